//! The sample application, a task manager, as it stands in `deploy/sample/`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::database::Database;

const SCHEMA: &str = include_str!("../../deploy/sample/schema.sql");
const SEED: &str = include_str!("../../deploy/sample/seed.sql");
const CONFIG: &str = include_str!("../../deploy/sample/sync.yaml");

/// The sample's files as written into a sandbox, which thereby works without a checkout.
#[derive(Debug, Clone)]
pub struct Sample {
    /// SQL to apply in this order.
    pub schema: Vec<PathBuf>,
    /// What is synchronized.
    pub config: PathBuf,
}

impl Sample {
    /// Write the files into a directory.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write(dir: &Path) -> std::io::Result<Self> {
        fs::create_dir_all(dir)?;
        let put = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map(|()| path)
        };
        Ok(Self { schema: vec![put("schema.sql", SCHEMA)?, put("seed.sql", SEED)?], config: put("sync.yaml", CONFIG)? })
    }
}

/// What a scope of the sample application holds.
#[derive(Debug, Clone)]
pub struct ScopeContent {
    /// The scope.
    pub scope: String,
    /// The one logical table whose rows it holds.
    pub table: &'static str,
    /// Its rows in the source, as a FROM clause.
    pub from: String,
}

/// The scopes that the sample's configuration assigns to a user, written down a second time, in SQL.
///
/// # Errors
/// The source cannot be asked.
pub fn scopes(source: &Database, user: &str) -> anyhow::Result<Vec<ScopeContent>> {
    let of_user = |prefix: &str, table: &'static str, condition: &str| ScopeContent {
        scope: format!("{prefix}:{user}"),
        table,
        from: format!("{table} where {condition} = '{user}'"),
    };
    let mut tasks = of_user("tasks_user", "tasks", "assignee_id");
    tasks.from.push_str(" and not archived");
    let mut scopes = vec![
        of_user("profile", "users", "id"),
        of_user("projects_user", "projects", "owner_id"),
        of_user("memberships_user", "members", "user_id"),
        tasks,
        of_user("comments_user", "comments", "author_id"),
        of_user("documents_user", "documents", "owner_id"),
        ScopeContent {
            scope: "templates_public".to_owned(),
            table: "templates",
            from: "templates where published".to_owned(),
        },
    ];
    for row in source.texts(&format!("select project_id from members where user_id = '{user}'"))? {
        let project = row.into_iter().next().flatten().context("a membership without a project")?;
        scopes.push(ScopeContent {
            scope: format!("project:{project}"),
            table: "comments",
            from: format!(
                "comments where task_id in (select id from tasks where project_id = {project} and not archived)"
            ),
        });
    }
    Ok(scopes)
}

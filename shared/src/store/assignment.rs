//! Assignments by a query, evaluated over the projections in a request's own snapshot (ADR 003, "Normal scope movement":
//! connect and pull compute the assigned set with the same rule).

use std::collections::BTreeSet;
use std::fmt::Write as _;

use deadpool_postgres::GenericClient;

use super::error::Result;
use super::{projection, statement};
use crate::registry::name::quote_identifier;
use crate::registry::{Registry, Table};
use crate::rule::{Assignment, Reference};

/// A client has at most this many assigned scopes by queries. Each pull validates and answers every one of them, so that
/// more is a mistake in the configuration rather than a use: it is refused, never truncated.
pub const MAX_ASSIGNED_SCOPES: usize = 10_000;

/// The queries of a registry's assignments, ready to be run.
#[derive(Debug)]
pub struct AssignmentQueries {
    all: Vec<(Assignment, String)>,
    reads_claims: bool,
}

/// A user has more scopes than [`MAX_ASSIGNED_SCOPES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("assignments give a user more than {MAX_ASSIGNED_SCOPES} scopes")]
pub struct TooManyScopes;

impl AssignmentQueries {
    /// The queries of a registry.
    pub fn new(registry: &Registry) -> Self {
        let all: Vec<(Assignment, String)> = registry
            .assignments
            .queries()
            .iter()
            .filter_map(|assignment| {
                let tables: Option<Vec<&Table>> =
                    assignment.from().iter().map(|number| registry.table(*number)).collect();
                Some((assignment.clone(), sql(assignment, &tables?)))
            })
            .collect();
        let reads_claims = all.iter().any(|(assignment, _)| assignment.reads_claims());
        Self { all, reads_claims }
    }

    /// Whether the claims of a user matter.
    pub fn reads_claims(&self) -> bool {
        self.reads_claims
    }

    /// The scopes of a user by the queries; `claims` is a JSON object.
    pub async fn scopes(
        &self,
        db: &impl GenericClient,
        user_id: &str,
        claims: &str,
    ) -> Result<std::result::Result<BTreeSet<String>, TooManyScopes>> {
        let mut scopes = BTreeSet::new();
        let limit = MAX_ASSIGNED_SCOPES as i64 + 1;
        for (assignment, sql) in &self.all {
            for row in statement::query(db, sql, &[&user_id, &claims, &limit]).await? {
                let values = (0..assignment.values().len())
                    .map(|i| row.try_get(i))
                    .collect::<std::result::Result<Vec<Option<&str>>, _>>()?;
                scopes.extend(assignment.scope_of_values(&values));
            }
            if scopes.len() > MAX_ASSIGNED_SCOPES {
                return Ok(Err(TooManyScopes));
            }
        }
        Ok(Ok(scopes))
    }
}

fn sql(assignment: &Assignment, tables: &[&Table]) -> String {
    let name = |reference| match reference {
        Reference::Column(table, column) => {
            format!("t{table}.{}", quote_identifier(&tables[table].columns[column].name))
        }
        Reference::UserId => "p.user_id".to_owned(),
        Reference::Claims => "p.claims".to_owned(),
    };
    // A line break ends a comment at an expression's end.
    let mut values: Vec<String> =
        assignment.values().iter().map(|value| format!("({}\n        )::text", value.render(name))).collect();
    if values.is_empty() {
        values.push("null".to_owned());
    }
    let from: Vec<String> =
        tables.iter().enumerate().map(|(index, table)| format!("{} as t{index}", projection::name(table))).collect();
    let conditions = assignment.conditions().iter().fold(String::new(), |mut sql, condition| {
        let _ = write!(sql, "\n        and ({}\n        )", condition.render(name));
        sql
    });
    format!(
        "-- assignment::scopes
    select distinct {}
    from (select $1::text as user_id, $2::text::jsonb as claims) as p, {}
    where true{conditions}
    limit $3",
        values.join(", "),
        from.join(", ")
    )
}

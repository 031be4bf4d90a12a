//! Cases of membership and assignment by name, as clients see them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use jsonwebtoken::{EncodingKey, Header, encode};
use tributary_tests::client::Client;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::files::Files;

const SCHEMA: &str = "
    create table projects (id int primary key, name text, owner text);
    create table tasks (id int primary key, project int, parent int, title text, hidden boolean not null default false);
    create table members (project int, who text, role text not null default 'member', primary key (project, who));
    insert into projects values (1, 'One', 'ann'), (2, 'Two', 'bob');
    insert into tasks values (10, 1, null, 'Ten'), (11, 1, 10, 'Eleven'), (20, 2, null, 'Twenty');
    insert into members values (1, 'ann'), (2, 'bob'), (1, 'c:d')";

const CONFIG: &str = "
tables:
  - relation: public.projects
  - relation: public.tasks
  - relation: public.members
    capture_only: true
scopes:
  - scope: 'mine:{m.who}'
    rows: SELECT t.* FROM tasks t JOIN members m ON m.project = t.project WHERE NOT t.hidden
  - scope: 'role:{m.who}:{lower(m.role)}:{p.name}'
    rows: SELECT t.* FROM tasks t JOIN projects p ON p.id = t.project, members m WHERE m.project = p.id
  - scope: 'children:{parent.title}'
    rows: SELECT child.* FROM tasks child JOIN tasks parent ON child.parent = parent.id
  - scope: 'project:{id}'
    rows: SELECT * FROM projects
  - scope: 'project:{project}'
    rows: SELECT * FROM tasks
  - scope: 'team:{owner}'
    rows: SELECT * FROM projects
assignments:
  - scope: 'mine:{user_id}'
  - scope: 'project:{project}'
    for: SELECT project FROM members WHERE who = :user_id
  - scope: 'children:{title}'
    for: SELECT DISTINCT t.title FROM tasks t JOIN members m ON m.project = t.project WHERE m.who = :user_id
  - scope: 'role:{who}:{role}:{project}'
    for: SELECT m.who, lower(m.role) AS role, p.name project FROM members m JOIN projects p ON p.id = m.project WHERE m.who = :user_id
  - scope: 'team:{owner}'
    for: SELECT owner FROM projects WHERE owner = (:claims ->> 'team')
";

fn start(schema: &str, config: &str, options: Options) -> anyhow::Result<Sandbox> {
    let files = Files::new()?;
    let schema = files.write("schema.sql", schema)?;
    let config = files.write("sync.yaml", config)?;
    Sandbox::start(Options { config: Some(config), schema: Some(vec![schema]), ..options })
}

/// The keys of a table's rows that a client holds in a scope.
fn keys(client: &Client, scope: &str, table: &str) -> Vec<String> {
    client.contents(scope, table).into_keys().collect()
}

/// Pulls until a scope holds exactly these rows.
fn holds(client: &mut Client, scope: &str, table: &str, expected: &[&str]) -> anyhow::Result<()> {
    eventually(Duration::from_secs(20), || {
        client.sync(100)?;
        let found = keys(client, scope, table);
        ensure!(found == expected, "{scope} holds {found:?} instead of {expected:?}");
        Ok(())
    })
}

fn assigned(client: &mut Client, scope: &str, expected: bool) -> anyhow::Result<()> {
    eventually(Duration::from_secs(20), || {
        client.sync(100)?;
        ensure!(client.scopes.contains_key(scope) == expected, "{scope}: {:?}", client.scopes.keys());
        Ok(())
    })
}

#[test]
fn rows_follow_relationships() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options::default())?;
    let source = sandbox.source()?;
    let mut ann = sandbox.client("ann", "follows")?;
    holds(&mut ann, "mine:ann", "tasks", &["10", "11"])?;

    // A capture_only row with a key of two columns comes, changes its key, and goes.
    source.run("insert into members values (2, 'ann', 'Guest')")?;
    holds(&mut ann, "mine:ann", "tasks", &["10", "11", "20"])?;
    source.run("update members set project = 3 where project = 1 and who = 'ann'")?;
    holds(&mut ann, "mine:ann", "tasks", &["20"])?;
    source.run("update members set project = 1 where project = 3")?;
    source.run("delete from members where project = 2 and who = 'ann'")?;
    holds(&mut ann, "mine:ann", "tasks", &["10", "11"])?;

    // The row's own columns matter too.
    source.run(
        "update tasks set hidden = true where id = 10; update tasks set project = 1, hidden = false where id = 20",
    )?;
    holds(&mut ann, "mine:ann", "tasks", &["11", "20"])?;
    source.run("begin; delete from tasks where id = 11; insert into tasks values (11, 1, 10, 'Back'); commit")?;
    holds(&mut ann, "mine:ann", "tasks", &["11", "20"])?;
    eventually(Duration::from_secs(20), || {
        ann.sync(100)?;
        let row = ann.contents_of("mine:ann", "tasks", "11").context("the row is gone")?;
        let title = row.get("title").and_then(|title| title.as_text());
        ensure!(title == Some("Back"), "{title:?}");
        Ok(())
    })?;

    // A fresh client that rebuilds holds the same.
    let mut fresh = sandbox.client("ann", "follows-fresh")?;
    holds(&mut fresh, "mine:ann", "tasks", &["11", "20"])?;
    ensure!(fresh.scope_digest("mine:ann")? == ann.scope_digest("mine:ann")?);
    Ok(())
}

#[test]
fn a_table_may_join_itself() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options::default())?;
    let source = sandbox.source()?;
    let mut ann = sandbox.client("ann", "itself")?;
    holds(&mut ann, "children:Ten", "tasks", &["11"])?;
    // The parent's title moves its child into another scope, which is assigned by a query over it.
    source.run("update tasks set title = 'Other' where id = 10")?;
    holds(&mut ann, "children:Other", "tasks", &["11"])?;
    assigned(&mut ann, "children:Ten", false)?;
    source.run("update tasks set parent = 10 where id = 10")?;
    holds(&mut ann, "children:Other", "tasks", &["10", "11"])?;
    source.run("update tasks set id = 12 where id = 10")?;
    holds(&mut ann, "children:Other", "tasks", &[])
}

#[test]
fn a_scope_of_several_values_tells_them_apart() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options::default())?;
    let source = sandbox.source()?;
    let mut user = sandbox.client("c:d", "several")?;
    holds(&mut user, "role:c%3Ad:member:One", "tasks", &["10", "11"])?;
    source.run(
        "update members set role = '50% \u{1}' where who = 'c:d'; update projects set name = 'a:b' where id = 1",
    )?;
    holds(&mut user, "role:c%3Ad:50%25 %01:a%3Ab", "tasks", &["10", "11"])?;
    assigned(&mut user, "role:c%3Ad:member:One", false)
}

#[test]
fn assignments_by_a_query_follow_their_rows() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options::default())?;
    let source = sandbox.source()?;
    let mut ann = sandbox.client("ann", "assigned")?;
    holds(&mut ann, "project:1", "tasks", &["10", "11"])?;
    ensure!(!ann.scopes.contains_key("project:2"));
    let version = ann.scope_set_version;
    source.run("insert into members values (2, 'ann')")?;
    assigned(&mut ann, "project:2", true)?;
    holds(&mut ann, "project:2", "projects", &["2"])?;
    ensure!(ann.scope_set_version > version);
    source.run("delete from members where who = 'ann' and project = 1")?;
    assigned(&mut ann, "project:1", false)?;
    ensure!(
        ann.rows.get("project:1").is_none_or(std::collections::BTreeMap::is_empty),
        "rows of a removed scope stayed"
    );
    let mut rebuild = ann.start_rebuild("project:1", 10);
    ensure!(ann.rebuild_page(&mut rebuild).is_err(), "a scope that is not assigned any more was rebuilt");
    // By the token's claims, not by the user.
    ensure!(!ann.scopes.keys().any(|scope| scope.starts_with("team:")));
    let ready = sandbox.ready();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let claims = serde_json::json!({"sub": "zoe", "exp": now + 3600, "team": "bob", "more": [1, {"é": null}]});
    let token = encode(&Header::default(), &claims, &EncodingKey::from_secret(ready.jwt_secret.as_bytes())?)?;
    let mut zoe = Client::new(&ready.pullers[0].url, &token, "claims");
    holds(&mut zoe, "team:bob", "projects", &["2"])
}

#[test]
fn truncating_a_dependency_empties_the_scopes() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options::default())?;
    let source = sandbox.source()?;
    let mut ann = sandbox.client("ann", "truncated")?;
    holds(&mut ann, "mine:ann", "tasks", &["10", "11"])?;
    source.run("truncate members")?;
    holds(&mut ann, "mine:ann", "tasks", &[])?;
    assigned(&mut ann, "project:1", false)?;
    source.run("begin; insert into members values (1, 'ann'); truncate tasks, projects; insert into tasks values (10, 1, null, 'New'); commit")?;
    holds(&mut ann, "mine:ann", "tasks", &["10"])?;
    holds(&mut ann, "project:1", "projects", &[])
}

#[test]
fn a_dependency_row_moves_many_rows_at_once() -> anyhow::Result<()> {
    const ROWS: i64 = 20_000;
    let schema = format!(
        "{SCHEMA}; insert into projects values (7, 'Big', 'ann');
         insert into tasks select 1000 + n, 7, null, 'T' || n from generate_series(1, {ROWS}) n"
    );
    // A scope for each title would be more than a user may have.
    let config = CONFIG
        .replace("SELECT DISTINCT t.title FROM tasks t", "SELECT t.title FROM tasks t JOIN tasks c ON c.parent = t.id");
    let sandbox = start(&schema, &config, Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut ann = sandbox.client("ann", "many")?;
    holds(&mut ann, "mine:ann", "tasks", &["10", "11"])?;
    let count = |client: &mut Client, expected: i64| {
        eventually(Duration::from_secs(60), || {
            client.sync(1000)?;
            let rows = client.contents("mine:ann", "tasks").len() as i64;
            ensure!(rows == expected, "{rows} rows instead of {expected}");
            Ok(())
        })
    };
    source.run("insert into members values (7, 'ann')")?;
    count(&mut ann, ROWS + 2)?;
    // A column that no rule reads affects nobody.
    let newest = "select max(commit_lsn) from tributary.scope_entry e join tributary.scope s using (scope_no) where scope_id = 'mine:ann'";
    let before = state.number(newest)?;
    source.run("update projects set owner = 'bob' where id = 7; insert into members values (2, 'ann')")?;
    count(&mut ann, ROWS + 3)?;
    let moved = state.number(&format!(
        "select count(*) from tributary.scope_entry e join tributary.scope s using (scope_no) where scope_id = 'mine:ann' and commit_lsn > {before}"
    ))?;
    ensure!(moved == 1, "{moved} entries moved");
    source.run("delete from members where project = 7")?;
    count(&mut ann, 3)
}

#[test]
fn a_user_with_too_many_scopes_is_refused_not_truncated() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options::default())?;
    sandbox.source()?.run("insert into members select n, 'greedy' from generate_series(1, 10001) n")?;
    let mut greedy = sandbox.client("greedy", "greedy")?;
    eventually(Duration::from_secs(20), || {
        let outcome = greedy.connect();
        let refused = outcome.as_ref().err().and_then(|error| error.code().map(str::to_owned));
        ensure!(refused.as_deref() == Some("temporary_unavailable"), "{outcome:?}");
        Ok(())
    })
}

#[test]
fn a_row_in_too_many_scopes_stops_the_stream() -> anyhow::Result<()> {
    let config = CONFIG.replace("WHERE NOT t.hidden", "WHERE NOT t.hidden\n    max_scopes_per_row: 5");
    let sandbox = start(SCHEMA, &config, Options { pullers: 0, ..Options::default() })?;
    sandbox.source()?.run("insert into members select 1, 'user ' || n from generate_series(1, 5) n")?;
    let state = sandbox.state()?;
    eventually(Duration::from_secs(20), || {
        let case =
            state.texts("select reason, relation, detail from tributary.quarantine where resolved_at is null")?;
        let case: Vec<_> = case.first().context("no case")?.iter().flatten().cloned().collect();
        ensure!(case == ["poison", "public.tasks", "a row is in more than 5 scopes of a rule"], "{case:?}");
        Ok(())
    })
}

#[test]
fn rules_of_other_shapes_are_refused_with_their_place() -> anyhow::Result<()> {
    let sandbox = start(SCHEMA, CONFIG, Options { materializers: 0, pullers: 0, ..Options::default() })?;
    let files = Files::new()?;
    let check = |config: &Path| {
        let mut launch = sandbox.materializer_launch("check")?;
        launch.args = vec!["check".into(), "--config".into(), config.into()];
        anyhow::Ok(launch.run()?)
    };
    let (status, output) = check(&files.write("good.yaml", CONFIG)?)?;
    ensure!(status.success(), "{output}");
    let good = "SELECT t.* FROM tasks t JOIN members m ON m.project = t.project WHERE NOT t.hidden";
    for (bad, expected) in [
        (
            "SELECT t.* FROM tasks t LEFT JOIN members m ON m.project = t.project",
            "line 1, column 35 of the SQL: only inner joins",
        ),
        (
            "SELECT t.* FROM tasks t JOIN members m ON m.project = t.project WHERE random() < 0.5",
            "must be marked IMMUTABLE",
        ),
        ("SELECT t.* FROM tasks t JOIN members m ON m.project = now()::text::int", "must be marked IMMUTABLE"),
        ("SELECT t.* FROM tasks t JOIN members m ON count(*) > 1", "aggregate functions are not allowed"),
        (
            "SELECT t.* FROM tasks t JOIN members m ON m.project = t.nothing",
            "line 1, column 55 of the SQL: column nothing does not exist",
        ),
        (
            "SELECT t.* FROM tasks t JOIN members m ON project = 1",
            "line 1, column 43 of the SQL: column project is of several tables of FROM",
        ),
        ("SELECT t.* FROM tasks t JOIN members m ON m.project = t.title", "operator does not exist: integer = text"),
        ("SELECT t.* FROM tasks t JOIN members m ON m.project", "must be type boolean"),
        ("SELECT t.* FROM tasks t JOIN members m ON x.project = 1", "x.project is not a column of a table of FROM"),
        ("SELECT t.* FROM tasks t JOIN others m ON true", "table others is not among the configured tables"),
        ("SELECT m.* FROM tasks t JOIN members m ON m.project = t.project", "members is capture_only"),
        ("SELECT m.who FROM tasks t JOIN members m ON m.project = t.project", "a rule selects * of its table"),
        ("SELECT * FROM tasks t JOIN members m ON m.project = t.project", "selects the rows of one table"),
        (
            "SELECT t.* FROM tasks t JOIN members m ON m.project IN (SELECT 1)",
            "line 1, column 43 of the SQL: a subquery",
        ),
    ] {
        let config = files.write("bad.yaml", &CONFIG.replace(good, bad))?;
        let (status, output) = check(&config)?;
        ensure!(status.code() == Some(1) && output.contains(expected), "{bad}: {output}");
        ensure!(output.contains("line 8:") || output.contains("line 9:"), "{bad}: {output}");
    }
    let good = "SELECT project FROM members WHERE who = :user_id";
    for (bad, expected) in [
        ("SELECT project FROM members WHERE who = :user", "known are :user_id and :claims"),
        ("SELECT who FROM members WHERE who = :user_id", "project is not a column that the query selects"),
        ("SELECT project FROM members WHERE who = :claims", "operator does not exist: text = jsonb"),
        ("SELECT project FROM members WHERE random() > 0.5", "must be marked IMMUTABLE"),
        ("SELECT project FROM members WHERE nothing = :user_id", "column nothing does not exist"),
        ("SELECT max(project) AS project FROM members", "aggregate functions are not allowed"),
    ] {
        let config = files.write("bad.yaml", &CONFIG.replace(good, bad))?;
        let (status, output) = check(&config)?;
        ensure!(status.code() == Some(1) && output.contains(expected), "{bad}: {output}");
    }
    Ok(())
}

#[test]
fn values_are_encoded_alike_by_sql_and_by_us() -> anyhow::Result<()> {
    use tributary_shared::rule::ParsedExpression;
    use tributary_shared::template::Template;
    let sandbox = start(SCHEMA, CONFIG, Options { materializers: 0, pullers: 0, ..Options::default() })?;
    let database = sandbox.source()?;
    let (template, _) = Template::parse("{v}", ParsedExpression::parse)?;
    let mut texts: Vec<String> = (1..=0x500).filter_map(char::from_u32).map(|c| format!("x{c}")).collect();
    texts.extend((1..=0x500).filter_map(char::from_u32).map(String::from));
    texts.extend(
        ["a:b%c\u{1}", "%3A", "😀:\u{9f}\u{a0}", "\\u0001[%:]", "é\ncombined e\u{301}", "::%%"].map(str::to_owned),
    );
    let sql = format!(
        "select {} from (select unnest($1::text[]) as v) r",
        tributary_shared::store::membership::encoded("r.v")
    );
    let encoded = database.query(&sql, &[&texts])?;
    ensure!(encoded.len() == texts.len());
    for (text, row) in texts.iter().zip(encoded) {
        let ours = template.scope_id(&[Some(text)])?;
        ensure!(row.get::<_, Option<String>>(0) == ours, "{text:?}: {ours:?}");
    }
    Ok(())
}

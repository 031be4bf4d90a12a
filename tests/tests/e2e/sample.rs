//! The sample application: what a client holds is what `SELECT` gives.

use std::time::Duration;

use anyhow::ensure;
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::expected;
use tributary_tests::http::HttpError;
use tributary_tests::sample;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

/// Pull until the client's copy of every scope of `user` is what the source holds.
pub fn settle(client: &mut Client, source: &Database, user: &str, limit: i64) -> anyhow::Result<usize> {
    eventually(Duration::from_secs(30), || {
        // A violation is final: the copy would not recover from it, and must not hide it by time running out.
        match client.sync(limit) {
            Err(violation @ ClientError::Violation(_)) => panic!("{violation}"),
            outcome => outcome?,
        }
        let scopes = sample::scopes(source, user)?;
        ensure!(scopes.iter().map(|s| &s.scope).all(|s| client.scopes.contains_key(s)), "not every scope is assigned");
        ensure!(scopes.len() == client.scopes.len(), "more is assigned than the configuration says");
        scopes.iter().map(|s| expected::compare(client, source, &s.scope, s.table, &s.from)).sum()
    })
}

/// Every kind of change, in transactions of several statements.
const CHANGES: [&str; 9] = [
    "update tasks set title = title || '!', progress = 1.0 / 3, estimate_hours = 1.50 where id % 7 = 0",
    // Moves rows out of one user's scope into another's.
    "update tasks set assignee_id = 'u_2' where assignee_id = 'u_1' and id % 3 = 0",
    // Leaves by the filter, and comes back.
    "update tasks set archived = not archived where id % 5 = 0",
    "delete from comments where id % 10 = 0; delete from projects where id = 3",
    // The key itself changes.
    "update templates set id = id || '_new' where id in ('t_1', 't_2'); update templates set published = not published where id = 't_4'",
    // An unchanged TOAST value beside a changed column; then the value itself.
    "update documents set body = (select string_agg(md5(n::text), '') from generate_series(1, 2000) n) where owner_id = 'u_1'",
    "update documents set title = 'Toasted', metadata = null where owner_id = 'u_1'",
    "begin; insert into users (id, name, email) values ('u_99', 'N', 'n@example.org');
     insert into projects (name, owner_id, budget) values ('P', 'u_1', -0.5), ('Q', 'u_99', 0), ('R', 'u_1', null);
     savepoint s; delete from users where id = 'u_99' and false; update tasks set due = null; rollback to s;
     insert into tasks (project_id, assignee_id, title) select 1, 'u_1', repeat('x', n) from generate_series(1, 300) n;
     commit",
    "begin; insert into templates values ('t_gone', 'G', '{}', true); delete from templates where id = 't_gone'; commit;
     begin; delete from templates where id = 't_5'; insert into templates values ('t_5', 'Back', '{\"b\": 1.0, \"a\": \"é\"}', true); commit",
];

fn round_trip(split: bool) -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { split, ..Options::default() })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "round-trip")?;
    let rows = settle(&mut client, &source, "u_1", 500)?;
    ensure!(rows > 200, "the sample holds only {rows} rows for its first user");
    for (number, changes) in CHANGES.iter().enumerate() {
        source.run(changes)?;
        // A page of one change now and then: the cursor must not pass what it does not deliver.
        settle(&mut client, &source, "u_1", if number % 3 == 0 { 1 } else { 40 })?;
    }
    let mut fresh = sandbox.client("u_1", "round-trip-fresh")?;
    settle(&mut fresh, &source, "u_1", 1000)?;
    for scope in client.scopes.keys() {
        ensure!(client.scope_digest(scope)? == fresh.scope_digest(scope)?, "pulled and rebuilt {scope} differ");
        ensure!(client.rows.get(scope) == fresh.rows.get(scope), "pulled and rebuilt rows of {scope} differ");
    }
    if split {
        let state_in_source = "select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace
            where n.nspname like 'tributary%' and relkind = 'r' and relname in ('progress', 'scope_entry', 'snapshot')";
        ensure!(source.number(state_in_source)? == 0, "state tables in the source database");
        ensure!(sandbox.state()?.number("select count(*) from tributary.progress")? == 1);
    }
    Ok(())
}

#[test]
fn a_client_holds_what_select_gives() -> anyhow::Result<()> {
    round_trip(false)
}

#[test]
fn a_client_holds_what_select_gives_with_the_state_in_a_database_of_its_own() -> anyhow::Result<()> {
    round_trip(true)
}

#[test]
fn lost_answers_and_changing_pullers_lose_nothing() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let source = sandbox.source()?;
    let urls: Vec<_> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    let mut client = sandbox.client("u_1", "lossy")?;
    client.http.lose_next_answer();
    ensure!(matches!(client.connect(), Err(ClientError::Transport(HttpError::Lost))));
    // The lost answer registered the client, and a known client may not call itself fresh: the installation starts
    // over under another id.
    match client.connect() {
        Err(ClientError::Api { code, .. }) => ensure!(code == "invalid_schema_reference", "{code}"),
        other => anyhow::bail!("a known client was taken for a fresh one: {other:?}"),
    }
    let mut client = sandbox.client("u_1", "lossy-again")?;
    client.connect()?;
    for (number, changes) in CHANGES.iter().enumerate() {
        source.run(changes)?;
        client.http.redirect(&urls[number % 2]);
        for scope in client.scopes_to_rebuild() {
            let mut rebuild = client.start_rebuild(&scope, 20);
            while !rebuild.finished {
                client.http.lose_next_answer();
                let first = client.rebuild_request(&rebuild);
                ensure!(matches!(client.rebuild_page(&mut rebuild), Err(ClientError::Transport(HttpError::Lost))));
                client.http.redirect(&urls[(number + rebuild.row_count()) % 2]);
                ensure!(client.rebuild_request(&rebuild) == first);
                client.rebuild_page(&mut rebuild)?;
            }
        }
        client.http.lose_next_answer();
        ensure!(matches!(client.pull_page(7), Err(ClientError::Transport(HttpError::Lost))));
        client.pull_page(7)?;
    }
    settle(&mut client, &source, "u_1", 500)?;
    Ok(())
}

#[test]
fn a_replayed_rebuild_page_is_the_same_octets() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "replay")?;
    client.connect()?;
    let mut rebuild = client.start_rebuild("tasks_user:u_1", 10);
    while !rebuild.finished {
        let request = client.rebuild_request(&rebuild).canonical()?;
        let first = client.http.post("/sync/rebuild", request.as_bytes())?;
        source.run("update tasks set priority = priority + 1 where assignee_id = 'u_1'")?;
        client.http.redirect(sandbox.pullers[rebuild.row_count() / 10 % 2].url.as_deref().unwrap());
        let second = client.http.post("/sync/rebuild", request.as_bytes())?;
        ensure!(first.status == 200 && first == second, "a replay differs from its first answer");
        client.rebuild_page(&mut rebuild)?;
    }
    settle(&mut client, &source, "u_1", 500)?;
    Ok(())
}

#[test]
fn main_errors_are_answered_as_the_contract_says() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let mut client = sandbox.client("u_1", "errors")?;
    client.connect()?;
    let url = sandbox.pullers[0].url.as_deref().unwrap();
    let code = |client: &Client, path: &str, body: &str| {
        let response = client.http.post(path, body.as_bytes()).unwrap();
        match tributary_tests::client::answer(path, &response) {
            Err(ClientError::Api { status, code, .. }) => (status, code),
            other => panic!("{path} {body}: {other:?}"),
        }
    };
    let invalid = || (400, "invalid_request".to_owned());
    let request = client.pull_request(10).canonical()?;
    for body in [
        String::new(),
        "{".to_owned(),
        "[]".to_owned(),
        request.replace("\"limit\":10", "\"limit\":0"),
        request.replace("\"limit\":10", "\"limit\":1001"),
        request.replace("\"limit\":10", "\"limit\":10.0"),
        request.replace("\"limit\":10", "\"limit\":\"10\""),
        request.replace("\"limit\":10", "\"limit\":10,\"more\":1"),
        request.replace("\"limit\":10", "\"limit\":10,\"limit\":10"),
        request.replace("\"limit\":10,", ""),
        request.replace("templates_public", "templates_secret"),
        request.replace("{\"cursor\":null}", "{\"cursor\":\"v1.forged\"}"),
    ] {
        assert_eq!(code(&client, "/sync/pull", &body), invalid(), "{body}");
    }
    let nobody = Client { http: tributary_tests::http::Http::new(url, None), ..sandbox.client("u_1", "errors")? };
    assert_eq!(code(&nobody, "/sync/pull", &request), (401, "auth_required".to_owned()));
    let mut other = sandbox.client("u_2", "errors")?;
    assert_eq!(other.connect().unwrap_err().code(), Some("auth_required"), "a client id belongs to one user");
    let stale = request.replace("\"client_generation\":1", "\"client_generation\":2");
    assert_eq!(code(&client, "/sync/pull", &stale).1, "client_generation_expired");
    let hash = client.manifest()?.hash.clone();
    assert_eq!(
        code(&client, "/sync/pull", &request.replace(&hash, &"0".repeat(64))),
        (422, "schema_mismatch".to_owned())
    );
    let old = client.connect_request().canonical()?.replace("\"protocol_version\":3", "\"protocol_version\":2");
    assert_eq!(code(&client, "/sync/connect", &old), (426, "upgrade_required".to_owned()));
    let foreign = client.rebuild_request(&client.start_rebuild("tasks_user:u_2", 10)).canonical()?;
    assert_eq!(code(&client, "/sync/rebuild", &foreign), invalid(), "a scope of somebody else");
    Ok(())
}

//! Checksums stand on exactly the terminal pages, cover exactly the assigned scopes at the response's boundary, and are
//! computed only when a scope has changed, and then once (ADR 003, "Pull response rules"; design.md, "A request").

use std::thread;

use anyhow::{Context as _, ensure};
use tributary_tests::client::{Client, digest_of};
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{accept, has_more, materialized, metric, raw, send, with};

/// From all rows of the scope.
const COMPUTED: &str = "tributary_digest_total{outcome=\"computed\"}";
/// From the rows in memory and those that changed.
const UPDATED: &str = "tributary_digest_total{outcome=\"updated\"}";

fn computations(sandbox: &Sandbox) -> anyhow::Result<u64> {
    Ok(metric(sandbox, COMPUTED)? + metric(sandbox, UPDATED)?)
}

#[test]
fn checksums_stand_on_exactly_the_terminal_pages() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "terminal")?;
    client.sync(500)?;
    source.run("update tasks set priority = priority + 1 where assignee_id = 'u_1'")?;
    materialized(&sandbox)?;
    let (mut pages, mut terminal) = (0, 0);
    loop {
        let body = client.pull_page(7)?.body;
        pages += 1;
        let Some(checksums) = body.get("checksums") else {
            ensure!(has_more(&body), "a terminal page without checksums");
            continue;
        };
        ensure!(!has_more(&body), "checksums on a page that is not terminal");
        let scopes = checksums.as_object().context("an object")?;
        ensure!(scopes.keys().eq(client.scopes.keys()));
        terminal += 1;
        break;
    }
    ensure!(terminal == 1 && pages > 5, "{pages} pages");

    // Of a scope that needs a rebuild, too; and what it says is what a rebuild then holds.
    let request = with(&client.pull_request(7), &["scopes", "tasks_user:u_1", "cursor"], Json::Null);
    let body = accept(&client, "/sync/pull", &request)?;
    ensure!(super::texts(&body, "rebuild") == ["tasks_user:u_1"]);
    let told = body.get("checksums").and_then(|all| all.get("tasks_user:u_1")).context("a checksum")?;
    client.rebuild("tasks_user:u_1", 100)?;
    ensure!(digest_of(told, "pull")? == client.scope_digest("tasks_user:u_1")?);
    Ok(())
}

#[test]
fn an_unchanged_scope_is_not_digested_again() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let source = sandbox.source()?;
    let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    let mut client = sandbox.client("u_1", "idle")?;
    client.sync(500)?;
    materialized(&sandbox)?;
    client.pull_all(500)?;
    let before = computations(&sandbox)?;
    // Other scopes change, the boundary moves, other clients come, through both pullers.
    for round in 0..10 {
        source.run("update tasks set priority = priority + 1 where assignee_id = 'u_2'")?;
        materialized(&sandbox)?;
        client.http.redirect(&urls[round % 2]);
        client.pull_all(500)?;
    }
    let mut second = sandbox.client("u_1", "idle-2")?;
    second.sync(500)?;
    ensure!(computations(&sandbox)? == before, "an unchanged scope was digested again");
    source.run("update tasks set priority = priority + 1 where assignee_id = 'u_1'")?;
    materialized(&sandbox)?;
    client.pull_all(500)?;
    ensure!(computations(&sandbox)? == before + 1, "one changed scope, one computation");
    Ok(())
}

#[test]
fn a_changed_scope_is_digested_once_by_all_who_wait() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let source = sandbox.source()?;
    let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    let token = sandbox.token("u_1")?;
    let mut clients = Vec::new();
    for number in 0..16 {
        let mut client = Client::new(&urls[number % 2], &token, &format!("waiting-{number}"));
        client.sync(500)?;
        clients.push(client);
    }
    for round in 0..5 {
        // Large enough for all of them to meet in the computation.
        source.run(
            "insert into tasks (project_id, assignee_id, title) select 1, 'u_1', 'many ' || n from generate_series(1, 3000) n;
             update templates set name = name || '.' where published",
        )?;
        materialized(&sandbox)?;
        let before = computations(&sandbox)?;
        let requests: Vec<String> = clients
            .iter()
            .map(|client| {
                let scopes = client.scopes.keys().map(|scope| (scope.clone(), Json::object([("cursor", Json::Null)])));
                raw(&with(&client.pull_request(1), &["scopes"], Json::Object(scopes.collect())))
            })
            .collect();
        thread::scope(|scope| {
            let pulling: Vec<_> = clients
                .iter()
                .zip(&requests)
                .enumerate()
                .map(|(number, (client, request))| {
                    let one = Client::new(&urls[number % 2], &token, &client.client_id);
                    scope.spawn(move || send(&one, "/sync/pull", request.as_bytes()))
                })
                .collect();
            for pull in pulling {
                let got = pull.join().map_err(|_| anyhow::anyhow!("a pull panicked"))?;
                ensure!(got == (200, "ok".to_owned()), "{got:?}");
            }
            anyhow::Ok(())
        })?;
        let computed = computations(&sandbox)? - before;
        ensure!(computed == 2, "round {round}: two changed scopes were digested {computed} times");
    }
    Ok(())
}

//! The durable checkpoint moves only by a presented cursor, never backwards, per scope, in the request's own transaction
//! (ADR 003, "Cursor issuance and server acknowledgement").

use std::thread;

use anyhow::{Context as _, ensure};
use tributary_tests::client::Client;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{Paused, accept, changes_of, checkpoints, cursors_of, has_more, materialized, pull_with, raw, send, with};

const TASKS: &str = "tasks_user:u_1";
const COMMENTS: &str = "comments_user:u_1";

const WRITES: &str = "update tasks set priority = priority + 1 where assignee_id = 'u_1';
    update comments set body = body || '.' where author_id = 'u_1'";

/// The position that the version of an updated row names.
fn position_of(change: &Json) -> anyhow::Result<(i64, i64)> {
    let version = change.get("server_version").and_then(Json::as_text).context("a version")?;
    let (lsn, ordinal) = version.split_once('.').context("two numbers")?;
    Ok((i64::from_str_radix(lsn, 16)?, i64::from_str_radix(ordinal, 16)?))
}

#[test]
fn issuing_acknowledges_nothing_and_presenting_acknowledges_its_scope() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "ack")?;
    client.connect()?;
    for scope in client.scopes_to_rebuild() {
        client.rebuild(&scope, 50)?;
    }
    ensure!(checkpoints(&state, "ack")?.is_empty(), "a rebuild acknowledged");
    // Its final cursor is acknowledged by the pull that presents it, and by that only for its scope.
    let mut only = client.scopes.clone();
    only.iter_mut().filter(|(scope, _)| *scope != TASKS).for_each(|(_, cursor)| *cursor = None);
    accept(&client, "/sync/pull", &pull_with(&client, &only, 10))?;
    ensure!(checkpoints(&state, "ack")?.keys().eq([TASKS]), "only the presented scope");
    accept(&client, "/sync/pull", &client.pull_request(10))?;
    let start = checkpoints(&state, "ack")?;
    ensure!(start.keys().eq(client.scopes.keys()));

    source.run(WRITES)?;
    materialized(&sandbox)?;
    // Pages are issued again and again; as long as they are not presented, nothing moves.
    let request = client.pull_request(7);
    let first = accept(&client, "/sync/pull", &request)?;
    for _ in 0..3 {
        let again = accept(&client, "/sync/pull", &request)?;
        ensure!(again.get("changes") == first.get("changes"), "a replay differs");
        ensure!(cursors_of(&again).keys().eq(cursors_of(&first).keys()));
    }
    ensure!(checkpoints(&state, "ack")? == start, "issuing acknowledged");

    // Page after page: each request acknowledges exactly what it presents. A page that ends amid the tasks presents the
    // position of its last task, which is also the version of that row.
    let mut last = start.clone();
    let before = client.scopes.clone();
    let mut presented_task = None;
    let mut amid = 0;
    loop {
        let page = client.pull_page(7)?;
        let now = checkpoints(&state, "ack")?;
        ensure!(now.iter().all(|(scope, position)| *position >= last[scope]), "a checkpoint went back");
        let changes = page.body.get("changes").and_then(Json::as_list).context("changes")?;
        let of_tasks = |change: &&Json| change.get("scope").and_then(Json::as_text) == Some(TASKS);
        if let (Some(position), Some(_)) = (presented_task, changes.first().filter(of_tasks)) {
            ensure!(now[TASKS] == position, "acknowledged {:?} instead of what was presented", now[TASKS]);
            amid += 1;
        }
        presented_task = changes.last().filter(of_tasks).map(position_of).transpose()?;
        last = now;
        if !page.has_more {
            break;
        }
    }
    ensure!(amid >= 3, "only {amid} pages end amid the tasks");
    let presented = client.scopes.clone();
    // Connect is shown all cursors, and acknowledges none.
    client.connect()?;
    ensure!(client.scopes == presented && checkpoints(&state, "ack")? == last, "connect acknowledged");
    accept(&client, "/sync/pull", &client.pull_request(7))?;
    let end = checkpoints(&state, "ack")?;
    ensure!(end[TASKS] > start[TASKS] && end[COMMENTS] > start[COMMENTS]);

    // An old cursor replays what it replayed then, and moves nothing back, in one scope or in all.
    let replay = accept(&client, "/sync/pull", &pull_with(&client, &before, 7))?;
    ensure!(replay.get("changes") == first.get("changes") && has_more(&replay), "an old cursor does not replay");
    let mut mixed = presented.clone();
    mixed.insert(COMMENTS.to_owned(), before[COMMENTS].clone());
    let replay = accept(&client, "/sync/pull", &pull_with(&client, &mixed, 1000))?;
    ensure!(!changes_of(&replay).is_empty() && changes_of(&replay).iter().all(|change| change[0] == COMMENTS));
    ensure!(checkpoints(&state, "ack")? == end, "an old cursor moved a checkpoint");
    Ok(())
}

#[test]
fn a_failed_pull_acknowledges_nothing() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "failing")?;
    client.sync(500)?;
    accept(&client, "/sync/pull", &client.pull_request(10))?;
    source.run(WRITES)?;
    materialized(&sandbox)?;
    client.pull_page(7)?;
    let request = client.pull_request(7);
    let start = checkpoints(&state, "failing")?;
    let forged = with(&request, &["scopes", COMMENTS, "cursor"], Json::text("v1.forged"));
    let schema = with(&request, &["schema", "version"], Json::int(2));
    let future = with(&request, &["scope_set_version"], Json::int(99));
    for (what, body, status) in
        [("a forged cursor", forged, 400), ("a schema", schema, 422), ("a version", future, 400)]
    {
        ensure!(send(&client, "/sync/pull", raw(&body).as_bytes()).0 == status);
        ensure!(checkpoints(&state, "failing")? == start, "{what} acknowledged");
    }
    let paused = Paused::materializer(&mut sandbox);
    source.run("select tributary.accept_write('u_1', 'failing')")?;
    ensure!(send(&client, "/sync/pull", raw(&request).as_bytes()) == (503, "capture_pending".to_owned()));
    ensure!(checkpoints(&state, "failing")? == start, "a pending capture acknowledged");
    drop(paused);
    materialized(&sandbox)?;
    // One entry of the page whose row is gone fails the whole of it.
    let row = state.text(
        "delete from tributary_data.\"public.tasks\" where tributary_row_id = (
             select e.row_id from tributary.scope_entry e join tributary.scope s using (scope_no)
             where s.scope_id = 'tasks_user:u_1' order by e.commit_lsn desc, e.ordinal desc limit 1)
         returning tributary_row_id",
    )?;
    let request = with(&request, &["limit"], Json::int(1000));
    let failed = send(&client, "/sync/pull", raw(&request).as_bytes());
    ensure!(failed == (500, "sync_integrity_failure".to_owned()), "row {row}: {failed:?}");
    ensure!(checkpoints(&state, "failing")? == start, "a failed page acknowledged");
    Ok(())
}

/// Many at once, through two pullers, with cursors of different age: each is answered, and the greatest stays.
#[test]
fn pulls_of_one_client_at_once_are_all_answered() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "crowd")?;
    client.sync(500)?;
    let mut history = vec![client.scopes.clone()];
    for _ in 0..6 {
        source.run(WRITES)?;
        materialized(&sandbox)?;
        // Not presented yet: the last answer is held only.
        client.pull_all(1000)?;
        history.push(client.scopes.clone());
    }
    let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    let token = sandbox.token("u_1")?;
    for round in 0..5 {
        // Nothing acknowledged again, so that every request has something to move.
        state.run(
            "update tributary.client_scope set acknowledged_lsn = null, acknowledged_ordinal = null;
                   update tributary.client set acknowledged_at = now() - interval '1 hour'",
        )?;
        let pulling: Vec<_> = (0..24)
            .map(|number| {
                let request = raw(&pull_with(&client, &history[(number + round) % history.len()], 5));
                let one = Client::new(&urls[number % 2], &token, "crowd");
                thread::spawn(move || send(&one, "/sync/pull", request.as_bytes()))
            })
            .collect();
        for pull in pulling {
            let got = pull.join().map_err(|_| anyhow::anyhow!("a pull panicked"))?;
            ensure!(got == (200, "ok".to_owned()), "round {round}: {got:?}");
        }
        let after = checkpoints(&state, "crowd")?;
        // What the newest cursors alone acknowledge is where it must have ended.
        accept(&client, "/sync/pull", &pull_with(&client, history.last().context("seven")?, 5))?;
        ensure!(after == checkpoints(&state, "crowd")?, "round {round}: the greatest did not stay");
    }
    Ok(())
}

/// Many first connects of one client at once: one registers it, nobody gets an error that is not of the contract.
#[test]
fn connects_of_one_client_at_once_are_all_answered() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    let token = sandbox.token("u_1")?;
    let connecting: Vec<_> = (0..16)
        .map(|number| {
            let one = Client::new(&urls[number % 2], &token, "newborn");
            thread::spawn(move || send(&one, "/sync/connect", raw(&one.connect_request()).as_bytes()))
        })
        .collect();
    let mut registered = 0;
    for connect in connecting {
        match connect.join().map_err(|_| anyhow::anyhow!("a connect panicked"))? {
            (200, _) => registered += 1,
            (400, code) if code == "invalid_schema_reference" => {}
            other => anyhow::bail!("{other:?}"),
        }
    }
    ensure!(registered == 1, "{registered} registered it");
    ensure!(sandbox.state()?.number("select scope_set_version from tributary.client")? == 1);
    Ok(())
}

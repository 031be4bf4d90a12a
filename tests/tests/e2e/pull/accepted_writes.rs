//! Accepted writes (contract.md section 7): what a client was told is accepted is never missing from its next answer.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{Paused, materialized, raw, send};

/// Pulls until the capture is no more pending.
fn pull_when_captured(client: &mut Client) -> anyhow::Result<()> {
    eventually(Duration::from_secs(20), || match client.pull_all(500) {
        Ok(_) => Ok(()),
        Err(ClientError::Violation(violation)) => panic!("{violation}"),
        Err(error) => Err(error.into()),
    })
}

fn law(split: bool) -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { split, ..Options::default() })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "writer")?;
    let mut other = sandbox.client("u_1", "reader")?;
    client.sync(500)?;
    other.sync(500)?;
    let mut rebuild = client.start_rebuild("tasks_user:u_1", 10);
    client.rebuild_page(&mut rebuild)?;
    let pending = (503, "capture_pending".to_owned());
    let pull = |client: &Client| send(client, "/sync/pull", raw(&client.pull_request(10)).as_bytes());

    // Together with a write: pending until the transaction is materialized, for this client alone.
    let paused = Paused::materializer(&mut sandbox);
    source.run(
        "begin; update tasks set title = 'accepted' where id = 60;
                select tributary.accept_write('u_1', 'writer'); commit",
    )?;
    for _ in 0..3 {
        ensure!(pull(&client) == pending, "{:?}", pull(&client));
    }
    let first = client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10));
    ensure!(send(&client, "/sync/rebuild", raw(&first).as_bytes()) == pending, "a rebuild passes the same gate");
    let sessions = sandbox.state()?.number("select count(*) from tributary.rebuild_session")?;
    ensure!(pull(&other) == (200, "ok".to_owned()), "another client of the user waits for nothing");
    drop(paused);
    pull_when_captured(&mut client)?;
    let title = client.contents_of("tasks_user:u_1", "tasks", "60").and_then(|row| row.get("title")?.as_text());
    ensure!(title == Some("accepted"), "the first answer after the gate has the write: {title:?}");
    // The session of before the write is over, even now that its epoch is materialized.
    let continued = raw(&client.rebuild_request(&rebuild));
    ensure!(send(&client, "/sync/rebuild", continued.as_bytes()) == (409, "rebuild_restart_required".to_owned()));
    let null = raw(&super::with(&client.rebuild_request(&rebuild), &["cursor"], Json::Null));
    ensure!(send(&client, "/sync/rebuild", null.as_bytes()).0 == 200, "from null it starts again");
    ensure!(sandbox.state()?.number("select count(*) from tributary.rebuild_session")? > sessions);

    // Rolled back, whole or to a savepoint, it leaves nothing.
    let epoch = |source: &Database| {
        source.number("select coalesce(max(epoch), 0) from tributary.accepted_write where client_id = 'writer'")
    };
    let before = epoch(&source)?;
    let paused = Paused::materializer(&mut sandbox);
    source.run(
        "begin; update tasks set title = 'x' where id = 60; select tributary.accept_write('u_1', 'writer'); rollback",
    )?;
    source.run("begin; savepoint s; select tributary.accept_write('u_1', 'writer'); rollback to s; commit")?;
    ensure!(epoch(&source)? == before && pull(&client) == (200, "ok".to_owned()), "a rolled back write is pending");
    drop(paused);
    materialized(&sandbox)?;
    ensure!(pull(&client).0 == 200);

    // In a transaction that touches nothing else, it is materialized all the same.
    source.run("select tributary.accept_write('u_1', 'writer')")?;
    pull_when_captured(&mut client)?;
    // Or only tables that are not synchronized.
    source.run(
        "create table if not exists unregistered (n int);
         begin; insert into unregistered values (1); select tributary.accept_write('u_1', 'writer'); commit",
    )?;
    pull_when_captured(&mut client)?;
    // And so are several in one transaction.
    source.run(
        "begin; select tributary.accept_write('u_1', 'writer'); delete from tasks where id = 60;
                select tributary.accept_write('u_1', 'writer'); commit",
    )?;
    pull_when_captured(&mut client)?;
    ensure!(epoch(&source)? == before + 4);
    ensure!(client.contents_of("tasks_user:u_1", "tasks", "60").is_none());

    // A write that is accepted while the pull is under way is not older than the pull: no order is promised. But one
    // that was accepted before is in it, through any number of rounds.
    for round in 0..20 {
        source.run(&format!(
            "begin; update users set name = 'round {round}' where id = 'u_1';
             select tributary.accept_write('u_1', 'writer'); commit"
        ))?;
        pull_when_captured(&mut client)?;
        let name = client.contents_of("profile:u_1", "users", "u_1").and_then(|row| row.get("name")?.as_text());
        ensure!(name == Some(format!("round {round}").as_str()), "round {round}: {name:?}");
    }
    Ok(())
}

#[test]
fn an_accepted_write_is_in_the_next_answer() -> anyhow::Result<()> {
    law(false)
}

#[test]
fn an_accepted_write_is_in_the_next_answer_with_the_state_apart() -> anyhow::Result<()> {
    law(true)
}

/// Many writers of one client and of many, each of which reads its own write back at once.
#[test]
fn many_accepted_writes_at_once() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { split: true, pullers: 2, ..Options::default() })?;
    let source_url = sandbox.source_url();
    sandbox
        .source()?
        .run("insert into users (id, name, email) select 'w_' || n, 'W', 'w' || n from generate_series(0, 3) n")?;
    let writing: Vec<_> = (0..8_usize)
        .map(|writer| {
            // Two writers a client.
            let user = format!("w_{}", writer / 2);
            let client_id = format!("many-{}", writer / 2);
            let (url, token) = (sandbox.pullers[writer % 2].url.clone().unwrap_or_default(), sandbox.token(&user)?);
            let source_url = source_url.clone();
            anyhow::Ok(thread::spawn(move || -> anyhow::Result<i64> {
                let source = Database::connect(&source_url)?;
                let mut client = Client::new(&url, &token, &format!("{client_id}-{writer}"));
                client.sync(500)?;
                let mut last = 0;
                for round in 0..25 {
                    let title = format!("{writer}.{round}");
                    let epoch = source.query(
                        &format!("with w as (insert into documents (id, owner_id, title) values (gen_random_uuid(), '{user}', '{title}') returning 1)
                                  select tributary.accept_write('{user}', 'shared-{user}'), tributary.accept_write('{user}', '{}') from w", client.client_id),
                        &[],
                    )?;
                    let shared: i64 = epoch[0].try_get(0)?;
                    ensure!(shared > last, "epochs of one client rise in commit order");
                    last = shared;
                    pull_when_captured(&mut client)?;
                    let scope = format!("documents_user:{user}");
                    let titles = client.contents(&scope, "documents");
                    let found = titles.values().any(|row| row.get("title").and_then(Json::as_text) == Some(&title));
                    ensure!(found, "{title} is missing");
                }
                Ok(last)
            }))
        })
        .collect::<anyhow::Result<_>>()?;
    for writer in writing {
        writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??;
    }
    materialized(&sandbox)?;
    let sum = "select coalesce(sum(epoch), 0) from tributary.";
    let accepted = sandbox.source()?.number(&format!("{sum}accepted_write where client_id like 'shared%'"))?;
    let captured = sandbox.state()?.number(&format!("{sum}materialized_epoch where client_id like 'shared%'"))?;
    ensure!(accepted == 200 && captured == 200, "{accepted} accepted, {captured} materialized");
    Ok(())
}

/// A client's epochs commit in order: the second write waits for the first, and another client's does not.
#[test]
fn a_clients_accepted_writes_commit_in_order() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (one, other) = (sandbox.source()?, sandbox.source()?);
    one.run("select tributary.accept_write('u_1', 'ordered')")?;
    for end in ["commit", "rollback"] {
        let (second, watcher) = (sandbox.source()?, sandbox.source()?);
        let before = watcher
            .number("select epoch from tributary.accepted_write where user_id = 'u_1' and client_id = 'ordered'")?;
        one.run("begin; select tributary.accept_write('u_1', 'ordered')")?;
        let waiting = thread::spawn(move || second.number("select tributary.accept_write('u_1', 'ordered')"));
        eventually(Duration::from_secs(20), || {
            let sql =
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%accept_write%'";
            ensure!(watcher.number(sql)? == 1, "the second does not wait");
            Ok(())
        })?;
        other.run("select tributary.accept_write('u_1', 'another'), tributary.accept_write('u_2', 'ordered')")?;
        one.run(end)?;
        let second = waiting.join().map_err(|_| anyhow::anyhow!("panic"))??;
        ensure!(second == before + if end == "commit" { 2 } else { 1 }, "{end}: {second} after {before}");
    }
    materialized(&sandbox)?;
    let epoch = "select epoch from tributary.materialized_epoch where client_id = 'ordered' and user_id = 'u_1'";
    ensure!(sandbox.state()?.number(epoch)? == 4);
    Ok(())
}

/// An application's role needs EXECUTE on the function, and has nothing else.
#[test]
fn an_application_needs_execute_alone() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    source.run("create role application login password 'application'; grant select, update on tasks to application")?;
    let (_, place) =
        sandbox.source_url().rsplit_once('@').map(|(a, b)| (a.to_owned(), b.to_owned())).context("an address")?;
    let application = Database::connect(&format!("postgresql://application:application@{place}"))?;
    let denied = |sql: &str| application.run(sql).is_err_and(|error| error.to_string().contains("42501"));
    ensure!(denied("select tributary.accept_write('u_1', 'app')"), "nobody may before it is granted");
    source.run("grant execute on function tributary.accept_write(text, text) to application")?;
    ensure!(application.number("select tributary.accept_write('u_1', 'app')")? == 1);
    application.run(
        "begin; update tasks set priority = 9 where id = 1; select tributary.accept_write('u_1', 'app'); commit",
    )?;
    for sql in [
        "select * from tributary.accepted_write",
        "update tributary.accepted_write set epoch = 100",
        "delete from tributary.accepted_write",
        "select * from tributary.progress",
        "select * from tributary.client",
        "create table tributary.x ()",
        "select * from tributary_data.\"public.tasks\"",
    ] {
        // With the state apart there is nothing of it here to be denied.
        let elsewhere = sandbox.state_url() != sandbox.source_url()
            && ["progress", "client", "tributary_data"].iter().any(|name| sql.contains(name));
        ensure!(elsewhere || denied(sql), "{sql} is allowed");
    }
    for bad in ["null, 'app'", "'', 'app'", "'u_1', null", "'u_1', ''", "'u_1', repeat('x', 256)"] {
        let refused = application.run(&format!("select tributary.accept_write({bad})"));
        ensure!(refused.is_err_and(|error| error.to_string().contains("22023")), "{bad} is accepted");
    }
    // Objects of the caller's own cannot get in the way of a function that has its owner's rights.
    source.run("create schema application authorization application")?;
    application.run(
        "create table application.accepted_write (user_id text, client_id text, epoch bigint);
         create function application.char_length(text) returns integer language sql as 'select 1000';
         set search_path = application, pg_catalog",
    )?;
    ensure!(application.number("select tributary.accept_write('u_1', 'app')")? == 3);
    ensure!(application.number("select count(*) from application.accepted_write")? == 0);
    materialized(&sandbox)?;
    let epoch = "select epoch from tributary.materialized_epoch where client_id = 'app'";
    ensure!(sandbox.state()?.number(epoch)? == 3);
    Ok(())
}

//! What is not there for now is 503 `temporary_unavailable` with Retry-After, and what is too much is 429 before any work
//! (ADR 003, "Error rules"; contract.md section 5).

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use tributary_tests::client::Client;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{durable, raw, restart_with, send, wire};

const LOCK: &str = "begin; lock table tributary.client in access exclusive mode";

fn unavailable() -> (u16, String) {
    (503, "temporary_unavailable".to_owned())
}

/// A pull in a thread of its own.
fn pulling(sandbox: &Sandbox, client: &Client) -> anyhow::Result<thread::JoinHandle<(u16, String)>> {
    let request = raw(&client.pull_request(10));
    let one = sandbox.client("u_1", &client.client_id)?;
    Ok(thread::spawn(move || send(&one, "/sync/pull", request.as_bytes())))
}

/// Waits until this many sessions wait for a lock.
fn waiting(sandbox: &Sandbox, count: i64) -> anyhow::Result<()> {
    let state = sandbox.state()?;
    eventually(Duration::from_secs(10), || {
        let sql = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'";
        ensure!(state.number(sql)? >= count, "nobody waits");
        Ok(())
    })
}

fn join(thread: thread::JoinHandle<(u16, String)>) -> anyhow::Result<(u16, String)> {
    thread.join().map_err(|_| anyhow::anyhow!("a pull panicked"))
}

#[test]
fn no_database_no_session_no_time_is_503() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let state = sandbox.state()?;
    let mut client = sandbox.client("u_1", "patient")?;
    client.sync(500)?;
    let before = durable(&state)?;

    // No session is free: the one there is waits for a lock.
    restart_with(&mut sandbox.pullers[0], &[("TRIBUTARY_POOL_SIZE", "1"), ("TRIBUTARY_POOL_WAIT_MILLIS", "300")])?;
    state.run(LOCK)?;
    let first = pulling(&sandbox, &client)?;
    waiting(&sandbox, 1)?;
    // The wait for a session is bounded: this one is answered while the first still waits.
    ensure!(join(pulling(&sandbox, &client)?)? == unavailable(), "pool exhaustion");
    ensure!(!first.is_finished());
    state.run("rollback")?;
    ensure!(join(first)?.0 == 200);

    // A statement takes too long.
    restart_with(&mut sandbox.pullers[0], &[("TRIBUTARY_STATEMENT_TIMEOUT_SECONDS", "1")])?;
    state.run(LOCK)?;
    ensure!(join(pulling(&sandbox, &client)?)? == unavailable(), "statement timeout");
    state.run("rollback")?;
    ensure!(durable(&state)? == before, "the state changed");
    ensure!(join(pulling(&sandbox, &client)?)?.0 == 200);

    // The database ends under a request, is away, and returns.
    restart_with(&mut sandbox.pullers[0], &[("TRIBUTARY_STATEMENT_TIMEOUT_SECONDS", "60")])?;
    state.run(LOCK)?;
    let hit = pulling(&sandbox, &client)?;
    waiting(&sandbox, 1)?;
    sandbox.postgres.process.signal(Signal::INT);
    ensure!(join(hit)? == unavailable(), "the database was shut down under it");
    if !sandbox.postgres.process.ended_within(Duration::from_secs(1)) {
        sandbox.postgres.process.signal(Signal::QUIT);
        ensure!(sandbox.postgres.process.ended_within(Duration::from_secs(10)));
    }
    for path in ["/sync/connect", "/sync/pull", "/sync/rebuild"] {
        let body = match path {
            "/sync/connect" => client.connect_request(),
            "/sync/pull" => client.pull_request(10),
            _ => client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10)),
        };
        ensure!(send(&client, path, raw(&body).as_bytes()) == unavailable(), "{path} without a database");
    }
    eventually(Duration::from_secs(20), || {
        ensure!(sandbox.pullers[0].readiness() == Some(503), "still ready without a database");
        Ok(())
    })?;
    sandbox.postgres.restart()?;
    sandbox.wait_until_ready()?;
    ensure!(durable(&sandbox.state()?)? == before, "the state changed");
    client.pull_all(10)?;
    Ok(())
}

#[test]
fn overload_is_429_before_any_work() -> anyhow::Result<()> {
    let sandbox =
        Sandbox::start(Options { puller_args: ["--max-in-flight", "1"].map(Into::into).into(), ..Options::default() })?;
    let state = sandbox.state()?;
    let mut client = sandbox.client("u_1", "crowded")?;
    client.sync(500)?;
    state.run(LOCK)?;
    let first = pulling(&sandbox, &client)?;
    waiting(&sandbox, 1)?;
    let limited = (429, "rate_limited".to_owned());
    ensure!(send(&client, "/sync/pull", raw(&client.pull_request(10)).as_bytes()) == limited);
    // Before the identity is looked at, before the body is read.
    let base = sandbox.pullers[0].url.as_deref().context("a puller")?;
    for path in ["/sync/connect", "/sync/pull", "/sync/rebuild"] {
        let answer = wire::exchange(base, "POST", path, &[("Content-Length", "1000000000")], b"")?;
        ensure!((answer.status, answer.code().as_str()) == (429, "rate_limited"), "{path}: {answer:?}");
        ensure!(answer.header("retry-after").is_some_and(|value| value.parse::<u32>().is_ok()), "{answer:?}");
    }
    state.run("rollback")?;
    ensure!(join(first)?.0 == 200);
    ensure!(send(&client, "/sync/pull", raw(&client.pull_request(10)).as_bytes()).0 == 200);
    Ok(())
}

/// Whether the puller has logged this.
fn has_logged(sandbox: &Sandbox, text: &str) -> anyhow::Result<bool> {
    Ok(std::fs::read_to_string(&sandbox.pullers[0].process.launch().log)?.contains(text))
}

/// SIGTERM: running requests end; what cannot end within the grace period is told so rather than cut off.
#[test]
fn shutdown_answers_what_is_under_way() -> anyhow::Result<()> {
    for in_time in [true, false] {
        let mut sandbox = Sandbox::start(Options::default())?;
        let state = sandbox.state()?;
        let mut client = sandbox.client("u_1", "last")?;
        client.sync(500)?;
        state.run(LOCK)?;
        let requests = [
            ("/sync/connect", raw(&client.connect_request())),
            ("/sync/pull", raw(&client.pull_request(10))),
            ("/sync/rebuild", raw(&client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10)))),
        ];
        let running = requests.map(|(path, body)| {
            let one = sandbox.client("u_1", &client.client_id).unwrap();
            (path, thread::spawn(move || send(&one, path, body.as_bytes())))
        });
        waiting(&sandbox, 3)?;
        sandbox.pullers[0].process.signal(Signal::TERM);
        eventually(Duration::from_secs(10), || {
            ensure!(has_logged(&sandbox, "draining")?, "the signal is not seen");
            Ok(())
        })?;
        if in_time {
            state.run("rollback")?;
        }
        for (path, request) in running {
            let got = join(request)?;
            let expected = if in_time { (200, "ok".to_owned()) } else { unavailable() };
            ensure!(got == expected, "{path}, in time {in_time}: {got:?}");
        }
        let process = &mut sandbox.pullers[0].process;
        ensure!(process.ended_within(Duration::from_secs(10)), "still running");
        ensure!(process.exited().is_some_and(|status| status.success()), "an orderly end");
        if !in_time {
            state.run("rollback")?;
        }
    }
    Ok(())
}

/// Makes commits that write a table wait for a lock that the test holds: the commit is sent, and not done.
const SLOW_COMMITS: &str = "
    create function public.slow_commit() returns trigger language plpgsql as
        $$ begin perform pg_catalog.pg_advisory_xact_lock(4711); return null; end $$;
    create constraint trigger slow_commit after update on tributary.client_scope
        deferrable initially deferred for each row execute function public.slow_commit();";

/// The grace period ends while the database commits: the request is not told that it failed, as what it wrote is kept.
/// It is answered when the commit is done in time, and else its connection ends without an answer.
#[test]
fn a_request_whose_commit_was_sent_is_not_told_that_it_failed() -> anyhow::Result<()> {
    for in_time in [true, false] {
        let mut sandbox = Sandbox::start(Options::default())?;
        let (source, state) = (sandbox.source()?, sandbox.state()?);
        let mut client = sandbox.client("u_1", "committed")?;
        client.sync(500)?;
        source.run("update tasks set priority = priority + 1 where assignee_id = 'u_1'")?;
        super::materialized(&sandbox)?;
        client.pull_all(500)?;
        let before = super::checkpoints(&state, "committed")?;
        state.run(SLOW_COMMITS)?;
        state.run("select pg_advisory_lock(4711)")?;
        let (request, one) = (raw(&client.pull_request(10)), sandbox.client("u_1", "committed")?);
        let running = thread::spawn(move || one.http.post("/sync/pull", request.as_bytes()));
        waiting(&sandbox, 1)?;
        sandbox.pullers[0].process.signal(Signal::TERM);
        let release = || state.run("select pg_advisory_unlock(4711)");
        if in_time {
            eventually(Duration::from_secs(20), || {
                ensure!(has_logged(&sandbox, "did not end within the grace period")?, "the grace period is not over");
                Ok(())
            })?;
            release()?;
        } else {
            ensure!(sandbox.pullers[0].process.ended_within(Duration::from_secs(20)), "still running");
        }
        let answer = running.join().map_err(|_| anyhow::anyhow!("a pull panicked"))?;
        match &answer {
            // A machine that stands still for the last second gives no answer either.
            Ok(response) if in_time => ensure!(response.status == 200, "{response:?}"),
            Ok(response) => anyhow::bail!("nobody knew the outcome: {response:?}"),
            Err(_) => {}
        }
        if !in_time {
            release()?;
        }
        eventually(Duration::from_secs(20), || {
            let after = super::checkpoints(&state, "committed")?;
            ensure!(after["tasks_user:u_1"] > before["tasks_user:u_1"], "what was sent is not committed");
            Ok(())
        })?;
    }
    Ok(())
}

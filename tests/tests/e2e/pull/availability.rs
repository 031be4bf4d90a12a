//! What is not there for now is 503 `temporary_unavailable` with Retry-After, and what is too much is 429 before any work
//! (ADR 003, "Error rules"; contract.md section 5).

use std::thread;
use std::time::{Duration, Instant};

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
    let started = Instant::now();
    ensure!(join(pulling(&sandbox, &client)?)? == unavailable(), "pool exhaustion");
    ensure!(started.elapsed() < Duration::from_secs(3), "the wait for a session is bounded");
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

/// SIGTERM: running requests end; what cannot end within the grace period is told so rather than cut off.
#[test]
fn shutdown_answers_what_is_under_way() -> anyhow::Result<()> {
    for in_time in [true, false] {
        let mut sandbox = Sandbox::start(Options::default())?;
        let state = sandbox.state()?;
        let mut client = sandbox.client("u_1", "last")?;
        client.sync(500)?;
        restart_with(&mut sandbox.pullers[0], &[])?;
        state.run(LOCK)?;
        let running = pulling(&sandbox, &client)?;
        waiting(&sandbox, 1)?;
        let process = &mut sandbox.pullers[0].process;
        process.signal(Signal::TERM);
        thread::sleep(Duration::from_millis(300));
        if in_time {
            state.run("rollback")?;
        }
        let got = join(running)?;
        ensure!(got == if in_time { (200, "ok".to_owned()) } else { unavailable() }, "in time {in_time}: {got:?}");
        ensure!(process.ended_within(Duration::from_secs(10)), "still running");
        ensure!(process.exited().is_some_and(|status| status.success()), "an orderly end");
        if !in_time {
            state.run("rollback")?;
        }
    }
    Ok(())
}

//! The materializer dies where it hurts most, again and again, under writes: no gap, no duplicate, and the slot is never
//! ahead of what is durable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::database::Database;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{PATIENCE, Polling, agree};
use crate::restart::writer;
use crate::sample::settle;

/// Watches that the slot never confirms what the state does not hold; the number of looks.
///
/// The slot is read first: durable progress only grows, so what is read of it later bounds what it was before.
fn watch_the_slot(
    source: Database,
    state: Database,
    stop: Arc<AtomicBool>,
) -> thread::JoinHandle<anyhow::Result<usize>> {
    thread::spawn(move || {
        let mut looks = 0;
        while !stop.load(Ordering::Relaxed) {
            let confirmed = source.number(
                "select coalesce(max(confirmed_flush_lsn - '0/0'), 0) from pg_replication_slots where slot_name = 'tributary'",
            )?;
            let durable = state.number(
                "select greatest((select resume_lsn from tributary.progress), (select acknowledged_lsn from tributary.leader))",
            )?;
            ensure!(confirmed <= durable, "the slot confirmed {confirmed}, and {durable} is durable");
            looks += 1;
            thread::sleep(Duration::from_millis(2));
        }
        Ok(looks)
    })
}

/// A dead leader's lease runs out soon.
fn short_lease() -> Options {
    Options { materializer_args: ["--lease-seconds", "1"].map(Into::into).into(), ..Options::default() }
}

fn dies_at(sandbox: &mut Sandbox, point: &str) -> anyhow::Result<()> {
    let process = &mut sandbox.materializers[0].process;
    process.kill();
    process.set_env("TRIBUTARY_FAILPOINT", point);
    process.restart()?;
    ensure!(process.ended_within(PATIENCE), "{point} was not reached: {}", process.last_words());
    ensure!(process.exited().is_some_and(|status| !status.success()), "{point}: an orderly end");
    process.set_env("TRIBUTARY_FAILPOINT", "before_commit:4000000000");
    Ok(())
}

#[test]
fn deaths_around_the_commit_lose_and_repeat_nothing() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(short_lease())?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "crash")?;
    settle(&mut client, &source, "u_1", 100)?;
    let stop = Arc::new(AtomicBool::new(false));
    let watching = watch_the_slot(sandbox.source()?, sandbox.state()?, stop.clone());
    let writing = writer(sandbox.source_url(), stop.clone());
    let mut outcome = Ok(());
    for point in
        ["before_commit", "before_acknowledgement", "before_commit:3", "before_acknowledgement:4", "before_commit:9"]
    {
        outcome = dies_at(&mut sandbox, point).and_then(|()| {
            // A reader in between sees whole transactions only.
            match client.sync(100) {
                Err(violation @ tributary_tests::client::ClientError::Violation(_)) => Err(violation.into()),
                _ => Ok(()),
            }
        });
        if outcome.is_err() {
            break;
        }
    }
    for round in 0..8_u64 {
        if outcome.is_ok() {
            outcome = sandbox.materializers[0].process.restart().map_err(Into::into);
            thread::sleep(Duration::from_millis(97 * round));
        }
    }
    stop.store(true, Ordering::Relaxed);
    let commits = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    let looks = watching.join().map_err(|_| anyhow::anyhow!("the watcher panicked"))??;
    outcome?;
    ensure!(commits > 50 && looks > 50, "only {commits} commits and {looks} looks");
    sandbox.wait_until_ready()?;
    agree(&sandbox, &mut client, &source, "crash-fresh")?;
    // Nothing of what was written twice is there twice: each row of the source has one captured row.
    let captured = sandbox.state()?.number("select count(*) from tributary_data.\"public.comments\"")?;
    ensure!(captured == source.number("select count(*) from comments")?, "{captured} comments are captured");
    Ok(())
}

#[test]
fn deaths_during_a_baseline_leave_it_to_be_taken_again() -> anyhow::Result<()> {
    // The first baseline of a state: nothing is half there after any of its deaths.
    let sandbox = Sandbox::start(Options { materializers: 0, pullers: 0, ..Options::default() })?;
    let source = sandbox.source()?;
    for point in ["baseline_slot", "baseline_copy", "baseline_copy:4", "before_activation", "after_activation"] {
        let mut launch = sandbox.materializer_launch("dying")?;
        launch.args = ["run", "--admin-listen", "127.0.0.1:0", "--config"].map(Into::into).into();
        launch.args.push(sandbox.config().into());
        launch.env.push(("TRIBUTARY_FAILPOINT".to_owned(), point.into()));
        let (status, output) = launch.run()?;
        ensure!(!status.success() && output.contains("aborting at a failpoint"), "{point}: {status}: {output}");
        let active = sandbox.state()?.number("select count(*) from tributary.progress")?;
        ensure!(active == i64::from(point == "after_activation"), "{point}: {active} baselines are active");
        source.run("update tasks set title = 'between' where id % 5 = 0; delete from comments where id % 20 = 0")?;
    }
    ensure!(source.number("select count(*) from pg_replication_slots")? == 1, "slots are left behind");
    drop((source, sandbox));

    // The baseline of a reset: the former state is served until the new one is active.
    let mut sandbox = Sandbox::start(short_lease())?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "reset")?;
    settle(&mut client, &source, "u_1", 100)?;
    let generation = "select stream_generation from tributary.progress";
    let former = sandbox.state()?.text(generation)?;
    let polling = Polling::start(&sandbox, 2, &["rebuild_restart_required"], "dying")?;
    let (exit, output) = sandbox.materializer_command(&["reset"])?;
    ensure!(exit.success(), "{output}");
    for point in ["baseline_slot", "baseline_copy:2", "before_activation"] {
        dies_at(&mut sandbox, point)?;
        ensure!(sandbox.state()?.text(generation)? == former, "{point}: another generation");
        ensure!(sandbox.status()?.condition() == "resetting", "{point}: {}", sandbox.status()?.json);
        polling.answered_again(1).context(point)?;
        source.run("update tasks set title = 'reset' where id % 4 = 0; delete from comments where id % 30 = 0")?;
    }
    dies_at(&mut sandbox, "after_activation")?;
    ensure!(sandbox.state()?.text(generation)? != former, "the reset is not active");
    sandbox.materializers[0].process.restart()?;
    polling.answered_again(2)?;
    for polled in polling.end()? {
        let begun: usize = polled.client.rebuilds.values().sum();
        let restarts = polled.refused.get("rebuild_restart_required").copied().unwrap_or(0);
        ensure!(begun == 2 * polled.client.scopes.len() + restarts, "{begun} rebuilds, {restarts} restarts");
    }
    eventually(PATIENCE, || {
        let status = sandbox.status()?;
        ensure!(status.findings().is_empty(), "{}", status.json);
        Ok(())
    })?;
    agree(&sandbox, &mut client, &source, "reset-fresh")
}

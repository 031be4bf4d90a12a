//! Three materializers: one leads. A paused leader is replaced, and cannot write when it wakes up; a leader that is told
//! to go hands over at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use rustix::process::Signal;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{PATIENCE, agree, leading, readiness};
use crate::restart::writer;

fn epoch(sandbox: &Sandbox) -> anyhow::Result<i64> {
    sandbox.state()?.number("select epoch from tributary.leader")
}

/// Waits until the boundary has moved under a later leadership than `former`; its epoch.
fn goes_on(sandbox: &Sandbox, former: i64) -> anyhow::Result<i64> {
    eventually(PATIENCE, || {
        let epoch = sandbox.state()?.number("select leader_epoch from tributary.progress")?;
        ensure!(epoch > former, "nobody took over");
        Ok(epoch)
    })
}

#[test]
fn a_paused_leader_is_replaced_and_cannot_write() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { materializers: 3, ..Options::default() })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "leaders")?;
    client.sync(100)?;
    let stop = Arc::new(AtomicBool::new(false));
    let writing = writer(sandbox.source_url(), stop.clone());

    let outcome = (|| -> anyhow::Result<()> {
        for _ in 0..2 {
            let paused = eventually(PATIENCE, || leading(&sandbox))?;
            let former = epoch(&sandbox)?;
            let began = Instant::now();
            sandbox.materializers[paused].process.signal(Signal::STOP);
            let next = goes_on(&sandbox, former)?;
            println!("taken over {:?} after the leader was paused", began.elapsed());
            sandbox.materializers[paused].process.signal(Signal::CONT);
            eventually(PATIENCE, || {
                let ready = readiness(&sandbox.materializers[paused]);
                ensure!(ready == "ready: standby", "the woken leader says {ready}");
                Ok(())
            })?;
            // It had a state transaction at hand, and everything since is the new leader's.
            let leaders = sandbox.state()?.number("select leader_epoch from tributary.progress")?;
            ensure!(leaders == next && epoch(&sandbox)? == next, "epoch {leaders} after {next}");
        }
        // With a lease that nobody outwaits here, only a leader that hands over can be followed by another.
        for number in 0..3 {
            let process = &mut sandbox.materializers[number].process;
            process.set_env("TRIBUTARY_LEASE_SECONDS", "300");
            process.signal(Signal::TERM);
            ensure!(process.ended_within(PATIENCE));
            process.restart()?;
        }
        for _ in 0..2 {
            let leader = eventually(PATIENCE, || leading(&sandbox))?;
            let former = epoch(&sandbox)?;
            let began = Instant::now();
            sandbox.materializers[leader].process.signal(Signal::TERM);
            goes_on(&sandbox, former)?;
            println!("handed over {:?} after SIGTERM", began.elapsed());
            ensure!(sandbox.materializers[leader].process.ended_within(PATIENCE), "it stays");
            sandbox.materializers[leader].process.restart()?;
            sandbox.wait_until_ready()?;
        }
        Ok(())
    })();
    stop.store(true, Ordering::Relaxed);
    let commits = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    outcome?;
    ensure!(commits > 20, "only {commits} commits");
    agree(&sandbox, &mut client, &source, "leaders-fresh")
}

/// PostgreSQL goes away and comes back under a leader and standbys: somebody leads again, and nothing is lost.
#[test]
fn a_restarted_database_is_followed_again_by_one_of_three() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { materializers: 3, pullers: 2, ..Options::default() })?;
    let mut client = sandbox.client("u_1", "database")?;
    client.sync(100)?;
    let stop = Arc::new(AtomicBool::new(false));
    let writing = writer(sandbox.source_url(), stop.clone());
    let outcome = (|| -> anyhow::Result<()> {
        for signal in [Signal::INT, Signal::QUIT] {
            thread::sleep(Duration::from_millis(300));
            sandbox.postgres.process.signal(signal);
            ensure!(sandbox.postgres.process.ended_within(PATIENCE), "PostgreSQL does not stop");
            sandbox.postgres.restart()?;
            sandbox.wait_until_ready()?;
            let ended = sandbox.ended();
            ensure!(ended.is_empty(), "a program ended: {ended:?}");
            eventually(PATIENCE, || leading(&sandbox))?;
        }
        Ok(())
    })();
    stop.store(true, Ordering::Relaxed);
    writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    outcome?;
    let leaders = sandbox.materializers.iter().filter(|service| readiness(service) == "ready: leader").count();
    ensure!(leaders == 1, "{leaders} leaders");
    let source = sandbox.source()?;
    agree(&sandbox, &mut client, &source, "database-fresh")
}

//! Programs die while the application writes: nothing is lost, nothing comes twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use tributary_tests::database::Database;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use crate::sample::settle;

/// Keeps writing for all users until it is told to stop; the number of its commits. Errors are those of a database
/// that is being restarted.
pub fn writer(url: String, stop: Arc<AtomicBool>) -> thread::JoinHandle<u64> {
    thread::spawn(move || {
        let (mut session, mut commits) = (None, 0_u64);
        while !stop.load(Ordering::Relaxed) {
            let Some(database) = session.take().or_else(|| Database::connect(&url).ok()) else {
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let outcome = database.run(&format!(
                "begin;
                 update tasks set priority = {commits} % 1000, archived = id % 13 = {commits} % 13 where id % 40 = {commits} % 40;
                 insert into comments (task_id, author_id, body) values ({commits} % 2000 + 1, 'u_1', 'restart {commits}');
                 delete from comments where id = (select min(id) from comments where author_id = 'u_1');
                 commit"
            ));
            if outcome.is_ok() {
                (session, commits) = (Some(database), commits + 1);
            }
            // Writes all the time, and not more than a small machine can follow.
            thread::sleep(Duration::from_millis(15));
        }
        commits
    })
}

fn under_writes(sandbox: &mut Sandbox, disturb: impl FnOnce(&mut Sandbox) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let writing = writer(sandbox.source_url(), stop.clone());
    let mut client = sandbox.client("u_1", "restart")?;
    client.sync(100)?;
    let disturbed = disturb(sandbox);
    stop.store(true, Ordering::Relaxed);
    let commits = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    disturbed?;
    ensure!(commits > 10, "only {commits} commits");
    sandbox.wait_until_ready()?;
    let source = sandbox.source()?;
    settle(&mut client, &source, "u_1", 100)?;
    let mut fresh = sandbox.client("u_1", "restart-fresh")?;
    settle(&mut fresh, &source, "u_1", 1000)?;
    ensure!(client.rows == fresh.rows, "pulled and rebuilt rows differ");
    Ok(())
}

#[test]
fn a_killed_materializer_loses_nothing() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    under_writes(&mut sandbox, |sandbox| {
        for round in 0..6 {
            thread::sleep(Duration::from_millis(150 + 130 * round));
            sandbox.materializers[0].process.restart()?;
        }
        Ok(())
    })
}

#[test]
fn a_standby_takes_over() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options {
        materializers: 2,
        materializer_args: ["--lease-seconds", "3"].map(Into::into).into(),
        ..Options::default()
    })?;
    under_writes(&mut sandbox, |sandbox| {
        let epoch = sandbox.state()?.number("select epoch from tributary.leader")?;
        // Kill both in turn: whichever led, the other goes on.
        for number in [0, 1] {
            sandbox.materializers[number].process.restart()?;
            thread::sleep(Duration::from_secs(5));
        }
        eventually(Duration::from_secs(20), || {
            ensure!(sandbox.state()?.number("select epoch from tributary.leader")? > epoch, "nobody took over");
            Ok(())
        })
    })
}

#[test]
fn a_restarted_database_loses_nothing() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    under_writes(&mut sandbox, |sandbox| {
        thread::sleep(Duration::from_millis(500));
        sandbox.postgres.restart()?;
        thread::sleep(Duration::from_millis(500));
        let ended = sandbox.ended();
        ensure!(ended.is_empty(), "a lost database connection ended a program: {ended:?}");
        sandbox.wait_until_ready()?;
        // And once without a farewell.
        sandbox.postgres.process.signal(rustix::process::Signal::QUIT);
        ensure!(sandbox.postgres.process.ended_within(Duration::from_secs(10)));
        sandbox.postgres.restart()?;
        sandbox.wait_until_ready()
    })
}

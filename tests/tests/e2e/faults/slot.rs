//! A stream that cannot go on without a gap: found, never papered over; the state is served meanwhile; `status` says
//! what happened and what to do; `reset` goes on, and every client rebuilds exactly once.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use tributary_tests::client::Client;
use tributary_tests::database::Database;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{PATIENCE, Polling, agree, metric, readiness};
use crate::sample::settle;

const DROP_SLOT: &str = "select pg_drop_replication_slot('tributary')";

fn generation(sandbox: &Sandbox) -> anyhow::Result<String> {
    sandbox.state()?.text("select stream_generation from tributary.progress")
}

fn resume(sandbox: &Sandbox) -> anyhow::Result<i64> {
    sandbox.state()?.number("select resume_lsn from tributary.progress")
}

fn write(source: &Database, what: &str) -> anyhow::Result<()> {
    source.run(&format!(
        "update tasks set title = '{what} ' || id where assignee_id in ('u_1', 'u_2') and id % 3 = 0;
         delete from comments where id = (select min(id) from comments where author_id = 'u_1');
         insert into comments (task_id, author_id, body) select 1, 'u_' || n, '{what}' from generate_series(1, 3) n"
    ))
}

/// What stands is served, the fault has its name, and nothing is materialized past the gap.
fn is_found(sandbox: &Sandbox, code: &str, before: i64) -> anyhow::Result<()> {
    eventually(PATIENCE, || {
        let status = sandbox.status()?;
        ensure!(status.findings().first() == Some(&code), "{:?} instead of {code}: {}", status.findings(), status.json);
        ensure!(status.needs_somebody && status.condition() == "broken", "{}", status.json);
        ensure!(status.advice(code).is_some_and(|todo| todo.contains("materializer reset")), "{}", status.json);
        let ready = readiness(&sandbox.materializers[0]);
        ensure!(ready.starts_with("not ready:") && ready.contains("materializer reset"), "{code}: {ready}");
        ensure!(metric(&sandbox.materializers[0], "tributary_slot_lost") == Some(1.0), "no metric of {code}");
        Ok(())
    })?;
    let (exit, table) = sandbox.materializer_command(&["status"])?;
    ensure!(exit.code() == Some(3) && table.contains(&format!("{code}: ")), "{table}");
    ensure!(table.contains("what to do: "), "{table}");
    ensure!(resume(sandbox)? == before, "the stream went on over a gap: {code}");
    ensure!(sandbox.pullers.iter().all(|puller| puller.readiness() == Some(200)), "a puller stopped serving");
    Ok(())
}

/// The reset leads to a new generation; clients that poll throughout rebuild each scope once, and hold what the source
/// holds.
fn reset_goes_on(sandbox: &Sandbox, source: &Database, what: &str) -> anyhow::Result<()> {
    let former = generation(sandbox)?;
    let polling = Polling::start(sandbox, 2, &["rebuild_restart_required"], what)?;
    polling.answered_again(1)?;
    sandbox.reset()?;
    ensure!(generation(sandbox)? != former, "the generation is the former one");
    polling.answered_again(2)?;
    for polled in polling.end()? {
        let restarts = polled.refused.get("rebuild_restart_required").copied().unwrap_or(0);
        let scopes = polled.client.scopes.len();
        let begun: usize = polled.client.rebuilds.values().sum();
        // Once to begin with, once for the reset; a rebuild that the reset met under way is begun again.
        ensure!(begun == 2 * scopes + restarts, "{what}: {begun} rebuilds of {scopes} scopes, {restarts} restarts");
    }
    eventually(PATIENCE, || {
        let status = sandbox.status()?;
        ensure!(status.findings().is_empty() && !status.needs_somebody, "after {what}: {}", status.json);
        ensure!(matches!(status.condition(), "following" | "behind"), "{}", status.json);
        ensure!(metric(&sandbox.materializers[0], "tributary_slot_lost") == Some(0.0), "the metric stays");
        Ok(())
    })?;
    // The new stream is followed, and holds no rows, markers or positions of the former one.
    write(source, &format!("after {what}"))?;
    let mut client = sandbox.client("u_1", &format!("after {what}"))?;
    settle(&mut client, source, "u_1", 100)?;
    let state = sandbox.state()?;
    for table in ["tasks", "comments", "documents", "templates"] {
        let captured = state.number(&format!("select count(*) from tributary_data.\"public.{table}\""))?;
        ensure!(captured == source.number(&format!("select count(*) from {table}"))?, "{what}: rows of {table}");
    }
    Ok(())
}

fn stopped(sandbox: &mut Sandbox, damage: impl FnOnce(&Database) -> anyhow::Result<()>) -> anyhow::Result<i64> {
    sandbox.materializers[0].process.kill();
    let source = sandbox.source()?;
    // The walsender of a killed consumer takes a moment to notice.
    eventually(PATIENCE, || {
        let held = source.number("select count(*) from pg_replication_slots where active")?;
        ensure!(held == 0, "the slot is held");
        Ok(())
    })?;
    let before = resume(sandbox)?;
    damage(&source)?;
    sandbox.materializers[0].process.restart()?;
    Ok(before)
}

#[test]
fn a_slot_with_a_gap_is_found_and_reset_goes_on() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "all along")?;
    settle(&mut client, &source, "u_1", 100)?;
    let status = sandbox.status()?;
    ensure!(status.condition() == "following" && !status.needs_somebody, "{}", status.json);
    ensure!(
        status.json["slot"]["facts"]["active"] == true && status.json["leader"]["alive"] == true,
        "{}",
        status.json
    );

    // Dropped while it is streamed.
    let before = {
        let held = client.rows.clone();
        eventually(PATIENCE, || {
            // Its walsender is ended and comes back: between the two it can be dropped.
            source.run("select pg_terminate_backend(active_pid) from pg_replication_slots where active")?;
            source.run(DROP_SLOT)
        })?;
        let before = resume(&sandbox)?;
        write(&source, "dropped")?;
        is_found(&sandbox, "slot_vanished", before)?;
        // Clients old and new are served what is durable.
        client.sync(100)?;
        ensure!(client.rows == held, "something was materialized past the gap");
        let mut fresh = sandbox.client("u_1", "in between")?;
        fresh.sync(100)?;
        ensure!(fresh.rows == held, "a fresh client was served something else");
        before
    };
    ensure!(resume(&sandbox)? == before);
    reset_goes_on(&sandbox, &source, "dropped")?;

    // Dropped and made anew by hand: it stands past changes that nobody has seen.
    let before = stopped(&mut sandbox, |source| {
        source.run(DROP_SLOT)?;
        write(source, "recreated")?;
        source.run("select pg_create_logical_replication_slot('tributary', 'pgoutput')")
    })?;
    is_found(&sandbox, "slot_advanced", before)?;
    reset_goes_on(&sandbox, &source, "recreated")?;

    // Advanced by hand.
    let before = stopped(&mut sandbox, |source| {
        write(source, "advanced")?;
        source.run("select pg_replication_slot_advance('tributary', pg_current_wal_lsn())")
    })?;
    is_found(&sandbox, "slot_advanced", before)?;
    reset_goes_on(&sandbox, &source, "advanced")?;

    // Invalidated, because the source may keep no more WAL for it.
    source.run("alter system set max_slot_wal_keep_size = '1MB'")?;
    source.run("select pg_reload_conf()")?;
    let before = stopped(&mut sandbox, |source| {
        for _ in 0..4 {
            source.run("create table if not exists ballast (v text)")?;
            source.run("insert into ballast select repeat(md5(n::text), 30) from generate_series(1, 18000) n")?;
            source.run("select pg_switch_wal()")?;
        }
        source.run("checkpoint")
    })?;
    is_found(&sandbox, "slot_invalidated", before)?;
    source.run("alter system reset max_slot_wal_keep_size")?;
    source.run("select pg_reload_conf()")?;
    reset_goes_on(&sandbox, &source, "invalidated")?;

    // A table taken out of the publication would lose its changes without a sign.
    let before = stopped(&mut sandbox, |source| {
        source.run("alter publication tributary drop table tasks")?;
        write(source, "altered")
    })?;
    is_found(&sandbox, "publication_altered", before)?;
    reset_goes_on(&sandbox, &source, "altered")?;

    // Somebody else's slot under our name is not dropped, by a reset neither.
    let before = stopped(&mut sandbox, |source| {
        source.run(DROP_SLOT)?;
        source.run("select pg_create_physical_replication_slot('tributary')")
    })?;
    is_found(&sandbox, "slot_foreign", before)?;
    let (exit, output) = sandbox.materializer_command(&["reset"])?;
    ensure!(exit.success() && output.contains("is requested"), "{output}");
    eventually(PATIENCE, || {
        let ready = readiness(&sandbox.materializers[0]);
        ensure!(ready.contains("is not ours"), "{ready}");
        Ok(())
    })?;
    ensure!(source.number("select count(*) from pg_replication_slots where slot_type = 'physical'")? == 1);
    // The reset that waited for its name to be free goes on; until it is active, the former generation is served.
    let former = generation(&sandbox)?;
    source.run(DROP_SLOT)?;
    eventually(PATIENCE, || {
        ensure!(generation(&sandbox)? != former, "the reset does not go on");
        Ok(())
    })?;
    agree(&sandbox, &mut client, &source, "at the end")
}

/// A source on one server, its state on another: a restore of the one does not touch the other.
fn apart() -> anyhow::Result<(Sandbox, Sandbox)> {
    let state = Sandbox::start(Options { split: true, materializers: 0, pullers: 0, ..Options::default() })?;
    let elsewhere = Some(state.state_url());
    let sandbox = Sandbox::start(Options { state_elsewhere: elsewhere, split: false, ..Options::default() })?;
    Ok((sandbox, state))
}

fn accepted(source: &Database, client: &Client) -> anyhow::Result<()> {
    source.run(&format!("select tributary.accept_write('u_1', '{}')", client.client_id))
}

#[test]
fn a_restored_source_is_found_and_reset_goes_on() -> anyhow::Result<()> {
    let (mut sandbox, _state) = apart()?;
    let mut client = sandbox.client("u_1", "restored")?;
    let source = sandbox.source()?;
    settle(&mut client, &source, "u_1", 100)?;
    accepted(&source, &client)?;
    write(&source, "in the backup")?;
    settle(&mut client, &source, "u_1", 100)?;
    drop(source);
    let backup = sandbox.postgres.cold_backup("backup")?;

    let source = sandbox.source()?;
    for _ in 0..3 {
        accepted(&source, &client)?;
    }
    write(&source, "lost by the restore")?;
    settle(&mut client, &source, "u_1", 100)?;
    let before = resume(&sandbox)?;
    drop(source);
    // As a disk snapshot is put back: the same cluster on the same timeline, its slot with it.
    sandbox.postgres.restore(&backup, |_| Ok(()))?;
    is_found(&sandbox, "wal_went_back", before)?;
    let source = sandbox.source()?;
    // Accepted anew: the epoch is one that was materialized before, of another write.
    accepted(&source, &client)?;
    write(&source, "after the restore")?;
    ensure!(sandbox.state()?.number("select max(epoch) from tributary.materialized_epoch")? == 4);
    reset_goes_on(&sandbox, &source, "restored")?;
    settle(&mut client, &source, "u_1", 100)?;
    ensure!(
        sandbox.state()?.number("select max(epoch) from tributary.materialized_epoch")? == 2,
        "epochs of another history"
    );

    // Promoted with everything that is materialized: the slot is there, nothing is lost, the stream goes on by itself.
    let promote = |dir: &std::path::Path| -> anyhow::Result<()> {
        fs::write(dir.join("recovery.signal"), "")?;
        let mut settings = fs::read_to_string(dir.join("postgresql.auto.conf"))?;
        settings.push_str("restore_command = 'false'\n");
        Ok(fs::write(dir.join("postgresql.auto.conf"), settings)?)
    };
    let former = generation(&sandbox)?;
    drop(source);
    let behind = sandbox.postgres.cold_backup("behind")?;
    let source = sandbox.source()?;
    write(&source, "past what is promoted later")?;
    settle(&mut client, &source, "u_1", 100)?;
    drop(source);
    sandbox.materializers[0].process.signal(Signal::TERM);
    ensure!(sandbox.materializers[0].process.ended_within(PATIENCE));
    let current = sandbox.postgres.cold_backup("current")?;
    sandbox.postgres.restore(&current, promote)?;
    sandbox.materializers[0].process.restart()?;
    let rebuilds = client.rebuilds.clone();
    let source = sandbox.source()?;
    ensure!(source.text("select left(pg_walfile_name(pg_current_wal_lsn()), 8)")? == "00000002", "no new timeline");
    write(&source, "on the second timeline")?;
    settle(&mut client, &source, "u_1", 100).context("a promotion that loses nothing")?;
    ensure!(
        client.rebuilds == rebuilds && generation(&sandbox)? == former,
        "a promotion that loses nothing led to rebuilds"
    );

    // Promoted without the newest of what is materialized, and written to until its WAL is longer than before.
    let before = resume(&sandbox)?;
    drop(source);
    sandbox.materializers[0].process.kill();
    sandbox.postgres.restore(&behind, promote)?;
    let source = sandbox.source()?;
    source.run("create table ballast as select repeat(md5(n::text), 30) v from generate_series(1, 40000) n")?;
    write(&source, "another second timeline")?;
    ensure!(
        source.number("select pg_current_wal_lsn() - '0/0'")? > before,
        "the test must overtake what was materialized"
    );
    sandbox.materializers[0].process.restart()?;
    is_found(&sandbox, "history_diverged", before)?;
    reset_goes_on(&sandbox, &source, "diverged")?;
    agree(&sandbox, &mut client, &source, "after all restores")?;

    // Another cluster altogether, as a dump is restored into.
    let other = Sandbox::start(Options { materializers: 0, pullers: 0, split: false, ..Options::default() })?;
    let before = resume(&sandbox)?;
    other.source()?.run("create publication tributary for table tasks")?;
    sandbox.materializers[0].process.kill();
    sandbox.materializers[0].process.set_env("TRIBUTARY_SOURCE_URL", other.source_url());
    sandbox.materializers[0].process.restart()?;
    eventually(Duration::from_secs(30), || {
        let ready = readiness(&sandbox.materializers[0]);
        ensure!(ready.contains("another database cluster"), "{ready}");
        Ok(())
    })?;
    ensure!(resume(&sandbox)? == before, "the stream went on with another cluster");
    Ok(())
}

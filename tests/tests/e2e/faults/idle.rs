//! Idle: other people's WAL does not pile up behind the slot, and a system without writes writes nothing but heartbeats.

use std::thread;
use std::time::Duration;

use anyhow::ensure;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::PATIENCE;

#[test]
fn an_idle_stream_advances_and_writes_heartbeats_alone() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options {
        pg_settings: ["autovacuum=off", "checkpoint_timeout=1h"].map(str::to_owned).into(),
        materializer_args: ["--lease-seconds", "3"].map(Into::into).into(),
        ..Options::default()
    })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "idle")?;
    client.sync(100)?;
    client.sync(100)?;

    // WAL of another table and of another database, 100 MB each.
    let wal = || source.number("select pg_current_wal_lsn() - '0/0'");
    let behind = |column: &str| {
        source.number(&format!(
            "select pg_current_wal_lsn() - {column} from pg_replication_slots where slot_name = 'tributary'"
        ))
    };
    let before = wal()?;
    let ballast = "create table ballast as select n, repeat(md5(n::text), 30) v from generate_series(1, 100000) n";
    source.run(ballast)?;
    source.run("create database elsewhere")?;
    sandbox.postgres.connect("elsewhere")?.run(ballast)?;
    let written = wal()? - before;
    ensure!(written > 200_000_000, "only {written} octets of WAL");
    eventually(PATIENCE, || {
        // What is kept moves with the records of running transactions that a checkpoint writes.
        source.run("checkpoint")?;
        let (confirmed, kept) = (behind("confirmed_flush_lsn")?, behind("restart_lsn")?);
        ensure!(confirmed < 1 << 20 && kept < 20 << 20, "{confirmed} octets unconfirmed, {kept} kept");
        Ok(())
    })?;

    // Each transaction that writes takes a number. A polling client is no reason to write.
    let state = sandbox.state()?;
    let (numbers, beat) = (
        "select pg_snapshot_xmax(pg_current_snapshot())::text",
        "select extract(epoch from renewed_at) * 1000 from tributary.leader",
    );
    let milliseconds = |text: String| text.parse::<f64>().unwrap_or_default();
    thread::sleep(Duration::from_secs(2));
    let (first_number, first_beat) = (state.number(numbers)?, milliseconds(state.text(beat)?));
    for _ in 0..40 {
        client.pull_page(100)?;
        thread::sleep(Duration::from_millis(200));
    }
    let (last_number, last_beat) = (state.number(numbers)?, milliseconds(state.text(beat)?));
    let beats = ((last_beat - first_beat) / 1000.0).round() as i64;
    ensure!(beats >= 3, "the leader's heart stands still");
    ensure!(
        last_number - first_number <= beats + 1,
        "{} writing transactions in {beats} heartbeats",
        last_number - first_number
    );
    Ok(())
}

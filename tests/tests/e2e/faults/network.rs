//! Connections that neither carry anything nor end: noticed within a bound, and left for new ones.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::proxy::Proxy;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{PATIENCE, agree};
use crate::sample::settle;

fn through(url: &str, proxy: &Proxy) -> anyhow::Result<String> {
    let (head, tail) = url.rsplit_once(':').context("an address has a port")?;
    let (_, database) = tail.split_once('/').context("an address has a database")?;
    Ok(format!("{head}:{}/{database}", proxy.port()))
}

#[test]
fn frozen_connections_are_noticed_and_left() -> anyhow::Result<()> {
    let short = ["--lease-seconds", "2", "--silence-seconds", "2"].map(Into::into).into();
    let mut sandbox = Sandbox::start(Options { materializer_args: short, ..Options::default() })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "frozen")?;
    let (to_source, to_state) = (Proxy::start(sandbox.postgres.port())?, Proxy::start(sandbox.postgres.port())?);
    let process = &mut sandbox.materializers[0].process;
    process.set_env("TRIBUTARY_SOURCE_URL", through(&process_url(process, "TRIBUTARY_SOURCE_URL")?, &to_source)?);
    process.set_env("TRIBUTARY_STATE_URL", through(&process_url(process, "TRIBUTARY_STATE_URL")?, &to_state)?);
    process.restart()?;
    sandbox.wait_until_ready()?;
    settle(&mut client, &source, "u_1", 100)?;
    for (proxy, what) in [(&to_source, "source"), (&to_state, "state"), (&to_source, "source again")] {
        proxy.freeze();
        source.run(&format!("update tasks set title = 'frozen {what}' where id % 3 = 0"))?;
        eventually(PATIENCE, || {
            settle(&mut client, &source, "u_1", 100).map(|_| ()).with_context(|| format!("with a frozen {what}"))
        })?;
    }
    ensure!(sandbox.ended().is_empty(), "the materializer ended");
    agree(&sandbox, &mut client, &source, "frozen-fresh")
}

fn process_url(process: &tributary_tests::processes::Process, name: &str) -> anyhow::Result<String> {
    let value = process.launch().env.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    value.and_then(|value| value.into_string().ok()).context("the process has an address")
}

/// A state transaction that takes longer than the source waits for a sign of life: the stream stays, and makes progress.
#[test]
fn a_long_apply_outlasts_a_short_wal_sender_timeout() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options {
        pg_settings: vec!["wal_sender_timeout=2s".to_owned()],
        // Room for a frozen stream, which this is not.
        materializer_args: ["--silence-seconds", "60"].map(Into::into).into(),
        ..Options::default()
    })?;
    let source = sandbox.source()?;
    let state = sandbox.state()?;
    let mut client = sandbox.client("u_1", "long")?;
    settle(&mut client, &source, "u_1", 100)?;
    let session = "select pid from pg_stat_replication where application_name like 'tributary-materializer %'";
    let before = source.text(session)?;
    // The writer waits for this lock in the middle of its transaction, while the stream goes on to fill every buffer.
    state.run("begin; lock table tributary_data.\"public.comments\" in exclusive mode")?;
    source.run("insert into comments (task_id, author_id, body) select n % 2000 + 1, 'u_1', repeat('long ', 40) from generate_series(1, 60000) n")?;
    source.run("update tasks set title = 'long' where id % 2 = 0")?;
    std::thread::sleep(Duration::from_secs(7));
    state.run("commit")?;
    settle(&mut client, &source, "u_1", 1000)?;
    ensure!(source.text(session)? == before, "the stream was cut and begun again");
    agree(&sandbox, &mut client, &source, "long-fresh")
}

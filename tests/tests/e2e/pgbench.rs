//! Real input: pgbench's tables and load, a scope per branch.

use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::client::Client;
use tributary_tests::expected;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

const SECONDS: &str = "20";
const BRANCHES: std::ops::RangeInclusive<i64> = 1..=4;

fn config() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/pgbench.yaml")
}

fn options() -> Options {
    Options {
        config: Some(config()),
        schema: Some(Vec::new()),
        prepare: Some(Box::new(|postgres| {
            let status = postgres
                .client_program("pgbench", "app")?
                .args(["-q", "-i", "-s", "5"])
                .stderr(Stdio::null())
                .status()?;
            ensure!(status.success(), "pgbench -i failed");
            Ok(())
        })),
        ..Options::default()
    }
}

#[test]
fn four_clients_pull_while_pgbench_runs() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(options())?;
    let source = sandbox.source()?;
    let mut clients = BRANCHES
        .map(|branch| sandbox.client(&branch.to_string(), &format!("pgbench-{branch}")))
        .collect::<anyhow::Result<Vec<Client>>>()?;
    let mut load = sandbox
        .postgres
        .client_program("pgbench", "app")?
        .args(["-n", "-c", "4", "-T", SECONDS])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let ended = std::sync::Arc::new(std::sync::Mutex::new(ended));
    let pulling: Vec<_> = clients
        .drain(..)
        .map(|mut client| {
            let ended = ended.clone();
            thread::spawn(move || {
                // Until the load is over; the sender's end is its drop.
                while let Err(std::sync::mpsc::TryRecvError::Empty) = ended.lock().unwrap().try_recv() {
                    client.sync(500)?;
                }
                anyhow::Ok(client)
            })
        })
        .collect();
    ensure!(load.wait()?.success(), "pgbench failed");
    drop(done);
    ensure!(source.number("select count(*) from pgbench_history")? > 0);
    // Commit order: whoever has this last change has everything before it.
    source.run("update pgbench_branches set filler = 'the end'")?;
    for (branch, client) in BRANCHES.zip(pulling) {
        let mut client = client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        let scope = format!("branch:{branch}");
        eventually(Duration::from_secs(60), || {
            client.sync(1000)?;
            let row = client.contents_of(&scope, "pgbench_branches", &branch.to_string()).context("no branch")?;
            let filler = row.get("filler").and_then(|filler| filler.as_text()).unwrap_or_default();
            ensure!(filler.starts_with("the end"), "the last change has not arrived");
            Ok(())
        })?;
        for table in ["pgbench_accounts", "pgbench_tellers", "pgbench_branches"] {
            let rows = expected::compare(&client, &source, &scope, table, &format!("{table} where bid = {branch}"))?;
            ensure!(rows > 0, "{table} is empty");
        }
        let mut fresh = sandbox.client(&branch.to_string(), &format!("pgbench-{branch}-fresh"))?;
        fresh.sync(1000)?;
        ensure!(fresh.scope_digest(&scope)? == client.scope_digest(&scope)?, "pulling and rebuilding differ");
    }
    Ok(())
}

#[test]
fn a_table_without_a_key_is_refused_by_name() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { materializers: 0, pullers: 0, ..options() })?;
    let bad = sandbox.dir().join("history.yaml");
    let text = std::fs::read_to_string(config())?;
    std::fs::write(&bad, text.replace("tables:\n", "tables:\n  - relation: public.pgbench_history\n"))?;
    let mut launch = sandbox.materializer_launch("check")?;
    launch.args = vec!["check".into(), "--config".into(), bad.into()];
    let (status, output) = launch.run()?;
    ensure!(status.code() == Some(1), "{status}: {output}");
    ensure!(output.contains("pgbench_history") && output.contains("key"), "{output}");
    launch.args[2] = config().into();
    let (status, output) = launch.run()?;
    ensure!(status.success(), "{output}");
    Ok(())
}

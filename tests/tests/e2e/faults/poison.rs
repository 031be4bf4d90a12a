//! A transaction that cannot be materialized: what came before it is served, it is named without a value, nothing is
//! skipped; `retry` goes on once the cause is mended, `reset` in any case.

use std::fs;

use anyhow::ensure;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{PATIENCE, agree, metric, readiness};
use crate::sample::settle;

/// Stands in values and ids that must not be seen anywhere.
const SECRET: &str = "s3cr3t";

fn is_stopped(sandbox: &Sandbox, code: &str, relation: &str) -> anyhow::Result<()> {
    eventually(PATIENCE, || {
        let status = sandbox.status()?;
        ensure!(status.condition() == "stopped" && status.needs_somebody, "{}", status.json);
        ensure!(status.findings() == [code], "{}", status.json);
        ensure!(status.json["quarantine"][0]["relation"] == relation, "{}", status.json);
        ensure!(status.advice(code).is_some_and(|todo| todo.contains("materializer retry")), "{}", status.json);
        let ready = readiness(&sandbox.materializers[0]);
        ensure!(ready.contains("quarantined") && sandbox.materializers[0].readiness() == Some(503), "{ready}");
        ensure!(metric(&sandbox.materializers[0], "tributary_quarantine{reason=\"poison\"}") == Some(1.0), "no metric");
        ensure!(!status.json.to_string().contains(SECRET) && !ready.contains(SECRET), "a value is told");
        Ok(())
    })
}

fn retry(sandbox: &Sandbox) -> anyhow::Result<()> {
    let (exit, output) = sandbox.materializer_command(&["retry"])?;
    ensure!(exit.success(), "{output}");
    Ok(())
}

#[test]
fn a_poisoned_transaction_stops_the_stream_until_it_is_mended() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "poison")?;
    settle(&mut client, &source, "u_1", 100)?;

    // Many transactions in one go, of which the one in the middle is bad: those before it are materialized.
    source.run("insert into templates values ('before', 'B', '{}', true)")?;
    source.run(&format!(
        "begin; update tasks set title = '{SECRET}' where assignee_id = 'u_1';
         insert into projects (name, owner_id, budget) values ('{SECRET}', 'u_1', 'NaN'); commit"
    ))?;
    source.run("insert into templates values ('after', 'A', '{}', true)")?;
    is_stopped(&sandbox, "quarantine_poison", "public.projects")?;
    eventually(PATIENCE, || {
        client.sync(100)?;
        let held = |key| client.contents_of("templates_public", "templates", key).is_some();
        ensure!(held("before") && !held("after"), "before: {}, after: {}", held("before"), held("after"));
        Ok(())
    })?;
    let tasks = client.contents("tasks_user:u_1", "tasks");
    ensure!(tasks.values().all(|row| !format!("{row:?}").contains(SECRET)), "a part of the bad transaction was served");
    // What is durable goes on being served, to new clients too; that it is old shows as lag.
    let mut fresh = sandbox.client("u_1", "poison-fresh")?;
    fresh.sync(100)?;
    ensure!(fresh.rows == client.rows && sandbox.pullers[0].readiness() == Some(200));
    let lag = || -> anyhow::Result<i64> { Ok(sandbox.status()?.json["lag"]["octets"].as_i64().unwrap_or_default()) };
    let before = lag()?;
    source.run("insert into templates select 'later_' || n, 'L', '{}', false from generate_series(1, 2000) n")?;
    ensure!(lag()? >= before + 100_000, "the lag does not grow: {before}, {}", lag()?);

    // Nothing is mended: it stops at the same transaction, and so it does after a death.
    let at = "select max(commit_lsn) from tributary.quarantine";
    let case = sandbox.state()?.number(at)?;
    retry(&sandbox)?;
    is_stopped(&sandbox, "quarantine_poison", "public.projects")?;
    sandbox.materializers[0].process.restart()?;
    is_stopped(&sandbox, "quarantine_poison", "public.projects")?;
    ensure!(sandbox.state()?.number(at)? == case, "another transaction is blamed");

    // The row is mended, and a reset leaves the bad transaction behind.
    source.run("update projects set budget = 1 where budget = 'NaN'")?;
    sandbox.reset()?;
    settle(&mut client, &source, "u_1", 100)?;
    eventually(PATIENCE, || {
        ensure!(sandbox.status()?.findings().is_empty(), "{}", sandbox.status()?.json);
        ensure!(
            metric(&sandbox.materializers[0], "tributary_quarantine{reason=\"poison\"}") == Some(0.0),
            "the metric stays"
        );
        Ok(())
    })?;

    // A cause that can be mended in place: a captured row that somebody removed, and puts back.
    let state = sandbox.state()?;
    let row = "tributary_data.\"public.documents\" where tributary_row_id = (select min(tributary_row_id) from tributary_data.\"public.documents\")";
    state.run(&format!("create table kept as select * from {row}; delete from {row}"))?;
    source.run("update documents set title = title || '!'")?;
    source.run("insert into templates values ('mended', 'M', '{}', true)")?;
    is_stopped(&sandbox, "quarantine_poison", "public.documents")?;
    state.run("insert into tributary_data.\"public.documents\" select * from kept; drop table kept")?;
    retry(&sandbox)?;
    agree(&sandbox, &mut client, &source, "poison-mended")?;
    ensure!(sandbox.status()?.findings().is_empty(), "{}", sandbox.status()?.json);

    for log in fs::read_dir(sandbox.dir().join("log"))? {
        let log = log?.path();
        let name = log.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // PostgreSQL's own log is the operator's.
        ensure!(name == "postgres.log" || !fs::read_to_string(&log)?.contains(SECRET), "a value stands in {name}");
    }
    Ok(())
}

//! Retention: expiry, compaction and floors (contract: retention). Time is shifted by a setting.

use std::time::Duration;

use anyhow::ensure;
use tributary_tests::client::ClientError;
use tributary_tests::expected;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

const SCOPE: &str = "tasks_user:u_1";
const ROWS: &str = "tasks where assignee_id = 'u_1' and not archived";

fn markers(sandbox: &Sandbox) -> anyhow::Result<i64> {
    let sql = "select count(*) from tributary.scope_entry e join tributary.scope s using (scope_no)
        where not present and scope_id = 'tasks_user:u_1'";
    sandbox.state()?.number(sql)
}

/// Delete markers stay while a client that has not acknowledged them may need them, and go when all have; a cursor
/// below the floor is stale, one at it is not; digests do not notice.
#[test]
fn markers_go_when_every_client_acknowledged_them() -> anyhow::Result<()> {
    let options = Options { materializer_args: ["--lease-seconds", "1"].map(Into::into).into(), ..Options::default() };
    let sandbox = Sandbox::start(options)?;
    let source = sandbox.source()?;
    let mut quick = sandbox.client("u_1", "quick")?;
    let mut slow = sandbox.client("u_1", "slow")?;
    quick.sync(500)?;
    slow.sync(500)?;
    // Rebuild sessions of both hold the floor for a day; here they are over.
    sandbox.state()?.run("delete from tributary.rebuild_session")?;

    source.run("delete from tasks where assignee_id = 'u_1' and id % 2 = 0")?;
    eventually(Duration::from_secs(20), || {
        quick.sync(500)?;
        expected::compare(&quick, &source, SCOPE, "tasks", ROWS)
    })?;
    // Acknowledged by one of two: the markers have to stay.
    quick.sync(500)?;
    let before = markers(&sandbox)?;
    ensure!(before > 0, "there is nothing to compact");
    std::thread::sleep(Duration::from_secs(2));
    ensure!(markers(&sandbox)? == before, "markers that a client has not acknowledged were removed");

    let old_cursor = slow.scopes.get(SCOPE).cloned().flatten();
    slow.sync(500)?;
    let delivered = slow.scopes.get(SCOPE).cloned().flatten();
    let computed = "select string_agg(commit_lsn || '/' || ordinal, ',' order by scope_no) from tributary.scope_digest";
    let digests = sandbox.state()?.text(computed)?;
    slow.sync(500)?;
    eventually(Duration::from_secs(20), || {
        ensure!(markers(&sandbox)? == 0, "markers are left");
        ensure!(sandbox.state()?.number("select count(*) from tributary.departed_row")? == 0, "departed rows are left");
        Ok(())
    })?;

    // At the floor and above it nothing changes, and the content is the same content.
    slow.scopes.insert(SCOPE.into(), delivered);
    let page = slow.pull_page(500)?;
    ensure!(!page.has_more && slow.scopes_to_rebuild().is_empty(), "a cursor at the floor was taken for stale");
    ensure!(sandbox.state()?.text(computed)? == digests, "compaction changed the content position of a scope");
    // Below it the scope is rebuilt, and converges.
    slow.scopes.insert(SCOPE.into(), old_cursor);
    slow.pull_page(500)?;
    ensure!(slow.scopes_to_rebuild() == [SCOPE], "a cursor below the floor was resumed");
    slow.sync(500)?;
    expected::compare(&slow, &source, SCOPE, "tasks", ROWS)?;
    // A row that comes back after its marker is gone is delivered like any other.
    source.run("insert into tasks (id, project_id, assignee_id, title) values (1000002, 1, 'u_1', 'back')")?;
    eventually(Duration::from_secs(20), || {
        quick.sync(500)?;
        expected::compare(&quick, &source, SCOPE, "tasks", ROWS)
    })?;
    Ok(())
}

/// A client that acknowledges nothing for the stale interval does not hold markers any longer; it reconnects with a
/// new generation, rebuilds and converges.
#[test]
fn a_silent_client_expires_and_comes_back() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options {
        materializer_args: ["--lease-seconds", "1"].map(Into::into).into(),
        ..Options::default()
    })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "silent")?;
    client.sync(500)?;
    client.sync(500)?;
    let generation = client.generation;
    source.run("delete from tasks where assignee_id = 'u_1' and id % 2 = 0")?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(markers(&sandbox)? > 0, "markers of an unexpired client were removed");

    // 31 days later.
    let launch = &mut sandbox.materializers[0];
    launch.process.set_env("TRIBUTARY_CLOCK_OFFSET_SECONDS", "2678400");
    launch.process.restart()?;
    eventually(Duration::from_secs(20), || {
        ensure!(markers(&sandbox)? == 0, "markers are left");
        Ok(())
    })?;
    match client.pull_page(500) {
        Err(ClientError::Api { status: 409, code, .. }) => ensure!(code == "client_generation_expired", "{code}"),
        other => anyhow::bail!("an expired generation was served: {other:?}"),
    }
    // The clocks agree again, else the new generation would be a month old at once.
    sandbox.materializers[0].process.set_env("TRIBUTARY_CLOCK_OFFSET_SECONDS", "0");
    sandbox.materializers[0].process.restart()?;
    client.connect()?;
    ensure!(client.generation > generation, "the generation did not move");
    ensure!(client.scopes.values().all(Option::is_none), "a cursor outlived its generation");
    client.sync(500)?;
    expected::compare(&client, &source, SCOPE, "tasks", ROWS)?;
    Ok(())
}

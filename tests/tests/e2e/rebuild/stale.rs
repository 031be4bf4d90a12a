//! ADR 003, "Rebuild token dispatch and expiry": each cause by which a session is over is 409, and nothing else.

use anyhow::ensure;
use tributary_tests::client::{Client, Rebuild};
use tributary_tests::database::Database;
use tributary_tests::sandbox::Options;

use super::{Boxes, items, ok, post, refusal, restart_required};

/// Begins a rebuild, lets `cause` happen, and sees the continuation refused; then a new attempt begins at once, unless
/// `cause` says that it cannot.
fn over(cause: impl FnOnce(&mut Boxes, &Database, &mut Client) -> anyhow::Result<Begins>) -> anyhow::Result<()> {
    let mut boxes = Boxes::start_with(&items("u_1", 1, 5), Options { pullers: 1, ..Options::default() })?;
    let mut client = boxes.client("u_1", "stale")?;
    let mut rebuild = boxes.begun(&client, 2)?;
    let state = boxes.sandbox.state()?;
    let begins = cause(&mut boxes, &state, &mut client)?;
    let before = super::dump(&state)?;
    refused(&client, &rebuild)?;
    // A lapsed session is over for any page size.
    rebuild.limit = 3;
    refused(&client, &rebuild)?;
    ensure!(super::dump(&state)? == before, "a refusal moved something");
    match begins {
        Begins::Now => {
            boxes.begun(&client, 2)?;
            // Also under the old id: what it named is over.
            (rebuild.cursor, rebuild.limit) = (None, 2);
            ok(&post(&client, &client.rebuild_request(&rebuild))?)?;
        }
        Begins::Never => {}
    }
    Ok(())
}

/// Whether a new rebuild can begin in the state that the test made up.
enum Begins {
    Now,
    Never,
}

fn refused(client: &Client, rebuild: &Rebuild) -> anyhow::Result<()> {
    let refusal = refusal(&post(client, &client.rebuild_request(rebuild))?)?;
    ensure!(refusal == restart_required(), "{refusal:?}");
    Ok(())
}

#[test]
fn s_04_stale_when_24_hours_are_over() -> anyhow::Result<()> {
    over(|boxes, _, _| boxes.shift_clock(0, 24 * 3600 + 1).map(|()| Begins::Now))
}

#[test]
fn s_04_stale_when_the_stream_generation_changes() -> anyhow::Result<()> {
    over(|boxes, state, _| {
        boxes.stop_materializers();
        state.run("update tributary.progress set stream_generation = gen_random_uuid()")?;
        Ok(Begins::Now)
    })
}

#[test]
fn s_04_stale_when_the_client_generation_changes() -> anyhow::Result<()> {
    over(|boxes, state, client| {
        let rebuild = boxes.begun(client, 2)?;
        state.run("update tributary.client set generation_expired = true")?;
        // The outer gate first: the envelope is not current.
        let gate = refusal(&post(client, &client.rebuild_request(&rebuild))?)?;
        ensure!(gate == (409, "client_generation_expired".to_owned()), "{gate:?}");
        let generation = client.generation;
        client.connect()?;
        ensure!(client.generation > generation, "connect did not renew the generation");
        Ok(Begins::Now)
    })
}

#[test]
fn s_04_stale_when_the_schema_changes() -> anyhow::Result<()> {
    over(|boxes, state, client| {
        boxes.stop_materializers();
        let rebuild = boxes.begun(client, 2)?;
        let hash = "ab".repeat(32);
        state.run(&format!(
            "insert into tributary.manifest (schema_version, schema_hash, document)
                select 2, decode('{hash}', 'hex'), document from tributary.manifest;
             insert into tributary.configuration (schema_version, registry)
                select 2, registry from tributary.configuration;
             update tributary.progress set configuration_no = (select max(configuration_no) from tributary.configuration)"
        ))?;
        // The outer gate first.
        let gate = refusal(&post(client, &client.rebuild_request(&rebuild))?)?;
        ensure!(gate == (422, "schema_mismatch".to_owned()), "{gate:?}");
        let manifest = client.manifest.as_mut().expect("connected");
        (manifest.version, manifest.hash) = (2, hash);
        // The rows of this made-up schema have no digests.
        Ok(Begins::Never)
    })
}

#[test]
fn s_04_stale_when_the_membership_generation_changes() -> anyhow::Result<()> {
    over(|_, state, _| {
        state.run("update tributary.scope set membership_generation = membership_generation + 1")?;
        Ok(Begins::Now)
    })
}

#[test]
fn s_04_stale_when_the_retention_lineage_changes() -> anyhow::Result<()> {
    over(|_, state, _| {
        state.run("update tributary.scope set retention_generation = retention_generation + 1")?;
        Ok(Begins::Now)
    })
}

#[test]
fn s_04_stale_when_writes_are_accepted() -> anyhow::Result<()> {
    over(|boxes, _, client| {
        let source = boxes.sandbox.source()?;
        let begun = boxes.begun(client, 2)?;
        let mut first = client.start_rebuild("box:u_1", 2);
        first.rebuild_id.clone_from(&begun.rebuild_id);
        boxes.stop_materializers();
        // Somebody else's accepted write is none of this client's concern.
        source.run("select tributary.accept_write('u_1', 'other'), tributary.accept_write('u_2', 'stale')")?;
        ok(&post(client, &client.rebuild_request(&begun))?)?;
        ok(&post(client, &client.rebuild_request(&first))?)?;
        source.run("select tributary.accept_write('u_1', 'stale')")?;
        // The epoch is checked before a stored page is replayed, and before the gate: the session is over for good.
        refused(client, &begun)?;
        // The first request would begin anew, and waits for the write instead of replaying what is older than it.
        let gate = refusal(&post(client, &client.rebuild_request(&first))?)?;
        ensure!(gate == (503, "capture_pending".to_owned()), "{gate:?}");
        boxes.sandbox.materializers[0].process.restart()?;
        boxes.sandbox.wait_until_ready()?;
        boxes.materialized(&source)?;
        Ok(Begins::Now)
    })
}

#[test]
fn s_04_stale_when_the_scope_is_assigned_no_more() -> anyhow::Result<()> {
    over(|_, state, client| {
        state.run("update tributary.client_scope set assigned = false")?;
        // A first request for it names a scope that the client does not have.
        let first = refusal(&post(client, &client.rebuild_request(&client.start_rebuild("box:u_1", 2)))?)?;
        ensure!(first == super::invalid(), "{first:?}");
        Ok(Begins::Never)
    })
}

#[test]
fn s_04_stale_when_the_session_is_removed() -> anyhow::Result<()> {
    over(|_, state, _| state.run("delete from tributary.rebuild_session").map(|()| Begins::Now))
}

#[test]
fn s_04_stale_when_the_snapshot_is_removed() -> anyhow::Result<()> {
    over(|_, state, _| {
        state.run("delete from tributary.rebuild_session; delete from tributary.snapshot")?;
        Ok(Begins::Now)
    })
}

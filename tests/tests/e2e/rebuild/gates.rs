//! ADR 003, "Rebuild token dispatch and expiry": the outer gates come before anything of the token; and the gate of
//! accepted writes.

use anyhow::ensure;
use tributary_tests::client::Client;
use tributary_tests::http::Http;

use super::{Boxes, items, ok, post, refusal, restart_required, with_cursor};

/// The refusals in the contract's order, each with a token that is forged and a limit that no page has.
#[test]
fn s_04_outer_gates_come_before_the_token() -> anyhow::Result<()> {
    let boxes = Boxes::start(&items("u_1", 1, 5))?;
    let mut client = boxes.client("u_1", "gates")?;
    let answer = |client: &Client| {
        let forged = with_cursor(client, &client.start_rebuild("box:u_1", 2), "v1.forged".to_owned());
        refusal(&post(client, &client.rebuild_request(&forged))?)
    };

    let nobody =
        Client { http: Http::new(boxes.url(0)?, None), client_id: "gates".into(), ..boxes.fresh("u_1", "gates")? };
    ensure!(answer(&nobody)? == (401, "auth_required".to_owned()));
    let other = Client { generation: Some(9), ..boxes.fresh("u_2", "gates")? };
    ensure!(answer(&other)? == (401, "auth_required".to_owned()), "the binding of client and user");
    // Also when the rest of the envelope is malformed.
    let request = other.rebuild_request(&other.start_rebuild("box:u_1", 0));
    ensure!(refusal(&post(&other, &request)?)? == (401, "auth_required".to_owned()));

    let generation = client.generation;
    let hash = client.manifest()?.hash.clone();
    for wrong in [generation.map(|g| g + 1), Some(77)] {
        client.generation = wrong;
        client.manifest.as_mut().expect("connected").hash = "0".repeat(64);
        ensure!(answer(&client)? == (409, "client_generation_expired".to_owned()), "generation before schema");
    }
    client.generation = generation;
    ensure!(answer(&client)? == (422, "schema_mismatch".to_owned()), "schema before token");
    client.manifest.as_mut().expect("connected").hash = hash;
    ensure!(answer(&client)? == super::invalid());

    // An unknown client has no generation.
    let stranger = Client { generation: Some(1), manifest: client.manifest.clone(), ..boxes.fresh("u_1", "stranger")? };
    ensure!(answer(&stranger)? == (409, "client_generation_expired".to_owned()));
    boxes.sandbox.state()?.run("update tributary.client set retired = true")?;
    client.generation = Some(77);
    ensure!(answer(&client)? == (409, "client_retired".to_owned()), "retirement before generation");
    Ok(())
}

#[test]
fn s_04_an_accepted_write_holds_up_a_rebuild_until_it_is_in_it() -> anyhow::Result<()> {
    let mut boxes = Boxes::start(&items("u_1", 1, 5))?;
    let source = boxes.sandbox.source()?;
    let state = boxes.sandbox.state()?;
    let mut client = boxes.client("u_1", "gate")?;
    boxes.stop_materializers();
    source.run(
        "begin; insert into items values (6, 'u_1', 'accepted'); select tributary.accept_write('u_1', 'gate'); commit",
    )?;
    let before = super::dump(&state)?;
    let rebuild = client.start_rebuild("box:u_1", 2);
    let request = client.rebuild_request(&rebuild);
    for _ in 0..3 {
        let gate = post(&client, &request)?;
        ensure!(refusal(&gate)? == (503, "capture_pending".to_owned()));
        ensure!(gate.retry_after.is_some());
    }
    ensure!(super::dump(&state)? == before, "a refusal moved something");
    ensure!(state.number("select count(*) from tributary.rebuild_session")? == 0, "a session behind the gate");
    // A forged token is told before the gate.
    let forged = with_cursor(&client, &rebuild, "v1.forged".to_owned());
    ensure!(refusal(&post(&client, &client.rebuild_request(&forged))?)? == super::invalid());
    // A rolled back write leaves nothing to wait for.
    let mut other = boxes.client("u_1", "other")?;
    source.run("begin; select tributary.accept_write('u_1', 'other'); rollback")?;
    other.rebuild("box:u_1", 100)?;

    boxes.sandbox.materializers[0].process.restart()?;
    boxes.sandbox.wait_until_ready()?;
    boxes.materialized(&source)?;
    // The same attempt goes through, and the write is in it.
    client.rebuild("box:u_1", 2)?;
    ensure!(client.contents_of("box:u_1", "items", "6").is_some(), "the accepted write is missing");
    ok(&post(&client, &request)?)?;
    Ok(())
}

#[test]
fn s_04_every_page_is_refused_once_a_write_is_accepted() -> anyhow::Result<()> {
    let boxes = Boxes::start(&items("u_1", 1, 5))?;
    let source = boxes.sandbox.source()?;
    let mut client = boxes.client("u_1", "epoch")?;
    let exchanges = super::record(&mut client, "box:u_1", 2)?;
    source.run("select tributary.accept_write('u_1', 'epoch')")?;
    boxes.materialized(&source)?;
    for exchange in &exchanges[1..] {
        let page = client.http.post("/sync/rebuild", exchange.request.as_bytes())?;
        ensure!(refusal(&page)? == restart_required(), "the epoch is checked before a stored page is replayed");
    }
    // The first request begins another session: the epoch is one of its bindings.
    let first = client.http.post("/sync/rebuild", exchanges[0].request.as_bytes())?;
    ensure!(ok(&first)?.get("cursor") != ok(&exchanges[0].response)?.get("cursor"));
    Ok(())
}

//! The cursor bridge: what is stale by its schema alone goes on at its position, through connect and nowhere else
//! (ADR 003, "Stale versus forged cursor dispatch").

use std::collections::BTreeMap;

use anyhow::ensure;
use tributary_tests::client::Client;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::super::pull::{accept, changes_of, checkpoints, cursors_of, durable, materialized, raw, texts, with};
use super::{COMMENTS, TASKS, TEMPLATES, action, answered, class_2, class_3, class_4, publish, refusal, updates};

/// A client that has everything but the newest changes of its tasks and comments; nobody writes any more.
fn behind(client_id: &str) -> anyhow::Result<(Sandbox, Client)> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let mut client = sandbox.client("u_1", client_id)?;
    client.sync(500)?;
    // Presented once, so that there are checkpoints.
    client.pull_all(500)?;
    sandbox.source()?.run("update tasks set priority = priority + 1; update comments set body = body || '!'")?;
    materialized(&sandbox)?;
    sandbox.materializers[0].process.kill();
    Ok((sandbox, client))
}

/// The connect request of a client with other cursors.
fn connect_with(request: &Json, cursors: &BTreeMap<String, Option<String>>) -> Json {
    let known = cursors.iter().map(|(scope, cursor)| {
        (scope.clone(), Json::object([("cursor", cursor.as_deref().map_or(Json::Null, Json::text))]))
    });
    with(request, &["known_scopes"], Json::Object(known.collect()))
}

fn current_schema(body: &Json) -> Json {
    let schema = body.get("schema").unwrap();
    Json::object([("version", schema.get("version").unwrap().clone()), ("hash", schema.get("hash").unwrap().clone())])
}

#[test]
fn a_cursor_of_an_older_schema_goes_on_at_its_position() -> anyhow::Result<()> {
    let (sandbox, mut client) = behind("bridged")?;
    let state = sandbox.state()?;
    let expected = changes_of(&accept(&client, "/sync/pull", &client.pull_request(1000))?);
    ensure!(expected.iter().any(|change| change[0] == TASKS) && expected.iter().any(|change| change[0] == COMMENTS));
    publish(&state, class_2("tasks"))?;
    publish(&state, class_2("templates"))?;
    let acknowledged = checkpoints(&state, "bridged")?;
    let (old, rebuilds) = (client.scopes.clone(), client.rebuilds.clone());

    // Pull knows no bridge: the old schema is a mismatch, the current one makes the cursors stale.
    let (status, code) = super::super::pull::send(&client, "/sync/pull", raw(&client.pull_request(1000)).as_bytes());
    ensure!((status, code.as_str()) == (422, "schema_mismatch"));
    let request = client.connect_request();
    let body = answered(&client, &request)?;
    let unbridged = with(&client.pull_request(1000), &["schema"], current_schema(&body));
    let pulled = accept(&client, "/sync/pull", &unbridged)?;
    ensure!(texts(&pulled, "rebuild").iter().eq(old.keys()) && cursors_of(&pulled).is_empty());
    ensure!(changes_of(&pulled).is_empty() && checkpoints(&state, "bridged")? == acknowledged);

    client.connect()?;
    ensure!(client.scopes.keys().eq(old.keys()));
    ensure!(client.scopes.iter().all(|(scope, cursor)| cursor.is_some() && old[scope] != *cursor), "other tokens");
    ensure!(checkpoints(&state, "bridged")? == acknowledged, "connect acknowledges no cursor");
    let pulled = accept(&client, "/sync/pull", &client.pull_request(1000))?;
    ensure!(changes_of(&pulled) == expected, "the same position");
    client.sync(500)?;
    ensure!(client.rebuilds == rebuilds, "nothing is rebuilt");
    Ok(())
}

#[test]
fn a_lost_answer_repeats_itself() -> anyhow::Result<()> {
    let (sandbox, mut client) = behind("repeated")?;
    publish(&sandbox.state()?, class_3("templates"))?;
    let request = client.connect_request();
    let old = client.scopes.clone();
    let first = answered(&client, &request)?;
    let again = answered(&client, &request)?;
    for body in [&first, &again] {
        ensure!(action(body) == "rebuild_local" && texts(body, "affected_scopes") == [TEMPLATES]);
        ensure!(updates(body).iter().all(|(scope, cursor)| cursor.is_none() == (scope == TEMPLATES)));
    }
    // The manifest was taken and the cursors were not: the cursor's own binding decides.
    let taken = with(&request, &["schema"], current_schema(&first));
    let body = answered(&client, &connect_with(&taken, &old))?;
    ensure!(action(&body) == "none");
    ensure!(updates(&body).keys().eq(old.keys()));
    ensure!(updates(&body).iter().all(|(scope, cursor)| cursor.is_none() == (scope == TEMPLATES)));
    client.connect()?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "none" && updates(&body).is_empty(), "what is current stays as it is");
    client.sync(500)?;
    Ok(())
}

#[test]
fn a_cursor_from_before_class_4_is_not_bridged() -> anyhow::Result<()> {
    let (sandbox, client) = behind("parted")?;
    let state = sandbox.state()?;
    let old = client.scopes.clone();
    publish(&state, class_4("documents"))?;
    let fresh = sandbox.client("u_1", "fresh")?;
    let current = current_schema(&answered(&fresh, &fresh.connect_request())?);
    let body = answered(&client, &connect_with(&with(&client.connect_request(), &["schema"], current), &old))?;
    ensure!(action(&body) == "none" && updates(&body).keys().eq(old.keys()));
    ensure!(updates(&body).values().all(Option::is_none));
    Ok(())
}

#[test]
fn a_cursor_that_another_binding_makes_stale_is_not_bridged() -> anyhow::Result<()> {
    let (sandbox, client) = behind("stale")?;
    let state = sandbox.state()?;
    publish(&state, class_2("tasks"))?;
    let acknowledged = checkpoints(&state, "stale")?;
    let newest = state.number("select boundary_lsn from tributary.progress")?;
    let floor = format!("floor_lsn = {newest}, floor_ordinal = 0");
    for (set, undo) in [
        ("membership_generation = membership_generation + 1", "membership_generation = membership_generation - 1"),
        ("retention_generation = retention_generation + 1", "retention_generation = retention_generation - 1"),
        (floor.as_str(), "floor_lsn = 0, floor_ordinal = 0"),
    ] {
        let update = |set: &str| state.run(&format!("update tributary.scope set {set} where scope_id = '{TASKS}'"));
        update(set)?;
        let body = answered(&client, &client.connect_request())?;
        ensure!(action(&body) == "replace" && updates(&body).keys().eq(client.scopes.keys()), "{set}");
        ensure!(updates(&body).iter().all(|(scope, cursor)| cursor.is_none() == (scope == TASKS)), "{set}");
        update(undo)?;
    }
    ensure!(checkpoints(&state, "stale")? == acknowledged);
    state.run("update tributary.client set generation_expired = true where client_id = 'stale'")?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "replace" && updates(&body).values().all(Option::is_none), "a renewed generation");
    Ok(())
}

#[test]
fn a_forged_cursor_is_refused_whatever_the_schema() -> anyhow::Result<()> {
    let (sandbox, client) = behind("forged")?;
    let state = sandbox.state()?;
    publish(&state, class_2("tasks"))?;
    let before = durable(&state)?;
    let misbound = client.scopes[COMMENTS].clone().unwrap();
    let forged = format!("{}A", client.scopes[TASKS].as_deref().unwrap());
    for token in [misbound, forged] {
        let request = with(&client.connect_request(), &["known_scopes", TASKS, "cursor"], Json::text(token));
        ensure!(refusal(&client, &request)? == (400, "invalid_request".to_owned()));
    }
    ensure!(durable(&state)? == before);
    Ok(())
}

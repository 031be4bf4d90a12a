//! The contract's dispatch, a test for each row, in its order.

use anyhow::ensure;
use tributary_tests::client::Client;
use tributary_tests::http::Http;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::super::pull::{durable, texts, with};
use super::{
    COMMENTS, TASKS, TEMPLATES, action, answered, ask, class_2, class_3, class_4, defines, publish, reference, refusal,
    reset, updates,
};

fn synced(sandbox: &Sandbox, client_id: &str) -> anyhow::Result<Client> {
    let mut client = sandbox.client("u_1", client_id)?;
    client.sync(500)?;
    Ok(client)
}

/// A sandbox whose materializer writes no more, and a client that has everything.
fn settled(client_id: &str) -> anyhow::Result<(Sandbox, Client)> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox, client_id)?;
    sandbox.materializers[0].process.kill();
    Ok((sandbox, client))
}

#[test]
fn no_or_bad_credentials_or_another_users_client_id_is_auth_required() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox, "mine")?;
    let url = sandbox.pullers[0].url.clone().unwrap();
    let before = durable(&sandbox.state()?)?;
    let request = client.connect_request();
    // Before anything else of the envelope is looked at.
    let malformed = with(&with(&request, &["platform"], Json::int(1)), &["protocol_version"], Json::int(2));
    for token in [None, Some("not a token".to_owned()), Some(sandbox.token("u_2")?)] {
        let other = Client { http: Http::new(&url, token.as_deref()), ..sandbox.client("u_1", "mine")? };
        for request in [&request, &malformed] {
            ensure!(refusal(&other, request)? == (401, "auth_required".to_owned()));
        }
    }
    ensure!(durable(&sandbox.state()?)? == before);
    Ok(())
}

#[test]
fn another_protocol_version_is_upgrade_required() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox, "old")?;
    let before = durable(&sandbox.state()?)?;
    // Before the rest of the envelope.
    let malformed = with(&client.connect_request(), &["platform"], Json::int(1));
    for received in [2, 4] {
        for request in [client.connect_request(), malformed.clone()] {
            let (status, body) = ask(&client, &with(&request, &["protocol_version"], Json::int(received)))?;
            let error = body.get("error").unwrap();
            let number = |name: &str| error.get(name).and_then(Json::as_int);
            ensure!(status == 426 && error.get("code").and_then(Json::as_text) == Some("upgrade_required"));
            ensure!(number("required_protocol_version") == Some(3));
            ensure!(number("received_protocol_version") == Some(received));
        }
    }
    ensure!(durable(&sandbox.state()?)? == before);
    Ok(())
}

#[test]
fn a_malformed_envelope_is_invalid_request_and_a_malformed_reference_alone_is_invalid_schema_reference()
-> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox, "malformed")?;
    let before = durable(&sandbox.state()?)?;
    let request = client.connect_request();
    let bad = Json::object([("version", Json::int(1)), ("hash", Json::text("x"))]);
    let (status, body) = ask(&client, &with(&request, &["schema"], bad.clone()))?;
    let error = body.get("error").unwrap();
    ensure!(status == 400 && error.get("code").and_then(Json::as_text) == Some("invalid_schema_reference"));
    ensure!(error.get("received_schema") == Some(&bad));
    for envelope in [with(&request, &["platform"], Json::int(1)), with(&request, &["more"], Json::int(1))] {
        for request in [&envelope, &with(&envelope, &["schema"], bad.clone())] {
            ensure!(refusal(&client, request)? == (400, "invalid_request".to_owned()));
        }
    }
    ensure!(durable(&sandbox.state()?)? == before);
    Ok(())
}

#[test]
fn the_fresh_sentinel_with_a_generation_a_known_client_or_a_reset_is_invalid_schema_reference() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let fresh = sandbox.client("u_1", "known")?.connect_request();
    synced(&sandbox, "known")?;
    let before = durable(&sandbox.state()?)?;
    let client = sandbox.client("u_1", "unknown")?;
    let unknown = client.connect_request();
    for request in [
        with(&unknown, &["client_generation"], Json::int(1)),
        with(&unknown, &["schema_reset"], Json::Bool(true)),
        fresh,
    ] {
        ensure!(refusal(&client, &request)? == (400, "invalid_schema_reference".to_owned()));
    }
    ensure!(durable(&sandbox.state()?)? == before);
    Ok(())
}

#[test]
fn a_fresh_client_with_the_fresh_sentinel_gets_replace() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let mut client = sandbox.client("u_1", "fresh")?;
    let body = client.connect()?;
    ensure!(action(&body) == "replace" && defines(&body) == Some(reference(&body)));
    ensure!(updates(&body).is_empty() && client.scopes.contains_key(TASKS));
    client.sync(500)?;
    Ok(())
}

#[test]
fn the_exact_current_schema_gets_none() -> anyhow::Result<()> {
    let (sandbox, client) = settled("current")?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "none" && defines(&body).is_none() && updates(&body).is_empty());
    // The hash counts, not the version alone.
    let other = with(&client.connect_request(), &["schema", "hash"], Json::text("0".repeat(64)));
    ensure!(action(&answered(&client, &other)?) == "unsupported:unknown_schema_lineage");
    drop(sandbox);
    Ok(())
}

#[test]
fn known_history_through_class_2_only_gets_replace() -> anyhow::Result<()> {
    let (sandbox, mut client) = settled("second")?;
    let state = sandbox.state()?;
    for table in ["tasks", "templates"] {
        publish(&state, class_2(table))?;
        let body = answered(&client, &client.connect_request())?;
        ensure!(action(&body) == "replace" && defines(&body) == Some(reference(&body)), "{}", action(&body));
        ensure!(body.get("affected_scopes").is_none());
        ensure!(updates(&body).keys().eq(client.scopes.keys()) && updates(&body).values().all(Option::is_some));
    }
    let rebuilds = client.rebuilds.clone();
    client.connect()?;
    client.sync(500)?;
    ensure!(client.rebuilds == rebuilds, "nothing is rebuilt");
    Ok(())
}

#[test]
fn known_history_with_class_3_that_affects_no_assigned_scope_gets_replace() -> anyhow::Result<()> {
    let files = crate::membership::files::Files::new()?;
    let schema = "
        create table notes (id int primary key, owner text);
        create table logs (id int primary key, owner text);
        insert into notes values (1, 'u_1'), (2, 'u_2');
        insert into logs values (1, 'u_2')";
    let config = "
tables:
  - relation: public.notes
  - relation: public.logs
scopes:
  - scope: 'notes:{owner}'
    rows: SELECT * FROM notes
  - scope: 'logs:{owner}'
    rows: SELECT * FROM logs
assignments:
  - scope: 'notes:{user_id}'
  - scope: 'logs:{owner}'
    for: SELECT owner FROM logs WHERE owner = :user_id
";
    let (config, schema) = (files.write("sync.yaml", config)?, files.write("schema.sql", schema)?);
    let options = Options { config: Some(config), schema: Some(vec![schema]), ..Options::default() };
    let mut sandbox = Sandbox::start(options)?;
    let mut client = synced(&sandbox, "unaffected")?;
    let mut other = sandbox.client("u_2", "affected")?;
    other.sync(500)?;
    sandbox.materializers[0].process.kill();
    let rebuilds = client.rebuilds.clone();
    publish(&sandbox.state()?, class_3("logs"))?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "replace" && body.get("affected_scopes").is_none(), "{}", action(&body));
    ensure!(defines(&body) == Some(reference(&body)));
    ensure!(updates(&body).keys().eq(client.scopes.keys()) && updates(&body).values().all(Option::is_some));
    client.connect()?;
    client.sync(500)?;
    ensure!(client.rebuilds == rebuilds, "nothing is rebuilt");
    // The same transition affects whoever has the scope.
    ensure!(texts(&answered(&other, &other.connect_request())?, "affected_scopes") == ["logs:u_2"]);
    Ok(())
}

#[test]
fn known_history_with_class_3_that_affects_assigned_scopes_gets_rebuild_local_of_exactly_those() -> anyhow::Result<()> {
    let (sandbox, mut client) = settled("third")?;
    let state = sandbox.state()?;
    publish(&state, class_2("tasks"))?;
    publish(&state, class_3("comments"))?;
    publish(&state, class_2("templates"))?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "rebuild_local" && defines(&body) == Some(reference(&body)), "{}", action(&body));
    // Of a rule over the table alone and of one with a join, whose target it is; tasks are joined and not delivered.
    let expected: Vec<&String> =
        client.scopes.keys().filter(|id| *id == COMMENTS || id.starts_with("project:")).collect();
    ensure!(expected.len() > 1, "{:?}", client.scopes.keys());
    let affected = texts(&body, "affected_scopes");
    ensure!(affected.iter().eq(expected.iter().copied()), "{affected:?}");
    ensure!(updates(&body).keys().eq(client.scopes.keys()));
    for (scope, cursor) in updates(&body) {
        ensure!(cursor.is_none() == affected.contains(&scope), "{scope}");
    }
    let mut rebuilds = client.rebuilds.clone();
    client.connect()?;
    client.sync(500)?;
    for scope in affected {
        *rebuilds.entry(scope).or_default() += 1;
    }
    ensure!(client.rebuilds == rebuilds, "only the affected scopes are rebuilt");
    Ok(())
}

#[test]
fn class_3_of_every_transition_on_the_way_affects() -> anyhow::Result<()> {
    let (sandbox, client) = settled("several")?;
    let state = sandbox.state()?;
    publish(&state, class_3("templates"))?;
    publish(&state, class_3("tasks"))?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "rebuild_local" && texts(&body, "affected_scopes") == [TASKS, TEMPLATES]);
    Ok(())
}

#[test]
fn an_unknown_lineage_gets_unsupported() -> anyhow::Result<()> {
    let (sandbox, client) = settled("unknown")?;
    let state = sandbox.state()?;
    let older = client.connect_request();
    publish(&state, class_2("tasks"))?;
    let before = durable(&state)?;
    for (member, value) in [
        ("hash", Json::text("0".repeat(64))),
        // A known hash, of another version.
        ("version", Json::int(2)),
        ("version", Json::int(99)),
    ] {
        let body = answered(&client, &with(&older, &["schema", member], value))?;
        ensure!(action(&body) == "unsupported:unknown_schema_lineage");
        ensure!(defines(&body).is_none() && body.get("affected_scopes").is_none() && updates(&body).is_empty());
    }
    ensure!(durable(&state)? == before, "nothing is written for a client that cannot go on");
    Ok(())
}

#[test]
fn known_history_through_class_4_gets_unsupported() -> anyhow::Result<()> {
    let (sandbox, client) = settled("fourth")?;
    let state = sandbox.state()?;
    publish(&state, class_4("documents"))?;
    publish(&state, class_2("tasks"))?;
    let before = durable(&state)?;
    let body = answered(&client, &client.connect_request())?;
    ensure!(action(&body) == "unsupported:incompatible_schema_transition");
    ensure!(defines(&body).is_none() && body.get("affected_scopes").is_none() && updates(&body).is_empty());
    ensure!(durable(&state)? == before, "nothing is written for a client that cannot go on");
    Ok(())
}

#[test]
fn schema_reset_of_a_continuing_client_gets_rebuild_local_for_all_assigned_scopes() -> anyhow::Result<()> {
    let (sandbox, client) = settled("reset")?;
    let state = sandbox.state()?;
    let all = |request: &Json, what: &str| -> anyhow::Result<()> {
        let body = answered(&client, request)?;
        ensure!(action(&body) == "rebuild_local" && defines(&body) == Some(reference(&body)), "{what}");
        ensure!(texts(&body, "affected_scopes").iter().eq(client.scopes.keys()), "{what}");
        ensure!(updates(&body).keys().eq(client.scopes.keys()), "{what}");
        ensure!(updates(&body).values().all(Option::is_none), "{what}");
        Ok(())
    };
    all(&reset(&client), "the current schema")?;
    let unknown = with(&reset(&client), &["schema", "hash"], Json::text("0".repeat(64)));
    all(&unknown, "an unknown lineage")?;
    publish(&state, class_2("tasks"))?;
    all(&reset(&client), "through class 2")?;
    publish(&state, class_4("documents"))?;
    all(&reset(&client), "through class 4: a known client has no other way on")?;
    Ok(())
}

#[test]
fn schema_reset_without_an_assigned_scope_gets_replace() -> anyhow::Result<()> {
    let files = crate::membership::files::Files::new()?;
    let schema = files.write("schema.sql", "create table notes (id int primary key, owner text)")?;
    let config = "
tables:
  - relation: public.notes
scopes:
  - scope: 'notes:{owner}'
    rows: SELECT * FROM notes
assignments:
  - scope: 'notes:{owner}'
    for: SELECT owner FROM notes WHERE owner = :user_id
";
    let config = files.write("sync.yaml", config)?;
    let sandbox = Sandbox::start(Options { config: Some(config), schema: Some(vec![schema]), ..Options::default() })?;
    let mut client = sandbox.client("u_1", "empty")?;
    client.connect()?;
    let body = answered(&client, &reset(&client))?;
    ensure!(action(&body) == "replace" && defines(&body) == Some(reference(&body)));
    ensure!(body.get("affected_scopes").is_none() && updates(&body).is_empty());
    Ok(())
}

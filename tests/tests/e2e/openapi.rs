//! `GET /openapi.json` describes the three endpoints exactly: real requests and answers, errors included, are what it
//! says, and what it does not say is no answer.

mod schema;

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tributary_tests::client::Client;
use tributary_tests::http::{Http, Response, get};
use tributary_tests::sandbox::{Options, Sandbox};

use self::schema::Description;

/// Asks, and holds request and answer against the description.
struct Described<'a> {
    description: &'a Description,
    /// `path status code` of every answer so far.
    seen: BTreeSet<String>,
}

impl Described<'_> {
    fn ask(&mut self, http: &Http, path: &str, body: &str) -> anyhow::Result<Response> {
        let response = http.post(path, body.as_bytes())?;
        self.answered(path, &response)?;
        let request = serde_json::from_str::<Value>(body);
        // What is accepted is described; what is described can still be refused for what it names.
        if response.status == 200 {
            self.description.request(path, &request?)?;
        }
        Ok(response)
    }

    fn answered(&mut self, path: &str, response: &Response) -> anyhow::Result<()> {
        let body: Value = serde_json::from_slice(&response.body)?;
        self.description.response(path, response.status, &body)?;
        let code = body["error"]["code"].as_str().unwrap_or("ok").to_owned();
        if response.status == 429 || response.status == 503 {
            ensure!(response.retry_after.is_some(), "{path} {code}: Retry-After");
        }
        self.seen.insert(format!("{path} {} {code}", response.status));
        Ok(())
    }
}

fn text(json: &tributary_tests::json::Json) -> anyhow::Result<String> {
    Ok(json.canonical()?)
}

#[test]
fn answers_are_what_openapi_json_says() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let base = sandbox.pullers[0].url.clone().context("a puller")?;
    let document = get(&format!("{base}/openapi.json"))?;
    ensure!((document.status, document.content_type.as_deref()) == (200, Some("application/json")));
    let description = Description::parse(&document.body)?;
    let mut described = Described { description: &description, seen: BTreeSet::new() };

    // A client's life, each answer applied by the reference client and described.
    let client = sandbox.client("u_1", "described")?;
    described.ask(&client.http, "/sync/connect", &text(&client.connect_request())?)?;
    // The answer was not applied, and the client is known now: the next is another installation.
    let mut client = Client { client_id: "described-2".to_owned(), ..client };
    client.connect()?;
    described.ask(&client.http, "/sync/connect", &text(&client.connect_request())?)?;
    let mut rebuild = client.start_rebuild("tasks_user:u_1", 20);
    while !rebuild.finished {
        described.ask(&client.http, "/sync/rebuild", &text(&client.rebuild_request(&rebuild))?)?;
        client.rebuild_page(&mut rebuild)?;
    }
    described.ask(&client.http, "/sync/pull", &text(&client.pull_request(20))?)?;
    client.sync(500)?;
    source.run(
        "update tasks set priority = 1; delete from tasks where id % 3 = 0; update documents set metadata = null",
    )?;
    crate::pull::materialized(&sandbox)?;
    for limit in [1, 20, 1000] {
        described.ask(&client.http, "/sync/pull", &text(&client.pull_request(limit))?)?;
    }
    let reset =
        super::pull::with(&client.connect_request(), &["schema_reset"], tributary_tests::json::Json::Bool(true));
    described.ask(&client.http, "/sync/connect", &text(&reset)?)?;
    let unknown = text(&client.connect_request())?.replace(&client.manifest()?.hash, &"0".repeat(64));
    described.ask(&client.http, "/sync/connect", &unknown)?;

    // Every error that a client can cause.
    let connect = text(&client.connect_request())?;
    let pull = text(&client.pull_request(10))?;
    let rebuild = text(&client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10)))?;
    let nobody = Http::new(&base, None);
    let hash = client.manifest()?.hash.clone();
    for (path, good) in [("/sync/connect", &connect), ("/sync/pull", &pull), ("/sync/rebuild", &rebuild)] {
        described.ask(&nobody, path, good)?;
        described.ask(&client.http, path, "{}")?;
        described.ask(&client.http, path, &good.replace(&hash, &"0".repeat(64)))?;
        described.ask(&client.http, path, &good.replace("\"hash\":\"", "\"hash\":\"x"))?;
        described.ask(&client.http, path, &good.replace("\"client_generation\":1", "\"client_generation\":2"))?;
        described.ask(&client.http, path, &good.replace("\"protocol_version\":3", "\"protocol_version\":4"))?;
        described.answered(path, &get(&format!("{base}{path}"))?)?;
        described.answered(path, &client.http.post_with(path, b"{}", &[("Content-Type", "text/plain")])?)?;
        let large = client.http.post(path, &vec![b' '; (1 << 20) + 1]);
        // The answer may come before all of the body was sent, and the connection end with it.
        if let Ok(large) = large {
            described.answered(path, &large)?;
        }
        state.run("update tributary.client set retired = true")?;
        described.ask(&client.http, path, good)?;
        state.run("update tributary.client set retired = false")?;
    }
    {
        let _paused = super::pull::Paused::materializer(&mut sandbox);
        source.run("select tributary.accept_write('u_1', 'described-2')")?;
        described.ask(&client.http, "/sync/pull", &pull)?;
        described.ask(&client.http, "/sync/rebuild", &rebuild)?;
    }
    crate::pull::materialized(&sandbox)?;
    let mut old = client.start_rebuild("comments_user:u_1", 5);
    client.rebuild_page(&mut old)?;
    state.run("update tributary.scope set membership_generation = membership_generation + 1 where scope_id = 'comments_user:u_1'")?;
    described.ask(&client.http, "/sync/rebuild", &text(&client.rebuild_request(&old))?)?;
    state.run("delete from tributary_data.\"public.tasks\"; delete from tributary.scope_digest")?;
    described.ask(&client.http, "/sync/pull", &pull)?;
    sandbox.postgres.process.signal(rustix::process::Signal::QUIT);
    ensure!(sandbox.postgres.process.ended_within(std::time::Duration::from_secs(10)));
    for (path, good) in [("/sync/connect", &connect), ("/sync/pull", &pull), ("/sync/rebuild", &rebuild)] {
        described.ask(&client.http, path, good)?;
    }
    for answer in [
        "/sync/connect 200 ok",
        "/sync/connect 400 invalid_request",
        "/sync/connect 400 invalid_schema_reference",
        "/sync/connect 401 auth_required",
        "/sync/connect 405 method_not_allowed",
        "/sync/connect 409 client_retired",
        "/sync/connect 415 unsupported_media_type",
        "/sync/connect 426 upgrade_required",
        "/sync/connect 503 temporary_unavailable",
        "/sync/pull 200 ok",
        "/sync/pull 400 invalid_request",
        "/sync/pull 401 auth_required",
        "/sync/pull 405 method_not_allowed",
        "/sync/pull 409 client_generation_expired",
        "/sync/pull 409 client_retired",
        "/sync/pull 415 unsupported_media_type",
        "/sync/pull 422 schema_mismatch",
        "/sync/pull 500 sync_integrity_failure",
        "/sync/pull 503 capture_pending",
        "/sync/pull 503 temporary_unavailable",
        "/sync/rebuild 200 ok",
        "/sync/rebuild 400 invalid_request",
        "/sync/rebuild 401 auth_required",
        "/sync/rebuild 409 client_generation_expired",
        "/sync/rebuild 409 client_retired",
        "/sync/rebuild 409 rebuild_restart_required",
        "/sync/rebuild 422 schema_mismatch",
        "/sync/rebuild 503 capture_pending",
        "/sync/rebuild 503 temporary_unavailable",
    ] {
        ensure!(described.seen.contains(answer), "{answer} was not seen: {:#?}", described.seen);
    }
    Ok(())
}

/// The validator refuses what is not described, or it proves nothing.
#[test]
fn what_is_not_described_is_refused() -> anyhow::Result<()> {
    let description = Description::parse(include_bytes!("../../../puller/openapi.json"))?;
    let checksum =
        serde_json::json!({"algorithm": "sha256", "version": 1, "encoding": "hex", "digest": "0".repeat(64)});
    let row = serde_json::json!({"id": "1"});
    let good = serde_json::json!({
        "changes": [
            {"scope": "s", "table": "t", "op": "upsert", "pk": row, "row": row, "row_checksum": checksum, "server_version": "v"},
            {"scope": "s", "table": "t", "op": "delete", "pk": row, "server_version": "v"}
        ],
        "scope_set_version": 1, "scope_cursors": {"s": "v1.x"}, "scope_updates": {"add": [{"id": "a", "cursor": null}], "remove": ["b"]},
        "rebuild": ["a"], "has_more": false, "checksums": {"s": checksum}
    });
    description.response("/sync/pull", 200, &good)?;
    let mut bad = Vec::new();
    let mut change = |pointer: &str, value: Value| {
        let mut other = good.clone();
        *other.pointer_mut(pointer).unwrap() = value;
        bad.push((format!("{pointer} replaced"), other));
    };
    change("/has_more", Value::Bool(true));
    change("/has_more", Value::Null);
    change("/scope_set_version", 1.5.into());
    change("/scope_set_version", (-1).into());
    change("/changes/0/op", "insert".into());
    change("/changes/1/op", "upsert".into());
    change("/changes/0/row_checksum/digest", "0".repeat(63).into());
    change("/changes/0/row_checksum/digest", "G".repeat(64).into());
    change("/changes/0/row_checksum/version", 2.into());
    change("/changes/0/pk", serde_json::json!({}));
    change("/changes/0/server_version", "".into());
    change("/scope_cursors/s", Value::Null);
    change("/scope_updates/add/0/cursor", "v1.x".into());
    change("/rebuild", serde_json::json!([""]));
    for member in ["changes", "scope_set_version", "scope_cursors", "scope_updates", "rebuild", "has_more", "checksums"]
    {
        let mut other = good.clone();
        other.as_object_mut().unwrap().remove(member);
        bad.push((format!("no {member}"), other));
    }
    let mut more = good.clone();
    more["more"] = 1.into();
    bad.push(("one more member".to_owned(), more));
    for (what, other) in bad {
        ensure!(description.response("/sync/pull", 200, &other).is_err(), "{what} passes");
    }
    ensure!(description.response("/sync/pull", 418, &good).is_err());
    let error = serde_json::json!({"error": {"code": "auth_required", "message": "m", "retryable": false}});
    description.response("/sync/pull", 401, &error)?;
    ensure!(description.response("/sync/pull", 400, &error).is_err(), "a code of another status");
    Ok(())
}

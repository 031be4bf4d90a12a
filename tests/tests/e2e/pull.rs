//! Pull, cursors and acknowledgement: the laws of ADR 003 and of the companion contract, against running programs.
//!
//! This module holds what the laws have in common: how a request is sent as raw text, what of the state must not change,
//! and how a test knows that everything committed is materialized.

#![expect(clippy::unwrap_used, reason = "a test that cannot read an answer has failed")]

mod accepted_writes;
mod acknowledgement;
mod assignment;
mod audit;
mod availability;
mod checksums;
mod cursors;
mod integrity;
pub mod model;
mod order_of_checks;
mod plan;
mod requests;
mod wire;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use tributary_tests::client::{Client, ClientError, answer};
use tributary_tests::database::Database;
use tributary_tests::http;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Sandbox, Service, eventually};

/// Everything that a request could change. `scope_digest` is a cache, entries and progress are the materializer's.
const DURABLE: [&str; 6] = ["client", "client_scope", "scope", "rebuild_session", "snapshot", "materialized_epoch"];

/// The rows of every table that a request could change, as text.
pub fn durable(state: &Database) -> anyhow::Result<BTreeMap<&'static str, String>> {
    DURABLE
        .iter()
        .map(|table| {
            let sql =
                format!("select coalesce(string_agg(t::text, E'\\n' order by t::text), '') from tributary.{table} t");
            Ok((*table, state.text(&sql)?))
        })
        .collect()
}

/// Status and code of an answer, `ok` of a success.
fn outcome(path: &str, response: &http::Response) -> (u16, String) {
    match answer(path, response) {
        Ok(_) => (200, "ok".to_owned()),
        Err(ClientError::Api { status, code, .. }) => (status, code),
        Err(error) => panic!("{path}: {error}"),
    }
}

/// Sends a body as this client and tells status and code.
pub fn send(client: &Client, path: &str, body: &[u8]) -> (u16, String) {
    outcome(path, &client.http.post(path, body).unwrap())
}

/// Sends a body as this client; the body of the 200 answer.
pub fn accept(client: &Client, path: &str, body: &Json) -> anyhow::Result<Json> {
    Ok(answer(path, &client.http.post(path, body.canonical()?.as_bytes())?)?)
}

/// Waits until everything that is committed in the source is materialized: a marker goes through the stream after it.
pub fn materialized(sandbox: &Sandbox) -> anyhow::Result<()> {
    let epoch = sandbox.source()?.number("select tributary.accept_write('marker', 'marker')")?;
    let state = sandbox.state()?;
    eventually(Duration::from_secs(30), || {
        let sql = "select coalesce(max(epoch), 0) from tributary.materialized_epoch where client_id = 'marker'";
        ensure!(state.number(sql)? >= epoch, "the stream is behind");
        Ok(())
    })
}

/// The durable checkpoints of a client by scope; scopes that it never acknowledged are missing.
pub fn checkpoints(state: &Database, client_id: &str) -> anyhow::Result<BTreeMap<String, (i64, i64)>> {
    let sql = "select s.scope_id, cs.acknowledged_lsn, cs.acknowledged_ordinal
        from tributary.client_scope cs
        join tributary.client c using (client_no)
        join tributary.scope s using (scope_no)
        where c.client_id = $1 and cs.acknowledged_lsn is not null";
    let rows = state.query(sql, &[&client_id])?;
    rows.iter().map(|row| Ok((row.try_get(0)?, (row.try_get(1)?, row.try_get(2)?)))).collect()
}

/// A value with the member at `path` replaced or added.
pub fn with(value: &Json, path: &[&str], new: Json) -> Json {
    let Json::Object(members) = value else { panic!("no object at {path:?}") };
    let mut members = members.clone();
    let inner = match path {
        [_] => new,
        [name, rest @ ..] => with(&members[*name], rest, new),
        [] => panic!("no path"),
    };
    members.insert(path[0].to_owned(), inner);
    Json::Object(members)
}

/// A value without the member at `path`.
fn without(value: &Json, path: &[&str]) -> Json {
    let Json::Object(members) = value else { panic!("no object at {path:?}") };
    let mut members = members.clone();
    match path {
        [name] => {
            members.remove(*name).unwrap();
        }
        [name, rest @ ..] => {
            let inner = without(&members[*name], rest);
            members.insert((*name).to_owned(), inner);
        }
        [] => panic!("no path"),
    }
    Json::Object(members)
}

/// The text of a value, numbers as they are written: requests that no correct client could send.
pub fn raw(value: &Json) -> String {
    match value {
        Json::Number(text) => text.clone(),
        Json::List(items) => format!("[{}]", items.iter().map(raw).collect::<Vec<_>>().join(",")),
        Json::Object(members) => {
            let members = members.iter().map(|(name, value)| format!("{}:{}", raw(&Json::text(name)), raw(value)));
            format!("{{{}}}", members.collect::<Vec<_>>().join(","))
        }
        other => other.canonical().unwrap(),
    }
}

/// The pull request of a client with other cursors.
pub fn pull_with(client: &Client, cursors: &BTreeMap<String, Option<String>>, limit: i64) -> Json {
    let scopes = cursors.iter().map(|(scope, cursor)| {
        (scope.clone(), Json::object([("cursor", cursor.as_deref().map_or(Json::Null, Json::text))]))
    });
    with(&client.pull_request(limit), &["scopes"], Json::Object(scopes.collect()))
}

/// The list of texts that is a member of an answer.
pub fn texts(body: &Json, name: &str) -> Vec<String> {
    let list = body.get(name).and_then(Json::as_list).unwrap();
    list.iter().map(|item| item.as_text().unwrap().to_owned()).collect()
}

/// The new cursors of an answer.
pub fn cursors_of(body: &Json) -> BTreeMap<String, String> {
    let cursors = body.get("scope_cursors").and_then(Json::as_object).unwrap();
    cursors.iter().map(|(scope, cursor)| (scope.clone(), cursor.as_text().unwrap().to_owned())).collect()
}

/// Scope, table, operation and key of each change of an answer, in order.
pub fn changes_of(body: &Json) -> Vec<[String; 4]> {
    let change = |change: &Json| {
        let text = |name: &str| change.get(name).and_then(Json::as_text).unwrap().to_owned();
        [text("scope"), text("table"), text("op"), raw(change.get("pk").unwrap())]
    };
    body.get("changes").and_then(Json::as_list).unwrap().iter().map(change).collect()
}

fn has_more(body: &Json) -> bool {
    body.get("has_more").and_then(Json::as_bool).unwrap()
}

/// The sum of a metric over the pullers, of the lines that begin like this.
fn metric(sandbox: &Sandbox, prefix: &str) -> anyhow::Result<u64> {
    let mut sum = 0;
    for puller in &sandbox.pullers {
        let text = String::from_utf8(http::get(&format!("{}/metrics", puller.admin_url))?.body)?;
        for line in text.lines().filter(|line| line.starts_with(prefix)) {
            sum += line.rsplit(' ').next().context("a value")?.parse::<u64>()?;
        }
    }
    Ok(sum)
}

/// Starts a service again with other environment variables.
fn restart_with(service: &mut Service, env: &[(&str, &str)]) -> anyhow::Result<()> {
    let mut launch = service.process.launch().clone();
    for (name, value) in env {
        launch.env.retain(|(known, _)| known != name);
        launch.env.push(((*name).to_owned(), value.into()));
    }
    service.process.stop(Signal::TERM, Duration::from_secs(10));
    service.process = launch.start()?;
    eventually(Duration::from_secs(20), || {
        ensure!(service.readiness() == Some(200), "{}", service.process.last_words());
        Ok(())
    })
}

/// Keeps the materializer from working until it is dropped.
pub struct Paused(u32);

impl Paused {
    pub fn materializer(sandbox: &mut Sandbox) -> Self {
        let process = &mut sandbox.materializers[0].process;
        process.signal(Signal::STOP);
        Self(process.pid())
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        let pid = i32::try_from(self.0).ok().and_then(rustix::process::Pid::from_raw);
        let _ = pid.map(|pid| rustix::process::kill_process(pid, Signal::CONT));
    }
}

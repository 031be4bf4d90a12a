//! The order of checks of pull and rebuild (contract.md section 5): of two things wrong at once, the earlier is told.

use anyhow::ensure;
use tributary_tests::client::Client;
use tributary_tests::database::Database;
use tributary_tests::http::Http;
use tributary_tests::json::Json;
use tributary_tests::pg::APPLICATION_DATABASE;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{Paused, durable, outcome, raw, send, with};

/// What can be wrong, in the order in which it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    NoIdentity,
    ContentType,
    ClientOfAnother,
    Envelope,
    Retired,
    Generation,
    Schema,
    Cursor,
    SourceAway,
    CapturePending,
}

const FAULTS: [Fault; 10] = [
    Fault::NoIdentity,
    Fault::ContentType,
    Fault::ClientOfAnother,
    Fault::Envelope,
    Fault::Retired,
    Fault::Generation,
    Fault::Schema,
    Fault::Cursor,
    Fault::SourceAway,
    Fault::CapturePending,
];

impl Fault {
    fn answer(self) -> (u16, String) {
        let (status, code) = match self {
            Self::NoIdentity | Self::ClientOfAnother => (401, "auth_required"),
            Self::ContentType => (415, "unsupported_media_type"),
            Self::Envelope | Self::Cursor => (400, "invalid_request"),
            Self::Retired => (409, "client_retired"),
            Self::Generation => (409, "client_generation_expired"),
            Self::Schema => (422, "schema_mismatch"),
            Self::SourceAway => (503, "temporary_unavailable"),
            Self::CapturePending => (503, "capture_pending"),
        };
        (status, code.to_owned())
    }
}

/// What is asked with faults: a synced client, a good pull, a good continuation of a rebuild and a good first request.
struct Asked {
    client: Client,
    good: [(&'static str, Json); 3],
    tokens: [String; 2],
    url: String,
    state: Database,
}

impl Asked {
    fn begin(sandbox: &Sandbox) -> anyhow::Result<Self> {
        let mut client = sandbox.client("u_1", "ordered")?;
        client.sync(500)?;
        let mut rebuild = client.start_rebuild("tasks_user:u_1", 10);
        client.rebuild_page(&mut rebuild)?;
        let first = client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10));
        let good = [
            ("/sync/pull", client.pull_request(10)),
            ("/sync/rebuild", client.rebuild_request(&rebuild)),
            ("/sync/rebuild", first),
        ];
        let tokens = [sandbox.token("u_1")?, sandbox.token("u_2")?];
        let url = sandbox.pullers[0].url.clone().unwrap_or_default();
        Ok(Self { client, good, tokens, url, state: sandbox.state()? })
    }

    /// Every request with any two of the faults, of which `standing` is that of the surroundings: the earlier is told, and
    /// nothing changes. The number of requests.
    fn in_pairs(&self, standing: Option<Fault>) -> anyhow::Result<usize> {
        let surroundings = [Fault::SourceAway, Fault::CapturePending];
        let before = durable(&self.state)?;
        let mut asked = 0;
        for (path, good) in &self.good {
            for one in FAULTS {
                for two in FAULTS.into_iter().filter(|two| *two >= one) {
                    if surroundings.into_iter().any(|f| (one == f || two == f) != (standing == Some(f))) {
                        continue;
                    }
                    let got = self.with_faults(path, good, [one, two])?;
                    // A continuation of before the accepted write is of an older epoch: that is checked with its
                    // bindings, and the gate after them.
                    let lapsed = one == Fault::CapturePending && good.get("cursor").is_some_and(|c| *c != Json::Null);
                    let expected = if lapsed { (409, "rebuild_restart_required".to_owned()) } else { one.answer() };
                    ensure!(got == expected, "{path} with {one:?} and {two:?}: {got:?}");
                    ensure!(durable(&self.state)? == before, "{path} with {one:?} and {two:?}: the state changed");
                    asked += 1;
                }
            }
        }
        Ok(asked)
    }

    fn with_faults(&self, path: &str, good: &Json, faults: [Fault; 2]) -> anyhow::Result<(u16, String)> {
        let has = |fault: Fault| faults.contains(&fault);
        let mut body = good.clone();
        if has(Fault::Envelope) {
            body = with(&body, &["limit"], Json::int(0));
        }
        if has(Fault::Generation) {
            body = with(&body, &["client_generation"], Json::int(7));
        }
        if has(Fault::Schema) {
            body = with(&body, &["schema", "version"], Json::int(7));
        }
        if has(Fault::Cursor) {
            let forged = Json::text("v1.forged");
            body = match path {
                "/sync/pull" => with(&body, &["scopes", "tasks_user:u_1", "cursor"], forged),
                _ => with(&body, &["cursor"], forged),
            };
        }
        let token = &self.tokens[usize::from(has(Fault::ClientOfAnother))];
        let http = Http::new(&self.url, (!has(Fault::NoIdentity)).then_some(token));
        let kind = if has(Fault::ContentType) { "text/plain" } else { "application/json" };
        let retired = |retired: bool| {
            self.state.run(&format!("update tributary.client set retired = {retired} where client_id = 'ordered'"))
        };
        if has(Fault::Retired) {
            retired(true)?;
        }
        let response = http.post_with(path, raw(&body).as_bytes(), &[("Content-Type", kind)])?;
        if has(Fault::Retired) {
            retired(false)?;
        }
        Ok(outcome(path, &response))
    }
}

#[test]
fn of_two_faults_the_earlier_is_told() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let asked = Asked::begin(&sandbox)?;
    let _paused = Paused::materializer(&mut sandbox);
    let mut count = asked.in_pairs(None)?;
    sandbox.source()?.run("select tributary.accept_write('u_1', 'ordered')")?;
    count += asked.in_pairs(Some(Fault::CapturePending))?;
    ensure!(count > 100, "only {count} requests");
    Ok(())
}

/// A source apart that cannot be read stands after the gates that do without it, and before all that needs the epoch.
#[test]
fn a_source_that_is_away_is_told_after_the_gates() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { split: true, ..Options::default() })?;
    let asked = Asked::begin(&sandbox)?;
    sandbox.materializers[0].process.kill();
    // Nothing of the state is materialized any more, and a write is accepted that the puller cannot learn of.
    sandbox.source()?.run("select tributary.accept_write('u_1', 'ordered')")?;
    let server = sandbox.postgres.connect("postgres")?;
    let away = |away: bool| {
        server.run(&format!("alter database {APPLICATION_DATABASE} allow_connections {}", !away))?;
        server.run(&format!(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = '{APPLICATION_DATABASE}'"
        ))
    };
    away(true)?;
    let count = asked.in_pairs(Some(Fault::SourceAway))?;
    ensure!(count >= 27, "only {count} requests");
    // A continuation that is over for any cause but the epoch is over without the source, too.
    let [_, (path, continued), _] = &asked.good;
    asked.state.run("update tributary.scope set membership_generation = membership_generation + 1")?;
    let got = send(&asked.client, path, raw(continued).as_bytes());
    ensure!(got == (409, "rebuild_restart_required".to_owned()), "{got:?}");
    asked.state.run("update tributary.scope set membership_generation = membership_generation - 1")?;
    // Connect needs no epoch.
    ensure!(send(&asked.client, "/sync/connect", raw(&asked.client.connect_request()).as_bytes()).0 == 200);
    away(false)?;
    // A source that accepts a session and then does not answer: the statement limit holds there, too.
    super::restart_with(&mut sandbox.pullers[0], &[("TRIBUTARY_STATEMENT_TIMEOUT_SECONDS", "1")])?;
    let source = sandbox.source()?;
    source.run("begin; lock table tributary.accepted_write in access exclusive mode")?;
    for (path, good) in &asked.good {
        let got = send(&asked.client, path, raw(good).as_bytes());
        ensure!(got == Fault::SourceAway.answer(), "{path} with a source that hangs: {got:?}");
    }
    source.run("rollback")?;
    let got = send(&asked.client, "/sync/pull", raw(&asked.good[0].1).as_bytes());
    ensure!(got == Fault::CapturePending.answer(), "the write that was accepted: {got:?}");
    Ok(())
}

//! The order of checks of pull and rebuild (contract.md section 5): of two things wrong at once, the earlier is told.

use anyhow::ensure;
use tributary_tests::http::Http;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{Paused, durable, outcome, raw, with};

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
    CapturePending,
}

const FAULTS: [Fault; 9] = [
    Fault::NoIdentity,
    Fault::ContentType,
    Fault::ClientOfAnother,
    Fault::Envelope,
    Fault::Retired,
    Fault::Generation,
    Fault::Schema,
    Fault::Cursor,
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
            Self::CapturePending => (503, "capture_pending"),
        };
        (status, code.to_owned())
    }
}

#[test]
fn of_two_faults_the_earlier_is_told() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    let state = sandbox.state()?;
    let mut client = sandbox.client("u_1", "ordered")?;
    client.sync(500)?;
    let mut rebuild = client.start_rebuild("tasks_user:u_1", 10);
    client.rebuild_page(&mut rebuild)?;
    let url = sandbox.pullers[0].url.clone().unwrap_or_default();
    let (own, other) = (sandbox.token("u_1")?, sandbox.token("u_2")?);
    let pull = client.pull_request(10);
    let continued = client.rebuild_request(&rebuild);
    let first = client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10));

    let _paused = Paused::materializer(&mut sandbox);
    let mut asked = 0;
    for pending in [false, true] {
        if pending {
            source.run("select tributary.accept_write('u_1', 'ordered')")?;
        }
        let before = durable(&state)?;
        for (path, good) in [("/sync/pull", &pull), ("/sync/rebuild", &continued), ("/sync/rebuild", &first)] {
            for one in FAULTS {
                for two in FAULTS.into_iter().filter(|two| *two >= one) {
                    let faults = [one, two];
                    if faults.contains(&Fault::CapturePending) != pending {
                        continue;
                    }
                    let mut body = good.clone();
                    let has = |fault: Fault| faults.contains(&fault);
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
                    let token = if has(Fault::ClientOfAnother) { &other } else { &own };
                    let http = Http::new(&url, (!has(Fault::NoIdentity)).then_some(token));
                    let kind = if has(Fault::ContentType) { "text/plain" } else { "application/json" };
                    if has(Fault::Retired) {
                        state.run("update tributary.client set retired = true where client_id = 'ordered'")?;
                    }
                    let response = http.post_with(path, raw(&body).as_bytes(), &[("Content-Type", kind)])?;
                    if has(Fault::Retired) {
                        state.run("update tributary.client set retired = false where client_id = 'ordered'")?;
                    }
                    let mut expected = one.answer();
                    if pending
                        && path == "/sync/rebuild"
                        && body.get("cursor") == continued.get("cursor")
                        && one == Fault::CapturePending
                    {
                        // A continuation of before the accepted write is of an older epoch: that is checked with its
                        // bindings, and the gate after them.
                        expected = (409, "rebuild_restart_required".to_owned());
                    }
                    let got = outcome(path, &response);
                    ensure!(got == expected, "{path} with {one:?} and {two:?}: {got:?}");
                    ensure!(durable(&state)? == before, "{path} with {one:?} and {two:?}: the state changed");
                    asked += 1;
                }
            }
        }
    }
    ensure!(asked > 100, "only {asked} requests");
    Ok(())
}

//! The rebuild contract against real programs, one test a law (ADR 003, "Rebuild contract"; audit findings S-04, S-05).
//!
//! The application here is as small as can be: rows lie in boxes, each user has a box, and some rows are for everyone.

mod forged;
mod gates;
mod isolation;
mod model;
mod pages;
mod replay;
mod shared;
mod staging;
mod stale;

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::client::{Client, ClientError, Rebuild, answer};
use tributary_tests::database::Database;
use tributary_tests::expected;
use tributary_tests::http::Response;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

const SCHEMA: &str = "
    create table items (id bigint primary key, box text not null, body text not null default '', shared boolean not null default false);
    create table labels (id text primary key, box text not null, name text);";

const CONFIG: &str = r#"
tables:
  - relation: public.items
  - relation: public.labels
scopes:
  - scope: "box:{box}"
    rows: SELECT * FROM items
  - scope: "box:{box}"
    rows: SELECT * FROM labels
  - scope: everyone
    rows: SELECT * FROM items WHERE shared
assignments:
  - scope: "box:{user_id}"
  - scope: everyone
"#;

/// How long things may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// A sandbox that runs the application of boxes.
struct Boxes {
    sandbox: Sandbox,
    config: PathBuf,
}

impl Drop for Boxes {
    fn drop(&mut self) {
        // In the system's temporary directory, which clears what stays.
        let _ = fs::remove_file(&self.config);
    }
}

/// One request of a rebuild, and its answer to the octet.
struct Exchange {
    request: String,
    response: Response,
}

impl Boxes {
    fn start(seed: &str) -> anyhow::Result<Self> {
        Self::start_with(seed, Options::default())
    }

    fn start_with(seed: &str, options: Options) -> anyhow::Result<Self> {
        let config = std::env::temp_dir().join(format!("tributary-boxes-{}.yaml", uuid::Uuid::new_v4().simple()));
        fs::write(&config, CONFIG)?;
        let seed = seed.to_owned();
        let sandbox = Sandbox::start(Options {
            config: Some(config.clone()),
            schema: Some(Vec::new()),
            prepare: Some(Box::new(move |postgres| {
                let source = postgres.connect(tributary_tests::pg::APPLICATION_DATABASE)?;
                source.run(SCHEMA)?;
                source.run(&seed)
            })),
            ..options
        })?;
        Ok(Self { sandbox, config })
    }

    fn url(&self, puller: usize) -> anyhow::Result<&str> {
        self.sandbox.pullers.get(puller).and_then(|puller| puller.url.as_deref()).context("no such puller")
    }

    /// A client that has never connected, with a token that outlives shifts of the clock.
    fn fresh(&self, user: &str, client_id: &str) -> anyhow::Result<Client> {
        Ok(Client::new(self.url(0)?, &self.sandbox.lasting_token(user)?, client_id))
    }

    /// A connected client.
    fn client(&self, user: &str, client_id: &str) -> anyhow::Result<Client> {
        let mut client = self.fresh(user, client_id)?;
        client.connect()?;
        Ok(client)
    }

    /// Pull until what the client holds is what `SELECT` gives, in every scope.
    fn settle(&self, client: &mut Client, source: &Database, user: &str, limit: i64) -> anyhow::Result<usize> {
        eventually(PATIENCE, || {
            match client.sync(limit) {
                Err(violation @ ClientError::Violation(_)) => panic!("{violation}"),
                outcome => outcome?,
            }
            compare(client, source, user)
        })
        .with_context(|| self.sandbox.pullers[0].process.last_words())
    }

    /// Wait until the state has everything that the source has committed so far, without a client.
    fn materialized(&self, source: &Database) -> anyhow::Result<()> {
        let marker = format!("mark-{}", uuid::Uuid::new_v4().simple());
        source.run(&format!("insert into labels values ('{marker}', '{marker}', null)"))?;
        let state = self.sandbox.state()?;
        eventually(PATIENCE, || {
            // The entry and not the scope: scopes are interned ahead of their state transaction.
            let seen = format!(
                "select count(*) from tributary.scope_entry join tributary.scope using (scope_no) where scope_id = 'box:{marker}'"
            );
            ensure!(state.number(&seen)? == 1, "a commit is not materialized");
            Ok(())
        })
    }

    /// A metric of a puller, summed over its labels; zero before it was counted.
    fn metric(&self, puller: usize, name: &str) -> anyhow::Result<f64> {
        let admin = &self.sandbox.pullers[puller].admin_url;
        let text = String::from_utf8(tributary_tests::http::get(&format!("{admin}/metrics"))?.body)?;
        let values = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        values.map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<f64>().context("a metric's value")).sum()
    }

    /// Wait until this many rebuilds wait for a staging at the first puller.
    fn waiting(&self, count: i64) -> anyhow::Result<()> {
        eventually(PATIENCE, || {
            let waiting = self.metric(0, "tributary_staging_waiters")? as i64;
            ensure!(waiting == count, "{waiting} wait");
            Ok(())
        })
    }

    /// Start a puller again with its clock shifted.
    fn shift_clock(&mut self, puller: usize, seconds: i64) -> anyhow::Result<()> {
        let process = &mut self.sandbox.pullers[puller].process;
        process.set_env("TRIBUTARY_CLOCK_OFFSET_SECONDS", seconds.to_string());
        process.restart()?;
        self.sandbox.wait_until_ready()
    }

    /// Stop the materializers for good, so that a test can change the state under the pullers.
    fn stop_materializers(&mut self) {
        for materializer in &mut self.sandbox.materializers {
            materializer.process.kill();
        }
    }

    /// A rebuild of the user's box of which one page has been fetched; its continuation is in `cursor`.
    #[expect(clippy::unused_self, reason = "read as: these boxes, begun")]
    fn begun(&self, client: &Client, limit: i64) -> anyhow::Result<Rebuild> {
        let mut rebuild = client.start_rebuild("box:u_1", limit);
        let page = ok(&post(client, &client.rebuild_request(&rebuild))?)?;
        rebuild.cursor = Some(page.get("cursor").and_then(Json::as_text).context("a continuation")?.to_owned());
        Ok(rebuild)
    }
}

/// The rows that a user's box and everyone's scope hold, by `SELECT`.
fn compare(client: &Client, source: &Database, user: &str) -> anyhow::Result<usize> {
    let held = format!("box:{user}");
    Ok(expected::compare(client, source, &held, "items", &format!("items where box = '{user}'"))?
        + expected::compare(client, source, &held, "labels", &format!("labels where box = '{user}'"))?
        + expected::compare(client, source, "everyone", "items", "items where shared")?)
}

/// Fill a user's box.
fn items(user: &str, from: i64, count: i64) -> String {
    let to = from + count - 1;
    format!("insert into items select n, '{user}', 'item ' || n from generate_series({from}, {to}) n;")
}

/// A rebuild in another's place: its scope, id and page size, with a cursor of the test's choice.
fn with_cursor(client: &Client, rebuild: &Rebuild, cursor: impl Into<Option<String>>) -> Rebuild {
    let mut other = client.start_rebuild(&rebuild.scope, rebuild.limit);
    other.rebuild_id.clone_from(&rebuild.rebuild_id);
    other.cursor = cursor.into();
    other
}

fn post(client: &Client, request: &Json) -> anyhow::Result<Response> {
    Ok(client.http.post("/sync/rebuild", request.canonical()?.as_bytes())?)
}

/// Asks until the request is not one too many at this moment.
fn until_let_in(client: &Client, request: &Json) -> anyhow::Result<Response> {
    loop {
        let response = post(client, request)?;
        if response.status != 429 {
            return Ok(response);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// The body of a page.
fn ok(response: &Response) -> anyhow::Result<Json> {
    answer("/sync/rebuild", response).with_context(|| String::from_utf8_lossy(&response.body).into_owned())
}

/// Status and code of a well-formed error answer: exactly an `error` member, so no records, cursors or checksums.
fn refusal(response: &Response) -> anyhow::Result<(u16, String)> {
    match answer("/sync/rebuild", response) {
        Err(ClientError::Api { status, code, .. }) => Ok((status, code)),
        Err(other) => Err(other.into()),
        Ok(body) => anyhow::bail!("answered: {:?}", body.get("has_more")),
    }
}

fn restart_required() -> (u16, String) {
    (409, "rebuild_restart_required".to_owned())
}

fn invalid() -> (u16, String) {
    (400, "invalid_request".to_owned())
}

/// Rebuild a scope and keep every request with its answer. The client verifies each page, by asking for it again.
fn record(client: &mut Client, scope: &str, limit: i64) -> anyhow::Result<Vec<Exchange>> {
    let mut rebuild = client.start_rebuild(scope, limit);
    let mut exchanges = Vec::new();
    while !rebuild.finished {
        let request = client.rebuild_request(&rebuild).canonical()?;
        let response = client.http.post("/sync/rebuild", request.as_bytes())?;
        let verified = client.rebuild_page(&mut rebuild)?;
        ensure!(ok(&response)? == verified, "page {} differs when it is asked for again", exchanges.len());
        exchanges.push(Exchange { request, response });
    }
    Ok(exchanges)
}

/// Every request again, each answered by the very octets that it was answered by first.
fn replay(client: &Client, exchanges: &[Exchange]) -> anyhow::Result<()> {
    for (page, Exchange { request, response }) in exchanges.iter().enumerate() {
        let again = client.http.post("/sync/rebuild", request.as_bytes())?;
        ensure!(again.status == 200, "page {page}: {:?}", refusal(&again)?);
        ensure!(again.body == response.body, "page {page}: other octets");
    }
    Ok(())
}

/// What a rebuild must leave alone, as text: clients, assignment, checkpoints, scopes, entries; and how many sessions
/// and snapshots there are.
fn dump(state: &Database) -> anyhow::Result<String> {
    let mut text = String::new();
    for query in [
        "select to_jsonb(c)::text from tributary.client c order by client_no",
        "select to_jsonb(c)::text from tributary.client_scope c order by client_no, scope_no",
        // Compaction raises floors beside all of this; it is the leader's, and has tests of its own.
        "select (to_jsonb(s) - '{floor_lsn,floor_ordinal,compacted_lsn,compacted_ordinal}'::text[])::text
            from tributary.scope s order by scope_no",
        "select to_jsonb(e)::text from tributary.scope_entry e order by row_id, scope_no",
        "select to_jsonb(p)::text from tributary.progress p",
        "select to_jsonb(m)::text from tributary.materialized_epoch m order by 1",
    ] {
        for row in state.texts(query)? {
            text.push_str(row.first().and_then(Option::as_deref).unwrap_or_default());
            text.push('\n');
        }
    }
    Ok(text)
}

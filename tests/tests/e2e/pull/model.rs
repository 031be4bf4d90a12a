//! Every page equals the naive model's: the full history of effects, filtered, deduplicated, sorted and cut (ADR 003,
//! "Per-scope eligibility before the limit", "Deterministic, starvation-free merge", "Scope-inclusive typed
//! deduplication"). Random commits; clients with divergent cursors, lost answers and random limits pull at once through
//! two pullers, between the commits and during them.
//!
//! During commits a page is that of one of the boundaries that could be visible. A state transaction may hold several
//! source transactions and keeps of each row only the last effect in them, so such commits touch no row twice.

mod history;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tributary_tests::client::{Client, answer, digest_of};
use tributary_tests::http::Http;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use self::history::{History, Place};
use super::{cursors_of, has_more, materialized, raw, with};

/// `TRIBUTARY_TEST_SEED`, or another one each time; tests print it.
pub fn seed() -> u64 {
    std::env::var("TRIBUTARY_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random)
}

/// A cursor, and which of its client's answers issued it; 0 is the rebuild.
#[derive(Clone)]
struct Held {
    token: String,
    issued_by: usize,
}

type Cursors = BTreeMap<String, Held>;

/// An answered pull, to be compared when the history is known.
struct Record {
    presented: Cursors,
    limit: usize,
    body: Json,
    /// The transactions of which some prefix, from `least` to `most` of them, was visible.
    least: usize,
    most: usize,
}

struct Puller {
    /// A pull request of this client, whose scopes and limit are replaced.
    template: Json,
    http: Http,
    urls: Vec<String>,
    random: StdRng,
    /// What the client held after each answer that reached it.
    states: Vec<Cursors>,
    issued: usize,
    /// Where each issued cursor stands, by the model.
    places: HashMap<(usize, String), Place>,
    least: usize,
    compared: usize,
}

impl Puller {
    fn new(sandbox: &Sandbox, user: &str, client_id: &str, random: StdRng, at: usize) -> anyhow::Result<Self> {
        let mut client = sandbox.client(user, client_id)?;
        client.sync(100)?;
        let held = |cursor: &Option<String>| cursor.clone().context("synced");
        let mut cursors = Cursors::new();
        let mut places = HashMap::new();
        for (scope, cursor) in &client.scopes {
            cursors.insert(scope.clone(), Held { token: held(cursor)?, issued_by: 0 });
            places.insert((0, scope.clone()), Place::end_of(at));
        }
        Ok(Self {
            template: client.pull_request(1),
            http: client.http,
            urls: sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect(),
            random,
            states: vec![cursors],
            issued: 0,
            places,
            least: at,
            compared: 0,
        })
    }

    /// A few pulls; `begun` tells how many transactions may be visible.
    fn pull(&mut self, count: usize, begun: &AtomicUsize) -> anyhow::Result<Vec<Record>> {
        let mut records = Vec::new();
        for _ in 0..count {
            let mut presented = self.states.last().context("a state")?.clone();
            if self.random.random_bool(0.4) {
                // Divergent: any scope may have an older cursor, also one that was left behind long ago.
                for (scope, held) in &mut presented {
                    if self.random.random_bool(0.5) {
                        let age = self.random.random_range(0..self.states.len());
                        *held = self.states[age][scope].clone();
                    }
                }
            }
            let limit = if self.random.random_bool(0.2) { 1000 } else { self.random.random_range(1..12) };
            let scopes = presented
                .iter()
                .map(|(scope, held)| (scope.clone(), Json::object([("cursor", Json::text(&held.token))])));
            let request = with(&self.template, &["scopes"], Json::Object(scopes.collect()));
            let request = raw(&with(&request, &["limit"], Json::int(limit)));
            let url = self.random.random_range(0..self.urls.len());
            self.http.redirect(&self.urls[url]);
            let body = answer("/sync/pull", &self.http.post("/sync/pull", request.as_bytes())?)?;
            let most = begun.load(Ordering::SeqCst);
            self.issued += 1;
            if self.random.random_bool(0.7) {
                let mut state = presented.clone();
                for (scope, token) in cursors_of(&body) {
                    state.insert(scope, Held { token, issued_by: self.issued });
                }
                self.states.push(state);
            }
            records.push(Record { presented, limit: limit as usize, body, least: self.least, most });
        }
        Ok(records)
    }

    /// Compares answers with the model, which must allow each of them at some boundary.
    fn compare(&mut self, history: &History, records: Vec<Record>) -> anyhow::Result<()> {
        let first = self.issued - records.len() + 1;
        for (offset, record) in records.into_iter().enumerate() {
            let cursors: BTreeMap<String, Place> = record
                .presented
                .iter()
                .map(|(scope, held)| (scope.clone(), self.places[&(held.issued_by, scope.clone())]))
                .collect();
            let got = history::Page::of_answer(&record.body);
            let least = record.least.max(self.least);
            let found = (least..=record.most).find_map(|boundary| {
                let (page, places) = history.page(&cursors, boundary, record.limit);
                (page == got).then_some((boundary, places))
            });
            let Some((boundary, places)) = found else {
                let (page, _) = history.page(&cursors, record.most, record.limit);
                anyhow::bail!(
                    "limit {} at {least} to {}, cursors {cursors:?}: got {got:#?}, the model gives {page:#?}",
                    record.limit,
                    record.most
                );
            };
            self.least = boundary;
            for (scope, place) in places {
                self.places.insert((first + offset, scope), place);
            }
            self.compared += 1;
        }
        Ok(())
    }
}

#[test]
fn every_page_is_the_naive_models() -> anyhow::Result<()> {
    let seed = seed();
    println!("seed {seed}: TRIBUTARY_TEST_SEED={seed} replays it");
    let (transactions, pages) = every_page(seed).with_context(|| format!("seed {seed}"))?;
    println!("{transactions} transactions, {pages} pages compared");
    ensure!(pages >= 500, "only {pages} pages");
    Ok(())
}

/// How many transactions were committed and how many pages compared.
fn every_page(seed: u64) -> anyhow::Result<(usize, usize)> {
    let mut random = StdRng::seed_from_u64(seed);
    let scratch = application()?;
    let sandbox = Sandbox::start(Options {
        pullers: 2,
        schema: Some(vec![scratch.join("schema.sql")]),
        config: Some(scratch.join("sync.yaml")),
        ..Options::default()
    })?;
    std::fs::remove_dir_all(&scratch)?;
    let source = sandbox.source()?;
    let mut history = History::default();
    for _ in 0..20 {
        source.run(&history.commit(&mut random, &BTreeSet::new()).0)?;
    }
    materialized(&sandbox)?;
    let at = history.transactions();
    let mut pullers = Vec::new();
    for (number, user) in ["a", "a", "a", "b", "b", "c"].into_iter().enumerate() {
        let random = StdRng::seed_from_u64(seed ^ (number as u64 + 1));
        pullers.push(Puller::new(&sandbox, user, &format!("model-{number}"), random, at)?);
    }
    let mut reference: Vec<Client> = ["a", "b", "c"]
        .into_iter()
        .map(|user| sandbox.client(user, &format!("reference-{user}")))
        .collect::<anyhow::Result<_>>()?;
    for client in &mut reference {
        client.sync(100)?;
    }

    for _ in 0..30 {
        let begun = AtomicUsize::new(history.transactions());
        let during = random.random_bool(0.5);
        let records: Vec<Vec<Record>> = thread::scope(|scope| {
            let begun = &begun;
            let mut pulling = Vec::new();
            if during {
                pulling.extend(pullers.iter_mut().map(|puller| scope.spawn(move || puller.pull(8, begun))));
            }
            let mut touched = BTreeSet::new();
            for _ in 0..random.random_range(1..10) {
                let (sql, keys) = history.commit(&mut random, &touched);
                begun.store(history.transactions(), Ordering::SeqCst);
                source.run(&sql)?;
                if during {
                    touched.extend(keys);
                } else {
                    materialized(&sandbox)?;
                }
            }
            let joined = pulling.into_iter().map(|thread| thread.join().expect("a puller panicked"));
            joined.collect::<anyhow::Result<Vec<_>>>()
        })?;
        for (puller, records) in pullers.iter_mut().zip(records) {
            puller.compare(&history, records)?;
        }
        materialized(&sandbox)?;

        // Everything is visible: each page is exactly one.
        let all = AtomicUsize::new(history.transactions());
        let records: Vec<Vec<Record>> = thread::scope(|scope| {
            let all = &all;
            let pulling: Vec<_> = pullers
                .iter_mut()
                .map(|puller| {
                    puller.least = history.transactions();
                    scope.spawn(move || puller.pull(5, all))
                })
                .collect();
            pulling.into_iter().map(|thread| thread.join().expect("a puller panicked")).collect::<anyhow::Result<_>>()
        })?;
        // Clients that verify every digest, and that hold what the model holds.
        for client in &mut reference {
            client.pull_all(random.random_range(1..20))?;
            for scope in client.scopes.keys() {
                let held: BTreeSet<String> = client
                    .rows
                    .get(scope)
                    .into_iter()
                    .flat_map(|rows| rows.values().map(|held| raw(&held.row)))
                    .collect();
                ensure!(held == history.contents(scope), "{scope}: held {held:?}");
            }
        }
        for (puller, records) in pullers.iter_mut().zip(records) {
            for record in &records {
                if !has_more(&record.body) {
                    checksums_are(&record.body, &reference)?;
                }
            }
            puller.compare(&history, records)?;
        }
    }
    Ok((history.transactions(), pullers.iter().map(|puller| puller.compared).sum()))
}

fn checksums_are(body: &Json, reference: &[Client]) -> anyhow::Result<()> {
    for (scope, checksum) in body.get("checksums").and_then(Json::as_object).context("checksums")? {
        let client = reference.iter().find(|client| client.scopes.contains_key(scope)).context("a reference")?;
        ensure!(digest_of(checksum, "pull")? == client.scope_digest(scope)?, "the digest of {scope} is another");
    }
    Ok(())
}

/// The application of the model, as files.
fn application() -> anyhow::Result<std::path::PathBuf> {
    let dir = std::env::temp_dir().join(format!("tributary-model-{}", uuid::Uuid::new_v4().simple()));
    std::fs::create_dir(&dir)?;
    std::fs::write(dir.join("schema.sql"), history::SCHEMA)?;
    std::fs::write(dir.join("sync.yaml"), history::CONFIG)?;
    Ok(dir)
}

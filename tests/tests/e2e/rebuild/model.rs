//! Rebuilds of several clients, page by page, among everything that can come between two pages: commits, moves between
//! boxes, lost answers, replays, accepted writes, dying programs and jumping clocks. Whatever happens, in the end each
//! client holds what a fresh rebuild gives, and that is what `SELECT` gives.
//!
//! The seed is printed; `TRIBUTARY_TEST_SEED` repeats its choices, `TRIBUTARY_TEST_STEPS` sets their number.

use std::collections::HashMap;
use std::fmt::Write as _;

use anyhow::{Context as _, bail, ensure};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::Signal;
use tributary_tests::client::{Client, ClientError, Rebuild};
use tributary_tests::database::Database;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{Boxes, PATIENCE, items, ok, refusal, restart_required};

const USERS: [&str; 3] = ["u_1", "u_2", "u_3"];
const DAY: i64 = 24 * 3600;

/// What happens next.
#[derive(Debug, Clone, Copy)]
enum Op {
    Commit,
    Page { lost: bool },
    Replay,
    Pull { lost: bool },
    Abandon,
    Accept,
    KillPuller,
    KillMaterializer,
    KillPostgres,
    JumpClock,
}

impl Op {
    fn choose(random: &mut StdRng) -> Self {
        match random.random_range(0..1000) {
            300..600 => Self::Page { lost: random.random_bool(0.3) },
            600..720 => Self::Replay,
            720..880 => Self::Pull { lost: random.random_bool(0.2) },
            880..910 => Self::Abandon,
            910..970 => Self::Accept,
            970..978 => Self::KillPuller,
            978..986 => Self::KillMaterializer,
            986..989 => Self::KillPostgres,
            989..993 => Self::JumpClock,
            // The rest, a third of all.
            _ => Self::Commit,
        }
    }
}

/// A client with its rebuild under way, and what it was ever answered in sessions that still live.
struct Member {
    user: &'static str,
    client: Client,
    rebuild: Option<Rebuild>,
    answered: HashMap<String, Vec<u8>>,
    /// Continuations of sessions that are over.
    lapsed: Vec<String>,
}

impl Member {
    fn lapse(&mut self) {
        let continuations = self.answered.drain().map(|(request, _)| request);
        self.lapsed.extend(continuations.filter(|request| !request.contains("\"cursor\":null")));
    }
}

struct World {
    boxes: Boxes,
    source: Database,
    members: Vec<Member>,
    random: StdRng,
    clock: i64,
    next_id: i64,
}

/// Faults of the infrastructure after which the same request is to be made again.
fn is_transient(error: &ClientError) -> bool {
    matches!(error, ClientError::Transport(_) | ClientError::Api { status: 503 | 429, .. })
}

impl World {
    fn step(&mut self, op: Op) -> anyhow::Result<()> {
        let number = self.random.random_range(0..self.members.len());
        let puller = self.boxes.url(self.random.random_range(0..2))?.to_owned();
        self.members[number].client.http.redirect(&puller);
        match op {
            Op::Commit => self.commit(),
            Op::Page { lost } => self.page(number, lost),
            Op::Replay => self.replay(number),
            Op::Pull { lost } => self.pull(number, lost),
            Op::Abandon => {
                // Somebody gives up, or rebuilds a scope that is healthy.
                let member = &mut self.members[number];
                let scopes: Vec<_> = member.client.scopes.keys().cloned().collect();
                let scope = scopes.choose(&mut self.random).context("a scope")?;
                member.rebuild = Some(member.client.start_rebuild(scope, self.random.random_range(1..=7)));
                Ok(())
            }
            Op::Accept => {
                let member = &mut self.members[number];
                self.source.run(&format!(
                    "begin; update items set body = body || '+' where id % 5 = 0 and box = '{0}';
                     select tributary.accept_write('{0}', '{1}'); commit",
                    member.user, member.client.client_id
                ))?;
                member.lapse();
                Ok(())
            }
            Op::KillPuller => {
                let puller = self.random.random_range(0..2);
                self.boxes.sandbox.pullers[puller].process.restart()?;
                self.recover()
            }
            Op::KillMaterializer => {
                self.boxes.sandbox.materializers[0].process.restart()?;
                self.recover()
            }
            Op::KillPostgres => {
                let postgres = &mut self.boxes.sandbox.postgres;
                postgres.process.signal(Signal::QUIT);
                postgres.process.ended_within(PATIENCE);
                postgres.restart()?;
                self.source = self.boxes.sandbox.source()?;
                self.recover()
            }
            Op::JumpClock => {
                // A session is over after a day; twice as far is no different, and tokens of users last a month.
                if self.clock >= 5 * DAY {
                    return Ok(());
                }
                self.supervise()?;
                self.clock += DAY + 60;
                for puller in 0..2 {
                    self.boxes.shift_clock(puller, self.clock)?;
                }
                self.members.iter_mut().for_each(Member::lapse);
                Ok(())
            }
        }
    }

    /// Mostly waits until all is well again; else goes on in the middle of it.
    fn recover(&mut self) -> anyhow::Result<()> {
        if self.random.random_bool(0.2) {
            return Ok(());
        }
        self.supervise()?;
        self.boxes.sandbox.wait_until_ready()?;
        // A standby is ready, too.
        self.boxes.materialized(&self.source)
    }

    /// Starts again what ended by itself: a program whose database goes away while it starts says so and ends.
    fn supervise(&mut self) -> anyhow::Result<()> {
        let Sandbox { materializers, pullers, .. } = &mut self.boxes.sandbox;
        for service in materializers.iter_mut().chain(pullers) {
            if service.process.exited().is_some() {
                service.process.restart()?;
            }
        }
        Ok(())
    }

    /// One transaction of a few statements: rows come, change, move between boxes, go, get other keys.
    fn commit(&mut self) -> anyhow::Result<()> {
        let mut sql = "begin;".to_owned();
        for _ in 0..self.random.random_range(1..6) {
            let user = USERS[self.random.random_range(0..USERS.len())];
            let modulus = self.random.random_range(2..9);
            let rest = self.random.random_range(0..modulus);
            self.next_id += 1;
            let id = self.next_id;
            match self.random.random_range(0..8) {
                0 => write!(sql, "insert into items values ({id}, '{user}', 'new', {});", id % 3 == 0)?,
                1 => write!(sql, "update items set body = 'changed {id}' where id % {modulus} = {rest};")?,
                2 => write!(sql, "update items set box = '{user}' where id % {modulus} = {rest} and id % 4 = 0;")?,
                3 => write!(
                    sql,
                    "delete from items where id = (select min(id) from items where id % {modulus} = {rest});"
                )?,
                4 => write!(sql, "update items set shared = not shared where id % {modulus} = {rest};")?,
                5 => write!(
                    sql,
                    "update items set id = {id} where id = (select max(id) from items where box = '{user}');"
                )?,
                6 => write!(
                    sql,
                    "insert into labels values ('l{rest}', '{user}', null)
                         on conflict (id) do update set box = excluded.box, name = '{id}';"
                )?,
                _ => write!(sql, "delete from labels where id = 'l{rest}';")?,
            }
        }
        sql.push_str("commit");
        self.source.run(&sql)
    }

    /// The next page of a client's rebuild, whose answer may be lost.
    fn page(&mut self, number: usize, lost: bool) -> anyhow::Result<()> {
        let member = &mut self.members[number];
        if member.rebuild.is_none() {
            let Some(scope) = member.client.scopes_to_rebuild().first().cloned() else { return Ok(()) };
            member.rebuild = Some(member.client.start_rebuild(&scope, self.random.random_range(1..=7)));
        }
        let Some(rebuild) = &mut member.rebuild else { return Ok(()) };
        let request = member.client.rebuild_request(rebuild).canonical()?;
        let Ok(response) = member.client.http.post("/sync/rebuild", request.as_bytes()) else { return Ok(()) };
        match response.status {
            200 => {}
            429 | 503 => return Ok(()),
            409 if !member.answered.contains_key(&request) || rebuild.cursor.is_some() => {
                ensure!(refusal(&response)? == restart_required(), "{:?}", refusal(&response)?);
                // Accepted writes and jumps of the clock are the only causes here, and each took the answers away.
                ensure!(
                    member.answered.is_empty()
                        || !member.answered.keys().any(|known| known.contains(&rebuild.rebuild_id)),
                    "a session ended without a cause"
                );
                member.rebuild = None;
                return Ok(());
            }
            status => bail!("{status}: {:?}", refusal(&response)?),
        }
        if let Some(first) = member.answered.get(&request) {
            ensure!(*first == response.body, "a page differs when it is asked for again");
        }
        let body = ok(&response)?;
        member.answered.insert(request, response.body);
        if lost {
            return Ok(());
        }
        match member.client.rebuild_page(rebuild) {
            Ok(applied) => ensure!(applied == body, "a page differs when it is asked for again at once"),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error.into()),
        }
        if rebuild.finished {
            member.rebuild = None;
        }
        Ok(())
    }

    /// Any earlier request of a session: the same octets while it lives, 409 afterwards.
    fn replay(&mut self, number: usize) -> anyhow::Result<()> {
        let member = &self.members[number];
        // Sorted, so that the seed decides and not the map's order.
        let mut requests: Vec<_> = member.answered.keys().collect();
        requests.sort();
        if let Some(request) = requests.choose(&mut self.random)
            && let Ok(response) = member.client.http.post("/sync/rebuild", request.as_bytes())
            && !matches!(response.status, 429 | 503)
        {
            ensure!(response.status == 200, "{:?}", refusal(&response)?);
            ensure!(response.body == member.answered[*request], "a replay differs from its first answer");
        }
        if let Some(request) = member.lapsed.choose(&mut self.random)
            && let Ok(response) = member.client.http.post("/sync/rebuild", request.as_bytes())
            && !matches!(response.status, 429 | 503)
        {
            ensure!(refusal(&response)? == restart_required());
        }
        Ok(())
    }

    fn pull(&mut self, number: usize, lost: bool) -> anyhow::Result<()> {
        let member = &mut self.members[number];
        if lost {
            member.client.http.lose_next_answer();
        }
        match member.client.pull_page(self.random.random_range(1..=20)) {
            Ok(_) => Ok(()),
            Err(error) if is_transient(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Every client ends what it began, pulls the rest, and holds what a fresh one does, and `SELECT`.
    fn finish(&mut self) -> anyhow::Result<()> {
        self.supervise()?;
        self.boxes.sandbox.wait_until_ready()?;
        for number in 0..self.members.len() {
            eventually(PATIENCE, || {
                self.page(number, false)?;
                ensure!(self.members[number].rebuild.is_none(), "a rebuild does not end");
                Ok(())
            })?;
            let Self { boxes, source, members, .. } = self;
            let member = &mut members[number];
            boxes.settle(&mut member.client, source, member.user, 5)?;
            let mut fresh = boxes.client(member.user, &format!("fresh-{number}"))?;
            boxes.settle(&mut fresh, source, member.user, 1000)?;
            for scope in fresh.scopes.keys() {
                let rows = |client: &Client| client.rows.get(scope).cloned().unwrap_or_default();
                ensure!(rows(&fresh) == rows(&member.client), "pulled and rebuilt rows of {scope} differ");
                ensure!(fresh.scope_digest(scope)? == member.client.scope_digest(scope)?);
            }
        }
        Ok(())
    }
}

fn run(seed: u64, steps: usize) -> anyhow::Result<()> {
    let rows: String = (0..3).map(|n| items(USERS[n as usize], 1 + 100 * n, 25)).collect();
    let materializer_args = ["--lease-seconds", "1"].map(Into::into).into();
    let boxes = Boxes::start_with(&rows, Options { pullers: 2, materializer_args, ..Options::default() })?;
    let source = boxes.sandbox.source()?;
    let mut members = Vec::new();
    for number in 0..5 {
        let user = USERS[number % USERS.len()];
        let client = boxes.client(user, &format!("member-{number}"))?;
        members.push(Member { user, client, rebuild: None, answered: HashMap::new(), lapsed: Vec::new() });
    }
    let random = StdRng::seed_from_u64(seed);
    let mut world = World { boxes, source, members, random, clock: 0, next_id: 1000 };
    for step in 0..steps {
        let op = Op::choose(&mut world.random);
        world.step(op).with_context(|| format!("step {step}: {op:?}"))?;
    }
    let pages: usize = world.members.iter().map(|member| member.client.pages).sum();
    println!("{pages} pages in {steps} steps");
    world.finish()?;
    ensure!(pages > steps / 4, "only {pages} pages in {steps} steps");
    Ok(())
}

#[test]
fn s_04_rebuilds_among_everything_end_with_what_select_gives() -> anyhow::Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seed = number("TRIBUTARY_TEST_SEED").unwrap_or_else(rand::random::<u64>);
    let steps = number("TRIBUTARY_TEST_STEPS").unwrap_or(1000) as usize;
    println!("TRIBUTARY_TEST_SEED={seed} TRIBUTARY_TEST_STEPS={steps}");
    run(seed, steps).with_context(|| format!("TRIBUTARY_TEST_SEED={seed}"))
}

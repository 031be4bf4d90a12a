//! A seeded simulation over the real programs: random writers, clients and faults, and after every quiet point each
//! client holds what `SELECT` says.
//!
//! A run is a list of steps that its seed gives; a failure prints the list, which [`run`] takes back literally, and with
//! `TRIBUTARY_TEST_SHRINK` set the shortest list that it could be cut to. `TRIBUTARY_TEST_MINUTES` makes a soak of it.
//!
//! That no cursor passes an undelivered effect is checked with every terminal page: the client's digest of the rows that
//! were delivered to it must be the server's. Older states of a client go on, as a phone restored from a backup does.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::Signal;
use tributary_tests::client::{Client, ClientError, Rows};
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use crate::pull::model::seed;
use crate::sample::settle;

const CLIENTS: usize = 4;
const MATERIALIZERS: usize = 2;
const PULLERS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(90);

/// One thing that happens. Literal, so that a failing list can be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    /// A transaction of the application.
    Commit(String),
    /// A change of the schema that the configuration allows.
    Ddl(&'static str),
    /// A client pulls pages, some of whose answers are lost.
    Pull { client: usize, puller: usize, limit: i64, lose: bool },
    /// A client rebuilds one scope, and may lose answers or give up on the way.
    Rebuild { client: usize, scope: usize, limit: i64, lose: bool, give_up: bool },
    /// A client keeps what it holds, for [`Step::GoBack`].
    Keep { client: usize },
    /// A client goes on from what it kept.
    GoBack { client: usize },
    /// A client presents the cursors of another.
    Steal { client: usize, from: usize },
    /// A materializer is killed and started.
    Kill { materializer: usize },
    /// A materializer is told to go, and started.
    Term { materializer: usize },
    /// A materializer is paused until the next quiet point.
    Pause { materializer: usize },
    /// A materializer dies at a named point, and is started.
    Die { materializer: usize, point: &'static str },
    /// A puller is told to go or killed, and started with a clock that is off.
    Puller { puller: usize, kill: bool, skew_seconds: i64 },
    /// PostgreSQL is restarted, with a farewell or without.
    Postgres { immediate: bool },
    /// Every session of the materializers and pullers is ended.
    EndSessions,
    /// The slot is dropped, and the stream reset.
    LoseSlot,
    /// Everything runs and settles, and is compared.
    Quiet,
}

const DDL: [&str; 5] = [
    "alter table users add column if not exists unknown_to_us text default 'x'",
    "create index concurrently if not exists tasks_by_title on tasks (title)",
    "vacuum full comments",
    "alter table documents alter column body set storage external",
    "analyze; checkpoint",
];
const POINTS: [&str; 3] = ["before_commit", "before_acknowledgement", "before_commit:2"];

fn statement(random: &mut StdRng) -> String {
    let (user, other) = (random.random_range(1..=5), random.random_range(1..=5));
    let (n, m) = (random.random_range(1..=200), random.random_range(2..=40));
    match random.random_range(0..16) {
        0 => format!("update tasks set assignee_id = 'u_{other}' where assignee_id = 'u_{user}' and id % {m} = 0"),
        1 => format!("update tasks set archived = not archived, priority = {n} where id % {m} = 1"),
        2 => format!("update tasks set project_id = {m} where id % 97 = {n} % 97"),
        3 => format!(
            "insert into comments (task_id, author_id, body) select id, 'u_{user}', 'simulated {n}' from tasks where id % {m} = 0 limit {n}"
        ),
        4 => format!("delete from comments where id % {m} = 0"),
        5 => format!("update comments set author_id = 'u_{other}', body = body || '.' where id % {m} = 1"),
        6 => format!(
            "update templates set id = 'k{n}_' || left(md5(id), 12) where id in (select id from templates order by md5(id || '{n}') limit 3)"
        ),
        7 => format!("update templates set published = not published where left(md5(id), 1) = left(md5('{n}'), 1)"),
        8 => format!(
            "insert into templates select 'n{n}_' || k, 'N', '{{\"n\": {n}}}', k % 2 = 0 from generate_series(1, {m}) k on conflict (id) do update set name = templates.name || '+'"
        ),
        9 => format!("delete from templates where left(md5(id), 1) = left(md5('{m}'), 1)"),
        10 => format!(
            "update documents set body = (select string_agg(md5(k::text || '{n}'), '') from generate_series(1, 300) k) where owner_id = 'u_{user}' and left(id::text, 1) = left(md5('{m}'), 1)"
        ),
        11 => format!(
            "update documents set id = md5(id::text || '{n}')::uuid, title = 'moved {n}' where owner_id = 'u_{user}' and left(id::text, 1) = left(md5('{n}'), 1)"
        ),
        12 => format!(
            "update documents set owner_id = 'u_{other}' where owner_id = 'u_{user}' and left(id::text, 1) = left(md5('{n}{m}'), 1)"
        ),
        13 => format!(
            "insert into members (project_id, user_id) values ({m}, 'u_{user}') on conflict do nothing; delete from members where project_id = {m} and user_id = 'u_{other}'"
        ),
        14 => format!(
            "savepoint s; delete from tasks where id % 7 = 0; update templates set name = 'lost'; rollback to s; update projects set budget = {n} where owner_id = 'u_{user}'"
        ),
        _ if n % 8 == 0 => format!(
            "create temporary table if not exists c (like comments) on commit drop; insert into c select * from comments; truncate comments; insert into comments select * from c where id % {m} <> 0"
        ),
        _ => format!("select tributary.accept_write('u_{user}', 'simulated-{}')", user % CLIENTS),
    }
}

fn step(random: &mut StdRng) -> Step {
    let client = random.random_range(0..CLIENTS);
    let materializer = random.random_range(0..MATERIALIZERS);
    match random.random_range(0..1000) {
        0..420 => {
            let statements: Vec<_> = (0..random.random_range(1..4)).map(|_| statement(random)).collect();
            let end = if random.random_bool(0.1) { "rollback" } else { "commit" };
            Step::Commit(format!("begin; {}; {end}", statements.join("; ")))
        }
        420..700 => Step::Pull {
            client,
            puller: random.random_range(0..PULLERS),
            limit: [1, 3, 20, 100, 1000][random.random_range(0..5)],
            lose: random.random_bool(0.2),
        },
        700..760 => Step::Rebuild {
            client,
            scope: random.random_range(0..20),
            limit: [1, 7, 50, 1000][random.random_range(0..4)],
            lose: random.random_bool(0.3),
            give_up: random.random_bool(0.2),
        },
        760..800 => Step::Keep { client },
        800..830 => Step::GoBack { client },
        830..860 => Step::Steal { client, from: (client + random.random_range(1..CLIENTS)) % CLIENTS },
        860..885 => Step::Kill { materializer },
        885..900 => Step::Term { materializer },
        900..915 => Step::Pause { materializer },
        915..925 => Step::Die { materializer, point: POINTS[random.random_range(0..POINTS.len())] },
        925..940 => Step::Puller {
            puller: random.random_range(0..PULLERS),
            kill: random.random_bool(0.5),
            skew_seconds: random.random_range(-3600..3600),
        },
        940..947 => Step::Postgres { immediate: random.random_bool(0.5) },
        947..960 => Step::EndSessions,
        960..964 => Step::LoseSlot,
        964..975 => Step::Ddl(DDL[random.random_range(0..DDL.len())]),
        _ => Step::Quiet,
    }
}

/// What a client can go back to.
type Kept = (std::collections::BTreeMap<String, Option<String>>, std::collections::BTreeMap<String, Rows>, i64);

struct Simulation {
    sandbox: Sandbox,
    clients: Vec<Client>,
    kept: Vec<Option<Kept>>,
    fresh: usize,
    /// Materializers that may still come to the named point that they are to die at.
    armed: [bool; MATERIALIZERS],
}

/// An answer that a client may get in such a world; anything else ends the simulation.
fn tolerable(outcome: Result<(), ClientError>) -> anyhow::Result<()> {
    match outcome {
        Ok(()) | Err(ClientError::Transport(_) | ClientError::Api { status: 429 | 503, .. }) => Ok(()),
        Err(ClientError::Api { code, .. }) if code == "rebuild_restart_required" => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Simulation {
    fn start() -> anyhow::Result<Self> {
        let sandbox = Sandbox::start(Options {
            materializers: MATERIALIZERS,
            pullers: PULLERS,
            materializer_args: ["--lease-seconds", "2", "--batch-rows", "200"].map(Into::into).into(),
            ..Options::default()
        })?;
        let clients = (0..CLIENTS)
            .map(|number| sandbox.client(&Self::user(number), &format!("simulated-{number}")))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let mut simulation =
            Self { sandbox, clients, kept: vec![None; CLIENTS], fresh: 0, armed: [false; MATERIALIZERS] };
        simulation.quiet()?;
        Ok(simulation)
    }

    /// `statement` accepts writes for these users and clients.
    fn user(client: usize) -> String {
        format!("u_{}", if client == 0 { CLIENTS } else { client })
    }

    fn perform(&mut self, step: &Step) -> anyhow::Result<()> {
        match step {
            Step::Commit(sql) => self.sandbox.source()?.run(sql).or_else(|error| {
                // What the application's own constraints refuse is rolled back.
                if error.to_string().contains("constraint") { Ok(()) } else { Err(error) }
            }),
            Step::Ddl(sql) => {
                let source = self.sandbox.source()?;
                sql.split("; ").try_for_each(|statement| source.run(statement))
            }
            Step::Pull { client, puller, limit, lose } => {
                let client = &mut self.clients[*client];
                client.http.redirect(self.sandbox.pullers[*puller].url.as_deref().context("a puller has an address")?);
                if *lose {
                    client.http.lose_next_answer();
                    tolerable(client.pull_page(*limit).map(|_| ()))?;
                }
                tolerable(client.pull_page(*limit).map(|_| ()))
            }
            Step::Rebuild { client, scope, limit, lose, give_up } => {
                let client = &mut self.clients[*client];
                let Some(scope) = client.scopes.keys().nth(scope % client.scopes.len().max(1)).cloned() else {
                    return Ok(());
                };
                let mut rebuild = client.start_rebuild(&scope, *limit);
                for page in 0..3000 {
                    if rebuild.finished || (*give_up && page == 3) {
                        break;
                    }
                    if *lose && page % 3 == 0 {
                        client.http.lose_next_answer();
                        tolerable(client.rebuild_page(&mut rebuild).map(|_| ()))?;
                    }
                    let outcome = client.rebuild_page(&mut rebuild).map(|_| ());
                    let over = outcome.is_err();
                    match outcome {
                        // A scope that was taken away meanwhile; the next pull says so.
                        Err(ClientError::Api { status: 400, .. }) => return Ok(()),
                        outcome => tolerable(outcome)?,
                    }
                    if over {
                        break;
                    }
                }
                Ok(())
            }
            Step::Keep { client } => {
                let held = &self.clients[*client];
                self.kept[*client] = Some((held.scopes.clone(), held.rows.clone(), held.scope_set_version));
                Ok(())
            }
            Step::GoBack { client } => {
                let held = &mut self.clients[*client];
                if let Some((scopes, rows, version)) = self.kept[*client].clone() {
                    (held.scopes, held.rows, held.scope_set_version) = (scopes, rows, version);
                }
                Ok(())
            }
            Step::Steal { client, from } => self.steal(*client, *from),
            Step::Kill { materializer } => Ok(self.sandbox.materializers[*materializer].process.restart()?),
            Step::Term { materializer } => {
                let process = &mut self.sandbox.materializers[*materializer].process;
                process.signal(Signal::CONT);
                process.signal(Signal::TERM);
                ensure!(process.ended_within(PATIENCE), "a materializer stays after SIGTERM");
                Ok(process.restart()?)
            }
            Step::Pause { materializer } => {
                self.sandbox.materializers[*materializer].process.signal(Signal::STOP);
                Ok(())
            }
            Step::Die { materializer, point } => {
                let process = &mut self.sandbox.materializers[*materializer].process;
                process.set_env("TRIBUTARY_FAILPOINT", *point);
                process.restart()?;
                // Only a leader comes to it; the next start of the process is without.
                process.set_env("TRIBUTARY_FAILPOINT", "before_commit:4000000000");
                self.armed[*materializer] = true;
                Ok(())
            }
            Step::Puller { puller, kill, skew_seconds } => {
                let process = &mut self.sandbox.pullers[*puller].process;
                process.signal(if *kill { Signal::KILL } else { Signal::TERM });
                ensure!(process.ended_within(PATIENCE), "a puller stays after SIGTERM");
                process.set_env("TRIBUTARY_CLOCK_OFFSET_SECONDS", skew_seconds.to_string());
                Ok(process.restart()?)
            }
            Step::Postgres { immediate } => {
                if *immediate {
                    self.sandbox.postgres.process.signal(Signal::QUIT);
                    ensure!(self.sandbox.postgres.process.ended_within(PATIENCE), "PostgreSQL stays");
                }
                self.sandbox.postgres.restart()
            }
            Step::EndSessions => self
                .sandbox
                .source()?
                .run("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tributary%'"),
            Step::LoseSlot => self.lose_slot(),
            Step::Quiet => self.quiet(),
        }
    }

    fn steal(&mut self, client: usize, from: usize) -> anyhow::Result<()> {
        let own = self.clients[client].scopes.clone();
        let stolen = self.clients[from].scopes.get("templates_public").cloned().flatten();
        let Some(stolen) = stolen else { return Ok(()) };
        let thief = &mut self.clients[client];
        thief.scopes.insert("templates_public".to_owned(), Some(stolen));
        let outcome = thief.pull_page(10);
        thief.scopes = own;
        match outcome {
            Err(ClientError::Api { status: 400, code, .. }) if code == "invalid_request" => Ok(()),
            Ok(_) => bail!("a stolen cursor was honoured"),
            Err(error) => tolerable(Err(error)),
        }
    }

    fn lose_slot(&mut self) -> anyhow::Result<()> {
        self.run_all()?;
        let source = self.sandbox.source()?;
        let existing = "select count(*) from pg_replication_slots where slot_name = 'tributary'";
        eventually(PATIENCE, || {
            source.run("select pg_terminate_backend(active_pid) from pg_replication_slots where active")?;
            if source.number(existing)? > 0 {
                source.run("select pg_drop_replication_slot('tributary')")
            } else {
                Ok(())
            }
        })?;
        source.run("update tasks set title = title || ' unseen' where id % 5 = 0")?;
        self.sandbox.reset()
    }

    /// Everything runs.
    fn run_all(&mut self) -> anyhow::Result<()> {
        for service in self.sandbox.materializers.iter_mut().chain(&mut self.sandbox.pullers) {
            service.process.signal(Signal::CONT);
        }
        // Who was to die at a named point and did not come to it goes on without.
        for (service, armed) in self.sandbox.materializers.iter_mut().zip(&mut self.armed) {
            if std::mem::take(armed) {
                service.process.restart()?;
            }
        }
        // One that starts while sessions are ended gives up, for its supervisor to start it again.
        let mut outcome = Ok(());
        for _ in 0..4 {
            for service in self.sandbox.materializers.iter_mut().chain(&mut self.sandbox.pullers) {
                if service.process.exited().is_some() {
                    service.process.restart()?;
                }
            }
            outcome = self.sandbox.wait_until_ready();
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    fn quiet(&mut self) -> anyhow::Result<()> {
        self.run_all()?;
        let source = self.sandbox.source()?;
        for (number, client) in self.clients.iter_mut().enumerate() {
            client.http.redirect(self.sandbox.pullers[number % PULLERS].url.as_deref().unwrap_or_default());
            // A scope that was taken away while it waited for its rebuild: the pull says so, a rebuild is refused.
            if !client.scopes.is_empty() {
                tolerable(client.pull_page(100).map(|_| ()))?;
            }
            let settled = settle(client, &source, &Self::user(number), 100);
            settled.with_context(|| format!("client {number}"))?;
        }
        self.fresh += 1;
        let number = self.fresh % CLIENTS;
        let mut rebuilt = self.sandbox.client(&Self::user(number), &format!("fresh-{}", self.fresh))?;
        settle(&mut rebuilt, &source, &Self::user(number), 1000).context("a fresh client")?;
        ensure!(rebuilt.rows == self.clients[number].rows, "pulled and rebuilt rows differ");
        let state = self.sandbox.state()?;
        let beyond = "select count(*) from tributary.client_scope cs, tributary.progress p where cs.acknowledged_lsn > p.boundary_lsn";
        ensure!(state.number(beyond)? == 0, "an acknowledged position is beyond the boundary");
        let open = "select count(*) from tributary.quarantine where resolved_at is null";
        ensure!(state.number(open)? == 0, "a transaction is quarantined");
        let status = self.sandbox.status()?;
        ensure!(status.findings().is_empty(), "{}", status.json);
        Ok(())
    }
}

/// Runs a list of steps; which one failed.
fn run(steps: &[Step]) -> Result<(), (usize, anyhow::Error)> {
    let mut simulation = Simulation::start().map_err(|error| (0, error))?;
    for (number, step) in steps.iter().enumerate() {
        simulation.perform(step).map_err(|error| (number, error.context(format!("in step {number}, {step:?}"))))?;
    }
    simulation.quiet().map_err(|error| (steps.len(), error))
}

/// Runs random steps for a time; on a failure says how to have it again.
fn simulate(seed: u64, time: Duration) -> anyhow::Result<()> {
    println!("seed {seed}: TRIBUTARY_TEST_SEED={seed} replays it");
    let mut random = StdRng::seed_from_u64(seed);
    let mut simulation = Simulation::start()?;
    let mut steps = Vec::new();
    let (mut quiet, end) = (0, Instant::now() + time);
    while Instant::now() < end {
        let next = step(&mut random);
        steps.push(next.clone());
        quiet += usize::from(next == Step::Quiet);
        if let Err(error) = simulation.perform(&next) {
            drop(simulation);
            return Err(failure(seed, steps, error));
        }
    }
    steps.push(Step::Quiet);
    if let Err(error) = simulation.quiet() {
        drop(simulation);
        return Err(failure(seed, steps, error));
    }
    println!("{} steps, {quiet} quiet points", steps.len());
    ensure!(steps.len() > 30, "only {} steps", steps.len());
    Ok(())
}

/// The error with its list of steps, shrunk if that is asked for.
fn failure(seed: u64, mut steps: Vec<Step>, error: anyhow::Error) -> anyhow::Error {
    if std::env::var_os("TRIBUTARY_TEST_SHRINK").is_some() {
        let mut chunk = steps.len() / 2;
        while chunk > 0 {
            let mut start = 0;
            while start < steps.len() {
                let mut shorter = steps.clone();
                shorter.drain(start..(start + chunk).min(steps.len()));
                match run(&shorter) {
                    Err((at, _)) => {
                        shorter.truncate(at + 1);
                        steps = shorter;
                    }
                    Ok(()) => start += chunk,
                }
            }
            chunk /= 2;
        }
    }
    error.context(format!("seed {seed}, steps {steps:#?}"))
}

fn time() -> Duration {
    let minutes = std::env::var("TRIBUTARY_TEST_MINUTES").ok().and_then(|text| text.parse::<u64>().ok());
    minutes.map_or(Duration::from_secs(30), |minutes| Duration::from_secs(60 * minutes))
}

#[test]
fn a_simulated_world_converges_with_a_fixed_seed() -> anyhow::Result<()> {
    simulate(20_260_718, time())
}

#[test]
fn a_simulated_world_converges_with_any_seed() -> anyhow::Result<()> {
    simulate(seed(), time())
}

/// Lists that once failed, and a short one of everything.
#[test]
fn literal_steps_converge() -> anyhow::Result<()> {
    let write = |n: u32| {
        Step::Commit(format!(
            "begin; update tasks set priority = {n} where id % 3 = 0; update templates set id = 'm{n}' where id = (select min(id) from templates); commit"
        ))
    };
    let steps = [
        write(1),
        Step::Keep { client: 0 },
        Step::Pull { client: 0, puller: 0, limit: 3, lose: true },
        Step::Die { materializer: 0, point: "before_commit" },
        write(2),
        Step::Pause { materializer: 1 },
        write(3),
        Step::GoBack { client: 0 },
        Step::Puller { puller: 0, kill: false, skew_seconds: 900 },
        Step::Steal { client: 1, from: 2 },
        Step::Quiet,
        Step::LoseSlot,
        Step::Rebuild { client: 2, scope: 4, limit: 7, lose: true, give_up: true },
        Step::EndSessions,
        write(4),
        Step::Ddl("vacuum full comments"),
        Step::Postgres { immediate: true },
        Step::Quiet,
    ];
    run(&steps).map_err(|(_, error)| error)
}

//! A whole Tributary on one machine: PostgreSQL, the application's schema, materializers, pullers.
//!
//! Tests start it in their own process, the `sandbox` binary from the command line. Whatever ends the process ends
//! everything that it started (see [`crate::processes`]).

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::Signal;

use crate::client::Client;
use crate::database::Database;
use crate::http;
use crate::pg::{APPLICATION_DATABASE, PgOptions, Postgres, STATE_DATABASE};
use crate::ports;
use crate::processes::{Launch, Process};
use crate::ready::{Ready, ReadyMaterializer, ReadyPostgres, ReadyPuller};
use crate::sample::Sample;
use crate::secrets::{Secrets, bearer_token, bearer_token_valid_for};

/// What our binaries get to drain; the sandbox waits a little longer.
const GRACE: Duration = Duration::from_secs(5);
/// Never set: for sandboxes that nobody interrupts.
static NEVER: AtomicBool = AtomicBool::new(false);

/// Work on the application's database between its schema and the materializers.
pub type Prepare = Box<dyn FnOnce(&Postgres) -> anyhow::Result<()>>;

/// What a sandbox is to be like. The default is the sample application on free ports in a directory that goes away.
pub struct Options {
    /// Keep everything here; a directory that holds a sandbox is started again.
    pub dir: Option<PathBuf>,
    /// What is synchronized; the sample's when not given.
    pub config: Option<PathBuf>,
    /// SQL files of the application; the sample's when not given.
    pub schema: Option<Vec<PathBuf>>,
    /// More work before the materializers start, on a fresh database only.
    pub prepare: Option<Prepare>,
    /// Number of pullers.
    pub pullers: usize,
    /// Number of materializers.
    pub materializers: usize,
    /// First of a row of ports; 0 takes free ones.
    pub port_base: u16,
    /// Where PostgreSQL's binaries are.
    pub pg_bin: Option<PathBuf>,
    /// PostgreSQL's settings, `name=value`.
    pub pg_settings: Vec<String>,
    /// Keep the state in a database of its own.
    pub split: bool,
    /// Keep the state in this database instead, of another server.
    pub state_elsewhere: Option<String>,
    /// More arguments for the materializers.
    pub materializer_args: Vec<OsString>,
    /// More arguments for the pullers.
    pub puller_args: Vec<OsString>,
    /// How long the programs may take until they are ready.
    pub ready_within: Duration,
    /// Set from outside to give up starting.
    pub cancelled: &'static AtomicBool,
    /// Told what goes on.
    pub say: fn(&str),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            dir: None,
            config: None,
            schema: None,
            prepare: None,
            pullers: 1,
            materializers: 1,
            port_base: 0,
            pg_bin: None,
            pg_settings: Vec::new(),
            // Set by tests/run.sh for its second round.
            split: std::env::var_os("TRIBUTARY_TEST_SPLIT").is_some(),
            state_elsewhere: None,
            materializer_args: Vec::new(),
            puller_args: Vec::new(),
            ready_within: Duration::from_secs(120),
            cancelled: &NEVER,
            say: |_| {},
        }
    }
}

/// One of our programs.
#[derive(Debug)]
pub struct Service {
    /// Its process.
    pub process: Process,
    /// Where it serves clients; pullers only.
    pub url: Option<String>,
    /// Where it answers probes.
    pub admin_url: String,
}

impl Service {
    /// The status of `/readyz`; `None` when nothing answers.
    pub fn readiness(&self) -> Option<u16> {
        http::get(&format!("{}/readyz", self.admin_url)).ok().map(|response| response.status)
    }
}

/// A running sandbox. Dropping it stops it.
#[derive(Debug)]
pub struct Sandbox {
    // Fields drop in this order: clients of PostgreSQL before it, the directory last.
    /// The pullers.
    pub pullers: Vec<Service>,
    /// The materializers.
    pub materializers: Vec<Service>,
    /// PostgreSQL.
    pub postgres: Postgres,
    config: PathBuf,
    secrets: Secrets,
    split: bool,
    state_elsewhere: Option<String>,
    ready_within: Duration,
    cancelled: &'static AtomicBool,
    dir: Directory,
}

impl Sandbox {
    /// Start everything and wait until it is ready.
    ///
    /// # Errors
    /// Something is missing or did not start; the message says what, and nothing is left running.
    pub fn start(options: Options) -> anyhow::Result<Self> {
        let dir = Directory::open(options.dir.as_deref())?;
        let secrets = Secrets::load_or_create(&dir.path.join("sandbox.json"))?;
        let mut ports = ports::choose(options.port_base, 1 + 2 * options.pullers + options.materializers)?.into_iter();
        let mut port = move || ports.next().context("a port for each program was chosen");
        let sample = Sample::write(&dir.path.join("sample"))?;
        let config = match &options.config {
            Some(config) => config.canonicalize().with_context(|| format!("cannot read {}", config.display()))?,
            None => sample.config,
        };
        (options.say)("starting PostgreSQL");
        let postgres = Postgres::start(&PgOptions {
            dir: dir.path.clone(),
            bin_dir: options.pg_bin,
            port: port()?,
            settings: options.pg_settings,
            password: secrets.database_password.clone(),
            cancelled: options.cancelled,
        })?;
        let mut sandbox = Self {
            pullers: Vec::new(),
            materializers: Vec::new(),
            postgres,
            config,
            secrets,
            split: options.split,
            state_elsewhere: options.state_elsewhere,
            ready_within: options.ready_within,
            cancelled: options.cancelled,
            dir,
        };
        let applied = sandbox.dir.path.join("schema-applied");
        if !applied.exists() {
            (options.say)("applying the application's schema");
            sandbox.create_databases()?;
            for file in options.schema.unwrap_or(sample.schema) {
                sandbox.postgres.run_file(APPLICATION_DATABASE, &file)?;
            }
            if let Some(prepare) = options.prepare {
                prepare(&sandbox.postgres)?;
            }
            fs::write(applied, "")?;
        }
        let puller_ports = (0..options.pullers).map(|_| Ok((port()?, port()?))).collect::<anyhow::Result<Vec<_>>>()?;
        if options.materializers > 0 {
            (options.say)("starting the materializer and waiting for its baseline");
        }
        for number in 0..options.materializers {
            let service = sandbox.materializer(number, port()?, &options.materializer_args)?;
            sandbox.materializers.push(service);
        }
        // Pullers come after the state's schema, which the materializer makes.
        sandbox.wait_until_ready()?;
        if options.pullers > 0 {
            (options.say)("starting the pullers");
        }
        for (number, (listen, admin)) in puller_ports.into_iter().enumerate() {
            let service = sandbox.puller(number, listen, admin, &options.puller_args)?;
            sandbox.pullers.push(service);
        }
        sandbox.wait_until_ready()?;
        Ok(sandbox)
    }

    /// Where everything is.
    pub fn ready(&self) -> Ready {
        Ready {
            database_url: self.source_url(),
            state_url: (self.split || self.state_elsewhere.is_some()).then(|| self.state_url()),
            jwt_secret: self.secrets.jwt_secret.clone(),
            pg: ReadyPostgres {
                data_dir: self.postgres.data_dir().display().to_string(),
                port: self.postgres.port(),
                pid: self.postgres.process.pid(),
            },
            materializers: self
                .materializers
                .iter()
                .map(|service| ReadyMaterializer { admin_url: service.admin_url.clone(), pid: service.process.pid() })
                .collect(),
            pullers: self
                .pullers
                .iter()
                .map(|service| ReadyPuller {
                    url: service.url.clone().unwrap_or_default(),
                    admin_url: service.admin_url.clone(),
                    pid: service.process.pid(),
                })
                .collect(),
        }
    }

    /// The sandbox's directory.
    pub fn dir(&self) -> &Path {
        &self.dir.path
    }

    /// The configuration in force.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// The address of the application's database.
    pub fn source_url(&self) -> String {
        self.postgres.url(APPLICATION_DATABASE)
    }

    /// The address of the state's database.
    pub fn state_url(&self) -> String {
        if let Some(elsewhere) = &self.state_elsewhere {
            return elsewhere.clone();
        }
        self.postgres.url(if self.split { STATE_DATABASE } else { APPLICATION_DATABASE })
    }

    /// A session in the application's database.
    ///
    /// # Errors
    /// PostgreSQL refuses.
    pub fn source(&self) -> anyhow::Result<Database> {
        Database::connect(&self.source_url())
    }

    /// A session in the state's database.
    ///
    /// # Errors
    /// PostgreSQL refuses.
    pub fn state(&self) -> anyhow::Result<Database> {
        Database::connect(&self.state_url())
    }

    /// A bearer token of a user.
    ///
    /// # Errors
    /// The secret is no key.
    pub fn token(&self, user: &str) -> anyhow::Result<String> {
        bearer_token(&self.secrets.jwt_secret, user)
    }

    /// A bearer token of a user that outlives tests which shift the clock by days.
    ///
    /// # Errors
    /// The secret is no key.
    pub fn lasting_token(&self, user: &str) -> anyhow::Result<String> {
        bearer_token_valid_for(&self.secrets.jwt_secret, user, Duration::from_secs(30 * 24 * 3600))
    }

    /// A fresh installation of a user, at the first puller.
    ///
    /// # Errors
    /// There is no puller.
    pub fn client(&self, user: &str, client_id: &str) -> anyhow::Result<Client> {
        let url = self.pullers.first().and_then(|puller| puller.url.as_deref()).context("the sandbox has no puller")?;
        Ok(Client::new(url, &self.token(user)?, client_id))
    }

    /// Wait until every program says that it is ready.
    ///
    /// # Errors
    /// One ended, or is not ready in time; the message holds its last words.
    pub fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.ready_within;
        for service in self.materializers.iter_mut().chain(&mut self.pullers) {
            while service.readiness() != Some(200) {
                if let Some(status) = service.process.exited() {
                    bail!("{} ended ({status}): {}", service.process.name(), service.process.last_words());
                }
                if self.cancelled.load(Ordering::Relaxed) {
                    bail!("interrupted");
                }
                if Instant::now() > deadline {
                    let words = service.process.last_words();
                    bail!("{} is not ready after {:?}: {words}", service.process.name(), self.ready_within);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Programs that ended by themselves, with their last words.
    pub fn ended(&mut self) -> Vec<String> {
        let services = self.materializers.iter_mut().chain(&mut self.pullers).map(|service| &mut service.process);
        services
            .chain([&mut self.postgres.process])
            .filter_map(|process| {
                let status = process.exited()?;
                Some(format!("{} ended ({status}): {}", process.name(), process.last_words()))
            })
            .collect()
    }

    /// Stop all programs in order; PostgreSQL last.
    pub fn stop(&mut self) {
        for service in self.pullers.iter_mut().chain(&mut self.materializers) {
            service.process.signal(Signal::TERM);
        }
        for service in self.pullers.iter_mut().chain(&mut self.materializers) {
            service.process.stop(Signal::TERM, GRACE + Duration::from_secs(3));
        }
        self.postgres.stop();
    }

    /// How a materializer is started here, for tests that start one of their own.
    ///
    /// # Errors
    /// Its binary is missing.
    pub fn materializer_launch(&self, name: &str) -> anyhow::Result<Launch> {
        let env = vec![
            ("TRIBUTARY_SOURCE_URL".to_owned(), self.source_url().into()),
            ("TRIBUTARY_STATE_URL".to_owned(), self.state_url().into()),
        ];
        Ok(self.launch(name, binary("materializer")?, env))
    }

    fn create_databases(&self) -> anyhow::Result<()> {
        let server = self.postgres.connect("postgres")?;
        let wanted = [Some(APPLICATION_DATABASE), self.split.then_some(STATE_DATABASE)];
        for database in wanted.into_iter().flatten() {
            // What an interrupted first start left behind is incomplete.
            server.run(&format!("drop database if exists {database} with (force)"))?;
            server.run(&format!("create database {database}"))?;
        }
        Ok(())
    }

    fn materializer(&self, number: usize, admin: u16, more: &[OsString]) -> anyhow::Result<Service> {
        let mut launch = self.materializer_launch(&format!("materializer-{number}"))?;
        launch.args = ["run", "--config"].map(OsString::from).into();
        launch.args.push(self.config.clone().into());
        launch.args.extend(flags(&[
            ("--admin-listen", format!("127.0.0.1:{admin}")),
            ("--grace-seconds", GRACE.as_secs().to_string()),
        ]));
        launch.args.extend_from_slice(more);
        Ok(Service { process: launch.start()?, url: None, admin_url: format!("http://127.0.0.1:{admin}") })
    }

    fn puller(&self, number: usize, listen: u16, admin: u16, more: &[OsString]) -> anyhow::Result<Service> {
        let env = vec![
            ("TRIBUTARY_SOURCE_URL".to_owned(), self.source_url().into()),
            ("TRIBUTARY_STATE_URL".to_owned(), self.state_url().into()),
            ("TRIBUTARY_JWT_SECRET".to_owned(), self.secrets.jwt_secret.clone().into()),
            ("TRIBUTARY_TOKEN_KEYS".to_owned(), self.secrets.token_keys.clone().into()),
        ];
        let mut launch = self.launch(&format!("puller-{number}"), binary("puller")?, env);
        launch.args = flags(&[
            ("--listen", format!("127.0.0.1:{listen}")),
            ("--admin-listen", format!("127.0.0.1:{admin}")),
            ("--grace-seconds", GRACE.as_secs().to_string()),
        ]);
        launch.args.extend_from_slice(more);
        Ok(Service {
            process: launch.start()?,
            url: Some(format!("http://127.0.0.1:{listen}")),
            admin_url: format!("http://127.0.0.1:{admin}"),
        })
    }

    fn launch(&self, name: &str, program: PathBuf, env: Vec<(String, OsString)>) -> Launch {
        let log = self.dir.path.join("log").join(format!("{name}.log"));
        Launch { name: name.to_owned(), program, args: Vec::new(), env, log, user: None, on_parent_death: "TERM" }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.stop();
    }
}

fn flags(pairs: &[(&str, String)]) -> Vec<OsString> {
    pairs.iter().flat_map(|(name, value)| [OsString::from(name), value.into()]).collect()
}

/// One of our binaries: where `SANDBOX_<NAME>` says, else beside this program (or, for a test, one directory up).
///
/// # Errors
/// It has not been built.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(format!("SANDBOX_{}", name.to_uppercase())) {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    own.ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("the {name} binary is not beside {}: build it with cargo build", own.display()))
}

/// Try until it succeeds or time is up; then the last error.
///
/// # Errors
/// It never succeeded.
pub fn eventually<T>(within: Duration, mut attempt: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + within;
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > deadline => return Err(error.context(format!("not within {within:?}"))),
            Err(_) => std::thread::sleep(Duration::from_millis(25)),
        }
    }
}

/// The directory of a sandbox; removed at the end unless the user chose it.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    temporary: bool,
}

impl Directory {
    fn open(chosen: Option<&Path>) -> anyhow::Result<Self> {
        let path = match chosen {
            Some(path) => std::path::absolute(path)?,
            None => std::env::temp_dir().join(format!("tributary-{}", uuid::Uuid::new_v4().simple())),
        };
        let directory = Self { path, temporary: chosen.is_none() };
        fs::create_dir_all(directory.path.join("log"))
            .with_context(|| format!("cannot make {}", directory.path.display()))?;
        if directory.temporary {
            // PostgreSQL's user passes through it to its own directory, which is closed to others.
            fs::set_permissions(&directory.path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(directory)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.temporary {
            // Nothing reads it any more; what cannot be removed stays in the system's temporary directory.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

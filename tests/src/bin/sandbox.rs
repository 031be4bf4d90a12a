//! `sandbox`: a whole Tributary on this machine with one command. See `sandbox --help` and the README.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use tributary_tests::demo;
use tributary_tests::ready::Ready;
use tributary_tests::sandbox::{Options, Sandbox};
use tributary_tests::secrets::bearer_token;

/// Set by SIGINT and SIGTERM.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A whole Tributary on this machine: a private PostgreSQL, the sample application, a materializer and pullers.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start everything, say how to try it, and run until Ctrl-C; without options: the sample application.
    Up(Up),
    /// Print a bearer token of a user, valid for one day.
    Token {
        /// The user.
        #[arg(long)]
        user: String,
        /// What `sandbox up --ready-file` wrote.
        #[arg(long)]
        ready_file: PathBuf,
    },
    /// A visible round trip on the sample application: write, connect, rebuild, pull, verify.
    Demo {
        /// Use this running sandbox instead of one of its own.
        #[arg(long)]
        ready_file: Option<PathBuf>,
        /// Keep the state in a database of its own (own sandbox only).
        #[arg(long, conflicts_with = "ready_file")]
        split: bool,
        /// Where PostgreSQL's binaries are (own sandbox only).
        #[arg(long, conflicts_with = "ready_file")]
        pg_bin: Option<PathBuf>,
    },
}

#[derive(Args)]
struct Up {
    /// Keep everything in this directory, and start what it holds again. Without it, a temporary one.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// What is synchronized. Without it, the sample application's.
    #[arg(long)]
    config: Option<PathBuf>,
    /// SQL file to apply to the new database; can be repeated. Without it, the sample application's.
    #[arg(long)]
    schema: Vec<PathBuf>,
    /// Number of pullers.
    #[arg(long, default_value_t = 1)]
    pullers: usize,
    /// Number of materializers; one leads, the others stand by.
    #[arg(long, default_value_t = 1)]
    materializers: usize,
    /// First port: PostgreSQL's; the materializers' admin ports and each puller's two follow. 0: any free ports.
    #[arg(long, default_value_t = 7400)]
    port_base: u16,
    /// Write where everything is, as JSON with secrets, once all is ready.
    #[arg(long)]
    ready_file: Option<PathBuf>,
    /// Where PostgreSQL's binaries are. Without it, the newest installed.
    #[arg(long)]
    pg_bin: Option<PathBuf>,
    /// A setting of PostgreSQL, name=value; can be repeated.
    #[arg(long = "pg-setting", value_parser = setting)]
    pg_setting: Vec<String>,
    /// Keep the state in a database of its own.
    #[arg(long)]
    split: bool,
}

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line: causes after colons, log excerpts joined.
            let message = format!("{error:#}").lines().collect::<Vec<_>>().join(" | ");
            let _ = writeln!(io::stderr(), "sandbox: {message}");
            ExitCode::FAILURE
        }
    }
}

impl Cli {
    fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Up(up) => up.run(),
            Command::Token { user, ready_file } => {
                say(&bearer_token(&Ready::read(&ready_file)?.jwt_secret, &user)?);
                Ok(())
            }
            Command::Demo { ready_file: Some(path), .. } => demo::run(&Ready::read(&path)?, &mut io::stdout()),
            Command::Demo { ready_file: None, split, pg_bin } => {
                watch_signals()?;
                let options = Options { split, pg_bin, cancelled: &INTERRUPTED, say, ..Options::default() };
                let sandbox = Sandbox::start(options)?;
                demo::run(&sandbox.ready(), &mut io::stdout())
            }
        }
    }
}

impl Up {
    fn run(self) -> anyhow::Result<()> {
        watch_signals()?;
        if let Some(path) = &self.ready_file {
            // What an earlier sandbox left behind must not look like this one being ready.
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot replace {}", path.display()));
                }
                _ => {}
            }
        }
        let mut sandbox = Sandbox::start(Options {
            dir: self.dir,
            config: self.config,
            schema: (!self.schema.is_empty()).then_some(self.schema),
            pullers: self.pullers,
            materializers: self.materializers,
            port_base: self.port_base,
            pg_bin: self.pg_bin,
            pg_settings: self.pg_setting,
            split: self.split,
            cancelled: &INTERRUPTED,
            say,
            ..Options::default()
        })?;
        let ready = sandbox.ready();
        if let Some(path) = &self.ready_file {
            ready.write(path)?;
        }
        explain(&sandbox, &ready, self.ready_file.as_deref())?;
        let mut told = Vec::new();
        while !INTERRUPTED.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
            // A program that ends does not end the sandbox: whoever ended it may want to see what the others do.
            for ended in sandbox.ended() {
                if !told.contains(&ended) {
                    say(&ended);
                    told.push(ended);
                }
            }
        }
        say("stopping");
        sandbox.stop();
        if let Some(path) = &self.ready_file {
            // It named what is gone; a reader that finds it missing is not misled.
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }
}

/// How to try a sandbox by hand.
fn explain(sandbox: &Sandbox, ready: &Ready, ready_file: Option<&std::path::Path>) -> anyhow::Result<()> {
    let user = "u_1";
    say("");
    say(&format!("Ready, in {}. Ctrl-C stops it.", sandbox.dir().display()));
    say(&format!("  PostgreSQL    psql '{}'", ready.database_url));
    if let Some(state) = &ready.state_url {
        say(&format!("  state         psql '{state}'"));
    }
    for materializer in &ready.materializers {
        say(&format!("  materializer  {}/readyz  /metrics", materializer.admin_url));
    }
    for puller in &ready.pullers {
        say(&format!("  puller        {}  (admin {})", puller.url, puller.admin_url));
    }
    if let Some(puller) = ready.pullers.first() {
        say("");
        say(&format!("A client of user {user}:"));
        say(&format!("  TOKEN={}", bearer_token(&ready.jwt_secret, user)?));
        say(&format!(
            "  curl -s {}/sync/connect -H \"Authorization: Bearer $TOKEN\" -H 'Content-Type: application/json' -d '{}'",
            puller.url,
            concat!(
                r#"{"client_id":"by-hand","platform":"curl","app_version":"1","protocol_version":3,"#,
                r#""schema":{"version":0,"hash":""},"scope_set_version":0,"known_scopes":{}}"#
            )
        ));
        say("The answer holds client_generation, scope_set_version and schema; with them:");
        say(&format!(
            "  curl -s {}/sync/rebuild -H \"Authorization: Bearer $TOKEN\" -H 'Content-Type: application/json' -d '{}'",
            puller.url,
            concat!(
                r#"{"client_id":"by-hand","client_generation":1,"schema":{"version":1,"hash":"HASH"},"#,
                r#""scope":"SCOPE","rebuild_id":"0197e83a-f7e8-7e21-92c0-c621732bd5de","cursor":null,"limit":100}"#
            )
        ));
        say(&format!(
            "  curl -s {}/sync/pull -H \"Authorization: Bearer $TOKEN\" -H 'Content-Type: application/json' -d '{}'",
            puller.url,
            concat!(
                r#"{"client_id":"by-hand","client_generation":1,"schema":{"version":1,"hash":"HASH"},"#,
                r#""scope_set_version":1,"scopes":{"SCOPE":{"cursor":"CURSOR"}},"limit":100}"#
            )
        ));
    }
    if let Some(path) = ready_file {
        say(&format!("Another user's token: sandbox token --user U --ready-file {}", path.display()));
        say(&format!("A round trip:         sandbox demo --ready-file {}", path.display()));
    }
    Ok(())
}

/// Note SIGINT and SIGTERM instead of dying of them.
fn watch_signals() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _guard = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        INTERRUPTED.store(true, Ordering::Relaxed);
    });
    Ok(())
}

fn setting(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.to_owned()),
        _ => Err("a setting is name=value".to_owned()),
    }
}

/// A line for the user; a closed pipe is not our business.
fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

//! A private PostgreSQL in a directory of its own, from the installed binaries.
//!
//! `fsync` is off: a sandbox survives the death of its processes and not that of the machine. Nothing else about its
//! durability differs from a server's.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::Signal;

use crate::database::Database;
use crate::processes::{Launch, Process, User, in_path};

/// The superuser that the sandbox's programs connect as.
pub const SUPERUSER: &str = "postgres";
/// The application's database.
pub const APPLICATION_DATABASE: &str = "app";
/// The state's database in a sandbox that keeps it apart.
pub const STATE_DATABASE: &str = "tributary_state";
/// Octets of a socket's address, less its ending zero.
const MAX_SOCKET_PATH: usize = 107;
/// A fast shutdown waits for its walsenders' consumers.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// What a private PostgreSQL is to be like.
#[derive(Debug, Clone)]
pub struct PgOptions {
    /// Its directory; an existing one is used again.
    pub dir: PathBuf,
    /// Where `initdb` and `postgres` are; found when not given.
    pub bin_dir: Option<PathBuf>,
    /// The port on 127.0.0.1.
    pub port: u16,
    /// Settings, `name=value`, that override the sandbox's, but for the port and the socket's directory.
    pub settings: Vec<String>,
    /// The superuser's password.
    pub password: String,
    /// Set from outside to give up waiting.
    pub cancelled: &'static AtomicBool,
}

/// A running private PostgreSQL. Dropping it stops it.
#[derive(Debug)]
pub struct Postgres {
    /// The server process, for tests that stop it.
    pub process: Process,
    bin_dir: PathBuf,
    data_dir: PathBuf,
    socket_dir: PathBuf,
    port: u16,
    password: String,
    cancelled: &'static AtomicBool,
}

impl Postgres {
    /// Make the cluster when there is none, start it, and wait until it answers.
    ///
    /// # Errors
    /// The binaries are missing, or the server did not start; the message holds its last words.
    pub fn start(options: &PgOptions) -> anyhow::Result<Self> {
        let bin_dir = match &options.bin_dir {
            Some(dir) => dir.clone(),
            None => installed_bin_dir().context(
                "PostgreSQL is not installed: install it (Debian: apt-get install postgresql) or give --pg-bin",
            )?,
        };
        for program in ["initdb", "postgres"] {
            if !bin_dir.join(program).is_file() {
                bail!("there is no {program} in {}", bin_dir.display());
            }
        }
        let user = User::unprivileged()?;
        let data_dir = options.dir.join("pg");
        let log = options.dir.join("log").join("postgres.log");
        let socket_dir = socket_dir(&options.dir, options.port)?;
        if let Some(user) = user {
            user.own(&socket_dir)?;
        }
        if !data_dir.join("PG_VERSION").is_file() {
            initialise(&bin_dir, &data_dir, user, &options.password, &log)?;
        }
        let mut settings: Vec<String> = [
            "listen_addresses=127.0.0.1",
            "wal_level=logical",
            "fsync=off",
            "max_wal_senders=20",
            "max_replication_slots=20",
            "max_connections=300",
            "shared_buffers=256MB",
            "max_wal_size=4GB",
            "log_line_prefix=%m [%p] %a ",
        ]
        .map(str::to_owned)
        .into();
        settings.extend(options.settings.iter().cloned());
        settings.push(format!("port={}", options.port));
        settings.push(format!("unix_socket_directories={}", socket_dir.display()));
        let mut args: Vec<OsString> = vec!["-D".into(), data_dir.clone().into()];
        args.extend(settings.into_iter().flat_map(|setting| ["-c".into(), setting.into()]));
        let launch = Launch {
            name: "PostgreSQL".to_owned(),
            program: bin_dir.join("postgres"),
            args,
            env: Vec::new(),
            log,
            user,
            // Immediate: nothing that still streams can hold it up, and the next start recovers.
            on_parent_death: "QUIT",
        };
        let mut postgres = Self {
            process: launch.start()?,
            bin_dir,
            data_dir,
            socket_dir,
            port: options.port,
            password: options.password.clone(),
            cancelled: options.cancelled,
        };
        postgres.wait_until_it_answers()?;
        Ok(postgres)
    }

    /// The address of a database, with the superuser's password.
    pub fn url(&self, database: &str) -> String {
        format!("postgresql://{SUPERUSER}:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    /// A session in a database.
    ///
    /// # Errors
    /// The server refuses.
    pub fn connect(&self, database: &str) -> anyhow::Result<Database> {
        Database::connect(&self.url(database))
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The data directory.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The directory of the Unix socket.
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// A client program (`psql`, `pgbench`) beside the server or in `PATH`, set up to connect to a database.
    ///
    /// # Errors
    /// It is not installed.
    pub fn client_program(&self, program: &str, database: &str) -> anyhow::Result<Command> {
        let beside = self.bin_dir.join(program);
        let path = if beside.is_file() {
            beside
        } else {
            in_path(program).with_context(|| format!("{program} is not installed"))?
        };
        let mut command = Command::new(path);
        command
            .env("PGHOST", "127.0.0.1")
            .env("PGPORT", self.port.to_string())
            .env("PGUSER", SUPERUSER)
            .env("PGPASSWORD", &self.password)
            .env("PGDATABASE", database);
        Ok(command)
    }

    /// Run an SQL file in one go, stopping at the first error; with `psql` where it is installed, so that its
    /// backslash commands and COPY data work.
    ///
    /// # Errors
    /// A statement failed.
    pub fn run_file(&self, database: &str, file: &Path) -> anyhow::Result<()> {
        let failed = || format!("cannot apply {}", file.display());
        if let Ok(mut psql) = self.client_program("psql", database) {
            psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-f"]).arg(file);
            let output = psql.output().with_context(failed)?;
            if !output.status.success() {
                bail!("{}: {}", failed(), String::from_utf8_lossy(&output.stderr).trim());
            }
            return Ok(());
        }
        let sql = fs::read_to_string(file).with_context(failed)?;
        self.connect(database)?.run(&sql).with_context(failed)
    }

    /// Stop and start it, as an administrator does.
    ///
    /// # Errors
    /// It does not come back.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.stop();
        self.process.restart()?;
        self.wait_until_it_answers()
    }

    /// Stop it, copy its directory, start it: a backup as a disk snapshot is one.
    ///
    /// # Errors
    /// The copy fails, or the server does not come back.
    pub fn cold_backup(&mut self, name: &str) -> anyhow::Result<PathBuf> {
        let copy = self.data_dir.with_extension(name);
        self.stop();
        copy_directory(&self.data_dir, &copy)?;
        self.process.restart()?;
        self.wait_until_it_answers()?;
        Ok(copy)
    }

    /// Stop it, put a backup in the place of its directory, let `prepare` change that, start it.
    ///
    /// # Errors
    /// The copy fails, or the server does not come back.
    pub fn restore(&mut self, backup: &Path, prepare: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.stop();
        fs::remove_dir_all(&self.data_dir)?;
        copy_directory(backup, &self.data_dir)?;
        prepare(&self.data_dir)?;
        self.process.restart()?;
        self.wait_until_it_answers()
    }

    /// Fast shutdown; immediate when that takes too long.
    pub fn stop(&mut self) {
        if !self.process.stop_or(Signal::INT, STOP_GRACE, Signal::QUIT) {
            self.process.kill();
        }
    }

    fn wait_until_it_answers(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if self.process.exited().is_some() {
                bail!("PostgreSQL did not start: {}", self.process.last_words());
            }
            let Err(error) = self.connect("postgres") else { return Ok(()) };
            if self.cancelled.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            if Instant::now() > deadline {
                return Err(error.context("PostgreSQL does not answer"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
        if self.socket_dir.starts_with("/tmp") {
            // Ours when the sandbox's own path was too long; otherwise it goes with the sandbox, or is kept.
            let _ = fs::remove_dir(&self.socket_dir);
        }
    }
}

fn initialise(bin_dir: &Path, data_dir: &Path, user: Option<User>, password: &str, log: &Path) -> anyhow::Result<()> {
    if data_dir.exists() {
        // An earlier start ended inside initdb.
        fs::remove_dir_all(data_dir).with_context(|| format!("cannot clear {}", data_dir.display()))?;
    }
    fs::create_dir(data_dir)?;
    fs::set_permissions(data_dir, fs::Permissions::from_mode(0o700))?;
    let password_file = data_dir.with_extension("password");
    fs::write(&password_file, "")?;
    fs::set_permissions(&password_file, fs::Permissions::from_mode(0o600))?;
    fs::write(&password_file, password)?;
    if let Some(user) = user {
        user.own(data_dir)?;
        user.own(&password_file)?;
    }
    let mut password_argument = OsString::from("--pwfile=");
    password_argument.push(&password_file);
    let launch = Launch {
        name: "initdb".to_owned(),
        program: bin_dir.join("initdb"),
        args: vec![
            "-D".into(),
            data_dir.into(),
            "-U".into(),
            SUPERUSER.into(),
            "-E".into(),
            "UTF8".into(),
            "--locale=C".into(),
            "-A".into(),
            "scram-sha-256".into(),
            "-N".into(),
            password_argument,
        ],
        env: Vec::new(),
        log: log.to_owned(),
        user,
        on_parent_death: "KILL",
    };
    let outcome = launch.run();
    fs::remove_file(&password_file)?;
    let (status, output) = outcome?;
    if !status.success() {
        let reason = output.lines().rev().find(|line| line.contains("error")).unwrap_or("see its log");
        // PostgreSQL's user cannot pass through a directory that is root's alone.
        fs::write(log, &output)?;
        bail!("initdb failed ({reason}); is {} reachable for PostgreSQL's user?", data_dir.display());
    }
    Ok(())
}

/// With owners and modes, which PostgreSQL insists on.
fn copy_directory(from: &Path, to: &Path) -> anyhow::Result<()> {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().context("cp")?;
    anyhow::ensure!(status.success(), "cannot copy {}: {status}", from.display());
    Ok(())
}

/// The newest installed PostgreSQL: Debian's directories by version, then `PATH`.
pub fn installed_bin_dir() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().filter_map(Result::ok);
    let newest = versions
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("initdb").is_file() && bin.join("postgres").is_file())
        .max()
        .map(|(_, bin)| bin);
    // Through links: PostgreSQL finds its share directory from where it really is.
    newest.or_else(|| Some(in_path("initdb")?.canonicalize().ok()?.parent()?.to_owned()))
}

fn socket_dir(dir: &Path, port: u16) -> io::Result<PathBuf> {
    let preferred = dir.join("run");
    let longest = preferred.join(format!(".s.PGSQL.{port}.lock"));
    let chosen = if longest.as_os_str().as_bytes().len() <= MAX_SOCKET_PATH {
        preferred
    } else {
        Path::new("/tmp").join(format!("tributary-{}-{port}", std::process::id()))
    };
    fs::create_dir_all(&chosen)?;
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_that_is_too_long_moves_to_tmp() {
        let base = std::env::temp_dir().join(format!("tributary-socket-{}", std::process::id()));
        let short = socket_dir(&base, 1).unwrap();
        assert_eq!(short, base.join("run"));
        let long = base.join("x".repeat(120));
        let moved = socket_dir(&long, 1).unwrap();
        assert!(moved.as_os_str().len() < 60, "{moved:?}");
        fs::remove_dir(&moved).unwrap();
        fs::remove_dir_all(&base).unwrap();
    }
}

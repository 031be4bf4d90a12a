//! Flags, each with an environment variable of the same name under `TRIBUTARY_`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Parser, Subcommand};
use tributary_shared::service::logs::LogFormat;
use tributary_shared::store::session::Address;

use crate::failpoint::Failpoint;

/// Follows PostgreSQL's logical replication and makes durable, commit-ordered sync state of it.
#[derive(Debug, Parser)]
#[command(name = "materializer", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Lead or stand by: take the baseline, follow the stream, write the state.
    Run(RunSettings),
    /// Check a configuration against the source database without touching it; prints every problem.
    Check(CheckSettings),
    /// Compare a configuration with the one in force: which tables are copied, which scopes get a new membership generation,
    /// which manifest results.
    Apply(ApplySettings),
    /// Bring the schemas of the state and the source database up to date, and exit.
    Migrate(Databases),
    /// Tell a stopped stream that the cause is fixed: the quarantined transaction is tried again.
    Retry(Databases),
    /// Ask this machine's materializer whether it is ready, by its admin port; exit code 0: it is.
    Health(HealthSettings),
    /// Say how the stream is, what happened to it, and what to do. Exit code 0: nothing to do; 3: something is wrong.
    Status(StatusSettings),
    /// Examine both databases, the configuration and the key ring, and say what to do about each finding. Changes
    /// nothing. Exit code 0: no problem; 1: problems; 2: something could not be examined.
    Doctor(DoctorSettings),
    /// Start a new stream generation from a new baseline: the leader makes the slot anew, and every client rebuilds
    /// once. What is materialized is served until then.
    Reset(ResetSettings),
}

#[derive(Debug, Args, Clone)]
pub struct Databases {
    /// The database that is synchronized: postgresql://user:password@host:port/database.
    #[arg(long, env = "TRIBUTARY_SOURCE_URL", hide_env_values = true)]
    pub source_url: Address,
    /// The database that holds the state. Default: the source database.
    #[arg(long, env = "TRIBUTARY_STATE_URL", hide_env_values = true)]
    pub state_url: Option<Address>,
}

impl Databases {
    /// The state database's address.
    pub fn state(&self) -> &Address {
        self.state_url.as_ref().unwrap_or(&self.source_url)
    }
}

/// Names of what is ours in the source.
#[derive(Debug, Args, Clone)]
pub struct SourceNames {
    /// Name of the replication slot.
    #[arg(long, env = "TRIBUTARY_SLOT", default_value = "tributary")]
    pub slot: SlotName,
    /// Name of the publication.
    #[arg(long, env = "TRIBUTARY_PUBLICATION", default_value = "tributary")]
    pub publication: String,
}

#[derive(Debug, Args, Clone)]
pub struct StatusSettings {
    #[command(flatten)]
    pub databases: Databases,
    #[command(flatten)]
    pub names: SourceNames,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args, Clone)]
pub struct DoctorSettings {
    #[command(flatten)]
    pub databases: Databases,
    #[command(flatten)]
    pub names: SourceNames,
    /// The configuration. Without it, the one in force is examined.
    #[arg(long, env = "TRIBUTARY_CONFIG")]
    pub config: Option<PathBuf>,
    /// The file that holds the pullers' key ring (their TRIBUTARY_TOKEN_KEYS), to be examined too.
    #[arg(long)]
    pub token_keys_file: Option<PathBuf>,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Shifts the machine's clock, for tests.
    #[arg(
        long,
        env = "TRIBUTARY_CLOCK_OFFSET_SECONDS",
        default_value = "0",
        hide = true,
        allow_negative_numbers = true
    )]
    pub clock_offset_seconds: i64,
}

#[derive(Debug, Args, Clone)]
pub struct ResetSettings {
    #[command(flatten)]
    pub databases: Databases,
    /// Return only when the new generation is active.
    #[arg(long)]
    pub wait: bool,
}

#[derive(Debug, Args)]
pub struct CheckSettings {
    /// The configuration.
    #[arg(long, env = "TRIBUTARY_CONFIG")]
    pub config: PathBuf,
    /// The database that is synchronized.
    #[arg(long, env = "TRIBUTARY_SOURCE_URL", hide_env_values = true)]
    pub source_url: Address,
}

#[derive(Debug, Args)]
pub struct ApplySettings {
    /// The configuration.
    #[arg(long, env = "TRIBUTARY_CONFIG")]
    pub config: PathBuf,
    #[command(flatten)]
    pub databases: Databases,
    /// Print what differs and change nothing. This version can do no more: the flag must be given.
    #[arg(long, required = true)]
    pub dry_run: bool,
    /// One JSON object instead of lines.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args, Clone)]
pub struct RunSettings {
    #[command(flatten)]
    pub databases: Databases,
    /// What is synchronized.
    #[arg(long, env = "TRIBUTARY_CONFIG")]
    pub config: PathBuf,
    /// Name of the replication slot.
    #[arg(long, env = "TRIBUTARY_SLOT", default_value = "tributary")]
    pub slot: SlotName,
    /// Name of the publication.
    #[arg(long, env = "TRIBUTARY_PUBLICATION", default_value = "tributary")]
    pub publication: String,
    /// Where /livez, /readyz and /metrics are served.
    #[arg(long, env = "TRIBUTARY_ADMIN_LISTEN", default_value = "127.0.0.1:9464")]
    pub admin_listen: SocketAddr,
    /// How logs are written.
    #[arg(long, env = "TRIBUTARY_LOG_FORMAT", value_enum, default_value = "human")]
    pub log_format: LogFormat,
    /// How long a leader that is silent keeps the lead; standbys take over after it. Heartbeats come thrice as often.
    #[arg(long, env = "TRIBUTARY_LEASE_SECONDS", default_value = "6", value_parser = clap::value_parser!(u64).range(1..=300))]
    pub lease_seconds: u64,
    /// Tables copied at once by a baseline.
    #[arg(long, env = "TRIBUTARY_BASELINE_WORKERS", default_value = "2", value_parser = clap::value_parser!(u16).range(1..=32))]
    pub baseline_workers: u16,
    /// Time to finish the running state transaction after SIGTERM.
    #[arg(long, env = "TRIBUTARY_GRACE_SECONDS", default_value = "20")]
    pub grace_seconds: u64,
    /// Rows of one part of a state transaction; bounds memory with the octets.
    #[arg(long, env = "TRIBUTARY_BATCH_ROWS", default_value = "8192", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub batch_rows: u32,
    /// Octets of values of one part of a state transaction.
    #[arg(long, env = "TRIBUTARY_BATCH_OCTETS", default_value = "16777216", value_parser = clap::value_parser!(u32).range(1024..=1_073_741_824))]
    pub batch_octets: u32,
    /// Clients that acknowledge nothing for this long have their generation expired (default 30 days).
    #[arg(long, env = "TRIBUTARY_STALE_SECONDS", default_value = "2592000", value_parser = clap::value_parser!(u64).range(1..))]
    pub stale_seconds: u64,
    /// Shifts the clock, for tests of expiry.
    #[arg(
        long,
        env = "TRIBUTARY_CLOCK_OFFSET_SECONDS",
        default_value = "0",
        hide = true,
        allow_negative_numbers = true
    )]
    pub clock_offset_seconds: i64,
    /// A stream that is silent for this long while the source's WAL moves on is reconnected.
    #[arg(long, env = "TRIBUTARY_SILENCE_SECONDS", default_value = "30", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub silence_seconds: u64,
    /// Aborts at a named point, for tests of faults: NAME or NAME:PASSAGE.
    #[arg(long, env = "TRIBUTARY_FAILPOINT", hide = true)]
    pub failpoint: Option<Failpoint>,
    /// How long a snapshot that no session uses is kept, for sessions that are being made.
    #[arg(long, env = "TRIBUTARY_SNAPSHOT_GRACE_SECONDS", default_value = "600", hide = true)]
    pub snapshot_grace_seconds: u64,
}

impl RunSettings {
    /// The lease.
    pub fn lease(&self) -> Duration {
        Duration::from_secs(self.lease_seconds)
    }

    /// Present time.
    pub fn now(&self) -> SystemTime {
        let shift = Duration::from_secs(self.clock_offset_seconds.unsigned_abs());
        if self.clock_offset_seconds < 0 { SystemTime::now() - shift } else { SystemTime::now() + shift }
    }

    /// Time between two heartbeats.
    pub fn heartbeat(&self) -> Duration {
        self.lease() / 3
    }
}

/// A name that PostgreSQL accepts for a replication slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotName(String);

/// A text that is no slot name.
#[derive(Debug, thiserror::Error)]
#[error("a slot name has 1 to 63 lower-case letters, digits and underscores")]
pub struct SlotNameError;

impl std::str::FromStr for SlotName {
    type Err = SlotNameError;

    fn from_str(text: &str) -> Result<Self, SlotNameError> {
        let valid = (1..=63).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        if valid { Ok(Self(text.to_owned())) } else { Err(SlotNameError) }
    }
}

impl SlotName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// `materializer health`
#[derive(Debug, Clone, Args)]
pub struct HealthSettings {
    /// The admin port, as the server has it.
    #[arg(long, env = "TRIBUTARY_ADMIN_LISTEN", default_value = "127.0.0.1:9464")]
    pub admin_listen: SocketAddr,
    /// Ask whether it is alive instead.
    #[arg(long)]
    pub live: bool,
}

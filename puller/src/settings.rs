//! Flags, each with an environment variable of the same name under `TRIBUTARY_`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tributary_shared::service::logs::LogFormat;
use tributary_shared::store::session::Address;
use tributary_shared::token::KeyRing;

/// Serves durable sync state to clients over HTTP (connect, pull, rebuild) until SIGTERM.
#[derive(Debug, Parser, Clone)]
#[command(name = "puller", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Cli {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// How to serve.
    #[command(flatten)]
    pub serve: Option<ServeSettings>,
}

/// Other things that a puller does.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Ask this machine's puller whether it is ready, by its admin port; exit code 0: it is.
    Health(HealthSettings),
}

/// `puller health`
#[derive(Debug, Clone, Args)]
pub struct HealthSettings {
    /// The admin port, as the server has it.
    #[arg(long, env = "TRIBUTARY_ADMIN_LISTEN", default_value = "127.0.0.1:9465")]
    pub admin_listen: SocketAddr,
    /// Ask whether it is alive instead.
    #[arg(long)]
    pub live: bool,
}

/// How a puller serves.
#[derive(Debug, Clone, Args)]
pub struct ServeSettings {
    /// The database that is synchronized; read for accepted-write epochs only.
    #[arg(long, env = "TRIBUTARY_SOURCE_URL", hide_env_values = true)]
    pub source_url: Address,
    /// The database that holds the state. Default: the source database.
    #[arg(long, env = "TRIBUTARY_STATE_URL", hide_env_values = true)]
    pub state_url: Option<Address>,
    /// Where clients are served.
    #[arg(long, env = "TRIBUTARY_LISTEN", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Where /livez, /readyz and /metrics are served.
    #[arg(long, env = "TRIBUTARY_ADMIN_LISTEN", default_value = "127.0.0.1:9465")]
    pub admin_listen: SocketAddr,
    /// Secret of HS256 bearer tokens, at least 32 octets; their `sub` claim is the user.
    #[arg(long, env = "TRIBUTARY_JWT_SECRET", hide_env_values = true)]
    pub jwt_secret: Option<String>,
    /// File with the public keys (JWKS) of RS256, ES256 and EdDSA bearer tokens, instead of a secret. It is read again every
    /// 5 seconds.
    #[arg(long, env = "TRIBUTARY_JWKS_FILE")]
    pub jwks_file: Option<PathBuf>,
    /// Audience (`aud`) that bearer tokens must name. Without it the claim is not looked at.
    #[arg(long, env = "TRIBUTARY_JWT_AUDIENCE")]
    pub jwt_audience: Option<String>,
    /// Issuer (`iss`) that bearer tokens must name. Without it the claim is not looked at.
    #[arg(long, env = "TRIBUTARY_JWT_ISSUER")]
    pub jwt_issuer: Option<String>,
    /// How far the clocks of issuers may differ, for `exp` and `nbf`.
    #[arg(long, env = "TRIBUTARY_JWT_LEEWAY_SECONDS", default_value = "60", value_parser = clap::value_parser!(u32).range(0..=600))]
    pub jwt_leeway_seconds: u32,
    /// Header that names the user, set by a trusted proxy that removes it from requests. Off unless named here.
    #[arg(long, env = "TRIBUTARY_IDENTITY_HEADER")]
    pub identity_header: Option<String>,
    /// Key ring of sync tokens: `id:base64url[,id:base64url…]`, 32 octets or more each. The first signs, all verify.
    #[arg(long, env = "TRIBUTARY_TOKEN_KEYS", hide_env_values = true)]
    pub token_keys: KeyRing,
    /// State sessions for requests.
    #[arg(long, env = "TRIBUTARY_POOL_SIZE", default_value = "16", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub pool_size: u16,
    /// Requests that are worked on or wait for a session; more are answered 429. Rebuilds that wait for a staging are
    /// counted by --max-staging-waiters instead.
    #[arg(long, env = "TRIBUTARY_MAX_IN_FLIGHT", default_value = "1024", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_in_flight: u32,
    /// Rebuilds that wait for a snapshot to be staged, by another one or in their turn; more are answered 429.
    #[arg(long, env = "TRIBUTARY_MAX_STAGING_WAITERS", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub max_staging_waiters: u32,
    /// Largest request body in octets; larger ones are answered 413.
    #[arg(long, env = "TRIBUTARY_MAX_BODY_BYTES", default_value = "1048576", value_parser = clap::value_parser!(u32).range(1024..=1_073_741_824))]
    pub max_body_bytes: u32,
    /// Wait for a free session before 503.
    #[arg(long, env = "TRIBUTARY_POOL_WAIT_MILLIS", default_value = "5000")]
    pub pool_wait_millis: u64,
    /// Limit of one statement.
    #[arg(long, env = "TRIBUTARY_STATEMENT_TIMEOUT_SECONDS", default_value = "60", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub statement_timeout_seconds: u64,
    /// How logs are written.
    #[arg(long, env = "TRIBUTARY_LOG_FORMAT", value_enum, default_value = "human")]
    pub log_format: LogFormat,
    /// Time for running requests to end after SIGTERM.
    #[arg(long, env = "TRIBUTARY_GRACE_SECONDS", default_value = "20")]
    pub grace_seconds: u64,
    /// Unready when the materializer has given no sign of life for this long; 0: never for this reason.
    #[arg(long, env = "TRIBUTARY_MAX_SILENCE_SECONDS", default_value = "300")]
    pub max_silence_seconds: u64,
    /// Shifts the clock, for tests of expiry.
    #[arg(
        long,
        env = "TRIBUTARY_CLOCK_OFFSET_SECONDS",
        default_value = "0",
        hide = true,
        allow_negative_numbers = true
    )]
    pub clock_offset_seconds: i64,
}

impl ServeSettings {
    /// The state database's address, with the statement limit.
    pub fn state(&self) -> Address {
        self.limited(self.state_url.as_ref().unwrap_or(&self.source_url))
    }

    /// The source database's address, with the statement limit; `None` when it is the state database.
    pub fn source_apart(&self) -> Option<Address> {
        let state = self.state_url.as_ref()?;
        (!state.is_same_database(&self.source_url)).then(|| self.limited(&self.source_url))
    }

    fn limited(&self, address: &Address) -> Address {
        address.clone().for_requests(Duration::from_secs(self.statement_timeout_seconds))
    }
}

//! Sessions: how every connection to PostgreSQL is made, and the settings that make its text output canonical.
//!
//! Values of the baseline and of the stream must be formatted identically whatever the server's or the role's
//! settings are, so each session pins everything that PostgreSQL's output functions read.

use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::{Client, Config, NoTls};

use super::error::Result;

/// Settings that the output of values depends on, and those that keep a session honest: row security is an error
/// rather than a silent filter.
pub const SETTINGS: &[(&str, &str)] = &[
    ("client_encoding", "UTF8"),
    ("datestyle", "ISO, YMD"),
    ("intervalstyle", "postgres"),
    ("timezone", "UTC"),
    ("bytea_output", "hex"),
    ("extra_float_digits", "1"),
    ("lc_monetary", "C"),
    ("xmlbinary", "base64"),
    ("quote_all_identifiers", "off"),
    ("search_path", "pg_catalog"),
    ("row_security", "off"),
    ("standard_conforming_strings", "on"),
    // Our statements are short or simple: compiling one costs more than it can save.
    ("jit", "off"),
];

/// Settings of sessions that answer requests. What a request reads is bounded by an index, in its order; a plan that
/// reads all and sorts it, because statistics are not what the data is, must not be taken.
pub const REQUEST_PLANS: &[(&str, &str)] = &[("enable_seqscan", "off"), ("enable_bitmapscan", "off")];

/// [`SETTINGS`] as the startup parameter `options`, which replication sessions honour too.
pub fn startup_options() -> String {
    let mut options = String::new();
    for (name, value) in SETTINGS {
        if *name != "client_encoding" {
            options.push_str("-c ");
            options.push_str(name);
            options.push('=');
            options.push_str(&value.replace(' ', "\\ "));
            options.push(' ');
        }
    }
    options
}

/// A database address with everything that our sessions need; made once from a setting.
#[derive(Clone)]
pub struct Address {
    config: Config,
    options: String,
}

/// A setting that is not a database address. The text is not repeated: it may hold a password.
#[derive(Debug, thiserror::Error)]
#[error("not a PostgreSQL connection string (postgresql://user:password@host:port/database): {0}")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(url: &str) -> Result<Self, AddressError> {
        let mut config = Config::from_str(url).map_err(|e| {
            let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
            AddressError(format!("{e}{cause}"))
        })?;
        if config.get_hosts().is_empty() {
            return Err(AddressError("no host".into()));
        }
        if matches!(config.get_ssl_mode(), tokio_postgres::config::SslMode::Require) {
            return Err(AddressError("sslmode=require is not supported by this build".into()));
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(Duration::from_secs(5));
        }
        config.keepalives_idle(Duration::from_secs(15)).tcp_user_timeout(Duration::from_secs(30));
        let options = startup_options();
        config.options(options.clone());
        Ok(Self { config, options })
    }
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl std::fmt::Display for Address {
    /// Host, port and database; never the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}/{}", self.host(), self.port(), self.database())
    }
}

impl Address {
    /// The driver's configuration, for a pool.
    pub fn config(&self, application: &str) -> Config {
        let mut config = self.config.clone();
        config.application_name(application);
        config
    }

    /// The same address with a further setting for its sessions; the value has no spaces.
    #[must_use]
    pub fn with_setting(mut self, name: &str, value: &str) -> Self {
        self.options = format!("{}-c {name}={value} ", self.options);
        self.config.options(self.options.clone());
        self
    }

    /// The same address for the sessions of requests, with a time limit for each statement and [`REQUEST_PLANS`].
    #[must_use]
    pub fn for_requests(self, limit: Duration) -> Self {
        REQUEST_PLANS
            .iter()
            .fold(self, |address, (name, value)| address.with_setting(name, value))
            .with_setting("statement_timeout", &limit.as_millis().to_string())
    }

    /// Whether both name one database of one server, as far as their texts tell.
    pub fn is_same_database(&self, other: &Self) -> bool {
        (self.host(), self.port(), self.database()) == (other.host(), other.port(), other.database())
    }

    /// First host: a name, an address or a socket's folder.
    pub fn host(&self) -> String {
        match self.config.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
            #[cfg(unix)]
            Some(tokio_postgres::config::Host::Unix(path)) => path.display().to_string(),
            None => String::new(),
        }
    }

    /// First port.
    pub fn port(&self) -> u16 {
        self.config.get_ports().first().copied().unwrap_or(5432)
    }

    /// Role that logs in.
    pub fn user(&self) -> &str {
        self.config.get_user().unwrap_or("postgres")
    }

    /// Password, empty when there is none.
    pub fn password(&self) -> String {
        self.config.get_password().map(|p| String::from_utf8_lossy(p).into_owned()).unwrap_or_default()
    }

    /// Database; by default named like the role.
    pub fn database(&self) -> &str {
        self.config.get_dbname().unwrap_or(self.user())
    }

    /// Opens a session and drives it in a task of its own until the client is dropped.
    pub async fn connect(&self, application: &str) -> Result<Client> {
        let (client, connection) = self.config(application).connect(NoTls).await?;
        tokio::spawn(async move {
            // The client's next call reports the same error to whoever can act on it.
            if let Err(error) = connection.await {
                tracing::debug!(%error, "database connection ended");
            }
        });
        Ok(client)
    }
}

/// A pool of sessions.
#[derive(Clone)]
pub struct Pool {
    inner: deadpool_postgres::Pool,
    /// Its name in metrics.
    name: &'static str,
}

impl Pool {
    /// The same pool under another name in metrics than `state`.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        metrics::counter!("tributary_pool_timeouts_total", "pool" => name).absolute(0);
        Self { name, ..self }
    }

    /// Its name in metrics.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Closes the sessions that nobody uses: whoever comes gets a new one.
    pub fn close_idle(&self) {
        self.inner.retain(|_, _| false);
    }

    /// How much of it is used.
    pub fn status(&self) -> deadpool_postgres::Status {
        self.inner.status()
    }
}

/// Makes a pool of at most `size` sessions; `wait` bounds the wait for a free one. No connection is made yet.
///
/// # Errors
/// Only when the pool's own settings contradict each other, which these do not.
pub fn pool(address: &Address, application: &str, size: usize, wait: Duration) -> Result<Pool> {
    let manager = deadpool_postgres::Manager::from_config(
        address.config(application),
        NoTls,
        deadpool_postgres::ManagerConfig { recycling_method: deadpool_postgres::RecyclingMethod::Fast },
    );
    deadpool_postgres::Pool::builder(manager)
        .max_size(size)
        .runtime(deadpool_postgres::Runtime::Tokio1)
        .wait_timeout(Some(wait))
        .create_timeout(Some(Duration::from_secs(5)))
        .recycle_timeout(Some(Duration::from_secs(5)))
        .build()
        .map(|inner| Pool { inner, name: "state" }.named("state"))
        .map_err(|e| super::error::StoreError::Pool(e.to_string()))
}

/// Takes a session from the pool.
pub async fn acquire(pool: &Pool) -> Result<deadpool_postgres::Object> {
    pool.inner.get().await.map_err(|error| match error {
        deadpool_postgres::PoolError::Backend(error) => error.into(),
        deadpool_postgres::PoolError::Timeout(deadpool_postgres::TimeoutType::Wait) => {
            metrics::counter!("tributary_pool_timeouts_total", "pool" => pool.name).increment(1);
            super::error::StoreError::Pool("all are in use".into())
        }
        other => super::error::StoreError::Pool(other.to_string()),
    })
}

/// A single-quoted SQL literal, for the few commands that take no parameters.
pub fn quote_literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_hide_the_password() {
        let address: Address = "postgresql://u:secret@db.example:5433/app".parse().expect("valid");
        assert_eq!(format!("{address} {address:?}"), "db.example:5433/app db.example:5433/app");
        assert_eq!((address.user(), address.password().as_str()), ("u", "secret"));
        let error = "postgresql://u:secret@db:99999/app".parse::<Address>().expect_err("bad port").to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn literals_are_quoted() {
        assert_eq!(quote_literal("it's"), "'it''s'");
    }
}

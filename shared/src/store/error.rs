//! What can go wrong in the store, and what becomes of it.

use tokio_postgres::error::SqlState;

/// An error of the store. Messages never hold row values, keys, tokens, or the ids of users, clients and scopes.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database refused, failed or could not be reached.
    #[error("database: {}", describe(.0))]
    Database(#[from] tokio_postgres::Error),
    /// No pooled connection within the time limit.
    #[error("no database connection: {0}")]
    Pool(String),
    /// Durable state contradicts itself (ADR 003, "Error rules": `sync_integrity_failure`).
    #[error("integrity: {0}")]
    Integrity(String),
    /// A takeover happened: this process no longer leads.
    #[error("another materializer leads")]
    Fenced,
}

/// What the caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Run the same transaction again at once: a concurrent one won.
    Rerun,
    /// Infrastructure: wait, reconnect, run again.
    Retry,
    /// The state is broken: stop and say so.
    Stop,
    /// Leave leadership.
    StandDown,
}

impl StoreError {
    /// An integrity error; `what` names the rule that is broken, in our own ids only.
    pub fn integrity(what: impl Into<String>) -> Self {
        Self::Integrity(what.into())
    }

    /// Whether a concurrent transaction made or removed what this one relied on, after its snapshot was taken. Running
    /// it again sees the other's work. For transactions whose rows are guarded by constraints on purpose.
    pub fn is_conflict(&self) -> bool {
        let Self::Database(error) = self else { return false };
        let constraint = [SqlState::UNIQUE_VIOLATION, SqlState::FOREIGN_KEY_VIOLATION];
        self.fate() == Fate::Rerun || error.code().is_some_and(|code| constraint.contains(code))
    }

    /// What becomes of this error.
    pub fn fate(&self) -> Fate {
        match self {
            Self::Pool(_) => Fate::Retry,
            Self::Integrity(_) => Fate::Stop,
            Self::Fenced => Fate::StandDown,
            Self::Database(error) => match error.code() {
                // No SQLSTATE: the connection broke or the answer could not be read.
                None => Fate::Retry,
                Some(code) if *code == SqlState::T_R_SERIALIZATION_FAILURE || *code == SqlState::T_R_DEADLOCK_DETECTED => {
                    Fate::Rerun
                }
                // 08 connection, 53 resources, 57 operator intervention, 58 system, 25 transaction state after a
                // dropped connection, 55 object not available (lock timeout, object in use), 28 and 3D: a password or
                // database that is being changed.
                Some(code) if ["08", "53", "57", "58", "25", "55", "28", "3D"].contains(&&code.code()[..2]) => Fate::Retry,
                Some(_) => Fate::Stop,
            },
        }
    }
}

/// SQLSTATE and message without the server's DETAIL, which may quote row values.
fn describe(error: &tokio_postgres::Error) -> String {
    if let Some(db) = error.as_db_error() {
        // Messages of class 22 and 23 can quote values as well.
        let class = &db.code().code()[..2];
        if class == "22" || class == "23" {
            let place = db.constraint().or(db.table()).unwrap_or("a value");
            return format!("SQLSTATE {} at {place}", db.code().code());
        }
        return format!("{} (SQLSTATE {})", db.message(), db.code().code());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// Result of a store function.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

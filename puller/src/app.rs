//! What every request works with, and how often it is run.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deadpool_postgres::{GenericClient, Object, Transaction};
use tokio::sync::OnceCell;
use tokio_postgres::IsolationLevel;
use tokio_util::sync::CancellationToken;
use tributary_shared::canonical::RowEncoder;
use tributary_shared::encoding;
use tributary_shared::manifest::Ancestry;
use tributary_shared::registry::{Registry, Table};
use tributary_shared::service::health::Health;
use tributary_shared::store::assignment::AssignmentQueries;
use tributary_shared::store::configuration::{self, Configuration};
use tributary_shared::store::error::{Fate, StoreError};
use tributary_shared::store::session::{self, Pool};
use tributary_shared::store::source;
use tributary_shared::token::KeyRing;

use crate::auth::Authenticator;
use crate::digests::Digests;
use crate::error::ApiError;
use crate::staging::Staging;

/// How often a request is run when concurrent ones get in its way.
const ATTEMPTS: u32 = 10;

/// The puller.
pub struct App {
    /// Sessions with the state.
    pub state: Pool,
    /// Sessions with the source, when it is another database.
    pub source: Option<Pool>,
    /// Sessions that keep digests, apart from those that requests hold while they wait for one.
    pub cache: Pool,
    /// Sync tokens.
    pub keys: KeyRing,
    /// Users.
    pub authenticator: Authenticator,
    /// Readiness.
    pub health: Health,
    /// Scope digests that are being computed or were.
    pub digests: Digests,
    /// Snapshots that are being staged.
    pub staging: Staging,
    /// Shift of the clock.
    pub clock_offset_seconds: i64,
    /// Cancelled when the grace period is over: whatever is not committed is answered 503 at once.
    pub give_up: CancellationToken,
    /// Configurations that were read.
    pub served: Mutex<HashMap<i64, Arc<Served>>>,
}

/// A configuration as requests use it; immutable.
pub struct Served {
    /// What is stored.
    pub configuration: Configuration,
    /// Assignments by a query.
    pub assignments: AssignmentQueries,
    ancestry: OnceCell<Ancestry>,
    encoders: HashMap<i16, (usize, RowEncoder)>,
}

impl Served {
    /// What is synchronized.
    pub fn registry(&self) -> &Registry {
        &self.configuration.registry
    }

    /// What its manifest descends from; read when a client of an older one comes. Published manifests never change.
    pub async fn ancestry(&self, db: &impl GenericClient) -> Result<&Ancestry, Failure> {
        Ok(self.ancestry.get_or_try_init(|| configuration::ancestry(db, &self.configuration)).await?)
    }

    /// A table with its encoder.
    pub fn table(&self, table_no: i16) -> Result<(&Table, &RowEncoder), Failure> {
        self.encoders
            .get(&table_no)
            .map(|(index, encoder)| (&self.configuration.registry.tables[*index], encoder))
            .ok_or_else(|| Failure::integrity("an entry is of a table that is not configured"))
    }

    /// Delivered tables with their encoders, in row-identity order of their rows.
    pub fn tables_in_identity_order(&self) -> Vec<(&Table, &RowEncoder)> {
        let mut tables: Vec<_> = self
            .encoders
            .values()
            .map(|(index, encoder)| (&self.configuration.registry.tables[*index], encoder))
            .filter(|(table, _)| !table.capture_only)
            .collect();
        // The prefixes are free of prefixes of each other, so their order is that of the identities.
        tables.sort_by(|a, b| a.1.identity_prefix().octets().cmp(b.1.identity_prefix().octets()));
        tables
    }
}

/// Why a request failed: what the client is told, or what happened in the store.
#[derive(Debug)]
pub enum Failure {
    /// The client's answer.
    Api(ApiError),
    /// The store's error; its fate decides.
    Store(StoreError),
}

impl Failure {
    /// Durable state contradicts itself.
    pub fn integrity(what: &str) -> Self {
        Self::Store(StoreError::integrity(what))
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Store(error.into())
    }
}

impl App {
    /// Present time.
    pub fn now(&self) -> SystemTime {
        let shift = Duration::from_secs(self.clock_offset_seconds.unsigned_abs());
        if self.clock_offset_seconds < 0 { SystemTime::now() - shift } else { SystemTime::now() + shift }
    }

    /// The client's accepted-write epoch in the source. Read before the state's snapshot is opened (contract:
    /// accepted writes).
    ///
    /// A source apart that cannot be read is told after the gates that do without it (contract: connect, order of
    /// checks); where source and state are one, none of them can be asked either.
    pub async fn accepted_epoch(&self, user_id: &str, client_id: &str) -> Result<Accepted, Failure> {
        let epoch = async {
            let db = session::acquire(self.source.as_ref().unwrap_or(&self.state)).await?;
            Ok(source::accepted_epoch(&db, user_id, client_id).await?)
        };
        match epoch.await {
            Err(failure) if self.source.is_none() => Err(failure),
            epoch => Ok(Accepted(epoch)),
        }
    }

    /// [`Self::accepted_epoch`] of several clients, `(user_id, client_id)`, in their order.
    pub async fn accepted_epochs_of(&self, clients: &[(&str, &str)]) -> Result<Vec<i64>, Failure> {
        if clients.is_empty() {
            return Ok(Vec::new());
        }
        let db = session::acquire(self.source.as_ref().unwrap_or(&self.state)).await?;
        Ok(source::accepted_epochs_of(&db, clients).await?)
    }

    /// The configuration of this number; read once.
    pub async fn served(&self, db: &impl GenericClient, configuration_no: i64) -> Result<Arc<Served>, Failure> {
        let known = self.served.lock().unwrap_or_else(PoisonError::into_inner).get(&configuration_no).cloned();
        if let Some(served) = known {
            return Ok(served);
        }
        let configuration = configuration::load(db, configuration_no).await?;
        let encoders = encoding::encoders(&configuration.registry)
            .map_err(|_| Failure::integrity("the configuration in force cannot be used"))?;
        let encoders = encoders
            .into_iter()
            .enumerate()
            .map(|(index, encoder)| (configuration.registry.tables[index].table_no, (index, encoder)))
            .collect();
        let assignments = AssignmentQueries::new(&configuration.registry);
        let served = Arc::new(Served { configuration, assignments, ancestry: OnceCell::new(), encoders });
        let mut all = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        // Configurations change rarely; the ones before the last few are not asked for any more.
        if all.len() >= 8 {
            all.clear();
        }
        all.insert(configuration_no, served.clone());
        Ok(served)
    }

    /// Runs a request until it is answered: again when a concurrent transaction got in its way, and never half. When the
    /// grace period ends, what has not sent its commit is told 503 and commits nothing; what has is told what becomes of
    /// it, or nothing.
    pub async fn run<T, F>(&self, mut once: impl FnMut(Commit) -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let commit = Commit::default();
            let mut running = std::pin::pin!(once(commit.clone()));
            let outcome = tokio::select! {
                biased;
                outcome = &mut running => outcome,
                () = self.give_up.cancelled() => {
                    if !commit.is_sent() {
                        return Err(ApiError::TemporaryUnavailable { retry_after: 1 });
                    }
                    running.await
                }
            };
            let error = match outcome {
                Ok(answer) => return Ok(answer),
                Err(Failure::Api(error)) => return Err(error),
                Err(Failure::Store(error)) => error,
            };
            if error.is_conflict() && attempt < ATTEMPTS {
                metrics::counter!("tributary_request_reruns_total").increment(1);
                tokio::time::sleep(Duration::from_millis(u64::from(attempt * attempt))).await;
                continue;
            }
            return Err(if let (Fate::Stop, StoreError::Integrity(reason)) = (error.fate(), &error) {
                self.health.broken(reason.clone());
                ApiError::SyncIntegrityFailure
            } else {
                tracing::warn!(%error, "a request failed for now");
                ApiError::TemporaryUnavailable { retry_after: 1 }
            });
        }
    }
}

/// A client's accepted-write epoch in the source, or why it cannot be read.
pub struct Accepted(Result<i64, Failure>);

impl From<i64> for Accepted {
    fn from(epoch: i64) -> Self {
        Self(Ok(epoch))
    }
}

impl Accepted {
    /// The epoch; `None` when it is unknown.
    pub fn known(&self) -> Option<i64> {
        self.0.as_ref().ok().copied()
    }

    /// The epoch, past the gates that do without it.
    pub fn require(self) -> Result<i64, Failure> {
        self.0
    }
}

/// The commit of one run of a request.
#[derive(Clone, Default)]
pub struct Commit(Arc<AtomicBool>);

impl Commit {
    /// Commits. From here on the request is not failed by ourselves: the database may already have done it.
    pub async fn send<E>(&self, commit: impl Future<Output = Result<(), E>>) -> Result<(), Failure>
    where
        Failure: From<E>,
    {
        self.0.store(true, Ordering::Relaxed);
        Ok(commit.await?)
    }

    fn is_sent(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Opens the one repeatable-read transaction of a request.
pub async fn begin(db: &mut Object) -> Result<Transaction<'_>, Failure> {
    Ok(db.build_transaction().isolation_level(IsolationLevel::RepeatableRead).start().await?)
}

/// Microseconds since 1970 UTC, the unit of tokens.
pub fn micros(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_micros()).unwrap_or(i64::MAX),
    }
}

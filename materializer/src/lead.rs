//! Leadership: stand by, take the lease, keep it by heartbeats, and work through whatever happens while leading.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::sync::{Mutex, watch};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;
use tributary_shared::lsn::Lsn;
use tributary_shared::registry::Registry;
use tributary_shared::service::backoff::Backoff;
use tributary_shared::service::health::Health;
use tributary_shared::store::error::{Fate, StoreError};
use tributary_shared::store::session::{self, Pool};
use tributary_shared::store::{
    configuration, leader, progress, quarantine, reset, retention, server, snapshot, source,
};
use uuid::Uuid;

use crate::assemble::Limits;
use crate::baseline::{self, Baseline};
use crate::diagnosis::{self, Fault, Names};
use crate::materialize::MaterializeError;
use crate::meters::{self, Lag};
use crate::pulse::Pulse;
use crate::settings::RunSettings;
use crate::stream::{self, Stream, StreamError};

/// Time for taking the lease; a database that does not answer is asked through another session after it.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(10);
/// Time for what comes before the stream: reading progress, comparing the source with it.
const PREPARE_LIMIT: Duration = Duration::from_secs(60);
/// A standby looks this often whether the lease is free: one statement that reads one row.
const STANDBY_LOOK: Duration = Duration::from_millis(250);
/// Longest wait between attempts after a fault.
const RETRY_CAP: Duration = Duration::from_secs(5);
/// Wait before a baseline is taken again that met a value it cannot represent.
const POISONED_BASELINE: Duration = Duration::from_secs(60);
/// Sessions, and at most as many snapshots, removed in one step of the housekeeping.
const COLLECT_BATCH: i64 = 100;
/// Clients expired in one step of the housekeeping.
const EXPIRE_BATCH: i64 = 500;
/// Scopes compacted in one step of the housekeeping.
const COMPACT_SCOPES: usize = 50;
/// Time between two counts of sessions and snapshots.
const COUNT_INTERVAL: Duration = Duration::from_secs(60);
/// Delete markers removed from a scope, and departed rows looked at, in one step of the housekeeping.
const COMPACT_BATCH: i64 = 1000;

/// How a turn of leading ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The next one begins at once.
    Again,
    /// The leadership is over.
    Over,
}

/// A materializer: stands by until it leads.
pub struct Materializer {
    pub settings: RunSettings,
    pub registry: Arc<Registry>,
    pub state: Pool,
    pub health: Health,
    pub holder: Uuid,
    pub stop: CancellationToken,
}

impl Materializer {
    /// Stands by and leads, until it is told to stop. Faults of the infrastructure never end it.
    pub async fn run(&self) {
        let mut backoff = Backoff::new(RETRY_CAP);
        while !self.stop.is_cancelled() {
            meters::stand_by();
            match self.try_acquire().await {
                Ok(Some(epoch)) => {
                    backoff.reset();
                    tracing::info!(epoch, "leading");
                    metrics::gauge!("tributary_leader").set(1.0);
                    self.lead(epoch).await;
                    self.release(epoch).await;
                    // Taking the lease again ends what is left of this leadership.
                    self.forget_sessions();
                }
                Ok(None) => {
                    backoff.reset();
                    self.health.ready("standby");
                    self.pause(self.settings.heartbeat().min(STANDBY_LOOK)).await;
                }
                Err(error) => {
                    self.health.unready(format!("state {error}"));
                    self.pause(backoff.next_delay()).await;
                }
            }
        }
    }

    async fn try_acquire(&self) -> Result<Option<i64>, StoreError> {
        let asked = async {
            let db = session::acquire(&self.state).await?;
            leader::acquire(&db, self.holder, self.settings.lease()).await
        };
        if let Ok(acquired) = tokio::time::timeout(ACQUIRE_LIMIT, asked).await {
            return acquired;
        }
        self.forget_sessions();
        Err(StoreError::Pool("no answer in time".into()))
    }

    /// Gives up every pooled session: on one that a network has forgotten nothing ever comes.
    fn forget_sessions(&self) {
        self.state.close_idle();
    }

    async fn release(&self, epoch: i64) {
        let released = async { leader::release(&session::acquire(&self.state).await?, epoch).await }.await;
        if let Err(error) = released {
            tracing::warn!(%error, "the lease was not given up; a standby waits for it to run out");
        }
    }

    async fn pause(&self, time: Duration) {
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(time) => {}
        }
    }

    /// Leads until the lease is lost or the process stops.
    async fn lead(&self, epoch: i64) {
        let leading = self.stop.child_token();
        let (idle, idle_seen) = watch::channel(Lsn::ZERO);
        let (recorded_sender, recorded) = watch::channel(Lsn::ZERO);
        let (wal_sender, source_wal) = watch::channel(Lsn::ZERO);
        let (reset_sender, reset) = watch::channel(None);
        let housekeeping = Arc::new(Mutex::new(()));
        let unanswered = CancellationToken::new();
        let pulse = Arc::new(Pulse::default());
        let heartbeat = Heartbeat {
            settings: self.settings.clone(),
            state: self.state.clone(),
            epoch,
            idle: idle_seen,
            recorded: recorded_sender,
            source_wal: wal_sender,
            reset: reset_sender,
            housekeeping: housekeeping.clone(),
            leading: leading.clone(),
            unanswered: unanswered.clone(),
            pulse: pulse.clone(),
        };
        let heart = tokio::spawn(heartbeat.run());
        let mut backoff = Backoff::new(RETRY_CAP);
        let mut careful_until = Lsn::ZERO;
        while !leading.is_cancelled() {
            let watches = Watches {
                idle: idle.clone(),
                recorded: recorded.clone(),
                source_wal: source_wal.clone(),
                reset: reset.clone(),
                housekeeping: housekeeping.clone(),
                pulse: pulse.clone(),
            };
            let turn = tokio::select! {
                turn = self.lead_once(epoch, careful_until, watches, &leading) => turn,
                // What waits for a session that never answers would wait for ever.
                () = unanswered.cancelled() => break,
            };
            pulse.rests();
            let error = match turn {
                Ok(Turn::Again) => continue,
                Ok(Turn::Over) => break,
                Err(error) => error,
            };
            let fault = error.downcast_ref::<Fault>();
            metrics::gauge!("tributary_slot_lost").set(f64::from(u8::from(fault.is_some())));
            self.health.unready(
                fault.map_or_else(|| format!("{error:#}"), |fault| format!("{fault}; what to do: {}", fault.advice())),
            );
            match error.downcast_ref::<StreamError>() {
                Some(StreamError::Stopped { commit_lsn: None, .. }) => {
                    // One of several transactions: the ones before it go through one by one, then it stands alone.
                    careful_until = (*source_wal.borrow()).max(Lsn::new(1).unwrap_or_default());
                    if careful_until.octets() <= 1 {
                        self.pause(backoff.next_delay()).await;
                    }
                    continue;
                }
                Some(StreamError::Stopped { reason, commit_lsn: Some(commit_lsn), relation, detail }) => {
                    self.quarantine(*commit_lsn, reason, relation.as_deref(), detail, &leading, &reset).await;
                    continue;
                }
                _ => {}
            }
            let fate = error
                .downcast_ref::<StoreError>()
                .or_else(|| match error.downcast_ref::<StreamError>() {
                    Some(StreamError::Store(error)) => Some(error),
                    _ => None,
                })
                .map_or(Fate::Retry, StoreError::fate);
            if fate == Fate::StandDown {
                break;
            }
            // Also what needs an operator is tried again: the cause may be mended from outside at any time. A baseline
            // that met a value it cannot represent reads every table again, so that one waits longer.
            let poisoned = error
                .chain()
                .any(|cause| matches!(cause.downcast_ref::<MaterializeError>(), Some(MaterializeError::Poison { .. })));
            let delay = match fate {
                _ if poisoned => POISONED_BASELINE,
                Fate::Rerun => Duration::ZERO,
                Fate::Retry | Fate::Stop | Fate::StandDown => backoff.next_delay(),
            };
            tokio::select! {
                () = leading.cancelled() => {}
                () = newly_asked(&reset) => {}
                () = tokio::time::sleep(delay) => {}
            }
        }
        leading.cancel();
        heart.await.unwrap_or_else(|error| tracing::error!(%error, "the heartbeat panicked"));
        if unanswered.is_cancelled() {
            self.health.unready("the state database does not answer");
            self.forget_sessions();
        }
    }

    /// One turn: baseline if there is none, reset if one is asked for, then the stream until it ends.
    async fn lead_once(
        &self,
        epoch: i64,
        careful_until: Lsn,
        watches: Watches,
        leading: &CancellationToken,
    ) -> anyhow::Result<Turn> {
        let limits = Limits {
            rows: self.settings.batch_rows as usize,
            octets: self.settings.batch_octets as usize,
            transactions: u64::MAX,
        };
        let baseline =
            Baseline { settings: &self.settings, registry: self.registry.clone(), state: &self.state, epoch, limits };
        let (db, progress) = self
            .within(async {
                let db = session::acquire(&self.state).await?;
                let progress = progress::load(&db).await?;
                Ok((db, progress))
            })
            .await?;
        let Some(progress) = progress else {
            drop(db);
            self.health.unready("taking the baseline");
            tokio::select! {
                () = leading.cancelled() => return Ok(Turn::Over),
                taken = baseline::take(&baseline) => taken.context("baseline")?,
            }
            return Ok(Turn::Again);
        };
        let configuration = configuration::load(&db, progress.configuration_no).await?;
        if configuration.registry != *self.registry {
            bail!("the configuration differs from number {} in force", progress.configuration_no);
        }
        if let Some(reset_no) = reset::requested(&db).await? {
            drop(db);
            self.health.unready("taking the baseline of a reset; the former state is served until it is active");
            // Housekeeping changes the rows that the reset replaces.
            let _quiet = watches.housekeeping.lock().await;
            tokio::select! {
                () = leading.cancelled() => {}
                done = crate::reset::perform(&baseline, reset_no, &progress) => done.context("reset")?,
            }
            return Ok(Turn::Over);
        }
        if let Some(case) = quarantine::current(&db).await? {
            self.await_retry(case.quarantine_no, &case.reason, &case.detail, leading, &watches.reset).await;
            return Ok(if leading.is_cancelled() { Turn::Over } else { Turn::Again });
        }
        self.within(async {
            let name = leader::application_name(self.holder);
            let source_db = self.settings.databases.source_url.connect(&name).await?;
            self.check_source(&source_db, &db, epoch).await
        })
        .await?;
        drop(db);
        metrics::gauge!("tributary_slot_lost").set(0.0);
        self.health.ready("leader");
        let turn = leading.child_token();
        let stream = Stream {
            settings: &self.settings,
            registry: self.registry.clone(),
            schema_hash: configuration.schema_hash,
            state: &self.state,
            epoch,
            limits,
            careful_until,
            progress,
            idle: watches.idle,
            recorded: watches.recorded,
            source_wal: watches.source_wal,
            pulse: watches.pulse,
            holder: self.holder,
            stop: turn.clone(),
        };
        let following = stream::follow(stream);
        tokio::pin!(following);
        tokio::select! {
            ended = &mut following => ended?,
            () = asked(&watches.reset) => {
                turn.cancel();
                following.await?;
            }
        }
        Ok(if leading.is_cancelled() { Turn::Over } else { Turn::Again })
    }

    /// What may not take longer than [`PREPARE_LIMIT`].
    async fn within<T>(&self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        if let Ok(done) = tokio::time::timeout(PREPARE_LIMIT, work).await {
            return done;
        }
        self.forget_sessions();
        bail!("a database did not answer within {} s", PREPARE_LIMIT.as_secs())
    }

    /// The source must be the server that the state was made of, and the slot must stand where we left it.
    async fn check_source(
        &self,
        source_db: &Client,
        state: &deadpool_postgres::Object,
        epoch: i64,
    ) -> anyhow::Result<()> {
        let address = &self.settings.databases.source_url;
        let slot = self.settings.slot.as_str();
        let names = Names { slot, publication: &self.settings.publication };
        let found = diagnosis::examine(source_db, address, state, names, &self.registry.tables).await?;
        if let Some(fault) = found.faults.into_iter().next() {
            return Err(fault.into());
        }
        if let Some(identity) = found.followed {
            tracing::info!(
                timeline = identity.timeline,
                "the source moved to a timeline that holds what is materialized"
            );
            server::record(state, epoch, &identity).await?;
        }
        if !source::free_slot(source_db, slot).await? {
            bail!("replication slot {slot} is held by another session");
        }
        Ok(())
    }

    async fn quarantine(
        &self,
        commit_lsn: Lsn,
        reason: &str,
        relation: Option<&str>,
        detail: &str,
        leading: &CancellationToken,
        reset: &watch::Receiver<Option<i64>>,
    ) {
        let opened = async {
            let db = session::acquire(&self.state).await?;
            quarantine::open(&db, commit_lsn, reason, relation, detail).await
        }
        .await;
        match opened {
            Ok(number) => {
                tracing::error!(%commit_lsn, reason, relation, detail, quarantine = number, "the stream is stopped");
                self.await_retry(number, reason, detail, leading, reset).await;
            }
            Err(error) => {
                tracing::error!(%error, %commit_lsn, reason, "the stream is stopped, and quarantine cannot be written");
                self.pause(Duration::from_secs(1)).await;
            }
        }
    }

    /// Waits until an operator says that the cause is fixed (`materializer retry`), or asks for a reset.
    async fn await_retry(
        &self,
        number: i64,
        reason: &str,
        detail: &str,
        leading: &CancellationToken,
        reset: &watch::Receiver<Option<i64>>,
    ) {
        meters::quarantine(Some(reason));
        self.health.unready(format!("stopped at a quarantined transaction (case {number}): {detail}"));
        loop {
            tokio::select! {
                () = leading.cancelled() => return,
                () = asked(reset) => return,
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
            let open = async { quarantine::is_open(&session::acquire(&self.state).await?, number).await }.await;
            if matches!(open, Ok(false)) {
                tracing::info!(quarantine = number, "trying the quarantined transaction again");
                meters::quarantine(None);
                return;
            }
        }
    }
}

struct Watches {
    idle: watch::Sender<Lsn>,
    recorded: watch::Receiver<Lsn>,
    source_wal: watch::Receiver<Lsn>,
    /// The open request for a reset.
    reset: watch::Receiver<Option<i64>>,
    /// Held by whoever changes rows that housekeeping changes too.
    housekeeping: Arc<Mutex<()>>,
    /// What the writer waits for.
    pulse: Arc<Pulse>,
}

/// Until a reset is asked for.
async fn asked(reset: &watch::Receiver<Option<i64>>) {
    if reset.clone().wait_for(Option::is_some).await.is_err() {
        // The heart has stopped, and with it the leadership.
        std::future::pending::<()>().await;
    }
}

/// Until a reset is asked for, from now on: one that fails waits as any other fault does.
async fn newly_asked(reset: &watch::Receiver<Option<i64>>) {
    let mut reset = reset.clone();
    let known = *reset.borrow_and_update();
    if reset.wait_for(|asked| asked.is_some() && *asked != known).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Keeps the lease, records what is acknowledged while the stream is idle, measures lag, and removes what expired.
struct Heartbeat {
    settings: RunSettings,
    state: Pool,
    epoch: i64,
    idle: watch::Receiver<Lsn>,
    recorded: watch::Sender<Lsn>,
    source_wal: watch::Sender<Lsn>,
    reset: watch::Sender<Option<i64>>,
    housekeeping: Arc<Mutex<()>>,
    leading: CancellationToken,
    /// The state database does not answer: the leadership has to begin again with other sessions.
    unanswered: CancellationToken,
    pulse: Arc<Pulse>,
}

impl Heartbeat {
    async fn run(self) {
        let mut renewed = tokio::time::Instant::now();
        let mut source_db = None;
        let mut lag = Lag::default();
        let mut sweep = Sweep::default();
        let mut beat = tokio::time::interval(self.settings.heartbeat());
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.leading.cancelled() => return,
                _ = beat.tick() => {}
            }
            // A frozen connection must not stop the heart: each step has a limit of its own.
            let limit = self.settings.heartbeat();
            let unanswered = |_| StoreError::Pool("no answer in time".into());
            match tokio::time::timeout(limit, self.renew()).await.map_err(unanswered).and_then(|done| done) {
                Ok(()) => renewed = tokio::time::Instant::now(),
                Err(StoreError::Fenced) => {
                    tracing::warn!(epoch = self.epoch, "another materializer leads");
                    self.leading.cancel();
                    return;
                }
                Err(error) if renewed.elapsed() > self.settings.lease() => {
                    tracing::warn!(%error, epoch = self.epoch, "the lease ran out: the state database does not answer");
                    self.unanswered.cancel();
                    self.leading.cancel();
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the heartbeat failed");
                    // The next one asks through another session.
                    self.state.close_idle();
                }
            }
            let forsaken = tokio::time::timeout(limit, self.writer_is_forsaken()).await;
            if matches!(forsaken, Ok(Ok(true))) {
                tracing::warn!(epoch = self.epoch, "the writer waits for a session that nobody serves");
                self.unanswered.cancel();
                self.leading.cancel();
                return;
            }
            let measured = tokio::time::timeout(limit, self.measure(&mut source_db, &mut lag)).await;
            if let Err(error) = measured.map_err(unanswered).and_then(|done| done) {
                tracing::debug!(%error, "the source's WAL position is not known");
                source_db = None;
            }
            let collected = tokio::time::timeout(limit, self.collect(&mut sweep)).await;
            if let Err(error) = collected.map_err(unanswered).and_then(|done| done) {
                tracing::debug!(%error, "housekeeping failed");
            }
        }
    }

    async fn renew(&self) -> Result<(), StoreError> {
        let idle = *self.idle.borrow();
        let db = session::acquire(&self.state).await?;
        leader::renew(&db, self.epoch, idle).await?;
        // Recorded first, acknowledged after: so the slot is never ahead of what we know to have said.
        self.recorded.send_if_modified(|recorded| {
            let moved = *recorded < idle;
            *recorded = idle.max(*recorded);
            moved
        });
        let asked = reset::requested(&db).await?;
        self.reset.send_if_modified(|known| {
            let differs = *known != asked;
            *known = asked;
            differs
        });
        Ok(())
    }

    /// Whether the writer waits for an answer while its backend has long waited for the writer.
    async fn writer_is_forsaken(&self) -> Result<bool, StoreError> {
        let silence = Duration::from_secs(self.settings.silence_seconds);
        match self.pulse.waiting_for(silence) {
            None => Ok(false),
            Some(backend) => leader::is_forsaken(&session::acquire(&self.state).await?, backend, silence).await,
        }
    }

    async fn measure(&self, source_db: &mut Option<Client>, lag: &mut Lag) -> Result<(), StoreError> {
        if source_db.is_none() {
            *source_db = Some(self.settings.databases.source_url.connect("tributary-materializer").await?);
        }
        let Some(db) = source_db else { return Ok(()) };
        let wal = source::current_wal(db).await?;
        self.source_wal.send_replace(wal);
        metrics::gauge!("tributary_source_wal_lsn").set(wal.octets() as f64);
        let slot = source::slot(db, self.settings.slot.as_str()).await?;
        // Without progress there is no slot to be lost.
        if let Some(progress) = progress::load(&session::acquire(&self.state).await?).await? {
            meters::slot(slot.as_ref(), wal, progress.resume_lsn, lag);
        }
        Ok(())
    }

    /// Small steps of housekeeping, bounded so that the stream does not feel them: expired rebuild sessions and unused
    /// snapshots, clients that acknowledge nothing, delete markers that no client needs.
    async fn collect(&self, sweep: &mut Sweep) -> Result<(), StoreError> {
        let Ok(_mine) = self.housekeeping.try_lock() else { return Ok(()) };
        let now = self.settings.now();
        let mut db = session::acquire(&self.state).await?;
        if sweep.counted.is_none_or(|counted| counted.elapsed() >= COUNT_INTERVAL) {
            sweep.counted = Some(Instant::now());
            let stored = snapshot::count(&db, now).await?;
            metrics::gauge!("tributary_rebuild_sessions").set(stored.sessions as f64);
            metrics::gauge!("tributary_snapshots").set(stored.snapshots as f64);
            metrics::gauge!("tributary_snapshot_bytes").set(stored.octets as f64);
        }
        let grace = Duration::from_secs(self.settings.snapshot_grace_seconds);
        let (sessions, snapshots) = snapshot::collect(&db, now, now - grace, COLLECT_BATCH).await?;
        let stale = Duration::from_secs(self.settings.stale_seconds);
        let expired = retention::expire_clients(&db, now, stale, EXPIRE_BATCH).await?;
        let mut markers = 0;
        for _ in 0..COMPACT_SCOPES {
            let Some(scope_no) = retention::next_marked_scope(&db, sweep.scope_no).await? else {
                sweep.scope_no = 0;
                break;
            };
            let transaction = db.transaction().await?;
            let compacted = retention::compact(&transaction, scope_no, now, COMPACT_BATCH).await?;
            leader::hold(&transaction, self.epoch).await?;
            transaction.commit().await?;
            markers += compacted.markers;
            // A scope with more than a batch is looked at again.
            sweep.scope_no = if compacted.markers < COMPACT_BATCH as u64 { scope_no } else { scope_no - 1 };
        }
        sweep.row_id = retention::forget_unmarked(&db, sweep.row_id, COMPACT_BATCH).await?.unwrap_or(0);
        metrics::counter!("tributary_expired_clients_total").increment(expired);
        metrics::counter!("tributary_compacted_markers_total").increment(markers);
        if sessions + snapshots + expired + markers > 0 {
            tracing::debug!(sessions, snapshots, expired, markers, "housekeeping");
        }
        Ok(())
    }
}

/// Where the housekeeping goes on.
#[derive(Default)]
struct Sweep {
    scope_no: i32,
    row_id: i64,
    /// When sessions and snapshots were counted last.
    counted: Option<Instant>,
}

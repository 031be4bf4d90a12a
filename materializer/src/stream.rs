//! The stream while this process leads: receive, decode, assemble, write, acknowledge.
//!
//! Two tasks: this one receives and assembles, [`write_batches`] writes. While one batch is written the next is
//! assembled, so that many small transactions share a state transaction when the writer is the slower one, and each
//! has its own when it is not.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt as _;
use pgwire_replication::{PgWireError, ReplicationClient, ReplicationEvent};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tributary_shared::encoding;
use tributary_shared::lsn::Lsn;
use tributary_shared::registry::Registry;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::leader;
use tributary_shared::store::progress::{self, Advance, Progress};
use tributary_shared::store::session::{self, Pool};

use crate::assemble::{AcceptedEpoch, AssembleError, Assembler, Batch, Limits, TransactionEnd};
use crate::failpoint;
use crate::materialize::{MaterializeError, Writer};
use crate::pgoutput::{DecodeError, Decoder};
use crate::pulse::Pulse;
use crate::replication;
use crate::settings::RunSettings;

/// Prefix of the logical messages that `tributary.accept_write` emits.
const ACCEPT_WRITE: &str = "tributary.accept_write";
/// PostgreSQL's epoch (2000-01-01) after the Unix epoch, in seconds.
const POSTGRES_EPOCH: u64 = 946_684_800;

/// Events that are taken in one go.
const BURST: u32 = 256;
/// Row changes past which a state transaction takes no batch more.
const JOINED_CHANGES: u64 = 32 * 1024;
/// Age past which it takes none.
const JOINED_TIME: Duration = Duration::from_millis(100);

/// Why the stream ended.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The replication session failed.
    #[error("replication: {}", replication::advice(.0))]
    Replication(#[from] PgWireError),
    /// The replication session ended without an error.
    #[error("replication: the server ended the stream")]
    Ended,
    /// The server did not answer in time.
    #[error("replication: no answer within {} s", replication::CONNECT_LIMIT.as_secs())]
    Unanswered,
    /// The stream was silent while the source's WAL moved on.
    #[error("replication: no message for {0} s while the source's WAL moves on")]
    Silent(u64),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A transaction that cannot be materialized.
    #[error("{}{detail}", relation.as_ref().map(|r| format!("{r}: ")).unwrap_or_default())]
    Stopped {
        /// `poison` or `drift`.
        reason: &'static str,
        /// Inclusive commit LSN of the transaction; `None` when it is one of several, and has to be found by
        /// following the stream carefully.
        commit_lsn: Option<Lsn>,
        /// The relation.
        relation: Option<String>,
        /// What is wrong, without values.
        detail: String,
    },
}

/// What the stream works with.
pub struct Stream<'a> {
    pub settings: &'a RunSettings,
    pub registry: Arc<Registry>,
    pub schema_hash: [u8; 32],
    pub state: &'a Pool,
    pub epoch: i64,
    pub limits: Limits,
    /// Until this position each source transaction has a state transaction of its own, because one of them cannot be
    /// materialized and the ones before it must be.
    pub careful_until: Lsn,
    /// Durable progress at the start.
    pub progress: Progress,
    /// What may be acknowledged although no transaction of ours ends there: recorded by the heartbeat, then taken
    /// from `recorded`.
    pub idle: watch::Sender<Lsn>,
    pub recorded: watch::Receiver<Lsn>,
    /// The source's WAL position as the heartbeat saw it last.
    pub source_wal: watch::Receiver<Lsn>,
    /// Told what the writer waits for.
    pub pulse: Arc<Pulse>,
    /// This process, for the names of its sessions.
    pub holder: uuid::Uuid,
    pub stop: CancellationToken,
}

/// Follows the stream until `stop`, or an error.
pub async fn follow(stream: Stream<'_>) -> Result<(), StreamError> {
    let settings = stream.settings;
    let mut client = replication::connect(
        &settings.databases.source_url,
        settings.slot.as_str(),
        &settings.publication,
        stream.progress.resume_lsn,
        &leader::application_name(stream.holder),
    )
    .await?;
    let started = async {
        client.start().await?;
        client.wait_started().await
    };
    tokio::time::timeout(replication::CONNECT_LIMIT, started).await.map_err(|_| StreamError::Unanswered)??;
    tracing::info!(resume_lsn = %stream.progress.resume_lsn, "streaming");

    let encoders = encoding::encoders(&stream.registry)
        .map_err(|e| StoreError::integrity(format!("the configuration in force cannot be used: {e}")))?;
    let keys = stream.registry.tables.iter().map(|t| t.keys.clone()).collect();
    let careful = stream.progress.resume_lsn < stream.careful_until;
    let limits = if careful { Limits { transactions: 1, ..stream.limits } } else { stream.limits };
    let mut assembler = Assembler::new(encoders.clone(), keys, limits, stream.progress.boundary_lsn);
    let mut decoder = Decoder::new(&stream.registry);
    let writer = Writer::new(
        stream.registry.clone(),
        Arc::new(encoders),
        stream.schema_hash,
        Arc::new(AtomicI64::new(stream.progress.next_row_id)),
        stream.state.clone(),
        None,
    );
    let (batches, inbox) = mpsc::channel::<Batch>(1);
    let (durable_sender, mut durable) = watch::channel(stream.progress.resume_lsn);
    let (state, pulse) = (stream.state.clone(), stream.pulse.clone());
    let writing = tokio::spawn(write_batches(state, writer, stream.epoch, inbox, durable_sender, pulse));
    // A stream that is given up, because a database does not answer, leaves no writer behind.
    let mut writing = AbortOnDropHandle::new(writing);

    let outcome =
        receive(&stream, &mut client, &mut assembler, &mut decoder, &batches, &mut durable, &mut writing).await;
    // Lets the writer finish what it was given; a part of a transaction is rolled back by the closed channel.
    drop(batches);
    let outcome = match outcome {
        Err(Received::Writer(error)) => Err(error),
        Ok(()) => join(writing.await),
        Err(Received::Failed(error)) => join(writing.await).and(Err(error)),
    };
    client.update_applied_lsn(wire(*durable.borrow()));
    client.stop();
    outcome
}

/// How receiving ended early.
enum Received {
    Failed(StreamError),
    /// The writer ended first; its task is joined.
    Writer(StreamError),
}

impl<E: Into<StreamError>> From<E> for Received {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

type Writing = AbortOnDropHandle<Result<(), StreamError>>;

fn join(joined: Result<Result<(), StreamError>, tokio::task::JoinError>) -> Result<(), StreamError> {
    joined.unwrap_or_else(|error| Err(StoreError::integrity(format!("the writer panicked: {error}")).into()))
}

async fn receive(
    stream: &Stream<'_>,
    client: &mut ReplicationClient,
    assembler: &mut Assembler,
    decoder: &mut Decoder,
    batches: &mpsc::Sender<Batch>,
    durable: &mut watch::Receiver<Lsn>,
    writing: &mut Writing,
) -> Result<(), Received> {
    let mut recorded = stream.recorded.clone();
    let mut heartbeat = tokio::time::interval(stream.settings.heartbeat());
    heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let silence = Duration::from_secs(stream.settings.silence_seconds);
    let mut last_event = Instant::now();
    let mut last_seen = Lsn::ZERO;
    // End of the newest transaction that was given to the writer.
    let mut sent = stream.progress.resume_lsn;
    // Empty transactions move the boundary with the heartbeat only: with the state in the source database, each
    // write of ours is such a transaction on older servers.
    let mut flush_empty = false;
    let mut careful = sent < stream.careful_until;
    loop {
        let ready = assembler.is_ready() && (assembler.has_content() || flush_empty);
        tokio::select! {
            biased;
            () = stream.stop.cancelled() => return Ok(()),
            ended = &mut *writing => {
                return Err(Received::Writer(join(ended).err().unwrap_or(StreamError::Ended)));
            }
            changed = durable.changed() => {
                if changed.is_ok() {
                    let end = *durable.borrow_and_update();
                    client.update_applied_lsn(wire(end));
                    if careful && end >= stream.careful_until {
                        careful = false;
                        assembler.set_limits(stream.limits);
                    }
                }
            }
            changed = recorded.changed() => {
                if changed.is_ok() {
                    client.update_applied_lsn(wire(*recorded.borrow_and_update()));
                }
            }
            permit = batches.reserve(), if ready => {
                if let Ok(permit) = permit {
                    let batch = assembler.take();
                    if let Some(end) = batch.end {
                        sent = end.end_lsn;
                    }
                    flush_empty = false;
                    permit.send(batch);
                }
            }
            event = client.recv(), if !assembler.is_full() => {
                last_event = Instant::now();
                let mut next = event;
                // What has arrived already is taken in one go: waiting for seven things at once costs more than an
                // event does.
                for left in (0..BURST).rev() {
                    let event = next?.ok_or(StreamError::Ended)?;
                    if let ReplicationEvent::KeepAlive { wal_end, .. } = &event {
                        last_seen = ours(*wal_end);
                        if assembler.is_empty() && *durable.borrow() >= sent {
                            stream.idle.send_replace(last_seen);
                        }
                    } else {
                        let transaction = assembler.open_transaction();
                        absorb(event, assembler, decoder).map_err(|cause| {
                            let at = assembler.open_transaction().or(transaction);
                            Received::Failed(cause.stopped(&stream.registry, if careful { at } else { None }))
                        })?;
                    }
                    if left == 0 || assembler.is_full() {
                        break;
                    }
                    let Some(arrived) = client.recv().now_or_never() else { break };
                    next = arrived;
                }
            }
            _ = heartbeat.tick() => {
                flush_empty = true;
                let wal = *stream.source_wal.borrow();
                if last_event.elapsed() > silence && wal > last_seen && !assembler.is_full() {
                    return Err(StreamError::Silent(silence.as_secs()).into());
                }
            }
        }
    }
}

/// What is wrong with an event.
#[derive(Debug, thiserror::Error)]
enum AbsorbError {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Assemble(#[from] AssembleError),
    #[error("an accepted-write message cannot be read")]
    Message,
    #[error("a log position is out of range")]
    Lsn,
}

impl AbsorbError {
    fn stopped(self, registry: &Registry, commit_lsn: Option<Lsn>) -> StreamError {
        let detail = self.to_string();
        let (reason, relation) = match self {
            Self::Decode(DecodeError::Drift { relation, .. }) => ("drift", Some(relation)),
            Self::Decode(DecodeError::BadRow { relation, .. }) => ("poison", Some(relation)),
            Self::Assemble(AssembleError::Key { table, .. }) => {
                ("poison", Some(registry.tables[table].relation.to_string()))
            }
            Self::Decode(DecodeError::Malformed(_)) | Self::Assemble(_) | Self::Message | Self::Lsn => ("poison", None),
        };
        StreamError::Stopped { reason, commit_lsn, relation, detail }
    }
}

fn absorb(event: ReplicationEvent, assembler: &mut Assembler, decoder: &mut Decoder) -> Result<(), AbsorbError> {
    let lsn = |lsn: pgwire_replication::Lsn| Lsn::new(lsn.as_u64()).map_err(|_| AbsorbError::Lsn);
    match event {
        ReplicationEvent::Begin { final_lsn, commit_time_micros, .. } => {
            assembler.begin(lsn(final_lsn)?, postgres_time(commit_time_micros))?;
        }
        ReplicationEvent::XLogData { data, .. } => {
            if let Some(change) = decoder.decode(data)? {
                assembler.change(change)?;
            }
        }
        ReplicationEvent::Commit { lsn: commit, end_lsn, .. } => assembler.commit(lsn(commit)?, lsn(end_lsn)?)?,
        ReplicationEvent::Message { transactional: true, prefix, content, .. } if prefix == ACCEPT_WRITE => {
            #[derive(serde::Deserialize)]
            struct Message {
                user_id: String,
                client_id: String,
                epoch: i64,
            }
            let Message { user_id, client_id, epoch } =
                serde_json::from_slice(&content).map_err(|_| AbsorbError::Message)?;
            assembler.accepted(AcceptedEpoch { user_id, client_id, epoch })?;
        }
        // Messages of others, and non-transactional ones, are none of ours.
        ReplicationEvent::Message { .. } | ReplicationEvent::KeepAlive { .. } | ReplicationEvent::StoppedAt { .. } => {}
    }
    Ok(())
}

/// Writes batches: each state transaction takes whole source transactions, moves the boundary as its last statement,
/// and is committed before anything is acknowledged. It takes the batches that already wait, within limits: a commit
/// waits for the disk.
async fn write_batches(
    state: Pool,
    mut writer: Writer,
    epoch: i64,
    mut inbox: mpsc::Receiver<Batch>,
    durable: watch::Sender<Lsn>,
    pulse: Arc<Pulse>,
) -> Result<(), StreamError> {
    pulse.waits(0);
    let mut session = session::acquire(&state).await?;
    let backend = leader::backend(&session).await?;
    // Taken already, for the next state transaction.
    let mut carried = None;
    loop {
        pulse.rests();
        let Some(mut batch) = (match carried.take() {
            Some(batch) => Some(batch),
            None => inbox.recv().await,
        }) else {
            return Ok(());
        };
        pulse.waits(backend);
        let started = Instant::now();
        let transaction = session.transaction().await.map_err(StoreError::from)?;
        let first = batch.first_commit;
        let (mut transactions, mut changes) = (0, 0);
        let end = loop {
            transactions += batch.transactions;
            changes += batch.changes;
            if let Err(error) = writer.write(&transaction, &batch).await {
                // In a state transaction of one source transaction it is certain which one failed.
                let only = batch.end.map_or(transactions == 0, |end| Some(end.commit_lsn) == first);
                return Err(failed(error, if only { first } else { None }));
            }
            if let Some(end) = batch.end {
                let join = batch.joinable && changes < JOINED_CHANGES && started.elapsed() < JOINED_TIME;
                match if join { inbox.try_recv().ok() } else { None } {
                    Some(next) if next.end.is_some() => {
                        batch = next;
                        continue;
                    }
                    // A part: its source transaction may be long, and nothing waits for it.
                    part => carried = part,
                }
                break end;
            }
            pulse.rests();
            match inbox.recv().await {
                Some(next) => batch = next,
                // Stopped inside a source transaction: what there is of it is rolled back.
                None => return Ok(()),
            }
            pulse.waits(backend);
        };
        let TransactionEnd { commit_lsn, end_lsn, commit_time } = end;
        if let Err(error) = writer.finish(&transaction).await {
            return Err(failed(error, if Some(commit_lsn) == first { first } else { None }));
        }
        let advance =
            Advance { boundary_lsn: commit_lsn, resume_lsn: end_lsn, commit_time, next_row_id: writer.next_row_id() };
        let advancing = Instant::now();
        progress::advance(&transaction, epoch, advance).await?;
        writer.phases.write += advancing.elapsed();
        failpoint::reach(failpoint::BEFORE_COMMIT);
        let committing = Instant::now();
        transaction.commit().await.map_err(StoreError::from)?;
        failpoint::reach(failpoint::BEFORE_ACKNOWLEDGEMENT);
        durable.send_replace(end_lsn);

        std::mem::take(&mut writer.phases).record(committing.elapsed());
        metrics::counter!("tributary_transactions_total").increment(transactions);
        metrics::histogram!("tributary_batch_duration_seconds").record(started.elapsed().as_secs_f64());
        metrics::histogram!("tributary_batch_changes").record(changes as f64);
        metrics::gauge!("tributary_boundary_lsn").set(commit_lsn.octets() as f64);
        let lag = SystemTime::now().duration_since(commit_time).unwrap_or_default();
        metrics::gauge!("tributary_commit_lag_seconds").set(lag.as_secs_f64());
    }
}

fn failed(error: MaterializeError, commit_lsn: Option<Lsn>) -> StreamError {
    match error {
        MaterializeError::Store(error) => error.into(),
        MaterializeError::Poison { relation, detail, .. } => {
            StreamError::Stopped { reason: "poison", commit_lsn, relation: Some(relation), detail }
        }
    }
}

fn wire(lsn: Lsn) -> pgwire_replication::Lsn {
    pgwire_replication::Lsn::from_u64(lsn.octets())
}

fn ours(lsn: pgwire_replication::Lsn) -> Lsn {
    Lsn::new(lsn.as_u64()).unwrap_or_default()
}

fn postgres_time(micros: i64) -> SystemTime {
    let epoch = SystemTime::UNIX_EPOCH + Duration::from_secs(POSTGRES_EPOCH);
    if micros >= 0 {
        epoch + Duration::from_micros(micros.unsigned_abs())
    } else {
        epoch - Duration::from_micros(micros.unsigned_abs())
    }
}

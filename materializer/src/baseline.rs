//! The baseline: every registered relation as of a snapshot that is exactly aligned with the slot's start.
//!
//! The slot's exported snapshot holds what committed before the consistent point; everything later is streamed. Rows
//! stand at the generation start, so that no cursor of the new generation delivers them: clients get them by rebuild.
//! Until the activation there is no progress row and no puller serves the state, so the copy may commit as it goes; an
//! interrupted baseline restarts cleanly: new slot, empty projections. The baseline of a reset (`reset`) is read by the
//! same functions and written inside one state transaction instead.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::SystemTime;

use anyhow::{Context, bail};
use deadpool_postgres::{GenericClient, Object, Transaction};
use futures_util::{StreamExt, TryStreamExt, pin_mut};
use tokio::sync::Mutex;
use tokio_postgres::{Client, SimpleQueryMessage};
use tributary_shared::canonical::FieldSource;
use tributary_shared::encoding;
use tributary_shared::lsn::Lsn;
use tributary_shared::manifest::Manifest;
use tributary_shared::position::Position;
use tributary_shared::registry::Registry;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::session::{self, Pool};
use tributary_shared::store::{configuration, leader, progress, projection, server, source, write};
use uuid::Uuid;

use crate::assemble::{Batch, Limits, PendingRow, RowState};
use crate::materialize::Writer;
use crate::membership::SetMembership;
use crate::meters::Copying;
use crate::pgoutput::Datum;
use crate::replication;
use crate::settings::RunSettings;
use crate::{diagnosis, failpoint};

/// What a baseline works with.
pub struct Baseline<'a> {
    pub settings: &'a RunSettings,
    pub registry: Arc<Registry>,
    pub state: &'a Pool,
    pub epoch: i64,
    pub limits: Limits,
}

/// Takes the baseline and activates a new stream generation.
pub async fn take(baseline: &Baseline<'_>) -> anyhow::Result<()> {
    let Baseline { settings, registry, state, epoch, .. } = baseline;
    let source_address = &settings.databases.source_url;
    let slot_name = settings.slot.as_str();
    let source_db = source_address.connect("tributary-materializer").await?;

    {
        let db = session::acquire(state).await?;
        leader::hold(&db, *epoch).await?;
        leader::forget_acknowledged(&db, *epoch).await?;
        projection::clear_unactivated(&db).await?;
        for table in &registry.tables {
            projection::create(&db, table).await?;
        }
    }
    if let Some(slot) = source::slot(&source_db, slot_name).await? {
        // Without progress there is nothing that the slot could belong to but a baseline of ours that did not finish.
        if slot.active_pid.is_some() {
            bail!("replication slot {slot_name} is in use by another process, but this state has no progress");
        }
        tracing::warn!(slot = slot_name, "dropping the slot of an interrupted baseline");
        source::drop_slot(&source_db, slot_name).await?;
    }
    let slot = create_slot(baseline, &source_db).await?;
    let identity = diagnosis::identity(&settings.databases.source_url, &server::present(&source_db).await?).await?;

    let manifest = next_manifest(state, registry).await?;
    let copied = copy(baseline, &slot.snapshot, slot.consistent_point, &manifest).await?;

    let mut db = session::acquire(state).await?;
    if registry.rules.iter().any(tributary_shared::rule::Rule::has_joins) {
        // Planned for the rows that are there.
        projection::analyze(&db, &registry.tables).await?;
        SetMembership::new(registry.clone(), &encoding::encoders(registry)?, (*state).clone()).baseline(*epoch).await?;
    }
    projection::analyze(&db, &registry.tables).await?;
    failpoint::reach(failpoint::BEFORE_ACTIVATION);
    let transaction = db.transaction().await.map_err(StoreError::from)?;
    let configuration_no = configuration::store(&transaction, registry, &manifest).await?;
    progress::activate(
        &transaction,
        *epoch,
        Uuid::new_v4(),
        slot.consistent_point,
        copied.snapshot_time,
        configuration_no,
        copied.next_row_id,
    )
    .await?;
    server::record(&transaction, *epoch, &identity).await?;
    transaction.commit().await.map_err(StoreError::from)?;
    failpoint::reach(failpoint::AFTER_ACTIVATION);
    tracing::info!(rows = copied.rows, configuration_no, "baseline active");
    Ok(())
}

/// Brings the publication up to the registry and makes the slot, which must not exist.
pub async fn create_slot(baseline: &Baseline<'_>, source_db: &Client) -> anyhow::Result<replication::NewSlot> {
    let Baseline { settings, registry, .. } = baseline;
    let made = source::ensure_publication(source_db, &settings.publication, &registry.tables).await?;
    let created =
        replication::create_slot(&settings.databases.source_url, settings.slot.as_str(), &settings.publication).await;
    let slot = match created {
        Ok(slot) => slot,
        Err(error) => {
            if made {
                source::drop_publication(source_db, &settings.publication).await?;
            }
            bail!("cannot create the replication slot: {}", replication::advice(&error));
        }
    };
    tracing::info!(consistent_point = %slot.consistent_point, tables = registry.tables.len(), "baseline started");
    failpoint::reach(failpoint::BASELINE_SLOT);
    Ok(slot)
}

/// The manifest of the registry: the published one when nothing differs, else its successor.
pub async fn next_manifest(state: &Pool, registry: &Registry) -> anyhow::Result<Manifest> {
    let db = session::acquire(state).await?;
    let newest = configuration::newest_manifest(&db).await?;
    let newest = newest.as_deref().map(Manifest::from_json).transpose().context("the published manifest")?;
    Ok(encoding::manifest(registry, newest.as_ref())?)
}

/// What was copied.
pub struct Copied {
    pub rows: u64,
    pub next_row_id: i64,
    pub snapshot_time: SystemTime,
}

/// Copies every relation, several at once, each worker through a session that imported the snapshot.
async fn copy(
    baseline: &Baseline<'_>,
    snapshot: &str,
    consistent_point: Lsn,
    manifest: &Manifest,
) -> anyhow::Result<Copied> {
    let registry = &baseline.registry;
    let next_row_id = Arc::new(AtomicI64::new(1));
    let queue = Arc::new(Mutex::new((0..registry.tables.len()).collect::<Vec<_>>()));

    // Every worker imports the snapshot before the first row is copied: the exporting session has nothing to wait for.
    let count = usize::from(baseline.settings.baseline_workers).min(registry.tables.len()).max(1);
    let mut sessions = Vec::with_capacity(count);
    let mut snapshot_time = SystemTime::UNIX_EPOCH;
    for _ in 0..count {
        let session = baseline.settings.databases.source_url.connect("tributary-materializer").await?;
        snapshot_time = source::import_snapshot(&session, snapshot).await?;
        sessions.push(session);
    }
    copy_epochs(&session::acquire(baseline.state).await?, &sessions[0]).await?;
    let copying = Copying::begin(source::estimated_rows(&sessions[0], &registry.tables).await?);

    let mut workers = Vec::with_capacity(count);
    for session in sessions {
        let writer = writer(baseline, manifest, consistent_point, next_row_id.clone())?;
        let destination = Destination::Committed(Box::new(session::acquire(baseline.state).await?));
        workers.push(copy_tables(baseline, session, writer, destination, queue.clone(), &copying));
    }
    futures_util::future::try_join_all(workers).await?;
    Ok(Copied { rows: copying.rows(), next_row_id: next_row_id.load(Ordering::Relaxed), snapshot_time })
}

/// Copies every relation into one state transaction, through one session that imports the snapshot.
pub async fn copy_within(
    baseline: &Baseline<'_>,
    db: &Transaction<'_>,
    slot: &replication::NewSlot,
    manifest: &Manifest,
    next_row_id: i64,
) -> anyhow::Result<Copied> {
    let session = baseline.settings.databases.source_url.connect("tributary-materializer").await?;
    let snapshot_time = source::import_snapshot(&session, &slot.snapshot).await?;
    copy_epochs(db, &session).await?;
    let next_row_id = Arc::new(AtomicI64::new(next_row_id));
    let writer = writer(baseline, manifest, slot.consistent_point, next_row_id.clone())?;
    let queue = Arc::new(Mutex::new((0..baseline.registry.tables.len()).collect::<Vec<_>>()));
    let copying = Copying::begin(source::estimated_rows(&session, &baseline.registry.tables).await?);
    copy_tables(baseline, session, writer, Destination::Within(db), queue, &copying).await?;
    Ok(Copied { rows: copying.rows(), next_row_id: next_row_id.load(Ordering::Relaxed), snapshot_time })
}

fn writer(
    baseline: &Baseline<'_>,
    manifest: &Manifest,
    consistent_point: Lsn,
    next_row_id: Arc<AtomicI64>,
) -> anyhow::Result<Writer> {
    let version = Position::transaction_end(consistent_point).context("the consistent point is zero")?;
    Ok(Writer::new(
        baseline.registry.clone(),
        Arc::new(encoding::encoders(&baseline.registry)?),
        *manifest.hash().octets(),
        next_row_id,
        baseline.state.clone(),
        Some(version),
    ))
}

/// Where a baseline's batches go.
enum Destination<'a> {
    /// Each batch is committed as it goes: nothing serves them yet.
    Committed(Box<Object>),
    /// All of them into a transaction of the caller.
    Within(&'a Transaction<'a>),
}

impl Destination<'_> {
    async fn write(&mut self, writer: &mut Writer, batch: &Batch, epoch: i64) -> anyhow::Result<()> {
        match self {
            Self::Committed(db) => {
                let transaction = db.transaction().await?;
                writer.write(&transaction, batch).await?;
                leader::hold(&transaction, epoch).await?;
                transaction.commit().await?;
            }
            Self::Within(db) => writer.write(db, batch).await?,
        }
        failpoint::reach(failpoint::BASELINE_COPY);
        Ok(())
    }
}

/// The baseline counts as having materialized every epoch that its snapshot sees (contract: accepted writes).
async fn copy_epochs(db: &impl GenericClient, session: &Client) -> anyhow::Result<()> {
    let epochs = source::accepted_epochs(session).await?.try_chunks(1000);
    pin_mut!(epochs);
    while let Some(chunk) = epochs.next().await {
        let chunk = chunk.map_err(|e| e.1)?;
        let chunk: Vec<(&str, &str, i64)> = chunk.iter().map(|(u, c, e)| (u.as_str(), c.as_str(), *e)).collect();
        write::record_epochs(db, &chunk).await?;
    }
    Ok(())
}

async fn copy_tables(
    baseline: &Baseline<'_>,
    session: Client,
    mut writer: Writer,
    mut destination: Destination<'_>,
    queue: Arc<Mutex<Vec<usize>>>,
    copying: &Copying,
) -> anyhow::Result<()> {
    let encoders = encoding::encoders(&baseline.registry)?;
    loop {
        let Some(index) = queue.lock().await.pop() else { return Ok(()) };
        let table = &baseline.registry.tables[index];
        let partitioned = source::is_partitioned(&session, table).await?;
        let stream = session
            .simple_query_raw(&source::baseline_query(table, partitioned))
            .await
            .with_context(|| format!("cannot read {}", table.relation))?;
        pin_mut!(stream);
        let mut pending = Pending::default();
        while let Some(message) = stream.try_next().await.with_context(|| format!("cannot read {}", table.relation))? {
            let SimpleQueryMessage::Row(row) = message else { continue };
            let mut octets = 0;
            let values: Vec<Datum> = (0..table.columns.len())
                .map(|i| match row.get(i) {
                    None => Datum::Null,
                    Some(text) => {
                        octets += text.len();
                        Datum::Text(bytes::Bytes::copy_from_slice(text.as_bytes()))
                    }
                })
                .collect();
            let sources = table.keys.iter().map(|key| match values[*key].text() {
                Some(text) => FieldSource::Text(text),
                None => FieldSource::Null,
            });
            let key = encoders[index]
                .key_octets_of(sources)
                .with_context(|| format!("{}: a key cannot be represented", table.relation))?;
            pending.octets += octets + key.len();
            pending.rows.push(PendingRow {
                key,
                fresh: true,
                states: vec![RowState::new(Position::GENERATION_START, Some(values))],
            });
            if pending.rows.len() >= baseline.limits.rows || pending.octets >= baseline.limits.octets {
                copying.add(flush(&mut destination, &mut writer, baseline, index, &mut pending).await?);
            }
        }
        copying.add(flush(&mut destination, &mut writer, baseline, index, &mut pending).await?);
        tracing::info!(relation = %table.relation, "relation copied");
    }
}

#[derive(Default)]
struct Pending {
    rows: Vec<PendingRow>,
    octets: usize,
}

async fn flush(
    destination: &mut Destination<'_>,
    writer: &mut Writer,
    baseline: &Baseline<'_>,
    index: usize,
    pending: &mut Pending,
) -> anyhow::Result<u64> {
    let rows = std::mem::take(pending).rows;
    let count = rows.len() as u64;
    if count == 0 {
        return Ok(0);
    }
    let batch = Batch::of_rows(baseline.registry.tables.len(), index, rows);
    destination.write(writer, &batch, baseline.epoch).await?;
    Ok(count)
}

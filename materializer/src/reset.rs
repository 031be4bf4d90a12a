//! `materializer reset`: a new stream generation from a new baseline, for when the old stream cannot go on.
//!
//! The former state is served until the new one is active: everything is written in one state transaction, which
//! requests see whole or not at all. An interrupted reset leaves the former state, a slot that nobody will follow, and
//! the open request; the next leader begins again with another slot. The price is room for both states and one copying
//! session instead of several.

use std::time::Duration;

use anyhow::{Context, bail};
use tributary_shared::encoding;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::progress::Progress;
use tributary_shared::store::reset::{self, Activation};
use tributary_shared::store::session::{self, Pool};
use tributary_shared::store::{leader, projection, server, source};
use uuid::Uuid;

use crate::baseline::{self, Baseline};
use crate::membership::SetMembership;
use crate::{diagnosis, failpoint};

/// Rebuild sessions of the former generation removed at once.
const SESSIONS: i64 = 1000;
/// Time between two looks at whether a reset is carried out.
const LOOK: Duration = Duration::from_millis(200);

/// Carries out the open request `reset_no`; the leadership is over when it succeeds.
pub async fn perform(baseline: &Baseline<'_>, reset_no: i64, former: &Progress) -> anyhow::Result<()> {
    let Baseline { settings, registry, state, epoch, .. } = baseline;
    let slot_name = settings.slot.as_str();
    let source_db = settings.databases.source_url.connect("tributary-materializer").await?;
    // Still the leader: nobody else is about to use the slot that is dropped.
    leader::hold(&session::acquire(state).await?, *epoch).await?;
    if let Some(slot) = source::slot(&source_db, slot_name).await? {
        if slot.plugin != "pgoutput" || slot.database != settings.databases.source_url.database() {
            bail!("replication slot {slot_name} is not ours: plugin {}, database {}", slot.plugin, slot.database);
        }
        if !source::free_slot(&source_db, slot_name).await? {
            bail!("replication slot {slot_name} is held by another session");
        }
        source::drop_slot(&source_db, slot_name).await?;
    }
    let slot = baseline::create_slot(baseline, &source_db).await?;
    let identity = diagnosis::identity(&settings.databases.source_url, &server::present(&source_db).await?).await?;
    let manifest = baseline::next_manifest(state, registry).await?;

    let mut db = session::acquire(state).await?;
    let transaction = db.transaction().await.map_err(StoreError::from)?;
    reset::clear(&transaction, &registry.tables).await?;
    reset::forget_epochs(&transaction).await?;
    let copied = baseline::copy_within(baseline, &transaction, &slot, &manifest, former.next_row_id).await?;
    projection::analyze(&transaction, &registry.tables).await?;
    let encoders = encoding::encoders(registry)?;
    SetMembership::new(registry.clone(), &encoders, (*state).clone())
        .baseline_within(&transaction)
        .await
        .context("membership")?;
    failpoint::reach(failpoint::BEFORE_ACTIVATION);
    let stream_generation = Uuid::new_v4();
    server::record(&transaction, *epoch, &identity).await?;
    let activation = Activation {
        reset_no,
        epoch: *epoch,
        stream_generation,
        consistent_point: slot.consistent_point,
        snapshot_time: copied.snapshot_time,
        configuration_no: former.configuration_no,
        next_row_id: copied.next_row_id,
    };
    reset::activate(&transaction, activation).await?;
    transaction.commit().await.map_err(StoreError::from)?;
    failpoint::reach(failpoint::AFTER_ACTIVATION);
    metrics::counter!("tributary_resets_total").increment(1);
    crate::meters::quarantine(None);
    tracing::info!(rows = copied.rows, %stream_generation, reset = reset_no, "a new stream generation is active");
    while reset::forget_sessions(&db, SESSIONS).await? == SESSIONS as u64 {}
    Ok(())
}

/// Waits until a reset is carried out; the generation that it led to.
pub async fn wait(state: &Pool, reset_no: i64) -> anyhow::Result<Uuid> {
    loop {
        if let Some(generation) = reset::outcome(&session::acquire(state).await?, reset_no).await? {
            return Ok(generation);
        }
        tokio::time::sleep(LOOK).await;
    }
}

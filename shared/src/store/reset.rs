//! Reset: a new stream generation from a new baseline. The open request is carried out by the leader, in one state
//! transaction that replaces everything which belonged to the former generation, so that requests see either the one
//! or the other whole.
//!
//! Kept across a reset: clients, their generations and assignments, interned scopes, membership generations, published
//! manifests. Tokens bind the stream generation, which is what makes every cursor of the former one stale.

use std::time::SystemTime;

use deadpool_postgres::GenericClient;
use uuid::Uuid;

use super::error::{Result, StoreError};
use super::{projection, statement};
use crate::lsn::Lsn;
use crate::registry::Table;

/// Asks for a reset, unless one is asked for already; returns its number.
pub async fn request(db: &impl GenericClient) -> Result<i64> {
    let sql = "-- reset::request
        with asked as (
            insert into tributary.reset default values
            on conflict ((completed_at is null)) where completed_at is null do nothing
            returning reset_no
        )
        select reset_no from asked
        union all
        select reset_no from tributary.reset where completed_at is null
        limit 1";
    Ok(statement::query_one(db, sql, &[]).await?.try_get(0)?)
}

/// The open request.
pub async fn requested(db: &impl GenericClient) -> Result<Option<i64>> {
    let sql = "-- reset::requested\nselect reset_no from tributary.reset where completed_at is null";
    Ok(statement::query_opt(db, sql, &[]).await?.map(|row| row.try_get(0)).transpose()?)
}

/// The stream generation that a reset led to; `None` while it is not carried out.
pub async fn outcome(db: &impl GenericClient, reset_no: i64) -> Result<Option<Uuid>> {
    let sql = "-- reset::outcome\nselect stream_generation from tributary.reset where reset_no = $1";
    let row = statement::query_opt(db, sql, &[&reset_no]).await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?.flatten())
}

/// Removes what the former generation captured, in the transaction that writes the new one: rows, entries, departed
/// keys. DELETE and not TRUNCATE, which is not MVCC-safe: until the commit requests are served from these rows.
pub async fn clear(db: &impl GenericClient, tables: &[Table]) -> Result<()> {
    let sql = "-- reset::clear_entries\ndelete from tributary.scope_entry";
    statement::execute(db, sql, &[]).await?;
    statement::execute(db, "-- reset::clear_departed\ndelete from tributary.departed_row", &[]).await?;
    for table in tables {
        statement::execute(db, &format!("-- reset::clear_rows\ndelete from {}", projection::name(table)), &[]).await?;
    }
    Ok(())
}

/// What the activation of a reset's baseline leaves.
#[derive(Debug, Clone, Copy)]
pub struct Activation {
    /// The request.
    pub reset_no: i64,
    /// The leadership that carries it out; it ends with the activation.
    pub epoch: i64,
    /// The new generation.
    pub stream_generation: Uuid,
    /// Exclusive: what committed before is in the baseline.
    pub consistent_point: Lsn,
    /// When the baseline's snapshot was taken.
    pub snapshot_time: SystemTime,
    /// The configuration in force.
    pub configuration_no: i64,
    /// The next interned row number.
    pub next_row_id: i64,
}

/// Activates the new generation, as the last statements of the transaction that wrote it.
///
/// Positions of two generations are not comparable, so every stored one goes: floors, compacted positions, checkpoints,
/// what was acknowledged to the slot. The leader's epoch rises, so that nothing of the leadership that knew the former
/// slot can be recorded for the new one.
///
/// # Errors
/// [`StoreError::Fenced`] when another leads.
pub async fn activate(db: &impl GenericClient, to: Activation) -> Result<()> {
    super::leader::hold(db, to.epoch).await?;
    // Writers of checkpoints wait from here to the commit. One whose snapshot is of the former generation then meets a
    // changed row and runs again in the new one. In the order in which requests write the two.
    db.batch_execute(
        "-- reset::lock_checkpoints\nlock table tributary.scope, tributary.client_scope in share row exclusive mode",
    )
    .await?;
    let sql = "-- reset::forget_checkpoints
        update tributary.client_scope set acknowledged_lsn = null, acknowledged_ordinal = null";
    statement::execute(db, sql, &[]).await?;
    let sql = "-- reset::forget_floors
        update tributary.scope
        set retention_generation = retention_generation + 1, floor_lsn = 0, floor_ordinal = 0, compacted_lsn = 0,
            compacted_ordinal = 0";
    statement::execute(db, sql, &[]).await?;
    let sql = "-- reset::resolve_quarantine
        update tributary.quarantine set resolved_at = clock_timestamp() where resolved_at is null";
    statement::execute(db, sql, &[]).await?;
    let sql = "-- reset::activate
        update tributary.progress
        set stream_generation = $1, boundary_lsn = 0, resume_lsn = $2, commit_time = $3,
            materialized_at = clock_timestamp(), leader_epoch = $4, configuration_no = $5, next_row_id = $6";
    let moved = statement::execute(
        db,
        sql,
        &[
            &to.stream_generation,
            &to.consistent_point.to_sql(),
            &to.snapshot_time,
            &to.epoch,
            &to.configuration_no,
            &to.next_row_id,
        ],
    )
    .await?;
    let sql = "-- reset::complete
        update tributary.reset
        set completed_at = clock_timestamp(), stream_generation = $2
        where reset_no = $1 and completed_at is null";
    let completed = statement::execute(db, sql, &[&to.reset_no, &to.stream_generation]).await?;
    let sql = "-- reset::end_leadership
        update tributary.leader
        set epoch = epoch + 1, renewed_at = 'epoch', acknowledged_lsn = 0
        where epoch = $1";
    let ended = statement::execute(db, sql, &[&to.epoch]).await?;
    if (moved, completed, ended) == (1, 1, 1) {
        Ok(())
    } else {
        Err(StoreError::integrity("a reset meets no progress, no request or no leader"))
    }
}

/// Forgets which accepted writes are materialized, before those are recorded that the new baseline sees: a source that
/// was restored has fewer.
pub async fn forget_epochs(db: &impl GenericClient) -> Result<()> {
    statement::execute(db, "-- reset::forget_epochs\ndelete from tributary.materialized_epoch", &[]).await?;
    Ok(())
}

/// Removes up to `batch` rebuild sessions of former generations, after the activation; returns how many. They can only
/// be answered 409; their snapshots go with the housekeeping. What a crash leaves here expires within a day.
pub async fn forget_sessions(db: &impl GenericClient, batch: i64) -> Result<u64> {
    let sql = "-- reset::forget_sessions
        delete from tributary.rebuild_session
        where session_id in (
            select r.session_id
            from tributary.rebuild_session r
            join tributary.progress p on p.stream_generation <> r.stream_generation
            limit $1
        )";
    statement::execute(db, sql, &[&batch]).await
}

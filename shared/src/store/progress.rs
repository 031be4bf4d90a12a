//! The durable boundary: one row that every state transaction of the leader updates, and every request reads first.

use std::time::SystemTime;

use deadpool_postgres::GenericClient;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::error::{Result, StoreError};
use super::statement;
use crate::lsn::Lsn;
use crate::position::Position;

/// The visible progress of materialization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The lineage that positions belong to.
    pub stream_generation: Uuid,
    /// Inclusive: commit LSN of the last materialized transaction; zero at the generation start.
    pub boundary_lsn: Lsn,
    /// Exclusive: every source transaction that ends at or before it is materialized.
    pub resume_lsn: Lsn,
    /// Source commit time of the boundary's transaction.
    pub commit_time: SystemTime,
    /// When the boundary was last moved, by the state database's clock.
    pub materialized_at: SystemTime,
    /// The configuration in force.
    pub configuration_no: i64,
    /// The next interned row number.
    pub next_row_id: i64,
}

impl Progress {
    /// Boundary B of ADR 003: a generation start or a transaction end.
    pub fn boundary(&self) -> Position {
        Position::boundary(self.boundary_lsn)
    }
}

/// Reads the progress row; `None` until a baseline is active.
pub async fn load(db: &impl GenericClient) -> Result<Option<Progress>> {
    let sql = "-- progress::load
        select stream_generation, boundary_lsn, resume_lsn, commit_time, materialized_at, configuration_no, next_row_id
        from tributary.progress";
    let Some(row) = statement::query_opt(db, sql, &[]).await? else { return Ok(None) };
    from_row(&row).map(Some)
}

/// Progress from the columns of [`load`], wherever they are selected.
pub(super) fn from_row(row: &tokio_postgres::Row) -> Result<Progress> {
    let lsn = |index: usize| {
        Lsn::from_sql(row.try_get(index)?).map_err(|_| StoreError::integrity("progress holds an impossible LSN"))
    };
    Ok(Progress {
        stream_generation: row.try_get(0)?,
        boundary_lsn: lsn(1)?,
        resume_lsn: lsn(2)?,
        commit_time: row.try_get(3)?,
        materialized_at: row.try_get(4)?,
        configuration_no: row.try_get(5)?,
        next_row_id: row.try_get(6)?,
    })
}

/// Where a state transaction leaves the boundary.
#[derive(Debug, Clone, Copy)]
pub struct Advance {
    /// Inclusive commit LSN of the last source transaction of this state transaction.
    pub boundary_lsn: Lsn,
    /// Its end LSN, exclusive.
    pub resume_lsn: Lsn,
    /// Its commit time.
    pub commit_time: SystemTime,
    /// The next interned row number after this state transaction.
    pub next_row_id: i64,
}

/// Moves the boundary as the last statement of a state transaction, holding the leader's epoch until commit.
///
/// # Errors
/// [`StoreError::Fenced`] when another leads, [`StoreError::Integrity`] when the boundary would not move forward;
/// both mean: abort the transaction.
pub async fn advance(db: &impl GenericClient, epoch: i64, to: Advance) -> Result<()> {
    let sql = "-- progress::advance
        update tributary.progress
        set boundary_lsn = $1, resume_lsn = $2, commit_time = $3, next_row_id = $4, leader_epoch = $5,
            materialized_at = clock_timestamp()
        where boundary_lsn < $1 and resume_lsn < $2 and next_row_id <= $4 and leader_epoch <= $5";
    let (boundary, resume) = (to.boundary_lsn.to_sql(), to.resume_lsn.to_sql());
    let parameters: [&(dyn ToSql + Sync); 5] = [&boundary, &resume, &to.commit_time, &to.next_row_id, &epoch];
    let held = super::leader::hold(db, epoch);
    let ((), moved) = tokio::try_join!(biased; held, statement::execute(db, sql, &parameters))?;
    if moved == 1 { Ok(()) } else { Err(StoreError::integrity("progress does not move forward")) }
}

/// Starts a stream generation: the activation of a baseline, in the transaction of the caller.
pub async fn activate(
    db: &impl GenericClient,
    epoch: i64,
    stream_generation: Uuid,
    consistent_point: Lsn,
    snapshot_time: SystemTime,
    configuration_no: i64,
    next_row_id: i64,
) -> Result<()> {
    super::leader::hold(db, epoch).await?;
    statement::execute(
        db,
        "-- progress::activate
        insert into tributary.progress (stream_generation, boundary_lsn, resume_lsn, commit_time, materialized_at,
            leader_epoch, configuration_no, next_row_id)
        values ($1, 0, $2, $3, clock_timestamp(), $4, $5, $6)",
        &[&stream_generation, &consistent_point.to_sql(), &snapshot_time, &epoch, &configuration_no, &next_row_id],
    )
    .await?;
    Ok(())
}

//! What an operator is told about the state: read by `materializer status`, which writes nothing.

use std::time::{Duration, SystemTime};

use deadpool_postgres::GenericClient;
use uuid::Uuid;

use super::error::Result;
use super::statement;
use crate::lsn::Lsn;

/// The leader, as the state knows it.
#[derive(Debug, Clone)]
pub struct Leader {
    /// Its epoch.
    pub epoch: i64,
    /// Since its last sign of life; very long when the lease was given up.
    pub silence: Duration,
    /// Exclusive: the highest LSN that was recorded before it was acknowledged to the slot.
    pub acknowledged: Lsn,
    /// Materializers that have sessions with the state database, the leader among them.
    pub materializers: i64,
}

/// Reads the leader; `None` before there ever was one.
pub async fn leader(db: &impl GenericClient) -> Result<Option<Leader>> {
    let sql = "-- status::leader
        select epoch, greatest(extract(epoch from clock_timestamp() - renewed_at), 0)::double precision,
            acknowledged_lsn,
            (select count(distinct application_name) from pg_stat_activity
            where application_name like 'tributary-materializer %' and datname = current_database())
        from tributary.leader";
    let Some(row) = statement::query_opt(db, sql, &[]).await? else { return Ok(None) };
    Ok(Some(Leader {
        epoch: row.try_get(0)?,
        silence: Duration::from_secs_f64(row.try_get(1)?),
        acknowledged: Lsn::from_sql(row.try_get(2)?).unwrap_or_default(),
        materializers: row.try_get(3)?,
    }))
}

/// A transaction at which the stream is stopped.
#[derive(Debug, Clone)]
pub struct OpenCase {
    /// Its number.
    pub quarantine_no: i64,
    /// Inclusive commit LSN.
    pub commit_lsn: Lsn,
    /// `poison` or `drift`.
    pub reason: String,
    /// The relation.
    pub relation: Option<String>,
    /// What is wrong, without values.
    pub detail: String,
    /// Since when.
    pub created_at: SystemTime,
}

/// The open cases, the newest first; a handful.
pub async fn quarantine(db: &impl GenericClient) -> Result<Vec<OpenCase>> {
    let sql = "-- status::quarantine
        select quarantine_no, commit_lsn, reason, relation, detail, created_at
        from tributary.quarantine
        where resolved_at is null
        order by quarantine_no desc
        limit 20";
    let rows = statement::query(db, sql, &[]).await?;
    rows.iter()
        .map(|row| {
            Ok(OpenCase {
                quarantine_no: row.try_get(0)?,
                commit_lsn: Lsn::from_sql(row.try_get(1)?).unwrap_or_default(),
                reason: row.try_get(2)?,
                relation: row.try_get(3)?,
                detail: row.try_get(4)?,
                created_at: row.try_get(5)?,
            })
        })
        .collect()
}

/// The newest reset.
#[derive(Debug, Clone)]
pub struct Reset {
    /// Its number.
    pub reset_no: i64,
    /// When it was asked for.
    pub requested_at: SystemTime,
    /// When its generation was activated.
    pub completed_at: Option<SystemTime>,
    /// The generation that it led to.
    pub stream_generation: Option<Uuid>,
}

/// Reads the newest reset.
pub async fn reset(db: &impl GenericClient) -> Result<Option<Reset>> {
    let sql = "-- status::reset
        select reset_no, requested_at, completed_at, stream_generation
        from tributary.reset
        order by reset_no desc
        limit 1";
    let Some(row) = statement::query_opt(db, sql, &[]).await? else { return Ok(None) };
    Ok(Some(Reset {
        reset_no: row.try_get(0)?,
        requested_at: row.try_get(1)?,
        completed_at: row.try_get(2)?,
        stream_generation: row.try_get(3)?,
    }))
}

/// Clients of the state: all that are not retired, and those of them whose generation is expired.
pub async fn clients(db: &impl GenericClient) -> Result<(i64, i64)> {
    let sql = "-- status::clients
        select count(*), count(*) filter (where generation_expired) from tributary.client where not retired";
    let row = statement::query_one(db, sql, &[]).await?;
    Ok((row.try_get(0)?, row.try_get(1)?))
}

//! The lease of the one leading materializer, and the fence that keeps a former leader from writing.
//!
//! A lease with an epoch rather than a session lock: a paused leader keeps its connections, so a lock held by a
//! session would keep standbys out for as long as the pause lasts. All times are the state database's.

use std::time::Duration;

use deadpool_postgres::GenericClient;
use uuid::Uuid;

use super::error::{Result, StoreError};
use super::statement;
use crate::lsn::Lsn;

/// Name that a materializer's sessions carry, so that the next leader can end those of a former one.
pub fn application_name(holder: Uuid) -> String {
    format!("tributary-materializer {holder}")
}

/// Tries to take the lease for `holder`; the new epoch, or `None` while another's lease is fresh.
///
/// Ends the former leadership's other sessions first, so that none holds a lock that the takeover waits for.
pub async fn acquire(db: &impl GenericClient, holder: Uuid, lease: Duration) -> Result<Option<i64>> {
    let lease_millis = lease.as_millis() as f64;
    let row = statement::query_opt(
        db,
        "-- leader::current
        select holder, renewed_at < clock_timestamp() - $1 * interval '1 millisecond' from tributary.leader",
        &[&lease_millis],
    )
    .await?;
    if let Some(row) = row {
        let (former, expired): (Uuid, bool) = (row.try_get(0)?, row.try_get(1)?);
        if former != holder && !expired {
            return Ok(None);
        }
        // Also our own of an earlier leadership: one that a network has forgotten can hold the epoch for ever.
        statement::execute(
            db,
            "-- leader::end_former_sessions
            select pg_terminate_backend(pid)
            from pg_stat_activity
            where application_name = $1 and pid <> pg_backend_pid()",
            &[&application_name(former)],
        )
        .await?;
    }
    // One row by `leader_is_one_row`: of two standbys that get here together, one changes it and the other finds a
    // fresh lease.
    let row = statement::query_opt(
        db,
        "-- leader::acquire
        insert into tributary.leader as l (epoch, holder, renewed_at, acknowledged_lsn)
        values (1, $1, clock_timestamp(), 0)
        on conflict on constraint leader_is_one_row do update
        set epoch = l.epoch + 1, holder = $1, renewed_at = clock_timestamp()
        where l.holder = $1 or l.renewed_at < clock_timestamp() - $2 * interval '1 millisecond'
        returning epoch",
        &[&holder, &lease_millis],
    )
    .await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// Heartbeat: keeps the lease and records the LSN that is about to be acknowledged to the source.
///
/// # Errors
/// [`StoreError::Fenced`] when another leads.
pub async fn renew(db: &impl GenericClient, epoch: i64, acknowledged: Lsn) -> Result<()> {
    let renewed = statement::execute(
        db,
        "-- leader::renew
            update tributary.leader
            set renewed_at = clock_timestamp(), acknowledged_lsn = greatest(acknowledged_lsn, $2)
            where epoch = $1",
        &[&epoch, &acknowledged.to_sql()],
    )
    .await?;
    if renewed == 1 { Ok(()) } else { Err(StoreError::Fenced) }
}

/// Gives the lease up, so that a standby need not wait for it to run out.
pub async fn release(db: &impl GenericClient, epoch: i64) -> Result<()> {
    statement::execute(
        db,
        "-- leader::release\nupdate tributary.leader set renewed_at = 'epoch' where epoch = $1",
        &[&epoch],
    )
    .await?;
    Ok(())
}

/// The highest LSN that was ever recorded as acknowledged, exclusive.
pub async fn acknowledged(db: &impl GenericClient) -> Result<Lsn> {
    let row =
        statement::query_opt(db, "-- leader::acknowledged\nselect acknowledged_lsn from tributary.leader", &[]).await?;
    let stored = row.map(|row| row.try_get::<_, i64>(0)).transpose()?.unwrap_or(0);
    Lsn::from_sql(stored).map_err(|_| StoreError::integrity("the leader row holds an impossible LSN"))
}

/// Forgets what was acknowledged, when a new slot starts a new lineage.
pub async fn forget_acknowledged(db: &impl GenericClient, epoch: i64) -> Result<()> {
    let sql = "-- leader::forget_acknowledged\nupdate tributary.leader set acknowledged_lsn = 0 where epoch = $1";
    if statement::execute(db, sql, &[&epoch]).await? == 1 { Ok(()) } else { Err(StoreError::Fenced) }
}

/// Holds the leader's epoch until the transaction ends: a takeover waits for it, and after a takeover it fails.
///
/// # Errors
/// [`StoreError::Fenced`] when another leads.
pub async fn hold(db: &impl GenericClient, epoch: i64) -> Result<()> {
    let sql = "-- leader::hold\nselect epoch from tributary.leader where epoch = $1 for key share";
    statement::query_opt(db, sql, &[&epoch]).await?.map(|_| ()).ok_or(StoreError::Fenced)
}

/// The session's backend.
pub async fn backend(db: &impl GenericClient) -> Result<i32> {
    Ok(statement::query_one(db, "-- leader::backend\nselect pg_backend_pid()", &[]).await?.try_get(0)?)
}

/// Whether a backend that somebody waits for works on nothing: it is gone, or has waited for its client all this time.
pub async fn is_forsaken(db: &impl GenericClient, backend: i32, silence: Duration) -> Result<bool> {
    let sql = "-- leader::is_forsaken
        select coalesce(bool_or(case
            when state = 'active' and wait_event is distinct from 'ClientRead' then false
            when state = 'active' then query_start < clock_timestamp() - $2 * interval '1 second'
            else state_change < clock_timestamp() - $2 * interval '1 second'
        end), true)
        from pg_stat_activity
        where pid = $1";
    Ok(statement::query_one(db, sql, &[&backend, &silence.as_secs_f64()]).await?.try_get(0)?)
}

/// How long ago the leader gave its last sign of life, by the state database's clock; `None` before the first.
pub async fn silence(db: &impl GenericClient) -> Result<Option<Duration>> {
    let sql = "-- leader::silence
        select greatest(extract(epoch from clock_timestamp() - renewed_at), 0)::double precision from tributary.leader";
    let row = statement::query_opt(db, sql, &[]).await?;
    Ok(row.map(|row| row.try_get::<_, f64>(0)).transpose()?.map(Duration::from_secs_f64))
}

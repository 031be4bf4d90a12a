//! Retention: expiry of clients that acknowledge nothing, compaction of delete markers, resume floors.
//!
//! All of it in small batches that the leader runs beside the stream. Time is the caller's.

use std::time::{Duration, SystemTime};

use deadpool_postgres::GenericClient;

use super::error::{Result, StoreError};
use super::statement;
use crate::position::Position;

/// Expires the generation of up to `batch` clients that have acknowledged nothing for `stale`; returns how many.
pub async fn expire_clients(db: &impl GenericClient, now: SystemTime, stale: Duration, batch: i64) -> Result<u64> {
    let sql = "-- retention::expire_clients
        update tributary.client
        set generation_expired = true
        where client_no in (
            select client_no from tributary.client
            where not generation_expired and not retired and acknowledged_at < $1
            limit $2
            for update skip locked
        )";
    let before = now.checked_sub(stale).unwrap_or(SystemTime::UNIX_EPOCH);
    statement::execute(db, sql, &[&before, &batch]).await
}

/// The next scope after `scope_no` that has a delete marker; `None` past the last.
pub async fn next_marked_scope(db: &impl GenericClient, scope_no: i32) -> Result<Option<i32>> {
    let sql = "-- retention::next_marked_scope
        select scope_no from tributary.scope_entry where not present and scope_no > $1 order by scope_no limit 1";
    let row = statement::query_opt(db, sql, &[&scope_no]).await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// What one step of the compaction did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// Delete markers removed.
    pub markers: u64,
    /// The scope's floor after it, inclusive.
    pub floor: Position,
}

/// Removes up to `batch` delete markers of a scope and raises its floor to the last of them, in the transaction of the
/// caller; when none remain below it, the floor rises to the limit itself. Markers that a state transaction is moving
/// are left to it: one that stays behind the floor is needed by nobody, and goes another time.
///
/// The limit is the least position that an unexpired client which is assigned the scope has acknowledged, and the
/// boundaries of the scope's live rebuild sessions in this stream generation; with neither, the scope's newest position.
pub async fn compact(db: &impl GenericClient, scope_no: i32, now: SystemTime, batch: i64) -> Result<Compacted> {
    // The scope's row first: two compactions of one scope take turns.
    let sql = "-- retention::lock_scope
        select floor_lsn, floor_ordinal, compacted_lsn, compacted_ordinal
        from tributary.scope where scope_no = $1 for no key update";
    let row = statement::query_one(db, sql, &[&scope_no]).await?;
    let (floor, compacted) = (position(&row, 0)?, position(&row, 2)?);
    let sql = "-- retention::limit
        select lsn, ordinal
        from (
            select cs.acknowledged_lsn as lsn, cs.acknowledged_ordinal as ordinal, 0 as fallback
            from tributary.client_scope cs
            join tributary.client c on c.client_no = cs.client_no
            where cs.scope_no = $1 and cs.assigned and cs.acknowledged_lsn is not null
                and not c.generation_expired and not c.retired
            union all
            select r.boundary_lsn, case r.boundary_lsn when 0 then 0 else 9223372036854775807 end, 0
            from tributary.rebuild_session r
            join tributary.progress p on p.stream_generation = r.stream_generation
            where r.scope_no = $1 and r.expires_at > $2
            union all
            (
                select e.commit_lsn, e.ordinal, 1
                from tributary.scope_entry e
                where e.scope_no = $1
                order by e.commit_lsn desc, e.ordinal desc
                limit 1
            )
        ) candidates
        order by fallback, lsn, ordinal
        limit 1";
    let Some(row) = statement::query_opt(db, sql, &[&scope_no, &now]).await? else {
        return Ok(Compacted { markers: 0, floor });
    };
    let limit = position(&row, 0)?;
    if limit <= floor {
        return Ok(Compacted { markers: 0, floor });
    }
    let sql = "-- retention::remove_markers
        with doomed as (
            select row_id, commit_lsn, ordinal
            from tributary.scope_entry
            where scope_no = $1 and not present and (commit_lsn, ordinal) <= ($2, $3)
            order by commit_lsn, ordinal
            limit $4
            for update skip locked
        ), removed as (
            delete from tributary.scope_entry e
            using doomed d
            where e.scope_no = $1 and e.row_id = d.row_id and not e.present
            returning d.commit_lsn, d.ordinal
        )
        select commit_lsn, ordinal, count(*) over () from removed order by commit_lsn desc, ordinal desc limit 1";
    let (lsn, ordinal) = limit.to_sql();
    let (markers, last, raised) = match statement::query_opt(db, sql, &[&scope_no, &lsn, &ordinal, &batch]).await? {
        None => (0, None, limit),
        Some(row) => {
            let markers: i64 = row.try_get(2)?;
            // A full batch may have left markers behind it: the floor stops at the last that is gone.
            let last = position(&row, 0)?;
            (markers as u64, Some(last), if markers == batch { last } else { limit })
        }
    };
    let raised = raised.max(floor);
    let compacted = last.unwrap_or(Position::GENERATION_START).max(compacted);
    let sql = "-- retention::raise_floor
        update tributary.scope
        set floor_lsn = $2, floor_ordinal = $3, compacted_lsn = $4, compacted_ordinal = $5
        where scope_no = $1";
    let ((lsn, ordinal), (last_lsn, last_ordinal)) = (raised.to_sql(), compacted.to_sql());
    statement::execute(db, sql, &[&scope_no, &lsn, &ordinal, &last_lsn, &last_ordinal]).await?;
    Ok(Compacted { markers, floor: raised })
}

/// Forgets departed rows that no delete marker names any more, among the `batch` after `row_id`; returns the last one
/// looked at, `None` past the end. Rows that a state transaction is relying on are locked, and left for the next time.
pub async fn forget_unmarked(db: &impl GenericClient, row_id: i64, batch: i64) -> Result<Option<i64>> {
    let sql = "-- retention::forget_unmarked
        with looked as (
            select row_id from tributary.departed_row where row_id > $1 order by row_id limit $2
        ), free as (
            select d.row_id
            from tributary.departed_row d
            where d.row_id in (select row_id from looked)
                and not exists (select from tributary.scope_entry e where e.row_id = d.row_id)
            for update skip locked
        ), forgotten as (
            delete from tributary.departed_row where row_id in (select row_id from free)
        )
        select max(row_id) from looked";
    Ok(statement::query_one(db, sql, &[&row_id, &batch]).await?.try_get(0)?)
}

fn position(row: &tokio_postgres::Row, first: usize) -> Result<Position> {
    Position::from_sql(row.try_get(first)?, row.try_get(first + 1)?)
        .map_err(|_| StoreError::integrity("a scope holds an impossible position"))
}

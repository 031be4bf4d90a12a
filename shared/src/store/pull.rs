//! What a pull reads: candidates after each cursor, and the captured rows of those that were selected.
//!
//! `scope_entry` keeps only the latest effect of each row in each scope, and the boundary is always the newest visible
//! one, so an entry after a cursor is exactly the retained candidate of its key (ADR 003, "Scope-inclusive typed
//! deduplication"); earlier effects can never be delivered again.

use deadpool_postgres::GenericClient;
use tokio_postgres::types::ToSql;

use super::error::{Result, StoreError};
use super::{projection, statement};
use crate::position::Position;
use crate::registry::Table;

/// A retained candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Index of its scope in what was asked for.
    pub scope: usize,
    /// Row.
    pub row_id: i64,
    /// Relation of the row.
    pub table_no: i16,
    /// Position of the effect.
    pub position: Position,
    /// Upsert (true) or delete.
    pub present: bool,
}

/// The least `limit` candidates, over all scopes, after each scope's position: `scopes` is `(scope_no, after)` in raw
/// UTF-8 order of the scope ids. One position occurs once in a scope, so (position, scope) is already the merge's
/// order; when fewer than `limit` come back, they are all there are.
///
/// Reads one index range a scope, each of at most `limit` entries.
pub async fn candidates(db: &impl GenericClient, scopes: &[(i32, Position)], limit: i64) -> Result<Vec<Candidate>> {
    if scopes.is_empty() {
        return Ok(Vec::new());
    }
    let numbers: Vec<i32> = scopes.iter().map(|s| s.0).collect();
    let lsns: Vec<i64> = scopes.iter().map(|s| s.1.to_sql().0).collect();
    let ordinals: Vec<i64> = scopes.iter().map(|s| s.1.to_sql().1).collect();
    let rows = statement::query(db, CANDIDATES, &[&numbers, &lsns, &ordinals, &limit]).await?;
    rows.iter()
        .map(|row| {
            Ok(Candidate {
                scope: (row.try_get::<_, i64>(0)? - 1) as usize,
                row_id: row.try_get(1)?,
                table_no: row.try_get(2)?,
                position: Position::from_sql(row.try_get(3)?, row.try_get(4)?)
                    .map_err(|_| StoreError::integrity("a scope entry holds an impossible position"))?,
                present: row.try_get(5)?,
            })
        })
        .collect()
}

/// The statement of [`candidates`]; its plan is kept in a test.
pub const CANDIDATES: &str = "-- pull::candidates
    select s.index, e.row_id, e.table_no, e.commit_lsn, e.ordinal, e.present
    from unnest($1::integer[], $2::bigint[], $3::bigint[]) with ordinality as s (scope_no, lsn, ordinal, index)
    cross join lateral (
        select row_id, table_no, commit_lsn, ordinal, present
        from tributary.scope_entry
        where scope_no = s.scope_no and (commit_lsn, ordinal) > (s.lsn, s.ordinal)
        order by commit_lsn, ordinal
        limit $4
    ) e
    order by e.commit_lsn, e.ordinal, s.index
    limit $4";

/// A captured row.
#[derive(Debug)]
pub struct Captured {
    /// Interned number.
    pub row_id: i64,
    /// Canonical octets of its key.
    pub key: Vec<u8>,
    /// The position that its `server_version` names.
    pub version: Position,
    /// Wire JSON.
    pub wire: String,
    /// Row digest.
    pub digest: [u8; 32],
}

/// Captured rows of one relation; rows that are gone are missing from the answer.
pub async fn captured(db: &impl GenericClient, table: &Table, row_ids: &[i64]) -> Result<Vec<Captured>> {
    let sql = format!(
        "-- pull::captured
        select tributary_row_id, tributary_key, tributary_version_lsn, tributary_version_ordinal, tributary_wire,
            tributary_digest
        from {}
        where tributary_row_id = any($1)",
        projection::name(table)
    );
    let parameters: &[&(dyn ToSql + Sync)] = &[&row_ids];
    statement::query(db, &sql, parameters).await?.iter().map(captured_from_row).collect()
}

/// Captured from the columns `row_id, key, version_lsn, version_ordinal, wire, digest`.
pub(super) fn captured_from_row(row: &tokio_postgres::Row) -> Result<Captured> {
    let digest: Option<Vec<u8>> = row.try_get(5)?;
    let wire: Option<String> = row.try_get(4)?;
    Ok(Captured {
        row_id: row.try_get(0)?,
        key: row.try_get(1)?,
        version: Position::from_sql(row.try_get(2)?, row.try_get(3)?)
            .map_err(|_| StoreError::integrity("a projection holds an impossible version"))?,
        wire: wire.ok_or_else(|| StoreError::integrity("a synced row has no captured projection"))?,
        digest: digest
            .and_then(|d| d.try_into().ok())
            .ok_or_else(|| StoreError::integrity("a captured row has no digest"))?,
    })
}

/// Keys of rows that are deleted or left their scopes, `(row_id, key)`: from the departed rows and, for those that are
/// still live, from the projection.
pub async fn keys(db: &impl GenericClient, table: &Table, row_ids: &[i64]) -> Result<Vec<(i64, Vec<u8>)>> {
    let sql = format!(
        "-- pull::keys
        select row_id, key from tributary.departed_row where row_id = any($1) and table_no = $2
        union all
        select tributary_row_id, tributary_key from {} where tributary_row_id = any($1)",
        projection::name(table)
    );
    let rows = statement::query(db, &sql, &[&row_ids, &table.table_no]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

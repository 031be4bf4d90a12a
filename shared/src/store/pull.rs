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
use crate::seal::{self, RowSeal};

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
            let scope = (row.try_get::<_, i64>(0)? - 1) as usize;
            let entry = entry_from_row(row, 1, scopes[scope].0)?;
            Ok(Candidate { scope, ..entry })
        })
        .collect()
}

/// An entry from the columns `row_id, table_no, commit_lsn, ordinal, present, seal`, the first of them at `at`.
///
/// # Errors
/// [`StoreError::Integrity`] when it is not as it was written.
pub(super) fn entry_from_row(row: &tokio_postgres::Row, at: usize, scope_no: i32) -> Result<Candidate> {
    let entry = Candidate {
        scope: 0,
        row_id: row.try_get(at)?,
        table_no: row.try_get(at + 1)?,
        position: Position::from_sql(row.try_get(at + 2)?, row.try_get(at + 3)?)
            .map_err(|_| StoreError::integrity("a scope entry holds an impossible position"))?,
        present: row.try_get(at + 4)?,
    };
    let sealed = seal::entry(entry.row_id, entry.position, scope_no, entry.table_no, entry.present);
    if row.try_get::<_, &[u8]>(at + 5)? == sealed {
        Ok(entry)
    } else {
        Err(StoreError::integrity("a scope entry differs from its seal"))
    }
}

/// The statement of [`candidates`]; its plan is kept in a test.
pub const CANDIDATES: &str = "-- pull::candidates
    select s.index, e.row_id, e.table_no, e.commit_lsn, e.ordinal, e.present, e.seal
    from unnest($1::integer[], $2::bigint[], $3::bigint[]) with ordinality as s (scope_no, lsn, ordinal, index)
    cross join lateral (
        select row_id, table_no, commit_lsn, ordinal, present, seal
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
///
/// # Errors
/// [`StoreError::Integrity`] when a row is not as it was captured.
pub async fn captured(db: &impl GenericClient, table: &Table, row_ids: &[i64]) -> Result<Vec<Captured>> {
    let sql = format!(
        "-- pull::captured
        select {CAPTURED}
        from {} p
        where p.tributary_row_id = any($1)",
        projection::name(table)
    );
    let parameters: &[&(dyn ToSql + Sync)] = &[&row_ids];
    let rows = statement::query(db, &sql, parameters).await?;
    rows.iter().map(|row| captured_from_row(row, 0, table.table_no)).collect()
}

/// The columns of [`captured_from_row`], of a projection `p`.
pub(super) const CAPTURED: &str = "p.tributary_row_id, p.tributary_key, p.tributary_version_lsn,
            p.tributary_version_ordinal, p.tributary_digest, p.tributary_seal, p.tributary_wire";

/// A captured row from the columns [`CAPTURED`], the first of them at `at`.
pub(super) fn captured_from_row(row: &tokio_postgres::Row, at: usize, table_no: i16) -> Result<Captured> {
    let Identified { row_id, key, version, digest, seal } = identified_from_row(row, at, table_no)?;
    let wire: Option<String> = row.try_get(at + 6)?;
    let wire = wire.ok_or_else(|| StoreError::integrity("a synced row has no captured projection"))?;
    if !seal.fits_wire(&digest, &wire) {
        return Err(StoreError::integrity("a captured row differs from its seal"));
    }
    Ok(Captured { row_id, key, version, wire, digest })
}

/// What identifies a captured row, without its content.
#[derive(Debug)]
pub struct Identified {
    /// Interned number.
    pub row_id: i64,
    /// Canonical octets of its key.
    pub key: Vec<u8>,
    /// The position that its `server_version` names.
    pub version: Position,
    /// Row digest.
    pub digest: [u8; 32],
    seal: RowSeal,
}

/// The columns of [`identified_from_row`], of a projection `p`.
pub(super) const IDENTIFIED: &str = "p.tributary_row_id, p.tributary_key, p.tributary_version_lsn,
            p.tributary_version_ordinal, p.tributary_digest, p.tributary_seal";

/// What identifies a captured row, from the columns [`IDENTIFIED`], the first of them at `at`.
///
/// # Errors
/// [`StoreError::Integrity`] when it is not as it was captured.
pub(super) fn identified_from_row(row: &tokio_postgres::Row, at: usize, table_no: i16) -> Result<Identified> {
    let digest: Option<&[u8]> = row.try_get(at + 4)?;
    let seal: Option<&[u8]> = row.try_get(at + 5)?;
    let row = Identified {
        row_id: row.try_get(at)?,
        key: row.try_get(at + 1)?,
        version: Position::from_sql(row.try_get(at + 2)?, row.try_get(at + 3)?)
            .map_err(|_| StoreError::integrity("a projection holds an impossible version"))?,
        digest: digest
            .and_then(|d| d.try_into().ok())
            .ok_or_else(|| StoreError::integrity("a captured row has no digest"))?,
        seal: seal
            .and_then(|s| s.try_into().ok())
            .map(RowSeal)
            .ok_or_else(|| StoreError::integrity("a captured row has no seal"))?,
    };
    if row.seal.fits_identity(row.row_id, table_no, &row.key, row.version, &row.digest) {
        Ok(row)
    } else {
        Err(StoreError::integrity("a captured row differs from its seal"))
    }
}

/// Keys of rows that are deleted or left their scopes, `(row_id, key)`: from the departed rows and, for those that are
/// still live, from the projection.
///
/// # Errors
/// [`StoreError::Integrity`] when a key is not as it was written.
pub async fn keys(db: &impl GenericClient, table: &Table, row_ids: &[i64]) -> Result<Vec<(i64, Vec<u8>)>> {
    let sql = "-- pull::departed_keys
        select row_id, key, seal from tributary.departed_row where row_id = any($1) and table_no = $2";
    let mut keys = Vec::with_capacity(row_ids.len());
    for row in statement::query(db, sql, &[&row_ids, &table.table_no]).await? {
        let (row_id, key): (i64, Vec<u8>) = (row.try_get(0)?, row.try_get(1)?);
        if row.try_get::<_, &[u8]>(2)? != seal::departed(row_id, table.table_no, &key) {
            return Err(StoreError::integrity("a departed row differs from its seal"));
        }
        keys.push((row_id, key));
    }
    if keys.len() < row_ids.len() {
        keys.extend(identified(db, table, row_ids).await?.into_iter().map(|row| (row.row_id, row.key)));
    }
    Ok(keys)
}

/// What identifies captured rows of one relation; rows that are gone are missing from the answer.
///
/// # Errors
/// [`StoreError::Integrity`] when a row is not as it was captured.
pub async fn identified(db: &impl GenericClient, table: &Table, row_ids: &[i64]) -> Result<Vec<Identified>> {
    let sql = format!(
        "-- pull::identified
        select {IDENTIFIED}
        from {} p
        where p.tributary_row_id = any($1)",
        projection::name(table)
    );
    let rows = statement::query(db, &sql, &[&row_ids]).await?;
    rows.iter().map(|row| identified_from_row(row, 0, table.table_no)).collect()
}

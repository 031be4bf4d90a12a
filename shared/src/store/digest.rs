//! Scope contents in row-identity order, and the cache of their digests.

use deadpool_postgres::GenericClient;
use futures_util::{Stream, TryStreamExt};
use tokio_postgres::types::ToSql;

use super::error::{Result, StoreError};
use super::pull::{IDENTIFIED, Identified, entry_from_row, identified_from_row};
use super::{projection, statement};
use crate::content::ContentKey;
use crate::registry::Table;
use crate::seal;

/// The columns of an entry `e`, as its reader takes them.
pub(super) const ENTRY: &str = "e.row_id, e.table_no, e.commit_lsn, e.ordinal, e.present, e.seal";
/// How many they are.
pub(super) const ENTRY_COLUMNS: usize = 6;

/// How many rows of each relation a scope holds, `(table_no, count)`.
pub async fn row_counts(db: &impl GenericClient, scope_no: i32) -> Result<Vec<(i16, i64)>> {
    let sql = "-- digest::row_counts
        select table_no, count(*) from tributary.scope_entry where scope_no = $1 and present group by table_no";
    let rows = statement::query(db, sql, &[&scope_no]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Lets statements of this transaction that read a whole scope be planned like any other, until [`plan_for_pages`].
pub async fn plan_for_scopes(db: &impl GenericClient) -> Result<()> {
    Ok(db.batch_execute("set local enable_seqscan = on; set local enable_bitmapscan = on").await?)
}

/// Statements read by an index again, as the session does.
pub async fn plan_for_pages(db: &impl GenericClient) -> Result<()> {
    Ok(db.batch_execute("set local enable_seqscan = off; set local enable_bitmapscan = off").await?)
}

/// What identifies a scope's rows of one relation, by unsigned key octets; streamed.
///
/// # Errors
/// [`StoreError::Integrity`] when an entry or a row is not as it was written.
pub async fn rows<C: GenericClient>(
    db: &C,
    scope_no: i32,
    table: &Table,
) -> Result<impl Stream<Item = Result<Identified>> + use<C>> {
    let sql = format!(
        "-- digest::rows
        select {ENTRY}, {IDENTIFIED}
        from tributary.scope_entry e
        join {} p on p.tributary_row_id = e.row_id
        where e.scope_no = $1 and e.table_no = $2 and e.present
        order by p.tributary_key",
        projection::name(table)
    );
    let table_no = table.table_no;
    let statement = db.prepare_cached(&sql).await?;
    let parameters: [&(dyn ToSql + Sync); 2] = [&scope_no, &table_no];
    let rows = db.query_raw(&statement, parameters).await?;
    Ok(rows.map_err(StoreError::from).and_then(move |row| async move {
        entry_from_row(&row, 0, scope_no)?;
        identified_from_row(&row, ENTRY_COLUMNS, table_no)
    }))
}

/// Reads every delete marker of a scope: one that was an entry would be missing from the content.
///
/// # Errors
/// [`StoreError::Integrity`] when a marker is not as it was written.
pub async fn check_markers(db: &impl GenericClient, scope_no: i32) -> Result<()> {
    let sql = format!(
        "-- digest::check_markers
        select {ENTRY} from tributary.scope_entry e where e.scope_no = $1 and not e.present"
    );
    let statement = db.prepare_cached(&sql).await?;
    let parameters: [&(dyn ToSql + Sync); 1] = [&scope_no];
    let rows = db.query_raw(&statement, parameters).await?;
    rows.map_err(StoreError::from)
        .try_for_each(|row| std::future::ready(entry_from_row(&row, 0, scope_no).map(|_| ())))
        .await
}

/// Keeps a scope's digest, unless one of a later content is kept already.
pub async fn keep(db: &impl GenericClient, key: &ContentKey, row_count: i64, digest: &[u8; 32]) -> Result<()> {
    let sql = "-- digest::keep
        insert into tributary.scope_digest as d (scope_no, stream_generation, schema_version, membership_generation,
            commit_lsn, ordinal, row_count, digest, seal)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
        on conflict on constraint scope_digest_scope_is_key do update
        set stream_generation = excluded.stream_generation, schema_version = excluded.schema_version,
            membership_generation = excluded.membership_generation, commit_lsn = excluded.commit_lsn,
            ordinal = excluded.ordinal, row_count = excluded.row_count, digest = excluded.digest, seal = excluded.seal
        where d.stream_generation <> excluded.stream_generation
            or d.schema_version <> excluded.schema_version
            or d.membership_generation <> excluded.membership_generation
            or (d.commit_lsn, d.ordinal) < (excluded.commit_lsn, excluded.ordinal)";
    let (lsn, ordinal) = key.content.to_sql();
    statement::execute(
        db,
        sql,
        &[
            &key.scope_no,
            &key.stream_generation,
            &key.schema_version,
            &key.membership_generation,
            &lsn,
            &ordinal,
            &row_count,
            &digest.as_slice(),
            &seal::scope_digest(key, row_count, digest).as_slice(),
        ],
    )
    .await?;
    Ok(())
}

/// Takes the right to compute a scope's digest until the transaction ends; false when another puller has it.
pub async fn try_claim(db: &impl GenericClient, scope_no: i32) -> Result<bool> {
    // The class ("dige" as a number) keeps these locks apart from any other advisory lock in the database.
    let sql = "-- digest::try_claim\nselect pg_try_advisory_xact_lock(1684629349, $1)";
    Ok(statement::query_one(db, sql, &[&scope_no]).await?.try_get(0)?)
}

/// The digest that is kept for exactly this content.
///
/// # Errors
/// [`StoreError::Integrity`] when it is not as it was kept.
pub async fn kept(db: &impl GenericClient, key: &ContentKey) -> Result<Option<[u8; 32]>> {
    let sql = "-- digest::kept
        select row_count, digest, seal
        from tributary.scope_digest
        where scope_no = $1 and stream_generation = $2 and schema_version = $3 and membership_generation = $4
            and commit_lsn = $5 and ordinal = $6";
    let (lsn, ordinal) = key.content.to_sql();
    let row = statement::query_opt(
        db,
        sql,
        &[&key.scope_no, &key.stream_generation, &key.schema_version, &key.membership_generation, &lsn, &ordinal],
    )
    .await?;
    row.map(|row| kept_from_row(&row, 0, key)).transpose()
}

/// A kept digest from the columns `row_count, digest, seal`, the first of them at `at`.
pub(super) fn kept_from_row(row: &tokio_postgres::Row, at: usize, key: &ContentKey) -> Result<[u8; 32]> {
    let row_count: i64 = row.try_get(at)?;
    let digest: [u8; 32] = row
        .try_get::<_, &[u8]>(at + 1)?
        .try_into()
        .map_err(|_| StoreError::integrity("a scope digest is not 32 octets"))?;
    if row.try_get::<_, &[u8]>(at + 2)? == seal::scope_digest(key, row_count, &digest) {
        Ok(digest)
    } else {
        Err(StoreError::integrity("a cached scope digest differs from its seal"))
    }
}

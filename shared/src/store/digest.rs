//! Scope contents in row-identity order, and the cache of their digests.

use deadpool_postgres::GenericClient;
use futures_util::{Stream, TryStreamExt};
use uuid::Uuid;

use super::error::{Result, StoreError};
use super::{projection, statement};
use crate::position::Position;
use crate::registry::Table;

/// How many rows of each relation a scope holds, `(table_no, count)`.
pub async fn row_counts(db: &impl GenericClient, scope_no: i32) -> Result<Vec<(i16, i64)>> {
    let sql = "-- digest::row_counts
        select table_no, count(*) from tributary.scope_entry where scope_no = $1 and present group by table_no";
    let rows = statement::query(db, sql, &[&scope_no]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Keys and digests of a scope's rows of one relation, by unsigned key octets; streamed.
pub async fn rows<C: GenericClient>(
    db: &C,
    scope_no: i32,
    table: &Table,
) -> Result<impl Stream<Item = Result<(Vec<u8>, [u8; 32])>> + use<C>> {
    let sql = format!(
        "-- digest::rows
        select p.tributary_key, p.tributary_digest
        from tributary.scope_entry e
        join {} p on p.tributary_row_id = e.row_id
        where e.scope_no = $1 and e.table_no = $2 and e.present
        order by p.tributary_key",
        projection::name(table)
    );
    let statement = db.prepare_cached(&sql).await?;
    let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&scope_no, &table.table_no];
    let rows = db.query_raw(&statement, parameters).await?;
    Ok(rows.map_err(StoreError::from).and_then(|row| async move {
        let digest: Option<Vec<u8>> = row.try_get(1)?;
        let digest = digest.and_then(|d| d.try_into().ok());
        Ok((row.try_get(0)?, digest.ok_or_else(|| StoreError::integrity("a captured row has no digest"))?))
    }))
}

/// What a cached digest is valid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DigestKey {
    /// Scope.
    pub scope_no: i32,
    /// Stream generation.
    pub stream_generation: Uuid,
    /// Schema version.
    pub schema_version: i64,
    /// Membership generation.
    pub membership_generation: i64,
    /// Content position.
    pub content: Position,
}

/// Keeps a scope's digest, unless one of a later content is kept already.
pub async fn keep(db: &impl GenericClient, key: &DigestKey, row_count: i64, digest: &[u8; 32]) -> Result<()> {
    let sql = "-- digest::keep
        insert into tributary.scope_digest as d (scope_no, stream_generation, schema_version, membership_generation,
            commit_lsn, ordinal, row_count, digest)
        values ($1, $2, $3, $4, $5, $6, $7, $8)
        on conflict on constraint scope_digest_scope_is_key do update
        set stream_generation = excluded.stream_generation, schema_version = excluded.schema_version,
            membership_generation = excluded.membership_generation, commit_lsn = excluded.commit_lsn,
            ordinal = excluded.ordinal, row_count = excluded.row_count, digest = excluded.digest
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
pub async fn kept(db: &impl GenericClient, key: &DigestKey) -> Result<Option<[u8; 32]>> {
    let sql = "-- digest::kept
        select digest
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
    let digest: Option<Vec<u8>> = row.map(|row| row.try_get(0)).transpose()?;
    digest
        .map(|d| d.try_into().map_err(|_| StoreError::integrity("a scope digest is not 32 octets")))
        .transpose()
}

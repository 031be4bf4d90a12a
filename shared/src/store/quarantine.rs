//! Transactions at which the stream stopped. Rows name the case and the relation, never a value, key or scope.

use deadpool_postgres::GenericClient;

use super::error::Result;
use super::statement;
use crate::lsn::Lsn;

/// An open case.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its number.
    pub quarantine_no: i64,
    /// Inclusive commit LSN of the transaction that could not be materialized.
    pub commit_lsn: Lsn,
    /// The kind of case: `poison` or `drift`.
    pub reason: String,
    /// The relation it was found in.
    pub relation: Option<String>,
    /// What is wrong, without values.
    pub detail: String,
}

/// Opens a case, unless the same one is open already; returns its number.
pub async fn open(
    db: &impl GenericClient,
    commit_lsn: Lsn,
    reason: &str,
    relation: Option<&str>,
    detail: &str,
) -> Result<i64> {
    let row = statement::query_one(
        db,
        "-- quarantine::open
            with known as (
                select quarantine_no from tributary.quarantine
                where resolved_at is null and commit_lsn = $1 and reason = $2 and detail = $4
            ), opened as (
                insert into tributary.quarantine (commit_lsn, reason, relation, detail)
                select $1, $2, $3, $4 where not exists (select from known)
                returning quarantine_no
            )
            select quarantine_no from known union all select quarantine_no from opened limit 1",
        &[&commit_lsn.to_sql(), &reason, &relation, &detail],
    )
    .await?;
    Ok(row.try_get(0)?)
}

/// The newest open case.
pub async fn current(db: &impl GenericClient) -> Result<Option<Case>> {
    let row = statement::query_opt(
        db,
        "-- quarantine::current
            select quarantine_no, commit_lsn, reason, relation, detail
            from tributary.quarantine
            where resolved_at is null
            order by quarantine_no desc
            limit 1",
        &[],
    )
    .await?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(Case {
        quarantine_no: row.try_get(0)?,
        commit_lsn: Lsn::from_sql(row.try_get(1)?).unwrap_or_default(),
        reason: row.try_get(2)?,
        relation: row.try_get(3)?,
        detail: row.try_get(4)?,
    }))
}

/// Closes every open case: the operator says that the cause is fixed (`materializer retry`). Returns how many.
pub async fn resolve(db: &impl GenericClient) -> Result<u64> {
    let sql = "-- quarantine::resolve
        update tributary.quarantine set resolved_at = clock_timestamp() where resolved_at is null";
    statement::execute(db, sql, &[]).await
}

/// Whether the case is still open.
pub async fn is_open(db: &impl GenericClient, quarantine_no: i64) -> Result<bool> {
    let sql = "-- quarantine::is_open
        select exists (select from tributary.quarantine where quarantine_no = $1 and resolved_at is null)";
    Ok(statement::query_one(db, sql, &[&quarantine_no]).await?.try_get(0)?)
}

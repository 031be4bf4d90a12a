//! Runs statements through the session's statement cache: each text is parsed once a session.

use deadpool_postgres::GenericClient;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::error::Result;

type Parameters<'a> = &'a [&'a (dyn ToSql + Sync)];

/// All rows. For answers whose size is bounded by what was asked for.
pub async fn query(db: &impl GenericClient, sql: &str, parameters: Parameters<'_>) -> Result<Vec<Row>> {
    let statement = db.prepare_cached(sql).await?;
    Ok(db.query(&statement, parameters).await?)
}

/// At most one row.
pub async fn query_opt(db: &impl GenericClient, sql: &str, parameters: Parameters<'_>) -> Result<Option<Row>> {
    let statement = db.prepare_cached(sql).await?;
    Ok(db.query_opt(&statement, parameters).await?)
}

/// Exactly one row.
pub async fn query_one(db: &impl GenericClient, sql: &str, parameters: Parameters<'_>) -> Result<Row> {
    let statement = db.prepare_cached(sql).await?;
    Ok(db.query_one(&statement, parameters).await?)
}

/// How many rows were written.
pub async fn execute(db: &impl GenericClient, sql: &str, parameters: Parameters<'_>) -> Result<u64> {
    let statement = db.prepare_cached(sql).await?;
    Ok(db.execute(&statement, parameters).await?)
}

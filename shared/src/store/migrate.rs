//! Applies the embedded migrations, each set under an advisory lock and with a history table of its own.

use deadpool_postgres::GenericClient;
use tokio_postgres::Client;

use super::error::{Result, StoreError};
use super::statement;

mod state {
    refinery::embed_migrations!("../migrations/state");
}
mod source {
    refinery::embed_migrations!("../migrations/source");
}

/// Key of the advisory lock that serialises migrations of one database ("trib" as a number).
const LOCK: i64 = 0x7472_6962;

/// Brings the state database's schema up to date; returns how many migrations were applied.
pub async fn state(client: &mut Client) -> Result<usize> {
    apply(client, state::migrations::runner(), "tributary.state_migration").await
}

/// Brings the source database's two objects up to date; returns how many migrations were applied.
pub async fn source(client: &mut Client) -> Result<usize> {
    apply(client, source::migrations::runner(), "tributary.source_migration").await
}

async fn apply(client: &mut Client, mut runner: refinery::Runner, history: &str) -> Result<usize> {
    client.execute("-- migrate::lock\nselect pg_advisory_lock($1)", &[&LOCK]).await?;
    let outcome = async {
        client.batch_execute("-- migrate::schema\ncreate schema if not exists tributary").await?;
        runner.set_migration_table_name(history);
        let report = runner.run_async(client).await.map_err(|e| StoreError::integrity(format!("migration: {e}")))?;
        Ok(report.applied_migrations().len())
    }
    .await;
    client.execute("-- migrate::unlock\nselect pg_advisory_unlock($1)", &[&LOCK]).await?;
    outcome
}

/// Whether the state database was ever migrated; asked before anything is made there.
pub async fn is_migrated(db: &impl GenericClient) -> Result<bool> {
    let sql = "-- migrate::is_migrated\nselect to_regclass('tributary.progress') is not null";
    Ok(statement::query_one(db, sql, &[]).await?.try_get(0)?)
}

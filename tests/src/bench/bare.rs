//! The least that a puller could do: one route that reads `progress` in a repeatable-read transaction. A process of its
//! own, as a puller is.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use tokio_postgres::{IsolationLevel, NoTls};

/// The command by which the bench starts it.
pub const COMMAND: &str = "bare-handler";
/// The environment variable with the state's address.
pub const STATE_URL: &str = "BENCH_STATE_URL";

/// Serve until the process is told to end.
///
/// # Errors
/// The address is taken, or the setting is missing.
pub fn serve(listen: SocketAddr, pool_size: usize) -> anyhow::Result<()> {
    let url = std::env::var(STATE_URL).with_context(|| format!("{STATE_URL} is not set"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let manager = Manager::from_config(
            url.parse().context("the state's address")?,
            NoTls,
            ManagerConfig { recycling_method: RecyclingMethod::Fast },
        );
        let pool = Pool::builder(manager)
            .max_size(pool_size)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(Duration::from_secs(5)))
            .build()?;
        let listener = tokio::net::TcpListener::bind(listen).await?;
        axum::serve(listener, Router::new().route("/sync/pull", post(answer)).with_state(pool)).await?;
        Ok(())
    })
}

async fn answer(State(pool): State<Pool>, _body: Bytes) -> Result<String, StatusCode> {
    read(&pool).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
}

async fn read(pool: &Pool) -> anyhow::Result<String> {
    let mut session = pool.get().await?;
    let db = session.build_transaction().isolation_level(IsolationLevel::RepeatableRead).start().await?;
    let statement = db.prepare_cached("select boundary_lsn, resume_lsn from tributary.progress").await?;
    let row = db.query_one(&statement, &[]).await?;
    let (boundary, resume): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
    db.commit().await?;
    Ok(format!(r#"{{"boundary":{boundary},"resume":{resume}}}"#))
}

//! The admin port: `/livez`, `/readyz` and `/metrics`. For operators; never exposed to clients.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::health::{Health, Readiness};

#[derive(Clone)]
struct Admin {
    health: Health,
    metrics: PrometheusHandle,
}

/// A port that could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {cause}; choose another with {flag}")]
pub struct ListenError {
    address: SocketAddr,
    cause: std::io::Error,
    flag: &'static str,
}

/// Opens a listening socket; `flag` is the setting that chose it, for the error.
pub async fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address).await.map_err(|cause| ListenError { address, cause, flag })
}

/// Buckets of histograms of rows.
const COUNTS: &[f64] = &[1.0, 10.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 1e4, 1e5, 1e6];
/// Buckets of histograms of octets.
const OCTETS: &[f64] =
    &[256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0, 67_108_864.0];

/// Installs the process's metrics recorder; call once.
///
/// # Errors
/// A recorder is installed already.
pub fn install_metrics() -> Result<PrometheusHandle, metrics_exporter_prometheus::BuildError> {
    PrometheusBuilder::new()
        .set_buckets(&[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0])?
        .set_buckets_for_metric(Matcher::Suffix("_changes".into()), COUNTS)?
        .set_buckets_for_metric(Matcher::Suffix("_rows".into()), COUNTS)?
        .set_buckets_for_metric(Matcher::Suffix("_bytes".into()), OCTETS)?
        .install_recorder()
}

/// Serves the admin port until `stop` is cancelled.
pub async fn serve(
    listener: TcpListener,
    health: Health,
    metrics: PrometheusHandle,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/livez", get(async || "live\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(render))
        .with_state(Admin { health, metrics });
    axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await }).await
}

async fn ready(State(admin): State<Admin>) -> (StatusCode, String) {
    match admin.health.current() {
        Readiness::Ready(role) => (StatusCode::OK, format!("ready: {role}\n")),
        Readiness::Unready(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")),
    }
}

async fn render(State(admin): State<Admin>) -> String {
    admin.metrics.run_upkeep();
    admin.metrics.render()
}

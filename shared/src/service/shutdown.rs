//! Shutdown: SIGTERM or SIGINT asks the process to drain and leave.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGTERM or SIGINT.
///
/// # Errors
/// The signal handlers cannot be installed.
pub fn token() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let cancelled = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("draining");
        cancelled.cancel();
    });
    Ok(token)
}

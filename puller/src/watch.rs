//! Readiness of a puller: whether the state can be read, is materialized at all, and is not older than a limit.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::{leader, progress, session};

use crate::app::App;
use crate::meters;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Looks that must fail before a ready puller is unready: one lost connection is retried by every request anyway.
const PATIENCE: u32 = 3;
/// A lease that was given up has no time of its last sign of life: no more than this is told.
const LONGEST_SILENCE: Duration = Duration::from_secs(86_400);

/// Keeps the puller's readiness true until `stop`.
pub async fn watch(app: Arc<App>, max_silence: Option<Duration>, stop: CancellationToken) {
    let mut failures = 0;
    loop {
        meters::measure(&app);
        match look(&app, max_silence).await {
            Ok(None) => {
                failures = 0;
                app.health.ready("serving");
            }
            Ok(Some(reason)) => app.health.unready(reason),
            Err(error) => {
                failures += 1;
                if failures >= PATIENCE || !app.health.is_ready() {
                    app.health.unready(format!("state {error}"));
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

/// Why the state cannot be served now, if so.
async fn look(app: &App, max_silence: Option<Duration>) -> Result<Option<String>, StoreError> {
    let db = session::acquire(&app.cache).await?;
    if !tributary_shared::store::migrate::is_migrated(&db).await? {
        return Ok(Some("the state has no schema yet: no materializer has run".into()));
    }
    if progress::load(&db).await?.is_none() {
        return Ok(Some("no baseline is active yet".into()));
    }
    let Some(silence) = leader::silence(&db).await? else { return Ok(None) };
    metrics::gauge!("tributary_leader_silence_seconds").set(silence.min(LONGEST_SILENCE).as_secs_f64());
    if max_silence.is_some_and(|limit| silence > limit) {
        return Ok(Some(format!("no materializer has led for {} s", silence.as_secs())));
    }
    Ok(None)
}

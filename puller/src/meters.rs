//! Metrics of a puller that are there from the start, so that the first event of a kind is seen as one: counters begin
//! at zero under every label that they can have. Those of each path stand where it is measured.

use metrics::{counter, gauge, histogram};

use crate::app::App;

/// Endpoints, as metrics name them.
const ENDPOINTS: [&str; 3] = ["connect", "pull", "rebuild"];
/// Outcomes that alerts look for.
const CODES: [&str; 6] =
    ["ok", "invalid_request", "temporary_unavailable", "sync_integrity_failure", "capture_pending", "rate_limited"];
/// Where digests come from.
const DIGESTS: [&str; 3] = ["cached", "updated", "computed"];

/// Registers them; once, after the recorder is installed.
pub fn register() {
    gauge!("tributary_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    for endpoint in ENDPOINTS {
        for code in CODES {
            counter!("tributary_requests_total", "endpoint" => endpoint, "code" => code).absolute(0);
        }
    }
    for outcome in DIGESTS {
        counter!("tributary_digest_total", "outcome" => outcome).absolute(0);
    }
    for cause in tributary_shared::cursor::Stale::ALL {
        counter!("tributary_stale_cursors_total", "cause" => cause.name()).absolute(0);
    }
    counter!("tributary_request_reruns_total").absolute(0);
    counter!("tributary_jwks_failures_total").absolute(0);
    counter!("tributary_assignments_refused_total").absolute(0);
    counter!("tributary_snapshots_staged_total").absolute(0);
    gauge!("tributary_requests_in_flight").set(0.0);
}

/// Measures what is full or empties; called every second.
pub fn measure(app: &App) {
    for pool in [Some(&app.state), app.source.as_ref(), Some(&app.cache)].into_iter().flatten() {
        let (name, status) = (pool.name(), pool.status());
        gauge!("tributary_pool_in_use", "pool" => name).set(status.size.saturating_sub(status.available) as f64);
        gauge!("tributary_pool_waiting", "pool" => name).set(status.waiting as f64);
        gauge!("tributary_pool_limit", "pool" => name).set(status.max_size as f64);
    }
    let staging = &app.staging;
    gauge!("tributary_staging_waiters").set(staging.waiting() as f64);
    gauge!("tributary_staging_waiters_limit").set(staging.most_waiters() as f64);
    gauge!("tributary_staging_running").set(staging.staging() as f64);
}

/// A request that is worked on, until it is dropped.
pub struct InFlight;

impl InFlight {
    /// Begins.
    pub fn begin() -> Self {
        gauge!("tributary_requests_in_flight").increment(1.0);
        Self
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        gauge!("tributary_requests_in_flight").decrement(1.0);
    }
}

/// An answer of this many octets.
pub fn answered(endpoint: &'static str, octets: usize) {
    histogram!("tributary_response_bytes", "endpoint" => endpoint).record(octets as f64);
}

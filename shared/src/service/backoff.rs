//! Waiting between attempts: exponential with full jitter, so that processes that lost one database do not return to
//! it in step.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};

/// Delays of an endless retry: from 100 ms up to `cap`, doubling, with jitter.
pub struct Backoff {
    cap: Duration,
    delays: backon::ExponentialBackoff,
}

impl Backoff {
    /// Delays up to `cap`.
    pub fn new(cap: Duration) -> Self {
        Self { cap, delays: Self::delays(cap) }
    }

    fn delays(cap: Duration) -> backon::ExponentialBackoff {
        ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_delay(cap)
            .with_jitter()
            .without_max_times()
            .build()
    }

    /// The next delay.
    pub fn next_delay(&mut self) -> Duration {
        self.delays.next().unwrap_or(self.cap)
    }

    /// Starts over, after a success.
    pub fn reset(&mut self) {
        self.delays = Self::delays(self.cap);
    }
}

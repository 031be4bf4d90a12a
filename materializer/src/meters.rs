//! Metrics of a materializer that are there from the start, and those that are taken by every heartbeat. Those of each
//! path stand where it is measured.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use metrics::{counter, gauge, histogram};
use tributary_shared::lsn::Lsn;
use tributary_shared::registry::Registry;
use tributary_shared::store::source::Slot;

/// Why a stream can be stopped at a transaction.
const REASONS: [&str; 2] = ["poison", "drift"];

/// Registers them; once, after the recorder is installed.
pub fn register(registry: &Registry) {
    gauge!("tributary_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    for name in [
        "tributary_transactions_total",
        "tributary_baseline_rows_total",
        "tributary_expired_clients_total",
        "tributary_compacted_markers_total",
        "tributary_resets_total",
    ] {
        counter!(name).absolute(0);
    }
    for table in &registry.tables {
        counter!("tributary_changes_total", "relation" => table.relation.to_string()).absolute(0);
    }
    for name in [
        "tributary_boundary_lsn",
        "tributary_commit_lag_seconds",
        "tributary_baseline_active",
        "tributary_baseline_progress_ratio",
        "tributary_source_wal_lsn",
        "tributary_rebuild_sessions",
        "tributary_snapshots",
        "tributary_snapshot_bytes",
    ] {
        gauge!(name).set(0.0);
    }
    stand_by();
}

/// What is only true of a leader ends with its leadership.
pub fn stand_by() {
    for name in [
        "tributary_leader",
        "tributary_slot_lost",
        "tributary_replication_lag_bytes",
        "tributary_replication_lag_seconds",
        "tributary_acknowledged_lsn",
        "tributary_slot_retained_bytes",
        "tributary_baseline_active",
    ] {
        gauge!(name).set(0.0);
    }
    quarantine(None);
}

/// The stream is stopped at a transaction for this reason, or is not.
pub fn quarantine(reason: Option<&str>) {
    for known in REASONS {
        gauge!("tributary_quarantine", "reason" => known).set(f64::from(u8::from(reason == Some(known))));
    }
}

/// Positions of the source's WAL as they were seen, with the time: how long the oldest of them waits for its
/// acknowledgement is the lag, whether the stream moves or stands still.
#[derive(Default)]
pub struct Lag {
    seen: VecDeque<(Lsn, Instant)>,
}

/// Positions that are remembered: past them every other one is forgotten, and the lag is told the coarser.
const SEEN: usize = 4096;

impl Lag {
    /// The source's WAL ends at `wal`, and everything before `acknowledged` is durable.
    pub fn observe(&mut self, wal: Lsn, acknowledged: Lsn, now: Instant) -> Duration {
        while self.seen.front().is_some_and(|(lsn, _)| *lsn <= acknowledged) {
            self.seen.pop_front();
        }
        if wal > acknowledged && self.seen.back().is_none_or(|(lsn, _)| *lsn < wal) {
            if self.seen.len() == SEEN {
                let mut odd = false;
                self.seen.retain(|_| {
                    odd = !odd;
                    odd
                });
            }
            self.seen.push_back((wal, now));
        }
        self.seen.front().map_or(Duration::ZERO, |(_, since)| now.saturating_duration_since(*since))
    }
}

/// Where the time of a state transaction goes.
#[derive(Debug, Default, Clone, Copy)]
pub struct Phases {
    /// What rows were.
    pub read: Duration,
    /// Rules.
    pub rules: Duration,
    /// Projections, entries, progress.
    pub write: Duration,
}

impl Phases {
    /// Records them, and the commit.
    pub fn record(self, commit: Duration) {
        for (phase, time) in [("read", self.read), ("rules", self.rules), ("write", self.write), ("commit", commit)] {
            histogram!("tributary_batch_phase_duration_seconds", "phase" => phase).record(time.as_secs_f64());
        }
    }
}

/// A baseline's copy, until it is dropped.
pub struct Copying {
    rows: AtomicU64,
    /// By the source's statistics.
    expected: u64,
}

impl Copying {
    /// Begins, with this many rows to come, about.
    pub fn begin(expected: u64) -> Self {
        gauge!("tributary_baseline_active").set(1.0);
        gauge!("tributary_baseline_progress_ratio").set(0.0);
        Self { rows: AtomicU64::new(0), expected }
    }

    /// So many rows more are copied.
    pub fn add(&self, rows: u64) {
        counter!("tributary_baseline_rows_total").increment(rows);
        let copied = self.rows.fetch_add(rows, Ordering::Relaxed) + rows;
        gauge!("tributary_baseline_progress_ratio").set((copied as f64 / self.expected.max(1) as f64).min(1.0));
    }

    /// Rows copied.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        gauge!("tributary_baseline_active").set(0.0);
    }
}

/// What the slot is like, and how far behind.
pub fn slot(slot: Option<&Slot>, wal: Lsn, durable: Lsn, lag: &mut Lag) {
    let acknowledged = slot.map_or(durable, |slot| slot.confirmed_flush);
    gauge!("tributary_replication_lag_seconds").set(lag.observe(wal, acknowledged, Instant::now()).as_secs_f64());
    // Zero again when the leader has looked at all that can be wrong.
    if slot.is_none_or(Slot::is_lost) {
        gauge!("tributary_slot_lost").set(1.0);
    }
    let Some(slot) = slot else { return };
    gauge!("tributary_replication_lag_bytes").set(wal.since(slot.confirmed_flush) as f64);
    gauge!("tributary_acknowledged_lsn").set(slot.confirmed_flush.octets() as f64);
    let retained = wal.since(slot.restart) as f64;
    gauge!("tributary_slot_retained_bytes").set(retained);
    // There is a limit only where the source has one.
    if let Some(safe) = slot.safe_wal_octets {
        gauge!("tributary_slot_retained_limit_bytes").set(retained + safe.max(0) as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lsn(octets: u64) -> Lsn {
        Lsn::new(octets).expect("in range")
    }

    #[test]
    fn lag_is_the_age_of_what_is_not_acknowledged() {
        let (mut lag, start) = (Lag::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(lag.observe(lsn(10), lsn(10), at(0)), Duration::ZERO, "idle");
        assert_eq!(lag.observe(lsn(20), lsn(10), at(1)), Duration::ZERO, "just seen");
        assert_eq!(lag.observe(lsn(30), lsn(10), at(3)), Duration::from_secs(2), "standing still");
        assert_eq!(lag.observe(lsn(30), lsn(20), at(4)), Duration::from_secs(1), "the older is acknowledged");
        assert_eq!(lag.observe(lsn(30), lsn(30), at(9)), Duration::ZERO, "caught up");
    }

    #[test]
    fn what_lag_remembers_is_bounded_and_never_younger() {
        let (mut lag, start) = (Lag::default(), Instant::now());
        for beat in 1..=3 * SEEN as u64 {
            let age = lag.observe(lsn(10 + beat), lsn(10), start + Duration::from_secs(beat));
            assert_eq!(age, Duration::from_secs(beat - 1));
        }
        assert!(lag.seen.len() <= SEEN);
    }
}

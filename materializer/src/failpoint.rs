//! Faults with names, for tests: the process aborts where a kill would hurt most.
//!
//! A hidden flag and not a build feature: tests run the very binaries that are shipped, and a second build of everything
//! would cost more than one relaxed load a state transaction. Nothing is armed unless the flag is given.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The state transaction is written and not committed.
pub const BEFORE_COMMIT: &str = "before_commit";
/// The state transaction is committed, its end is not acknowledged.
pub const BEFORE_ACKNOWLEDGEMENT: &str = "before_acknowledgement";
/// A baseline has its slot, and nothing is copied.
pub const BASELINE_SLOT: &str = "baseline_slot";
/// A baseline has copied a batch.
pub const BASELINE_COPY: &str = "baseline_copy";
/// A baseline is copied, and not active.
pub const BEFORE_ACTIVATION: &str = "before_activation";
/// A baseline is active, and nothing of its stream was read.
pub const AFTER_ACTIVATION: &str = "after_activation";

const ALL: [&str; 6] =
    [BEFORE_COMMIT, BEFORE_ACKNOWLEDGEMENT, BASELINE_SLOT, BASELINE_COPY, BEFORE_ACTIVATION, AFTER_ACTIVATION];

/// Where to abort: the name of a point, and at which passage of it (`before_commit:3`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failpoint {
    name: String,
    passage: u32,
}

/// A text that names no point.
#[derive(Debug, thiserror::Error)]
#[error("a failpoint is NAME or NAME:PASSAGE, of {}", ALL.join(", "))]
pub struct FailpointError;

impl std::str::FromStr for Failpoint {
    type Err = FailpointError;

    fn from_str(text: &str) -> Result<Self, FailpointError> {
        let (name, passage) = text.split_once(':').unwrap_or((text, "1"));
        let passage = passage.parse().ok().filter(|passage| *passage > 0).ok_or(FailpointError)?;
        if !ALL.contains(&name) {
            return Err(FailpointError);
        }
        Ok(Self { name: name.to_owned(), passage })
    }
}

static ARMED: OnceLock<(Failpoint, AtomicU32)> = OnceLock::new();

/// Arms a point for the life of the process.
pub fn arm(point: Failpoint) {
    tracing::warn!(point = point.name, passage = point.passage, "a failpoint is armed");
    let passages = AtomicU32::new(point.passage);
    // Called once, at start.
    let _ = ARMED.set((point, passages));
}

/// Aborts the process if this point is armed and this is the passage.
pub fn reach(name: &str) {
    let Some((point, left)) = ARMED.get() else { return };
    if point.name == name && left.fetch_sub(1, Ordering::Relaxed) == 1 {
        tracing::error!(point = name, "aborting at a failpoint");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_have_names_and_passages() {
        let point = |text: &str| text.parse::<Failpoint>().map(|p| (p.name, p.passage)).ok();
        assert_eq!(point("before_commit"), Some(("before_commit".to_owned(), 1)));
        assert_eq!(point("baseline_copy:7"), Some(("baseline_copy".to_owned(), 7)));
        for text in ["", "nowhere", "before_commit:", "before_commit:0", "before_commit:-1", "before_commit:x"] {
            assert_eq!(point(text), None, "{text}");
        }
    }
}

//! Whether the writer waits for the state database, and since when: a session that a network has forgotten neither
//! answers nor ends, and nothing in the writer itself would notice. The heartbeat looks, through a session of its own.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The writer's part is to say when it begins to wait and when it rests.
#[derive(Debug, Default)]
pub struct Pulse {
    waiting: Mutex<Option<(i32, Instant)>>,
}

impl Pulse {
    /// The writer waits for its session with this backend from now on; 0 while it has none.
    pub fn waits(&self, backend: i32) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some((backend, Instant::now()));
    }

    /// The writer has nothing to wait for.
    pub fn rests(&self) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The backend that the writer has been waiting for, if for longer than this.
    pub fn waiting_for(&self, longer: Duration) -> Option<i32> {
        let waiting = *self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.filter(|(_, since)| since.elapsed() > longer).map(|(backend, _)| backend)
    }
}

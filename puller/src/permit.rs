//! What a request counts as: one that is worked on, or one that waits for a staging. Each has a bound of its own, so
//! that a rush of rebuilds for one scope, or for many, does not keep out pulls, connects and other rebuilds.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// A request's part of a bound; given back when it is dropped.
pub struct Permit(OwnedSemaphorePermit);

impl Permit {
    /// A part of this bound, now.
    ///
    /// # Errors
    /// `rate_limited`: all of it is taken.
    pub fn take(bound: &Arc<Semaphore>) -> Result<Self, ApiError> {
        let permit = bound.clone().try_acquire_owned();
        permit.map(Self).map_err(|_| ApiError::RateLimited { retry_after: 1 })
    }

    /// From now on a part of another bound, if it is not that already; the former is given back.
    ///
    /// # Errors
    /// `rate_limited`: all of it is taken.
    pub fn change(&mut self, bound: &Arc<Semaphore>) -> Result<(), ApiError> {
        if !Arc::ptr_eq(self.0.semaphore(), bound) {
            *self = Self::take(bound)?;
        }
        Ok(())
    }
}

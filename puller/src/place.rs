//! What a request counts as: one that is worked on, or one that waits for a staging. Each has a bound of its own, so
//! that a rush of rebuilds for one scope, or for many, leaves pulls, connects and other rebuilds their places.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// A request's place within a bound; given back when it is dropped.
pub struct Place(OwnedSemaphorePermit);

impl Place {
    /// A place now.
    ///
    /// # Errors
    /// `rate_limited`: there is none.
    pub fn take(bound: &Arc<Semaphore>) -> Result<Self, ApiError> {
        let permit = bound.clone().try_acquire_owned();
        permit.map(Self).map_err(|_| ApiError::RateLimited { retry_after: 1 })
    }

    /// From now on within another bound, if it is not within that already; its former place is given back.
    ///
    /// # Errors
    /// `rate_limited`: there is no place.
    pub fn change(&mut self, bound: &Arc<Semaphore>) -> Result<(), ApiError> {
        if !Arc::ptr_eq(self.0.semaphore(), bound) {
            *self = Self::take(bound)?;
        }
        Ok(())
    }
}

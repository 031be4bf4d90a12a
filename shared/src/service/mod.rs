//! What both processes are made of besides their work: logs, the admin port, health, shutdown.
//!
//! With [`crate::store`] the only part of this crate that does I/O.

pub mod admin;
pub mod backoff;
pub mod health;
pub mod logs;
pub mod probe;
pub mod shutdown;

//! The concepts of Tributary that the materializer and the pullers share.
//!
//! Everything outside [`store`] is pure: no I/O, no clock, no randomness, never async. Present time, keys and prior
//! state come in as arguments. [`store`] is the only home of SQL, for both binaries.

pub mod lsn;
pub mod portable;
pub mod position;
pub mod registry;
pub mod rule;
pub mod store;
pub mod template;

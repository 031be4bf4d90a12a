//! The concepts of Tributary that the materializer and the pullers share.
//!
//! Everything outside [`store`] is pure: no I/O, no clock, no randomness, never async. Present time, keys and prior
//! state come in as arguments. [`store`] is the only home of SQL, for both binaries.

pub mod continuation;
pub mod cursor;
pub mod lsn;
pub mod merge;
pub mod position;
pub mod protocol;
pub mod token;

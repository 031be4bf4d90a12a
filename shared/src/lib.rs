//! The concepts of Tributary that the materializer and the pullers share.
//!
//! Everything outside [`store`] and [`service`] is pure: no I/O, no clock, no randomness, never async. Present time,
//! keys and prior state come in as arguments. [`store`] is the only home of SQL, for both binaries.

pub mod canonical;
pub mod content;
pub mod continuation;
pub mod cursor;
pub mod digest;
pub mod encoding;
pub mod lsn;
pub mod manifest;
pub mod merge;
pub mod portable;
pub mod position;
pub mod protocol;
pub mod registry;
pub mod rule;
pub mod seal;
pub mod service;
pub mod store;
pub mod template;
pub mod token;

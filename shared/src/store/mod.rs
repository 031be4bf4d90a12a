//! The only home of SQL: every statement of the product stands here, under a comment that names its function.
//!
//! Functions take a connection or transaction, do what their name says, and return typed values. They hold no policy:
//! what to do with an error is decided by [`error::StoreError::fate`] and by the caller.

pub mod assignment;
pub mod catalog;
pub mod client;
pub mod configuration;
mod copy;
pub mod digest;
pub mod doctor;
pub mod error;
pub mod leader;
pub mod membership;
pub mod migrate;
pub mod progress;
pub mod projection;
pub mod pull;
pub mod quarantine;
pub mod reset;
pub mod retention;
pub mod scope;
pub mod server;
pub mod session;
pub mod snapshot;
pub mod source;
mod statement;
pub mod status;
pub mod transaction;
pub mod write;

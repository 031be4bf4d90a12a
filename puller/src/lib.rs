//! Serves durable sync state to clients over HTTP: connect, pull, rebuild.

pub mod auth;
pub mod error;

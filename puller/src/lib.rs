//! Serves durable sync state to clients over HTTP: connect, pull, rebuild.

pub mod app;
pub mod auth;
pub mod connect;
pub mod digests;
pub mod error;
pub mod gate;
pub mod jwks;
pub mod meters;
pub mod permit;
pub mod pull;
pub mod rebuild;
pub mod router;
pub mod settings;
pub mod staging;
pub mod watch;

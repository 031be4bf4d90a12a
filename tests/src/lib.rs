//! The harness of the end-to-end tests, which is also the `sandbox`: a private PostgreSQL, a materializer, pullers,
//! and a reference client that shares no code with them.

pub mod bench;
pub mod canonical;
pub mod client;
pub mod database;
pub mod demo;
pub mod envelope;
pub mod expected;
pub mod http;
pub mod json;
pub mod operator;
pub mod pg;
pub mod ports;
pub mod processes;
pub mod proxy;
pub mod ready;
pub mod sample;
pub mod sandbox;
pub mod secrets;

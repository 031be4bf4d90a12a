//! End-to-end tests: real processes against a private PostgreSQL, one sandbox each.

#![expect(clippy::print_stdout, reason = "seeds and counts, for who reads a test's output")]

mod apply;
mod bad_input;
mod connect;
mod content;
mod doctor;
mod faults;
mod lifetime;
mod membership;
mod metrics;
mod openapi;
mod oracle;
mod pgbench;
mod pull;
mod rebuild;
mod restart;
mod retention;
mod rules_sql;
mod sample;
mod simulation;

//! End-to-end tests: real processes against a private PostgreSQL, one sandbox each.

mod bad_input;
mod lifetime;
mod membership;
mod oracle;
mod pgbench;
mod restart;
mod rules_sql;
mod sample;

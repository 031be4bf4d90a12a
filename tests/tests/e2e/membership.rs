//! Membership by joins: whatever transactions do, the entries are what PostgreSQL says about the rules over the source.

pub mod files;
mod named;
mod random;

//! The only home of SQL.

pub mod catalog;

//! Measurements of a whole Tributary, each beside a baseline that is measured in the same run on the same machine:
//! PostgreSQL's own logical replication, a bare HTTP handler, COPY.
//!
//! Every measurement starts a sandbox of its own, with `fsync` and `synchronous_commit` on. What makes the load is not
//! measured and commits asynchronously. Deliberately absent: judgement; a figure that misses its target is printed
//! like any other.

pub mod bare;
mod drain;
mod idle;
mod keep_alive;
mod latency;
mod memory;
mod pages;
mod session;
mod site;
mod subscription;
mod table;

use std::sync::atomic::AtomicBool;

use clap::ValueEnum;

use memory::Memory;
use site::Site;
pub use table::Table;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Measurement {
    /// Draining 1,000,000 inserted rows, 1,000 in a transaction.
    Bulk,
    /// Draining 50,000 transactions of one row.
    Single,
    /// Commit to pull at 100 commits a second.
    Latency,
    /// Pulls that find no change.
    Idle,
    /// Rebuild and pull pages of 1,000 rows.
    Pages,
    /// Memory of one transaction of 2,000,000 rows.
    Memory,
}

/// How to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// Factor of all row counts and durations.
    pub scale: f64,
    /// What to measure.
    pub measurements: Vec<Measurement>,
    /// Keep the state in a database of its own, on the same server.
    pub split: bool,
    /// Further settings of PostgreSQL, for a look at what it does.
    pub pg_settings: Vec<String>,
    /// The command, for the table.
    pub command: String,
    /// Told what goes on.
    pub say: fn(&str),
    /// Set from outside to give up.
    pub cancelled: &'static AtomicBool,
}

impl Options {
    /// `full` rows, or seconds, or whatever is counted, at this scale.
    fn scaled(&self, full: i64) -> i64 {
        ((full as f64 * self.scale) as i64).max(1)
    }
}

/// Measure, one after the other.
///
/// # Errors
/// Something did not start, or did not arrive.
pub fn run(options: &Options) -> anyhow::Result<Table> {
    let mut memory = Memory::default();
    let mut table = Table::new(options.command.clone());
    for measurement in &options.measurements {
        let mut site = Site::start(options)?;
        table.describe(&site)?;
        memory.idle(&site)?;
        let figures = match measurement {
            Measurement::Bulk => drain::bulk(options, &mut site, &mut memory)?,
            Measurement::Single => drain::single(options, &mut site, &mut memory)?,
            Measurement::Latency => latency::measure(options, &mut site)?,
            Measurement::Idle => idle::measure(options, &site)?,
            Measurement::Pages => pages::measure(options, &site)?,
            Measurement::Memory => vec![memory::one_transaction(options, &site)?],
        };
        memory.peak(&site)?;
        for figure in figures {
            (options.say)(&figure.line());
            table.add(figure);
        }
    }
    for figure in memory.figures() {
        table.add(figure);
    }
    Ok(table)
}

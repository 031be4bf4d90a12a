//! Peak memory (`VmHWM`) of both programs beside what they have when idle.

use std::time::Duration;

use anyhow::Context as _;

use super::Options;
use super::site::Site;
use super::table::{Figure, field, kibibytes};

/// Rows of the one large transaction.
const ROWS: i64 = 2_000_000;
/// What it may add to the idle materializer's memory, in octets.
const MOST_ADDED: u64 = 100 << 20;
/// A program is idle when it has been ready for this long.
const SETTLE: Duration = Duration::from_millis(500);

/// Least idle and greatest peak of one program over a run.
#[derive(Debug, Default, Clone, Copy)]
struct Beside {
    idle: Option<u64>,
    peak: u64,
}

/// Memory over a whole run.
#[derive(Debug, Default)]
pub(super) struct Memory {
    materializer: Beside,
    puller: Beside,
}

impl Memory {
    /// Note what the programs have before they work.
    pub fn idle(&mut self, site: &Site) -> anyhow::Result<()> {
        std::thread::sleep(SETTLE);
        for (beside, pid) in self.programs(site) {
            let now = high_water(pid)?;
            beside.idle = Some(beside.idle.map_or(now, |least| least.min(now)));
        }
        Ok(())
    }

    /// Note their peaks; before a program is stopped, and at the end.
    pub fn peak(&mut self, site: &Site) -> anyhow::Result<()> {
        for (beside, pid) in self.programs(site) {
            beside.peak = beside.peak.max(high_water(pid)?);
        }
        Ok(())
    }

    fn programs(&mut self, site: &Site) -> [(&mut Beside, u32); 2] {
        [(&mut self.materializer, site.materializer_pid()), (&mut self.puller, site.puller_pid())]
    }

    pub fn figures(&self) -> Vec<Figure> {
        let figure = |name: &str, beside: Beside| {
            Some(Figure::memory(format!("peak memory of the {name}, whole run"), beside.peak, beside.idle?, None))
        };
        [figure("materializer", self.materializer), figure("puller", self.puller)].into_iter().flatten().collect()
    }
}

/// One transaction that is larger than any buffer.
pub(super) fn one_transaction(options: &Options, site: &Site) -> anyhow::Result<Figure> {
    let rows = options.scaled(ROWS);
    let idle = high_water(site.materializer_pid())?;
    let before = site.wal_position()?;
    (options.say)(&format!("writing one transaction of {rows} rows"));
    site.write_in_one_transaction(rows)?;
    (options.say)("draining it");
    site.wait_until_materialized(before)?;
    let peak = high_water(site.materializer_pid())?;
    Ok(Figure::memory(
        format!("peak memory of the materializer, one transaction of {rows} rows"),
        peak,
        idle,
        Some(MOST_ADDED),
    ))
}

fn high_water(pid: u32) -> anyhow::Result<u64> {
    let text = field(&format!("/proc/{pid}/status"), "VmHWM");
    text.as_deref().and_then(kibibytes).with_context(|| format!("the peak memory of process {pid} is not known"))
}

//! How fast what was written while nobody followed is drained.
//!
//! Both sides drain the same WAL, one after the other, from a standing start: the time runs from the start of the
//! program, or from `ENABLE`, until the last transaction is visible.

use std::time::{Duration, Instant};

use super::Options;
use super::memory::Memory;
use super::site::Site;
use super::subscription::Subscription;
use super::table::Figure;

/// 1,000,000 rows, 1,000 in a transaction.
pub(super) fn bulk(options: &Options, site: &mut Site, memory: &mut Memory) -> anyhow::Result<Vec<Figure>> {
    let rows = options.scaled(1_000_000);
    let (ours, native) = both(site, memory, rows, 1000)?;
    let speed = |time: Duration| rows as f64 / time.as_secs_f64();
    Ok(vec![Figure::speed(
        format!("drain {rows} inserted rows of 200 B, 1,000 a transaction"),
        "rows/s",
        speed(ours),
        ("subscription", speed(native)),
        0.3,
    )])
}

/// 50,000 transactions of one row.
pub(super) fn single(options: &Options, site: &mut Site, memory: &mut Memory) -> anyhow::Result<Vec<Figure>> {
    let rows = options.scaled(50_000);
    let (ours, native) = both(site, memory, rows, 1)?;
    let speed = |time: Duration| rows as f64 / time.as_secs_f64();
    Ok(vec![Figure::speed(
        format!("drain {rows} one-row transactions"),
        "transactions/s",
        speed(ours),
        ("subscription", speed(native)),
        1.0,
    )])
}

fn both(site: &mut Site, memory: &mut Memory, rows: i64, each: i64) -> anyhow::Result<(Duration, Duration)> {
    memory.peak(site)?;
    site.stop_materializer()?;
    let subscription = Subscription::create(site)?;
    site.say(&format!("writing {rows} rows, {each} in a transaction"));
    let before_last = site.write(rows, each)?;

    site.say("draining with a subscription");
    site.checkpoint()?;
    let started = Instant::now();
    subscription.enable()?;
    subscription.wait_until_applied(rows)?;
    let native = started.elapsed();
    subscription.remove(site)?;

    site.say("draining with the materializer");
    site.checkpoint()?;
    let started = Instant::now();
    site.start_materializer()?;
    site.wait_until_materialized(before_last)?;
    let ours = started.elapsed();
    Ok((ours, native))
}

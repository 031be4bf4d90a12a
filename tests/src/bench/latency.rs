//! From commit to sight at 100 commits a second: of a client that pulls as fast as answers come, and of one that reads
//! a subscription's table as fast as answers come.
//!
//! A commit's time is when the writer learns of it. The writer commits synchronously and keeps its pace whatever the
//! others do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::Options;
use super::session::Session;
use super::site::Site;
use super::subscription::Subscription;
use super::table::Figure;
use crate::database::Database;

const COMMITS_PER_SECOND: i64 = 100;
/// Full length.
const SECONDS: i64 = 10;
/// Whose rows are written.
const OWNER: i64 = 7;
/// Rows of the scope before.
const ROWS: i64 = 1000;
/// Longest wait for the last row.
const PATIENCE: Duration = Duration::from_secs(30);
/// Greatest multiple of the subscription's time.
const TARGET: f64 = 2.0;

pub(super) fn measure(options: &Options, site: &mut Site) -> anyhow::Result<Vec<Figure>> {
    let commits = options.scaled(SECONDS * COMMITS_PER_SECOND).max(20);
    site.give(OWNER, 1, ROWS)?;
    let mut client = Session::open(site, &OWNER.to_string(), "latency", true)?;

    site.stop_materializer()?;
    let subscription = Subscription::create(site)?;
    subscription.enable()?;
    site.say(&format!("{commits} commits beside a subscription"));
    let mut last = ROWS;
    let native = observe(&site.sandbox.source_url(), ROWS + 1, commits, || {
        let rows = subscription.replica.query("select id from public.items where id > $1", &[&last])?;
        let ids: Vec<i64> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        last = ids.iter().copied().max().unwrap_or(last);
        Ok(ids)
    })?;
    subscription.remove(site)?;

    let before = site.wal_position()?;
    site.start_materializer()?;
    site.sandbox.wait_until_ready()?;
    // Drains what the subscription was given, so that both sides begin at rest.
    site.give(OWNER, ROWS + commits + 1, 1)?;
    site.wait_until_materialized(before)?;
    while client.pull()?.has_more {}
    site.say(&format!("{commits} commits beside a client that pulls"));
    let ours = observe(&site.sandbox.source_url(), ROWS + commits + 2, commits, || Ok(client.pull()?.ids))?;

    Ok([("median", 0.5), ("p99", 0.99)]
        .map(|(name, quantile)| {
            let name = format!("commit to pull at {COMMITS_PER_SECOND} commits/s, {name}");
            Figure::time(name, at(&ours, quantile), ("subscription", at(&native, quantile)), TARGET)
        })
        .into())
}

/// Commits rows from `first` on at their pace, while `look` says which rows have come into sight; the times between,
/// in ascending order.
fn observe(
    source_url: &str,
    first: i64,
    commits: i64,
    mut look: impl FnMut() -> anyhow::Result<Vec<i64>>,
) -> anyhow::Result<Vec<Duration>> {
    let source = Database::connect(source_url)?;
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let written = write(&source, first, commits);
            failed.store(written.is_err(), Ordering::Relaxed);
            written
        });
        let mut seen = HashMap::new();
        let mut progress = Instant::now();
        while (seen.len() as i64) < commits && !failed.load(Ordering::Relaxed) {
            let ids = look()?;
            let now = Instant::now();
            if !ids.is_empty() {
                progress = now;
            }
            seen.extend(ids.into_iter().filter(|id| *id >= first).map(|id| (id, now)));
            if now.duration_since(progress) > PATIENCE {
                bail!("rows do not come into sight");
            }
        }
        let committed = writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        let mut times = committed
            .iter()
            .map(|(id, at)| Ok(seen.get(id).context("a row was not seen")?.saturating_duration_since(*at)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        times.sort_unstable();
        Ok(times)
    })
}

fn write(source: &Database, first: i64, commits: i64) -> anyhow::Result<Vec<(i64, Instant)>> {
    let start = Instant::now();
    let pace = Duration::from_secs(1) / COMMITS_PER_SECOND as u32;
    let mut committed = Vec::with_capacity(commits as usize);
    for number in 0..commits {
        let due = pace * number as u32;
        thread::sleep(due.saturating_sub(start.elapsed()));
        let id = first + number;
        source.execute(
            "insert into public.items values ($1, $2, repeat('x', 184))",
            &[&id, &i32::try_from(OWNER)?],
        )?;
        committed.push((id, Instant::now()));
    }
    Ok(committed)
}

/// The time at a quantile of ascending times.
fn at(times: &[Duration], quantile: f64) -> Duration {
    let index = (times.len() as f64 * quantile).ceil() as usize;
    times.get(index.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(at(&times, 0.5), Duration::from_millis(50));
        assert_eq!(at(&times, 0.99), Duration::from_millis(99));
        assert_eq!(at(&times[..1], 0.99), Duration::from_millis(1));
    }
}

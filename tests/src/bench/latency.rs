//! From commit to sight at 100 commits a second: of a client that pulls as fast as answers come, and of one that reads
//! a subscription's table as fast as answers come.
//!
//! A commit begins when the writer sends COMMIT and is done when the writer learns of it; both times are told. The writer
//! commits synchronously and keeps its pace whatever the others do.

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

    let figure = |since: &str, name: &str, quantile, times: fn(&Sight) -> Duration| {
        Figure::time(
            format!("{since} to pull at {COMMITS_PER_SECOND} commits/s, {name}"),
            at(&ours, quantile, times),
            ("subscription", at(&native, quantile, times)),
            TARGET,
        )
    };
    Ok(vec![
        figure("COMMIT sent", "median", 0.5, |sight| sight.since_sent),
        figure("COMMIT sent", "p99", 0.99, |sight| sight.since_sent),
        figure("COMMIT answered", "median", 0.5, |sight| sight.since_answered),
        figure("COMMIT answered", "p99", 0.99, |sight| sight.since_answered),
    ])
}

/// How long a row took to come into sight.
#[derive(Debug, Clone, Copy)]
struct Sight {
    since_sent: Duration,
    since_answered: Duration,
}

/// A row's commit.
struct Commit {
    id: i64,
    sent: Instant,
    answered: Instant,
}

/// Commits rows from `first` on at their pace, while `look` says which rows have come into sight; the times between.
fn observe(
    source_url: &str,
    first: i64,
    commits: i64,
    mut look: impl FnMut() -> anyhow::Result<Vec<i64>>,
) -> anyhow::Result<Vec<Sight>> {
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
        let sight = |commit: &Commit| {
            let seen = seen.get(&commit.id).context("a row was not seen")?;
            Ok(Sight {
                since_sent: seen.saturating_duration_since(commit.sent),
                since_answered: seen.saturating_duration_since(commit.answered),
            })
        };
        committed.iter().map(sight).collect()
    })
}

fn write(source: &Database, first: i64, commits: i64) -> anyhow::Result<Vec<Commit>> {
    let start = Instant::now();
    let pace = Duration::from_secs(1) / COMMITS_PER_SECOND as u32;
    let mut committed = Vec::with_capacity(commits as usize);
    for number in 0..commits {
        let due = pace * number as u32;
        thread::sleep(due.saturating_sub(start.elapsed()));
        let id = first + number;
        source.run(&format!("begin; insert into public.items values ({id}, {OWNER}, repeat('x', 184))"))?;
        let sent = Instant::now();
        source.run("commit")?;
        committed.push(Commit { id, sent, answered: Instant::now() });
    }
    Ok(committed)
}

/// The time at a quantile, by nearest rank.
fn at(sights: &[Sight], quantile: f64, time: fn(&Sight) -> Duration) -> Duration {
    let mut times: Vec<Duration> = sights.iter().map(time).collect();
    times.sort_unstable();
    let index = (times.len() as f64 * quantile).ceil() as usize;
    times.get(index.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let sight = |time| Sight { since_sent: Duration::from_millis(time), since_answered: Duration::ZERO };
        let sights: Vec<Sight> = (1..=100).rev().map(sight).collect();
        let quantile = |part| at(&sights, part, |sight| sight.since_sent);
        assert_eq!(quantile(0.5), Duration::from_millis(50));
        assert_eq!(quantile(0.99), Duration::from_millis(99));
        assert_eq!(at(&[], 0.99, |sight| sight.since_sent), Duration::ZERO);
    }
}

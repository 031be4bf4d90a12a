//! A thousand clients at once: sessions over the same content share one snapshot, which is staged once.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tributary_tests::client::Client;
use tributary_tests::http::Response;
use tributary_tests::sandbox::{Options, eventually};

use super::{Boxes, post, record, refusal, until_let_in};

/// Whether the issue's own sizes are to be run; smaller ones otherwise.
pub fn full() -> bool {
    std::env::var_os("TRIBUTARY_TEST_FULL").is_some()
}

fn rows_for_everyone(rows: i64) -> String {
    format!("insert into items select n, 'nobody', 'row ' || n, true from generate_series(1, {rows}) n")
}

/// A page's records as a number, and its continuation. Unparsed: parsing a thousand pages takes longer than serving them.
fn outline(response: &Response) -> anyhow::Result<(u64, String)> {
    let text = std::str::from_utf8(&response.body)?;
    let (records, rest) = text.rsplit_once("],\"cursor\":\"").context("an intermediate page")?;
    let mut hasher = DefaultHasher::new();
    records.hash(&mut hasher);
    Ok((hasher.finish(), rest.split('"').next().unwrap_or_default().to_owned()))
}

/// What one of many clients saw.
struct Seen {
    pages: Vec<u64>,
    refusals: usize,
    first_page_after: Duration,
}

/// Fetches the first pages of everyone's scope, coming back as it is told to.
fn crowd_member(client: &Client, pages: usize) -> anyhow::Result<Seen> {
    let mut rebuild = client.start_rebuild("everyone", 1000);
    let mut seen = Seen { pages: Vec::new(), refusals: 0, first_page_after: Duration::ZERO };
    let started = Instant::now();
    while seen.pages.len() < pages {
        let response = post(client, &client.rebuild_request(&rebuild))?;
        if response.status == 200 {
            let (records, cursor) = outline(&response)?;
            if seen.pages.is_empty() {
                seen.first_page_after = started.elapsed();
            }
            seen.pages.push(records);
            rebuild.cursor = Some(cursor);
        } else {
            let (status, code) = refusal(&response)?;
            ensure!(status == 429 || status == 503, "{status} {code}");
            let wait = response.retry_after.as_deref().context("Retry-After")?.parse::<u64>()?;
            seen.refusals += 1;
            ensure!(started.elapsed() < Duration::from_secs(300), "never let in");
            thread::sleep(Duration::from_secs(wait));
        }
    }
    Ok(seen)
}

/// `count` clients of as many users, connected, spread over the pullers.
fn crowd(boxes: &Boxes, count: usize) -> anyhow::Result<Vec<Client>> {
    let connected: Vec<anyhow::Result<Vec<Client>>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..8)
            .map(|worker| {
                scope.spawn(move || {
                    (worker..count)
                        .step_by(8)
                        .map(|n| {
                            let mut client = boxes.fresh(&format!("c_{n}"), &format!("crowd-{n}"))?;
                            client.http.redirect(boxes.url(n % boxes.sandbox.pullers.len())?);
                            client.connect()?;
                            Ok(client)
                        })
                        .collect()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no panic")).collect()
    });
    Ok(connected.into_iter().collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// All of them at the same moment.
fn rush(clients: Vec<Client>, pages: usize) -> anyhow::Result<Vec<Seen>> {
    let gate = Arc::new(Barrier::new(clients.len()));
    let members: Vec<_> = clients
        .into_iter()
        .map(|client| {
            let gate = gate.clone();
            thread::Builder::new().stack_size(512 * 1024).spawn(move || {
                gate.wait();
                crowd_member(&client, pages)
            })
        })
        .collect::<Result<_, _>>()?;
    members.into_iter().map(|member| member.join().map_err(|_| anyhow::anyhow!("a client panicked"))?).collect()
}

fn staged(boxes: &Boxes) -> anyhow::Result<i64> {
    let mut staged = 0.0;
    for puller in 0..boxes.sandbox.pullers.len() {
        staged += boxes.metric(puller, "tributary_snapshots_staged_total")?;
    }
    Ok(staged as i64)
}

fn staged_once(pullers: usize, more: &[&str]) -> anyhow::Result<()> {
    let (clients, rows) = if full() { (1000, 100_000) } else { (200, 10_000) };
    let boxes = Boxes::start_with(
        &rows_for_everyone(rows),
        Options { pullers, puller_args: more.iter().map(Into::into).collect(), ..Options::default() },
    )?;
    let seen = rush(crowd(&boxes, clients)?, 3)?;
    let slowest = seen.iter().map(|seen| seen.first_page_after).max().unwrap_or_default();
    let refusals: usize = seen.iter().map(|seen| seen.refusals).sum();
    println!("{clients} clients, {rows} rows, {pullers} pullers: slowest first page {slowest:?}, {refusals} refusals");
    ensure!(seen.iter().all(|one| one.pages == seen[0].pages), "clients saw different pages");
    ensure!(staged(&boxes)? == 1, "staged {} times", staged(&boxes)?);
    let state = boxes.sandbox.state()?;
    ensure!(state.number("select count(*) from tributary.snapshot")? == 1, "one content, more than one snapshot");
    ensure!(state.number("select count(distinct snapshot_no) from tributary.rebuild_session")? == 1);
    ensure!(state.number("select count(*) from tributary.rebuild_session")? == clients as i64);
    // And it is the whole scope.
    let mut whole = boxes.client("whole", "whole")?;
    record(&mut whole, "everyone", 1000)?;
    super::compare(&whole, &boxes.sandbox.source()?, "whole")?;
    ensure!(staged(&boxes)? == 1);
    Ok(())
}

#[test]
fn many_clients_at_once_stage_a_scope_once() -> anyhow::Result<()> {
    staged_once(1, &[])
}

#[test]
fn many_clients_at_once_stage_a_scope_once_through_two_pullers() -> anyhow::Result<()> {
    staged_once(2, &[])
}

#[test]
fn surplus_clients_come_back_and_are_served() -> anyhow::Result<()> {
    staged_once(1, &["--max-staging-waiters", "20"])
}

/// A scope that never rests: one staging makes the sessions of all that wait when it begins, at one boundary.
#[test]
fn many_clients_at_once_share_a_scope_that_never_rests() -> anyhow::Result<()> {
    let (clients, rows) = if full() { (1000, 100_000) } else { (100, 10_000) };
    let boxes = Boxes::start(&rows_for_everyone(rows))?;
    let clients = crowd(&boxes, clients)?;
    let count = clients.len();
    let source = boxes.sandbox.source()?;
    let stop = std::sync::atomic::AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut writes = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                source.run(&format!("update items set body = 'write {writes}' where id = 1 + {writes} % 1000"))?;
                writes += 1;
                thread::sleep(Duration::from_millis(5));
            }
            anyhow::Ok(writes)
        });
        let seen = rush(clients, 2);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let writes = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        ensure!(writes > 10, "only {writes} writes");
        seen
    })?;
    let staged = staged(&boxes)?;
    let slowest = seen.iter().map(|seen| seen.first_page_after).max().unwrap_or_default();
    println!("{count} clients of a scope that never rests: staged {staged} times, slowest first page {slowest:?}");
    ensure!(staged <= 12, "staged {staged} times for {count} clients");
    // Each goes on from its own boundary.
    let source = boxes.sandbox.source()?;
    let mut whole = boxes.client("whole", "whole")?;
    boxes.settle(&mut whole, &source, "whole", 1000)?;
    Ok(())
}

/// Who waits for a staging is not one of the requests that are worked on: a crowd leaves pulls and connects their places.
#[test]
fn a_waiting_crowd_takes_no_places() -> anyhow::Result<()> {
    let args = ["--max-in-flight", "4"].map(Into::into).into();
    let boxes = Boxes::start_with(&rows_for_everyone(2000), Options { puller_args: args, ..Options::default() })?;
    let state = boxes.sandbox.state()?;
    let mut other = boxes.client("other", "other")?;
    let clients: Vec<_> =
        (0..12).map(|n| boxes.client(&format!("c_{n}"), &format!("crowd-{n}"))).collect::<anyhow::Result<_>>()?;
    // The staging stands still.
    state.run("begin; lock table tributary.snapshot_block in access exclusive mode")?;
    let answers: Vec<_> = thread::scope(|scope| {
        let requests: Vec<_> = clients
            .iter()
            .map(|client| {
                let request = client.rebuild_request(&client.start_rebuild("everyone", 1000));
                scope.spawn(move || until_let_in(client, &request))
            })
            .collect();
        let mut beside = || {
            // One stages.
            boxes.waiting(11)?;
            for _ in 0..5 {
                other.pull_all(10)?;
                other.connect()?;
            }
            boxes.waiting(11)
        };
        let beside = beside();
        state.run("rollback")?;
        beside?;
        requests
            .into_iter()
            .map(|request| request.join().map_err(|_| anyhow::anyhow!("panic"))?)
            .collect::<anyhow::Result<Vec<_>>>()
    })?;
    for answer in &answers {
        outline(answer)?;
    }
    ensure!(staged(&boxes)? == 1);
    Ok(())
}

/// While one stages, the setting's number wait; more are told to come back, and nobody else is held up.
#[test]
fn waiters_are_bounded_by_the_setting() -> anyhow::Result<()> {
    let args = ["--max-staging-waiters", "3"].map(Into::into).into();
    let boxes = Boxes::start_with(&rows_for_everyone(2000), Options { puller_args: args, ..Options::default() })?;
    let state = boxes.sandbox.state()?;
    let clients = crowd(&boxes, 10)?;
    // The staging stands still.
    state.run("begin; lock table tributary.snapshot_block in access exclusive mode")?;
    let answers: Vec<_> = thread::scope(|scope| {
        let requests: Vec<_> = clients
            .iter()
            .map(|client| {
                scope.spawn(move || post(client, &client.rebuild_request(&client.start_rebuild("everyone", 1000))))
            })
            .collect();
        let others = || {
            eventually(super::PATIENCE, || {
                // Ten connected before; one stages, three wait.
                let refused = boxes.metric(0, "tributary_requests_total")? - 10.0;
                ensure!(refused >= 6.0, "{refused} refusals");
                Ok(())
            })?;
            // Somebody else goes on: another scope, and pulls.
            let mut other = boxes.client("other", "other")?;
            other.rebuild("box:other", 10)?;
            other.pull_all(10)?;
            anyhow::Ok(())
        };
        let others = others();
        state.run("rollback")?;
        others?;
        requests
            .into_iter()
            .map(|request| request.join().map_err(|_| anyhow::anyhow!("panic"))?)
            .collect::<anyhow::Result<Vec<_>>>()
    })?;
    let refused: Vec<_> = answers.iter().filter(|answer| answer.status != 200).collect();
    ensure!(refused.len() == 6, "{} of 10 were refused", refused.len());
    for answer in refused {
        ensure!(refusal(answer)? == (429, "rate_limited".to_owned()));
        ensure!(answer.retry_after.as_deref() == Some("1"));
    }
    // Everyone's scope and the other one.
    ensure!(staged(&boxes)? == 2);
    // Whoever was refused comes back.
    for client in &clients {
        outline(&post(client, &client.rebuild_request(&client.start_rebuild("everyone", 1000)))?)?;
    }
    ensure!(staged(&boxes)? == 2);
    Ok(())
}

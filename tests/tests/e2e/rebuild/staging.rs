//! Staging is all or nothing, in flat memory, and in nobody's way; what no session needs is removed.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::http::Response;
use tributary_tests::sandbox::{Options, eventually};

use super::shared::full;
use super::{Boxes, PATIENCE, items, ok, post, refusal, until_let_in};

/// A table lock that no staging passes: the middle of one, for as long as the test wants.
const STAND_STILL: &str = "begin; lock table tributary.snapshot_block in access exclusive mode";

fn stands_still(watcher: &Database) -> anyhow::Result<()> {
    eventually(PATIENCE, || {
        let waiting =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%add_block%'";
        ensure!(watcher.number(waiting)? > 0, "no staging is in its middle");
        Ok(())
    })
}

fn nothing_is_left(state: &Database) -> anyhow::Result<()> {
    // PostgreSQL learns that a client is gone when it next answers it.
    eventually(PATIENCE, || {
        let running = "select count(*) from pg_stat_activity where query like '%add_block%' and state <> 'idle' and pid <> pg_backend_pid()";
        ensure!(state.number(running)? == 0, "the staging's transaction still runs");
        for table in ["snapshot", "snapshot_block", "rebuild_session"] {
            ensure!(state.number(&format!("select count(*) from tributary.{table}"))? == 0, "a {table} is left");
        }
        Ok(())
    })
}

/// Something ends a staging in its middle: what the client was told, after `end`; nothing is left, and the same request
/// succeeds after `mend`.
fn interrupted(
    puller_args: &[&str],
    end: impl FnOnce(&mut Boxes) -> anyhow::Result<()>,
    told: impl FnOnce(Option<Response>) -> anyhow::Result<()>,
    mend: impl FnOnce(&mut Boxes) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let options = Options { puller_args: puller_args.iter().map(Into::into).collect(), ..Options::default() };
    let mut boxes = Boxes::start_with(&items("u_1", 1, 3000), options)?;
    let (state, watcher) = (boxes.sandbox.state()?, boxes.sandbox.state()?);
    let mut client = boxes.client("u_1", "interrupted")?;
    let mut rebuild = client.start_rebuild("box:u_1", 1000);
    let request = client.rebuild_request(&rebuild);
    state.run(STAND_STILL)?;
    let answer = thread::scope(|scope| {
        let asking = scope.spawn(|| post(&client, &request));
        let ended = stands_still(&watcher).and_then(|()| end(&mut boxes));
        let answer = asking.join().map_err(|_| anyhow::anyhow!("panic"))?;
        state.run("rollback")?;
        ended?;
        anyhow::Ok(answer.ok())
    })?;
    told(answer)?;
    nothing_is_left(&watcher)?;
    mend(&mut boxes)?;
    // The same request succeeds; a client comes back after each 503, as it is told to.
    eventually(PATIENCE, || {
        while !rebuild.finished {
            match client.rebuild_page(&mut rebuild) {
                Err(error @ ClientError::Api { status: 503, .. }) => return Err(error.into()),
                outcome => drop(outcome.map_err(|error| panic!("{error}"))),
            }
        }
        Ok(())
    })?;
    super::compare(&client, &boxes.sandbox.source()?, "u_1")?;
    ensure!(watcher.number("select count(*) from tributary.snapshot")? == 1);
    Ok(())
}

fn unavailable(answer: Option<Response>) -> anyhow::Result<()> {
    let answer = answer.context("no answer")?;
    ensure!(refusal(&answer)? == (503, "temporary_unavailable".to_owned()));
    ensure!(answer.retry_after.is_some());
    Ok(())
}

#[test]
fn a_killed_puller_leaves_nothing_of_a_staging() -> anyhow::Result<()> {
    interrupted(
        &[],
        |boxes| {
            boxes.sandbox.pullers[0].process.kill();
            Ok(())
        },
        |answer| {
            ensure!(answer.is_none(), "a dead puller answered");
            Ok(())
        },
        |boxes| {
            boxes.sandbox.pullers[0].process.restart()?;
            boxes.sandbox.wait_until_ready()
        },
    )
}

#[test]
fn a_statement_timeout_leaves_nothing_of_a_staging() -> anyhow::Result<()> {
    interrupted(&["--statement-timeout-seconds", "1"], |_| Ok(()), unavailable, |_| Ok(()))
}

#[test]
fn a_lost_session_leaves_nothing_of_a_staging() -> anyhow::Result<()> {
    interrupted(
        &[],
        |boxes| {
            let sql = "select pg_terminate_backend(pid) from pg_stat_activity
                where wait_event_type = 'Lock' and query like '%add_block%'";
            boxes.sandbox.state()?.run(sql)
        },
        unavailable,
        |_| Ok(()),
    )
}

#[test]
fn a_terminated_puller_says_so_and_leaves_nothing_of_a_staging() -> anyhow::Result<()> {
    interrupted(
        &[],
        |boxes| {
            let process = &mut boxes.sandbox.pullers[0].process;
            process.signal(Signal::TERM);
            ensure!(process.ended_within(PATIENCE), "it does not end");
            // Told in time, rather than cut off at the end of the grace period.
            let log = fs::read_to_string(&process.launch().log)?;
            ensure!(log.contains("draining") && !log.contains("grace period"), "told too late");
            Ok(())
        },
        unavailable,
        |boxes| {
            boxes.sandbox.pullers[0].process.restart()?;
            boxes.sandbox.wait_until_ready()
        },
    )
}

/// A client that gives up does not undo the work: its retry finds it done, or waits for it.
#[test]
fn a_lost_request_does_not_lose_the_staging() -> anyhow::Result<()> {
    let boxes = Boxes::start(&items("u_1", 1, 3000))?;
    let (state, watcher) = (boxes.sandbox.state()?, boxes.sandbox.state()?);
    let client = boxes.client("u_1", "impatient")?;
    let request = client.rebuild_request(&client.start_rebuild("box:u_1", 1000)).canonical()?;
    state.run(STAND_STILL)?;
    {
        let url = boxes.url(0)?.trim_start_matches("http://").to_owned();
        let mut socket = std::net::TcpStream::connect(&url)?;
        let head = format!(
            "POST /sync/rebuild HTTP/1.1\r\nHost: {url}\r\nContent-Type: application/json\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n{request}",
            boxes.sandbox.lasting_token("u_1")?,
            request.len()
        );
        std::io::Write::write_all(&mut socket, head.as_bytes())?;
        stands_still(&watcher)?;
    }
    // The client's own pulls and connects go on beside it.
    let mut beside = boxes.client("u_1", "impatient-too")?;
    beside.rebuild("everyone", 10)?;
    thread::sleep(Duration::from_millis(300));
    stands_still(&watcher)?;
    state.run("rollback")?;
    let page = client.http.post("/sync/rebuild", request.as_bytes())?;
    ok(&page)?;
    // Beside the other's.
    ensure!(boxes.metric(0, "tributary_snapshots_staged_total")? as i64 == 2, "the work was done again");
    ensure!(watcher.number("select count(*) from tributary.rebuild_session where page_limit = 1000")? == 1);
    Ok(())
}

/// A client's own pulls write its row (assignment, time of acknowledgement): they must not wait for its rebuild.
#[test]
fn a_clients_pulls_do_not_wait_for_its_own_rebuild() -> anyhow::Result<()> {
    let boxes = Boxes::start(&items("u_1", 1, 3000))?;
    let (state, watcher) = (boxes.sandbox.state()?, boxes.sandbox.state()?);
    let mut client = boxes.client("u_1", "busy")?;
    client.rebuild("everyone", 10)?;
    watcher.run("update tributary.client set acknowledged_at = acknowledged_at - interval '1 hour'")?;
    let twin =
        Client { generation: client.generation, manifest: client.manifest.clone(), ..boxes.fresh("u_1", "busy")? };
    let request = twin.rebuild_request(&twin.start_rebuild("box:u_1", 1000));
    state.run(STAND_STILL)?;
    thread::scope(|scope| {
        let asking = scope.spawn(|| post(&twin, &request));
        let pulled = stands_still(&watcher).and_then(|()| {
            let request = client.pull_request(10).canonical()?;
            let page = client.http.post("/sync/pull", request.as_bytes())?;
            ensure!(page.status == 200, "{}", String::from_utf8_lossy(&page.body));
            stands_still(&watcher)
        });
        state.run("rollback")?;
        ok(&asking.join().map_err(|_| anyhow::anyhow!("panic"))??)?;
        pulled
    })?;
    ensure!(
        watcher.number("select count(*) from tributary.client where acknowledged_at > now() - interval '5 min'")? == 1
    );
    Ok(())
}

/// Many scopes at once: stagings share a part of the sessions, those in their turn wait apart from the requests that are
/// worked on, and pulls have the rest of both.
#[test]
fn stagings_take_neither_all_sessions_nor_all_places() -> anyhow::Result<()> {
    let seed: String = (0..6).map(|n| items(&format!("s_{n}"), 1 + n * 1000, 10)).collect();
    // One staging at a time; each rebuild passes through a place, and one stays in it.
    let args = ["--pool-size", "4", "--max-in-flight", "3", "--pool-wait-millis", "60000"].map(Into::into).into();
    let boxes = Boxes::start_with(&seed, Options { puller_args: args, ..Options::default() })?;
    let (state, watcher) = (boxes.sandbox.state()?, boxes.sandbox.state()?);
    let mut puller = boxes.client("other", "other")?;
    puller.sync(10)?;
    let clients =
        (0..6).map(|n| boxes.client(&format!("s_{n}"), &format!("s-{n}"))).collect::<anyhow::Result<Vec<_>>>()?;
    state.run(STAND_STILL)?;
    thread::scope(|scope| {
        let asking: Vec<_> = clients
            .iter()
            .enumerate()
            .map(|(n, client)| {
                let rebuild = client.start_rebuild(&format!("box:s_{n}"), 10);
                scope.spawn(move || until_let_in(client, &client.rebuild_request(&rebuild)))
            })
            .collect();
        let pulled = stands_still(&watcher).and_then(|()| {
            boxes.waiting(5)?;
            for _ in 0..5 {
                puller.pull_all(10)?;
                puller.connect()?;
            }
            stands_still(&watcher)
        });
        state.run("rollback")?;
        pulled?;
        for request in asking {
            ok(&request.join().map_err(|_| anyhow::anyhow!("panic"))??)?;
        }
        Ok(())
    })
}

/// Resident memory of a process, in octets.
fn resident(pid: u32) -> anyhow::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("VmRSS")?;
    Ok(line.split_ascii_whitespace().nth(1).context("a number")?.parse::<u64>()? * 1024)
}

#[test]
fn a_large_scope_is_staged_in_flat_memory_and_in_nobodys_way() -> anyhow::Result<()> {
    let rows = if full() { 1_000_000 } else { 60_000 };
    let seed = format!(
        "insert into items select n, 'u_1', repeat(md5(n::text), 20) from generate_series(1, {rows}) n; {}",
        items("u_2", 2_000_000, 100)
    );
    let options = Options { ready_within: Duration::from_secs(600), ..Options::default() };
    let boxes = Boxes::start_with(&seed, options)?;
    let (source, state) = (boxes.sandbox.source()?, boxes.sandbox.state()?);
    let pid = boxes.sandbox.pullers[0].process.pid();
    let client = boxes.client("u_1", "large")?;
    let mut other = boxes.client("u_2", "small")?;
    other.sync(100)?;
    let before = resident(pid)?;
    let done = AtomicBool::new(false);
    let watcher = boxes.sandbox.state()?;
    state.run(STAND_STILL)?;
    let (peak, pulls) = thread::scope(|scope| {
        let memory = scope.spawn(|| {
            let mut peak = 0;
            while !done.load(Ordering::Relaxed) {
                peak = peak.max(resident(pid)?);
                thread::sleep(Duration::from_millis(5));
            }
            anyhow::Ok(peak)
        });
        let beside = scope.spawn(|| {
            let mut pulls = 0;
            let mut round = || {
                source.run(&format!("update items set body = 'beside {pulls}' where box = 'u_2'"))?;
                boxes.materialized(&source)?;
                ensure!(other.pull_all(1000)? > 0, "a commit is not delivered");
                pulls += 1;
                anyhow::Ok(())
            };
            // Commits are materialized and delivered while the staging is in its middle, whatever it takes.
            let amid = stands_still(&watcher).and_then(|()| {
                (0..3).try_for_each(|_| round())?;
                stands_still(&watcher)
            });
            state.run("rollback")?;
            amid?;
            while !done.load(Ordering::Relaxed) {
                round()?;
            }
            anyhow::Ok(pulls)
        });
        let started = Instant::now();
        let request = client.rebuild_request(&client.start_rebuild("box:u_1", 1000));
        let staged = loop {
            // A staging that takes longer than a request may is asked for again.
            let page = post(&client, &request);
            match page {
                Ok(page) if page.status == 503 => {
                    ensure!(started.elapsed() < Duration::from_secs(600), "never staged");
                }
                other => break other,
            }
        };
        let took = started.elapsed();
        done.store(true, Ordering::Relaxed);
        ok(&staged?)?;
        println!("{rows} rows staged in {took:?}");
        let peak = memory.join().map_err(|_| anyhow::anyhow!("panic"))??;
        let pulls = beside.join().map_err(|_| anyhow::anyhow!("panic"))??;
        anyhow::Ok((peak, pulls))
    })?;
    let data = state.number("select sum(byte_count)::bigint from tributary.snapshot")? as u64;
    let grown = peak.saturating_sub(before);
    println!("{data} octets staged, {grown} octets more memory; {pulls} pulls beside");
    ensure!(state.number("select max(row_count) from tributary.snapshot")? == rows);
    ensure!(grown < 32 << 20, "memory grew by {grown} octets for {data} staged");
    ensure!(data > 40 << 20 || !full(), "too little data to tell");
    ensure!(pulls >= 3);
    Ok(())
}

#[test]
fn snapshots_without_a_live_session_are_removed() -> anyhow::Result<()> {
    let boxes = Boxes::start_with(
        &items("u_1", 1, 50),
        Options {
            materializer_args: ["--snapshot-grace-seconds", "1", "--lease-seconds", "1"].map(Into::into).into(),
            ..Options::default()
        },
    )?;
    let (source, state) = (boxes.sandbox.source()?, boxes.sandbox.state()?);
    let client = boxes.client("u_1", "old")?;
    let old = boxes.begun(&client, 10)?;
    source.run("update items set body = 'newer'")?;
    boxes.materialized(&source)?;
    let live = boxes.begun(&client, 10)?;
    // The first session is of yesterday; both snapshots are older than the grace, and a great many have no session.
    state.run(&format!(
        "update tributary.rebuild_session set created_at = created_at - interval '25 hours', expires_at = expires_at - interval '25 hours'
            where rebuild_id = '{}';
         update tributary.snapshot set created_at = created_at - interval '25 hours';
         insert into tributary.snapshot (scope_no, stream_generation, schema_version, membership_generation, content_lsn,
             content_ordinal, row_count, byte_count, digest, seal, created_at)
         select scope_no, stream_generation, schema_version, membership_generation, content_lsn, content_ordinal - n,
             1, 1000, digest, seal, created_at from tributary.snapshot, generate_series(1, 100) n;
         insert into tributary.snapshot_block (snapshot_no, block_no, first_row, record_ends, records, seal)
         select snapshot_no, 0, 0, '{{1}}', 'x', 'x' from tributary.snapshot where byte_count = 1000",
        old.rebuild_id
    ))?;
    eventually(PATIENCE, || {
        let left = state.number("select count(*) from tributary.snapshot")?;
        ensure!(left == 1, "{left} snapshots are left");
        ensure!(state.number("select count(*) from tributary.rebuild_session")? == 1);
        Ok(())
    })?;
    ensure!(state.number("select count(distinct snapshot_no) from tributary.snapshot_block")? == 1);
    ok(&post(&client, &client.rebuild_request(&live))?)?;
    let over = refusal(&post(&client, &client.rebuild_request(&old))?)?;
    ensure!(over == super::restart_required());
    Ok(())
}

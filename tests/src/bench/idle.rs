//! Pulls that find no change, beside a bare handler behind the same HTTP server with as many database sessions.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::Options;
use super::bare;
use super::keep_alive::KeepAlive;
use super::session::Session;
use super::site::Site;
use super::table::Figure;
use crate::processes::{Launch, Process};
use crate::sandbox::eventually;

const CONNECTIONS: i64 = 32;
/// Full length.
const MILLISECONDS: i64 = 6000;
/// Before it counts.
const WARM_UP: Duration = Duration::from_millis(500);
/// State sessions of both: the puller's default.
const POOL: usize = 16;
/// Least part of the bare handler's speed.
const TARGET: f64 = 0.3;

pub(super) fn measure(options: &Options, site: &Site) -> anyhow::Result<Vec<Figure>> {
    let time = Duration::from_millis(options.scaled(MILLISECONDS).max(500).unsigned_abs());
    let mut pullers = Vec::new();
    for number in 0..CONNECTIONS {
        // Something to have no changes of.
        site.give(number, number * 100 + 1, 100)?;
        let session = Session::open(site, &number.to_string(), &format!("idle-{number}"), true)?;
        let request = session.pull_request();
        pullers.push((session.into_connection(), request));
    }
    site.say("pulls without changes");
    let ours = requests_per_second(pullers, time)?;

    let address = format!("127.0.0.1:{}", crate::ports::choose(0, 1)?[0]);
    let _handler = start_bare(site, &address)?;
    let connect = || Ok((eventually(Duration::from_secs(10), || KeepAlive::open(&address, "none"))?, Vec::new()));
    let bare = (0..CONNECTIONS).map(|_| connect()).collect::<anyhow::Result<Vec<_>>>()?;
    site.say("the bare handler");
    let bare = requests_per_second(bare, time)?;
    Ok(vec![Figure::speed(
        format!("pulls without changes, 3 scopes, {CONNECTIONS} connections"),
        "requests/s",
        ours,
        ("bare handler", bare),
        TARGET,
    )])
}

fn start_bare(site: &Site, address: &str) -> anyhow::Result<Process> {
    let launch = Launch {
        name: "bare handler".to_owned(),
        program: std::env::current_exe().context("the path of this program")?,
        args: vec![
            bare::COMMAND.into(),
            "--listen".into(),
            address.into(),
            "--pool-size".into(),
            POOL.to_string().into(),
        ],
        env: vec![(bare::STATE_URL.to_owned(), site.sandbox.state_url().into())],
        log: site.sandbox.dir().join("log/bare.log"),
        user: None,
        on_parent_death: "TERM",
    };
    Ok(launch.start()?)
}

/// Every connection sends its request again as soon as it is answered.
fn requests_per_second(connections: Vec<(KeepAlive, Vec<u8>)>, time: Duration) -> anyhow::Result<f64> {
    let start = Barrier::new(connections.len());
    let answered = thread::scope(|scope| {
        let workers: Vec<_> = connections
            .into_iter()
            .map(|(mut connection, request)| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let begin = Instant::now() + WARM_UP;
                    let mut answered = 0_u64;
                    loop {
                        connection.post("/sync/pull", &request)?;
                        let now = Instant::now();
                        if now > begin + time {
                            return anyhow::Ok(answered);
                        }
                        answered += u64::from(now > begin);
                    }
                })
            })
            .collect();
        let counts = workers
            .into_iter()
            .map(|worker| worker.join().map_err(|_| anyhow::anyhow!("a connection's thread panicked"))?);
        counts.sum::<anyhow::Result<u64>>()
    })?;
    Ok(answered as f64 / time.as_secs_f64())
}

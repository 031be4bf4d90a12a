//! Faults: whatever breaks, nothing is lost, nothing comes twice, and what cannot go on says so.

mod crash;
mod idle;
mod leader;
mod network;
mod poison;
mod rolling;
mod slot;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::http;
use tributary_tests::sandbox::{Sandbox, Service, eventually};

use crate::sample::settle;

/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a probe of the admin port says.
fn readiness(service: &Service) -> String {
    http::get(&format!("{}/readyz", service.admin_url))
        .map(|response| String::from_utf8_lossy(&response.body).trim().to_owned())
        .unwrap_or_default()
}

/// The value of a metric without labels.
fn metric(service: &Service, name: &str) -> Option<f64> {
    let response = http::get(&format!("{}/metrics", service.admin_url)).ok()?;
    let text = String::from_utf8_lossy(&response.body).into_owned();
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// The materializer that leads.
fn leading(sandbox: &Sandbox) -> anyhow::Result<usize> {
    let leads = |service: &Service| readiness(service) == "ready: leader";
    sandbox.materializers.iter().position(leads).context("nobody leads")
}

/// The user of a polling client: the sample has twenty.
fn user(number: usize) -> String {
    format!("u_{}", (number - 1) % 20 + 1)
}

/// Clients that poll in threads of their own, through all pullers in turn.
struct Polling {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    threads: Vec<thread::JoinHandle<anyhow::Result<Polled>>>,
}

/// What became of a polling client.
struct Polled {
    client: Client,
    /// Error answers by code.
    refused: BTreeMap<String, usize>,
}

impl Polling {
    /// Starts clients of different users, and waits until each holds its copy. Only answers that are retryable, and
    /// those of `expected` codes, are no failure.
    fn start(sandbox: &Sandbox, clients: usize, expected: &'static [&'static str], name: &str) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicUsize::new(0));
        let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
        let mut threads = Vec::new();
        for number in 1..=clients {
            let mut client = sandbox.client(&user(number), &format!("{name}-{number}"))?;
            client.sync(100)?;
            let (stop, answered, urls) = (stop.clone(), answered.clone(), urls.clone());
            threads.push(thread::spawn(move || {
                let mut refused = BTreeMap::new();
                let mut turn = number;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    client.http.redirect(&urls[turn % urls.len()]);
                    match client.sync(100) {
                        Ok(()) => {
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(ClientError::Api { status, code, .. })
                            if matches!(status, 429 | 503) || expected.contains(&code.as_str()) =>
                        {
                            *refused.entry(code).or_default() += 1;
                        }
                        Err(ClientError::Transport(_)) => *refused.entry("no answer".to_owned()).or_default() += 1,
                        Err(error) => return Err(error.into()),
                    }
                    thread::sleep(Duration::from_millis(20));
                }
                Ok(Polled { client, refused })
            }));
        }
        Ok(Self { stop, answered, threads })
    }

    /// Waits until each client has on average been answered this often, from now on.
    fn answered_again(&self, times: usize) -> anyhow::Result<()> {
        let wanted = self.answered.load(Ordering::Relaxed) + times * self.threads.len();
        eventually(PATIENCE, || {
            let ended = self.threads.iter().any(thread::JoinHandle::is_finished);
            ensure!(ended || self.answered.load(Ordering::Relaxed) >= wanted, "the clients are not answered");
            Ok(())
        })
    }

    /// Stops them; each has its last word.
    fn end(self) -> anyhow::Result<Vec<Polled>> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))?)
            .collect()
    }
}

/// Two clients of the first user, the one that pulled all along and a fresh one, hold what the source holds.
fn agree(sandbox: &Sandbox, client: &mut Client, source: &Database, fresh: &str) -> anyhow::Result<()> {
    settle(client, source, "u_1", 100)?;
    let mut rebuilt = sandbox.client("u_1", fresh)?;
    settle(&mut rebuilt, source, "u_1", 1000)?;
    ensure!(client.rows == rebuilt.rows, "pulled and rebuilt rows differ");
    Ok(())
}

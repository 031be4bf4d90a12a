//! A rolling restart of every program under fifty polling clients and writes: nothing but retryable errors, and no
//! rebuild.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::ensure;
use rustix::process::Signal;
use tributary_tests::sandbox::{Options, Sandbox, Service};

use super::{PATIENCE, Polling, user};
use crate::restart::writer;
use crate::sample::settle;

const CLIENTS: usize = 50;

fn roll(service: &mut Service) -> anyhow::Result<()> {
    service.process.signal(Signal::TERM);
    ensure!(service.process.ended_within(PATIENCE), "{} stays", service.process.name());
    ensure!(
        service.process.exited().is_some_and(|status| status.success()),
        "{}: no orderly end",
        service.process.name()
    );
    service.process.restart()?;
    Ok(())
}

#[test]
fn a_rolling_restart_under_load_costs_no_client_a_rebuild() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { pullers: 2, materializers: 2, ..Options::default() })?;
    let polling = Polling::start(&sandbox, CLIENTS, &[], "rolling")?;
    let stop = Arc::new(AtomicBool::new(false));
    let writing = writer(sandbox.source_url(), stop.clone());
    let outcome = (|| -> anyhow::Result<()> {
        for number in 0..2 {
            polling.answered_again(1)?;
            roll(&mut sandbox.pullers[number])?;
            sandbox.wait_until_ready()?;
            roll(&mut sandbox.materializers[number])?;
            sandbox.wait_until_ready()?;
        }
        polling.answered_again(1)
    })();
    stop.store(true, Ordering::Relaxed);
    writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    let source = sandbox.source()?;
    let ended = polling.end()?;
    outcome?;
    ensure!(ended.len() == CLIENTS);
    for (number, polled) in ended.into_iter().enumerate() {
        let mut client = polled.client;
        let (scopes, begun) = (client.scopes.len(), client.rebuilds.values().sum::<usize>());
        ensure!(begun == scopes, "{begun} rebuilds of {scopes} scopes; refused: {:?}", polled.refused);
        // A tenth of them against SELECT; every answer of all was verified when it came.
        if number % 10 == 0 {
            settle(&mut client, &source, &user(number + 1), 100)?;
        }
    }
    Ok(())
}

//! The materializer: one leader follows the source's replication stream and writes the sync state; others stand by.

mod apply;
mod assemble;
mod baseline;
mod diagnosis;
mod doctor;
mod failpoint;
mod lead;
mod materialize;
mod membership;
mod meters;
mod pgoutput;
mod preflight;
mod pulse;
mod replication;
mod reset;
mod settings;
mod status;
mod stream;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use tributary_shared::service::health::Health;
use tributary_shared::service::logs::{self, LogFormat};
use tributary_shared::service::{admin, probe, shutdown};
use tributary_shared::store::{self, configuration, leader, migrate, progress, quarantine, session};
use uuid::Uuid;

use crate::lead::Materializer;
use crate::settings::{CheckSettings, Cli, Command, Databases, ResetSettings, RunSettings};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sessions with the state database: writer, heartbeat, scopes, housekeeping; a baseline takes two a worker more.
const STATE_SESSIONS: usize = 6;

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if let Command::Health(settings) = &command {
        return probe::report(settings.admin_listen, settings.live);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(async {
        match command {
            Command::Run(settings) => run(settings).await?,
            Command::Check(settings) => check(settings).await?,
            Command::Apply(settings) => apply::dry_run(&settings).await?,
            Command::Migrate(databases) => migrate_all(databases).await?,
            Command::Retry(databases) => retry(databases).await?,
            Command::Status(settings) => return status::print(settings).await,
            Command::Doctor(settings) => return doctor::print(settings).await,
            Command::Reset(settings) => reset(settings).await?,
            // Answered above, without a runtime.
            Command::Health(_) => {}
        }
        anyhow::Ok(ExitCode::SUCCESS)
    });
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(settings: RunSettings) -> anyhow::Result<()> {
    logs::install(settings.log_format);
    if let Some(point) = settings.failpoint.clone() {
        failpoint::arm(point);
    }
    let stop = shutdown::token().context("cannot watch signals")?;
    let metrics = admin::install_metrics().context("metrics")?;
    let health = Health::new("materializer");
    let listener = admin::listen(settings.admin_listen, "--admin-listen").await?;
    let admin_stop = tokio_util::sync::CancellationToken::new();
    let admin = tokio::spawn(admin::serve(listener, health.clone(), metrics, admin_stop.clone()));

    // Everything is checked before anything is made.
    let mut source_db = preflight::connect(&settings.databases.source_url, "source").await?;
    preflight::check_server(&source_db, &settings).await?;
    let mut state_db = preflight::connect(settings.databases.state(), "state").await?;
    preflight::check_state(&state_db).await?;
    let holder = Uuid::new_v4();
    let size = STATE_SESSIONS + 2 * usize::from(settings.baseline_workers);
    let state =
        session::pool(settings.databases.state(), &leader::application_name(holder), size, Duration::from_secs(10))?;
    let previous = stored_registry(&state).await?;
    let (registry, warnings) = preflight::registry(&mut source_db, &settings.config, previous.as_ref()).await?;
    if let Some(previous) = &previous
        && *previous != registry
    {
        bail!(
            "{} differs from the configuration in force, and this version cannot change a configuration that has a \
             baseline: restore the file; `materializer apply --dry-run` says what differs",
            settings.config.display()
        );
    }
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    let applied = migrate::state(&mut state_db).await? + migrate::source(&mut source_db).await?;
    tracing::info!(applied, source = %settings.databases.source_url, state = %settings.databases.state(), "schemas are up to date");
    drop((source_db, state_db));

    meters::register(&registry);
    let grace = Duration::from_secs(settings.grace_seconds);
    let materializer = Materializer {
        settings,
        registry: Arc::new(registry),
        state,
        health: health.clone(),
        holder,
        stop: stop.clone(),
    };
    let mut work = tokio::spawn(async move { materializer.run().await });
    tokio::select! {
        // It ends by itself only by a panic, which a supervisor's restart may mend and silence would not.
        ended = &mut work => ended.context("the materializer ended")?,
        () = stop.cancelled() => {
            health.unready("draining");
            if tokio::time::timeout(grace, work).await.is_err() {
                tracing::warn!("the running state transaction was not finished in time; it is rolled back");
            }
        }
    }
    admin_stop.cancel();
    admin.abort();
    Ok(())
}

/// The registry in force, if the state has one already.
async fn stored_registry(state: &session::Pool) -> anyhow::Result<Option<tributary_shared::registry::Registry>> {
    let db = session::acquire(state).await?;
    if !migrate::is_migrated(&db).await? {
        return Ok(None);
    }
    let Some(progress) = progress::load(&db).await? else { return Ok(None) };
    Ok(Some(configuration::load(&db, progress.configuration_no).await?.registry))
}

async fn check(settings: CheckSettings) -> anyhow::Result<()> {
    let mut source_db = preflight::connect(&settings.source_url, "source").await?;
    let (registry, warnings) = preflight::registry(&mut source_db, &settings.config, None).await?;
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    eprintln!(
        "{}: {} tables, {} rules: no problem found",
        settings.config.display(),
        registry.tables.len(),
        registry.rules.len()
    );
    Ok(())
}

async fn migrate_all(databases: Databases) -> anyhow::Result<()> {
    logs::install(LogFormat::Human);
    let mut source_db = preflight::connect(&databases.source_url, "source").await?;
    let mut state_db = preflight::connect(databases.state(), "state").await?;
    preflight::check_state(&state_db).await?;
    let state = migrate::state(&mut state_db).await?;
    let source = migrate::source(&mut source_db).await?;
    tracing::info!(state, source, "migrations applied");
    Ok(())
}

async fn retry(databases: Databases) -> anyhow::Result<()> {
    let pool = session::pool(databases.state(), "tributary-materializer", 1, Duration::from_secs(10))?;
    let db = session::acquire(&pool).await?;
    let cases = quarantine::resolve(&db).await?;
    eprintln!("{cases} quarantined transactions will be tried again");
    Ok(())
}

async fn reset(settings: ResetSettings) -> anyhow::Result<()> {
    let mut state_db = preflight::connect(settings.databases.state(), "state").await?;
    let pool = session::pool(settings.databases.state(), "tributary-materializer", 1, Duration::from_secs(10))?;
    let db = session::acquire(&pool).await?;
    if !migrate::is_migrated(&db).await? {
        bail!("the state database holds no state: there is nothing to reset");
    }
    // The materializers may be of the former release, or not run at all.
    migrate::state(&mut state_db).await?;
    if progress::load(&db).await?.is_none() {
        bail!("no baseline is active yet: a materializer takes one at its start");
    }
    let number = store::reset::request(&db).await?;
    let alive = leader::silence(&db).await?.is_some_and(|silence| silence < Duration::from_secs(60));
    drop(db);
    eprintln!("reset {number} is requested; `materializer status` tells how it goes");
    if !alive {
        eprintln!("no materializer leads now: the next one that does carries it out");
    }
    if settings.wait {
        let generation = reset::wait(&pool, number).await?;
        eprintln!("stream generation {generation} is active: every client rebuilds once");
    }
    Ok(())
}

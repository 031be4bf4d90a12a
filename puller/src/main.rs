//! The puller: stateless; any number of them serve one state.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use puller::app::App;
use puller::auth::{Authenticator, JwtVerifier};
use puller::digests::Digests;
use puller::jwks::KeyFile;
use puller::meters;
use puller::router::{self, Limits};
use puller::settings::{Cli, Command, ServeSettings};
use puller::staging::Staging;
use puller::watch;
use tokio_util::sync::CancellationToken;
use tributary_shared::service::health::Health;
use tributary_shared::service::{admin, logs, probe, shutdown};
use tributary_shared::store::session;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sessions that keep digests and watch progress.
const CACHE_SESSIONS: usize = 3;

/// Time for the last answers to leave when the grace period is over.
const FAREWELL: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::Health(settings)) = cli.command {
        return probe::report(settings.admin_listen, settings.live);
    }
    let settings = cli.serve.expect("required without a subcommand");
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(serve(settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(settings: ServeSettings) -> anyhow::Result<()> {
    logs::install(settings.log_format);
    let stop = shutdown::token().context("cannot watch signals")?;
    let metrics = admin::install_metrics().context("metrics")?;
    meters::register();
    let authenticator = authenticator(&settings, &stop)?;
    let health = Health::new("puller");
    let admin_listener = admin::listen(settings.admin_listen, "--admin-listen").await?;
    let listener = admin::listen(settings.listen, "--listen").await?;
    let admin_stop = CancellationToken::new();
    tokio::spawn(admin::serve(admin_listener, health.clone(), metrics, admin_stop.clone()));

    let state = settings.state();
    // A first session, so that a wrong address or password is one clear line and no endless retry.
    state.connect("tributary-puller").await.with_context(|| {
        format!("cannot connect to the state database at {state}: is PostgreSQL running there, and are role and password right?")
    })?;
    let wait = Duration::from_millis(settings.pool_wait_millis);
    let size = usize::from(settings.pool_size);
    let source = if let Some(source) = settings.source_apart() {
        source.connect("tributary-puller").await.with_context(|| {
            format!("cannot connect to the source database at {source}: is PostgreSQL running there, and are role and password right?")
        })?;
        Some(session::pool(&source, "tributary-puller", size, wait)?.named("source"))
    } else {
        None
    };
    let app = Arc::new(App {
        state: session::pool(&state, "tributary-puller", size, wait)?,
        source,
        // A digest that is lost is computed again.
        cache: session::pool(
            &state.clone().with_setting("synchronous_commit", "off"),
            "tributary-puller",
            CACHE_SESSIONS,
            wait,
        )?
        .named("cache"),
        keys: settings.token_keys.clone(),
        authenticator,
        health: health.clone(),
        digests: Digests::default(),
        staging: Staging::new(settings.max_staging_waiters as usize, size),
        give_up: CancellationToken::new(),
        clock_offset_seconds: settings.clock_offset_seconds,
        served: std::sync::Mutex::default(),
    });
    let max_silence = (settings.max_silence_seconds > 0).then(|| Duration::from_secs(settings.max_silence_seconds));
    let watching = tokio::spawn(watch::watch(app.clone(), max_silence, stop.clone()));
    let limits = Limits { in_flight: settings.max_in_flight as usize, body_octets: settings.max_body_bytes as usize };
    tracing::info!(listen = %settings.listen, state = %state, "serving");

    let drain = stop.clone();
    let served = app.clone();
    let give_up = app.give_up.clone();
    let mut serving = tokio::spawn(
        axum::serve(listener, router::router(served, limits))
            .with_graceful_shutdown(async move { drain.cancelled().await })
            .into_future(),
    );
    stop.cancelled().await;
    watching.await.context("readiness")?;
    health.unready("draining");
    let grace = Duration::from_secs(settings.grace_seconds);
    // Who waits for a staging is told in time to come back; its work may need longer than the grace period.
    tokio::spawn(async move {
        tokio::time::sleep(grace / 2).await;
        app.staging.leaving.cancel();
    });
    if tokio::time::timeout(grace, &mut serving).await.is_err() {
        tracing::warn!("some requests did not end within the grace period: what is not committed is answered 503");
        give_up.cancel();
        // Connections that nobody reads from do not keep the process. Neither does a commit that takes longer: its
        // connection is closed without an answer, as nobody knows what becomes of it.
        let _ = tokio::time::timeout(FAREWELL, serving).await;
    }
    admin_stop.cancel();
    Ok(())
}

fn authenticator(settings: &ServeSettings, stop: &CancellationToken) -> anyhow::Result<Authenticator> {
    let verifier = match (&settings.jwt_secret, &settings.jwks_file, &settings.identity_header) {
        (Some(secret), None, None) => JwtVerifier::hs256([secret.as_bytes()])?,
        (None, Some(path), None) => {
            let file = KeyFile::open(path.clone()).with_context(|| format!("--jwks-file {}", path.display()))?;
            if settings.jwt_audience.is_none() {
                tracing::warn!("--jwt-audience is not given: a token that was issued for another service is accepted");
            }
            tokio::spawn(file.clone().follow(stop.clone()));
            JwtVerifier::key_file(file)
        }
        (None, None, Some(header)) => {
            if settings.jwt_audience.is_some() || settings.jwt_issuer.is_some() {
                bail!("--jwt-audience and --jwt-issuer are for tokens, and --identity-header takes none");
            }
            return Ok(Authenticator::TrustedHeader(header.parse().context("--identity-header is not a header name")?));
        }
        (None, None, None) => {
            bail!("users cannot be authenticated: give --jwt-secret, --jwks-file or --identity-header")
        }
        _ => bail!("give one of --jwt-secret, --jwks-file and --identity-header"),
    };
    let verifier = verifier.with_leeway(settings.jwt_leeway_seconds);
    let verifier = settings.jwt_audience.iter().fold(verifier, |verifier, name| verifier.with_audience(name.clone()));
    let verifier = settings.jwt_issuer.iter().fold(verifier, |verifier, name| verifier.with_issuer(name.clone()));
    Ok(Authenticator::Jwt(verifier))
}

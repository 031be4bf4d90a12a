//! Start-up: everything that can be wrong with the settings and the source is found before anything is made.

use anyhow::{Context, bail};
use tokio_postgres::Client;
use tributary_shared::registry::config::SyncConfig;
use tributary_shared::registry::Registry;
use tributary_shared::store::session::Address;
use tributary_shared::store::{catalog, source};

use crate::settings::RunSettings;

/// A session with the source, with an error that says what to do.
pub async fn connect(address: &Address, what: &str) -> anyhow::Result<Client> {
    address.connect("tributary-materializer").await.with_context(|| {
        format!("cannot connect to the {what} database at {address}: is PostgreSQL running there, and are role and password right?")
    })
}

/// Checks the source server.
pub async fn check_server(db: &Client, settings: &RunSettings) -> anyhow::Result<()> {
    let server = source::server(db).await?;
    if server.version < 140_000 {
        bail!("PostgreSQL 14 or later is needed; the source runs {}", server.version / 10_000);
    }
    if server.in_recovery {
        bail!("the source is a standby in recovery: point --source-url at the primary");
    }
    if server.wal_level != "logical" {
        bail!("wal_level is {}: set wal_level = logical on the source and restart it", server.wal_level);
    }
    if !server.can_replicate {
        bail!(
            "role {} has no REPLICATION privilege on the source: ALTER ROLE … REPLICATION",
            settings.databases.source_url.user()
        );
    }
    if !server.can_create {
        bail!(
            "role {} may not create objects in the source database: GRANT CREATE ON DATABASE …",
            settings.databases.source_url.user()
        );
    }
    if source::slot(db, settings.slot.as_str()).await?.is_none() && server.slots.0 >= i64::from(server.slots.1) {
        bail!(
            "all {} replication slots of the source are in use: raise max_replication_slots or drop an unused slot",
            server.slots.1
        );
    }
    Ok(())
}

/// Checks the state database.
pub async fn check_state(db: &Client) -> anyhow::Result<()> {
    let server = source::server(db).await?;
    if server.version < 140_000 {
        bail!("PostgreSQL 14 or later is needed; the state database runs {}", server.version / 10_000);
    }
    if server.in_recovery {
        bail!("the state database is a standby in recovery: point --state-url at the primary");
    }
    if server.encoding != "UTF8" {
        bail!("the state database has the encoding {}: UTF8 is needed", server.encoding);
    }
    if !server.can_create {
        bail!("the role may not create objects in the state database: GRANT CREATE ON DATABASE …");
    }
    Ok(())
}

/// Problems of a configuration, one a line.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Problems(pub Vec<String>);

/// Reads a configuration, and resolves it against the source.
///
/// # Errors
/// [`Problems`] with every problem that was found.
pub async fn registry(
    db: &mut Client,
    path: &std::path::Path,
    previous: Option<&Registry>,
) -> anyhow::Result<(Registry, Vec<String>)> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the configuration {name}"))?;
    let lines = |problems: Vec<tributary_shared::registry::Problem>| {
        Problems(problems.iter().map(|p| format!("{name}: {p}")).collect())
    };
    let config = SyncConfig::parse(&text).map_err(lines)?;
    let known = catalog::load(db, &config.relations()).await?;
    let (registry, warnings) = Registry::resolve(&config, &known, previous).map_err(lines)?;
    let (problems, more) = catalog::check_expressions(db, &config, &registry).await?;
    if !problems.is_empty() {
        return Err(lines(problems).into());
    }
    Ok((registry, warnings.iter().chain(&more).map(|w| format!("{name}: {w}")).collect()))
}

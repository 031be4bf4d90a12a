//! `materializer apply --dry-run`: what a changed configuration would ask for. Reads both databases, writes nothing.
//!
//! Deliberately absent in this version: carrying the change out.

use anyhow::{Context, bail};
use tributary_shared::registry::change::Change;
use tributary_shared::store::session;

use crate::preflight;
use crate::settings::ApplySettings;

/// Compares the file with the configuration in force and prints the difference.
///
/// # Errors
/// The file has problems, a database does not answer, or no baseline is active.
#[expect(clippy::print_stdout, reason = "the difference is the program's output")]
pub async fn dry_run(settings: &ApplySettings) -> anyhow::Result<()> {
    let mut source_db = preflight::connect(&settings.databases.source_url, "source").await?;
    let state =
        session::pool(settings.databases.state(), "tributary-materializer", 1, std::time::Duration::from_secs(10))?;
    let Some(in_force) = crate::stored_registry(&state).await? else {
        bail!("no baseline is active yet: a materializer takes one at its start, with the file that it is given");
    };
    let (registry, warnings) = preflight::registry(&mut source_db, &settings.config, Some(&in_force)).await?;
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    let change = Change::between(&in_force, &registry);
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&change).context("the difference cannot be written")?);
    } else {
        print!("{change}");
    }
    Ok(())
}

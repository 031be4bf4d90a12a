//! PostgreSQL's own logical replication into an identical empty table in another database of the same server.

use std::time::{Duration, Instant};

use anyhow::bail;

use super::site::{Site, TABLE};
use crate::database::Database;

const DATABASE: &str = "replica";
/// Longest wait for a row.
const PATIENCE: Duration = Duration::from_secs(300);
/// Pause between two looks.
const POLL: Duration = Duration::from_millis(5);

/// A subscription with its settings as they are by default.
pub(super) struct Subscription {
    pub replica: Database,
}

impl Subscription {
    /// Make it, disabled: what is written from now on has to be drained.
    pub fn create(site: &Site) -> anyhow::Result<Self> {
        let postgres = &site.sandbox.postgres;
        site.source.run(&format!("create database {DATABASE}"))?;
        let replica = postgres.connect(DATABASE)?;
        replica.run(TABLE)?;
        site.source.run("create publication native for table public.items")?;
        // In advance: a subscription to its own server cannot make its slot itself.
        site.source.run("select pg_create_logical_replication_slot('native', 'pgoutput')")?;
        let publisher = site.sandbox.source_url();
        replica.run(&format!(
            "create subscription native connection '{publisher}' publication native
             with (create_slot = false, slot_name = 'native', copy_data = false, enabled = false)"
        ))?;
        Ok(Self { replica })
    }

    /// Begin to apply.
    pub fn enable(&self) -> anyhow::Result<()> {
        self.replica.run("alter subscription native enable")
    }

    /// Wait until this row is visible; those of earlier transactions are then visible too.
    pub fn wait_until_applied(&self, id: i64) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.replica.query("select from public.items where id = $1", &[&id])?.is_empty() {
            if Instant::now() > deadline {
                bail!("the subscription has not applied what was written after {PATIENCE:?}");
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Remove it with its slot, so that it takes no part in what follows.
    pub fn remove(self, site: &Site) -> anyhow::Result<()> {
        self.replica.run("drop subscription native")?;
        site.source.run("drop publication native")
    }
}

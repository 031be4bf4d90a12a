//! What an operator does with the `materializer` binary, for tests.

use std::process::ExitStatus;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::sandbox::Sandbox;

/// What `materializer status --json` says.
#[derive(Debug)]
pub struct Status {
    /// All of it.
    pub json: Value,
    /// Whether the exit code says that somebody is needed.
    pub needs_somebody: bool,
}

impl Status {
    /// The one word.
    pub fn condition(&self) -> &str {
        self.json["condition"].as_str().unwrap_or_default()
    }

    /// The codes of what was found, the worst first.
    pub fn findings(&self) -> Vec<&str> {
        let findings = self.json["findings"].as_array().map(Vec::as_slice).unwrap_or_default();
        findings.iter().filter_map(|finding| finding["code"].as_str()).collect()
    }

    /// What to do about a finding.
    pub fn advice(&self, code: &str) -> Option<&str> {
        self.json["findings"].as_array()?.iter().find(|finding| finding["code"] == code)?["todo"].as_str()
    }
}

impl Sandbox {
    /// Run `materializer` with these arguments to its end.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn materializer_command(&self, args: &[&str]) -> anyhow::Result<(ExitStatus, String)> {
        let mut launch = self.materializer_launch("materializer-command")?;
        launch.args = args.iter().map(Into::into).collect();
        Ok(launch.run()?)
    }

    /// `materializer status --json`.
    ///
    /// # Errors
    /// It fails, or its output is no JSON.
    pub fn status(&self) -> anyhow::Result<Status> {
        let (exit, output) = self.materializer_command(&["status", "--json"])?;
        ensure!(matches!(exit.code(), Some(0 | 3)), "status: {exit}: {output}");
        let json = serde_json::from_str(&output).with_context(|| format!("status printed: {output}"))?;
        Ok(Status { json, needs_somebody: exit.code() == Some(3) })
    }

    /// `materializer reset`, and wait until the new generation is active.
    ///
    /// # Errors
    /// It fails.
    pub fn reset(&self) -> anyhow::Result<()> {
        let (exit, output) = self.materializer_command(&["reset", "--wait"])?;
        ensure!(exit.success(), "reset: {exit}: {output}");
        Ok(())
    }
}

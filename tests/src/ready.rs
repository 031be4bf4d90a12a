//! The ready file: where everything of a running sandbox is. It holds secrets and is its owner's alone.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// A running sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The application's database, with its password.
    pub database_url: String,
    /// The state's database, where it is one of its own (`--split`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_url: Option<String>,
    /// The HS256 secret of bearer tokens.
    pub jwt_secret: String,
    /// PostgreSQL.
    pub pg: ReadyPostgres,
    /// The materializers; one of them leads.
    pub materializers: Vec<ReadyMaterializer>,
    /// The pullers; any serves any client.
    pub pullers: Vec<ReadyPuller>,
}

/// The private PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyPostgres {
    /// Its data directory.
    pub data_dir: String,
    /// Its port on 127.0.0.1.
    pub port: u16,
    /// The postmaster.
    pub pid: u32,
}

/// One materializer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyMaterializer {
    /// `/livez`, `/readyz` and `/metrics` are below it.
    pub admin_url: String,
    /// Its process.
    pub pid: u32,
}

/// One puller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyPuller {
    /// `/sync/connect`, `/sync/pull` and `/sync/rebuild` are below it.
    pub url: String,
    /// `/livez`, `/readyz` and `/metrics` are below it.
    pub admin_url: String,
    /// Its process.
    pub pid: u32,
}

impl Ready {
    /// Write the file at once or not at all: a reader never sees half of it.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        write_private(path, &text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Read a ready file.
    ///
    /// # Errors
    /// There is none, or it is of another form.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}: is the sandbox up?", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is not a ready file", path.display()))
    }
}

/// Replace a file by octets that only its owner can read.
///
/// # Errors
/// The directory cannot be written.
pub fn write_private(path: &Path, octets: &[u8]) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let fresh = path.with_file_name(name);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(octets)?;
    fs::rename(&fresh, path)
}

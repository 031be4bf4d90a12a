//! A client that only follows cursors: rows are verified by the reference client in the tests, not here.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use serde_json::json;

use super::keep_alive::KeepAlive;
use super::site::Site;
use crate::canonical::Manifest;

/// Greatest page.
pub(super) const PAGE: i64 = 1000;

#[derive(Deserialize)]
struct PullAnswer {
    changes: Vec<Seen>,
    scope_cursors: BTreeMap<String, String>,
    rebuild: Vec<String>,
    has_more: bool,
}

#[derive(Deserialize)]
struct RebuildAnswer {
    records: Vec<Seen>,
    cursor: Option<String>,
    has_more: bool,
}

/// A row, as far as it is looked at.
#[derive(Deserialize)]
struct Seen {
    pk: Key,
}

#[derive(Deserialize)]
struct Key {
    id: String,
}

/// A page of a pull.
pub(super) struct Page {
    pub ids: Vec<i64>,
    pub has_more: bool,
}

/// A connected client.
pub(super) struct Session {
    connection: KeepAlive,
    client_id: String,
    generation: i64,
    manifest: Manifest,
    scope_set_version: i64,
    cursors: BTreeMap<String, Option<String>>,
}

impl Session {
    /// Connect; with `synced`, rebuild and pull to the end too, by the reference client.
    pub fn open(site: &Site, user: &str, client_id: &str, synced: bool) -> anyhow::Result<Self> {
        let mut client = site.sandbox.client(user, client_id)?;
        if synced {
            client.sync(PAGE)?;
        } else {
            client.connect()?;
        }
        Ok(Self {
            connection: KeepAlive::open(site.puller_address()?, &site.sandbox.token(user)?)?,
            client_id: client.client_id,
            generation: client.generation.context("connect gives a generation")?,
            manifest: client.manifest.context("connect gives a manifest")?,
            scope_set_version: client.scope_set_version,
            cursors: client.scopes,
        })
    }

    /// The body of the next pull.
    pub fn pull_request(&self) -> Vec<u8> {
        let scopes: BTreeMap<_, _> = self.cursors.iter().map(|(id, cursor)| (id, json!({"cursor": cursor}))).collect();
        let body = json!({
            "client_id": self.client_id,
            "client_generation": self.generation,
            "schema": {"version": self.manifest.version, "hash": self.manifest.hash},
            "scope_set_version": self.scope_set_version,
            "scopes": scopes,
            "limit": PAGE,
        });
        body.to_string().into_bytes()
    }

    /// Pull once.
    pub fn pull(&mut self) -> anyhow::Result<Page> {
        let request = self.pull_request();
        let answer: PullAnswer = serde_json::from_slice(self.connection.post("/sync/pull", &request)?)?;
        ensure!(answer.rebuild.is_empty(), "a scope needs a rebuild");
        for (scope, cursor) in answer.scope_cursors {
            self.cursors.insert(scope, Some(cursor));
        }
        let ids = answer.changes.iter().map(|seen| seen.pk.id.parse()).collect::<Result<_, _>>()?;
        Ok(Page { ids, has_more: answer.has_more })
    }

    /// Rebuild a scope, without keeping anything of it; the number of its rows.
    pub fn rebuild(&mut self, scope: &str) -> anyhow::Result<i64> {
        let rebuild_id = uuid::Uuid::now_v7().to_string();
        let mut cursor: Option<String> = None;
        let mut rows = 0;
        loop {
            let body = json!({
                "client_id": self.client_id,
                "client_generation": self.generation,
                "schema": {"version": self.manifest.version, "hash": self.manifest.hash},
                "scope": scope,
                "rebuild_id": rebuild_id,
                "cursor": cursor,
                "limit": PAGE,
            });
            let body = body.to_string();
            let answer: RebuildAnswer =
                serde_json::from_slice(self.connection.post("/sync/rebuild", body.as_bytes())?)?;
            rows += answer.records.len() as i64;
            if !answer.has_more {
                return Ok(rows);
            }
            cursor = answer.cursor;
        }
    }

    /// The connection alone, for requests that are always the same.
    pub fn into_connection(self) -> KeepAlive {
        self.connection
    }
}

//! Answers, as octets, with exactly the members of the protocol.
//!
//! Rows and records come ready-made: they are copied, never parsed, so that a page costs what its octets cost. Types
//! decide which members come together: there is no `has_more` beside `checksums`, and no final cursor beside a
//! continuation.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;

use super::{PROTOCOL_VERSION, ScopeId};

/// A delivered candidate's names, whatever its outcome.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    /// The scope that it is of.
    pub scope: &'a str,
    /// Logical table id.
    pub table: &'a str,
    /// The primary key as ready-made JSON, `{"<field id>":<value>}`.
    pub pk: &'a str,
    /// The opaque version of the captured row, or of the delete.
    pub server_version: &'a str,
}

/// The answer to a pull, written change by change.
#[derive(Debug)]
pub struct PullResponse {
    out: Vec<u8>,
    is_empty: bool,
}

/// What stands behind the changes of a pull.
#[derive(Debug, Clone, Copy)]
pub struct PullTail<'a> {
    /// The assignment's version.
    pub scope_set_version: u64,
    /// New cursors; of no scope that is in `rebuild`.
    pub scope_cursors: &'a BTreeMap<ScopeId, String>,
    /// Scopes newly assigned, each with a null cursor.
    pub added: &'a [ScopeId],
    /// Scopes assigned no more.
    pub removed: &'a [ScopeId],
    /// Assigned scopes without usable incremental state.
    pub rebuild: &'a [ScopeId],
    /// Whether this is the last page, and then the digests.
    pub end: PullEnd<'a>,
}

/// How a pull page ends.
#[derive(Debug, Clone, Copy)]
pub enum PullEnd<'a> {
    /// `has_more: true`, no checksums.
    More,
    /// `has_more: false`, with the digest of every assigned scope.
    Terminal(&'a BTreeMap<ScopeId, [u8; 32]>),
}

impl PullResponse {
    /// An answer without changes so far, with room for about `octets`.
    pub fn with_capacity(octets: usize) -> Self {
        let mut out = Vec::with_capacity(octets);
        out.extend(b"{\"changes\":[");
        Self { out, is_empty: true }
    }

    /// Adds an upsert with its captured row (ready-made JSON) and the row's digest.
    pub fn upsert(&mut self, change: &Change<'_>, row: &str, row_digest: &[u8; 32]) {
        self.open(change, "upsert");
        self.row(row, row_digest);
        self.close(change);
    }

    /// Adds a delete; with an authoritative tombstone row and its digest, when there is one.
    pub fn delete(&mut self, change: &Change<'_>, tombstone: Option<(&str, &[u8; 32])>) {
        self.open(change, "delete");
        if let Some((row, row_digest)) = tombstone {
            self.row(row, row_digest);
        }
        self.close(change);
    }

    /// The whole answer.
    pub fn finish(self, tail: &PullTail<'_>) -> Vec<u8> {
        let Self { mut out, .. } = self;
        out.extend(b"],\"scope_set_version\":");
        json(&mut out, &tail.scope_set_version);
        out.extend(b",\"scope_cursors\":");
        json(&mut out, tail.scope_cursors);
        out.extend(b",\"scope_updates\":");
        json(&mut out, &ScopeDelta::new(tail.added, tail.removed));
        out.extend(b",\"rebuild\":");
        json(&mut out, tail.rebuild);
        match tail.end {
            PullEnd::More => out.extend(b",\"has_more\":true}"),
            PullEnd::Terminal(digests) => {
                out.extend(b",\"has_more\":false,\"checksums\":{");
                for (index, (scope, digest)) in digests.iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    json(&mut out, scope);
                    out.push(b':');
                    checksum(&mut out, digest);
                }
                out.extend(b"}}");
            }
        }
        out
    }

    fn open(&mut self, change: &Change<'_>, operation: &str) {
        let out = &mut self.out;
        if !std::mem::take(&mut self.is_empty) {
            out.push(b',');
        }
        out.extend(b"{\"scope\":");
        json(out, change.scope);
        out.extend(b",\"table\":");
        json(out, change.table);
        out.extend(b",\"op\":\"");
        out.extend(operation.as_bytes());
        out.extend(b"\",\"pk\":");
        out.extend(change.pk.as_bytes());
    }

    fn row(&mut self, row: &str, digest: &[u8; 32]) {
        self.out.extend(b",\"row\":");
        self.out.extend(row.as_bytes());
        self.out.extend(b",\"row_checksum\":");
        checksum(&mut self.out, digest);
    }

    fn close(&mut self, change: &Change<'_>) {
        self.out.extend(b",\"server_version\":");
        json(&mut self.out, change.server_version);
        self.out.push(b'}');
    }
}

/// One page of a rebuild.
#[derive(Debug, Clone, Copy)]
pub struct RebuildPage<'a> {
    /// The scope that is rebuilt.
    pub scope: &'a str,
    /// Whether this is the last page.
    pub end: RebuildEnd<'a>,
}

/// How a rebuild page ends.
#[derive(Debug, Clone, Copy)]
pub enum RebuildEnd<'a> {
    /// `has_more: true`, with the continuation.
    More {
        /// The rebuild token of the next page.
        cursor: &'a str,
    },
    /// `has_more: false`.
    Final {
        /// The incremental token at the snapshot's boundary.
        final_scope_cursor: &'a str,
        /// The digest of the staged scope.
        digest: &'a [u8; 32],
    },
}

impl RebuildPage<'_> {
    /// The answer, with these ready-made records (see [`RebuildPage::record`]).
    pub fn write<'r>(&self, records: impl IntoIterator<Item = &'r [u8]>) -> Vec<u8> {
        let mut out = b"{\"scope\":".to_vec();
        json(&mut out, self.scope);
        out.extend(b",\"records\":[");
        for (index, record) in records.into_iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            out.extend(record);
        }
        match self.end {
            RebuildEnd::More { cursor } => {
                out.extend(b"],\"cursor\":");
                json(&mut out, cursor);
                out.extend(b",\"has_more\":true}");
            }
            RebuildEnd::Final { final_scope_cursor, digest } => {
                out.extend(b"],\"cursor\":null,\"has_more\":false,\"final_scope_cursor\":");
                json(&mut out, final_scope_cursor);
                out.extend(b",\"checksum\":");
                checksum(&mut out, digest);
                out.push(b'}');
            }
        }
        out
    }

    /// Appends one record, as it is staged: `pk` and `row` are ready-made JSON.
    pub fn record(out: &mut Vec<u8>, table: &str, pk: &str, row: &str, digest: &[u8; 32], server_version: &str) {
        out.extend(b"{\"table\":");
        json(out, table);
        out.extend(b",\"pk\":");
        out.extend(pk.as_bytes());
        out.extend(b",\"row\":");
        out.extend(row.as_bytes());
        out.extend(b",\"row_checksum\":");
        checksum(out, digest);
        out.extend(b",\"server_version\":");
        json(out, server_version);
        out.push(b'}');
    }
}

/// What the client has to do about its schema.
#[derive(Debug, Clone, Copy)]
pub enum SchemaAction<'a> {
    /// It is current.
    None,
    /// Take the manifest; local rows stay.
    Replace {
        /// The current manifest.
        definition: &'a RawValue,
    },
    /// Take the manifest and rebuild.
    RebuildLocal {
        /// The current manifest.
        definition: &'a RawValue,
        /// The scopes to rebuild, in raw UTF-8 order.
        affected_scopes: &'a [ScopeId],
    },
    /// There is no way from the client's schema to the current one.
    Unsupported(UnsupportedSchema),
}

/// Why there is no way to the current schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UnsupportedSchema {
    /// The client's schema is not of the published history.
    UnknownSchemaLineage,
    /// A class 4 change lies between.
    IncompatibleSchemaTransition,
}

/// The answer to connect.
#[derive(Debug, Clone, Copy)]
pub struct ConnectResponse<'a> {
    /// Present time, as canonical `datetime`.
    pub server_time: &'a str,
    /// The client's current generation.
    pub client_generation: u64,
    /// The assignment's version.
    pub scope_set_version: u64,
    /// Version of the current manifest.
    pub schema_version: u64,
    /// Hash of the current manifest, 64 lowercase hex digits.
    pub schema_hash: &'a str,
    /// What the client has to do about it.
    pub action: SchemaAction<'a>,
    /// Assigned scopes that the client does not know.
    pub added: &'a [ScopeId],
    /// Scopes that it knows and that are assigned no more.
    pub removed: &'a [ScopeId],
    /// Cursors replaced by the schema bridge; none is null: the scope needs a rebuild.
    pub scope_cursor_updates: &'a BTreeMap<ScopeId, Option<String>>,
}

#[derive(Serialize)]
struct ConnectBody<'a> {
    server_time: &'a str,
    protocol_version: i64,
    client_generation: u64,
    scope_set_version: u64,
    schema: ConnectSchema<'a>,
    scopes: ScopeDelta<'a>,
    scope_cursor_updates: &'a BTreeMap<ScopeId, Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema_definition: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    affected_scopes: Option<&'a [ScopeId]>,
}

#[derive(Serialize)]
struct ConnectSchema<'a> {
    version: u64,
    hash: &'a str,
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<UnsupportedSchema>,
}

impl ConnectResponse<'_> {
    /// The whole answer.
    pub fn write(&self) -> Vec<u8> {
        let (action, schema_definition, affected_scopes, reason) = match self.action {
            SchemaAction::None => ("none", None, None, None),
            SchemaAction::Replace { definition } => ("replace", Some(definition), None, None),
            SchemaAction::RebuildLocal { definition, affected_scopes } => {
                ("rebuild_local", Some(definition), Some(affected_scopes), None)
            }
            SchemaAction::Unsupported(reason) => ("unsupported", None, None, Some(reason)),
        };
        let body = ConnectBody {
            server_time: self.server_time,
            protocol_version: PROTOCOL_VERSION,
            client_generation: self.client_generation,
            scope_set_version: self.scope_set_version,
            schema: ConnectSchema { version: self.schema_version, hash: self.schema_hash, action, reason },
            scopes: ScopeDelta::new(self.added, self.removed),
            scope_cursor_updates: self.scope_cursor_updates,
            schema_definition,
            affected_scopes,
        };
        let mut out = Vec::new();
        json(&mut out, &body);
        out
    }
}

#[derive(Serialize)]
struct ScopeDelta<'a> {
    add: Vec<AddedScope<'a>>,
    remove: &'a [ScopeId],
}

#[derive(Serialize)]
struct AddedScope<'a> {
    id: &'a ScopeId,
    cursor: Option<()>,
}

impl<'a> ScopeDelta<'a> {
    fn new(added: &'a [ScopeId], removed: &'a [ScopeId]) -> Self {
        Self { add: added.iter().map(|id| AddedScope { id, cursor: None }).collect(), remove: removed }
    }
}

impl Serialize for ScopeId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

fn json<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) {
    serde_json::to_writer(out, value).expect("a Vec takes everything, and map keys are strings");
}

fn checksum(out: &mut Vec<u8>, digest: &[u8; 32]) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.extend(b"{\"algorithm\":\"sha256\",\"version\":1,\"encoding\":\"hex\",\"digest\":\"");
    out.extend(digest.iter().flat_map(|octet| [HEX[usize::from(octet >> 4)], HEX[usize::from(octet & 15)]]));
    out.extend(b"\"}");
}

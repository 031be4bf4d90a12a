//! The reference client: one installation that keeps its own copy of every scope and trusts nothing
//! (ADR 003 "Pull response rules", "Rebuild response rules"; contract.md section 5).
//!
//! It refuses any answer whose shape, order, row digest or scope digest is not exact. After a
//! [`ClientError::Violation`] its copy is half applied and it is not to be used further; every other error leaves it
//! as it was. Deliberately absent: parsing of cursors, retries, anything of the server's code.

use std::collections::{BTreeMap, BTreeSet};

use crate::canonical::{Digest, Manifest};
pub use crate::envelope::{ClientError, answer, digest_of};
use crate::envelope::{
    Result, exact, flag, int, list, member, nonempty, object_of, require, sorted_texts, text, violation,
};
use crate::http::Http;
use crate::json::Json;

/// A row as the client holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldRow {
    /// The logical table.
    pub table: String,
    /// The key's value.
    pub pk: Json,
    /// The row, an object by field id.
    pub row: Json,
    /// Its verified digest.
    pub digest: Digest,
    /// `server_version`
    pub server_version: String,
}

/// The rows of one scope by row identity.
pub type Rows = BTreeMap<Vec<u8>, HeldRow>;

/// What one pull page did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledPage {
    /// Number of changes.
    pub changes: usize,
    /// Whether more remain.
    pub has_more: bool,
    /// The body, for tests that look closer.
    pub body: Json,
}

/// A rebuild that is under way: its rows enter the client only when it is whole and its digest verified.
#[derive(Debug)]
pub struct Rebuild {
    /// The scope.
    pub scope: String,
    /// The immutable id of this attempt.
    pub rebuild_id: String,
    /// Page size.
    pub limit: i64,
    /// The continuation; `None` before the first page.
    pub cursor: Option<String>,
    /// Whether the final page was applied.
    pub finished: bool,
    rows: Rows,
}

impl Rebuild {
    /// Rows received so far.
    pub fn row_count(&self) -> usize {
        self.rows.len()
    }
}

/// One installation of an application.
#[derive(Debug)]
pub struct Client {
    /// The connection; its hooks are for tests.
    pub http: Http,
    /// `client_id`
    pub client_id: String,
    /// The generation that connect gave; `None` before.
    pub generation: Option<i64>,
    /// The manifest in force.
    pub manifest: Option<Manifest>,
    /// The last applied assignment version.
    pub scope_set_version: i64,
    /// Assigned scopes with their cursors; `None` needs a rebuild.
    pub scopes: BTreeMap<String, Option<String>>,
    /// The copy.
    pub rows: BTreeMap<String, Rows>,
    /// Pages received.
    pub pages: usize,
    /// Rebuilds that were begun, by scope.
    pub rebuilds: BTreeMap<String, usize>,
}

impl Client {
    /// A fresh installation that talks to the puller at `base` with a bearer token.
    pub fn new(base: &str, token: &str, client_id: &str) -> Self {
        Self {
            http: Http::new(base, Some(token)),
            client_id: client_id.to_owned(),
            generation: None,
            manifest: None,
            scope_set_version: 0,
            scopes: BTreeMap::new(),
            rows: BTreeMap::new(),
            pages: 0,
            rebuilds: BTreeMap::new(),
        }
    }

    /// The body of the connect request that this client would send now.
    pub fn connect_request(&self) -> Json {
        let known = self.scopes.iter().map(|(scope, cursor)| (scope.clone(), cursor_object(cursor.as_deref())));
        let mut request = vec![
            ("client_id", Json::text(&self.client_id)),
            ("platform", Json::text("reference")),
            ("app_version", Json::text("1.0.0")),
            ("protocol_version", Json::int(3)),
            ("schema", self.schema_reference()),
            ("scope_set_version", Json::int(self.scope_set_version)),
            ("known_scopes", Json::Object(known.collect())),
        ];
        request.extend(self.generation.map(|generation| ("client_generation", Json::int(generation))));
        object(request)
    }

    /// Connect, and apply the answer; its body.
    pub fn connect(&mut self) -> Result<Json> {
        let request = self.connect_request();
        let body = self.post("/sync/connect", &request)?;
        let schema = member(&body, "schema", "connect")?;
        let action = text(schema, "action", "connect schema")?.to_owned();
        let mut members = vec![
            "server_time",
            "protocol_version",
            "client_generation",
            "scope_set_version",
            "schema",
            "scopes",
            "scope_cursor_updates",
        ];
        match action.as_str() {
            "none" | "unsupported" => {}
            "replace" => members.push("schema_definition"),
            "rebuild_local" => members.extend(["schema_definition", "affected_scopes"]),
            _ => return violation("connect: unknown schema action"),
        }
        exact(&body, &members, "connect")?;
        let reason = if schema.get("reason").is_some() {
            &["version", "hash", "action", "reason"][..]
        } else {
            &["version", "hash", "action"]
        };
        exact(schema, reason, "connect schema")?;
        require(int(&body, "protocol_version", "connect")? == 3, "connect: protocol_version")?;
        if action == "unsupported" {
            return Ok(body);
        }
        if let Some(definition) = body.get("schema_definition") {
            self.manifest = Some(Manifest::parse(definition)?);
        }
        let Some(manifest) = &self.manifest else { return violation("connect: no manifest to go by") };
        require(
            manifest.version == int(schema, "version", "connect schema")?
                && manifest.hash == text(schema, "hash", "connect schema")?,
            "connect: the schema reference is not the manifest's",
        )?;
        let generation = int(&body, "client_generation", "connect")?;
        require(generation >= self.generation.unwrap_or(1).max(1), "connect: client_generation went back")?;
        self.generation = Some(generation);
        for (scope, cursor) in object_of(&body, "scope_cursor_updates", "connect")? {
            let Some(held) = self.scopes.get_mut(scope) else {
                return violation("connect: cursor update of an unknown scope");
            };
            *held = match cursor {
                Json::Null => None,
                cursor => Some(nonempty(cursor, "connect: cursor update")?),
            };
        }
        let version = int(&body, "scope_set_version", "connect")?;
        self.assign(member(&body, "scopes", "connect")?, version)?;
        if body.get("affected_scopes").is_some() {
            let affected = sorted_texts(&body, "affected_scopes", "connect")?;
            for scope in affected {
                match self.scopes.get_mut(&scope) {
                    Some(cursor) => *cursor = None,
                    None => return violation("connect: an affected scope is not assigned"),
                }
            }
        }
        self.rebind()?;
        Ok(body)
    }

    /// Digests bind the manifest: what goes on incrementally is held under the one that connect gave.
    fn rebind(&mut self) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        for (scope, rows) in &mut self.rows {
            if matches!(self.scopes.get(scope), Some(Some(_))) {
                for held in rows.values_mut() {
                    held.digest = manifest.row_digest(&held.table, &held.row, &held.server_version)?;
                }
            }
        }
        Ok(())
    }

    /// The body of the pull request that this client would send now.
    pub fn pull_request(&self, limit: i64) -> Json {
        let scopes = self.scopes.iter().map(|(scope, cursor)| (scope.clone(), cursor_object(cursor.as_deref())));
        object(vec![
            ("client_id", Json::text(&self.client_id)),
            ("client_generation", Json::int(self.generation.unwrap_or(0))),
            ("schema", self.schema_reference()),
            ("scope_set_version", Json::int(self.scope_set_version)),
            ("scopes", Json::Object(scopes.collect())),
            ("limit", Json::int(limit)),
        ])
    }

    /// Pull one page and apply it.
    pub fn pull_page(&mut self, limit: i64) -> Result<PulledPage> {
        let body = self.post("/sync/pull", &self.pull_request(limit))?;
        self.pages += 1;
        let has_more = flag(&body, "has_more", "pull")?;
        let mut members = vec!["changes", "scope_set_version", "scope_cursors", "scope_updates", "rebuild", "has_more"];
        members.extend((!has_more).then_some("checksums"));
        exact(&body, &members, "pull")?;
        let changes = list(&body, "changes", "pull")?;
        require(changes.len() as i64 <= limit, "pull: more changes than the limit")?;
        require(!has_more || !changes.is_empty(), "pull: has_more without progress")?;
        self.assign(member(&body, "scope_updates", "pull")?, int(&body, "scope_set_version", "pull")?)?;
        let rebuild = sorted_texts(&body, "rebuild", "pull")?;
        let cursors = object_of(&body, "scope_cursors", "pull")?;
        let mut seen = BTreeSet::new();
        for change in changes {
            let (scope, identity) = self.apply(change, &rebuild)?;
            require(seen.insert((scope, identity)), "pull: one key of one scope twice in a page")?;
        }
        for scope in &rebuild {
            require(!cursors.contains_key(scope), "pull: a cursor for a scope in rebuild")?;
            match self.scopes.get_mut(scope) {
                Some(cursor) => *cursor = None,
                None => return violation("pull: rebuild of a scope that is not assigned"),
            }
        }
        for (scope, cursor) in cursors {
            match self.scopes.get_mut(scope) {
                Some(Some(held)) => *held = nonempty(cursor, "pull: cursor")?,
                _ => return violation("pull: a cursor for a scope without incremental state"),
            }
        }
        require(
            self.scopes.iter().all(|(scope, cursor)| cursor.is_some() || rebuild.contains(scope)),
            "pull: an assigned scope without incremental state is not in rebuild",
        )?;
        if !has_more {
            let checksums = object_of(&body, "checksums", "pull")?;
            require(
                checksums.keys().eq(self.scopes.keys()),
                "pull: checksums do not cover exactly the assigned scopes",
            )?;
            for (scope, checksum) in checksums {
                let digest = digest_of(checksum, "pull checksum")?;
                if self.scopes[scope].is_some() {
                    require(cursors.contains_key(scope), "pull: a terminal page without a cursor for a valid scope")?;
                    require(
                        digest == self.scope_digest(scope)?,
                        "pull: a scope's digest differs from the rows delivered",
                    )?;
                }
            }
        }
        Ok(PulledPage { changes: changes.len(), has_more, body })
    }

    /// Pull until nothing remains; the number of changes.
    pub fn pull_all(&mut self, limit: i64) -> Result<usize> {
        let mut total = 0;
        loop {
            let page = self.pull_page(limit)?;
            total += page.changes;
            if !page.has_more {
                return Ok(total);
            }
        }
    }

    /// Begin a rebuild of one scope under a new id.
    pub fn start_rebuild(&self, scope: &str, limit: i64) -> Rebuild {
        Rebuild {
            scope: scope.to_owned(),
            rebuild_id: uuid::Uuid::now_v7().to_string(),
            limit,
            cursor: None,
            finished: false,
            rows: Rows::new(),
        }
    }

    /// The body of a rebuild's next request.
    pub fn rebuild_request(&self, rebuild: &Rebuild) -> Json {
        object(vec![
            ("client_id", Json::text(&self.client_id)),
            ("client_generation", Json::int(self.generation.unwrap_or(0))),
            ("schema", self.schema_reference()),
            ("scope", Json::text(&rebuild.scope)),
            ("rebuild_id", Json::text(&rebuild.rebuild_id)),
            ("cursor", rebuild.cursor.as_deref().map_or(Json::Null, Json::text)),
            ("limit", Json::int(rebuild.limit)),
        ])
    }

    /// Fetch and apply a rebuild's next page; its body. The final page installs rows and cursor in the client.
    pub fn rebuild_page(&mut self, rebuild: &mut Rebuild) -> Result<Json> {
        let body = self.post("/sync/rebuild", &self.rebuild_request(rebuild))?;
        self.pages += 1;
        let has_more = flag(&body, "has_more", "rebuild")?;
        let mut members = vec!["scope", "records", "cursor", "has_more"];
        if !has_more {
            members.extend(["final_scope_cursor", "checksum"]);
        }
        exact(&body, &members, "rebuild")?;
        let records = list(&body, "records", "rebuild")?;
        require(text(&body, "scope", "rebuild")? == rebuild.scope, "rebuild: another scope")?;
        require(records.len() as i64 <= rebuild.limit, "rebuild: more records than the limit")?;
        require(!has_more || !records.is_empty(), "rebuild: an intermediate page without records")?;
        for record in records {
            exact(record, &["table", "pk", "row", "row_checksum", "server_version"], "rebuild record")?;
            let (identity, held) = self.verified(record)?;
            require(
                rebuild.rows.last_key_value().is_none_or(|(last, _)| *last < identity),
                "rebuild: records are not in identity order",
            )?;
            rebuild.rows.insert(identity, held);
        }
        let cursor = member(&body, "cursor", "rebuild")?;
        if has_more {
            rebuild.cursor = Some(nonempty(cursor, "rebuild: continuation")?);
            return Ok(body);
        }
        require(*cursor == Json::Null, "rebuild: a cursor on the final page")?;
        let final_cursor = nonempty(member(&body, "final_scope_cursor", "rebuild")?, "rebuild: final cursor")?;
        let digest = digest_of(member(&body, "checksum", "rebuild")?, "rebuild checksum")?;
        require(
            digest == digest_of_rows(self.manifest()?, &rebuild.scope, &rebuild.rows),
            "rebuild: the scope's digest differs from the rows delivered",
        )?;
        rebuild.finished = true;
        self.rows.insert(rebuild.scope.clone(), std::mem::take(&mut rebuild.rows));
        self.scopes.insert(rebuild.scope.clone(), Some(final_cursor));
        Ok(body)
    }

    /// Rebuild one scope to its end; the number of its rows.
    pub fn rebuild(&mut self, scope: &str, limit: i64) -> Result<usize> {
        *self.rebuilds.entry(scope.to_owned()).or_default() += 1;
        let mut rebuild = self.start_rebuild(scope, limit);
        while !rebuild.finished {
            self.rebuild_page(&mut rebuild)?;
        }
        Ok(self.rows.get(scope).map_or(0, Rows::len))
    }

    /// Connect if need be, rebuild what needs it, pull to a terminal page with nothing left to rebuild.
    pub fn sync(&mut self, limit: i64) -> Result<()> {
        if self.generation.is_none() {
            self.connect()?;
        }
        for _ in 0..1000 {
            for scope in self.scopes_to_rebuild() {
                self.rebuild(&scope, 1000)?;
            }
            self.pull_all(limit)?;
            if self.scopes_to_rebuild().is_empty() {
                return Ok(());
            }
        }
        violation("pull does not settle")
    }

    /// Assigned scopes without incremental state.
    pub fn scopes_to_rebuild(&self) -> Vec<String> {
        self.scopes.iter().filter(|(_, cursor)| cursor.is_none()).map(|(scope, _)| scope.clone()).collect()
    }

    /// The rows of one table in one scope, by the canonical JSON text of their key.
    pub fn contents(&self, scope: &str, table: &str) -> BTreeMap<String, Json> {
        let rows = self.rows.get(scope).into_iter().flat_map(Rows::values);
        rows.filter(|held| held.table == table).map(|held| (key_text(&held.pk), held.row.clone())).collect()
    }

    /// One row of one table in one scope.
    pub fn contents_of(&self, scope: &str, table: &str, key: &str) -> Option<&Json> {
        let mut rows = self.rows.get(scope)?.values();
        rows.find(|held| held.table == table && key_text(&held.pk) == key).map(|held| &held.row)
    }

    /// The digest of the rows that this client holds of a scope.
    pub fn scope_digest(&self, scope: &str) -> Result<Digest> {
        let empty = Rows::new();
        Ok(digest_of_rows(self.manifest()?, scope, self.rows.get(scope).unwrap_or(&empty)))
    }

    /// The manifest that connect gave.
    pub fn manifest(&self) -> Result<&Manifest> {
        self.manifest.as_ref().ok_or_else(|| ClientError::Violation("rows before a manifest".to_owned()))
    }

    fn schema_reference(&self) -> Json {
        let (version, hash) = self.manifest.as_ref().map_or((0, ""), |m| (m.version, m.hash.as_str()));
        object(vec![("version", Json::int(version)), ("hash", Json::text(hash))])
    }

    fn post(&self, path: &str, request: &Json) -> Result<Json> {
        // Requests hold nothing that RFC 8785 cannot represent: integers are small and text is any text.
        let octets = request.canonical().map_err(|error| ClientError::Violation(error.to_string()))?;
        answer(path, &self.http.post(path, octets.as_bytes())?)
    }

    fn assign(&mut self, delta: &Json, version: i64) -> Result<()> {
        exact(delta, &["add", "remove"], "scope delta")?;
        let removed = sorted_texts(delta, "remove", "scope delta")?;
        let mut added = Vec::new();
        for scope in list(delta, "add", "scope delta")? {
            exact(scope, &["id", "cursor"], "scope delta")?;
            require(scope.get("cursor") == Some(&Json::Null), "an added scope has a null cursor")?;
            added.push(text(scope, "id", "scope delta")?.to_owned());
        }
        require(added.is_sorted() && !added.iter().any(|id| removed.contains(id)), "scope delta: order or overlap")?;
        require(
            if added.is_empty() && removed.is_empty() {
                version >= self.scope_set_version
            } else {
                version > self.scope_set_version
            },
            "scope_set_version did not follow the assignment",
        )?;
        for scope in removed {
            self.scopes.remove(&scope);
            self.rows.remove(&scope);
        }
        for scope in added {
            self.rows.remove(&scope);
            self.scopes.insert(scope, None);
        }
        self.scope_set_version = version;
        Ok(())
    }

    fn apply(&mut self, change: &Json, rebuild: &[String]) -> Result<(String, Vec<u8>)> {
        let mut members = vec!["scope", "table", "op", "pk", "server_version"];
        let bears_row = change.get("row").is_some();
        if bears_row {
            members.extend(["row", "row_checksum"]);
        }
        exact(change, &members, "change")?;
        let scope = text(change, "scope", "change")?.to_owned();
        require(
            matches!(self.scopes.get(&scope), Some(Some(_))) && !rebuild.contains(&scope),
            "pull: a change of a scope without incremental state",
        )?;
        let identity = match text(change, "op", "change")? {
            "upsert" => {
                require(bears_row, "pull: an upsert without a row")?;
                let (identity, held) = self.verified(change)?;
                self.rows.entry(scope.clone()).or_default().insert(identity.clone(), held);
                identity
            }
            "delete" => {
                require(!text(change, "server_version", "change")?.is_empty(), "change: empty server_version")?;
                let identity = if bears_row { self.verified(change)?.0 } else { self.identity(change)?.0 };
                self.rows.entry(scope.clone()).or_default().remove(&identity);
                identity
            }
            _ => return violation("change: unknown operation"),
        };
        Ok((scope, identity))
    }

    fn identity(&self, record: &Json) -> Result<(Vec<u8>, Json)> {
        let table = text(record, "table", "record")?;
        let field = &self.manifest()?.table(table)?.primary_key;
        let key = member(record, "pk", "record")?;
        exact(key, &[field], "pk")?;
        let value = member(key, field, "pk")?;
        Ok((self.manifest()?.row_identity(table, value)?, value.clone()))
    }

    fn verified(&self, record: &Json) -> Result<(Vec<u8>, HeldRow)> {
        let (identity, pk) = self.identity(record)?;
        let table = text(record, "table", "record")?;
        let row = member(record, "row", "record")?;
        require(row.get(&self.manifest()?.table(table)?.primary_key) == Some(&pk), "record: row and pk differ")?;
        let server_version = text(record, "server_version", "record")?;
        let digest = digest_of(member(record, "row_checksum", "record")?, "row_checksum")?;
        require(
            self.manifest()?.row_digest(table, row, server_version)? == digest,
            "record: a row's digest does not match it",
        )?;
        let held = HeldRow {
            table: table.to_owned(),
            pk,
            row: row.clone(),
            digest,
            server_version: server_version.to_owned(),
        };
        Ok((identity, held))
    }
}

/// The text by which [`Client::contents`] names a key.
pub fn key_text(key: &Json) -> String {
    match key {
        Json::Text(text) | Json::Number(text) => text.clone(),
        other => other.canonical().unwrap_or_default(),
    }
}

fn digest_of_rows(manifest: &Manifest, scope: &str, rows: &Rows) -> Digest {
    manifest.scope_digest(scope, rows.iter().map(|(identity, held)| (identity.as_slice(), &held.digest)))
}

fn cursor_object(cursor: Option<&str>) -> Json {
    object(vec![("cursor", cursor.map_or(Json::Null, Json::text))])
}

fn object(members: Vec<(&str, Json)>) -> Json {
    Json::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

//! Scope digests: cached with the content position that they are valid for, and computed once when that moved.
//!
//! Within a puller requests of one content wait for one computation; between pullers an advisory lock lets one compute
//! while the others wait for its result. Memory is bounded by [`KEPT`] digests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deadpool_postgres::Transaction;
use futures_util::{StreamExt, pin_mut};
use tokio::sync::OnceCell;
use tributary_shared::digest::ScopeDigester;
use tributary_shared::store::client::ClientScope;
use tributary_shared::store::digest::{self, DigestKey};
use tributary_shared::store::session;

use crate::app::{App, Failure, Served};
use crate::gate::Opened;

/// Digests remembered by a puller.
const KEPT: usize = 16 * 1024;
/// How long a puller waits for another's computation before it computes by itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// The digests that this puller knows or is computing.
#[derive(Default)]
pub struct Digests {
    known: Mutex<HashMap<DigestKey, Arc<OnceCell<[u8; 32]>>>>,
}

/// What a scope's digest is valid for, in a request's snapshot.
pub fn key(opened: &Opened, scope: &ClientScope) -> DigestKey {
    DigestKey {
        scope_no: scope.scope_no,
        stream_generation: opened.progress.stream_generation,
        schema_version: opened.served.configuration.schema_version as i64,
        membership_generation: scope.membership_generation,
        content: scope.content,
    }
}

impl Digests {
    /// The digest of a scope at the request's boundary.
    pub async fn of(
        &self,
        app: &App,
        db: &Transaction<'_>,
        opened: &Opened,
        scope: &ClientScope,
    ) -> Result<[u8; 32], Failure> {
        let schema_version = opened.served.configuration.schema_version;
        if let Some(digest) = scope.digest(opened.progress.stream_generation, schema_version) {
            metrics::counter!("tributary_digest_total", "outcome" => "cached").increment(1);
            return Ok(digest);
        }
        let key = key(opened, scope);
        let cell = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if known.len() >= KEPT {
                known.clear();
            }
            known.entry(key).or_default().clone()
        };
        let digest = cell.get_or_try_init(|| self.shared(app, db, opened, scope, &key)).await?;
        Ok(*digest)
    }

    /// Computes the digest, unless another puller is at it: then waits for what that one keeps.
    async fn shared(
        &self,
        app: &App,
        db: &Transaction<'_>,
        opened: &Opened,
        scope: &ClientScope,
        key: &DigestKey,
    ) -> Result<[u8; 32], Failure> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        // The claim ends with the request's transaction, at the latest.
        while !digest::try_claim(db, key.scope_no).await? && tokio::time::Instant::now() < deadline {
            let cache = session::acquire(&app.cache).await?;
            if let Some(digest) = digest::kept(&cache, key).await? {
                return Ok(digest);
            }
            drop(cache);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let cache = session::acquire(&app.cache).await?;
        if let Some(digest) = digest::kept(&cache, key).await? {
            return Ok(digest);
        }
        let (digest, rows) = compute(db, &opened.served, scope).await?;
        metrics::counter!("tributary_digest_total", "outcome" => "computed").increment(1);
        if let Err(error) = digest::keep(&cache, key, rows, &digest).await {
            tracing::warn!(%error, "a scope digest was not kept");
        }
        Ok(digest)
    }
}

/// Digests a scope's rows in identity order, streamed: one plain SHA-256 over all of them.
async fn compute(db: &Transaction<'_>, served: &Served, scope: &ClientScope) -> Result<([u8; 32], i64), Failure> {
    let counts: HashMap<i16, i64> = digest::row_counts(db, scope.scope_no).await?.into_iter().collect();
    let total: i64 = counts.values().sum();
    let mut digester = ScopeDigester::new(&served.configuration.schema_hash, &scope.scope_id, total as u64);
    let mut identity = Vec::new();
    for (table, encoder) in served.tables_in_identity_order() {
        if !counts.contains_key(&table.table_no) {
            continue;
        }
        let rows = digest::rows(db, scope.scope_no, table).await?;
        pin_mut!(rows);
        while let Some(row) = rows.next().await {
            let (key, digest) = row?;
            identity.clear();
            encoder.identity_prefix().identity_into(&key, &mut identity);
            digester.row(&identity, &digest).map_err(|_| Failure::integrity("a scope's rows are not in order"))?;
        }
    }
    let digest = digester.finish().map_err(|_| Failure::integrity("a scope has entries without captured rows"))?;
    Ok((digest, total))
}

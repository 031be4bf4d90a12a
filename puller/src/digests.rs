//! Scope digests: cached with the content position that they are valid for, and computed once when that moved.
//!
//! Within a puller requests of one content wait for one computation; between pullers an advisory lock lets one compute
//! while the others wait for its result. A scope whose rows this puller has in memory needs only those that changed
//! since. Memory is bounded by [`KEPT`] digests and [`CONTENTS_OCTETS`] of rows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deadpool_postgres::GenericClient;
use futures_util::{StreamExt, pin_mut};
use tokio::sync::OnceCell;
use tributary_shared::content::{ContentKey, Contents};
use tributary_shared::digest::ScopeDigester;
use tributary_shared::store::client::ClientScope;
use tributary_shared::store::transaction::{Begun, Isolation};
use tributary_shared::store::{digest, pull};

use crate::app::{App, Failure, Served};
use crate::gate::Opened;

/// Digests remembered by a puller.
const KEPT: usize = 16 * 1024;
/// Memory for the rows of scopes.
const CONTENTS_OCTETS: usize = 64 << 20;
/// A scope that needs more than this keeps no rows in memory.
const SCOPE_OCTETS: usize = CONTENTS_OCTETS / 4;
/// Changes past which a scope is read anew.
const CHANGES: i64 = 10_000;
/// How long a puller waits for another's computation before it computes by itself.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause while another puller computes.
const POLL: Duration = Duration::from_millis(50);

/// The digests that this puller knows or is computing.
#[derive(Default)]
pub struct Digests {
    known: Mutex<HashMap<ContentKey, Arc<OnceCell<[u8; 32]>>>>,
    contents: Mutex<KeptContents>,
}

/// Rows of scopes in memory.
#[derive(Default)]
struct KeptContents {
    scopes: HashMap<i32, KeptScope>,
    octets: usize,
    /// Counts uses, so that the scope whose last use is the oldest goes first.
    clock: u64,
}

struct KeptScope {
    key: ContentKey,
    contents: Contents,
    used: u64,
}

impl KeptContents {
    /// Takes the rows of a scope out, when they are of this content's past.
    fn take(&mut self, key: &ContentKey) -> Option<(ContentKey, Contents)> {
        if !self.scopes.get(&key.scope_no)?.key.precedes(key) {
            return None;
        }
        let kept = self.scopes.remove(&key.scope_no)?;
        self.octets -= kept.contents.octets();
        Some((kept.key, kept.contents))
    }

    /// Keeps the rows of a scope, unless newer ones are kept.
    fn keep(&mut self, key: ContentKey, contents: Contents) {
        let newer = |kept: &KeptScope| key.precedes(&kept.key);
        if contents.octets() > SCOPE_OCTETS || self.scopes.get(&key.scope_no).is_some_and(newer) {
            return;
        }
        self.clock += 1;
        self.octets += contents.octets();
        let kept = KeptScope { key, contents, used: self.clock };
        if let Some(before) = self.scopes.insert(key.scope_no, kept) {
            self.octets -= before.contents.octets();
        }
        while self.octets > CONTENTS_OCTETS {
            let Some(oldest) = self.scopes.iter().min_by_key(|(_, kept)| kept.used).map(|(scope, _)| *scope) else {
                return;
            };
            if let Some(gone) = self.scopes.remove(&oldest) {
                self.octets -= gone.contents.octets();
            }
        }
    }
}

/// What a scope's digest is valid for, in a request's snapshot.
pub fn key(opened: &Opened, scope: &ClientScope) -> ContentKey {
    ContentKey {
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
        db: &impl GenericClient,
        opened: &Opened,
        scope: &ClientScope,
    ) -> Result<[u8; 32], Failure> {
        let key = key(opened, scope);
        if let Some(digest) = scope.digest(&key) {
            metrics::counter!("tributary_digest_total", "outcome" => "cached").increment(1);
            return Ok(digest);
        }
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
        db: &impl GenericClient,
        opened: &Opened,
        scope: &ClientScope,
        key: &ContentKey,
    ) -> Result<[u8; 32], Failure> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            // The claim ends with this transaction: after the digest is kept, or with nothing done.
            let cache = Begun::acquire(&app.cache, Isolation::ReadCommitted).await?;
            let ((), claimed, kept) = tokio::try_join!(
                biased;
                cache.begin(),
                digest::try_claim(&*cache, key.scope_no),
                digest::kept(&*cache, key)
            )?;
            if let Some(digest) = kept {
                return Ok(digest);
            }
            if !claimed && tokio::time::Instant::now() < deadline {
                drop(cache);
                tokio::time::sleep(POLL).await;
                continue;
            }
            let (digest, rows) = self.compute(db, &opened.served, scope, key).await?;
            let kept = async {
                digest::keep(&*cache, key, rows, &digest).await?;
                cache.commit().await
            };
            if let Err(error) = kept.await {
                tracing::warn!(%error, "a scope digest was not kept");
            }
            return Ok(digest);
        }
    }

    /// The digest and the number of rows: from the rows in memory and what changed since, or from all rows.
    async fn compute(
        &self,
        db: &impl GenericClient,
        served: &Served,
        scope: &ClientScope,
        key: &ContentKey,
    ) -> Result<([u8; 32], i64), Failure> {
        let in_order = |_| Failure::integrity("a scope's rows are not in order");
        let schema_hash = &served.configuration.schema_hash;
        let kept = self.contents.lock().unwrap_or_else(PoisonError::into_inner).take(key);
        // Where compaction has taken a delete marker of a later time, what was deleted is not known any more.
        if let Some((was, mut contents)) = kept.filter(|(was, _)| scope.compacted <= was.content)
            && change(db, served, scope, was, &mut contents).await?
        {
            metrics::counter!("tributary_digest_total", "outcome" => "updated").increment(1);
            let digest = contents.digest(schema_hash, &scope.scope_id).map_err(in_order)?;
            let rows = contents.row_count() as i64;
            self.contents.lock().unwrap_or_else(PoisonError::into_inner).keep(*key, contents);
            return Ok((digest, rows));
        }
        metrics::counter!("tributary_digest_total", "outcome" => "computed").increment(1);
        let (digest, rows, contents) = read(db, served, scope).await?;
        if let Some(contents) = contents {
            self.contents.lock().unwrap_or_else(PoisonError::into_inner).keep(*key, contents);
        }
        Ok((digest, rows))
    }
}

/// Brings rows in memory to the request's snapshot; false when too much has changed.
async fn change(
    db: &impl GenericClient,
    served: &Served,
    scope: &ClientScope,
    was: ContentKey,
    contents: &mut Contents,
) -> Result<bool, Failure> {
    let changes = pull::candidates(db, &[(scope.scope_no, was.content)], CHANGES + 1).await?;
    if changes.len() as i64 > CHANGES {
        return Ok(false);
    }
    let mut by_table: HashMap<i16, (Vec<i64>, Vec<i64>)> = HashMap::new();
    for change in &changes {
        let (present, absent) = by_table.entry(change.table_no).or_default();
        if change.present { present.push(change.row_id) } else { absent.push(change.row_id) }
    }
    let mut identity = Vec::new();
    for (table_no, (present, absent)) in by_table {
        let (table, encoder) = served.table(table_no)?;
        let mut found = 0;
        if !absent.is_empty() {
            for (_, key) in pull::keys(db, table, &absent).await? {
                identity.clear();
                encoder.identity_prefix().identity_into(&key, &mut identity);
                contents.remove(&identity);
                found += 1;
            }
        }
        if !present.is_empty() {
            for row in pull::identified(db, table, &present).await? {
                identity.clear();
                encoder.identity_prefix().identity_into(&row.key, &mut identity);
                contents.upsert(&identity, row.digest);
                found += 1;
            }
        }
        if found != present.len() + absent.len() {
            return Err(Failure::integrity("an entry has no captured row, or a delete marker no key"));
        }
    }
    Ok(true)
}

/// Digests a scope's rows in identity order, streamed: one plain SHA-256 over all of them. Returns the rows too, when
/// they are few enough to be kept.
async fn read(
    db: &impl GenericClient,
    served: &Served,
    scope: &ClientScope,
) -> Result<([u8; 32], i64, Option<Contents>), Failure> {
    digest::plan_for_scopes(db).await?;
    digest::check_markers(db, scope.scope_no).await?;
    let counts: HashMap<i16, i64> = digest::row_counts(db, scope.scope_no).await?.into_iter().collect();
    let total: i64 = counts.values().sum();
    let mut digester = ScopeDigester::new(&served.configuration.schema_hash, &scope.scope_id, total as u64);
    let mut contents = Some(Contents::default());
    let mut identity = Vec::new();
    for (table, encoder) in served.tables_in_identity_order() {
        if !counts.contains_key(&table.table_no) {
            continue;
        }
        let rows = digest::rows(db, scope.scope_no, table).await?;
        pin_mut!(rows);
        while let Some(row) = rows.next().await {
            let row = row?;
            identity.clear();
            encoder.identity_prefix().identity_into(&row.key, &mut identity);
            digester.row(&identity, &row.digest).map_err(|_| Failure::integrity("a scope's rows are not in order"))?;
            if let Some(kept) = &mut contents {
                kept.upsert(&identity, row.digest);
                if kept.octets() > SCOPE_OCTETS {
                    contents = None;
                }
            }
        }
    }
    digest::plan_for_pages(db).await?;
    let digest = digester.finish().map_err(|_| Failure::integrity("a scope has entries without captured rows"))?;
    Ok((digest, total, contents))
}

//! Staging: the immutable snapshot of a scope's content, made once and shared by every session over the same content.
//!
//! Rows are read through a portal and written as blocks of ready-made records, so that memory is bounded by one block
//! whatever the size of the scope. It happens in the transaction that creates the sessions: all commit, or nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use deadpool_postgres::Transaction;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tributary_shared::content::ContentKey;
use tributary_shared::digest::ScopeDigester;
use tributary_shared::protocol::{RebuildPage, RebuildRequest};
use tributary_shared::store::client::ClientScope;
use tributary_shared::store::digest;
use tributary_shared::store::snapshot;

use crate::app::{App, Failure};
use crate::auth::Identity;
use crate::digests;
use crate::gate::Opened;

/// Octets after which a block is full.
const BLOCK_OCTETS: usize = 256 * 1024;
/// Records after which a block is full: one page of the largest size.
const BLOCK_RECORDS: usize = 1000;
/// Most rows fetched from the portal at once.
const FETCH_ROWS: i32 = 500;
/// Octets that a fetch is to bring at most, by the size of the rows before it.
const FETCH_OCTETS: usize = 4 * BLOCK_OCTETS;

/// Who stages, and who waits.
pub struct Staging {
    /// Rebuilds that may wait at once.
    pub waiters: Arc<Semaphore>,
    most_waiters: usize,
    /// Stagings that may run at once.
    pub running: Arc<Semaphore>,
    most_running: usize,
    /// Rebuilds that may read at once what they have waited for: a thousand of them wake up together.
    pub readers: Semaphore,
    /// Cancelled when this process is about to end, so that who waits is told to come back.
    pub leaving: CancellationToken,
    turns: Mutex<HashMap<i32, Arc<Turn>>>,
}

/// The turns of one scope's stagings.
#[derive(Default)]
pub struct Turn {
    /// Held by the rebuild that stages.
    pub lock: Arc<tokio::sync::Mutex<()>>,
    waiting: Mutex<Vec<Arc<Ticket>>>,
}

/// A rebuild that waits for a session.
pub struct Ticket {
    /// Whose it is.
    pub user: Identity,
    /// Its first request.
    pub request: RebuildRequest,
}

/// A ticket's place among those that wait, until it is dropped.
pub struct Place<'a> {
    turn: &'a Turn,
    ticket: Arc<Ticket>,
}

impl Turn {
    /// Takes a place: whoever stages the scope from now on makes this rebuild's session too.
    pub fn wait(&self, ticket: Ticket) -> Place<'_> {
        let ticket = Arc::new(ticket);
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(ticket.clone());
        Place { turn: self, ticket }
    }

    /// The rebuilds that wait; bounded by [`Staging::waiters`].
    pub fn waiting(&self) -> Vec<Arc<Ticket>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.turn.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|ticket| !Arc::ptr_eq(ticket, &self.ticket));
    }
}

impl Staging {
    /// With room for `waiters`. Of `sessions` with the state, a quarter may stage and a quarter may read what was
    /// staged, so that a rush of rebuilds never holds up all pulls.
    pub fn new(waiters: usize, sessions: usize) -> Self {
        let quarter = (sessions / 4).max(1);
        Self {
            waiters: Arc::new(Semaphore::new(waiters)),
            most_waiters: waiters,
            running: Arc::new(Semaphore::new(quarter)),
            most_running: quarter,
            readers: Semaphore::new(quarter),
            leaving: CancellationToken::new(),
            turns: Mutex::default(),
        }
    }

    /// Rebuilds that wait now.
    pub fn waiting(&self) -> usize {
        self.most_waiters.saturating_sub(self.waiters.available_permits())
    }

    /// How many rebuilds may wait.
    pub fn most_waiters(&self) -> usize {
        self.most_waiters
    }

    /// How many stagings run.
    pub fn staging(&self) -> usize {
        self.most_running.saturating_sub(self.running.available_permits())
    }

    /// The turns of a scope.
    pub fn turn(&self, scope_no: i32) -> Arc<Turn> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        // Turns that nobody holds are forgotten, so that the map is bounded by the waiters.
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns.entry(scope_no).or_default().clone()
    }
}

/// A snapshot that is begun in the request's transaction, and has no rows yet.
pub struct Begun {
    /// Its number, for the sessions that are made of it.
    pub snapshot_no: i64,
    key: ContentKey,
}

/// Begins to stage a scope's content as of the request's snapshot. `None`: another puller is staging the scope.
pub async fn begin(
    app: &App,
    db: &Transaction<'_>,
    opened: &Opened,
    scope: &ClientScope,
) -> Result<Option<Begun>, Failure> {
    if !snapshot::try_claim_staging(db, scope.scope_no).await? {
        return Ok(None);
    }
    let key = digests::key(opened, scope);
    let snapshot_no = snapshot::begin(db, &key, app.now()).await?;
    Ok(Some(Begun { snapshot_no, key }))
}

/// Stages the rows.
pub async fn fill(db: &Transaction<'_>, opened: &Opened, scope: &ClientScope, begun: &Begun) -> Result<(), Failure> {
    let started = Instant::now();
    let Begun { snapshot_no, key } = *begun;
    digest::plan_for_scopes(db).await?;
    digest::check_markers(db, scope.scope_no).await?;
    let counts: HashMap<i16, i64> = digest::row_counts(db, scope.scope_no).await?.into_iter().collect();
    let total: i64 = counts.values().sum();
    let schema_hash = &opened.served.configuration.schema_hash;
    let mut digester = ScopeDigester::new(schema_hash, &scope.scope_id, total as u64);
    let mut blocks =
        Blocks { db, snapshot_no, next_block: 0, first_row: 0, ends: Vec::new(), records: Vec::new(), octets: 0 };
    let mut identity = Vec::new();
    for (table, encoder) in opened.served.tables_in_identity_order() {
        if !counts.contains_key(&table.table_no) {
            continue;
        }
        let portal = snapshot::open_content(db, scope.scope_no, table).await?;
        let mut fetch = FETCH_ROWS / 10;
        loop {
            let rows = snapshot::next_content(db, &portal, scope.scope_no, table, fetch).await?;
            for row in &rows {
                identity.clear();
                encoder.identity_prefix().identity_into(&row.key, &mut identity);
                digester
                    .row(&identity, &row.digest)
                    .map_err(|_| Failure::integrity("a scope's rows are not in order"))?;
                let pk = encoder.key_json(&row.key).map_err(|_| Failure::integrity("a stored key is not canonical"))?;
                let version = row.version.server_version();
                RebuildPage::record(&mut blocks.records, &table.id, &pk, &row.wire, &row.digest, &version);
                blocks.end_record().await?;
            }
            if rows.len() < fetch as usize {
                break;
            }
            let octets: usize = rows.iter().map(|row| row.wire.len()).sum();
            fetch = (FETCH_OCTETS * rows.len()).div_ceil(octets.max(1)).clamp(1, FETCH_ROWS as usize) as i32;
        }
    }
    let octets = blocks.finish().await?;
    let digest = digester.finish().map_err(|_| Failure::integrity("a scope has entries without captured rows"))?;
    digest::plan_for_pages(db).await?;
    snapshot::complete(db, &key, snapshot_no, total, octets, &digest).await?;
    metrics::counter!("tributary_snapshots_staged_total").increment(1);
    metrics::histogram!("tributary_staging_duration_seconds").record(started.elapsed().as_secs_f64());
    Ok(())
}

/// Writes records as blocks.
struct Blocks<'a> {
    db: &'a Transaction<'a>,
    snapshot_no: i64,
    next_block: i32,
    first_row: i64,
    ends: Vec<i32>,
    records: Vec<u8>,
    octets: i64,
}

impl Blocks<'_> {
    async fn end_record(&mut self) -> Result<(), Failure> {
        let end = i32::try_from(self.records.len())
            .map_err(|_| Failure::integrity("a record is larger than a block can be"))?;
        self.ends.push(end);
        if self.records.len() >= BLOCK_OCTETS || self.ends.len() >= BLOCK_RECORDS {
            self.write().await?;
        }
        Ok(())
    }

    async fn write(&mut self) -> Result<(), Failure> {
        snapshot::add_block(self.db, self.snapshot_no, self.next_block, self.first_row, &self.ends, &self.records)
            .await?;
        self.next_block += 1;
        self.first_row += self.ends.len() as i64;
        self.octets += self.records.len() as i64;
        self.ends.clear();
        self.records.clear();
        Ok(())
    }

    async fn finish(mut self) -> Result<i64, Failure> {
        if !self.ends.is_empty() {
            self.write().await?;
        }
        Ok(self.octets)
    }
}

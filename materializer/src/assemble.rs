//! From changes to batches: whole source transactions, collapsed to the net state of each row. Pure.
//!
//! Within one source transaction only a row's last state counts, at the position of the last event that touched it
//! (membership is evaluated once, on the state at the transaction's end). Across the transactions of a batch each end
//! state is kept, because each may have put the row into a scope: a scope that a row entered and left within one batch
//! still gets its delete marker.
//!
//! Memory is bounded by [`Limits`]: a source transaction that is larger goes through as parts, which the writer puts
//! into one state transaction. A row that enters and leaves a scope in different parts of one source transaction leaves
//! a delete marker that a smaller transaction would not; clients ignore a delete of a row that they do not hold.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::SystemTime;

use bytes::Bytes;
use tributary_shared::canonical::{FieldSource, RowEncoder};
use tributary_shared::lsn::Lsn;
use tributary_shared::position::Position;

use crate::pgoutput::{Change, Datum, Row};

/// Where a batch is full.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Row states held.
    pub rows: usize,
    /// Octets of their values.
    pub octets: usize,
    /// Complete source transactions.
    pub transactions: u64,
}

/// What a row is at the end of one source transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowState {
    /// The last event that touched it.
    pub position: Position,
    /// The row, `None` when it is deleted.
    pub row: Option<Row>,
    /// The former key of a row that changed its key, when unchanged values have to be read from its projection.
    pub unchanged_from: Option<Vec<u8>>,
}

impl RowState {
    /// A state whose unchanged values, if it has any, stand under its own key.
    pub fn new(position: Position, row: Option<Row>) -> Self {
        Self { position, row, unchanged_from: None }
    }

    fn has_unchanged(&self) -> bool {
        self.row.as_ref().is_some_and(|row| row.contains(&Datum::Unchanged))
    }
}

/// A row that a batch touches.
#[derive(Debug)]
pub struct PendingRow {
    /// Canonical octets of its key.
    pub key: Vec<u8>,
    /// Whether the first event was an INSERT: then the projection does not hold it.
    pub fresh: bool,
    /// Its states at the ends of the batch's source transactions, in commit order; never empty.
    pub states: Vec<RowState>,
}

/// The rows of one relation that a batch touches.
#[derive(Debug, Default)]
pub struct TableBatch {
    /// Rows, each key once.
    pub rows: Vec<PendingRow>,
    index: HashMap<Vec<u8>, usize>,
}

/// The end of the last complete source transaction of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionEnd {
    /// Its commit LSN.
    pub commit_lsn: Lsn,
    /// Its end LSN, exclusive.
    pub end_lsn: Lsn,
    /// Its commit time.
    pub commit_time: SystemTime,
}

/// One accepted-write epoch that was met in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptedEpoch {
    /// User.
    pub user_id: String,
    /// Client.
    pub client_id: String,
    /// Epoch.
    pub epoch: i64,
}

/// Work for one turn of the writer.
#[derive(Debug, Default)]
pub struct Batch {
    /// By index of the relation in the registry.
    pub tables: Vec<TableBatch>,
    /// A TRUNCATE that comes before the rows of this batch: relations and the event's position.
    pub truncates: Vec<(usize, Position)>,
    /// Epochs of the batch, the newest of each client.
    pub epochs: HashMap<(String, String), i64>,
    /// The end of the last complete transaction; `None`: the state transaction stays open for the next batch.
    pub end: Option<TransactionEnd>,
    /// Commit LSN of the first transaction that the batch has anything of.
    pub first_commit: Option<Lsn>,
    /// Complete source transactions.
    pub transactions: u64,
    /// Row changes.
    pub changes: u64,
    /// Whether other batches may share its state transaction.
    pub joinable: bool,
    rows: usize,
    octets: usize,
}

impl Batch {
    /// A batch of rows of one relation of `tables`, outside of any transaction: for a baseline.
    pub fn of_rows(tables: usize, table: usize, rows: Vec<PendingRow>) -> Self {
        let mut batch = empty(tables);
        batch.tables[table].rows = rows;
        batch
    }

    /// Whether it changes durable state other than the boundary.
    pub fn has_content(&self) -> bool {
        self.rows > 0 || !self.truncates.is_empty() || !self.epochs.is_empty()
    }
}

/// Why a transaction cannot be assembled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssembleError {
    /// The stream's messages are out of order.
    #[error("the stream is out of order: {0}")]
    Order(&'static str),
    /// A key has no canonical form.
    #[error("a key cannot be represented: {detail}")]
    Key {
        /// Index of the relation in the registry.
        table: usize,
        /// The reason, without the value.
        detail: String,
    },
    /// More events in one transaction than a position can number.
    #[error("a transaction has too many events")]
    TooManyEvents,
}

#[derive(Debug)]
struct Open {
    commit_lsn: Lsn,
    commit_time: SystemTime,
    next_event: u64,
    /// Already materialized before a restart: its changes are skipped.
    replayed: bool,
}

/// Assembles batches from the stream's events.
pub struct Assembler {
    encoders: Vec<RowEncoder>,
    key_columns: Vec<Vec<usize>>,
    limits: Limits,
    boundary: Lsn,
    open: Option<Open>,
    batch: Batch,
    /// A full batch that a TRUNCATE or the limits cut off inside a transaction, to be written first.
    cut: Option<Batch>,
}

impl Assembler {
    /// An assembler behind the durable boundary (inclusive commit LSN); `key_columns` and `encoders` by relation.
    pub fn new(encoders: Vec<RowEncoder>, key_columns: Vec<Vec<usize>>, limits: Limits, boundary: Lsn) -> Self {
        let batch = empty(encoders.len());
        Self { encoders, key_columns, limits, boundary, open: None, batch, cut: None }
    }

    /// A transaction begins.
    pub fn begin(&mut self, commit_lsn: Lsn, commit_time: SystemTime) -> Result<(), AssembleError> {
        if self.open.is_some() {
            return Err(AssembleError::Order("BEGIN inside a transaction"));
        }
        let replayed = commit_lsn <= self.boundary;
        if !replayed && self.batch.first_commit.is_none() {
            self.batch.first_commit = Some(commit_lsn);
        }
        self.open = Some(Open { commit_lsn, commit_time, next_event: 0, replayed });
        Ok(())
    }

    /// A row change of the open transaction.
    pub fn change(&mut self, change: Change) -> Result<(), AssembleError> {
        let open = self.open.as_mut().ok_or(AssembleError::Order("a change outside a transaction"))?;
        if open.replayed {
            return Ok(());
        }
        let (commit_lsn, event) = (open.commit_lsn, open.next_event);
        open.next_event += 1;
        let at = |effect| Position::effect(commit_lsn, event, effect).map_err(|_| AssembleError::TooManyEvents);
        self.batch.changes += 1;
        match change {
            Change::Insert { table, row } => {
                let key = self.row_key(table, &row)?;
                self.put(table, key, RowState::new(at(0)?, Some(row)), true);
            }
            Change::Update { table, old_key, mut row } => {
                // A key that is TOASTed itself is left out of the new row when it did not change.
                for (&column, text) in self.key_columns[table].iter().zip(old_key.iter().flatten()) {
                    if row[column] == Datum::Unchanged {
                        row[column] = Datum::Text(text.clone());
                    }
                }
                let key = self.row_key(table, &row)?;
                let old_key = old_key.map(|key| self.text_key(table, key.iter())).transpose()?;
                match old_key {
                    // The delete of the old key and the insert of the new one are two effects of one event, ordered
                    // by their key octets.
                    Some(old_key) if old_key != key => {
                        let (old, new) = if old_key < key { (0, 1) } else { (1, 0) };
                        let mut state = RowState::new(at(new)?, Some(row));
                        self.inherit_unchanged(table, &old_key, &mut state);
                        self.put(table, old_key, RowState::new(at(old)?, None), false);
                        self.put(table, key, state, true);
                    }
                    _ => self.put(table, key, RowState::new(at(0)?, Some(row)), false),
                }
            }
            Change::Delete { table, key } => {
                let key = self.text_key(table, key.iter())?;
                self.put(table, key, RowState::new(at(0)?, None), false);
            }
            Change::Truncate { tables } => {
                // What came before the TRUNCATE is written before it.
                if self.batch.has_content() {
                    self.cut_off();
                }
                let mut next = event;
                // One event for each relation, so that their effects in one scope have positions of their own.
                for table in tables {
                    let position = Position::effect(commit_lsn, next, 0).map_err(|_| AssembleError::TooManyEvents)?;
                    self.batch.truncates.push((table, position));
                    next += 1;
                }
                if let Some(open) = &mut self.open {
                    open.next_event = next;
                }
            }
        }
        Ok(())
    }

    /// An accepted-write epoch of the open transaction.
    pub fn accepted(&mut self, epoch: AcceptedEpoch) -> Result<(), AssembleError> {
        let open = self.open.as_ref().ok_or(AssembleError::Order("a transactional message outside a transaction"))?;
        if !open.replayed {
            let newest = self.batch.epochs.entry((epoch.user_id, epoch.client_id)).or_default();
            *newest = epoch.epoch.max(*newest);
        }
        Ok(())
    }

    /// The open transaction ends.
    pub fn commit(&mut self, commit_lsn: Lsn, end_lsn: Lsn) -> Result<(), AssembleError> {
        let open = self.open.take().ok_or(AssembleError::Order("COMMIT outside a transaction"))?;
        if open.commit_lsn != commit_lsn {
            return Err(AssembleError::Order("COMMIT of another transaction than BEGIN"));
        }
        if open.replayed {
            return Ok(());
        }
        if commit_lsn <= self.boundary {
            return Err(AssembleError::Order("commits are not in commit order"));
        }
        self.boundary = commit_lsn;
        self.batch.transactions += 1;
        self.batch.end = Some(TransactionEnd { commit_lsn, end_lsn, commit_time: open.commit_time });
        Ok(())
    }

    /// One source transaction at a time, to find the one that cannot be materialized; or as usual again.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Commit LSN of the transaction that is being received.
    pub fn open_transaction(&self) -> Option<Lsn> {
        self.open.as_ref().map(|open| open.commit_lsn)
    }

    /// Whether nothing is held: every transaction that was received has been taken.
    pub fn is_empty(&self) -> bool {
        self.open.is_none() && self.cut.is_none() && self.batch.end.is_none() && !self.batch.has_content()
    }

    /// Whether no more may be added before a batch is taken.
    pub fn is_full(&self) -> bool {
        self.cut.is_some()
            || self.batch.rows >= self.limits.rows
            || self.batch.octets >= self.limits.octets
            || self.batch.transactions >= self.limits.transactions
    }

    /// Whether anything waits to be written: a complete transaction, or a part of one that fills the limits.
    pub fn is_ready(&self) -> bool {
        self.is_full() || (self.open.is_none() && self.batch.end.is_some())
    }

    /// Whether what waits changes more than the boundary.
    pub fn has_content(&self) -> bool {
        self.cut.is_some() || self.batch.has_content()
    }

    /// Takes the next batch. Inside a transaction the batch is a part, and leaves the state transaction open.
    pub fn take(&mut self) -> Batch {
        if let Some(cut) = self.cut.take() {
            return cut;
        }
        let mut batch = std::mem::replace(&mut self.batch, empty(self.encoders.len()));
        self.leave_open(&mut batch);
        batch
    }

    fn cut_off(&mut self) {
        let mut batch = std::mem::replace(&mut self.batch, empty(self.encoders.len()));
        self.leave_open(&mut batch);
        self.cut = Some(batch);
    }

    /// Inside a transaction the batch must not be committed: it holds a part.
    fn leave_open(&mut self, batch: &mut Batch) {
        batch.joinable = self.limits.transactions > 1;
        if let Some(open) = &self.open {
            batch.end = None;
            if !open.replayed {
                self.batch.first_commit = Some(open.commit_lsn);
            }
        }
    }

    fn row_key(&self, table: usize, row: &Row) -> Result<Vec<u8>, AssembleError> {
        let texts = self.key_columns[table].iter().map(|&column| match &row[column] {
            Datum::Text(text) => Some(text),
            Datum::Null | Datum::Unchanged => None,
        });
        if texts.clone().any(|text| text.is_none()) {
            return Err(AssembleError::Key { table, detail: "a row does not carry its key".into() });
        }
        self.text_key(table, texts.flatten())
    }

    fn text_key<'a>(&self, table: usize, texts: impl Iterator<Item = &'a Bytes>) -> Result<Vec<u8>, AssembleError> {
        let mut invalid = false;
        let sources = texts.map(|text| {
            FieldSource::Text(std::str::from_utf8(text).unwrap_or_else(|_| {
                invalid = true;
                ""
            }))
        });
        let octets = self.encoders[table].key_octets_of(sources);
        if invalid {
            return Err(AssembleError::Key { table, detail: "it is not valid UTF-8".into() });
        }
        octets.map_err(|error| AssembleError::Key { table, detail: error.to_string() })
    }

    /// A row that changes its key takes unchanged values from its old key's state, if this batch holds it; what is
    /// still unchanged then stands in the old key's projection.
    fn inherit_unchanged(&self, table: usize, old_key: &[u8], state: &mut RowState) {
        let batch = &self.batch.tables[table];
        let mut from = Some(old_key.to_vec());
        if let Some(&index) = batch.index.get(old_key)
            && let Some(old) = batch.rows[index].states.last()
        {
            if let (Some(row), Some(before)) = (&mut state.row, &old.row) {
                fill_unchanged(row, before);
            }
            if old.unchanged_from.is_some() {
                from.clone_from(&old.unchanged_from);
            }
        }
        if state.has_unchanged() {
            state.unchanged_from = from;
        }
    }

    fn put(&mut self, table: usize, key: Vec<u8>, mut state: RowState, inserted: bool) {
        let batch = &mut self.batch;
        batch.octets += key.len() + state.row.as_ref().map_or(0, row_octets);
        let pending = &mut batch.tables[table];
        if let Some(&index) = pending.index.get(&key) {
            let states = &mut pending.rows[index].states;
            let last = states.last_mut().expect("a pending row has a state");
            if let (Some(row), Some(before)) = (&mut state.row, &last.row) {
                fill_unchanged(row, before);
            }
            if state.unchanged_from.is_none() && state.has_unchanged() {
                state.unchanged_from.clone_from(&last.unchanged_from);
            }
            if last.position.commit_lsn() == state.position.commit_lsn() {
                *last = state;
            } else {
                states.push(state);
                batch.rows += 1;
            }
        } else {
            pending.index.insert(key.clone(), pending.rows.len());
            pending.rows.push(PendingRow { key, fresh: inserted, states: vec![state] });
            batch.rows += 1;
        }
    }
}

fn empty(tables: usize) -> Batch {
    Batch { tables: (0..tables).map(|_| TableBatch::default()).collect(), ..Batch::default() }
}

fn row_octets(row: &Row) -> usize {
    row.iter().map(|d| std::mem::size_of::<Datum>() + if let Datum::Text(text) = d { text.len() } else { 0 }).sum()
}

/// Takes values that a change did not touch from the row before it.
fn fill_unchanged(row: &mut Row, before: &Row) {
    for (value, old) in row.iter_mut().zip(before) {
        if *value == Datum::Unchanged {
            *value = old.clone();
        }
    }
}

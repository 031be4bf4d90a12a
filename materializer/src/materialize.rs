//! From a batch to durable state: look up what the rows were, evaluate the rules, write projections and entries.
//!
//! Everything is done in sets: a constant number of statements per batch and relation, whatever the number of rows.
//! The statements stand in `tributary_shared::store::write`; the decisions stand here.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use deadpool_postgres::Transaction;
use tributary_shared::canonical::{FieldSource, RowEncoder, WireFields, wire_fields};
use tributary_shared::position::Position;
use tributary_shared::registry::{Registry, Table};
use tributary_shared::rule::{Rule, RuleSql};
use tributary_shared::seal::RowSeal;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::membership::Changed;
use tributary_shared::store::scope;
use tributary_shared::store::session::{self, Pool};
use tributary_shared::store::write::{self, EntryWrite, Existing, RowCopy, RowWrite};

use crate::assemble::{Batch, PendingRow, RowState, TableBatch};
use crate::membership::{self, SetMembership, Written};
use crate::meters::Phases;
use crate::pgoutput::Datum;

/// Interned scopes remembered by a writer; past it the memory starts over.
const SCOPE_CACHE: usize = 1 << 20;

/// Why a batch could not be materialized.
#[derive(Debug, thiserror::Error)]
pub enum MaterializeError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A row cannot be typed or evaluated, or contradicts the projection: the stream stops at its transaction.
    #[error("{relation}: {detail}")]
    Poison {
        /// The relation.
        relation: String,
        /// What is wrong, without values.
        detail: String,
    },
}

/// The rules of one relation.
struct TableRules {
    native: Vec<Rule>,
    sql: Vec<(Rule, RuleSql)>,
}

/// Writes batches; one per state session.
pub struct Writer {
    registry: Arc<Registry>,
    encoders: Arc<Vec<RowEncoder>>,
    rules: Vec<TableRules>,
    schema_hash: [u8; 32],
    next_row_id: Arc<AtomicI64>,
    scopes: HashMap<String, i32>,
    /// For each relation whether it can have departed rows; asked once. Only the leader's writer adds them, and none
    /// survives a state transaction that fails.
    departed: Vec<Option<bool>>,
    pool: Pool,
    /// For a baseline: the version of every row, while effects stand at the generation start.
    baseline_version: Option<Position>,
    /// Membership of the tables that rules with joins read.
    membership: SetMembership,
    /// Time since the last state transaction.
    pub phases: Phases,
}

/// What a column of a row is, once unchanged values are found.
#[derive(Clone, Copy)]
enum Resolved<'a> {
    Null,
    Text(&'a str),
    /// From the projection: text if the column is stored, wire JSON if the table is synced.
    Kept {
        text: Option<&'a str>,
        wire: Option<&'a str>,
    },
}

impl<'a> Resolved<'a> {
    fn text(self) -> Option<&'a str> {
        match self {
            Self::Null => None,
            Self::Text(text) => Some(text),
            Self::Kept { text, .. } => text,
        }
    }
}

/// What the rules say about one row of a batch; scopes by their index among the batch's scopes.
#[derive(Default, Clone)]
struct Membership {
    /// Of the last state; a scope may be named by several rules.
    present: Vec<usize>,
    /// Of earlier states.
    touched: Vec<usize>,
}

/// The scopes that a batch names, each once.
#[derive(Default)]
struct BatchScopes {
    ids: Vec<String>,
    index: HashMap<String, usize>,
}

impl BatchScopes {
    fn index(&mut self, id: String) -> usize {
        if let Some(&index) = self.index.get(&id) {
            return index;
        }
        self.ids.push(id.clone());
        self.index.insert(id, self.ids.len() - 1);
        self.ids.len() - 1
    }
}

/// Looked-up former rows of one relation, by key.
struct Former {
    by_key: HashMap<Vec<u8>, Existing>,
    departed: HashMap<Vec<u8>, i64>,
}

impl Writer {
    /// A writer of the registry's relations. `pool` gives the session that interns scopes, outside of the state
    /// transaction: a new scope without entries is an empty scope, and nobody waits for a long transaction because of
    /// its name.
    pub fn new(
        registry: Arc<Registry>,
        encoders: Arc<Vec<RowEncoder>>,
        schema_hash: [u8; 32],
        next_row_id: Arc<AtomicI64>,
        pool: Pool,
        baseline_version: Option<Position>,
    ) -> Self {
        let membership = SetMembership::new(registry.clone(), &encoders, pool.clone());
        let rules = registry
            .tables
            .iter()
            .map(|table| {
                let mut rules = TableRules { native: Vec::new(), sql: Vec::new() };
                let ours = !membership.evaluates(table);
                for rule in registry.rules.iter().filter(|r| ours && r.table_no == table.table_no) {
                    if rule.native().is_some() {
                        rules.native.push(rule.clone());
                    } else {
                        rules.sql.push((rule.clone(), rule.sql(table)));
                    }
                }
                rules
            })
            .collect();
        Self {
            departed: vec![None; registry.tables.len()],
            scopes: HashMap::new(),
            registry,
            encoders,
            rules,
            schema_hash,
            next_row_id,
            pool,
            baseline_version,
            membership,
            phases: Phases::default(),
        }
    }

    /// The next interned row number, for the progress row.
    pub fn next_row_id(&self) -> i64 {
        self.next_row_id.load(Ordering::Relaxed)
    }

    /// Writes a batch into the open state transaction. The boundary is not moved.
    pub async fn write(&mut self, db: &Transaction<'_>, batch: &Batch) -> Result<(), MaterializeError> {
        let registry = self.registry.clone();
        for &(table, position) in &batch.truncates {
            if self.membership.concerns(&registry.tables[table]) {
                self.membership.truncate(db, &registry.tables[table], position).await?;
            } else {
                write::truncate(db, &registry.tables[table], position).await?;
            }
            self.departed[table] = Some(true);
        }
        let mut scopes = BatchScopes::default();
        let mut work = Vec::new();
        for (index, pending) in batch.tables.iter().enumerate().filter(|(_, t)| !t.rows.is_empty()) {
            let reading = Instant::now();
            let former = self.look_up(db, index, pending).await?;
            self.phases.read += reading.elapsed();
            let evaluating = Instant::now();
            let membership = self.evaluate(db, index, pending, &former, &mut scopes).await?;
            self.phases.rules += evaluating.elapsed();
            work.push((index, pending, former, membership));
        }
        let numbers = self.intern(&scopes.ids).await?;
        let concerned =
            |index: usize| self.membership.concerns(&registry.tables[index]) && self.baseline_version.is_none();
        let concerned: Vec<bool> = (0..registry.tables.len()).map(concerned).collect();
        for (index, pending, former, _) in work.iter().filter(|(index, ..)| concerned[*index]) {
            let table = &registry.tables[*index];
            let reaching = membership::reaching(table, &pending.rows, &former.by_key);
            self.membership.before(db, table, &reaching).await?;
        }
        let mut written = Vec::new();
        for (index, pending, former, membership) in work {
            let writing = Instant::now();
            let rows = self.write_table(db, index, pending, &former, &membership, &numbers).await?;
            self.phases.write += writing.elapsed();
            if concerned[index] {
                written.push((index, rows));
            }
        }
        for (index, rows) in written {
            self.membership.after(db, &registry.tables[index], &rows).await?;
        }
        let epochs: Vec<(&str, &str, i64)> =
            batch.epochs.iter().map(|((user, client), epoch)| (user.as_str(), client.as_str(), *epoch)).collect();
        write::record_epochs(db, &epochs).await?;
        Ok(())
    }

    /// Completes a state transaction, after its last batch: membership that rules with joins give is evaluated once, on
    /// its end state.
    pub async fn finish(&mut self, db: &Transaction<'_>) -> Result<(), MaterializeError> {
        let evaluating = Instant::now();
        let finished = self.membership.finish(db).await;
        self.phases.rules += evaluating.elapsed();
        finished
    }

    /// What the projection and the departed rows hold under the batch's keys.
    async fn look_up(
        &mut self,
        db: &Transaction<'_>,
        index: usize,
        pending: &TableBatch,
    ) -> Result<Former, MaterializeError> {
        let registry = self.registry.clone();
        let table = &registry.tables[index];
        let fresh: Vec<&[u8]> = pending.rows.iter().filter(|r| r.fresh).map(|r| r.key.as_slice()).collect();
        let known: Vec<&[u8]> = pending.rows.iter().filter(|r| !r.fresh).map(|r| r.key.as_slice()).collect();
        let mut former = Former { by_key: HashMap::new(), departed: HashMap::new() };
        if !fresh.is_empty() && self.baseline_version.is_none() && self.may_have_departed(db, index).await? {
            former.departed.extend(write::departed(db, table.table_no, &fresh).await?);
        }
        if !known.is_empty() {
            let wire = !table.capture_only && pending.rows.iter().flat_map(|r| &r.states).any(has_unchanged);
            let rows = write::existing(db, table, &known, wire).await?;
            former.by_key.extend(rows.into_iter().map(|row| (row.key.clone(), row)));
            if pending.rows.iter().any(|r| !r.fresh && !former.by_key.contains_key(&r.key)) {
                return Err(self.poison(index, "a change of a row that the projection does not hold"));
            }
        }
        Ok(former)
    }

    async fn may_have_departed(&mut self, db: &Transaction<'_>, index: usize) -> Result<bool, MaterializeError> {
        if let Some(known) = self.departed[index] {
            return Ok(known);
        }
        let found = write::has_departed(db, self.registry.tables[index].table_no).await?;
        self.departed[index] = Some(found);
        Ok(found)
    }

    /// Evaluates the relation's rules on every end state of its rows.
    async fn evaluate(
        &self,
        db: &Transaction<'_>,
        index: usize,
        pending: &TableBatch,
        former: &Former,
        scopes: &mut BatchScopes,
    ) -> Result<Vec<Membership>, MaterializeError> {
        let rules = &self.rules[index];
        let mut membership = vec![Membership::default(); pending.rows.len()];
        if rules.native.is_empty() && rules.sql.is_empty() {
            return Ok(membership);
        }
        let table = &self.registry.tables[index];
        let native: Vec<_> = rules.native.iter().filter_map(Rule::native).collect();
        // States that SQL has to look at, and where they belong: (row, is it the last state).
        let mut asked: Vec<(usize, bool)> = Vec::new();
        let mut arrays: Vec<Vec<Vec<Option<&str>>>> =
            rules.sql.iter().map(|(_, sql)| vec![Vec::new(); sql.columns.len()]).collect();
        for (row, pending_row) in pending.rows.iter().enumerate() {
            for (i, state) in pending_row.states.iter().enumerate() {
                let Some(resolved) = Self::resolve(table, pending_row, state, former, &HashMap::new())? else {
                    continue;
                };
                let last = i + 1 == pending_row.states.len();
                let texts: Vec<Option<&str>> = resolved.iter().map(|r| r.text()).collect();
                for rule in &native {
                    let scope = rule.scope(&texts).map_err(|e| self.poison(index, &e.to_string()))?;
                    if let Some(id) = scope {
                        add(&mut membership[row], scopes.index(id), last);
                    }
                }
                if !rules.sql.is_empty() {
                    asked.push((row, last));
                    for ((_, sql), columns) in rules.sql.iter().zip(&mut arrays) {
                        for (array, &column) in columns.iter_mut().zip(&sql.columns) {
                            array.push(texts[column]);
                        }
                    }
                }
            }
        }
        let ordinals: Vec<i32> = (0..asked.len()).map(|i| i as i32).collect();
        for ((rule, sql), columns) in rules.sql.iter().zip(&arrays) {
            let answers = match write::evaluate_rule(db, &sql.text, &ordinals, columns).await {
                Ok(answers) => answers,
                Err(error) if is_data_error(&error) => {
                    return Err(self.poison(index, &format!("a rule cannot be evaluated: {error}")));
                }
                Err(error) => return Err(error.into()),
            };
            for (ordinal, values) in answers {
                let (row, last) = asked[ordinal as usize];
                let values: Vec<Option<&str>> = values.iter().map(Option::as_deref).collect();
                let scope = rule.scope_id(&values).map_err(|e| self.poison(index, &e.to_string()))?;
                if let Some(id) = scope {
                    add(&mut membership[row], scopes.index(id), last);
                }
            }
        }
        Ok(membership)
    }

    /// The columns of a row state; `None` for a deleted row.
    fn resolve<'a>(
        table: &Table,
        pending: &'a PendingRow,
        state: &'a RowState,
        former: &'a Former,
        wires: &HashMap<&[u8], WireFields<'a>>,
    ) -> Result<Option<Vec<Resolved<'a>>>, MaterializeError> {
        let Some(row) = &state.row else { return Ok(None) };
        let mut kept: Option<(&'a Existing, Option<&WireFields<'a>>)> = None;
        if has_unchanged(state) {
            let from = state.unchanged_from.as_deref().unwrap_or(&pending.key);
            let existing = former.by_key.get(from).ok_or_else(|| MaterializeError::Poison {
                relation: table.relation.to_string(),
                detail: "an unchanged value is not in the projection".into(),
            })?;
            kept = Some((existing, wires.get(from)));
        }
        let mut stored = 0;
        let mut resolved = Vec::with_capacity(row.len());
        for (column, datum) in table.columns.iter().zip(row) {
            resolved.push(match datum {
                Datum::Null => Resolved::Null,
                Datum::Text(_) => datum.text().map_or(Resolved::Null, Resolved::Text),
                Datum::Unchanged => {
                    let (existing, wire) = kept.expect("looked up above for a state with unchanged values");
                    let text = if column.stored { existing.stored[stored].as_deref() } else { None };
                    Resolved::Kept { text, wire: wire.and_then(|w| w.get(&column.field_id)) }
                }
            });
            stored += usize::from(column.stored);
        }
        Ok(Some(resolved))
    }

    /// Numbers of the batch's scopes, interned outside of the state transaction.
    async fn intern(&mut self, ids: &[String]) -> Result<Vec<i32>, MaterializeError> {
        if self.scopes.len() > SCOPE_CACHE {
            self.scopes.clear();
        }
        let missing: Vec<&str> = ids.iter().map(String::as_str).filter(|id| !self.scopes.contains_key(*id)).collect();
        if !missing.is_empty() {
            let db = session::acquire(&self.pool).await?;
            let numbers = scope::intern(&db, &missing).await?;
            for (id, number) in missing.into_iter().zip(numbers) {
                self.scopes.insert(id.to_owned(), number);
            }
        }
        Ok(ids.iter().map(|id| self.scopes[id]).collect())
    }

    async fn write_table(
        &mut self,
        db: &Transaction<'_>,
        index: usize,
        pending: &TableBatch,
        former: &Former,
        membership: &[Membership],
        numbers: &[i32],
    ) -> Result<Vec<Written>, MaterializeError> {
        let registry = self.registry.clone();
        let table = &registry.tables[index];
        let concerned = self.membership.concerns(table);
        let old_ids: Vec<i64> = former.by_key.values().map(|e| e.row_id).collect();
        let mut old_scopes: HashMap<i64, Vec<i32>> = HashMap::new();
        if !old_ids.is_empty() && !self.membership.evaluates(table) {
            for (row_id, scope_no) in write::present_scopes(db, &old_ids).await? {
                old_scopes.entry(row_id).or_default().push(scope_no);
            }
        }
        let wires = self.wires(index, pending, former)?;

        let mut added = Vec::new();
        let mut updated = Vec::new();
        let mut deleted: Vec<(i64, &[u8])> = Vec::new();
        let mut removed = Vec::new();
        let mut returned = Vec::new();
        let mut new_entries = Vec::new();
        let mut moved_entries = Vec::new();
        let mut written = Vec::new();
        for (pending_row, member) in pending.rows.iter().zip(membership) {
            let state = pending_row.states.last().expect("a pending row has a state");
            let existing = former.by_key.get(&pending_row.key);
            let departed = former.departed.get(&pending_row.key).copied();
            let known = existing.map(|e| e.row_id).or(departed);
            // A row that came and went within the batch without touching a scope leaves nothing.
            if state.row.is_none() && known.is_none() && member.touched.is_empty() && member.present.is_empty() {
                continue;
            }
            let row_id = known.unwrap_or_else(|| self.next_row_id.fetch_add(1, Ordering::Relaxed));
            if concerned {
                written.push(Written {
                    changed: Changed { row_id, position: state.position },
                    reaches_others: membership::reaches_others(table, pending_row, existing),
                    is_there: state.row.is_some(),
                });
            }
            let present = ascending(member.present.iter().map(|&s| numbers[s]));
            let former_scopes = old_scopes.get(&row_id).into_iter().flatten().copied();
            let mut left = ascending(member.touched.iter().map(|&s| numbers[s]).chain(former_scopes));
            left.retain(|scope_no| present.binary_search(scope_no).is_err());
            let entries = if known.is_some() { &mut moved_entries } else { &mut new_entries };
            for (scope_no, present) in present.iter().map(|&s| (s, true)).chain(left.iter().map(|&s| (s, false))) {
                entries.push(EntryWrite {
                    row_id,
                    scope_no,
                    table_no: table.table_no,
                    position: state.position,
                    present,
                });
            }
            if state.row.is_some() {
                let row = (row_id, pending_row, state);
                if existing.is_some() {
                    updated.push(self.encode(index, row, former, &wires)?);
                } else {
                    added.push(row);
                }
                if departed.is_some() {
                    returned.push(row_id);
                }
            } else {
                if existing.is_some() {
                    removed.push(row_id);
                }
                if departed.is_none() {
                    deleted.push((row_id, &pending_row.key));
                }
            }
        }
        if !deleted.is_empty() {
            self.departed[index] = Some(true);
        }
        let rows = async {
            // Removed before added: a key can pass from one row to another within a batch.
            write::delete_rows(db, table, &removed).await?;
            write::forget_departed(db, &returned).await?;
            write::remember_departed(db, table.table_no, &deleted).await?;
            write::update_rows(db, table, &updated).await?;
            if added.len() <= write::FEW {
                let few: Vec<RowWrite<'_>> = added
                    .into_iter()
                    .map(|row| self.encode(index, row, former, &wires))
                    .collect::<Result<_, MaterializeError>>()?;
                write::insert_rows(db, table, &few).await?;
            } else {
                // Made while the server takes the ones before.
                let mut copy = RowCopy::start(db, table).await?;
                for row in added {
                    copy.row(&self.encode(index, row, former, &wires)?).await?;
                }
                copy.finish().await?;
            }
            Ok::<_, MaterializeError>(())
        };
        let entries = async {
            write::copy_entries(db, &new_entries).await?;
            Ok(write::upsert_entries(db, &moved_entries).await?)
        };
        // Neither depends on the other: what both send first goes in one round trip.
        tokio::try_join!(biased; rows, entries)?;
        metrics::counter!("tributary_changes_total", "relation" => table.relation.to_string())
            .increment(pending.rows.len() as u64);
        Ok(written)
    }

    /// The parsed wire rows that unchanged values are taken from, by key.
    fn wires<'a>(
        &self,
        index: usize,
        pending: &'a TableBatch,
        former: &'a Former,
    ) -> Result<HashMap<&'a [u8], WireFields<'a>>, MaterializeError> {
        let mut wanted: HashSet<&[u8]> = HashSet::new();
        for row in &pending.rows {
            for state in row.states.iter().filter(|s| has_unchanged(s)) {
                wanted.insert(state.unchanged_from.as_deref().unwrap_or(&row.key));
            }
        }
        let mut wires = HashMap::new();
        for key in wanted {
            if let Some(wire) = former.by_key.get(key).and_then(|e| e.wire.as_deref()) {
                let fields =
                    wire_fields(wire).map_err(|_| self.poison(index, "a captured row is not readable JSON"))?;
                wires.insert(key, fields);
            }
        }
        Ok(wires)
    }

    fn encode<'a>(
        &self,
        index: usize,
        (row_id, pending, state): (i64, &'a PendingRow, &'a RowState),
        former: &'a Former,
        wires: &HashMap<&[u8], WireFields<'a>>,
    ) -> Result<RowWrite<'a>, MaterializeError> {
        let table = &self.registry.tables[index];
        let version = self.baseline_version.unwrap_or(state.position);
        let resolved = Self::resolve(table, pending, state, former, wires)?.unwrap_or_default();
        let stored = table.columns.iter().zip(&resolved).filter(|(c, _)| c.stored).map(|(_, r)| r.text()).collect();
        let mut write = RowWrite { row_id, key: &pending.key, version, wire: None, digest: None, seal: None, stored };
        if !table.capture_only {
            let sources: Vec<FieldSource<'_>> = resolved
                .iter()
                .map(|r| match r {
                    Resolved::Null => Some(FieldSource::Null),
                    Resolved::Text(text) => Some(FieldSource::Text(text)),
                    Resolved::Kept { wire, .. } => wire.map(FieldSource::Wire),
                })
                .collect::<Option<_>>()
                .ok_or_else(|| self.poison(index, "an unchanged value is not in the projection"))?;
            let encoded = self.encoders[index]
                .encode(&sources, &self.schema_hash, &version.server_version())
                .map_err(|e| self.poison(index, &e.to_string()))?;
            let sealed = RowSeal::new(row_id, table.table_no, &pending.key, version, &encoded.digest, &encoded.wire);
            write.seal = Some(sealed);
            write.wire = Some(encoded.wire);
            write.digest = Some(encoded.digest);
        }
        Ok(write)
    }

    fn poison(&self, index: usize, detail: &str) -> MaterializeError {
        MaterializeError::Poison {
            relation: self.registry.tables[index].relation.to_string(),
            detail: detail.to_owned(),
        }
    }
}

fn has_unchanged(state: &RowState) -> bool {
    state.row.as_ref().is_some_and(|row| row.contains(&Datum::Unchanged))
}

fn add(membership: &mut Membership, scope: usize, last: bool) {
    if last { membership.present.push(scope) } else { membership.touched.push(scope) }
}

/// Numbers in ascending order, each once.
fn ascending(numbers: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut numbers: Vec<i32> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Whether the database refused a value or an expression rather than failed.
pub fn is_data_error(error: &StoreError) -> bool {
    matches!(error, StoreError::Database(e) if e.code().is_some_and(|c| c.code().starts_with("22")))
}

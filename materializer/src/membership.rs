//! Membership of the tables that rules with joins read: what a state transaction changes is noted as it is written, and
//! the rules are evaluated once, on the state at its end, by `tributary_shared::store::membership`.
//!
//! A source transaction that goes through in parts is evaluated after its last one. The rows that a change reaches are
//! noted on the state before each part is written and on the state after it: a combination of rows that goes away is
//! met before the first of its rows changes, one that comes is met after the last of them has.

use std::collections::HashMap;
use std::sync::Arc;

use deadpool_postgres::Transaction;
use futures_util::{StreamExt, pin_mut};
use tributary_shared::canonical::RowEncoder;
use tributary_shared::position::Position;
use tributary_shared::registry::catalog::ColumnType;
use tributary_shared::registry::{Registry, Table};
use tributary_shared::store::error::StoreError;
use tributary_shared::store::membership::{Changed, Membership, Refused, Violation};
use tributary_shared::store::session::{self, Pool};
use tributary_shared::store::write::{self, Existing};
use tributary_shared::store::{leader, scope};

use crate::assemble::PendingRow;
use crate::materialize::{MaterializeError, is_data_error};
use crate::pgoutput::Datum;

/// Scopes interned at once.
const INTERNED_AT_ONCE: usize = 10_000;
/// Rows of a baseline that are evaluated at once.
const BASELINE_ROWS: i64 = 50_000;

impl From<Refused> for MaterializeError {
    fn from(refused: Refused) -> Self {
        if is_data_error(&refused.error) {
            let detail = format!("a rule cannot be evaluated: {}", refused.error);
            return Self::Poison { relation: refused.relation, detail };
        }
        Self::Store(refused.error)
    }
}

impl From<Violation> for MaterializeError {
    fn from(violation: Violation) -> Self {
        Self::Poison { relation: violation.relation, detail: violation.detail }
    }
}

/// A written row that a rule with joins reads.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    pub changed: Changed,
    /// A column that rules read differs, or the row came or went.
    pub reaches_others: bool,
    /// The projection holds it now.
    pub is_there: bool,
}

/// The membership part of a writer.
pub struct SetMembership {
    registry: Arc<Registry>,
    membership: Membership,
    pool: Pool,
    /// The state transaction has noted something, so that its scratch tables are there.
    open: bool,
}

impl SetMembership {
    pub fn new(registry: Arc<Registry>, encoders: &[RowEncoder], pool: Pool) -> Self {
        let mut order: Vec<(&[u8], i16)> = registry
            .tables
            .iter()
            .zip(encoders)
            .map(|(table, encoder)| (encoder.identity_prefix().octets(), table.table_no))
            .collect();
        order.sort_unstable();
        let order: Vec<i16> = order.into_iter().map(|(_, table_no)| table_no).collect();
        let membership = Membership::new(&registry, &order);
        Self { registry, membership, pool, open: false }
    }

    /// Whether a rule with joins reads the table.
    pub fn concerns(&self, table: &Table) -> bool {
        self.membership.concerns(table.table_no)
    }

    /// Whether entries of the table's rows are written here.
    pub fn evaluates(&self, table: &Table) -> bool {
        self.membership.evaluates(table.table_no)
    }

    async fn open(&mut self, db: &Transaction<'_>) -> Result<(), StoreError> {
        if !self.open {
            self.membership.open(db).await?;
            self.open = true;
        }
        Ok(())
    }

    /// TRUNCATE of a table that a rule with joins reads.
    pub async fn truncate(
        &mut self,
        db: &Transaction<'_>,
        table: &Table,
        event: Position,
    ) -> Result<(), MaterializeError> {
        self.open(db).await?;
        self.membership.impact_of_all(db, table.table_no, event).await?;
        if self.evaluates(table) {
            self.membership.note_all(db, table, event).await?;
            write::empty(db, table).await?;
        } else {
            write::truncate(db, table, event).await?;
        }
        Ok(())
    }

    /// Before rows of a table are written: `reaching` are those of them that are projected and whose change matters to
    /// other rows.
    pub async fn before(
        &mut self,
        db: &Transaction<'_>,
        table: &Table,
        reaching: &[Changed],
    ) -> Result<(), MaterializeError> {
        if !reaching.is_empty() {
            self.open(db).await?;
            self.membership.impact(db, table.table_no, reaching).await?;
        }
        Ok(())
    }

    /// After all rows of a batch are written.
    pub async fn after(
        &mut self,
        db: &Transaction<'_>,
        table: &Table,
        written: &[Written],
    ) -> Result<(), MaterializeError> {
        if written.is_empty() {
            return Ok(());
        }
        self.open(db).await?;
        if self.evaluates(table) {
            let all: Vec<Changed> = written.iter().map(|row| row.changed).collect();
            self.membership.note(db, table.table_no, &all).await?;
        }
        let reaching: Vec<Changed> =
            written.iter().filter(|row| row.reaches_others && row.is_there).map(|row| row.changed).collect();
        self.membership.impact(db, table.table_no, &reaching).await?;
        Ok(())
    }

    /// At the end of the state transaction: evaluates what was noted and writes the effects.
    pub async fn finish(&mut self, db: &Transaction<'_>) -> Result<(), MaterializeError> {
        if !self.open {
            return Ok(());
        }
        self.open = false;
        if let Some(violation) = self.membership.evaluate(db).await? {
            return Err(violation.into());
        }
        self.intern(db).await?;
        match self.membership.write(db).await? {
            Some(violation) => Err(violation.into()),
            None => Ok(()),
        }
    }

    /// Interns scopes outside of the state transaction, as the writer does. The transaction reads what others commit.
    async fn intern(&self, db: &Transaction<'_>) -> Result<(), MaterializeError> {
        let unknown = self.membership.unknown_scopes(db).await?.chunks(INTERNED_AT_ONCE);
        pin_mut!(unknown);
        while let Some(chunk) = unknown.next().await {
            let chunk = chunk.into_iter().collect::<Result<Vec<String>, StoreError>>()?;
            let ids: Vec<&str> = chunk.iter().map(String::as_str).collect();
            scope::intern(&session::acquire(&self.pool).await?, &ids).await?;
        }
        Ok(())
    }

    /// The membership of a baseline, when all tables are copied: in ranges of rows, each in a transaction of its own.
    pub async fn baseline(&mut self, epoch: i64) -> Result<(), MaterializeError> {
        let mut db = session::acquire(&self.pool).await?;
        for table_no in self.membership.evaluated().collect::<Vec<_>>() {
            let registry = self.registry.clone();
            let Some(table) = registry.table(table_no) else { continue };
            let mut first = 0;
            loop {
                let transaction = db.transaction().await.map_err(StoreError::from)?;
                self.membership.open(&transaction).await?;
                let Some(next) = self.membership.note_range(&transaction, table, first, BASELINE_ROWS).await? else {
                    break;
                };
                if let Some(violation) = self.membership.evaluate(&transaction).await? {
                    return Err(violation.into());
                }
                self.intern(&transaction).await?;
                let entries = self.membership.write_baseline(&transaction, table_no).await?;
                leader::hold(&transaction, epoch).await?;
                transaction.commit().await.map_err(StoreError::from)?;
                tracing::debug!(relation = %table.relation, entries, "membership evaluated");
                first = next;
            }
        }
        Ok(())
    }

    /// [`Self::baseline`] inside one transaction, for a reset.
    pub async fn baseline_within(&mut self, db: &Transaction<'_>) -> Result<(), MaterializeError> {
        self.membership.open(db).await?;
        for table_no in self.membership.evaluated().collect::<Vec<_>>() {
            let registry = self.registry.clone();
            let Some(table) = registry.table(table_no) else { continue };
            let mut first = 0;
            while let Some(next) = self.membership.note_range(db, table, first, BASELINE_ROWS).await? {
                if let Some(violation) = self.membership.evaluate(db).await? {
                    return Err(violation.into());
                }
                self.intern(db).await?;
                self.membership.write_baseline(db, table_no).await?;
                self.membership.forget_noted(db).await?;
                first = next;
            }
        }
        Ok(())
    }
}

/// Whether a change of a row can matter to other rows: a column that rules read differs, or the row comes or goes.
pub fn reaches_others(table: &Table, pending: &PendingRow, before: Option<&Existing>) -> bool {
    let (Some(before), Some(row)) = (before, pending.states.last().and_then(|state| state.row.as_ref())) else {
        return true;
    };
    let columns = table.columns.iter().zip(row).filter(|(column, _)| column.stored);
    columns.zip(&before.stored).any(|((column, datum), before)| match datum {
        Datum::Unchanged => false,
        Datum::Null => before.is_some(),
        Datum::Text(_) => !is_same_text(&column.type_info, datum.text(), before.as_deref()),
    })
}

/// Whether a value's output and the cast to text of a projected one are of the same value. When in doubt they are not.
fn is_same_text(type_info: &ColumnType, output: Option<&str>, cast: Option<&str>) -> bool {
    const BOOL: u32 = 16;
    const BPCHAR: u32 = 1042;
    match (output, cast) {
        (Some(output), Some(cast)) if type_info.base_oid == BOOL => cast.starts_with(output),
        (Some(output), Some(cast)) if type_info.base_oid == BPCHAR => output.trim_end_matches(' ') == cast,
        _ => output == cast,
    }
}

/// Of the batch's rows of one table: those that are projected and whose change matters to others.
pub fn reaching(table: &Table, rows: &[PendingRow], former: &HashMap<Vec<u8>, Existing>) -> Vec<Changed> {
    let changed = |pending: &PendingRow| {
        let before = former.get(&pending.key)?;
        let position = pending.states.last()?.position;
        reaches_others(table, pending, Some(before)).then_some(Changed { row_id: before.row_id, position })
    };
    rows.iter().filter_map(changed).collect()
}

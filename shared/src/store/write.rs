//! What a state transaction reads and writes, in sets: a constant number of statements per batch and relation.

use std::fmt::Write as _;

use deadpool_postgres::{GenericClient, Transaction};
use tokio_postgres::types::ToSql;

use super::copy::{Copy, Form};
use super::error::{Result, StoreError};
use super::{projection, statement};
use crate::position::{MAX_EFFECTS, Position};
use crate::registry::Table;
use crate::registry::name::quote_identifier;
use crate::seal::{self, RowSeal, Seal};

/// A projected row as it is before a batch.
#[derive(Debug)]
pub struct Existing {
    /// Canonical octets of its key.
    pub key: Vec<u8>,
    /// Interned number.
    pub row_id: i64,
    /// PostgreSQL's text of the stored columns, in the table's order of them.
    pub stored: Vec<Option<String>>,
    /// Its wire JSON, when it was asked for and the table is synced.
    pub wire: Option<String>,
}

/// A projected row to write.
#[derive(Debug)]
pub struct RowWrite<'a> {
    /// Interned number.
    pub row_id: i64,
    /// Canonical octets of its key.
    pub key: &'a [u8],
    /// The position that its `server_version` names.
    pub version: Position,
    /// Wire JSON; `None` for a capture-only table.
    pub wire: Option<String>,
    /// Row digest; `None` for a capture-only table.
    pub digest: Option<[u8; 32]>,
    /// Its seal; `None` for a capture-only table.
    pub seal: Option<RowSeal>,
    /// PostgreSQL's text of the stored columns, in the table's order of them.
    pub stored: Vec<Option<&'a str>>,
}

/// A scope entry to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryWrite {
    /// Row.
    pub row_id: i64,
    /// Scope.
    pub scope_no: i32,
    /// The row's relation.
    pub table_no: i16,
    /// The effect's position.
    pub position: Position,
    /// Whether the row is in the scope after this effect.
    pub present: bool,
}

impl EntryWrite {
    fn seal(&self) -> Seal {
        seal::entry(self.row_id, self.position, self.scope_no, self.table_no, self.present)
    }
}

/// Numbers of rows that departed under the given keys, `(key, row_id)`; they stay until the transaction ends.
pub async fn departed(db: &impl GenericClient, table_no: i16, keys: &[&[u8]]) -> Result<Vec<(Vec<u8>, i64)>> {
    let sql = "-- write::departed
        select key, row_id from tributary.departed_row where table_no = $1 and key = any($2) for key share";
    let rows = statement::query(db, sql, &[&table_no, &keys]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Whether any row of a relation has departed and is remembered.
pub async fn has_departed(db: &impl GenericClient, table_no: i16) -> Result<bool> {
    let sql = "-- write::has_departed
        select exists (select from tributary.departed_row where table_no = $1)";
    Ok(statement::query_one(db, sql, &[&table_no]).await?.try_get(0)?)
}

/// The projected rows under the given keys.
pub async fn existing(db: &impl GenericClient, table: &Table, keys: &[&[u8]], wire: bool) -> Result<Vec<Existing>> {
    let mut sql = String::from("-- write::existing\nselect tributary_key, tributary_row_id, ");
    sql.push_str(if wire { "tributary_wire" } else { "null::text" });
    let mut stored = 0;
    for column in table.columns.iter().filter(|c| c.stored) {
        let _ = write!(sql, ", {}::text", quote_identifier(&column.name));
        stored += 1;
    }
    let _ = write!(sql, "\nfrom {} where tributary_key = any($1)", projection::name(table));
    let rows = statement::query(db, &sql, &[&keys]).await?;
    rows.iter()
        .map(|row| {
            Ok(Existing {
                key: row.try_get(0)?,
                row_id: row.try_get(1)?,
                wire: row.try_get(2)?,
                stored: (0..stored).map(|i| row.try_get(3 + i)).collect::<Result<_, _>>()?,
            })
        })
        .collect()
}

/// Scopes that the given rows are in, `(row_id, scope_no)`.
pub async fn present_scopes(db: &impl GenericClient, row_ids: &[i64]) -> Result<Vec<(i64, i32)>> {
    let sql = "-- write::present_scopes
        select row_id, scope_no from tributary.scope_entry where row_id = any($1) and present";
    let rows = statement::query(db, sql, &[&row_ids]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// Adds rows that the projection does not hold, one by one: the server works on the first while the next are made.
pub struct RowCopy {
    copy: Copy,
    /// Forms of the stored columns.
    forms: Vec<Form>,
}

impl RowCopy {
    /// Begins to add rows to a projection.
    pub async fn start(db: &Transaction<'_>, table: &Table) -> Result<Self> {
        let mut target = format!(
            "{} (tributary_row_id, tributary_key, tributary_version_lsn, tributary_version_ordinal, tributary_wire, \
             tributary_digest, tributary_seal",
            projection::name(table)
        );
        let mut forms = Vec::new();
        let mut binary = true;
        for column in table.columns.iter().filter(|c| c.stored) {
            let _ = write!(target, ", {}", quote_identifier(&column.name));
            let form = Form::of(&column.type_info.sql);
            binary &= form.is_some();
            forms.push(form.unwrap_or(Form::Text));
        }
        target.push(')');
        Ok(Self { copy: Copy::start(db, &target, 7 + forms.len(), binary).await?, forms })
    }

    /// Adds a row.
    pub async fn row(&mut self, row: &RowWrite<'_>) -> Result<()> {
        let copy = &mut self.copy;
        let (lsn, ordinal) = row.version.to_sql();
        copy.begin_row();
        copy.int8(row.row_id);
        copy.octets(row.key);
        copy.int8(lsn);
        copy.int8(ordinal);
        match &row.wire {
            Some(wire) => copy.text(wire),
            None => copy.null(),
        }
        match &row.digest {
            Some(digest) => copy.octets(digest),
            None => copy.null(),
        }
        match &row.seal {
            Some(RowSeal(seal)) => copy.octets(seal),
            None => copy.null(),
        }
        if row.stored.len() != self.forms.len() {
            return Err(StoreError::integrity("a row has another number of stored columns than its table"));
        }
        for (form, value) in self.forms.iter().zip(&row.stored) {
            match value {
                Some(text) => copy.value(*form, text)?,
                None => copy.null(),
            }
        }
        copy.end_row().await
    }

    /// Ends: every row is written.
    pub async fn finish(self) -> Result<()> {
        self.copy.finish().await
    }
}

/// Up to this many rows are added by one statement: a COPY asks once more.
pub const FEW: usize = 64;

/// Rows as arrays, one a column: `unnest` makes rows of them again.
struct RowArrays<'a> {
    row_ids: Vec<i64>,
    keys: Vec<&'a [u8]>,
    lsns: Vec<i64>,
    ordinals: Vec<i64>,
    wires: Vec<Option<&'a str>>,
    digests: Vec<Option<&'a [u8]>>,
    seals: Vec<Option<&'a [u8]>>,
    stored: Vec<Vec<Option<&'a str>>>,
}

impl<'a> RowArrays<'a> {
    fn new(table: &Table, rows: &'a [RowWrite<'_>]) -> Self {
        let stored = table.columns.iter().filter(|c| c.stored).count();
        Self {
            row_ids: rows.iter().map(|r| r.row_id).collect(),
            keys: rows.iter().map(|r| r.key).collect(),
            lsns: rows.iter().map(|r| r.version.to_sql().0).collect(),
            ordinals: rows.iter().map(|r| r.version.to_sql().1).collect(),
            wires: rows.iter().map(|r| r.wire.as_deref()).collect(),
            digests: rows.iter().map(|r| r.digest.as_ref().map(<[u8; 32]>::as_slice)).collect(),
            seals: rows.iter().map(|r| r.seal.as_ref().map(|seal| seal.0.as_slice())).collect(),
            stored: (0..stored).map(|i| rows.iter().map(|r| r.stored[i]).collect()).collect(),
        }
    }

    /// As the parameters of a statement that reads [`Self::source`].
    fn parameters(&self) -> Vec<&(dyn ToSql + Sync)> {
        let mut parameters: Vec<&(dyn ToSql + Sync)> =
            vec![&self.row_ids, &self.keys, &self.lsns, &self.ordinals, &self.wires, &self.digests, &self.seals];
        parameters.extend(self.stored.iter().map(|column| column as &(dyn ToSql + Sync)));
        parameters
    }

    /// The rows as a source `u` of a statement; stored columns are the texts `c0`, `c1` and so on.
    fn source(table: &Table) -> String {
        let stored = table.columns.iter().filter(|c| c.stored).count();
        let mut sql = String::from(
            "unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[], $5::text[], $6::bytea[], $7::bytea[]",
        );
        for i in 0..stored {
            let _ = write!(sql, ", ${}::text[]", i + 8);
        }
        sql.push_str(") as u (row_id, key, version_lsn, version_ordinal, wire, digest, seal");
        for i in 0..stored {
            let _ = write!(sql, ", c{i}");
        }
        sql.push(')');
        sql
    }
}

/// Adds a few rows that the projection does not hold.
pub async fn insert_rows(db: &impl GenericClient, table: &Table, rows: &[RowWrite<'_>]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let (mut names, mut values) = (String::new(), String::new());
    for (i, column) in table.columns.iter().filter(|c| c.stored).enumerate() {
        let _ = write!(names, ", {}", quote_identifier(&column.name));
        let _ = write!(values, ", u.c{i}::{}", column.type_info.sql);
    }
    let sql = format!(
        "-- write::insert_rows
        insert into {} (tributary_row_id, tributary_key, tributary_version_lsn, tributary_version_ordinal, tributary_wire,
            tributary_digest, tributary_seal{names})
        select u.row_id, u.key, u.version_lsn, u.version_ordinal, u.wire, u.digest, u.seal{values}
        from {}",
        projection::name(table),
        RowArrays::source(table)
    );
    let arrays = RowArrays::new(table, rows);
    expect_count(statement::execute(db, &sql, &arrays.parameters()).await?, rows.len(), "insert_rows")
}

/// Replaces rows that the projection holds, under the same keys.
pub async fn update_rows(db: &impl GenericClient, table: &Table, rows: &[RowWrite<'_>]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut sql = format!(
        "-- write::update_rows
        update {} as p
        set tributary_version_lsn = u.version_lsn, tributary_version_ordinal = u.version_ordinal,
            tributary_wire = u.wire, tributary_digest = u.digest, tributary_seal = u.seal",
        projection::name(table)
    );
    for (i, column) in table.columns.iter().filter(|c| c.stored).enumerate() {
        let _ = write!(sql, ", {} = u.c{i}::{}", quote_identifier(&column.name), column.type_info.sql);
    }
    let source = RowArrays::source(table);
    let _ =
        write!(sql, "\n        from {source}\n        where p.tributary_row_id = u.row_id and p.tributary_key = u.key");
    let arrays = RowArrays::new(table, rows);
    expect_count(statement::execute(db, &sql, &arrays.parameters()).await?, rows.len(), "update_rows")
}

/// Removes rows from the projection.
pub async fn delete_rows(db: &impl GenericClient, table: &Table, row_ids: &[i64]) -> Result<()> {
    if row_ids.is_empty() {
        return Ok(());
    }
    let sql =
        format!("-- write::delete_rows\ndelete from {} where tributary_row_id = any($1)", projection::name(table));
    expect_count(statement::execute(db, &sql, &[&row_ids]).await?, row_ids.len(), "delete_rows")
}

/// Adds entries of rows that have none.
pub async fn copy_entries(db: &Transaction<'_>, entries: &[EntryWrite]) -> Result<()> {
    if entries.len() <= FEW {
        return upsert_entries(db, entries).await;
    }
    let target = "tributary.scope_entry (row_id, commit_lsn, ordinal, scope_no, table_no, present, seal)";
    let mut copy = Copy::start(db, target, 7, true).await?;
    for entry in entries {
        let (lsn, ordinal) = entry.position.to_sql();
        copy.begin_row();
        copy.int8(entry.row_id);
        copy.int8(lsn);
        copy.int8(ordinal);
        copy.int4(entry.scope_no);
        copy.int2(entry.table_no);
        copy.boolean(entry.present);
        copy.octets(&entry.seal());
        copy.end_row().await?;
    }
    copy.finish().await
}

/// Adds entries, or moves those that are there to their later position.
pub async fn upsert_entries(db: &impl GenericClient, entries: &[EntryWrite]) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let sql = "-- write::upsert_entries
        insert into tributary.scope_entry (row_id, commit_lsn, ordinal, scope_no, table_no, present, seal)
        select *
        from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::integer[], $5::smallint[], $6::boolean[], $7::bytea[])
        on conflict on constraint scope_entry_row_is_key do update
        set commit_lsn = excluded.commit_lsn, ordinal = excluded.ordinal, present = excluded.present,
            seal = excluded.seal";
    let row_ids: Vec<i64> = entries.iter().map(|e| e.row_id).collect();
    let lsns: Vec<i64> = entries.iter().map(|e| e.position.to_sql().0).collect();
    let ordinals: Vec<i64> = entries.iter().map(|e| e.position.to_sql().1).collect();
    let scopes: Vec<i32> = entries.iter().map(|e| e.scope_no).collect();
    let tables: Vec<i16> = entries.iter().map(|e| e.table_no).collect();
    let present: Vec<bool> = entries.iter().map(|e| e.present).collect();
    let seals: Vec<Seal> = entries.iter().map(EntryWrite::seal).collect();
    let seals: Vec<&[u8]> = seals.iter().map(Seal::as_slice).collect();
    let written =
        statement::execute(db, sql, &[&row_ids, &lsns, &ordinals, &scopes, &tables, &present, &seals]).await?;
    expect_count(written, entries.len(), "upsert_entries")
}

/// Remembers the keys of rows that left the projection; `rows` is `(row_id, key)`.
pub async fn remember_departed(db: &impl GenericClient, table_no: i16, rows: &[(i64, &[u8])]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let sql = "-- write::remember_departed
        insert into tributary.departed_row (row_id, table_no, key, seal)
        select u.row_id, $1, u.key, u.seal from unnest($2::bigint[], $3::bytea[], $4::bytea[]) as u (row_id, key, seal)
        on conflict on constraint departed_row_id_is_key do nothing";
    let row_ids: Vec<i64> = rows.iter().map(|r| r.0).collect();
    let keys: Vec<&[u8]> = rows.iter().map(|r| r.1).collect();
    let seals: Vec<Seal> = rows.iter().map(|(row_id, key)| seal::departed(*row_id, table_no, key)).collect();
    let seals: Vec<&[u8]> = seals.iter().map(Seal::as_slice).collect();
    statement::execute(db, sql, &[&table_no, &row_ids, &keys, &seals]).await?;
    Ok(())
}

/// Forgets departed rows that returned under their old numbers.
pub async fn forget_departed(db: &impl GenericClient, row_ids: &[i64]) -> Result<()> {
    if row_ids.is_empty() {
        return Ok(());
    }
    let sql = "-- write::forget_departed\ndelete from tributary.departed_row where row_id = any($1)";
    statement::execute(db, sql, &[&row_ids]).await?;
    Ok(())
}

/// TRUNCATE of a relation at `event`: a delete of every projected row, set-based whatever their number.
///
/// Effect ordinals follow the row identity within each scope (ADR 003: deterministic per-scope effect ordinal).
///
/// # Errors
/// [`StoreError::Integrity`] when a scope holds more rows than one event can have effects.
pub async fn truncate(db: &impl GenericClient, table: &Table, event: Position) -> Result<()> {
    let name = projection::name(table);
    let (lsn, ordinal) = event.to_sql();
    let sql = format!(
        "-- write::truncate_entries
        with doomed as (
            select e.row_id, e.scope_no, row_number() over (partition by e.scope_no order by p.tributary_key) - 1 as effect
            from {name} p
            join tributary.scope_entry e on e.row_id = p.tributary_row_id
            where e.present
        ), moved as (
            update tributary.scope_entry e
            set commit_lsn = $1, ordinal = $2::bigint + d.effect, present = false,
                seal = tributary.entry_seal(e.row_id, $1, $2::bigint + d.effect, e.scope_no, e.table_no, false)
            from doomed d
            where e.row_id = d.row_id and e.scope_no = d.scope_no
            returning d.effect
        )
        select coalesce(max(effect), 0) from moved"
    );
    let last: i64 = statement::query_one(db, &sql, &[&lsn, &ordinal]).await?.try_get(0)?;
    if last >= i64::from(MAX_EFFECTS) {
        return Err(StoreError::integrity("TRUNCATE removes more rows of one scope than one event can have effects"));
    }
    empty(db, table).await
}

/// Removes every row from a projection, and remembers their keys.
pub async fn empty(db: &impl GenericClient, table: &Table) -> Result<()> {
    let name = projection::name(table);
    let sql = format!(
        "-- write::truncate_departed
        insert into tributary.departed_row (row_id, table_no, key, seal)
        select tributary_row_id, $1, tributary_key, tributary.departed_seal(tributary_row_id, $1, tributary_key)
        from {name}
        on conflict on constraint departed_row_id_is_key do nothing"
    );
    statement::execute(db, &sql, &[&table.table_no]).await?;
    // DELETE rather than TRUNCATE: pullers read the projection in snapshots, and TRUNCATE is not MVCC-safe.
    statement::execute(db, &format!("-- write::truncate_rows\ndelete from {name}"), &[]).await?;
    Ok(())
}

/// Records accepted-write epochs as materialized; `epochs` is `(user_id, client_id, epoch)` without repeated clients.
pub async fn record_epochs(db: &impl GenericClient, epochs: &[(&str, &str, i64)]) -> Result<()> {
    if epochs.is_empty() {
        return Ok(());
    }
    let sql = "-- write::record_epochs
        insert into tributary.materialized_epoch as m (user_id, client_id, epoch)
        select * from unnest($1::text[], $2::text[], $3::bigint[])
        on conflict on constraint materialized_epoch_is_key do update set epoch = greatest(m.epoch, excluded.epoch)";
    let users: Vec<&str> = epochs.iter().map(|e| e.0).collect();
    let clients: Vec<&str> = epochs.iter().map(|e| e.1).collect();
    let numbers: Vec<i64> = epochs.iter().map(|e| e.2).collect();
    statement::execute(db, sql, &[&users, &clients, &numbers]).await?;
    Ok(())
}

/// Membership of rows under a rule that PostgreSQL evaluates: `sql` as [`crate::rule`] makes it, with the ordinals of
/// the rows and one array per column that it reads. Returns `(ordinal, template values)`.
pub async fn evaluate_rule(
    db: &impl GenericClient,
    sql: &str,
    ordinals: &[i32],
    columns: &[Vec<Option<&str>>],
) -> Result<Vec<(i32, Vec<Option<String>>)>> {
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&ordinals];
    parameters.extend(columns.iter().map(|c| c as &(dyn ToSql + Sync)));
    let rows = statement::query(db, sql, &parameters).await?;
    rows.iter()
        .map(|row| {
            let values = (1..row.len()).map(|i| row.try_get(i)).collect::<Result<_, _>>()?;
            Ok((row.try_get(0)?, values))
        })
        .collect()
}

fn expect_count(written: u64, expected: usize, what: &str) -> Result<()> {
    if written == expected as u64 {
        Ok(())
    } else {
        Err(StoreError::integrity(format!("{what} wrote {written} rows instead of {expected}")))
    }
}

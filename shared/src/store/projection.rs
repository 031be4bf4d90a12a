//! Projections: one table per registered relation in the schema `tributary_data`, exactly the captured rows as of the
//! boundary.
//!
//! Our columns carry the prefix `tributary_`, which the registry refuses in source names; columns that rules and
//! assignments read stand beside them under their source names and with built-in types, so that nobody's `DROP TYPE`
//! meets our tables.

use std::fmt::Write as _;

use deadpool_postgres::GenericClient;
use sha2::{Digest, Sha256};

use super::error::Result;
use crate::registry::Table;
use crate::registry::name::quote_identifier;
use crate::rule::collate;

/// The projection's qualified, quoted name.
pub fn name(table: &Table) -> String {
    table.projection_name().quoted()
}

/// Makes the projection of a relation, unless it exists.
pub async fn create(db: &impl GenericClient, table: &Table) -> Result<()> {
    let mut sql = format!(
        "-- projection::create
        create table if not exists {} (
            tributary_row_id bigint not null primary key,
            tributary_key bytea not null unique,
            tributary_version_lsn bigint not null,
            tributary_version_ordinal bigint not null,
            tributary_wire text,
            tributary_digest bytea,
            tributary_seal bytea",
        name(table)
    );
    for column in table.columns.iter().filter(|c| c.stored) {
        sql.push_str(",\n            ");
        sql.push_str(&quote_identifier(&column.name));
        sql.push(' ');
        sql.push_str(&column.type_info.sql);
        sql.push_str(&collate(&column.type_info));
    }
    sql.push_str("\n        )");
    for column in table.columns.iter().filter(|c| c.indexed) {
        let (column, index) = (quote_identifier(&column.name), quote_identifier(&index_name(table, &column.name)));
        let _ = write!(sql, ";\n        create index if not exists {index} on {} ({column})", name(table));
    }
    db.batch_execute(&sql).await?;
    Ok(())
}

/// The index of a column. Names of projections and columns are each as long as a name may be.
fn index_name(table: &Table, column: &str) -> String {
    const DIGEST_OCTETS: usize = 12;
    let mut digest = Sha256::new();
    digest.update(table.projection_name().name());
    // No identifier holds a zero octet, so the pair is told apart.
    digest.update([0]);
    digest.update(column);
    let mut name = String::from("by_");
    for octet in &digest.finalize()[..DIGEST_OCTETS] {
        let _ = write!(name, "{octet:02x}");
    }
    name
}

/// Drops every projection and empties all state that a baseline fills: the clean restart of an interrupted baseline.
/// Only for a state without progress, which no puller serves.
pub async fn clear_unactivated(db: &impl GenericClient) -> Result<()> {
    db.batch_execute(
        "-- projection::clear_unactivated
        do $$
        declare
            stale regclass;
        begin
            if exists (select from tributary.progress) then
                raise exception 'a baseline is active';
            end if;
            for stale in select oid from pg_class
                where relnamespace = 'tributary_data'::regnamespace and relkind = 'r'
            loop
                execute 'drop table ' || stale;
            end loop;
            truncate tributary.scope_entry, tributary.departed_row, tributary.scope_digest,
                tributary.rebuild_session, tributary.snapshot_block, tributary.snapshot;
        end
        $$",
    )
    .await?;
    Ok(())
}

/// Collects the planner's statistics after a baseline.
pub async fn analyze(db: &impl GenericClient, tables: &[Table]) -> Result<()> {
    let mut sql = String::from("-- projection::analyze\nanalyze tributary.scope_entry, tributary.scope");
    for table in tables {
        sql.push_str(", ");
        sql.push_str(&name(table));
    }
    db.batch_execute(&sql).await?;
    Ok(())
}

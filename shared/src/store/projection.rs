//! Projections: one table per registered relation in the schema `tributary_data`, exactly the captured rows as of the
//! boundary.
//!
//! Our columns carry the prefix `tributary_`, which the registry refuses in source names; columns that rules and
//! assignments read stand beside them under their source names and with built-in types, so that nobody's `DROP TYPE`
//! meets our tables.

use deadpool_postgres::GenericClient;

use super::error::Result;
use crate::registry::Table;
use crate::registry::name::quote_identifier;

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
            tributary_digest bytea",
        name(table)
    );
    for column in table.columns.iter().filter(|c| c.stored) {
        sql.push_str(",\n            ");
        sql.push_str(&quote_identifier(&column.name));
        sql.push(' ');
        sql.push_str(&column.type_info.sql);
    }
    sql.push_str("\n        )");
    db.batch_execute(&sql).await?;
    Ok(())
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

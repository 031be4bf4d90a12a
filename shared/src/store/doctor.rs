//! What `materializer doctor` asks of a server beside what start-up, status and the stream ask: settings, privileges,
//! indexes, clock, keys in use. Reads alone; what is good and what is not is the doctor's to say.

use std::time::{Duration, SystemTime};

use tokio_postgres::Client;

use super::error::Result;
use crate::registry::{RelationName, Table};

/// Settings of a server, in the units of their names.
#[expect(clippy::struct_excessive_bools, reason = "independent settings of the server")]
#[derive(Debug, Clone)]
pub struct Settings {
    /// `wal_sender_timeout`; zero is never.
    pub wal_sender_timeout: Duration,
    /// `max_slot_wal_keep_size` in octets; `None` without a limit.
    pub slot_wal_limit_octets: Option<u64>,
    /// `logical_decoding_work_mem` in octets.
    pub decoding_octets: u64,
    /// `idle_replication_slot_timeout` of PostgreSQL 18; zero is never.
    pub idle_slot_timeout: Duration,
    /// `fsync`.
    pub fsync: bool,
    /// `full_page_writes`.
    pub full_page_writes: bool,
    /// Whether `synchronous_commit` of this role's sessions waits for the server's own disk.
    pub waits_for_disk: bool,
    /// Whether the role is a superuser.
    pub superuser: bool,
}

/// Reads the settings as this role's sessions have them.
pub async fn settings(db: &Client) -> Result<Settings> {
    // `pg_settings` tells a setting's number in the unit that it has there: ms, MB, kB, s.
    let sql = "-- doctor::settings
        select max(setting::bigint) filter (where name = 'wal_sender_timeout'),
            max(setting::bigint) filter (where name = 'max_slot_wal_keep_size'),
            max(setting::bigint) filter (where name = 'logical_decoding_work_mem'),
            coalesce(max(setting::bigint) filter (where name = 'idle_replication_slot_timeout'), 0),
            current_setting('fsync') = 'on',
            current_setting('full_page_writes') = 'on',
            current_setting('synchronous_commit') <> 'off',
            coalesce((select rolsuper from pg_roles where rolname = current_user), false)
        from pg_settings
        where name in ('wal_sender_timeout', 'max_slot_wal_keep_size', 'logical_decoding_work_mem',
            'idle_replication_slot_timeout')";
    let row = db.query_one(sql, &[]).await?;
    let count = |index: usize| -> Result<i64> { Ok(row.try_get(index)?) };
    let positive = |number: i64| number.max(0).unsigned_abs();
    Ok(Settings {
        wal_sender_timeout: Duration::from_millis(positive(count(0)?)),
        slot_wal_limit_octets: u64::try_from(count(1)?).ok().map(|mebibytes| mebibytes << 20),
        decoding_octets: positive(count(2)?) << 10,
        idle_slot_timeout: Duration::from_secs(positive(count(3)?)),
        fsync: row.try_get(4)?,
        full_page_writes: row.try_get(5)?,
        waits_for_disk: row.try_get(6)?,
        superuser: row.try_get(7)?,
    })
}

/// The server's clock.
pub async fn clock(db: &Client) -> Result<SystemTime> {
    let row = db.query_one("-- doctor::clock\nselect clock_timestamp()", &[]).await?;
    Ok(row.try_get(0)?)
}

/// What the role may do with a relation of the source.
#[derive(Debug, Clone)]
pub struct Access {
    /// The relation.
    pub relation: RelationName,
    /// Use its schema and read it.
    pub readable: bool,
    /// Act for its owner, which publishing it takes.
    pub owned: bool,
}

/// What the role may do with those of the relations that exist.
pub async fn access(db: &Client, relations: &[RelationName]) -> Result<Vec<Access>> {
    let sql = "-- doctor::access
        select w.schema, w.name,
            has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select'),
            pg_has_role(c.relowner, 'usage')
        from unnest($1::text[], $2::text[]) with ordinality as w (schema, name, number)
        join pg_namespace n on n.nspname = w.schema
        join pg_class c on c.relnamespace = n.oid and c.relname = w.name
        where c.relkind not in ('i', 'I', 't')
        order by w.number";
    let (schemas, names): (Vec<&str>, Vec<&str>) = relations.iter().map(|r| (r.schema(), r.name())).unzip();
    let rows = db.query(sql, &[&schemas, &names]).await?;
    rows.iter()
        .map(|row| {
            let relation = RelationName::new(row.try_get::<_, String>(0)?, row.try_get::<_, String>(1)?);
            Ok(Access { relation, readable: row.try_get(2)?, owned: row.try_get(3)? })
        })
        .collect()
}

/// Whether the role may act for the publication's owner; `None` when there is no such publication.
pub async fn owns_publication(db: &Client, name: &str) -> Result<Option<bool>> {
    let sql = "-- doctor::owns_publication
        select pg_has_role(pubowner, 'usage') from pg_publication where pubname = $1";
    Ok(db.query_opt(sql, &[&name]).await?.map(|row| row.try_get(0)).transpose()?)
}

/// What the role may not do with the state, by name: schemas that it cannot make tables in, tables that it cannot write.
/// The state must be migrated.
pub async fn state_refusals(db: &Client) -> Result<Vec<String>> {
    let sql = "-- doctor::state_refusals
        select 'create in schema ' || nspname from pg_namespace
        where nspname in ('tributary', 'tributary_data') and not has_schema_privilege(oid, 'usage, create')
        union all
        select 'write ' || n.nspname || '.' || c.relname from pg_class c
        join pg_namespace n on n.oid = c.relnamespace
        where n.nspname in ('tributary', 'tributary_data') and c.relkind = 'r' and c.relname <> 'accepted_write'
            and c.relname not like '%\\_migration'
            and not (has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert')
                and has_table_privilege(c.oid, 'update') and has_table_privilege(c.oid, 'delete'))
        order by 1
        limit 20";
    let rows = db.query(sql, &[]).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Columns that rows are looked up by and that no valid index of their projection begins with, as `relation.column`.
pub async fn missing_indexes(db: &Client, tables: &[Table]) -> Result<Vec<String>> {
    let sql = "-- doctor::missing_indexes
        select w.number - 1
        from unnest($1::text[], $2::text[], $3::text[]) with ordinality as w (schema, name, column_name, number)
        join pg_namespace n on n.nspname = w.schema
        join pg_class c on c.relnamespace = n.oid and c.relname = w.name
        join pg_attribute a on a.attrelid = c.oid and a.attname = w.column_name
        where not exists (
            select from pg_index i
            where i.indrelid = c.oid and i.indisvalid and i.indpred is null and i.indkey[0] = a.attnum
        )
        order by w.number";
    let columns = tables.iter().flat_map(|table| {
        let indexed = table.columns.iter().filter(|column| column.indexed);
        indexed.map(move |column| (table, column.name.as_str()))
    });
    let columns: Vec<(&Table, &str)> = columns.collect();
    let projections: Vec<RelationName> = columns.iter().map(|(table, _)| table.projection_name()).collect();
    let (schemas, names): (Vec<&str>, Vec<&str>) = projections.iter().map(|p| (p.schema(), p.name())).unzip();
    let wanted: Vec<&str> = columns.iter().map(|(_, column)| *column).collect();
    let rows = db.query(sql, &[&schemas, &names, &wanted]).await?;
    let mut missing = Vec::new();
    for row in rows {
        let index: i64 = row.try_get(0)?;
        if let Some((table, column)) = usize::try_from(index).ok().and_then(|index| columns.get(index)) {
            missing.push(format!("{}.{column}", table.relation));
        }
    }
    Ok(missing)
}

/// Ids of the signing keys that open rebuild sessions depend on, with how many of them.
pub async fn keys_in_use(db: &Client) -> Result<Vec<(i64, i64)>> {
    let sql = "-- doctor::keys_in_use
        select key_id, count(*) from tributary.rebuild_session where expires_at > now() group by key_id order by key_id";
    let rows = db.query(sql, &[]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

//! What we read and make in the source database: settings, publication, slot, accepted-write epochs.

use std::time::{Duration, SystemTime};

use deadpool_postgres::GenericClient;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::error::{Result, StoreError};
use super::session::quote_literal;
use super::statement;
use crate::lsn::Lsn;
use crate::registry::Table;
use crate::registry::name::quote_identifier;

/// Facts about the source server that decide whether replication can start.
#[derive(Debug, Clone)]
pub struct Server {
    /// `server_version_num`, such as 150018.
    pub version: i32,
    /// `wal_level`.
    pub wal_level: String,
    /// Whether the role may replicate (REPLICATION, superuser, or a managed service's replication role).
    pub can_replicate: bool,
    /// Whether the role may create objects in the database.
    pub can_create: bool,
    /// Replication slots in use, and how many there may be.
    pub slots: (i64, i32),
    /// WAL senders in use, and how many there may be.
    pub wal_senders: (i64, i32),
    /// Whether the server is in recovery (a standby).
    pub in_recovery: bool,
    /// Encoding of the database.
    pub encoding: String,
}

/// Reads what decides whether replication can start.
pub async fn server(db: &Client) -> Result<Server> {
    let row = db
        .query_one(
            "-- source::server
            select current_setting('server_version_num')::integer,
                current_setting('wal_level'),
                coalesce((select rolreplication or rolsuper from pg_roles where rolname = current_user), false)
                    or exists (select from pg_roles r
                        where r.rolname in ('rds_replication', 'cloudsqlreplica')
                            and pg_has_role(current_user, r.oid, 'usage')),
                has_database_privilege(current_database(), 'create'),
                (select count(*) from pg_replication_slots),
                current_setting('max_replication_slots')::integer,
                (select count(*) from pg_stat_replication),
                current_setting('max_wal_senders')::integer,
                pg_is_in_recovery(),
                pg_encoding_to_char((select encoding from pg_database where datname = current_database()))",
            &[],
        )
        .await?;
    Ok(Server {
        version: row.try_get(0)?,
        wal_level: row.try_get(1)?,
        can_replicate: row.try_get(2)?,
        can_create: row.try_get(3)?,
        slots: (row.try_get(4)?, row.try_get(5)?),
        wal_senders: (row.try_get(6)?, row.try_get(7)?),
        in_recovery: row.try_get(8)?,
        encoding: row.try_get(9)?,
    })
}

/// Makes the publication, or brings its list of tables up to the registry's. Returns whether it was made now.
///
/// One that is right already is left alone, as PostgreSQL lets only the tables' owner alter it: so an administrator can
/// publish the tables, and our role need not own them. Our own tables are never in it: it names its tables one by one.
pub async fn ensure_publication(db: &Client, name: &str, tables: &[Table]) -> Result<bool> {
    let list = tables.iter().map(|t| format!("only {}", t.relation.quoted())).collect::<Vec<_>>().join(", ");
    let schemas: Vec<&str> = tables.iter().map(|t| t.relation.schema()).collect();
    let names: Vec<&str> = tables.iter().map(|t| t.relation.name()).collect();
    let found = db
        .query_opt(
            "-- source::publication
            with wanted as (
                select schema, name from unnest($2::text[], $3::text[]) as w (schema, name)
            ), published as (
                select schemaname::text, tablename::text from pg_publication_tables where pubname = $1
            )
            select p.puballtables,
                p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate and p.pubviaroot
                    and not exists (table wanted except table published)
                    and not exists (table published except table wanted)
                    -- Filters of rows and lists of columns, which PostgreSQL 14 does not have yet.
                    and not exists (
                        select from pg_publication_rel r
                        where r.prpubid = p.oid
                            and (to_jsonb(r) ->> 'prqual' is not null or to_jsonb(r) ->> 'prattrs' is not null)
                    )
            from pg_publication p
            where p.pubname = $1",
            &[&name, &schemas, &names],
        )
        .await?;
    let options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true";
    let name = quote_identifier(name);
    let (made, sql) = match &found {
        None => (true, format!("create publication {name} for table {list} with ({options})")),
        Some(row) if row.try_get(0)? => {
            return Err(StoreError::integrity("the publication is FOR ALL TABLES; ours names its tables one by one"));
        }
        Some(row) if row.try_get(1)? => return Ok(false),
        Some(_) => {
            (false, format!("alter publication {name} set table {list}; alter publication {name} set ({options})"))
        }
    };
    db.batch_execute(&sql).await?;
    Ok(made)
}

/// What differs between the publication and what the stream needs of it: changes that it leaves out are lost without a
/// sign. `None` when it is as [`ensure_publication`] makes it.
pub async fn publication_difference(db: &Client, name: &str, tables: &[Table]) -> Result<Option<String>> {
    let row = db
        .query_opt(
            "-- source::publication_options
            select pubinsert and pubupdate and pubdelete and pubtruncate, pubviaroot
            from pg_publication
            where pubname = $1",
            &[&name],
        )
        .await?;
    let Some(row) = row else { return Ok(Some("it does not exist".into())) };
    if !row.try_get::<_, bool>(0)? || !row.try_get::<_, bool>(1)? {
        return Ok(Some("its options leave changes out".into()));
    }
    let schemas: Vec<&str> = tables.iter().map(|t| t.relation.schema()).collect();
    let names: Vec<&str> = tables.iter().map(|t| t.relation.name()).collect();
    // A row filter or a list of columns, of PostgreSQL 15 and later, leaves out as well.
    let missing = db
        .query_opt(
            "-- source::publication_tables
            select w.schema || '.' || w.name
            from unnest($2::text[], $3::text[]) as w (schema, name)
            where not exists (
                select from pg_publication_rel r
                join pg_publication p on p.oid = r.prpubid
                join pg_class c on c.oid = r.prrelid
                join pg_namespace n on n.oid = c.relnamespace
                where p.pubname = $1 and n.nspname = w.schema and c.relname = w.name
                    and to_jsonb(r) ->> 'prqual' is null and to_jsonb(r) ->> 'prattrs' is null
            )
            limit 1",
            &[&name, &schemas, &names],
        )
        .await?;
    Ok(missing.map(|row| row.try_get::<_, String>(0)).transpose()?.map(|table| format!("it leaves out {table}")))
}

/// Drops a publication that this process has just made.
pub async fn drop_publication(db: &Client, name: &str) -> Result<()> {
    db.batch_execute(&format!("drop publication if exists {}", quote_identifier(name))).await?;
    Ok(())
}

/// The state of our replication slot.
#[derive(Debug, Clone)]
pub struct Slot {
    /// The plugin; ours is `pgoutput`.
    pub plugin: String,
    /// The database it decodes.
    pub database: String,
    /// The walsender that holds it.
    pub active_pid: Option<i32>,
    /// Exclusive: what was acknowledged as durable.
    pub confirmed_flush: Lsn,
    /// Where the WAL begins that the source keeps for the slot.
    pub restart: Lsn,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// Octets of WAL that may still be written before the slot is in danger; `None` without a limit.
    pub safe_wal_octets: Option<i64>,
    /// Why the source invalidated it, where the server says so.
    pub invalidation_reason: Option<String>,
}

impl Slot {
    /// Whether the source has removed WAL that the slot needs, so that it can never be read again.
    pub fn is_lost(&self) -> bool {
        self.wal_status.as_deref() == Some("lost") || self.invalidation_reason.is_some()
    }
}

/// Rows of the relations together, by the source's statistics.
pub async fn estimated_rows(db: &Client, tables: &[Table]) -> Result<u64> {
    let (schemas, names): (Vec<&str>, Vec<&str>) =
        tables.iter().map(|table| (table.relation.schema(), table.relation.name())).unzip();
    let row = db
        .query_one(
            "-- source::estimated_rows
            select coalesce(sum(greatest(leaf.reltuples, 0)), 0)::bigint
            from unnest($1::text[], $2::text[]) as u (schema, name)
            join pg_namespace n on n.nspname = u.schema
            join pg_class c on c.relnamespace = n.oid and c.relname = u.name
            cross join lateral (
                select c.reltuples where c.relkind <> 'p'
                union all
                select p.reltuples from pg_partition_tree(c.oid) t join pg_class p on p.oid = t.relid
                where c.relkind = 'p' and t.isleaf
            ) leaf",
            &[&schemas, &names],
        )
        .await?;
    Ok(row.try_get::<_, i64>(0)?.unsigned_abs())
}

/// Reads our slot; `None` when it does not exist.
pub async fn slot(db: &Client, name: &str) -> Result<Option<Slot>> {
    let row = db
        .query_opt(
            "-- source::slot
            select coalesce(plugin, ''), coalesce(database, ''), active_pid, confirmed_flush_lsn, wal_status, restart_lsn,
                safe_wal_size, to_jsonb(s) ->> 'invalidation_reason'
            from pg_replication_slots s
            where slot_name = $1",
            &[&name],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    let lsn = |index: usize| -> Result<Lsn> {
        let lsn: Option<PgLsn> = row.try_get(index)?;
        Ok(Lsn::new(lsn.map_or(0, u64::from)).unwrap_or_default())
    };
    Ok(Some(Slot {
        plugin: row.try_get(0)?,
        database: row.try_get(1)?,
        active_pid: row.try_get(2)?,
        confirmed_flush: lsn(3)?,
        wal_status: row.try_get(4)?,
        restart: lsn(5)?,
        safe_wal_octets: row.try_get(6)?,
        invalidation_reason: row.try_get(7)?,
    }))
}

/// Drops our slot, which must be inactive.
pub async fn drop_slot(db: &Client, name: &str) -> Result<()> {
    db.execute("-- source::drop_slot\nselect pg_drop_replication_slot($1)", &[&name]).await?;
    Ok(())
}

/// Ends the walsender that still holds our slot for a former leader; waits until the slot is free, for at most a
/// few seconds. Returns whether it is free.
pub async fn free_slot(db: &Client, name: &str) -> Result<bool> {
    for attempt in 0..50 {
        let Some(pid) = slot(db, name).await?.and_then(|s| s.active_pid) else { return Ok(true) };
        if attempt == 0 {
            db.execute("-- source::free_slot\nselect pg_terminate_backend($1)", &[&pid]).await?;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(false)
}

/// The end of the source's WAL, for lag.
pub async fn current_wal(db: &Client) -> Result<Lsn> {
    let row = db.query_one("-- source::current_wal\nselect pg_current_wal_insert_lsn()", &[]).await?;
    Ok(Lsn::new(row.try_get::<_, PgLsn>(0)?.into()).unwrap_or_default())
}

/// Opens a transaction that sees exactly the exported snapshot; returns the time of the snapshot's import.
pub async fn import_snapshot(db: &Client, snapshot: &str) -> Result<SystemTime> {
    db.batch_execute(&format!(
        "begin isolation level repeatable read read only; set transaction snapshot {}",
        quote_literal(snapshot)
    ))
    .await?;
    Ok(db.query_one("-- source::snapshot_time\nselect transaction_timestamp()", &[]).await?.try_get(0)?)
}

/// Statement that reads a relation's registered columns as text, for a session that imported the baseline's snapshot.
///
/// ONLY for an ordinary table: an inheritance child is a relation of its own in the publication too. A partitioned
/// table is read with its partitions, which stream under the root's name.
pub fn baseline_query(table: &Table, partitioned: bool) -> String {
    let columns = table.columns.iter().map(|c| quote_identifier(&c.name)).collect::<Vec<_>>().join(", ");
    let only = if partitioned { "" } else { "only " };
    format!("select {columns} from {only}{}", table.relation.quoted())
}

/// Whether a relation is partitioned.
pub async fn is_partitioned(db: &Client, table: &Table) -> Result<bool> {
    let row = db
        .query_one(
            "-- source::is_partitioned
            select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
                where n.nspname = $1 and c.relname = $2 and c.relkind = 'p')",
            &[&table.relation.schema(), &table.relation.name()],
        )
        .await?;
    Ok(row.try_get(0)?)
}

/// The client's accepted-write epoch in the source; 0 when nothing was ever accepted for it.
///
/// Read before the state snapshot is opened (contract: accepted writes), so that a write accepted before the request
/// is never missing from its answer.
pub async fn accepted_epoch(db: &impl GenericClient, user_id: &str, client_id: &str) -> Result<i64> {
    let sql = "-- source::accepted_epoch
        select epoch from tributary.accepted_write where user_id = $1 and client_id = $2";
    let row = statement::query_opt(db, sql, &[&user_id, &client_id]).await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?.unwrap_or(0))
}

/// [`accepted_epoch`] of several clients, `(user_id, client_id)`, in their order.
pub async fn accepted_epochs_of(db: &impl GenericClient, clients: &[(&str, &str)]) -> Result<Vec<i64>> {
    let sql = "-- source::accepted_epochs_of
        select coalesce(a.epoch, 0)
        from unnest($1::text[], $2::text[]) with ordinality as u (user_id, client_id, number)
        left join tributary.accepted_write a on a.user_id = u.user_id and a.client_id = u.client_id
        order by u.number";
    let (users, ids): (Vec<&str>, Vec<&str>) = clients.iter().copied().unzip();
    let rows = statement::query(db, sql, &[&users, &ids]).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Epochs that a baseline's snapshot sees: the baseline counts as having materialized them. Read through a session
/// that imported the snapshot; streams, as there may be many.
pub async fn accepted_epochs(
    db: &Client,
) -> Result<impl futures_util::Stream<Item = Result<(String, String, i64)>> + use<>> {
    use futures_util::TryStreamExt;
    let sql = "-- source::accepted_epochs\nselect user_id, client_id, epoch from tributary.accepted_write";
    let none: [&(dyn tokio_postgres::types::ToSql + Sync); 0] = [];
    let rows = db.query_raw(sql, none).await?;
    Ok(rows
        .map_err(StoreError::from)
        .and_then(|row| async move { Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)) }))
}

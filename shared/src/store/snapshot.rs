//! Staged snapshots and rebuild sessions (ADR 003, "Durable immutable staged rebuild snapshot").

use std::time::SystemTime;

use deadpool_postgres::{GenericClient, Transaction};
use tokio_postgres::Portal;
use uuid::Uuid;

use super::digest::{ENTRY, ENTRY_COLUMNS};
use super::error::{Result, StoreError};
use super::pull::{CAPTURED, Captured, captured_from_row, entry_from_row};
use super::{projection, statement};
use crate::content::ContentKey;
use crate::lsn::Lsn;
use crate::position::Position;
use crate::registry::Table;
use crate::seal;

/// A staged snapshot: immutable content of one scope.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Its number.
    pub snapshot_no: i64,
    /// Rows in it.
    pub row_count: i64,
    /// Scope digest.
    pub digest: [u8; 32],
}

const SNAPSHOT_COLUMNS: &str = "snapshot_no, row_count, digest, seal, scope_no, stream_generation, schema_version,
            membership_generation, content_lsn, content_ordinal";

fn snapshot_from_row(row: &tokio_postgres::Row) -> Result<Snapshot> {
    let key = ContentKey {
        scope_no: row.try_get(4)?,
        stream_generation: row.try_get(5)?,
        schema_version: row.try_get(6)?,
        membership_generation: row.try_get(7)?,
        content: Position::from_sql(row.try_get(8)?, row.try_get(9)?)
            .map_err(|_| StoreError::integrity("a snapshot holds an impossible position"))?,
    };
    let digest: &[u8] = row.try_get(2)?;
    let snapshot = Snapshot {
        snapshot_no: row.try_get(0)?,
        row_count: row.try_get(1)?,
        digest: digest.try_into().map_err(|_| StoreError::integrity("a snapshot's digest is not 32 octets"))?,
    };
    let sealed = seal::snapshot(&key, snapshot.snapshot_no, snapshot.row_count, &snapshot.digest);
    if row.try_get::<_, &[u8]>(3)? == sealed {
        Ok(snapshot)
    } else {
        Err(StoreError::integrity("a snapshot differs from its seal"))
    }
}

/// The snapshot of exactly this content, if it is staged.
pub async fn find(db: &impl GenericClient, key: &ContentKey) -> Result<Option<Snapshot>> {
    let sql = format!(
        "-- snapshot::find
        select {SNAPSHOT_COLUMNS}
        from tributary.snapshot
        where scope_no = $1 and stream_generation = $2 and schema_version = $3 and membership_generation = $4
            and content_lsn = $5 and content_ordinal = $6"
    );
    let (lsn, ordinal) = key.content.to_sql();
    let row = statement::query_opt(
        db,
        &sql,
        &[&key.scope_no, &key.stream_generation, &key.schema_version, &key.membership_generation, &lsn, &ordinal],
    )
    .await?;
    row.as_ref().map(snapshot_from_row).transpose()
}

/// A snapshot by its number.
pub async fn load(db: &impl GenericClient, snapshot_no: i64) -> Result<Option<Snapshot>> {
    let sql = format!(
        "-- snapshot::load
        select {SNAPSHOT_COLUMNS} from tributary.snapshot where snapshot_no = $1"
    );
    statement::query_opt(db, &sql, &[&snapshot_no]).await?.as_ref().map(snapshot_from_row).transpose()
}

/// Takes the right to stage snapshots of a scope until the transaction ends; false when another puller has it.
pub async fn try_claim_staging(db: &impl GenericClient, scope_no: i32) -> Result<bool> {
    // The class ("snap" as a number) keeps these locks apart from any other advisory lock in the database.
    let sql = "-- snapshot::try_claim_staging\nselect pg_try_advisory_xact_lock(1936941424, $1)";
    Ok(statement::query_one(db, sql, &[&scope_no]).await?.try_get(0)?)
}

/// Makes an empty snapshot, to be completed in the same transaction; returns its number.
pub async fn begin(db: &impl GenericClient, key: &ContentKey, now: SystemTime) -> Result<i64> {
    let sql = "-- snapshot::begin
        insert into tributary.snapshot (scope_no, stream_generation, schema_version, membership_generation,
            content_lsn, content_ordinal, row_count, byte_count, digest, seal, created_at)
        values ($1, $2, $3, $4, $5, $6, 0, 0, decode(repeat('00', 32), 'hex'), ''::bytea, $7)
        returning snapshot_no";
    let (lsn, ordinal) = key.content.to_sql();
    let row = statement::query_one(
        db,
        sql,
        &[&key.scope_no, &key.stream_generation, &key.schema_version, &key.membership_generation, &lsn, &ordinal, &now],
    )
    .await?;
    Ok(row.try_get(0)?)
}

/// Completes a snapshot in the transaction that began it.
pub async fn complete(
    db: &impl GenericClient,
    key: &ContentKey,
    snapshot_no: i64,
    row_count: i64,
    byte_count: i64,
    digest: &[u8; 32],
) -> Result<()> {
    let sql = "-- snapshot::complete
        update tributary.snapshot set row_count = $2, byte_count = $3, digest = $4, seal = $5 where snapshot_no = $1";
    let sealed = seal::snapshot(key, snapshot_no, row_count, digest);
    statement::execute(db, sql, &[&snapshot_no, &row_count, &byte_count, &digest.as_slice(), &sealed.as_slice()])
        .await?;
    Ok(())
}

/// Adds a block of ready-made records.
pub async fn add_block(
    db: &impl GenericClient,
    snapshot_no: i64,
    block_no: i32,
    first_row: i64,
    record_ends: &[i32],
    records: &[u8],
) -> Result<()> {
    let sql = "-- snapshot::add_block
        insert into tributary.snapshot_block (snapshot_no, block_no, first_row, record_ends, records, seal)
        values ($1, $2, $3, $4, $5, $6)";
    let sealed = seal::block(snapshot_no, block_no, first_row, record_ends, records);
    statement::execute(db, sql, &[&snapshot_no, &block_no, &first_row, &record_ends, &records, &sealed.as_slice()])
        .await?;
    Ok(())
}

/// Opens a portal over a scope's captured rows of one relation, in order of their keys.
pub async fn open_content(db: &Transaction<'_>, scope_no: i32, table: &Table) -> Result<Portal> {
    let sql = format!(
        "-- snapshot::open_content
        select {ENTRY}, {CAPTURED}
        from tributary.scope_entry e
        join {} p on p.tributary_row_id = e.row_id
        where e.scope_no = $1 and e.table_no = $2 and e.present
        order by p.tributary_key",
        projection::name(table)
    );
    let statement = db.prepare_cached(&sql).await?;
    Ok(db.bind(&statement, &[&scope_no, &table.table_no]).await?)
}

/// The next rows of a portal; fewer than `limit` at its end.
///
/// # Errors
/// [`StoreError::Integrity`] when an entry or a row is not as it was written.
pub async fn next_content(
    db: &Transaction<'_>,
    portal: &Portal,
    scope_no: i32,
    table: &Table,
    limit: i32,
) -> Result<Vec<Captured>> {
    let rows = db.query_portal(portal, limit).await?;
    rows.iter()
        .map(|row| {
            entry_from_row(row, 0, scope_no)?;
            captured_from_row(row, ENTRY_COLUMNS, table.table_no)
        })
        .collect()
}

/// A block, or the part of the staged order that it holds.
#[derive(Debug)]
pub struct Block {
    /// Ordinal of its first record.
    pub first_row: i64,
    /// Exclusive end octet of each record.
    pub record_ends: Vec<i32>,
    /// The records.
    pub records: Vec<u8>,
}

/// The blocks that hold the records `start..end` of a snapshot.
///
/// # Errors
/// [`StoreError::Integrity`] when a block is not as it was staged.
pub async fn blocks(db: &impl GenericClient, snapshot_no: i64, start: i64, end: i64) -> Result<Vec<Block>> {
    let sql = "-- snapshot::blocks
        select block_no, first_row, record_ends, records, seal
        from tributary.snapshot_block
        where snapshot_no = $1 and first_row < $3 and first_row >= (
            select max(first_row) from tributary.snapshot_block where snapshot_no = $1 and first_row <= $2
        )
        order by first_row";
    let rows = statement::query(db, sql, &[&snapshot_no, &start, &end]).await?;
    rows.iter()
        .map(|row| {
            let block = Block { first_row: row.try_get(1)?, record_ends: row.try_get(2)?, records: row.try_get(3)? };
            let sealed = seal::block(snapshot_no, row.try_get(0)?, block.first_row, &block.record_ends, &block.records);
            if row.try_get::<_, &[u8]>(4)? == sealed {
                Ok(block)
            } else {
                Err(StoreError::integrity("a staged block differs from its seal"))
            }
        })
        .collect()
}

/// A rebuild session.
#[derive(Debug, Clone)]
pub struct Session {
    /// Server-generated id.
    pub session_id: Uuid,
    /// Client.
    pub client_no: i64,
    /// Generation of the client.
    pub client_generation: i64,
    /// Scope.
    pub scope_no: i32,
    /// The client's attempt.
    pub rebuild_id: Uuid,
    /// Stream generation.
    pub stream_generation: Uuid,
    /// Schema version.
    pub schema_version: i64,
    /// Membership generation of the scope.
    pub membership_generation: i64,
    /// Retention lineage of the scope.
    pub retention_generation: i64,
    /// The client's accepted-write epoch at creation.
    pub accepted_write_epoch: i64,
    /// Inclusive commit LSN of the snapshot boundary; zero is the generation start.
    pub boundary_lsn: Lsn,
    /// Page size of the attempt.
    pub page_limit: i32,
    /// The key that its tokens are signed with, so that a replay is the same to the octet.
    pub key_id: i64,
    /// The staged rows.
    pub snapshot_no: i64,
    /// Creation; tokens of the session are issued at this time.
    pub created_at: SystemTime,
}

const SESSION_COLUMNS: &str = "session_id, client_no, client_generation, scope_no, rebuild_id, stream_generation,
            schema_version, membership_generation, retention_generation, accepted_write_epoch, boundary_lsn,
            page_limit, key_id, snapshot_no, created_at";

fn session_from_row(row: &tokio_postgres::Row) -> Result<Session> {
    Ok(Session {
        session_id: row.try_get(0)?,
        client_no: row.try_get(1)?,
        client_generation: row.try_get(2)?,
        scope_no: row.try_get(3)?,
        rebuild_id: row.try_get(4)?,
        stream_generation: row.try_get(5)?,
        schema_version: row.try_get(6)?,
        membership_generation: row.try_get(7)?,
        retention_generation: row.try_get(8)?,
        accepted_write_epoch: row.try_get(9)?,
        boundary_lsn: Lsn::from_sql(row.try_get(10)?)
            .map_err(|_| StoreError::integrity("a rebuild session holds an impossible boundary"))?,
        page_limit: row.try_get(11)?,
        key_id: row.try_get(12)?,
        snapshot_no: row.try_get(13)?,
        created_at: row.try_get(14)?,
    })
}

/// The unexpired session of this attempt under exactly the current bindings (those of `wanted`).
pub async fn find_session(db: &impl GenericClient, wanted: &Session, now: SystemTime) -> Result<Option<Session>> {
    let sql = format!(
        "-- snapshot::find_session
        select {SESSION_COLUMNS}
        from tributary.rebuild_session
        where client_no = $1 and client_generation = $2 and scope_no = $3 and rebuild_id = $4
            and stream_generation = $5 and schema_version = $6 and membership_generation = $7
            and retention_generation = $8 and accepted_write_epoch = $9 and expires_at > $10
        order by created_at desc
        limit 1"
    );
    let row = statement::query_opt(
        db,
        &sql,
        &[
            &wanted.client_no,
            &wanted.client_generation,
            &wanted.scope_no,
            &wanted.rebuild_id,
            &wanted.stream_generation,
            &wanted.schema_version,
            &wanted.membership_generation,
            &wanted.retention_generation,
            &wanted.accepted_write_epoch,
            &now,
        ],
    )
    .await?;
    row.as_ref().map(session_from_row).transpose()
}

/// A session by its id.
pub async fn load_session(db: &impl GenericClient, session_id: Uuid) -> Result<Option<Session>> {
    let sql = format!(
        "-- snapshot::load_session\nselect {SESSION_COLUMNS} from tributary.rebuild_session where session_id = $1"
    );
    statement::query_opt(db, &sql, &[&session_id]).await?.as_ref().map(session_from_row).transpose()
}

/// Stores a new session; it expires exactly 24 hours after its creation. An expired one of the same attempt and
/// bindings makes room for it; a live one of a concurrent request is a conflict, and the request runs again.
pub async fn create_session(db: &impl GenericClient, session: &Session) -> Result<()> {
    let sql = "-- snapshot::replace_expired_session
        delete from tributary.rebuild_session
        where client_no = $1 and client_generation = $2 and scope_no = $3 and rebuild_id = $4 and expires_at <= $5";
    statement::execute(
        db,
        sql,
        &[&session.client_no, &session.client_generation, &session.scope_no, &session.rebuild_id, &session.created_at],
    )
    .await?;
    let sql = format!(
        "-- snapshot::create_session
        insert into tributary.rebuild_session ({SESSION_COLUMNS}, expires_at)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $15::timestamptz + interval '24 hours')"
    );
    statement::execute(
        db,
        &sql,
        &[
            &session.session_id,
            &session.client_no,
            &session.client_generation,
            &session.scope_no,
            &session.rebuild_id,
            &session.stream_generation,
            &session.schema_version,
            &session.membership_generation,
            &session.retention_generation,
            &session.accepted_write_epoch,
            &session.boundary_lsn.to_sql(),
            &session.page_limit,
            &session.key_id,
            &session.snapshot_no,
            &session.created_at,
        ],
    )
    .await?;
    Ok(())
}

/// How much is kept for rebuilds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Sessions that are not expired.
    pub sessions: i64,
    /// Snapshots.
    pub snapshots: i64,
    /// Octets of their records.
    pub octets: i64,
}

/// Counts what is kept for rebuilds: one row a session and one a snapshot, not their records.
pub async fn count(db: &impl GenericClient, now: SystemTime) -> Result<Stored> {
    let sql = "-- snapshot::count
        select (select count(*) from tributary.rebuild_session where expires_at > $1), count(*),
            coalesce(sum(byte_count), 0)::bigint
        from tributary.snapshot";
    let row = statement::query_one(db, sql, &[&now]).await?;
    Ok(Stored { sessions: row.try_get(0)?, snapshots: row.try_get(1)?, octets: row.try_get(2)? })
}

/// Octets of snapshots after which [`collect`] takes no more: the deletion of one large snapshot is enough for a step.
const COLLECT_OCTETS: i64 = 64 << 20;

/// Removes up to `batch` expired sessions, then up to `batch` snapshots older than `unused_before` that no session
/// uses, the oldest first and bounded by their size. Returns how many of each.
pub async fn collect(
    db: &impl GenericClient,
    now: SystemTime,
    unused_before: SystemTime,
    batch: i64,
) -> Result<(u64, u64)> {
    let sql = "-- snapshot::collect_sessions
        delete from tributary.rebuild_session
        where session_id in (select session_id from tributary.rebuild_session where expires_at <= $1 limit $2)";
    let sessions = statement::execute(db, sql, &[&now, &batch]).await?;
    let sql = "-- snapshot::collect_snapshots
        delete from tributary.snapshot
        where snapshot_no in (
            select u.snapshot_no
            from (
                select s.snapshot_no, sum(s.byte_count) over (order by s.snapshot_no) - s.byte_count as before
                from tributary.snapshot s
                where s.created_at <= $1
                    and not exists (select from tributary.rebuild_session r where r.snapshot_no = s.snapshot_no)
                order by s.snapshot_no
                limit $2
            ) u
            where u.before < $3::bigint
        )";
    let snapshots = statement::execute(db, sql, &[&unused_before, &batch, &COLLECT_OCTETS]).await?;
    Ok((sessions, snapshots))
}

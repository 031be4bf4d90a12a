//! Registered clients, their assigned scopes and checkpoints.

use std::time::SystemTime;

use deadpool_postgres::GenericClient;
use uuid::Uuid;

use super::error::{Result, StoreError};
use super::{digest, statement};
use crate::content::ContentKey;
use crate::position::Position;

/// A registered client.
#[derive(Debug, Clone)]
pub struct Client {
    /// Interned number.
    pub client_no: i64,
    /// The user that it belongs to.
    pub user_id: String,
    /// Current generation, from 1.
    pub generation: i64,
    /// Authoritative version of its assignment; 0 until a scope was assigned.
    pub scope_set_version: i64,
    /// When a presented cursor last acknowledged, to the minute.
    pub acknowledged_at: SystemTime,
    /// Whether retention has expired its generation; connect starts a new one.
    pub generation_expired: bool,
    /// Whether it is retired for good.
    pub retired: bool,
    /// The newest accepted-write epoch that is materialized.
    pub materialized_epoch: i64,
}

/// The digest that is cached for a scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedDigest {
    /// What it is valid for.
    pub key: ContentKey,
    /// The digest.
    pub digest: [u8; 32],
}

/// A scope that is or was assigned to a client's current generation.
#[derive(Debug, Clone)]
pub struct ClientScope {
    /// Its id.
    pub scope_id: String,
    /// Its interned number.
    pub scope_no: i32,
    /// False: assigned earlier, removed since.
    pub assigned: bool,
    /// The greatest position that the client presented.
    pub checkpoint: Option<Position>,
    /// Current membership generation.
    pub membership_generation: i64,
    /// Current retention lineage.
    pub retention_generation: i64,
    /// Resume floor, inclusive.
    pub floor: Position,
    /// Content position: the newest effect, whether compaction has taken its delete marker since or not. Content and
    /// digest can only differ where this differs.
    pub content: Position,
    /// The greatest position of a delete marker that compaction removed.
    pub compacted: Position,
    /// The cached digest, valid or not.
    pub cached: Option<CachedDigest>,
}

impl ClientScope {
    /// The cached digest if it is that of this content.
    pub fn digest(&self, key: &ContentKey) -> Option<[u8; 32]> {
        self.cached.as_ref().filter(|cached| cached.key == *key).map(|cached| cached.digest)
    }
}

/// Finds a client by its id, which belongs to one user.
pub async fn load(db: &impl GenericClient, client_id: &str) -> Result<Option<Client>> {
    let sql = "-- client::load
        select c.client_no, c.user_id, c.generation, c.scope_set_version, c.acknowledged_at, c.generation_expired,
            c.retired, coalesce(m.epoch, 0)
        from tributary.client c
        left join tributary.materialized_epoch m on m.user_id = c.user_id and m.client_id = c.client_id
        where c.client_id = $1";
    let Some(row) = statement::query_opt(db, sql, &[&client_id]).await? else { return Ok(None) };
    Ok(Some(Client {
        client_no: row.try_get(0)?,
        user_id: row.try_get(1)?,
        generation: row.try_get(2)?,
        scope_set_version: row.try_get(3)?,
        acknowledged_at: row.try_get(4)?,
        generation_expired: row.try_get(5)?,
        retired: row.try_get(6)?,
        materialized_epoch: row.try_get(7)?,
    }))
}

/// Registers a client; returns its number.
pub async fn create(
    db: &impl GenericClient,
    user_id: &str,
    client_id: &str,
    generation: i64,
    scope_set_version: i64,
    now: SystemTime,
) -> Result<i64> {
    let sql = "-- client::create
        insert into tributary.client (user_id, client_id, generation, scope_set_version, created_at, acknowledged_at)
        values ($1, $2, $3, $4, $5, $5)
        returning client_no";
    let row = statement::query_one(db, sql, &[&user_id, &client_id, &generation, &scope_set_version, &now]).await?;
    Ok(row.try_get(0)?)
}

/// Starts the next generation of a client: nothing assigned, nothing acknowledged. Returns its number.
pub async fn renew_generation(db: &impl GenericClient, client_no: i64, now: SystemTime) -> Result<i64> {
    let sql = "-- client::renew_generation_scopes\ndelete from tributary.client_scope where client_no = $1";
    statement::execute(db, sql, &[&client_no]).await?;
    let sql = "-- client::renew_generation
        update tributary.client
        set generation = generation + 1, generation_expired = false, created_at = $2, acknowledged_at = $2
        where client_no = $1
        returning generation";
    Ok(statement::query_one(db, sql, &[&client_no, &now]).await?.try_get(0)?)
}

/// Locks a client's row for the rest of the transaction: it stays, and a request that changed it since the snapshot is
/// a conflict. Later requests may change it meanwhile, so that a client's pulls never wait for its own long rebuild; what
/// they change ends the session by its bindings.
pub async fn lock(db: &impl GenericClient, client_no: i64) -> Result<()> {
    let sql = "-- client::lock\nselect client_no from tributary.client where client_no = $1 for key share";
    statement::query_one(db, sql, &[&client_no]).await?;
    Ok(())
}

const SCOPE_COLUMNS: &str = "s.scope_id, s.scope_no, s.membership_generation, s.retention_generation, s.floor_lsn,
            s.floor_ordinal, n.commit_lsn, n.ordinal, d.stream_generation, d.schema_version, d.membership_generation,
            d.commit_lsn, d.ordinal, d.row_count, d.digest, d.seal, s.compacted_lsn, s.compacted_ordinal";
const SCOPE_JOINS: &str = "left join lateral (
            select e.commit_lsn, e.ordinal
            from tributary.scope_entry e
            where e.scope_no = s.scope_no
            order by e.commit_lsn desc, e.ordinal desc
            limit 1
        ) n on true
        left join tributary.scope_digest d on d.scope_no = s.scope_no";

/// Every scope that is or was assigned to the client's current generation.
pub async fn scopes(db: &impl GenericClient, client_id: &str) -> Result<Vec<ClientScope>> {
    let sql = format!(
        "-- client::scopes
        select {SCOPE_COLUMNS}, cs.assigned, cs.acknowledged_lsn, cs.acknowledged_ordinal
        from tributary.client c
        join tributary.client_scope cs on cs.client_no = c.client_no
        join tributary.scope s on s.scope_no = cs.scope_no
        {SCOPE_JOINS}
        where c.client_id = $1"
    );
    statement::query(db, &sql, &[&client_id]).await?.iter().map(scope_from_row).collect()
}

/// The given scopes as if they were assigned and never acknowledged: for those that a request has just added.
pub async fn new_scopes(db: &impl GenericClient, scope_nos: &[i32]) -> Result<Vec<ClientScope>> {
    let sql = format!(
        "-- client::new_scopes
        select {SCOPE_COLUMNS}, true, null::bigint, null::bigint
        from tributary.scope s
        {SCOPE_JOINS}
        where s.scope_no = any($1)"
    );
    statement::query(db, &sql, &[&scope_nos]).await?.iter().map(scope_from_row).collect()
}

fn scope_from_row(row: &tokio_postgres::Row) -> Result<ClientScope> {
    let position = |lsn: usize, ordinal: usize| -> Result<Option<Position>> {
        let pair: (Option<i64>, Option<i64>) = (row.try_get(lsn)?, row.try_get(ordinal)?);
        let (Some(lsn), Some(ordinal)) = pair else { return Ok(None) };
        let position = Position::from_sql(lsn, ordinal)
            .map_err(|_| StoreError::integrity("a scope holds an impossible position"))?;
        Ok(Some(position))
    };
    let floor = position(4, 5)?.unwrap_or(Position::GENERATION_START);
    let compacted = position(16, 17)?.unwrap_or(Position::GENERATION_START);
    let newest = position(6, 7)?.unwrap_or(Position::GENERATION_START);
    let cached = match row.try_get::<_, Option<Uuid>>(8)? {
        None => None,
        Some(stream_generation) => {
            let key = ContentKey {
                scope_no: row.try_get(1)?,
                stream_generation,
                schema_version: row.try_get(9)?,
                membership_generation: row.try_get(10)?,
                content: position(11, 12)?.unwrap_or(Position::GENERATION_START),
            };
            Some(CachedDigest { key, digest: digest::kept_from_row(row, 13, &key)? })
        }
    };
    Ok(ClientScope {
        scope_id: row.try_get(0)?,
        scope_no: row.try_get(1)?,
        membership_generation: row.try_get(2)?,
        retention_generation: row.try_get(3)?,
        floor,
        content: newest.max(compacted),
        compacted,
        cached,
        assigned: row.try_get(18)?,
        checkpoint: position(19, 20)?,
    })
}

/// Writes a changed assignment and its new version. `added` had no row or were removed earlier.
pub async fn reassign(
    db: &impl GenericClient,
    client_no: i64,
    scope_set_version: i64,
    added: &[i32],
    removed: &[i32],
) -> Result<()> {
    let sql = "-- client::reassign_add
        insert into tributary.client_scope (client_no, scope_no, assigned)
        select $1, unnest($2::integer[]), true
        on conflict on constraint client_scope_is_key do update set assigned = true";
    statement::execute(db, sql, &[&client_no, &added]).await?;
    let sql = "-- client::reassign_remove
        update tributary.client_scope set assigned = false where client_no = $1 and scope_no = any($2)";
    statement::execute(db, sql, &[&client_no, &removed]).await?;
    let sql = "-- client::reassign_version
        update tributary.client set scope_set_version = $2 where client_no = $1 and scope_set_version = $2::bigint - 1";
    if statement::execute(db, sql, &[&client_no, &scope_set_version]).await? == 1 {
        Ok(())
    } else {
        Err(StoreError::integrity("scope_set_version does not move by one"))
    }
}

/// Advances checkpoints to presented positions, per scope and never backwards (ADR 003, "Cursor issuance and server
/// acknowledgement"). Callers pass only positions that are ahead of the stored ones.
pub async fn acknowledge(db: &impl GenericClient, client_no: i64, presented: &[(i32, Position)]) -> Result<()> {
    let sql = "-- client::acknowledge
        update tributary.client_scope cs
        set acknowledged_lsn = u.lsn, acknowledged_ordinal = u.ordinal
        from unnest($2::integer[], $3::bigint[], $4::bigint[]) as u (scope_no, lsn, ordinal)
        where cs.client_no = $1 and cs.scope_no = u.scope_no
            and (cs.acknowledged_lsn is null or (cs.acknowledged_lsn, cs.acknowledged_ordinal) < (u.lsn, u.ordinal))";
    let scopes: Vec<i32> = presented.iter().map(|p| p.0).collect();
    let lsns: Vec<i64> = presented.iter().map(|p| p.1.to_sql().0).collect();
    let ordinals: Vec<i64> = presented.iter().map(|p| p.1.to_sql().1).collect();
    statement::execute(db, sql, &[&client_no, &scopes, &lsns, &ordinals]).await?;
    Ok(())
}

/// Lets the transaction commit without waiting for the disk: it is durable within a second. Only for acknowledgements,
/// which compaction relies on and clients repeat: after a crash of the database a checkpoint can be an older one, as if
/// the request had come later (ADR 003, "Costs and obligations": compaction uses the last position conservatively).
pub async fn relax_commit(db: &impl GenericClient) -> Result<()> {
    Ok(db.batch_execute("set local synchronous_commit = off").await?)
}

/// Records that the client has acknowledged just now, for retention.
pub async fn touch(db: &impl GenericClient, client_no: i64, now: SystemTime) -> Result<()> {
    let sql = "-- client::touch\nupdate tributary.client set acknowledged_at = $2 where client_no = $1";
    statement::execute(db, sql, &[&client_no, &now]).await?;
    Ok(())
}

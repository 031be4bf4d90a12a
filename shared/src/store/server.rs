//! Which server the source is, so that a restored or another one is not taken for the one that the stream came from.

use deadpool_postgres::GenericClient;
use tokio_postgres::Client;
use tokio_postgres::types::PgLsn;

use super::error::{Result, StoreError};
use super::statement;
use crate::lsn::Lsn;

/// What tells a source server from another, and from its own past.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Of the cluster; survives a restart, a failover and a physical restore.
    pub system_identifier: String,
    /// Rises with every promotion and every restore to a point in time.
    pub timeline: i64,
}

/// The source as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// Which server it is.
    pub identity: Identity,
    /// End of its WAL.
    pub wal: Lsn,
}

/// Asks the source who it is. It must not be in recovery.
pub async fn present(source: &Client) -> Result<Present> {
    let row = source
        .query_one(
            "-- server::present
            select (select system_identifier::text from pg_control_system()),
                ('x' || lpad(left(pg_walfile_name(wal), 8), 16, '0'))::bit(64)::bigint,
                wal
            from pg_current_wal_insert_lsn() as wal",
            &[],
        )
        .await?;
    let identity = Identity { system_identifier: row.try_get(0)?, timeline: row.try_get(1)? };
    Ok(Present { identity, wal: Lsn::new(row.try_get::<_, PgLsn>(2)?.into()).unwrap_or_default() })
}

/// The server that the stream generation in force comes from; `None` for a state of an earlier version.
pub async fn recorded(db: &impl GenericClient) -> Result<Option<Identity>> {
    let sql = "-- server::recorded\nselect system_identifier, timeline from tributary.source_server";
    let Some(row) = statement::query_opt(db, sql, &[]).await? else { return Ok(None) };
    Ok(Some(Identity { system_identifier: row.try_get(0)?, timeline: row.try_get(1)? }))
}

/// Records the server, under the leader's epoch: at an activation, or when the source moved to a timeline that holds
/// everything that is materialized.
///
/// # Errors
/// [`StoreError::Fenced`] when another leads.
pub async fn record(db: &impl GenericClient, epoch: i64, identity: &Identity) -> Result<()> {
    let sql = "-- server::record
        insert into tributary.source_server as s (system_identifier, timeline)
        select $2, $3 from tributary.leader where epoch = $1
        on conflict on constraint source_server_is_one_row do update
        set system_identifier = excluded.system_identifier, timeline = excluded.timeline";
    let recorded = statement::execute(db, sql, &[&epoch, &identity.system_identifier, &identity.timeline]).await?;
    if recorded == 1 { Ok(()) } else { Err(StoreError::Fenced) }
}

/// Where a timeline was left for the next, by a timeline history file (`<timeline>\t<LSN>\t<reason>` a line); `None`
/// when the history does not come from that timeline.
pub fn left_at(history: &str, timeline: i64) -> Option<Lsn> {
    history.lines().find_map(|line| {
        let mut fields = line.split('\t');
        let left: i64 = fields.next()?.trim().parse().ok()?;
        let at = fields.next()?.trim().parse().ok()?;
        (left == timeline).then_some(at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_says_where_a_timeline_was_left() {
        let history = "1\t0/5000028\tbefore 2026-12-01 10:00:00+00\n2\t0/70000A0\tno recovery target specified\n\n";
        assert_eq!(left_at(history, 1), "0/5000028".parse().ok());
        assert_eq!(left_at(history, 2), "0/70000A0".parse().ok());
        assert_eq!(left_at(history, 3), None);
        assert_eq!(left_at("", 1), None);
        assert_eq!(left_at("1\tnonsense\tx\n", 1), None);
    }
}

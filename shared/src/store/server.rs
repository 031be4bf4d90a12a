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
    /// Another one after every promotion and every restore to a point in time.
    pub timeline: i64,
    /// The timeline's history file: `<timeline>\t<LSN at which it was left>\t<reason>` a line. Empty for the first.
    pub history: String,
}

/// The source as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Present {
    /// Its cluster.
    pub system_identifier: String,
    /// Its timeline.
    pub timeline: i64,
    /// End of its WAL.
    pub wal: Lsn,
}

/// How two identities of one cluster are related.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kinship {
    /// The same timeline.
    Same,
    /// They hold the same WAL up to this point, exclusive.
    PartedAt(Lsn),
    /// They have no timeline in common.
    Strangers,
}

impl Identity {
    /// How this server is related to another time of its cluster.
    pub fn kinship(&self, other: &Self) -> Kinship {
        let (own, others) = (left(&self.history), left(&other.history));
        let common = own.iter().zip(&others).take_while(|(a, b)| a == b).count();
        match (own.get(common), others.get(common)) {
            (None, None) if self.timeline == other.timeline => Kinship::Same,
            (Some((own, at)), Some((others, other_at))) if own == others => Kinship::PartedAt(*at.min(other_at)),
            (Some((own, at)), None) if *own == other.timeline => Kinship::PartedAt(*at),
            (None, Some((others, at))) if *others == self.timeline => Kinship::PartedAt(*at),
            _ => Kinship::Strangers,
        }
    }
}

/// The timelines of a history, each with where it was left.
fn left(history: &str) -> Vec<(i64, Lsn)> {
    let line = |line: &str| {
        let mut fields = line.split('\t');
        Some((fields.next()?.trim().parse().ok()?, fields.next()?.trim().parse().ok()?))
    };
    history.lines().filter_map(line).collect()
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
    let wal = Lsn::new(row.try_get::<_, PgLsn>(2)?.into()).unwrap_or_default();
    Ok(Present { system_identifier: row.try_get(0)?, timeline: row.try_get(1)?, wal })
}

/// The server that the stream generation in force comes from; `None` for a state of an earlier version.
pub async fn recorded(db: &impl GenericClient) -> Result<Option<Identity>> {
    let sql = "-- server::recorded\nselect system_identifier, timeline, history from tributary.source_server";
    let Some(row) = statement::query_opt(db, sql, &[]).await? else { return Ok(None) };
    Ok(Some(Identity { system_identifier: row.try_get(0)?, timeline: row.try_get(1)?, history: row.try_get(2)? }))
}

/// Records the server, under the leader's epoch: at an activation, or when the source moved to a timeline that holds
/// everything that is materialized.
///
/// # Errors
/// [`StoreError::Fenced`] when another leads.
pub async fn record(db: &impl GenericClient, epoch: i64, identity: &Identity) -> Result<()> {
    let sql = "-- server::record
        insert into tributary.source_server as s (system_identifier, timeline, history)
        select $2, $3, $4 from tributary.leader where epoch = $1
        on conflict on constraint source_server_is_one_row do update
        set system_identifier = excluded.system_identifier, timeline = excluded.timeline, history = excluded.history";
    let Identity { system_identifier, timeline, history } = identity;
    let recorded = statement::execute(db, sql, &[&epoch, system_identifier, timeline, history]).await?;
    if recorded == 1 { Ok(()) } else { Err(StoreError::Fenced) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(timeline: i64, history: &str) -> Identity {
        Identity { system_identifier: "7".to_owned(), timeline, history: history.to_owned() }
    }

    #[test]
    fn histories_part_where_the_first_of_them_left_a_common_timeline() {
        let at = |text: &str| Kinship::PartedAt(text.parse().expect("an LSN"));
        let first = identity(1, "");
        let second = identity(2, "1\t0/5000028\tbefore 2026-12-01 10:00:00+00\n");
        let other_second = identity(2, "1\t0/4000000\tno recovery target specified\n\n");
        let third = identity(3, "1\t0/5000028\tanother reason\n2\t0/70000A0\tx\n");
        for (one, two, kinship) in [
            (&first, &first, Kinship::Same),
            (&second, &second, Kinship::Same),
            (&first, &second, at("0/5000028")),
            (&second, &third, at("0/70000A0")),
            (&first, &third, at("0/5000028")),
            (&second, &other_second, at("0/4000000")),
            (&other_second, &third, at("0/4000000")),
            (&first, &identity(4, "3\t0/1\tx\n"), Kinship::Strangers),
            (&first, &identity(4, "nonsense"), Kinship::Strangers),
        ] {
            assert_eq!(one.kinship(two), kinship, "{one:?} {two:?}");
            assert_eq!(two.kinship(one), kinship, "{two:?} {one:?}");
        }
    }
}

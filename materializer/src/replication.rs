//! Replication sessions: how the stream is opened, and what its errors mean.

use std::time::Duration;

use pgwire_replication::{PgWireError, ReplicationClient, ReplicationConfig};
use tributary_shared::lsn::Lsn;
use tributary_shared::registry::name::quote_identifier;
use tributary_shared::store::session::{Address, startup_options};

/// Events between the library's socket task and us. Bounds memory together with the size of a row: the library reads
/// no further while the buffer is full.
const BUFFERED_EVENTS: usize = 2048;
/// Time for connecting, authenticating and starting a stream; the library has no limit of its own.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// A replication session that has not started to stream: for creating a slot, or for `start`.
pub async fn connect(
    source: &Address,
    slot: &str,
    publication: &str,
    start: Lsn,
    application: &str,
) -> Result<ReplicationClient, PgWireError> {
    let host = source.host();
    // The library folds names as unquoted identifiers.
    let publication = quote_identifier(publication);
    let config = if host.starts_with('/') {
        ReplicationConfig::unix(
            host,
            source.port(),
            source.user(),
            source.password(),
            source.database(),
            slot,
            publication.as_str(),
        )
    } else {
        ReplicationConfig::new(host, source.user(), source.password(), source.database(), slot, publication.as_str())
            .with_port(source.port())
    };
    let config = config
        .with_start_lsn(pgwire_replication::Lsn::from_u64(start.octets()))
        .with_status_interval(Duration::from_secs(1))
        .with_wakeup_interval(Duration::from_secs(5))
        .with_buffer_size(BUFFERED_EVENTS)
        .with_options(startup_options())
        .with_application_name(application);
    ReplicationClient::connect_gated(config).await
}

/// A slot that was just created, with the snapshot that is exactly aligned with its start.
pub struct NewSlot {
    /// Holds the exported snapshot open; nothing may be sent on it until the snapshot is imported everywhere.
    #[expect(dead_code, reason = "kept for its lifetime: the snapshot ends with the session")]
    pub session: ReplicationClient,
    /// Exclusive: what committed before is in the snapshot, what commits from here on will be streamed.
    pub consistent_point: Lsn,
    /// Name to import the snapshot by.
    pub snapshot: String,
}

/// Creates the slot and exports its snapshot.
pub async fn create_slot(source: &Address, slot: &str, publication: &str) -> Result<NewSlot, PgWireError> {
    let mut session = connect(source, slot, publication, Lsn::ZERO, "tributary-materializer").await?;
    let sql = format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput (SNAPSHOT 'export')", quote_identifier(slot));
    // Creating a slot waits for every transaction that is running, however long: no limit here.
    let rows = session.simple_query(&sql).await?;
    let text = |index: usize| {
        rows.first()
            .and_then(|row| row.get(index))
            .and_then(Option::as_ref)
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .ok_or_else(|| PgWireError::Protocol("CREATE_REPLICATION_SLOT gave no slot".into()))
    };
    let consistent_point = text(1)?
        .parse()
        .map_err(|_| PgWireError::Protocol("CREATE_REPLICATION_SLOT gave no consistent point".into()))?;
    let snapshot = text(2)?.to_owned();
    Ok(NewSlot { session, consistent_point, snapshot })
}

/// The history file of a timeline: where its ancestors were left.
pub async fn timeline_history(source: &Address, timeline: i64) -> Result<String, PgWireError> {
    let asked = async {
        let mut session = connect(source, "none", "none", Lsn::ZERO, "tributary-materializer").await?;
        let rows = session.simple_query(&format!("TIMELINE_HISTORY {timeline}")).await?;
        let content = rows.first().and_then(|row| row.get(1)).and_then(Option::as_ref);
        let content = content.ok_or_else(|| PgWireError::Protocol("TIMELINE_HISTORY gave no history".into()))?;
        Ok(String::from_utf8_lossy(content).into_owned())
    };
    let unanswered = |_| PgWireError::Protocol("TIMELINE_HISTORY was not answered in time".into());
    tokio::time::timeout(CONNECT_LIMIT, asked).await.map_err(unanswered)?
}

/// One clear line about a replication error, with what to do where we know it.
pub fn advice(error: &PgWireError) -> String {
    let text = error.to_string();
    let has = |code: &str| text.contains(code);
    if has("53400") && text.contains("replication slot") {
        "all replication slots are in use: raise max_replication_slots or drop an unused slot".into()
    } else if has("42710") {
        "the replication slot exists already".into()
    } else if has("55006") {
        "the replication slot is held by another session".into()
    } else if has("42704") {
        format!("the replication slot or the publication does not exist: {text}")
    } else if has("53300") {
        "all WAL senders are in use: raise max_wal_senders".into()
    } else if has("42501") || has("must be superuser or replication role") {
        "the role has no REPLICATION privilege: ALTER ROLE … REPLICATION".into()
    } else {
        text
    }
}

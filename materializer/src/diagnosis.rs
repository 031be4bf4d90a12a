//! What stands between durable progress and the source: whether every change since is still to be had, and from the
//! server that the state was made of. The leader refuses to follow a stream with a gap, `materializer status` says what
//! it is; both ask here, so that they never say different things.
//!
//! Deliberately absent: repair. A stream with a gap goes on by `materializer reset` alone.

use deadpool_postgres::GenericClient;
use tokio_postgres::Client;
use tributary_shared::lsn::Lsn;
use tributary_shared::registry::Table;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::server::{self, Identity, Kinship, Present};
use tributary_shared::store::session::Address;
use tributary_shared::store::source::{self, Slot};
use tributary_shared::store::{leader, progress};

use crate::replication;

/// Why the stream cannot be followed from where the state stands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The source is another cluster.
    #[error("the source is another database cluster than the one that the state was made of")]
    AnotherServer,
    /// The source's history parted from the known one before what is materialized.
    #[error(
        "the source went on from {left}, on timeline {timeline}, while the state holds changes up to {resume}: it was restored, or a standby was promoted that had not received them"
    )]
    Diverged {
        /// The timeline now.
        timeline: i64,
        /// Up to where it holds the same as the one that the state knows.
        left: Lsn,
        /// Exclusive end of what is materialized.
        resume: Lsn,
    },
    /// The source is on a timeline that does not come from the known one.
    #[error(
        "the source is on timeline {timeline}, which has nothing in common with timeline {known} that the state was made of"
    )]
    AnotherHistory {
        /// The timeline now.
        timeline: i64,
        /// The timeline that the state knows.
        known: i64,
    },
    /// The source's WAL ends before what is materialized.
    #[error(
        "the source's WAL ends at {wal}, before {resume} that is materialized: it was restored from an older backup"
    )]
    WentBack {
        /// End of the source's WAL.
        wal: Lsn,
        /// Exclusive end of what was materialized or acknowledged.
        resume: Lsn,
    },
    /// There is no slot of this name.
    #[error("replication slot {slot} has vanished: changes since {resume} are lost to the stream")]
    SlotVanished {
        /// Its name.
        slot: String,
        /// Exclusive end of what is materialized.
        resume: Lsn,
    },
    /// The slot is somebody else's.
    #[error("replication slot {slot} is not ours: plugin {plugin}, database {database}")]
    SlotForeign {
        /// Its name.
        slot: String,
        /// Its plugin.
        plugin: String,
        /// Its database.
        database: String,
    },
    /// The source has removed WAL that the slot needed.
    #[error("replication slot {slot} was invalidated ({reason}): changes since {resume} are lost to the stream")]
    SlotInvalidated {
        /// Its name.
        slot: String,
        /// What the source says.
        reason: String,
        /// Exclusive end of what is materialized.
        resume: Lsn,
    },
    /// The slot stands where we never acknowledged.
    #[error(
        "replication slot {slot} was advanced or made anew by someone else: it stands at {to}, and {acknowledged} was acknowledged at most"
    )]
    SlotAdvanced {
        /// Its name.
        slot: String,
        /// Where it stands.
        to: Lsn,
        /// What was recorded before it was acknowledged.
        acknowledged: Lsn,
    },
    /// The publication leaves changes out.
    #[error(
        "publication {publication} is not as the stream needs it: {difference}; changes since it was altered are lost to the stream"
    )]
    PublicationAltered {
        /// Its name.
        publication: String,
        /// What differs.
        difference: String,
    },
}

impl Fault {
    /// A word for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::AnotherServer => "another_server",
            Self::Diverged { .. } | Self::AnotherHistory { .. } => "history_diverged",
            Self::WentBack { .. } => "wal_went_back",
            Self::SlotVanished { .. } => "slot_vanished",
            Self::SlotForeign { .. } => "slot_foreign",
            Self::SlotInvalidated { .. } => "slot_invalidated",
            Self::SlotAdvanced { .. } => "slot_advanced",
            Self::PublicationAltered { .. } => "publication_altered",
        }
    }

    /// What an operator does about it.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::AnotherServer => {
                "point --source-url at the right server; if the source was moved here on purpose, run `materializer reset`"
            }
            Self::SlotForeign { .. } => {
                "give another --slot, or drop that slot if nothing needs it; then run `materializer reset`"
            }
            Self::SlotInvalidated { .. } => {
                "run `materializer reset`; raise max_slot_wal_keep_size so that it outlasts the longest time without a materializer"
            }
            Self::PublicationAltered { .. } => {
                "run `materializer reset`, which puts the publication right and takes a new baseline"
            }
            Self::Diverged { .. }
            | Self::AnotherHistory { .. }
            | Self::WentBack { .. }
            | Self::SlotVanished { .. }
            | Self::SlotAdvanced { .. } => {
                "run `materializer reset`: a new baseline is taken and every client rebuilds once; what is materialized is served until then"
            }
        }
    }
}

/// What was found at the source.
#[derive(Debug)]
pub struct Found {
    /// The server.
    pub present: Present,
    /// The slot, if there is one of the name.
    pub slot: Option<Slot>,
    /// What is wrong; the worst first.
    pub faults: Vec<Fault>,
    /// The server moved to a timeline that holds everything which is materialized: to be recorded.
    pub followed: Option<Identity>,
}

/// Names of what is ours in the source.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// The slot.
    pub slot: &'a str,
    /// The publication.
    pub publication: &'a str,
}

/// Who the source is, with the history of its timeline.
///
/// # Errors
/// It does not answer.
pub async fn identity(address: &Address, present: &Present) -> Result<Identity, StoreError> {
    // The first timeline has no history.
    let history = if present.timeline > 1 {
        let history = replication::timeline_history(address, present.timeline).await;
        history.map_err(|error| StoreError::Pool(replication::advice(&error)))?
    } else {
        String::new()
    };
    Ok(Identity { system_identifier: present.system_identifier.clone(), timeline: present.timeline, history })
}

/// Compares the source with durable progress.
///
/// # Errors
/// One of the databases does not answer.
pub async fn examine(
    source_db: &Client,
    address: &Address,
    state: &impl GenericClient,
    names: Names<'_>,
    tables: &[Table],
) -> Result<Found, StoreError> {
    let resume = progress::load(state).await?.map_or(Lsn::ZERO, |progress| progress.resume_lsn);
    let acknowledged = leader::acknowledged(state).await?.max(resume);
    let known = server::recorded(state).await?;
    let present = server::present(source_db).await?;
    let slot = source::slot(source_db, names.slot).await?;
    let mut faults = Vec::new();
    let mut followed = None;
    match known {
        Some(known) if known.system_identifier != present.system_identifier => {
            faults.push(Fault::AnotherServer);
        }
        Some(known) => {
            let identity = identity(address, &present).await?;
            let timeline = identity.timeline;
            match known.kinship(&identity) {
                Kinship::Same => {}
                Kinship::PartedAt(left) if left >= resume => followed = Some(identity),
                Kinship::PartedAt(left) => faults.push(Fault::Diverged { timeline, left, resume }),
                Kinship::Strangers => faults.push(Fault::AnotherHistory { timeline, known: known.timeline }),
            }
        }
        None => {}
    }
    // What was acknowledged was seen in the source's WAL: both bounds hold of a server that never went back.
    if faults.is_empty() && present.wal < acknowledged {
        faults.push(Fault::WentBack { wal: present.wal, resume: acknowledged });
    }
    let name = || names.slot.to_owned();
    match &slot {
        None => faults.push(Fault::SlotVanished { slot: name(), resume }),
        Some(slot) if slot.plugin != "pgoutput" || slot.database != address.database() => {
            let (plugin, database) = (slot.plugin.clone(), slot.database.clone());
            faults.push(Fault::SlotForeign { slot: name(), plugin, database });
        }
        Some(slot) if slot.is_lost() => {
            let reason = slot.invalidation_reason.clone().unwrap_or_else(|| "its WAL was removed".into());
            faults.push(Fault::SlotInvalidated { slot: name(), reason, resume });
        }
        Some(slot) if slot.confirmed_flush > acknowledged => {
            faults.push(Fault::SlotAdvanced { slot: name(), to: slot.confirmed_flush, acknowledged });
        }
        Some(_) => {}
    }
    if let Some(difference) = source::publication_difference(source_db, names.publication, tables).await? {
        faults.push(Fault::PublicationAltered { publication: names.publication.to_owned(), difference });
    }
    Ok(Found { present, slot, faults, followed })
}

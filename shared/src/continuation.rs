//! `Continuation`: the rebuild token, the next page of one immutable rebuild session (ADR 003, "Rebuild HMAC token
//! bindings and 24-hour expiry", "Rebuild token dispatch and expiry").
//!
//! All tokens of a session carry the session's creation time and are sealed by its key, so that a replayed page is
//! the same octet for octet.

use uuid::Uuid;

use crate::position::{Position, PositionKind};
use crate::token::{Bindings, Expected, Forged, KeyId, KeyRing, Kind, Lineage, Reader, UnknownKey, Writer};

/// A session lives exactly this long, in microseconds; pages and replays never extend it.
pub const SESSION_MICROS: i64 = 24 * 60 * 60 * 1_000_000;

/// A rebuild continuation's authentic content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuation {
    /// Generations that the session was created under.
    pub lineage: Lineage,
    /// Whose, and of which scope.
    pub bindings: Bindings,
    /// The server's name of the session.
    pub session_id: Uuid,
    /// The client's name of the attempt.
    pub rebuild_id: Uuid,
    /// A generation start or transaction end: where incremental pull goes on afterwards.
    pub snapshot_boundary: Position,
    /// Ordinal, from 0, of the next page's first row in the staged snapshot.
    pub next_row_ordinal: u64,
    /// Rows of a page, 1 to 1000; fixed for the session.
    pub page_limit: u16,
    /// The client's accepted-write epoch that the session was created at.
    pub accepted_write_epoch: u64,
    /// Creation of the session, in microseconds since 1970 UTC.
    pub issued_at: i64,
}

/// What a continuation is compared with.
#[derive(Debug, Clone, Copy)]
pub struct Current {
    /// The generations in force.
    pub lineage: Lineage,
    /// The client's epoch in the source, read before the state snapshot.
    pub accepted_write_epoch: u64,
    /// Present time, in microseconds since 1970 UTC.
    pub now: i64,
}

/// Why an authentic continuation cannot go on: 409 `rebuild_restart_required`, whichever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lapse {
    /// 24 hours are over.
    Expired,
    /// Another stream generation.
    Stream,
    /// Another client generation.
    Client,
    /// Another schema.
    Schema,
    /// Another membership generation of the scope.
    Membership,
    /// Another retention lineage.
    Retention,
    /// Writes of the client were accepted since.
    Epoch,
}

/// Why a continuation request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The session is over: 409 `rebuild_restart_required`.
    Lapsed(Lapse),
    /// The request's limit is not the session's: 400 `invalid_request`.
    PageLimit,
}

impl Continuation {
    /// When the session ends, exclusive, in microseconds since 1970 UTC.
    pub const fn expires_at(&self) -> i64 {
        self.issued_at.saturating_add(SESSION_MICROS)
    }

    /// The token, sealed by the session's key.
    ///
    /// # Errors
    /// The session's key is retired: the session can be continued no more.
    pub fn seal_with(&self, ring: &KeyRing, key_id: KeyId) -> Result<String, UnknownKey> {
        ring.seal_with(key_id, Kind::Rebuild, &self.encode())
    }

    /// The continuation that a request presents.
    ///
    /// # Errors
    /// Not a rebuild token of this ring, or not for this user, client, scope and attempt: one and the same error.
    pub fn open(ring: &KeyRing, text: &str, expected: &Expected<'_>, rebuild_id: Uuid) -> Result<Self, Forged> {
        let continuation = Self::decode(&ring.open(Kind::Rebuild, text)?)?;
        continuation.bindings.require(expected)?;
        if continuation.rebuild_id == rebuild_id { Ok(continuation) } else { Err(Forged) }
    }

    /// Why the session is over; `None` when it goes on. Whether session and snapshot still exist, the store knows.
    pub fn lapse(&self, current: &Current) -> Option<Lapse> {
        let (was, is) = (&self.lineage, &current.lineage);
        if current.now >= self.expires_at() {
            Some(Lapse::Expired)
        } else if was.stream_generation != is.stream_generation {
            Some(Lapse::Stream)
        } else if was.client_generation != is.client_generation {
            Some(Lapse::Client)
        } else if was.schema_hash != is.schema_hash {
            Some(Lapse::Schema)
        } else if was.membership_generation != is.membership_generation {
            Some(Lapse::Membership)
        } else if was.retention_generation != is.retention_generation {
            Some(Lapse::Retention)
        } else if self.accepted_write_epoch != current.accepted_write_epoch {
            Some(Lapse::Epoch)
        } else {
            None
        }
    }

    /// Why a request with this limit is refused. Only "a valid token with a page-size mismatch" is invalid, so a
    /// lapsed session comes first.
    pub fn refusal(&self, current: &Current, limit: u16) -> Option<Refusal> {
        match self.lapse(current) {
            Some(lapse) => Some(Refusal::Lapsed(lapse)),
            None if limit != self.page_limit => Some(Refusal::PageLimit),
            None => None,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let fields = self.lineage.write(Writer::default());
        self.bindings
            .write(fields)
            .uuid(self.session_id)
            .uuid(self.rebuild_id)
            .position(self.snapshot_boundary)
            .u64(self.next_row_ordinal)
            .u16(self.page_limit)
            .u64(self.accepted_write_epoch)
            .i64(self.issued_at)
            .i64(self.expires_at())
            .finish()
    }

    fn decode(fields: &[u8]) -> Result<Self, Forged> {
        let mut from = Reader::new(fields);
        let continuation = Self {
            lineage: Lineage::read(&mut from)?,
            bindings: Bindings::read(&mut from)?,
            session_id: from.uuid()?,
            rebuild_id: from.uuid()?,
            snapshot_boundary: from.position()?,
            next_row_ordinal: from.u64()?,
            page_limit: from.u16()?,
            accepted_write_epoch: from.u64()?,
            issued_at: from.i64()?,
        };
        let expires_at = from.i64()?;
        from.finish()?;
        let is_boundary = !matches!(continuation.snapshot_boundary.kind(), PositionKind::Effect { .. });
        let is_page = (1..=1000).contains(&continuation.page_limit);
        if is_boundary && is_page && expires_at == continuation.expires_at() { Ok(continuation) } else { Err(Forged) }
    }
}

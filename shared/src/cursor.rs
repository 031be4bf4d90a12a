//! `Cursor`: the incremental token, one scope's position (ADR 003, "Cursor issuance and server acknowledgement",
//! "Stale versus forged cursor dispatch").
//!
//! [`Cursor::open`] decides between authentic and [`Forged`]; [`Cursor::staleness`] between usable and stale. What
//! follows from either (400, or the scope in `rebuild`) is the request's business.

use crate::position::Position;
use crate::token::{Bindings, Expected, Forged, KeyId, KeyRing, Kind, Lineage, Reader, UnknownKey, Writer};

/// An incremental cursor's authentic content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Generations that it was issued under.
    pub lineage: Lineage,
    /// Whose, and of which scope.
    pub bindings: Bindings,
    /// Everything at or before it is accounted for.
    pub position: Position,
    /// When the server issued it, in microseconds since 1970 UTC.
    pub issued_at: i64,
}

/// What a cursor of one scope is compared with: the request's snapshot.
#[derive(Debug, Clone, Copy)]
pub struct Current {
    /// The generations in force.
    pub lineage: Lineage,
    /// The scope's resume floor, inclusive: a cursor at or above it is valid.
    pub floor: Position,
    /// The request's boundary B.
    pub boundary: Position,
}

/// Why an authentic cursor cannot be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stale {
    /// Another stream generation.
    Stream,
    /// Another client generation.
    Client,
    /// Another membership generation of the scope.
    Membership,
    /// Another retention lineage.
    Retention,
    /// Delete markers after it are compacted away.
    BelowFloor,
    /// Of this stream generation, but past the request's boundary. This server issued it, so the snapshot is of an
    /// older state: a replica that lags, or a restored backup. Waiting (503) or a rebuild; the caller knows which.
    AheadOfBoundary,
    /// Another schema, and nothing else: only this one can be bridged (see [`Cursor::with_schema`]).
    Schema,
}

impl Stale {
    /// Every cause.
    pub const ALL: [Self; 7] = [
        Self::Stream,
        Self::Client,
        Self::Membership,
        Self::Retention,
        Self::BelowFloor,
        Self::AheadOfBoundary,
        Self::Schema,
    ];

    /// The cause's name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Client => "client",
            Self::Membership => "membership",
            Self::Retention => "retention",
            Self::BelowFloor => "below_floor",
            Self::AheadOfBoundary => "ahead_of_boundary",
            Self::Schema => "schema",
        }
    }
}

impl Cursor {
    /// The token, sealed by the signing key.
    pub fn seal(&self, ring: &KeyRing) -> String {
        ring.seal(Kind::Incremental, &self.encode())
    }

    /// The token, sealed by a given key: the final cursor of a rebuild session repeats octet for octet.
    pub fn seal_with(&self, ring: &KeyRing, key_id: KeyId) -> Result<String, UnknownKey> {
        ring.seal_with(key_id, Kind::Incremental, &self.encode())
    }

    /// The cursor that a request presents.
    ///
    /// # Errors
    /// Not an incremental token of this ring, or not for this user, client and scope: one and the same error.
    pub fn open(ring: &KeyRing, text: &str, expected: &Expected<'_>) -> Result<Self, Forged> {
        let cursor = Self::decode(&ring.open(Kind::Incremental, text)?)?;
        cursor.bindings.require(expected)?;
        Ok(cursor)
    }

    /// Why this cursor cannot be resumed now; `None` when it can.
    ///
    /// The schema is compared last, so that [`Stale::Schema`] says that every other binding is current, which is the
    /// bridge's condition.
    pub fn staleness(&self, current: &Current) -> Option<Stale> {
        let (was, is) = (&self.lineage, &current.lineage);
        if was.stream_generation != is.stream_generation {
            Some(Stale::Stream)
        } else if was.client_generation != is.client_generation {
            Some(Stale::Client)
        } else if was.membership_generation != is.membership_generation {
            Some(Stale::Membership)
        } else if was.retention_generation != is.retention_generation {
            Some(Stale::Retention)
        } else if self.position < current.floor {
            Some(Stale::BelowFloor)
        } else if self.position > current.boundary {
            Some(Stale::AheadOfBoundary)
        } else if was.schema_hash != is.schema_hash {
            Some(Stale::Schema)
        } else {
            None
        }
    }

    /// The connect-time bridge's replacement: the same position under a compatible current schema.
    #[must_use]
    pub fn with_schema(mut self, schema_hash: [u8; 32], issued_at: i64) -> Self {
        self.lineage.schema_hash = schema_hash;
        self.issued_at = issued_at;
        self
    }

    fn encode(&self) -> Vec<u8> {
        let fields = self.lineage.write(Writer::default());
        self.bindings.write(fields).position(self.position).i64(self.issued_at).finish()
    }

    fn decode(fields: &[u8]) -> Result<Self, Forged> {
        let mut from = Reader::new(fields);
        let cursor = Self {
            lineage: Lineage::read(&mut from)?,
            bindings: Bindings::read(&mut from)?,
            position: from.position()?,
            issued_at: from.i64()?,
        };
        from.finish()?;
        Ok(cursor)
    }
}

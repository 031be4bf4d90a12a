//! Tokens: opaque texts that the server authenticates before it trusts a single field of them
//! (ADR 003, "Cursor issuance", "Stale versus forged cursor dispatch", "Rebuild HMAC token bindings").
//!
//! The text is `v1.` and base64url without padding of
//!
//! ```text
//! version (1) | kind (1) | key_id (8, big-endian) | fields of the kind | HMAC-SHA-256 of all before it (32)
//! ```
//!
//! The kind stands in the body and also separates the keys, so that a token of one kind can never pass as the other.
//! [`crate::cursor`] and [`crate::continuation`] define the fields. Every way in which a token can be wrong is the
//! one error [`Forged`]. Deliberately absent: encryption (fields hold no identifiers in clear) and any way to read a
//! field before the MAC is verified, but for the key id that selects the key.

mod binding;
mod body;
mod key_ring;
#[cfg(test)]
mod tests;

pub use binding::{Bindings, Expected, Lineage};
pub(crate) use body::{Reader, Writer};
pub use key_ring::{KeyId, KeyRing, KeyRingError, UnknownKey};

/// What every token text begins with.
pub const PREFIX: &str = "v1.";
/// The token version in the body.
const VERSION: u8 = 1;
/// Octets of an HMAC-SHA-256.
const MAC_OCTETS: usize = 32;
/// Version, kind, key id.
const HEADER_OCTETS: usize = 10;
/// More than the fields of any kind take; bounds the work that an unauthenticated text can cause.
pub const MAX_FIELD_OCTETS: usize = 256;
/// No token text is longer.
pub const MAX_CHARS: usize = PREFIX.len() + ((HEADER_OCTETS + MAX_FIELD_OCTETS + MAC_OCTETS) * 4).div_ceil(3);

/// A text that is not a token of this server for this request: malformed, of another kind or version, of an unknown
/// key, with a wrong MAC, or bound to something else. It never tells which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("token is not authentic for this request")]
pub struct Forged;

/// What a token is for. The two are not interchangeable (ADR 003, "Stream position and common terms").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Position of one scope in the stream.
    Incremental,
    /// Continuation of one rebuild session.
    Rebuild,
}

impl Kind {
    const fn octet(self) -> u8 {
        match self {
            Self::Incremental => 1,
            Self::Rebuild => 2,
        }
    }

    /// What is hashed with a secret to get the kind's own MAC key. Part of the token format: never changes.
    const fn derivation_label(self) -> &'static [u8] {
        match self {
            Self::Incremental => b"tributary token kind incremental v1",
            Self::Rebuild => b"tributary token kind rebuild v1",
        }
    }
}

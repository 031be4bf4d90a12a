//! What both kinds of tokens are bound to: who may present them for what, and the generations they were issued under.

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::{Forged, Reader, Writer};

/// For whom and for which scope a request presents a token.
#[derive(Clone, Copy)]
pub struct Expected<'a> {
    /// The authenticated user (transport identity, never a JSON field).
    pub user: &'a str,
    /// The user's client.
    pub client: &'a str,
    /// The scope that the token is presented for.
    pub scope: &'a str,
}

/// Who may present a token, and for which scope, as digests: tokens carry no identifier in clear and have a length
/// of their own, however long the identifiers are.
///
/// User and client are 16 octets of SHA-256: to pass as another, one needs a second preimage, and that under a MAC.
/// The scope is all 32 octets: parts of scope ids come from application data, so that somebody could try to prepare
/// two scopes that collide; with the whole digest, equality of digests is equality of scope ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bindings {
    user: [u8; 16],
    client: [u8; 16],
    scope: [u8; 32],
}

impl Bindings {
    /// The bindings of a token for this user, client and scope.
    pub fn of(expected: &Expected<'_>) -> Self {
        let user = digest(b"tributary:user-binding:v1\0", &[expected.user]);
        let client = digest(b"tributary:client-binding:v1\0", &[expected.user, expected.client]);
        let scope = digest(b"tributary:scope-binding:v1\0", &[expected.scope]);
        Self { user: half(&user), client: half(&client), scope }
    }

    /// Authentic, but somebody else's, is forged.
    pub(crate) fn require(&self, expected: &Expected<'_>) -> Result<(), Forged> {
        if *self == Self::of(expected) { Ok(()) } else { Err(Forged) }
    }

    pub(crate) fn write(&self, to: Writer) -> Writer {
        to.octets(&self.user).octets(&self.client).octets(&self.scope)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, Forged> {
        Ok(Self { user: from.octets()?, client: from.octets()?, scope: from.octets()? })
    }
}

fn digest(label: &[u8], texts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(label);
    for text in texts {
        // Lengths keep ("ab", "c") and ("a", "bc") apart.
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text.as_bytes());
    }
    hash.finalize().into()
}

fn half(digest: &[u8; 32]) -> [u8; 16] {
    *digest.first_chunk().expect("16 is less than 32")
}

/// The generations under which continuation state was issued. A token is current only while all of them are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lineage {
    /// Positions of different stream generations are not comparable.
    pub stream_generation: Uuid,
    /// Replaced when the client's continuation state is retired.
    pub client_generation: u64,
    /// The exact manifest used for the page.
    pub schema_hash: [u8; 32],
    /// The scope's membership rule and its materialized generation.
    pub membership_generation: u64,
    /// The retained lineage; ordinary compaction only raises the floor and leaves this.
    pub retention_generation: u64,
}

impl Lineage {
    pub(crate) fn write(&self, to: Writer) -> Writer {
        to.uuid(self.stream_generation)
            .u64(self.client_generation)
            .octets(&self.schema_hash)
            .u64(self.membership_generation)
            .u64(self.retention_generation)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, Forged> {
        Ok(Self {
            stream_generation: from.uuid()?,
            client_generation: from.u64()?,
            schema_hash: from.octets()?,
            membership_generation: from.u64()?,
            retention_generation: from.u64()?,
        })
    }
}

//! The content of a scope: what it is named by, and its rows in memory.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::digest::{ScopeDigestError, ScopeDigester};
use crate::position::Position;

/// What the content of a scope is named by: its cached digest and its snapshots are valid for exactly this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentKey {
    /// Scope.
    pub scope_no: i32,
    /// Stream generation.
    pub stream_generation: Uuid,
    /// Schema version.
    pub schema_version: i64,
    /// Membership generation.
    pub membership_generation: i64,
    /// Content position: the newest effect.
    pub content: Position,
}

impl ContentKey {
    /// Whether `later` is content of the same lineage, at or after this one.
    pub fn precedes(&self, later: &Self) -> bool {
        Self { content: later.content, ..*self } == *later && self.content <= later.content
    }
}

/// What a row costs in memory beside its identity, in octets: its digest, and its part of the map.
const ROW_OCTETS: usize = 80;

/// The identities and digests of a scope's rows. With the rows that changed since, its digest at a later position needs
/// no other row to be read again; it is computed anew over all of them all the same, one plain SHA-256.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    rows: BTreeMap<Box<[u8]>, [u8; 32]>,
    octets: usize,
}

impl Contents {
    /// Adds a row, or gives it another digest.
    pub fn upsert(&mut self, identity: &[u8], row_digest: [u8; 32]) {
        if self.rows.insert(identity.into(), row_digest).is_none() {
            self.octets += identity.len() + ROW_OCTETS;
        }
    }

    /// Takes a row away, if it is there.
    pub fn remove(&mut self, identity: &[u8]) {
        if self.rows.remove(identity).is_some() {
            self.octets -= identity.len() + ROW_OCTETS;
        }
    }

    /// Memory, in octets, about.
    pub const fn octets(&self) -> usize {
        self.octets
    }

    /// How many rows there are.
    pub fn row_count(&self) -> usize {
        self.rows.len()
    }

    /// The scope's digest.
    ///
    /// # Errors
    /// None: a map is in order and knows its length.
    pub fn digest(&self, schema_hash: &[u8; 32], scope_id: &str) -> Result<[u8; 32], ScopeDigestError> {
        let mut digester = ScopeDigester::new(schema_hash, scope_id, self.rows.len() as u64);
        for (identity, digest) in &self.rows {
            digester.row(identity, digest)?;
        }
        digester.finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fresh(rows: &BTreeMap<Vec<u8>, [u8; 32]>) -> [u8; 32] {
        let mut digester = ScopeDigester::new(&[1; 32], "scope", rows.len() as u64);
        for (identity, digest) in rows {
            digester.row(identity, digest).expect("in order");
        }
        digester.finish().expect("all rows")
    }

    proptest! {
        #[test]
        fn changed_rows_give_the_digest_of_all_rows(
            changes in prop::collection::vec((prop::collection::vec(0_u8..4, 1..3), prop::option::of(0_u8..4)), 0..40),
        ) {
            let mut contents = Contents::default();
            let mut model: BTreeMap<Vec<u8>, [u8; 32]> = BTreeMap::new();
            for (identity, change) in changes {
                if let Some(digest) = change {
                    contents.upsert(&identity, [digest; 32]);
                    model.insert(identity, [digest; 32]);
                } else {
                    contents.remove(&identity);
                    model.remove(&identity);
                }
                prop_assert_eq!(contents.digest(&[1; 32], "scope"), Ok(fresh(&model)));
                let octets: usize = model.keys().map(|identity| identity.len() + ROW_OCTETS).sum();
                prop_assert_eq!((contents.row_count(), contents.octets()), (model.len(), octets));
            }
        }
    }
}

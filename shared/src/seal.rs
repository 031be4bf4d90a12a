//! Seals: durable state that contradicts what was written is recognised when it is read, before any of it is served
//! (ADR 003, "Explicit candidate outcomes and captured projections": a digest mismatch or impossible materialization
//! state fails the whole page).
//!
//! A seal is the beginning of a SHA-256 over everything that a record says, its own key included, so that neither a
//! changed column nor a record in another's place passes. It is no secret: it finds damage and stray SQL, not an intruder
//! who computes it anew. Statements that write in sets use the SQL functions of the same names in
//! `migrations/state/V1__state.sql`; an end-to-end test compares both.

use crate::content::ContentKey;
use crate::position::Position;
use sha2::{Digest, Sha256};

/// Octets of a seal.
pub const OCTETS: usize = 8;

/// A seal.
pub type Seal = [u8; OCTETS];

/// What kind of record is sealed, so that none passes for another.
#[derive(Clone, Copy)]
enum Kind {
    Entry = 1,
    Departed = 2,
    Row = 3,
    Wire = 4,
    ScopeDigest = 5,
    Snapshot = 6,
    Block = 7,
}

struct Sealer(Sha256);

impl Sealer {
    fn new(kind: Kind) -> Self {
        let mut hasher = Sha256::new();
        hasher.update([kind as u8]);
        Self(hasher)
    }

    fn octets(mut self, octets: &[u8]) -> Self {
        self.0.update(octets);
        self
    }

    fn int8(self, number: i64) -> Self {
        self.octets(&number.to_be_bytes())
    }

    fn position(self, position: Position) -> Self {
        let (lsn, ordinal) = position.to_sql();
        self.int8(lsn).int8(ordinal)
    }

    fn seal(self) -> Seal {
        let digest = self.0.finalize();
        let mut seal = Seal::default();
        seal.copy_from_slice(&digest[..OCTETS]);
        seal
    }
}

/// The seal of a scope entry.
pub fn entry(row_id: i64, position: Position, scope_no: i32, table_no: i16, present: bool) -> Seal {
    let (lsn, ordinal) = position.to_sql();
    // Laid out at once: this is the commonest record.
    let mut input = [0; 32];
    input[0] = Kind::Entry as u8;
    input[1..9].copy_from_slice(&row_id.to_be_bytes());
    input[9..17].copy_from_slice(&lsn.to_be_bytes());
    input[17..25].copy_from_slice(&ordinal.to_be_bytes());
    input[25..29].copy_from_slice(&scope_no.to_be_bytes());
    input[29..31].copy_from_slice(&table_no.to_be_bytes());
    input[31] = u8::from(present);
    let mut seal = Seal::default();
    seal.copy_from_slice(&Sha256::digest(input)[..OCTETS]);
    seal
}

/// The seal of the key of a departed row.
pub fn departed(row_id: i64, table_no: i16, key: &[u8]) -> Seal {
    Sealer::new(Kind::Departed).int8(row_id).octets(&table_no.to_be_bytes()).octets(key).seal()
}

/// The seal of a captured row in two halves: the first is over what identifies it, its digest included, and can be
/// checked without its content; the second is over the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSeal(pub [u8; 2 * OCTETS]);

impl RowSeal {
    /// Seals a captured row.
    pub fn new(row_id: i64, table_no: i16, key: &[u8], version: Position, digest: &[u8; 32], wire: &str) -> Self {
        let mut seal = [0; 2 * OCTETS];
        seal[..OCTETS].copy_from_slice(&Self::identity(row_id, table_no, key, version, digest));
        seal[OCTETS..].copy_from_slice(&Self::wire(digest, wire));
        Self(seal)
    }

    /// Whether the row's identity, version and digest are as they were sealed.
    pub fn fits_identity(&self, row_id: i64, table_no: i16, key: &[u8], version: Position, digest: &[u8; 32]) -> bool {
        self.0[..OCTETS] == Self::identity(row_id, table_no, key, version, digest)
    }

    /// Whether the content is the one that was sealed with this digest.
    pub fn fits_wire(&self, digest: &[u8; 32], wire: &str) -> bool {
        self.0[OCTETS..] == Self::wire(digest, wire)
    }

    fn identity(row_id: i64, table_no: i16, key: &[u8], version: Position, digest: &[u8; 32]) -> Seal {
        let sealer = Sealer::new(Kind::Row).int8(row_id).octets(&table_no.to_be_bytes()).position(version);
        // The key comes last: all before it has a fixed length.
        sealer.octets(digest).octets(key).seal()
    }

    fn wire(digest: &[u8; 32], wire: &str) -> Seal {
        Sealer::new(Kind::Wire).octets(digest).octets(wire.as_bytes()).seal()
    }
}

fn content_sealer(kind: Kind, key: &ContentKey) -> Sealer {
    Sealer::new(kind)
        .octets(&key.scope_no.to_be_bytes())
        .octets(key.stream_generation.as_bytes())
        .int8(key.schema_version)
        .int8(key.membership_generation)
        .position(key.content)
}

/// The seal of a cached scope digest.
pub fn scope_digest(key: &ContentKey, row_count: i64, digest: &[u8; 32]) -> Seal {
    content_sealer(Kind::ScopeDigest, key).int8(row_count).octets(digest).seal()
}

/// The seal of a staged snapshot.
pub fn snapshot(key: &ContentKey, snapshot_no: i64, row_count: i64, digest: &[u8; 32]) -> Seal {
    content_sealer(Kind::Snapshot, key).int8(snapshot_no).int8(row_count).octets(digest).seal()
}

/// The seal of a block of a snapshot.
pub fn block(snapshot_no: i64, block_no: i32, first_row: i64, record_ends: &[i32], records: &[u8]) -> Seal {
    let mut sealer = Sealer::new(Kind::Block).int8(snapshot_no).octets(&block_no.to_be_bytes()).int8(first_row);
    sealer = sealer.int8(record_ends.len() as i64);
    for end in record_ends {
        sealer = sealer.octets(&end.to_be_bytes());
    }
    sealer.octets(records).seal()
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::lsn::Lsn;

    fn at(lsn: u64, event: u64) -> Position {
        Position::effect(Lsn::new(lsn).expect("in range"), event, 0).expect("in range")
    }

    #[test]
    fn every_part_of_an_entry_is_sealed() {
        let seal = entry(1, at(10, 2), 3, 4, true);
        let others = [
            entry(2, at(10, 2), 3, 4, true),
            entry(1, at(11, 2), 3, 4, true),
            entry(1, at(10, 3), 3, 4, true),
            entry(1, at(10, 2), 4, 4, true),
            entry(1, at(10, 2), 3, 5, true),
            entry(1, at(10, 2), 3, 4, false),
        ];
        assert!(others.iter().all(|other| *other != seal));
    }

    #[test]
    fn every_part_of_a_row_is_sealed() {
        let (digest, other) = ([7; 32], [8; 32]);
        let seal = RowSeal::new(1, 2, b"key", at(10, 2), &digest, "{}");
        assert!(seal.fits_identity(1, 2, b"key", at(10, 2), &digest) && seal.fits_wire(&digest, "{}"));
        assert!(!seal.fits_identity(2, 2, b"key", at(10, 2), &digest));
        assert!(!seal.fits_identity(1, 3, b"key", at(10, 2), &digest));
        assert!(!seal.fits_identity(1, 2, b"kez", at(10, 2), &digest));
        assert!(!seal.fits_identity(1, 2, b"key", at(11, 2), &digest));
        assert!(!seal.fits_identity(1, 2, b"key", at(10, 2), &other));
        assert!(!seal.fits_wire(&digest, "{ }") && !seal.fits_wire(&other, "{}"));
    }

    #[test]
    fn every_part_of_a_content_is_sealed() {
        let generation = Uuid::from_u128(9);
        let key = ContentKey {
            scope_no: 1,
            stream_generation: generation,
            schema_version: 2,
            membership_generation: 3,
            content: at(10, 2),
        };
        let digest = [7; 32];
        let seal = scope_digest(&key, 5, &digest);
        let others = [
            scope_digest(&ContentKey { scope_no: 2, ..key }, 5, &digest),
            scope_digest(&ContentKey { stream_generation: Uuid::from_u128(8), ..key }, 5, &digest),
            scope_digest(&ContentKey { schema_version: 3, ..key }, 5, &digest),
            scope_digest(&ContentKey { membership_generation: 4, ..key }, 5, &digest),
            scope_digest(&ContentKey { content: at(10, 3), ..key }, 5, &digest),
            scope_digest(&key, 6, &digest),
            scope_digest(&key, 5, &[8; 32]),
            snapshot(&key, 5, 5, &digest),
        ];
        assert!(others.iter().all(|other| *other != seal));
        assert_ne!(snapshot(&key, 5, 5, &digest), snapshot(&key, 6, 5, &digest));
    }

    #[test]
    fn every_part_of_a_block_is_sealed() {
        let seal = block(1, 2, 3, &[2, 4], b"abcd");
        let others = [
            block(2, 2, 3, &[2, 4], b"abcd"),
            block(1, 3, 3, &[2, 4], b"abcd"),
            block(1, 2, 4, &[2, 4], b"abcd"),
            block(1, 2, 3, &[3, 4], b"abcd"),
            block(1, 2, 3, &[2, 4], b"abce"),
        ];
        assert!(others.iter().all(|other| *other != seal));
        assert_ne!(departed(1, 2, b"k"), departed(1, 2, b"l"));
    }
}

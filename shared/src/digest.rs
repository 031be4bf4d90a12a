//! Digests of rows and scopes, and their form on the wire (ADR 003, "Pull response rules": `checksums`,
//! `row_checksum`).
//!
//! One plain streaming SHA-256 each. Deliberately absent: trees, XOR and incremental updates; a scope's digest is
//! computed anew from its rows in identity order.

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};
use sha2::{Digest, Sha256};

const SCOPE_DIGEST: &[u8] = b"synchro:v3:scope-digest:v1\0";
const HEX: &[u8; 16] = b"0123456789abcdef";

/// SHA-256 of a row digest's whole input.
pub(crate) fn row_digest_of(input: &[u8]) -> [u8; 32] {
    Sha256::digest(input).into()
}

/// Why a scope's rows have no digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScopeDigestError {
    /// A row whose identity is not above the one before it.
    #[error("rows of a scope are not in identity order")]
    NotAscending,
    /// More or fewer rows than announced.
    #[error("a scope has another number of rows than announced")]
    RowCount,
}

/// Digests one scope from its rows, streamed in the unsigned order of their identities.
#[derive(Clone, Debug)]
pub struct ScopeDigester {
    hasher: Sha256,
    /// Rows still to come.
    remaining: u64,
    /// The greatest identity so far; identities are never empty.
    last: Vec<u8>,
}

impl ScopeDigester {
    /// Begins the digest of a scope that has exactly `row_count` rows.
    pub fn new(schema_hash: &[u8; 32], scope_id: &str, row_count: u64) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(SCOPE_DIGEST);
        hasher.update(schema_hash);
        hasher.update((scope_id.len() as u64).to_be_bytes());
        hasher.update(scope_id.as_bytes());
        hasher.update(row_count.to_be_bytes());
        Self { hasher, remaining: row_count, last: Vec::new() }
    }

    /// Adds the next row.
    ///
    /// # Errors
    /// The identity is not above the last one, or the row is one too many.
    pub fn row(&mut self, identity: &[u8], row_digest: &[u8; 32]) -> Result<(), ScopeDigestError> {
        if identity <= self.last.as_slice() {
            return Err(ScopeDigestError::NotAscending);
        }
        self.remaining = self.remaining.checked_sub(1).ok_or(ScopeDigestError::RowCount)?;
        self.last.clear();
        self.last.extend_from_slice(identity);
        self.hasher.update((identity.len() as u64).to_be_bytes());
        self.hasher.update(identity);
        self.hasher.update(row_digest);
        Ok(())
    }

    /// The digest.
    ///
    /// # Errors
    /// Rows are missing.
    pub fn finish(self) -> Result<[u8; 32], ScopeDigestError> {
        if self.remaining == 0 { Ok(self.hasher.finalize().into()) } else { Err(ScopeDigestError::RowCount) }
    }
}

/// A digest as the wire shows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Checksum([u8; 32]);

impl Checksum {
    /// The checksum of a row or scope digest.
    pub const fn new(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// Appends exactly what serializing gives, for records that are put together as text.
    pub fn write_json(&self, out: &mut String) {
        out.push_str(r#"{"algorithm":"sha256","version":1,"encoding":"hex","digest":""#);
        write_hex(&self.0, out);
        out.push_str("\"}");
    }
}

impl From<[u8; 32]> for Checksum {
    fn from(digest: [u8; 32]) -> Self {
        Self(digest)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut checksum = serializer.serialize_struct("Checksum", 4)?;
        checksum.serialize_field("algorithm", "sha256")?;
        checksum.serialize_field("version", &1)?;
        checksum.serialize_field("encoding", "hex")?;
        checksum.serialize_field("digest", &hex(&self.0))?;
        checksum.end()
    }
}

/// Appends lowercase hexadecimal.
pub fn write_hex(octets: &[u8], out: &mut String) {
    out.reserve(octets.len() * 2);
    for octet in octets {
        out.push(char::from(HEX[usize::from(octet >> 4)]));
        out.push(char::from(HEX[usize::from(octet & 15)]));
    }
}

/// Lowercase hexadecimal.
pub fn hex(octets: &[u8]) -> String {
    let mut out = String::new();
    write_hex(octets, &mut out);
    out
}

/// The digest that exactly 64 lowercase hexadecimal digits spell.
pub fn parse_hex(text: &str) -> Option<[u8; 32]> {
    let nibble = |digit: u8| HEX.iter().position(|hex| *hex == digit).map(|n| n as u8);
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let pairs: &[[u8; 2]; 32] = pairs.try_into().ok()?;
    let mut digest = [0; 32];
    for (octet, [high, low]) in digest.iter_mut().zip(pairs) {
        *octet = nibble(*high)? << 4 | nibble(*low)?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checksum_is_exact() {
        let checksum = Checksum::new([0xAB; 32]);
        let expected =
            format!(r#"{{"algorithm":"sha256","version":1,"encoding":"hex","digest":"{}"}}"#, "ab".repeat(32));
        assert_eq!(serde_json::to_string(&checksum).unwrap(), expected);
        let mut written = String::new();
        checksum.write_json(&mut written);
        assert_eq!(written, expected);
    }

    #[test]
    fn rows_of_a_scope_ascend_and_are_counted() {
        let digester = |rows| ScopeDigester::new(&[0; 32], "s", rows);
        let mut two = digester(2);
        assert_eq!(two.row(b"a", &[1; 32]), Ok(()));
        assert_eq!(two.row(b"a", &[1; 32]), Err(ScopeDigestError::NotAscending));
        assert_eq!(two.row(b"Z", &[1; 32]), Err(ScopeDigestError::NotAscending));
        assert_eq!(two.clone().finish(), Err(ScopeDigestError::RowCount));
        // Unsigned: 0xff is above every ASCII octet.
        assert_eq!(two.row(b"\xff", &[1; 32]), Ok(()));
        assert_eq!(two.row(b"\xff\0", &[1; 32]), Err(ScopeDigestError::RowCount));
        assert!(two.finish().is_ok());
        assert!(digester(0).finish().is_ok());
    }

    #[test]
    fn scope_digest_has_the_layout_of_the_protocol() {
        let mut digester = ScopeDigester::new(&[7; 32], "sé", 2);
        let mut input = b"synchro:v3:scope-digest:v1\0".to_vec();
        input.extend([7; 32]);
        input.extend([0, 0, 0, 0, 0, 0, 0, 3]);
        input.extend("sé".as_bytes());
        input.extend([0, 0, 0, 0, 0, 0, 0, 2]);
        for (identity, digest) in [(b"aa".as_slice(), [1; 32]), (b"b", [2; 32])] {
            digester.row(identity, &digest).unwrap();
            input.extend((identity.len() as u64).to_be_bytes());
            input.extend(identity);
            input.extend(digest);
        }
        assert_eq!(digester.finish(), Ok(row_digest_of(&input)));
    }

    proptest! {
        #[test]
        fn hex_round_trips(digest: [u8; 32]) {
            prop_assert_eq!(parse_hex(&hex(&digest)), Some(digest));
        }
    }

    #[test]
    fn hex_has_one_spelling() {
        for text in ["", "ab", &"A".repeat(64), &"g".repeat(64), &"a".repeat(63), &"a".repeat(66)] {
            assert_eq!(parse_hex(text), None, "{text}");
        }
    }
}

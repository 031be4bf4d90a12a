//! Log sequence numbers of PostgreSQL's write-ahead log.

use std::fmt;
use std::str::FromStr;

/// A position in PostgreSQL's write-ahead log, in octets; displays as `16/B374D848`.
///
/// Stored in SQL as `bigint`: positions of 2^63 and above (eight exbibytes of WAL) are refused at the edge, so that
/// signed comparison is right.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(u64);

/// A text or number that is not a log sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a log sequence number below 2^63")]
pub struct LsnError;

impl Lsn {
    /// Before any WAL; PostgreSQL's invalid LSN.
    pub const ZERO: Self = Self(0);

    /// An LSN from its octet position.
    pub const fn new(octets: u64) -> Result<Self, LsnError> {
        if octets > i64::MAX as u64 { Err(LsnError) } else { Ok(Self(octets)) }
    }

    /// An LSN as it is stored in SQL.
    pub const fn from_sql(stored: i64) -> Result<Self, LsnError> {
        if stored < 0 { Err(LsnError) } else { Ok(Self(stored as u64)) }
    }

    /// The value that is stored in SQL.
    pub const fn to_sql(self) -> i64 {
        self.0 as i64
    }

    /// The position in octets.
    pub const fn octets(self) -> u64 {
        self.0
    }

    /// Octets of WAL from `earlier` to `self`; 0 when `earlier` is not earlier.
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Lsn {
    type Err = LsnError;

    fn from_str(text: &str) -> Result<Self, LsnError> {
        let (high, low) = text.split_once('/').ok_or(LsnError)?;
        let half = |s: &str| {
            let hex = !s.is_empty() && s.bytes().all(|b| b.is_ascii_hexdigit());
            if hex { u32::from_str_radix(s, 16).map_err(|_| LsnError) } else { Err(LsnError) }
        };
        Self::new(u64::from(half(high)?) << 32 | u64::from(half(low)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_parse_round_trip() {
        for octets in [0, 1, 0xFFFF_FFFF, 0x1_0000_0000, 0x16_B374_D848, i64::MAX as u64] {
            let lsn = Lsn::new(octets).expect("below 2^63");
            assert_eq!(lsn.to_string().parse(), Ok(lsn));
            assert_eq!(Lsn::from_sql(lsn.to_sql()), Ok(lsn));
        }
        assert_eq!("16/B374D848".parse(), Ok(Lsn(0x16_B374_D848)));
    }

    #[test]
    fn refuses_what_is_not_an_lsn() {
        for text in ["", "/", "0", "0/", "/0", "0/+1", "0/1 ", "1FFFFFFFF/0", "80000000/0", "G/0", "0/0/0"] {
            assert_eq!(text.parse::<Lsn>(), Err(LsnError), "{text:?}");
        }
        assert_eq!(Lsn::new(1 << 63), Err(LsnError));
        assert_eq!(Lsn::from_sql(-1), Err(LsnError));
    }
}

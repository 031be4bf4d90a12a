//! Points of the pull stream (ADR 003, "Stream position and common terms").
//!
//! Positions of different stream generations are not comparable; a position does not carry its generation, so
//! whoever compares two has checked that first.

use crate::lsn::{Lsn, LsnError};

/// Bits of a stored ordinal that hold the effect ordinal.
const EFFECT_BITS: u32 = 24;
/// Effects of one event in one scope are below this number.
pub const MAX_EFFECTS: u32 = 1 << EFFECT_BITS;
/// Events (row changes) of one source transaction are below this number.
pub const MAX_EVENTS: u64 = 1 << (62 - EFFECT_BITS);
/// The stored ordinal of a transaction end: after every effect.
const END_ORDINAL: i64 = i64::MAX;

/// A point of the stream, in stream order: the generation start precedes every transaction, a transaction end
/// follows every effect at its commit LSN.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Position {
    // Derived order on (lsn, ordinal) is stream order by the choice of the stored encoding.
    lsn: Lsn,
    ordinal: i64,
}

/// What kind of point a position is, with the members that this kind has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PositionKind {
    /// Before every transaction of the generation.
    GenerationStart,
    /// One effect.
    Effect {
        /// Commit LSN of the source transaction.
        commit_lsn: Lsn,
        /// Ordinal, from 0, of the row change in its source transaction.
        event_ordinal: u64,
        /// Delivery tie-breaker of the effects of one event in one scope, from 0.
        effect_ordinal: u32,
    },
    /// After every effect of a source transaction.
    TransactionEnd {
        /// Commit LSN of the source transaction.
        commit_lsn: Lsn,
    },
}

/// Numbers that are not a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a stream position")]
pub struct PositionError;

impl From<LsnError> for PositionError {
    fn from(_: LsnError) -> Self {
        Self
    }
}

impl Position {
    /// The point before every transaction. Rows of a baseline stand at it.
    pub const GENERATION_START: Self = Self { lsn: Lsn::ZERO, ordinal: 0 };

    /// The point after every effect of the transaction that committed at `commit_lsn`.
    ///
    /// # Errors
    /// `commit_lsn` is zero, which no transaction has.
    pub fn transaction_end(commit_lsn: Lsn) -> Result<Self, PositionError> {
        if commit_lsn == Lsn::ZERO { Err(PositionError) } else { Ok(Self { lsn: commit_lsn, ordinal: END_ORDINAL }) }
    }

    /// The point of one effect.
    ///
    /// # Errors
    /// `commit_lsn` is zero, or an ordinal is past [`MAX_EVENTS`] or [`MAX_EFFECTS`].
    pub fn effect(commit_lsn: Lsn, event_ordinal: u64, effect_ordinal: u32) -> Result<Self, PositionError> {
        if commit_lsn == Lsn::ZERO || event_ordinal >= MAX_EVENTS || effect_ordinal >= MAX_EFFECTS {
            return Err(PositionError);
        }
        let ordinal = event_ordinal << EFFECT_BITS | u64::from(effect_ordinal);
        Ok(Self { lsn: commit_lsn, ordinal: ordinal as i64 })
    }

    /// The boundary whose inclusive commit LSN is stored as `boundary_lsn`: zero is the generation start.
    pub fn boundary(boundary_lsn: Lsn) -> Self {
        Self::transaction_end(boundary_lsn).unwrap_or(Self::GENERATION_START)
    }

    /// A position from its two stored numbers.
    ///
    /// # Errors
    /// The numbers are not of the stored encoding.
    pub fn from_sql(commit_lsn: i64, ordinal: i64) -> Result<Self, PositionError> {
        let lsn = Lsn::from_sql(commit_lsn)?;
        let position = Self { lsn, ordinal };
        let valid = if lsn == Lsn::ZERO {
            ordinal == 0
        } else {
            ordinal == END_ORDINAL || (0..(MAX_EVENTS << EFFECT_BITS) as i64).contains(&ordinal)
        };
        if valid { Ok(position) } else { Err(PositionError) }
    }

    /// The two stored numbers, `(commit_lsn, ordinal)`; pairs compare as positions do.
    pub const fn to_sql(self) -> (i64, i64) {
        (self.lsn.to_sql(), self.ordinal)
    }

    /// The commit LSN; zero at a generation start.
    pub const fn commit_lsn(self) -> Lsn {
        self.lsn
    }

    /// What this position is.
    pub fn kind(self) -> PositionKind {
        match (self.lsn, self.ordinal) {
            (Lsn::ZERO, _) => PositionKind::GenerationStart,
            (commit_lsn, END_ORDINAL) => PositionKind::TransactionEnd { commit_lsn },
            (commit_lsn, ordinal) => PositionKind::Effect {
                commit_lsn,
                event_ordinal: ordinal as u64 >> EFFECT_BITS,
                effect_ordinal: ordinal as u32 & (MAX_EFFECTS - 1),
            },
        }
    }

    /// The opaque `server_version` of what happened at this position: of a captured row, or of a delete.
    pub fn server_version(self) -> String {
        format!("{:x}.{:x}", self.lsn.octets(), self.ordinal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lsn(n: u64) -> Lsn {
        Lsn::new(n).expect("small")
    }

    #[test]
    fn points_are_in_stream_order() {
        let effect = |l, e, f| Position::effect(lsn(l), e, f).expect("in range");
        let end = |l| Position::transaction_end(lsn(l)).expect("not zero");
        let ordered = [
            Position::GENERATION_START,
            effect(1, 0, 0),
            effect(1, 0, 1),
            effect(1, 0, MAX_EFFECTS - 1),
            effect(1, 1, 0),
            effect(1, MAX_EVENTS - 1, MAX_EFFECTS - 1),
            end(1),
            effect(2, 0, 0),
            end(2),
        ];
        for pair in ordered.windows(2) {
            assert!(pair[0] < pair[1], "{pair:?}");
            assert!(pair[0].to_sql() < pair[1].to_sql(), "{pair:?}");
        }
        for position in ordered {
            let (l, o) = position.to_sql();
            assert_eq!(Position::from_sql(l, o), Ok(position));
        }
    }

    #[test]
    fn kind_gives_back_the_members() {
        let position = Position::effect(lsn(9), 7, 5).expect("in range");
        let expected = PositionKind::Effect { commit_lsn: lsn(9), event_ordinal: 7, effect_ordinal: 5 };
        assert_eq!(position.kind(), expected);
        assert_eq!(Position::boundary(Lsn::ZERO).kind(), PositionKind::GenerationStart);
        assert_eq!(Position::boundary(lsn(3)).kind(), PositionKind::TransactionEnd { commit_lsn: lsn(3) });
    }

    #[test]
    fn refuses_what_is_out_of_range() {
        assert!(Position::effect(Lsn::ZERO, 0, 0).is_err());
        assert!(Position::effect(lsn(1), MAX_EVENTS, 0).is_err());
        assert!(Position::effect(lsn(1), 0, MAX_EFFECTS).is_err());
        assert!(Position::transaction_end(Lsn::ZERO).is_err());
        assert!(Position::from_sql(0, 1).is_err());
        assert!(Position::from_sql(1, -1).is_err());
        assert!(Position::from_sql(1, i64::MAX - 1).is_err());
        assert!(Position::from_sql(-1, 0).is_err());
    }
}

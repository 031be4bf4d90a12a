//! The canonical binary form of token fields: fixed widths, big-endian, no lengths, nothing optional but the members
//! that a position's kind has. One value has one encoding, and decoding takes exactly that.

use uuid::Uuid;

use super::Forged;
use crate::lsn::Lsn;
use crate::position::{Position, PositionKind};

const GENERATION_START: u8 = 0;
const EFFECT: u8 = 1;
const TRANSACTION_END: u8 = 2;

/// Appends fields.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn octets(mut self, octets: &[u8]) -> Self {
        self.0.extend(octets);
        self
    }

    pub(crate) fn u16(self, value: u16) -> Self {
        self.octets(&value.to_be_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.octets(&value.to_be_bytes())
    }

    pub(crate) fn i64(self, value: i64) -> Self {
        self.octets(&value.to_be_bytes())
    }

    pub(crate) fn uuid(self, value: Uuid) -> Self {
        self.octets(value.as_bytes())
    }

    /// ADR 003: `commit_lsn` only of an effect or a transaction end, the ordinals only of an effect.
    pub(crate) fn position(self, value: Position) -> Self {
        match value.kind() {
            PositionKind::GenerationStart => self.octets(&[GENERATION_START]),
            PositionKind::Effect { commit_lsn, event_ordinal, effect_ordinal } => {
                self.octets(&[EFFECT]).u64(commit_lsn.octets()).u64(event_ordinal).octets(&effect_ordinal.to_be_bytes())
            }
            PositionKind::TransactionEnd { commit_lsn } => self.octets(&[TRANSACTION_END]).u64(commit_lsn.octets()),
        }
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Takes fields from authentic octets.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(octets: &'a [u8]) -> Self {
        Self(octets)
    }

    pub(crate) fn octets<const N: usize>(&mut self) -> Result<[u8; N], Forged> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Forged)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Forged> {
        self.octets().map(u16::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Forged> {
        self.octets().map(u64::from_be_bytes)
    }

    pub(crate) fn i64(&mut self) -> Result<i64, Forged> {
        self.octets().map(i64::from_be_bytes)
    }

    pub(crate) fn uuid(&mut self) -> Result<Uuid, Forged> {
        self.octets().map(Uuid::from_bytes)
    }

    pub(crate) fn position(&mut self) -> Result<Position, Forged> {
        let [kind] = self.octets()?;
        match kind {
            GENERATION_START => Ok(Position::GENERATION_START),
            EFFECT => {
                let commit_lsn = self.lsn()?;
                let event_ordinal = self.u64()?;
                let effect_ordinal = u32::from_be_bytes(self.octets()?);
                Position::effect(commit_lsn, event_ordinal, effect_ordinal).map_err(|_| Forged)
            }
            TRANSACTION_END => Position::transaction_end(self.lsn()?).map_err(|_| Forged),
            _ => Err(Forged),
        }
    }

    fn lsn(&mut self) -> Result<Lsn, Forged> {
        Lsn::new(self.u64()?).map_err(|_| Forged)
    }

    /// Every octet is taken.
    pub(crate) fn finish(self) -> Result<(), Forged> {
        if self.0.is_empty() { Ok(()) } else { Err(Forged) }
    }
}

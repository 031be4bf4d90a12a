//! The page of a pull: a deterministic k-way merge of per-scope candidate streams, the cut at the limit, and what
//! cursor each scope gets (ADR 003, "Per-scope eligibility before the limit", "Deterministic, starvation-free
//! merge", `scope_cursors` and `has_more` of "Pull response rules").
//!
//! The input of a scope is a bounded head of its candidate stream: eligible (after its cursor, at or before the
//! boundary), deduplicated (one candidate of a key), in position order. The store keeps only the latest effect of
//! each key in each scope, which is that deduplication. Deliberately absent: rows, JSON, and any way to leave a
//! candidate out.
//!
//! # Reading `limit + 1` candidates of each scope suffices
//!
//! Let L be the limit. A page selects at most L candidates, so at most L of one scope, and they are a prefix of the
//! scope's stream, because the merge takes streams from their heads and each stream is in merge order (its
//! positions increase strictly, and position is the first component of the tuple).
//! 1. The choice of the k-th candidate (k ≤ L) compares one candidate of each scope: the one after those already
//!    selected, of which there are at most k − 1 ≤ L − 1. So it looks at most at the L-th of each scope.
//! 2. Whether a scope is blocked, and `has_more`, ask only whether a candidate follows the scope's last selected one:
//!    at most the (L + 1)-th.
//!
//! So a head of L + 1 is never used up, and with a shorter head the stream ends there. [`merge`] does not rely on
//! the caller having read so much: a head that is used up while its stream goes on is allowed only as long as no
//! decision needs what was not read, and is [`MergeError::HeadTooShort`] otherwise.
//!
//! # Starvation-free
//!
//! Each page takes the least remaining tuples and the boundary is fixed and finite, so a candidate is delivered after
//! at most (number of lesser candidates) / L pages. What commits later stands after the boundary.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::position::{Position, PositionKind};

/// What a candidate does to its row in its scope. The order is the protocol's operation rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// The row leaves the scope or is gone.
    Delete,
    /// The row is in the scope, as captured.
    Upsert,
}

/// The retained (greatest eligible) effect of one key in one scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Position of the effect.
    pub position: Position,
    /// Logical table id, as UTF-8.
    pub table_id: &'a [u8],
    /// Primary key, as `typed_value` octets.
    pub key: &'a [u8],
    /// What it does.
    pub operation: Operation,
}

/// What follows a head that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Nothing: the stream ends with its head.
    Nothing,
    /// More candidates up to the boundary may follow, all of them after this position (or at it, but behind the head
    /// candidates of all streams in merge order). The head's last position, when nothing better is known; the last
    /// position of all, when the heads are the least `limit + 1` of all streams together, read in merge order.
    /// A stream whose head is used up then counts as going on: its cursor does not reach the boundary on this page.
    /// `has_more` is exact as long as some head holds a candidate that was not selected, or the guess is right.
    After(Position),
}

/// The candidate stream of one scope with a valid cursor.
#[derive(Debug, Clone)]
pub struct Stream<'a> {
    /// Scope id, as UTF-8; of one stream only.
    pub scope_id: &'a [u8],
    /// Position of the presented cursor, exclusive.
    pub cursor: Position,
    /// The first candidates, in position order.
    pub head: Vec<Candidate<'a>>,
    /// What follows them.
    pub rest: Rest,
}

/// Where a selected candidate stands in the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selected {
    /// Index of the stream.
    pub stream: usize,
    /// Index in the stream's head.
    pub candidate: usize,
}

/// A page, and the progress that it accounts for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The selected candidates, in the order in which they are delivered.
    pub selected: Vec<Selected>,
    /// For each stream the position of its new cursor: the boundary when nothing of it remains, else its last
    /// selected candidate; `None` when there is neither, and the scope gets no new cursor.
    pub cursors: Vec<Option<Position>>,
    /// A candidate of some stream remains.
    pub has_more: bool,
}

/// Input that cannot come from consistent state; the request fails as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// The boundary is the position of an effect.
    #[error("the boundary is neither a generation start nor a transaction end")]
    Boundary,
    /// A cursor lies past the boundary.
    #[error("a cursor lies past the boundary")]
    CursorAhead,
    /// A candidate is not an effect after the cursor and at or before the boundary.
    #[error("a candidate is not eligible")]
    Ineligible,
    /// The positions of a stream do not increase strictly. A tie would let a cursor pass an undelivered candidate.
    #[error("candidates of a scope are not in strict position order")]
    OutOfOrder,
    /// The page depends on candidates that were not read.
    #[error("too few candidates of a scope were read")]
    HeadTooShort,
}

/// The merge tuple; the stream's index makes the order total on wrong input, too.
type Rank<'a> = (Position, &'a [u8], &'a [u8], &'a [u8], Operation, usize);

/// The page of at most `limit` candidates, the least of all streams by (position, scope id, table id, key,
/// operation).
///
/// # Errors
/// [`MergeError`]: the streams are not what the module's header says.
pub fn merge(streams: &[Stream<'_>], boundary: Position, limit: usize) -> Result<Page, MergeError> {
    check(streams, boundary)?;
    let mut taken = vec![0_usize; streams.len()];
    let mut selected = Vec::with_capacity(limit.min(streams.iter().map(|stream| stream.head.len()).sum()));
    // Candidates that were not read are all after this position.
    let mut horizon: Option<Position> = None;
    let mut heads = BinaryHeap::with_capacity(streams.len());
    for index in 0..streams.len() {
        offer(streams, index, 0, boundary, &mut heads, &mut horizon);
    }
    while selected.len() < limit {
        let Some(Reverse(least)) = heads.pop() else {
            if horizon.is_some() {
                return Err(MergeError::HeadTooShort);
            }
            break;
        };
        let (position, .., index) = least;
        if horizon.is_some_and(|unread| position > unread) {
            return Err(MergeError::HeadTooShort);
        }
        selected.push(Selected { stream: index, candidate: taken[index] });
        taken[index] += 1;
        offer(streams, index, taken[index], boundary, &mut heads, &mut horizon);
    }
    let mut has_more = false;
    let cursors = streams.iter().zip(&taken).map(|(stream, &taken)| {
        let blocked = taken < stream.head.len() || stream.unread(boundary).is_some();
        has_more |= blocked;
        if blocked { taken.checked_sub(1).map(|last| stream.head[last].position) } else { Some(boundary) }
    });
    let cursors = cursors.collect();
    Ok(Page { selected, cursors, has_more })
}

/// Puts the candidate `next` of a stream up for selection, or lowers the horizon when it was not read.
fn offer<'a>(
    streams: &[Stream<'a>],
    index: usize,
    next: usize,
    boundary: Position,
    heads: &mut BinaryHeap<Reverse<Rank<'a>>>,
    horizon: &mut Option<Position>,
) {
    let stream = &streams[index];
    if let Some(c) = stream.head.get(next) {
        heads.push(Reverse((c.position, stream.scope_id, c.table_id, c.key, c.operation, index)));
    } else if let Some(unread) = stream.unread(boundary) {
        *horizon = Some(horizon.map_or(unread, |known| known.min(unread)));
    }
}

impl Stream<'_> {
    /// After which position candidates up to the boundary may stand that were not read: wherever reading ended, they
    /// are after the cursor and after the head.
    fn unread(&self, boundary: Position) -> Option<Position> {
        let Rest::After(read) = self.rest else { return None };
        let head = self.head.last().map_or(self.cursor, |last| last.position);
        let unread = read.max(head);
        (unread < boundary).then_some(unread)
    }
}

fn check(streams: &[Stream<'_>], boundary: Position) -> Result<(), MergeError> {
    if matches!(boundary.kind(), PositionKind::Effect { .. }) {
        return Err(MergeError::Boundary);
    }
    for stream in streams {
        if stream.cursor > boundary {
            return Err(MergeError::CursorAhead);
        }
        let mut before = stream.cursor;
        for candidate in &stream.head {
            let is_effect = matches!(candidate.position.kind(), PositionKind::Effect { .. });
            if !is_effect || candidate.position <= stream.cursor || candidate.position > boundary {
                return Err(MergeError::Ineligible);
            }
            if candidate.position <= before {
                return Err(MergeError::OutOfOrder);
            }
            before = candidate.position;
        }
    }
    Ok(())
}

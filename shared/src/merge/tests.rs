//! The merge against the ADR in its most naive form: a full history, "eligibility before the limit" taken literally.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::lsn::Lsn;

const SCOPES: [&str; 4] = ["a", "ab", "a\u{e9}", "b"];
const TABLES: [&str; 2] = ["t", "ta"];
const KEYS: [&[u8]; 4] = [b"\x01", b"\x01\x00", b"\x02", b"\xff"];

type Key = (usize, usize, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Effect {
    position: Position,
    scope: usize,
    table: usize,
    key: usize,
    operation: Operation,
}

impl Effect {
    fn rank(&self) -> (Position, &'static [u8], &'static [u8], &'static [u8], Operation) {
        (self.position, SCOPES[self.scope].as_bytes(), TABLES[self.table].as_bytes(), KEYS[self.key], self.operation)
    }
}

/// One source transaction: for each event the keys that it touches, with the scopes they are in afterwards.
type Transaction = Vec<Vec<(usize, usize, u8)>>;

/// The full history, and beside it what the store keeps of it.
#[derive(Debug, Default)]
struct World {
    lsn: u64,
    member: BTreeMap<(usize, usize), u8>,
    history: Vec<Effect>,
    latest: BTreeMap<Key, Effect>,
}

fn lsn(n: u64) -> Lsn {
    Lsn::new(n).expect("small")
}

impl World {
    fn commit(&mut self, transaction: &Transaction) {
        self.lsn += 1;
        let mut last = BTreeMap::new();
        for (event, touched) in transaction.iter().enumerate() {
            for &(table, key, scopes) in touched {
                last.insert((table, key), (event, scopes));
            }
        }
        let mut by_event_and_scope = BTreeMap::<(usize, usize), Vec<_>>::new();
        for ((table, key), (event, scopes)) in last {
            let before = self.member.insert((table, key), scopes).unwrap_or(0);
            for scope in (0..SCOPES.len()).filter(|scope| (before | scopes) >> scope & 1 == 1) {
                let operation = if scopes >> scope & 1 == 1 { Operation::Upsert } else { Operation::Delete };
                by_event_and_scope.entry((event, scope)).or_default().push((table, key, operation));
            }
        }
        for ((event, scope), effects) in by_event_and_scope {
            for (ordinal, (table, key, operation)) in effects.into_iter().enumerate() {
                let position = Position::effect(lsn(self.lsn), event as u64, ordinal as u32).expect("in range");
                let effect = Effect { position, scope, table, key, operation };
                self.history.push(effect);
                self.latest.insert((scope, table, key), effect);
            }
        }
    }

    fn boundary(&self) -> Position {
        Position::boundary(lsn(self.lsn))
    }

    /// Select, deduplicate by the scope-inclusive typed key, keep the greatest, in position order.
    fn candidates(&self, scope: usize, after: Position) -> Vec<Effect> {
        let mut kept: BTreeMap<Key, Effect> = BTreeMap::new();
        for effect in &self.history {
            if effect.scope == scope && effect.position > after && effect.position <= self.boundary() {
                let greatest = kept.entry((scope, effect.table, effect.key)).or_insert(*effect);
                *greatest = (*greatest).max(*effect);
            }
        }
        let mut candidates: Vec<Effect> = kept.into_values().collect();
        candidates.sort();
        candidates
    }

    /// Merge all candidates of all scopes, then cut.
    fn naive_pull(&self, cursors: &BTreeMap<usize, Position>, limit: usize) -> Answer {
        let mut merged: Vec<Effect> =
            cursors.iter().flat_map(|(&scope, &after)| self.candidates(scope, after)).collect();
        merged.sort_by_key(Effect::rank);
        let rest = merged.split_off(limit.min(merged.len()));
        let mut next = BTreeMap::new();
        for &scope in cursors.keys() {
            if rest.iter().all(|effect| effect.scope != scope) {
                next.insert(scope, self.boundary());
            } else if let Some(last) = merged.iter().rfind(|effect| effect.scope == scope) {
                next.insert(scope, last.position);
            }
        }
        Answer { changes: merged, cursors: next, has_more: !rest.is_empty() }
    }

    /// As the puller does it: the latest effects only, a bounded head of each scope, the merge under test.
    fn pull(&self, cursors: &BTreeMap<usize, Position>, limit: usize) -> Answer {
        let scopes: Vec<usize> = cursors.keys().copied().collect();
        let heads: Vec<Vec<Effect>> =
            scopes.iter().map(|&scope| self.head(scope, cursors[&scope], limit + 1)).collect();
        let streams: Vec<Stream<'_>> = scopes
            .iter()
            .zip(&heads)
            .map(|(&scope, head)| {
                let rest = match head.last() {
                    Some(last) if head.len() > limit => Rest::After(last.position),
                    _ => Rest::Nothing,
                };
                stream(scope, cursors[&scope], head, rest)
            })
            .collect();
        let page = merge(&streams, self.boundary(), limit).expect("consistent input");
        Answer {
            changes: page.selected.iter().map(|at| heads[at.stream][at.candidate]).collect(),
            cursors: scopes.iter().zip(page.cursors).filter_map(|(&scope, to)| Some((scope, to?))).collect(),
            has_more: page.has_more,
        }
    }

    fn head(&self, scope: usize, after: Position, bound: usize) -> Vec<Effect> {
        let mut entries: Vec<Effect> =
            self.latest.values().filter(|e| e.scope == scope && e.position > after).copied().collect();
        entries.sort();
        entries.truncate(bound);
        entries
    }

    /// Positions at which a cursor can stand.
    fn points(&self) -> Vec<Position> {
        let ends = (0..=self.lsn).map(|n| Position::boundary(lsn(n)));
        self.history.iter().map(|effect| effect.position).chain(ends).collect()
    }
}

fn stream<'a>(scope: usize, cursor: Position, head: &[Effect], rest: Rest) -> Stream<'a> {
    let head = head
        .iter()
        .map(|effect| Candidate {
            position: effect.position,
            table_id: TABLES[effect.table].as_bytes(),
            key: KEYS[effect.key],
            operation: effect.operation,
        })
        .collect();
    Stream { scope_id: SCOPES[scope].as_bytes(), cursor, head, rest }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    changes: Vec<Effect>,
    cursors: BTreeMap<usize, Position>,
    has_more: bool,
}

fn transactions(most: usize) -> impl Strategy<Value = Vec<Transaction>> {
    let touched = (0..TABLES.len(), 0..KEYS.len(), 0_u8..16);
    let event = prop::collection::vec(touched, 0..5);
    prop::collection::vec(prop::collection::vec(event, 0..5), 0..most)
}

fn world(transactions: &[Transaction]) -> World {
    let mut world = World::default();
    for transaction in transactions {
        world.commit(transaction);
    }
    world
}

/// A cursor for each scope, anywhere in the stream; some scopes take no part.
fn cursors(world: &World, picks: &[Option<prop::sample::Index>]) -> BTreeMap<usize, Position> {
    let points = world.points();
    let pick = |(scope, pick): (usize, &Option<prop::sample::Index>)| {
        Some((scope, points[pick.as_ref()?.index(points.len())]))
    };
    picks.iter().enumerate().filter_map(pick).collect()
}

fn picks() -> impl Strategy<Value = Vec<Option<prop::sample::Index>>> {
    prop::collection::vec(prop::option::weighted(0.9, any::<prop::sample::Index>()), SCOPES.len())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Keeping only the latest effects, reading bounded heads and merging them is the full
    /// eligibility-before-limit model: same changes, cursors and `has_more`.
    #[test]
    fn equals_eligibility_before_the_limit(history in transactions(8), picks in picks(), limit in 1_usize..12) {
        let world = world(&history);
        let cursors = cursors(&world, &picks);
        prop_assert_eq!(world.pull(&cursors, limit), world.naive_pull(&cursors, limit));
    }

    /// Split pulls equal one pull, and need no more pages than the limits allow: nothing starves.
    #[test]
    fn split_pulls_equal_one_pull(history in transactions(8), picks in picks(), limits in prop::collection::vec(1_usize..5, 1..6)) {
        let world = world(&history);
        let mut at = cursors(&world, &picks);
        let whole = world.pull(&at, 10_000);
        prop_assert!(!whole.has_more);
        let mut delivered = Vec::new();
        for &limit in limits.iter().cycle() {
            let remaining = whole.changes.len() - delivered.len();
            let page = world.pull(&at, limit);
            prop_assert_eq!(page.changes.len(), remaining.min(limit));
            prop_assert_eq!(page.has_more, remaining > limit);
            delivered.extend(page.changes);
            at.extend(page.cursors);
            if !page.has_more {
                break;
            }
        }
        prop_assert_eq!(delivered, whole.changes);
        prop_assert!(at.values().all(|position| *position == world.boundary()));
    }

    /// After any page, each eligible effect of a scope at or before its new cursor was delivered or is covered by a
    /// later candidate of its key that was delivered or stands after the cursor.
    #[test]
    fn no_cursor_reaches_an_undelivered_candidate(history in transactions(8), picks in picks(), limit in 1_usize..8) {
        let world = world(&history);
        let before = cursors(&world, &picks);
        let page = world.pull(&before, limit);
        let delivered: BTreeSet<Effect> = page.changes.iter().copied().collect();
        for (scope, to) in &page.cursors {
            prop_assert!(*to >= before[scope]);
            for effect in world.candidates(*scope, before[scope]) {
                prop_assert_eq!(effect.position <= *to, delivered.contains(&effect));
            }
        }
        prop_assert!(page.cursors.len() == before.len() || page.has_more);
    }

    /// A client that pulls pages while transactions commit between them ends with exactly the scopes' content.
    #[test]
    fn pages_between_commits_converge(history in transactions(10), limits in prop::collection::vec(1_usize..4, 1..10)) {
        let mut world = World::default();
        let mut at: BTreeMap<usize, Position> = (0..SCOPES.len()).map(|s| (s, Position::GENERATION_START)).collect();
        let mut client: BTreeSet<Key> = BTreeSet::new();
        let mut pull = |world: &World, limit: usize| {
            let page = world.pull(&at, limit);
            for change in &page.changes {
                let key = (change.scope, change.table, change.key);
                match change.operation {
                    Operation::Upsert => client.insert(key),
                    Operation::Delete => client.remove(&key),
                };
            }
            at.extend(page.cursors);
            (page.has_more, client.clone())
        };
        for (transaction, &limit) in history.iter().zip(limits.iter().cycle()) {
            world.commit(transaction);
            pull(&world, limit);
        }
        let content = loop {
            if let (false, content) = pull(&world, 2) { break content }
        };
        let upserts = world.latest.iter().filter(|(_, effect)| effect.operation == Operation::Upsert);
        prop_assert_eq!(content, upserts.map(|(key, _)| *key).collect::<BTreeSet<_>>());
    }

    /// Reading the least `limit + 1` of all streams together gives the same changes and `has_more`, and cursors that
    /// may lag behind but pass nothing.
    #[test]
    fn heads_read_together_give_the_right_page(history in transactions(8), picks in picks(), limit in 1_usize..12) {
        let world = world(&history);
        let cursors = cursors(&world, &picks);
        let mut read: Vec<Effect> =
            cursors.iter().flat_map(|(&scope, &after)| world.head(scope, after, usize::MAX)).collect();
        read.sort_by_key(|effect| (effect.position, SCOPES[effect.scope].as_bytes()));
        read.truncate(limit + 1);
        let rest = match read.last() {
            Some(last) if read.len() > limit => Rest::After(last.position),
            _ => Rest::Nothing,
        };
        let head = |scope: usize| read.iter().filter(|effect| effect.scope == scope).copied().collect::<Vec<_>>();
        let heads: Vec<(usize, Vec<Effect>)> = cursors.keys().map(|&scope| (scope, head(scope))).collect();
        let streams: Vec<Stream<'_>> =
            heads.iter().map(|(scope, head)| stream(*scope, cursors[scope], head, rest)).collect();
        let page = merge(&streams, world.boundary(), limit).expect("enough was read");
        let naive = world.naive_pull(&cursors, limit);
        let changes: Vec<Effect> = page.selected.iter().map(|at| heads[at.stream].1[at.candidate]).collect();
        prop_assert_eq!(&changes, &naive.changes);
        prop_assert_eq!(page.has_more, naive.has_more);
        for ((scope, _), to) in heads.iter().zip(page.cursors) {
            let greatest = naive.cursors.get(scope).copied();
            let delivered = changes.iter().rfind(|effect| effect.scope == *scope).map(|effect| effect.position);
            prop_assert!(to == greatest || (page.has_more && to == delivered));
        }
    }

    /// Heads of any length give the right page or an error, never a wrong page.
    #[test]
    fn short_heads_never_give_a_wrong_page(history in transactions(8), picks in picks(), limit in 1_usize..8, bounds in prop::collection::vec(0_usize..6, SCOPES.len())) {
        let world = world(&history);
        let cursors = cursors(&world, &picks);
        let heads: Vec<(usize, Vec<Effect>)> =
            cursors.iter().map(|(&scope, &after)| (scope, world.head(scope, after, bounds[scope]))).collect();
        let streams: Vec<Stream<'_>> = heads.iter().map(|(scope, head)| {
            let after = cursors[scope];
            let all = world.head(*scope, after, usize::MAX).len();
            let last = head.last().map_or(after, |effect| effect.position);
            let rest = if head.len() < all { Rest::After(last) } else { Rest::Nothing };
            stream(*scope, after, head, rest)
        }).collect();
        match merge(&streams, world.boundary(), limit) {
            Ok(page) => {
                let naive = world.naive_pull(&cursors, limit);
                let changes: Vec<Effect> = page.selected.iter().map(|at| heads[at.stream].1[at.candidate]).collect();
                prop_assert_eq!(changes, naive.changes);
                prop_assert_eq!(page.has_more, naive.has_more);
                let next: BTreeMap<usize, Position> =
                    heads.iter().zip(page.cursors).filter_map(|((scope, _), to)| Some((*scope, to?))).collect();
                prop_assert_eq!(next, naive.cursors);
            }
            Err(error) => prop_assert_eq!(error, MergeError::HeadTooShort),
        }
    }
}

fn effect(event: u64, ordinal: u32, scope: usize, key: usize) -> Effect {
    let position = Position::effect(lsn(1), event, ordinal).expect("in range");
    Effect { position, scope, table: 0, key, operation: Operation::Upsert }
}

#[test]
fn a_cut_between_the_effects_of_one_event_resumes_right() {
    let mut world = World::default();
    world.commit(&vec![vec![(0, 0, 0b11), (0, 1, 0b11), (1, 0, 0b11)]]);
    let start = BTreeMap::from([(0, Position::GENERATION_START), (1, Position::GENERATION_START)]);
    let page = world.pull(&start, 3);
    let keys: Vec<_> = page.changes.iter().map(|e| (e.position.kind(), e.scope)).collect();
    assert_eq!(keys.len(), 3);
    // Scope "a" has its effects 0 and 1, scope "ab" its effect 0 of the same event.
    assert_eq!(page.cursors, BTreeMap::from([(0, effect(0, 1, 0, 0).position), (1, effect(0, 0, 1, 0).position)]));
    let mut at = start;
    at.extend(page.cursors);
    let rest = world.pull(&at, 3);
    assert_eq!(rest.changes.len(), 3);
    assert!(!rest.has_more);
}

/// The tuple's components decide in their order, all as unsigned octets; delete ranks before upsert.
#[test]
fn ties_are_ordered_by_scope_table_key_operation() {
    let position = effect(0, 0, 0, 0).position;
    let one = |scope: &'static [u8], table_id: &'static [u8], key: &'static [u8], operation| Stream {
        scope_id: scope,
        cursor: Position::GENERATION_START,
        head: vec![Candidate { position, table_id, key, operation }],
        rest: Rest::Nothing,
    };
    let ordered = [
        one(b"a", b"t", b"\x01", Operation::Upsert),
        one(b"ab", b"t", b"\x00", Operation::Upsert),
        one(b"b", b"a", b"\xff", Operation::Upsert),
        one(b"b", b"t", b"\x7f", Operation::Upsert),
        one(b"b", b"t", b"\x80", Operation::Delete),
        one(b"b", b"t", b"\x80", Operation::Upsert),
    ];
    let reversed: Vec<_> = ordered.iter().rev().cloned().collect();
    let page = merge(&reversed, Position::boundary(lsn(1)), 10).expect("consistent input");
    let order: Vec<usize> = page.selected.iter().map(|at| at.stream).collect();
    assert_eq!(order, [5, 4, 3, 2, 1, 0]);
}

/// Divergent cursors: the page is filled by a scope that lags far behind another, which nothing was read of.
#[test]
fn a_cursor_past_what_was_read_together_is_no_error() {
    let boundary = Position::boundary(lsn(2));
    let [first, second] = [effect(0, 0, 0, 0), effect(1, 0, 0, 1)];
    let rest = Rest::After(second.position);
    let lagging = stream(0, Position::GENERATION_START, &[first, second], rest);
    let ahead = stream(1, Position::boundary(lsn(1)), &[], rest);
    let done = stream(2, boundary, &[], rest);
    let page = merge(&[lagging, ahead, done], boundary, 1).expect("consistent input");
    assert_eq!(page.selected, [Selected { stream: 0, candidate: 0 }]);
    assert_eq!(page.cursors, [Some(first.position), None, Some(boundary)]);
    assert!(page.has_more);
}

#[test]
fn refuses_inconsistent_state() {
    let boundary = Position::boundary(lsn(1));
    let start = Position::GENERATION_START;
    let [first, second] = [effect(0, 0, 0, 0), effect(1, 0, 0, 1)];
    let run = |cursor, head: &[Effect], rest, boundary| merge(&[stream(0, cursor, head, rest)], boundary, 1);
    let past = Effect { position: Position::effect(lsn(2), 0, 0).expect("in range"), ..first };
    let end = Effect { position: boundary, ..first };
    assert_eq!(run(start, &[first], Rest::Nothing, first.position), Err(MergeError::Boundary));
    assert_eq!(run(past.position, &[], Rest::Nothing, boundary), Err(MergeError::CursorAhead));
    assert_eq!(run(first.position, &[first], Rest::Nothing, boundary), Err(MergeError::Ineligible));
    assert_eq!(run(start, &[past], Rest::Nothing, boundary), Err(MergeError::Ineligible));
    assert_eq!(run(start, &[end], Rest::Nothing, boundary), Err(MergeError::Ineligible));
    assert_eq!(run(start, &[second, first], Rest::Nothing, boundary), Err(MergeError::OutOfOrder));
    assert_eq!(run(start, &[first, first], Rest::Nothing, boundary), Err(MergeError::OutOfOrder));
    assert_eq!(run(start, &[], Rest::After(start), boundary), Err(MergeError::HeadTooShort));
}

//! The assembler against a naive model: whatever the cuts between batches, applying the batches gives what applying
//! each event alone gives, at the positions of the last events.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tributary_shared::canonical::EncodedField;
use tributary_shared::portable::{FieldType, PortableType};

use super::*;

const LIMITS: Limits = Limits { rows: 1000, octets: 1 << 20, transactions: u64::MAX };

fn lsn(n: u64) -> Lsn {
    Lsn::new(n).expect("small")
}

fn at(commit: u64, event: u64, effect: u32) -> Position {
    Position::effect(lsn(commit), event, effect).expect("in range")
}

/// A table of `id int` and two texts, the second of which may be TOASTed.
fn assembler(limits: Limits) -> Assembler {
    let field = |id: &str, kind, column| EncodedField {
        field_id: id.into(),
        field_type: FieldType::new(kind, column > 0),
        column,
    };
    let fields = vec![
        field("id", PortableType::Int, 0),
        field("v", PortableType::String, 1),
        field("big", PortableType::String, 2),
    ];
    let encoder = RowEncoder::new("t", "id", fields).expect("a table");
    Assembler::new(vec![encoder], vec![vec![0]], limits, Lsn::ZERO)
}

fn text(text: &str) -> Datum {
    Datum::Text(Bytes::copy_from_slice(text.as_bytes()))
}

fn row(id: i32, v: &str, big: Option<&str>) -> Row {
    vec![text(&id.to_string()), text(v), big.map_or(Datum::Unchanged, text)]
}

fn key(id: i32) -> Vec<u8> {
    [[2, 1].as_slice(), &id.to_be_bytes()].concat()
}

fn insert(id: i32, v: &str) -> Change {
    Change::Insert { table: 0, row: row(id, v, Some("big")) }
}

fn update(id: i32, v: &str, big: Option<&str>) -> Change {
    Change::Update { table: 0, old_key: None, row: row(id, v, big) }
}

fn rename(from: i32, to: i32, v: &str, big: Option<&str>) -> Change {
    Change::Update { table: 0, old_key: Some(vec![Bytes::from(from.to_string())]), row: row(to, v, big) }
}

fn delete(id: i32) -> Change {
    Change::Delete { table: 0, key: vec![Bytes::from(id.to_string())] }
}

fn transaction(assembler: &mut Assembler, commit: u64, changes: Vec<Change>) {
    assembler.begin(lsn(commit), SystemTime::UNIX_EPOCH).expect("begin");
    for change in changes {
        assembler.change(change).expect("change");
    }
    assembler.commit(lsn(commit), lsn(commit + 1)).expect("commit");
}

#[test]
fn only_the_end_state_of_a_transaction_counts_at_its_last_event() {
    let mut assembler = assembler(LIMITS);
    transaction(&mut assembler, 10, vec![insert(1, "a"), insert(2, "b"), update(1, "c", None), delete(2)]);
    let batch = assembler.take();
    let rows = &batch.tables[0].rows;
    assert_eq!(rows.len(), 2);
    assert!(rows[0].fresh && rows[1].fresh);
    assert_eq!(rows[0].states, vec![RowState::new(at(10, 2, 0), Some(row(1, "c", Some("big"))))]);
    assert_eq!(rows[1].states, vec![RowState::new(at(10, 3, 0), None)]);
    assert_eq!(batch.end.map(|end| end.end_lsn), Some(lsn(11)));
}

#[test]
fn each_transaction_of_a_batch_keeps_its_end_state() {
    let mut assembler = assembler(LIMITS);
    transaction(&mut assembler, 10, vec![insert(1, "a")]);
    transaction(&mut assembler, 20, vec![update(1, "b", None)]);
    transaction(&mut assembler, 30, vec![delete(1)]);
    let batch = assembler.take();
    let states: Vec<_> = batch.tables[0].rows[0].states.iter().map(|s| (s.position, s.row.is_some())).collect();
    assert_eq!(states, vec![(at(10, 0, 0), true), (at(20, 0, 0), true), (at(30, 0, 0), false)]);
    assert_eq!((batch.transactions, batch.first_commit), (3, Some(lsn(10))));
}

#[test]
fn a_changed_key_is_a_delete_and_an_insert_of_one_event_in_key_order() {
    let mut assembler = assembler(LIMITS);
    transaction(&mut assembler, 10, vec![rename(5, 3, "a", None), rename(6, 7, "b", None)]);
    let batch = assembler.take();
    let seen: Vec<_> = batch.tables[0]
        .rows
        .iter()
        .map(|r| (r.key.clone(), r.states[0].position, r.states[0].row.is_some(), r.states[0].unchanged_from.clone()))
        .collect();
    assert_eq!(
        seen,
        vec![
            (key(5), at(10, 0, 1), false, None),
            (key(3), at(10, 0, 0), true, Some(key(5))),
            (key(6), at(10, 1, 0), false, None),
            (key(7), at(10, 1, 1), true, Some(key(6))),
        ]
    );
}

#[test]
fn a_key_that_is_toasted_itself_comes_from_the_old_tuple() {
    let mut assembler = assembler(LIMITS);
    let row = vec![Datum::Unchanged, text("a"), Datum::Unchanged];
    let change = Change::Update { table: 0, old_key: Some(vec![Bytes::from_static(b"5")]), row };
    transaction(&mut assembler, 10, vec![change]);
    let batch = assembler.take();
    assert_eq!(batch.tables[0].rows.len(), 1);
    assert_eq!(batch.tables[0].rows[0].key, key(5));
}

#[test]
fn truncate_cuts_a_batch_and_comes_before_what_follows_it() {
    let mut assembler = assembler(LIMITS);
    assembler.begin(lsn(10), SystemTime::UNIX_EPOCH).expect("begin");
    assembler.change(insert(1, "a")).expect("change");
    assembler.change(Change::Truncate { tables: vec![0] }).expect("truncate");
    assert!(assembler.is_full(), "nothing may be added before the part is taken");
    let part = assembler.take();
    assert_eq!((part.tables[0].rows.len(), part.truncates.len(), part.end), (1, 0, None));
    assembler.change(insert(1, "b")).expect("change");
    assembler.commit(lsn(10), lsn(11)).expect("commit");
    let rest = assembler.take();
    assert_eq!(rest.truncates, vec![(0, at(10, 1, 0))]);
    assert_eq!(rest.tables[0].rows[0].states[0].position, at(10, 2, 0));
    assert!(rest.end.is_some());
}

#[test]
fn a_part_of_a_transaction_is_never_committed() {
    let mut assembler = assembler(Limits { rows: 2, ..LIMITS });
    transaction(&mut assembler, 10, vec![insert(1, "a")]);
    assembler.begin(lsn(20), SystemTime::UNIX_EPOCH).expect("begin");
    assembler.change(insert(2, "b")).expect("change");
    assert!(assembler.is_full());
    assert_eq!(assembler.take().end, None, "the open transaction has a part in it");
    assembler.commit(lsn(20), lsn(21)).expect("commit");
    let batch = assembler.take();
    assert_eq!(batch.end.map(|end| end.commit_lsn), Some(lsn(20)));
}

#[test]
fn what_is_materialized_already_is_skipped() {
    let mut assembler = assembler(LIMITS);
    assembler.boundary = lsn(10);
    transaction(&mut assembler, 5, vec![insert(1, "a")]);
    transaction(&mut assembler, 10, vec![insert(2, "a")]);
    assert!(!assembler.is_ready() && assembler.is_empty());
    transaction(&mut assembler, 11, vec![insert(3, "a")]);
    assert_eq!(assembler.take().tables[0].rows.len(), 1);
}

#[test]
fn messages_out_of_order_are_refused() {
    let mut assembler = assembler(LIMITS);
    assert!(assembler.change(insert(1, "a")).is_err());
    assert!(assembler.commit(lsn(1), lsn(2)).is_err());
    assembler.begin(lsn(9), SystemTime::UNIX_EPOCH).expect("begin");
    assert!(assembler.begin(lsn(10), SystemTime::UNIX_EPOCH).is_err());
    assert!(assembler.commit(lsn(8), lsn(9)).is_err());
}

#[test]
fn epochs_keep_the_newest_of_each_client() {
    let mut assembler = assembler(LIMITS);
    assembler.begin(lsn(10), SystemTime::UNIX_EPOCH).expect("begin");
    for epoch in [1, 3, 2] {
        let epoch = AcceptedEpoch { user_id: "u".into(), client_id: "c".into(), epoch };
        assembler.accepted(epoch).expect("inside a transaction");
    }
    assembler.commit(lsn(10), lsn(11)).expect("commit");
    assert!(assembler.is_ready() && assembler.has_content(), "a transaction of messages alone is written");
    assert_eq!(assembler.take().epochs.get(&("u".to_owned(), "c".to_owned())), Some(&3));
}

/// What a client of the model does in a transaction; keys are small, so that they meet.
#[derive(Debug, Clone)]
enum Op {
    Put { id: i32, big: bool },
    Rename { from: i32, to: i32, big: bool },
    Delete { id: i32 },
    Truncate,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..6, any::<bool>()).prop_map(|(id, big)| Op::Put { id, big }),
        2 => (0..6, 0..6, any::<bool>()).prop_map(|(from, to, big)| Op::Rename { from, to, big }),
        3 => (0..6).prop_map(|id| Op::Delete { id }),
        1 => Just(Op::Truncate),
    ]
}

/// Rows as PostgreSQL would hold them: id to (v, big).
type Rows = BTreeMap<i32, (String, String)>;

/// The changes that PostgreSQL would stream for the operations, and the rows after them. Impossible operations (an
/// update of a row that is not there) do nothing.
fn play(rows: &mut Rows, ops: &[Op], number: usize) -> Vec<Change> {
    let mut changes = Vec::new();
    for (index, op) in ops.iter().enumerate() {
        let v = format!("v{number}.{index}");
        match *op {
            Op::Put { id, big } => {
                let new_big = format!("b{number}.{index}");
                if let Some(held) = rows.get_mut(&id) {
                    held.0.clone_from(&v);
                    if big {
                        held.1.clone_from(&new_big);
                    }
                    changes.push(update(id, &v, big.then_some(&new_big)));
                } else {
                    rows.insert(id, (v.clone(), new_big.clone()));
                    changes.push(Change::Insert { table: 0, row: row(id, &v, Some(&new_big)) });
                }
            }
            Op::Rename { from, to, big } => {
                if from != to && rows.contains_key(&from) && !rows.contains_key(&to) {
                    let (_, mut old_big) = rows.remove(&from).expect("it is there");
                    if big {
                        old_big = format!("b{number}.{index}");
                    }
                    changes.push(rename(from, to, &v, big.then_some(&old_big)));
                    rows.insert(to, (v, old_big));
                }
            }
            Op::Delete { id } => {
                if rows.remove(&id).is_some() {
                    changes.push(delete(id));
                }
            }
            Op::Truncate => {
                rows.clear();
                changes.push(Change::Truncate { tables: vec![0] });
            }
        }
    }
    changes
}

/// Applies a batch as the writer does: truncates first, then each row's states, unchanged values from the projection
/// before the batch.
fn apply(projection: &mut BTreeMap<Vec<u8>, Row>, batch: &Batch) {
    if !batch.truncates.is_empty() {
        projection.clear();
    }
    let before = projection.clone();
    for pending in &batch.tables[0].rows {
        assert_eq!(pending.fresh, !before.contains_key(&pending.key), "fresh rows are those that are not projected");
        let state = pending.states.last().expect("a state");
        match &state.row {
            None => {
                projection.remove(&pending.key);
            }
            Some(row) => {
                let mut row = row.clone();
                if row.contains(&Datum::Unchanged) {
                    let from = state.unchanged_from.as_ref().unwrap_or(&pending.key);
                    fill_unchanged(&mut row, before.get(from).expect("an unchanged value is projected"));
                }
                projection.insert(pending.key.clone(), row);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn batches_give_what_the_events_give(
        transactions in prop::collection::vec(prop::collection::vec(op(), 0..8), 1..12),
        limit in 1usize..12,
        takes in prop::collection::vec(any::<bool>(), 64),
    ) {
        let mut assembler = assembler(Limits { rows: limit, ..LIMITS });
        let mut takes = takes.into_iter().cycle();
        let mut rows = Rows::new();
        let mut projection = BTreeMap::new();
        for (number, ops) in transactions.iter().enumerate() {
            let commit = 10 * (number as u64 + 1);
            assembler.begin(lsn(commit), SystemTime::UNIX_EPOCH).expect("begin");
            for change in play(&mut rows, ops, number) {
                while assembler.is_full() {
                    apply(&mut projection, &assembler.take());
                }
                assembler.change(change).expect("change");
            }
            assembler.commit(lsn(commit), lsn(commit + 1)).expect("commit");
            let last = number + 1 == transactions.len();
            if last || takes.next() == Some(true) {
                let mut end = None;
                while assembler.is_ready() {
                    let batch = assembler.take();
                    apply(&mut projection, &batch);
                    end = batch.end;
                }
                prop_assert_eq!(end.map(|e| e.commit_lsn), Some(lsn(commit)));
                let expected: BTreeMap<Vec<u8>, Row> =
                    rows.iter().map(|(id, (v, big))| (key(*id), row(*id, v, Some(big)))).collect();
                prop_assert_eq!(&projection, &expected);
            }
        }
    }
}

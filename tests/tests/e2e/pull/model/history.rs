//! The naive model: what was committed, every effect that it had, and the page that follows from them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use tributary_tests::json::Json;

use crate::pull::raw;

pub const SCHEMA: &str = "
create table notes (id bigint primary key, owner text, team text, body text not null, archived boolean not null);
create table pages (id text primary key, owner text, body text not null);
create table noise (n bigint);
";

pub const CONFIG: &str = r#"
tables:
  - relation: public.notes
  - relation: public.pages
scopes:
  - scope: "owner:{owner}"
    rows: SELECT * FROM notes
  - scope: "owner:{owner}"
    rows: SELECT * FROM pages
  - scope: "team:{team}"
    rows: SELECT * FROM notes WHERE NOT archived
  - scope: archive
    rows: SELECT * FROM notes WHERE archived
  - scope: library
    rows: SELECT * FROM pages
assignments:
  - scope: "owner:{user_id}"
  - scope: "team:{user_id}"
  - scope: archive
  - scope: library
"#;

const NOTE_IDS: [i64; 24] = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    12,
    255,
    256,
    257,
    65_535,
    65_536,
    4_294_967_295,
    4_294_967_296,
    4_294_967_297,
    9_007_199_254_740_993,
    9_223_372_036_854_775_805,
    9_223_372_036_854_775_806,
    9_223_372_036_854_775_807,
];
const PAGE_IDS: [&str; 12] = ["", "a", "b", "B", "bb", "aaa", "ü", "z z", "%", ":", "\u{10ffff}", "long long long key"];
const NAMES: [Option<&str>; 4] = [Some("a"), Some("b"), Some("c"), None];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    Notes,
    Pages,
}

/// Table and key, as PostgreSQL's text.
pub type Key = (Table, String);

#[derive(Debug, Clone)]
struct Row {
    owner: Option<&'static str>,
    team: Option<&'static str>,
    body: String,
    archived: bool,
}

type Rows = BTreeMap<Key, Row>;

/// A point of the stream: transaction (from 1), event, effect. A transaction's end follows all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(usize, u64, u64);

impl Place {
    pub fn end_of(transaction: usize) -> Self {
        Self(transaction, u64::MAX, u64::MAX)
    }
}

#[derive(Debug, Clone)]
struct Effect {
    at: Place,
    scope: String,
    key: Key,
    /// The row at the transaction's end; none is a delete.
    row: Option<Json>,
}

/// What of an answer the model decides.
#[derive(Debug, PartialEq, Eq)]
pub struct Page {
    /// Scope, table, operation, key, row.
    changes: Vec<[String; 5]>,
    /// Scopes that get a new cursor.
    advanced: BTreeSet<String>,
    has_more: bool,
}

impl Page {
    pub fn of_answer(body: &Json) -> Self {
        let rows = body.get("changes").and_then(Json::as_list).unwrap().iter();
        let rows = rows.map(|change| change.get("row").map(raw).unwrap_or_default());
        let changes = super::super::changes_of(body).into_iter().zip(rows);
        Self {
            changes: changes.map(|([scope, table, op, pk], row)| [scope, table, op, pk, row]).collect(),
            advanced: super::super::cursors_of(body).into_keys().collect(),
            has_more: super::super::has_more(body),
        }
    }
}

/// Everything that was ever committed.
#[derive(Debug, Default)]
pub struct History {
    rows: Rows,
    effects: Vec<Effect>,
    transactions: usize,
}

impl History {
    pub fn transactions(&self) -> usize {
        self.transactions
    }

    /// A random transaction that touches none of these keys: its SQL, and the keys that it touches.
    pub fn commit(&mut self, random: &mut StdRng, forbidden: &BTreeSet<Key>) -> (String, BTreeSet<Key>) {
        let before = self.rows.clone();
        let mut draft = Draft {
            sql: "begin;\n".to_owned(),
            rows: self.rows.clone(),
            touched: BTreeMap::new(),
            events: 0,
            forbidden,
        };
        for _ in 0..random.random_range(0..7) {
            draft.operation(random);
        }
        draft.sql.push_str("commit");
        let Draft { sql, rows, touched, .. } = draft;
        self.rows = rows;
        self.transactions += 1;
        for (key, (event, effect)) in &touched {
            let at = Place(self.transactions, *event, *effect);
            let was = before.get(key).map(|row| scopes(key.0, row)).unwrap_or_default();
            let is = self.rows.get(key).map(|row| scopes(key.0, row)).unwrap_or_default();
            let row = self.rows.get(key).map(|row| json(key, row));
            for scope in was.union(&is) {
                let row = if is.contains(scope) { row.clone() } else { None };
                self.effects.push(Effect { at, scope: scope.clone(), key: key.clone(), row });
            }
        }
        (sql, touched.into_keys().collect())
    }

    /// The page after these cursors at the end of this many transactions, and where its new cursors stand.
    pub fn page(
        &self,
        cursors: &BTreeMap<String, Place>,
        boundary: usize,
        limit: usize,
    ) -> (Page, BTreeMap<String, Place>) {
        let end = Place::end_of(boundary);
        let mut candidates: Vec<&Effect> = Vec::new();
        for (scope, cursor) in cursors {
            let mut retained: BTreeMap<&Key, &Effect> = BTreeMap::new();
            let eligible =
                self.effects.iter().filter(|effect| effect.scope == *scope && effect.at > *cursor && effect.at <= end);
            for effect in eligible {
                let greatest = retained.entry(&effect.key).or_insert(effect);
                if effect.at > greatest.at {
                    *greatest = effect;
                }
            }
            candidates.extend(retained.into_values());
        }
        candidates.sort_by_key(|effect| (effect.at, effect.scope.as_bytes()));
        let rest = candidates.split_off(limit.min(candidates.len()));
        let mut places = BTreeMap::new();
        for scope in cursors.keys() {
            if rest.iter().all(|effect| effect.scope != *scope) {
                places.insert(scope.clone(), end);
            } else if let Some(last) = candidates.iter().rev().find(|effect| effect.scope == *scope) {
                places.insert(scope.clone(), last.at);
            }
        }
        let changes = candidates.iter().map(|effect| {
            let (table, key) = &effect.key;
            let op = if effect.row.is_some() { "upsert" } else { "delete" };
            [
                effect.scope.clone(),
                table.name().to_owned(),
                op.to_owned(),
                raw(&Json::object([("id", Json::text(key))])),
                effect.row.as_ref().map(raw).unwrap_or_default(),
            ]
        });
        let page =
            Page { changes: changes.collect(), advanced: places.keys().cloned().collect(), has_more: !rest.is_empty() };
        (page, places)
    }

    /// The rows of a scope now, as JSON text.
    pub fn contents(&self, scope: &str) -> BTreeSet<String> {
        let rows = self.rows.iter().filter(|(key, row)| scopes(key.0, row).contains(scope));
        rows.map(|(key, row)| raw(&json(key, row))).collect()
    }
}

impl Table {
    fn name(self) -> &'static str {
        match self {
            Self::Notes => "notes",
            Self::Pages => "pages",
        }
    }

    fn keys(self) -> Vec<Key> {
        match self {
            Self::Notes => NOTE_IDS.iter().map(|id| (self, id.to_string())).collect(),
            Self::Pages => PAGE_IDS.iter().map(|id| (self, (*id).to_owned())).collect(),
        }
    }
}

/// The scopes of a row, written down a second time.
fn scopes(table: Table, row: &Row) -> BTreeSet<String> {
    let mut scopes = BTreeSet::new();
    scopes.extend(row.owner.map(|owner| format!("owner:{owner}")));
    match table {
        Table::Notes if row.archived => {
            scopes.insert("archive".to_owned());
        }
        Table::Notes => scopes.extend(row.team.map(|team| format!("team:{team}"))),
        Table::Pages => {
            scopes.insert("library".to_owned());
        }
    }
    scopes
}

fn json((table, key): &Key, row: &Row) -> Json {
    let optional = |text: Option<&str>| text.map_or(Json::Null, Json::text);
    let (id, owner, body) = (Json::text(key), optional(row.owner), Json::text(&row.body));
    match table {
        Table::Notes => Json::object([
            ("id", id),
            ("owner", owner),
            ("team", optional(row.team)),
            ("body", body),
            ("archived", Json::Bool(row.archived)),
        ]),
        Table::Pages => Json::object([("id", id), ("owner", owner), ("body", body)]),
    }
}

/// Orders keys as their `typed_value` octets do: numbers by size (all are positive), texts by length first.
fn key_order((table, key): &Key) -> (i64, &[u8]) {
    match table {
        Table::Notes => (key.parse().unwrap(), b""),
        Table::Pages => (key.len() as i64, key.as_bytes()),
    }
}

/// A transaction in the making.
struct Draft<'a> {
    sql: String,
    rows: Rows,
    /// Touched keys, with event and effect ordinal of the last touch.
    touched: BTreeMap<Key, (u64, u64)>,
    events: u64,
    forbidden: &'a BTreeSet<Key>,
}

impl Draft<'_> {
    fn operation(&mut self, random: &mut StdRng) {
        let table = if random.random_bool(0.6) { Table::Notes } else { Table::Pages };
        let allowed: Vec<Key> = table.keys().into_iter().filter(|key| !self.forbidden.contains(key)).collect();
        let (live, free): (Vec<Key>, Vec<Key>) = allowed.into_iter().partition(|key| self.rows.contains_key(key));
        let name = table.name();
        match random.random_range(0..12) {
            0 => {
                let _ = writeln!(self.sql, "insert into noise values (1);");
            }
            1 if !live.is_empty() => {
                // Rolled back to a savepoint: neither an event nor an effect.
                let key = literal(&live.choose(random).unwrap().1);
                let _ = writeln!(self.sql, "savepoint s; delete from {name} where id = {key}; rollback to s;");
            }
            2..=4 => {
                let Some(key) = free.choose(random) else { return };
                let row = Row {
                    owner: NAMES.choose(random).copied().flatten(),
                    team: NAMES.choose(random).copied().flatten(),
                    body: format!("body {}", random.random_range(0..1000)),
                    archived: random.random_bool(0.3),
                };
                let id = literal(&key.1);
                let (owner, team, body) = (nullable(row.owner), nullable(row.team), literal(&row.body));
                let values = match table {
                    Table::Notes => format!("{id}, {owner}, {team}, {body}, {}", row.archived),
                    Table::Pages => format!("{id}, {owner}, {body}"),
                };
                let _ = writeln!(self.sql, "insert into {name} values ({values});");
                self.rows.insert(key.clone(), row);
                self.touch(&[key]);
            }
            5 => {
                let Some(key) = live.choose(random) else { return };
                let _ = writeln!(self.sql, "delete from {name} where id = {};", literal(&key.1));
                self.rows.remove(key);
                self.touch(&[key]);
            }
            6 => {
                let (Some(old), Some(new)) = (live.choose(random), free.choose(random)) else { return };
                let _ =
                    writeln!(self.sql, "update {name} set id = {} where id = {};", literal(&new.1), literal(&old.1));
                let row = self.rows.remove(old).unwrap();
                self.rows.insert(new.clone(), row);
                self.touch(&[old, new]);
            }
            kind => {
                let Some(key) = live.choose(random) else { return };
                let row = self.rows.get_mut(key).unwrap();
                let set = match (kind, table) {
                    (7, _) => {
                        row.owner = NAMES.choose(random).copied().flatten();
                        format!("owner = {}", nullable(row.owner))
                    }
                    (8, Table::Notes) => {
                        row.team = NAMES.choose(random).copied().flatten();
                        format!("team = {}", nullable(row.team))
                    }
                    (9, Table::Notes) => {
                        row.archived = !row.archived;
                        "archived = not archived".to_owned()
                    }
                    (10, _) => "body = body".to_owned(),
                    _ => {
                        row.body = format!("body {}", random.random_range(0..1000));
                        format!("body = {}", literal(&row.body))
                    }
                };
                let _ = writeln!(self.sql, "update {name} set {set} where id = {};", literal(&key.1));
                self.touch(&[key]);
            }
        }
    }

    /// One event; its effects are ordered by key.
    fn touch(&mut self, keys: &[&Key]) {
        let mut keys = keys.to_vec();
        keys.sort_by_key(|key| key_order(key));
        for (effect, key) in keys.into_iter().enumerate() {
            self.touched.insert(key.clone(), (self.events, effect as u64));
        }
        self.events += 1;
    }
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn nullable(text: Option<&str>) -> String {
    text.map_or("null".to_owned(), literal)
}

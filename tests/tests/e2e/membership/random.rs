//! Random schemas, rules and transactions. PostgreSQL is the oracle: after each batch the entries are what the rules
//! say about the source's own tables, and what a client would hold that was given only later effects is the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tributary_tests::database::Database;
use tributary_tests::sandbox::{Options, Sandbox};

use super::files::Files;

/// A seed to replay; without it a random one, which is printed.
const SEED: &str = "TRIBUTARY_TEST_SEED";
/// Schemas side by side in one sandbox.
const SCHEMAS: usize = 3;
const BATCHES: usize = 45;
const TRANSACTIONS: usize = 25;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Number,
    Text,
    Flag,
}

/// Columns that every table has beside its key; few different values, so that they meet.
const COLUMNS: [(&str, Kind); 5] =
    [("g", Kind::Number), ("h", Kind::Number), ("s", Kind::Text), ("u", Kind::Text), ("f", Kind::Flag)];
const TEXTS: [&str; 8] = ["a", "A", "é", "a:b", "50%", "", "x\u{1}y", "\u{85}z"];

struct Table {
    name: String,
    delivered: bool,
    /// Has a key of two columns, `id` and `k`.
    composite: bool,
}

struct Rule {
    target: usize,
    template: Vec<(String, String)>,
    suffix: String,
    from: String,
}

struct Case {
    schema: String,
    tables: Vec<Table>,
    rules: Vec<Rule>,
}

fn pick<'a, T>(rng: &mut StdRng, from: &'a [T]) -> &'a T {
    from.choose(rng).expect("not empty")
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

impl Case {
    fn random(rng: &mut StdRng, schema: String) -> Self {
        let count = rng.random_range(2..=4);
        let tables: Vec<Table> = (0..count)
            .map(|index| {
                let delivered = index == 0 || rng.random_bool(0.5);
                Table {
                    name: ["a", "b", "c", "D d"][index].to_owned(),
                    delivered,
                    composite: !delivered && rng.random_bool(0.5),
                }
            })
            .collect();
        let mut rules: Vec<Rule> = Vec::new();
        for number in 0..rng.random_range(2..=4) {
            let rule = Rule::random(rng, &schema, &tables, number);
            rules.push(rule);
        }
        Self { schema, tables, rules }
    }

    fn ddl(&self) -> String {
        let mut sql = format!("create schema {};\ncreate sequence {0}.ids start 1000;\n", self.schema);
        for table in &self.tables {
            let key = if table.composite { "primary key (k, id)" } else { "primary key (id)" };
            let _ = writeln!(
                sql,
                "create table {}.\"{}\" (id int not null, k text not null default 'k', note text, g int, h int, s text, u varchar(9) collate \"C\", f boolean, {key});",
                self.schema, table.name
            );
        }
        sql
    }

    fn yaml_tables(&self) -> String {
        self.tables.iter().fold(String::new(), |mut yaml, table| {
            let _ = writeln!(yaml, "  - relation: '{}.\"{}\"'", self.schema, table.name);
            let more = if table.delivered {
                format!("id: {}_{}", self.schema, table.name)
            } else {
                "capture_only: true".into()
            };
            let _ = writeln!(yaml, "    {more}");
            yaml
        })
    }

    fn yaml_rules(&self) -> String {
        self.rules.iter().fold(String::new(), |mut yaml, rule| {
            let mut scope = self.schema.clone();
            for (literal, value) in &rule.template {
                let _ = write!(scope, "{literal}{{{value}}}");
            }
            scope.push_str(&rule.suffix);
            let _ = writeln!(yaml, "  - scope: {}\n    rows: |", literal(&scope));
            let _ = writeln!(yaml, "      SELECT r0.* FROM {}", rule.from);
            yaml
        })
    }

    /// Every (scope, table, id) by the source's own tables.
    fn expected(&self, source: &Database) -> anyhow::Result<BTreeSet<(String, String, String)>> {
        let mut all = BTreeSet::new();
        for rule in &self.rules {
            let values = rule.template.iter().fold(String::new(), |mut sql, (_, value)| {
                let _ = write!(sql, ", ({value})::text");
                sql
            });
            let table = format!("{}_{}", self.schema, self.tables[rule.target].name);
            for row in source.texts(&format!("select r0.id{values} from {}", rule.from))? {
                let mut values = row.into_iter();
                let id = values.next().flatten().context("a row without its key")?;
                let Some(values) = values.collect::<Option<Vec<String>>>() else { continue };
                let mut scope = self.schema.clone();
                for ((literal, _), value) in rule.template.iter().zip(values) {
                    scope.push_str(literal);
                    for c in value.chars() {
                        if !matches!(c, '%' | ':') && !c.is_control() {
                            scope.push(c);
                            continue;
                        }
                        for octet in c.to_string().bytes() {
                            let _ = write!(scope, "%{octet:02X}");
                        }
                    }
                }
                scope.push_str(&rule.suffix);
                all.insert((scope, table.clone(), id));
            }
        }
        Ok(all)
    }

    fn statement(&self, rng: &mut StdRng) -> String {
        let table = pick(rng, &self.tables);
        let name = format!("{}.\"{}\"", self.schema, table.name);
        let id = rng.random_range(0..25);
        let which = match rng.random_range(0..4) {
            0 => format!("id = {id}"),
            1 => format!("id % 4 = {}", id % 4),
            2 => format!("g = {}", rng.random_range(0..5)),
            _ => format!("id between {id} and {}", id + 3),
        };
        match rng.random_range(0..100) {
            0..35 => {
                let rows: Vec<String> = (0..rng.random_range(1..4))
                    .map(|_| {
                        let values: Vec<String> = COLUMNS.iter().map(|(_, kind)| value(rng, *kind)).collect();
                        let key = pick(rng, &["k", "l:", "é"]);
                        format!("({}, {}, {})", rng.random_range(0..25), literal(key), values.join(", "))
                    })
                    .collect();
                format!("insert into {name} (id, k, g, h, s, u, f) values {} on conflict do nothing", rows.join(", "))
            }
            35..70 => {
                let (column, kind) = pick(rng, &COLUMNS);
                format!("update {name} set {column} = {} where {which}", value(rng, *kind))
            }
            70..76 => format!("update {name} set note = 'n' where {which}"),
            76..82 => format!("update {name} set id = nextval('{}.ids') % 100000 where {which}", self.schema),
            82..96 => format!("delete from {name} where {which}"),
            96..98 => format!("truncate {name}"),
            98 => format!("truncate {name}, {}.\"{}\"", self.schema, self.tables[0].name)
                .replace(&format!("{name}, {name}"), &name),
            _ => format!(
                "delete from {name} where id = {id}; insert into {name} (id, g, h) values ({id}, 1, 2) on conflict do nothing"
            ),
        }
    }

    fn transaction(&self, rng: &mut StdRng) -> String {
        let statements: Vec<String> = (0..rng.random_range(1..5)).map(|_| self.statement(rng)).collect();
        let end = if rng.random_bool(0.05) { "rollback" } else { "commit" };
        format!("begin; {}; {end}", statements.join("; "))
    }
}

fn value(rng: &mut StdRng, kind: Kind) -> String {
    if rng.random_bool(0.12) {
        return "null".to_owned();
    }
    match kind {
        Kind::Number => rng.random_range(0..5).to_string(),
        Kind::Text => literal(pick::<&str>(rng, &TEXTS)),
        Kind::Flag => (*pick(rng, &["true", "false"])).to_owned(),
    }
}

impl Rule {
    fn random(rng: &mut StdRng, schema: &str, tables: &[Table], number: usize) -> Self {
        let delivered: Vec<usize> = (0..tables.len()).filter(|index| tables[*index].delivered).collect();
        let target = *pick(rng, &delivered);
        let mut from = format!("{schema}.\"{}\" r0", tables[target].name);
        let mut conditions = Vec::new();
        let joins = if number == 0 { rng.random_range(1..=3) } else { rng.random_range(0..=2) };
        for alias in 1..=joins {
            let table = pick(rng, tables);
            let other = rng.random_range(0..alias);
            let on = match rng.random_range(0..6) {
                0 => format!("r{alias}.g = r{other}.h"),
                1 => format!("r{other}.s = r{alias}.s AND r{alias}.f"),
                2 => format!("r{alias}.id = r{other}.g"),
                3 => format!("(r{alias}.u = r{other}.u AND r{alias}.g <> r{other}.g -- on\n      )"),
                4 => format!("r{alias}.g = r{other}.g AND r{alias}.id > r{other}.id"),
                _ => format!("r{alias}.h IN (r{other}.g, r{other}.h)"),
            };
            let name = format!("{schema}.\"{}\" r{alias}", table.name);
            // ON sees no table before a comma, so that what follows one is joined in WHERE.
            if rng.random_bool(0.2) || from.contains(',') {
                let _ = write!(from, ", {name}");
                conditions.push(on);
            } else {
                let _ = write!(from, "\n      JOIN {name} ON {on}");
            }
        }
        for _ in 0..rng.random_range(0..=2) {
            let alias = rng.random_range(0..=joins);
            let filter = match rng.random_range(0..7) {
                0 => format!("NOT r{alias}.f"),
                1 => format!("r{alias}.g > 1"),
                2 => format!("(r{alias}.s IS NULL OR lower(r{alias}.s) = 'a')"),
                3 => format!("r0.g + r{alias}.h < 6"),
                4 => format!("r{alias}.s IS DISTINCT FROM 'a'"),
                5 => format!("(r{alias}.f OR r{alias}.h = 2)"),
                _ => format!("r{alias}.u < 'b'"),
            };
            conditions.push(filter);
        }
        if !conditions.is_empty() {
            let _ = write!(from, "\n      WHERE {}", conditions.join(" AND "));
        }
        // Some scopes are given by several rules.
        let prefix = if rng.random_bool(0.5) { String::new() } else { format!("_{number}") };
        let mut template = Vec::new();
        for place in 0..rng.random_range(0..=2) {
            let alias = rng.random_range(0..=joins);
            let value = pick(rng, &["g", "h", "s", "u", "f", "id"]);
            let value = if rng.random_bool(0.2) { format!("lower(r{alias}.s)") } else { format!("r{alias}.{value}") };
            template.push((if place == 0 { format!("{prefix}:") } else { ":".to_owned() }, value));
        }
        let suffix = if template.is_empty() { format!("{prefix}_all") } else { String::new() };
        Self { target, template, suffix, from }
    }
}

/// What a client would hold: filled from everything at first, from later effects after.
struct Held {
    boundary: i64,
    rows: BTreeMap<(String, String, i64), String>,
}

impl Held {
    /// Applies the entries after the boundary, in one snapshot.
    fn pull(&mut self, state: &Database, cases: &[Case]) -> anyhow::Result<()> {
        state.run("begin isolation level repeatable read read only")?;
        let boundary = state.number("select boundary_lsn from tributary.progress")?;
        // Nobody is assigned these scopes, so that compaction takes their delete markers at once: what it took after our
        // boundary makes us begin the scope anew, like a client below its floor.
        let compacted =
            state.texts(&format!("select scope_id from tributary.scope where compacted_lsn > {}", self.boundary))?;
        for scope in compacted.iter().flatten().flatten() {
            self.rows.retain(|(of, _, _), _| of != scope);
        }
        for (case, table) in cases.iter().flat_map(|case| case.tables.iter().map(move |table| (case, table))) {
            if !table.delivered {
                continue;
            }
            let id = format!("{}_{}", case.schema, table.name);
            let projection = format!("tributary_data.\"{}.{}\"", case.schema, table.name);
            let entries = state.texts(&format!(
                "select s.scope_id, e.row_id, e.present, p.tributary_wire, e.commit_lsn
                 from tributary.scope_entry e
                 join tributary.scope s using (scope_no)
                 left join {projection} p on p.tributary_row_id = e.row_id
                 where (e.commit_lsn >= {} and (e.commit_lsn > {0} or e.commit_lsn = 0) or s.compacted_lsn > {0})
                     and e.table_no = (
                         select (t ->> 'table_no')::int
                         from tributary.configuration c, json_array_elements(c.registry::json -> 'tables') t
                         where t ->> 'id' = '{id}')",
                self.boundary
            ))?;
            for entry in entries {
                let [Some(scope), Some(row_id), Some(present), wire, Some(lsn)] = entry.as_slice() else {
                    anyhow::bail!("an entry is incomplete")
                };
                ensure!(lsn.parse::<i64>()? <= boundary, "an effect is after the boundary");
                let key = (scope.clone(), id.clone(), row_id.parse()?);
                if present == "t" {
                    self.rows.insert(key, wire.clone().context("an entry has no captured row")?);
                } else {
                    self.rows.remove(&key);
                }
            }
        }
        state.run("commit")?;
        self.boundary = boundary;
        Ok(())
    }

    fn keys(&self) -> anyhow::Result<BTreeSet<(String, String, String)>> {
        self.rows
            .iter()
            .map(|((scope, table, _), wire)| {
                let wire: serde_json::Value = serde_json::from_str(wire)?;
                Ok((scope.clone(), table.clone(), wire["id"].to_string()))
            })
            .collect()
    }
}

fn seed() -> anyhow::Result<u64> {
    let seed = match std::env::var(SEED) {
        Ok(seed) => seed.parse()?,
        Err(_) => rand::random::<u32>().into(),
    };
    println!("{SEED}={seed}");
    Ok(seed)
}

/// Waits until the materializer has everything that was committed before.
fn settle(source: &Database, state: &Database, marker: i64) -> anyhow::Result<()> {
    source.run(&format!("update public.marker set n = {marker}"))?;
    let deadline = Instant::now() + Duration::from_secs(30);
    while state.number("select (tributary_wire::json ->> 'n')::bigint from tributary_data.\"public.marker\"")? != marker
    {
        if let Some(detail) =
            state.texts("select detail from tributary.quarantine where resolved_at is null limit 1")?.pop()
        {
            anyhow::bail!("the stream is stopped: {detail:?}");
        }
        ensure!(Instant::now() < deadline, "the materializer does not settle");
        std::thread::sleep(Duration::from_millis(3));
    }
    Ok(())
}

fn entries_equal_the_rules(batch_rows: &str, batches: usize) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(seed()?);
    let cases: Vec<Case> = (0..SCHEMAS).map(|number| Case::random(&mut rng, format!("s{number}"))).collect();
    let files = Files::new()?;
    let ddl: String = cases.iter().map(Case::ddl).collect();
    let schema = files.write(
        "schema.sql",
        &format!(
            "{ddl}create table public.marker (id int primary key, n bigint); insert into public.marker values (1, 0);"
        ),
    )?;
    let yaml = format!(
        "tables:\n  - relation: public.marker\n{}scopes:\n{}",
        cases.iter().map(Case::yaml_tables).collect::<String>(),
        cases.iter().map(Case::yaml_rules).collect::<String>()
    );
    let config: PathBuf = files.write("sync.yaml", &yaml)?;
    // What is there before the baseline.
    let mut setup = String::new();
    for case in &cases {
        for _ in 0..30 {
            let _ = writeln!(setup, "{};", case.transaction(&mut rng));
        }
    }
    let sandbox = Sandbox::start(Options {
        config: Some(config),
        schema: Some(vec![schema, files.write("setup.sql", &setup)?]),
        pullers: 0,
        materializer_args: vec!["--batch-rows".into(), batch_rows.into()],
        ..Options::default()
    })
    .with_context(|| yaml.clone())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut held = Held { boundary: 0, rows: BTreeMap::new() };
    let mut most = 0;
    for batch in 0..=batches {
        let mut log = String::new();
        for _ in 0..if batch == 0 { 0 } else { TRANSACTIONS } {
            let transaction = pick(&mut rng, &cases).transaction(&mut rng);
            let _ = writeln!(log, "{transaction};");
            source.run(&transaction).with_context(|| transaction.clone())?;
        }
        settle(&source, &state, batch as i64 + 1).with_context(|| format!("{yaml}\n{log}"))?;
        held.pull(&state, &cases)?;
        let mut expected = BTreeSet::new();
        for case in &cases {
            expected.extend(case.expected(&source)?);
        }
        let found = held.keys()?;
        let missing: Vec<_> = expected.difference(&found).take(3).collect();
        let surplus: Vec<_> = found.difference(&expected).take(3).collect();
        ensure!(
            missing.is_empty() && surplus.is_empty(),
            "batch {batch}: missing {missing:?}, surplus {surplus:?}\n{yaml}\n{log}"
        );
        most = most.max(expected.len());
        let twice = state.texts(
            "select scope_no from tributary.scope_entry where commit_lsn > 0
             group by scope_no, commit_lsn, ordinal having count(*) > 1 limit 1",
        )?;
        ensure!(twice.is_empty(), "two effects of one scope have one position\n{yaml}\n{log}");
        for ((scope, table, row_id), wire) in &held.rows {
            let (schema, name) = table.split_once('_').context("a table id")?;
            let now = state.text(&format!(
                "select tributary_wire from tributary_data.\"{schema}.{name}\" where tributary_row_id = {row_id}"
            ))?;
            ensure!(now == *wire, "batch {batch}: a change of a row of {scope} was not delivered\n{yaml}\n{log}");
            if batch % 10 > 0 {
                break;
            }
        }
    }
    ensure!(most > 10, "the rules give hardly anything: {most}\n{yaml}");
    Ok(())
}

#[test]
fn entries_equal_the_rules_over_the_source() -> anyhow::Result<()> {
    entries_equal_the_rules("8192", BATCHES)
}

#[test]
fn entries_equal_the_rules_when_transactions_come_in_parts() -> anyhow::Result<()> {
    entries_equal_the_rules("3", BATCHES)
}

//! Rules and the catalog against a real PostgreSQL: what is evaluated without SQL, what is evaluated by our query
//! over texts, and what PostgreSQL says about the live table agree.

use anyhow::{Context, Result, ensure};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls};
use tributary_shared::registry::catalog::{
    Catalog, Collation, Persistence, PrimaryKey, RelationKind, ReplicaIdentity, TypeClass,
};
use tributary_shared::registry::{Registry, RelationName, SyncConfig, Table};
use tributary_shared::rule::Rule;
use tributary_shared::store::catalog;

/// A seed to replay; without it a random one, which is printed.
const SEED: &str = "TRIBUTARY_TEST_SEED";
const DATABASE: &str = "TRIBUTARY_TEST_DATABASE_URL";

async fn connect() -> Result<Client> {
    let url = std::env::var(DATABASE).with_context(|| format!("set {DATABASE} to the URL of a throw-away database"))?;
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A schema of a test's own, made anew.
async fn schema(client: &Client, name: &str, tables: &str) -> Result<()> {
    let text = format!(
        "drop schema if exists {name} cascade; create schema {name}; set search_path = {name}; {tables}; reset search_path"
    );
    client.batch_execute(&text).await.with_context(|| format!("schema {name}"))
}

async fn load(client: &Client, names: &[&str]) -> Result<Catalog> {
    let names = names.iter().map(|name| Ok(name.parse()?)).collect::<Result<Vec<RelationName>>>()?;
    Ok(catalog::load(client, &names).await?)
}

async fn resolve(client: &Client, yaml: &str) -> Result<(SyncConfig, Registry)> {
    let config = SyncConfig::parse(yaml).map_err(|problems| anyhow::anyhow!("{problems:?}"))?;
    let catalog = catalog::load(client, &config.relations()).await?;
    let (registry, _) =
        Registry::resolve(&config, &catalog, None).map_err(|problems| anyhow::anyhow!("{problems:?}"))?;
    Ok((config, registry))
}

const TABLE: &str = "
    create type mood as enum ('sad', 'ok', 'happy');
    create domain flag as boolean;
    create table t (
        id int4 primary key,
        b flag,
        n int4,
        m int8,
        s text,
        v varchar(8) collate \"C\",
        u uuid,
        e mood,
        d numeric(8, 2),
        c char(4),
        \"Odd \"\"é\" text
    )";

/// The literal texts that rows and predicates share, so that they meet often.
fn texts() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["", "a", "A", "ab", "a ", "é", "%:", "x'y", "5", "t"]).prop_map(str::to_owned)
}

const UUIDS: [&str; 2] = ["00000000-0000-0000-0000-00000000000a", "6b9c4a36-31a1-4a5c-9c0e-7d2f1b5b3c11"];

fn one_of(texts: &[&'static str]) -> BoxedStrategy<String> {
    prop::sample::select(texts.to_vec()).prop_map(str::to_owned).boxed()
}

fn row() -> impl Strategy<Value = Vec<Option<String>>> {
    let columns = [
        one_of(&["t", "f"]),
        (-3..8i32).prop_map(|n| n.to_string()).boxed(),
        one_of(&["9223372036854775807", "0", "5", "-1"]),
        texts().boxed(),
        texts().boxed(),
        one_of(&UUIDS),
        one_of(&["sad", "ok", "happy"]),
        one_of(&["1.00", "0.50", "NaN", "-3.25"]),
        one_of(&["a   ", "ab  ", "    "]),
        texts().boxed(),
    ];
    columns.map(|column| prop::option::weighted(0.8, column).boxed()).to_vec()
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn predicate() -> impl Strategy<Value = String> {
    const COLUMNS: [&str; 10] = ["b", "n", "m", "s", "v", "u", "e", "d", "c", "\"Odd \"\"é\""];
    const TEXT_COLUMNS: [&str; 3] = ["s", "t.v", "\"Odd \"\"é\""];
    let number = prop_oneof![
        (-3..8i32).prop_map(|n| n.to_string()),
        one_of(&["007", "- 3", "'5'", "9223372036854775807", "99999999999999999999", "5.0", "2147483648"]),
    ];
    let leaf = prop_oneof![
        one_of(&["b", "t.b", "true", "false", "null", "b = true", "b <> 't'", "'f' = b", "b = 'yes'"]),
        one_of(&COLUMNS).prop_map(|column| format!("{column} is null")),
        (one_of(&["n", "m"]), one_of(&["=", "<>", "<", ">="]), number)
            .prop_map(|(column, operator, number)| format!("{column} {operator} {number}")),
        (one_of(&TEXT_COLUMNS), one_of(&["=", "!=", "<"]), texts())
            .prop_map(|(column, operator, text)| format!("{column} {operator} {}", quoted(&text))),
        (one_of(&TEXT_COLUMNS), prop::collection::vec(texts(), 1..4), one_of(&["", "not "])).prop_map(
            |(column, list, not)| {
                let list: Vec<String> = list.iter().map(|text| quoted(text)).collect();
                format!("{column} {not}in ({})", list.join(", "))
            }
        ),
        one_of(&UUIDS).prop_map(|uuid| format!("u = '{uuid}'")),
        one_of(&UUIDS).prop_map(|uuid| format!("u <> '{}'", uuid.to_uppercase())),
        one_of(&["e = 'ok'", "e <> 'sad'", "e in ('ok', 'happy')", "e::text > 'ok'"]),
        one_of(&[
            "d = 1",
            "d = 'NaN'",
            "d > 0.5",
            "c = 'a'",
            "c = 'a '",
            "length(s) > 1",
            "s || v = 'aa'",
            "n = m",
            "n + 1 = 3 -- comment\n",
            "n is distinct from 5",
            "n between 1 and 3",
            "lower(s) = 'a'",
            "s like 'a%'",
        ]),
    ];
    // Without parentheses of its own, so that the precedence of operators is tested too.
    leaf.prop_recursive(4, 24, 3, |inner| {
        prop_oneof![
            (inner.clone(), one_of(&["and", "or"]), inner.clone())
                .prop_map(|(left, operator, right)| format!("{left} {operator} {right}")),
            inner.clone().prop_map(|inner| format!("not {inner}")),
            inner.clone().prop_map(|inner| format!("({inner})")),
            (inner, one_of(&["true", "not true", "false", "not false", "unknown", "not unknown"]))
                .prop_map(|(inner, is)| format!("({inner}) is {is}")),
        ]
    })
}

/// Templates with the expressions that they hold.
const TEMPLATES: [(&str, &[&str]); 8] = [
    ("s:{n}", &["n"]),
    ("s:{b}:{s}", &["b", "s"]),
    ("s:{t.\"Odd \"\"é\"}", &["t.\"Odd \"\"é\""]),
    ("s:{d}:{e}:{u}:{m}:{v}", &["d", "e", "u", "m", "v"]),
    ("constant", &[]),
    ("s:{c}", &["c"]),
    ("s:{n + 1}:{upper(s)}", &["n + 1", "upper(s)"]),
    ("s:{coalesce(s, '}')}", &["coalesce(s, '}')"]),
];

/// Rows (by ordinal) that are in a scope, with the scope.
type Answer = Vec<(i32, String)>;

async fn by_query(client: &Client, rule: &Rule, table: &Table, rows: &[Vec<Option<&str>>]) -> Result<Answer> {
    let sql = rule.sql(table);
    let ordinals: Vec<i32> = (0..rows.len() as i32).collect();
    let arrays: Vec<Vec<Option<&str>>> =
        sql.columns.iter().map(|column| rows.iter().map(|row| row[*column]).collect()).collect();
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&ordinals];
    parameters.extend(arrays.iter().map(|array| array as &(dyn ToSql + Sync)));
    scopes(rule, &client.query(&sql.text, &parameters).await?)
}

/// What PostgreSQL says about the live table, whose types are the source's own.
async fn on_the_table(client: &Client, rule: &Rule, values: &[&str], filter: &str) -> Result<Answer> {
    let values: Vec<String> = values.iter().map(|value| format!(", ({value})::text")).collect();
    scopes(rule, &client.query(&format!("select id{} from rules_agree.t where {filter}", values.concat()), &[]).await?)
}

fn scopes(rule: &Rule, rows: &[tokio_postgres::Row]) -> Result<Answer> {
    let mut answer = Vec::new();
    for row in rows {
        let values: Vec<Option<&str>> = (1..row.len()).map(|column| row.get(column)).collect();
        answer.extend(rule.scope_id(&values)?.map(|scope| (row.get(0), scope)));
    }
    answer.sort();
    Ok(answer)
}

fn natively(rule: &Rule, rows: &[Vec<Option<&str>>]) -> Result<Option<Answer>> {
    let Some(native) = rule.native() else { return Ok(None) };
    let mut answer = Vec::new();
    for (ordinal, row) in rows.iter().enumerate() {
        answer.extend(native.scope(row)?.map(|scope| (ordinal as i32, scope)));
    }
    Ok(Some(answer))
}

/// Checks the three ways against each other; true when the rule was evaluated without SQL too.
async fn agree(
    client: &Client,
    config: &str,
    rows: &[Vec<Option<String>>],
    values: &[&str],
    filter: &str,
) -> Result<bool> {
    client.batch_execute("truncate rules_agree.t").await?;
    let insert = "insert into rules_agree.t values ($1, $2::text::boolean, $3::text::int4, $4::text::int8, $5, $6, \
                  $7::text::uuid, $8::text::rules_agree.mood, $9::text::numeric, $10::text, $11)";
    let mut texts: Vec<Vec<Option<&str>>> = Vec::new();
    for (id, row) in rows.iter().enumerate() {
        let id = id as i32;
        let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&id];
        parameters.extend(row.iter().map(|value| value as &(dyn ToSql + Sync)));
        client.execute(insert, &parameters).await?;
        texts.push(std::iter::once(Some("")).chain(row.iter().map(Option::as_deref)).collect());
    }
    let (_, registry) = resolve(client, config).await?;
    let rule = &registry.rules[0];
    let expected = on_the_table(client, rule, values, filter).await.context("on the table")?;
    let queried = by_query(client, rule, &registry.tables[0], &texts).await.context("by query")?;
    ensure!(queried == expected, "by query {queried:?}, on the table {expected:?}");
    let native = natively(rule, &texts)?;
    if let Some(native) = &native {
        ensure!(*native == expected, "natively {native:?}, on the table {expected:?}");
    }
    Ok(native.is_some())
}

#[test]
fn native_evaluation_and_sql_agree() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = runtime.block_on(async {
        let client = connect().await?;
        schema(&client, "rules_agree", TABLE).await?;
        Ok::<_, anyhow::Error>(client)
    })?;
    let (native, all) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let cases = (prop::collection::vec(row(), 1..12), predicate(), prop::sample::select(TEMPLATES.to_vec()));
    let seed = match std::env::var(SEED) {
        Ok(seed) => seed.parse()?,
        Err(_) => rand::random::<u64>(),
    };
    println!("{SEED}={seed}");
    let mut octets = [0; 32];
    octets[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases: 400, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &octets));
    let outcome = runner.run(&cases, |(rows, filter, (scope, values))| {
        let indented = format!("SELECT * FROM t WHERE {filter}").replace('\n', "\n      ");
        let config = format!(
            "tables: [{{relation: rules_agree.t}}]\nscopes:\n  - scope: '{}'\n    rows: |\n      {indented}",
            scope.replace('\'', "''")
        );
        let used = runtime
            .block_on(agree(&client, &config, &rows, values, &filter))
            .map_err(|error| TestCaseError::fail(format!("{error:?}\n{config}")))?;
        native.set(native.get() + u32::from(used));
        all.set(all.get() + 1);
        Ok(())
    });
    outcome.map_err(|error| anyhow::anyhow!("{error}"))?;
    // Both ways are really taken.
    let (native, all) = (native.get(), all.get());
    ensure!(native * 10 > all && native < all, "{native} of {all} rules were evaluated without SQL");
    Ok(())
}

#[tokio::test]
async fn the_catalog_says_what_the_source_is() -> Result<()> {
    let client = connect().await?;
    schema(
        &client,
        "catalog_says",
        "create type mood as enum ('sad');
         create type pair as (a int, b int);
         create domain money_amount as numeric(12, 3) not null;
         create domain money_alias as money_amount;
         create collation loose (provider = icu, locale = 'und', deterministic = false);
         create table everything (
             dropped int,
             id int8 generated always as identity,
             price money_alias,
             moods mood[],
             mood mood,
             pair pair,
             tags text[],
             code char(3) collate \"C\",
             loose text collate loose,
             twice int8 generated always as (id * 2) stored,
             at timestamptz(3) not null,
             reg regclass,
             primary key (id) include (at)
         );
         alter table everything drop column dropped;
         create view a_view as select 1 as id;
         create unlogged table \"Un logged\" (id int primary key);
         create table parted (id int primary key) partition by range (id);
         create table parted_1 partition of parted for values from (0) to (10);
         create table parent (id int);
         create table child () inherits (parent);
         create table late (id int primary key deferrable, other int not null unique);
         alter table late replica identity using index late_other_key;
         create table pairwise (a int, b int, primary key (b, a));
         alter table pairwise replica identity full;
         create table silent (id int primary key);
         alter table silent replica identity nothing",
    )
    .await?;
    let names = [
        "catalog_says.everything",
        "catalog_says.absent",
        "catalog_says.a_view",
        "catalog_says.\"Un logged\"",
        "catalog_says.parted",
        "catalog_says.parent",
        "catalog_says.late",
        "catalog_says.pairwise",
        "catalog_says.silent",
    ];
    let catalog = load(&client, &names).await?;
    assert!(catalog.server_version >= 140_000);
    let found: Vec<&str> = catalog.relations.iter().map(|relation| relation.name.name()).collect();
    assert_eq!(found, ["everything", "a_view", "Un logged", "parted", "parent", "late", "pairwise", "silent"]);
    let of = |name: &str| catalog.relations.iter().find(|relation| relation.name.name() == name).expect("loaded");
    assert_eq!(of("a_view").kind, RelationKind::View);
    assert_eq!(of("Un logged").persistence, Persistence::Unlogged);
    assert_eq!((of("parted").kind, of("parted").has_children), (RelationKind::PartitionedTable, false));
    assert!(of("parent").has_children && of("parent").primary_key.is_none());
    assert_eq!(of("late").primary_key, Some(PrimaryKey { columns: vec![1], deferrable: true }));
    assert_eq!(of("late").replica_identity, ReplicaIdentity::Index(vec![2]));
    assert_eq!(of("pairwise").primary_key, Some(PrimaryKey { columns: vec![2, 1], deferrable: false }));
    assert_eq!(of("pairwise").replica_identity, ReplicaIdentity::Full);
    assert_eq!(of("silent").replica_identity, ReplicaIdentity::Nothing);

    let everything = of("everything");
    assert_eq!(everything.primary_key, Some(PrimaryKey { columns: vec![2], deferrable: false }));
    let names: Vec<&str> = everything.columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["id", "price", "moods", "mood", "pair", "tags", "code", "loose", "twice", "at", "reg"]);
    let sql = |name: &str| {
        let type_info = &everything.column(name).expect("a column").type_info;
        (type_info.sql.as_str(), type_info.class)
    };
    assert_eq!(sql("price"), ("numeric(12,3)", TypeClass::Builtin));
    assert_eq!(sql("moods"), ("text", TypeClass::Opaque));
    assert_eq!(sql("mood"), ("text", TypeClass::Enum));
    assert_eq!(sql("pair"), ("text", TypeClass::Composite));
    assert_eq!(sql("tags"), ("text[]", TypeClass::Builtin));
    assert_eq!(sql("code"), ("character(3)", TypeClass::Builtin));
    assert_eq!(sql("at"), ("timestamp(3) with time zone", TypeClass::Builtin));
    assert_eq!(sql("reg"), ("text", TypeClass::Opaque));
    let column = |name: &str| everything.column(name).expect("a column");
    assert!(column("price").not_null && column("at").not_null && !column("tags").not_null);
    assert_eq!(column("price").type_info.precision_and_scale(), Some((12, 3)));
    assert_eq!(column("price").type_info.modifier, -1);
    assert_ne!(column("price").type_info.oid, 1700);
    assert_eq!(column("code").type_info.collation, Collation::Named("C".to_owned()));
    assert_eq!(column("loose").type_info.collation, Collation::Foreign);
    assert_eq!(column("mood").type_info.collation, Collation::Default);
    assert!(column("twice").generated && !column("twice").identity_always);
    assert!(column("id").identity_always && !column("id").generated);
    Ok(())
}

#[tokio::test]
async fn row_security_applies_to_roles_that_do_not_bypass_it() -> Result<()> {
    let client = connect().await?;
    schema(
        &client,
        "row_security",
        "create table guarded (id int primary key); alter table guarded enable row level security;
         drop role if exists tributary_test_reader; create role tributary_test_reader",
    )
    .await?;
    let guarded = |catalog: &Catalog| (catalog.relations[0].row_security_applies, catalog.relations[0].readable);
    assert_eq!(guarded(&load(&client, &["row_security.guarded"]).await?), (false, true));
    client.batch_execute("set role tributary_test_reader").await?;
    assert_eq!(guarded(&load(&client, &["row_security.guarded"]).await?), (true, false));
    Ok(())
}

#[tokio::test]
async fn postgresql_itself_checks_expressions() -> Result<()> {
    let mut client = connect().await?;
    schema(
        &client,
        "expressions",
        "create type mood as enum ('sad');
         create table t (id int primary key, n int, s text, at timestamptz, day date, e mood, v varchar(4) collate \"C\");
         create function twice(n int) returns int immutable language sql as 'select n * 2'",
    )
    .await?;
    let rules = [
        ("fine:{n}", "n > 1 AND s LIKE 'a%'", None),
        ("fine:{e}:{v}", "e = 'sad'", None),
        ("constant", "true", None),
        ("volatile", "random() < 0.5", Some("functions in index predicate must be marked IMMUTABLE")),
        ("stable", "at > now()", Some("functions in index predicate must be marked IMMUTABLE")),
        ("text:{at}", "true", Some("functions in index expression must be marked IMMUTABLE")),
        ("text:{day}", "true", Some("functions in index expression must be marked IMMUTABLE")),
        ("aggregate", "count(*) > 1", Some("aggregate functions are not allowed in index predicates")),
        ("window", "row_number() over () > 1", Some("window functions are not allowed in index predicates")),
        ("type", "n = 'x'", Some("invalid input syntax for type integer: \"x\"")),
        ("boolean", "n", Some("argument of WHERE must be type boolean, not type integer")),
        ("own", "twice(n) = 2", Some("function twice(integer) does not exist")),
    ];
    let scopes: Vec<String> = rules
        .iter()
        .map(|(scope, filter, _)| format!("\n  - scope: '{scope}'\n    rows: \"SELECT * FROM t WHERE {filter}\""))
        .collect();
    let (config, registry) =
        resolve(&client, &format!("tables:\n  - relation: expressions.t\nscopes:{}", scopes.concat())).await?;
    let (problems, warnings) = catalog::check_expressions(&mut client, &config, &registry).await?;
    let found: Vec<String> = problems.iter().map(ToString::to_string).collect();
    let expected: Vec<String> = rules
        .iter()
        .enumerate()
        .filter_map(|(number, (scope, _, reason))| {
            reason.map(|reason| format!("line {}: rule {scope}: {reason}", 5 + 2 * number))
        })
        .collect();
    assert_eq!(found, expected);
    assert!(warnings.is_empty());

    client.batch_execute("set default_transaction_read_only = on").await?;
    let (problems, warnings) = catalog::check_expressions(&mut client, &config, &registry).await?;
    assert!(problems.is_empty(), "{problems:?}");
    // Nothing is left behind, and the search path is back.
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let path: String = client.query_one("show search_path", &[]).await?.get(0);
    assert!(path.contains("public"), "{path}");
    Ok(())
}

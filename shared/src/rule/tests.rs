use super::*;
use crate::portable::PortableType;
use crate::registry::catalog::TypeClass;
use crate::registry::{Column, Lifecycle};

fn column(name: &str, oid: u32, sql: &str, class: TypeClass) -> Column {
    Column {
        name: name.to_owned(),
        field_id: name.to_owned(),
        type_info: ColumnType {
            oid,
            modifier: -1,
            base_oid: oid,
            base_modifier: -1,
            sql: sql.to_owned(),
            class,
            collation: Collation::Default,
        },
        portable: PortableType::default_for(oid),
        nullable: true,
        precision: None,
        scale: None,
        writable: true,
        delivered: true,
        stored: true,
        indexed: false,
    }
}

fn table() -> Table {
    let builtin = |name, oid, sql| column(name, oid, sql, TypeClass::Builtin);
    Table {
        table_no: 7,
        relation: "public.t".parse().expect("a name"),
        id: "t".to_owned(),
        capture_only: false,
        columns: vec![
            builtin("flag", 16, "boolean"),
            builtin("n", 23, "integer"),
            builtin("Name é", 25, "text"),
            builtin("u", 2950, "uuid"),
            builtin("d", 1700, "numeric"),
            column("mood", 20_000, "text", TypeClass::Enum),
            column("pair", 20_001, "text", TypeClass::Composite),
            builtin("c", 1042, "character(3)"),
        ],
        keys: vec![3],
        lifecycle: Lifecycle::default(),
    }
}

fn bind(scope: &str, rows: &str) -> Result<Rule, Vec<String>> {
    let table = table();
    let tables = vec![&table; RuleQuery::parse(rows).expect(rows).from().len()];
    let (template, values) = Template::parse(scope, ParsedExpression::parse).expect(scope);
    let query = RuleQuery::parse(rows).expect(rows);
    let source = RuleSource { scope, rows, max_scopes_per_row: 2, template: &template, values: &values, query: &query };
    Rule::bind(source, &tables).map_err(|problems| problems.iter().map(ToString::to_string).collect())
}

fn rule(scope: &str, filter: &str) -> Rule {
    bind(scope, &format!("SELECT * FROM t WHERE {filter}")).expect(filter)
}

#[test]
fn the_query_keeps_the_authors_text_and_replaces_names_alone() {
    let rule = bind(
        "a:{t.n}:{\"Name é\" -- why\n}",
        "SELECT * FROM public.t\nWHERE /* é n */ 'n é' = t.\"Name é\" AND public.t.N > 1 OR u IS NULL -- n",
    )
    .expect("binds");
    let sql = rule.sql(&table());
    assert_eq!(sql.columns, [1, 2, 3]);
    assert_eq!(
        sql.text,
        "-- rule::scopes
select
    r.ordinal,
    (r.c1
    )::text as value_0,
    (r.c2 -- why

    )::text as value_1
from (
    select
        a.ordinal,
        a.c1::integer as c1,
        a.c2::text as c2,
        a.c3::uuid as c3
    from unnest($1::int4[], $2::text[], $3::text[], $4::text[]) as a (ordinal, c1, c2, c3)
) as r
where ( /* é n */ 'n é' = r.c2 AND r.c1 > 1 OR r.c3 IS NULL -- n
)"
    );
}

#[test]
fn a_constant_rule_reads_no_columns() {
    let rule = bind("public", "SELECT * FROM t").expect("binds");
    let sql = rule.sql(&table());
    assert!(sql.columns.is_empty() && sql.text.contains("unnest($1::int4[]) as a (ordinal)"), "{}", sql.text);
    assert_eq!(rule.native().expect("native").scope(&[]), Ok(Some("public".to_owned())));
}

#[test]
fn an_alias_hides_the_tables_name() {
    assert!(bind("s", "SELECT x.* FROM t x WHERE x.flag AND flag").is_ok());
    assert!(bind("s", "SELECT * FROM t x WHERE t.flag").is_err());
    assert!(bind("s", "SELECT * FROM t WHERE other.t.flag").is_err());
    assert!(bind("s", "SELECT * FROM t WHERE pair IS NULL").expect_err("composite")[0].contains("composite"));
}

#[test]
fn only_provable_equality_is_native() {
    for filter in [
        "flag",
        "NOT flag AND (n = 5 OR n <> -007)",
        "'x' = \"Name é\"",
        "n IN (1, 2) AND mood NOT IN ('a', 'b')",
        "u = '6b9c4a36-31a1-4a5c-9c0e-7d2f1b5b3c11'",
        "n = '5'",
        "flag = true AND flag <> 'false' AND flag IS NOT TRUE",
        "n IS NULL OR c IS NOT NULL OR NULL",
    ] {
        assert!(rule("s:{n}", filter).native().is_some(), "{filter}");
    }
    for filter in [
        "d = 1",
        "c = 'a'",
        "n = 1.0",
        "n = '05'",
        "n = n",
        "n > 1",
        "flag = 'yes'",
        "u = '6B9C4A36-31a1-4a5c-9c0e-7d2f1b5b3c11'",
        "\"Name é\" = E'x'",
        "\"Name é\" COLLATE \"C\" = 'x'",
        "flag AND lower(\"Name é\") = 'x'",
    ] {
        assert!(rule("s:{n}", filter).native().is_none(), "{filter}");
    }
    assert!(rule("s:{n + 1}", "flag").native().is_none());
    assert!(rule("s:{c}", "flag").native().is_none());
    assert!(rule("s:{d}:{(mood)}", "flag").native().is_some());
}

#[test]
fn native_logic_has_three_values() {
    let scope = |filter: &str, flag: Option<&str>, n: Option<&str>| {
        rule("s:{flag}", filter).native().expect("native").scope(&[flag, n]).map(|scope| scope.is_some())
    };
    assert_eq!(scope("flag OR n = 1", Some("t"), None), Ok(true));
    assert_eq!(scope("NOT (flag AND n = 1)", Some("t"), None), Ok(false));
    assert_eq!(scope("NOT (NOT flag AND n = 1)", Some("t"), None), Ok(true));
    assert_eq!(scope("n <> 1", Some("t"), None), Ok(false));
    assert_eq!(scope("(n = 1) IS UNKNOWN", Some("t"), None), Ok(true));
    assert_eq!(scope("n IS NULL", None, None), Ok(false), "a null value gives no scope");
    assert_eq!(scope("flag", Some("true"), None), Err(RuleError::NotABoolean));
    assert_eq!(rule("s", "u IS NULL").native().expect("native").scope(&[]), Err(RuleError::MissingColumn));
}

#[test]
fn scope_values_are_casts_to_text() {
    let native = rule("s:{flag}:{n}", "true");
    let scope = |flag| native.native().expect("native").scope(&[Some(flag), Some("-3")]);
    assert_eq!(scope("t"), Ok(Some("s:true:-3".to_owned())));
    assert_eq!(scope("f"), Ok(Some("s:false:-3".to_owned())));
    assert_eq!(native.scope_id(&[Some("true"), Some("-3")]), scope("t"));
}

#[test]
fn a_rule_bounds_the_scopes_of_a_row() {
    let rule = rule("s", "true");
    assert_eq!(rule.check_bound(2), Ok(()));
    assert_eq!(rule.check_bound(3), Err(RuleError::TooManyScopes(2)));
}

#[test]
fn columns_of_joined_tables_are_told_apart() {
    let joined = "SELECT x.* FROM t x JOIN t AS y ON x.n = y.n AND y.\"Name é\" IS NOT NULL WHERE NOT x.flag";
    let rule = bind("s:{y.u}", joined).expect("binds");
    assert!(rule.native().is_none() && rule.has_joins());
    assert_eq!((rule.from(), rule.target(), rule.table_no), ([7, 7].as_slice(), 0, 7));
    let name = |reference| format!("{reference:?}");
    let rendered: Vec<String> = rule.conditions().iter().map(|condition| condition.render(name)).collect();
    assert_eq!(rendered, [" Column(0, 1) = Column(1, 1) AND Column(1, 2) IS NOT NULL ", " NOT Column(0, 0)"]);
    assert_eq!(rule.values()[0].render(name), "Column(1, 3)");
    let table = table();
    let query = RuleQuery::parse(joined).expect("a query");
    assert_eq!(query.lookups(&[&table, &table]), [(0, 1), (1, 1)]);
    assert!(bind("s:{u}", joined).expect_err("ambiguous")[0].contains("of several tables"));
    assert!(bind("s:{z.u}", joined).expect_err("unknown")[0].contains("z.u is not a column of a table of FROM"));
    assert!(bind("s", "SELECT x.* FROM t x, t y WHERE x.mood = y.mood").expect_err("enum")[0].contains("is an enum"));
}

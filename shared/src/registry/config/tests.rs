use super::*;

fn problems(yaml: &str) -> Vec<String> {
    match SyncConfig::parse(yaml) {
        Ok(_) => Vec::new(),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

const EXAMPLE: &str = r#"
tables:
  - relation: public.documents
    id: docs
    columns: [id, title, body, owner_id, updated_at]
    types: {body: string}
    read_only: [owner_id]
    lifecycle: {updated_at: updated_at}
  - relation: '"My Schema"."T"'
  - relation: public.members
    capture_only: true
scopes:
  - scope: "documents_user:{owner_id}"
    rows: SELECT * FROM documents
  - scope: templates_public
    rows: |
      SELECT d.* FROM public.documents d
      WHERE d.published
    max_scopes_per_row: 5
assignments:
  - scope: "documents_user:{user_id}"
  - scope: templates_public
"#;

#[test]
fn reads_the_whole_format() {
    let config = SyncConfig::parse(EXAMPLE).expect("an example");
    let [documents, t, members] = config.tables.as_slice() else { panic!("three tables") };
    assert_eq!((documents.line, documents.id.value.as_str(), documents.capture_only), (3, "docs", false));
    assert_eq!(documents.columns.as_ref().map(Vec::len), Some(5));
    assert_eq!(documents.types[0].1, PortableType::String);
    assert_eq!(documents.lifecycle.updated_at.as_ref().map(|at| at.line), Some(8));
    assert_eq!((t.relation.value.schema(), t.relation.value.name(), t.id.value.as_str()), ("My Schema", "T", "T"));
    assert!(t.columns.is_none() && members.capture_only);
    assert_eq!(config.scopes[0].max_scopes_per_row, 1000);
    assert_eq!((config.scopes[1].max_scopes_per_row, config.scopes[1].line), (5, 15));
    assert_eq!(config.assignments[0].template.value_count(), 1);
}

#[test]
fn a_file_without_tables_is_refused() {
    assert_eq!(problems("scopes: []"), ["line 1: the file has no tables"]);
    assert_eq!(problems("\ntables: []"), ["line 2: tables is empty"]);
    for yaml in ["", "# nothing", "tables", "- tables", "---"] {
        assert_eq!(problems(yaml).len(), 1, "{yaml:?}: {:?}", problems(yaml));
    }
}

/// Each case: a file and the problems that it has, exactly.
#[test]
fn every_problem_is_reported_with_its_line() {
    let cases: &[(&str, &[&str])] = &[
        (
            "tables:\n  - relation: documents\n    colour: red\n  - id: x\n  - 5\nextra: 1",
            &[
                "line 2: relation documents: the relation name has no schema: write schema.name",
                "line 3: unknown key colour in a table; known are relation, id, columns, types, read_only, lifecycle, capture_only",
                "line 4: a table has no relation",
                "line 5: a table must be a mapping",
                "line 6: unknown key extra in the file; known are tables, scopes, assignments",
            ],
        ),
        (
            "tables:\n  - relation: a.b\n    relation: a.c\n    id: x\n    id: y\n    columns: []\nscopes: 1\nscopes: 2",
            &[
                "line 3: relation stands here and on line 2",
                "line 5: id stands here and on line 4",
                "line 6: columns is empty",
                "line 7: scopes must be a list",
                "line 8: scopes stands here and on line 7",
            ],
        ),
        (
            "tables:\n  - relation: a.b\n    \"relation\": a.c\n    types:\n      é: string\n      é: int",
            &["line 3: relation stands here and on line 2", "line 6: é stands here and on line 5"],
        ),
        (
            "tables:\n  - relation:\n    id: ''\n    columns: [a, a, ~, [b]]\n    types: {a: text, b: string}\n    capture_only: \"true\"",
            &[
                "line 2: relation is empty",
                "line 3: id is empty",
                "line 4: a column is empty",
                "line 4: a column must be a text",
                "line 4: columns names a twice",
                "line 5: text is not a portable type",
                "line 6: capture_only must be true or false",
            ],
        ),
        (
            "tables:\n  - relation: a.b\n    capture_only: true\n    id: x\n    lifecycle: {deleted: d}\n    read_only: x",
            &[
                "line 4: id has no meaning for a capture_only table",
                "line 5: lifecycle has no meaning for a capture_only table",
                "line 5: unknown key deleted in lifecycle; known are created_at, updated_at, deleted_at",
                "line 6: read_only has no meaning for a capture_only table",
                "line 6: read_only must be a list",
            ],
        ),
        (
            "tables:\n  - relation: tributary.progress\n  - relation: public.tributary_x\n  - relation: a b",
            &[
                "line 2: relation tributary.progress: names of Tributary's own and of PostgreSQL's cannot be synchronized",
                "line 3: relation public.tributary_x: names of Tributary's own and of PostgreSQL's cannot be synchronized",
                "line 4: relation a b: not a relation name: write schema.name, quoted as in SQL where needed",
            ],
        ),
        (
            "tables:\n  - relation: a.b\n  - relation: A.B\n  - relation: c.b\n  - relation: d.b\n    capture_only: true\n  - relation: e.f\n    id: b",
            &[
                "line 3: relation a.b is configured on line 2 too",
                "line 4: table id b belongs to a.b on line 2 too",
                "line 4: table id b belongs to a.b on line 3 too",
                "line 8: table id b belongs to a.b on line 2 too",
                "line 8: table id b belongs to a.b on line 3 too",
                "line 8: table id b belongs to c.b on line 4 too",
            ],
        ),
        (
            "tables: [{relation: a.b}]\nscopes:\n  - scope: 'x:{'\n    rows: SELECT * FROM b WHERE\n  - scope: 'x:{a +}'\n    rows: SELECT * FROM b JOIN c ON true\n    max_scopes_per_row: 0\n  - scope: x",
            &[
                "line 3: the scope template has a { at character 3 without its }",
                "line 4: rows: Expected: an expression, found: EOF",
                "line 5: in the scope template, the expression at character 4: Expected: an expression, found: EOF",
                "line 6: rows: line 1, column 1 of the SQL: a rule with joins selects the rows of one table: SELECT table.* FROM …",
                "line 7: max_scopes_per_row must be a positive whole number",
                "line 8: a scope has no rows",
            ],
        ),
        (
            "tables:\n  - relation: a.b\n  - relation: a.c\n    capture_only: true\nscopes:\n  - scope: x\n    rows: SELECT * FROM d\n  - scope: y\n    rows: SELECT * FROM c\n  - scope: 'z:{x.id}'\n    rows: SELECT * FROM b\n  - scope: w\n    rows: SELECT * FROM b\n  - scope: w\n    rows: select * from b",
            &[
                "line 7: rows: table d is not among the configured tables",
                "line 9: rows: table a.c is capture_only, so that no rule can deliver it",
                "line 11: rows or scope: line 1, column 1 of the SQL: x.id is not a column of the rule's table",
                "line 14: the same rule stands on line 12",
            ],
        ),
        (
            "tables: [{relation: a.b}]\nassignments:\n  - scope: 'x:{user}'\n  - scope: 'p:{project_id}'\n    for: SELECT 1\n  - {}\n  - scope: a\n  - scope: b",
            &[
                "line 3: in the scope template, the expression at character 4: user is unknown; known is user_id",
                "line 5: for: line 1, column 1 of the SQL: the query has no FROM",
                "line 6: an assignment has no scope",
            ],
        ),
        (
            "tables: [{relation: a.b}]\nassignments:\n  - scope: 'x:{user_id}'\n  - scope: 'x:{user_id}'",
            &["line 4: the same assignment stands on line 3"],
        ),
        ("tables: &x\n  - relation: a.b", &["line 2: anchors are not supported"]),
        ("tables: !x\n  - relation: a.b", &["line 2: tags are not supported"]),
        (
            "tables:\n  - {relation: a.b",
            &["line 3: not YAML: while parsing a flow mapping, did not find expected ',' or '}'"],
        ),
    ];
    for (yaml, expected) in cases {
        assert_eq!(problems(yaml), *expected, "{yaml}");
    }
}

proptest::proptest! {
    /// Bytes that are no configuration are refused, never a panic.
    #[test]
    fn arbitrary_text_never_panics(text in "[a-z:{}\\[\\]\n \"'|>&*!#~-]{0,80}") {
        let _ = SyncConfig::parse(&text);
        let _ = SyncConfig::parse(&format!("tables:\n  - relation: {text}"));
        let _ = SyncConfig::parse(&format!("tables: [{{relation: a.b}}]\nscopes:\n  - scope: '{text}'\n    rows: SELECT * FROM b WHERE {text}"));
    }
}

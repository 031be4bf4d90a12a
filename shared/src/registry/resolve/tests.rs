use super::*;
use crate::registry::catalog::{Collation, ColumnType, TypeClass};

fn column(attnum: i16, name: &str, oid: u32, sql: &str) -> CatalogColumn {
    CatalogColumn {
        name: name.to_owned(),
        attnum,
        type_info: ColumnType {
            oid,
            modifier: -1,
            base_oid: oid,
            base_modifier: -1,
            sql: sql.to_owned(),
            class: TypeClass::Builtin,
            collation: Collation::Default,
        },
        not_null: false,
        generated: false,
        identity_always: false,
    }
}

/// public.documents: a table with every kind of column that matters here.
fn documents() -> CatalogRelation {
    let mut amount = column(6, "amount", 1700, "numeric(10,2)");
    amount.type_info.base_modifier = (10 << 16 | 2) + 4;
    let mut mood = column(8, "mood", 20_000, "text");
    mood.type_info.class = TypeClass::Enum;
    let mut email = column(9, "email", 20_001, "text");
    email.type_info.class = TypeClass::Opaque;
    let mut double = column(10, "double", 23, "integer");
    double.generated = true;
    let mut number = column(11, "number", 23, "integer");
    number.identity_always = true;
    number.not_null = true;
    CatalogRelation {
        name: "public.documents".parse().expect("a name"),
        oid: 1,
        kind: RelationKind::Table,
        persistence: Persistence::Permanent,
        replica_identity: ReplicaIdentity::Default,
        primary_key: Some(PrimaryKey { columns: vec![2], deferrable: false }),
        row_security_applies: false,
        has_children: false,
        readable: true,
        columns: vec![
            column(1, "title", 25, "text"),
            column(2, "id", 2950, "uuid"),
            column(4, "owner_id", 25, "text"),
            column(5, "updated_at", 1184, "timestamp with time zone"),
            amount,
            column(7, "published", 16, "boolean"),
            mood,
            email,
            double,
            number,
        ],
    }
}

fn resolve_with(relation: CatalogRelation, yaml: &str) -> Result<(Registry, Vec<Warning>), Vec<String>> {
    let config = SyncConfig::parse(yaml).expect(yaml);
    let catalog = Catalog { server_version: 150_000, relations: vec![relation] };
    Registry::resolve(&config, &catalog, None).map_err(|problems| problems.iter().map(ToString::to_string).collect())
}

fn problems(relation: CatalogRelation, yaml: &str) -> Vec<String> {
    resolve_with(relation, yaml).err().unwrap_or_default()
}

const PLAIN: &str = "tables: [{relation: public.documents}]";

#[test]
fn resolves_columns_types_and_use() {
    let yaml = "tables:
  - relation: public.documents
    columns: [id, title, updated_at, amount, number]
    types: {title: string, number: int64}
    read_only: [title]
    lifecycle: {updated_at: updated_at}
scopes:
  - scope: 'documents_user:{owner_id}'
    rows: SELECT * FROM documents d WHERE d.published
assignments:
  - scope: 'documents_user:{user_id}'";
    let (registry, warnings) = resolve_with(documents(), yaml).expect("resolves");
    let table = &registry.tables[0];
    let names: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["title", "id", "owner_id", "updated_at", "amount", "published", "number"]);
    let flags = |name: &str| {
        let column = table.columns.iter().find(|column| column.name == name).expect(name);
        (column.delivered, column.stored, column.writable, column.nullable)
    };
    assert_eq!(flags("id"), (true, false, false, false));
    assert_eq!(flags("title"), (true, false, false, true));
    assert_eq!(flags("owner_id"), (false, true, true, true));
    assert_eq!(flags("published"), (false, true, true, true));
    assert_eq!(flags("number"), (true, false, false, false));
    assert_eq!(flags("amount"), (true, false, true, true));
    assert_eq!((table.table_no, table.keys.as_slice(), table.lifecycle.updated_at), (1, [1].as_slice(), Some(3)));
    assert_eq!((table.columns[4].precision, table.columns[4].scale), (Some(10), Some(2)));
    assert_eq!(table.columns[6].portable, PortableType::Int64);
    let warned: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warned,
        [
            "line 2: column amount of public.documents: NaN or Infinity cannot be decimal, and such a value would stop the stream; types: {amount: string} takes every value",
            "line 2: column updated_at of public.documents: infinity, or a year before 1 or past 9999, cannot be datetime, and such a value would stop the stream; types: {updated_at: string} takes every value",
        ]
    );
    let manifest = serde_json::to_value(registry.manifest_tables()).expect("serializes");
    assert_eq!(
        manifest,
        serde_json::json!([{
            "table_id": "documents",
            "relation_id": "public.documents",
            "name": "documents",
            "composition": "single_scope",
            "primary_key_field_id": "id",
            "lifecycle": {"created_at_field_id": null, "updated_at_field_id": "updated_at", "deleted_at_field_id": null},
            "fields": [
                {"field_id": "amount", "name": "amount", "type": "decimal", "nullable": true, "writable": true, "precision": 10, "scale": 2},
                {"field_id": "id", "name": "id", "type": "string", "nullable": false, "writable": false},
                {"field_id": "number", "name": "number", "type": "int64", "nullable": false, "writable": false},
                {"field_id": "title", "name": "title", "type": "string", "nullable": true, "writable": false},
                {"field_id": "updated_at", "name": "updated_at", "type": "datetime", "nullable": true, "writable": true},
            ],
            "indexes": [],
        }])
    );
    let stored = serde_json::to_string(&registry).expect("serializes");
    assert_eq!(serde_json::from_str::<Registry>(&stored).expect("deserializes"), registry);
}

#[test]
fn by_default_all_columns_but_generated_ones() {
    let (registry, warnings) = resolve_with(documents(), PLAIN).expect("resolves");
    assert_eq!(registry.tables[0].columns.len(), 9);
    assert!(
        warnings.iter().any(|warning| warning.message.contains("double of public.documents is generated and left out"))
    );
    assert!(warnings.iter().any(|warning| warning.message == "no rule delivers rows of public.documents"));
}

#[test]
fn refuses_relations_that_cannot_be_followed() {
    type Case = (fn(&mut CatalogRelation), &'static str);
    let cases: Vec<Case> = vec![
        (|r| r.kind = RelationKind::View, "is a view: only tables are in the stream"),
        (|r| r.kind = RelationKind::ForeignTable, "is a foreign table: only local tables are in the stream"),
        (|r| r.kind = RelationKind::MaterializedView, "is a materialized view: only tables are in the stream"),
        (|r| r.kind = RelationKind::Other, "is not a table"),
        (|r| r.persistence = Persistence::Unlogged, "is unlogged: it is not in the stream"),
        (|r| r.persistence = Persistence::Temporary, "is temporary: it is not in the stream"),
        (|r| r.has_children = true, "has tables that inherit from it: configure them as tables of their own instead"),
        (|r| r.primary_key = None, "has no primary key"),
        (
            |r| r.primary_key = Some(PrimaryKey { columns: vec![1, 2], deferrable: false }),
            "has a primary key of 2 columns: it must have one",
        ),
        (
            |r| r.primary_key = Some(PrimaryKey { columns: vec![2], deferrable: true }),
            "has a deferrable primary key, which identifies no row in the stream",
        ),
        (
            |r| r.row_security_applies = true,
            "has row-level security that applies to this role: rows would be missing; grant it BYPASSRLS",
        ),
    ];
    for (change, reason) in cases {
        let mut relation = documents();
        change(&mut relation);
        assert_eq!(problems(relation, PLAIN), [format!("line 1: relation public.documents {reason}")]);
    }
    let identity = |replica_identity| problems(CatalogRelation { replica_identity, ..documents() }, PLAIN);
    assert_eq!(identity(ReplicaIdentity::Full), [""; 0]);
    assert_eq!(identity(ReplicaIdentity::Index(vec![2])), [""; 0]);
    let refused =
        |reason: &str| [format!("line 1: relation public.documents: its replica identity {reason}; set it to DEFAULT")];
    assert_eq!(identity(ReplicaIdentity::Index(vec![1])), refused("is an index on other columns than the primary key"));
    assert_eq!(identity(ReplicaIdentity::Nothing), refused("is NOTHING"));
    assert_eq!(
        problems(documents(), "tables: [{relation: public.other}]"),
        ["line 1: relation public.other does not exist"]
    );
    let config = SyncConfig::parse(PLAIN).expect("a file");
    let old = Catalog { server_version: 130_009, relations: vec![documents()] };
    assert!(Registry::resolve(&config, &old, None).is_err());
}

#[test]
fn refuses_names_and_types_that_do_not_fit() {
    let yaml = "tables:
  - relation: public.documents
    columns: [title, nothing, double, mood]
    types: {title: int, mood: decimal, owner_id: string}
    read_only: [gone]
    lifecycle: {created_at: title, deleted_at: updated_at}";
    assert_eq!(
        problems(documents(), yaml),
        [
            "line 3: columns of public.documents lack its key id",
            "line 3: columns: column double of public.documents is generated, and PostgreSQL leaves such columns out of the stream",
            "line 3: columns: column nothing of public.documents does not exist",
            "line 4: types: column mood of public.documents (text) cannot be decimal: it can be string",
            "line 4: types: column owner_id of public.documents is not among its columns",
            "line 4: types: column title of public.documents (text) cannot be int: it can be string",
            "line 5: read_only: column gone of public.documents does not exist",
            "line 6: lifecycle: created_at names title, which is not a datetime",
            "line 6: lifecycle: deleted_at names updated_at, which is not among the columns",
        ]
    );
    let mut reserved = documents();
    reserved.columns[0].name = "tributary_x".to_owned();
    assert_eq!(
        problems(reserved, PLAIN),
        ["line 1: column public.documents.tributary_x: names beginning with tributary_ are reserved"]
    );
}

#[test]
fn refuses_what_rules_may_not_ask() {
    let of = |filter: &str| {
        let yaml = format!("{PLAIN}\nscopes:\n  - scope: s\n    rows: SELECT * FROM documents WHERE {filter}");
        problems(documents(), &yaml)
    };
    for fine in [
        "mood = 'happy'",
        "'sad' <> mood",
        "mood IN ('happy', 'sad')",
        "mood IS NULL AND email IS NOT NULL",
        "email::text LIKE '%x'",
        "lower(cast(mood as text)) = 'x'",
        "amount > 3",
    ] {
        assert_eq!(of(fine), [""; 0], "{fine}");
    }
    for (filter, reason) in [
        ("nothing = 1", "line 1, column 31 of the SQL: column nothing does not exist"),
        ("mood > 'happy'", "column mood is an enum"),
        ("mood || 'x' = 'y'", "column mood is an enum"),
        ("email = 'a'", "column email has a type that is kept as text"),
        ("double = 1", "column double is generated"),
    ] {
        let found = of(filter);
        assert!(
            found.len() == 1 && found[0].starts_with("line 3: ") && found[0].contains(reason),
            "{filter}: {found:?}"
        );
    }
}

#[test]
fn table_numbers_stay_and_are_never_used_twice() {
    let relation = |name: &str| CatalogRelation { name: name.parse().expect(name), ..documents() };
    let catalog = Catalog { server_version: 150_000, relations: ["a.a", "a.b", "a.c", "a.d"].map(relation).to_vec() };
    let resolve = |names: &[&str], previous: Option<&Registry>| {
        let tables: Vec<String> = names.iter().map(|name| format!("\n  - relation: {name}")).collect();
        let config = SyncConfig::parse(&format!("tables:{}", tables.concat())).expect("a file");
        Registry::resolve(&config, &catalog, previous).expect("resolves").0
    };
    let numbers = |registry: &Registry| registry.tables.iter().map(|table| table.table_no).collect::<Vec<_>>();
    let first = resolve(&["a.a", "a.b"], None);
    assert_eq!(numbers(&first), [1, 2]);
    let second = resolve(&["a.c", "a.a"], Some(&first));
    assert_eq!(numbers(&second), [3, 1]);
    let third = resolve(&["a.a"], Some(&second));
    assert_eq!(numbers(&resolve(&["a.d", "a.b", "a.a"], Some(&third))), [4, 5, 1]);
}

#[test]
fn capture_only_tables_are_not_delivered() {
    let yaml = "tables: [{relation: public.documents, capture_only: true, columns: [title]}]";
    let (registry, warnings) = resolve_with(documents(), yaml).expect("resolves");
    let names: Vec<&str> = registry.tables[0].columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["title", "id"]);
    assert!(registry.tables[0].columns.iter().all(|column| !column.delivered));
    assert!(registry.manifest_tables().is_empty() && warnings.is_empty());
}

#[test]
fn warns_of_scopes_that_do_not_meet() {
    let yaml = format!(
        "{PLAIN}\nscopes:\n  - scope: 'user:{{owner_id}}'\n    rows: SELECT * FROM documents\nassignments:\n  - scope: 'usr:{{user_id}}'"
    );
    let (_, warnings) = resolve_with(documents(), &yaml).expect("resolves");
    let of_line =
        |line: usize| warnings.iter().find(|warning| warning.line == line).map(|warning| warning.message.as_str());
    assert_eq!(of_line(3), Some("no assignment gives the scope user:{owner_id}"));
    assert_eq!(of_line(6), Some("no rule gives the scope usr:{user_id}"));
}

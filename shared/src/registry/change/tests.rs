use super::*;
use crate::registry::SyncConfig;
use crate::registry::catalog::{
    Catalog, CatalogColumn, CatalogRelation, Collation, ColumnType, Persistence, PrimaryKey, RelationKind,
    ReplicaIdentity, TypeClass,
};

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

fn relation(name: &str, columns: Vec<CatalogColumn>) -> CatalogRelation {
    CatalogRelation {
        name: name.parse().expect("a name"),
        oid: 1,
        kind: RelationKind::Table,
        persistence: Persistence::Permanent,
        replica_identity: ReplicaIdentity::Default,
        primary_key: Some(PrimaryKey { columns: vec![1], deferrable: false }),
        row_security_applies: false,
        has_children: false,
        readable: true,
        columns,
    }
}

fn catalog() -> Vec<CatalogRelation> {
    let columns =
        || vec![column(1, "id", 23, "integer"), column(2, "owner", 25, "text"), column(3, "title", 25, "text")];
    vec![relation("public.a", columns()), relation("public.b", columns())]
}

fn resolve(relations: Vec<CatalogRelation>, yaml: &str, previous: Option<&Registry>) -> Registry {
    let config = SyncConfig::parse(yaml).expect(yaml);
    let catalog = Catalog { server_version: 150_000, relations };
    Registry::resolve(&config, &catalog, previous).expect("resolves").0
}

const BEFORE: &str = "
tables: [{relation: public.a, columns: [id, owner]}, {relation: public.b}]
scopes:
  - {scope: 'a:{owner}', rows: SELECT * FROM a}
  - {scope: 'b:{owner}', rows: SELECT * FROM b}
assignments:
  - {scope: 'a:{user_id}'}";

fn change(relations: Vec<CatalogRelation>, yaml: &str) -> Change {
    let old = resolve(catalog(), BEFORE, None);
    Change::between(&old, &resolve(relations, yaml, Some(&old)))
}

fn classes(change: &Change) -> Option<(TransitionClass, Vec<&str>)> {
    let schema = change.schema.as_ref()?;
    Some((schema.class, schema.affected_tables.iter().map(String::as_str).collect()))
}

#[test]
fn the_same_file_changes_nothing() {
    let change = change(catalog(), BEFORE);
    assert!(change.is_empty(), "{change}");
    assert_eq!(change.to_string(), "nothing differs from the configuration in force\n");
}

#[test]
fn a_column_that_nobody_names_changes_nothing() {
    let mut relations = catalog();
    relations[0].columns.insert(1, column(9, "more", 25, "text"));
    assert!(change(relations, BEFORE).is_empty());
}

#[test]
fn a_new_column_copies_its_table_alone() {
    let change = change(catalog(), &BEFORE.replace("[id, owner]", "[id, owner, title]"));
    let [table] = change.tables.as_slice() else { panic!("{change}") };
    assert_eq!((table.relation.as_str(), table.action), ("public.a", TableAction::Copied));
    assert_eq!(table.why, ["column title is new"]);
    assert_eq!(change.scopes, ["a:{owner}"]);
    assert_eq!(classes(&change), Some((TransitionClass::Class3, vec!["a"])));
    assert!(!change.assignments && change.rules_added.is_empty() && change.rules_removed.is_empty());
}

#[test]
fn a_retyped_column_is_copied_and_incompatible() {
    let mut relations = catalog();
    relations[1].columns[2] = column(3, "title", 23, "integer");
    let change = change(relations, BEFORE);
    assert_eq!(change.tables[0].why, ["column title has another type"]);
    assert_eq!(change.scopes, ["b:{owner}"]);
    assert_eq!(classes(&change), Some((TransitionClass::Class4, vec!["b"])));
}

#[test]
fn a_removed_table_takes_its_rules_along() {
    let yaml =
        BEFORE.replace(", {relation: public.b}", "").replace("  - {scope: 'b:{owner}', rows: SELECT * FROM b}\n", "");
    let change = change(catalog(), &yaml);
    assert_eq!(change.tables[0].action, TableAction::Removed);
    assert_eq!(change.rules_removed, ["b:{owner}"]);
    assert_eq!(classes(&change), Some((TransitionClass::Class4, vec!["b"])));
}

#[test]
fn an_added_table_is_of_class_2() {
    let mut relations = catalog();
    relations.push(relation("public.c", vec![column(1, "id", 23, "integer"), column(2, "owner", 25, "text")]));
    let yaml = BEFORE
        .replace("{relation: public.b}]", "{relation: public.b}, {relation: public.c}]")
        .replace("assignments:", "  - {scope: 'a:{owner}', rows: SELECT * FROM c}\nassignments:");
    let change = change(relations, &yaml);
    assert_eq!(change.tables[0].action, TableAction::Added);
    assert_eq!(
        (change.rules_added.as_slice(), change.scopes.as_slice()),
        (&["a:{owner}".to_owned()][..], &["a:{owner}".to_owned()][..])
    );
    assert_eq!(classes(&change), Some((TransitionClass::Class2, vec![])));
}

#[test]
fn a_rule_moves_its_own_scopes_alone() {
    let yaml = BEFORE.replace("SELECT * FROM b}", "SELECT * FROM b WHERE owner <> 'x'}");
    let change = change(catalog(), &yaml);
    assert!(change.tables.is_empty() && change.schema.is_none(), "{change}");
    assert_eq!((change.rules_added.len(), change.rules_removed.len()), (1, 1));
    assert_eq!(change.scopes, ["b:{owner}"]);
}

#[test]
fn a_rule_that_reads_a_new_column_copies_the_table() {
    let yaml = BEFORE.replace("SELECT * FROM b}", "SELECT * FROM b WHERE title = 'x'}");
    assert_eq!(change(catalog(), &yaml).tables[0].why, ["column title is read by a rule or an assignment now"]);
}

#[test]
fn assignments_move_no_scope() {
    let change = change(catalog(), &format!("{BEFORE}\n  - {{scope: 'b:{{user_id}}'}}"));
    assert!(change.assignments && change.tables.is_empty() && change.scopes.is_empty() && change.schema.is_none());
}

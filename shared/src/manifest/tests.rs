use proptest::prelude::*;
use serde_json::Value as Json;

use super::*;

fn vectors() -> Json {
    serde_json::from_str(include_str!("../../../tests/data/vectors.json")).unwrap()
}

pub(super) fn field(id: &str, kind: PortableType) -> Field {
    Field { field_id: id.into(), name: id.into(), kind, nullable: false, writable: true, precision: None, scale: None }
}

pub(super) fn table(id: &str) -> Table {
    Table {
        table_id: id.into(),
        relation_id: format!("rel_{id}"),
        name: id.into(),
        composition: Composition::SingleScope,
        primary_key_field_id: "id".into(),
        lifecycle: Lifecycle::default(),
        fields: vec![
            field("id", PortableType::String),
            field("at", PortableType::Datetime),
            Field { precision: Some(6), scale: Some(2), ..field("price", PortableType::Decimal) },
            Field { nullable: true, ..field("note", PortableType::String) },
        ],
        indexes: [],
    }
}

#[test]
fn published_manifest_has_its_hash() {
    let vectors = vectors();
    let document = vectors["manifest"]["json"].as_str().unwrap();
    let expected = vectors["manifest"]["schema_hash"].as_str().unwrap();
    let manifest = Manifest::from_json(document).unwrap();
    assert_eq!(manifest.hash().to_string(), expected);
    assert_eq!(Manifest::from_json(&manifest.to_json()), Ok(manifest.clone()));
    // The same tables, in any order, are the same initial manifest.
    let mut tables = manifest.tables().to_vec();
    tables.reverse();
    assert_eq!(Manifest::initial(tables), Ok(manifest));
    assert_eq!(Manifest::from_json(&document.replace("collision", "Collision")), Err(ManifestError::Hash));
}

#[test]
fn document_has_exactly_the_members_of_the_contract() {
    let manifest = Manifest::initial(vec![table("t")]).unwrap();
    let member = |name: &str| manifest.to_json().find(&format!("\"{name}\"")).unwrap();
    let order = [
        "schema_version",
        "schema_hash",
        "parent_schema",
        "transition_class",
        "compatibility_floor",
        "tables",
        "table_id",
        "relation_id",
        "composition",
        "primary_key_field_id",
        "lifecycle",
        "created_at_field_id",
        "fields",
        "indexes",
    ];
    assert!(order.is_sorted_by_key(|name| member(name)));
    let json: Json = serde_json::from_str(&manifest.to_json()).unwrap();
    assert_eq!(json["transition_class"], "initial");
    assert_eq!(json["parent_schema"], Json::Null);
    assert_eq!(json["tables"][0]["indexes"], Json::Array(vec![]));
    let fields = &json["tables"][0]["fields"];
    assert_eq!(fields[0]["field_id"], "at", "fields are in UTF-8 order");
    assert!(fields[0].get("precision").is_none() && fields[0].get("scale").is_none());
    assert_eq!((&fields[3]["precision"], &fields[3]["scale"]), (&6.into(), &2.into()));
    for missing in ["parent_schema", "schema_hash", "tables"] {
        let mut without = json.clone();
        without.as_object_mut().unwrap().remove(missing);
        assert_eq!(Manifest::from_json(&without.to_string()), Err(ManifestError::Json), "{missing}");
    }
}

#[test]
fn tables_that_are_not_a_manifest() {
    type Change = fn(&mut Vec<Table>);
    let cases: [(ManifestError, Change); 8] = [
        (ManifestError::DuplicateId, |t| t.push(table("t"))),
        (ManifestError::DuplicateId, |t| t[0].fields.push(field("id", PortableType::Int))),
        (ManifestError::EmptyId, |t| t[0].name.clear()),
        (ManifestError::EmptyId, |t| t[0].fields[1].name.clear()),
        (ManifestError::NoSuchField, |t| t[0].primary_key_field_id = "none".into()),
        (ManifestError::NoSuchField, |t| t[0].lifecycle.updated_at_field_id = Some("none".into())),
        (ManifestError::NullableKey, |t| t[0].fields[0].nullable = true),
        (ManifestError::NotDecimal, |t| t[0].fields[1].scale = Some(1)),
    ];
    for (error, change) in cases {
        let mut tables = vec![table("t")];
        change(&mut tables);
        assert_eq!(Manifest::initial(tables), Err(error));
    }
}

#[test]
fn transitions_have_the_class_of_what_they_ask() {
    use TransitionClass::{Class2, Class3, Class4};
    type Change = fn(&mut Vec<Table>);
    // Fields by index: id, at, price numeric(6, 2), note (nullable).
    let cases: [(&str, TransitionClass, Change); 22] = [
        ("table added", Class2, |t| t.push(table("u"))),
        ("lifecycle named", Class2, |t| t[0].lifecycle.updated_at_field_id = Some("at".into())),
        ("nullable", Class2, |t| t[0].fields[1].nullable = true),
        ("writable", Class2, |t| t[0].fields[1].writable = false),
        ("precision widened", Class2, |t| t[0].fields[2].precision = Some(7)),
        ("bounds gone", Class2, |t| (t[0].fields[2].precision, t[0].fields[2].scale) = (None, None)),
        ("both widened", Class2, |t| (t[0].fields[2].precision, t[0].fields[2].scale) = (Some(7), Some(3))),
        ("field added", Class3, |t| t[0].fields.push(field("new", PortableType::Int))),
        ("nullable field added", Class3, |t| {
            t[0].fields.push(Field { nullable: true, ..field("new", PortableType::Int) });
        }),
        ("relation", Class3, |t| t[0].relation_id = "other".into()),
        ("table name", Class3, |t| t[0].name = "other".into()),
        ("composition", Class3, |t| t[0].composition = Composition::MultiScope),
        ("field name", Class3, |t| t[0].fields[1].name = "other".into()),
        ("not nullable", Class3, |t| t[0].fields[3].nullable = false),
        ("lifecycle moved", Class3, |t| t[0].lifecycle.created_at_field_id = Some("note".into())),
        ("lifecycle gone", Class3, |t| t[0].lifecycle.created_at_field_id = None),
        ("table removed", Class4, Vec::clear),
        ("table replaced", Class4, |t| t[0].table_id = "u".into()),
        ("field removed", Class4, |t| t[0].fields.truncate(3)),
        ("field retyped", Class4, |t| t[0].fields[3].kind = PortableType::Json),
        // Fewer digits before the point: numeric(6, 3).
        ("whole digits narrowed", Class4, |t| t[0].fields[2].scale = Some(3)),
        ("another key", Class4, |t| t[0].primary_key_field_id = "at".into()),
    ];
    let mut old = vec![table("t")];
    old[0].lifecycle.created_at_field_id = Some("at".into());
    let first = Manifest::initial(old.clone()).unwrap();
    assert_eq!(first.successor(old.clone()), Ok(None));
    for (case, class, change) in cases {
        let mut tables = old.clone();
        change(&mut tables);
        let transition = classify(&old, &tables).unwrap();
        assert_eq!(transition.class, class, "{case}");
        assert_eq!(transition.affected.contains("t"), class > Class2, "{case}");
        let next = first.successor(tables).unwrap().unwrap();
        assert_eq!((next.transition_class(), next.version(), next.parent()), (class, 2, Some(first.reference())));
        assert_eq!(next.compatibility_floor(), if class == Class2 { 1 } else { 2 }, "{case}");
    }
}

#[test]
fn compatibility_floor_is_where_the_class_2_lineage_began() {
    let mut tables = vec![table("t")];
    let mut manifest = Manifest::initial(tables.clone()).unwrap();
    let mut floors = vec![manifest.compatibility_floor()];
    for step in ["a", "b", "+", "c", "d"] {
        if step == "+" {
            tables[0].fields.push(field("new", PortableType::Int));
        } else {
            tables.push(table(step));
        }
        manifest = manifest.successor(tables.clone()).unwrap().unwrap();
        floors.push(manifest.compatibility_floor());
    }
    assert_eq!(floors, [1, 1, 1, 4, 4, 4]);
}

proptest! {
    #[test]
    fn widening_bounds_keep_every_value(
        old in (prop::option::of(0u32..5), prop::option::of(0u32..5)),
        new in (prop::option::of(0u32..5), prop::option::of(0u32..5)),
    ) {
        use crate::portable::Value;
        let with = |(precision, scale)| Field { precision, scale, ..field("d", PortableType::Decimal) };
        let (old, new) = (with(old), with(new));
        if widens(&old, &new) {
            for whole in ["0", "-1", "12", "123", "1234", "123456"] {
                for fraction in ["", ".1", ".12", ".123", ".1234", ".123456"] {
                    let raw = format!("\"{whole}{fraction}\"");
                    if Value::from_wire(&old.field_type(), &raw).is_ok() {
                        prop_assert!(Value::from_wire(&new.field_type(), &raw).is_ok(), "{}", raw);
                    }
                }
            }
        }
    }
}

use proptest::prelude::*;
use serde_json::Value as Json;

use super::*;
use crate::digest::{ScopeDigester, hex};
use crate::manifest::Manifest;
use crate::portable::PortableType;

fn vectors() -> Json {
    serde_json::from_str(include_str!("../../../tests/data/vectors.json")).unwrap()
}

fn encoder(manifest: &Manifest, table_id: &str) -> RowEncoder {
    let table = manifest.table(table_id).unwrap();
    let fields = table
        .fields
        .iter()
        .enumerate()
        .map(|(column, f)| EncodedField { field_id: f.field_id.clone(), field_type: f.field_type(), column })
        .collect();
    RowEncoder::new(table_id, &table.primary_key_field_id, fields).unwrap()
}

#[test]
fn published_row_has_its_identity_and_digest() {
    let vectors = vectors();
    let manifest = Manifest::from_json(vectors["manifest"]["json"].as_str().unwrap()).unwrap();
    let expected = &vectors["row_digest"];
    let table_id = expected["table_id"].as_str().unwrap();
    let table = manifest.table(table_id).unwrap();
    let encoder = encoder(&manifest, table_id);
    let version = expected["server_version"].as_str().unwrap();

    let wire = wire_fields(expected["row_json"].as_str().unwrap()).unwrap();
    let row: Vec<_> = table.fields.iter().map(|f| FieldSource::Wire(wire.get(&f.field_id).unwrap())).collect();
    let encoded = encoder.encode(&row, manifest.hash().octets(), version).unwrap();
    assert_eq!(hex(&encoded.digest), expected["digest"].as_str().unwrap());
    let identity = row_identity(table_id, &table.primary_key_field_id, &encoded.key);
    assert_eq!(hex(&identity), expected["row_identity_hex"].as_str().unwrap());
    let (sent, given): (Json, Json) = (
        serde_json::from_str(&encoded.wire).unwrap(),
        serde_json::from_str(expected["row_json"].as_str().unwrap()).unwrap(),
    );
    assert_eq!(sent, given);

    // The same row as PostgreSQL writes it.
    let text = |field_id: &str| match field_id {
        "fld_bool" => "t",
        "fld_bytes" => "\\x00ff",
        "fld_date" => "2024-02-29",
        "fld_dec" => "12.34",
        "fld_dt" => "2024-02-29 12:34:56.123456+00",
        "fld_float" => "0.1",
        "fld_i64" => "9007199254740991",
        "fld_id" => "row-α",
        "fld_int" => "-2147483648",
        "fld_json" => r#"{"z": [true, null], "a": 1}"#,
        "fld_text" => "e\u{301}",
        "fld_time" => "23:59:59.999999",
        other => panic!("{other}"),
    };
    let row: Vec<_> = table.fields.iter().map(|f| FieldSource::Text(text(&f.field_id))).collect();
    assert_eq!(encoder.encode(&row, manifest.hash().octets(), version), Ok(encoded.clone()));
    assert_ne!(encoder.encode(&row, &[0; 32], version).unwrap().digest, encoded.digest);
    assert_ne!(encoder.encode(&row, manifest.hash().octets(), "other").unwrap().digest, encoded.digest);
    assert_eq!(encoder.key_json(&encoded.key).as_deref(), Ok(r#"{"fld_id":"row-α"}"#));
}

/// A table `t` with key `id` (int) in column 1 and `note` (nullable string) in column 0.
fn small(table_id: &str) -> RowEncoder {
    let field = |field_id: &str, kind, nullable, column| EncodedField {
        field_id: field_id.into(),
        field_type: FieldType::new(kind, nullable),
        column,
    };
    let fields = vec![field("note", PortableType::String, true, 0), field("id", PortableType::Int, true, 1)];
    RowEncoder::new(table_id, "id", fields).unwrap()
}

#[test]
fn refused_fields_are_named_and_values_are_not() {
    let encoder = small("t");
    let encode = |row: &[FieldSource<'_>]| encoder.encode(row, &[0; 32], "v").map(|row| row.wire);
    let refused = |field_id: &str, reason| Err(FieldError { field_id: field_id.into(), reason });
    assert_eq!(encode(&[FieldSource::Null, FieldSource::Text("7")]).as_deref(), Ok(r#"{"id":7,"note":null}"#));
    assert_eq!(encode(&[FieldSource::Null, FieldSource::Null]), refused("id", ValueError::Null));
    assert_eq!(encode(&[FieldSource::Null, FieldSource::Wire("null")]), refused("id", ValueError::Null));
    assert_eq!(encode(&[FieldSource::Null]), refused("id", ValueError::Missing));
    assert_eq!(
        encode(&[FieldSource::Wire("1"), FieldSource::Text("7")]),
        refused("note", ValueError::NotCanonical(PortableType::String))
    );
    let error = encode(&[FieldSource::Null, FieldSource::Text("31337x")]).unwrap_err();
    assert_eq!(error.to_string(), "field id: not a text of type int");
}

#[test]
fn encoders_need_their_key_and_distinct_fields() {
    let field = |id: &str| EncodedField {
        field_id: id.into(),
        field_type: FieldType::new(PortableType::Int, false),
        column: 0,
    };
    assert_eq!(RowEncoder::new("t", "id", vec![field("a")]).err(), Some(EncoderError::NoKey));
    assert_eq!(RowEncoder::new("t", "a", vec![field("a"), field("a")]).err(), Some(EncoderError::DuplicateField));
}

#[test]
fn stored_keys_that_are_not_keys_are_refused() {
    let encoder = small("t");
    assert_eq!(encoder.key_json(&[2, 1, 0xFF, 0xFF, 0xFF, 0xFF]).as_deref(), Ok(r#"{"id":-1}"#));
    for octets in [&[][..], &[2], &[2, 0], &[2, 1, 0], &[1, 1, 0, 0, 0, 0], &[2, 1, 0, 0, 0, 0, 0]] {
        assert!(encoder.key_json(octets).is_err(), "{octets:?}");
    }
}

/// Delimiters would confuse `tbl_a` + `fld_bc` with `tbl_af` + `ld_bc`.
#[test]
fn identities_of_different_tables_never_meet() {
    let key = small("t").key_octets(FieldSource::Text("1")).unwrap();
    assert_ne!(row_identity("tbl_a", "fld_bc", &key), row_identity("tbl_af", "ld_bc", &key));
}

#[test]
fn wire_fields_reads_raw_members() {
    let fields = wire_fields(r#"{"a":{"x":[1, 2]},"\u00e9\"":"\u0065","n":1.50}"#).unwrap();
    assert_eq!(fields.get("a"), Some(r#"{"x":[1, 2]}"#));
    assert_eq!(fields.get("é\""), Some(r#""\u0065""#));
    assert_eq!(fields.get("n"), Some("1.50"));
    assert_eq!(fields.get("b"), None);
    assert_eq!(fields.len(), 3);
    for wire in ["", "[]", "null", "{", "{\"a\":}"] {
        assert!(wire_fields(wire).is_err(), "{wire}");
    }
}

proptest! {
    /// What is stored of a row encodes to the same row again, whichever columns are read back.
    #[test]
    fn unchanged_columns_read_back(note in prop::option::of("[^\0]{0,12}"), id: i32, from_wire: bool) {
        let encoder = small("t\"é");
        let id = id.to_string();
        let note = note.as_deref().map_or(FieldSource::Null, FieldSource::Text);
        let first = encoder.encode(&[note, FieldSource::Text(&id)], &[3; 32], "v").unwrap();
        let stored = wire_fields(&first.wire).unwrap();
        let key = if from_wire { FieldSource::Wire(stored.get("id").unwrap()) } else { FieldSource::Text(&id) };
        let again = encoder.encode(&[FieldSource::Wire(stored.get("note").unwrap()), key], &[3; 32], "v").unwrap();
        prop_assert_eq!(again, first);
    }

    /// Rows are digested in the unsigned order of whole identities, across tables of a scope too; ordering by
    /// (prefix, key octets) is the same order.
    #[test]
    fn identities_order_by_prefix_then_key(rows in prop::collection::btree_set(("[a-c]{1,3}", "[i-k]{1,2}", any::<i32>()), 1..20)) {
        let mut split: Vec<_> = rows
            .iter()
            .map(|(table, pk, id)| {
                let octets = [&[2, 1][..], &id.to_be_bytes()].concat();
                (IdentityPrefix::new(table, pk), octets)
            })
            .collect();
        split.sort_by(|(a, x), (b, y)| (a.octets(), x).cmp(&(b.octets(), y)));
        let mut digester = ScopeDigester::new(&[0; 32], "s", split.len() as u64);
        let mut identity = Vec::new();
        for (prefix, key) in &split {
            prefix.identity_into(key, &mut identity);
            prop_assert_eq!(&identity, &prefix.identity(key));
            prop_assert_eq!(digester.row(&identity, &[0; 32]), Ok(()));
        }
        prop_assert!(digester.finish().is_ok());
    }
}

use proptest::prelude::*;
use serde_json::Value as Json;

use super::*;
use crate::digest::hex;

fn vectors() -> Json {
    serde_json::from_str(include_str!("../../../tests/data/vectors.json")).unwrap()
}

fn field(vector: &Json) -> FieldType {
    let bound = |name: &str| vector.get(name).map(|n| u32::try_from(n.as_u64().unwrap()).unwrap());
    FieldType {
        kind: serde_json::from_value(vector["type"].clone()).unwrap(),
        nullable: true,
        precision: bound("precision"),
        scale: bound("scale"),
    }
}

fn octets(value: &Value<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    value.write_octets(&mut out);
    out
}

fn json(value: &Value<'_>) -> String {
    let mut out = String::new();
    value.write_json(&mut out);
    out
}

#[test]
fn published_values_have_their_octets() {
    let vectors = vectors();
    for vector in vectors["typed"].as_array().unwrap() {
        let field = field(vector);
        let value = Value::from_wire(&field, vector["json"].as_str().unwrap()).unwrap();
        let canonical = octets(&value);
        assert_eq!(hex(&canonical), vector["octets_hex"].as_str().unwrap(), "{vector}");
        let back = Value::from_octets(field.kind, &canonical).unwrap();
        assert_eq!(back, value, "{vector}");
        assert_eq!(Value::from_wire(&field, &json(&back)), Ok(value), "{vector}");
    }
}

#[test]
fn published_invalid_values_are_refused() {
    let vectors = vectors();
    for vector in vectors["typed_invalid"].as_array().unwrap() {
        let value = Value::from_wire(&field(vector), vector["json"].as_str().unwrap());
        assert!(value.is_err(), "{vector} gives {value:?}");
    }
}

/// Portable type, PostgreSQL's text, wire JSON.
const POSTGRES_TEXTS: &[(PortableType, &str, &str)] = {
    use PortableType::{Boolean, Bytes, Date, Datetime, Decimal, Float, Int, Int64, Json, String, Time};
    &[
        (String, "", r#""""#),
        (String, "a\"\\\n\u{1}é", r#""a\"\\\n\u0001é""#),
        (Int, "-7", "-7"),
        (Int64, "9223372036854775807", r#""9223372036854775807""#),
        (Decimal, "1.50", r#""1.5""#),
        (Decimal, "-0.00", r#""0""#),
        (Decimal, "0.00", r#""0""#),
        (Decimal, "-0.10", r#""-0.1""#),
        (Decimal, "100.00", r#""100""#),
        (Decimal, "100", r#""100""#),
        (Decimal, "123456789012345678901234567890.1", r#""123456789012345678901234567890.1""#),
        (Float, "-0", "0"),
        (Float, "1", "1"),
        // float4's shortest text denotes this binary64, not the binary32 widened.
        (Float, "0.1", "0.1"),
        (Float, "1e+06", "1000000"),
        (Float, "1e+21", "1e+21"),
        (Float, "1.5e-07", "1.5e-7"),
        (Float, "1.7976931348623157e+308", "1.7976931348623157e+308"),
        (Float, "5e-324", "5e-324"),
        (Boolean, "t", "true"),
        (Boolean, "f", "false"),
        (Datetime, "2024-02-29 12:34:56.1+00", r#""2024-02-29T12:34:56.100000Z""#),
        (Datetime, "2024-02-29 12:34:56+00", r#""2024-02-29T12:34:56.000000Z""#),
        (Datetime, "0001-01-01 00:00:00", r#""0001-01-01T00:00:00.000000Z""#),
        (Datetime, "9999-12-31 23:59:59.999999", r#""9999-12-31T23:59:59.999999Z""#),
        (Date, "2000-02-29", r#""2000-02-29""#),
        (Time, "00:00:00", r#""00:00:00.000000""#),
        (Time, "12:34:56.10203", r#""12:34:56.102030""#),
        (Json, "{\"b\": [1.0, \"\\u0000\"], \"a\": null}", r#""{\"a\":null,\"b\":[1,\"\\u0000\"]}""#),
        (Json, "null", r#""null""#),
        (Bytes, "\\x", r#""""#),
        (Bytes, "\\x00ff", r#""AP8""#),
    ]
};

#[test]
fn postgres_texts_become_wire_values() {
    for &(kind, text, wire) in POSTGRES_TEXTS {
        let field = FieldType::new(kind, false);
        let value = Value::from_postgres_text(&field, text).unwrap_or_else(|error| panic!("{kind} {text}: {error}"));
        assert_eq!(json(&value), wire, "{kind} {text}");
        // Octets too: they tell 0 and -0 apart.
        let from_wire = Value::from_wire(&field, wire).unwrap();
        assert_eq!((octets(&from_wire), &from_wire), (octets(&value), &value), "{kind} {text}");
    }
}

#[test]
fn octets_that_are_not_canonical_are_refused() {
    let blob = |tag: u8, content: &[u8]| {
        let mut out = vec![tag, 1];
        write_blob(content, &mut out);
        out
    };
    let float = |n: f64| [&[5, 1][..], &n.to_be_bytes()].concat();
    for (kind, given) in [
        (PortableType::Float, float(-0.0)),
        (PortableType::Float, float(f64::NAN)),
        (PortableType::Float, float(f64::INFINITY)),
        (PortableType::Boolean, vec![6, 1, 2]),
        (PortableType::String, blob(1, b"\xFF")),
        (PortableType::String, [blob(1, b"a"), vec![0]].concat()),
        (PortableType::String, vec![1, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]),
        (PortableType::String, vec![1, 2]),
        (PortableType::String, vec![1, 0, 0]),
        (PortableType::Decimal, blob(4, b"1.0")),
        (PortableType::Datetime, blob(7, b"2024-02-29T12:34:56Z")),
        (PortableType::Date, blob(8, b"2023-02-29")),
        (PortableType::Time, blob(9, b"24:00:00.000000")),
        (PortableType::Json, blob(10, b"{ }")),
        (PortableType::Int, vec![3, 1, 0, 0, 0, 0]),
    ] {
        assert_eq!(Value::from_octets(kind, &given), Err(ValueError::NotCanonical(kind)), "{given:?}");
    }
}

#[test]
fn postgres_texts_that_a_type_cannot_hold_are_refused() {
    use PortableType::{Boolean, Bytes, Date, Datetime, Decimal, Float, Int, Int64, Json, Time};
    use ValueError::{Inexact, JsonDuplicateName, JsonNumber, JsonSyntax, Malformed, NotFinite, OutOfRange};
    for (kind, text, error) in [
        (Int, "2147483648", OutOfRange(Int)),
        (Int, "1.0", Malformed(Int)),
        (Int, "", Malformed(Int)),
        (Int, "-0", Malformed(Int)),
        (Int64, "9223372036854775808", OutOfRange(Int64)),
        (Decimal, "NaN", NotFinite(Decimal)),
        (Decimal, "-Infinity", NotFinite(Decimal)),
        (Decimal, "1e5", Malformed(Decimal)),
        (Decimal, "1.", Malformed(Decimal)),
        (Decimal, ".5", Malformed(Decimal)),
        (Decimal, "00.5", Malformed(Decimal)),
        (Float, "NaN", NotFinite(Float)),
        (Float, "Infinity", NotFinite(Float)),
        (Float, "inf", Malformed(Float)),
        (Float, "1e400", OutOfRange(Float)),
        (Float, "1e-400", Inexact),
        (Float, "0.1000000000000000055", Inexact),
        (Boolean, "true", Malformed(Boolean)),
        (Datetime, "infinity", OutOfRange(Datetime)),
        (Datetime, "-infinity", OutOfRange(Datetime)),
        (Datetime, "10000-01-01 00:00:00+00", OutOfRange(Datetime)),
        (Datetime, "0044-03-15 00:00:00+00 BC", OutOfRange(Datetime)),
        (Datetime, "2024-02-29 12:34:56+01", Malformed(Datetime)),
        (Datetime, "2024-02-29T12:34:56", Malformed(Datetime)),
        (Datetime, "2024-02-29", Malformed(Datetime)),
        (Datetime, "29.02.2024 12:34:56", Malformed(Datetime)),
        (Datetime, "2024-02-é 12:34:56", Malformed(Datetime)),
        (Date, "infinity", OutOfRange(Date)),
        (Date, "10000-01-01", OutOfRange(Date)),
        (Date, "0044-03-15 BC", OutOfRange(Date)),
        (Date, "1900-02-29", OutOfRange(Date)),
        (Date, "02/29/2024", Malformed(Date)),
        (Time, "24:00:00", OutOfRange(Time)),
        (Time, "23:59:60", OutOfRange(Time)),
        (Time, "12:34", Malformed(Time)),
        (Time, "12:34:56.1234567", Malformed(Time)),
        (Time, "12:34:56.", Malformed(Time)),
        (Time, "12:34:56+00", Malformed(Time)),
        (Json, r#"{"a":1,"a":2}"#, JsonDuplicateName),
        (Json, "9007199254740993", JsonNumber),
        (Json, "1e400", JsonNumber),
        (Json, r#""\ud800""#, JsonSyntax),
        (Bytes, "\\x0", Malformed(Bytes)),
        (Bytes, "\\xGG", Malformed(Bytes)),
        (Bytes, "00", Malformed(Bytes)),
    ] {
        assert_eq!(Value::from_postgres_text(&FieldType::new(kind, true), text), Err(error), "{kind} {text}");
    }
}

#[test]
fn decimals_stay_within_what_is_declared() {
    let field = FieldType { precision: Some(6), scale: Some(2), ..FieldType::new(PortableType::Decimal, false) };
    let read = |text| Value::from_postgres_text(&field, text).map(|value| json(&value));
    assert_eq!(read("1234.50").as_deref(), Ok(r#""1234.5""#));
    assert_eq!(read("0.120").as_deref(), Ok(r#""0.12""#));
    assert_eq!(read("12345.6"), Err(ValueError::Precision));
    assert_eq!(read("1.234"), Err(ValueError::Scale));
    let declared = |typmod| {
        let field = FieldType::new(PortableType::Decimal, false).with_numeric_typmod(typmod);
        (field.precision, field.scale)
    };
    assert_eq!(declared((6 << 16 | 2) + 4), (Some(6), Some(2)));
    assert_eq!(declared((1000 << 16 | 0x3E8) + 4), (Some(1000), Some(1000)));
    assert_eq!(declared(-1), (None, None));
    // numeric(3, -2) and numeric(2, 4)
    assert_eq!(declared((3 << 16 | 0x7FE) + 4), (None, None));
    assert_eq!(declared((2 << 16 | 4) + 4), (None, None));
}

#[test]
fn null_needs_a_nullable_field() {
    for kind in PortableType::ALL {
        assert_eq!(Value::from_wire(&FieldType::new(kind, false), "null"), Err(ValueError::Null));
        assert_eq!(Value::null(&FieldType::new(kind, false)), Err(ValueError::Null));
        let null = Value::null(&FieldType::new(kind, true)).unwrap();
        assert_eq!((octets(&null), json(&null)), (vec![kind.tag(), 0], "null".to_owned()));
    }
}

#[test]
fn types_have_one_name_and_tag() {
    for (i, kind) in PortableType::ALL.into_iter().enumerate() {
        assert_eq!(usize::from(kind.tag()), i + 1);
        assert_eq!(PortableType::from_tag(kind.tag()), Some(kind));
        assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
    }
    assert_eq!((PortableType::from_tag(0), PortableType::from_tag(12)), (None, None));
}

/// OIDs as `pg_type` has them.
#[test]
fn types_without_a_mapping_are_text() {
    use tokio_postgres::types::Type;
    for (pg, kind) in [
        (Type::INT2, PortableType::Int),
        (Type::INT4, PortableType::Int),
        (Type::INT8, PortableType::Int64),
        (Type::OID, PortableType::Int64),
        (Type::NUMERIC, PortableType::Decimal),
        (Type::FLOAT4, PortableType::Float),
        (Type::FLOAT8, PortableType::Float),
        (Type::BOOL, PortableType::Boolean),
        (Type::TIMESTAMPTZ, PortableType::Datetime),
        (Type::TIMESTAMP, PortableType::Datetime),
        (Type::DATE, PortableType::Date),
        (Type::TIME, PortableType::Time),
        (Type::JSON, PortableType::Json),
        (Type::JSONB, PortableType::Json),
        (Type::BYTEA, PortableType::Bytes),
        (Type::TEXT, PortableType::String),
        (Type::UUID, PortableType::String),
        (Type::INTERVAL, PortableType::String),
        (Type::TIMETZ, PortableType::String),
        (Type::INT4_ARRAY, PortableType::String),
        (Type::MONEY, PortableType::String),
    ] {
        assert_eq!(PortableType::default_for(pg.oid()), kind, "{pg}");
    }
}

/// A field and a text that PostgreSQL could write for it.
fn any_text() -> impl Strategy<Value = (FieldType, String)> {
    let of = |kind| FieldType::new(kind, true);
    let clock = (0..24u32, 0..60u32, 0..60u32, prop::option::of("[0-9]{1,6}")).prop_map(|(h, m, s, fraction)| {
        format!("{h:02}:{m:02}:{s:02}{}", fraction.map_or(String::new(), |f| format!(".{f}")))
    });
    let date = (1..=9999u32, 1..=12u32, 1..=28u32).prop_map(|(y, m, d)| format!("{y:04}-{m:02}-{d:02}"));
    prop_oneof![
        any::<String>().prop_map(move |text| (of(PortableType::String), text)),
        any::<i32>().prop_map(move |n| (of(PortableType::Int), n.to_string())),
        any::<i64>().prop_map(move |n| (of(PortableType::Int64), n.to_string())),
        "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,20})?"
            .prop_filter("PostgreSQL writes no -0", |text| text != "-0")
            .prop_map(move |text| (of(PortableType::Decimal), text)),
        prop::num::f64::ANY
            .prop_filter("finite", |n| n.is_finite())
            .prop_map(move |n| (of(PortableType::Float), format!("{n:e}"))),
        any::<bool>().prop_map(move |b| (of(PortableType::Boolean), if b { "t" } else { "f" }.to_owned())),
        (date.clone(), clock.clone(), "(\\+00)?")
            .prop_map(move |(d, t, z)| (of(PortableType::Datetime), format!("{d} {t}{z}"))),
        date.prop_map(move |text| (of(PortableType::Date), text)),
        clock.prop_map(move |text| (of(PortableType::Time), text)),
        prop::collection::vec(any::<(String, i32)>(), 0..4).prop_map(move |members| {
            let object: serde_json::Map<_, _> = members.into_iter().map(|(k, v)| (k, v.into())).collect();
            (of(PortableType::Json), serde_json::to_string_pretty(&object).unwrap())
        }),
        prop::collection::vec(any::<u8>(), 0..40)
            .prop_map(move |octets| (of(PortableType::Bytes), format!("\\x{}", hex(&octets)))),
    ]
}

proptest! {
    #[test]
    fn every_form_holds_the_same_value((field, text) in any_text()) {
        let value = Value::from_postgres_text(&field, &text).unwrap();
        let (wire, canonical) = (json(&value), octets(&value));
        let from_wire = Value::from_wire(&field, &wire).unwrap();
        prop_assert_eq!(octets(&from_wire), &canonical[..]);
        prop_assert_eq!(&from_wire, &value);
        let from_octets = Value::from_octets(field.kind, &canonical).unwrap();
        prop_assert_eq!(json(&from_octets), wire);
        // A string's other spellings are the same value.
        let parsed: Json = serde_json::from_str(&json(&value)).unwrap();
        if let Json::String(content) = parsed {
            let escaped: String = content.encode_utf16().flat_map(|unit| format!("\\u{unit:04x}").into_bytes()).map(char::from).collect();
            let spelled = format!("\"{escaped}\"");
            prop_assert_eq!(Value::from_wire(&field, &spelled), Ok(value));
        }
    }

    #[test]
    fn float_texts_keep_their_number(number in prop::num::f64::ANY.prop_filter("finite", |n| n.is_finite())) {
        let field = FieldType::new(PortableType::Float, false);
        let text = format!("{number:e}");
        let wire = json(&Value::from_postgres_text(&field, &text).unwrap());
        let read: f64 = wire.parse().unwrap();
        // Adding zero leaves every number but -0.
        prop_assert_eq!(read.to_bits(), (number + 0.0).to_bits());
    }

    #[test]
    fn no_octets_panic_and_all_that_pass_are_canonical(
        kind in prop::sample::select(&PortableType::ALL[..]),
        presence in 0..3u8,
        length in prop::option::of(0..12u64),
        payload in prop::collection::vec(any::<u8>(), 0..12),
    ) {
        let mut given = vec![kind.tag(), presence];
        given.extend(length.iter().flat_map(|n| n.to_be_bytes()));
        given.extend(&payload);
        if let Ok(value) = Value::from_octets(kind, &given) {
            prop_assert_eq!(octets(&value), given);
        }
    }

    #[test]
    fn no_text_panics(
        kind in prop::sample::select(&PortableType::ALL[..]),
        text in "[-+0-9.:eETZ tfx\"\\\\{}\u{e9}]{0,30}",
    ) {
        let field = FieldType::new(kind, true);
        for value in [Value::from_postgres_text(&field, &text), Value::from_wire(&field, &text)].into_iter().flatten() {
            let again = json(&value);
            prop_assert_eq!(Value::from_wire(&field, &again), Ok(value));
        }
    }
}

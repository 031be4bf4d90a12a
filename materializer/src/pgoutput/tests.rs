//! Messages built by hand from PostgreSQL's documentation of the format, apart from the parser's own encoder.

use tributary_shared::registry::SyncConfig;
use tributary_shared::registry::catalog::{
    Catalog, CatalogColumn, CatalogRelation, Collation, ColumnType, Persistence, PrimaryKey, RelationKind,
    ReplicaIdentity, TypeClass,
};

use super::*;

fn column(attnum: i16, name: &str, oid: u32, sql: &str) -> CatalogColumn {
    let modifier = if oid == 1700 { (10 << 16 | 2) + 4 } else { -1 };
    CatalogColumn {
        name: name.to_owned(),
        attnum,
        type_info: ColumnType {
            oid,
            modifier,
            base_oid: oid,
            base_modifier: modifier,
            sql: sql.to_owned(),
            class: TypeClass::Builtin,
            collation: Collation::Default,
        },
        not_null: attnum == 1,
        generated: false,
        identity_always: false,
    }
}

fn registry() -> Registry {
    let catalog = Catalog {
        server_version: 150_000,
        relations: vec![CatalogRelation {
            name: "public.t".parse().expect("a name"),
            oid: 7,
            kind: RelationKind::Table,
            persistence: Persistence::Permanent,
            replica_identity: ReplicaIdentity::Default,
            primary_key: Some(PrimaryKey { columns: vec![1], deferrable: false }),
            row_security_applies: false,
            has_children: false,
            readable: true,
            columns: vec![
                column(1, "id", 23, "integer"),
                column(2, "v", 25, "text"),
                column(3, "n", 1700, "numeric(10,2)"),
            ],
        }],
    };
    let config = SyncConfig::parse("tables: [{relation: public.t}]").expect("a configuration");
    Registry::resolve(&config, &catalog, None).expect("it fits").0
}

/// `(name, type oid, modifier, is key)`.
type Announced<'a> = (&'a str, u32, i32, bool);

const ID: Announced<'static> = ("id", 23, -1, true);
const V: Announced<'static> = ("v", 25, -1, false);
const N: Announced<'static> = ("n", 1700, (10 << 16 | 2) + 4, false);

fn relation(name: &str, identity: u8, columns: &[Announced<'_>]) -> Bytes {
    let mut out = vec![b'R'];
    out.extend(7u32.to_be_bytes());
    out.extend(b"public\0");
    out.extend(name.as_bytes());
    out.push(0);
    out.push(identity);
    out.extend((columns.len() as u16).to_be_bytes());
    for (name, oid, modifier, key) in columns {
        out.push(u8::from(*key));
        out.extend(name.as_bytes());
        out.push(0);
        out.extend(oid.to_be_bytes());
        out.extend(modifier.to_be_bytes());
    }
    out.into()
}

fn tuple(out: &mut Vec<u8>, values: &[&str]) {
    out.extend((values.len() as u16).to_be_bytes());
    for value in values {
        match *value {
            "null" => out.push(b'n'),
            "unchanged" => out.push(b'u'),
            text => {
                out.push(b't');
                out.extend((text.len() as u32).to_be_bytes());
                out.extend(text.as_bytes());
            }
        }
    }
}

fn row_message(kind: u8, parts: &[(u8, &[&str])]) -> Bytes {
    let mut out = vec![kind];
    out.extend(7u32.to_be_bytes());
    for (tag, values) in parts {
        out.push(*tag);
        tuple(&mut out, values);
    }
    out.into()
}

fn text(text: &str) -> Datum {
    Datum::Text(Bytes::copy_from_slice(text.as_bytes()))
}

fn announced(columns: &[Announced<'_>]) -> Decoder {
    let mut decoder = Decoder::new(&registry());
    assert_eq!(decoder.decode(relation("t", b'd', columns)), Ok(None));
    decoder
}

#[test]
fn rows_come_in_the_registrys_order_whatever_the_tables_is() {
    let mut decoder = announced(&[("new", 25, -1, false), N, ID, V]);
    let message = row_message(b'I', &[(b'N', &["x", "1.50", "1", "null"])]);
    let row = vec![text("1"), Datum::Null, text("1.50")];
    assert_eq!(decoder.decode(message), Ok(Some(Change::Insert { table: 0, row })));
}

#[test]
fn updates_tell_unchanged_from_null_and_carry_an_old_key() {
    let mut decoder = announced(&[ID, V, N]);
    let plain = row_message(b'U', &[(b'N', &["1", "unchanged", "null"])]);
    let row = vec![text("1"), Datum::Unchanged, Datum::Null];
    assert_eq!(decoder.decode(plain), Ok(Some(Change::Update { table: 0, old_key: None, row })));
    let keyed = row_message(b'U', &[(b'K', &["1", "null", "null"]), (b'N', &["2", "a", "null"])]);
    let row = vec![text("2"), text("a"), Datum::Null];
    let old_key = Some(vec![Bytes::from_static(b"1")]);
    assert_eq!(decoder.decode(keyed), Ok(Some(Change::Update { table: 0, old_key, row })));
}

#[test]
fn deletes_and_truncates() {
    let mut decoder = announced(&[ID, V, N]);
    let delete = row_message(b'D', &[(b'K', &["1", "null", "null"])]);
    assert_eq!(decoder.decode(delete), Ok(Some(Change::Delete { table: 0, key: vec![Bytes::from_static(b"1")] })));
    let mut truncate = vec![b'T'];
    truncate.extend(1u32.to_be_bytes());
    truncate.push(0);
    truncate.extend(7u32.to_be_bytes());
    assert_eq!(decoder.decode(truncate.into()), Ok(Some(Change::Truncate { tables: vec![0] })));
}

#[test]
fn a_relation_that_no_longer_matches_is_drift_before_a_row_is_read() {
    let cases: [(&str, Bytes); 7] = [
        ("column v was dropped or renamed", relation("t", b'd', &[ID, N])),
        ("column v was dropped or renamed", relation("t", b'd', &[ID, ("w", 25, -1, false), N])),
        ("column v has another type", relation("t", b'd', &[ID, ("v", 23, -1, false), N])),
        ("column n has another precision or scale", relation("t", b'd', &[ID, V, ("n", 1700, -1, false)])),
        ("its primary key or replica identity changed", relation("t", b'd', &[("id", 23, -1, false), V, N])),
        ("its primary key or replica identity changed", relation("t", b'd', &[ID, ("v", 25, -1, true), N])),
        ("its primary key or replica identity changed", relation("t", b'n', &[ID, V, N])),
    ];
    for (expected, message) in cases {
        let mut decoder = Decoder::new(&registry());
        match decoder.decode(message) {
            Err(DecodeError::Drift { detail, .. }) => assert_eq!(detail, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
    // Drift in the middle of a stream is found as well, and FULL is as good as DEFAULT.
    let mut decoder = announced(&[ID, V, N]);
    assert!(decoder.decode(relation("t", b'd', &[ID, N])).is_err());
    let all_keys = [ID, ("v", 25, -1, true), ("n", 1700, N.2, true)];
    assert_eq!(Decoder::new(&registry()).decode(relation("t", b'f', &all_keys)), Ok(None));
}

#[test]
fn a_partition_may_be_announced_but_changes_come_under_the_roots_name() {
    for stranger in ["t_low", "T"] {
        let mut decoder = Decoder::new(&registry());
        assert_eq!(decoder.decode(relation(stranger, b'n', &[ID])), Ok(None));
        let row = row_message(b'I', &[(b'N', &["1", "a", "null"])]);
        assert!(matches!(decoder.decode(row.clone()), Err(DecodeError::Drift { .. })));
        // The same number may be announced again, as what it is now.
        assert_eq!(decoder.decode(relation("t", b'd', &[ID, V, N])), Ok(None));
        assert!(decoder.decode(row).is_ok());
    }
}

#[test]
fn what_cannot_be_read_is_refused() {
    let mut decoder = announced(&[ID, V, N]);
    let mut not_utf8 = row_message(b'I', &[(b'N', &["1", "abc", "null"])]).to_vec();
    let at = not_utf8.len() - 2;
    not_utf8[at] = 0xFF;
    assert!(matches!(decoder.decode(not_utf8.into()), Err(DecodeError::BadRow { .. })));
    let no_key = row_message(b'D', &[(b'K', &["null", "null", "null"])]);
    assert!(matches!(decoder.decode(no_key), Err(DecodeError::BadRow { .. })));
    let short = row_message(b'I', &[(b'N', &["1"])]);
    assert!(matches!(decoder.decode(short), Err(DecodeError::BadRow { .. })));
    let mut unannounced = Decoder::new(&registry());
    let row = row_message(b'I', &[(b'N', &["1", "a", "null"])]);
    assert!(matches!(unannounced.decode(row.clone()), Err(DecodeError::Malformed(_))));
    for length in 0..row.len() {
        assert!(decoder.decode(row.slice(..length)).is_err(), "{length} octets of a row");
    }
}

//! Canonical octets and digests (contract.md sections 1 to 3), written from the contract alone.
//!
//! Deliberately absent: anything of `tributary-shared`. Two implementations that share no code can disagree, and a
//! disagreement is what the end-to-end tests look for.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

use crate::json::{Json, es6_number, is_integer};

const ROW_IDENTITY: &[u8] = b"synchro:v3:row-identity:v1\0";
const ROW_DIGEST: &[u8] = b"synchro:v3:row-digest:v1\0";
const SCOPE_DIGEST: &[u8] = b"synchro:v3:scope-digest:v1\0";
const SCHEMA_MANIFEST: &[u8] = b"synchro:v3:schema-manifest:v1\0";
const TYPES: [&str; 11] =
    ["string", "int", "int64", "decimal", "float", "boolean", "datetime", "date", "time", "json", "bytes"];

/// 32 octets of SHA-256.
pub type Digest = [u8; 32];

/// A value, row or manifest that is not exactly what the contract allows. Names the rule, never the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not canonical: {0}")]
pub struct NotCanonical(&'static str);

/// One field of a manifest's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// The column's name.
    pub name: String,
    /// The portable type's name.
    pub portable_type: String,
    /// Whether null is a value of it.
    pub nullable: bool,
    /// Declared precision and scale of a decimal.
    pub precision: Option<i64>,
    /// Digits after the point.
    pub scale: Option<i64>,
}

/// One table of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// `relation_id`
    pub relation_id: String,
    /// The field that is the key.
    pub primary_key: String,
    /// Fields by id; the map's order is the order of the row body.
    pub fields: BTreeMap<String, Field>,
}

/// A verified schema manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// `schema_version`
    pub version: i64,
    /// `schema_hash`, as hexadecimal text.
    pub hash: String,
    /// Tables by id.
    pub tables: BTreeMap<String, Table>,
    hash_octets: Digest,
}

impl Manifest {
    /// Read a manifest, refusing one whose shape or hash is not exact.
    ///
    /// # Errors
    /// Members are missing, unknown or ill-typed, or `schema_hash` is not the hash of the rest.
    pub fn parse(document: &Json) -> Result<Self, NotCanonical> {
        exact(
            document,
            &["schema_version", "schema_hash", "parent_schema", "transition_class", "compatibility_floor", "tables"],
            "manifest members",
        )?;
        let hash = text_of(document, "schema_hash")?;
        let hash_octets = schema_hash(document)?;
        if hash != hex(&hash_octets) {
            return Err(NotCanonical("schema_hash is not the manifest's hash"));
        }
        let version = int_of(document, "schema_version")?;
        let parent = document.get("parent_schema").filter(|parent| **parent != Json::Null);
        let class = text_of(document, "transition_class")?;
        if (class == "initial") != parent.is_none() || !["initial", "class_2", "class_3", "class_4"].contains(&class) {
            return Err(NotCanonical("transition_class"));
        }
        if let Some(parent) = parent {
            exact(parent, &["version", "hash"], "parent_schema")?;
        }
        let floor = int_of(document, "compatibility_floor")?;
        if version < 1 || floor < 1 || floor > version || (class != "class_2" && floor != version) {
            return Err(NotCanonical("schema_version and compatibility_floor"));
        }
        let mut tables = BTreeMap::new();
        for table in list_of(document, "tables")? {
            let id = text_of(table, "table_id")?;
            if tables.insert(id.to_owned(), Table::parse(table)?).is_some() {
                return Err(NotCanonical("one table_id twice"));
            }
        }
        Ok(Self { version, hash: hash.to_owned(), tables, hash_octets })
    }

    /// The table of this id.
    ///
    /// # Errors
    /// There is none.
    pub fn table(&self, table_id: &str) -> Result<&Table, NotCanonical> {
        self.tables.get(table_id).ok_or(NotCanonical("unknown table"))
    }

    /// `row_identity` of a key.
    ///
    /// # Errors
    /// The table is unknown, or the key is null or not canonical for its type.
    pub fn row_identity(&self, table_id: &str, key: &Json) -> Result<Vec<u8>, NotCanonical> {
        let table = self.table(table_id)?;
        let mut field = table.fields.get(&table.primary_key).ok_or(NotCanonical("key field"))?.clone();
        field.nullable = false;
        let mut out = ROW_IDENTITY.to_vec();
        put_text(&mut out, table_id);
        put_text(&mut out, &table.primary_key);
        field.put(&mut out, key)?;
        Ok(out)
    }

    /// `row_body` of a row.
    ///
    /// # Errors
    /// The row does not hold exactly the table's fields, or a value is not canonical.
    pub fn row_body(&self, table_id: &str, row: &Json) -> Result<Vec<u8>, NotCanonical> {
        let table = self.table(table_id)?;
        let row = row.as_object().ok_or(NotCanonical("a row is an object"))?;
        if !row.keys().eq(table.fields.keys()) {
            return Err(NotCanonical("a row holds exactly the fields of its table"));
        }
        let mut out = (row.len() as u32).to_be_bytes().to_vec();
        for ((id, field), value) in table.fields.iter().zip(row.values()) {
            put_text(&mut out, id);
            field.put(&mut out, value)?;
        }
        Ok(out)
    }

    /// `row_digest` of a row under a server version.
    ///
    /// # Errors
    /// As [`Self::row_identity`] and [`Self::row_body`], or the server version is empty.
    pub fn row_digest(&self, table_id: &str, row: &Json, server_version: &str) -> Result<Digest, NotCanonical> {
        if server_version.is_empty() {
            return Err(NotCanonical("empty server_version"));
        }
        let key = row.get(&self.table(table_id)?.primary_key).ok_or(NotCanonical("a row holds its key"))?;
        let mut out = ROW_DIGEST.to_vec();
        out.extend_from_slice(&self.hash_octets);
        put_blob(&mut out, &self.row_identity(table_id, key)?);
        put_blob(&mut out, &self.row_body(table_id, row)?);
        put_text(&mut out, server_version);
        Ok(Sha256::digest(&out).into())
    }

    /// `scope_digest` of entries that come in `row_identity` order, as a [`BTreeMap`] gives them.
    pub fn scope_digest<'a>(
        &self,
        scope_id: &str,
        entries: impl ExactSizeIterator<Item = (&'a [u8], &'a Digest)>,
    ) -> Digest {
        let mut head = SCOPE_DIGEST.to_vec();
        head.extend_from_slice(&self.hash_octets);
        put_text(&mut head, scope_id);
        head.extend_from_slice(&(entries.len() as u64).to_be_bytes());
        let mut hash = Sha256::new();
        hash.update(&head);
        for (identity, digest) in entries {
            hash.update((identity.len() as u64).to_be_bytes());
            hash.update(identity);
            hash.update(digest);
        }
        hash.finalize().into()
    }
}

impl Table {
    fn parse(table: &Json) -> Result<Self, NotCanonical> {
        exact(
            table,
            &[
                "table_id",
                "relation_id",
                "name",
                "composition",
                "primary_key_field_id",
                "lifecycle",
                "fields",
                "indexes",
            ],
            "table members",
        )?;
        text_of(table, "name")?;
        if !["single_scope", "multi_scope"].contains(&text_of(table, "composition")?) {
            return Err(NotCanonical("composition"));
        }
        if !list_of(table, "indexes")?.is_empty() {
            return Err(NotCanonical("indexes"));
        }
        let mut fields = BTreeMap::new();
        for field in list_of(table, "fields")? {
            let id = text_of(field, "field_id")?;
            if fields.insert(id.to_owned(), Field::parse(field)?).is_some() {
                return Err(NotCanonical("one field_id twice"));
            }
        }
        let lifecycle = table.get("lifecycle").ok_or(NotCanonical("lifecycle"))?;
        exact(lifecycle, &["created_at_field_id", "updated_at_field_id", "deleted_at_field_id"], "lifecycle")?;
        for field in lifecycle.as_object().into_iter().flat_map(BTreeMap::values) {
            if *field != Json::Null && !field.as_text().is_some_and(|id| fields.contains_key(id)) {
                return Err(NotCanonical("lifecycle names an unknown field"));
            }
        }
        let primary_key = text_of(table, "primary_key_field_id")?.to_owned();
        if !fields.contains_key(&primary_key) {
            return Err(NotCanonical("primary_key_field_id names no field"));
        }
        Ok(Self { relation_id: text_of(table, "relation_id")?.to_owned(), primary_key, fields })
    }
}

impl Field {
    fn parse(field: &Json) -> Result<Self, NotCanonical> {
        let mut members = vec!["field_id", "name", "type", "nullable", "writable"];
        members.extend(["precision", "scale"].into_iter().filter(|name| field.get(name).is_some()));
        exact(field, &members, "field members")?;
        let portable_type = text_of(field, "type")?.to_owned();
        if !TYPES.contains(&portable_type.as_str()) || (members.len() > 5 && portable_type != "decimal") {
            return Err(NotCanonical("field type"));
        }
        let flag = |name| field.get(name).and_then(Json::as_bool).ok_or(NotCanonical("field flags"));
        flag("writable")?;
        let name = text_of(field, "name")?.to_owned();
        let digits = |name| match field.get(name) {
            None => Ok(None),
            Some(_) => int_of(field, name).map(Some),
        };
        let (precision, scale) = (digits("precision")?, digits("scale")?);
        Ok(Self { name, portable_type, nullable: flag("nullable")?, precision, scale })
    }

    /// Append the `typed_value` of `value`.
    ///
    /// # Errors
    /// The value is not canonical for the field's type.
    pub fn put(&self, out: &mut Vec<u8>, value: &Json) -> Result<(), NotCanonical> {
        let tag = TYPES.iter().position(|name| *name == self.portable_type).ok_or(NotCanonical("field type"))?;
        out.push(tag as u8 + 1);
        if *value == Json::Null {
            out.push(0);
            return if self.nullable { Ok(()) } else { Err(NotCanonical("null where the field is not nullable")) };
        }
        out.push(1);
        match (self.portable_type.as_str(), value) {
            ("boolean", Json::Bool(value)) => out.push(u8::from(*value)),
            ("int", Json::Number(text)) if is_integer(text) => {
                out.extend_from_slice(&text.parse::<i32>().map_err(|_| NotCanonical("int"))?.to_be_bytes());
            }
            ("float", Json::Number(text)) => {
                let number: f64 = text.parse().map_err(|_| NotCanonical("float"))?;
                if es6_number(number).as_ref() != Some(text) {
                    return Err(NotCanonical("float"));
                }
                out.extend_from_slice(&number.to_be_bytes());
            }
            ("string", Json::Text(text)) => put_text(out, text),
            ("int64", Json::Text(text)) if is_integer(text) => {
                out.extend_from_slice(&text.parse::<i64>().map_err(|_| NotCanonical("int64"))?.to_be_bytes());
            }
            ("decimal", Json::Text(text)) if self.is_decimal(text) => put_text(out, text),
            ("datetime", Json::Text(text)) if is_datetime(text) => put_text(out, text),
            ("date", Json::Text(text)) if is_date(text) => put_text(out, text),
            ("time", Json::Text(text)) if is_time(text) => put_text(out, text),
            ("json", Json::Text(text)) => {
                let canonical = Json::parse(text.as_bytes()).ok().and_then(|value| value.canonical().ok());
                if canonical.as_ref() != Some(text) {
                    return Err(NotCanonical("json"));
                }
                put_text(out, text);
            }
            ("bytes", Json::Text(text)) => {
                // The engine refuses padding, foreign characters and trailing bits that are not zero.
                put_blob(out, &URL_SAFE_NO_PAD.decode(text).map_err(|_| NotCanonical("bytes"))?);
            }
            _ => return Err(NotCanonical("value of another type")),
        }
        Ok(())
    }

    fn is_decimal(&self, text: &str) -> bool {
        let unsigned = text.strip_prefix('-').unwrap_or(text);
        let (whole, fraction) = match unsigned.split_once('.') {
            Some((whole, fraction)) if !fraction.is_empty() && !fraction.ends_with('0') => (whole, fraction),
            Some(_) => return false,
            None => (unsigned, ""),
        };
        let scale = self.scale.unwrap_or(0);
        is_integer(whole)
            && !whole.starts_with('-')
            && fraction.bytes().all(|b| b.is_ascii_digit())
            && text != "-0"
            && self.scale.is_none_or(|scale| fraction.len() as i64 <= scale)
            && self.precision.is_none_or(|precision| whole.trim_start_matches('0').len() as i64 <= precision - scale)
    }
}

/// The hash that `document`, a manifest, must carry.
///
/// # Errors
/// It is not an object of tables with fields, or holds what RFC 8785 cannot represent.
pub fn schema_hash(document: &Json) -> Result<Digest, NotCanonical> {
    let mut members = document.as_object().ok_or(NotCanonical("manifest"))?.clone();
    members.remove("schema_hash");
    let mut tables = list_of(document, "tables")?.to_vec();
    for table in &mut tables {
        let fields = sorted_by(list_of(table, "fields")?, "field_id")?;
        if let Json::Object(members) = table {
            members.insert("fields".to_owned(), Json::List(fields));
        }
    }
    members.insert("tables".to_owned(), Json::List(sorted_by(&tables, "table_id")?));
    let canonical = Json::Object(members).canonical().map_err(|_| NotCanonical("manifest"))?;
    Ok(Sha256::new().chain_update(SCHEMA_MANIFEST).chain_update(canonical).finalize().into())
}

/// Lowercase hexadecimal digits of some octets.
pub fn hex(octets: &[u8]) -> String {
    octets.iter().flat_map(|b| [b >> 4, b & 15]).filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
}

fn sorted_by(list: &[Json], member: &str) -> Result<Vec<Json>, NotCanonical> {
    let mut keyed = list.iter().map(|item| Ok((text_of(item, member)?, item))).collect::<Result<Vec<_>, _>>()?;
    keyed.sort_by_key(|(id, _)| *id);
    Ok(keyed.into_iter().map(|(_, item)| item.clone()).collect())
}

fn exact(value: &Json, names: &[&str], rule: &'static str) -> Result<(), NotCanonical> {
    let members = value.as_object().ok_or(NotCanonical(rule))?;
    if members.len() == names.len() && names.iter().all(|name| members.contains_key(*name)) {
        Ok(())
    } else {
        Err(NotCanonical(rule))
    }
}

fn text_of<'a>(value: &'a Json, name: &str) -> Result<&'a str, NotCanonical> {
    value.get(name).and_then(Json::as_text).filter(|text| !text.is_empty()).ok_or(NotCanonical("a manifest's text"))
}

fn int_of(value: &Json, name: &str) -> Result<i64, NotCanonical> {
    value.get(name).and_then(Json::as_int).ok_or(NotCanonical("a manifest's number"))
}

fn list_of<'a>(value: &'a Json, name: &str) -> Result<&'a [Json], NotCanonical> {
    value.get(name).and_then(Json::as_list).ok_or(NotCanonical("a manifest's list"))
}

fn put_blob(out: &mut Vec<u8>, octets: &[u8]) {
    out.extend_from_slice(&(octets.len() as u64).to_be_bytes());
    out.extend_from_slice(octets);
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_blob(out, text.as_bytes());
}

/// The numbers of `text` where `shape` has runs of `0`; every other character must stand as it is.
fn numbers(text: &str, shape: &str) -> Option<Vec<u32>> {
    if text.len() != shape.len() {
        return None;
    }
    let mut numbers = Vec::new();
    let mut in_run = false;
    for (t, s) in text.bytes().zip(shape.bytes()) {
        match s {
            b'0' if !t.is_ascii_digit() => return None,
            b'0' => {
                let digit = u32::from(t - b'0');
                match numbers.last_mut() {
                    Some(last) if in_run => *last = *last * 10 + digit,
                    _ => numbers.push(digit),
                }
                in_run = true;
            }
            _ if t != s => return None,
            _ => in_run = false,
        }
    }
    Some(numbers)
}

fn is_calendar_day(year: u32, month: u32, day: u32) -> bool {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match month {
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        1..=12 => 31,
        _ => 0,
    };
    year >= 1 && (1..=days).contains(&day)
}

fn is_date(text: &str) -> bool {
    numbers(text, "0000-00-00").is_some_and(|n| is_calendar_day(n[0], n[1], n[2]))
}

fn is_time(text: &str) -> bool {
    numbers(text, "00:00:00.000000").is_some_and(|n| n[0] < 24 && n[1] < 60 && n[2] < 60)
}

fn is_datetime(text: &str) -> bool {
    numbers(text, "0000-00-00T00:00:00.000000Z")
        .is_some_and(|n| is_calendar_day(n[0], n[1], n[2]) && n[3] < 24 && n[4] < 60 && n[5] < 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vectors() -> Json {
        Json::parse(include_bytes!("../data/vectors.json")).unwrap()
    }

    fn manifest(vectors: &Json) -> Manifest {
        let source = vectors.get("manifest").and_then(|m| m.get("json")).and_then(Json::as_text).unwrap();
        Manifest::parse(&Json::parse(source.as_bytes()).unwrap()).unwrap()
    }

    fn field(portable_type: &str) -> Field {
        let (name, portable_type) = ("f".to_owned(), portable_type.to_owned());
        Field { name, portable_type, nullable: true, precision: None, scale: None }
    }

    fn typed(portable_type: &str, source: &str) -> Option<String> {
        let mut out = Vec::new();
        let value = Json::parse(source.as_bytes()).ok()?;
        field(portable_type).put(&mut out, &value).ok()?;
        Some(hex(&out))
    }

    fn text<'a>(value: &'a Json, name: &str) -> &'a str {
        value.get(name).and_then(Json::as_text).unwrap()
    }

    #[test]
    fn manifest_hash_of_another_implementation() {
        let vectors = vectors();
        assert_eq!(manifest(&vectors).hash, text(vectors.get("manifest").unwrap(), "schema_hash"));
    }

    #[test]
    fn a_changed_manifest_is_refused() {
        let vectors = vectors();
        let source = text(vectors.get("manifest").unwrap(), "json").replace("time_value", "time_valve");
        assert!(Manifest::parse(&Json::parse(source.as_bytes()).unwrap()).is_err());
    }

    #[test]
    fn typed_values_of_another_implementation() {
        let vectors = vectors();
        for case in vectors.get("typed").and_then(Json::as_list).unwrap() {
            let (portable_type, source) = (text(case, "type"), text(case, "json"));
            assert_eq!(typed(portable_type, source).as_deref(), Some(text(case, "octets_hex")), "{case:?}");
        }
    }

    #[test]
    fn values_that_are_not_canonical_are_refused() {
        let vectors = vectors();
        for case in vectors.get("typed_invalid").and_then(Json::as_list).unwrap() {
            let digits = |name| case.get(name).and_then(Json::as_int);
            let declared =
                Field { precision: digits("precision"), scale: digits("scale"), ..field(text(case, "type")) };
            let value = Json::parse(text(case, "json").as_bytes());
            let outcome = value.map(|value| declared.put(&mut Vec::new(), &value));
            assert!(!matches!(outcome, Ok(Ok(()))), "{case:?}");
        }
        for (portable_type, source) in [
            ("string", "1"),
            ("int64", "1"),
            ("int64", "\"9223372036854775808\""),
            ("decimal", "\".5\""),
            ("decimal", "\"1.\""),
            ("decimal", "\"--1\""),
            ("decimal", "\"01\""),
            ("date", "\"0000-01-01\""),
            ("time", "\"24:00:00.000000\""),
            ("time", "\"00:00:00.00000\""),
            ("json", "\"{\\\"a\\\":1,\\\"a\\\":1}\""),
            ("json", "\"9007199254740992\""),
            ("json", "\"1.0\""),
            ("bytes", "\"AB\""),
        ] {
            assert_eq!(typed(portable_type, source), None, "{portable_type} {source}");
        }
        let narrow = Field { precision: Some(4), scale: Some(2), ..field("decimal") };
        assert!(narrow.is_decimal("12.34") && narrow.is_decimal("-0.01"));
        assert!(!narrow.is_decimal("123") && !narrow.is_decimal("1.234"));
    }

    #[test]
    fn row_digest_of_another_implementation() {
        let vectors = vectors();
        let manifest = manifest(&vectors);
        let case = vectors.get("row_digest").unwrap();
        let row = Json::parse(text(case, "row_json").as_bytes()).unwrap();
        let table = text(case, "table_id");
        let key = row.get(&manifest.table(table).unwrap().primary_key).unwrap();
        assert_eq!(hex(&manifest.row_identity(table, key).unwrap()), text(case, "row_identity_hex"));
        assert_eq!(hex(&manifest.row_body(table, &row).unwrap()), text(case, "row_body_hex"));
        let digest = manifest.row_digest(table, &row, text(case, "server_version")).unwrap();
        assert_eq!(hex(&digest), text(case, "digest"));
        assert_ne!(manifest.row_digest(table, &row, "another").unwrap(), digest);
        assert!(manifest.row_digest(table, &row, "").is_err());
    }
}

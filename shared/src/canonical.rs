//! Canonical octets of rows: identities, bodies, and the encoder that turns a captured row into what is stored of it.
//!
//! Serves ADR 003, "Scope-inclusive typed deduplication" (keys are encoded by their declared portable type, never by
//! concatenation with a delimiter) and "Explicit candidate outcomes and captured projections" (row, digest and version
//! are made together, where the row is captured). Deliberately absent: stored rows and their interned numbers.

use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::digest::row_digest_of;
use crate::portable::{FieldType, Value, ValueError, write_string};

const ROW_IDENTITY: &[u8] = b"synchro:v3:row-identity:v1\0";
const ROW_DIGEST: &[u8] = b"synchro:v3:row-digest:v1\0";

pub use crate::portable::write_blob;

/// Appends `text(value)`: a blob of UTF-8.
pub fn write_text(value: &str, out: &mut Vec<u8>) {
    write_blob(value.as_bytes(), out);
}

/// The octets that every row identity of one table begins with.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct IdentityPrefix(Vec<u8>);

impl IdentityPrefix {
    /// The prefix of a table whose key is the field `pk_field_id`.
    pub fn new(table_id: &str, pk_field_id: &str) -> Self {
        let mut octets = ROW_IDENTITY.to_vec();
        write_text(table_id, &mut octets);
        write_text(pk_field_id, &mut octets);
        Self(octets)
    }

    /// The identity of the row whose key has these `typed_value` octets.
    pub fn identity(&self, key_octets: &[u8]) -> Vec<u8> {
        [&self.0, key_octets].concat()
    }

    /// Replaces the content of `out` by an identity, so that a loop over rows needs one buffer.
    pub fn identity_into(&self, key_octets: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.0);
        out.extend_from_slice(key_octets);
    }

    /// The prefix itself. Identities of different tables order as (prefix, key octets) do, because no prefix begins
    /// another.
    pub fn octets(&self) -> &[u8] {
        &self.0
    }
}

/// The identity of one row, from the `typed_value` octets of its key.
pub fn row_identity(table_id: &str, pk_field_id: &str, key_octets: &[u8]) -> Vec<u8> {
    IdentityPrefix::new(table_id, pk_field_id).identity(key_octets)
}

/// Where the encoder takes one column's value from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FieldSource<'a> {
    /// SQL null.
    Null,
    /// PostgreSQL's text output.
    Text(&'a str),
    /// Wire JSON of the field as it is stored: an unchanged TOAST value.
    Wire(&'a str),
}

/// A field of a table, for [`RowEncoder::new`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodedField {
    /// The logical field id.
    pub field_id: String,
    /// What its values must be.
    pub field_type: FieldType,
    /// Index of its column in the rows that will be encoded.
    pub column: usize,
}

/// Fields that do not describe a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncoderError {
    /// Two fields have one id.
    #[error("two fields of one table have the same id")]
    DuplicateField,
    /// The key's field is not among the fields.
    #[error("the primary key is not a field of the table")]
    NoKey,
}

/// A field of a row that has no canonical form. Names the field, never the value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field {field_id}: {reason}")]
pub struct FieldError {
    /// The logical field id.
    pub field_id: String,
    /// Why the value is refused.
    pub reason: ValueError,
}

/// What is stored of a captured row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodedRow {
    /// Canonical `typed_value` octets of the primary key.
    pub key: Vec<u8>,
    /// The row's JSON object; its members are field ids.
    pub wire: String,
    /// The canonical row digest.
    pub digest: [u8; 32],
}

/// Encodes the rows of one table. Built once for a table and manifest.
#[derive(Clone, Debug)]
pub struct RowEncoder {
    prefix: IdentityPrefix,
    /// In UTF-8 order of field ids, as the row body wants them.
    fields: Vec<Plan>,
    key: usize,
    /// Further columns of the key of a row that is never delivered, in key order.
    more_keys: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Plan {
    field_id: String,
    field_type: FieldType,
    column: usize,
    /// `text(field_id)`.
    id_octets: Vec<u8>,
    /// `"field_id":`.
    id_json: String,
}

impl Plan {
    fn value<'a>(&self, source: FieldSource<'a>) -> Result<Value<'a>, FieldError> {
        match source {
            FieldSource::Null => Value::null(&self.field_type),
            FieldSource::Text(text) => Value::from_postgres_text(&self.field_type, text),
            FieldSource::Wire(raw) => Value::from_wire(&self.field_type, raw),
        }
        .map_err(|reason| self.refused(reason))
    }

    fn refused(&self, reason: ValueError) -> FieldError {
        FieldError { field_id: self.field_id.clone(), reason }
    }
}

impl RowEncoder {
    /// The encoder of a table. The key's field is never null, whatever its type says.
    ///
    /// # Errors
    /// Two fields have one id, or none is `pk_field_id`.
    pub fn new(table_id: &str, pk_field_id: &str, mut fields: Vec<EncodedField>) -> Result<Self, EncoderError> {
        fields.sort_by(|a, b| a.field_id.cmp(&b.field_id));
        if fields.windows(2).any(|pair| pair[0].field_id == pair[1].field_id) {
            return Err(EncoderError::DuplicateField);
        }
        let key = fields.iter().position(|field| field.field_id == pk_field_id).ok_or(EncoderError::NoKey)?;
        let mut fields: Vec<Plan> = fields
            .into_iter()
            .map(|field| {
                let mut id_octets = Vec::new();
                write_text(&field.field_id, &mut id_octets);
                let mut id_json = String::new();
                write_string(&field.field_id, &mut id_json);
                id_json.push(':');
                Plan {
                    field_id: field.field_id,
                    field_type: field.field_type,
                    column: field.column,
                    id_octets,
                    id_json,
                }
            })
            .collect();
        fields[key].field_type.nullable = false;
        Ok(Self { prefix: IdentityPrefix::new(table_id, pk_field_id), fields, key, more_keys: Vec::new() })
    }

    /// The same encoder for a key of several columns: these follow the first. Only for tables that are never delivered,
    /// as a key on the wire has one field.
    ///
    /// # Errors
    /// One of them is not among the fields.
    pub fn with_more_keys(mut self, field_ids: &[&str]) -> Result<Self, EncoderError> {
        for id in field_ids {
            let index = self.fields.iter().position(|field| field.field_id == *id).ok_or(EncoderError::NoKey)?;
            self.fields[index].field_type.nullable = false;
            self.more_keys.push(index);
        }
        Ok(self)
    }

    /// The octets that identities of this table's rows begin with.
    pub const fn identity_prefix(&self) -> &IdentityPrefix {
        &self.prefix
    }

    /// The `typed_value` octets of the primary key, from its column alone (an old key, a delete).
    ///
    /// # Errors
    /// The key is null or has no canonical form.
    pub fn key_octets(&self, source: FieldSource<'_>) -> Result<Vec<u8>, FieldError> {
        let mut octets = Vec::with_capacity(32);
        self.fields[self.key].value(source)?.write_octets(&mut octets);
        Ok(octets)
    }

    /// The `typed_value` octets of all key columns, in key order: each says where it ends, so that different keys give
    /// different octets.
    ///
    /// # Errors
    /// A column is null, missing, or has no canonical form.
    pub fn key_octets_of<'a>(&self, sources: impl IntoIterator<Item = FieldSource<'a>>) -> Result<Vec<u8>, FieldError> {
        let mut octets = Vec::with_capacity(32);
        let mut sources = sources.into_iter();
        for plan in std::iter::once(self.key).chain(self.more_keys.iter().copied()).map(|key| &self.fields[key]) {
            let source = sources.next().ok_or_else(|| plan.refused(ValueError::Missing))?;
            plan.value(source)?.write_octets(&mut octets);
        }
        Ok(octets)
    }

    /// The JSON object of a primary key, from its stored octets.
    ///
    /// # Errors
    /// The octets are not a canonical value of the key's type.
    pub fn key_json(&self, key_octets: &[u8]) -> Result<String, FieldError> {
        let plan = &self.fields[self.key];
        let value = Value::from_octets(plan.field_type.kind, key_octets).map_err(|reason| plan.refused(reason))?;
        if value.is_null() {
            return Err(plan.refused(ValueError::Null));
        }
        let mut out = format!("{{{}", plan.id_json);
        value.write_json(&mut out);
        out.push('}');
        Ok(out)
    }

    /// Everything that is stored of a captured row.
    ///
    /// # Errors
    /// A field is null against its type, has no canonical form, or has no column in `row`.
    pub fn encode(
        &self,
        row: &[FieldSource<'_>],
        schema_hash: &[u8; 32],
        server_version: &str,
    ) -> Result<EncodedRow, FieldError> {
        let source = |plan: &Plan| row.get(plan.column).copied().ok_or_else(|| plan.refused(ValueError::Missing));
        let key = self.key_octets(source(&self.fields[self.key])?)?;

        let source_octets: usize = row
            .iter()
            .map(|source| match source {
                FieldSource::Null => 0,
                FieldSource::Text(text) | FieldSource::Wire(text) => text.len(),
            })
            .sum();
        let ids: usize = self.fields.iter().map(|plan| plan.id_json.len()).sum();
        let mut wire = String::with_capacity(source_octets + ids + 16 * self.fields.len() + 2);
        // The digest's input is laid out whole: the body's length stands before the body.
        let mut input = Vec::with_capacity(
            source_octets + ids + 32 * self.fields.len() + 128 + self.prefix.0.len() + key.len() + server_version.len(),
        );
        input.extend_from_slice(ROW_DIGEST);
        input.extend_from_slice(schema_hash);
        input.extend_from_slice(&((self.prefix.0.len() + key.len()) as u64).to_be_bytes());
        input.extend_from_slice(&self.prefix.0);
        input.extend_from_slice(&key);
        let length_at = input.len();
        input.extend_from_slice(&[0; 8]);

        let body_at = input.len();
        input.extend_from_slice(&(self.fields.len() as u32).to_be_bytes());
        for (i, plan) in self.fields.iter().enumerate() {
            wire.push(if i == 0 { '{' } else { ',' });
            wire.push_str(&plan.id_json);
            input.extend_from_slice(&plan.id_octets);
            let value = plan.value(source(plan)?)?;
            value.write_json(&mut wire);
            value.write_octets(&mut input);
        }
        wire.push('}');
        let body_length = (input.len() - body_at) as u64;
        input[length_at..body_at].copy_from_slice(&body_length.to_be_bytes());
        write_text(server_version, &mut input);
        Ok(EncodedRow { key, wire, digest: row_digest_of(&input) })
    }
}

/// The members of a stored row's JSON object: field id to raw JSON.
#[derive(Debug)]
pub struct WireFields<'a>(BTreeMap<FieldId<'a>, &'a RawValue>);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct FieldId<'a>(#[serde(borrow)] Cow<'a, str>);

impl Borrow<str> for FieldId<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// Stored wire JSON that is not an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("stored row is not a JSON object")]
pub struct WireError;

/// Reads a stored row's JSON object without decoding its values.
///
/// # Errors
/// `wire` is not a JSON object.
pub fn wire_fields(wire: &str) -> Result<WireFields<'_>, WireError> {
    serde_json::from_str(wire).map(WireFields).map_err(|_| WireError)
}

impl<'a> WireFields<'a> {
    /// The raw JSON of a field.
    pub fn get(&self, field_id: &str) -> Option<&'a str> {
        self.0.get(field_id).map(|raw| raw.get())
    }

    /// How many members the row has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the row has no members.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests;

//! Schema manifests: what clients know of the synchronized tables, and how one manifest follows another.
//!
//! Every cursor and digest binds a manifest's hash (ADR 003, "Pull request rules" 3 and the token bindings). A
//! published manifest never changes. Deliberately absent: relations, columns and rules, which are the registry's.

mod ancestry;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

pub use self::ancestry::{Ancestry, Descent, MAX_ANCESTORS};
use crate::digest::{hex, parse_hex};
use crate::portable::{FieldType, MAX_SAFE_INTEGER, PortableType};

const SCHEMA_MANIFEST: &[u8] = b"synchro:v3:schema-manifest:v1\0";

/// The hash that identifies a manifest; 64 lowercase hexadecimal digits as text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SchemaHash([u8; 32]);

impl SchemaHash {
    /// A hash from its octets.
    pub const fn new(octets: [u8; 32]) -> Self {
        Self(octets)
    }

    /// The octets, which digests and tokens bind.
    pub const fn octets(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Text that is not a schema hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not 64 lowercase hexadecimal digits")]
pub struct SchemaHashError;

impl std::str::FromStr for SchemaHash {
    type Err = SchemaHashError;

    fn from_str(text: &str) -> Result<Self, SchemaHashError> {
        parse_hex(text).map(Self).ok_or(SchemaHashError)
    }
}

impl fmt::Display for SchemaHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for SchemaHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for SchemaHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SchemaHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A manifest by version and hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchemaReference {
    /// The version, from 1.
    pub version: u64,
    /// The hash.
    pub hash: SchemaHash,
}

/// How a manifest follows its parent. Ordered by what it asks of clients.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransitionClass {
    /// No parent.
    Initial,
    /// A compatible addition that needs no historical values.
    #[serde(rename = "class_2")]
    Class2,
    /// Rows must be materialised anew.
    #[serde(rename = "class_3")]
    Class3,
    /// Something is removed or retyped, or has another key.
    #[serde(rename = "class_4")]
    Class4,
}

/// Whether a row of the table is in one scope at most.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Composition {
    /// A row is in one scope at most.
    SingleScope,
    /// A row can be in several scopes.
    MultiScope,
}

/// Fields with a meaning to every client; each may be absent.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifecycle {
    /// When the row was made.
    pub created_at_field_id: Option<String>,
    /// When the row was last changed.
    pub updated_at_field_id: Option<String>,
    /// When the row was deleted softly.
    pub deleted_at_field_id: Option<String>,
}

impl Lifecycle {
    fn fields(&self) -> [Option<&str>; 3] {
        [&self.created_at_field_id, &self.updated_at_field_id, &self.deleted_at_field_id].map(Option::as_deref)
    }
}

/// One field of a table.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Field {
    /// Logical id: the member of `row` and `pk` on the wire.
    pub field_id: String,
    /// Name for clients' local schema.
    pub name: String,
    /// Portable type.
    #[serde(rename = "type")]
    pub kind: PortableType,
    /// Whether it may be null.
    pub nullable: bool,
    /// Whether clients may write it.
    pub writable: bool,
    /// Declared digits of a decimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<u32>,
    /// Declared fraction digits of a decimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<u32>,
}

impl Field {
    /// What the field's values must be.
    pub const fn field_type(&self) -> FieldType {
        FieldType { kind: self.kind, nullable: self.nullable, precision: self.precision, scale: self.scale }
    }
}

/// One table.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Logical id: `table` on the wire.
    pub table_id: String,
    /// The relation that its rows come from.
    pub relation_id: String,
    /// Name for clients' local schema.
    pub name: String,
    /// Whether rows can be in several scopes.
    pub composition: Composition,
    /// The field that is the primary key.
    pub primary_key_field_id: String,
    /// Fields with a meaning to every client.
    pub lifecycle: Lifecycle,
    /// Fields, in UTF-8 order of their ids.
    pub fields: Vec<Field>,
    /// Always empty in this version of the protocol.
    pub indexes: [(); 0],
}

impl Table {
    /// The field with this id.
    pub fn field(&self, field_id: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.field_id == field_id)
    }
}

/// Tables that are not a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Two tables, or two fields of a table, have one id.
    #[error("two tables or two fields of one table have the same id")]
    DuplicateId,
    /// An id or name is empty.
    #[error("an id or a name is empty")]
    EmptyId,
    /// A key or lifecycle field is not among the fields.
    #[error("a primary key or lifecycle field is not a field of its table")]
    NoSuchField,
    /// The key may be null.
    #[error("a primary key is nullable")]
    NullableKey,
    /// Precision or scale on another type than decimal.
    #[error("precision or scale on a field that is not a decimal")]
    NotDecimal,
    /// The version is not an integer that JSON carries.
    #[error("the schema version is out of range")]
    Version,
    /// The stored hash is not the hash of the stored content.
    #[error("the schema hash is not that of the manifest")]
    Hash,
    /// Text that is not a manifest.
    #[error("not the JSON of a manifest")]
    Json,
}

/// A published schema manifest: valid, its tables and fields in order, its hash right. Serializes to the document that
/// is sent on the wire.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Document")]
pub struct Manifest(Document);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema_version: u64,
    schema_hash: SchemaHash,
    // Without this, an absent member would pass for a null one.
    #[serde(deserialize_with = "Option::deserialize")]
    parent_schema: Option<SchemaReference>,
    transition_class: TransitionClass,
    compatibility_floor: u64,
    tables: Vec<Table>,
}

/// A manifest without its hash, which is what is hashed.
#[derive(Serialize)]
struct Hashed<'a> {
    schema_version: u64,
    parent_schema: Option<SchemaReference>,
    transition_class: TransitionClass,
    compatibility_floor: u64,
    tables: &'a [Table],
}

impl Document {
    fn hash(&self) -> SchemaHash {
        let hashed = Hashed {
            schema_version: self.schema_version,
            parent_schema: self.parent_schema,
            transition_class: self.transition_class,
            compatibility_floor: self.compatibility_floor,
            tables: &self.tables,
        };
        let octets =
            serde_json_canonicalizer::to_vec(&hashed).expect("a manifest holds only strings, flags and safe integers");
        SchemaHash(Sha256::new().chain_update(SCHEMA_MANIFEST).chain_update(octets).finalize().into())
    }

    /// Puts tables and fields in order and sets the hash.
    fn seal(mut self) -> Result<Manifest, ManifestError> {
        self.normalize()?;
        self.schema_hash = self.hash();
        Ok(Manifest(self))
    }

    fn normalize(&mut self) -> Result<(), ManifestError> {
        let versions = 1..=MAX_SAFE_INTEGER as u64;
        let parent_precedes = self.parent_schema.is_none_or(|parent| parent.version < self.schema_version);
        let floor_is_past = (1..=self.schema_version).contains(&self.compatibility_floor);
        if !versions.contains(&self.schema_version) || !parent_precedes || !floor_is_past {
            return Err(ManifestError::Version);
        }
        order_tables(&mut self.tables)
    }
}

impl TryFrom<Document> for Manifest {
    type Error = ManifestError;

    fn try_from(mut document: Document) -> Result<Self, ManifestError> {
        document.normalize()?;
        if document.hash() == document.schema_hash { Ok(Self(document)) } else { Err(ManifestError::Hash) }
    }
}

/// Puts tables and fields in the order of their ids and checks them.
fn order_tables(tables: &mut [Table]) -> Result<(), ManifestError> {
    tables.sort_by(|a, b| a.table_id.cmp(&b.table_id));
    if tables.windows(2).any(|pair| pair[0].table_id == pair[1].table_id) {
        return Err(ManifestError::DuplicateId);
    }
    for table in tables {
        table.fields.sort_by(|a, b| a.field_id.cmp(&b.field_id));
        if table.fields.windows(2).any(|pair| pair[0].field_id == pair[1].field_id) {
            return Err(ManifestError::DuplicateId);
        }
        let names = table.fields.iter().flat_map(|field| [&field.field_id, &field.name]);
        if names.chain([&table.table_id, &table.relation_id, &table.name]).any(String::is_empty) {
            return Err(ManifestError::EmptyId);
        }
        let key = table.field(&table.primary_key_field_id).ok_or(ManifestError::NoSuchField)?;
        if key.nullable {
            return Err(ManifestError::NullableKey);
        }
        if table.lifecycle.fields().into_iter().flatten().any(|id| table.field(id).is_none()) {
            return Err(ManifestError::NoSuchField);
        }
        let declares = |field: &Field| field.precision.is_some() || field.scale.is_some();
        if table.fields.iter().any(|field| declares(field) && field.kind != PortableType::Decimal) {
            return Err(ManifestError::NotDecimal);
        }
    }
    Ok(())
}

impl Manifest {
    /// The first manifest, version 1.
    ///
    /// # Errors
    /// The tables are not a manifest.
    pub fn initial(tables: Vec<Table>) -> Result<Self, ManifestError> {
        Document {
            schema_version: 1,
            schema_hash: SchemaHash([0; 32]),
            parent_schema: None,
            transition_class: TransitionClass::Initial,
            compatibility_floor: 1,
            tables,
        }
        .seal()
    }

    /// The manifest that follows this one with these tables; `None` when nothing differs.
    ///
    /// # Errors
    /// The tables are not a manifest.
    pub fn successor(&self, mut tables: Vec<Table>) -> Result<Option<Self>, ManifestError> {
        order_tables(&mut tables)?;
        let Some(transition) = classify(self.tables(), &tables) else { return Ok(None) };
        let schema_version = self.version() + 1;
        Document {
            schema_version,
            schema_hash: SchemaHash([0; 32]),
            parent_schema: Some(self.reference()),
            transition_class: transition.class,
            compatibility_floor: self.floor_of(schema_version, transition.class),
            tables,
        }
        .seal()
        .map(Some)
    }

    /// The earliest version of the unbroken class 2 lineage that a child with this class ends.
    const fn floor_of(&self, child_version: u64, class: TransitionClass) -> u64 {
        match class {
            TransitionClass::Class2 => self.0.compatibility_floor,
            TransitionClass::Initial | TransitionClass::Class3 | TransitionClass::Class4 => child_version,
        }
    }

    /// A manifest from its stored document.
    ///
    /// # Errors
    /// The text is not a valid manifest, or its hash is not that of its content.
    pub fn from_json(document: &str) -> Result<Self, ManifestError> {
        let document: Document = serde_json::from_str(document).map_err(|_| ManifestError::Json)?;
        document.try_into()
    }

    /// The document that is stored and sent on the wire.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a manifest has string keys only")
    }

    /// The version, from 1.
    pub const fn version(&self) -> u64 {
        self.0.schema_version
    }

    /// The hash that identifies this manifest.
    pub const fn hash(&self) -> SchemaHash {
        self.0.schema_hash
    }

    /// Version and hash.
    pub const fn reference(&self) -> SchemaReference {
        SchemaReference { version: self.0.schema_version, hash: self.0.schema_hash }
    }

    /// The manifest that this one follows.
    pub const fn parent(&self) -> Option<SchemaReference> {
        self.0.parent_schema
    }

    /// How this manifest follows its parent.
    pub const fn transition_class(&self) -> TransitionClass {
        self.0.transition_class
    }

    /// The earliest version of the unbroken class 2 lineage that ends here.
    pub const fn compatibility_floor(&self) -> u64 {
        self.0.compatibility_floor
    }

    /// Tables in UTF-8 order of their ids.
    pub fn tables(&self) -> &[Table] {
        &self.0.tables
    }

    /// The table with this id.
    pub fn table(&self, table_id: &str) -> Option<&Table> {
        self.0.tables.iter().find(|table| table.table_id == table_id)
    }
}

/// What one set of tables asks of clients that hold another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transition {
    /// The strongest class of any difference.
    pub class: TransitionClass,
    /// Ids of the tables with a difference of class 3 or 4. Scopes without rows of them are unaffected.
    pub affected: BTreeSet<String>,
}

/// Classifies the difference of two sets of tables; `None` when they are the same.
///
/// | difference | class |
/// | --- | --- |
/// | a table is added | 2: nobody holds rows of it |
/// | a lifecycle field is named where none was | 2: the values are already there |
/// | a field becomes nullable; a decimal's bounds widen | 2: every held value stays valid |
/// | `writable` | 2: no value changes |
/// | a field is added to a table | 3: held rows lack its value |
/// | another relation, name or composition; another or no lifecycle field; a field is no longer nullable | 3 |
/// | a table or field is removed or has another type; a decimal's bounds narrow; another key | 4 |
pub fn classify(old: &[Table], new: &[Table]) -> Option<Transition> {
    let old: BTreeMap<&str, &Table> = old.iter().map(|table| (table.table_id.as_str(), table)).collect();
    let new: BTreeMap<&str, &Table> = new.iter().map(|table| (table.table_id.as_str(), table)).collect();
    let ids: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
    let mut classes = ids.into_iter().filter_map(|id| {
        let class = match (old.get(id), new.get(id)) {
            (Some(old), Some(new)) => classify_table(old, new)?,
            (Some(_), None) => TransitionClass::Class4,
            (None, _) => TransitionClass::Class2,
        };
        Some((id, class))
    });
    let first = classes.next()?;
    let mut transition = Transition { class: first.1, affected: BTreeSet::new() };
    for (id, class) in std::iter::once(first).chain(classes) {
        transition.class = transition.class.max(class);
        if class > TransitionClass::Class2 {
            transition.affected.insert(id.to_owned());
        }
    }
    Some(transition)
}

fn classify_table(old: &Table, new: &Table) -> Option<TransitionClass> {
    use TransitionClass::{Class2, Class3, Class4};
    let mut class = None;
    let mut differs = |by: TransitionClass| class = class.max(Some(by));
    if old.primary_key_field_id != new.primary_key_field_id {
        differs(Class4);
    }
    if old.relation_id != new.relation_id || old.name != new.name || old.composition != new.composition {
        differs(Class3);
    }
    for (old, new) in old.lifecycle.fields().into_iter().zip(new.lifecycle.fields()) {
        match (old, new) {
            _ if old == new => {}
            (None, _) => differs(Class2),
            (Some(_), _) => differs(Class3),
        }
    }
    for field in &new.fields {
        match old.field(&field.field_id) {
            None => differs(Class3),
            Some(old) => classify_field(old, field, &mut differs),
        }
    }
    if old.fields.iter().any(|field| new.field(&field.field_id).is_none()) {
        differs(Class4);
    }
    class
}

fn classify_field(old: &Field, new: &Field, differs: &mut impl FnMut(TransitionClass)) {
    use TransitionClass::{Class2, Class3, Class4};
    if old.kind != new.kind {
        differs(Class4);
    }
    if (old.precision, old.scale) != (new.precision, new.scale) {
        differs(if widens(old, new) { Class2 } else { Class4 });
    }
    if old.name != new.name || (old.nullable && !new.nullable) {
        differs(Class3);
    }
    if old.writable != new.writable || (!old.nullable && new.nullable) {
        differs(Class2);
    }
}

/// Whether every decimal within the old bounds is within the new ones.
fn widens(old: &Field, new: &Field) -> bool {
    let fits = |old: Option<i64>, new: Option<i64>| match (old, new) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(old), Some(new)) => old <= new,
    };
    let scale = |field: &Field| field.scale.map(i64::from);
    // Digits before the point; an undeclared scale takes none of the precision.
    let whole = |field: &Field| field.precision.map(|precision| i64::from(precision) - scale(field).unwrap_or(0));
    fits(scale(old), scale(new)) && fits(whole(old), whole(new))
}

#[cfg(test)]
mod tests;

//! What the source database's catalog says about relations; loaded by [`crate::store::catalog`].

use serde::{Deserialize, Serialize};

use super::name::RelationName;

/// PostgreSQL gives its own types smaller OIDs.
const FIRST_USER_OID: u32 = 16_384;
/// Ordinary built-in types: their text means the same in any database. Absent are the types whose text depends on the
/// database or on settings of the money kind (`reg*`, `money`, `aclitem`, `xml`, …): they stand as text.
const ORDINARY_TYPES: [u32; 47] = [
    16, 17, 18, 19, 20, 21, 23, 25, 26, 114, 600, 601, 602, 603, 604, 628, 650, 700, 701, 718, 774, 829, 869, 1042,
    1043, 1082, 1083, 1114, 1184, 1186, 1266, 1560, 1562, 1700, 2950, 3220, 3614, 3615, 3802, 3904, 3906, 3908, 3910,
    3912, 3926, 4072, 4451,
];
/// The multirange types beside `int4multirange`.
const MULTIRANGES: std::ops::RangeInclusive<u32> = 4532..=4536;

/// The catalog as of one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Catalog {
    /// `server_version_num`.
    pub server_version: u32,
    /// The relations that exist, of those that were asked for.
    pub relations: Vec<CatalogRelation>,
}

/// One relation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogRelation {
    /// Its name.
    pub name: RelationName,
    /// Its OID.
    pub oid: u32,
    /// What it is.
    pub kind: RelationKind,
    /// Whether it is in the WAL.
    pub persistence: Persistence,
    /// What the stream says about old rows.
    pub replica_identity: ReplicaIdentity,
    /// Its primary key.
    pub primary_key: Option<PrimaryKey>,
    /// Row-level security hides rows from the role that loaded the catalog.
    pub row_security_applies: bool,
    /// Other tables inherit from it (partitions of a partitioned table do not count).
    pub has_children: bool,
    /// The role that loaded the catalog may read it.
    pub readable: bool,
    /// Its columns in `attnum` order, dropped ones left out.
    pub columns: Vec<CatalogColumn>,
}

/// What a relation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RelationKind {
    /// An ordinary table.
    Table,
    /// A partitioned table.
    PartitionedTable,
    /// A view.
    View,
    /// A materialized view.
    MaterializedView,
    /// A foreign table.
    ForeignTable,
    /// Something else that `pg_class` lists.
    Other,
}

/// Whether a relation is in the WAL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Persistence {
    /// It is.
    Permanent,
    /// Unlogged.
    Unlogged,
    /// Temporary.
    Temporary,
}

/// A relation's replica identity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaIdentity {
    /// The primary key.
    Default,
    /// The whole old row.
    Full,
    /// The key columns (`attnum`) of an index.
    Index(Vec<i16>),
    /// Nothing: updates and deletes fail or are not told apart.
    Nothing,
}

/// A relation's primary key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrimaryKey {
    /// Its columns (`attnum`) in key order.
    pub columns: Vec<i16>,
    /// Deferrable keys identify no row in the stream.
    pub deferrable: bool,
}

/// One column.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogColumn {
    /// Its name.
    pub name: String,
    /// Its number in the relation.
    pub attnum: i16,
    /// Its type.
    pub type_info: ColumnType,
    /// The column or its domain is not null.
    pub not_null: bool,
    /// Generated from other columns, stored or virtual.
    pub generated: bool,
    /// `GENERATED ALWAYS AS IDENTITY`.
    pub identity_always: bool,
}

/// A column's type, as the stream, the projection and the rules need it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ColumnType {
    /// The declared type, a domain's own OID; the relation message of the stream carries it.
    pub oid: u32,
    /// The declared modifier; the relation message carries it.
    pub modifier: i32,
    /// The type beneath all domains.
    pub base_oid: u32,
    /// The modifier beneath all domains.
    pub base_modifier: i32,
    /// The type in our own tables and casts: PostgreSQL's built-in one, else `text`.
    pub sql: String,
    /// What comparison means on it.
    pub class: TypeClass,
    /// Its collation.
    pub collation: Collation,
}

/// What the state's copy of a type can be asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TypeClass {
    /// A built-in type: everything.
    Builtin,
    /// An enum, standing as text: equality with its labels.
    Enum,
    /// Another type that stands as text: its text alone, and whether it is null.
    Opaque,
    /// A composite type, standing as text: nothing, for it can be null to SQL while its text is not.
    Composite,
}

/// A column's collation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collation {
    /// None, or the database's default: equal means equal octets.
    Default,
    /// A deterministic one of PostgreSQL's own: equal means equal octets, order is its own.
    Named(String),
    /// User-defined, or not deterministic: the state cannot compare as the source does.
    Foreign,
}

/// What `pg_type` says about a base type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BaseType<'a> {
    /// Its OID.
    pub oid: u32,
    /// Its elements' OID when it is an array, else 0.
    pub element_oid: u32,
    /// `typtype`: `b`, `c`, `e`, …
    pub kind: char,
    /// `format_type` of it with its modifier.
    pub formatted: &'a str,
}

impl BaseType<'_> {
    /// The type in our own SQL, and what comparison means on it.
    pub fn in_our_sql(&self) -> (String, TypeClass) {
        let ordinary = |oid: u32| ORDINARY_TYPES.contains(&oid) || MULTIRANGES.contains(&oid);
        let builtin =
            self.oid < FIRST_USER_OID && (ordinary(self.oid) || (self.element_oid != 0 && ordinary(self.element_oid)));
        if builtin {
            (self.formatted.to_owned(), TypeClass::Builtin)
        } else {
            let class = match self.kind {
                'e' => TypeClass::Enum,
                'c' => TypeClass::Composite,
                _ => TypeClass::Opaque,
            };
            ("text".to_owned(), class)
        }
    }
}

impl ColumnType {
    /// Declared precision and scale of a numeric.
    pub fn precision_and_scale(&self) -> Option<(u32, i32)> {
        const NUMERIC: u32 = 1700;
        const MODIFIER_OFFSET: i32 = 4;
        let packed = self.base_modifier.checked_sub(MODIFIER_OFFSET).filter(|packed| *packed >= 0)?;
        if self.base_oid != NUMERIC {
            return None;
        }
        // The low eleven bits are the scale in two's complement (negative scales: PostgreSQL 15 and later).
        let scale = ((packed & 0x7ff) ^ 1024) - 1024;
        Some(((packed >> 16 & 0xffff) as u32, scale))
    }
}

impl CatalogRelation {
    /// The column of this name.
    pub fn column(&self, name: &str) -> Option<&CatalogColumn> {
        self.columns.iter().find(|column| column.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sql(oid: u32, element_oid: u32, kind: char, formatted: &str) -> (String, TypeClass) {
        BaseType { oid, element_oid, kind, formatted }.in_our_sql()
    }

    #[test]
    fn user_defined_types_stand_as_text() {
        assert_eq!(sql(1700, 0, 'b', "numeric(10,2)"), ("numeric(10,2)".to_owned(), TypeClass::Builtin));
        assert_eq!(sql(1009, 25, 'b', "text[]"), ("text[]".to_owned(), TypeClass::Builtin));
        assert_eq!(sql(20_000, 0, 'e', "mood"), ("text".to_owned(), TypeClass::Enum));
        assert_eq!(sql(20_000, 0, 'b', "citext"), ("text".to_owned(), TypeClass::Opaque));
        assert_eq!(sql(20_000, 0, 'c', "pair"), ("text".to_owned(), TypeClass::Composite));
        assert_eq!(sql(20_000, 20_001, 'b', "mood[]"), ("text".to_owned(), TypeClass::Opaque));
        assert_eq!(sql(2205, 0, 'b', "regclass"), ("text".to_owned(), TypeClass::Opaque));
        assert_eq!(sql(790, 0, 'b', "money"), ("text".to_owned(), TypeClass::Opaque));
    }

    #[test]
    fn numeric_modifiers_unpack() {
        let numeric = |base_modifier| ColumnType {
            oid: 1700,
            modifier: base_modifier,
            base_oid: 1700,
            base_modifier,
            sql: "numeric".to_owned(),
            class: TypeClass::Builtin,
            collation: Collation::Default,
        };
        assert_eq!(numeric(-1).precision_and_scale(), None);
        assert_eq!(numeric((10 << 16 | 2) + 4).precision_and_scale(), Some((10, 2)));
        assert_eq!(numeric((3 << 16 | (-2 & 0x7ff)) + 4).precision_and_scale(), Some((3, -2)));
        assert_eq!(ColumnType { base_oid: 1043, ..numeric(24) }.precision_and_scale(), None);
    }
}

//! What a registry delivers, as the schema manifest says it (protocol version 3, "Schema manifest").

use serde::{Deserialize, Serialize};

use super::{Column, Registry, Table};
use crate::portable::PortableType;

/// A table of the manifest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ManifestTable {
    /// The logical table id.
    pub table_id: String,
    /// `schema.relation`.
    pub relation_id: String,
    /// The relation's name.
    pub name: String,
    /// In how many scopes a row can be.
    pub composition: Composition,
    /// The key's field.
    pub primary_key_field_id: String,
    /// Fields of a row's life.
    pub lifecycle: ManifestLifecycle,
    /// The fields, in UTF-8 order of their ids.
    pub fields: Vec<ManifestField>,
    /// Always empty.
    pub indexes: [(); 0],
}

/// In how many scopes a row of a table can be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Composition {
    /// One at most: one rule delivers the table, and gives a row one scope.
    SingleScope,
    /// Several.
    MultiScope,
}

/// Fields of a row's life.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ManifestLifecycle {
    /// When it was made.
    pub created_at_field_id: Option<String>,
    /// When it was last changed.
    pub updated_at_field_id: Option<String>,
    /// When it was deleted.
    pub deleted_at_field_id: Option<String>,
}

/// A field of the manifest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ManifestField {
    /// Its id.
    pub field_id: String,
    /// The column's name.
    pub name: String,
    /// Its portable type.
    #[serde(rename = "type")]
    pub portable: PortableType,
    /// It can be null.
    pub nullable: bool,
    /// Clients may write it.
    pub writable: bool,
    /// Declared precision of a decimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<u32>,
    /// Declared scale of a decimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<i32>,
}

impl Registry {
    /// The delivered tables in UTF-8 order of their ids.
    pub fn manifest_tables(&self) -> Vec<ManifestTable> {
        let mut tables: Vec<ManifestTable> =
            self.tables.iter().filter(|table| !table.capture_only).map(|table| self.manifest_table(table)).collect();
        tables.sort_by(|a, b| a.table_id.cmp(&b.table_id));
        tables
    }

    fn manifest_table(&self, table: &Table) -> ManifestTable {
        let field_id = |index: Option<usize>| index.map(|index| table.columns[index].field_id.clone());
        let mut fields: Vec<ManifestField> =
            table.columns.iter().filter(|column| column.delivered).map(manifest_field).collect();
        fields.sort_by(|a, b| a.field_id.cmp(&b.field_id));
        ManifestTable {
            table_id: table.id.clone(),
            relation_id: format!("{}.{}", table.relation.schema(), table.relation.name()),
            name: table.relation.name().to_owned(),
            composition: if self.rules_of(table.table_no).count() > 1 {
                Composition::MultiScope
            } else {
                Composition::SingleScope
            },
            primary_key_field_id: table.key_column().field_id.clone(),
            lifecycle: ManifestLifecycle {
                created_at_field_id: field_id(table.lifecycle.created_at),
                updated_at_field_id: field_id(table.lifecycle.updated_at),
                deleted_at_field_id: field_id(table.lifecycle.deleted_at),
            },
            fields,
            indexes: [],
        }
    }
}

fn manifest_field(column: &Column) -> ManifestField {
    ManifestField {
        field_id: column.field_id.clone(),
        name: column.name.clone(),
        portable: column.portable,
        nullable: column.nullable,
        writable: column.writable,
        precision: column.precision,
        scale: column.scale,
    }
}

//! From the registry to what is delivered: row encoders and the schema manifest.

use crate::canonical::{EncodedField, EncoderError, RowEncoder};
use crate::manifest::{Manifest, ManifestError};
use crate::portable::FieldType;
use crate::registry::{Registry, Table};

/// The encoder of each table, in the registry's order. A capture-only table has one too, for its keys.
///
/// # Errors
/// Fields do not describe a table; the registry's checks exclude it.
pub fn encoders(registry: &Registry) -> Result<Vec<RowEncoder>, EncoderError> {
    registry.tables.iter().map(encoder).collect()
}

fn encoder(table: &Table) -> Result<RowEncoder, EncoderError> {
    let fields = table
        .columns
        .iter()
        .enumerate()
        .filter(|(index, column)| column.delivered || table.keys.contains(index))
        .map(|(index, column)| EncodedField {
            field_id: column.field_id.clone(),
            field_type: FieldType {
                kind: column.portable,
                nullable: column.nullable,
                precision: column.decimal_bounds().0,
                scale: column.decimal_bounds().1,
            },
            column: index,
        })
        .collect();
    let more: Vec<&str> = table.keys.iter().skip(1).map(|key| table.columns[*key].field_id.as_str()).collect();
    RowEncoder::new(&table.id, &table.key_column().field_id, fields)?.with_more_keys(&more)
}

/// The manifest of a registry: `newest`, the newest published one, when nothing differs, else its successor.
///
/// # Errors
/// The tables are not a manifest; the registry's checks exclude it.
pub fn manifest(registry: &Registry, newest: Option<&Manifest>) -> Result<Manifest, ManifestError> {
    let tables = registry.manifest_tables();
    match newest {
        None => Manifest::initial(tables),
        Some(newest) => Ok(newest.successor(tables)?.unwrap_or_else(|| newest.clone())),
    }
}

//! From the registry to what is delivered: row encoders and the schema manifest. Used by the materializer, which
//! captures rows, and by pullers, which check what they serve.

use crate::canonical::{EncodedField, EncoderError, FieldSource, RowEncoder, wire_fields};
use crate::manifest::{Manifest, ManifestError};
use crate::portable::FieldType;
use crate::registry::{Registry, Table};
use crate::store::pull::Captured;

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

/// Checks that a captured row is what was captured: its canonical digest, computed anew from its wire JSON, and its key
/// are those that are stored with it (ADR 003: a digest mismatch fails the whole page).
pub fn is_as_captured(encoder: &RowEncoder, table: &Table, schema_hash: &[u8; 32], captured: &Captured) -> bool {
    let Ok(fields) = wire_fields(&captured.wire) else { return false };
    let mut delivered = 0;
    let mut sources = Vec::with_capacity(table.columns.len());
    for column in &table.columns {
        let raw = fields.get(&column.field_id);
        delivered += usize::from(raw.is_some());
        sources.push(raw.map_or(FieldSource::Null, FieldSource::Wire));
    }
    // A field that is missing would pass for a null one.
    let expected = table.columns.iter().enumerate().filter(|(i, c)| c.delivered || table.keys.contains(i)).count();
    if delivered != expected || fields.len() != expected {
        return false;
    }
    encoder
        .encode(&sources, schema_hash, &captured.version.server_version())
        .is_ok_and(|encoded| encoded.digest == captured.digest && encoded.key == captured.key)
}

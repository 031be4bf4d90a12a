//! What a registry delivers, as tables of the schema manifest (protocol version 3, "Schema manifest").

use super::{Column, Registry, Table};
use crate::manifest;

impl Registry {
    /// The delivered tables in UTF-8 order of their ids.
    pub fn manifest_tables(&self) -> Vec<manifest::Table> {
        let mut tables: Vec<manifest::Table> =
            self.tables.iter().filter(|table| !table.capture_only).map(|table| self.manifest_table(table)).collect();
        tables.sort_by(|a, b| a.table_id.cmp(&b.table_id));
        tables
    }

    fn manifest_table(&self, table: &Table) -> manifest::Table {
        let field_id = |index: Option<usize>| index.map(|index| table.columns[index].field_id.clone());
        let mut fields: Vec<manifest::Field> =
            table.columns.iter().filter(|column| column.delivered).map(field).collect();
        fields.sort_by(|a, b| a.field_id.cmp(&b.field_id));
        manifest::Table {
            table_id: table.id.clone(),
            relation_id: table.relation.to_string(),
            name: table.relation.name().to_owned(),
            composition: if self.rules_of(table.table_no).count() > 1
                || self.rules_of(table.table_no).any(crate::rule::Rule::has_joins)
            {
                manifest::Composition::MultiScope
            } else {
                manifest::Composition::SingleScope
            },
            primary_key_field_id: table.key_column().field_id.clone(),
            lifecycle: manifest::Lifecycle {
                created_at_field_id: field_id(table.lifecycle.created_at),
                updated_at_field_id: field_id(table.lifecycle.updated_at),
                deleted_at_field_id: field_id(table.lifecycle.deleted_at),
            },
            fields,
            indexes: [],
        }
    }
}

fn field(column: &Column) -> manifest::Field {
    manifest::Field {
        field_id: column.field_id.clone(),
        name: column.name.clone(),
        kind: column.portable,
        nullable: column.nullable,
        writable: column.writable,
        precision: column.decimal_bounds().0,
        scale: column.decimal_bounds().1,
    }
}

//! From pgoutput messages to changes of registered relations. Pure: bytes in, changes out.
//!
//! The wire format is parsed by `pg_walstream`; what stands here is what it does not know: which relations and columns
//! are registered, and that a relation which no longer matches the registry is drift, found before a row is misread.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use bytes::Bytes;
use pg_walstream::protocol::{ColumnData, LogicalReplicationMessage, LogicalReplicationParser, TupleData};
use tributary_shared::portable::PortableType;
use tributary_shared::registry::{Registry, Table};

/// One column's value of a decoded row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Datum {
    /// SQL null.
    Null,
    /// A TOASTed value that the change did not touch; it stands in the projection.
    Unchanged,
    /// PostgreSQL's text output; valid UTF-8.
    Text(Bytes),
}

impl Datum {
    /// The text, `None` when null or unchanged.
    pub fn text(&self) -> Option<&str> {
        match self {
            // Checked when the datum was made.
            Self::Text(bytes) => std::str::from_utf8(bytes).ok(),
            Self::Null | Self::Unchanged => None,
        }
    }
}

/// A row's registered columns, in the registry's order.
pub type Row = Vec<Datum>;

/// PostgreSQL's text of each column of a key, in key order.
pub type Key = Vec<Bytes>;

/// A change of one registered relation; `table` is its index in the registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A new row.
    Insert {
        /// Relation.
        table: usize,
        /// The row.
        row: Row,
    },
    /// A changed row.
    Update {
        /// Relation.
        table: usize,
        /// The key before, when the message carries it: the key changed, or the replica identity is FULL.
        old_key: Option<Key>,
        /// The row after.
        row: Row,
    },
    /// A deleted row.
    Delete {
        /// Relation.
        table: usize,
        /// Its key.
        key: Key,
    },
    /// Emptied relations.
    Truncate {
        /// Relations.
        tables: Vec<usize>,
    },
}

/// Why the stream has to stop at a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message cannot be read at all.
    #[error("a message of the stream cannot be decoded: {0}")]
    Malformed(String),
    /// A relation no longer matches the configuration.
    #[error("{detail}")]
    Drift {
        /// The relation.
        relation: String,
        /// What differs, and what to do.
        detail: String,
    },
    /// A value is not valid UTF-8 or a key is missing.
    #[error("{detail}")]
    BadRow {
        /// The relation.
        relation: String,
        /// What is wrong, without values.
        detail: String,
    },
}

/// How a streamed relation maps to a registered one.
#[derive(Debug)]
struct Mapping {
    table: usize,
    /// For each registered column its index in the message.
    columns: Vec<usize>,
    /// The key columns in key order, by their index in the message.
    keys: Vec<usize>,
}

/// Decodes messages; knows the relations that were announced since the stream began.
pub struct Decoder {
    parser: LogicalReplicationParser,
    tables: Vec<Table>,
    by_name: HashMap<(String, String), usize>,
    by_oid: HashMap<u32, Mapping>,
    /// Announced relations that are not configured: partitions, whose changes come under their root's name.
    strangers: HashMap<u32, String>,
}

impl Decoder {
    /// A decoder of the registry's relations, for a stream that begins now.
    pub fn new(registry: &Registry) -> Self {
        let tables = registry.tables.clone();
        let by_name = tables
            .iter()
            .enumerate()
            .map(|(i, t)| ((t.relation.schema().to_owned(), t.relation.name().to_owned()), i))
            .collect();
        Self {
            parser: LogicalReplicationParser::with_protocol_version(1),
            tables,
            by_name,
            by_oid: HashMap::new(),
            strangers: HashMap::new(),
        }
    }

    /// The change in a message; `None` for messages that announce something.
    ///
    /// # Errors
    /// See [`DecodeError`]; the stream has to stop at this message's transaction.
    pub fn decode(&mut self, message: Bytes) -> Result<Option<Change>, DecodeError> {
        let message =
            self.parser.parse_wal_message_bytes(message).map_err(|e| DecodeError::Malformed(e.to_string()))?.message;
        match message {
            LogicalReplicationMessage::Relation {
                relation_id,
                namespace,
                relation_name,
                replica_identity,
                columns,
            } => {
                let streamed: Vec<Streamed> = columns
                    .iter()
                    .map(|c| Streamed {
                        name: c.name.to_string(),
                        type_oid: c.type_id,
                        modifier: c.type_modifier,
                        key: c.is_key(),
                    })
                    .collect();
                if let Some(mapping) = self.map(&namespace, &relation_name, replica_identity, &streamed)? {
                    self.strangers.remove(&relation_id);
                    self.by_oid.insert(relation_id, mapping);
                } else {
                    self.by_oid.remove(&relation_id);
                    self.strangers.insert(relation_id, format!("{namespace}.{relation_name}"));
                }
                Ok(None)
            }
            LogicalReplicationMessage::Insert { relation_id, tuple } => {
                let mapping = self.mapping(relation_id)?;
                Ok(Some(Change::Insert { table: mapping.table, row: self.row(mapping, tuple)? }))
            }
            LogicalReplicationMessage::Update { relation_id, old_tuple, new_tuple, .. } => {
                let mapping = self.mapping(relation_id)?;
                let old_key = old_tuple.map(|old| self.key(mapping, &old)).transpose()?;
                Ok(Some(Change::Update { table: mapping.table, old_key, row: self.row(mapping, new_tuple)? }))
            }
            LogicalReplicationMessage::Delete { relation_id, old_tuple, .. } => {
                let mapping = self.mapping(relation_id)?;
                Ok(Some(Change::Delete { table: mapping.table, key: self.key(mapping, &old_tuple)? }))
            }
            LogicalReplicationMessage::Truncate { relation_ids, .. } => {
                let tables = relation_ids
                    .iter()
                    .map(|oid| self.mapping(*oid).map(|m| m.table))
                    .collect::<Result<Vec<_>, _>>()?;
                Ok(Some(Change::Truncate { tables }))
            }
            LogicalReplicationMessage::Type { .. } | LogicalReplicationMessage::Origin { .. } => Ok(None),
            other => Err(DecodeError::Malformed(format!("unexpected message {:?}", std::mem::discriminant(&other)))),
        }
    }

    fn mapping(&self, oid: u32) -> Result<&Mapping, DecodeError> {
        self.by_oid.get(&oid).ok_or_else(|| match self.strangers.get(&oid) {
            Some(relation) => DecodeError::Drift {
                relation: relation.clone(),
                detail: "the publication streams changes of a relation that is not configured".into(),
            },
            None => DecodeError::Malformed("a change of a relation that was never announced".into()),
        })
    }

    fn map(
        &self,
        schema: &str,
        name: &str,
        replica_identity: u8,
        columns: &[Streamed],
    ) -> Result<Option<Mapping>, DecodeError> {
        let relation = format!("{schema}.{name}");
        let drift = |detail: String| DecodeError::Drift { relation: relation.clone(), detail };
        let Some(&table) = self.by_name.get(&(schema.to_owned(), name.to_owned())) else { return Ok(None) };
        let registered = &self.tables[table];
        let mut indices = Vec::with_capacity(registered.columns.len());
        for column in &registered.columns {
            let Some(index) = columns.iter().position(|c| c.name == column.name) else {
                return Err(drift(format!("column {} was dropped or renamed", column.name)));
            };
            if columns[index].type_oid != column.type_info.oid {
                return Err(drift(format!("column {} has another type", column.name)));
            }
            // Declared digits are part of a decimal's type on the wire; other modifiers are not.
            if column.portable == PortableType::Decimal && columns[index].modifier != column.type_info.modifier {
                return Err(drift(format!("column {} has another precision or scale", column.name)));
            }
            indices.push(index);
        }
        let keys: Vec<usize> = registered.keys.iter().map(|key| indices[*key]).collect();
        let key_ok = match replica_identity {
            b'd' | b'i' => columns.iter().enumerate().all(|(i, c)| c.key == keys.contains(&i)),
            b'f' => true,
            _ => false,
        };
        if !key_ok {
            return Err(drift("its primary key or replica identity changed".into()));
        }
        Ok(Some(Mapping { table, columns: indices, keys }))
    }

    fn row(&self, mapping: &Mapping, tuple: TupleData) -> Result<Row, DecodeError> {
        let columns = tuple.columns;
        mapping
            .columns
            .iter()
            .map(|&index| {
                let column = columns.get(index).ok_or_else(|| self.bad_row(mapping, "a row has too few columns"))?;
                self.datum(mapping, column)
            })
            .collect()
    }

    fn key(&self, mapping: &Mapping, tuple: &TupleData) -> Result<Key, DecodeError> {
        let text = |index: &usize| {
            let column = tuple.columns.get(*index).ok_or_else(|| self.bad_row(mapping, "a row has too few columns"))?;
            match self.datum(mapping, column)? {
                Datum::Text(text) => Ok(text),
                Datum::Null | Datum::Unchanged => Err(self.bad_row(mapping, "a change does not carry its row's key")),
            }
        };
        mapping.keys.iter().map(text).collect()
    }

    fn datum(&self, mapping: &Mapping, column: &ColumnData) -> Result<Datum, DecodeError> {
        if column.is_text() {
            let bytes = column.raw_bytes();
            if std::str::from_utf8(&bytes).is_err() {
                return Err(self.bad_row(mapping, "a value is not valid UTF-8"));
            }
            Ok(Datum::Text(bytes))
        } else if column.is_null() {
            Ok(Datum::Null)
        } else if column.is_unchanged() {
            Ok(Datum::Unchanged)
        } else {
            Err(self.bad_row(mapping, "a value is not in text format"))
        }
    }

    fn bad_row(&self, mapping: &Mapping, detail: &str) -> DecodeError {
        let relation = self.tables[mapping.table].relation.to_string();
        DecodeError::BadRow { relation, detail: detail.into() }
    }
}

/// A column as the stream announces it.
struct Streamed {
    name: String,
    type_oid: u32,
    modifier: i32,
    key: bool,
}

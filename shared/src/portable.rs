//! Portable types (protocol version 3).

use serde::{Deserialize, Serialize};

/// What a field's values look like on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "placeholder")]
pub enum PortableType {
    String,
    Int,
    Int64,
    Decimal,
    Float,
    Boolean,
    Datetime,
    Date,
    Time,
    Json,
    Bytes,
}

impl PortableType {
    /// The mapping of a PostgreSQL type (a domain's base type).
    pub fn default_for(type_oid: u32) -> Self {
        match type_oid {
            16 => Self::Boolean,
            17 => Self::Bytes,
            20 | 26 => Self::Int64,
            21 | 23 => Self::Int,
            114 | 3802 => Self::Json,
            700 | 701 => Self::Float,
            1082 => Self::Date,
            1083 => Self::Time,
            1114 | 1184 => Self::Datetime,
            1700 => Self::Decimal,
            _ => Self::String,
        }
    }
}

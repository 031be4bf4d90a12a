//! Portable types: what a field's values look like on the wire (protocol version 3, "Portable types").
//!
//! A value that its portable type cannot hold is an error, never rounded, dropped or nulled. Errors name the reason
//! and never the value. Deliberately absent: PostgreSQL's own semantics (collation, arithmetic, time zones); only its
//! text output is read.

mod calendar;
mod json;
mod number;
mod value;

pub use json::{MAX_SAFE_INTEGER, canonical_json, write_string};
pub use value::{Value, write_blob};

use serde::{Deserialize, Serialize};

/// One of the eleven portable types.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortableType {
    /// Unicode text, never normalised.
    String,
    /// A signed 32-bit integer, a JSON number.
    Int,
    /// A signed 64-bit integer, a JSON string.
    Int64,
    /// An exact decimal number, a JSON string.
    Decimal,
    /// A finite binary64, a JSON number.
    Float,
    /// `true` or `false`.
    Boolean,
    /// A point in time, UTC, with six fraction digits.
    Datetime,
    /// A calendar date of the years 0001 to 9999.
    Date,
    /// A time of day with six fraction digits.
    Time,
    /// One JSON value as its canonical text (RFC 8785), in a JSON string.
    Json,
    /// Octets, in base64url without padding.
    Bytes,
}

/// OIDs of PostgreSQL's built-in types that do not map to `string`.
mod oid {
    pub const BOOL: u32 = 16;
    pub const BYTEA: u32 = 17;
    pub const INT8: u32 = 20;
    pub const INT2: u32 = 21;
    pub const INT4: u32 = 23;
    pub const OID: u32 = 26;
    pub const JSON: u32 = 114;
    pub const FLOAT4: u32 = 700;
    pub const FLOAT8: u32 = 701;
    pub const DATE: u32 = 1082;
    pub const TIME: u32 = 1083;
    pub const TIMESTAMP: u32 = 1114;
    pub const TIMESTAMPTZ: u32 = 1184;
    pub const NUMERIC: u32 = 1700;
    pub const JSONB: u32 = 3802;
}

impl PortableType {
    /// All portable types, in the order of their tags.
    pub const ALL: [Self; 11] = [
        Self::String,
        Self::Int,
        Self::Int64,
        Self::Decimal,
        Self::Float,
        Self::Boolean,
        Self::Datetime,
        Self::Date,
        Self::Time,
        Self::Json,
        Self::Bytes,
    ];

    /// The first octet of every canonical value of this type.
    pub const fn tag(self) -> u8 {
        match self {
            Self::String => 1,
            Self::Int => 2,
            Self::Int64 => 3,
            Self::Decimal => 4,
            Self::Float => 5,
            Self::Boolean => 6,
            Self::Datetime => 7,
            Self::Date => 8,
            Self::Time => 9,
            Self::Json => 10,
            Self::Bytes => 11,
        }
    }

    /// The type whose tag is `tag`.
    pub const fn from_tag(tag: u8) -> Option<Self> {
        let mut i = 0;
        while i < Self::ALL.len() {
            if Self::ALL[i].tag() == tag {
                return Some(Self::ALL[i]);
            }
            i += 1;
        }
        None
    }

    /// The type's name in manifests and configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Int => "int",
            Self::Int64 => "int64",
            Self::Decimal => "decimal",
            Self::Float => "float",
            Self::Boolean => "boolean",
            Self::Datetime => "datetime",
            Self::Date => "date",
            Self::Time => "time",
            Self::Json => "json",
            Self::Bytes => "bytes",
        }
    }

    /// The portable type of a column of PostgreSQL's type `base_oid`, unless the configuration says otherwise.
    /// A domain's caller passes the OID of its base type; every type without a mapping of its own is `string`.
    pub const fn default_for(base_oid: u32) -> Self {
        match base_oid {
            oid::INT2 | oid::INT4 => Self::Int,
            oid::INT8 | oid::OID => Self::Int64,
            oid::NUMERIC => Self::Decimal,
            oid::FLOAT4 | oid::FLOAT8 => Self::Float,
            oid::BOOL => Self::Boolean,
            oid::TIMESTAMP | oid::TIMESTAMPTZ => Self::Datetime,
            oid::DATE => Self::Date,
            oid::TIME => Self::Time,
            oid::JSON | oid::JSONB => Self::Json,
            oid::BYTEA => Self::Bytes,
            _ => Self::String,
        }
    }
}

impl std::fmt::Display for PortableType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What the values of one field must be.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FieldType {
    /// The portable type.
    #[serde(rename = "type")]
    pub kind: PortableType,
    /// Whether the field may be null.
    pub nullable: bool,
    /// Declared digits of a decimal; `None` is unbounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<u32>,
    /// Declared fraction digits of a decimal; `None` is unbounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<u32>,
}

impl FieldType {
    /// A field of this type that declares no precision.
    pub const fn new(kind: PortableType, nullable: bool) -> Self {
        Self { kind, nullable, precision: None, scale: None }
    }

    /// The same field with the precision and scale of a `numeric` column's type modifier (`atttypmod`).
    ///
    /// A scale that is negative or above the precision has no portable form: such a field declares neither, so that
    /// its values, which PostgreSQL keeps within the modifier, stay representable.
    #[must_use]
    pub const fn with_numeric_typmod(mut self, typmod: i32) -> Self {
        // A modifier is ((precision << 16) | (scale, 11 bits, signed)) + 4; -1 is none.
        if typmod >= 4 {
            let packed = typmod - 4;
            let precision = (packed >> 16) & 0xFFFF;
            let scale = ((packed & 0x7FF) ^ 1024) - 1024;
            if scale >= 0 && scale <= precision {
                self.precision = Some(precision as u32);
                self.scale = Some(scale as u32);
            }
        }
        self
    }
}

/// Why a value is refused. Never holds the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ValueError {
    /// SQL null where the field does not allow it.
    #[error("null in a field that is not nullable")]
    Null,
    /// No source for the value: the row is shorter than its description.
    #[error("the row has no such column")]
    Missing,
    /// Text that the source type's output never has.
    #[error("not a text of type {0}")]
    Malformed(PortableType),
    /// Wire JSON or octets that are not the one canonical form.
    #[error("not the canonical form of type {0}")]
    NotCanonical(PortableType),
    /// `NaN` or an infinity.
    #[error("not a finite value of type {0}")]
    NotFinite(PortableType),
    /// Outside the type's range: a date BC or beyond 9999, an integer too large, `24:00:00`.
    #[error("out of the range of type {0}")]
    OutOfRange(PortableType),
    /// A number that a binary64 would round.
    #[error("more digits than type float holds")]
    Inexact,
    /// More digits before the point than declared.
    #[error("beyond the declared precision")]
    Precision,
    /// More digits after the point than declared.
    #[error("beyond the declared scale")]
    Scale,
    /// Text that is not JSON, or a string in it that is not Unicode.
    #[error("not JSON text")]
    JsonSyntax,
    /// Nested deeper than any PostgreSQL server accepts by default.
    #[error("JSON text is nested too deeply")]
    JsonDepth,
    /// Two members of one object with the same name.
    #[error("JSON object with duplicate names")]
    JsonDuplicateName,
    /// An integer beyond ±(2^53−1), or a number beyond binary64.
    #[error("JSON number outside of the interoperable range")]
    JsonNumber,
}

#[cfg(test)]
mod tests;

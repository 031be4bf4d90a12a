//! One canonical value: read from PostgreSQL's text or from wire JSON, written as wire JSON or as canonical octets.

use std::borrow::Cow;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::calendar::{self, CalendarError};
use super::{FieldType, PortableType, ValueError, json, number};

/// A value in its one canonical form; borrows its text where the source already had it.
#[derive(Clone, PartialEq, Debug)]
pub struct Value<'a>(Form<'a>);

// Private, so that every `Value` is canonical: each has exactly one JSON value and exactly one octet string.
#[derive(Clone, PartialEq, Debug)]
enum Form<'a> {
    Null(PortableType),
    Int(i32),
    Int64(i64),
    /// Never negative zero.
    Float(f64),
    Boolean(bool),
    Bytes(Cow<'a, [u8]>),
    /// The types whose canonical value is a text.
    Text(PortableType, Cow<'a, str>),
}

impl CalendarError {
    fn of_postgres(self, kind: PortableType) -> ValueError {
        match self {
            Self::Malformed => ValueError::Malformed(kind),
            Self::OutOfRange => ValueError::OutOfRange(kind),
        }
    }
}

impl<'a> Value<'a> {
    /// SQL null of a field.
    ///
    /// # Errors
    /// The field is not nullable.
    pub const fn null(field: &FieldType) -> Result<Self, ValueError> {
        if field.nullable { Ok(Self(Form::Null(field.kind))) } else { Err(ValueError::Null) }
    }

    /// The value of a field from PostgreSQL's text output, under `DateStyle = ISO`, `TimeZone = UTC`,
    /// `bytea_output = hex` and `extra_float_digits = 1`.
    ///
    /// # Errors
    /// The field's type cannot hold the value.
    pub fn from_postgres_text(field: &FieldType, text: &'a str) -> Result<Self, ValueError> {
        let kind = field.kind;
        let form = match kind {
            PortableType::String => Form::Text(kind, Cow::Borrowed(text)),
            PortableType::Int => Form::Int(integer(kind, text, ValueError::Malformed)?),
            PortableType::Int64 => Form::Int64(integer(kind, text, ValueError::Malformed)?),
            PortableType::Decimal => Form::Text(kind, Cow::Borrowed(number::decimal_from_postgres(field, text)?)),
            PortableType::Float => Form::Float(number::float_from_postgres(text)?),
            PortableType::Boolean => match text {
                "t" => Form::Boolean(true),
                "f" => Form::Boolean(false),
                _ => return Err(ValueError::Malformed(kind)),
            },
            PortableType::Datetime => Form::Text(kind, Cow::Owned(datetime_from_postgres(text)?)),
            PortableType::Date => {
                calendar::check_date(text.as_bytes())
                    .map_err(|error| calendar::postgres_range_error(text).unwrap_or(error).of_postgres(kind))?;
                Form::Text(kind, Cow::Borrowed(text))
            }
            PortableType::Time => {
                let mut out = String::with_capacity(15);
                calendar::write_time(text, &mut out).map_err(|error| error.of_postgres(kind))?;
                Form::Text(kind, Cow::Owned(out))
            }
            PortableType::Json => Form::Text(kind, Cow::Owned(json::canonical_json(text)?)),
            PortableType::Bytes => Form::Bytes(Cow::Owned(bytes_from_postgres(text)?)),
        };
        Ok(Self(form))
    }

    /// The value of a field from its wire JSON. Accepts only the canonical value, in any spelling of a JSON string.
    ///
    /// # Errors
    /// Another JSON type, another form of the value, or null in a field that is not nullable.
    pub fn from_wire(field: &FieldType, raw: &'a str) -> Result<Self, ValueError> {
        let kind = field.kind;
        let raw = raw.trim_matches([' ', '\t', '\n', '\r']);
        let form = match (kind, raw) {
            (_, "null") => return Self::null(field),
            (PortableType::Boolean, "true") => Form::Boolean(true),
            (PortableType::Boolean, "false") => Form::Boolean(false),
            (PortableType::Boolean, _) => return Err(ValueError::NotCanonical(kind)),
            (PortableType::Int, _) => Form::Int(integer(kind, raw, ValueError::NotCanonical)?),
            (PortableType::Float, _) => Form::Float(number::float_from_wire(raw)?),
            _ => match json::read_string(raw).map_err(|_| ValueError::NotCanonical(kind))? {
                Cow::Borrowed(content) => return Self::from_canonical_text(field, content),
                Cow::Owned(content) => return Value::from_canonical_text(field, &content).map(Value::into_owned),
            },
        };
        Ok(Self(form))
    }

    /// The value whose wire JSON is a string with this content.
    fn from_canonical_text(field: &FieldType, text: &'a str) -> Result<Self, ValueError> {
        let kind = field.kind;
        let refused = ValueError::NotCanonical(kind);
        match kind {
            PortableType::String => {}
            PortableType::Int64 => return Ok(Self(Form::Int64(integer(kind, text, ValueError::NotCanonical)?))),
            PortableType::Decimal => number::check_decimal(field, text)?,
            PortableType::Datetime => calendar::check_datetime(text.as_bytes()).map_err(|_| refused)?,
            PortableType::Date => calendar::check_date(text.as_bytes()).map_err(|_| refused)?,
            PortableType::Time => calendar::check_time(text.as_bytes()).map_err(|_| refused)?,
            PortableType::Json => {
                if json::canonical_json(text)? != text {
                    return Err(refused);
                }
            }
            PortableType::Bytes => {
                // The engine refuses padding, foreign characters and trailing bits: one spelling for each value.
                let octets = URL_SAFE_NO_PAD.decode(text).map_err(|_| refused)?;
                return Ok(Self(Form::Bytes(Cow::Owned(octets))));
            }
            PortableType::Int | PortableType::Float | PortableType::Boolean => return Err(refused),
        }
        Ok(Self(Form::Text(kind, Cow::Borrowed(text))))
    }

    /// The value from its `typed_value` octets: the inverse of [`Value::write_octets`].
    ///
    /// # Errors
    /// The octets are not exactly one canonical value of `kind`.
    pub fn from_octets(kind: PortableType, octets: &'a [u8]) -> Result<Self, ValueError> {
        let refused = ValueError::NotCanonical(kind);
        let payload = match octets {
            [tag, 0] if *tag == kind.tag() => return Ok(Self(Form::Null(kind))),
            [tag, 1, payload @ ..] if *tag == kind.tag() => payload,
            _ => return Err(refused),
        };
        let form = match kind {
            PortableType::Int => Form::Int(i32::from_be_bytes(payload.try_into().map_err(|_| refused)?)),
            PortableType::Int64 => Form::Int64(i64::from_be_bytes(payload.try_into().map_err(|_| refused)?)),
            PortableType::Float => {
                let number = f64::from_be_bytes(payload.try_into().map_err(|_| refused)?);
                let negative_zero = number == 0.0 && number.is_sign_negative();
                if !number.is_finite() || negative_zero {
                    return Err(refused);
                }
                Form::Float(number)
            }
            PortableType::Boolean => match payload {
                [0] => Form::Boolean(false),
                [1] => Form::Boolean(true),
                _ => return Err(refused),
            },
            PortableType::Bytes => Form::Bytes(Cow::Borrowed(read_blob(payload).ok_or(refused)?)),
            _ => {
                let text = std::str::from_utf8(read_blob(payload).ok_or(refused)?).map_err(|_| refused)?;
                return Self::from_canonical_text(&FieldType::new(kind, true), text);
            }
        };
        Ok(Self(form))
    }

    /// The same value, without what it borrowed.
    pub fn into_owned(self) -> Value<'static> {
        Value(match self.0 {
            Form::Null(kind) => Form::Null(kind),
            Form::Int(n) => Form::Int(n),
            Form::Int64(n) => Form::Int64(n),
            Form::Float(n) => Form::Float(n),
            Form::Boolean(b) => Form::Boolean(b),
            Form::Bytes(octets) => Form::Bytes(Cow::Owned(octets.into_owned())),
            Form::Text(kind, text) => Form::Text(kind, Cow::Owned(text.into_owned())),
        })
    }

    /// The portable type.
    pub const fn kind(&self) -> PortableType {
        match &self.0 {
            Form::Null(kind) | Form::Text(kind, _) => *kind,
            Form::Int(_) => PortableType::Int,
            Form::Int64(_) => PortableType::Int64,
            Form::Float(_) => PortableType::Float,
            Form::Boolean(_) => PortableType::Boolean,
            Form::Bytes(_) => PortableType::Bytes,
        }
    }

    /// Whether this is SQL null.
    pub const fn is_null(&self) -> bool {
        matches!(self.0, Form::Null(_))
    }

    /// Appends the wire JSON.
    pub fn write_json(&self, out: &mut String) {
        match &self.0 {
            Form::Null(_) => out.push_str("null"),
            Form::Int(n) => write!(out, "{n}").expect("a String takes every write"),
            Form::Int64(n) => write!(out, "\"{n}\"").expect("a String takes every write"),
            Form::Float(n) => out.push_str(&number::es6(*n)),
            Form::Boolean(b) => out.push_str(if *b { "true" } else { "false" }),
            Form::Bytes(octets) => {
                out.push('"');
                URL_SAFE_NO_PAD.encode_string(octets, out);
                out.push('"');
            }
            Form::Text(_, text) => json::write_string(text, out),
        }
    }

    /// Appends the `typed_value` octets.
    pub fn write_octets(&self, out: &mut Vec<u8>) {
        out.push(self.kind().tag());
        if self.is_null() {
            out.push(0);
            return;
        }
        out.push(1);
        match &self.0 {
            Form::Null(_) => {}
            Form::Int(n) => out.extend_from_slice(&n.to_be_bytes()),
            Form::Int64(n) => out.extend_from_slice(&n.to_be_bytes()),
            Form::Float(n) => out.extend_from_slice(&n.to_be_bytes()),
            Form::Boolean(b) => out.push(u8::from(*b)),
            Form::Bytes(octets) => write_blob(octets, out),
            Form::Text(_, text) => write_blob(text.as_bytes(), out),
        }
    }
}

/// Appends `blob(octets)`: the length as eight big-endian octets, then the octets.
pub fn write_blob(octets: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(octets.len() as u64).to_be_bytes());
    out.extend_from_slice(octets);
}

/// The content of octets that are exactly one blob.
fn read_blob(octets: &[u8]) -> Option<&[u8]> {
    let (length, content) = octets.split_first_chunk::<8>()?;
    (u64::from_be_bytes(*length) == content.len() as u64).then_some(content)
}

fn integer<T: std::str::FromStr>(
    kind: PortableType,
    text: &str,
    malformed: fn(PortableType) -> ValueError,
) -> Result<T, ValueError> {
    if !number::is_canonical_integer(text) {
        return Err(malformed(kind));
    }
    text.parse().map_err(|_| ValueError::OutOfRange(kind))
}

/// PostgreSQL's `YYYY-MM-DD HH:MM:SS[.f…]`, with `+00` when the type has a time zone.
fn datetime_from_postgres(text: &str) -> Result<String, ValueError> {
    const KIND: PortableType = PortableType::Datetime;
    if let Some(error) = calendar::postgres_range_error(text) {
        return Err(error.of_postgres(KIND));
    }
    let malformed = ValueError::Malformed(KIND);
    let (date, time) = text.split_at_checked(calendar::DATE_LEN).ok_or(malformed)?;
    calendar::check_date(date.as_bytes()).map_err(|error| error.of_postgres(KIND))?;
    let time = time.strip_prefix(' ').ok_or(malformed)?;
    let mut out = String::with_capacity(27);
    out.push_str(date);
    out.push('T');
    calendar::write_time(time.strip_suffix("+00").unwrap_or(time), &mut out)
        .map_err(|error| error.of_postgres(KIND))?;
    out.push('Z');
    Ok(out)
}

/// PostgreSQL's `\x` and lowercase hexadecimal.
fn bytes_from_postgres(text: &str) -> Result<Vec<u8>, ValueError> {
    let refused = ValueError::Malformed(PortableType::Bytes);
    let digits = text.strip_prefix("\\x").ok_or(refused)?.as_bytes();
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(refused),
    };
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(refused);
    }
    pairs.iter().map(|&[high, low]| Ok(nibble(high)? << 4 | nibble(low)?)).collect()
}

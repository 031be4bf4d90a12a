//! JSON, strictly: no repeated member at any level, and integers told apart from other numbers.
//!
//! Typed deserialization is not strict enough: `serde_json` reads a struct from an array, too, and a missing member
//! as a null one. Requests are small; a tree costs little.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::InvalidRequest;

/// Integers of an envelope lie in ±(2^53−1).
pub const MAX_INTEGER: i64 = (1 << 53) - 1;

/// A JSON value without repeated members.
#[derive(Clone, PartialEq)]
pub(super) enum Json {
    Null,
    Boolean(bool),
    /// Written as an integer, within ±(2^53−1).
    Integer(i64),
    /// Any other number: with fraction or exponent, `-0`, or too large.
    Other(f64),
    String(String),
    Array(Vec<Json>),
    /// Members in the order of the text.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// The value of a whole text: valid UTF-8, nothing behind it, nested at most 128 deep.
    pub(super) fn parse(octets: &[u8]) -> Result<Self, InvalidRequest> {
        serde_json::from_slice(octets).map_err(|_| InvalidRequest)
    }

    pub(super) fn string(self) -> Result<String, InvalidRequest> {
        if let Self::String(text) = self { Ok(text) } else { Err(InvalidRequest) }
    }

    pub(super) fn integer(&self) -> Result<i64, InvalidRequest> {
        if let Self::Integer(number) = self { Ok(*number) } else { Err(InvalidRequest) }
    }

    pub(super) fn boolean(&self) -> Result<bool, InvalidRequest> {
        if let Self::Boolean(truth) = self { Ok(*truth) } else { Err(InvalidRequest) }
    }

    pub(super) fn object(self) -> Result<Members, InvalidRequest> {
        if let Self::Object(members) = self { Ok(Members(members)) } else { Err(InvalidRequest) }
    }

    /// The value for an answer that shows the client what it sent.
    pub(super) fn to_value(&self) -> serde_json::Value {
        use serde_json::Value;
        match self {
            Self::Null => Value::Null,
            Self::Boolean(truth) => Value::Bool(*truth),
            Self::Integer(number) => Value::from(*number),
            Self::Other(number) => Value::from(*number),
            Self::String(text) => Value::String(text.clone()),
            Self::Array(items) => items.iter().map(Self::to_value).collect(),
            Self::Object(members) => members.iter().map(|(name, value)| (name.clone(), value.to_value())).collect(),
        }
    }
}

/// The members of an object, taken one by one until none may be left.
#[derive(Clone)]
pub(super) struct Members(Vec<(String, Json)>);

impl Members {
    pub(super) fn get(&self, name: &str) -> Option<&Json> {
        self.0.iter().find_map(|(known, value)| (known == name).then_some(value))
    }

    pub(super) fn optional(&mut self, name: &str) -> Option<Json> {
        let index = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(index).1)
    }

    pub(super) fn required(&mut self, name: &str) -> Result<Json, InvalidRequest> {
        self.optional(name).ok_or(InvalidRequest)
    }

    /// No unknown member is left.
    pub(super) fn finish(self) -> Result<(), InvalidRequest> {
        if self.0.is_empty() { Ok(()) } else { Err(InvalidRequest) }
    }

    pub(super) fn into_members(self) -> Vec<(String, Json)> {
        self.0
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value without repeated members")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<Json, E> {
        Ok(Json::Boolean(truth))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Json, E> {
        let within = (-MAX_INTEGER..=MAX_INTEGER).contains(&number);
        Ok(if within { Json::Integer(number) } else { Json::Other(number as f64) })
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Json, E> {
        Ok(match i64::try_from(number) {
            Ok(number) if number <= MAX_INTEGER => Json::Integer(number),
            _ => Json::Other(number as f64),
        })
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Other(number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Json, E> {
        Ok(Json::String(text.to_owned()))
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<Json, E> {
        Ok(Json::String(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut members: Vec<(String, Json)> = Vec::new();
        while let Some(member) = access.next_entry()? {
            members.push(member);
        }
        let mut names: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(de::Error::custom("repeated member"));
        }
        Ok(Json::Object(members))
    }
}

//! Strict reading of the protocol's envelopes: exact members, exact types, and nothing beside them.
//!
//! Messages name members and places, never values.

use std::collections::BTreeMap;

use crate::canonical::{Digest, NotCanonical, hex};
use crate::http::{HttpError, Response};
use crate::json::Json;

type Members = BTreeMap<String, Json>;

/// Why a request brought nothing.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server broke the contract.
    #[error("protocol violation: {0}")]
    Violation(String),
    /// A well-formed error answer.
    #[error("{status} {code}")]
    Api {
        /// The HTTP status.
        status: u16,
        /// `error.code`
        code: String,
        /// The members of `error`.
        error: Json,
    },
    /// No answer.
    #[error(transparent)]
    Transport(#[from] HttpError),
}

impl ClientError {
    /// The code of an error answer.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Api { code, .. } => Some(code),
            _ => None,
        }
    }
}

impl From<NotCanonical> for ClientError {
    fn from(error: NotCanonical) -> Self {
        Self::Violation(error.to_string())
    }
}

pub(crate) type Result<T> = std::result::Result<T, ClientError>;
/// The JSON body of a 200 answer; the well-formed error of any other.
///
/// # Errors
/// [`ClientError::Api`] for an error answer, [`ClientError::Violation`] for one that is not exact.
pub fn answer(path: &str, response: &Response) -> Result<Json> {
    let status = response.status;
    require(
        response.content_type.as_deref().is_some_and(|kind| kind.starts_with("application/json")),
        &format!("{path} {status}: not JSON"),
    )?;
    let body =
        Json::parse(&response.body).map_err(|error| ClientError::Violation(format!("{path} {status}: {error}")))?;
    if status == 200 {
        return Ok(body);
    }
    let place = format!("{path} {status}");
    exact(&body, &["error"], &place)?;
    let error = member(&body, "error", &place)?;
    let code = text(error, "code", &place)?.to_owned();
    text(error, "message", &place)?;
    let transient = matches!(status, 429 | 503);
    require(flag(error, "retryable", &place)? == transient, &format!("{place}: retryable"))?;
    let retry_after = response.retry_after.as_deref();
    require(
        !transient || retry_after.is_some_and(|value| !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit())),
        &format!("{place}: Retry-After"),
    )?;
    Err(ClientError::Api { status, code, error: error.clone() })
}

/// The digest of a checksum object as it stands on the wire.
///
/// # Errors
/// It is not exactly of the form of contract.md section 2.
pub fn digest_of(checksum: &Json, place: &str) -> Result<Digest> {
    exact(checksum, &["algorithm", "version", "encoding", "digest"], place)?;
    require(
        text(checksum, "algorithm", place)? == "sha256"
            && int(checksum, "version", place)? == 1
            && text(checksum, "encoding", place)? == "hex",
        place,
    )?;
    let digits = text(checksum, "digest", place)?;
    let mut digest = [0; 32];
    require(digits.len() == 64 && digits.is_ascii(), place)?;
    for (octet, pair) in digest.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).unwrap_or_default();
        *octet = u8::from_str_radix(pair, 16).map_err(|_| ClientError::Violation(place.to_owned()))?;
    }
    // Digits other than these 64 lowercase ones do not come back.
    require(hex(&digest) == digits, place)?;
    Ok(digest)
}

pub(crate) fn violation<T>(message: &str) -> Result<T> {
    Err(ClientError::Violation(message.to_owned()))
}

pub(crate) fn require(condition: bool, message: &str) -> Result<()> {
    if condition { Ok(()) } else { violation(message) }
}

pub(crate) fn exact(value: &Json, names: &[&str], place: &str) -> Result<()> {
    let whole = value
        .as_object()
        .is_some_and(|members| members.len() == names.len() && names.iter().all(|name| members.contains_key(*name)));
    require(whole, &format!("{place}: the members are not exactly {}", names.join(", ")))
}

pub(crate) fn member<'a>(value: &'a Json, name: &str, place: &str) -> Result<&'a Json> {
    value.get(name).ok_or_else(|| ClientError::Violation(format!("{place}: no {name}")))
}

pub(crate) fn typed<T>(value: Option<T>, name: &str, place: &str) -> Result<T> {
    value.ok_or_else(|| ClientError::Violation(format!("{place}: {name} is missing or of another type")))
}

pub(crate) fn text<'a>(value: &'a Json, name: &str, place: &str) -> Result<&'a str> {
    typed(value.get(name).and_then(Json::as_text), name, place)
}

pub(crate) fn int(value: &Json, name: &str, place: &str) -> Result<i64> {
    typed(value.get(name).and_then(Json::as_int), name, place)
}

pub(crate) fn flag(value: &Json, name: &str, place: &str) -> Result<bool> {
    typed(value.get(name).and_then(Json::as_bool), name, place)
}

pub(crate) fn list<'a>(value: &'a Json, name: &str, place: &str) -> Result<&'a [Json]> {
    typed(value.get(name).and_then(Json::as_list), name, place)
}

pub(crate) fn object_of<'a>(value: &'a Json, name: &str, place: &str) -> Result<&'a Members> {
    typed(value.get(name).and_then(Json::as_object), name, place)
}

pub(crate) fn nonempty(value: &Json, place: &str) -> Result<String> {
    match value.as_text() {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => violation(place),
    }
}

/// A list of scope ids: in raw UTF-8 order (contract.md section 2), none twice.
pub(crate) fn sorted_texts(value: &Json, name: &str, place: &str) -> Result<Vec<String>> {
    let texts = list(value, name, place)?.iter().map(|item| nonempty(item, place)).collect::<Result<Vec<_>>>()?;
    require(texts.is_sorted_by(|a, b| a < b), &format!("{place}: {name} is not in order"))?;
    Ok(texts)
}

//! Who is asking. The user is transport context: never taken from a JSON field (ADR 003, "Pull request rules").
//!
//! Either a signed JWT as bearer token, whose `sub` is the user, or an identity header of a trusted proxy, which
//! must be switched on. Every failure is the one [`AuthRequired`]. Deliberately absent: any look at the token before
//! its signature is verified but for the header that selects the key, and any algorithm that a key was not made for.

#[cfg(test)]
mod tests;

use std::fmt;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::jwks::KeyFile;

/// Clocks of issuers may differ by this many seconds, unless a setting says otherwise.
const LEEWAY_SECONDS: u32 = 60;
/// No bearer token is longer; bounds what an unauthenticated request can cause.
const MAX_TOKEN_OCTETS: usize = 16 * 1024;
/// As many octets as the MAC has (RFC 7518, section 3.2).
const MIN_SECRET_OCTETS: usize = 32;

/// The request has no valid identity. It never tells why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("authentication is required")]
pub struct AuthRequired;

impl From<AuthRequired> for ApiError {
    fn from(_: AuthRequired) -> Self {
        Self::AuthRequired
    }
}

/// A secret that is too short for its algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the JWT secret has fewer than 32 octets")]
pub struct ShortSecret;

/// An authenticated user. Personal data: `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct UserId(String);

impl UserId {
    fn parse(text: &str) -> Result<Self, AuthRequired> {
        // PostgreSQL has no U+0000 in texts, so it could not be stored.
        if text.is_empty() || text.contains('\0') { Err(AuthRequired) } else { Ok(Self(text.to_owned())) }
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UserId({} octets)", self.0.len())
    }
}

/// Who is asking, and with which claims (`:claims` of assignments).
#[derive(Clone, PartialEq)]
pub struct Identity {
    /// The user.
    pub user: UserId,
    /// All claims of the token; of a trusted header only `sub`.
    pub claims: Value,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("user", &self.user).finish_non_exhaustive()
    }
}

/// How requests are authenticated.
#[derive(Clone)]
pub enum Authenticator {
    /// `Authorization: Bearer` with a JWT.
    Jwt(JwtVerifier),
    /// A header that a proxy in front sets, and strips from what comes in. Only for pullers that nobody else
    /// reaches.
    TrustedHeader(HeaderName),
}

/// A key, for exactly one algorithm. The pair is fixed by the settings and the key's type, never by the token.
#[derive(Clone)]
pub(crate) struct VerificationKey {
    /// Matched with the token's `kid` when both have one.
    pub(crate) id: Option<String>,
    pub(crate) algorithm: Algorithm,
    pub(crate) key: DecodingKey,
}

/// Verifies JWTs.
#[derive(Clone)]
pub struct JwtVerifier {
    secrets: Vec<VerificationKey>,
    file: Option<KeyFile>,
    leeway_seconds: u32,
    audience: Option<String>,
    issuer: Option<String>,
}

impl JwtVerifier {
    /// Tokens signed by HS256 with any of these secrets: several, so that they rotate.
    ///
    /// # Errors
    /// A secret has fewer than 32 octets, or there is none.
    pub fn hs256<'a>(secrets: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, ShortSecret> {
        let key = |secret: &[u8]| {
            if secret.len() < MIN_SECRET_OCTETS {
                return Err(ShortSecret);
            }
            let key = DecodingKey::from_secret(secret).map_err(|_| ShortSecret)?;
            Ok(VerificationKey { id: None, algorithm: Algorithm::HS256, key })
        };
        let keys = secrets.into_iter().map(key).collect::<Result<Vec<_>, _>>()?;
        if keys.is_empty() { Err(ShortSecret) } else { Ok(Self::of(keys, None)) }
    }

    /// Tokens signed by RS256, ES256 or EdDSA with a key of this file.
    pub fn key_file(file: KeyFile) -> Self {
        Self::of(Vec::new(), Some(file))
    }

    fn of(secrets: Vec<VerificationKey>, file: Option<KeyFile>) -> Self {
        Self { secrets, file, leeway_seconds: LEEWAY_SECONDS, audience: None, issuer: None }
    }

    /// How far the clocks of issuers may differ.
    #[must_use]
    pub fn with_leeway(mut self, seconds: u32) -> Self {
        self.leeway_seconds = seconds;
        self
    }

    /// Tokens must name this audience. Without it, an `aud` claim is not looked at.
    #[must_use]
    pub fn with_audience(mut self, audience: String) -> Self {
        self.audience = Some(audience);
        self
    }

    /// Tokens must name this issuer.
    #[must_use]
    pub fn with_issuer(mut self, issuer: String) -> Self {
        self.issuer = Some(issuer);
        self
    }

    fn verify(&self, token: &str, now: i64) -> Result<Identity, AuthRequired> {
        if token.len() > MAX_TOKEN_OCTETS {
            return Err(AuthRequired);
        }
        let header = decode_header(token).map_err(|_| AuthRequired)?;
        // An extension that must be understood, and none is (RFC 7515, section 4.1.11).
        if header.crit.is_some() {
            return Err(AuthRequired);
        }
        let fits = |key: &&VerificationKey| {
            let named = key.id.is_none() || header.kid.is_none() || key.id == header.kid;
            named && key.algorithm == header.alg
        };
        let verified = |key: &VerificationKey| decode::<Value>(token, &key.key, &self.validation(key.algorithm)).ok();
        let published = self.file.as_ref().map(KeyFile::keys).unwrap_or_default();
        let claims =
            self.secrets.iter().chain(published.iter()).filter(fits).find_map(verified).ok_or(AuthRequired)?.claims;
        check_times(&claims, now, self.leeway_seconds)?;
        let user = UserId::parse(claims.get("sub").and_then(Value::as_str).ok_or(AuthRequired)?)?;
        Ok(Identity { user, claims })
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        // Times are checked against the caller's clock, below.
        validation.validate_exp = false;
        validation.required_spec_claims.clear();
        validation.validate_aud = self.audience.is_some();
        if let Some(audience) = &self.audience {
            validation.set_audience(&[audience]);
            validation.required_spec_claims.insert("aud".to_owned());
        }
        if let Some(issuer) = &self.issuer {
            validation.set_issuer(&[issuer]);
            validation.required_spec_claims.insert("iss".to_owned());
        }
        validation
    }
}

/// `exp` is required: a token that is valid for ever cannot be taken back. `nbf` is heeded when there is one.
fn check_times(claims: &Value, now: i64, leeway_seconds: u32) -> Result<(), AuthRequired> {
    let (now, leeway) = (now as f64, f64::from(leeway_seconds));
    let expires = claims.get("exp").and_then(Value::as_f64).ok_or(AuthRequired)?;
    let begins = claims.get("nbf").map_or(Ok(f64::MIN), |nbf| nbf.as_f64().ok_or(AuthRequired))?;
    if now < expires + leeway && begins <= now + leeway { Ok(()) } else { Err(AuthRequired) }
}

impl Authenticator {
    /// Who sends a request with these headers, at `now` in seconds since 1970 UTC.
    pub fn authenticate(&self, headers: &HeaderMap, now: i64) -> Result<Identity, AuthRequired> {
        match self {
            Self::Jwt(verifier) => verifier.verify(bearer(only(headers, &AUTHORIZATION)?)?, now),
            Self::TrustedHeader(name) => {
                let value = std::str::from_utf8(only(headers, name)?.as_bytes()).map_err(|_| AuthRequired)?;
                let user = UserId::parse(value)?;
                let claims = json!({"sub": user.as_str()});
                Ok(Identity { user, claims })
            }
        }
    }
}

/// The header's value, if it stands there once: of two, a proxy and we might each believe another.
fn only<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Result<&'h HeaderValue, AuthRequired> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(AuthRequired),
    }
}

fn bearer(value: &HeaderValue) -> Result<&str, AuthRequired> {
    let (scheme, token) = value.to_str().map_err(|_| AuthRequired)?.split_once(' ').ok_or(AuthRequired)?;
    if scheme.eq_ignore_ascii_case("bearer") { Ok(token.trim_start_matches(' ')) } else { Err(AuthRequired) }
}

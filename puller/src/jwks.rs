//! Public keys of users' tokens from a JWKS file (RFC 7517), read again while the puller runs, so that keys rotate.
//!
//! Each key is for exactly one algorithm, which its type decides. Deliberately absent: symmetric keys (a document that is
//! public must not make a secret of what it holds), and any key that a token brings along or points to.

#[cfg(test)]
mod tests;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::auth::VerificationKey;

/// Time between two looks at the file; a key that was taken out is trusted for no longer.
const INTERVAL: Duration = Duration::from_secs(5);
/// A larger document is refused.
const MAX_OCTETS: u64 = 256 * 1024;
/// Bounds how many signatures one token without `kid` can cause to be verified.
const MAX_KEYS: usize = 32;
/// Octets of an RSA modulus (RFC 7518, section 3.3), and a bound on what verifying costs.
const RSA_OCTETS: std::ops::RangeInclusive<usize> = 256..=1024;
/// Octets of a coordinate of P-256, and of a key of Ed25519.
const CURVE_OCTETS: usize = 32;

/// Why a file gives no keys.
#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] std::io::Error),
    /// Past the bound.
    #[error("it is larger than {MAX_OCTETS} octets")]
    TooLarge,
    /// Not a key set.
    #[error("it is not a JSON object with an array `keys`")]
    Malformed,
    /// Past the bound.
    #[error("it has more than {MAX_KEYS} keys")]
    TooManyKeys,
    /// None of its keys can be used.
    #[error("it has no key for RS256 (2048 bits or more), ES256 or EdDSA (Ed25519)")]
    NoKey,
}

/// The keys of a document. Those that are of another kind are left out (RFC 7517, section 5).
fn parse(text: &[u8]) -> Result<Vec<VerificationKey>, JwksError> {
    let document: Value = serde_json::from_slice(text).map_err(|_| JwksError::Malformed)?;
    let all = document.get("keys").and_then(Value::as_array).ok_or(JwksError::Malformed)?;
    if all.len() > MAX_KEYS {
        return Err(JwksError::TooManyKeys);
    }
    let keys: Vec<_> = all.iter().filter_map(usable).collect();
    if keys.is_empty() { Err(JwksError::NoKey) } else { Ok(keys) }
}

fn usable(key: &Value) -> Option<VerificationKey> {
    let jwk: Jwk = serde_json::from_value(key.clone()).ok()?;
    let octets = |member: &str| Some(octets_of(key.get(member)?.as_str()?)?.len());
    let (algorithm, name) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) if RSA_OCTETS.contains(&octets("n")?) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(curve)
            if curve.curve == EllipticCurve::P256 && octets("x")? == CURVE_OCTETS && octets("y")? == CURVE_OCTETS =>
        {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(pair)
            if pair.curve == EllipticCurve::Ed25519 && octets("x")? == CURVE_OCTETS =>
        {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let signs = jwk.common.public_key_use.as_ref().is_none_or(|purpose| *purpose == PublicKeyUse::Signature);
    let verifies = jwk.common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
    let named = jwk.common.key_algorithm.is_none_or(|algorithm| algorithm == name);
    if !(signs && verifies && named) {
        return None;
    }
    let key = DecodingKey::from_jwk(&jwk).ok()?;
    Some(VerificationKey { id: jwk.common.key_id, algorithm, key })
}

/// base64url without padding, as every number in a JWK is.
fn octets_of(text: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(text).ok()
}

fn read(path: &Path) -> Result<Vec<VerificationKey>, JwksError> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(MAX_OCTETS + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_OCTETS { Err(JwksError::TooLarge) } else { parse(&text) }
}

/// The keys of a file, as they were when it could last be read.
#[derive(Clone)]
pub struct KeyFile {
    path: PathBuf,
    keys: Arc<RwLock<Arc<Vec<VerificationKey>>>>,
}

impl KeyFile {
    /// Reads it.
    ///
    /// # Errors
    /// It gives no keys.
    pub fn open(path: PathBuf) -> Result<Self, JwksError> {
        let keys = Arc::new(read(&path)?);
        Ok(Self { path, keys: Arc::new(RwLock::new(keys)) })
    }

    /// The keys in force.
    pub(crate) fn keys(&self) -> Arc<Vec<VerificationKey>> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads it again. When it gives no keys, those that were read before stay in force.
    ///
    /// # Errors
    /// It gives no keys.
    pub fn renew(&self) -> Result<(), JwksError> {
        let keys = Arc::new(read(&self.path)?);
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// Reads it again and again until `stop`.
    pub async fn follow(self, stop: CancellationToken) {
        let mut failing = false;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
            let file = self.clone();
            let Ok(outcome) = tokio::task::spawn_blocking(move || file.renew()).await else { continue };
            if let Err(error) = &outcome {
                metrics::counter!("tributary_jwks_failures_total").increment(1);
                // Once for each time that it begins: the counter tells how long it lasts.
                if !failing {
                    tracing::warn!(%error, "the JWKS file gives no keys: those that were read before stay in force");
                }
            } else if failing {
                tracing::info!("the JWKS file gives keys again");
            }
            failing = outcome.is_err();
        }
    }
}

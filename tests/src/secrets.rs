//! The secrets of a sandbox: made once per directory, so that a sandbox that is started again honours the tokens
//! that it gave out before.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{EncodingKey, Header, encode};
use serde::{Deserialize, Serialize};

use crate::ready::write_private;

/// How long a bearer token is valid.
const TOKEN_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// A sandbox's token may be used on a clock that is this far behind.
const CLOCK_SKEW: Duration = Duration::from_secs(60);

/// What the programs of one sandbox share.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Secrets {
    /// PostgreSQL's superuser.
    pub database_password: String,
    /// HS256 of bearer tokens.
    pub jwt_secret: String,
    /// The key ring of cursors, `key_id:secret`.
    pub token_keys: String,
}

#[derive(Serialize)]
struct Claims<'a> {
    sub: &'a str,
    iat: u64,
    exp: u64,
}

impl Secrets {
    /// The secrets in this file; new ones when there is none.
    ///
    /// # Errors
    /// The file is of another form or cannot be written.
    pub fn load_or_create(path: &Path) -> anyhow::Result<Self> {
        if path.exists() {
            let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            return serde_json::from_slice(&text).with_context(|| format!("{} is not of a sandbox", path.display()));
        }
        let secrets = Self {
            database_password: random_text(18),
            jwt_secret: random_text(33),
            token_keys: format!("1:{}", random_text(32)),
        };
        write_private(path, &serde_json::to_vec(&secrets)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(secrets)
    }
}

/// A bearer token of a user (HS256, one day).
///
/// # Errors
/// The secret is no key.
pub fn bearer_token(jwt_secret: &str, user: &str) -> anyhow::Result<String> {
    bearer_token_valid_for(jwt_secret, user, TOKEN_LIFETIME)
}

/// A bearer token of a user (HS256) that outlives tests which shift the clock.
///
/// # Errors
/// The secret is no key.
pub fn bearer_token_valid_for(jwt_secret: &str, user: &str, lifetime: Duration) -> anyhow::Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let claims = Claims { sub: user, iat: now.saturating_sub(CLOCK_SKEW).as_secs(), exp: (now + lifetime).as_secs() };
    Ok(encode(&Header::default(), &claims, &EncodingKey::from_secret(jwt_secret.as_bytes())?)?)
}

fn random_text(octets: usize) -> String {
    URL_SAFE_NO_PAD.encode((0..octets).map(|_| rand::random::<u8>()).collect::<Vec<_>>())
}

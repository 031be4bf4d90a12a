//! The server's secrets for tokens: one signs, all verify, so that keys rotate without invalidating what is out.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use super::{Forged, HEADER_OCTETS, Kind, MAC_OCTETS, MAX_CHARS, PREFIX, VERSION};

type HmacSha256 = Hmac<Sha256>;

/// Fewest octets of a secret: as many as the MAC has.
const MIN_SECRET_OCTETS: usize = 32;
/// Secrets come from operators' tools, some of which pad; tokens are strict instead.
const SECRET_TEXT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Names a key of the ring; positive. Stored with rebuild sessions, so that their tokens repeat octet for octet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(i64);

impl KeyId {
    /// A key id as it is stored in SQL; `None` when it is not positive.
    pub const fn from_sql(stored: i64) -> Option<Self> {
        if stored > 0 { Some(Self(stored)) } else { None }
    }

    /// The value that is stored in SQL.
    pub const fn to_sql(self) -> i64 {
        self.0
    }
}

/// The ring has no key of this id (any more).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no token key of this id")]
pub struct UnknownKey;

/// A text that is not a key ring. `entry` counts from 1; secrets are never shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyRingError {
    /// Not of the form `id:secret`, or the id is not a canonical positive integer below 2^63.
    #[error("token key {entry}: not of the form id:secret with a positive integer id")]
    Malformed {
        /// Which entry.
        entry: usize,
    },
    /// The secret is not base64url.
    #[error("token key {entry}: the secret is not base64url")]
    NotBase64 {
        /// Which entry.
        entry: usize,
    },
    /// The secret is too short.
    #[error("token key {entry}: the secret has fewer than 32 octets")]
    ShortSecret {
        /// Which entry.
        entry: usize,
    },
    /// Two entries have one id.
    #[error("token key {entry}: its id stands earlier already")]
    RepeatedId {
        /// Which entry.
        entry: usize,
    },
}

/// One secret, kept only as the keyed state of each kind: cloning that is cheaper than keying anew.
#[derive(Clone)]
struct Key {
    id: KeyId,
    incremental: HmacSha256,
    rebuild: HmacSha256,
}

impl Key {
    fn derive(id: KeyId, secret: &[u8]) -> Self {
        let derived = |kind: Kind| {
            let mac = keyed(secret).chain_update(kind.derivation_label());
            keyed(&mac.finalize().into_bytes())
        };
        Self { id, incremental: derived(Kind::Incremental), rebuild: derived(Kind::Rebuild) }
    }

    fn mac(&self, kind: Kind) -> HmacSha256 {
        match kind {
            Kind::Incremental => self.incremental.clone(),
            Kind::Rebuild => self.rebuild.clone(),
        }
    }
}

fn keyed(key: &[u8]) -> HmacSha256 {
    HmacSha256::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// The secrets that seal and verify tokens. `id:base64url[,id:base64url…]`; the first signs, all verify. A key is
/// retired by leaving it out, which makes everything that it sealed forged.
#[derive(Clone)]
pub struct KeyRing {
    signing: Key,
    verifying_only: Vec<Key>,
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRing").field("signing", &self.signing.id).field("keys", &self.len()).finish_non_exhaustive()
    }
}

impl FromStr for KeyRing {
    type Err = KeyRingError;

    fn from_str(text: &str) -> Result<Self, KeyRingError> {
        let mut keys: Vec<Key> = Vec::new();
        // Secret files tend to end in a line feed.
        for (index, part) in text.trim().split(',').enumerate() {
            let entry = index + 1;
            let (id, secret) = part.split_once(':').ok_or(KeyRingError::Malformed { entry })?;
            let number: i64 = id.parse().map_err(|_| KeyRingError::Malformed { entry })?;
            let key_id = KeyId::from_sql(number).ok_or(KeyRingError::Malformed { entry })?;
            if number.to_string() != id {
                return Err(KeyRingError::Malformed { entry });
            }
            let secret = SECRET_TEXT.decode(secret).map_err(|_| KeyRingError::NotBase64 { entry })?;
            if secret.len() < MIN_SECRET_OCTETS {
                return Err(KeyRingError::ShortSecret { entry });
            }
            if keys.iter().any(|key| key.id == key_id) {
                return Err(KeyRingError::RepeatedId { entry });
            }
            keys.push(Key::derive(key_id, &secret));
        }
        let verifying_only = keys.split_off(1);
        let signing = keys.pop().expect("split yields at least one entry");
        Ok(Self { signing, verifying_only })
    }
}

impl KeyRing {
    /// The key that seals new tokens.
    pub fn signing_key(&self) -> KeyId {
        self.signing.id
    }

    /// How many keys it has.
    #[expect(clippy::len_without_is_empty, reason = "a ring has a signing key")]
    pub fn len(&self) -> usize {
        1 + self.verifying_only.len()
    }

    /// Whether it has a key of this id.
    pub fn has(&self, id: KeyId) -> bool {
        self.key(id).is_some()
    }

    /// The token text of `fields`, sealed by the signing key.
    ///
    /// Fields past [`super::MAX_FIELD_OCTETS`] give a text that never opens; no kind of token has that many.
    pub fn seal(&self, kind: Kind, fields: &[u8]) -> String {
        seal(&self.signing, kind, fields)
    }

    /// The token text of `fields`, sealed by the key `key_id`: a replay repeats what an earlier signing key sealed.
    pub fn seal_with(&self, key_id: KeyId, kind: Kind, fields: &[u8]) -> Result<String, UnknownKey> {
        let key = self.key(key_id).ok_or(UnknownKey)?;
        Ok(seal(key, kind, fields))
    }

    /// The authentic fields of a token text of this kind.
    pub fn open(&self, kind: Kind, text: &str) -> Result<Vec<u8>, Forged> {
        if text.len() > MAX_CHARS {
            return Err(Forged);
        }
        let encoded = text.strip_prefix(PREFIX).ok_or(Forged)?;
        // This engine refuses padding, other alphabets and set trailing bits: one body has one text.
        let mut octets = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| Forged)?;
        let body_octets = octets.len().checked_sub(MAC_OCTETS).ok_or(Forged)?;
        let (body, mac) = octets.split_at(body_octets);
        let (header, _) = body.split_first_chunk::<HEADER_OCTETS>().ok_or(Forged)?;
        let [version, kind_octet, key_id @ ..] = *header;
        let key_id = KeyId(i64::from_be_bytes(key_id));
        // Only to select the key: `kind` decides the derivation, and the MAC covers all of the header. An unknown key is
        // refused after as much work as a wrong MAC.
        let key = self.key(key_id);
        key.unwrap_or(&self.signing).mac(kind).chain_update(body).verify_slice(mac).map_err(|_| Forged)?;
        if key.is_none() || version != VERSION || kind_octet != kind.octet() {
            return Err(Forged);
        }
        octets.truncate(body_octets);
        octets.drain(..HEADER_OCTETS);
        Ok(octets)
    }

    fn key(&self, id: KeyId) -> Option<&Key> {
        std::iter::once(&self.signing).chain(&self.verifying_only).find(|key| key.id == id)
    }
}

fn seal(key: &Key, kind: Kind, fields: &[u8]) -> String {
    let mut octets = Vec::with_capacity(HEADER_OCTETS + fields.len() + MAC_OCTETS);
    octets.extend([VERSION, kind.octet()]);
    octets.extend(key.id.0.to_be_bytes());
    octets.extend(fields);
    let mac = key.mac(kind).chain_update(&octets).finalize().into_bytes();
    octets.extend(&mac[..]);
    let mut text = String::with_capacity(MAX_CHARS);
    text.push_str(PREFIX);
    URL_SAFE_NO_PAD.encode_string(&octets, &mut text);
    text
}

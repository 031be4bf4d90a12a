//! Requests, from octets. Every member is known, there once, and of its type, at every level.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use uuid::Uuid;

use super::identifier::{ClientId, InvalidRequest, PresentedToken, ScopeId};
use super::json::{Json, Members};
use super::{MAX_LIMIT, PROTOCOL_VERSION};

/// A JSON object that may be a request. Apart from its parsing into one, because the binding of the client id to the
/// user is checked before the rest of the envelope is (companion contract, section 5).
#[derive(Clone)]
pub struct Envelope(Members);

/// The schema manifest that a request names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaReference {
    /// Its version. Pull and rebuild: any integer.
    pub version: i64,
    /// Its hash. Pull and rebuild: any text; what is not the current hash is a mismatch and not malformed.
    pub hash: String,
}

impl SchemaReference {
    /// What a fresh client sends: `{"version": 0, "hash": ""}`.
    pub fn is_fresh(&self) -> bool {
        self.version == 0 && self.hash.is_empty()
    }

    fn read(value: Json) -> Result<Self, InvalidRequest> {
        let mut members = value.object()?;
        let version = members.required("version")?.integer()?;
        let hash = members.required("hash")?.string()?;
        members.finish()?;
        Ok(Self { version, hash })
    }

    /// A reference that a manifest can have.
    fn is_well_formed(&self) -> bool {
        let is_hash = self.hash.len() == 64 && self.hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        self.version > 0 && is_hash
    }
}

/// `POST /sync/connect`.
#[derive(Debug, Clone, PartialEq)]
pub struct ConnectRequest {
    /// The client.
    pub client_id: ClientId,
    /// Its generation; a fresh client has none.
    pub client_generation: Option<u64>,
    /// The client's platform, any text.
    pub platform: String,
    /// The client's version, any text.
    pub app_version: String,
    /// A manifest's reference, or the fresh sentinel ([`SchemaReference::is_fresh`]); the sentinel never comes with
    /// a generation or a reset.
    pub schema: SchemaReference,
    /// The client asks to rebuild everything.
    pub schema_reset: bool,
    /// The last assignment version that the client applied.
    pub scope_set_version: u64,
    /// The scopes that the client knows, with their cursors.
    pub known_scopes: BTreeMap<ScopeId, Option<PresentedToken>>,
}

/// Why a connect request is refused before any state is read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConnectRefusal {
    /// 426: an integer that is not 3.
    #[error("protocol version is not supported")]
    UnsupportedProtocol {
        /// What was sent.
        received: i64,
    },
    /// 400 `invalid_request`.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// 400 `invalid_schema_reference`: nothing but the schema reference is wrong, or the fresh sentinel comes with a
    /// generation or a reset.
    #[error("schema reference is invalid")]
    InvalidSchemaReference {
        /// What was sent.
        received: serde_json::Value,
    },
}

/// `POST /sync/pull`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullRequest {
    /// The client.
    pub client_id: ClientId,
    /// Its generation, positive.
    pub client_generation: u64,
    /// The manifest that it holds.
    pub schema: SchemaReference,
    /// The last assignment version that the client applied.
    pub scope_set_version: u64,
    /// Its scopes, with their cursors.
    pub scopes: BTreeMap<ScopeId, Option<PresentedToken>>,
    /// Most changes of the page, 1 to 1000.
    pub limit: u16,
}

/// `POST /sync/rebuild`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RebuildRequest {
    /// The client.
    pub client_id: ClientId,
    /// Its generation, positive.
    pub client_generation: u64,
    /// The manifest that it holds.
    pub schema: SchemaReference,
    /// The scope to rebuild.
    pub scope: ScopeId,
    /// The client's name of this attempt, not nil.
    pub rebuild_id: Uuid,
    /// The continuation; none for the first page.
    pub cursor: Option<PresentedToken>,
    /// Most records of a page, 1 to 1000.
    pub limit: u16,
}

impl Envelope {
    /// The JSON object of a request body. A repeated member anywhere is invalid here already, since nobody can say
    /// which of the two was meant.
    pub fn read(octets: &[u8]) -> Result<Self, InvalidRequest> {
        Ok(Self(Json::parse(octets)?.object()?))
    }

    /// The client that the request claims to be of, if its id is one: whatever else is wrong with the request,
    /// another user's client is refused with 401 first.
    pub fn client_id(&self) -> Option<ClientId> {
        let id = self.0.get("client_id")?.clone().string().ok()?;
        ClientId::parse(id).ok()
    }

    /// The request of `POST /sync/connect`, or the refusal that comes first in the contract's table.
    ///
    /// - An integer `protocol_version` that is not 3 is 426 even in an otherwise malformed envelope: an envelope of
    ///   another version has rules of its own. Missing or no integer: malformed.
    /// - The reference is what the member `schema` holds, members missing or unknown inside it included; without
    ///   the member at all, the envelope is malformed.
    /// - `schema_reset: false` is the same as none.
    pub fn connect(self) -> Result<ConnectRequest, ConnectRefusal> {
        let Self(mut members) = self;
        let protocol_version = members.required("protocol_version")?.integer()?;
        if protocol_version != PROTOCOL_VERSION {
            return Err(ConnectRefusal::UnsupportedProtocol { received: protocol_version });
        }
        let client_id = client_id(&mut members)?;
        let client_generation = members.optional("client_generation").map(|value| positive(&value)).transpose()?;
        let platform = members.required("platform")?.string()?;
        let app_version = members.required("app_version")?.string()?;
        let presented = members.required("schema")?;
        let schema_reset = members.optional("schema_reset").map_or(Ok(false), |value| value.boolean())?;
        let scope_set_version = scope_set_version(&mut members)?;
        let known_scopes = scopes(members.required("known_scopes")?)?;
        members.finish()?;
        let received = presented.to_value();
        let schema = match SchemaReference::read(presented) {
            Ok(schema) if schema.is_fresh() && client_generation.is_none() && !schema_reset => schema,
            Ok(schema) if schema.is_well_formed() => schema,
            _ => return Err(ConnectRefusal::InvalidSchemaReference { received }),
        };
        Ok(ConnectRequest {
            client_id,
            client_generation,
            platform,
            app_version,
            schema,
            schema_reset,
            scope_set_version,
            known_scopes,
        })
    }

    /// The request of `POST /sync/pull`.
    pub fn pull(self) -> Result<PullRequest, InvalidRequest> {
        let Self(mut members) = self;
        let request = PullRequest {
            client_id: client_id(&mut members)?,
            client_generation: positive(&members.required("client_generation")?)?,
            schema: SchemaReference::read(members.required("schema")?)?,
            scope_set_version: scope_set_version(&mut members)?,
            scopes: scopes(members.required("scopes")?)?,
            limit: limit(&mut members)?,
        };
        members.finish()?;
        Ok(request)
    }

    /// The request of `POST /sync/rebuild`.
    pub fn rebuild(self) -> Result<RebuildRequest, InvalidRequest> {
        let Self(mut members) = self;
        let request = RebuildRequest {
            client_id: client_id(&mut members)?,
            client_generation: positive(&members.required("client_generation")?)?,
            schema: SchemaReference::read(members.required("schema")?)?,
            scope: ScopeId::parse(members.required("scope")?.string()?)?,
            rebuild_id: canonical_uuid(&members.required("rebuild_id")?.string()?)?,
            cursor: token(members.required("cursor")?)?,
            limit: limit(&mut members)?,
        };
        members.finish()?;
        Ok(request)
    }
}

fn client_id(members: &mut Members) -> Result<ClientId, InvalidRequest> {
    ClientId::parse(members.required("client_id")?.string()?)
}

fn positive(value: &Json) -> Result<u64, InvalidRequest> {
    let number = u64::try_from(value.integer()?).map_err(|_| InvalidRequest)?;
    if number > 0 { Ok(number) } else { Err(InvalidRequest) }
}

fn scope_set_version(members: &mut Members) -> Result<u64, InvalidRequest> {
    u64::try_from(members.required("scope_set_version")?.integer()?).map_err(|_| InvalidRequest)
}

fn limit(members: &mut Members) -> Result<u16, InvalidRequest> {
    let limit = u16::try_from(members.required("limit")?.integer()?).map_err(|_| InvalidRequest)?;
    if (1..=MAX_LIMIT).contains(&limit) { Ok(limit) } else { Err(InvalidRequest) }
}

fn scopes(value: Json) -> Result<BTreeMap<ScopeId, Option<PresentedToken>>, InvalidRequest> {
    let read = |(id, state): (String, Json)| {
        let mut state = state.object()?;
        let cursor = token(state.required("cursor")?)?;
        state.finish()?;
        Ok((ScopeId::parse(id)?, cursor))
    };
    value.object()?.into_members().into_iter().map(read).collect()
}

fn token(value: Json) -> Result<Option<PresentedToken>, InvalidRequest> {
    match value {
        Json::Null => Ok(None),
        other => Ok(Some(PresentedToken::new(other.string()?))),
    }
}

fn canonical_uuid(text: &str) -> Result<Uuid, InvalidRequest> {
    let uuid = Uuid::try_parse(text).map_err(|_| InvalidRequest)?;
    let mut canonical = Uuid::encode_buffer();
    let is_canonical = text == uuid.hyphenated().encode_lower(&mut canonical);
    if is_canonical && !uuid.is_nil() { Ok(uuid) } else { Err(InvalidRequest) }
}

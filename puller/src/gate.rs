//! What pull and rebuild check first, in the contract's order: client binding, retirement, generation, schema; and
//! assignment, which connect and pull reconcile by one rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use deadpool_postgres::{GenericClient, Object};
use tributary_shared::cursor::{Current, Cursor, Stale};
use tributary_shared::position::Position;
use tributary_shared::protocol::{ClientId, PresentedToken, SchemaReference, ScopeId};
use tributary_shared::store::client::{self, Client, ClientScope};
use tributary_shared::store::progress::{self, Progress};
use tributary_shared::store::transaction::Begun;
use tributary_shared::store::{scope, source};
use tributary_shared::token::{Bindings, Expected, Lineage};

use crate::app::{App, Failure, Served, micros};
use crate::auth::Identity;
use crate::error::ApiError;

/// The state that a request reads, all of one snapshot.
pub struct Opened {
    /// Progress, which fixes boundary B.
    pub progress: Progress,
    /// The configuration in force at B.
    pub served: Arc<Served>,
    /// The client, if it is registered.
    pub client: Option<Client>,
    /// Scopes ever assigned to its current generation, by id.
    pub scopes: BTreeMap<String, ClientScope>,
}

/// Reads progress first, then the client: one snapshot, one round trip.
pub async fn open(app: &App, db: &impl GenericClient, client_id: &ClientId) -> Result<Opened, Failure> {
    let id = client_id.as_str();
    let read = tokio::try_join!(biased; progress::load(db), client::load(db, id), client::scopes(db, id))?;
    opened(app, db, read).await
}

/// [`open`] of a transaction whose begin is sent with it; also the client's accepted-write epoch, when it stands in the
/// same database: read in the request's own snapshot, it is never older than what was accepted before the request.
pub async fn begin(app: &App, db: &Begun, user: &str, client_id: &ClientId) -> Result<(Opened, Option<i64>), Failure> {
    let id = client_id.as_str();
    let session: &Object = db;
    let epoch = async {
        match &app.source {
            None => source::accepted_epoch(session, user, id).await.map(Some),
            Some(_) => Ok(None),
        }
    };
    let (_begun, progress, client, scopes, epoch) = tokio::try_join!(
        biased;
        db.begin(),
        progress::load(session),
        client::load(session, id),
        client::scopes(session, id),
        epoch
    )?;
    Ok((opened(app, session, (progress, client, scopes)).await?, epoch))
}

async fn opened(
    app: &App,
    db: &impl GenericClient,
    (progress, client, scopes): (Option<Progress>, Option<Client>, Vec<ClientScope>),
) -> Result<Opened, Failure> {
    let progress = progress.ok_or(ApiError::TemporaryUnavailable { retry_after: 1 })?;
    let served = app.served(db, progress.configuration_no).await?;
    let scopes = scopes.into_iter().map(|scope| (scope.scope_id.clone(), scope)).collect();
    Ok(Opened { progress, served, client, scopes })
}

/// Another client's state in the same snapshot.
pub async fn open_another(db: &impl GenericClient, opened: &Opened, client_id: &ClientId) -> Result<Opened, Failure> {
    let id = client_id.as_str();
    let (client, scopes) = tokio::try_join!(biased; client::load(db, id), client::scopes(db, id))?;
    let scopes = scopes.into_iter().map(|scope| (scope.scope_id.clone(), scope)).collect();
    Ok(Opened { progress: opened.progress.clone(), served: opened.served.clone(), client, scopes })
}

/// Whether a client id belongs to another user; asked when a request is malformed in any other way.
pub async fn belongs_to_another(app: &App, user: &str, client_id: &ClientId) -> Result<bool, Failure> {
    let db = tributary_shared::store::session::acquire(&app.state).await?;
    Ok(client::load(&db, client_id.as_str()).await?.is_some_and(|client| client.user_id != user))
}

impl Opened {
    /// Boundary B.
    pub fn boundary(&self) -> Position {
        self.progress.boundary()
    }

    /// The client of a pull or rebuild, past the outer gates.
    pub fn admit(&self, user: &str, generation: u64, schema: &SchemaReference) -> Result<&Client, ApiError> {
        let Some(client) = &self.client else {
            // Never connected, or unknown to this state: connect makes it known.
            return Err(ApiError::ClientGenerationExpired { current: 0 });
        };
        if client.user_id != user {
            return Err(ApiError::AuthRequired);
        }
        if client.retired {
            return Err(ApiError::ClientRetired);
        }
        if client.generation_expired || client.generation as u64 != generation {
            return Err(ApiError::ClientGenerationExpired { current: client.generation as u64 });
        }
        let current = &self.served.configuration;
        let hash = tributary_shared::digest::hex(&current.schema_hash);
        if schema.version != current.schema_version as i64 || schema.hash != hash {
            return Err(ApiError::SchemaMismatch {
                current: SchemaReference { version: current.schema_version as i64, hash },
                received: schema.clone(),
            });
        }
        Ok(client)
    }

    /// The bindings that a token of this scope has now.
    pub fn lineage(&self, generation: u64, scope: &ClientScope) -> Lineage {
        Lineage {
            stream_generation: self.progress.stream_generation,
            client_generation: generation,
            schema_hash: self.served.configuration.schema_hash,
            membership_generation: scope.membership_generation as u64,
            retention_generation: scope.retention_generation as u64,
        }
    }

    /// What a presented cursor must be to resume its scope.
    pub fn current(&self, generation: u64, scope: &ClientScope) -> Current {
        Current { lineage: self.lineage(generation, scope), floor: scope.floor, boundary: self.boundary() }
    }

    /// A new token of this scope at a position.
    pub fn seal(
        &self,
        app: &App,
        expected: &Expected<'_>,
        generation: u64,
        scope: &ClientScope,
        position: Position,
    ) -> String {
        Cursor {
            lineage: self.lineage(generation, scope),
            bindings: Bindings::of(expected),
            position,
            issued_at: micros(app.now()),
        }
        .seal(&app.keys)
    }
}

/// A presented cursor, authenticated.
pub enum Presented {
    /// It resumes the scope from here.
    Valid(Position),
    /// It does not, for this cause.
    Stale(Cursor, Stale),
    /// Null: there is no incremental state.
    Null,
}

/// Authenticates every presented token, before any scope is processed: one that is forged fails the request.
///
/// # Errors
/// `invalid_request`: a token is forged or misbound, or a scope was never assigned and `unknown` forbids that.
pub fn authenticate(
    app: &App,
    opened: &Opened,
    user: &str,
    client_id: &ClientId,
    generation: u64,
    presented: &BTreeMap<ScopeId, Option<PresentedToken>>,
) -> Result<BTreeMap<ScopeId, Presented>, ApiError> {
    let mut authenticated = BTreeMap::new();
    for (id, token) in presented {
        let outcome = match token {
            None => Presented::Null,
            Some(token) => {
                let expected = Expected { user, client: client_id.as_str(), scope: id.as_str() };
                let cursor =
                    Cursor::open(&app.keys, token.as_str(), &expected).map_err(|_| ApiError::InvalidRequest)?;
                match opened.scopes.get(id.as_str()) {
                    // A scope that is known to a client whose generation is gone.
                    None => Presented::Stale(cursor, Stale::Client),
                    Some(scope) => match cursor.staleness(&opened.current(generation, scope)) {
                        None => Presented::Valid(cursor.position),
                        Some(cause) => Presented::Stale(cursor, cause),
                    },
                }
            }
        };
        authenticated.insert(id.clone(), outcome);
    }
    Ok(authenticated)
}

/// Seconds until a client that has too many scopes asks again: only another configuration or other data helps.
const TOO_MANY_SCOPES_RETRY: u32 = 60;

/// The scopes that a user has, evaluated in the request's snapshot.
pub async fn assigned(db: &impl GenericClient, served: &Served, user: &Identity) -> Result<BTreeSet<String>, Failure> {
    let user_id = user.user.as_str();
    // A user whose id fits no scope id has no scope: no row can be in such a scope either.
    let mut scopes: BTreeSet<String> =
        served.registry().assignments.scopes(user_id).unwrap_or_default().into_iter().collect();
    let claims = if served.assignments.reads_claims() { user.claims.to_string() } else { "{}".to_owned() };
    match served.assignments.scopes(db, user_id, &claims).await? {
        Ok(more) => scopes.extend(more),
        Err(error) => {
            tracing::error!(%error, "a request is refused: restrict the assignments of the configuration");
            metrics::counter!("tributary_assignments_refused_total").increment(1);
            return Err(ApiError::TemporaryUnavailable { retry_after: TOO_MANY_SCOPES_RETRY }.into());
        }
    }
    Ok(scopes)
}

/// The assignment after a request reconciled it.
pub struct Reconciled {
    /// Whether it was written.
    pub changed: bool,
    /// Assigned scopes, in raw UTF-8 order of their ids.
    pub assigned: BTreeMap<ScopeId, ClientScope>,
    /// The assignment's version.
    pub scope_set_version: u64,
}

/// Evaluates the assignment in the request's snapshot and writes it if it changed: the version moves by exactly one per
/// changed set (ADR 003, "Normal scope movement").
pub async fn reconcile(
    db: &impl GenericClient,
    opened: &Opened,
    client_no: i64,
    scope_set_version: i64,
    user: &Identity,
) -> Result<Reconciled, Failure> {
    let wanted = assigned(db, &opened.served, user).await?;
    let had: BTreeSet<&String> = opened.scopes.values().filter(|s| s.assigned).map(|s| &s.scope_id).collect();
    let added: Vec<&str> = wanted.iter().filter(|id| !had.contains(id)).map(String::as_str).collect();
    let removed: Vec<i32> =
        opened.scopes.values().filter(|s| s.assigned && !wanted.contains(&s.scope_id)).map(|s| s.scope_no).collect();
    let mut version = scope_set_version;
    let mut all: BTreeMap<String, ClientScope> = opened.scopes.clone();
    let changed = !added.is_empty() || !removed.is_empty();
    if changed {
        version += 1;
        let numbers = scope::intern(db, &added).await?;
        client::reassign(db, client_no, version, &numbers, &removed).await?;
        let unseen: Vec<i32> =
            added.iter().zip(&numbers).filter(|(id, _)| !all.contains_key(**id)).map(|(_, number)| *number).collect();
        for scope in client::new_scopes(db, &unseen).await? {
            all.insert(scope.scope_id.clone(), scope);
        }
    }
    let mut assigned = BTreeMap::new();
    for id in wanted {
        let scope = all.remove(&id).ok_or_else(|| Failure::integrity("an assigned scope has no row"))?;
        let id = ScopeId::parse(id).map_err(|_| Failure::integrity("an assigned scope has an impossible id"))?;
        assigned.insert(id, scope);
    }
    Ok(Reconciled { changed, assigned, scope_set_version: version as u64 })
}

//! `POST /sync/connect`: registration, generation, schema and assignment (contract: connect). Acknowledges no cursor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use deadpool_postgres::GenericClient;
use serde_json::value::RawValue;
use tributary_shared::cursor::{Cursor, Stale};
use tributary_shared::digest::hex;
use tributary_shared::manifest::{Descent, SchemaHash, SchemaReference};
use tributary_shared::protocol::{ConnectRequest, ConnectResponse, Envelope, SchemaAction, ScopeId, UnsupportedSchema};
use tributary_shared::store::{client, session};
use tributary_shared::token::Expected;

use crate::app::{App, Commit, Failure, begin};
use crate::auth::Identity;
use crate::error::ApiError;
use crate::gate::{self, Opened, Presented};
use crate::pull::refuse_malformed;

/// Answers a connect.
pub async fn connect(app: &App, user: &Identity, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let envelope = Envelope::read(body).map_err(|_| ApiError::InvalidRequest)?;
    let client_id = envelope.client_id();
    let refusal = match envelope.connect() {
        Ok(request) => return app.run(|commit| once(app, user, &request, commit)).await,
        Err(refusal) => refusal,
    };
    // Another user's client is refused first, whatever else is wrong.
    match refuse_malformed(app, user, client_id).await {
        ApiError::InvalidRequest => {}
        error => return Err(error),
    }
    Err(refusal.into())
}

/// What the schema reference of a request asks for.
enum Action {
    None,
    Replace,
    /// Scopes that hold rows of these tables, by their ids, are rebuilt; when none is assigned, as [`Self::Replace`].
    Rebuild(Arc<BTreeSet<String>>),
    RebuildAll,
    Unsupported(UnsupportedSchema),
}

async fn once(app: &App, user: &Identity, request: &ConnectRequest, commit: Commit) -> Result<Vec<u8>, Failure> {
    let mut connection = session::acquire(&app.state).await?;
    let db = begin(&mut connection).await?;
    let mut opened = gate::open(app, &db, &request.client_id).await?;
    if opened.client.as_ref().is_some_and(|client| client.user_id != user.user.as_str()) {
        return Err(ApiError::AuthRequired.into());
    }
    if opened.client.as_ref().is_some_and(|client| client.retired) {
        return Err(ApiError::ClientRetired.into());
    }
    if request.schema.is_fresh() && opened.client.is_some() {
        let received = serde_json::json!({"version": request.schema.version, "hash": request.schema.hash});
        return Err(ApiError::InvalidSchemaReference { received }.into());
    }
    let action = action(&db, &opened, request).await?;
    let (client_no, generation, version) = register(app, &db, &mut opened, user, request, &action).await?;
    let presented =
        gate::authenticate(app, &opened, user.user.as_str(), &request.client_id, generation, &request.known_scopes)?;

    if let Action::Unsupported(reason) = action {
        // Nothing is registered or assigned for a client that cannot use it.
        return Ok(answer(
            app,
            &opened,
            generation,
            version as u64,
            SchemaAction::Unsupported(reason),
            &Delta::default(),
        ));
    }
    let reconciled = gate::reconcile(&db, &opened, client_no, version, user).await?;
    let affected: Vec<ScopeId> = match &action {
        Action::None | Action::Replace | Action::Unsupported(_) => Vec::new(),
        Action::Rebuild(tables) => {
            let registry = opened.served.registry();
            reconciled.assigned.keys().filter(|id| registry.can_hold(id.as_str(), tables)).cloned().collect()
        }
        Action::RebuildAll => reconciled.assigned.keys().cloned().collect(),
    };
    let mut delta = Delta {
        added: reconciled.assigned.keys().filter(|id| !request.known_scopes.contains_key(*id)).cloned().collect(),
        removed: request.known_scopes.keys().filter(|id| !reconciled.assigned.contains_key(*id)).cloned().collect(),
        cursors: BTreeMap::new(),
    };
    for (id, outcome) in &presented {
        let Some(scope) = reconciled.assigned.get(id) else { continue };
        // Assigned scopes, and so the affected ones, are in raw UTF-8 order.
        let is_affected = affected.binary_search(id).is_ok();
        let update = match outcome {
            Presented::Null => continue,
            Presented::Valid(_) if !is_affected => continue,
            Presented::Stale(cursor, Stale::Schema) if !is_affected && is_bridged(&db, &opened, id, cursor).await? => {
                let expected =
                    Expected { user: user.user.as_str(), client: request.client_id.as_str(), scope: id.as_str() };
                Some(opened.seal(app, &expected, generation, scope, cursor.position))
            }
            Presented::Valid(_) | Presented::Stale(..) => None,
        };
        delta.cursors.insert(id.clone(), update);
    }
    commit.send(db.commit()).await?;

    let definition = RawValue::from_string(opened.served.configuration.manifest_document.clone())
        .map_err(|_| Failure::integrity("the published manifest is not JSON"))?;
    let action = match action {
        Action::None => SchemaAction::None,
        Action::Rebuild(_) | Action::RebuildAll if !affected.is_empty() => {
            SchemaAction::RebuildLocal { definition: &definition, affected_scopes: &affected }
        }
        Action::Replace | Action::Rebuild(_) | Action::RebuildAll => SchemaAction::Replace { definition: &definition },
        Action::Unsupported(reason) => SchemaAction::Unsupported(reason),
    };
    Ok(answer(app, &opened, generation, reconciled.scope_set_version, action, &delta))
}

/// The contract's dispatch. A reset comes first: it is what a client whose schema is unsupported goes on with, as one that
/// is known here cannot call itself fresh any more.
async fn action(db: &impl GenericClient, opened: &Opened, request: &ConnectRequest) -> Result<Action, Failure> {
    let current = &opened.served.configuration;
    if request.schema.is_fresh() {
        return Ok(Action::Replace);
    }
    if request.schema_reset {
        return Ok(Action::RebuildAll);
    }
    if request.schema.version == current.schema_version as i64 && request.schema.hash == hex(&current.schema_hash) {
        return Ok(Action::None);
    }
    let (Ok(version), Ok(hash)) = (request.schema.version.try_into(), request.schema.hash.parse()) else {
        return Ok(Action::Unsupported(UnsupportedSchema::UnknownSchemaLineage));
    };
    let ancestry = opened.served.ancestry(db).await?;
    Ok(match ancestry.descent(&SchemaReference { version, hash }) {
        None => Action::Unsupported(UnsupportedSchema::UnknownSchemaLineage),
        Some(Descent::Incompatible) => Action::Unsupported(UnsupportedSchema::IncompatibleSchemaTransition),
        Some(Descent::Compatible { affected }) => Action::Rebuild(affected.clone()),
    })
}

/// The bridge: whether a cursor that is stale by its schema alone goes on at its position (ADR 003, "Stale versus forged
/// cursor dispatch"). Its own binding decides and not the request's reference: an answer that carried its replacement may
/// have been lost after the client had taken the new manifest.
async fn is_bridged(db: &impl GenericClient, opened: &Opened, id: &ScopeId, cursor: &Cursor) -> Result<bool, Failure> {
    let ancestry = opened.served.ancestry(db).await?;
    Ok(match ancestry.descent_of(&SchemaHash::new(cursor.lineage.schema_hash)) {
        Some(Descent::Compatible { affected }) => !opened.served.registry().can_hold(id.as_str(), affected),
        Some(Descent::Incompatible) | None => false,
    })
}

/// The client's number, generation and assignment version: registers an unknown one, renews an expired generation.
async fn register(
    app: &App,
    db: &deadpool_postgres::Transaction<'_>,
    opened: &mut Opened,
    user: &Identity,
    request: &ConnectRequest,
    action: &Action,
) -> Result<(i64, u64, i64), Failure> {
    let writes = !matches!(action, Action::Unsupported(_));
    match &opened.client {
        None => {
            // A client that this state does not know keeps no generation that its old tokens are bound to.
            let generation = request.client_generation.unwrap_or(0) as i64 + 1;
            // Its assignment version must not look like an old one to the client either.
            let version = request.scope_set_version as i64;
            let client_no = if writes {
                client::create(db, user.user.as_str(), request.client_id.as_str(), generation, version, app.now())
                    .await?
            } else {
                0
            };
            Ok((client_no, generation as u64, version))
        }
        Some(client) if client.generation_expired && writes => {
            let generation = client::renew_generation(db, client.client_no, app.now()).await?;
            let found = (client.client_no, generation as u64, client.scope_set_version);
            opened.scopes.clear();
            Ok(found)
        }
        Some(client) => Ok((client.client_no, client.generation as u64, client.scope_set_version)),
    }
}

#[derive(Default)]
struct Delta {
    added: Vec<ScopeId>,
    removed: Vec<ScopeId>,
    cursors: BTreeMap<ScopeId, Option<String>>,
}

fn answer(
    app: &App,
    opened: &Opened,
    generation: u64,
    scope_set_version: u64,
    action: SchemaAction<'_>,
    delta: &Delta,
) -> Vec<u8> {
    let configuration = &opened.served.configuration;
    ConnectResponse {
        server_time: &canonical_datetime(app.now()),
        client_generation: generation,
        scope_set_version,
        schema_version: configuration.schema_version,
        schema_hash: &hex(&configuration.schema_hash),
        action,
        added: &delta.added,
        removed: &delta.removed,
        scope_cursor_updates: &delta.cursors,
    }
    .write()
}

/// `YYYY-MM-DDTHH:MM:SS.ffffffZ`.
fn canonical_datetime(time: SystemTime) -> String {
    let utc = time::OffsetDateTime::from(time);
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z",
        utc.year(),
        u8::from(utc.month()),
        utc.day(),
        utc.hour(),
        utc.minute(),
        utc.second(),
        utc.microsecond()
    )
}

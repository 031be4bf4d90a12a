//! `POST /sync/pull`: validate, read, decide, write, answer (ADR 003, "Pull request rules" to "Cursor issuance and
//! server acknowledgement").
//!
//! Whatever fails, the whole page fails: the transaction is dropped, and with it acknowledgement and assignment.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use deadpool_postgres::{GenericClient, Object};
use tributary_shared::merge::{self, Operation, Rest, Stream};
use tributary_shared::position::Position;
use tributary_shared::protocol::{Change, Envelope, PullEnd, PullRequest, PullResponse, PullTail, ScopeId};
use tributary_shared::store::client::{self, ClientScope};
use tributary_shared::store::pull::{self, Candidate, Captured};
use tributary_shared::store::transaction::{Begun, Isolation};
use tributary_shared::token::Expected;

use crate::app::{Accepted, App, Commit, Failure, Served};
use crate::auth::Identity;
use crate::error::ApiError;
use crate::gate::{self, Opened, Presented, Reconciled};

/// The acknowledgement time is kept this coarsely, so that idle polling does not write.
const ACKNOWLEDGED_GRANULARITY: Duration = Duration::from_secs(60);

/// Answers a pull.
pub async fn pull(app: &App, user: &Identity, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let envelope = Envelope::read(body).map_err(|_| ApiError::InvalidRequest)?;
    let client_id = envelope.client_id();
    let Ok(request) = envelope.pull() else {
        return Err(refuse_malformed(app, user, client_id).await);
    };
    app.run(|commit| once(app, user, &request, commit)).await
}

/// The binding of client to user is checked before the rest of the envelope.
pub async fn refuse_malformed(
    app: &App,
    user: &Identity,
    client_id: Option<tributary_shared::protocol::ClientId>,
) -> ApiError {
    let Some(client_id) = client_id else { return ApiError::InvalidRequest };
    match app.run(|_| gate::belongs_to_another(app, user.user.as_str(), &client_id)).await {
        Ok(false) => ApiError::InvalidRequest,
        Ok(true) => ApiError::AuthRequired,
        Err(error) => error,
    }
}

async fn once(app: &App, user: &Identity, request: &PullRequest, commit: Commit) -> Result<Vec<u8>, Failure> {
    // The epoch first, the snapshot after it: what was accepted before this request cannot be missing in its answer.
    let elsewhere = match &app.source {
        Some(_) => Some(app.accepted_epoch(user.user.as_str(), request.client_id.as_str()).await?),
        None => None,
    };
    let db = Begun::acquire(&app.state, Isolation::RepeatableRead).await?;
    let (opened, here) = gate::begin(app, &db, user.user.as_str(), &request.client_id).await?;
    let accepted = elsewhere.unwrap_or_else(|| Accepted::from(here.unwrap_or(0)));
    let client = opened.admit(user.user.as_str(), request.client_generation, &request.schema)?.clone();
    if request.scope_set_version > client.scope_set_version as u64 {
        return Err(ApiError::InvalidRequest.into());
    }
    if request.scopes.keys().any(|id| !opened.scopes.contains_key(id.as_str())) {
        return Err(ApiError::InvalidRequest.into());
    }
    let presented = gate::authenticate(
        app,
        &opened,
        user.user.as_str(),
        &request.client_id,
        request.client_generation,
        &request.scopes,
    )?;
    if client.materialized_epoch < accepted.require()? {
        return Err(ApiError::CapturePending { retry_after: 1 }.into());
    }

    let session: &Object = &db;
    let reconciled = gate::reconcile(session, &opened, client.client_no, client.scope_set_version, user).await?;
    let valid = valid_scopes(&presented, &reconciled);
    let page = page(session, &opened, &valid, usize::from(request.limit)).await?;

    let mut cursors = BTreeMap::new();
    for ((id, scope, _), position) in valid.iter().zip(&page.cursors) {
        if let Some(position) = position {
            let expected =
                Expected { user: user.user.as_str(), client: request.client_id.as_str(), scope: id.as_str() };
            let token = opened.seal(app, &expected, request.client_generation, scope, *position);
            cursors.insert((*id).clone(), token);
        }
    }
    let mut digests = BTreeMap::new();
    if !page.has_more {
        for (id, scope) in &reconciled.assigned {
            digests.insert(id.clone(), app.digests.of(app, session, &opened, scope).await?);
        }
    }
    // What only read has nothing to wait for: its transaction ends behind the answer.
    let acknowledged = acknowledge(app, session, &client, &valid).await?;
    if acknowledged && !reconciled.changed {
        // What was presented once is presented again: a crash that takes a checkpoint back takes nothing from anybody.
        client::relax_commit(session).await?;
    }
    if acknowledged || reconciled.changed {
        commit.send(db.commit()).await?;
    }

    let added: Vec<ScopeId> =
        reconciled.assigned.keys().filter(|id| !request.scopes.contains_key(*id)).cloned().collect();
    let removed: Vec<ScopeId> =
        request.scopes.keys().filter(|id| !reconciled.assigned.contains_key(*id)).cloned().collect();
    let rebuild: Vec<ScopeId> = reconciled
        .assigned
        .keys()
        .filter(|id| !matches!(presented.get(*id), Some(Presented::Valid(_))))
        .cloned()
        .collect();
    metrics::histogram!("tributary_pull_changes").record(page.changes as f64);
    Ok(page.response.finish(&PullTail {
        scope_set_version: reconciled.scope_set_version,
        scope_cursors: &cursors,
        added: &added,
        removed: &removed,
        rebuild: &rebuild,
        end: if page.has_more { PullEnd::More } else { PullEnd::Terminal(&digests) },
    }))
}

/// A scope whose cursor resumes it, and from where.
type ValidScope<'a> = (&'a ScopeId, &'a ClientScope, Position);

/// Assigned scopes with a valid cursor, in raw UTF-8 order.
fn valid_scopes<'a>(presented: &BTreeMap<ScopeId, Presented>, reconciled: &'a Reconciled) -> Vec<ValidScope<'a>> {
    reconciled
        .assigned
        .iter()
        .filter_map(|(id, scope)| match presented.get(id) {
            Some(Presented::Valid(position)) => Some((id, scope, *position)),
            Some(Presented::Stale(_, cause)) => {
                metrics::counter!("tributary_stale_cursors_total", "cause" => cause.name()).increment(1);
                None
            }
            Some(Presented::Null) | None => None,
        })
        .collect()
}

struct Page {
    response: PullResponse,
    changes: usize,
    cursors: Vec<Option<Position>>,
    has_more: bool,
}

/// Eligibility before the limit, merge, cut: reads one candidate more than fits, over all scopes.
async fn page(
    db: &impl GenericClient,
    opened: &Opened,
    valid: &[ValidScope<'_>],
    limit: usize,
) -> Result<Page, Failure> {
    // A scope whose newest effect is not after its cursor has no candidates.
    let (moved, ranges): (Vec<usize>, Vec<(i32, Position)>) = valid
        .iter()
        .enumerate()
        .filter(|(_, (_, scope, after))| scope.content > *after)
        .map(|(index, (_, scope, after))| (index, (scope.scope_no, *after)))
        .unzip();
    let mut candidates = pull::candidates(db, &ranges, limit as i64 + 1).await?;
    for candidate in &mut candidates {
        candidate.scope = moved[candidate.scope];
    }
    let found = find(db, &opened.served, &candidates).await?;
    let outcomes: Vec<Outcome<'_>> =
        candidates.iter().map(|candidate| outcome(&opened.served, &found, candidate)).collect::<Result<_, _>>()?;

    let mut streams: Vec<Stream<'_>> = valid
        .iter()
        .map(|(id, _, after)| Stream {
            scope_id: id.as_str().as_bytes(),
            cursor: *after,
            head: Vec::new(),
            rest: Rest::Nothing,
        })
        .collect();
    // For each stream the candidates that its head was made of.
    let mut heads: Vec<Vec<usize>> = vec![Vec::new(); streams.len()];
    for (index, (candidate, outcome)) in candidates.iter().zip(&outcomes).enumerate() {
        streams[candidate.scope].head.push(merge::Candidate {
            position: candidate.position,
            table_id: outcome.table_id.as_bytes(),
            key: outcome.key,
            operation: if candidate.present { Operation::Upsert } else { Operation::Delete },
        });
        heads[candidate.scope].push(index);
    }
    // The store gives the least of all scopes together. When it gave all that was asked for, a scope goes on exactly when
    // its newest effect was not read; what follows stands neither before the last candidate nor before its cursor.
    if let (Some(last), true) = (candidates.last(), candidates.len() > limit) {
        for (stream, (_, scope, after)) in streams.iter_mut().zip(valid) {
            let read = stream.head.last().map_or(*after, |candidate| candidate.position);
            if scope.content > read {
                stream.rest = Rest::After(last.position.max(*after));
            }
        }
    }
    let merged = merge::merge(&streams, opened.boundary(), limit)
        .map_err(|error| Failure::Store(tributary_shared::store::error::StoreError::integrity(error.to_string())))?;

    let mut response = PullResponse::with_capacity(1024 + 512 * merged.selected.len());
    for selected in &merged.selected {
        let index = heads[selected.stream][selected.candidate];
        let (candidate, outcome) = (&candidates[index], &outcomes[index]);
        let (table, encoder) = opened.served.table(candidate.table_no)?;
        let pk = encoder.key_json(outcome.key).map_err(|_| Failure::integrity("a stored key is not canonical"))?;
        let version = outcome.row.map_or(candidate.position, |row| row.version).server_version();
        let change =
            Change { scope: valid[selected.stream].0.as_str(), table: &table.id, pk: &pk, server_version: &version };
        match outcome.row {
            Some(row) => response.upsert(&change, &row.wire, &row.digest),
            None => response.delete(&change, None),
        }
    }
    Ok(Page { response, changes: merged.selected.len(), cursors: merged.cursors, has_more: merged.has_more })
}

/// What becomes of a candidate: every one has an explicit outcome, or the page fails.
struct Outcome<'a> {
    table_id: &'a str,
    key: &'a [u8],
    row: Option<&'a Captured>,
}

/// Captured rows and keys of the candidates, one statement a relation.
struct Found {
    rows: HashMap<i64, Captured>,
    keys: HashMap<i64, Vec<u8>>,
}

async fn find(db: &impl GenericClient, served: &Served, candidates: &[Candidate]) -> Result<Found, Failure> {
    let mut by_table: BTreeMap<i16, (Vec<i64>, Vec<i64>)> = BTreeMap::new();
    for candidate in candidates {
        let (upserts, deletes) = by_table.entry(candidate.table_no).or_default();
        if candidate.present { upserts.push(candidate.row_id) } else { deletes.push(candidate.row_id) }
    }
    let mut found = Found { rows: HashMap::new(), keys: HashMap::new() };
    for (table_no, (upserts, deletes)) in &by_table {
        let (table, _) = served.table(*table_no)?;
        if !upserts.is_empty() {
            found.rows.extend(pull::captured(db, table, upserts).await?.into_iter().map(|row| (row.row_id, row)));
        }
        if !deletes.is_empty() {
            found.keys.extend(pull::keys(db, table, deletes).await?);
        }
    }
    Ok(found)
}

fn outcome<'a>(served: &'a Served, found: &'a Found, candidate: &Candidate) -> Result<Outcome<'a>, Failure> {
    let (table, _) = served.table(candidate.table_no)?;
    if candidate.present {
        let row =
            found.rows.get(&candidate.row_id).ok_or_else(|| Failure::integrity("an entry has no captured row"))?;
        Ok(Outcome { table_id: &table.id, key: &row.key, row: Some(row) })
    } else {
        let key = found.keys.get(&candidate.row_id).ok_or_else(|| Failure::integrity("a delete marker has no key"))?;
        Ok(Outcome { table_id: &table.id, key, row: None })
    }
}

/// Advances checkpoints to what was presented, in the request's own transaction; writes nothing when nothing moves.
/// Returns whether it wrote.
async fn acknowledge(
    app: &App,
    db: &impl GenericClient,
    client: &client::Client,
    valid: &[ValidScope<'_>],
) -> Result<bool, Failure> {
    if valid.is_empty() {
        return Ok(false);
    }
    let now = app.now();
    let moved: Vec<(i32, Position)> = valid
        .iter()
        .filter(|(_, scope, presented)| scope.checkpoint.is_none_or(|checkpoint| checkpoint < *presented))
        .map(|(_, scope, presented)| (scope.scope_no, *presented))
        .collect();
    if !moved.is_empty() {
        client::acknowledge(db, client.client_no, &moved).await?;
    }
    let touched = now.duration_since(client.acknowledged_at).is_ok_and(|age| age >= ACKNOWLEDGED_GRANULARITY);
    if touched {
        client::touch(db, client.client_no, now).await?;
    }
    Ok(touched || !moved.is_empty())
}

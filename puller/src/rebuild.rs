//! `POST /sync/rebuild`: one immutable snapshot of a scope, page by page (ADR 003, "Rebuild contract").
//!
//! Writes a session and, when nobody has staged this content before, its snapshot; never a checkpoint, an assignment or
//! anything of another scope.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use deadpool_postgres::Transaction;
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};
use tokio::time::Instant;
use tributary_shared::continuation::{self, Continuation, Refusal};
use tributary_shared::cursor::Cursor;
use tributary_shared::position::Position;
use tributary_shared::protocol::{Envelope, RebuildEnd, RebuildPage, RebuildRequest};
use tributary_shared::store::client::{self, Client, ClientScope};
use tributary_shared::store::session;
use tributary_shared::store::snapshot::{self, Session};
use tributary_shared::token::{Bindings, Expected, KeyId, Lineage};
use uuid::Uuid;

use crate::app::{App, Commit, Failure, begin, micros};
use crate::auth::Identity;
use crate::digests;
use crate::error::ApiError;
use crate::gate::{self, Opened};
use crate::permit::Permit;
use crate::pull::refuse_malformed;
use crate::staging::{self, Ticket, Turn};

/// Longest wait for a snapshot that is being staged, so that the client gets an answer before a balancer gives up.
/// The staging goes on meanwhile, and the client's retry finds its session.
const STAGING_WAIT: Duration = Duration::from_secs(50);
/// Pause while another puller stages.
const STAGING_POLL: Duration = Duration::from_millis(100);

/// Answers a rebuild page.
pub async fn rebuild(app: &Arc<App>, user: &Identity, body: &[u8], permit: Permit) -> Result<Vec<u8>, ApiError> {
    let envelope = Envelope::read(body).map_err(|_| ApiError::InvalidRequest)?;
    let client_id = envelope.client_id();
    let Ok(request) = envelope.rebuild() else {
        return Err(refuse_malformed(app, user, client_id).await);
    };
    let scope_no = match app.run(|commit| once(app, user, &request, &Mode::Reuse, commit)).await? {
        Outcome::Page(page) => return Ok(page),
        Outcome::Unstaged { scope_no } => scope_no,
    };
    // Nobody has staged this content: one rebuild does, the others wait for it.
    wait(app, user, &request, scope_no, permit).await
}

/// Waits for something until this moment, or until this process is about to leave. Only waits are cut so, never a
/// transaction: one whose commit was sent is not told that it failed.
async fn patiently<T>(app: &App, until: Instant, wait: impl Future<Output = T>) -> Result<T, ApiError> {
    let unavailable = ApiError::TemporaryUnavailable { retry_after: 1 };
    tokio::select! {
        biased;
        done = wait => Ok(done),
        () = tokio::time::sleep_until(until) => Err(unavailable),
        () = app.staging.leaving.cancelled() => Err(unavailable),
    }
}

/// Waits for whoever stages the scope, or stages it.
async fn wait(
    app: &Arc<App>,
    user: &Identity,
    request: &RebuildRequest,
    scope_no: i32,
    mut permit: Permit,
) -> Result<Vec<u8>, ApiError> {
    let until = Instant::now() + STAGING_WAIT;
    let turn = app.staging.turn(scope_no);
    let mut waiting = None;
    loop {
        if let Ok(guard) = turn.lock.clone().try_lock_owned() {
            drop(waiting.take());
            let running = app.staging.running.clone().try_acquire_owned().ok();
            if running.is_none() {
                permit.change(&app.staging.waiters)?;
            }
            let staging = stage(app.clone(), user.clone(), request.clone(), turn.clone(), running, (guard, permit));
            // A task of its own: whether the client waits or not, the work is not lost.
            return patiently(app, until, tokio::spawn(staging)).await?.unwrap_or_else(|error| {
                tracing::error!(%error, "a staging ended early");
                Err(ApiError::TemporaryUnavailable { retry_after: 1 })
            });
        }
        permit.change(&app.staging.waiters)?;
        if waiting.is_none() {
            waiting = Some(turn.wait(Ticket { user: user.clone(), request: request.clone() }));
        }
        // Whoever waited looks whether the one before it has made its session, without holding up the others.
        drop(patiently(app, until, turn.lock.lock()).await?);
        let _reading = patiently(app, until, app.staging.readers.acquire()).await?;
        if let Outcome::Page(page) = app.run(|commit| once(app, user, request, &Mode::Reuse, commit)).await? {
            return Ok(page);
        }
    }
}

/// Stages a scope and answers the first page, holding the scope's turn and the request's permit; while as many stage as
/// may, or another puller stages it, waits for that.
async fn stage(
    app: Arc<App>,
    user: Identity,
    request: RebuildRequest,
    turn: Arc<Turn>,
    mut running: Option<OwnedSemaphorePermit>,
    _held: (OwnedMutexGuard<()>, Permit),
) -> Result<Vec<u8>, ApiError> {
    let mode = Mode::Stage(turn);
    loop {
        let outcome = {
            let _running = match running.take() {
                Some(running) => running,
                None => app.staging.running.clone().acquire_owned().await.expect("never closed"),
            };
            app.run(|commit| once(&app, &user, &request, &mode, commit)).await?
        };
        match outcome {
            Outcome::Page(page) => return Ok(page),
            Outcome::Unstaged { .. } => tokio::time::sleep(STAGING_POLL).await,
        }
    }
}

/// Whether a request may stage.
enum Mode {
    /// Only what is staged.
    Reuse,
    /// Stage, and make the sessions of all that wait in this turn.
    Stage(Arc<Turn>),
}

enum Outcome {
    Page(Vec<u8>),
    /// The content is not staged, and this request may not or cannot do it now.
    Unstaged {
        scope_no: i32,
    },
}

async fn once(
    app: &App,
    user: &Identity,
    request: &RebuildRequest,
    mode: &Mode,
    commit: Commit,
) -> Result<Outcome, Failure> {
    // Epochs first, the snapshot after them: what was accepted before is not missing in it.
    let accepted = app.accepted_epoch(user.user.as_str(), request.client_id.as_str()).await?;
    let companions = match mode {
        Mode::Stage(turn) => companions(app, turn).await?,
        Mode::Reuse => Vec::new(),
    };
    let mut connection = session::acquire(&app.state).await?;
    let db = begin(&mut connection).await?;
    let opened = gate::open(app, &db, &request.client_id).await?;
    let client = opened.admit(user.user.as_str(), request.client_generation, &request.schema)?;
    // Until it is required nothing reads an epoch that is unknown.
    let epoch = accepted.known().unwrap_or(0);
    let context = Context { app, db: &db, opened: &opened, client, user, request, accepted: epoch };
    match &request.cursor {
        None => {
            let scope = context.assigned().await?.ok_or(ApiError::InvalidRequest)?;
            accepted.require()?;
            context.refuse_pending()?;
            let Some(session) = context.first(scope, mode, &companions).await? else {
                return Ok(Outcome::Unstaged { scope_no: scope.scope_no });
            };
            let page = context.page(&session, scope, 0).await?;
            commit.send(db.commit()).await?;
            Ok(Outcome::Page(page))
        }
        Some(token) => {
            let continuation = Continuation::open(&app.keys, token.as_str(), &context.expected(), request.rebuild_id)
                .map_err(|_| ApiError::InvalidRequest)?;
            // A continuation of a scope whose assignment was invalidated cannot go on.
            let scope = context.assigned().await?.ok_or(ApiError::RebuildRestartRequired)?;
            let current = continuation::Current {
                lineage: opened.lineage(request.client_generation, scope),
                // Without the source every other cause is told all the same.
                accepted_write_epoch: accepted.known().map_or(continuation.accepted_write_epoch, |epoch| epoch as u64),
                now: micros(app.now()),
            };
            if continuation.lapse(&current).is_some() {
                return Err(ApiError::RebuildRestartRequired.into());
            }
            let session = snapshot::load_session(&db, continuation.session_id)
                .await?
                .filter(|session| session.client_no == client.client_no && session.rebuild_id == request.rebuild_id)
                .ok_or(ApiError::RebuildRestartRequired)?;
            // Only of a session that is still there.
            if let Some(Refusal::PageLimit) = continuation.refusal(&current, request.limit) {
                return Err(ApiError::InvalidRequest.into());
            }
            accepted.require()?;
            context.refuse_pending()?;
            let page = context.page(&session, scope, continuation.next_row_ordinal).await?;
            Ok(Outcome::Page(page))
        }
    }
}

/// A rebuild that waits, with its client's accepted-write epoch.
struct Companion {
    ticket: Arc<Ticket>,
    accepted: i64,
}

/// The rebuilds that wait in a turn; one statement reads all of their epochs.
async fn companions(app: &App, turn: &Turn) -> Result<Vec<Companion>, Failure> {
    let tickets = turn.waiting();
    let clients: Vec<(&str, &str)> =
        tickets.iter().map(|ticket| (ticket.user.user.as_str(), ticket.request.client_id.as_str())).collect();
    let epochs = app.accepted_epochs_of(&clients).await?;
    Ok(tickets.into_iter().zip(epochs).map(|(ticket, accepted)| Companion { ticket, accepted }).collect())
}

struct Context<'a> {
    app: &'a App,
    db: &'a Transaction<'a>,
    opened: &'a Opened,
    client: &'a Client,
    user: &'a Identity,
    request: &'a RebuildRequest,
    accepted: i64,
}

impl<'a> Context<'a> {
    fn expected(&self) -> Expected<'a> {
        Expected {
            user: self.user.user.as_str(),
            client: self.request.client_id.as_str(),
            scope: self.request.scope.as_str(),
        }
    }

    /// The requested scope, if it is assigned: to the client's generation, and by what assignments say now.
    async fn assigned(&self) -> Result<Option<&'a ClientScope>, Failure> {
        let assigned = gate::assigned(self.db, &self.opened.served, self.user).await?;
        let scope = self.opened.scopes.get(self.request.scope.as_str());
        Ok(scope.filter(|scope| scope.assigned && assigned.contains(&scope.scope_id)))
    }

    /// An accepted write that is not materialized holds the request up.
    fn refuse_pending(&self) -> Result<(), ApiError> {
        if self.client.materialized_epoch < self.accepted {
            return Err(ApiError::CapturePending { retry_after: 1 });
        }
        Ok(())
    }

    /// The session of the first request: the unexpired one of this attempt, or a new one. `None`: the content is not
    /// staged, and this request may not do it now.
    async fn first(
        &self,
        scope: &ClientScope,
        mode: &Mode,
        companions: &[Companion],
    ) -> Result<Option<Session>, Failure> {
        let mut wanted = self.wanted(scope);
        if let Some(session) = snapshot::find_session(self.db, &wanted, wanted.created_at).await? {
            // Another page size is another request, and cannot change the pages of this attempt.
            let same = session.page_limit == wanted.page_limit;
            return if same { Ok(Some(session)) } else { Err(ApiError::InvalidRequest.into()) };
        }
        client::lock(self.db, self.client.client_no).await?;
        if let Some(staged) = snapshot::find(self.db, &digests::key(self.opened, scope)).await? {
            wanted.snapshot_no = staged.snapshot_no;
            snapshot::create_session(self.db, &wanted).await?;
            return Ok(Some(wanted));
        }
        let Mode::Stage(_) = mode else { return Ok(None) };
        let Some(begun) = staging::begin(self.app, self.db, self.opened, scope).await? else { return Ok(None) };
        wanted.snapshot_no = begun.snapshot_no;
        snapshot::create_session(self.db, &wanted).await?;
        // Before the rows: a client that changes meanwhile is noticed while nothing is done yet.
        for companion in companions {
            self.join(companion, begun.snapshot_no).await?;
        }
        staging::fill(self.db, self.opened, scope, &begun).await?;
        Ok(Some(wanted))
    }

    /// Makes the session of a rebuild that waits, in this transaction and of the same snapshot: past the same gates, at
    /// the same boundary. One that is refused learns of it by itself.
    async fn join(&self, companion: &Companion, snapshot_no: i64) -> Result<(), Failure> {
        let Companion { ticket, accepted } = companion;
        let request = &ticket.request;
        let opened = gate::open_another(self.db, self.opened, &request.client_id).await?;
        let Ok(client) = opened.admit(ticket.user.user.as_str(), request.client_generation, &request.schema) else {
            return Ok(());
        };
        let context = Context { opened: &opened, client, user: &ticket.user, request, accepted: *accepted, ..*self };
        let Some(scope) = context.assigned().await? else { return Ok(()) };
        if context.refuse_pending().is_err() {
            return Ok(());
        }
        let wanted = Session { snapshot_no, ..context.wanted(scope) };
        // One request can wait twice.
        if snapshot::find_session(self.db, &wanted, wanted.created_at).await?.is_none() {
            client::lock(self.db, client.client_no).await?;
            snapshot::create_session(self.db, &wanted).await?;
        }
        Ok(())
    }

    /// A new session of this request at the boundary, without a snapshot.
    fn wanted(&self, scope: &ClientScope) -> Session {
        let lineage = self.opened.lineage(self.request.client_generation, scope);
        Session {
            session_id: Uuid::new_v4(),
            client_no: self.client.client_no,
            client_generation: lineage.client_generation as i64,
            scope_no: scope.scope_no,
            rebuild_id: self.request.rebuild_id,
            stream_generation: lineage.stream_generation,
            schema_version: self.opened.served.configuration.schema_version as i64,
            membership_generation: lineage.membership_generation as i64,
            retention_generation: lineage.retention_generation as i64,
            accepted_write_epoch: self.accepted,
            boundary_lsn: self.opened.progress.boundary_lsn,
            page_limit: i32::from(self.request.limit),
            key_id: self.app.keys.signing_key().to_sql(),
            snapshot_no: 0,
            // The state keeps microseconds: what is stored must be what tokens carry.
            created_at: UNIX_EPOCH + Duration::from_micros(micros(self.app.now()).unsigned_abs()),
        }
    }

    /// The page that begins at a row of the staged order: the same octets whenever it is asked for.
    async fn page(&self, session: &Session, scope: &ClientScope, start: u64) -> Result<Vec<u8>, Failure> {
        let staged = snapshot::load(self.db, session.snapshot_no)
            .await?
            .ok_or_else(|| Failure::integrity("a session's snapshot is missing"))?;
        let start = i64::try_from(start).map_err(|_| ApiError::InvalidRequest)?;
        let end = staged.row_count.min(start.saturating_add(i64::from(session.page_limit)));
        let blocks =
            if start < end { snapshot::blocks(self.db, session.snapshot_no, start, end).await? } else { Vec::new() };
        let mut records: Vec<&[u8]> = Vec::with_capacity((end - start).max(0) as usize);
        for block in &blocks {
            let mut from = 0;
            for (index, &to) in block.record_ends.iter().enumerate() {
                let row = block.first_row + index as i64;
                let to = to as usize;
                let record = block
                    .records
                    .get(from..to)
                    .ok_or_else(|| Failure::integrity("a staged block does not hold its records"))?;
                if (start..end).contains(&row) {
                    records.push(record);
                }
                from = to;
            }
        }
        if records.len() as i64 != (end - start).max(0) {
            return Err(Failure::integrity("a snapshot does not hold the rows that it counts"));
        }
        metrics::histogram!("tributary_rebuild_page_rows").record(records.len() as f64);
        let lineage = Lineage {
            stream_generation: session.stream_generation,
            client_generation: session.client_generation as u64,
            schema_hash: self.opened.served.configuration.schema_hash,
            membership_generation: session.membership_generation as u64,
            retention_generation: session.retention_generation as u64,
        };
        let bindings = Bindings::of(&self.expected());
        let boundary = Position::boundary(session.boundary_lsn);
        let issued_at = micros(session.created_at);
        let key = KeyId::from_sql(session.key_id).ok_or_else(|| Failure::integrity("a session's key has no number"))?;
        let page = if end < staged.row_count {
            let cursor = Continuation {
                lineage,
                bindings,
                session_id: session.session_id,
                rebuild_id: session.rebuild_id,
                snapshot_boundary: boundary,
                next_row_ordinal: end as u64,
                page_limit: session.page_limit as u16,
                accepted_write_epoch: session.accepted_write_epoch as u64,
                issued_at,
            }
            .seal_with(&self.app.keys, key)
            // The session's key is retired: nothing of it can be repeated.
            .map_err(|_| ApiError::RebuildRestartRequired)?;
            RebuildPage { scope: &scope.scope_id, end: RebuildEnd::More { cursor: &cursor } }.write(records)
        } else {
            let cursor = Cursor { lineage, bindings, position: boundary, issued_at }
                .seal_with(&self.app.keys, key)
                .map_err(|_| ApiError::RebuildRestartRequired)?;
            let end = RebuildEnd::Final { final_scope_cursor: &cursor, digest: &staged.digest };
            RebuildPage { scope: &scope.scope_id, end }.write(records)
        };
        Ok(page)
    }
}

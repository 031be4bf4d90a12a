//! `POST /sync/rebuild`: one immutable snapshot of a scope, page by page (ADR 003, "Rebuild contract").
//!
//! Writes a session and, when nobody has staged this content before, its snapshot; never a checkpoint, an assignment or
//! anything of another scope.

use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use deadpool_postgres::Transaction;
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};
use tributary_shared::continuation::{self, Continuation, Refusal};
use tributary_shared::cursor::Cursor;
use tributary_shared::position::Position;
use tributary_shared::protocol::{Envelope, RebuildEnd, RebuildPage, RebuildRequest};
use tributary_shared::store::client::{self, Client, ClientScope};
use tributary_shared::store::digest::DigestKey;
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
use crate::staging::{self, Latest, Turn};

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
    let (scope_no, accepted) = match app.run(|commit| once(app, user, &request, Mode::Reuse(None), commit)).await? {
        Outcome::Page(page) => return Ok(page),
        Outcome::Unstaged { scope_no, accepted } => (scope_no, accepted),
    };
    // Nobody has staged this content: one rebuild does, the others wait for it.
    let waiting = Waiting { app, user, request: &request, scope_no, since: Instant::now(), accepted };
    waiting.answer(permit).await
}

/// A first request whose content is not staged.
struct Waiting<'a> {
    app: &'a Arc<App>,
    user: &'a Identity,
    request: &'a RebuildRequest,
    scope_no: i32,
    since: Instant,
    /// The epoch that was found materialized before it waited.
    accepted: i64,
}

impl Waiting<'_> {
    /// Waits for something, until the client has waited long enough or this process is about to leave.
    async fn patiently<T>(&self, wait: impl Future<Output = T>) -> Result<T, ApiError> {
        let unavailable = ApiError::TemporaryUnavailable { retry_after: 1 };
        tokio::select! {
            biased;
            done = wait => Ok(done),
            () = tokio::time::sleep_until((self.since + STAGING_WAIT).into()) => Err(unavailable),
            () = self.app.staging.leaving.cancelled() => Err(unavailable),
        }
    }

    /// Waits for whoever stages the scope, or stages it.
    async fn answer(&self, mut permit: Permit) -> Result<Vec<u8>, ApiError> {
        let waiters = &self.app.staging.waiters;
        let turn = self.app.staging.turn(self.scope_no);
        loop {
            if let Ok(guard) = turn.lock.clone().try_lock_owned() {
                let running = self.app.staging.running.clone().try_acquire_owned().ok();
                if running.is_none() {
                    permit.change(waiters)?;
                }
                let (app, user, request) = (self.app.clone(), self.user.clone(), self.request.clone());
                let staging = stage(app, user, request, turn.clone(), running, (guard, permit));
                // A task of its own: whether the client waits or not, the work is not lost.
                return self.patiently(tokio::spawn(staging)).await?.unwrap_or_else(|error| {
                    tracing::error!(%error, "a staging ended early");
                    Err(ApiError::TemporaryUnavailable { retry_after: 1 })
                });
            }
            permit.change(waiters)?;
            // Whoever waited looks whether the one before it has staged the content, without holding up the others.
            drop(self.patiently(turn.lock.lock()).await?);
            // What was staged from a state snapshot opened while this request waited is as good as staging it now, though
            // the scope has changed since: that is how many clients share one staging of a scope that never rests.
            let latest = turn.latest().filter(|latest| latest.opened >= self.since);
            let shared = latest.map(|latest| Shared { latest, accepted: self.accepted });
            let mode = Mode::Reuse(shared);
            let _reading = self.patiently(self.app.staging.readers.acquire()).await?;
            if let Outcome::Page(page) =
                self.app.run(|commit| once(self.app, self.user, self.request, mode.clone(), commit)).await?
            {
                return Ok(page);
            }
        }
    }
}

/// Stages a scope and answers the first page, holding the scope's turn and the request's permit; while others stage that
/// are as many as may, or another puller stages it, waits for that.
async fn stage(
    app: Arc<App>,
    user: Identity,
    request: RebuildRequest,
    turn: Arc<Turn>,
    mut running: Option<OwnedSemaphorePermit>,
    _held: (OwnedMutexGuard<()>, Permit),
) -> Result<Vec<u8>, ApiError> {
    loop {
        let outcome = {
            let _running = match running.take() {
                Some(running) => running,
                None => app.staging.running.clone().acquire_owned().await.expect("never closed"),
            };
            app.run(|commit| once(&app, &user, &request, Mode::Stage(turn.clone()), commit)).await?
        };
        match outcome {
            Outcome::Page(page) => return Ok(page),
            Outcome::Unstaged { .. } => tokio::time::sleep(STAGING_POLL).await,
        }
    }
}

/// Whether a request may stage.
#[derive(Clone)]
enum Mode {
    /// Only what is staged; also what this says, though the scope has newer content.
    Reuse(Option<Shared>),
    /// Stage, and tell the others in this turn.
    Stage(Arc<Turn>),
}

/// A staging that a waiting request may share.
#[derive(Clone)]
struct Shared {
    latest: Arc<Latest>,
    /// The epoch that is known to be materialized in it.
    accepted: i64,
}

enum Outcome {
    Page(Vec<u8>),
    /// The content is not staged, and this request may not or cannot do it now.
    Unstaged {
        scope_no: i32,
        /// The client's epoch, which is materialized.
        accepted: i64,
    },
}

async fn once(
    app: &App,
    user: &Identity,
    request: &RebuildRequest,
    mode: Mode,
    commit: Commit,
) -> Result<Outcome, Failure> {
    let accepted = app.accepted_epoch(user.user.as_str(), request.client_id.as_str()).await?;
    let opening = Instant::now();
    let mut connection = session::acquire(&app.state).await?;
    let db = begin(&mut connection).await?;
    let opened = gate::open(app, &db, &request.client_id).await?;
    let client = opened.admit(user.user.as_str(), request.client_generation, &request.schema)?;
    let assigned = gate::assigned(&db, &opened.served, user).await?;
    let scope =
        opened.scopes.get(request.scope.as_str()).filter(|scope| scope.assigned && assigned.contains(&scope.scope_id));
    let context = Context { app, db: &db, opened: &opened, client, user, request };
    match &request.cursor {
        None => {
            let scope = scope.ok_or(ApiError::InvalidRequest)?;
            let accepted = accepted.require()?;
            if client.materialized_epoch < accepted {
                return Err(ApiError::CapturePending { retry_after: 1 }.into());
            }
            let Some(session) = context.first(scope, accepted, &mode).await? else {
                return Ok(Outcome::Unstaged { scope_no: scope.scope_no, accepted });
            };
            let page = context.page(&session, scope, 0).await?;
            commit.send(db).await?;
            // The session of an earlier attempt can be of older content.
            let present = session.boundary_lsn == opened.progress.boundary_lsn;
            if let (Mode::Stage(turn), true) = (mode, present) {
                turn.publish(Latest {
                    key: digests::key(&opened, scope),
                    snapshot_no: session.snapshot_no,
                    boundary: session.boundary_lsn,
                    opened: opening,
                });
            }
            Ok(Outcome::Page(page))
        }
        Some(token) => {
            let continuation = Continuation::open(&app.keys, token.as_str(), &context.expected(), request.rebuild_id)
                .map_err(|_| ApiError::InvalidRequest)?;
            // A continuation of a scope whose assignment was invalidated cannot go on.
            let scope = scope.ok_or(ApiError::RebuildRestartRequired)?;
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
            if client.materialized_epoch < accepted.require()? {
                return Err(ApiError::CapturePending { retry_after: 1 }.into());
            }
            let page = context.page(&session, scope, continuation.next_row_ordinal).await?;
            Ok(Outcome::Page(page))
        }
    }
}

struct Context<'a> {
    app: &'a App,
    db: &'a Transaction<'a>,
    opened: &'a Opened,
    client: &'a Client,
    user: &'a Identity,
    request: &'a RebuildRequest,
}

impl<'a> Context<'a> {
    fn expected(&self) -> Expected<'a> {
        Expected {
            user: self.user.user.as_str(),
            client: self.request.client_id.as_str(),
            scope: self.request.scope.as_str(),
        }
    }

    /// The session of the first request: the unexpired one of this attempt, or a new one. `None`: the content is not
    /// staged, and this request may not do it now.
    async fn first(&self, scope: &ClientScope, accepted: i64, mode: &Mode) -> Result<Option<Session>, Failure> {
        let lineage = self.opened.lineage(self.request.client_generation, scope);
        let now = self.app.now();
        let mut wanted = Session {
            session_id: Uuid::new_v4(),
            client_no: self.client.client_no,
            client_generation: lineage.client_generation as i64,
            scope_no: scope.scope_no,
            rebuild_id: self.request.rebuild_id,
            stream_generation: lineage.stream_generation,
            schema_version: self.opened.served.configuration.schema_version as i64,
            membership_generation: lineage.membership_generation as i64,
            retention_generation: lineage.retention_generation as i64,
            accepted_write_epoch: accepted,
            boundary_lsn: self.opened.progress.boundary_lsn,
            page_limit: i32::from(self.request.limit),
            key_id: self.app.keys.signing_key().to_sql(),
            snapshot_no: 0,
            // The state keeps microseconds: what is stored must be what tokens carry.
            created_at: UNIX_EPOCH + Duration::from_micros(micros(now).unsigned_abs()),
        };
        if let Some(session) = snapshot::find_session(self.db, &wanted, now).await? {
            // Another page size is another request, and cannot change the pages of this attempt.
            let same = session.page_limit == wanted.page_limit;
            return if same { Ok(Some(session)) } else { Err(ApiError::InvalidRequest.into()) };
        }
        client::lock(self.db, self.client.client_no).await?;
        let key = digests::key(self.opened, scope);
        let staged = match (snapshot::find(self.db, &key).await?, mode) {
            (Some(staged), _) => Some(staged.snapshot_no),
            (None, Mode::Stage(_)) => {
                staging::stage(self.app, self.db, self.opened, scope).await?.map(|staged| staged.snapshot_no)
            }
            (None, Mode::Reuse(Some(shared))) if may_share(&key, scope, accepted, shared) => {
                wanted.boundary_lsn = shared.latest.boundary;
                let staged = snapshot::load(self.db, shared.latest.snapshot_no).await?;
                staged.map(|staged| staged.snapshot_no)
            }
            (None, Mode::Reuse(_)) => None,
        };
        let Some(snapshot_no) = staged else { return Ok(None) };
        wanted.snapshot_no = snapshot_no;
        snapshot::create_session(self.db, &wanted).await?;
        Ok(Some(wanted))
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

/// Whether a snapshot that was staged for another while this request waited is one that it could have staged itself: under
/// the same generations, not below the resume floor, and with every write that was accepted.
fn may_share(key: &DigestKey, scope: &ClientScope, accepted: i64, shared: &Shared) -> bool {
    let latest = &shared.latest;
    let same = DigestKey { content: key.content, ..latest.key } == *key;
    same && shared.accepted == accepted && Position::boundary(latest.boundary) >= scope.floor
}

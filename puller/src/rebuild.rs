//! `POST /sync/rebuild`: one immutable snapshot of a scope, page by page (ADR 003, "Rebuild contract").
//!
//! Writes a session and, when nobody has staged this content before, its snapshot; never a checkpoint, an assignment or
//! anything of another scope.

use std::time::{Duration, UNIX_EPOCH};

use deadpool_postgres::Transaction;
use tributary_shared::continuation::{self, Continuation, Refusal};
use tributary_shared::cursor::Cursor;
use tributary_shared::position::Position;
use tributary_shared::protocol::{Envelope, RebuildEnd, RebuildPage, RebuildRequest};
use tributary_shared::store::client::{self, Client, ClientScope};
use tributary_shared::store::session;
use tributary_shared::store::snapshot::{self, Session};
use tributary_shared::token::{Bindings, Expected, KeyId, Lineage};
use uuid::Uuid;

use crate::app::{App, Failure, begin, micros};
use crate::auth::Identity;
use crate::digests;
use crate::error::ApiError;
use crate::gate::{self, Opened};
use crate::pull::refuse_malformed;
use crate::staging;

/// Longest wait for a snapshot that is being staged.
const STAGING_WAIT: Duration = Duration::from_secs(50);
/// Pause while another puller stages.
const STAGING_POLL: Duration = Duration::from_millis(100);

/// Answers a rebuild page.
pub async fn rebuild(app: &App, user: &Identity, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let envelope = Envelope::read(body).map_err(|_| ApiError::InvalidRequest)?;
    let client_id = envelope.client_id();
    let request = match envelope.rebuild() {
        Ok(request) => request,
        Err(_) => return Err(refuse_malformed(app, user, client_id).await),
    };
    let scope_no = match app.run(|| once(app, user, &request, Mode::Reuse)).await? {
        Outcome::Page(page) => return Ok(page),
        Outcome::Unstaged { scope_no } => scope_no,
    };
    // Nobody has staged this content: one rebuild does, the others wait for it.
    let _waiting = app.staging.waiters.try_acquire().map_err(|_| ApiError::RateLimited { retry_after: 1 })?;
    let staged = async {
        let turn = app.staging.turn(scope_no);
        loop {
            let waited = turn.lock.try_lock().is_err();
            let guard = turn.lock.lock().await;
            // Whoever waited looks first whether the one before it has staged the content, without holding up the
            // others.
            let (mode, guard) = if waited {
                drop(guard);
                (Mode::Reuse, None)
            } else {
                (Mode::Stage, Some(guard))
            };
            match app.run(|| once(app, user, &request, mode)).await? {
                Outcome::Page(page) => return Ok(page),
                Outcome::Unstaged { .. } if mode == Mode::Reuse => {}
                Outcome::Unstaged { .. } => {
                    drop(guard);
                    tokio::time::sleep(STAGING_POLL).await;
                }
            }
        }
    };
    tokio::time::timeout(STAGING_WAIT, staged).await.unwrap_or(Err(ApiError::TemporaryUnavailable { retry_after: 1 }))
}

/// Whether a request may stage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Reuse,
    Stage,
}

enum Outcome {
    Page(Vec<u8>),
    /// The content is not staged, and this request may not or cannot do it now.
    Unstaged {
        scope_no: i32,
    },
}

async fn once(app: &App, user: &Identity, request: &RebuildRequest, mode: Mode) -> Result<Outcome, Failure> {
    let accepted = app.accepted_epoch(user.user.as_str(), request.client_id.as_str()).await?;
    let mut connection = session::acquire(&app.state).await?;
    let db = begin(&mut connection).await?;
    let opened = gate::open(app, &db, &request.client_id).await?;
    let client = opened.admit(user.user.as_str(), request.client_generation, &request.schema)?;
    let assigned = opened.served.registry().assignments.scopes(user.user.as_str()).unwrap_or_default();
    let scope =
        opened.scopes.get(request.scope.as_str()).filter(|scope| scope.assigned && assigned.contains(&scope.scope_id));
    let context = Context { app, db: &db, opened: &opened, client, user, request, accepted };
    match &request.cursor {
        None => {
            let scope = scope.ok_or(ApiError::InvalidRequest)?;
            if client.materialized_epoch < accepted {
                return Err(ApiError::CapturePending { retry_after: 1 }.into());
            }
            let Some(session) = context.first(scope, mode).await? else {
                return Ok(Outcome::Unstaged { scope_no: scope.scope_no });
            };
            let page = context.page(&session, scope, 0).await?;
            db.commit().await?;
            Ok(Outcome::Page(page))
        }
        Some(token) => {
            let continuation = Continuation::open(&app.keys, token.as_str(), &context.expected(), request.rebuild_id)
                .map_err(|_| ApiError::InvalidRequest)?;
            // A continuation of a scope whose assignment was invalidated cannot go on.
            let scope = scope.ok_or(ApiError::RebuildRestartRequired)?;
            let current = continuation::Current {
                lineage: opened.lineage(request.client_generation, scope),
                accepted_write_epoch: accepted as u64,
                now: micros(app.now()),
            };
            match continuation.refusal(&current, request.limit) {
                None => {}
                Some(Refusal::Lapsed(_)) => return Err(ApiError::RebuildRestartRequired.into()),
                Some(Refusal::PageLimit) => return Err(ApiError::InvalidRequest.into()),
            }
            if client.materialized_epoch < accepted {
                return Err(ApiError::CapturePending { retry_after: 1 }.into());
            }
            let session = snapshot::load_session(&db, continuation.session_id)
                .await?
                .filter(|session| session.client_no == client.client_no && session.rebuild_id == request.rebuild_id)
                .ok_or(ApiError::RebuildRestartRequired)?;
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

    /// The session of the first request: the unexpired one of this attempt, or a new one. `None`: the content is not
    /// staged, and this request may not do it now.
    async fn first(&self, scope: &ClientScope, mode: Mode) -> Result<Option<Session>, Failure> {
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
            accepted_write_epoch: self.accepted,
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
        let staged = match snapshot::find(self.db, &key).await? {
            Some(staged) => Some(staged),
            None if mode == Mode::Stage => staging::stage(self.app, self.db, self.opened, scope).await?,
            None => None,
        };
        let Some(staged) = staged else { return Ok(None) };
        wanted.snapshot_no = staged.snapshot_no;
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

//! The ADR's audit findings of pull, as tests of their names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::ensure;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::{Paused, accept, changes_of, checkpoints, cursors_of, has_more, materialized, pull_with, raw, send};

const SCOPES: [&str; 3] = ["comments_user:u_1", "documents_user:u_1", "tasks_user:u_1"];

/// S-02: multi-scope pagination can report completion with unread changes. Every combination of old and new checkpoints,
/// with scopes whose changes fill any window before those of the others, is consumed to completion.
#[test]
fn s_02_divergent_checkpoints_deliver_every_event() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("u_1", "divergent")?;
    client.sync(500)?;
    // One scope's changes stand before the others', then they alternate, then they end in another order.
    source.run("update tasks set priority = priority + 1 where assignee_id = 'u_1'")?;
    let middle_tasks = client.scopes.clone();
    for n in 0..20 {
        source.run(&format!(
            "update documents set title = title || '{n}' where id = (select id from documents where owner_id = 'u_1' order by id offset {n} % 10 limit 1);
             update comments set body = body || '{n}' where id = (select id from comments where author_id = 'u_1' order by id offset {n} limit 1);
             update tasks set title = title || '{n}' where id = (select id from tasks where assignee_id = 'u_1' and not archived order by id offset {n} limit 1)"
        ))?;
    }
    source.run("delete from comments where author_id = 'u_1' and id % 3 = 0; update documents set metadata = null where owner_id = 'u_1'")?;
    materialized(&sandbox)?;
    let old = middle_tasks;
    client.pull_all(1000)?;
    let new = client.scopes.clone();
    let whole = accept(&client, "/sync/pull", &pull_with(&client, &old, 1000))?;
    ensure!(!has_more(&whole));
    let whole = changes_of(&whole);
    for scope in SCOPES {
        let count = whole.iter().filter(|change| change[0] == scope).count();
        ensure!(count >= 10, "only {count} changes of {scope}");
    }
    for mask in 0..8_u32 {
        let stale: BTreeSet<&str> =
            SCOPES.iter().enumerate().filter(|(bit, _)| mask >> bit & 1 == 1).map(|(_, scope)| *scope).collect();
        let expected: Vec<_> = whole.iter().filter(|change| stale.contains(change[0].as_str())).cloned().collect();
        for limit in [1, 3, 10, 64, 1000] {
            let mut cursors: BTreeMap<String, Option<String>> = new.clone();
            for scope in &stale {
                cursors.insert((*scope).to_owned(), old[*scope].clone());
            }
            let mut delivered = Vec::new();
            loop {
                let page = accept(&client, "/sync/pull", &pull_with(&client, &cursors, limit))?;
                delivered.extend(changes_of(&page));
                let more = has_more(&page);
                ensure!(more == (delivered.len() < expected.len()), "{stale:?} by {limit}: has_more is not exact");
                ensure!(more == page.get("checksums").is_none(), "{stale:?} by {limit}: checksums");
                for (scope, cursor) in cursors_of(&page) {
                    cursors.insert(scope, Some(cursor));
                }
                if !more {
                    ensure!(cursors_of(&page).len() == cursors.len(), "a terminal page gives every scope a cursor");
                    break;
                }
            }
            ensure!(delivered == expected, "{stale:?} by {limit}: pages are not the whole");
        }
    }
    Ok(())
}

/// The first read fixes the boundary: what is materialized while a pull is under way is not part of its answer, and none
/// of it is lost behind its cursors (ADR 003, "Per-scope eligibility before the limit").
#[test]
fn a_page_is_of_the_boundary_that_it_began_at() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "amid")?;
    client.sync(500)?;
    source.run("update comments set body = body || '!' where author_id = 'u_1'")?;
    materialized(&sandbox)?;
    let expected = changes_of(&accept(&client, "/sync/pull", &client.pull_request(1000))?);
    // Progress is read; the client's row cannot be.
    state.run("begin; lock table tributary.client in access exclusive mode")?;
    let (request, one) = (client.pull_request(1000), sandbox.client("u_1", "amid")?);
    let pulling = std::thread::spawn(move || accept(&one, "/sync/pull", &request));
    let watcher = sandbox.state()?;
    eventually(Duration::from_secs(20), || {
        let sql = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%client::%'";
        ensure!(watcher.number(sql)? == 1, "the pull is not amid its reads");
        Ok(())
    })?;
    source.run("update comments set body = body || '?' where author_id = 'u_1'; update tasks set priority = 7 where assignee_id = 'u_1'; delete from documents where owner_id = 'u_1'")?;
    materialized(&sandbox)?;
    state.run("rollback")?;
    let body = pulling.join().map_err(|_| anyhow::anyhow!("a pull panicked"))??;
    ensure!(changes_of(&body) == expected, "a later materialization is in the page");
    ensure!(raw(body.get("changes").unwrap_or(&Json::Null)).matches('?').count() == 0, "a later row is in the page");
    let checksums = body.get("checksums").cloned();
    for (scope, cursor) in cursors_of(&body) {
        client.scopes.insert(scope, Some(cursor));
    }
    let next = accept(&client, "/sync/pull", &client.pull_request(1000))?;
    ensure!(next.get("checksums").cloned() != checksums, "the digest is of another boundary than the page");
    let scopes: BTreeSet<String> = changes_of(&next).into_iter().map(|[scope, ..]| scope).collect();
    ensure!(SCOPES.iter().all(|scope| scopes.contains(*scope)), "what came after the boundary is lost: {scopes:?}");
    Ok(())
}

/// S-03: a cursor can advance without a delivered change. A missing or altered projection, or a row that changes in the
/// source meanwhile: no silent omission, and no acknowledgement of a failed page.
#[test]
fn s_03_no_cursor_advances_without_a_delivered_change() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "audited")?;
    client.sync(500)?;
    accept(&client, "/sync/pull", &client.pull_request(10))?;
    source.run("update tasks set title = 'captured' where assignee_id = 'u_1' and not archived")?;
    materialized(&sandbox)?;
    let request = client.pull_request(1000);
    let whole = accept(&client, "/sync/pull", &request)?;
    let count = changes_of(&whole).len();

    let table = "tributary_data.\"public.tasks\"";
    let victim = state.number(
        "select e.row_id from tributary.scope_entry e join tributary.scope s using (scope_no)
         where s.scope_id = 'tasks_user:u_1' order by e.commit_lsn desc, e.ordinal desc offset 3 limit 1",
    )?;
    state.run(&format!("create table public.kept as select * from {table} where tributary_row_id = {victim}"))?;
    let restore =
        format!("delete from {table} where tributary_row_id = {victim}; insert into {table} select * from public.kept");
    for (what, tamper) in [
        ("a missing projection", format!("delete from {table} where tributary_row_id = {victim}")),
        (
            "another row",
            format!(
                "update {table} set tributary_wire = replace(tributary_wire, 'captured', 'invented') where tributary_row_id = {victim}"
            ),
        ),
        (
            "another digest",
            format!(
                "update {table} set tributary_digest = decode(repeat('00', 32), 'hex') where tributary_row_id = {victim}"
            ),
        ),
        ("no row", format!("update {table} set tributary_wire = null where tributary_row_id = {victim}")),
        ("no digest", format!("update {table} set tributary_digest = null where tributary_row_id = {victim}")),
        (
            "another version",
            format!(
                "update {table} set tributary_version_ordinal = tributary_version_ordinal + 1 where tributary_row_id = {victim}"
            ),
        ),
    ] {
        // Nothing acknowledged yet, so that what the request presents would move a checkpoint.
        state.run("update tributary.client_scope set acknowledged_lsn = null, acknowledged_ordinal = null")?;
        state.run(&tamper)?;
        let got = send(&client, "/sync/pull", raw(&request).as_bytes());
        ensure!(got == (500, "sync_integrity_failure".to_owned()), "{what}: {got:?}");
        ensure!(checkpoints(&state, "audited")?.is_empty(), "{what}: acknowledged");
        state.run(&restore)?;
        let again = accept(&client, "/sync/pull", &request)?;
        ensure!(changes_of(&again).len() == count, "{what}: an event was lost behind it");
    }

    // The row changes in the source after the event: what is delivered is what was captured.
    let paused = Paused::materializer(&mut sandbox);
    source.run("update tasks set title = 'later' where assignee_id = 'u_1'; delete from tasks where id % 7 = 0")?;
    let body = accept(&client, "/sync/pull", &request)?;
    ensure!(body.get("changes") == whole.get("changes"), "a live row was read");
    drop(paused);
    materialized(&sandbox)?;
    while client.pull_page(5)?.has_more {}
    let titles: BTreeSet<Option<&str>> =
        client.rows["tasks_user:u_1"].values().map(|held| held.row.get("title").and_then(Json::as_text)).collect();
    ensure!(titles == BTreeSet::from([Some("later")]), "the later change did not come: {titles:?}");
    Ok(())
}

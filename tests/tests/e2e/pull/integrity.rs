//! Durable state that contradicts itself: the whole request fails, nothing is acknowledged, and readiness goes down with
//! the reason for operators (ADR 003, "Error rules").

use anyhow::ensure;
use tributary_tests::http;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{checkpoints, durable, materialized, pull_with, raw, restart_with, send, with};

const TASKS: &str = "tributary_data.\"public.tasks\"";

/// The newest entry of the tasks' scope.
const ENTRY: &str = "(select e.row_id from tributary.scope_entry e join tributary.scope s using (scope_no)
    where s.scope_id = 'tasks_user:u_1' and e.present order by e.commit_lsn desc, e.ordinal desc limit 1)";
const MARKER: &str = "(select e.row_id from tributary.scope_entry e join tributary.scope s using (scope_no)
    join tributary.departed_row d using (row_id)
    where s.scope_id = 'tasks_user:u_1' and not e.present order by e.commit_lsn desc, e.ordinal desc limit 1)";
const OF_SCOPE: &str = "scope_no = (select scope_no from tributary.scope where scope_id = 'tasks_user:u_1')";

#[test]
fn tampered_state_fails_the_whole_request() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "tampered")?;
    client.sync(500)?;
    let old = client.scopes.clone();
    source.run("update tasks set priority = 99 where assignee_id = 'u_1'; delete from tasks where assignee_id = 'u_1' and id % 60 = 0")?;
    materialized(&sandbox)?;
    state.run(
        "create schema kept;
         create table kept.tasks as select * from tributary_data.\"public.tasks\";
         create table kept.scope_entry as select * from tributary.scope_entry;
         create table kept.departed_row as select * from tributary.departed_row;
         create table kept.configuration as select * from tributary.progress",
    )?;
    let restore = format!(
        "delete from {TASKS}; insert into {TASKS} select * from kept.tasks;
         delete from tributary.scope_entry; insert into tributary.scope_entry select * from kept.scope_entry;
         delete from tributary.departed_row; insert into tributary.departed_row select * from kept.departed_row;
         update tributary.progress set configuration_no = (select configuration_no from kept.configuration)"
    );
    let request = raw(&pull_with(&client, &old, 1000));
    let pages = [raw(&pull_with(&client, &old, 3)), request.clone()];
    let cases = [
        (
            "the wire text changed",
            format!(
                "update {TASKS} set tributary_wire = replace(tributary_wire, '99', '98') where tributary_row_id = {ENTRY}"
            ),
        ),
        (
            "the wire text is no JSON",
            format!("update {TASKS} set tributary_wire = 'x' where tributary_row_id = {ENTRY}"),
        ),
        ("the projection is deleted", format!("delete from {TASKS} where tributary_row_id = {ENTRY}")),
        ("the row is null", format!("update {TASKS} set tributary_wire = null where tributary_row_id = {ENTRY}")),
        (
            "the digest changed",
            format!("update {TASKS} set tributary_digest = sha256('x') where tributary_row_id = {ENTRY}"),
        ),
        ("the digest is short", format!("update {TASKS} set tributary_digest = 'x' where tributary_row_id = {ENTRY}")),
        (
            "the version changed",
            format!(
                "update {TASKS} set tributary_version_lsn = tributary_version_lsn - 1 where tributary_row_id = {ENTRY}"
            ),
        ),
        (
            "the key changed",
            format!("update {TASKS} set tributary_key = tributary_key || '\\x00' where tributary_row_id = {ENTRY}"),
        ),
        ("a departed key is deleted", format!("delete from tributary.departed_row where row_id = {MARKER}")),
        ("a departed key is no key", format!("update tributary.departed_row set key = 'x' where row_id = {MARKER}")),
        (
            "a delete came back to life",
            format!("update tributary.scope_entry set present = true where row_id = {MARKER} and {OF_SCOPE}"),
        ),
        (
            "an entry is of no table",
            format!("update tributary.scope_entry set table_no = 77 where row_id = {ENTRY} and {OF_SCOPE}"),
        ),
        (
            "an entry is of another table",
            format!(
                "update tributary.scope_entry set table_no = table_no % 3 + 1 where row_id = {ENTRY} and {OF_SCOPE}"
            ),
        ),
        (
            "an entry is of no row",
            format!("update tributary.scope_entry set row_id = 1000000 where row_id = {ENTRY} and {OF_SCOPE}"),
        ),
        (
            "an entry lies past the boundary",
            format!(
                "update tributary.scope_entry set commit_lsn = 9000000000000000000 where row_id = {ENTRY} and {OF_SCOPE}"
            ),
        ),
        (
            "an entry's position is impossible",
            format!("update tributary.scope_entry set ordinal = -1 where row_id = {ENTRY} and {OF_SCOPE}"),
        ),
        (
            "two entries have one position",
            format!(
                "update tributary.scope_entry e set (commit_lsn, ordinal) = (select commit_lsn, ordinal from tributary.scope_entry o where o.scope_no = e.scope_no and o.row_id <> e.row_id order by commit_lsn desc limit 1) where row_id = {ENTRY} and {OF_SCOPE}"
            ),
        ),
    ];
    for (what, tamper) in &cases {
        let start = (durable(&state)?, checkpoints(&state, "tampered")?);
        state.run(tamper)?;
        // By pages of any size: one that does not meet the damage is right, the one that meets it fails whole.
        let got = send(&client, "/sync/pull", request.as_bytes());
        ensure!(got == (500, "sync_integrity_failure".to_owned()), "{what}: {got:?}");
        ensure!((durable(&state)?, checkpoints(&state, "tampered")?) == start, "{what}: the state changed");
        let ready = http::get(&format!("{}/readyz", sandbox.pullers[0].admin_url))?;
        let reason = String::from_utf8(ready.body)?;
        ensure!(ready.status == 503 && reason.contains("integrity"), "{what}: readiness {} {reason}", ready.status);
        for secret in ["u_1", "tampered", "tasks_user"] {
            ensure!(!reason.contains(secret), "{what}: the reason names a user, client or scope: {reason}");
        }
        state.run(&restore)?;
        restart_with(&mut sandbox.pullers[0], &[])?;
        for page in &pages {
            ensure!(send(&client, "/sync/pull", page.as_bytes()).0 == 200, "{what}: mended, and still not served");
        }
    }

    // A rebuild stages none of it.
    state.run("delete from tributary.rebuild_session; delete from tributary.snapshot")?;
    for (what, tamper) in cases
        .iter()
        .filter(|(what, _)| what.contains("wire text") || what.contains("digest") || what.contains("projection"))
    {
        let first = client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10));
        let start = durable(&state)?;
        state.run(tamper)?;
        let (status, code) = send(&client, "/sync/rebuild", raw(&first).as_bytes());
        // The ADR's table has both: what cannot be staged for now, and what is broken.
        ensure!(
            [(500, "sync_integrity_failure"), (503, "temporary_unavailable")].contains(&(status, code.as_str())),
            "{what}: {status} {code}"
        );
        ensure!(durable(&state)? == start, "{what}: a session was left");
        state.run(&restore)?;
    }
    // And a terminal page whose digest cannot be computed has no checksum at all.
    state.run("delete from tributary.scope_digest")?;
    restart_with(&mut sandbox.pullers[0], &[])?;
    state.run(&format!("delete from {TASKS} where tributary_row_id = {ENTRY}"))?;
    let none = with(&client.pull_request(10), &["scopes", "tasks_user:u_1", "cursor"], Json::Null);
    ensure!(send(&client, "/sync/pull", raw(&none).as_bytes()) == (500, "sync_integrity_failure".to_owned()));
    let log = std::fs::read_to_string(&sandbox.pullers[0].process.launch().log)?;
    ensure!(log.contains("integrity failure"), "operators are told");
    ensure!(!log.contains("u_1") && !log.contains("tampered"), "the log names a user, client or scope");
    Ok(())
}

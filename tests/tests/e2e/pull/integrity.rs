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
/// The oldest entry of the tasks' scope.
const OLD: &str = "(select e.row_id from tributary.scope_entry e join tributary.scope s using (scope_no)
    where s.scope_id = 'tasks_user:u_1' and e.present order by e.commit_lsn, e.ordinal, e.row_id limit 1)";
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
    // Its housekeeping would change what is compared below.
    sandbox.materializers[0].process.kill();
    state.run(
        "create schema kept;
         create table kept.tasks as select * from tributary_data.\"public.tasks\";
         create table kept.scope_entry as select * from tributary.scope_entry;
         create table kept.departed_row as select * from tributary.departed_row;
         create table kept.scope_digest as select * from tributary.scope_digest;
         create table kept.configuration as select * from tributary.progress",
    )?;
    let restore = format!(
        "delete from {TASKS}; insert into {TASKS} select * from kept.tasks;
         delete from tributary.scope_entry; insert into tributary.scope_entry select * from kept.scope_entry;
         delete from tributary.departed_row; insert into tributary.departed_row select * from kept.departed_row;
         delete from tributary.scope_digest; insert into tributary.scope_digest select * from kept.scope_digest;
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
        (
            "the seal is gone",
            format!("update {TASKS} set tributary_seal = null where tributary_row_id = {ENTRY}"),
        ),
        (
            "the row is that of another entry",
            format!(
                "update {TASKS} p set (tributary_wire, tributary_digest, tributary_version_lsn, tributary_version_ordinal)
                 = (select tributary_wire, tributary_digest, tributary_version_lsn, tributary_version_ordinal
                    from {TASKS} o where o.tributary_row_id <> p.tributary_row_id order by o.tributary_row_id limit 1)
                 where tributary_row_id = {ENTRY}"
            ),
        ),
        (
            "a departed key is that of another row",
            format!(
                "update tributary.departed_row set key = (select tributary_key from {TASKS} limit 1) where row_id = {MARKER}"
            ),
        ),
        ("a departed key is deleted", format!("delete from tributary.departed_row where row_id = {MARKER}")),
        ("a departed key is no key", format!("update tributary.departed_row set key = 'x' where row_id = {MARKER}")),
        (
            "a delete came back to life",
            format!("update tributary.scope_entry set present = true where row_id = {MARKER} and {OF_SCOPE}"),
        ),
        (
            "an entry turned into a delete",
            format!("update tributary.scope_entry set present = false where row_id = {ENTRY} and {OF_SCOPE}"),
        ),
        (
            "an entry points to another row of its table",
            format!(
                "update tributary.scope_entry set row_id = (
                     select tributary_row_id from {TASKS} p where not exists (
                         select from tributary.scope_entry o where o.row_id = p.tributary_row_id and o.{OF_SCOPE}
                     ) limit 1
                 ) where row_id = {ENTRY} and {OF_SCOPE}"
            ),
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
        state.run(tamper)?;
        let start = (durable(&state)?, checkpoints(&state, "tampered")?);
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
    // Nor is anything served that was staged and is another now.
    let first = raw(&client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10)));
    ensure!(send(&client, "/sync/rebuild", first.as_bytes()).0 == 200);
    for (what, tamper, mend) in [
        (
            "a staged record changed",
            "update tributary.snapshot_block set records = set_byte(records, 7, get_byte(records, 7) # 1)",
            "update tributary.snapshot_block set records = set_byte(records, 7, get_byte(records, 7) # 1)",
        ),
        (
            "a staged record ends elsewhere",
            "update tributary.snapshot_block set record_ends[1] = record_ends[1] - 1",
            "update tributary.snapshot_block set record_ends[1] = record_ends[1] + 1",
        ),
        (
            "a snapshot counts fewer rows",
            "update tributary.snapshot set row_count = row_count - 1",
            "update tributary.snapshot set row_count = row_count + 1",
        ),
        (
            "a snapshot is of another content",
            "update tributary.snapshot set content_ordinal = content_ordinal + 1",
            "update tributary.snapshot set content_ordinal = content_ordinal - 1",
        ),
    ] {
        state.run(tamper)?;
        let got = send(&client, "/sync/rebuild", first.as_bytes());
        ensure!(got == (500, "sync_integrity_failure".to_owned()), "{what}: {got:?}");
        state.run(mend)?;
        ensure!(send(&client, "/sync/rebuild", first.as_bytes()).0 == 200, "{what}: mended, and still not served");
    }
    // A cached digest is not believed either.
    client.pull_all(500)?;
    let idle = raw(&client.pull_request(10));
    ensure!(state.number(&format!("select count(*) from tributary.scope_digest where {OF_SCOPE}"))? == 1);
    for (what, tamper, mend) in [
        (
            "a cached digest changed",
            "digest = set_byte(digest, 0, get_byte(digest, 0) # 1)",
            "digest = set_byte(digest, 0, get_byte(digest, 0) # 1)",
        ),
        (
            "a cached digest is of another schema",
            "schema_version = schema_version + 1",
            "schema_version = schema_version - 1",
        ),
        ("a cached digest is of another content", "ordinal = ordinal - 1", "ordinal = ordinal + 1"),
    ] {
        state.run(&format!("update tributary.scope_digest set {tamper} where {OF_SCOPE}"))?;
        let got = send(&client, "/sync/pull", idle.as_bytes());
        ensure!(got == (500, "sync_integrity_failure".to_owned()), "{what}: {got:?}");
        state.run(&format!("update tributary.scope_digest set {mend} where {OF_SCOPE}"))?;
        ensure!(send(&client, "/sync/pull", idle.as_bytes()).0 == 200, "{what}: mended, and still not served");
    }
    // Nor is what lies before every cursor, when a digest has to be computed from it.
    for (what, tamper) in [
        (
            "an old entry turned into a delete",
            format!("update tributary.scope_entry set present = false where row_id = {OLD} and {OF_SCOPE}"),
        ),
        (
            "an old row has another digest",
            format!("update {TASKS} set tributary_digest = sha256('x') where tributary_row_id = {OLD}"),
        ),
    ] {
        state.run(&restore)?;
        state.run("delete from tributary.scope_digest")?;
        restart_with(&mut sandbox.pullers[0], &[])?;
        state.run(&tamper)?;
        let got = send(&client, "/sync/pull", idle.as_bytes());
        ensure!(got == (500, "sync_integrity_failure".to_owned()), "{what}: {got:?}");
    }
    state.run(&restore)?;
    // An entry that was moved into another scope is nobody's there.
    let mut other = sandbox.client("u_2", "other")?;
    other.connect()?;
    state.run(&format!(
        "delete from tributary.scope_digest;
         update tributary.scope_entry set scope_no = (select scope_no from tributary.scope where scope_id = 'tasks_user:u_2')
         where row_id = {OLD} and {OF_SCOPE}"
    ))?;
    restart_with(&mut sandbox.pullers[0], &[])?;
    let got = send(&other, "/sync/pull", raw(&other.pull_request(10)).as_bytes());
    ensure!(got == (500, "sync_integrity_failure".to_owned()), "an entry moved into another scope: {got:?}");
    state.run(&restore)?;
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

/// What statements that write in sets seal, and what the materializer seals row by row, is sealed alike.
#[test]
fn every_entry_and_departed_row_is_sealed_by_one_rule() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "sealed")?;
    client.sync(500)?;
    source.run("update tasks set priority = 98 where id % 7 = 0; delete from tasks where id % 11 = 0")?;
    source.run("truncate comments")?;
    source.run("delete from members where user_id = 'u_1'")?;
    materialized(&sandbox)?;
    for (table, sealed) in [
        ("scope_entry", "entry_seal(row_id, commit_lsn, ordinal, scope_no, table_no, present)"),
        ("departed_row", "departed_seal(row_id, table_no, key)"),
    ] {
        let all = state.number(&format!("select count(*) from tributary.{table}"))?;
        let right = state.number(&format!("select count(*) from tributary.{table} where seal = tributary.{sealed}"))?;
        ensure!(all > 100 && right == all, "{right} of {all} rows of {table} are sealed by the rule");
    }
    // And the puller knows them all.
    client.pull_all(500)?;
    Ok(())
}

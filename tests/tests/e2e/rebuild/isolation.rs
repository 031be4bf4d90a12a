//! ADR 003, "Rebuild checkpoint and scope isolation" (audit finding S-05).

use anyhow::{Context as _, ensure};
use tributary_tests::client::Client;
use tributary_tests::database::Database;

use super::{Boxes, dump, items, record, replay};

fn checkpoints(state: &Database, client: &Client) -> anyhow::Result<Vec<Vec<Option<String>>>> {
    state.texts(&format!(
        "select s.scope_id, cs.acknowledged_lsn, cs.acknowledged_ordinal from tributary.client_scope cs
         join tributary.client c using (client_no) join tributary.scope s using (scope_no)
         where c.client_id = '{}' order by 1",
        client.client_id
    ))
}

#[test]
fn s_05_a_rebuild_writes_only_its_session_and_its_snapshot() -> anyhow::Result<()> {
    let seed = format!("{} update items set shared = id % 2 = 0;", items("u_1", 1, 25));
    let boxes = Boxes::start(&seed)?;
    let source = boxes.sandbox.source()?;
    let state = boxes.sandbox.state()?;
    let mut bystander = boxes.client("u_1", "bystander")?;
    bystander.sync(100)?;
    let mut client = boxes.client("u_1", "isolated")?;
    client.sync(100)?;
    // Unread history of both scopes, and a session of the other scope under way.
    source.run("update items set body = 'unread', shared = not shared where id <= 10")?;
    boxes.materialized(&source)?;
    let mut other = client.start_rebuild("everyone", 3);
    client.rebuild_page(&mut other)?;
    let sessions = "select to_jsonb(r)::text from tributary.rebuild_session r where page_limit <> 7 order by 1";
    let (before, sessions_before) = (dump(&state)?, state.texts(sessions)?);
    let everyone = client.scopes["everyone"].clone();
    let acknowledged = checkpoints(&state, &client)?;
    ensure!(acknowledged.iter().all(|row| row[1].is_some()), "both scopes have a checkpoint");

    let exchanges = record(&mut client, "box:u_1", 7)?;
    replay(&client, &exchanges)?;
    ensure!(dump(&state)? == before, "a rebuild moved something else");
    ensure!(state.texts(sessions)? == sessions_before, "a rebuild moved another session");

    // The other rebuild goes on as if nothing had happened.
    while !other.finished {
        client.rebuild_page(&mut other)?;
    }
    ensure!(dump(&state)? == before, "a final page is no acknowledgement");

    // Only the pull that presents the final cursor acknowledges it, for the scope it names.
    client.scopes.insert("everyone".to_owned(), everyone);
    let mut lagging = client.scopes.clone();
    lagging.remove("everyone");
    let request = client.pull_request(1000).canonical()?;
    let page = client.http.post("/sync/pull", request.as_bytes())?;
    ensure!(page.status == 200);
    let moved = checkpoints(&state, &client)?;
    ensure!(moved[0] != acknowledged[0], "the presented final cursor is not acknowledged");
    ensure!(moved[1] == acknowledged[1], "an unrelated checkpoint moved");
    // The history that was unread in the other scope is delivered all the same.
    let body = tributary_tests::client::answer("/sync/pull", &page)?;
    let changes = body.get("changes").and_then(|changes| changes.as_list()).context("changes")?;
    let of = |scope: &str| {
        changes.iter().filter(|change| change.get("scope").and_then(|s| s.as_text()) == Some(scope)).count()
    };
    ensure!(of("everyone") == 10, "{} changes of the other scope", of("everyone"));
    ensure!(of("box:u_1") == 0, "what the rebuild held came again");
    boxes.settle(&mut bystander, &source, "u_1", 3)?;
    Ok(())
}

#[test]
fn s_05_a_first_rebuild_leaves_no_checkpoint() -> anyhow::Result<()> {
    let boxes = Boxes::start(&items("u_1", 1, 25))?;
    let state = boxes.sandbox.state()?;
    let mut client = boxes.client("u_1", "fresh")?;
    client.rebuild("box:u_1", 10)?;
    client.rebuild("everyone", 10)?;
    ensure!(checkpoints(&state, &client)?.iter().all(|row| row[1].is_none()), "a rebuild acknowledged something");
    client.pull_all(10)?;
    ensure!(checkpoints(&state, &client)?.iter().all(|row| row[1].is_some()));
    Ok(())
}

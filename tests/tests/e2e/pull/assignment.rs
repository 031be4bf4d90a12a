//! Assignment: one rule for connect and pull, a version that moves by exactly one per changed set, and answers from which a
//! client recovers whatever was lost (ADR 003, "Normal scope movement").

use std::collections::BTreeSet;
use std::thread;

use anyhow::{Context as _, ensure};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::expected;
use tributary_tests::http::HttpError;
use tributary_tests::json::Json;
use tributary_tests::sample;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{accept, changes_of, checkpoints, cursors_of, durable, materialized, raw, send, texts, with, without};
use crate::pull::model::seed;

const PREFIXES: [&str; 6] =
    ["profile:", "projects_user:", "memberships_user:", "tasks_user:", "comments_user:", "documents_user:"];

/// Puts a configuration in force that assigns these scopes of the user, as an operator's new `sync.yaml` would.
fn assign(state: &Database, prefixes: &[&str], templates: bool) -> anyhow::Result<()> {
    let mut list: Vec<String> = prefixes.iter().map(|prefix| format!("{{\"literals\":[\"{prefix}\",\"\"]}}")).collect();
    if templates {
        list.push("{\"literals\":[\"templates_public\"]}".to_owned());
    }
    state.run(&format!(
        "with c as (
             insert into tributary.configuration (schema_version, registry)
             select schema_version, jsonb_set(registry::jsonb, '{{assignments}}', '{{\"templates\": [{}], \"queries\": []}}')::text
             from tributary.configuration order by configuration_no limit 1
             returning configuration_no
         )
         update tributary.progress set configuration_no = (select configuration_no from c)",
        list.join(",")
    ))
}

fn scope_ids(prefixes: &[&str], templates: bool) -> BTreeSet<String> {
    let mut scopes: BTreeSet<String> = prefixes.iter().map(|prefix| format!("{prefix}u_1")).collect();
    scopes.extend(templates.then(|| "templates_public".to_owned()));
    scopes
}

fn version(state: &Database, client: &str) -> anyhow::Result<i64> {
    state.number(&format!("select scope_set_version from tributary.client where client_id = '{client}'"))
}

fn ids(body: &Json, list: &str) -> Vec<String> {
    let list = body.get("scope_updates").and_then(|updates| updates.get(list)?.as_list()).unwrap();
    let id = |item: &Json| item.as_text().or_else(|| item.get("id")?.as_text()).unwrap().to_owned();
    list.iter().map(id).collect()
}

fn int(body: &Json, name: &str) -> i64 {
    body.get(name).and_then(Json::as_int).unwrap()
}

#[test]
fn scopes_move_as_the_adr_says() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    assign(&state, &PREFIXES, true)?;
    let mut client = sandbox.client("u_1", "moving")?;
    client.sync(500)?;
    ensure!(version(&state, "moving")? == 1, "the first set is version 1, whatever its size");
    for _ in 0..3 {
        client.pull_page(10)?;
        client.connect()?;
    }
    ensure!(version(&state, "moving")? == 1, "an unchanged set moved the version");

    // Several leave at once: one version, all in remove, nothing more of them.
    source.run("update tasks set priority = priority + 1; update comments set body = body || '?'; update documents set title = 'T'")?;
    materialized(&sandbox)?;
    assign(&state, &PREFIXES[..3], true)?;
    let held = client.pull_request(1000);
    let body = accept(&client, "/sync/pull", &held)?;
    let gone = ["comments_user:u_1", "documents_user:u_1", "tasks_user:u_1"];
    ensure!(ids(&body, "remove") == gone && ids(&body, "add").is_empty());
    ensure!(int(&body, "scope_set_version") == 2 && version(&state, "moving")? == 2);
    ensure!(changes_of(&body).iter().all(|change| !gone.contains(&change[0].as_str())), "a change of a removed scope");
    ensure!(cursors_of(&body).keys().all(|scope| !gone.contains(&scope.as_str())), "a cursor of a removed scope");
    let checksums = body.get("checksums").and_then(Json::as_object).unwrap();
    ensure!(checksums.keys().all(|scope| !gone.contains(&scope.as_str())), "a checksum of a removed scope");
    // Its answer was lost: the same request is accepted, and says the same.
    for _ in 0..2 {
        let again = accept(&client, "/sync/pull", &held)?;
        ensure!(ids(&again, "remove") == gone && int(&again, "scope_set_version") == 2);
    }
    ensure!(version(&state, "moving")? == 2, "a repeated request moved the version");
    // A removed scope is accepted, one never assigned is not, and neither can be rebuilt.
    let never = with(&held, &["scopes", "tasks_user:u_2"], Json::object([("cursor", Json::Null)]));
    ensure!(send(&client, "/sync/pull", raw(&never).as_bytes()).0 == 400);
    let removed = client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10));
    ensure!(send(&client, "/sync/rebuild", raw(&removed).as_bytes()) == (400, "invalid_request".to_owned()));
    client.pull_all(1000)?;
    ensure!(client.scopes.len() == 4);

    // One returns: it is new to the client, null until it is rebuilt, whatever it once was.
    assign(&state, &PREFIXES[..4], true)?;
    let body = accept(&client, "/sync/pull", &client.pull_request(1000))?;
    ensure!(ids(&body, "add") == ["tasks_user:u_1"] && texts(&body, "rebuild") == ["tasks_user:u_1"]);
    ensure!(int(&body, "scope_set_version") == 3 && !cursors_of(&body).contains_key("tasks_user:u_1"));
    client.sync(500)?;

    // In and out in one change is one version; connect says it as pull does.
    assign(&state, &["tasks_user:", "documents_user:"], false)?;
    client.connect()?;
    ensure!(client.scope_set_version == 4 && version(&state, "moving")? == 4);
    ensure!(
        client.scopes.keys().cloned().collect::<BTreeSet<_>>() == scope_ids(&["tasks_user:", "documents_user:"], false)
    );
    client.sync(500)?;

    // None at all.
    assign(&state, &[], false)?;
    client.pull_all(10)?;
    ensure!(client.scopes.is_empty() && version(&state, "moving")? == 5);
    client.pull_all(10)?;
    assign(&state, &PREFIXES, true)?;
    client.sync(500)?;
    ensure!(version(&state, "moving")? == 6 && client.scopes.len() == 7);

    // A request that leaves an assigned scope out shows that the client does not know it.
    let body = accept(&client, "/sync/pull", &without(&client.pull_request(10), &["scopes", "tasks_user:u_1"]))?;
    ensure!(ids(&body, "add") == ["tasks_user:u_1"] && texts(&body, "rebuild") == ["tasks_user:u_1"]);
    ensure!(version(&state, "moving")? == 6, "what a client does not know is no change of the set");
    Ok(())
}

#[test]
fn a_failed_pull_and_a_rebuild_write_no_assignment() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let state = sandbox.state()?;
    let mut client = sandbox.client("u_1", "unmoved")?;
    client.sync(500)?;
    let mut rebuild = client.start_rebuild("tasks_user:u_1", 10);
    client.rebuild_page(&mut rebuild)?;
    let request = client.pull_request(10);
    assign(&state, &PREFIXES[..3], true)?;
    let before = durable(&state)?;
    let forged = with(&request, &["scopes", "tasks_user:u_1", "cursor"], Json::text("v1.forged"));
    ensure!(send(&client, "/sync/pull", raw(&forged).as_bytes()).0 == 400);
    // The continuation of a scope that is assigned no more cannot go on, and the set is not reconciled by it.
    let continued = raw(&client.rebuild_request(&rebuild));
    ensure!(send(&client, "/sync/rebuild", continued.as_bytes()) == (409, "rebuild_restart_required".to_owned()));
    let first = raw(&client.rebuild_request(&client.start_rebuild("tasks_user:u_1", 10)));
    ensure!(send(&client, "/sync/rebuild", first.as_bytes()) == (400, "invalid_request".to_owned()));
    ensure!(durable(&state)? == before, "the state changed");
    // A page that fails after the assignment was reconciled takes it back.
    state.run("update tributary.scope_entry set commit_lsn = 9000000000000000000, ordinal = 0
        where row_id = (select min(row_id) from tributary.scope_entry join tributary.scope using (scope_no) where scope_id = 'profile:u_1')")?;
    let before = durable(&state)?;
    ensure!(send(&client, "/sync/pull", raw(&request).as_bytes()) == (500, "sync_integrity_failure".to_owned()));
    ensure!(durable(&state)? == before, "a failed page left an assignment");
    Ok(())
}

/// Requests of one client that all find the set changed: each is answered, one changes it.
#[test]
fn a_set_that_many_find_changed_moves_once() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let state = sandbox.state()?;
    let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    let token = sandbox.token("u_1")?;
    let mut client = sandbox.client("u_1", "raced")?;
    client.sync(500)?;
    for round in 0..8 {
        let (prefixes, templates) = if round % 2 == 0 { (&PREFIXES[..2], false) } else { (&PREFIXES[..], true) };
        assign(&state, prefixes, templates)?;
        let (pull, connect) = (raw(&client.pull_request(10)), raw(&client.connect_request()));
        let asking: Vec<_> = (0..16)
            .map(|number| {
                let one = Client::new(&urls[number % 2], &token, "raced");
                let (path, body) =
                    if number % 3 == 0 { ("/sync/connect", connect.clone()) } else { ("/sync/pull", pull.clone()) };
                thread::spawn(move || (path, send(&one, path, body.as_bytes())))
            })
            .collect();
        for asked in asking {
            let (path, got) = asked.join().map_err(|_| anyhow::anyhow!("a request panicked"))?;
            ensure!(got == (200, "ok".to_owned()), "round {round}, {path}: {got:?}");
        }
        ensure!(version(&state, "raced")? == 2 + round, "round {round}: the version moved otherwise than by one");
        client.pull_page(10)?;
        ensure!(client.scopes.keys().cloned().collect::<BTreeSet<_>>() == scope_ids(prefixes, templates));
        ensure!(client.scope_set_version == 2 + round);
        client.sync(500)?;
    }
    Ok(())
}

/// The answer is lost after commit at every step, and the client goes on with what it has.
#[test]
fn lost_answers_lose_no_assignment() -> anyhow::Result<()> {
    let seed = seed();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let urls: Vec<String> = sandbox.pullers.iter().filter_map(|puller| puller.url.clone()).collect();
    assign(&state, &PREFIXES, true)?;
    let mut client = sandbox.client("u_1", "lossy")?;
    client.connect()?;
    let mut changes = version(&state, "lossy")?;
    let mut in_force = scope_ids(&PREFIXES, true);
    for round in 0..60 {
        let prefixes: Vec<&str> = PREFIXES.into_iter().filter(|_| random.random_bool(0.6)).collect();
        let templates = random.random_bool(0.6);
        assign(&state, &prefixes, templates)?;
        let now = scope_ids(&prefixes, templates);
        let moved = now != in_force;
        if random.random_bool(0.5) {
            source.run("update tasks set priority = priority + 1 where assignee_id = 'u_1' and id % 5 = 0")?;
        }
        client.http.redirect(&urls[round % 2]);
        // One to three answers are lost, of either endpoint; the version moves with the first of them.
        for _ in 0..random.random_range(0..3) {
            client.http.lose_next_answer();
            let lost = if random.random_bool(0.5) {
                client.connect().err()
            } else {
                client.pull_page(random.random_range(1..20)).err()
            };
            ensure!(matches!(lost, Some(ClientError::Transport(HttpError::Lost))), "{lost:?}");
            if random.random_bool(0.3) {
                break;
            }
        }
        let recovered = settle_assignment(&mut client, &mut random)?;
        ensure!(recovered == now, "round {round}: {recovered:?} instead of {now:?}");
        changes += i64::from(moved);
        in_force = now;
        ensure!(client.scope_set_version == version(&state, "lossy")?, "round {round}: version");
        ensure!(version(&state, "lossy")? == changes, "round {round}: not exactly one per changed set");
        let known = checkpoints(&state, "lossy")?;
        ensure!(known.len() <= 7);
    }
    state.run(
        "update tributary.progress set configuration_no = (select min(configuration_no) from tributary.configuration)",
    )?;
    crate::sample::settle(&mut client, &source, "u_1", 100)?;
    Ok(())
}

/// A client's whole life with changes of its assignment, known to it by pull and by connect: every answer of it is lost once,
/// after its commit, and the client repeats what it asked. In the end it has what it has without a loss.
#[test]
fn the_answer_of_any_step_may_be_lost() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    // Of the very first answer the client has nothing by which it could be told from another: it begins under another id.
    assign(&state, &PREFIXES, true)?;
    let mut newborn = sandbox.client("u_1", "step-1")?;
    newborn.http.lose_next_answer();
    ensure!(matches!(newborn.connect(), Err(ClientError::Transport(HttpError::Lost))));
    let refused = newborn.connect().err();
    ensure!(refused.as_ref().and_then(ClientError::code) == Some("invalid_schema_reference"), "{refused:?}");
    let mut lost = 1;
    for step in 2.. {
        let client_id = format!("step-{step}");
        let mut client = sandbox.client("u_1", &client_id)?;
        client.http.lose_answer(step);
        // Set by set: what connect tells, and what pull tells; more, fewer, others, none, all.
        let sets: [(&[&str], bool, bool); 7] = [
            (&PREFIXES[..3], true, true),
            (&PREFIXES[..5], true, false),
            (&PREFIXES[3..5], false, false),
            (&PREFIXES[..2], true, true),
            (&[], false, false),
            (&PREFIXES[1..4], false, true),
            (&PREFIXES, true, false),
        ];
        let mut version = 0;
        for (prefixes, templates, by_connect) in sets {
            assign(&state, prefixes, templates)?;
            version += 1;
            if by_connect {
                until_answered(|| client.connect())?;
            } else {
                until_answered(|| client.pull_page(3))?;
            }
            ensure!(client.scopes.keys().cloned().collect::<BTreeSet<_>>() == scope_ids(prefixes, templates), "{step}");
            ensure!(client.scope_set_version == version, "step {step}: version {}", client.scope_set_version);
            for scope in client.scopes_to_rebuild() {
                let mut rebuild = client.start_rebuild(&scope, 40);
                while !rebuild.finished {
                    until_answered(|| client.rebuild_page(&mut rebuild))?;
                }
            }
            while until_answered(|| client.pull_page(3))?.has_more {}
            ensure!(client.scopes_to_rebuild().is_empty(), "step {step}");
        }
        let left = client.http.will_lose();
        lost += usize::from(!left);
        let mut compared = 0;
        for held in sample::scopes(&source, "u_1")?.iter().filter(|held| client.scopes.contains_key(&held.scope)) {
            expected::compare(&client, &source, &held.scope, held.table, &held.from)
                .with_context(|| format!("step {step}"))?;
            compared += 1;
        }
        ensure!(compared == 7, "step {step}: {compared} scopes");
        if left {
            break;
        }
    }
    println!("{lost} steps");
    ensure!(lost > 30, "only {lost} steps");
    Ok(())
}

/// Repeats what a client asks while its answers are lost.
fn until_answered<T>(mut ask: impl FnMut() -> Result<T, ClientError>) -> anyhow::Result<T> {
    loop {
        match ask() {
            Err(ClientError::Transport(HttpError::Lost)) => {}
            answered => return Ok(answered?),
        }
    }
}

/// One answered request, of either endpoint, and sometimes everything after it.
fn settle_assignment(client: &mut Client, random: &mut StdRng) -> anyhow::Result<BTreeSet<String>> {
    if random.random_bool(0.3) {
        client.connect()?;
    } else {
        client.pull_page(random.random_range(1..50))?;
    }
    if random.random_bool(0.4) {
        client.sync(100)?;
    }
    Ok(client.scopes.keys().cloned().collect())
}

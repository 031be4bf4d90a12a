//! Incremental cursors: what is forged or misbound is refused in one and the same way, what is authentic but stale is
//! rebuilt (ADR 003, "Incremental cursor bindings", "Stale versus forged cursor dispatch").

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE, URL_SAFE_NO_PAD};
use tributary_tests::client::{Client, answer};
use tributary_tests::database::Database;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::{accept, checkpoints, cursors_of, durable, materialized, pull_with, raw, restart_with, texts, with};

const TASKS: &str = "tasks_user:u_1";
const COMMENTS: &str = "comments_user:u_1";

/// A pull that presents this token for the tasks' scope.
fn presenting(client: &Client, token: &str) -> Json {
    with(&client.pull_request(10), &["scopes", TASKS, "cursor"], Json::text(token))
}

fn forgeries(token: &str, other_key: &str) -> anyhow::Result<Vec<(String, String)>> {
    let body = token.strip_prefix("v1.").context("tokens begin with v1.")?;
    let octets = URL_SAFE_NO_PAD.decode(body)?;
    let seal = |octets: &[u8]| format!("v1.{}", URL_SAFE_NO_PAD.encode(octets));
    let mut forged = Vec::new();
    for bit in 0..octets.len() * 8 {
        let mut flipped = octets.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        forged.push((format!("bit {bit} flipped"), seal(&flipped)));
    }
    for length in 0..token.len() {
        forged.push((format!("the first {length} characters"), token[..length].to_owned()));
    }
    for length in 0..octets.len() {
        forged.push((format!("the first {length} octets"), seal(&octets[..length])));
    }
    let mut twice = octets.clone();
    twice.extend_from_slice(&octets);
    let mut longer = octets.clone();
    longer.push(0);
    for (what, text) in [
        ("one octet more", seal(&longer)),
        ("itself twice", seal(&twice)),
        ("padding", format!("v1.{}", URL_SAFE.encode(&octets))),
        ("padding anyway", format!("{token}=")),
        ("a character more", format!("{token}A")),
        ("a space before", format!(" {token}")),
        ("a space behind", format!("{token} ")),
        ("a line end", format!("{token}\n")),
        ("another version", format!("v2.{body}")),
        ("no version", body.to_owned()),
        ("an upper case version", format!("V1.{body}")),
        ("two versions", format!("v1.{token}")),
        ("hexadecimal", format!("v1.{}", tributary_tests::canonical::hex(&octets))),
        ("a token of another key", other_key.to_owned()),
        ("lower case", token.to_lowercase()),
    ] {
        forged.push((what.to_owned(), text));
    }
    let standard = format!("v1.{}", STANDARD.encode(&octets));
    if standard != token {
        forged.push(("the standard alphabet".to_owned(), standard));
    }
    // Bits of the last character that no octet holds.
    if octets.len() % 3 != 0 {
        let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let last = alphabet.iter().position(|c| Some(c) == token.as_bytes().last()).context("base64url")?;
        let mut loose = token.to_owned();
        loose.pop();
        loose.push(alphabet[last | 1] as char);
        ensure!(loose != token, "a canonical token has no set trailing bits");
        forged.push(("set trailing bits".to_owned(), loose));
    }
    Ok(forged)
}

#[test]
fn a_forged_or_misbound_cursor_is_refused_in_one_way() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let mut client = sandbox.client("u_1", "bound")?;
    client.sync(500)?;
    let mut second = sandbox.client("u_1", "bound-2")?;
    second.sync(500)?;
    let mut stranger = sandbox.client("u_2", "bound-3")?;
    stranger.sync(500)?;
    let mut rebuild = client.start_rebuild(TASKS, 10);
    client.rebuild_page(&mut rebuild)?;
    let continuation = rebuild.cursor.clone().context("more pages")?;
    let token = client.scopes[TASKS].clone().context("synced")?;
    let other_key = {
        // Another installation altogether, which has other secrets.
        let other = Sandbox::start(Options::default())?;
        let mut client = other.client("u_1", "bound")?;
        client.sync(500)?;
        client.scopes[TASKS].clone().context("synced")?
    };
    let mut forged = forgeries(&token, &other_key)?;
    let held = |client: &Client, scope: &str| client.scopes[scope].clone().context("synced");
    forged.push(("another client's".into(), held(&second, TASKS)?));
    forged.push(("another user's".into(), held(&stranger, "tasks_user:u_2")?));
    forged.push(("another user's, of the shared scope".into(), held(&stranger, "templates_public")?));
    forged.push(("another scope's".into(), held(&client, COMMENTS)?));
    forged.push(("a continuation".into(), continuation));

    let state = sandbox.state()?;
    let before = durable(&state)?;
    let ask = |body: &Json| client.http.post("/sync/pull", raw(body).as_bytes()).unwrap();
    let malformed = ask(&with(&client.pull_request(10), &["limit"], Json::int(0)));
    ensure!(malformed.status == 400);
    for (what, text) in &forged {
        let response = ask(&presenting(&client, text));
        ensure!(response == malformed, "{what}: {} {}", response.status, String::from_utf8_lossy(&response.body));
    }
    // A rebuild takes no incremental cursor, not even its own final one.
    let incremental = with(&client.rebuild_request(&rebuild), &["cursor"], Json::text(&token));
    ensure!(client.http.post("/sync/rebuild", raw(&incremental).as_bytes())? == malformed, "kinds are apart");
    // One forged among valid ones: nothing of the request is processed.
    ensure!(durable(&state)? == before, "a refused request changed the state");
    ensure!(answer("/sync/pull", &ask(&presenting(&client, &token))).is_ok(), "the token itself is good");
    println!("{} forgeries", forged.len());
    Ok(())
}

/// A statement that makes cursors stale, the one that takes it back, and the scopes that it touches (all when none).
struct Cause {
    name: &'static str,
    make: String,
    undo: String,
    only: Option<&'static str>,
}

#[test]
fn a_stale_cursor_is_rebuilt_and_not_acknowledged() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let mut client = sandbox.client("u_1", "stale")?;
    client.sync(500)?;
    let old = client.scopes.clone();
    source.run("update tasks set priority = priority + 1; update comments set body = body || '!'")?;
    materialized(&sandbox)?;
    client.pull_all(500)?;
    let newest = state.number("select boundary_lsn from tributary.progress")?;
    ahead_of_the_boundary(&mut sandbox, &state, &mut client)?;
    let stream = state.text("select stream_generation from tributary.progress")?;
    let scope = |set: &str| format!("update tributary.scope set {set} where scope_id = '{TASKS}'");
    let causes = [
        Cause {
            name: "stream",
            make: "update tributary.progress set stream_generation = gen_random_uuid()".into(),
            undo: format!("update tributary.progress set stream_generation = '{stream}'"),
            only: None,
        },
        Cause {
            name: "membership",
            make: scope("membership_generation = membership_generation + 1"),
            undo: scope("membership_generation = membership_generation - 1"),
            only: Some(TASKS),
        },
        Cause {
            name: "retention",
            make: scope("retention_generation = retention_generation + 1"),
            undo: scope("retention_generation = retention_generation - 1"),
            only: Some(TASKS),
        },
        Cause {
            name: "below_floor",
            make: scope(&format!("floor_lsn = {newest}, floor_ordinal = 0")),
            undo: scope("floor_lsn = 0, floor_ordinal = 0"),
            only: Some(TASKS),
        },
    ];
    for cause in &causes {
        let acknowledged = checkpoints(&state, "stale")?;
        state.run(&cause.make)?;
        let body = accept(&client, "/sync/pull", &pull_with(&client, &old, 1000))?;
        let rebuild: BTreeSet<String> = texts(&body, "rebuild").into_iter().collect();
        let stale: BTreeSet<String> =
            old.keys().filter(|id| cause.only.is_none_or(|only| only == *id)).cloned().collect();
        ensure!(rebuild == stale, "{}: rebuild is {rebuild:?}", cause.name);
        ensure!(cursors_of(&body).keys().all(|id| !stale.contains(id)), "{}: a cursor beside rebuild", cause.name);
        ensure!(
            super::changes_of(&body).iter().all(|change| !stale.contains(&change[0])),
            "{}: a change beside rebuild",
            cause.name
        );
        if cause.only.is_some() {
            ensure!(super::changes_of(&body).iter().any(|change| change[0] == COMMENTS), "the others go on");
        }
        // The digest of a scope in rebuild is there, but heals nothing.
        let checksums = body.get("checksums").and_then(Json::as_object).context("a terminal page")?;
        ensure!(checksums.keys().eq(old.keys()), "{}: checksums cover the assigned scopes", cause.name);
        ensure!(checkpoints(&state, "stale")? == acknowledged, "{}: a stale cursor was acknowledged", cause.name);
        ensure!(refused_for(&sandbox, cause.name)?, "{}: refused for another cause", cause.name);
        connect_gives_null(&client, &old, &stale)?;
        ensure!(checkpoints(&state, "stale")? == acknowledged, "{}: connect acknowledged", cause.name);
        state.run(&cause.undo)?;
    }
    // At the floor is not below it: a checkpoint is the position of a cursor that was presented.
    accept(&client, "/sync/pull", &client.pull_request(1000))?;
    let at = checkpoints(&state, "stale")?[TASKS];
    for (floor, expected) in [(at.1, 0), (0, 0)] {
        state.run(&scope(&format!("floor_lsn = {}, floor_ordinal = {floor}", at.0)))?;
        let body = accept(&client, "/sync/pull", &client.pull_request(1000))?;
        ensure!(texts(&body, "rebuild").len() == expected, "the floor is inclusive");
    }
    state.run(&scope("floor_lsn = 0, floor_ordinal = 0"))?;

    client_generation(&client, &state)?;
    schema(&client, &state)
}

fn refused_for(sandbox: &Sandbox, cause: &str) -> anyhow::Result<bool> {
    Ok(super::metric(sandbox, &format!("tributary_stale_cursors_total{{cause=\"{cause}\"}}"))? >= 1)
}

/// Connect says the same of the same cursors: null for those that are stale, nothing of the others.
fn connect_gives_null(
    client: &Client,
    cursors: &BTreeMap<String, Option<String>>,
    stale: &BTreeSet<String>,
) -> anyhow::Result<()> {
    let known = cursors.iter().map(|(scope, cursor)| {
        (scope.clone(), Json::object([("cursor", cursor.as_deref().map_or(Json::Null, Json::text))]))
    });
    let request = with(&client.connect_request(), &["known_scopes"], Json::Object(known.collect()));
    let body = accept(client, "/sync/connect", &request)?;
    let updates = body.get("scope_cursor_updates").and_then(Json::as_object).context("updates")?;
    ensure!(updates.keys().eq(stale) && updates.values().all(|cursor| *cursor == Json::Null), "{updates:?}");
    Ok(())
}

/// The state was restored to an earlier time, at which no row was another: a cursor of the time between is authentic, and
/// ahead of all that the state knows.
fn ahead_of_the_boundary(sandbox: &mut Sandbox, state: &Database, client: &mut Client) -> anyhow::Result<()> {
    let boundary = || state.number("select boundary_lsn from tributary.progress");
    let earlier = boundary()?;
    materialized(sandbox)?;
    client.pull_all(500)?;
    // Presented once, so that the checkpoints are ahead as well.
    accept(client, "/sync/pull", &client.pull_request(10))?;
    sandbox.materializers[0].process.kill();
    let later = boundary()?;
    ensure!(later > earlier);
    let acknowledged = checkpoints(state, "stale")?;
    state.run(&format!("update tributary.progress set boundary_lsn = {earlier}"))?;
    let body = accept(client, "/sync/pull", &client.pull_request(1000))?;
    let every: BTreeSet<String> = client.scopes.keys().cloned().collect();
    ensure!(texts(&body, "rebuild").into_iter().collect::<BTreeSet<_>>() == every && cursors_of(&body).is_empty());
    ensure!(super::changes_of(&body).is_empty());
    ensure!(checkpoints(state, "stale")? == acknowledged, "a cursor ahead of the boundary was acknowledged");
    ensure!(refused_for(sandbox, "ahead_of_boundary")?);
    connect_gives_null(client, &client.scopes, &every)?;
    state.run(&format!("update tributary.progress set boundary_lsn = {later}"))?;
    sandbox.materializers[0].process.restart()?;
    sandbox.wait_until_ready()?;
    ensure!(texts(&accept(client, "/sync/pull", &client.pull_request(1000))?, "rebuild").is_empty());
    Ok(())
}

/// After its generation was renewed a client has the scopes of the new one alone: a scope of the former is one that was
/// never assigned to it, and a cursor of the former is stale.
#[test]
fn a_new_generation_knows_no_scope_of_the_former() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    source.run("delete from members where user_id = 'u_1' and project_id <> (select min(project_id) from members where user_id = 'u_1')")?;
    let mut client = sandbox.client("u_1", "renewed")?;
    materialized(&sandbox)?;
    client.sync(500)?;
    let former = client.scopes.clone();
    let gone = former.keys().find(|scope| scope.starts_with("project:")).context("a project's scope")?.clone();
    // In the generation that it was assigned to, a removed scope is accepted.
    source.run("delete from members where user_id = 'u_1'")?;
    materialized(&sandbox)?;
    for _ in 0..2 {
        let body = accept(&client, "/sync/pull", &pull_with(&client, &former, 10))?;
        let removed = body.get("scope_updates").and_then(|u| u.get("remove")?.as_list()).context("remove")?;
        ensure!(removed.len() == 1 && removed[0].as_text() == Some(&gone));
    }
    state.run("update tributary.client set generation_expired = true where client_id = 'renewed'")?;
    let (status, code) = super::send(&client, "/sync/pull", raw(&pull_with(&client, &former, 10)).as_bytes());
    ensure!((status, code.as_str()) == (409, "client_generation_expired"));
    let before = client.generation;
    client.connect()?;
    ensure!(client.generation > before && !client.scopes.contains_key(&gone));
    ensure!(client.scopes.values().all(Option::is_none), "a new generation begins with null cursors");
    let got = super::send(&client, "/sync/pull", raw(&pull_with(&client, &former, 10)).as_bytes());
    ensure!(got == (400, "invalid_request".to_owned()), "a scope of the former generation: {got:?}");
    let mut stale = former.clone();
    stale.remove(&gone);
    let body = accept(&client, "/sync/pull", &pull_with(&client, &stale, 10))?;
    ensure!(texts(&body, "rebuild").iter().eq(stale.keys()) && cursors_of(&body).is_empty());
    ensure!(checkpoints(&state, "renewed")?.is_empty(), "a cursor of the former generation was acknowledged");
    client.sync(500)?;
    Ok(())
}

fn client_generation(client: &Client, state: &Database) -> anyhow::Result<()> {
    let acknowledged = checkpoints(state, "stale")?;
    state.run("update tributary.client set generation = generation + 1 where client_id = 'stale'")?;
    let request = client.pull_request(1000);
    let (status, code) = super::send(client, "/sync/pull", raw(&request).as_bytes());
    ensure!((status, code.as_str()) == (409, "client_generation_expired"));
    let request = with(&request, &["client_generation"], Json::int(client.generation.context("connected")? + 1));
    let body = accept(client, "/sync/pull", &request)?;
    ensure!(texts(&body, "rebuild").len() == client.scopes.len() && cursors_of(&body).is_empty());
    ensure!(checkpoints(state, "stale")? == acknowledged);
    state.run("update tributary.client set generation = generation - 1 where client_id = 'stale'")
}

fn schema(client: &Client, state: &Database) -> anyhow::Result<()> {
    let acknowledged = checkpoints(state, "stale")?;
    state.run(
        "insert into tributary.manifest (schema_version, schema_hash, document) values (2, decode(repeat('ab', 32), 'hex'), '{}');
         with c as (
             insert into tributary.configuration (schema_version, registry)
             select 2, registry from tributary.configuration order by configuration_no desc limit 1
             returning configuration_no
         )
         update tributary.progress set configuration_no = (select configuration_no from c)",
    )?;
    let (status, code) = super::send(client, "/sync/pull", raw(&client.pull_request(10)).as_bytes());
    ensure!((status, code.as_str()) == (422, "schema_mismatch"));
    let reference = Json::object([("version", Json::int(2)), ("hash", Json::text("ab".repeat(32)))]);
    let body = accept(client, "/sync/pull", &with(&client.pull_request(10), &["schema"], reference))?;
    ensure!(texts(&body, "rebuild").len() == client.scopes.len() && cursors_of(&body).is_empty());
    ensure!(checkpoints(state, "stale")? == acknowledged);
    Ok(())
}

#[test]
fn keys_rotate_and_retire() -> anyhow::Result<()> {
    let (one, two) = (URL_SAFE_NO_PAD.encode([1; 32]), URL_SAFE_NO_PAD.encode([2; 32]));
    let mut sandbox = Sandbox::start(Options { pullers: 2, ..Options::default() })?;
    let mut ring = |number: usize, ring: &str| {
        restart_with(&mut sandbox.pullers[number], &[("TRIBUTARY_TOKEN_KEYS", ring)])?;
        anyhow::Ok(sandbox.pullers[number].url.clone().unwrap_or_default())
    };
    let both = format!("1:{one},2:{two}");
    let turned = format!("2:{two},1:{one}");
    let urls = [ring(0, &format!("1:{one}"))?, ring(1, &format!("1:{one}"))?];
    let mut client = sandbox.client("u_1", "rotating")?;
    client.sync(500)?;
    let old = client.scopes.clone();
    let mut ring =
        |number: usize, ring: &str| restart_with(&mut sandbox.pullers[number], &[("TRIBUTARY_TOKEN_KEYS", ring)]);
    // Known everywhere before it signs anywhere: clients move between pullers all the time.
    ring(0, &both)?;
    ring(1, &both)?;
    ring(0, &turned)?;
    for round in 0..4 {
        client.http.redirect(&urls[round % 2]);
        client.pull_all(500)?;
    }
    ring(1, &turned)?;
    client.pull_all(500)?;
    let new = client.scopes.clone();
    // Until the old key is retired both are good.
    for cursors in [&old, &new] {
        accept(&client, "/sync/pull", &pull_with(&client, cursors, 10))?;
    }
    for number in [0, 1] {
        ring(number, &format!("2:{two}"))?;
    }
    for url in &urls {
        client.http.redirect(url);
        accept(&client, "/sync/pull", &pull_with(&client, &new, 10))?;
        let retired = super::send(&client, "/sync/pull", raw(&pull_with(&client, &old, 10)).as_bytes());
        ensure!(retired == (400, "invalid_request".to_owned()), "a retired key's token: {retired:?}");
    }
    // The same number with another secret is another key.
    ring(0, &format!("2:{one}"))?;
    client.http.redirect(&urls[0]);
    ensure!(super::send(&client, "/sync/pull", raw(&pull_with(&client, &new, 10)).as_bytes()).0 == 400);
    Ok(())
}

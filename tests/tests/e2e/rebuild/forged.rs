//! ADR 003, "Rebuild token dispatch and expiry": whatever is forged or misbound is 400, and never told which it was.

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tributary_tests::client::{Client, Rebuild};
use tributary_tests::json::Json;
use tributary_tests::sandbox::Options;

use super::{Boxes, invalid, items, ok, post, refusal, with_cursor};

/// A rebuild of the first user's box that has begun.
fn begun() -> anyhow::Result<(Boxes, Client, Rebuild)> {
    let seed = format!(
        "{} {}",
        items("u_1", 1, 5),
        "insert into items select n, 'u_2', '', true from generate_series(11, 15) n;"
    );
    let boxes = Boxes::start_with(&seed, Options { pullers: 1, ..Options::default() })?;
    let client = boxes.client("u_1", "forged")?;
    let rebuild = boxes.begun(&client, 2)?;
    Ok((boxes, client, rebuild))
}

fn refused(client: &Client, rebuild: &Rebuild, what: &str) -> anyhow::Result<()> {
    refused_request(client, &client.rebuild_request(rebuild), what)
}

fn refused_request(client: &Client, request: &Json, what: &str) -> anyhow::Result<()> {
    let response = post(client, request)?;
    let refusal = refusal(&response)?;
    ensure!(refusal == invalid(), "{what}: {refusal:?}");
    // One and the same answer for all.
    let body = br#"{"error":{"code":"invalid_request","message":"request is invalid","retryable":false}}"#;
    ensure!(response.body == body, "{what}: the answer tells more");
    Ok(())
}

fn goes_on(client: &Client, rebuild: &Rebuild) -> anyhow::Result<()> {
    ok(&post(client, &client.rebuild_request(rebuild))?).map(|_| ())
}

#[test]
fn s_04_another_users_token_is_invalid() -> anyhow::Result<()> {
    let (boxes, client, rebuild) = begun()?;
    // The other user's own client of its own id, and the same id under the other user.
    let other = boxes.client("u_2", "other")?;
    let mut request = with_cursor(&other, &rebuild, rebuild.cursor.clone());
    "everyone".clone_into(&mut request.scope);
    refused(&other, &request, "user")?;
    let thief =
        Client { generation: client.generation, manifest: client.manifest.clone(), ..boxes.fresh("u_2", "forged")? };
    let binding = refusal(&post(&thief, &thief.rebuild_request(&rebuild))?)?;
    ensure!(binding == (401, "auth_required".to_owned()), "a client id belongs to one user: {binding:?}");
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_another_clients_token_is_invalid() -> anyhow::Result<()> {
    let (boxes, client, rebuild) = begun()?;
    refused(&boxes.client("u_1", "second")?, &rebuild, "client")?;
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_another_scopes_token_is_invalid() -> anyhow::Result<()> {
    let (_boxes, client, mut rebuild) = begun()?;
    "everyone".clone_into(&mut rebuild.scope);
    refused(&client, &rebuild, "scope")?;
    "box:u_1".clone_into(&mut rebuild.scope);
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_another_attempts_token_is_invalid() -> anyhow::Result<()> {
    let (_boxes, client, rebuild) = begun()?;
    let other = with_cursor(&client, &client.start_rebuild("box:u_1", 2), rebuild.cursor.clone());
    refused(&client, &other, "rebuild_id")?;
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_tokens_of_the_two_kinds_are_not_interchangeable() -> anyhow::Result<()> {
    let (_boxes, mut client, rebuild) = begun()?;
    client.sync(100)?;
    let incremental = client.scopes["box:u_1"].clone();
    ensure!(incremental.is_some());
    refused(&client, &with_cursor(&client, &rebuild, incremental), "incremental token")?;
    client.scopes.insert("box:u_1".to_owned(), rebuild.cursor.clone());
    let pull = client.http.post("/sync/pull", client.pull_request(10).canonical()?.as_bytes())?;
    ensure!(refusal(&pull)? == invalid(), "a rebuild token in a pull");
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_another_page_size_is_invalid() -> anyhow::Result<()> {
    let (_boxes, client, mut rebuild) = begun()?;
    for limit in [1, 3, 1000] {
        rebuild.limit = limit;
        refused(&client, &rebuild, "page size")?;
    }
    // Nor can the first request change it under the same id.
    rebuild.limit = 3;
    let cursor = rebuild.cursor.take();
    refused(&client, &rebuild, "page size of the first request")?;
    (rebuild.limit, rebuild.cursor) = (2, cursor);
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_no_bit_of_a_token_can_be_changed() -> anyhow::Result<()> {
    let (_boxes, client, rebuild) = begun()?;
    let token = rebuild.cursor.clone().context("a continuation")?;
    let (prefix, text) = token.split_at(3);
    ensure!(prefix == "v1.");
    let octets = URL_SAFE_NO_PAD.decode(text)?;
    let changed =
        |rebuild: &Rebuild, cursor: String, what: &str| refused(&client, &with_cursor(&client, rebuild, cursor), what);
    for bit in 0..octets.len() * 8 {
        let mut flipped = octets.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        changed(&rebuild, format!("v1.{}", URL_SAFE_NO_PAD.encode(flipped)), &format!("bit {bit}"))?;
    }
    for cut in [1, octets.len() / 2, octets.len() - 1] {
        changed(&rebuild, format!("v1.{}", URL_SAFE_NO_PAD.encode(&octets[..cut])), "cut")?;
    }
    for other in [
        "",
        "v1.",
        "v2.",
        "null",
        "items:5",
        "v1.!",
        "v1.é\u{0}",
        &token[1..],
        &format!("{token}A"),
        &format!("{token}="),
        &format!("v2.{text}"),
        &token.to_uppercase(),
    ] {
        changed(&rebuild, other.to_owned(), other)?;
    }
    goes_on(&client, &rebuild)
}

#[test]
fn s_04_tokens_of_an_unknown_key_are_invalid() -> anyhow::Result<()> {
    let (mut boxes, client, rebuild) = begun()?;
    let process = &mut boxes.sandbox.pullers[0].process;
    let old =
        process.launch().env.iter().find(|(name, _)| name == "TRIBUTARY_TOKEN_KEYS").map(|(_, value)| value.clone());
    let old = old.and_then(|value| value.into_string().ok()).context("the key ring")?;
    let new = format!("2:{}", URL_SAFE_NO_PAD.encode([7_u8; 32]));
    // A rotated ring still knows the old key, and the session keeps signing with it.
    let page = post(&client, &client.rebuild_request(&rebuild))?.body;
    for (ring, known) in [(format!("{new},{old}"), true), (new.clone(), false), (format!("1:{}", &new[2..]), false)] {
        let process = &mut boxes.sandbox.pullers[0].process;
        process.set_env("TRIBUTARY_TOKEN_KEYS", &ring);
        process.restart()?;
        boxes.sandbox.wait_until_ready()?;
        if known {
            ensure!(post(&client, &client.rebuild_request(&rebuild))?.body == page, "a rotated key changed a replay");
        } else {
            refused(&client, &rebuild, "key")?;
        }
    }
    Ok(())
}

#[test]
fn s_04_a_malformed_request_is_invalid() -> anyhow::Result<()> {
    let (_boxes, client, rebuild) = begun()?;
    let good = client.rebuild_request(&rebuild);
    let Json::Object(members) = &good else { unreachable!() };
    let with = |name: &str, value: Json| {
        let mut members = members.clone();
        members.insert(name.to_owned(), value);
        Json::Object(members)
    };
    for name in members.keys() {
        let mut fewer = members.clone();
        fewer.remove(name);
        refused_request(&client, &Json::Object(fewer), name)?;
    }
    for (name, value) in [
        ("limit", Json::int(0)),
        ("limit", Json::int(-1)),
        ("limit", Json::int(1001)),
        ("limit", Json::text("2")),
        ("limit", Json::Null),
        ("cursor", Json::int(1)),
        ("cursor", Json::Object(std::collections::BTreeMap::new())),
        ("rebuild_id", Json::text("0197E83A-F7E8-7E21-92C0-C621732BD5DE")),
        ("rebuild_id", Json::text("0197e83af7e87e2192c0c621732bd5de")),
        ("rebuild_id", Json::text("00000000-0000-0000-0000-000000000000")),
        ("rebuild_id", Json::Null),
        ("scope", Json::text("")),
        ("scope", Json::text("box:u_2")),
        ("scope", Json::text("box:nobody")),
        ("scope", Json::text("x".repeat(256))),
        ("scope", Json::Null),
        ("client_generation", Json::int(0)),
        ("client_generation", Json::text("1")),
        ("more", Json::int(1)),
    ] {
        let request = with(name, value.clone());
        refused_request(&client, &request, &format!("{name}: {value:?}"))?;
    }
    goes_on(&client, &rebuild)
}

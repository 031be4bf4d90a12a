//! Requests are exact: every deviation has its own precise status, and changes nothing (ADR 003, "Pull request rules",
//! "Rebuild request rules", "Error rules"; contract.md sections 4 and 5).

use anyhow::{Context as _, ensure};
use tributary_tests::client::Client;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};
use tributary_tests::secrets::bearer_token;

use super::{durable, raw, send, wire, with, without};

const TOO_LARGE: &str = "9007199254740992";

fn number(text: &str) -> Json {
    Json::Number(text.to_owned())
}

/// Values of every JSON type but the named one.
fn other_types(own: &str) -> Vec<Json> {
    let all = [
        ("null", Json::Null),
        ("boolean", Json::Bool(true)),
        ("number", number("1")),
        ("text", Json::text("1")),
        ("list", Json::List(vec![Json::int(1)])),
        ("object", Json::object([("cursor", Json::Null)])),
    ];
    all.into_iter().filter(|(kind, _)| *kind != own).map(|(_, value)| value).collect()
}

/// Numbers that are no integers of an envelope.
fn no_integers() -> Vec<Json> {
    ["1.0", "1.5", "1e0", "1E2", "-0", TOO_LARGE, "-9007199254740992", "1e400", "123456789012345678901234567890"]
        .map(number)
        .into()
}

/// A request of an endpoint, and what is wrong with it when a member is.
struct Endpoint {
    path: &'static str,
    good: Json,
    /// Member, JSON type; all are required.
    members: &'static [(&'static str, &'static str)],
}

type Case = (String, Vec<u8>, (u16, &'static str));

const INVALID: (u16, &str) = (400, "invalid_request");
const REFERENCE: (u16, &str) = (400, "invalid_schema_reference");

/// What holds for every endpoint.
fn common(endpoint: &Endpoint) -> Vec<Case> {
    let good = &endpoint.good;
    let mut cases: Vec<Case> = Vec::new();
    let mut case = |what: String, body: String, expected| cases.push((what, body.into_bytes(), expected));
    let text = raw(good);
    for body in ["", " ", "{", "}", "[]", "null", "true", "1", "\"x\"", "{}", "{\"client_id\"}", "nul"] {
        case(format!("the body {body:?}"), body.to_owned(), INVALID);
    }
    case("a list around it".into(), format!("[{text}]"), INVALID);
    case("octets behind it".into(), format!("{text}x"), INVALID);
    case("two of it".into(), format!("{text}{text}"), INVALID);
    case("a comma behind the last member".into(), format!("{},}}", &text[..text.len() - 1]), INVALID);
    case("a byte order mark".into(), format!("\u{feff}{text}"), INVALID);
    case("deep nesting".into(), format!("{{\"client_id\":{}", "[".repeat(100_000)), INVALID);
    case(
        "deep, balanced nesting".into(),
        text.replacen('{', &format!("{{\"x\":{}{},", "[".repeat(500), "]".repeat(500)), 1),
        INVALID,
    );
    let is_connect = endpoint.path == "/sync/connect";
    for (name, kind) in endpoint.members {
        // Only the reference is malformed: connect says so.
        let wrong = if is_connect && *name == "schema" { REFERENCE } else { INVALID };
        case(format!("no {name}"), raw(&without(good, &[name])), INVALID);
        let twice = format!("{{\"{name}\":{},{}", raw(&good.get(name).unwrap().clone()), &text[1..]);
        case(format!("{name} twice"), twice, INVALID);
        let escaped = format!("{{\"\\u{:04x}{}\":null,{}", name.as_bytes()[0], &name[1..], &text[1..]);
        case(format!("{name} twice, once escaped"), escaped, INVALID);
        for value in other_types(kind) {
            if (*name, &value) == ("cursor", &Json::Null) || (*name, &value) == ("cursor", &Json::text("1")) {
                continue;
            }
            case(format!("{name} as {}", raw(&value)), raw(&with(good, &[name], value)), wrong);
        }
        if *kind == "number" {
            for value in no_integers() {
                case(format!("{name} as {}", raw(&value)), raw(&with(good, &[name], value)), INVALID);
            }
        }
    }
    case("an unknown member".into(), raw(&with(good, &["more"], Json::Null)), INVALID);
    let reference = if is_connect { REFERENCE } else { INVALID };
    case("an unknown member of schema".into(), raw(&with(good, &["schema", "more"], Json::Null)), reference);
    for name in ["version", "hash"] {
        case(format!("no schema.{name}"), raw(&without(good, &["schema", name])), reference);
    }
    case("schema.version twice".into(), text.replacen("\"version\":", "\"version\":1,\"version\":", 1), INVALID);
    for value in other_types("number").into_iter().chain(no_integers()) {
        // What no binary64 holds is refused as JSON, before anything is a schema reference.
        let expected = if value == number("1e400") { INVALID } else { reference };
        case(format!("schema.version {}", raw(&value)), raw(&with(good, &["schema", "version"], value)), expected);
    }
    for value in other_types("text") {
        case(format!("schema.hash {}", raw(&value)), raw(&with(good, &["schema", "hash"], value)), reference);
    }
    for id in [String::new(), "x".repeat(256), "\u{0}".to_owned()] {
        case(
            format!("a client id of {} characters", id.len()),
            raw(&with(good, &["client_id"], Json::text(id))),
            INVALID,
        );
    }
    case("a lone surrogate".into(), text.replacen("\"client_id\":\"", "\"client_id\":\"\\ud800", 1), INVALID);
    let mut octets = text.clone().into_bytes();
    let at = text.find("\"client_id\":\"").unwrap() + 13;
    octets.insert(at, 0xff);
    cases.push(("an octet that is not UTF-8".into(), octets, INVALID));
    cases
}

/// What holds for a map of scopes to their cursors.
fn scope_map(good: &Json, map: &str, scope: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut case = |what: &str, body: String| cases.push((what.to_owned(), body.into_bytes(), INVALID));
    let state = |value: Json| raw(&with(good, &[map, scope], value));
    case("an unknown member of a scope", state(Json::object([("cursor", Json::Null), ("more", Json::Null)])));
    case("a scope without a cursor", state(Json::Object([].into())));
    case("a scope as null", state(Json::Null));
    case("a scope as text", state(Json::text("x")));
    for value in [Json::Bool(false), Json::int(1), Json::List(Vec::new()), Json::object([("cursor", Json::Null)])] {
        case("a cursor of another type", state(Json::object([("cursor", value)])));
    }
    let name = raw(&Json::text(scope));
    case(
        "a scope twice",
        raw(good).replacen(&format!("{name}:{{"), &format!("{name}:{{\"cursor\":null}},{name}:{{"), 1),
    );
    case("a cursor twice", raw(good).replacen(&format!("{name}:{{"), &format!("{name}:{{\"cursor\":null,"), 1));
    for id in [String::new(), "x".repeat(256), "\u{0}".to_owned()] {
        let more = with(good, &[map, &id], Json::object([("cursor", Json::Null)]));
        case("an impossible scope id", raw(&more));
    }
    case("a token that is none", state(Json::object([("cursor", Json::text("v1.forged"))])));
    case("an empty token", state(Json::object([("cursor", Json::text(""))])));
    case("a long token", state(Json::object([("cursor", Json::text(format!("v1.{}", "A".repeat(100_000))))])));
    cases
}

fn refused(sandbox: &Sandbox, client: &Client, path: &str, cases: &[Case]) -> anyhow::Result<()> {
    let state = sandbox.state()?;
    let before = durable(&state)?;
    for (what, body, (status, code)) in cases {
        let got = send(client, path, body);
        ensure!(got == (*status, (*code).to_owned()), "{path}, {what}: {got:?}");
        ensure!(durable(&state)? == before, "{path}, {what}: the state changed");
    }
    Ok(())
}

fn synced(sandbox: &Sandbox) -> anyhow::Result<Client> {
    let mut client = sandbox.client("u_1", "exact")?;
    client.sync(500)?;
    Ok(client)
}

#[test]
fn pull_requests_are_exact() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox)?;
    let good = client.pull_request(10);
    let endpoint = Endpoint {
        path: "/sync/pull",
        good: good.clone(),
        members: &[
            ("client_id", "text"),
            ("client_generation", "number"),
            ("schema", "object"),
            ("scope_set_version", "number"),
            ("scopes", "object"),
            ("limit", "number"),
        ],
    };
    let mut cases = common(&endpoint);
    cases.extend(scope_map(&good, "scopes", "tasks_user:u_1"));
    let mut case = |what: &str, body: Json, expected| cases.push((what.to_owned(), raw(&body).into_bytes(), expected));
    for limit in ["0", "-1", "1001", "65537", "4294967297"] {
        case("a limit out of range", with(&good, &["limit"], number(limit)), INVALID);
    }
    for generation in ["0", "-1"] {
        case("a generation that none has", with(&good, &["client_generation"], number(generation)), INVALID);
    }
    case("a negative assignment version", with(&good, &["scope_set_version"], number("-1")), INVALID);
    let future = Json::int(client.scope_set_version + 1);
    case("a future assignment version", with(&good, &["scope_set_version"], future), INVALID);
    let unknown = |id: &str| with(&good, &["scopes", id], Json::object([("cursor", Json::Null)]));
    case("a scope that nobody has", unknown("nothing"), INVALID);
    case("a scope of somebody else", unknown("tasks_user:u_2"), INVALID);
    for generation in [client.generation.unwrap() + 1, 9_007_199_254_740_991] {
        let other = with(&good, &["client_generation"], Json::int(generation));
        case("another generation", other, (409, "client_generation_expired"));
    }
    for version in ["2", "0", "-1"] {
        case("another schema version", with(&good, &["schema", "version"], number(version)), (422, "schema_mismatch"));
    }
    for hash in [String::new(), "0".repeat(64), client.manifest()?.hash.to_uppercase()] {
        case("another schema hash", with(&good, &["schema", "hash"], Json::text(hash)), (422, "schema_mismatch"));
    }
    case(
        "a client that never connected",
        with(&good, &["client_id"], Json::text("nobody")),
        (409, "client_generation_expired"),
    );
    refused(&sandbox, &client, "/sync/pull", &cases)?;
    // The bounds themselves are good, and so are scopes in any order and any white space.
    for limit in ["1", "1000"] {
        let body = raw(&with(&good, &["limit"], number(limit)));
        ensure!(send(&client, "/sync/pull", body.as_bytes()).0 == 200, "limit {limit}");
        let spaced = format!(" \t\r\n{} ", body.replace(',', " ,\n"));
        ensure!(send(&client, "/sync/pull", spaced.as_bytes()).0 == 200, "white space");
    }
    println!("{} cases", cases.len());
    Ok(())
}

#[test]
fn rebuild_requests_are_exact() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let mut client = synced(&sandbox)?;
    let mut rebuild = client.start_rebuild("tasks_user:u_1", 10);
    client.rebuild_page(&mut rebuild)?;
    let good = client.rebuild_request(&rebuild);
    let endpoint = Endpoint {
        path: "/sync/rebuild",
        good: good.clone(),
        members: &[
            ("client_id", "text"),
            ("client_generation", "number"),
            ("schema", "object"),
            ("scope", "text"),
            ("rebuild_id", "text"),
            ("cursor", "text"),
            ("limit", "number"),
        ],
    };
    let mut cases = common(&endpoint);
    let mut case = |what: &str, body: Json, expected| cases.push((what.to_owned(), raw(&body).into_bytes(), expected));
    let id = rebuild.rebuild_id.clone();
    for wrong in [
        String::new(),
        id.to_uppercase(),
        id.replace('-', ""),
        format!("{{{id}}}"),
        format!("urn:uuid:{id}"),
        format!("{id} "),
        "00000000-0000-0000-0000-000000000000".to_owned(),
        id.replacen(|c: char| c.is_ascii_digit(), "g", 1),
    ] {
        case(&format!("the rebuild id {wrong:?}"), with(&good, &["rebuild_id"], Json::text(wrong)), INVALID);
    }
    for limit in ["0", "-1", "1001", "65546"] {
        case("a limit out of range", with(&good, &["limit"], number(limit)), INVALID);
    }
    case("another limit than the continuation's", with(&good, &["limit"], number("11")), INVALID);
    case("a lexical row key", with(&good, &["cursor"], Json::text("tasks|100")), INVALID);
    let fresh = with(&good, &["cursor"], Json::Null);
    for scope in ["nothing", "tasks_user:u_2", "", "\u{0}"] {
        case(&format!("the scope {scope:?}"), with(&fresh, &["scope"], Json::text(scope)), INVALID);
        case(&format!("the scope {scope:?}, continued"), with(&good, &["scope"], Json::text(scope)), INVALID);
    }
    let generation = Json::int(client.generation.unwrap() + 1);
    case("another generation", with(&good, &["client_generation"], generation), (409, "client_generation_expired"));
    case("another schema", with(&good, &["schema", "version"], number("2")), (422, "schema_mismatch"));
    refused(&sandbox, &client, "/sync/rebuild", &cases)?;
    while !rebuild.finished {
        client.rebuild_page(&mut rebuild)?;
    }
    println!("{} cases", cases.len());
    Ok(())
}

#[test]
fn connect_requests_are_exact() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox)?;
    let good = client.connect_request();
    let endpoint = Endpoint {
        path: "/sync/connect",
        good: good.clone(),
        members: &[
            ("client_id", "text"),
            ("platform", "text"),
            ("app_version", "text"),
            ("protocol_version", "number"),
            ("schema", "object"),
            ("scope_set_version", "number"),
            ("known_scopes", "object"),
        ],
    };
    let mut cases = common(&endpoint);
    cases.extend(scope_map(&good, "known_scopes", "tasks_user:u_1"));
    let mut case = |what: &str, body: Json, expected| cases.push((what.to_owned(), raw(&body).into_bytes(), expected));
    for version in ["2", "4", "0", "-3"] {
        case("another protocol", with(&good, &["protocol_version"], number(version)), (426, "upgrade_required"));
        let malformed = without(&with(&good, &["protocol_version"], number(version)), &["platform"]);
        case("another protocol, malformed for ours", malformed, (426, "upgrade_required"));
    }
    for generation in other_types("number").into_iter().chain(no_integers()).chain([number("0"), number("-1")]) {
        case("a generation of another type", with(&good, &["client_generation"], generation), INVALID);
    }
    for reset in other_types("boolean") {
        case("a reset of another type", with(&good, &["schema_reset"], reset), INVALID);
    }
    for hash in [String::new(), "0".repeat(63), "0".repeat(65), "G".repeat(64), client.manifest()?.hash.to_uppercase()]
    {
        case("an impossible hash", with(&good, &["schema", "hash"], Json::text(hash)), REFERENCE);
    }
    let sentinel = Json::object([("version", Json::int(0)), ("hash", Json::text(""))]);
    let fresh = with(&good, &["schema"], sentinel);
    case("the fresh sentinel with a generation", fresh.clone(), REFERENCE);
    let fresh = without(&fresh, &["client_generation"]);
    case("the fresh sentinel of a known client", fresh.clone(), REFERENCE);
    let unknown = with(&fresh, &["client_id"], Json::text("another"));
    case("the fresh sentinel with a reset", with(&unknown, &["schema_reset"], Json::Bool(true)), REFERENCE);
    refused(&sandbox, &client, "/sync/connect", &cases)?;
    println!("{} cases", cases.len());
    Ok(())
}

/// The method, path, type and size of a request, and who sends it.
#[test]
fn http_is_exact() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let client = synced(&sandbox)?;
    let state = sandbox.state()?;
    let before = durable(&state)?;
    let base = sandbox.pullers[0].url.as_deref().context("a puller")?;
    let bearer = format!("Bearer {}", sandbox.token("u_1")?);
    let authorized = |more: &[(&'static str, &'static str)]| {
        let mut headers = vec![("Authorization", bearer.as_str())];
        headers.extend_from_slice(more);
        headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect::<Vec<_>>()
    };
    let json = ("Content-Type", "application/json");
    let ask = |method: &str, path: &str, headers: &[(String, String)], body: &[u8]| {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        wire::exchange(base, method, path, &headers, body).unwrap()
    };
    let good = raw(&client.pull_request(10));

    for path in ["/sync/connect", "/sync/pull", "/sync/rebuild"] {
        for method in ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            let answer = ask(method, path, &authorized(&[json]), good.as_bytes());
            ensure!((answer.status, answer.header("allow")) == (405, Some("POST")), "{method} {path}: {answer:?}");
            ensure!(answer.code() == "method_not_allowed");
        }
        ensure!(ask("HEAD", path, &authorized(&[]), b"").status == 405);
    }
    let answer = ask("POST", "/openapi.json", &authorized(&[json]), b"{}");
    let allowed = answer.header("allow").unwrap_or_default();
    ensure!(answer.status == 405 && allowed.contains("GET") && !allowed.contains("POST"), "{answer:?}");
    for path in
        ["/", "/sync", "/sync/", "/sync/pull/", "/sync/PULL", "/sync/push", "//sync/pull", "/metrics", "/readyz"]
    {
        let answer = ask("POST", path, &authorized(&[json]), good.as_bytes());
        ensure!((answer.status, answer.code().as_str()) == (404, "not_found"), "{path}: {answer:?}");
    }

    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin1", "json", ""] {
        let answer = ask("POST", "/sync/pull", &authorized(&[("Content-Type", kind)]), good.as_bytes());
        ensure!((answer.status, answer.code().as_str()) == (415, "unsupported_media_type"), "{kind}: {answer:?}");
    }
    ensure!(ask("POST", "/sync/pull", &authorized(&[]), good.as_bytes()).status == 415, "no type");
    for kind in ["application/json; charset=utf-8", "Application/JSON", "application/json;charset=\"UTF-8\""] {
        let answer = ask("POST", "/sync/pull", &authorized(&[("Content-Type", kind)]), good.as_bytes());
        ensure!(answer.status == 200, "{kind}: {answer:?}");
        ensure!(answer.header("content-type") == Some("application/json"));
    }

    // The limit is 1 MiB: reached it is good, passed it is refused, announced or not, and also when it never comes.
    let padded = |length: usize| format!("{good}{}", " ".repeat(length - good.len())).into_bytes();
    ensure!(ask("POST", "/sync/pull", &authorized(&[json]), &padded(1 << 20)).status == 200, "exactly the limit");
    let announced = ask("POST", "/sync/pull", &authorized(&[json, ("Content-Length", "1048577")]), b"");
    ensure!((announced.status, announced.code().as_str()) == (413, "payload_too_large"), "{announced:?}");
    let huge = ask("POST", "/sync/pull", &authorized(&[json, ("Content-Length", "9223372036854775808")]), b"");
    ensure!(huge.status == 413, "{huge:?}");
    let mut chunked = format!("{:x}\r\n", (1 << 20) + 1).into_bytes();
    chunked.extend(padded((1 << 20) + 1));
    chunked.extend(b"\r\n0\r\n\r\n");
    let chunked = ask("POST", "/sync/pull", &authorized(&[json, ("Transfer-Encoding", "chunked")]), &chunked);
    ensure!((chunked.status, chunked.code().as_str()) == (413, "payload_too_large"), "{chunked:?}");

    let secret = sandbox.ready().jwt_secret;
    let token = sandbox.token("u_1")?;
    let (signed, _) = token.rsplit_once('.').context("three parts")?;
    let (_, claims) = signed.split_once('.').context("three parts")?;
    let headers =
        |values: &[String]| values.iter().map(|v| ("Authorization".to_owned(), v.clone())).collect::<Vec<_>>();
    for (what, values) in [
        ("no header", vec![]),
        ("another scheme", vec![format!("Basic {token}")]),
        ("no token", vec!["Bearer".to_owned()]),
        ("an empty token", vec!["Bearer ".to_owned()]),
        ("two headers", vec![bearer.clone(), bearer.clone()]),
        ("another secret", vec![format!("Bearer {}", bearer_token(&format!("{secret}x"), "u_1")?)]),
        ("an empty user", vec![format!("Bearer {}", bearer_token(&secret, "")?)]),
        ("no signature", vec![format!("Bearer {signed}.")]),
        // {"alg":"none"}
        ("no algorithm", vec![format!("Bearer eyJhbGciOiJub25lIn0.{claims}.")]),
    ] {
        let mut sent = headers(&values);
        sent.push((json.0.to_owned(), json.1.to_owned()));
        let answer = ask("POST", "/sync/pull", &sent, good.as_bytes());
        ensure!((answer.status, answer.code().as_str()) == (401, "auth_required"), "{what}: {answer:?}");
        ensure!(answer.header("www-authenticate") == Some("Bearer"), "{what}: {answer:?}");
    }
    ensure!(durable(&state)? == before, "the state changed");
    Ok(())
}

//! The request rules: what is refused, member by member, at every level.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::json::MAX_INTEGER;
use super::*;

const HASH: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const REBUILD: &str = "0197e83a-f7e8-7e21-92c0-c621732bd5de";

fn pull_body() -> Value {
    json!({
        "client_id": "ios-device-123", "client_generation": 4, "schema": {"version": 8, "hash": HASH},
        "scope_set_version": 13, "limit": 500,
        "scopes": {"templates_public": {"cursor": "opaque-server-token"}, "documents_user:u_123": {"cursor": null}},
    })
}

fn rebuild_body() -> Value {
    json!({
        "client_id": "ios-device-123", "client_generation": 4, "schema": {"version": 8, "hash": HASH},
        "scope": "templates_public", "rebuild_id": REBUILD, "cursor": null, "limit": 1000,
    })
}

fn connect_body() -> Value {
    json!({
        "client_id": "ios-device-123", "client_generation": 4, "platform": "ios", "app_version": "1.0.0",
        "protocol_version": 3, "schema": {"version": 8, "hash": HASH}, "schema_reset": true, "scope_set_version": 13,
        "known_scopes": {"templates_public": {"cursor": "opaque-server-token"}},
    })
}

fn fresh_body() -> Value {
    json!({
        "client_id": "ios-device-123", "platform": "ios", "app_version": "1.0.0", "protocol_version": 3,
        "schema": {"version": 0, "hash": ""}, "scope_set_version": 0, "known_scopes": {},
    })
}

#[derive(Debug, Clone, Copy)]
enum Endpoint {
    Connect,
    Pull,
    Rebuild,
}

const ENDPOINTS: [Endpoint; 3] = [Endpoint::Connect, Endpoint::Pull, Endpoint::Rebuild];

impl Endpoint {
    fn body(self) -> Value {
        match self {
            Self::Connect => connect_body(),
            Self::Pull => pull_body(),
            Self::Rebuild => rebuild_body(),
        }
    }

    fn read(self, octets: &[u8]) -> Result<(), ConnectRefusal> {
        let envelope = Envelope::read(octets)?;
        match self {
            Self::Connect => envelope.connect().map(drop),
            Self::Pull => Ok(envelope.pull().map(drop)?),
            Self::Rebuild => Ok(envelope.rebuild().map(drop)?),
        }
    }
}

const INVALID: Result<(), ConnectRefusal> = Err(ConnectRefusal::Invalid(InvalidRequest));

fn octets(body: &Value) -> Vec<u8> {
    body.to_string().into_bytes()
}

fn with(mut body: Value, pointer: &str, value: Value) -> Value {
    *body.pointer_mut(pointer).expect("a member") = value;
    body
}

fn connect(body: &Value) -> Result<ConnectRequest, ConnectRefusal> {
    Envelope::read(&octets(body))?.connect()
}

fn pull(body: &Value) -> Result<PullRequest, InvalidRequest> {
    Envelope::read(&octets(body))?.pull()
}

fn rebuild(body: &Value) -> Result<RebuildRequest, InvalidRequest> {
    Envelope::read(&octets(body))?.rebuild()
}

#[test]
fn reads_the_requests_of_the_adr() {
    let request = pull(&pull_body()).expect("valid");
    assert_eq!(request.client_id.as_str(), "ios-device-123");
    assert_eq!((request.client_generation, request.scope_set_version, request.limit), (4, 13, 500));
    assert_eq!(request.schema, SchemaReference { version: 8, hash: HASH.to_owned() });
    let scopes: Vec<_> =
        request.scopes.iter().map(|(s, c)| (s.as_str(), c.as_ref().map(PresentedToken::as_str))).collect();
    assert_eq!(scopes, [("documents_user:u_123", None), ("templates_public", Some("opaque-server-token"))]);

    let request = rebuild(&rebuild_body()).expect("valid");
    assert_eq!((request.scope.as_str(), request.rebuild_id.to_string().as_str()), ("templates_public", REBUILD));
    assert_eq!((request.cursor, request.limit), (None, 1000));

    let request = connect(&connect_body()).expect("valid");
    assert_eq!((request.client_generation, request.schema_reset), (Some(4), true));
    let request = connect(&fresh_body()).expect("valid");
    assert_eq!((request.client_generation, request.schema_reset, request.schema.is_fresh()), (None, false, true));
    assert!(pull(&with(pull_body(), "/scopes", json!({}))).is_ok());
}

/// The pointers of all members, at all levels.
fn members(value: &Value, at: &str, found: &mut Vec<String>) {
    for (name, inner) in value.as_object().into_iter().flatten() {
        let pointer = format!("{at}/{name}");
        members(inner, &pointer, found);
        found.push(pointer);
    }
}

fn pointers(body: &Value) -> Vec<String> {
    let mut found = Vec::new();
    members(body, "", &mut found);
    found
}

/// Inside `schema` of connect the envelope is fine and only the reference is not.
fn is_refused(endpoint: Endpoint, pointer: &str, result: &Result<(), ConnectRefusal>) -> bool {
    match (endpoint, pointer.starts_with("/schema/")) {
        (Endpoint::Connect, true) => matches!(result, Err(ConnectRefusal::InvalidSchemaReference { .. })),
        _ => *result == INVALID,
    }
}

#[test]
fn missing_members_are_refused_at_every_level() {
    for endpoint in ENDPOINTS {
        let optional = ["/client_generation", "/schema_reset"];
        for pointer in pointers(&endpoint.body()) {
            let is_entry = pointer.starts_with("/scopes/") || pointer.starts_with("/known_scopes/");
            if (is_entry && !pointer.ends_with("/cursor"))
                || (matches!(endpoint, Endpoint::Connect) && optional.contains(&pointer.as_str()))
            {
                continue;
            }
            let mut body = endpoint.body();
            let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
            body.pointer_mut(parent).and_then(Value::as_object_mut).expect("an object").remove(name);
            let result = endpoint.read(&octets(&body));
            assert!(is_refused(endpoint, &pointer, &result), "{endpoint:?} without {pointer}: {result:?}");
        }
    }
}

#[test]
fn unknown_members_are_refused_at_every_level() {
    for endpoint in ENDPOINTS {
        let body = endpoint.body();
        let objects = pointers(&body).into_iter().filter(|at| body.pointer(at).is_some_and(Value::is_object));
        for pointer in objects.chain([String::new()]) {
            let mut body = body.clone();
            let object = body.pointer_mut(&pointer).and_then(Value::as_object_mut).expect("an object");
            object.insert("unknown".to_owned(), json!(1));
            let result = endpoint.read(&octets(&body));
            let inside = format!("{pointer}/unknown");
            assert!(is_refused(endpoint, &inside, &result), "{endpoint:?} {inside}: {result:?}");
        }
    }
}

/// `serde_json::Value` cannot hold a repeated member, so this goes by text.
#[test]
fn repeated_members_are_refused_at_every_level() {
    for endpoint in ENDPOINTS {
        let body = endpoint.body();
        for pointer in pointers(&body) {
            let name = pointer.rsplit_once('/').expect("a pointer").1;
            let member = format!("{}:{}", json!(name), body.pointer(&pointer).expect("a member"));
            let text = body.to_string();
            assert!(text.contains(&member), "{pointer}");
            let repeated = text.replacen(&member, &format!("{member},{member}"), 1);
            assert_eq!(endpoint.read(repeated.as_bytes()), INVALID, "{endpoint:?} {pointer}");
            // The same name, written with an escape.
            let escaped = member.replacen(&name[..1], &format!("\\u{:04x}", name.as_bytes()[0]), 1);
            let repeated = text.replacen(&member, &format!("{member},{escaped}"), 1);
            assert_eq!(endpoint.read(repeated.as_bytes()), INVALID, "{endpoint:?} {pointer} escaped");
        }
    }
}

#[test]
fn wrong_types_are_refused_at_every_level() {
    let values =
        [json!(null), json!(true), json!(1.5), json!(7), json!("7"), json!([]), json!({}), json!([["cursor", null]])];
    for endpoint in ENDPOINTS {
        let body = endpoint.body();
        for pointer in pointers(&body) {
            let is = body.pointer(&pointer).expect("a member");
            for value in &values {
                let same_type = std::mem::discriminant(value) == std::mem::discriminant(is) && *value != json!(1.5);
                let is_cursor = pointer.ends_with("/cursor") && (value.is_string() || value.is_null());
                // A reference of any object or integer may be well-typed; their own tests are below.
                if same_type || is_cursor {
                    continue;
                }
                let result = endpoint.read(&octets(&with(body.clone(), &pointer, value.clone())));
                let within = if pointer == "/schema" { "/schema/" } else { &pointer };
                assert!(is_refused(endpoint, within, &result), "{endpoint:?} {pointer} {value}: {result:?}");
            }
        }
    }
}

#[test]
fn limits_outside_1_to_1000_are_refused_and_never_clamped() {
    for (body, read) in [
        (pull_body(), (|body: &str| Envelope::read(body.as_bytes())?.pull().map(|r| r.limit)) as fn(&str) -> _),
        (rebuild_body(), |body: &str| Envelope::read(body.as_bytes())?.rebuild().map(|r| r.limit)),
    ] {
        let number = format!("\"limit\":{}", body["limit"]);
        let text = |limit: &str| body.to_string().replacen(&number, &format!("\"limit\":{limit}"), 1);
        for limit in [1, 2, 999, 1000] {
            assert_eq!(read(&text(&limit.to_string())), Ok(limit));
        }
        let refused = [
            "0",
            "-1",
            "-0",
            "1001",
            "65537",
            "4294967297",
            "18446744073709551617",
            "1.0",
            "1e0",
            "1e2",
            "01",
            "+1",
            "\"5\"",
            "null",
            "true",
            "[5]",
            "0x5",
            "NaN",
            "",
        ];
        for limit in refused {
            assert_eq!(read(&text(limit)), Err(InvalidRequest), "{limit}");
        }
    }
}

#[test]
fn integers_lie_within_2_to_the_53() {
    for (value, valid) in
        [(MAX_INTEGER, true), (MAX_INTEGER + 1, false), (i64::MAX, false), (-1, false), (i64::MIN, false)]
    {
        assert_eq!(pull(&with(pull_body(), "/scope_set_version", json!(value))).is_ok(), valid, "{value}");
        assert_eq!(pull(&with(pull_body(), "/client_generation", json!(value))).is_ok(), valid, "{value}");
        assert_eq!(connect(&with(connect_body(), "/scope_set_version", json!(value))).is_ok(), valid, "{value}");
        assert_eq!(connect(&with(connect_body(), "/client_generation", json!(value))).is_ok(), valid, "{value}");
    }
    assert!(pull(&with(pull_body(), "/schema/version", json!(MAX_INTEGER + 1))).is_err());
    assert!(pull(&with(pull_body(), "/client_generation", json!(0))).is_err());
    assert!(pull(&with(pull_body(), "/scope_set_version", json!(0))).is_ok());
}

#[test]
fn identifiers_are_nonempty_and_at_most_255_characters() {
    let cases = [
        ("x".repeat(255), true),
        ("\u{1F600}".repeat(255), true),
        ("x".repeat(256), false),
        (String::new(), false),
        ("a\0b".to_owned(), false),
        (" ".to_owned(), true),
    ];
    for (id, valid) in cases {
        assert_eq!(pull(&with(pull_body(), "/client_id", json!(id))).is_ok(), valid);
        assert_eq!(rebuild(&with(rebuild_body(), "/scope", json!(id))).is_ok(), valid);
        let scopes = json!({id.clone(): {"cursor": null}});
        assert_eq!(pull(&with(pull_body(), "/scopes", scopes.clone())).is_ok(), valid);
        assert_eq!(connect(&with(connect_body(), "/known_scopes", scopes)).is_ok(), valid);
    }
}

#[test]
fn rebuild_ids_are_canonical() {
    for id in [
        "",
        "00000000-0000-0000-0000-000000000000",
        "0197E83A-F7E8-7E21-92C0-C621732BD5DE",
        "0197e83af7e87e2192c0c621732bd5de",
        "{0197e83a-f7e8-7e21-92c0-c621732bd5de}",
        "urn:uuid:0197e83a-f7e8-7e21-92c0-c621732bd5de",
        " 0197e83a-f7e8-7e21-92c0-c621732bd5de",
        "0197e83a-f7e8-7e21-92c0-c621732bd5d",
    ] {
        assert_eq!(rebuild(&with(rebuild_body(), "/rebuild_id", json!(id))), Err(InvalidRequest), "{id}");
    }
}

#[test]
fn what_is_not_one_json_object_is_refused() {
    let deep = |open: &str, close: &str| format!("{}{}", open.repeat(100_000), close.repeat(100_000));
    for endpoint in ENDPOINTS {
        let valid = endpoint.body().to_string();
        assert_eq!(endpoint.read(valid.as_bytes()), Ok(()));
        assert_eq!(endpoint.read(format!(" \n{valid}\t\r ").as_bytes()), Ok(()));
        let refused = [
            String::new(),
            "null".to_owned(),
            "[]".to_owned(),
            "\"\"".to_owned(),
            format!("[{valid}]"),
            format!("{valid}{valid}"),
            format!("{valid},"),
            format!("{valid}\0"),
            format!("\u{feff}{valid}"),
            valid[..valid.len() - 1].to_owned(),
            valid.replacen(':', ":/**/", 1),
            valid.replacen('}', ",}", 1),
            valid.replacen("ios-device-123", "\\ud800", 1),
            valid.replacen("ios-device-123", "\n", 1),
            deep("[", "]"),
            deep("{\"a\":", "}"),
            valid.replacen('{', &format!("{{\"deep\":{},", deep("[", "]")), 1),
        ];
        for body in refused {
            assert_eq!(endpoint.read(body.as_bytes()), INVALID, "{endpoint:?} {}", &body[..body.len().min(80)]);
        }
        // serde would read a struct from an array of its members' values.
        let values: Vec<Value> = endpoint.body().as_object().expect("an object").values().cloned().collect();
        assert_eq!(endpoint.read(&octets(&json!(values))), INVALID);
        let mut not_utf8 = valid.into_bytes();
        let at = not_utf8.windows(3).position(|w| w == b"ios").expect("the client id");
        not_utf8[at] = 0xff;
        assert_eq!(endpoint.read(&not_utf8), INVALID);
    }
}

#[test]
fn the_claimed_client_is_known_whatever_else_is_wrong() {
    let claimed = |body: Value| Envelope::read(&octets(&body)).expect("an object").client_id();
    assert_eq!(claimed(json!({"client_id": "c", "limit": 0})), ClientId::parse("c").ok());
    assert_eq!(claimed(json!({"client_id": ""})), None);
    assert_eq!(claimed(json!({"client_id": 1})), None);
    assert_eq!(claimed(json!({})), None);
}

#[test]
fn protocol_version_is_refused_before_the_envelope() {
    for received in [4, 2, 0, -1, MAX_INTEGER] {
        let refusal = Err(ConnectRefusal::UnsupportedProtocol { received });
        assert_eq!(connect(&with(connect_body(), "/protocol_version", json!(received))), refusal);
        assert_eq!(connect(&json!({"protocol_version": received, "unknown": true})), refusal);
        let both = with(with(connect_body(), "/protocol_version", json!(received)), "/schema", json!(null));
        assert_eq!(connect(&both), refusal);
    }
    for version in [json!("3"), json!("4"), json!(null), json!(4.5), json!(MAX_INTEGER + 1)] {
        let body = with(connect_body(), "/protocol_version", version);
        assert_eq!(connect(&body), Err(ConnectRefusal::Invalid(InvalidRequest)));
    }
}

#[test]
fn only_a_malformed_schema_reference_is_told_as_one() {
    let uppercase = HASH.to_uppercase();
    let received = [
        json!(null),
        json!("8"),
        json!([8, HASH]),
        json!({}),
        json!({"version": 8}),
        json!({"version": 8, "hash": HASH, "unknown": 1}),
        json!({"version": 8, "hash": ""}),
        json!({"version": 8, "hash": &HASH[1..]}),
        json!({"version": 8, "hash": uppercase}),
        json!({"version": 0, "hash": HASH}),
        json!({"version": -1, "hash": HASH}),
        json!({"version": 8.5, "hash": HASH}),
        json!({"version": "8", "hash": HASH}),
    ];
    for received in received {
        let body = with(connect_body(), "/schema", received.clone());
        assert_eq!(connect(&body), Err(ConnectRefusal::InvalidSchemaReference { received }));
        // Something else is malformed, too.
        let worse = with(body, "/platform", json!(1));
        assert_eq!(connect(&worse), Err(ConnectRefusal::Invalid(InvalidRequest)));
    }
}

#[test]
fn the_fresh_sentinel_comes_alone() {
    let received = json!({"version": 0, "hash": ""});
    let refusal = Err(ConnectRefusal::InvalidSchemaReference { received });
    let with_member = |name: &str, value: Value| {
        let mut body = fresh_body();
        body.as_object_mut().expect("an object").insert(name.to_owned(), value);
        connect(&body)
    };
    assert_eq!(with_member("client_generation", json!(1)), refusal);
    assert_eq!(with_member("schema_reset", json!(true)), refusal);
    assert!(with_member("schema_reset", json!(false)).is_ok());
}

/// In pull and rebuild a well-typed reference that is not current is a mismatch (422), decided with state.
#[test]
fn any_well_typed_reference_is_read_by_pull_and_rebuild() {
    for (version, hash) in [(0, ""), (-1, HASH), (8, "other")] {
        let schema = json!({"version": version, "hash": hash});
        assert!(pull(&with(pull_body(), "/schema", schema.clone())).is_ok());
        assert!(rebuild(&with(rebuild_body(), "/schema", schema)).is_ok());
    }
}

#[test]
fn requests_show_no_identifiers_or_tokens() {
    let shown = format!("{:?} {:?}", pull(&pull_body()), rebuild(&rebuild_body()));
    for secret in ["ios-device", "templates_public", "u_123", "opaque"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

proptest! {
    /// Untrusted octets never panic, valid or damaged.
    #[test]
    fn damaged_requests_never_panic(at in any::<prop::sample::Index>(), octet in any::<u8>(), remove in any::<bool>()) {
        for endpoint in ENDPOINTS {
            let mut body = octets(&endpoint.body());
            let at = at.index(body.len());
            if remove { body.remove(at); } else { body[at] = octet; }
            let _ = endpoint.read(&body);
        }
    }
}

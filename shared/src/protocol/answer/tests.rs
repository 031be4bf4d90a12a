//! Answers have exactly the members of the ADR, whatever the texts in them.

use serde_json::{Value, json};

use super::*;

const DIGEST: [u8; 32] = [0xab; 32];

fn scope(id: &str) -> ScopeId {
    ScopeId::parse(id).expect("valid")
}

fn parsed(octets: &[u8]) -> Value {
    serde_json::from_slice(octets).expect("JSON")
}

fn hex_checksum() -> Value {
    json!({"algorithm": "sha256", "version": 1, "encoding": "hex", "digest": "ab".repeat(32)})
}

#[test]
fn a_pull_page_has_exactly_its_members() {
    let odd = "s\"\\\n\u{e9}\u{1F600}";
    let change = Change { scope: odd, table: "t\"1", pk: r#"{"id":"e_1"}"#, server_version: "v\"1" };
    let mut page = PullResponse::with_capacity(0);
    page.upsert(&change, r#"{"id":"e_1","v":1.50}"#, &DIGEST);
    page.delete(&change, None);
    page.delete(&change, Some((r#"{"id":"e_1"}"#, &DIGEST)));
    let cursors = BTreeMap::from([(scope(odd), "token".to_owned())]);
    let (added, removed, rebuild) = ([scope("a"), scope("b")], [scope("c")], [scope("a"), scope("b")]);
    let digests = BTreeMap::from([(scope("a"), DIGEST), (scope(odd), DIGEST)]);
    let tail = PullTail {
        scope_set_version: 13,
        scope_cursors: &cursors,
        added: &added,
        removed: &removed,
        rebuild: &rebuild,
        end: PullEnd::Terminal(&digests),
    };
    let octets = page.finish(&tail);
    assert!(String::from_utf8_lossy(&octets).contains(r#""row":{"id":"e_1","v":1.50}"#), "rows are copied as they are");
    let common = json!({"scope": odd, "table": "t\"1", "pk": {"id": "e_1"}, "server_version": "v\"1"});
    let with = |more: Value| {
        let mut change = common.as_object().expect("an object").clone();
        change.extend(more.as_object().expect("an object").clone());
        Value::Object(change)
    };
    let expected = json!({
        "changes": [
            with(json!({"op": "upsert", "row": {"id": "e_1", "v": 1.5}, "row_checksum": hex_checksum()})),
            with(json!({"op": "delete"})),
            with(json!({"op": "delete", "row": {"id": "e_1"}, "row_checksum": hex_checksum()})),
        ],
        "scope_set_version": 13,
        "scope_cursors": {odd: "token"},
        "scope_updates": {"add": [{"id": "a", "cursor": null}, {"id": "b", "cursor": null}], "remove": ["c"]},
        "rebuild": ["a", "b"],
        "has_more": false,
        "checksums": {"a": hex_checksum(), odd: hex_checksum()},
    });
    assert_eq!(parsed(&octets), expected);
}

#[test]
fn checksums_are_absent_when_more_follows() {
    let none = BTreeMap::new();
    let tail = PullTail {
        scope_set_version: 0,
        scope_cursors: &none,
        added: &[],
        removed: &[],
        rebuild: &[],
        end: PullEnd::More,
    };
    let octets = PullResponse::with_capacity(0).finish(&tail);
    let expected = json!({
        "changes": [], "scope_set_version": 0, "scope_cursors": {}, "scope_updates": {"add": [], "remove": []},
        "rebuild": [], "has_more": true,
    });
    assert_eq!(parsed(&octets), expected);
    let terminal = PullTail { end: PullEnd::Terminal(&BTreeMap::new()), ..tail };
    let octets = PullResponse::with_capacity(0).finish(&terminal);
    assert_eq!(parsed(&octets)["checksums"], json!({}));
}

#[test]
fn rebuild_pages_have_exactly_their_members() {
    let mut record = Vec::new();
    RebuildPage::record(&mut record, "templates", r#"{"id":"e_1"}"#, r#"{"id":"e_1","name":"Squat"}"#, &DIGEST, "v1");
    let more = RebuildPage { scope: "s\"", end: RebuildEnd::More { cursor: "next" } };
    let expected_record = json!({
        "table": "templates", "pk": {"id": "e_1"}, "row": {"id": "e_1", "name": "Squat"},
        "row_checksum": hex_checksum(), "server_version": "v1",
    });
    let expected = json!({
        "scope": "s\"", "records": [expected_record, expected_record], "cursor": "next", "has_more": true,
    });
    assert_eq!(parsed(&more.write([record.as_slice(), &record])), expected);
    let end = RebuildEnd::Final { final_scope_cursor: "incremental", digest: &DIGEST };
    let expected = json!({
        "scope": "s", "records": [], "cursor": null, "has_more": false, "final_scope_cursor": "incremental",
        "checksum": hex_checksum(),
    });
    assert_eq!(parsed(&RebuildPage { scope: "s", end }.write([])), expected);
}

#[test]
fn connect_answers_have_exactly_the_members_of_their_action() {
    let definition = RawValue::from_string(r#"{"schema_version":8}"#.to_owned()).expect("JSON");
    let (affected, added) = ([scope("a")], [scope("b")]);
    let updates = BTreeMap::from([(scope("a"), None), (scope("c"), Some("token".to_owned()))]);
    let body = |action| {
        let response = ConnectResponse {
            server_time: "2026-01-01T00:00:00.000000Z",
            client_generation: 1,
            scope_set_version: 2,
            schema_version: 8,
            schema_hash: "00ff",
            action,
            added: &added,
            removed: &affected,
            scope_cursor_updates: &updates,
        };
        parsed(&response.write())
    };
    let expected = |schema: Value, more: Value| {
        let mut members = json!({
            "server_time": "2026-01-01T00:00:00.000000Z", "protocol_version": 3, "client_generation": 1,
            "scope_set_version": 2, "scopes": {"add": [{"id": "b", "cursor": null}], "remove": ["a"]},
            "scope_cursor_updates": {"a": null, "c": "token"}, "schema": schema,
        });
        members.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        members
    };
    let schema = |action: &str| json!({"version": 8, "hash": "00ff", "action": action});
    assert_eq!(body(SchemaAction::None), expected(schema("none"), json!({})));
    let manifest = json!({"schema_definition": {"schema_version": 8}});
    let replace = SchemaAction::Replace { definition: &definition };
    assert_eq!(body(replace), expected(schema("replace"), manifest));
    let rebuild = SchemaAction::RebuildLocal { definition: &definition, affected_scopes: &affected };
    let manifest = json!({"schema_definition": {"schema_version": 8}, "affected_scopes": ["a"]});
    assert_eq!(body(rebuild), expected(schema("rebuild_local"), manifest));
    for (reason, text) in [
        (UnsupportedSchema::UnknownSchemaLineage, "unknown_schema_lineage"),
        (UnsupportedSchema::IncompatibleSchemaTransition, "incompatible_schema_transition"),
    ] {
        let schema = json!({"version": 8, "hash": "00ff", "action": "unsupported", "reason": text});
        assert_eq!(body(SchemaAction::Unsupported(reason)), expected(schema, json!({})));
    }
}

//! The error table, and that the API description knows all of it.

use std::collections::BTreeSet;

use axum::body::to_bytes;

use super::*;

/// Error, status, code, other members, other headers.
type Row = (ApiError, u16, &'static str, Value, &'static [(&'static str, &'static str)]);

/// One row of each error.
fn table() -> Vec<Row> {
    let schema = |version, hash: &str| SchemaReference { version, hash: hash.to_owned() };
    let mismatch = ApiError::SchemaMismatch { current: schema(8, "c"), received: schema(0, "") };
    let schemas = json!({"current_schema": {"version": 8, "hash": "c"}, "received_schema": {"version": 0, "hash": ""}});
    let versions = json!({"required_protocol_version": 3, "received_protocol_version": 4});
    let reference = ApiError::InvalidSchemaReference { received: json!({"version": 8}) };
    vec![
        (ApiError::InvalidRequest, 400, "invalid_request", json!({}), &[]),
        (reference, 400, "invalid_schema_reference", json!({"received_schema": {"version": 8}}), &[]),
        (ApiError::AuthRequired, 401, "auth_required", json!({}), &[("www-authenticate", "Bearer")]),
        (ApiError::NotFound, 404, "not_found", json!({}), &[]),
        (ApiError::MethodNotAllowed, 405, "method_not_allowed", json!({}), &[("allow", "POST")]),
        (
            ApiError::ClientGenerationExpired { current: 5 },
            409,
            "client_generation_expired",
            json!({"current_client_generation": 5}),
            &[],
        ),
        (ApiError::ClientRetired, 409, "client_retired", json!({}), &[]),
        (ApiError::RebuildRestartRequired, 409, "rebuild_restart_required", json!({}), &[]),
        (ApiError::PayloadTooLarge, 413, "payload_too_large", json!({}), &[]),
        (ApiError::UnsupportedMediaType, 415, "unsupported_media_type", json!({}), &[]),
        (mismatch, 422, "schema_mismatch", schemas, &[]),
        (ApiError::UpgradeRequired { received: 4 }, 426, "upgrade_required", versions, &[]),
        (ApiError::RateLimited { retry_after: 1 }, 429, "rate_limited", json!({}), &[("retry-after", "1")]),
        (ApiError::SyncIntegrityFailure, 500, "sync_integrity_failure", json!({}), &[]),
        (
            ApiError::TemporaryUnavailable { retry_after: 2 },
            503,
            "temporary_unavailable",
            json!({}),
            &[("retry-after", "2")],
        ),
        (ApiError::CapturePending { retry_after: 3 }, 503, "capture_pending", json!({}), &[("retry-after", "3")]),
    ]
}

#[tokio::test]
async fn each_error_has_its_status_code_members_and_headers() {
    for (error, status, code, members, headers) in table() {
        let message = error.to_string();
        let response = error.into_response();
        assert_eq!(response.status().as_u16(), status, "{code}");
        let names: BTreeSet<&str> = response.headers().keys().map(axum::http::HeaderName::as_str).collect();
        let expected: BTreeSet<&str> = headers.iter().map(|(name, _)| *name).chain(["content-type"]).collect();
        assert_eq!(names, expected, "{code}");
        assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
        for (name, value) in headers {
            assert_eq!(response.headers()[*name], value, "{code}");
        }
        let octets = to_bytes(response.into_body(), 10_000).await.expect("a body");
        let body: Value = serde_json::from_slice(&octets).expect("JSON");
        let mut error = json!({"code": code, "message": message, "retryable": matches!(status, 429 | 503)});
        error.as_object_mut().expect("an object").extend(members.as_object().expect("an object").clone());
        assert_eq!(body, json!({ "error": error }), "{code}");
    }
}

#[test]
fn refusals_of_a_connect_request_keep_their_codes() {
    let code = |refusal: ConnectRefusal| ApiError::from(refusal).status_and_code().1;
    assert_eq!(code(ConnectRefusal::UnsupportedProtocol { received: 4 }), "upgrade_required");
    assert_eq!(code(InvalidRequest.into()), "invalid_request");
    assert_eq!(code(ConnectRefusal::InvalidSchemaReference { received: json!(1) }), "invalid_schema_reference");
}

/// `openapi.json` names every code under its status, and no other.
#[test]
fn the_api_description_has_exactly_these_errors() {
    let api: Value = serde_json::from_str(include_str!("../../openapi.json")).expect("JSON");
    let mut described = BTreeSet::new();
    for path in ["/sync/connect", "/sync/pull", "/sync/rebuild"] {
        let responses = api["paths"][path]["post"]["responses"].as_object().expect("responses");
        for (status, response) in responses.iter().filter(|(status, _)| *status != "200") {
            let name = response["$ref"].as_str().and_then(|at| at.rsplit('/').next()).expect("a reference");
            let schema = &api["components"]["responses"][name]["content"]["application/json"]["schema"];
            let codes = schema["properties"]["error"]["properties"]["code"]["enum"].as_array().expect("codes");
            described.extend(codes.iter().map(|code| (status.clone(), code.as_str().expect("a text").to_owned())));
        }
    }
    let expected: BTreeSet<(String, String)> =
        table().iter().map(|(_, status, code, ..)| (status.to_string(), (*code).to_owned())).collect();
    assert_eq!(described, expected);
}

//! Every answer that is not a success: one enum, with status, code, and the members that the code carries (ADR 003,
//! "Error rules"; companion contract, section 5).
//!
//! Messages are fixed texts: nothing of the request or of the state is in them.

#[cfg(test)]
mod tests;

use axum::http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tributary_shared::protocol::{ConnectRefusal, InvalidRequest, PROTOCOL_VERSION, SchemaReference};

/// An answer with the body `{"error": {code, message, retryable, …}}`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ApiError {
    /// Malformed, an unknown scope, a future assignment version, or a forged or misbound token.
    #[error("request is invalid")]
    InvalidRequest,
    /// Connect: nothing but the schema reference is wrong.
    #[error("schema reference is invalid")]
    InvalidSchemaReference {
        /// What was sent.
        received: Value,
    },
    /// No valid identity, or the client is another user's.
    #[error("authentication is required")]
    AuthRequired,
    /// Connect: another protocol version.
    #[error("protocol version is not supported")]
    UpgradeRequired {
        /// What was sent.
        received: i64,
    },
    /// The client's generation is not current: connect again.
    #[error("client generation is expired")]
    ClientGenerationExpired {
        /// The generation in force.
        current: u64,
    },
    /// The client is retired for good.
    #[error("client is retired")]
    ClientRetired,
    /// The rebuild session is over: start again from a null cursor.
    #[error("rebuild must be restarted")]
    RebuildRestartRequired,
    /// The request does not name the current manifest: connect again.
    #[error("schema is not current")]
    SchemaMismatch {
        /// The manifest in force.
        current: SchemaReference,
        /// What was sent.
        received: SchemaReference,
    },
    /// More requests than this puller takes.
    #[error("too many requests")]
    RateLimited {
        /// Seconds until a retry.
        retry_after: u32,
    },
    /// The state database cannot be read now.
    #[error("temporarily unavailable")]
    TemporaryUnavailable {
        /// Seconds until a retry.
        retry_after: u32,
    },
    /// The client's accepted writes are not materialized yet.
    #[error("accepted writes are not captured yet")]
    CapturePending {
        /// Seconds until a retry.
        retry_after: u32,
    },
    /// Impossible durable state; readiness goes down.
    #[error("sync state failed its integrity checks")]
    SyncIntegrityFailure,
    /// No such route.
    #[error("not found")]
    NotFound,
    /// Every route of the protocol takes POST.
    #[error("method is not allowed")]
    MethodNotAllowed,
    /// The body is larger than the setting.
    #[error("request body is too large")]
    PayloadTooLarge,
    /// The body is not `application/json`.
    #[error("content type is not supported")]
    UnsupportedMediaType,
}

impl ApiError {
    /// HTTP status and code.
    pub fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::InvalidRequest => (StatusCode::BAD_REQUEST, "invalid_request"),
            Self::InvalidSchemaReference { .. } => (StatusCode::BAD_REQUEST, "invalid_schema_reference"),
            Self::AuthRequired => (StatusCode::UNAUTHORIZED, "auth_required"),
            Self::NotFound => (StatusCode::NOT_FOUND, "not_found"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::ClientGenerationExpired { .. } => (StatusCode::CONFLICT, "client_generation_expired"),
            Self::ClientRetired => (StatusCode::CONFLICT, "client_retired"),
            Self::RebuildRestartRequired => (StatusCode::CONFLICT, "rebuild_restart_required"),
            Self::PayloadTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large"),
            Self::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type"),
            Self::SchemaMismatch { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "schema_mismatch"),
            Self::UpgradeRequired { .. } => (StatusCode::UPGRADE_REQUIRED, "upgrade_required"),
            Self::RateLimited { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limited"),
            Self::SyncIntegrityFailure => (StatusCode::INTERNAL_SERVER_ERROR, "sync_integrity_failure"),
            Self::TemporaryUnavailable { .. } => (StatusCode::SERVICE_UNAVAILABLE, "temporary_unavailable"),
            Self::CapturePending { .. } => (StatusCode::SERVICE_UNAVAILABLE, "capture_pending"),
        }
    }

    /// Seconds after which the same request may succeed; `None` when it is not retryable.
    pub fn retry_after(&self) -> Option<u32> {
        match self {
            Self::RateLimited { retry_after }
            | Self::TemporaryUnavailable { retry_after }
            | Self::CapturePending { retry_after } => Some(*retry_after),
            _ => None,
        }
    }

    fn body(&self) -> Value {
        let mut error = Map::new();
        error.insert("code".to_owned(), self.status_and_code().1.into());
        error.insert("message".to_owned(), self.to_string().into());
        error.insert("retryable".to_owned(), self.retry_after().is_some().into());
        let mut more = |name: &str, value: Value| error.insert(name.to_owned(), value);
        match self {
            Self::InvalidSchemaReference { received } => {
                more("received_schema", received.clone());
            }
            Self::UpgradeRequired { received } => {
                more("required_protocol_version", PROTOCOL_VERSION.into());
                more("received_protocol_version", (*received).into());
            }
            Self::ClientGenerationExpired { current } => {
                more("current_client_generation", (*current).into());
            }
            Self::SchemaMismatch { current, received } => {
                more("current_schema", reference(current));
                more("received_schema", reference(received));
            }
            _ => {}
        }
        json!({ "error": error })
    }
}

fn reference(schema: &SchemaReference) -> Value {
    json!({"version": schema.version, "hash": schema.hash})
}

impl From<InvalidRequest> for ApiError {
    fn from(_: InvalidRequest) -> Self {
        Self::InvalidRequest
    }
}

impl From<ConnectRefusal> for ApiError {
    fn from(refusal: ConnectRefusal) -> Self {
        match refusal {
            ConnectRefusal::UnsupportedProtocol { received } => Self::UpgradeRequired { received },
            ConnectRefusal::Invalid(InvalidRequest) => Self::InvalidRequest,
            ConnectRefusal::InvalidSchemaReference { received } => Self::InvalidSchemaReference { received },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, _) = self.status_and_code();
        let mut response = (status, self.body().to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after() {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        match self {
            Self::AuthRequired => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Self::MethodNotAllowed => {
                headers.insert(ALLOW, HeaderValue::from_static("POST"));
            }
            _ => {}
        }
        response
    }
}

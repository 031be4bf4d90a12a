//! Every route on one page, and what happens before and after a request is worked on.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::sync::Semaphore;

use crate::app::App;
use crate::auth::Identity;
use crate::error::ApiError;
use crate::meters::{self, InFlight};
use crate::permit::Permit;
use crate::{connect, pull, rebuild};

/// The public interface.
pub fn router(app: Arc<App>, limits: Limits) -> Router {
    let server = Server { app, in_flight: Arc::new(Semaphore::new(limits.in_flight)), limits };
    Router::new()
        .route("/sync/connect", post(connect_route))
        .route("/sync/pull", post(pull_route))
        .route("/sync/rebuild", post(rebuild_route))
        .route("/openapi.json", get(openapi).fallback(only_get))
        .fallback(async || ApiError::NotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .with_state(server)
}

/// What is refused before any work.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests that are worked on at once.
    pub in_flight: usize,
    /// Octets of a body.
    pub body_octets: usize,
}

#[derive(Clone)]
struct Server {
    app: Arc<App>,
    in_flight: Arc<Semaphore>,
    limits: Limits,
}

async fn connect_route(State(server): State<Server>, request: Request) -> Response {
    server.answer("connect", request, async |app, user, body, _permit| connect::connect(app, user, body).await).await
}

async fn pull_route(State(server): State<Server>, request: Request) -> Response {
    server.answer("pull", request, async |app, user, body, _permit| pull::pull(app, user, body).await).await
}

async fn rebuild_route(State(server): State<Server>, request: Request) -> Response {
    server
        .answer("rebuild", request, async |app, user, body, permit| rebuild::rebuild(app, user, body, permit).await)
        .await
}

async fn openapi() -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, json)], include_str!("../openapi.json")).into_response()
}

async fn only_get() -> Response {
    let mut response = ApiError::MethodNotAllowed.into_response();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

impl Server {
    async fn answer(
        &self,
        endpoint: &'static str,
        request: Request,
        work: impl AsyncFnOnce(&Arc<App>, &Identity, &[u8], Permit) -> Result<Vec<u8>, ApiError>,
    ) -> Response {
        let started = Instant::now();
        let outcome = self.work(request, work).await;
        let code = match &outcome {
            Ok(_) => "ok",
            Err(error) => error.status_and_code().1,
        };
        metrics::histogram!("tributary_request_duration_seconds", "endpoint" => endpoint)
            .record(started.elapsed().as_secs_f64());
        metrics::counter!("tributary_requests_total", "endpoint" => endpoint, "code" => code).increment(1);
        match outcome {
            Ok(body) => {
                meters::answered(endpoint, body.len());
                let json = HeaderValue::from_static("application/json");
                (StatusCode::OK, [(CONTENT_TYPE, json)], Body::from(body)).into_response()
            }
            Err(error) => error.into_response(),
        }
    }

    async fn work(
        &self,
        request: Request,
        work: impl AsyncFnOnce(&Arc<App>, &Identity, &[u8], Permit) -> Result<Vec<u8>, ApiError>,
    ) -> Result<Vec<u8>, ApiError> {
        let permit = Permit::take(&self.in_flight)?;
        let _in_flight = InFlight::begin();
        let (identity, body) = tokio::select! {
            biased;
            read = self.read(request) => read?,
            // From here on it is the request's own business when it can be given up (see `App::run`).
            () = self.app.give_up.cancelled() => return Err(ApiError::TemporaryUnavailable { retry_after: 1 }),
        };
        work(&self.app, &identity, &body, permit).await
    }

    /// Who sends a request, and its body.
    async fn read(&self, request: Request) -> Result<(Identity, Bytes), ApiError> {
        let now = crate::app::micros(self.app.now()) / 1_000_000;
        let identity = self.app.authenticator.authenticate(request.headers(), now)?;
        if !is_json(request.headers().get(CONTENT_TYPE)) {
            return Err(ApiError::UnsupportedMediaType);
        }
        let declared = request.headers().get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > self.limits.body_octets as u64) {
            return Err(ApiError::PayloadTooLarge);
        }
        let body = to_bytes(request.into_body(), self.limits.body_octets).await.map_err(|error| {
            // The limit is the only error of ours; anything else is a client that went away.
            let inner = std::error::Error::source(&error);
            if inner.is_some_and(|e| e.to_string().contains("length limit")) {
                ApiError::PayloadTooLarge
            } else {
                ApiError::InvalidRequest
            }
        })?;
        Ok((identity, body))
    }
}

/// `application/json`, with no charset but UTF-8.
fn is_json(content_type: Option<&HeaderValue>) -> bool {
    let Some(text) = content_type.and_then(|value| value.to_str().ok()) else { return false };
    let mut parts = text.split(';').map(str::trim);
    let json = parts.next().is_some_and(|media| media.eq_ignore_ascii_case("application/json"));
    json && parts.all(|parameter| {
        parameter.split_once('=').is_none_or(|(name, value)| {
            !name.trim().eq_ignore_ascii_case("charset") || value.trim().trim_matches('"').eq_ignore_ascii_case("utf-8")
        })
    })
}

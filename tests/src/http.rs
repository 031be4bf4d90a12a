//! One POST at a time to a puller, with the hooks that tests need: raw bodies, foreign headers, lost answers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Octets past which an answer is refused.
const MAX_BODY: u64 = 1 << 30;

/// No answer reached the client.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection failed or ended early.
    #[error("no answer: {0}")]
    Transport(String),
    /// The test asked for this answer to be lost.
    #[error("the answer was lost on purpose")]
    Lost,
}

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The HTTP status.
    pub status: u16,
    /// `Content-Type`
    pub content_type: Option<String>,
    /// `Retry-After`
    pub retry_after: Option<String>,
    /// The octets of the body.
    pub body: Vec<u8>,
}

/// A connection to one puller, with a bearer token or none.
#[derive(Debug)]
pub struct Http {
    base: String,
    authorization: Option<String>,
    agent: ureq::Agent,
    /// Answers until one is lost, counted down; 0: none is.
    lose: AtomicUsize,
}

impl Http {
    /// A connection to the puller at `base`.
    pub fn new(base: &str, token: Option<&str>) -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(5)))
            .timeout_global(Some(Duration::from_secs(120)))
            .build();
        Self {
            base: base.trim_end_matches('/').to_owned(),
            authorization: token.map(|token| format!("Bearer {token}")),
            agent: config.into(),
            lose: AtomicUsize::new(0),
        }
    }

    /// Talk to another puller from now on, as a load balancer may have it.
    pub fn redirect(&mut self, base: &str) {
        base.trim_end_matches('/').clone_into(&mut self.base);
    }

    /// Let the next answer be lost: the server handles the request, the client never learns.
    pub fn lose_next_answer(&self) {
        self.lose_answer(1);
    }

    /// Let the answer of this number from now on, from 1, be lost.
    pub fn lose_answer(&self, number: usize) {
        self.lose.store(number, Ordering::Relaxed);
    }

    /// Whether an answer is still to be lost.
    pub fn will_lose(&self) -> bool {
        self.lose.load(Ordering::Relaxed) > 0
    }

    /// POST a body.
    ///
    /// # Errors
    /// No whole answer came.
    pub fn post(&self, path: &str, body: &[u8]) -> Result<Response, HttpError> {
        self.post_with(path, body, &[("Content-Type", "application/json")])
    }

    /// POST a body under exactly these headers, beside `Authorization`.
    ///
    /// # Errors
    /// No whole answer came.
    pub fn post_with(&self, path: &str, body: &[u8], headers: &[(&str, &str)]) -> Result<Response, HttpError> {
        let mut request = self.agent.post(format!("{}{path}", self.base));
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send(body).map_err(|error| HttpError::Transport(error.to_string()))?;
        let response = receive(answer)?;
        let before = self.lose.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if before == Ok(1) { Err(HttpError::Lost) } else { Ok(response) }
    }
}

/// GET an address, as a probe does.
///
/// # Errors
/// No whole answer came within five seconds.
pub fn get(url: &str) -> Result<Response, HttpError> {
    let config =
        ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(5))).build();
    let agent: ureq::Agent = config.into();
    receive(agent.get(url).call().map_err(|error| HttpError::Transport(error.to_string()))?)
}

fn receive(mut answer: ureq::http::Response<ureq::Body>) -> Result<Response, HttpError> {
    let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (content_type, retry_after) = (header("content-type"), header("retry-after"));
    let status = answer.status().as_u16();
    let body = answer.body_mut().with_config().limit(MAX_BODY).read_to_vec();
    let body = body.map_err(|error| HttpError::Transport(error.to_string()))?;
    Ok(Response { status, content_type, retry_after, body })
}

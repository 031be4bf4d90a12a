//! HTTP by hand, for requests that a client library would not send.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::Context as _;

/// What came back, headers in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// `error.code` of the body.
    pub fn code(&self) -> String {
        let body = tributary_tests::json::Json::parse(self.body.as_bytes()).unwrap();
        body.get("error").and_then(|error| error.get("code")?.as_text()).unwrap().to_owned()
    }
}

/// An open connection on which a request was written.
pub struct Pending(TcpStream);

/// Writes a request to the server at `base` and does not wait for the answer.
pub fn begin(base: &str, octets: &[u8]) -> anyhow::Result<Pending> {
    let mut stream = TcpStream::connect(base.trim_start_matches("http://"))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    // A server that has refused the request may not read all of it.
    let _ = stream.write_all(octets);
    Ok(Pending(stream))
}

impl Pending {
    /// The answer, to the end of the connection.
    pub fn finish(mut self) -> anyhow::Result<Answer> {
        let mut octets = Vec::new();
        let mut buffer = [0; 4096];
        // What was refused unread may reset the connection behind the answer.
        while let Ok(count @ 1..) = self.0.read(&mut buffer) {
            octets.extend_from_slice(&buffer[..count]);
        }
        let text = String::from_utf8(octets)?;
        let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status")?.parse()?;
        let headers = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
            .collect();
        Ok(Answer { status, headers, body: body.to_owned() })
    }
}

/// A request's head and body; `Connection: close`, and a length unless the headers say how the body ends.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut out = format!("{method} {path} HTTP/1.1\r\nHost: puller\r\nConnection: close\r\n");
    for (name, value) in headers {
        let _ = write!(out, "{name}: {value}\r\n");
    }
    let framed =
        headers.iter().any(|(name, _)| ["content-length", "transfer-encoding"].contains(&&*name.to_lowercase()));
    if !framed {
        let _ = write!(out, "Content-Length: {}\r\n", body.len());
    }
    out.push_str("\r\n");
    let mut out = out.into_bytes();
    out.extend_from_slice(body);
    out
}

/// One request, one answer.
pub fn exchange(base: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> anyhow::Result<Answer> {
    begin(base, &request(method, path, headers, body))?.finish()
}

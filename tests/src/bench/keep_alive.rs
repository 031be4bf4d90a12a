//! A connection that stays open and costs next to nothing: the client must not be what is measured.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, bail};

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// One connection.
pub(super) struct KeepAlive {
    stream: BufReader<TcpStream>,
    /// Request line and headers but for the length, by path.
    head: String,
    request: Vec<u8>,
    line: String,
    body: Vec<u8>,
}

impl KeepAlive {
    pub fn open(address: &str, token: &str) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::with_capacity(1 << 18, stream),
            head: format!(
                "HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            ),
            request: Vec::new(),
            line: String::new(),
            body: Vec::new(),
        })
    }

    /// POST, and the body of a 200 answer.
    pub fn post(&mut self, path: &str, body: &[u8]) -> anyhow::Result<&[u8]> {
        self.request.clear();
        write!(self.request, "POST {path} {}Content-Length: {}\r\n\r\n", self.head, body.len())?;
        self.request.extend_from_slice(body);
        self.stream.get_mut().write_all(&self.request)?;
        self.answer()
    }

    fn answer(&mut self) -> anyhow::Result<&[u8]> {
        let status = self.next_line()?.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
        let status = status.context("the answer is not HTTP")?;
        let mut length = None;
        loop {
            let line = self.next_line()?;
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse::<usize>().ok();
            }
        }
        self.body.resize(length.context("the answer has no Content-Length")?, 0);
        self.stream.read_exact(&mut self.body)?;
        if status != 200 {
            bail!("status {status}: {}", String::from_utf8_lossy(&self.body));
        }
        Ok(&self.body)
    }

    fn next_line(&mut self) -> anyhow::Result<&str> {
        self.line.clear();
        if self.stream.read_line(&mut self.line)? == 0 {
            bail!("the connection was closed");
        }
        Ok(self.line.trim_end())
    }
}

//! The health command of both programs: asks the admin port of this machine, so that an image needs no shell for it.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Limit of the whole question.
const LIMIT: Duration = Duration::from_secs(2);
/// An answer is one line and a few headers.
const ANSWER_OCTETS: u64 = 16 * 1024;

/// Asks `/readyz`, or `/livez`, of the process whose admin port is bound to `admin_listen`, and prints its line. Success
/// means 200.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the answer is for whoever asks")]
pub fn report(admin_listen: SocketAddr, live: bool) -> ExitCode {
    match ask(admin_listen, if live { "/livez" } else { "/readyz" }) {
        Ok((status, line)) => {
            println!("{line}");
            if status == 200 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("error: {}: {error}", reachable(admin_listen));
            ExitCode::FAILURE
        }
    }
}

/// A port that is bound to every address is reached by loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn ask(admin_listen: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    let until = Instant::now() + LIMIT;
    let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&reachable(admin_listen), left())?;
    stream.set_write_timeout(Some(left()))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes())?;
    stream.set_read_timeout(Some(left()))?;
    let mut answer = String::new();
    stream.take(ANSWER_OCTETS).read_to_string(&mut answer)?;
    let malformed = || std::io::Error::new(std::io::ErrorKind::InvalidData, "the answer is not HTTP");
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(malformed)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(malformed)?;
    Ok((status, body.trim_end().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_reached_by_loopback() {
        let loopback = |text: &str| reachable(text.parse().expect("an address")).to_string();
        assert_eq!(loopback("0.0.0.0:9464"), "127.0.0.1:9464");
        assert_eq!(loopback("[::]:9464"), "[::1]:9464");
        assert_eq!(loopback("10.1.2.3:9464"), "10.1.2.3:9464");
    }
}

//! A TCP proxy that can freeze: nothing passes and nothing is closed, as when a firewall forgets a connection.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Time between two looks at whether it is frozen or over.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
struct Shared {
    /// Connections up to this number, from 1 on, pass nothing.
    frozen: AtomicUsize,
    accepted: AtomicUsize,
    over: AtomicBool,
}

/// A running proxy. Dropping it ends every connection.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Passes connections on to a port of this machine.
    ///
    /// # Errors
    /// No port can be opened.
    pub fn start(to: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared::default());
        let accepting = shared.clone();
        thread::spawn(move || accept(&listener, to, &accepting));
        Ok(Self { port, shared })
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// From now on nothing passes on the connections that there are; new ones are served.
    pub fn freeze(&self) {
        self.shared.frozen.store(self.accepted(), Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
    }
}

fn accept(listener: &TcpListener, to: u16, shared: &Arc<Shared>) {
    while !shared.over.load(Ordering::Relaxed) {
        let Ok((client, _)) = listener.accept() else {
            thread::sleep(LOOK);
            continue;
        };
        let number = shared.accepted.fetch_add(1, Ordering::Relaxed) + 1;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, to));
        // A server that is not there: the client sees its connection end.
        let Ok(server) = TcpStream::connect(address) else { continue };
        let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone()) else { continue };
        for (from, to) in [(client, server), (server_too, client_too)] {
            let shared = shared.clone();
            thread::spawn(move || pass(from, to, number, &shared));
        }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, number: usize, shared: &Shared) {
    let mut buffer = vec![0; 64 * 1024];
    let _ = from.set_nonblocking(false);
    let _ = from.set_read_timeout(Some(LOOK));
    while !shared.over.load(Ordering::Relaxed) {
        if number <= shared.frozen.load(Ordering::Relaxed) {
            thread::sleep(LOOK);
            continue;
        }
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                // Read before it was frozen, and not passed on after.
                while number <= shared.frozen.load(Ordering::Relaxed) && !shared.over.load(Ordering::Relaxed) {
                    thread::sleep(LOOK);
                }
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

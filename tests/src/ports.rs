//! TCP ports of a sandbox: a row of them from a base, or free ones.

use std::net::{Ipv4Addr, TcpListener};

use rand::Rng as _;

/// Below this and above 1024 no outgoing connection takes a port by itself on Linux.
const EPHEMERAL_START: u16 = 32768;

/// A port that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// Somebody listens there.
    #[error("port {0} is taken: choose another --port-base, or 0 for free ports")]
    Taken(u16),
    /// The base leaves no room.
    #[error("--port-base {0} leaves no room for {1} ports")]
    NoRoom(u16, usize),
    /// All tries failed.
    #[error("no free port found")]
    NoneFree,
}

/// `count` ports on the loopback address that nobody listens on: from `base` upwards, or any for base 0.
///
/// # Errors
/// A port of the row is taken, or none is free.
pub fn choose(base: u16, count: usize) -> Result<Vec<u16>, PortError> {
    if base == 0 {
        return free(count);
    }
    let last = usize::from(base) + count - 1;
    let last = u16::try_from(last).map_err(|_| PortError::NoRoom(base, count))?;
    (base..=last).map(|port| if listen(port).is_some() { Ok(port) } else { Err(PortError::Taken(port)) }).collect()
}

fn free(count: usize) -> Result<Vec<u16>, PortError> {
    // Ports that the kernel hands out (port 0) are also handed to outgoing connections before our children listen.
    let mut held = Vec::new();
    let mut random = rand::rng();
    for _ in 0..count * 1000 {
        if held.len() == count {
            break;
        }
        held.extend(listen(random.random_range(10_000..EPHEMERAL_START)));
    }
    let ports: Vec<_> = held.iter().filter_map(|listener| listener.local_addr().ok()).map(|addr| addr.port()).collect();
    if ports.len() == count { Ok(ports) } else { Err(PortError::NoneFree) }
}

fn listen(port: u16) -> Option<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_differ_and_a_taken_one_is_named() {
        let ports = choose(0, 20).unwrap();
        assert_eq!(ports.iter().collect::<std::collections::BTreeSet<_>>().len(), 20);
        let _listener = listen(ports[1]).unwrap();
        assert!(matches!(choose(ports[1], 1), Err(PortError::Taken(port)) if port == ports[1]));
        assert!(matches!(choose(65535, 2), Err(PortError::NoRoom(65535, 2))));
    }
}

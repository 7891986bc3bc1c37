//! [`AdmissionPolicy`]: decides which connections the rendezvous store (launch's server for torch's
//! `TCPStore` clients) accepts.
//!
//! torch's protocol has no authentication. A client on this machine is admitted if its socket
//! belongs to this user or to root. A client on another machine cannot prove its user, so it is
//! admitted by the address of a host of the job.
use super::socket_owner::{SocketDiagnostics, SocketOwner};
use nix::ifaddrs::getifaddrs;
use std::{
    collections::HashSet,
    fmt, io,
    net::{IpAddr, SocketAddr},
};

/// The reason why the rendezvous store accepts a connection: the client runs as this user, or comes
/// from a host of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionAcceptReason {
    /// The client is on this machine, and its socket belongs to this user or to root.
    User,
    /// The client has the address of a host of the job.
    Address,
}

impl fmt::Display for ConnectionAcceptReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ConnectionAcceptReason::User => "user",
            ConnectionAcceptReason::Address => "address",
        })
    }
}

/// The reason why the rendezvous store rejects a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AdmissionError {
    #[error("its process belongs to another user (uid {uid})")]
    OtherUser { uid: u32 },
    #[error("it is not a host of this job")]
    UnknownAddress,
    #[error("it closed the connection before its user was known")]
    Closed,
}

/// Decides from a client's user or IP address whether the rendezvous store (launch's server for
/// torch's `TCPStore`) accepts its connection.
pub(super) struct AdmissionPolicy {
    /// The addresses of the hosts of the job.
    allowed: HashSet<IpAddr>,
    uid: u32,
    /// Finds the users of clients on this machine; `None` if the kernel or the container does not
    /// support sock_diag.
    diagnostics: Option<SocketDiagnostics>,
}

impl AdmissionPolicy {
    /// Creates a policy that admits clients of this user on this machine, and clients at the
    /// `allowed` addresses.
    pub(super) fn new(allowed: HashSet<IpAddr>) -> Self {
        let diagnostics = SocketDiagnostics::open().ok();
        AdmissionPolicy { allowed, uid: nix::unistd::geteuid().as_raw(), diagnostics }
    }

    /// Returns whether this machine's kernel supports sock_diag requests, which find the user who
    /// owns a connection from a process of this machine.
    pub(super) fn identifies_local_users(&self) -> bool {
        self.diagnostics.is_some()
    }

    /// Decides whether the rendezvous store accepts the connection from the client's address `peer`
    /// to the address `local` of this machine.
    pub(super) fn admit(
        &mut self,
        peer: SocketAddr,
        local: SocketAddr,
    ) -> Result<ConnectionAcceptReason, AdmissionError> {
        let owner = match &mut self.diagnostics {
            Some(diagnostics) => diagnostics.find_owner(peer, local),
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        let owner = match owner {
            Ok(owner) => owner,
            Err(_) => {
                // Later clients are then admitted by address, too, and the caller warns once.
                self.diagnostics = None;
                return self.admit_by_address(peer.ip(), true);
            }
        };
        match owner {
            Some(SocketOwner { inode: 0, .. }) => Err(AdmissionError::Closed),
            Some(SocketOwner { uid, .. }) if uid == self.uid || uid == 0 => Ok(ConnectionAcceptReason::User),
            Some(SocketOwner { uid, .. }) => Err(AdmissionError::OtherUser { uid }),
            // A client of this machine without a socket has sent data and closed it.
            None if is_address_of_this_machine(peer.ip()) => Err(AdmissionError::Closed),
            None => self.admit_by_address(peer.ip(), false),
        }
    }

    /// Decides by a client's IP address alone whether the rendezvous store accepts its connection.
    /// `is_loopback_allowed` admits every client that uses the loopback address.
    fn admit_by_address(
        &self,
        ip: IpAddr,
        is_loopback_allowed: bool,
    ) -> Result<ConnectionAcceptReason, AdmissionError> {
        let ip = ip.to_canonical();
        match self.allowed.contains(&ip) || (is_loopback_allowed && ip.is_loopback()) {
            true => Ok(ConnectionAcceptReason::Address),
            false => Err(AdmissionError::UnknownAddress),
        }
    }
}

/// Returns whether an IP address belongs to this machine. Returns true if that is unknown.
fn is_address_of_this_machine(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    let Ok(interfaces) = getifaddrs() else { return true };
    let addresses = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    ip.is_loopback() || addresses.into_iter().any(|address| address.to_canonical() == ip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    #[test]
    fn local_clients_are_admitted_by_user_and_others_by_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let _client = TcpStream::connect(local).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        let remote = IpAddr::from([192, 0, 2, 7]);
        let mut admission = AdmissionPolicy::new(HashSet::from([remote, Ipv4Addr::LOCALHOST.into()]));
        assert!(admission.identifies_local_users());
        assert_eq!(admission.admit(peer, local), Ok(ConnectionAcceptReason::User));
        assert_eq!(admission.admit((remote, 1).into(), local), Ok(ConnectionAcceptReason::Address));
        let unknown = (IpAddr::from([192, 0, 2, 8]), 1).into();
        assert_eq!(admission.admit(unknown, local), Err(AdmissionError::UnknownAddress));
        // The address is allowed, but no process has this socket.
        let absent = (Ipv4Addr::LOCALHOST, 1).into();
        assert_eq!(admission.admit(absent, local), Err(AdmissionError::Closed));
        admission.uid = 4_000_000_000;
        let uid = nix::unistd::geteuid().as_raw();
        let expected =
            if uid == 0 { Ok(ConnectionAcceptReason::User) } else { Err(AdmissionError::OtherUser { uid }) };
        assert_eq!(admission.admit(peer, local), expected);
    }

    #[test]
    fn without_sock_diag_clients_are_admitted_by_address() {
        let mut admission = AdmissionPolicy::new(HashSet::from([IpAddr::from([192, 0, 2, 7])]));
        admission.diagnostics = None;
        assert!(!admission.identifies_local_users());
        let local = (Ipv4Addr::LOCALHOST, 5).into();
        for (ip, expected) in [
            ("127.0.0.1", Ok(ConnectionAcceptReason::Address)),
            ("::1", Ok(ConnectionAcceptReason::Address)),
            ("192.0.2.7", Ok(ConnectionAcceptReason::Address)),
            ("::ffff:192.0.2.7", Ok(ConnectionAcceptReason::Address)),
            ("192.0.2.8", Err(AdmissionError::UnknownAddress)),
            ("2001:db8::8", Err(AdmissionError::UnknownAddress)),
        ] {
            let peer = (ip.parse::<IpAddr>().unwrap(), 1).into();
            assert_eq!(admission.admit(peer, local), expected, "{ip}");
        }
    }
}

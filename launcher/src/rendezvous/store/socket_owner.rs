//! [`SocketDiagnostics`]: asks the kernel (sock_diag) which user owns the other end of a TCP
//! connection, if that end is on this machine.
use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
        sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

/// The netlink message type of a request to sock_diag and of its answer (`SOCK_DIAG_BY_FAMILY`).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// The netlink message type of an answer that reports an error (`NLMSG_ERROR`).
const NLMSG_ERROR: u16 = 2;
/// The netlink flag that every request has (`NLM_F_REQUEST`).
const NLM_F_REQUEST: u16 = 1;
/// The size of the header of a netlink message, in bytes. The header has length, type, flags,
/// sequence number and port.
const NETLINK_HEADER_BYTES: usize = 16;
/// The size of a sock_diag request (`struct inet_diag_req_v2`) without the netlink header, in
/// bytes.
const REQUEST_BYTES: usize = 56;
/// The size of a sock_diag answer (`struct inet_diag_msg`) without the netlink header, in bytes.
const ANSWER_BYTES: usize = 72;
/// The byte offset of the user ID in the kernel's sock_diag answer about the owner of a socket. The
/// inode follows.
const UID_OFFSET: usize = 64;
/// The size in bytes of the buffer for the kernel's answer to a sock_diag request.
const MAX_ANSWER_BYTES: usize = 8 << 10;
/// How long this process waits for the kernel's answer to a sock_diag request, in seconds. The
/// kernel normally answers at once.
const ANSWER_TIMEOUT_S: i64 = 1;

/// The user who owns a socket on this machine, and the socket's inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SocketOwner {
    /// The user id. Meaningless if `inode` is 0.
    pub(crate) uid: u32,
    /// The inode of the socket. 0 if no process has the socket open any more.
    pub(crate) inode: u32,
}

/// The kernel's answer to the question which user owns a socket: the owner, or that there is no
/// such socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketAnswer {
    /// The owner of the socket, which is on this machine.
    Owner(SocketOwner),
    /// The kernel reports this error number. ENOENT: no such socket is on this machine.
    Error(i32),
}

/// The reason why the kernel's answer to a sock_diag request cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SocketAnswerError {
    #[error("the answer is shorter than its header states")]
    Truncated,
    #[error("the answer has the unknown type {0}")]
    UnknownType(u16),
    #[error("the answer belongs to another request")]
    WrongSequence,
}

/// A netlink socket through which this process asks the kernel for the owners of TCP sockets.
#[derive(Debug)]
pub(crate) struct SocketDiagnostics {
    socket: OwnedFd,
    sequence: u32,
}

impl SocketDiagnostics {
    /// Opens a netlink socket for sock_diag requests to the kernel. Fails if the kernel or the
    /// container does not support sock_diag.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket =
            socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkSockDiag)?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::new(ANSWER_TIMEOUT_S, 0))?;
        Ok(SocketDiagnostics { socket, sequence: 0 })
    }

    /// Asks the kernel which user owns the TCP socket of this machine with the address `peer`,
    /// whose other end has the address `local`. Returns `None` if no such socket is on this
    /// machine.
    pub(crate) fn find_owner(
        &mut self,
        peer: SocketAddr,
        local: SocketAddr,
    ) -> io::Result<Option<SocketOwner>> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = encode_request(self.sequence, peer, local);
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut buffer = [0; MAX_ANSWER_BYTES];
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            return match parse_answer(&buffer[..length], self.sequence) {
                Ok(SocketAnswer::Owner(owner)) => Ok(Some(owner)),
                Ok(SocketAnswer::Error(libc::ENOENT)) => Ok(None),
                Ok(SocketAnswer::Error(number)) => Err(io::Error::from_raw_os_error(number)),
                // The answer to a request that timed out.
                Err(SocketAnswerError::WrongSequence) => continue,
                Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            };
        }
    }
}

/// Encodes a sock_diag request to the kernel about the TCP socket with the address `peer`, whose
/// other end has the address `local`.
fn encode_request(sequence: u32, peer: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let mut request = Vec::with_capacity(NETLINK_HEADER_BYTES + REQUEST_BYTES);
    request.extend(((NETLINK_HEADER_BYTES + REQUEST_BYTES) as u32).to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.extend(sequence.to_ne_bytes());
    request.extend(0u32.to_ne_bytes());
    let family = if peer.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    request.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    // Sockets in every state.
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(peer.port().to_be_bytes());
    request.extend(local.port().to_be_bytes());
    request.extend(encode_address(peer.ip()));
    request.extend(encode_address(local.ip()));
    // Any interface, and no cookie (`INET_DIAG_NOCOOKIE`).
    request.extend(0u32.to_ne_bytes());
    request.extend([0xff; 8]);
    request
}

/// Encodes an IP address as the 16 bytes of the address field of a sock_diag request.
fn encode_address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V6(v6) => v6.octets(),
        IpAddr::V4(v4) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&v4.octets());
            bytes
        }
    }
}

/// Parses the kernel's answer to a sock_diag request, and checks that the answer has the request's
/// sequence number.
pub(crate) fn parse_answer(bytes: &[u8], sequence: u32) -> Result<SocketAnswer, SocketAnswerError> {
    let word = |at: usize| {
        let word = bytes.get(at..at + 4).and_then(|word| word.first_chunk::<4>());
        word.map(|word| u32::from_ne_bytes(*word)).ok_or(SocketAnswerError::Truncated)
    };
    let length = word(0)? as usize;
    if length < NETLINK_HEADER_BYTES || length > bytes.len() {
        return Err(SocketAnswerError::Truncated);
    }
    let kind = bytes.get(4..6).and_then(|kind| kind.first_chunk::<2>());
    let kind = u16::from_ne_bytes(*kind.ok_or(SocketAnswerError::Truncated)?);
    if word(8)? != sequence {
        return Err(SocketAnswerError::WrongSequence);
    }
    match kind {
        NLMSG_ERROR if length >= NETLINK_HEADER_BYTES + 4 => {
            Ok(SocketAnswer::Error((word(NETLINK_HEADER_BYTES)? as i32).wrapping_neg()))
        }
        SOCK_DIAG_BY_FAMILY if length >= NETLINK_HEADER_BYTES + ANSWER_BYTES => {
            let uid = word(NETLINK_HEADER_BYTES + UID_OFFSET)?;
            let inode = word(NETLINK_HEADER_BYTES + UID_OFFSET + 4)?;
            Ok(SocketAnswer::Owner(SocketOwner { uid, inode }))
        }
        NLMSG_ERROR | SOCK_DIAG_BY_FAMILY => Err(SocketAnswerError::Truncated),
        other => Err(SocketAnswerError::UnknownType(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Shutdown, TcpListener, TcpStream};

    #[test]
    fn the_owner_of_a_local_socket_is_this_user() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, peer) = listener.accept().unwrap();
            let local = accepted.local_addr().unwrap();
            let mut diagnostics = SocketDiagnostics::open().unwrap();
            let owner = diagnostics.find_owner(peer, local).unwrap().expect("a local socket");
            assert_eq!(owner.uid, nix::unistd::geteuid().as_raw());
            assert_ne!(owner.inode, 0);
            client.shutdown(Shutdown::Both).unwrap();
            drop(client);
            // A socket that no process has open has no owner.
            let closed = diagnostics.find_owner(peer, local).unwrap();
            assert_eq!(closed.map_or(0, |owner| owner.inode), 0);
            let mut other = peer;
            other.set_port(1);
            assert_eq!(diagnostics.find_owner(other, local).unwrap(), None);
        }
    }

    #[test]
    fn malformed_answers_are_errors() {
        let answer = |kind: u16, sequence: u32, body: &[u8]| {
            let length = (NETLINK_HEADER_BYTES + body.len()) as u32;
            let header = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0, 0], &sequence.to_ne_bytes()];
            [&header.concat()[..], &[0; 4], body].concat()
        };
        let mut body = [0; ANSWER_BYTES];
        body[UID_OFFSET] = 7;
        body[UID_OFFSET + 4] = 9;
        let good = answer(SOCK_DIAG_BY_FAMILY, 3, &body);
        let owner =
            SocketOwner { uid: u32::from_ne_bytes([7, 0, 0, 0]), inode: u32::from_ne_bytes([9, 0, 0, 0]) };
        assert_eq!(parse_answer(&good, 3), Ok(SocketAnswer::Owner(owner)));
        assert_eq!(parse_answer(&good, 4), Err(SocketAnswerError::WrongSequence));
        for length in 0..good.len() {
            assert_eq!(parse_answer(&good[..length], 3), Err(SocketAnswerError::Truncated), "{length}");
        }
        let missing = answer(NLMSG_ERROR, 3, &(-libc::ENOENT).to_ne_bytes());
        assert_eq!(parse_answer(&missing, 3), Ok(SocketAnswer::Error(libc::ENOENT)));
        let extreme = answer(NLMSG_ERROR, 3, &i32::MIN.to_ne_bytes());
        assert_eq!(parse_answer(&extreme, 3), Ok(SocketAnswer::Error(i32::MIN)));
        assert_eq!(parse_answer(&answer(NLMSG_ERROR, 3, b""), 3), Err(SocketAnswerError::Truncated));
        assert_eq!(parse_answer(&answer(5, 3, b""), 3), Err(SocketAnswerError::UnknownType(5)));
    }
}

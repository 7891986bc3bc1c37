//! [`ConnectionSetup`]: connects a rank to its peers on other hosts.
//!
//! Each rank listens, the higher rank of a pair connects, and both authenticate each other.
use super::{
    handshake::{
        self as hs, CHALLENGE_BYTES, ChallengeAnswer, ConnectionKind, HELLO_BYTES, HandshakeSide, Hello,
        RankIdentity, SECRET_BYTES,
    },
    peer_monitor::{GroupHealth, to_poll_timeout},
    topology::Topology,
};
use crate::{CommError, ConnectFailure, ConnectFailureReason, RejectReason, Result};
use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::socket::{setsockopt, sockopt::TcpUserTimeout},
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io::{ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::{Duration, Instant},
};

/// Maximum number of new connections that a joining rank accepts at once, before it again processes
/// the handshakes of the connections accepted so far.
const MAX_ACCEPTED_AT_ONCE: usize = 256;
/// The largest number of unauthenticated connections from addresses that belong to no known peer. A
/// peer may connect from a different address than that on which it listens.
const MAX_PENDING_FROM_UNKNOWN: usize = 32;
/// Number of unauthenticated connections that a known peer address may have in addition to those
/// that the ranks at this address need.
const SPARE_PENDING_PER_ADDRESS: usize = 8;
/// The time limit of one handshake, from the new connection to the last message (WELCOME).
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit of one attempt to open a TCP connection.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(900);
/// The delay after a failed attempt to connect to a rank, before the next attempt.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// The longest time for which a rank waits before it checks again whether the group was aborted.
const ABORT_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Authenticated connections to peers, each with the peer's rank and the purpose of the connection.
pub(super) type AuthenticatedStreams = Vec<(u32, ConnectionKind, TcpStream)>;

/// Everything that a rank needs to connect to its peers on other hosts: its key, the peers'
/// addresses, timeouts, and whether the group was aborted.
pub(super) struct ConnectionSetup<'a> {
    pub(super) id: &'a RankIdentity,
    pub(super) topology: &'a Topology,
    /// By rank: the addresses on which the rank listens, in the order in which they are tried.
    pub(super) addresses: &'a [Vec<SocketAddr>],
    pub(super) health: &'a GroupHealth,
    /// The time limit for connecting to all peers.
    pub(super) timeout: Duration,
    /// How long sent bytes may stay unacknowledged (`TCP_USER_TIMEOUT`).
    pub(super) silence_timeout: Duration,
}

impl ConnectionSetup<'_> {
    /// Opens two connections to every rank on another host: one for the data of collectives, and
    /// one for control messages. Connects to lower ranks and accepts the connections of higher
    /// ranks at the same time. The returned streams are non-blocking.
    pub(super) fn connect_to_all_peers(&self, listener: &TcpListener) -> Result<AuthenticatedStreams> {
        let deadline = Instant::now() + self.timeout;
        let stop = AtomicBool::new(false);
        let (accepted, connected) = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| self.accept_higher_ranks(listener, deadline, &stop));
            let connected = self.connect_lower_ranks(deadline);
            stop.store(connected.is_err(), SeqCst);
            let panicked = |_| Err(CommError::ThreadEnded { message: None });
            (accepting.join().unwrap_or_else(panicked), connected)
        });
        let mut streams = connected?;
        streams.extend(accepted?);
        for (_, _, stream) in &streams {
            self.set_stream_options(stream)
                .map_err(CommError::wrap_io_error("set the options of a connection"))?;
        }
        Ok(streams)
    }

    /// Prepares an authenticated stream: makes it non-blocking, disables Nagle's algorithm, and
    /// sets `TCP_USER_TIMEOUT`.
    fn set_stream_options(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        set_tcp_user_timeout(stream, self.silence_timeout)
    }

    /// Builds the error of a rank that waited in vain for the ranks in `missing` to join the group.
    /// `missing` may list a rank twice, once per connection.
    fn build_join_timeout_error(
        &self,
        mut missing: Vec<usize>,
        last_failure: Option<ConnectFailure>,
    ) -> CommError {
        missing.sort_unstable();
        missing.dedup();
        CommError::JoinTimeout {
            rank: self.topology.rank,
            world: self.topology.world_size(),
            timeout: self.timeout,
            missing,
            last_failure: last_failure.map(Box::new),
        }
    }

    // ---- connecting to the lower ranks ----

    /// Opens two connections to every lower-numbered rank on other hosts: one for the data of
    /// collectives, and one for control messages. Retries failed attempts until `deadline`. Fails
    /// if a peer rejects this rank or the group is aborted.
    fn connect_lower_ranks(&self, deadline: Instant) -> Result<AuthenticatedStreams> {
        let lower = self.topology.remote_ranks().filter(|r| *r < self.topology.rank);
        let mut remaining: VecDeque<(usize, ConnectionKind)> =
            lower.flat_map(|r| ConnectionKind::ALL.map(|kind| (r, kind))).collect();
        let mut streams = Vec::new();
        let mut last_failure = None;
        while let Some((peer, kind)) = remaining.pop_front() {
            if let Some(reason) = self.health.abort_reason() {
                return Err(CommError::Aborted(reason));
            }
            if Instant::now() >= deadline {
                remaining.push_back((peer, kind));
                let missing = remaining.iter().map(|(r, _)| *r).collect();
                return Err(self.build_join_timeout_error(missing, last_failure));
            }
            match self.connect_to_rank(peer, kind) {
                Ok(stream) => streams.push((peer as u32, kind, stream)),
                Err((_, ConnectAttemptError::Rejected(reason))) => {
                    return Err(CommError::Rejected { rank: self.topology.rank, peer, reason });
                }
                Err((address, ConnectAttemptError::Failed(error))) => {
                    last_failure = Some(ConnectFailure { peer, address, error });
                    remaining.push_back((peer, kind));
                    std::thread::sleep(RETRY_DELAY);
                }
            }
        }
        Ok(streams)
    }

    /// Tries each address of a rank once, in order, until an address connects. Fails with the error
    /// of the last address that was tried.
    fn connect_to_rank(
        &self,
        rank: usize,
        kind: ConnectionKind,
    ) -> std::result::Result<TcpStream, (Option<SocketAddr>, ConnectAttemptError)> {
        let mut last = (None, ConnectAttemptError::Failed(ConnectFailureReason::NoAddress));
        for address in &self.addresses[rank] {
            let stream =
                TcpStream::connect_timeout(address, CONNECT_TIMEOUT).map_err(ConnectAttemptError::from);
            match stream.and_then(|stream| self.authenticate_as_connector(stream, rank as u32, kind)) {
                Ok(stream) => return Ok(stream),
                Err(error @ ConnectAttemptError::Rejected(_)) => return Err((Some(*address), error)),
                Err(error) => last = (Some(*address), error),
            }
        }
        Err(last)
    }

    /// Authenticates a new connection to rank `to`, which this rank has opened, with a handshake.
    /// Returns the stream once both sides are authenticated.
    fn authenticate_as_connector(
        &self,
        mut stream: TcpStream,
        to: u32,
        kind: ConnectionKind,
    ) -> std::result::Result<TcpStream, ConnectAttemptError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        stream.set_read_timeout(Some(ABORT_CHECK_INTERVAL))?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
        stream.set_nodelay(true)?;
        let hello = hs::encode_hello(self.id, to, kind, &hs::generate_nonce()?);
        stream.write_all(&hello)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        self.read_exact_with_deadline(&mut stream, &mut challenge, deadline)?;
        match hs::decode_challenge(self.id, &hello, &challenge) {
            ChallengeAnswer::Accepted => {}
            ChallengeAnswer::Rejected(reason) => return Err(ConnectAttemptError::Rejected(reason)),
            ChallengeAnswer::Unproven => {
                return Err(ConnectAttemptError::Failed(ConnectFailureReason::WrongKey));
            }
            ChallengeAnswer::OtherProtocol => {
                return Err(ConnectAttemptError::Failed(ConnectFailureReason::NotAPeer));
            }
        }
        let mac = |side| hs::compute_mac(self.id, side, &hello, &challenge);
        stream.write_all(mac(HandshakeSide::Connector).as_bytes())?;
        let mut welcome = [0; SECRET_BYTES];
        self.read_exact_with_deadline(&mut stream, &mut welcome, deadline)?;
        match mac(HandshakeSide::Acceptor) == welcome {
            true => Ok(stream),
            false => Err(ConnectAttemptError::Failed(ConnectFailureReason::WrongKey)),
        }
    }

    /// Reads from the stream of a peer until `buf` is full, at most until a deadline. Fails after
    /// `deadline`, or soon after the group was aborted.
    fn read_exact_with_deadline(
        &self,
        stream: &mut TcpStream,
        buf: &mut [u8],
        deadline: Instant,
    ) -> std::result::Result<(), ConnectAttemptError> {
        let mut filled = 0;
        while filled < buf.len() {
            match stream.read(&mut buf[filled..]) {
                Ok(0) => return Err(ConnectAttemptError::Failed(ConnectFailureReason::Closed)),
                Ok(n) => filled += n,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline || self.health.abort_reason().is_some() {
                        return Err(ConnectAttemptError::Failed(ConnectFailureReason::NoAnswer));
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    // ---- accepting the higher ranks ----

    /// Accepts and authenticates the connections from every higher-numbered rank on other hosts.
    /// Fails if a connection is missing at `deadline`, or if the group is aborted. If `stop` is
    /// set, returns the connections that were authenticated before.
    fn accept_higher_ranks(
        &self,
        listener: &TcpListener,
        deadline: Instant,
        stop: &AtomicBool,
    ) -> Result<AuthenticatedStreams> {
        listener.set_nonblocking(true).map_err(CommError::wrap_io_error("accept connections of peers"))?;
        let mut missing: Vec<(u32, ConnectionKind)> = self
            .topology
            .remote_ranks()
            .filter(|r| *r > self.topology.rank)
            .flat_map(|r| ConnectionKind::ALL.map(|kind| (r as u32, kind)))
            .collect();
        let mut streams: AuthenticatedStreams = Vec::new();
        let mut pending = VecDeque::new();
        let quotas = PendingQuotas::new(missing.iter().map(|(rank, _)| &self.addresses[*rank as usize][..]));
        while !missing.is_empty() && !stop.load(SeqCst) {
            if let Some(reason) = self.health.abort_reason() {
                return Err(CommError::Aborted(reason));
            }
            if Instant::now() >= deadline {
                let ranks = missing.iter().map(|(r, _)| *r as usize).collect();
                return Err(self.build_join_timeout_error(ranks, None));
            }
            self.wait_for_input(listener, &pending);
            accept_waiting_connections(listener, &quotas, &mut pending);
            let now = Instant::now();
            for _ in 0..pending.len() {
                let Some(mut connection) = pending.pop_front() else { break };
                match connection.advance_handshake(self.id) {
                    HandshakeProgress::Authenticated(hello) => {
                        // A peer that did not receive its welcome connects again and uses the last
                        // connection.
                        missing.retain(|m| *m != (hello.from, hello.kind));
                        streams.retain(|(r, k, _)| (*r, *k) != (hello.from, hello.kind));
                        streams.push((hello.from, hello.kind, connection.stream));
                    }
                    HandshakeProgress::Waiting if now < connection.deadline => {
                        pending.push_back(connection);
                    }
                    HandshakeProgress::Waiting | HandshakeProgress::Failed => {}
                }
            }
        }
        Ok(streams)
    }

    /// Blocks until a peer connects, handshake bytes arrive or the group is aborted, for at most
    /// [`ABORT_CHECK_INTERVAL`].
    fn wait_for_input(&self, listener: &TcpListener, pending: &VecDeque<PendingConnection>) {
        let mut fds = vec![self.health.abort_poll_fd(), PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        fds.extend(pending.iter().map(|p| PollFd::new(p.stream.as_fd(), PollFlags::POLLIN)));
        _ = poll(&mut fds, to_poll_timeout(ABORT_CHECK_INTERVAL));
    }
}

/// Sets `TCP_USER_TIMEOUT`: the kernel then closes the connection if sent bytes are not
/// acknowledged within `timeout`.
fn set_tcp_user_timeout(stream: &TcpStream, timeout: Duration) -> std::io::Result<()> {
    let ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    Ok(setsockopt(stream, TcpUserTimeout, &ms)?)
}

/// Limits on the number of unauthenticated connections from each source address. Because of these
/// limits, a program that opens many connections cannot displace those from other addresses.
struct PendingQuotas(HashMap<IpAddr, usize>);

impl PendingQuotas {
    /// Computes how many unauthenticated connections each address may have, from the addresses of
    /// the peers that will connect. `expected` are the addresses of each peer, which connects from
    /// one of them.
    fn new<'a>(expected: impl Iterator<Item = &'a [SocketAddr]>) -> Self {
        let mut quotas = HashMap::new();
        for addresses in expected {
            let addresses: HashSet<IpAddr> = addresses.iter().map(|a| a.ip().to_canonical()).collect();
            for address in addresses {
                // A peer may connect again before its first connection has failed.
                *quotas.entry(address).or_insert(SPARE_PENDING_PER_ADDRESS) += 2;
            }
        }
        PendingQuotas(quotas)
    }

    /// Returns the key for counting unauthenticated connections from `source` (the address itself,
    /// or `None` if no peer has this address), and their maximum number. All unknown addresses are
    /// counted together, as `None`.
    fn find_quota(&self, source: IpAddr) -> (Option<IpAddr>, usize) {
        let source = source.to_canonical();
        self.0.get(&source).map_or((None, MAX_PENDING_FROM_UNKNOWN), |quota| (Some(source), *quota))
    }

    /// Adds `connection` to the queue of unauthenticated connections, and closes the oldest
    /// connection from this source address if the address now has too many.
    fn enqueue_connection(&self, connection: PendingConnection, pending: &mut VecDeque<PendingConnection>) {
        let (source, quota) = self.find_quota(connection.source);
        let is_counted = |other: &PendingConnection| self.find_quota(other.source).0 == source;
        if pending.iter().filter(|other| is_counted(other)).count() >= quota
            && let Some(oldest) = pending.iter().position(is_counted)
        {
            pending.remove(oldest);
        }
        pending.push_back(connection);
    }
}

/// Accepts all connections that wait at the listener and adds them to `pending`, the queue of
/// unfinished handshakes.
fn accept_waiting_connections(
    listener: &TcpListener,
    quotas: &PendingQuotas,
    pending: &mut VecDeque<PendingConnection>,
) {
    for _ in 0..MAX_ACCEPTED_AT_ONCE {
        let Ok((stream, source)) = listener.accept() else { return };
        if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
            continue;
        }
        quotas.enqueue_connection(PendingConnection::new(stream, source.ip()), pending);
    }
}

/// Why one attempt to connect to a peer failed, and whether another attempt may succeed.
enum ConnectAttemptError {
    /// The peer rejected this rank for the given reason. Another attempt would fail, too.
    Rejected(RejectReason),
    /// The connection or the handshake failed. Another attempt may succeed.
    Failed(ConnectFailureReason),
}

impl From<std::io::Error> for ConnectAttemptError {
    fn from(e: std::io::Error) -> Self {
        ConnectAttemptError::Failed(ConnectFailureReason::Os(e.to_string()))
    }
}

/// An accepted connection whose peer is not authenticated yet, and the progress of its handshake.
struct PendingConnection {
    stream: TcpStream,
    source: IpAddr,
    deadline: Instant,
    hello: [u8; HELLO_BYTES],
    proof: [u8; SECRET_BYTES],
    filled: usize,
    /// The peer's HELLO, the PROOF that the peer must send, and the WELCOME with which this rank
    /// will answer. `None` until this rank has sent its CHALLENGE.
    expected: Option<(Hello, blake3::Hash, blake3::Hash)>,
}

/// State of a handshake on the accepting side after all available bytes were read: waiting for
/// bytes, failed, or complete.
enum HandshakeProgress {
    Waiting,
    Failed,
    Authenticated(Hello),
}

impl PendingConnection {
    /// Wraps a new connection from `source`, whose handshake has not begun.
    fn new(stream: TcpStream, source: IpAddr) -> Self {
        PendingConnection {
            stream,
            source,
            deadline: Instant::now() + HANDSHAKE_TIMEOUT,
            hello: [0; HELLO_BYTES],
            proof: [0; SECRET_BYTES],
            filled: 0,
            expected: None,
        }
    }

    /// Reads the handshake bytes that have arrived on this connection, and answers each complete
    /// message. Does not block.
    fn advance_handshake(&mut self, id: &RankIdentity) -> HandshakeProgress {
        loop {
            let buf = match self.expected {
                None => &mut self.hello[self.filled..],
                Some(_) => &mut self.proof[self.filled..],
            };
            match self.stream.read(buf) {
                Ok(0) => return HandshakeProgress::Failed,
                Ok(n) => self.filled += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return HandshakeProgress::Waiting,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return HandshakeProgress::Failed,
            }
            if let Some((hello, proof, welcome)) = self.expected {
                if self.filled == SECRET_BYTES {
                    let is_valid = proof == self.proof && self.stream.write_all(welcome.as_bytes()).is_ok();
                    return match is_valid {
                        true => HandshakeProgress::Authenticated(hello),
                        false => HandshakeProgress::Failed,
                    };
                }
            } else if self.filled == HELLO_BYTES && !self.send_challenge(id) {
                return HandshakeProgress::Failed;
            }
        }
    }

    /// Answers the connector's HELLO message with a CHALLENGE message, which accepts or rejects the
    /// connection. Returns whether the handshake continues.
    fn send_challenge(&mut self, id: &RankIdentity) -> bool {
        let Some(hello) = hs::check_hello(id, &self.hello) else { return false };
        let Ok(nonce) = hs::generate_nonce() else { return false };
        let challenge = hs::encode_challenge(id, &self.hello, hello.map(drop), &nonce);
        // The challenge fits into the empty send buffer of a new connection.
        let (Ok(()), Ok(hello)) = (self.stream.write_all(&challenge), hello) else { return false };
        let mac = |side| hs::compute_mac(id, side, &self.hello, &challenge);
        self.expected = Some((hello, mac(HandshakeSide::Connector), mac(HandshakeSide::Acceptor)));
        self.filled = 0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the pending side of a test connection, as if it came from the address `source`.
    fn create_pending(listener: &TcpListener, source: [u8; 4]) -> PendingConnection {
        TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        PendingConnection::new(listener.accept().unwrap().0, source.into())
    }

    #[test]
    fn a_flood_of_connections_displaces_only_those_of_its_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peers: [Vec<SocketAddr>; 2] =
            [vec!["192.0.2.1:1".parse().unwrap()], vec!["[::ffff:192.0.2.2]:1".parse().unwrap()]];
        // Two connections of each peer are expected.
        let quotas = PendingQuotas::new(peers.iter().chain(&peers).map(Vec::as_slice));
        let mut pending = VecDeque::new();
        let [peer, other_peer, unknown, other_unknown] =
            [[192, 0, 2, 1], [192, 0, 2, 2], [192, 0, 2, 7], [192, 0, 2, 8]];
        quotas.enqueue_connection(create_pending(&listener, peer), &mut pending);
        quotas.enqueue_connection(create_pending(&listener, unknown), &mut pending);
        for _ in 0..2 * MAX_PENDING_FROM_UNKNOWN {
            quotas.enqueue_connection(create_pending(&listener, other_unknown), &mut pending);
            quotas.enqueue_connection(create_pending(&listener, other_peer), &mut pending);
        }
        let count = |source: [u8; 4]| pending.iter().filter(|p| p.source == IpAddr::from(source)).count();
        assert_eq!(count(peer), 1, "the peer keeps its connection");
        assert_eq!(count(other_peer), SPARE_PENDING_PER_ADDRESS + 4);
        assert_eq!((count(unknown), count(other_unknown)), (0, MAX_PENDING_FROM_UNKNOWN));
    }
}

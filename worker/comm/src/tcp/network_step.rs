//! [`NetworkStep`]: exchanges the messages of one step of a collective with several peers at the
//! same time, over one TCP connection per peer.
//!
//! The calling thread sends and receives on whichever connection is ready next. Data moves directly
//! between the caller's memory and the kernel's socket buffers.
//!
//! Each message has a header: its number on this connection, its call (three words), and its
//! length. The receiver knows these values beforehand and compares them. So no memory is ever
//! allocated for a length that a peer announces, and the comparison detects ranks that disagree
//! about a collective.
use super::{
    peer_monitor::{GroupHealth, to_poll_timeout},
    topology::Topology,
};
use crate::{CallMismatch, CommError, Result, call::CollectiveCall, shm::OutgoingMessage};
use nix::{
    poll::{PollFd, PollFlags, poll},
    sys::socket::{MsgFlags, sendmsg},
};
use std::{
    io::{ErrorKind, IoSlice, Read},
    net::TcpStream,
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

/// Size in bytes of the header that precedes each message between ranks.
const HEADER_BYTES: usize = 40;
/// Approximate number of bytes that a rank transfers on one connection in each direction before it
/// turns to the next connection.
const MAX_TURN_BYTES: usize = 1 << 20;
/// The longest wait for a connection to become readable or writable before the timeout is checked.
const TIMEOUT_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// TCP connection to one peer for the data of collectives, with counters of the messages sent and
/// received on the connection.
pub(super) struct DataConnection {
    pub(super) stream: TcpStream,
    /// Number of messages that this rank began to send.
    sent: u64,
    /// Number of messages that this rank began to receive.
    received: u64,
}

impl DataConnection {
    /// Wraps a non-blocking TCP stream as a connection on which no message was sent or received
    /// yet.
    pub(super) fn new(stream: TcpStream) -> Self {
        DataConnection { stream, sent: 0, received: 0 }
    }
}

/// Location of the bytes of an outgoing message: in the buffer that also receives messages, or in
/// other memory.
pub(super) enum SendSource<'a> {
    /// A range of the receive buffer. The step must not receive into this range.
    Buffer(Range<usize>),
    /// A message in memory other than the receive buffer.
    Message(OutgoingMessage<'a>),
}

impl SendSource<'_> {
    /// Returns the size of the outgoing message in bytes, without the header.
    fn len(&self) -> usize {
        match self {
            SendSource::Buffer(range) => range.len(),
            SendSource::Message(message) => message.len(),
        }
    }
}

/// The messages that a rank exchanges with one peer in one step of a collective, and the number of
/// bytes transferred so far in each direction.
pub(super) struct PeerTransfer<'a> {
    pub(super) peer: usize,
    /// The message to send; `None` if this step sends nothing to the peer.
    pub(super) source: Option<SendSource<'a>>,
    /// The range of the receive buffer for the peer's message; `None` if this step expects no
    /// message from the peer.
    pub(super) recv_range: Option<Range<usize>>,
    sent_header: [u8; HEADER_BYTES],
    received_header: [u8; HEADER_BYTES],
    /// Number of bytes sent so far, including the header.
    sent_bytes: usize,
    /// Number of bytes received so far, including the header.
    received_bytes: usize,
}

impl<'a> PeerTransfer<'a> {
    /// Creates the exchange of at most one message in each direction with `peer`: from `source` to
    /// the peer, and from the peer to the range `recv_range` of the receive buffer.
    pub(super) fn new(peer: usize, source: Option<SendSource<'a>>, recv_range: Option<Range<usize>>) -> Self {
        PeerTransfer {
            peer,
            source,
            recv_range,
            sent_header: [0; HEADER_BYTES],
            received_header: [0; HEADER_BYTES],
            sent_bytes: 0,
            received_bytes: 0,
        }
    }

    /// Returns true if the message to the peer is not completely sent.
    fn has_bytes_to_send(&self) -> bool {
        self.source.as_ref().is_some_and(|source| self.sent_bytes < HEADER_BYTES + source.len())
    }

    /// Returns true if the message from the peer is not completely received.
    fn has_bytes_to_receive(&self) -> bool {
        self.recv_range.as_ref().is_some_and(|range| self.received_bytes < HEADER_BYTES + range.len())
    }
}

/// Why a rank could not exchange messages with one peer: the connection ended, or the peer sent an
/// unexpected message header.
enum TransferError {
    /// The connection failed, or the peer closed it.
    Closed,
    /// The peer's header is not the expected one.
    Mismatch(CallMismatch),
}

/// One step of a collective over the network, in which a rank sends messages to several peers and
/// receives messages from them at the same time. Holds the step's call and timeout.
pub(super) struct NetworkStep<'a> {
    pub(super) topology: &'a Topology,
    pub(super) health: &'a GroupHealth,
    pub(super) call: &'a CollectiveCall,
    /// The longest time without any transferred byte before the step fails.
    pub(super) timeout: Duration,
}

impl NetworkStep<'_> {
    /// Sends and receives the messages of all `transfers` (one per peer), and blocks until all are
    /// complete or one fails. After an error the caller must abort the group.
    pub(super) fn run(
        &self,
        connections: &mut [Option<DataConnection>],
        buf: &mut [u8],
        transfers: &mut [PeerTransfer],
    ) -> Result<()> {
        for transfer in transfers.iter_mut() {
            let connection = self.find_connection(connections, transfer.peer)?;
            if let Some(source) = &transfer.source {
                transfer.sent_header = encode_header(connection.sent, self.call, source.len());
                connection.sent += 1;
            }
            connection.received += u64::from(transfer.recv_range.is_some());
        }
        let mut last_progress = Instant::now();
        loop {
            let mut moved = 0;
            for transfer in transfers.iter_mut() {
                moved += self.transfer_available_bytes(
                    self.find_connection(connections, transfer.peer)?,
                    buf,
                    transfer,
                )?;
            }
            if !transfers.iter().any(|t| t.has_bytes_to_send() || t.has_bytes_to_receive()) {
                return Ok(());
            }
            if let Some(reason) = self.health.abort_reason() {
                return Err(CommError::Aborted(reason));
            }
            match moved {
                0 if last_progress.elapsed() >= self.timeout => {
                    return Err(self.build_timeout_error(transfers));
                }
                0 => {
                    let remaining = self.timeout.saturating_sub(last_progress.elapsed());
                    self.wait_until_ready(connections, transfers, remaining);
                }
                _ => last_progress = Instant::now(),
            }
        }
    }

    /// Returns the TCP connection to `peer` for the data of collectives. Fails if this rank has no
    /// connection to `peer`.
    fn find_connection<'c>(
        &self,
        connections: &'c mut [Option<DataConnection>],
        peer: usize,
    ) -> Result<&'c mut DataConnection> {
        let connection = connections.get_mut(peer).and_then(Option::as_mut);
        connection.ok_or(CommError::NotConnected { rank: self.topology.rank, peer })
    }

    /// Sends and receives as many bytes of the messages exchanged with one peer (`transfer`) as
    /// possible without blocking. Returns the number of bytes in both directions together.
    fn transfer_available_bytes(
        &self,
        connection: &mut DataConnection,
        buf: &mut [u8],
        transfer: &mut PeerTransfer,
    ) -> Result<usize> {
        let (sent, received) = (transfer.sent_bytes, transfer.received_bytes);
        let result = send_available_bytes(connection, buf, transfer)
            .and_then(|()| self.receive_available_bytes(connection, buf, transfer));
        if transfer.received_bytes > received {
            self.health.record_activity(transfer.peer);
        }
        match result {
            Ok(()) => Ok(transfer.sent_bytes - sent + transfer.received_bytes - received),
            Err(TransferError::Mismatch(mismatch)) => Err(CommError::Mismatch(mismatch)),
            Err(TransferError::Closed) => {
                let reason = self.health.wait_for_end_reason(transfer.peer, self.call);
                Err(CommError::Aborted(reason))
            }
        }
    }

    /// Receives as many bytes of one peer's message as possible without blocking. Checks the header
    /// when all its bytes have arrived.
    fn receive_available_bytes(
        &self,
        connection: &mut DataConnection,
        buf: &mut [u8],
        transfer: &mut PeerTransfer,
    ) -> std::result::Result<(), TransferError> {
        let Some(range) = transfer.recv_range.clone() else { return Ok(()) };
        let mut turn_bytes = 0;
        while transfer.received_bytes < HEADER_BYTES + range.len() && turn_bytes < MAX_TURN_BYTES {
            let to = match transfer.received_bytes.checked_sub(HEADER_BYTES) {
                None => &mut transfer.received_header[transfer.received_bytes..],
                Some(offset) => {
                    let end = range.len().min(offset + MAX_TURN_BYTES);
                    &mut buf[range.start + offset..range.start + end]
                }
            };
            match connection.stream.read(to) {
                Ok(0) => return Err(TransferError::Closed),
                Ok(n) => {
                    turn_bytes += n;
                    transfer.received_bytes += n;
                    if transfer.received_bytes == HEADER_BYTES {
                        let number = connection.received - 1;
                        self.check_header(number, transfer.peer, &transfer.received_header, range.len())
                            .map_err(TransferError::Mismatch)?;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(TransferError::Closed),
            }
        }
        Ok(())
    }

    /// Fails if a message header from `peer` has another message number than `expected`, another
    /// length than `len`, or another collective.
    fn check_header(
        &self,
        expected: u64,
        peer: usize,
        header: &[u8; HEADER_BYTES],
        len: usize,
    ) -> std::result::Result<(), CallMismatch> {
        let word = |i: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&header[i * 8..i * 8 + 8]);
            u64::from_le_bytes(bytes)
        };
        let rank = self.topology.rank;
        self.call.check_peer_call(rank, peer, [word(1), word(2), word(3)])?;
        let number = word(0);
        if number != expected {
            return Err(CallMismatch::MessageNumber { rank, peer, number, expected });
        }
        self.call.check_transfer_bytes(peer, rank, word(4), len as u64)
    }

    /// Blocks until a connection with an unfinished transfer can send or receive, until the group
    /// is aborted, or for at most `timeout`.
    fn wait_until_ready(
        &self,
        connections: &[Option<DataConnection>],
        transfers: &[PeerTransfer],
        timeout: Duration,
    ) {
        let mut fds = vec![self.health.abort_poll_fd()];
        for transfer in transfers.iter().filter(|t| t.has_bytes_to_send() || t.has_bytes_to_receive()) {
            let mut events = PollFlags::empty();
            events.set(PollFlags::POLLIN, transfer.has_bytes_to_receive());
            events.set(PollFlags::POLLOUT, transfer.has_bytes_to_send());
            if let Some(connection) = &connections[transfer.peer] {
                fds.push(PollFd::new(connection.stream.as_fd(), events));
            }
        }
        _ = poll(&mut fds, to_poll_timeout(timeout.min(TIMEOUT_CHECK_INTERVAL)));
    }

    /// Builds the timeout error of a collective in which the current network step transferred no
    /// byte for too long. It lists the peers of unfinished transfers.
    fn build_timeout_error(&self, transfers: &[PeerTransfer]) -> CommError {
        let unfinished = transfers.iter().filter(|t| t.has_bytes_to_receive() || t.has_bytes_to_send());
        let mut missing: Vec<usize> = unfinished.map(|t| t.peer).collect();
        missing.sort_unstable();
        CommError::Timeout {
            rank: self.topology.rank,
            world: self.topology.world_size(),
            collective: self.call.kind,
            call_number: self.call.number,
            timeout: self.timeout,
            missing,
        }
    }
}

/// Encodes the header that precedes message number `number` of a connection, with the message's
/// length `len` in bytes.
fn encode_header(number: u64, call: &CollectiveCall, len: usize) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    let [a, b, c] = call.to_words();
    for (to, word) in out.chunks_exact_mut(8).zip([number, a, b, c, len as u64]) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    out
}

/// Sends bytes of one message and its header to a peer, as many as possible without blocking.
fn send_available_bytes(
    connection: &DataConnection,
    buf: &[u8],
    transfer: &mut PeerTransfer,
) -> std::result::Result<(), TransferError> {
    let Some(source) = &transfer.source else { return Ok(()) };
    let total = HEADER_BYTES + source.len();
    let mut turn_bytes = 0;
    while transfer.sent_bytes < total && turn_bytes < MAX_TURN_BYTES {
        let offset = transfer.sent_bytes.saturating_sub(HEADER_BYTES);
        let body: &[u8] = match source {
            _ if offset >= source.len() => &[],
            SendSource::Buffer(range) => &buf[range.start + offset..range.end],
            SendSource::Message(message) => message.contiguous_bytes_from(offset),
        };
        let header = &transfer.sent_header[transfer.sent_bytes.min(HEADER_BYTES)..];
        let slices = [IoSlice::new(header), IoSlice::new(&body[..body.len().min(MAX_TURN_BYTES)])];
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(connection.stream.as_raw_fd(), &slices, &[], flags, None) {
            Ok(n) => {
                turn_bytes += n;
                transfer.sent_bytes += n;
            }
            Err(nix::errno::Errno::EAGAIN) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return Err(TransferError::Closed),
        }
    }
    Ok(())
}

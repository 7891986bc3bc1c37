//! [`start_measurement_servers`]: accepts the connections over which other agents measure the
//! network to this host, and transfers data on them.
use super::measuring_connection::{
    MeasureCommand, authenticate_accepted_connection, read_retransmits_and_segment_size,
};
use crate::connection::handshake::HandshakeKey;
use protocol::network_probe::MAX_TRANSFER_MS;
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The largest number of connections from other agents that this agent serves for measurements at
/// the same time. Further connections are closed.
const MAX_CONNECTIONS: usize = 64;
/// How long a process that opens a connection for network measurements may take to prove that it
/// has the key for them.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(3);
/// The time limit for the first data of a measured transfer to arrive.
pub(super) const FIRST_DATA_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long this agent waits for the next command or the next byte to echo on a measured connection
/// before it closes the connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long this agent waits for the end of a transfer that another agent measures, after the
/// requested duration of the transfer has passed.
const TRANSFER_END_TIMEOUT: Duration = Duration::from_secs(2);
/// The largest number of bytes that this agent echoes on one connection, over which another agent
/// measures round trips.
const MAX_ECHO_BYTES: usize = 1000;
/// The size of the buffer for reading and writing the data of a measured transfer, in bytes.
const BUFFER_BYTES: usize = 256 << 10;
/// The pause after the agent has failed to accept a connection for measurements, for example
/// because too many files are open.
const FAILED_ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The length, in bytes, of an encoded report about a measured transfer, which one agent sends to
/// the other.
pub(super) const TRANSFER_REPORT_BYTES: usize = 40;
/// The first bytes of an encoded [`TransferReport`], by which the receiver distinguishes the report
/// from the zeros that precede it.
const TRANSFER_REPORT_MAGIC: &[u8; 8] = b"launchT1";

/// The report about a measured transfer (bytes, time and retransmits), which one agent sends to the
/// other after the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TransferReport {
    /// The number of bytes that arrived, as the receiver reports it.
    pub(super) bytes: u64,
    /// The time from the first to the last byte, as the receiver reports it.
    pub(super) nanoseconds: u64,
    /// The number of segments that the sender sent again.
    pub(super) retransmits: u64,
    /// The size of a segment in bytes, as the sender reports it.
    pub(super) segment_bytes: u64,
}

impl TransferReport {
    /// Encodes this report about a measured transfer (bytes, time and retransmits) as bytes.
    fn to_bytes(self) -> [u8; TRANSFER_REPORT_BYTES] {
        let mut bytes = [0; TRANSFER_REPORT_BYTES];
        bytes[..8].copy_from_slice(TRANSFER_REPORT_MAGIC);
        let numbers = [self.bytes, self.nanoseconds, self.retransmits, self.segment_bytes];
        for (target, number) in bytes[8..].chunks_exact_mut(8).zip(numbers) {
            target.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Decodes a report about a measured transfer (bytes, time and retransmits) from bytes. Returns
    /// `None` for other bytes.
    pub(super) fn parse(bytes: &[u8]) -> Option<TransferReport> {
        let numbers = bytes.strip_prefix(TRANSFER_REPORT_MAGIC)?;
        let mut numbers = numbers.chunks_exact(8).map(|n| n.try_into().map(u64::from_le_bytes));
        let mut next = || numbers.next()?.ok();
        Some(TransferReport {
            bytes: next()?,
            nanoseconds: next()?,
            retransmits: next()?,
            segment_bytes: next()?,
        })
    }

    /// Reads a report about a measured transfer (bytes, time and retransmits) from a connection to
    /// another agent, and decodes it.
    pub(super) fn read(stream: &mut TcpStream) -> io::Result<TransferReport> {
        let mut bytes = [0; TRANSFER_REPORT_BYTES];
        stream.read_exact(&mut bytes)?;
        TransferReport::parse(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Starts one thread for each listener in `listeners`, to accept the connections on which other
/// agents measure the network to this host. Fails if a thread cannot be started.
pub(super) fn start_measurement_servers(listeners: Vec<TcpListener>, key: &HandshakeKey) -> io::Result<()> {
    let active = Arc::new(AtomicUsize::new(0));
    for listener in listeners {
        let (active, key) = (active.clone(), key.clone());
        let accept = move || {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => start_connection_thread(stream, &active, &key),
                    Err(_) => thread::sleep(FAILED_ACCEPT_PAUSE),
                }
            }
        };
        thread::Builder::new().name("measured".into()).spawn(accept)?;
    }
    Ok(())
}

/// Starts a thread that serves another agent's measurements on one connection, or closes the
/// connection if [`MAX_CONNECTIONS`] are already served.
fn start_connection_thread(stream: TcpStream, active: &Arc<AtomicUsize>, key: &HandshakeKey) {
    if active.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
        active.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    let (counter, key) = (active.clone(), key.clone());
    let serve = move || {
        // A failure ends only this connection; the other side reports it.
        _ = authenticate_and_serve(&key, stream);
        counter.fetch_sub(1, Ordering::Relaxed);
    };
    if thread::Builder::new().name("measured".into()).spawn(serve).is_err() {
        active.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Authenticates the agent that has opened a connection for measurements, and executes that agent's
/// command: echo bytes, receive data or send data.
fn authenticate_and_serve(key: &HandshakeKey, stream: TcpStream) -> io::Result<()> {
    let mut stream = authenticate_accepted_connection(key, stream, AUTHENTICATION_TIMEOUT)?;
    stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
    stream.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let limit = |ms: u64| Duration::from_millis(ms.min(MAX_TRANSFER_MS));
    match MeasureCommand::read(&mut stream)? {
        MeasureCommand::Echo => {
            let mut byte = [0];
            for _ in 0..MAX_ECHO_BYTES {
                stream.read_exact(&mut byte)?;
                stream.write_all(&byte)?;
            }
            Ok(())
        }
        MeasureCommand::Receive(ms) => serve_receive_command(stream, limit(ms)),
        MeasureCommand::Send(ms) => serve_send_command(stream, limit(ms)),
    }
}

/// Executes the command of another agent to receive data for the time `time`, and reports to that
/// agent how many bytes have arrived.
fn serve_receive_command(mut stream: TcpStream, time: Duration) -> io::Result<()> {
    let (bytes, elapsed) = receive_data(&mut stream, time)?;
    let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
    stream.write_all(&TransferReport { bytes, nanoseconds, ..TransferReport::default() }.to_bytes())?;
    // Closing a connection with unread data would destroy the report on the other side.
    let deadline = Instant::now() + TRANSFER_END_TIMEOUT;
    stream.set_read_timeout(Some(TRANSFER_END_TIMEOUT))?;
    let mut buffer = vec![0; BUFFER_BYTES];
    while Instant::now() < deadline && stream.read(&mut buffer)? > 0 {}
    Ok(())
}

/// Sends data to another agent until that agent stops the transfer, and then sends a report with
/// the number of retransmits.
fn serve_send_command(mut stream: TcpStream, time: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(FIRST_DATA_TIMEOUT + time + TRANSFER_END_TIMEOUT))?;
    let is_done = AtomicBool::new(false);
    let mut writer = stream.try_clone()?;
    thread::scope(|scope| {
        let sender = scope.spawn(|| send_data(&mut writer, &is_done));
        let end = stream.read(&mut [0]);
        is_done.store(true, Ordering::Relaxed);
        if end.is_err() {
            // Ends a write that waits for the other side.
            _ = stream.shutdown(Shutdown::Both);
        }
        sender.join().is_ok()
    });
    let (retransmits, segment_bytes) = read_retransmits_and_segment_size(&stream).unwrap_or_default();
    stream
        .write_all(&TransferReport { retransmits, segment_bytes, ..TransferReport::default() }.to_bytes())?;
    stream.shutdown(Shutdown::Write)
}

/// Sends zeros on a connection whose throughput is measured, until the function `is_done` returns
/// `true` or the connection ends.
pub(super) fn send_data(stream: &mut TcpStream, is_done: &AtomicBool) {
    let zeros = vec![0; BUFFER_BYTES];
    while !is_done.load(Ordering::Relaxed) {
        // The kernel takes a part of the data if the other side is slow.
        if !matches!(stream.write(&zeros), Ok(count) if count > 0) {
            return;
        }
    }
}

/// Receives data for the time `time`, counted from the first byte, to measure the throughput of a
/// connection. Returns the number of bytes, and the time from the first to the last byte. Returns 0
/// bytes if none arrive within [`FIRST_DATA_TIMEOUT`].
pub(super) fn receive_data(stream: &mut TcpStream, time: Duration) -> io::Result<(u64, Duration)> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut read = |limit: Duration| {
        stream.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        match stream.read(&mut buffer) {
            Ok(count) => Ok(count as u64),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Ok(0)
            }
            Err(error) => Err(error),
        }
    };
    let mut bytes = read(FIRST_DATA_TIMEOUT)?;
    let began = Instant::now();
    let mut last = Duration::ZERO;
    while bytes > 0 && began.elapsed() < time {
        match read(time.saturating_sub(began.elapsed()))? {
            0 => break,
            count => bytes += count,
        }
        last = began.elapsed();
    }
    // A stall at the end counts, so that an interrupted transfer does not look fast.
    Ok((bytes, if bytes > 0 { last.max(began.elapsed()) } else { last }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailer_round_trips_and_zeros_are_none() {
        let trailer = TransferReport { bytes: 1, nanoseconds: 2, retransmits: u64::MAX, segment_bytes: 1448 };
        assert_eq!(TransferReport::parse(&trailer.to_bytes()), Some(trailer));
        assert_eq!(TransferReport::parse(&[0; TRANSFER_REPORT_BYTES]), None);
        assert_eq!(TransferReport::parse(TRANSFER_REPORT_MAGIC), None);
    }
}

//! Opens authenticated TCP connections between agents for `launch check --network`, and sends the
//! commands that start network measurements.
use crate::connection::handshake::{HandshakeKey, authenticate_agent, authenticate_controller};
use nix::sys::socket::{setsockopt, sockopt};
use std::{
    io::{self, Read, Write},
    mem::{size_of, zeroed},
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};
use tokio::net::TcpSocket;

/// The TCP segment size, in bytes, of a test transfer that succeeds even if the network loses large
/// packets. Every network must carry packets of this size.
pub(super) const SMALL_SEGMENT_BYTES: u32 = 536;
/// The largest number of bytes that the kernel may buffer unsent on a measured connection, so that
/// a transfer ends soon after its sender stops. A small number keeps the time short in which data
/// remain on the way after the end of a transfer.
const MAX_UNSENT_BYTES: u32 = 128 << 10;
/// The length, in bytes, of the encoded command of a measurement, which contains a kind and a
/// duration.
const COMMAND_BYTES: usize = 9;

/// The local address from which an agent opens connections for measurements, and the key with which
/// it authenticates them.
#[derive(Clone, Debug)]
pub(super) struct MeasurementEndpoint {
    pub(super) key: HandshakeKey,
    /// The address of this host from which connections are opened.
    pub(super) address: IpAddr,
}

/// The command by which one agent asks another one to echo, receive or send data on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MeasureCommand {
    /// Return each byte immediately.
    Echo,
    /// Receive data for this time, in milliseconds, and report how many bytes arrived.
    Receive(u64),
    /// Send data until this side closes its direction, at most for about this time in milliseconds.
    Send(u64),
}

impl MeasureCommand {
    /// Sends this command of a measurement (echo, receive or send data) to another agent over a
    /// connection.
    pub(super) fn write(self, stream: &mut TcpStream) -> io::Result<()> {
        let (kind, ms) = match self {
            MeasureCommand::Echo => (b'E', 0),
            MeasureCommand::Receive(ms) => (b'R', ms),
            MeasureCommand::Send(ms) => (b'S', ms),
        };
        let mut bytes = [0; COMMAND_BYTES];
        bytes[0] = kind;
        bytes[1..].copy_from_slice(&ms.to_le_bytes());
        stream.write_all(&bytes)
    }

    /// Receives the command of a measurement (echo, receive or send data) from another agent over a
    /// connection. Fails if the bytes are no command.
    pub(super) fn read(stream: &mut TcpStream) -> io::Result<MeasureCommand> {
        let mut bytes = [0; COMMAND_BYTES];
        stream.read_exact(&mut bytes)?;
        let [kind, ms @ ..] = bytes;
        let ms = u64::from_le_bytes(ms);
        match kind {
            b'E' => Ok(MeasureCommand::Echo),
            b'R' => Ok(MeasureCommand::Receive(ms)),
            b'S' => Ok(MeasureCommand::Send(ms)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Opens a connection for measurements from the local address in `end` to the agent at `target`, on
/// which both sides prove that they have the key for measurements. `timeout` limits both together.
/// With `small_segments`, the connection uses segments of [`SMALL_SEGMENT_BYTES`] in both
/// directions.
pub(super) fn open_connection(
    end: &MeasurementEndpoint,
    target: SocketAddr,
    timeout: Duration,
    small_segments: bool,
) -> io::Result<TcpStream> {
    block_on_with_timeout(timeout, async {
        let socket = if target.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if small_segments {
            setsockopt(&socket, sockopt::TcpMaxSeg, &SMALL_SEGMENT_BYTES)?;
        }
        socket.bind(SocketAddr::new(end.address, 0))?;
        let mut stream = socket.connect(target).await?;
        let verified = authenticate_controller(&mut stream, &end.key, "").await.map_err(io::Error::other)?;
        verified.send_proof_of_key().await.map_err(io::Error::other)?;
        into_blocking(stream)
    })
}

/// Checks that the agent that has opened a connection for measurements has the measurement key, and
/// proves the same to that agent. Fails if the process does not have the key, or not within
/// `timeout`.
pub(super) fn authenticate_accepted_connection(
    key: &HandshakeKey,
    stream: TcpStream,
    timeout: Duration,
) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    block_on_with_timeout(timeout, async {
        let mut stream = tokio::net::TcpStream::from_std(stream)?;
        authenticate_agent(&mut stream, key).await.map_err(io::Error::other)?;
        into_blocking(stream)
    })
}

/// Runs a future to its end on this thread, and fails if that takes longer than the time `timeout`.
fn block_on_with_timeout<T>(timeout: Duration, future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let expired = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {timeout:?}"));
        tokio::time::timeout(timeout, future).await.map_err(expired)?
    })
}

/// Converts a TCP connection of the async runtime to a blocking one, which sends small messages
/// immediately.
fn into_blocking(stream: tokio::net::TcpStream) -> io::Result<TcpStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let unsent = MAX_UNSENT_BYTES;
    // SAFETY: the option takes a number of 32 bits, and the descriptor is open.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const unsent).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(stream) } else { Err(io::Error::last_os_error()) }
}

/// Returns the number of segments that the kernel has retransmitted on a connection, and the size
/// of a segment in bytes. Returns `None` if the kernel does not report it.
pub(super) fn read_retransmits_and_segment_size(stream: &impl AsFd) -> Option<(u64, u64)> {
    // SAFETY: zeros are a valid value of this structure of integers.
    let mut info: libc::tcp_info = unsafe { zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, the size of the structure.
    let result = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    (result == 0).then(|| (u64::from(info.tcpi_total_retrans), u64::from(info.tcpi_snd_mss.max(1))))
}

//! Sends the executable of this agent to other hosts of the job that do not have it.
//!
//! Such a host has no program that could encrypt a connection, only a shell. The executable is no
//! secret, and the host verifies it with a hash that it gets over SSH. So the connection is not
//! encrypted. The token in the request only keeps other programs from taking the network.
use std::{
    fs::File,
    io::{self, Read, Write},
    net::TcpStream as StdStream,
    time::Duration,
};
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    time::{sleep, timeout},
};

/// The first bytes of another host's request for the executable of launch, which distinguish the
/// request from an agent's handshake. The token and a line end follow.
const REQUEST_PREFIX: &[u8; 6] = b"fetch ";
/// The length, in bytes, of the longest request of another host for the executable of launch.
const MAX_REQUEST_BYTES: usize = 128;
/// The time limit for the rest of another host's request for the executable of launch, after the
/// first bytes of the request have arrived.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The time without progress after which sending the executable to another host fails.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// The number of bytes of launch's executable that are read from the file and sent to another host
/// at once.
const CHUNK_BYTES: usize = 256 << 10;
/// The interval at which this agent checks whether the first bytes of a request for the executable
/// have arrived on a connection.
const PEEK_INTERVAL: Duration = Duration::from_millis(10);

/// Returns whether the first bytes on a connection are a request for the executable of launch
/// rather than an agent's handshake. Takes no byte from the connection. The caller limits the time.
pub(super) async fn is_fetch_request(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0; REQUEST_PREFIX.len()];
    loop {
        match stream.peek(&mut first).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count if first[..count] != REQUEST_PREFIX[..count] => return Ok(false),
            count if count == first.len() => return Ok(true),
            // The readiness of the socket does not change while more bytes are missing.
            _ => sleep(PEEK_INTERVAL).await,
        }
    }
}

/// Reads a request for the executable from a connection, and sends the executable if the request
/// contains `token`, the secret of the run. Closes the connection without an answer if the token is
/// wrong.
pub(super) async fn send_executable(mut stream: TcpStream, token: &str) {
    let read = timeout(REQUEST_TIMEOUT, read_request(&mut stream)).await;
    let Ok(Ok(request)) = read else { return };
    if request.strip_prefix(REQUEST_PREFIX) != Some(token.as_bytes()) {
        return;
    }
    let Ok(stream) = stream.into_std() else { return };
    // An error means that the host has given up, or takes no bytes. The controller notices.
    _ = tokio::task::spawn_blocking(move || write_executable(stream)).await;
}

/// Reads another host's request for the executable of launch, which is one line, from a connection.
async fn read_request(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    loop {
        match stream.read_u8().await? {
            b'\n' => return Ok(request),
            _ if request.len() == MAX_REQUEST_BYTES => return Err(io::ErrorKind::InvalidData.into()),
            byte => request.push(byte),
        }
    }
}

/// Sends the executable file of this process over a connection to another host, and closes the
/// connection. Blocks.
fn write_executable(mut stream: StdStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut file = File::open("/proc/self/exe")?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(()),
            count => stream.write_all(&chunk[..count])?,
        }
    }
}

//! The Unix socket at which an agent listens, so that a later controller or a later agent on the
//! same host can reach it. The socket is also the lock that the agent holds on its host.
//!
//! The socket is in the abstract namespace, so nothing is left of it when the agent ends in any
//! way. Its name is a keyed hash of run and host, so no other user can guess it. Another user can
//! see the name in `/proc/net/unix` while the socket exists, and take the name when the agent has
//! ended. Therefore an agent has [`SOCKET_NAME_COUNT`] possible names, and sockets and connections
//! of other users do not count. Both sides prove that they have the key of the run before any
//! message.
use crate::connection::{
    EncryptedReader, EncryptedWriter, FrameError, encode_frame,
    handshake::{
        HANDSHAKE_TIMEOUT, HandshakeError, HandshakeKey, authenticate_agent, authenticate_controller,
    },
    read_frame,
};
use diagnostic::{Diagnostic, codes::host};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
    },
};
use protocol::control::{
    AttachPurpose, AttachRejection, AttachRequest, ControllerToken, FromAgent, JobSecretKey,
    PROTOCOL_VERSION, SupervisionTerms, ToAgent,
};
use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
    },
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    net::{
        UnixListener, UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Semaphore, mpsc},
    time::{Instant, sleep, timeout},
};

/// The number of possible names for the Unix socket of an agent, of which the agent uses the first
/// free one. There are several, so that another user cannot easily take all of them.
const SOCKET_NAME_COUNT: u32 = 16;
/// The largest number of connections to an agent's Unix socket on which the handshake (proof that
/// both sides have the run's key) runs at the same time. Further connections wait.
const MAX_CONCURRENT_HANDSHAKES: usize = 16;
/// How long a new agent waits until an older agent of the same run on its host has ended.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(8);
/// How often a new agent checks whether the older agent of the same run on this host has ended,
/// after it has asked that agent to end.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The reading half of an encrypted connection between an agent and a process that has connected to
/// the agent's Unix socket, such as a new controller.
pub(super) type SocketReader = EncryptedReader<OwnedReadHalf>;
/// The writing half of an encrypted connection between an agent and a process that has connected to
/// the agent's Unix socket, such as a new controller.
pub(super) type SocketWriter = EncryptedWriter<OwnedWriteHalf>;

/// An authenticated connection from another process to the agent's Unix socket, with that process's
/// request to control or to end the agent.
pub(super) struct AttachConnection {
    pub(super) input: SocketReader,
    pub(super) output: SocketWriter,
    pub(super) request: AttachRequest,
}

/// Derives the possible names of an agent's Unix socket from the run's key, the run's name and the
/// host name, in the order in which agents try them.
fn derive_socket_names(key: &JobSecretKey, run: &str, host: &str) -> impl Iterator<Item = String> {
    let mut hasher = blake3::Hasher::new_keyed(&key.0);
    for part in ["launch agent socket", run, host] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    (0..SOCKET_NAME_COUNT).map(move |number| {
        let hash = hasher.clone().update(&number.to_le_bytes()).finalize();
        format!("launch-{}", &hash.to_hex()[..40])
    })
}

/// Returns whether the process at the other end of a Unix socket belongs to the user of this
/// process or to root. For a connecting socket, this is the process that listens.
fn is_peer_of_user_or_root(socket: &impl AsFd) -> bool {
    let credentials = getsockopt(socket, PeerCredentials);
    credentials.is_ok_and(|peer| peer.uid() == 0 || peer.uid() == nix::unistd::geteuid().as_raw())
}

/// Connects to the Unix socket of the run's agent on this host, if such an agent is alive. Returns
/// `None` if there is none. Fails on a system without abstract sockets. Never blocks.
fn connect_to_agent_socket(key: &JobSecretKey, run: &str, host: &str) -> io::Result<Option<StdStream>> {
    for name in derive_socket_names(key, run, host) {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        match connect(socket.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?) {
            Ok(()) if is_peer_of_user_or_root(&socket) => return Ok(Some(socket.into())),
            // No process listens, or one that does not accept connections, as an agent does.
            Ok(()) | Err(Errno::ECONNREFUSED | Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Makes this agent listen on a Unix socket with the first of the agent's possible socket names
/// that is free. Fails if no name is free, or on a system without abstract sockets.
fn bind_first_free_name(terms: &SupervisionTerms) -> io::Result<StdListener> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for name in derive_socket_names(&terms.key, &terms.run, &terms.host) {
        match StdListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            result => return result,
        }
    }
    Err(last)
}

/// Binds the Unix socket of this agent unless another agent of the run is alive on this host. Fails
/// with [`io::ErrorKind::AddrInUse`] if one is.
fn bind_unless_in_use(terms: &SupervisionTerms) -> io::Result<StdListener> {
    match connect_to_agent_socket(&terms.key, &terms.run, &terms.host)? {
        Some(_) => Err(io::ErrorKind::AddrInUse.into()),
        None => bind_first_free_name(terms),
    }
}

/// The reason why an agent cannot become the only agent of its run on this host.
#[derive(Debug)]
pub(super) enum HostLockError {
    /// The agent on the host obeys a later controller, which has this token.
    Replaced(ControllerToken),
    /// Another agent of the run is alive on the host and does not end.
    InUse(Diagnostic),
}

/// Makes the calling agent the only agent of its run on this host: binds the agent's Unix socket,
/// and asks an older agent of the run to end. Returns the listener of the agent's socket, or `None`
/// on a system without abstract sockets. Fails if the older agent does not end.
pub(super) async fn lock_host(terms: &SupervisionTerms) -> Result<Option<StdListener>, HostLockError> {
    let deadline = Instant::now() + EVICTION_TIMEOUT;
    let mut eviction = Box::pin(request_agent_eviction(terms));
    let mut has_answered = false;
    loop {
        match bind_unless_in_use(terms) {
            Ok(listener) => return Ok(Some(listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                let answer = tokio::select! {
                    answer = &mut eviction, if !has_answered => Some(answer),
                    () = sleep(EXIT_CHECK_INTERVAL) => None,
                };
                match answer {
                    Some(Ok(Some(FromAgent::NotAdopted(AttachRejection::Controlled { token, .. }))))
                        if token > terms.token =>
                    {
                        return Err(HostLockError::Replaced(token));
                    }
                    // The older agent has accepted no connection yet.
                    Some(Err(_)) => {
                        sleep(EXIT_CHECK_INTERVAL).await;
                        eviction = Box::pin(request_agent_eviction(terms));
                    }
                    Some(Ok(_)) => has_answered = true,
                    None => {}
                }
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let message = format!(
                    "an agent of an earlier attempt of this run is still alive on host {}",
                    terms.host
                );
                let error = Diagnostic::error(host::HOST_IN_USE, message).with_subject(&terms.host);
                return Err(HostLockError::InUse(error));
            }
            Err(_) => return Ok(None),
        }
    }
}

/// Asks the older agent of the run on this host to end, and waits for that agent's answer. Returns
/// `None` if the agent has ended without an answer.
async fn request_agent_eviction(terms: &SupervisionTerms) -> Result<Option<FromAgent>, AttachRejection> {
    let request = AttachRequest {
        version: PROTOCOL_VERSION,
        run: terms.run.clone(),
        host: terms.host.clone(),
        key: terms.key.clone(),
        token: terms.token,
        host_lease_ms: terms.host_lease_ms,
        purpose: AttachPurpose::Evict { below: terms.number },
    };
    // The connection ends when its output is dropped.
    let (mut input, _output) = send_request_to_agent(&request).await?;
    Ok(read_frame(&mut input).await.ok().flatten())
}

/// Connects to the agent of the run that is already alive on this host, and asks it to obey another
/// controller or to end. Returns the connection, on which the agent answers.
pub(super) async fn send_request_to_agent(
    request: &AttachRequest,
) -> Result<(SocketReader, SocketWriter), AttachRejection> {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        let message = "cannot reach the agent that is alive on the host";
        AttachRejection::Failed(
            Diagnostic::error(host::AGENT_UNREACHABLE, message).with_subject(&request.host).with_cause(error),
        )
    };
    let found =
        connect_to_agent_socket(&request.key, &request.run, &request.host).map_err(|error| failed(&error))?;
    let stream = found.ok_or(AttachRejection::NoAgent)?;
    let connect = async {
        let stream = UnixStream::from_std(stream)?;
        let key = HandshakeKey::from_job_key(&request.key);
        let (stream, _) = authenticate_agent(stream, &key).await?;
        let (input, mut output) = stream.into_halves(UnixStream::into_split);
        let frame = encode_frame(&ToAgent::Attach(Box::new(request.clone())));
        write_frame(&mut output, &frame.map_err(io::Error::other)?).await?;
        Ok((input, output))
    };
    let connected = timeout(HANDSHAKE_TIMEOUT, connect).await.unwrap_or(Err(HandshakeError::Timeout));
    connected.map_err(|error| failed(&error))
}

/// Accepts connections on the Unix socket of an agent, and makes the other side of each prove that
/// it has the key of the run. Sends each authenticated connection to `requests`, together with its
/// request.
pub(super) async fn accept_connections(
    listener: StdListener,
    terms: SupervisionTerms,
    requests: mpsc::Sender<AttachConnection>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let (limit, terms) = (Arc::new(Semaphore::new(MAX_CONCURRENT_HANDSHAKES)), Arc::new(terms));
    loop {
        let Ok(permit) = limit.clone().acquire_owned().await else { return Ok(()) };
        let (stream, _) = listener.accept().await?;
        if !is_peer_of_user_or_root(&stream) {
            continue;
        }
        let (terms, requests) = (terms.clone(), requests.clone());
        tokio::spawn(async move {
            let received = timeout(HANDSHAKE_TIMEOUT, authenticate_and_read_request(stream, &terms)).await;
            if let Ok(Ok(connection)) = received {
                // An error means that the agent ends.
                _ = requests.send(connection).await;
            }
            drop(permit);
        });
    }
}

/// Authenticates a process that has connected to the agent's Unix socket, and reads the request of
/// that process to control or to end the agent.
async fn authenticate_and_read_request(
    stream: UnixStream,
    terms: &SupervisionTerms,
) -> Result<AttachConnection, HandshakeError> {
    let key = HandshakeKey::from_job_key(&terms.key);
    let verified = authenticate_controller(stream, &key, &terms.host).await?;
    let (mut input, output) = verified.send_proof_of_key().await?.into_halves(UnixStream::into_split);
    let message: Result<Option<ToAgent>, FrameError> = read_frame(&mut input).await;
    match message {
        Ok(Some(ToAgent::Attach(request))) if request.version == PROTOCOL_VERSION => {
            Ok(AttachConnection { input, output, request: *request })
        }
        Ok(Some(ToAgent::Attach(request))) => {
            let message = format!(
                "the agent on host {} speaks version {PROTOCOL_VERSION} of the control protocol, and the new \
                 controller version {}",
                terms.host, request.version
            );
            let error = Diagnostic::error(diagnostic::codes::run::AGENT_VERSION_MISMATCH, message)
                .with_help("attach with the build of launch that started the run");
            reject_request(output, AttachRejection::Failed(error)).await;
            Err(HandshakeError::WrongProtocol)
        }
        _ => Err(HandshakeError::WrongProtocol),
    }
}

/// Writes `frame`, an encoded message, to a connection that another process has opened to the
/// agent's Unix socket.
async fn write_frame(output: &mut SocketWriter, frame: &[u8]) -> io::Result<()> {
    output.write_all(frame).await?;
    output.flush().await
}

/// Sends the reason `rejection` to a process that wants to control or end this agent but may not,
/// and closes the connection.
pub(super) async fn reject_request(mut output: SocketWriter, rejection: AttachRejection) {
    if let Ok(frame) = encode_frame(&FromAgent::NotAdopted(rejection)) {
        // An error means that the other side has ended.
        _ = timeout(HANDSHAKE_TIMEOUT, write_frame(&mut output, &frame)).await;
    }
}

/// Sends a message to each later agent that has asked this agent to end, with the information that
/// all workers of this agent have ended.
pub(super) async fn notify_evictors_of_agent_end(connections: Vec<AttachConnection>) {
    let Ok(frame) = encode_frame(&FromAgent::WorkersEnded { attempt: 0 }) else { return };
    for mut connection in connections {
        // An error means that the other side has ended.
        _ = timeout(HANDSHAKE_TIMEOUT, write_frame(&mut connection.output, &frame)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobspec::ControllerLossAction;

    /// Builds the terms of an agent of the run `run`.
    fn build_terms(run: &str, number: u64) -> SupervisionTerms {
        SupervisionTerms {
            run: run.to_owned(),
            host: "h0".into(),
            key: JobSecretKey([7; 32]),
            token: ControllerToken { epoch: 1, id: 5 },
            number,
            host_lease_ms: 5000,
            controller_lease_ms: 60_000,
            on_controller_loss: ControllerLossAction::Continue,
            controller_timeout_ms: 900_000,
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(future)
    }

    #[test]
    fn a_later_agent_evicts_an_older_one_that_ends_when_it_is_asked() {
        let run = format!("evict-{}", std::process::id());
        block_on(async {
            let older = lock_host(&build_terms(&run, 1)).await.expect("free").expect("a socket");
            let (sender, mut requests) = mpsc::channel(1);
            let accepting = tokio::spawn(accept_connections(older, build_terms(&run, 1), sender));
            let later_terms = build_terms(&run, 2);
            let (later, ()) = tokio::join!(lock_host(&later_terms), async {
                let connection = requests.recv().await.expect("a request");
                assert_eq!(connection.request.purpose, AttachPurpose::Evict { below: 2 });
                assert_eq!(connection.request.token, later_terms.token);
                accepting.abort();
            });
            assert!(later.expect("evicted").is_some());
        });
    }

    #[test]
    fn an_agent_of_a_later_controller_keeps_its_host() {
        let run = format!("replaced-{}", std::process::id());
        let newer = ControllerToken { epoch: 2, id: 1 };
        block_on(async {
            let listener = lock_host(&build_terms(&run, 1)).await.expect("free").expect("a socket");
            let (sender, mut requests) = mpsc::channel(1);
            tokio::spawn(accept_connections(listener, build_terms(&run, 1), sender));
            let later_terms = build_terms(&run, 2);
            let (locked, ()) = tokio::join!(lock_host(&later_terms), async {
                let connection = requests.recv().await.expect("a request");
                let rejection = AttachRejection::Controlled { token: newer, silent_ms: 0 };
                reject_request(connection.output, rejection).await;
            });
            assert!(matches!(locked, Err(HostLockError::Replaced(token)) if token == newer), "{locked:?}");
        });
    }

    #[test]
    fn a_request_without_an_agent_or_with_another_key_is_rejected() {
        let run = format!("key-{}", std::process::id());
        block_on(async {
            let mut request = AttachRequest {
                version: PROTOCOL_VERSION,
                run: run.clone(),
                host: "h0".into(),
                key: JobSecretKey([7; 32]),
                token: ControllerToken::default(),
                host_lease_ms: 5000,
                purpose: AttachPurpose::Adopt,
            };
            assert_eq!(
                send_request_to_agent(&request).await.map(drop).expect_err("no agent"),
                AttachRejection::NoAgent
            );
            let listener = lock_host(&build_terms(&run, 1)).await.expect("free").expect("a socket");
            let mut other = build_terms(&run, 1);
            other.key = JobSecretKey([8; 32]);
            let (sender, mut requests) = mpsc::channel(1);
            tokio::spawn(accept_connections(listener, other, sender));
            let rejection = send_request_to_agent(&request).await.map(drop).expect_err("another key");
            assert!(matches!(rejection, AttachRejection::Failed(_)), "{rejection:?}");
            assert!(requests.try_recv().is_err());
            // Another key leads to another socket.
            request.key = JobSecretKey([9; 32]);
            assert_eq!(
                send_request_to_agent(&request).await.map(drop).expect_err("no agent"),
                AttachRejection::NoAgent
            );
        });
    }
}

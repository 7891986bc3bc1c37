//! [`StoreServer`]: the network server of the rendezvous store, which speaks torch's `TCPStore`
//! protocol. The server has a separate thread and runtime, so that thousands of clients and the
//! controller do not delay each other.
//!
//! Connections of other users of this machine, and from hosts that do not belong to the job, are
//! closed. Addresses are never resolved to names.
use super::{
    StoreClientError,
    admission::AdmissionPolicy,
    core::{ClientId, RendezvousStore},
    limits::MAX_STORE_BYTES,
    wire::{self, RequestParseOutcome, StoreRequest},
};
use crate::warning_limit::WarningLimit;
use diagnostic::{Diagnostic, codes::run, quantity::format_count};
use nix::sys::{
    resource::{Resource, getrlimit},
    socket::{Backlog, listen},
};
use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr, TcpListener as StdListener},
    rc::Rc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::{Notify, mpsc, oneshot},
    task::LocalSet,
};

/// The largest number of simultaneous connections to the rendezvous store. Further connections are
/// closed with a warning. A rank has one or two connections.
const MAX_CONNECTIONS: usize = 65_536;
/// The number of open files that the process with the rendezvous store needs for itself, in
/// addition to one for each client.
const OTHER_OPEN_FILES: u64 = 64;
/// The largest number of bytes that the store reads at once from the socket of a client.
const READ_CHUNK_BYTES: usize = 64 << 10;
/// The size in bytes of the unsent replies to a client at which the server sends them before it
/// executes the client's next request.
const REPLY_BATCH_BYTES: usize = 256 << 10;
/// How long a client of the rendezvous store may take to send the handshake after it has connected.
/// After this time, the server closes the connection.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the rendezvous store waits before it accepts connections again, after file descriptors
/// have run out.
const FAILED_ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A running rendezvous store, launch's server for torch's `TCPStore` clients. Dropping the server
/// closes every connection and frees the port.
#[derive(Debug)]
pub(crate) struct StoreServer {
    port: u16,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Starts a rendezvous store that listens at `port` (0: any free port) of `address`. It serves
    /// processes of this user on this machine, and processes at the `allowed` addresses. `messages`
    /// receives lines for the user.
    pub(crate) fn start(
        address: IpAddr,
        port: u16,
        allowed: &[IpAddr],
        messages: mpsc::Sender<String>,
    ) -> io::Result<StoreServer> {
        Self::start_with_timeout(address, port, allowed, messages, HANDSHAKE_TIMEOUT)
    }

    /// Starts a rendezvous store that closes a connection if its first request, the handshake, does
    /// not arrive within `handshake_timeout`.
    fn start_with_timeout(
        address: IpAddr,
        port: u16,
        allowed: &[IpAddr],
        messages: mpsc::Sender<String>,
        handshake_timeout: Duration,
    ) -> io::Result<StoreServer> {
        let listener = StdListener::bind((address, port))?;
        // Connections from this machine to `address` have `address` as their source, too.
        let allowed: HashSet<IpAddr> = allowed.iter().chain([&address]).map(|ip| ip.to_canonical()).collect();
        let admission = AdmissionPolicy::new(allowed);
        // All ranks connect at the same moment, so the queue is as long as the kernel allows.
        listen(&listener, Backlog::MAXCONN)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = thread::Builder::new().name("store".into()).spawn(move || {
            let state = ServerState::new(messages, handshake_timeout);
            let local = LocalSet::new();
            local.block_on(&runtime, async {
                tokio::select! {
                    _ = stopped => {}
                    () = accept_clients(listener, admission, state) => {}
                }
            });
        })?;
        Ok(StoreServer { port, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the number of the port at which the rendezvous store listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Fails if the rendezvous store cannot serve `clients` clients at once, because of
    /// [`MAX_CONNECTIONS`] or because the process may open too few files.
    pub(crate) fn check_capacity(clients: u32) -> diagnostic::Result<()> {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| {
            let message = "cannot read the limit of open files for the rendezvous store";
            Diagnostic::error(run::RENDEZVOUS_TOO_MANY_RANKS, message).with_cause(&error)
        })?;
        check_open_file_limit(clients, hard)
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread that panicked has nothing left to close.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Fails if the rendezvous store cannot serve `clients` clients at once in a process that may have
/// at most `open_files` open files. Counts one connection per client, although newer versions of
/// torch open two if they can.
fn check_open_file_limit(clients: u32, open_files: u64) -> diagnostic::Result<()> {
    let error = |message: String| {
        Diagnostic::error(run::RENDEZVOUS_TOO_MANY_RANKS, message)
            .with_field("ranks", clients)
            .with_field("open_files", open_files)
    };
    if clients as usize > MAX_CONNECTIONS {
        let message = format!(
            "the rendezvous store serves at most {MAX_CONNECTIONS} clients, but the job has {clients} ranks"
        );
        return Err(error(message).with_help("let rank 0 serve the store (`cluster.store: rank0`)"));
    }
    if u64::from(clients) + OTHER_OPEN_FILES > open_files {
        let message = format!(
            "the rendezvous store for {clients} ranks needs {} open files, but the limit is {open_files}",
            u64::from(clients) + OTHER_OPEN_FILES
        );
        return Err(error(message).with_help(
            "raise the hard limit (`ulimit -Hn`), or let rank 0 serve the store (`cluster.store: rank0`)",
        ));
    }
    Ok(())
}

/// The state that all connections to a rendezvous store share, such as the stored values and the
/// unsent replies to each client.
struct ServerState {
    store: RefCell<RendezvousStore>,
    /// The unwritten replies to each client.
    reply_buffers: RefCell<HashMap<ClientId, Rc<ReplyBuffer>>>,
    /// The number of bytes of incomplete requests and unwritten replies, over all connections.
    buffered: RefCell<usize>,
    /// The buffer into which bytes are read from a socket before they are appended to the input of
    /// its connection.
    scratch: RefCell<Vec<u8>>,
    messages: mpsc::Sender<String>,
    warning_limit: RefCell<WarningLimit>,
    handshake_timeout: Duration,
}

/// The replies to one client of the rendezvous store that the server has not written to the
/// client's socket yet.
#[derive(Default)]
struct ReplyBuffer {
    bytes: RefCell<Vec<u8>>,
    /// Notified when the request of another client has added a reply to this buffer.
    filled: Notify,
}

impl ServerState {
    /// Creates the shared state of a rendezvous store that has no clients yet.
    fn new(messages: mpsc::Sender<String>, handshake_timeout: Duration) -> Self {
        ServerState {
            store: RefCell::default(),
            reply_buffers: RefCell::default(),
            buffered: RefCell::new(0),
            scratch: RefCell::new(vec![0; READ_CHUNK_BYTES]),
            messages,
            warning_limit: RefCell::default(),
            handshake_timeout,
        }
    }

    /// Queues a warning about the rendezvous store for output to the user. Drops the warning if the
    /// channel of messages is full.
    fn warn_user(&self, text: String) {
        _ = self.messages.try_send(format!("launch: rendezvous store: {text}"));
    }

    /// Shows the user a warning about a client of the rendezvous store, but only one per interval
    /// for each IP address.
    fn warn_about_peer(&self, peer: SocketAddr, text: &str) {
        tracing::debug!(target: "store", %peer, text, "warning");
        let omitted = self.warning_limit.borrow_mut().admit_warning(peer.ip(), Instant::now());
        match omitted {
            None => {}
            Some(0) => self.warn_user(text.to_owned()),
            Some(n) => self.warn_user(format!("{text} ({} omitted)", format_count(n, "similar message"))),
        }
    }
}

/// Accepts connections to the rendezvous store, and starts a task for each connection that the
/// policy `admission` allows. Warns the user about rejected connections. Returns only if the
/// listener cannot be used.
async fn accept_clients(listener: StdListener, mut admission: AdmissionPolicy, state: ServerState) {
    let shared = Rc::new(state);
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return shared.warn_user(format!("cannot serve: {error}")),
    };
    let mut has_warned_of_users = false;
    for client in 0.. {
        let (stream, peer) = accept_connection(&listener, &shared).await;
        // Without its local address, the connection is closed already.
        let Ok(local) = stream.local_addr() else { continue };
        let admitted = admission.admit(peer, local);
        if !admission.identifies_local_users() && !std::mem::replace(&mut has_warned_of_users, true) {
            let text = "the kernel does not report the users of connections, so every user of this machine \
                        can connect";
            shared.warn_user(text.to_owned());
        }
        match admitted {
            Err(error) => {
                shared.warn_about_peer(peer, &format!("rejected a connection from {}: {error}", peer.ip()));
            }
            Ok(_) if shared.reply_buffers.borrow().len() >= MAX_CONNECTIONS => {
                let text = format!(
                    "rejected a connection from {peer}: the limit of {MAX_CONNECTIONS} connections is reached"
                );
                shared.warn_about_peer(peer, &text);
            }
            Ok(admitted_by) => {
                tracing::debug!(target: "store", %peer, %admitted_by, "accepted a connection");
                tokio::task::spawn_local(ClientConnection::serve_client(
                    client,
                    stream,
                    peer,
                    shared.clone(),
                ));
            }
        }
    }
}

/// Waits for the next connection to the rendezvous store and accepts it. Warns the user once if
/// open files have run out.
async fn accept_connection(listener: &TcpListener, shared: &ServerState) -> (TcpStream, SocketAddr) {
    let mut has_warned = false;
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            // The client has closed the connection already.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                if !std::mem::replace(&mut has_warned, true) {
                    shared.warn_user(format!(
                        "cannot accept more connections at the moment: {error} (see `ulimit -n`)"
                    ));
                }
                tokio::time::sleep(FAILED_ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The connection of a client of the rendezvous store, with the input that was not parsed yet.
struct ClientConnection {
    client: ClientId,
    stream: TcpStream,
    shared: Rc<ServerState>,
    reply_buffer: Rc<ReplyBuffer>,
    input: Vec<u8>,
    /// How many unparsed bytes `input` must have before its first request is parsed again.
    needed: usize,
    /// Whether the client has sent the handshake of the protocol.
    validated: bool,
    /// The number of bytes of replies that have left the reply buffer and are being written.
    writing: usize,
}

impl ClientConnection {
    /// Serves a client of the rendezvous store until the connection ends. Warns the user if the
    /// client violates the protocol or a limit.
    async fn serve_client(client: ClientId, stream: TcpStream, peer: SocketAddr, shared: Rc<ServerState>) {
        // Replies are small, and the client waits for them.
        _ = stream.set_nodelay(true);
        let reply_buffer = Rc::new(ReplyBuffer::default());
        shared.reply_buffers.borrow_mut().insert(client, reply_buffer.clone());
        let (input, needed) = (Vec::new(), 1);
        let mut connection = ClientConnection {
            client,
            stream,
            shared,
            reply_buffer,
            input,
            needed,
            validated: false,
            writing: 0,
        };
        if let Err(error) = connection.serve_requests().await {
            let text = format!("closed the connection of {peer}: {error}");
            connection.shared.warn_about_peer(peer, &text);
        }
    }

    /// Reads and executes requests of a client of the rendezvous store until the client closes the
    /// connection. Fails if the client violates the protocol or a limit, or sends no handshake in
    /// time.
    async fn serve_requests(&mut self) -> Result<(), StoreClientError> {
        let handshake_deadline = tokio::time::Instant::now() + self.shared.handshake_timeout;
        loop {
            if self.write_replies().await.is_err() {
                return Ok(());
            }
            tokio::select! {
                readable = self.stream.readable() => match readable.and_then(|()| self.read_input()) {
                    Ok(0) => return Ok(()),
                    Ok(_) => self.handle_requests().await?,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return Ok(()),
                },
                () = self.reply_buffer.filled.notified() => {}
                () = tokio::time::sleep_until(handshake_deadline), if !self.validated => {
                    return Err(StoreClientError::HandshakeTimeout);
                }
            }
        }
    }

    /// Writes the replies that wait in the client's reply buffer to the client's socket.
    async fn write_replies(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut *self.reply_buffer.bytes.borrow_mut());
        self.writing = bytes.len();
        self.stream.write_all(&bytes).await?;
        self.writing = 0;
        *self.shared.buffered.borrow_mut() -= bytes.len();
        Ok(())
    }

    /// Reads the bytes that have arrived at the client's socket, without blocking, and appends them
    /// to the unparsed input. Returns their number, which is 0 at the end of the stream.
    fn read_input(&mut self) -> io::Result<usize> {
        let mut scratch = self.shared.scratch.borrow_mut();
        let n = self.stream.try_read(&mut scratch)?;
        self.input.extend_from_slice(&scratch[..n]);
        *self.shared.buffered.borrow_mut() += n;
        Ok(n)
    }

    /// Executes every complete request that has arrived from the client of the store, and removes
    /// it from the input. Fails if the client violates the protocol or a limit, or if the buffers
    /// of all connections and the store together exceed [`MAX_STORE_BYTES`] bytes.
    async fn handle_requests(&mut self) -> Result<(), StoreClientError> {
        let mut consumed = 0;
        while self.input.len() - consumed >= self.needed {
            match wire::parse_request(&self.input[consumed..]) {
                RequestParseOutcome::Complete(request, length) => {
                    (consumed, self.needed) = (consumed + length, 1);
                    self.handle_request(request)?;
                    if self.reply_buffer.bytes.borrow().len() > REPLY_BATCH_BYTES
                        && self.write_replies().await.is_err()
                    {
                        break; // The client has closed the connection, which the next read finds.
                    }
                }
                RequestParseOutcome::Incomplete(needed) => self.needed = needed,
                RequestParseOutcome::Malformed(error) => return Err(error),
            }
        }
        self.input.drain(..consumed);
        if self.input.is_empty() {
            // Frees the buffer, because thousands of clients may be idle.
            self.input = Vec::new();
        }
        *self.shared.buffered.borrow_mut() -= consumed;
        let bytes = *self.shared.buffered.borrow() + self.shared.store.borrow().total_bytes();
        match bytes > MAX_STORE_BYTES {
            true => Err(StoreClientError::BuffersFull),
            false => Ok(()),
        }
    }

    /// Executes a request of this client on the rendezvous store. Puts each reply, which may be for
    /// other clients, into the reply buffer of its client. Fails if the first request is not the
    /// handshake, or if the store rejects the request.
    fn handle_request(&mut self, request: StoreRequest) -> Result<(), StoreClientError> {
        match request {
            StoreRequest::Validate => self.validated = true,
            _ if !self.validated => return Err(StoreClientError::NotValidated),
            _ => {}
        }
        let mut replies = Vec::new();
        let result = self.shared.store.borrow_mut().handle_request(self.client, request, &mut replies);
        let reply_buffers = self.shared.reply_buffers.borrow();
        for (client, reply) in replies {
            if let Some(reply_buffer) = reply_buffers.get(&client) {
                let mut bytes = reply_buffer.bytes.borrow_mut();
                let before = bytes.len();
                wire::encode_reply(&reply, &mut bytes);
                *self.shared.buffered.borrow_mut() += bytes.len() - before;
                if client != self.client {
                    reply_buffer.filled.notify_one();
                }
            }
        }
        result
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        self.shared.store.borrow_mut().end_wait(self.client);
        self.shared.reply_buffers.borrow_mut().remove(&self.client);
        let unwritten = self.writing + self.reply_buffer.bytes.borrow().len();
        *self.shared.buffered.borrow_mut() -= self.input.len() + unwritten;
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;

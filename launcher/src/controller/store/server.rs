//! [`StoreServer`]: the sockets of the rendezvous store, on a separate thread and runtime, so that
//! thousands of clients and the controller do not delay each other.
//!
//! Connections from other hosts than the job's are closed; addresses are never resolved to names.
use super::{
    ClientError,
    core::{Client, MAX_TOTAL, Store},
    wire::{self, Parsed, Request},
};
use diagnostic::{Diagnostic, codes::run};
use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    socket::{Backlog, listen},
};
use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr, TcpListener as StdListener},
    rc::Rc,
    thread::{self, JoinHandle},
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::{Notify, mpsc, oneshot},
    task::LocalSet,
};

/// Limit of simultaneous connections. A rank has one or two.
const MAX_CONNECTIONS: usize = 65_536;
/// Files that the process has open in addition to the connections.
const OTHER_FILES: u64 = 64;
/// Size of one read, bytes.
const CHUNK: usize = 64 << 10;
/// Replies are written when they reach this size, even if more requests are waiting, bytes.
const BATCH: usize = 256 << 10;
/// Between two attempts to accept when descriptors have run out.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(50);

/// A running store; dropping it closes every connection.
#[derive(Debug)]
pub(crate) struct StoreServer {
    port: u16,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Binds `port` (0: any free one) at `address`, and serves processes on this machine and the
    /// `allowed` addresses. `messages` receives lines for the user.
    pub(crate) fn start(
        address: IpAddr,
        port: u16,
        allowed: &[IpAddr],
        messages: mpsc::Sender<String>,
    ) -> io::Result<StoreServer> {
        let listener = StdListener::bind((address, port))?;
        // A process on this machine that connects to this address also comes from it.
        let allowed: HashSet<IpAddr> = allowed.iter().chain([&address]).map(|ip| ip.to_canonical()).collect();
        // All ranks connect at the same moment, so the queue is as long as the kernel allows.
        listen(&listener, Backlog::MAXCONN)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = thread::Builder::new().name("store".into()).spawn(move || {
            let local = LocalSet::new();
            local.block_on(&runtime, async {
                tokio::select! {
                    _ = stopped => {}
                    () = serve(listener, allowed, messages) => {}
                }
            });
        })?;
        Ok(StoreServer { port, stop: Some(stop), thread: Some(thread) })
    }

    /// The port that the store listens on.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Checks that the store can serve this many clients.
    pub(crate) fn check_capacity(clients: u32) -> diagnostic::Result<()> {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(|error| {
            let message = "cannot read the limit of open files for the rendezvous store";
            Diagnostic::error(run::RENDEZVOUS_TOO_MANY_RANKS, message).with_cause(&error)
        })?;
        check_file_limit(clients, hard)
    }

    /// Raises the soft limit of open files to the hard limit, because each client is an open file.
    /// Processes that are started afterwards inherit the limit.
    pub(crate) fn raise_file_limit() {
        if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
            // If it fails, late clients wait in the queue, and the user is warned then.
            _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
        }
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread that panicked has nothing left to close.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A rank has one connection, in newer versions of torch two; at least one must be possible.
fn check_file_limit(clients: u32, open_files: u64) -> diagnostic::Result<()> {
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
    if u64::from(clients) + OTHER_FILES > open_files {
        let message = format!(
            "the rendezvous store for {clients} ranks needs {} open files, but the limit is {open_files}",
            u64::from(clients) + OTHER_FILES
        );
        return Err(error(message).with_help(
            "raise the hard limit (`ulimit -Hn`), or let rank 0 serve the store (`cluster.store: rank0`)",
        ));
    }
    Ok(())
}

/// The state that all connections share.
struct SharedState {
    store: RefCell<Store>,
    mailboxes: RefCell<HashMap<Client, Rc<Mailbox>>>,
    /// Bytes of incomplete requests and unwritten replies.
    buffered: RefCell<usize>,
    scratch: RefCell<Vec<u8>>,
    messages: mpsc::Sender<String>,
}

/// Replies that the task of a client has not written yet.
#[derive(Default)]
struct Mailbox {
    bytes: RefCell<Vec<u8>>,
    filled: Notify,
}

impl SharedState {
    fn warn(&self, text: String) {
        // A client that floods the store with errors gets no more lines than the channel can hold.
        _ = self.messages.try_send(format!("launch: rendezvous store: {text}"));
    }
}

async fn serve(listener: StdListener, peers: HashSet<IpAddr>, messages: mpsc::Sender<String>) {
    let shared = Rc::new(SharedState {
        store: RefCell::default(),
        mailboxes: RefCell::default(),
        buffered: RefCell::new(0),
        scratch: RefCell::new(vec![0; CHUNK]),
        messages,
    });
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return shared.warn(format!("cannot serve: {error}")),
    };
    let mut has_warned = false;
    for client in 0.. {
        let (stream, peer) = loop {
            match listener.accept().await {
                Ok(accepted) => break accepted,
                // The client has closed the connection already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut has_warned, true) {
                        shared.warn(format!(
                            "cannot accept more connections at the moment: {error} (see `ulimit -n`)"
                        ));
                    }
                    tokio::time::sleep(ACCEPT_INTERVAL).await;
                }
            }
        };
        if !is_allowed(&peers, peer) {
            shared.warn(format!("rejected a connection from {}, which is not a host of this job", peer.ip()));
        } else if shared.mailboxes.borrow().len() >= MAX_CONNECTIONS {
            shared.warn(format!(
                "rejected a connection from {peer}: the limit of {MAX_CONNECTIONS} connections is reached"
            ));
        } else {
            tokio::task::spawn_local(Connection::run(client, stream, peer, shared.clone()));
        }
    }
}

/// Whether the peer is on this machine or on a host of the job.
fn is_allowed(peers: &HashSet<IpAddr>, peer: SocketAddr) -> bool {
    let ip = peer.ip().to_canonical();
    ip.is_loopback() || peers.contains(&ip)
}

struct Connection {
    client: Client,
    stream: TcpStream,
    shared: Rc<SharedState>,
    mailbox: Rc<Mailbox>,
    input: Vec<u8>,
    /// The number of bytes of `input` from which on parsing can continue.
    needed: usize,
    validated: bool,
    /// Bytes of replies that have left the mailbox and are being written.
    writing: usize,
}

impl Connection {
    async fn run(client: Client, stream: TcpStream, peer: SocketAddr, shared: Rc<SharedState>) {
        // Replies are small, and the client waits for them.
        _ = stream.set_nodelay(true);
        let mailbox = Rc::new(Mailbox::default());
        shared.mailboxes.borrow_mut().insert(client, mailbox.clone());
        let (input, needed) = (Vec::new(), 1);
        let mut connection =
            Connection { client, stream, shared, mailbox, input, needed, validated: false, writing: 0 };
        if let Err(error) = connection.serve().await {
            connection.shared.warn(format!("closed the connection of {peer}: {error}"));
        }
    }

    /// Serves until the client closes the connection, or makes an error.
    async fn serve(&mut self) -> Result<(), ClientError> {
        loop {
            if self.write().await.is_err() {
                return Ok(());
            }
            tokio::select! {
                readable = self.stream.readable() => match readable.and_then(|()| self.read()) {
                    Ok(0) => return Ok(()),
                    Ok(_) => self.handle_requests().await?,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return Ok(()),
                },
                () = self.mailbox.filled.notified() => {}
            }
        }
    }

    /// Writes the replies in the mailbox.
    async fn write(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut *self.mailbox.bytes.borrow_mut());
        self.writing = bytes.len();
        self.stream.write_all(&bytes).await?;
        self.writing = 0;
        *self.shared.buffered.borrow_mut() -= bytes.len();
        Ok(())
    }

    fn read(&mut self) -> io::Result<usize> {
        let mut scratch = self.shared.scratch.borrow_mut();
        let n = self.stream.try_read(&mut scratch)?;
        self.input.extend_from_slice(&scratch[..n]);
        *self.shared.buffered.borrow_mut() += n;
        Ok(n)
    }

    /// Handles every complete request.
    async fn handle_requests(&mut self) -> Result<(), ClientError> {
        let mut at = 0;
        while self.input.len() - at >= self.needed {
            match wire::parse(&self.input[at..]) {
                Parsed::Complete(request, length) => {
                    (at, self.needed) = (at + length, 1);
                    self.handle(request)?;
                    if self.mailbox.bytes.borrow().len() > BATCH && self.write().await.is_err() {
                        break; // closed by the client, which the next read finds
                    }
                }
                Parsed::Incomplete(needed) => self.needed = needed,
                Parsed::Malformed(error) => return Err(error),
            }
        }
        self.input.drain(..at);
        if self.input.is_empty() {
            // Frees the buffer, because thousands of clients may be idle.
            self.input = Vec::new();
        }
        *self.shared.buffered.borrow_mut() -= at;
        let bytes = *self.shared.buffered.borrow() + self.shared.store.borrow().bytes();
        match bytes > MAX_TOTAL {
            true => Err(ClientError::BuffersFull),
            false => Ok(()),
        }
    }

    fn handle(&mut self, request: Request) -> Result<(), ClientError> {
        match request {
            Request::Validate => self.validated = true,
            _ if !self.validated => return Err(ClientError::NotValidated),
            _ => {}
        }
        let mut replies = Vec::new();
        let result = self.shared.store.borrow_mut().handle(self.client, request, &mut replies);
        let mailboxes = self.shared.mailboxes.borrow();
        for (client, reply) in replies {
            if let Some(mailbox) = mailboxes.get(&client) {
                let mut bytes = mailbox.bytes.borrow_mut();
                let before = bytes.len();
                wire::encode(&reply, &mut bytes);
                *self.shared.buffered.borrow_mut() += bytes.len() - before;
                if client != self.client {
                    mailbox.filled.notify_one();
                }
            }
        }
        result
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.store.borrow_mut().remove_client(self.client);
        self.shared.mailboxes.borrow_mut().remove(&self.client);
        let unwritten = self.writing + self.mailbox.bytes.borrow().len();
        *self.shared.buffered.borrow_mut() -= self.input.len() + unwritten;
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;

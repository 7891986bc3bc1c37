//! The store's sockets: a thread of its own with a runtime of its own, so that thousands of clients and the controller
//! never wait for one another. Peers outside the list are turned away by address; no name is ever looked up.
use super::{
    core::{Client, MAX_TOTAL, Store},
    wire::{self, Parsed, Request},
};
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

/// Most connections at once. A rank has one or two.
const MAX_CONNECTIONS: usize = 65_536;
/// Files that its process has open beside them.
const OTHER_FILES: u64 = 64;
/// Bytes read at once.
const CHUNK: usize = 64 << 10;
/// Replies gathered before they are written while more requests are at hand, bytes.
const BATCH: usize = 256 << 10;
/// Between two tries to accept when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A running store; dropping it closes every connection.
#[derive(Debug)]
pub(crate) struct Server {
    port: u16,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds `port` (0: any free one) at `address` and serves this machine's processes and the `allowed` peers. `talk`
    /// gets what a person should know.
    pub(crate) fn start(
        address: IpAddr,
        port: u16,
        allowed: &[IpAddr],
        talk: mpsc::Sender<String>,
    ) -> io::Result<Server> {
        let listener = StdListener::bind((address, port))?;
        // A process of this machine that connects to this address comes from it.
        let allowed: HashSet<IpAddr> = allowed.iter().chain([&address]).map(|ip| ip.to_canonical()).collect();
        // All ranks connect at the same moment: the longest queue that the kernel allows.
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
                    () = serve(listener, allowed, talk) => {}
                }
            });
        })?;
        Ok(Server { port, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Can so many clients be had? The error says what is missing.
    pub(crate) fn has_room(clients: u32) -> Result<(), String> {
        let (_, hard) =
            getrlimit(Resource::RLIMIT_NOFILE).map_err(|e| format!("no limit of open files: {e}"))?;
        room(clients, hard)
    }

    /// Lets this process open as many files as it may: each client is one. Processes that are started afterwards
    /// inherit that.
    pub(crate) fn make_room() {
        if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
            // Without it late clients wait in the queue, and the person is told why.
            _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread that panicked has nothing left to close.
        _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A rank has a connection, in newer versions of torch two: one must fit at least.
fn room(clients: u32, open_files: u64) -> Result<(), String> {
    let elsewhere = "or let rank 0 serve (`cluster.store: rank0`)";
    if clients as usize > MAX_CONNECTIONS {
        return Err(format!(
            "the rendezvous store has at most {MAX_CONNECTIONS} clients, and the job has {clients} ranks: use fewer, {elsewhere}"
        ));
    }
    if u64::from(clients) + OTHER_FILES > open_files {
        return Err(format!(
            "the rendezvous store of {clients} ranks needs as many open files, and this host allows a process              {open_files} (`ulimit -Hn`): raise that, {elsewhere}"
        ));
    }
    Ok(())
}

/// What all connections share.
struct Shared {
    store: RefCell<Store>,
    mailboxes: RefCell<HashMap<Client, Rc<Mailbox>>>,
    /// Unfinished requests, and replies that were not written yet, bytes.
    underway: RefCell<usize>,
    scratch: RefCell<Vec<u8>>,
    talk: mpsc::Sender<String>,
}

/// Replies for a client that its task has still to write.
#[derive(Default)]
struct Mailbox {
    bytes: RefCell<Vec<u8>>,
    filled: Notify,
}

impl Shared {
    fn tell(&self, text: String) {
        // Who floods the store with errors is heard as far as there is room.
        _ = self.talk.try_send(format!("launch: the rendezvous store {text}"));
    }
}

async fn serve(listener: StdListener, peers: HashSet<IpAddr>, talk: mpsc::Sender<String>) {
    let shared = Rc::new(Shared {
        store: RefCell::default(),
        mailboxes: RefCell::default(),
        underway: RefCell::new(0),
        scratch: RefCell::new(vec![0; CHUNK]),
        talk,
    });
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return shared.tell(format!("can't serve: {error}")),
    };
    let mut troubled = false;
    for client in 0.. {
        let (stream, peer) = loop {
            match listener.accept().await {
                Ok(accepted) => break accepted,
                // The client has gone already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        shared.tell(format!("can't accept more connections for now: {error} (ulimit -n?)"));
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        if !allowed(&peers, peer) {
            shared.tell(format!("turned away {}: not a host of this job", peer.ip()));
        } else if shared.mailboxes.borrow().len() >= MAX_CONNECTIONS {
            shared.tell(format!("turned away {peer}: there are {MAX_CONNECTIONS} connections"));
        } else {
            tokio::task::spawn_local(Connection::run(client, stream, peer, shared.clone()));
        }
    }
}

/// Only the job's own hosts take part.
fn allowed(peers: &HashSet<IpAddr>, peer: SocketAddr) -> bool {
    let ip = peer.ip().to_canonical();
    ip.is_loopback() || peers.contains(&ip)
}

struct Connection {
    client: Client,
    stream: TcpStream,
    shared: Rc<Shared>,
    mailbox: Rc<Mailbox>,
    input: Vec<u8>,
    /// Bytes of `input` that are needed to read on.
    need: usize,
    validated: bool,
    /// Replies that have left the mailbox and are being written, bytes.
    writing: usize,
}

impl Connection {
    async fn run(client: Client, stream: TcpStream, peer: SocketAddr, shared: Rc<Shared>) {
        // Answers are small and waited for.
        _ = stream.set_nodelay(true);
        let mailbox = Rc::new(Mailbox::default());
        shared.mailboxes.borrow_mut().insert(client, mailbox.clone());
        let (input, need) = (Vec::new(), 1);
        let mut connection =
            Connection { client, stream, shared, mailbox, input, need, validated: false, writing: 0 };
        if let Err(why) = connection.serve().await {
            connection.shared.tell(format!("closed the connection of {peer}: {why}"));
        }
    }

    /// Until the client leaves; the error says why it is sent away.
    async fn serve(&mut self) -> Result<(), String> {
        loop {
            if self.write().await.is_err() {
                return Ok(());
            }
            tokio::select! {
                readable = self.stream.readable() => match readable.and_then(|()| self.read()) {
                    Ok(0) => return Ok(()),
                    Ok(_) => self.carry_out().await?,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return Ok(()),
                },
                () = self.mailbox.filled.notified() => {}
            }
        }
    }

    /// Writes what others' requests, and its own, have brought it.
    async fn write(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut *self.mailbox.bytes.borrow_mut());
        self.writing = bytes.len();
        self.stream.write_all(&bytes).await?;
        self.writing = 0;
        *self.shared.underway.borrow_mut() -= bytes.len();
        Ok(())
    }

    fn read(&mut self) -> io::Result<usize> {
        let mut scratch = self.shared.scratch.borrow_mut();
        let n = self.stream.try_read(&mut scratch)?;
        self.input.extend_from_slice(&scratch[..n]);
        *self.shared.underway.borrow_mut() += n;
        Ok(n)
    }

    /// Carries out every request that is whole.
    async fn carry_out(&mut self) -> Result<(), String> {
        let mut at = 0;
        while self.input.len() - at >= self.need {
            match wire::parse(&self.input[at..]) {
                Parsed::Whole(request, length) => {
                    (at, self.need) = (at + length, 1);
                    self.ask(request)?;
                    if self.mailbox.bytes.borrow().len() > BATCH && self.write().await.is_err() {
                        break; // gone; reading will find that out
                    }
                }
                Parsed::Part(need) => self.need = need,
                Parsed::Malformed(why) => return Err(format!("{why}; it doesn't speak torch's protocol")),
            }
        }
        self.input.drain(..at);
        if self.input.is_empty() {
            // Thousands of clients may be idle.
            self.input = Vec::new();
        }
        *self.shared.underway.borrow_mut() -= at;
        let held = *self.shared.underway.borrow() + self.shared.store.borrow().bytes();
        match held > MAX_TOTAL {
            true => Err("unfinished requests and replies that nobody takes fill the memory".to_owned()),
            false => Ok(()),
        }
    }

    fn ask(&mut self, request: Request) -> Result<(), String> {
        match request {
            Request::Validate => self.validated = true,
            _ if !self.validated => {
                return Err(
                    "it didn't begin as torch 2.4 or later does (for others: `cluster.store: rank0`)"
                        .to_owned(),
                );
            }
            _ => {}
        }
        let mut replies = Vec::new();
        let done = self.shared.store.borrow_mut().handle(self.client, request, &mut replies);
        let mailboxes = self.shared.mailboxes.borrow();
        for (client, reply) in replies {
            if let Some(mailbox) = mailboxes.get(&client) {
                let mut bytes = mailbox.bytes.borrow_mut();
                let before = bytes.len();
                wire::encode(&reply, &mut bytes);
                *self.shared.underway.borrow_mut() += bytes.len() - before;
                if client != self.client {
                    mailbox.filled.notify_one();
                }
            }
        }
        done
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.store.borrow_mut().leave(self.client);
        self.shared.mailboxes.borrow_mut().remove(&self.client);
        let unwritten = self.writing + self.mailbox.bytes.borrow().len();
        *self.shared.underway.borrow_mut() -= self.input.len() + unwritten;
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;

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
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener as StdListener},
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
    /// Binds `port` (0: any free one) on the loopback interface and serves the peers of this machine. `talk` gets what
    /// a person should know.
    pub(crate) fn start(port: u16, talk: mpsc::Sender<String>) -> io::Result<Server> {
        let listener = StdListener::bind((Ipv4Addr::LOCALHOST, port))?;
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
                    () = serve(listener, talk) => {}
                }
            });
        })?;
        Ok(Server { port, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
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

/// What all connections share.
struct Shared {
    store: RefCell<Store>,
    mailboxes: RefCell<HashMap<Client, Rc<Mailbox>>>,
    /// Unfinished requests, bytes.
    unfinished: RefCell<usize>,
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

async fn serve(listener: StdListener, talk: mpsc::Sender<String>) {
    let shared = Rc::new(Shared {
        store: RefCell::default(),
        mailboxes: RefCell::default(),
        unfinished: RefCell::new(0),
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
        if !allowed(peer) {
            shared.tell(format!("turned away {}: not a host of this job", peer.ip()));
        } else if shared.mailboxes.borrow().len() >= MAX_CONNECTIONS {
            shared.tell(format!("turned away {peer}: there are {MAX_CONNECTIONS} connections"));
        } else {
            tokio::task::spawn_local(Connection::run(client, stream, peer, shared.clone()));
        }
    }
}

/// Only this machine's own processes take part.
fn allowed(peer: SocketAddr) -> bool {
    match peer.ip() {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.to_canonical().is_loopback(),
    }
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
}

impl Connection {
    async fn run(client: Client, stream: TcpStream, peer: SocketAddr, shared: Rc<Shared>) {
        // Answers are small and waited for.
        _ = stream.set_nodelay(true);
        let mailbox = Rc::new(Mailbox::default());
        shared.mailboxes.borrow_mut().insert(client, mailbox.clone());
        let (input, need) = (Vec::new(), 1);
        let mut connection = Connection { client, stream, shared, mailbox, input, need, validated: false };
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
        self.stream.write_all(&bytes).await
    }

    fn read(&mut self) -> io::Result<usize> {
        let mut scratch = self.shared.scratch.borrow_mut();
        let n = self.stream.try_read(&mut scratch)?;
        self.input.extend_from_slice(&scratch[..n]);
        *self.shared.unfinished.borrow_mut() += n;
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
        *self.shared.unfinished.borrow_mut() -= at;
        let held = *self.shared.unfinished.borrow() + self.shared.store.borrow().bytes();
        if held > MAX_TOTAL { Err("unfinished requests fill the memory".to_owned()) } else { Ok(()) }
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
                wire::encode(&reply, &mut mailbox.bytes.borrow_mut());
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
        *self.shared.unfinished.borrow_mut() -= self.input.len();
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;

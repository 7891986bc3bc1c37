//! Knowing that the peers live: heartbeats, farewells and aborts on a connection of their own beside each data connection, so
//! that they pass however much data is under way.
//!
//! A frame is a kind (u8), a length (u16, little-endian, at most [`REASON`]) and that many bytes. One thread per rank reads
//! all of them; whoever aborts writes at once.
use crate::{Comm, shm::ShmComm};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};
use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::AsFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// The longest reason that travels; a longer one is cut.
const REASON: usize = 1024;
/// Bytes of a frame's kind and length.
const HEAD: usize = 3;
/// The most time between two looks at the host's shared memory, where an abort leaves no bytes on a connection.
const GLANCE: Duration = Duration::from_millis(50);
/// Longest wait for the peers to take note of a farewell.
const LEAVE: Duration = Duration::from_secs(1);
/// How far a farewell or an abort may be behind the end of the data.
const FAREWELL: Duration = Duration::from_millis(200);
/// Heartbeats in the time after which silence means death.
const BEATS: u32 = 5;

const BEAT: u8 = 1;
const ABORT: u8 = 2;
const BYE: u8 = 3;

/// What the threads of a rank share.
pub(super) struct Shared {
    rank: usize,
    start: Instant,
    /// The first reason given.
    aborted: Mutex<Option<String>>,
    /// Readable for ever once the group is aborted.
    wake: EventFd,
    /// Readable when the watch thread shall leave.
    leaving: EventFd,
    /// By rank: it said farewell.
    left: Vec<AtomicBool>,
    /// By rank: when it was last heard, milliseconds since `start`; 0: never.
    heard: Vec<AtomicU64>,
    /// Where frames go out. A peer whose connection broke is taken out.
    out: Mutex<Vec<(usize, TcpStream)>>,
    shm: OnceLock<Arc<ShmComm>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // nothing panics while one is held
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(rank: usize, world: usize) -> std::io::Result<Self> {
        let event = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        Ok(Shared {
            rank,
            start: Instant::now(),
            aborted: Mutex::new(None),
            wake: event()?,
            leaving: event()?,
            left: (0..world).map(|_| AtomicBool::new(false)).collect(),
            heard: (0..world).map(|_| AtomicU64::new(0)).collect(),
            out: Mutex::new(Vec::new()),
            shm: OnceLock::new(),
        })
    }

    /// Aborts reach the ranks of this host through `shm` from now on.
    pub(super) fn with_shm(&self, shm: Arc<ShmComm>) {
        let aborted = lock(&self.aborted);
        if let Some(reason) = &*aborted {
            shm.abort(reason);
        }
        _ = self.shm.set(shm);
    }

    /// The reason, when the group is aborted.
    pub(super) fn reason(&self) -> Option<String> {
        lock(&self.aborted).clone()
    }

    /// Wakes every waiter here and tells all peers. The first reason stays.
    pub(super) fn abort(&self, reason: &str) {
        // Held to the end: who learns the reason may leave at once, and peers must hear of it before that farewell.
        let mut aborted = lock(&self.aborted);
        if aborted.is_some() {
            return;
        }
        *aborted = Some(reason.to_owned());
        _ = self.wake.write(1);
        if let Some(shm) = self.shm.get() {
            shm.abort(reason);
        }
        self.tell_all(ABORT, reason);
    }

    fn tell_all(&self, kind: u8, text: &str) {
        let mut end = text.len().min(REASON);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut frame = vec![kind];
        frame.extend_from_slice(&(end as u16).to_le_bytes());
        frame.extend_from_slice(&text.as_bytes()[..end]);
        // A buffer that is full of heartbeats, or a broken connection: its reader's silence or end tells.
        lock(&self.out).retain_mut(|(_, stream)| stream.write(&frame).is_ok_and(|n| n == frame.len()));
    }

    /// Was anything to wait for cut short? To be polled beside connections.
    pub(super) fn wake_fd(&self) -> PollFd<'_> {
        PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)
    }

    /// Bytes came from `rank`.
    pub(super) fn hear(&self, rank: usize) {
        self.heard[rank].store(self.now(), SeqCst);
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64 + 1
    }

    /// Why `rank`'s connection ended: its farewell may be a moment behind the end of its data.
    pub(super) fn why_gone(&self, rank: usize, before: &str) -> String {
        let until = Instant::now() + FAREWELL;
        loop {
            let left = self.left[rank].load(SeqCst);
            // An abort comes before the farewell of whoever aborted, so it is looked at after it.
            if let Some(reason) = self.reason() {
                return reason;
            }
            if left {
                return format!("rank {rank} left the group before {before}");
            }
            if Instant::now() >= until {
                return gone(rank);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Tells the watch thread to say farewell and to end.
    pub(super) fn leave(&self) {
        self.tell_all(BYE, "");
        _ = self.leaving.write(1);
    }
}

fn gone(rank: usize) -> String {
    format!("rank {rank} is gone: its connection ended without a farewell (its process or host ended)")
}

/// One peer's watch connection.
struct Peer {
    rank: usize,
    stream: TcpStream,
    buffer: [u8; HEAD + REASON],
    filled: usize,
    open: bool,
}

/// The watch thread's state.
pub(super) struct Watch {
    shared: Arc<Shared>,
    peers: Vec<Peer>,
    /// Silence for this long is death.
    silence: Duration,
    /// A peer that was never heard may still be joining for this long.
    first_word: Duration,
}

impl Watch {
    /// `streams` are non-blocking.
    pub(super) fn new(
        shared: Arc<Shared>,
        streams: Vec<(usize, TcpStream)>,
        silence: Duration,
        first_word: Duration,
    ) -> std::io::Result<Self> {
        let mut out = lock(&shared.out);
        for (rank, stream) in &streams {
            out.push((*rank, stream.try_clone()?));
        }
        drop(out);
        let peer = |(rank, stream)| Peer { rank, stream, buffer: [0; HEAD + REASON], filled: 0, open: true };
        Ok(Watch { peers: streams.into_iter().map(peer).collect(), shared, silence, first_word })
    }

    /// Until the rank leaves.
    pub(super) fn run(mut self) {
        let beat = self.silence / BEATS;
        let mut beat_at = Instant::now();
        loop {
            if Instant::now() >= beat_at {
                self.shared.tell_all(BEAT, "");
                beat_at = Instant::now() + beat;
            }
            if self.wait(beat_at.saturating_duration_since(Instant::now()).min(GLANCE)) {
                break;
            }
            if let Some(reason) = self.shared.shm.get().and_then(|shm| shm.aborted()) {
                self.shared.abort(&reason);
            }
            self.check_silence();
        }
        self.linger();
    }

    /// Reads what comes for at most `limit`; true when the rank leaves.
    fn wait(&mut self, limit: Duration) -> bool {
        let mut fds = vec![PollFd::new(self.shared.leaving.as_fd(), PollFlags::POLLIN)];
        let open = self.peers.iter().filter(|p| p.open);
        fds.extend(open.map(|p| PollFd::new(p.stream.as_fd(), PollFlags::POLLIN)));
        _ = poll(&mut fds, poll_limit(limit));
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        drop(fds);
        for (peer, _) in self.peers.iter_mut().filter(|p| p.open).zip(&ready[1..]).filter(|(_, r)| **r) {
            peer.read(&self.shared);
        }
        ready[0]
    }

    fn check_silence(&self) {
        let now = self.shared.now();
        for peer in self.peers.iter().filter(|p| p.open) {
            let heard = self.shared.heard[peer.rank].load(SeqCst);
            let limit = if heard == 0 { self.first_word } else { self.silence };
            if Duration::from_millis(now.saturating_sub(heard)) > limit {
                self.shared.abort(&format!(
                    "rank {} is silent: rank {} has heard nothing of it for {} s (a host, the network between them or \
                     a process stands still)",
                    peer.rank,
                    self.shared.rank,
                    limit.as_secs_f64()
                ));
                return;
            }
        }
    }

    /// Reads on until all peers have closed, so that nothing that was sent is taken back by a reset.
    fn linger(&mut self) {
        lock(&self.shared.out).clear();
        for peer in &self.peers {
            _ = peer.stream.shutdown(Shutdown::Write);
        }
        let until = Instant::now() + LEAVE;
        while self.peers.iter().any(|p| p.open) && Instant::now() < until {
            let mut fds: Vec<PollFd> = self.peers.iter().filter(|p| p.open).map(pollable).collect();
            _ = poll(&mut fds, poll_limit(until.saturating_duration_since(Instant::now())));
            for peer in self.peers.iter_mut().filter(|p| p.open) {
                let mut bin = [0; HEAD + REASON];
                match peer.stream.read(&mut bin) {
                    Ok(n) if n > 0 => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    _ => peer.open = false,
                }
            }
        }
    }
}

fn pollable(peer: &Peer) -> PollFd<'_> {
    PollFd::new(peer.stream.as_fd(), PollFlags::POLLIN)
}

/// Rounded up: a wait never turns into a spin.
pub(super) fn poll_limit(limit: Duration) -> PollTimeout {
    let ms = limit.as_micros().div_ceil(1000).min(60_000);
    PollTimeout::from(ms as u16)
}

impl Peer {
    fn read(&mut self, shared: &Shared) {
        match self.stream.read(&mut self.buffer[self.filled..]) {
            Ok(0) => self.ended(shared),
            Ok(n) => {
                shared.hear(self.rank);
                self.filled += n;
                self.take_frames(shared);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.ended(shared),
        }
    }

    fn ended(&mut self, shared: &Shared) {
        self.open = false;
        // answers a farewell: the peer waits for this end
        _ = self.stream.shutdown(Shutdown::Both);
        lock(&shared.out).retain(|(rank, _)| *rank != self.rank);
        if !shared.left[self.rank].load(SeqCst) {
            shared.abort(&gone(self.rank));
        }
    }

    fn take_frames(&mut self, shared: &Shared) {
        while self.filled >= HEAD {
            let len = u16::from_le_bytes([self.buffer[1], self.buffer[2]]) as usize;
            if len > REASON {
                let (me, peer) = (shared.rank, self.rank);
                shared.abort(&format!("rank {me} got a watch frame of {len} bytes from rank {peer}"));
                self.open = false;
                return;
            }
            if self.filled < HEAD + len {
                return;
            }
            match self.buffer[0] {
                ABORT => shared.abort(&String::from_utf8_lossy(&self.buffer[HEAD..HEAD + len])),
                BYE => shared.left[self.rank].store(true, SeqCst),
                _ => {}
            }
            self.buffer.copy_within(HEAD + len..self.filled, 0);
            self.filled -= HEAD + len;
        }
    }
}

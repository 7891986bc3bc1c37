//! [`PeerMonitor`]: detects dead ranks on other hosts by heartbeats, and exchanges abort messages
//! and farewells (clean leaves) with the ranks.
//!
//! Each pair of ranks on different hosts has a control connection in addition to its data
//! connection, so that control frames pass while data is queued. One thread per rank reads the
//! frames of all peers. A thread that aborts the group writes the abort frames itself and does not
//! wait for the thread that reads.
use super::control_frame::{ControlFrame, FrameParse, MAX_FRAME_BYTES};
use crate::{AbortReason, Comm, call::CollectiveCall, shm::ShmComm};
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

/// The longest time between two checks of the host's shared memory for an abort. Polling is
/// necessary, because an abort in shared memory makes no connection readable.
const SHM_ABORT_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The longest time for which a leaving rank waits for its peers to read its farewell.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest time for which a rank that leaves an aborted group waits for its peers to read its
/// farewell. A lost host never closes its connections.
const ABORTED_LEAVE_TIMEOUT: Duration = Duration::from_millis(100);
/// How long a rank waits for a farewell (clean leave) or an abort after the peer's data connection
/// has ended.
const FAREWELL_TIMEOUT: Duration = Duration::from_millis(200);
/// Number of heartbeats that a rank sends during the silence timeout, the time without data after
/// which a peer counts as lost.
const HEARTBEATS_PER_TIMEOUT: u32 = 5;

/// What one rank knows about its group: whether the group was aborted, which ranks have left, and
/// when each peer last sent bytes. All threads of the rank share it.
pub(super) struct GroupHealth {
    rank: usize,
    start: Instant,
    /// The reason of the first abort; `None` while the group is not aborted.
    aborted: Mutex<Option<AbortReason>>,
    /// An event descriptor that becomes readable when the group is aborted, and stays readable.
    abort_event: EventFd,
    /// An event descriptor that becomes readable when the monitor thread must end because the rank
    /// leaves its group.
    leave_event: EventFd,
    /// By rank: whether the rank sent a farewell.
    has_left: Vec<AtomicBool>,
    /// By rank: when bytes of the rank last arrived, as 1 plus the number of milliseconds since
    /// `start`; 0 if never.
    last_heard_ms: Vec<AtomicU64>,
    /// The control connections to which frames are written, each with the peer's rank. A broken
    /// connection is removed.
    senders: Mutex<Vec<(usize, TcpStream)>>,
    shm: OnceLock<Arc<ShmComm>>,
}

/// Locks `mutex`, and ignores that another thread may have panicked while it held the lock.
fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // no code panics while it holds one of these locks
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GroupHealth {
    /// Creates the initial state of a group as one rank sees it: not aborted, no rank has left, and
    /// no peer has sent bytes.
    pub(super) fn new(rank: usize, world: usize) -> std::io::Result<Self> {
        let event = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        Ok(GroupHealth {
            rank,
            start: Instant::now(),
            aborted: Mutex::new(None),
            abort_event: event()?,
            leave_event: event()?,
            has_left: (0..world).map(|_| AtomicBool::new(false)).collect(),
            last_heard_ms: (0..world).map(|_| AtomicU64::new(0)).collect(),
            senders: Mutex::new(Vec::new()),
            shm: OnceLock::new(),
        })
    }

    /// Registers the host's shared memory communicator `shm`, so that an abort of the group also
    /// reaches the other ranks of this host.
    pub(super) fn attach_shared_memory(&self, shm: Arc<ShmComm>) {
        let aborted = lock_ignoring_poison(&self.aborted);
        if let Some(reason) = &*aborted {
            shm.abort_with_reason(reason);
        }
        _ = self.shm.set(shm);
    }

    /// Returns the reason of the abort, or `None` if the group is not aborted.
    pub(super) fn abort_reason(&self) -> Option<AbortReason> {
        lock_ignoring_poison(&self.aborted).clone()
    }

    /// Aborts the group for `reason`: wakes every waiting thread of this rank and sends `reason` to
    /// all peers on other hosts and on this host. Does nothing if the group is already aborted.
    pub(super) fn abort(&self, reason: &AbortReason) {
        // Held to the end: a thread that learns the reason may leave at once, and the peers must
        // receive the reason before that farewell.
        let mut aborted = lock_ignoring_poison(&self.aborted);
        if aborted.is_some() {
            return;
        }
        *aborted = Some(reason.clone());
        _ = self.abort_event.write(1);
        if let Some(shm) = self.shm.get() {
            shm.abort_with_reason(reason);
        }
        self.send_to_peers(&ControlFrame::Abort(reason.clone()));
    }

    /// Writes a control frame to the control connections of all peers, without blocking. If a
    /// connection cannot take the whole frame immediately, no later frame is written to that
    /// connection.
    fn send_to_peers(&self, frame: &ControlFrame) {
        let frame = frame.encode();
        // If a buffer is full of heartbeats or a connection broke, the peer detects silence or the
        // end.
        lock_ignoring_poison(&self.senders)
            .retain_mut(|(_, stream)| stream.write(&frame).is_ok_and(|n| n == frame.len()));
    }

    /// Returns a `poll` entry for the event descriptor that becomes readable when the group is
    /// aborted. Every wait polls this descriptor together with its connections.
    pub(super) fn abort_poll_fd(&self) -> PollFd<'_> {
        PollFd::new(self.abort_event.as_fd(), PollFlags::POLLIN)
    }

    /// Records that bytes arrived from `rank` now, so that `rank` does not count as silent.
    pub(super) fn record_activity(&self, rank: usize) {
        self.last_heard_ms[rank].store(self.elapsed_ms(), SeqCst);
    }

    /// Returns the milliseconds since this object was created, plus 1, because the value 0 is
    /// reserved for peers that have sent nothing yet.
    fn elapsed_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64 + 1
    }

    /// Determines why the data connection to `rank` ended during the collective `call`: the group
    /// was aborted, the rank left, or the rank was lost. Waits up to [`FAREWELL_TIMEOUT`] for a
    /// farewell or an abort, because either of them may arrive after the data connection has ended.
    pub(super) fn wait_for_end_reason(&self, rank: usize, call: &CollectiveCall) -> AbortReason {
        let deadline = Instant::now() + FAREWELL_TIMEOUT;
        loop {
            let has_left = self.has_left[rank].load(SeqCst);
            // A rank that aborts sends its abort before its farewell, so check for it afterwards.
            if let Some(reason) = self.abort_reason() {
                return reason;
            }
            if has_left {
                return AbortReason::PeerLeft { rank, collective: call.to_string() };
            }
            if Instant::now() >= deadline {
                return AbortReason::PeerLost { rank };
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Leaves the group cleanly: sends farewells to all peers and makes the monitor thread end.
    pub(super) fn leave(&self) {
        self.send_to_peers(&ControlFrame::Farewell);
        _ = self.leave_event.write(1);
    }
}

/// The control connection of one peer, with the received bytes that do not form a complete frame
/// yet.
struct MonitoredPeer {
    rank: usize,
    stream: TcpStream,
    buffer: [u8; MAX_FRAME_BYTES],
    filled: usize,
    is_open: bool,
}

/// Thread of a rank that sends heartbeats to peers on other hosts, reads their control frames, and
/// aborts the group if a peer falls silent.
pub(super) struct PeerMonitor {
    health: Arc<GroupHealth>,
    peers: Vec<MonitoredPeer>,
    /// How long a peer may be silent before it counts as dead.
    silence_timeout: Duration,
    /// How long a peer may be silent if nothing was ever received from it, because it may still be
    /// joining.
    join_timeout: Duration,
}

impl PeerMonitor {
    /// Creates the monitor of the control connections `streams`, which must be non-blocking, and
    /// sends the first heartbeat. The heartbeat shows the peers that this rank is running. From
    /// then on they notice its silence after `silence_timeout`, even if this monitor never runs.
    pub(super) fn new(
        health: Arc<GroupHealth>,
        streams: Vec<(usize, TcpStream)>,
        silence_timeout: Duration,
        join_timeout: Duration,
    ) -> std::io::Result<Self> {
        let mut senders = lock_ignoring_poison(&health.senders);
        for (rank, stream) in &streams {
            senders.push((*rank, stream.try_clone()?));
        }
        drop(senders);
        health.send_to_peers(&ControlFrame::Heartbeat);
        let peer = |(rank, stream)| MonitoredPeer {
            rank,
            stream,
            buffer: [0; MAX_FRAME_BYTES],
            filled: 0,
            is_open: true,
        };
        let peers = streams.into_iter().map(peer).collect();
        Ok(PeerMonitor { peers, health, silence_timeout, join_timeout })
    }

    /// Sends heartbeats and processes the control frames of peers until the rank leaves its group.
    pub(super) fn run(mut self) {
        let interval = self.silence_timeout / HEARTBEATS_PER_TIMEOUT;
        let mut next_heartbeat = Instant::now() + interval;
        loop {
            if Instant::now() >= next_heartbeat {
                self.health.send_to_peers(&ControlFrame::Heartbeat);
                next_heartbeat = Instant::now() + interval;
            }
            let timeout = next_heartbeat.saturating_duration_since(Instant::now());
            if self.read_frames(timeout.min(SHM_ABORT_CHECK_INTERVAL)) {
                break;
            }
            if let Some(reason) = self.health.shm.get().and_then(|shm| shm.abort_reason()) {
                self.health.abort(&reason);
            }
            self.abort_if_peer_is_silent();
        }
        self.wait_for_close();
    }

    /// Reads and processes the control frames that arrive from peers within `timeout`. Returns
    /// `true` if this rank must leave the group.
    fn read_frames(&mut self, timeout: Duration) -> bool {
        let mut fds = vec![PollFd::new(self.health.leave_event.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.peers.iter().filter(|p| p.is_open).map(to_poll_fd));
        _ = poll(&mut fds, to_poll_timeout(timeout));
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        drop(fds);
        let open = self.peers.iter_mut().filter(|p| p.is_open);
        for (peer, _) in open.zip(&ready[1..]).filter(|(_, ready)| **ready) {
            peer.read_available_frames(&self.health);
        }
        ready[0]
    }

    /// Aborts the group if no byte has arrived from a peer for longer than the silence timeout.
    fn abort_if_peer_is_silent(&self) {
        let now_ms = self.health.elapsed_ms();
        for peer in self.peers.iter().filter(|p| p.is_open) {
            let heard_ms = self.health.last_heard_ms[peer.rank].load(SeqCst);
            let silence = if heard_ms == 0 { self.join_timeout } else { self.silence_timeout };
            if Duration::from_millis(now_ms.saturating_sub(heard_ms)) > silence {
                let (rank, observer) = (peer.rank, self.health.rank);
                self.health.abort(&AbortReason::PeerSilent { rank, observer, silence });
                return;
            }
        }
    }

    /// Waits until all peers have closed their control connections, but no longer than
    /// [`LEAVE_TIMEOUT`], or [`ABORTED_LEAVE_TIMEOUT`] after an abort. Closing earlier could reset
    /// a connection and discard a sent frame.
    fn wait_for_close(&mut self) {
        lock_ignoring_poison(&self.health.senders).clear();
        for peer in &self.peers {
            _ = peer.stream.shutdown(Shutdown::Write);
        }
        let is_aborted = self.health.abort_reason().is_some();
        let deadline = Instant::now() + if is_aborted { ABORTED_LEAVE_TIMEOUT } else { LEAVE_TIMEOUT };
        while self.peers.iter().any(|p| p.is_open) && Instant::now() < deadline {
            let mut fds: Vec<PollFd> = self.peers.iter().filter(|p| p.is_open).map(to_poll_fd).collect();
            _ = poll(&mut fds, to_poll_timeout(deadline.saturating_duration_since(Instant::now())));
            for peer in self.peers.iter_mut().filter(|p| p.is_open) {
                let mut discarded = [0; MAX_FRAME_BYTES];
                match peer.stream.read(&mut discarded) {
                    Ok(n) if n > 0 => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    _ => peer.is_open = false,
                }
            }
        }
    }
}

/// Returns the argument with which the system call `poll` waits for bytes on the control connection
/// of `peer`.
fn to_poll_fd(peer: &MonitoredPeer) -> PollFd<'_> {
    PollFd::new(peer.stream.as_fd(), PollFlags::POLLIN)
}

/// Converts a duration to a timeout of `poll` in milliseconds. Rounds up, so that a wait never
/// becomes a busy loop.
pub(super) fn to_poll_timeout(timeout: Duration) -> PollTimeout {
    let ms = timeout.as_micros().div_ceil(1000).min(60_000);
    PollTimeout::from(ms as u16)
}

impl MonitoredPeer {
    /// Reads once from the peer's control connection and processes the frames that are complete.
    fn read_available_frames(&mut self, health: &GroupHealth) {
        match self.stream.read(&mut self.buffer[self.filled..]) {
            Ok(0) => self.close_and_abort_without_farewell(health),
            Ok(n) => {
                health.record_activity(self.rank);
                self.filled += n;
                self.process_complete_frames(health);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.close_and_abort_without_farewell(health),
        }
    }

    /// Closes this rank's end of a control connection that the peer has ended, and aborts the group
    /// if the peer sent no farewell.
    fn close_and_abort_without_farewell(&mut self, health: &GroupHealth) {
        self.is_open = false;
        // answers a farewell: the peer waits for this end
        _ = self.stream.shutdown(Shutdown::Both);
        lock_ignoring_poison(&health.senders).retain(|(rank, _)| *rank != self.rank);
        if !health.has_left[self.rank].load(SeqCst) {
            health.abort(&AbortReason::PeerLost { rank: self.rank });
        }
    }

    /// Processes the complete control frames that the peer has sent: aborts the group if a frame is
    /// an abort, and records a farewell. An invalid frame aborts the group.
    fn process_complete_frames(&mut self, health: &GroupHealth) {
        loop {
            let (frame, end) = match ControlFrame::parse(&self.buffer[..self.filled]) {
                FrameParse::Incomplete => return,
                FrameParse::Invalid => {
                    health.abort(&AbortReason::InvalidFrame { rank: self.rank, observer: health.rank });
                    self.is_open = false;
                    return;
                }
                FrameParse::Complete(frame, end) => (frame, end),
            };
            match frame {
                ControlFrame::Abort(reason) => health.abort(&reason),
                ControlFrame::Farewell => health.has_left[self.rank].store(true, SeqCst),
                ControlFrame::Heartbeat | ControlFrame::Unknown(_) => {}
            }
            self.buffer.copy_within(end..self.filled, 0);
            self.filled -= end;
        }
    }
}

//! [`TcpComm`]: collectives between ranks on several hosts, with TCP between the hosts and shared
//! memory inside each.
//!
//! All collectives consist of two kinds of steps (docs/design/comm.md). A *replication* step
//! distributes data that every rank needs: it crosses the network once per pair of hosts, to the
//! rank's counterpart there, and is shared inside the host. An *exchange* step sends data that only
//! one rank needs directly to that rank. The receiver computes sums, by the same fixed tree as on
//! every other transport. With one rank per host this is plain TCP.
//!
//! Memory: a rank reuses one private buffer, which is as large as its largest call so far required.
//! The buffer is limited to 8 × staging or two of the largest pieces, whichever is more.
use crate::{
    AbortReason, CallMismatch, Comm, CommError, GroupError, PartialSink, Result,
    call::{self, BufferShape, CollectiveCall, GroupPosition},
    error::ArgumentError,
    shm::{self, JobRanks, OutgoingMessage, ShmComm, partition_into_windows},
    tree_sum::tree_sum,
};
use device::{Buf, View, ViewMut};
use handshake::{ConnectionKind, RankIdentity, SECRET_BYTES};
use network_step::{DataConnection, NetworkStep, PeerTransfer, SendSource};
use peer_monitor::{GroupHealth, PeerMonitor};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    ops::Range,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
    thread::JoinHandle,
    time::Duration,
};
use topology::Topology;

mod connection_setup;
mod handshake;
mod network_step;
mod peer_monitor;
mod topology;

/// The largest size in bytes up to which every rank computes the whole sum of an all-reduce, in one
/// network step instead of two.
const MAX_SINGLE_STEP_BYTES: usize = 16 << 10;
/// The largest size of a rank's private buffer for received pieces, as a multiple of
/// `staging_bytes`.
const WINDOW_FACTOR: usize = 8;
/// The largest number of partials that one rank may pass to an ordered reduce-scatter.
const MAX_PARTIALS: u64 = 1 << 16;
/// The largest number of incoming connections that the operating system queues until this rank
/// accepts them.
const LISTEN_BACKLOG: i32 = 1024;

/// Size in bytes of the secret key with which the ranks of a job authenticate each other.
pub const KEY_BYTES: usize = SECRET_BYTES;

/// Timeouts and memory of a group on several hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpLimits {
    /// Timeouts for joining and for collectives, within a host and between hosts, and the size of
    /// the staging memory.
    pub shm: shm::ShmLimits,
    /// How long a peer may send nothing before it counts as dead. Every rank sends five heartbeats
    /// in this time.
    pub silence_timeout: Duration,
}

impl Default for TcpLimits {
    fn default() -> Self {
        TcpLimits { shm: shm::ShmLimits::default(), silence_timeout: Duration::from_secs(5) }
    }
}

/// The host and the addresses of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// A number that identifies the host of the rank. Ranks of one host have equal numbers.
    pub host: usize,
    /// The addresses on which the rank listens, in the order in which peers try them.
    pub addresses: Vec<SocketAddr>,
}

/// Description of the group that a rank joins. All ranks give the same description except for
/// `rank`.
#[derive(Clone)]
pub struct GroupSpec {
    /// The rank of this process.
    pub rank: usize,
    /// The members of the group, by rank.
    pub members: Vec<GroupMember>,
    /// The name of the run. Ranks of different runs reject each other's connections.
    pub run: String,
    /// Number of the run's attempt. Ranks of different attempts reject each other's connections.
    pub attempt: u32,
    /// The secret key that only the ranks of this attempt know.
    pub key: [u8; KEY_BYTES],
}

/// The listening socket of one rank. The socket is bound before its address is given to the peers,
/// which connect to it during [`RankListener::join`].
pub struct RankListener {
    listener: TcpListener,
}

/// A handle that aborts a group from any thread, also while the group is being joined.
#[derive(Clone)]
pub struct AbortHandle(Arc<GroupHealth>);

impl AbortHandle {
    /// Creates a handle for `rank` of `world` ranks, to be passed to [`RankListener::join`]. Fails
    /// if the operating system has no descriptors left.
    pub fn new(rank: usize, world: usize) -> Result<Self> {
        let health =
            GroupHealth::new(rank, world).map_err(CommError::from_failed_operation("create an eventfd"))?;
        Ok(AbortHandle(Arc::new(health)))
    }

    /// Aborts the group with the text `reason`. Joining, and every waiting and later collective,
    /// then fails with [`CommError::Aborted`].
    pub fn abort(&self, reason: &str) {
        self.0.abort(&AbortReason::from_request(reason));
    }
}

impl RankListener {
    /// Binds a listener to `address`, on a port that the operating system selects.
    pub fn bind(address: IpAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        // The backlog of std is too short for a thousand peers that connect at once.
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(LISTEN_BACKLOG)?)?;
        Ok(RankListener { listener })
    }

    /// Returns the address and port of the listener.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Joins the group as this listener's rank. Blocks until all peers have joined and
    /// authenticated themselves.
    ///
    /// `memory` is one memfd that the ranks of this host share (see [`ShmComm::join`]). It is
    /// required if the host has several ranks. Fails if a peer does not join within
    /// `limits.shm.join_timeout`.
    pub fn join(
        self,
        group: &GroupSpec,
        memory: Option<OwnedFd>,
        limits: TcpLimits,
        abort_handle: &AbortHandle,
    ) -> Result<TcpComm> {
        let hosts: Vec<usize> = group.members.iter().map(|m| m.host).collect();
        let rank = group.rank;
        let topology = Topology::new(rank, &hosts)?;
        let health = &abort_handle.0;
        self.connect_to_peers(group, memory, limits, topology, health).inspect_err(|error| {
            // Ranks that have joined already learn why this rank is missing.
            health.abort(&match error {
                CommError::Aborted(reason) => reason.clone(),
                error => {
                    let message = format!("rank {rank} cannot join the group: {error}");
                    AbortReason::RankFailed { rank, message }
                }
            });
        })
    }

    /// Joins this host's shared memory, connects to the ranks of other hosts, and starts the thread
    /// that monitors them.
    fn connect_to_peers(
        self,
        group: &GroupSpec,
        memory: Option<OwnedFd>,
        limits: TcpLimits,
        topology: Topology,
        health: &Arc<GroupHealth>,
    ) -> Result<TcpComm> {
        let shm = join_shared_memory(&topology, memory, limits)?;
        if let Some(shm) = &shm {
            health.attach_shared_memory(shm.clone());
        }
        let id = RankIdentity {
            key: group.key,
            run: *blake3::hash(group.run.as_bytes()).as_bytes(),
            attempt: group.attempt,
            rank: group.rank as u32,
            world: topology.world() as u32,
        };
        let addresses: Vec<Vec<SocketAddr>> = group.members.iter().map(|m| m.addresses.clone()).collect();
        let setup = connection_setup::ConnectionSetup {
            id: &id,
            topology: &topology,
            addresses: &addresses,
            health,
            timeout: limits.shm.join_timeout,
            silence_timeout: limits.silence_timeout,
        };
        let streams = setup.connect_to_all_peers(&self.listener)?;
        drop(self.listener); // from here on other processes find the port closed
        let (data, control): (Vec<_>, Vec<_>) =
            streams.into_iter().partition(|(_, kind, _)| *kind == ConnectionKind::Data);
        let mut connections: Vec<Option<DataConnection>> = (0..topology.world()).map(|_| None).collect();
        for (rank, _, stream) in data {
            connections[rank as usize] = Some(DataConnection::new(stream));
        }
        let control = control.into_iter().map(|(rank, _, stream)| (rank as usize, stream)).collect();
        let (silence_timeout, join_timeout) = (limits.silence_timeout, limits.shm.join_timeout);
        let monitor = PeerMonitor::new(health.clone(), control, silence_timeout, join_timeout)
            .map_err(CommError::from_failed_operation("set up the control connections"))?;
        let thread = std::thread::Builder::new()
            .name("comm-monitor".into())
            .spawn(|| monitor.run())
            .map_err(CommError::from_failed_operation("start the thread that monitors the peers"))?;
        let call_state = Mutex::new(TcpCallState { calls: 0, connections, scratch: Buf::zeroed(0) });
        let health = health.clone();
        Ok(TcpComm { topology, health, shm, limits, call_state, monitor: Some(thread) })
    }
}

/// Joins the shared memory group of this host's ranks. Returns `None` if the host has only this
/// rank.
fn join_shared_memory(
    topology: &Topology,
    memory: Option<OwnedFd>,
    limits: TcpLimits,
) -> Result<Option<Arc<ShmComm>>> {
    let (world, local_ranks) = (topology.world(), topology.local_ranks().to_vec());
    if local_ranks.len() == 1 {
        return Ok(None);
    }
    let Some(memory) = memory else {
        return Err(GroupError::NoSharedMemory { rank: topology.rank, world, local_ranks }.into());
    };
    let job_ranks = JobRanks { ranks: local_ranks, world };
    let shm = ShmComm::join_host_group(memory, topology.local_rank(), limits.shm, job_ranks)?;
    Ok(Some(Arc::new(shm)))
}

/// The communicator of one rank of a group on several hosts.
///
/// Dropping it leaves the group: peers that need this rank then get [`CommError::Aborted`].
pub struct TcpComm {
    topology: Topology,
    health: Arc<GroupHealth>,
    /// The shared-memory communicator of this host's ranks; `None` if this rank is alone on its
    /// host.
    shm: Option<Arc<ShmComm>>,
    limits: TcpLimits,
    /// Serializes the collectives of this rank.
    call_state: Mutex<TcpCallState>,
    monitor: Option<JoinHandle<()>>,
}

/// How many collectives one rank has begun, its connections, and its reusable memory.
struct TcpCallState {
    /// Number of collectives called so far.
    calls: u64,
    /// By rank: the data connection, or `None` for a rank of this host.
    connections: Vec<Option<DataConnection>>,
    /// Memory in which received pieces are assembled before they are summed or delivered. The next
    /// call reuses it.
    scratch: Buf,
}

/// Returns the first `len` elements of the buffer `scratch`, with arbitrary content. Replaces the
/// buffer by a larger one if necessary.
fn reserve_scratch(scratch: &mut Buf, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        *scratch = Buf::zeroed(0); // free the old buffer before allocating the new one
        *scratch = Buf::zeroed(len);
    }
    &mut scratch.host_mut()[..len]
}

/// Aborts the group if dropped during a panic of the caller's sink, so that peers do not wait for
/// this rank.
struct AbortOnPanic<'a>(&'a TcpComm);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.health.abort(&AbortReason::RankPanicked { rank: self.0.rank() });
        }
    }
}

impl TcpComm {
    /// Returns this rank and the number of ranks in its group.
    fn position(&self) -> GroupPosition {
        GroupPosition { rank: self.topology.rank, world: self.topology.world() }
    }

    /// Begins a collective: locks this rank's call state and gives the call its number. Fails if
    /// the group is aborted or the arguments are invalid. Invalid arguments abort the group.
    fn begin_call(
        &self,
        call: std::result::Result<CollectiveCall, ArgumentError>,
    ) -> Result<(MutexGuard<'_, TcpCallState>, CollectiveCall)> {
        let rank = self.rank();
        let mut call_state = self.call_state.lock().map_err(|_| {
            let reason = AbortReason::RankPanicked { rank };
            self.health.abort(&reason);
            CommError::Aborted(reason)
        })?;
        if let Some(reason) = self.health.abort_reason() {
            return Err(CommError::Aborted(reason));
        }
        let call = call
            .map_err(|error| self.abort_on_error(CommError::InvalidArguments { rank, error }))?
            .with_number(call_state.calls);
        call_state.calls += 1;
        Ok((call_state, call))
    }

    /// Aborts the group because of `error`, so that peers learn why this rank cannot continue.
    /// Returns `error`, or the reason of an earlier abort.
    fn abort_on_error(&self, error: CommError) -> CommError {
        self.health.abort(&error.to_abort_reason(self.rank()));
        match error {
            // Another reason may have been given first.
            CommError::Aborted(reason) => CommError::Aborted(self.health.abort_reason().unwrap_or(reason)),
            error => error,
        }
    }

    /// Runs one step of a collective over the network connections and blocks until the step is
    /// complete. An error aborts the group.
    fn run_network_step(
        &self,
        connections: &mut [Option<DataConnection>],
        call: &CollectiveCall,
        buf: &mut [u8],
        transfers: &mut [PeerTransfer],
    ) -> Result<()> {
        let timeout = self.limits.shm.collective_timeout;
        let step = NetworkStep { topology: &self.topology, health: &self.health, call, timeout };
        step.run(connections, buf, transfers).map_err(|error| self.abort_on_error(error))
    }

    /// Gathers `buf` on all ranks: runs a replication step. Before the call, each rank r has only
    /// the bytes `parts[r]`; afterwards, every rank has all parts.
    fn replicate(
        &self,
        connections: &mut [Option<DataConnection>],
        call: &CollectiveCall,
        buf: &mut [u8],
        parts: &[Range<usize>],
    ) -> Result<()> {
        let (topology, me) = (&self.topology, self.topology.rank);
        let mut transfers: Vec<PeerTransfer> = topology
            .remote_ranks()
            .map(|r| {
                let source = topology.sends_replica_to(me, r).then(|| SendSource::Buffer(parts[me].clone()));
                PeerTransfer::new(r, source, topology.sends_replica_to(r, me).then(|| parts[r].clone()))
            })
            .filter(|t| t.source.is_some() || t.recv_range.is_some())
            .collect();
        self.run_network_step(connections, call, buf, &mut transfers)?;
        let Some(shm) = &self.shm else { return Ok(()) };
        let mut local_parts: Vec<Vec<Range<usize>>> = vec![Vec::new(); topology.local_ranks().len()];
        for (rank, part) in parts.iter().enumerate() {
            local_parts[topology.find_local_receiver(rank)].push(part.clone());
        }
        shm.replicate_ranges(&mut shm.lock_call_state(), call, buf, &local_parts)
            .map_err(|error| self.abort_on_error(error))
    }

    /// Sends `messages[r]` to each rank r, and receives the message of rank r in
    /// `buf[recv_ranges[r]]`: runs an exchange step.
    ///
    /// The entries for this rank itself are ignored.
    fn exchange_messages(
        &self,
        connections: &mut [Option<DataConnection>],
        call: &CollectiveCall,
        messages: &[OutgoingMessage],
        buf: &mut [u8],
        recv_ranges: &[Range<usize>],
    ) -> Result<()> {
        let transfer = |r: usize| {
            let source = SendSource::Message(messages[r].clone());
            PeerTransfer::new(r, Some(source), Some(recv_ranges[r].clone()))
        };
        let mut transfers: Vec<PeerTransfer> = self.topology.remote_ranks().map(transfer).collect();
        self.run_network_step(connections, call, buf, &mut transfers)?;
        let Some(shm) = &self.shm else { return Ok(()) };
        let local_ranks = self.topology.local_ranks();
        let messages: Vec<OutgoingMessage> = local_ranks.iter().map(|&r| messages[r].clone()).collect();
        let recv_ranges: Vec<Range<usize>> = local_ranks.iter().map(|&r| recv_ranges[r].clone()).collect();
        shm.exchange_messages(&mut shm.lock_call_state(), call, &messages, buf, &recv_ranges)
            .map_err(|error| self.abort_on_error(error))
    }

    /// Gathers `number` from every rank in one replication step, and returns the numbers indexed by
    /// rank.
    fn all_gather_u64(
        &self,
        connections: &mut [Option<DataConnection>],
        call: &CollectiveCall,
        number: u64,
    ) -> Result<Vec<u64>> {
        let mut numbers = vec![0u64; self.world()];
        numbers[self.rank()] = number;
        let parts = compute_consecutive_ranges(&vec![size_of::<u64>(); self.world()]);
        self.replicate(connections, call, bytemuck::cast_slice_mut(&mut numbers), &parts)?;
        Ok(numbers)
    }

    /// Computes the largest length of the private buffer in `f32` elements, if the largest piece
    /// has `largest_piece` elements.
    fn compute_scratch_elements(&self, largest_piece: usize) -> usize {
        let window = WINDOW_FACTOR * self.limits.shm.staging_bytes / size_of::<f32>();
        window.max(largest_piece.saturating_mul(2))
    }

    /// Sends and receives the pieces of one window of an ordered reduce-scatter, and then passes
    /// the received pieces to the sink.
    fn exchange_window(
        &self,
        call_state: &mut TcpCallState,
        call: &CollectiveCall,
        partials: &[&[u8]],
        window: &[Range<usize>],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let me = self.rank();
        let lens: Vec<usize> = counts.iter().map(|n| n * size_of::<f32>()).collect();
        let parts = compute_consecutive_ranges(&lens);
        let sent = &partials[window[me].clone()];
        let messages: Vec<OutgoingMessage> =
            parts.iter().map(|part| OutgoingMessage { parts: sent, range: part.clone() }).collect();
        let recv_len = |(r, w): (usize, &Range<usize>)| if r == me { 0 } else { w.len() * lens[me] };
        let recv_lens: Vec<usize> = window.iter().enumerate().map(recv_len).collect();
        let recv_ranges = compute_consecutive_ranges(&recv_lens);
        let TcpCallState { connections, scratch, .. } = call_state;
        let buf = reserve_scratch(scratch, recv_lens.iter().sum::<usize>() / size_of::<f32>());
        self.exchange_messages(connections, call, &messages, bytemuck::cast_slice_mut(buf), &recv_ranges)?;
        for (rank, indices) in window.iter().enumerate() {
            for (k, i) in indices.clone().enumerate() {
                let piece: &[f32] = match rank == me {
                    true => bytemuck::cast_slice(&partials[i][parts[me].clone()]),
                    false => {
                        let start = recv_ranges[rank].start / size_of::<f32>() + k * counts[me];
                        &buf[start..][..counts[me]]
                    }
                };
                sink(rank, i, piece.into());
            }
        }
        Ok(())
    }

    /// Sums the range `ranges[r]` of `send` over all ranks on each rank r, in one exchange step.
    ///
    /// This rank stores the sum of its range in `out`, which has the length of that range.
    fn reduce_scatter_ranges(
        &self,
        call_state: &mut TcpCallState,
        call: &CollectiveCall,
        send: &[f32],
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        let (me, n) = (self.rank(), out.len());
        let bytes = [bytemuck::cast_slice(send)];
        let message = |r: &Range<usize>| OutgoingMessage { parts: &bytes, range: r.start * 4..r.end * 4 };
        let messages: Vec<OutgoingMessage> = ranges.iter().map(message).collect();
        let recv_lens: Vec<usize> = (0..self.world()).map(|r| if r == me { 0 } else { n * 4 }).collect();
        let recv_ranges = compute_consecutive_ranges(&recv_lens);
        let TcpCallState { connections, scratch, .. } = call_state;
        let buf = reserve_scratch(scratch, n * (self.world() - 1));
        self.exchange_messages(connections, call, &messages, bytemuck::cast_slice_mut(buf), &recv_ranges)?;
        let addend = |r: usize| match r == me {
            true => &send[ranges[me].clone()],
            false => &buf[recv_ranges[r].start / 4..][..n],
        };
        tree_sum(out, &(0..self.world()).map(addend).collect::<Vec<_>>());
        Ok(())
    }

    /// Replaces `x` by its sum over all ranks, in one replication step: every rank computes the
    /// whole sum.
    fn all_reduce_small(
        &self,
        call_state: &mut TcpCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (world, me, n) = (self.world(), self.rank(), x.len());
        let TcpCallState { connections, scratch, .. } = call_state;
        let buf = reserve_scratch(scratch, world * n);
        buf[me * n..][..n].copy_from_slice(x);
        let parts = compute_consecutive_ranges(&vec![n * 4; world]);
        self.replicate(connections, call, bytemuck::cast_slice_mut(buf), &parts)?;
        let addends: Vec<&[f32]> = (0..world).map(|r| &buf[r * n..][..n]).collect();
        tree_sum(x, &addends);
        Ok(())
    }

    /// Replaces `x` by its sum over all ranks, block by block. Each rank sums its share of a block
    /// in an exchange step, and then a replication step distributes the sums.
    fn all_reduce_large(
        &self,
        call_state: &mut TcpCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (world, me) = (self.world(), self.rank());
        let block_len = self.compute_scratch_elements(0).max(world);
        for block in x.chunks_mut(block_len) {
            let shares: Vec<Range<usize>> =
                (0..world).map(|r| call::compute_even_share(block.len(), r, world)).collect();
            let mut sum = vec![0.0; shares[me].len()];
            self.reduce_scatter_ranges(call_state, call, block, &shares, &mut sum)?;
            block[shares[me].clone()].copy_from_slice(&sum);
            let parts: Vec<Range<usize>> = shares.iter().map(|s| s.start * 4..s.end * 4).collect();
            let block = bytemuck::cast_slice_mut(block);
            self.replicate(&mut call_state.connections, call, block, &parts)?;
        }
        Ok(())
    }
}

/// Computes the index ranges of parts with the lengths `lens`, which are stored one after the
/// other.
fn compute_consecutive_ranges(lens: &[usize]) -> Vec<Range<usize>> {
    call::compute_offsets(lens).into_iter().zip(lens).map(|(start, n)| start..start + n).collect()
}

impl Comm for TcpComm {
    fn rank(&self) -> usize {
        self.topology.rank
    }

    fn world(&self) -> usize {
        self.topology.world()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let shapes = (BufferShape::new(recv.as_view()), BufferShape::new(send));
        let call = CollectiveCall::describe_all_gather(self.position(), shapes.0, shapes.1, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let lens: Vec<usize> = counts.iter().map(|n| n * shapes.1.element_bytes).collect();
        let parts = compute_consecutive_ranges(&lens);
        let recv = recv.bytes();
        recv[parts[self.rank()].clone()].copy_from_slice(send.bytes());
        self.replicate(&mut call_state.connections, &call, recv, &parts)
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let call = CollectiveCall::describe_reduce_scatter_ordered(self.position(), lens, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let _guard = AbortOnPanic(self);
        let partials: Vec<&[u8]> = partials.iter().map(|p| bytemuck::cast_slice(p.host())).collect();
        let partial_counts =
            self.all_gather_u64(&mut call_state.connections, &call, partials.len() as u64)?;
        if let Some(rank) = partial_counts.iter().position(|&n| n > MAX_PARTIALS) {
            let (partials, limit) = (partial_counts[rank], MAX_PARTIALS);
            let mismatch = CallMismatch::TooManyPartials { rank, partials, limit };
            return Err(self.abort_on_error(CommError::Mismatch(mismatch)));
        }
        let partial_counts: Vec<usize> = partial_counts.into_iter().map(|n| n as usize).collect();
        let max_elements = self.compute_scratch_elements(counts.iter().copied().max().unwrap_or(0));
        for window in partition_into_windows(&partial_counts, counts, max_elements) {
            self.exchange_window(&mut call_state, &call, &partials, &window, counts, sink)?;
        }
        Ok(())
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let call = CollectiveCall::describe_reduce_scatter(self.position(), recv.len(), send.len(), counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host(), send.host());
        let starts = call::compute_offsets(counts);
        let longest = counts.iter().copied().max().unwrap_or(0);
        let chunk_len = (self.compute_scratch_elements(0) / self.world()).max(1);
        let mut offset = 0;
        loop {
            let chunk = |r: usize| counts[r].min(offset)..counts[r].min(offset + chunk_len);
            let ranges: Vec<Range<usize>> =
                (0..self.world()).map(|r| starts[r] + chunk(r).start..starts[r] + chunk(r).end).collect();
            let out = &mut recv[chunk(self.rank())];
            self.reduce_scatter_ranges(&mut call_state, &call, send, &ranges, out)?;
            offset += chunk_len;
            if offset >= longest {
                return Ok(());
            }
        }
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::describe_all_reduce(x.len())))?;
        let x = x.host();
        match size_of_val(x) <= MAX_SINGLE_STEP_BYTES {
            true => self.all_reduce_small(&mut call_state, &call, x),
            false => self.all_reduce_large(&mut call_state, &call, x),
        }
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let call = CollectiveCall::describe_broadcast(self.position(), x.len(), root);
        let (mut call_state, call) = self.begin_call(call)?;
        let x: &mut [u8] = bytemuck::cast_slice_mut(x.host());
        let part = |r: usize| if r == root { 0..x.len() } else { 0..0 };
        let parts: Vec<Range<usize>> = (0..self.world()).map(part).collect();
        self.replicate(&mut call_state.connections, &call, x, &parts)
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let shapes = (BufferShape::new(recv.as_view()), BufferShape::new(send));
        let call = CollectiveCall::describe_all_to_all(
            self.position(),
            shapes.0,
            recv_counts,
            shapes.1,
            send_counts,
        );
        let (mut call_state, call) = self.begin_call(call)?;
        let size = shapes.1.element_bytes;
        let to_ranges = |counts: &[usize]| {
            compute_consecutive_ranges(&counts.iter().map(|n| n * size).collect::<Vec<_>>())
        };
        let (recv_ranges, send_ranges) = (to_ranges(recv_counts), to_ranges(send_counts));
        let parts = [send.bytes()];
        let (recv, me) = (recv.bytes(), self.rank());
        recv[recv_ranges[me].clone()].copy_from_slice(&parts[0][send_ranges[me].clone()]);
        let message = |r: &Range<usize>| OutgoingMessage { parts: &parts, range: r.clone() };
        let messages: Vec<OutgoingMessage> = send_ranges.iter().map(message).collect();
        self.exchange_messages(&mut call_state.connections, &call, &messages, recv, &recv_ranges)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut call_state, call) =
            self.begin_call(CollectiveCall::describe_all_gather_bytes(bytes.len()))?;
        let lens = self.all_gather_u64(&mut call_state.connections, &call, bytes.len() as u64)?;
        let limit = crate::MAX_GATHER_BYTES as u64;
        if let Some(rank) = lens.iter().position(|&n| n > limit) {
            let mismatch = CallMismatch::TooManyBytes { rank, bytes: lens[rank], limit };
            return Err(self.abort_on_error(CommError::Mismatch(mismatch)));
        }
        let parts = compute_consecutive_ranges(&lens.iter().map(|&n| n as usize).collect::<Vec<_>>());
        let mut gathered = vec![0; parts.last().map_or(0, |p| p.end)];
        gathered[parts[self.rank()].clone()].copy_from_slice(bytes);
        self.replicate(&mut call_state.connections, &call, &mut gathered, &parts)?;
        Ok(parts.into_iter().map(|part| gathered[part].to_vec()).collect())
    }

    fn barrier(&self) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::describe_barrier()))?;
        self.replicate(&mut call_state.connections, &call, &mut [], &vec![0..0; self.world()])
    }

    fn abort(&self, reason: &str) {
        self.health.abort(&AbortReason::from_request(reason));
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.health.abort_reason().or_else(|| self.shm.as_ref()?.abort_reason())
    }
}

impl Drop for TcpComm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.health.abort(&AbortReason::RankPanicked { rank: self.rank() });
        }
        self.health.leave();
        if let Some(shm) = &self.shm {
            shm.leave();
        }
        // The connections are closed after the farewell, so that a peer that needs this rank knows
        // why its data ended.
        if let Ok(call_state) = self.call_state.get_mut() {
            call_state.connections.clear();
        }
        if let Some(monitor) = self.monitor.take() {
            // The thread ends within `LEAVE_TIMEOUT` (`peer_monitor.rs`). A panic of the thread is
            // irrelevant now.
            _ = monitor.join();
        }
    }
}

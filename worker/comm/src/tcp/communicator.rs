//! [`TcpComm`]: the communicator of one rank, in a group on several hosts. Also the steps of its
//! collectives.
use super::link_delay_meter::LinkDelayMeter;
use super::network_step::{DataConnection, NetworkStep, PeerTransfer, SendSource};
use super::peer_monitor::GroupHealth;
use super::topology::Topology;
use crate::{
    AbortReason, Comm, CommError, PartialSink, Result,
    call::{self, CollectiveCall, GroupPosition, compute_consecutive_ranges},
    call_error::ArgumentError,
    shm::{OutgoingMessage, ShmComm, ShmLimits},
    tree_sum::tree_sum,
};
use device::Buf;
use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard},
    thread::JoinHandle,
    time::Duration,
};

/// Size limit of a rank's private buffer for received data, as a multiple of the rank's part of its
/// host's shared memory, unless large pieces need more.
const WINDOW_TO_STAGING_RATIO: usize = 8;
/// Timeouts of a group of ranks on several hosts, and the amount of shared memory on each host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpLimits {
    /// Timeouts for joining and for collectives, within a host and between hosts, and the size of
    /// the staging memory.
    pub shm: ShmLimits,
    /// How long a peer may send nothing before it counts as dead. Every rank sends five heartbeats
    /// in this time.
    pub silence_timeout: Duration,
}

impl Default for TcpLimits {
    fn default() -> Self {
        TcpLimits { shm: ShmLimits::default(), silence_timeout: Duration::from_secs(5) }
    }
}

/// The communicator of one rank, in a group on several hosts.
///
/// Dropping it leaves the group: peers that need this rank then get [`CommError::Aborted`].
pub struct TcpComm {
    pub(super) topology: Topology,
    pub(super) health: Arc<GroupHealth>,
    /// The shared-memory communicator of this host's ranks; `None` if this rank is alone on its
    /// host.
    pub(super) shm: Option<Arc<ShmComm>>,
    pub(super) limits: TcpLimits,
    /// The call state of this rank. A collective holds the lock, so that collectives of one rank
    /// never overlap.
    pub(super) call_state: Mutex<TcpCallState>,
    pub(super) monitor: Option<JoinHandle<()>>,
}

/// Mutable state of one rank's communicator: its number of collectives so far, its connections, and
/// a reusable buffer.
pub(super) struct TcpCallState {
    /// Number of collectives called so far.
    pub(super) calls: u64,
    /// By rank: the data connection, or `None` for a rank of this host.
    pub(super) connections: Vec<Option<DataConnection>>,
    /// Measures for how long data is on its way.
    pub(super) link_clock: LinkDelayMeter,
    /// Memory in which received pieces are assembled before they are summed or delivered. The next
    /// call reuses it.
    pub(super) scratch: Buf,
}

/// Returns the first `len` elements of the reusable buffer `scratch`, with arbitrary content, after
/// enlarging it if necessary.
fn reserve_scratch(scratch: &mut Buf, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        *scratch = Buf::zeroed(0); // free the old buffer before allocating the new one
        *scratch = Buf::zeroed(len);
    }
    &mut scratch.host_slice_mut()[..len]
}

/// Guard that aborts the group if the callback that receives the pieces of a reduce-scatter panics,
/// so that peers do not wait for this rank.
pub(super) struct AbortOnPanic<'a>(pub(super) &'a TcpComm);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.health.abort(&AbortReason::RankPanicked { rank: self.0.rank() });
        }
    }
}

impl TcpComm {
    /// Returns this rank and the number of ranks in its group.
    pub(super) fn group_position(&self) -> GroupPosition {
        GroupPosition { rank: self.topology.rank, world: self.topology.world_size() }
    }

    /// Begins a collective: checks its arguments, assigns the next call number, and locks the
    /// rank's communicator until the collective ends. Fails if the group is aborted or the
    /// arguments are invalid. Invalid arguments abort the group.
    pub(super) fn begin_call(
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
            .with_call_number(call_state.calls);
        call_state.calls += 1;
        Ok((call_state, call))
    }

    /// Aborts the group because of `error`, and sends the reason to the peers. Returns `error`,
    /// or the reason of an earlier abort.
    pub(super) fn abort_on_error(&self, error: CommError) -> CommError {
        self.health.abort(&error.to_abort_reason(self.rank()));
        match error {
            // Another reason may have been given first.
            CommError::Aborted(reason) => CommError::Aborted(self.health.abort_reason().unwrap_or(reason)),
            error => error,
        }
    }

    /// Sends and receives the messages `transfers` of one step of the collective `call` over the
    /// network, and blocks until all are complete. An error aborts the group.
    pub(super) fn run_network_step(
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

    /// Copies the byte range `parts[r]` of `buf` from each rank r to all other ranks, over the
    /// network and through shared memory.
    pub(super) fn replicate_parts(
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

    /// Exchanges messages among all ranks: sends `messages[r]` to each rank r, and receives the
    /// message of rank r in `buf[recv_ranges[r]]`.
    ///
    /// The entries for this rank itself are ignored.
    pub(super) fn exchange_messages(
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

    /// Gathers `number` from every rank over the network, and returns the numbers of all ranks,
    /// indexed by rank.
    pub(super) fn all_gather_u64(
        &self,
        connections: &mut [Option<DataConnection>],
        call: &CollectiveCall,
        number: u64,
    ) -> Result<Vec<u64>> {
        let mut numbers = vec![0u64; self.world_size()];
        numbers[self.rank()] = number;
        let parts = compute_consecutive_ranges(&vec![size_of::<u64>(); self.world_size()]);
        self.replicate_parts(connections, call, bytemuck::cast_slice_mut(&mut numbers), &parts)?;
        Ok(numbers)
    }

    /// Returns the size limit, in `f32` elements, of the private buffer in which this rank collects
    /// the pieces of vectors that it receives. `largest_piece` is the length of the largest piece.
    pub(super) fn compute_scratch_elements(&self, largest_piece: usize) -> usize {
        let window = WINDOW_TO_STAGING_RATIO * self.limits.shm.staging_bytes / size_of::<f32>();
        window.max(largest_piece.saturating_mul(2))
    }

    /// Exchanges the pieces of one group of vectors (`window`: a range of vector indices per rank)
    /// over the network, and passes this rank's piece of each vector to `sink`.
    pub(super) fn exchange_and_deliver_window(
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

    /// Sums the `send` buffers of all ranks elementwise, and gives each rank r the range
    /// `ranges[r]` of the sum, with one exchange over the network.
    ///
    /// This rank stores the sum of its range in `out`, which has the length of that range.
    pub(super) fn reduce_scatter_ranges(
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
        let recv_lens: Vec<usize> = (0..self.world_size()).map(|r| if r == me { 0 } else { n * 4 }).collect();
        let recv_ranges = compute_consecutive_ranges(&recv_lens);
        let TcpCallState { connections, scratch, .. } = call_state;
        let buf = reserve_scratch(scratch, n * (self.world_size() - 1));
        self.exchange_messages(connections, call, &messages, bytemuck::cast_slice_mut(buf), &recv_ranges)?;
        let addend = |r: usize| match r == me {
            true => &send[ranges[me].clone()],
            false => &buf[recv_ranges[r].start / 4..][..n],
        };
        tree_sum(out, &(0..self.world_size()).map(addend).collect::<Vec<_>>());
        Ok(())
    }

    /// Replaces the small vector `x` by its sum over all ranks: every rank receives all vectors and
    /// computes the whole sum.
    pub(super) fn all_reduce_small(
        &self,
        call_state: &mut TcpCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (world, me, n) = (self.world_size(), self.rank(), x.len());
        let TcpCallState { connections, scratch, .. } = call_state;
        let buf = reserve_scratch(scratch, world * n);
        buf[me * n..][..n].copy_from_slice(x);
        let parts = compute_consecutive_ranges(&vec![n * 4; world]);
        self.replicate_parts(connections, call, bytemuck::cast_slice_mut(buf), &parts)?;
        let addends: Vec<&[f32]> = (0..world).map(|r| &buf[r * n..][..n]).collect();
        tree_sum(x, &addends);
        Ok(())
    }

    /// Replaces the vector `x` by its sum over all ranks over the network, one block of `x` at a
    /// time. Each rank sums a share of each block. Each rank sums its share of a block in an
    /// exchange step, and then a replication step distributes the sums.
    pub(super) fn all_reduce_large(
        &self,
        call_state: &mut TcpCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (world, me) = (self.world_size(), self.rank());
        let block_len = self.compute_scratch_elements(0).max(world);
        for block in x.chunks_mut(block_len) {
            let shares: Vec<Range<usize>> =
                (0..world).map(|r| call::compute_even_share(block.len(), r, world)).collect();
            let mut sum = vec![0.0; shares[me].len()];
            self.reduce_scatter_ranges(call_state, call, block, &shares, &mut sum)?;
            block[shares[me].clone()].copy_from_slice(&sum);
            let parts: Vec<Range<usize>> = shares.iter().map(|s| s.start * 4..s.end * 4).collect();
            let block = bytemuck::cast_slice_mut(block);
            self.replicate_parts(&mut call_state.connections, call, block, &parts)?;
        }
        Ok(())
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

//! [`ShmComm`]: collectives between processes of one host, which share one memory segment.
//!
//! A collective is a series of *rounds*. In a round every rank fills its slot of the staging
//! memory, enters the round, waits until all have entered it, and reads what it needs from the
//! peers' slots. Each rank has two slots that alternate, so one wait per round is enough (`wait.rs`
//! explains why). Rounds of streaming collectives move [`MAX_CHUNK_BYTES`], which stay in the
//! processors' caches between the writer and the reader.
//!
//! Memory: a rank touches 2 × min([`MAX_CHUNK_BYTES`], staging) of the segment in streaming
//! collectives and up to 2 × staging in [`reduce_scatter_ordered`](Comm::reduce_scatter_ordered).
//! If the partials do not fit into staging, the latter also keeps a private buffer of 8 × staging
//! or two of the largest pieces, whichever is more (`ordered_reduce.rs`). The kernel allocates a
//! page of the segment when it is first accessed. If the machine has no memory left at that time,
//! the rank gets SIGBUS.
use crate::{
    AbortReason, CallMismatch, Comm, CommError, GroupError, PartialSink, Result, SharedWindow,
    call::{self, BufferShape, CollectiveCall, GroupPosition},
    error::ArgumentError,
};
use device::{Buf, Dtype, View, ViewMut};
use segment::{HeaderMapping, Segment, WindowMapping};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, atomic::Ordering},
    time::Duration,
};
use wait::{WaitError, store_words};

mod host_exchange;
mod ordered_reduce;
mod segment;
mod streaming_copy;
#[cfg(test)]
mod tests;
mod tree_reduce;
mod wait;

pub(crate) use host_exchange::{OutgoingMessage, check_byte_transfer};
pub use ordered_reduce::count_assembly_elements;
pub(crate) use ordered_reduce::partition_into_windows;

/// The largest number of bytes that a rank publishes in one round of a streaming collective. A
/// smaller staging slot lowers the number.
const MAX_CHUNK_BYTES: usize = 512 << 10;

/// The number of `f32` elements in a cache line.
const CACHE_LINE_ELEMENTS: usize = 16;

/// Timeouts and staging memory of a shared-memory group. Every rank must give the same
/// `staging_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmLimits {
    /// How long a rank waits for the others to join the group.
    pub join_timeout: Duration,
    /// How long a rank waits in a collective for peers that have not entered the collective.
    pub collective_timeout: Duration,
    /// Size in bytes of each of a rank's two staging slots; rounded up to whole pages.
    pub staging_bytes: usize,
}

impl Default for ShmLimits {
    fn default() -> Self {
        ShmLimits {
            join_timeout: Duration::from_secs(60),
            collective_timeout: Duration::from_secs(30 * 60),
            staging_bytes: 8 << 20,
        }
    }
}

/// The communicator of one rank of a group of processes on one host.
///
/// Dropping it leaves the group: peers that need this rank then get [`CommError::Aborted`].
pub struct ShmComm {
    /// The rank within the segment, and the number of ranks that share the segment.
    position: GroupPosition,
    job_ranks: JobRanks,
    limits: ShmLimits,
    /// Whether a rank spins briefly before it sleeps in a wait. True only if the machine has at
    /// least one processor per rank.
    can_spin: bool,
    segment: Segment,
    /// The file (a memfd) of the segment. Shared windows are stored in the file after the segment.
    fd: OwnedFd,
    /// Serializes the collectives of this rank.
    call_state: Mutex<ShmCallState>,
}

/// Maps ranks within a segment to ranks of the job, because error messages name ranks of the job.
#[derive(Clone, Debug)]
pub(crate) struct JobRanks {
    /// By rank within the segment: the rank within the job.
    pub(crate) ranks: Vec<usize>,
    /// Number of ranks of the job.
    pub(crate) world: usize,
}

/// How many collectives and rounds one rank has begun, and its reusable memory.
pub(crate) struct ShmCallState {
    /// Number of collectives called so far.
    calls: u64,
    /// Number of rounds entered so far.
    rounds: u64,
    /// Memory in which pieces are assembled that do not fit into the staging memory; reused by all
    /// calls.
    scratch: Buf,
    /// Bytes that shared windows occupy after the segment in the file.
    window_bytes: usize,
}

impl ShmCallState {
    /// Returns the index of this rank's staging slot for the next round: 0 or 1, alternating.
    fn next_slot(&self) -> usize {
        ((self.rounds + 1) % 2) as usize
    }
}

/// Aborts the group that shares the segment `fd`, with the text `reason`. The calling process need
/// not be one of the group's ranks, and ranks may still be joining.
pub fn abort_group(fd: BorrowedFd<'_>, reason: &str) -> Result<()> {
    HeaderMapping::open(fd)?.header().abort(&AbortReason::from_request(reason));
    Ok(())
}

impl ShmComm {
    /// Joins a group of `world` ranks as rank `rank`, and returns when all ranks have joined.
    ///
    /// `fd` is one memfd that every rank inherited, of size 0 at first. Fails if a rank does not
    /// join within `limits.join_timeout`, or if ranks disagree about `world` or the staging size.
    pub fn join(fd: OwnedFd, rank: usize, world: usize, limits: ShmLimits) -> Result<ShmComm> {
        ShmComm::join_host_group(fd, rank, limits, JobRanks { ranks: (0..world).collect(), world })
    }

    /// Joins the group of the ranks of one host of a job. This rank is `rank` within the segment
    /// and `job_ranks.ranks[rank]` within the job.
    pub(crate) fn join_host_group(
        fd: OwnedFd,
        rank: usize,
        limits: ShmLimits,
        job_ranks: JobRanks,
    ) -> Result<ShmComm> {
        let world = job_ranks.ranks.len();
        let segment = Segment::open(fd.as_fd(), world, &limits)?;
        if rank >= world {
            return Err(GroupError::RankOutOfRange { rank, world }.into());
        }
        // The processors of the machine, not of this process: ranks that are pinned have one each.
        // SAFETY: reads a number.
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        let can_spin = usize::try_from(cpus).is_ok_and(|cpus| cpus >= world);
        let state = ShmCallState { calls: 0, rounds: 0, scratch: Buf::zeroed(0), window_bytes: 0 };
        let pid = std::process::id();
        let joined = &segment.rank_status(rank).joined_pid;
        if let Err(joined_pid) = joined.compare_exchange(0, pid, Ordering::SeqCst, Ordering::SeqCst) {
            let rank = job_ranks.ranks[rank];
            let error = CommError::from(GroupError::AlreadyJoined { rank, joined_pid, pid });
            segment.header().abort(&error.to_abort_reason(rank));
            return Err(error);
        }
        let position = GroupPosition { rank, world };
        let call_state = Mutex::new(state);
        let comm = ShmComm { position, job_ranks, limits, can_spin, segment, fd, call_state };
        comm.segment.header().wake_sleepers();
        match comm.segment.wait_for_join(limits.join_timeout) {
            Ok(()) => comm.check_not_aborted().map(|()| comm),
            Err(error) => Err(comm.abort_on_failed_join(error)),
        }
    }

    /// Converts `rank`, a rank within the segment, to the rank within the job.
    fn to_job_rank(&self, rank: usize) -> usize {
        self.job_ranks.ranks[rank]
    }

    /// Fails with [`CommError::Aborted`] if the group is aborted.
    fn check_not_aborted(&self) -> Result<()> {
        self.segment.header().abort_reason().map_or(Ok(()), |reason| Err(CommError::Aborted(reason)))
    }

    /// Leaves the group in order. From now on, peers that wait for this rank fail.
    pub(crate) fn leave(&self) {
        self.segment.rank_status(self.position.rank).has_left.store(1, Ordering::SeqCst);
        self.segment.header().wake_sleepers();
    }

    /// Aborts the group for `reason`. Keeps the first reason if the group is already aborted.
    pub(crate) fn abort_with_reason(&self, reason: &AbortReason) {
        self.segment.header().abort(reason);
    }

    /// Begins a collective: locks this rank's call state and gives the call its number. Fails if
    /// the group is aborted or the arguments are invalid. Invalid arguments abort the group.
    fn begin_call(
        &self,
        call: std::result::Result<CollectiveCall, ArgumentError>,
    ) -> Result<(MutexGuard<'_, ShmCallState>, CollectiveCall)> {
        let rank = self.to_job_rank(self.position.rank);
        let mut call_state = self.call_state.lock().map_err(|_| {
            let reason = AbortReason::RankPanicked { rank };
            self.abort_with_reason(&reason);
            CommError::Aborted(reason)
        })?;
        self.check_not_aborted()?;
        let call = call
            .map_err(|error| self.abort_on_error(CommError::InvalidArguments { rank, error }))?
            .with_number(call_state.calls);
        call_state.calls += 1;
        Ok((call_state, call))
    }

    /// Aborts the group because of `error`, and returns `error`. Without the abort, this rank's
    /// later calls would be paired with the wrong calls of its peers.
    fn abort_on_error(&self, error: CommError) -> CommError {
        self.abort_with_reason(&error.to_abort_reason(self.to_job_rank(self.position.rank)));
        error
    }

    /// Aborts the group because `mismatch` shows that its ranks made different calls. Returns the
    /// mismatch as an error.
    fn abort_on_mismatch(&self, mismatch: CallMismatch) -> CommError {
        self.abort_on_error(CommError::Mismatch(mismatch))
    }

    /// Converts ranks within the segment to ranks within the job.
    fn to_job_ranks(&self, ranks: Vec<usize>) -> Vec<usize> {
        ranks.into_iter().map(|rank| self.to_job_rank(rank)).collect()
    }

    /// Aborts the group because waiting for peers to join failed with `error`. Returns the error of
    /// the communicator.
    fn abort_on_failed_join(&self, error: WaitError) -> CommError {
        match error {
            WaitError::Aborted(reason) => CommError::Aborted(reason),
            WaitError::PeerLeft(rank) => self.abort_on_departed_peer(rank, "join".to_owned()),
            WaitError::TimedOut(missing) => self.abort_on_error(CommError::JoinTimeout {
                rank: self.to_job_rank(self.position.rank),
                world: self.job_ranks.world,
                timeout: self.limits.join_timeout,
                missing: self.to_job_ranks(missing),
                last_failure: None,
            }),
        }
    }

    /// Aborts the group because waiting for peers in `call` failed with `error`. Returns the error
    /// of the collective.
    fn abort_on_failed_wait(&self, error: WaitError, call: &CollectiveCall) -> CommError {
        match error {
            WaitError::Aborted(reason) => CommError::Aborted(reason),
            WaitError::PeerLeft(rank) => {
                self.abort_on_departed_peer(rank, format!("{} (call {})", call.kind, call.number))
            }
            WaitError::TimedOut(missing) => self.abort_on_error(CommError::Timeout {
                rank: self.to_job_rank(self.position.rank),
                world: self.job_ranks.world,
                collective: call.kind,
                call_number: call.number,
                timeout: self.limits.collective_timeout,
                missing: self.to_job_ranks(missing),
            }),
        }
    }

    /// Aborts the group because the peer `rank` (a rank within the segment) left although
    /// `collective` needs it. Returns the error of the collective.
    fn abort_on_departed_peer(&self, rank: usize, collective: String) -> CommError {
        let reason = AbortReason::PeerLeft { rank: self.to_job_rank(rank), collective };
        self.abort_on_error(CommError::Aborted(reason))
    }

    /// Enters the next round of the collective `call`. From now on peers may read this rank's
    /// staging slot.
    fn enter_round(&self, call_state: &mut ShmCallState, call: &CollectiveCall) {
        call_state.rounds += 1;
        self.segment.enter_round(self.position.rank, call_state.rounds, call.to_words());
    }

    /// Waits until all ranks have entered the current round. Fails, and aborts the group, if a rank
    /// made another call than `call` or if the wait fails.
    fn wait_for_round(&self, call_state: &ShmCallState, call: &CollectiveCall) -> Result<()> {
        let (round, timeout) = (call_state.rounds, self.limits.collective_timeout);
        self.segment
            .wait_for_round(round, self.can_spin, timeout)
            .map_err(|error| self.abort_on_failed_wait(error, call))?;
        let slot = (round % 2) as usize;
        for peer in self.peers() {
            let words = &self.segment.rank_status(peer).call[slot];
            let words = words.each_ref().map(|w| w.load(Ordering::Relaxed));
            let (rank, peer) = (self.to_job_rank(self.position.rank), self.to_job_rank(peer));
            call.check_peer_call(rank, peer, words).map_err(|m| self.abort_on_mismatch(m))?;
        }
        Ok(())
    }

    /// Returns the ranks other than this one, starting with the next higher rank. So at one time
    /// each rank reads from a different peer.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let GroupPosition { rank, world } = self.position;
        (1..world).map(move |i| (rank + i) % world)
    }

    /// Returns how many `f32` elements a rank publishes in one round of a streaming collective.
    fn count_chunk_elements(&self) -> usize {
        MAX_CHUNK_BYTES.min(self.segment.layout.staging_bytes) / size_of::<f32>()
    }

    /// Returns how many `f32` elements a rank publishes for each peer in one round, if every peer
    /// gets different data. The result is a multiple of a cache line.
    fn count_peer_chunk_elements(&self) -> usize {
        (self.count_chunk_elements() / (self.position.world - 1)) & !(CACHE_LINE_ELEMENTS - 1)
    }

    /// Computes the position in `owner`'s staging slot at which the chunk for rank `dest` begins.
    /// The chunks for the peers have length `chunk` each; the result has the unit of `chunk`.
    fn compute_peer_chunk_offset(&self, owner: usize, dest: usize, chunk: usize) -> usize {
        (dest - usize::from(dest > owner)) * chunk
    }

    /// Gathers `send` from all ranks in chunks, one round per chunk. Calls `take(rank, offset,
    /// chunk)` for every chunk of every rank, including this one. `offset` is the position of the
    /// chunk within the bytes of `rank`.
    ///
    /// Rank r sends `lens[r]` bytes. All ranks must pass the same `lens`.
    fn gather_chunks(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        send: &[u8],
        lens: &[usize],
        mut take: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let (rank, chunk_bytes) = (self.position.rank, self.count_chunk_elements() * size_of::<f32>());
        let longest = lens.iter().copied().max().unwrap_or(0);
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            let range = compute_chunk_range(send.len(), offset, chunk_bytes);
            // SAFETY: this rank's slot of the next round.
            unsafe { self.segment.slot_mut(rank, slot, 0, range.len()) }
                .copy_from_slice(&send[range.clone()]);
            self.enter_round(call_state, call);
            take(rank, offset, &send[range]);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let len = compute_chunk_range(lens[peer], offset, chunk_bytes).len();
                // SAFETY: read within the round.
                take(peer, offset, unsafe { self.segment.slot(peer, slot, 0, len) });
            }
            offset += chunk_bytes;
            if offset >= longest {
                return Ok(());
            }
        }
    }

    /// Gathers `number` from every rank in one round, and returns the numbers indexed by rank.
    fn gather_u64(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        number: u64,
    ) -> Result<Vec<u64>> {
        let slot = call_state.next_slot();
        store_words(self.segment.number_table(self.position.rank, slot), [number]);
        self.enter_round(call_state, call);
        self.wait_for_round(call_state, call)?;
        let number = |rank| self.segment.number_table(rank, slot)[0].load(Ordering::Relaxed);
        Ok((0..self.position.world).map(number).collect())
    }

    /// Runs the round of an all-to-all in which ranks compare lengths: publishes how many elements
    /// this rank sends to each peer and expects from each peer. Returns the length of the longest
    /// message between any two ranks. Fails, and aborts the group, if a rank sends another length
    /// than its peer expects.
    fn exchange_transfer_lengths(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        recv_counts: &[usize],
        send_counts: &[usize],
    ) -> Result<usize> {
        let GroupPosition { rank, world } = self.position;
        let slot = call_state.next_slot();
        let words = send_counts.iter().chain(recv_counts).map(|&n| n as u64);
        store_words(self.segment.number_table(rank, slot), words);
        self.enter_round(call_state, call);
        self.wait_for_round(call_state, call)?;
        let mut longest = 0;
        for peer in 0..world {
            let table = self.segment.number_table(peer, slot);
            let table: Vec<u64> = table.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            call::check_transfer_lengths(peer, rank, table[rank], recv_counts[peer] as u64)
                .and_then(|()| {
                    call::check_transfer_lengths(rank, peer, send_counts[peer] as u64, table[world + rank])
                })
                .map_err(|mismatch| self.abort_on_mismatch(mismatch))?;
            let sent = (0..world).filter(|&to| to != peer).map(|to| table[to]).max();
            longest = longest.max(sent.unwrap_or(0));
        }
        // An invalid number of a peer causes more rounds, but allocates no memory.
        Ok(usize::try_from(longest).unwrap_or(usize::MAX))
    }
}

/// Computes the part of the index range `0..len` that begins at `offset` and has at most `chunk`
/// indices. The part is empty if `offset` is beyond the end.
fn compute_chunk_range(len: usize, offset: usize, chunk: usize) -> std::ops::Range<usize> {
    offset.min(len)..offset.saturating_add(chunk).min(len)
}

impl Comm for ShmComm {
    fn rank(&self) -> usize {
        self.position.rank
    }

    fn world(&self) -> usize {
        self.position.world
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let shapes = (BufferShape::new(recv.as_view()), BufferShape::new(send));
        let call = CollectiveCall::describe_all_gather(self.position, shapes.0, shapes.1, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.bytes(), send.bytes());
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let lens: Vec<usize> = counts.iter().map(|n| n * shapes.1.element_bytes).collect();
        let starts = call::compute_offsets(&lens);
        let bypass_cache = recv.len() >= streaming_copy::MIN_STREAMING_BYTES;
        self.gather_chunks(&mut call_state, &call, send, &lens, |from, offset, chunk| {
            let start = starts[from] + offset.min(lens[from]);
            streaming_copy::copy_bytes(&mut recv[start..start + chunk.len()], chunk, bypass_cache);
        })
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let call = CollectiveCall::describe_reduce_scatter_ordered(self.position, lens, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            partials.iter().enumerate().for_each(|(i, p)| sink(0, i, *p));
            return Ok(());
        }
        let partials: Vec<&[f32]> = partials.iter().map(|p| p.host()).collect();
        self.reduce_scatter_ordered_rounds(&mut call_state, &call, &partials, counts, sink)
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let call = CollectiveCall::describe_reduce_scatter(self.position, recv.len(), send.len(), counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host(), send.host());
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        self.reduce_scatter_in_chunks(&mut call_state, &call, recv, send, counts)
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::describe_all_reduce(x.len())))?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x = x.host();
        self.all_reduce_in_rounds(&mut call_state, &call, x)
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let call = CollectiveCall::describe_broadcast(self.position, x.len(), root);
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            return Ok(());
        }
        let is_root = self.position.rank == root;
        let x = x.host();
        let (len, chunk) = (x.len(), self.count_chunk_elements());
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            let range = compute_chunk_range(len, offset, chunk);
            if is_root {
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_f32_mut(root, slot, 0, range.len()) }
                    .copy_from_slice(&x[range.clone()]);
            }
            self.enter_round(&mut call_state, &call);
            self.wait_for_round(&call_state, &call)?;
            if !is_root {
                // SAFETY: read within the round.
                let chunk = unsafe { self.segment.slot_f32(root, slot, 0, range.len()) };
                x[range].copy_from_slice(chunk);
            }
            offset += chunk;
            if offset >= len {
                return Ok(());
            }
        }
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let shapes = (BufferShape::new(recv.as_view()), BufferShape::new(send));
        let call =
            CollectiveCall::describe_all_to_all(self.position, shapes.0, recv_counts, shapes.1, send_counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.bytes(), send.bytes());
        let GroupPosition { rank, world } = self.position;
        if world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let size = shapes.1.element_bytes;
        let longest = self.exchange_transfer_lengths(&mut call_state, &call, recv_counts, send_counts)?;
        let longest = longest.saturating_mul(size);
        let to_bytes = |counts: &[usize]| counts.iter().map(|n| n * size).collect::<Vec<_>>();
        let (send_lens, recv_lens) = (to_bytes(send_counts), to_bytes(recv_counts));
        let (send_starts, recv_starts) =
            (call::compute_offsets(&send_lens), call::compute_offsets(&recv_lens));
        let chunk_bytes = self.count_peer_chunk_elements() * size_of::<f32>();
        recv[recv_starts[rank]..][..recv_lens[rank]]
            .copy_from_slice(&send[send_starts[rank]..][..send_lens[rank]]);
        let mut offset = 0;
        while offset < longest {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let range = compute_chunk_range(send_lens[peer], offset, chunk_bytes);
                let start = self.compute_peer_chunk_offset(rank, peer, chunk_bytes);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_mut(rank, slot, start, range.len()) }
                    .copy_from_slice(&send[send_starts[peer]..][range]);
            }
            self.enter_round(&mut call_state, &call);
            self.wait_for_round(&call_state, &call)?;
            for peer in self.peers() {
                let range = compute_chunk_range(recv_lens[peer], offset, chunk_bytes);
                let start = self.compute_peer_chunk_offset(peer, rank, chunk_bytes);
                // SAFETY: read within the round.
                let chunk = unsafe { self.segment.slot(peer, slot, start, range.len()) };
                recv[recv_starts[peer]..][range].copy_from_slice(chunk);
            }
            offset = offset.saturating_add(chunk_bytes);
        }
        Ok(())
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut call_state, call) =
            self.begin_call(CollectiveCall::describe_all_gather_bytes(bytes.len()))?;
        if self.position.world == 1 {
            return Ok(vec![bytes.to_vec()]);
        }
        let lens = self.gather_u64(&mut call_state, &call, bytes.len() as u64)?;
        let limit = crate::MAX_GATHER_BYTES as u64;
        if let Some(rank) = lens.iter().position(|&n| n > limit) {
            let (bytes, rank) = (lens[rank], self.to_job_rank(rank));
            return Err(self.abort_on_mismatch(CallMismatch::TooManyBytes { rank, bytes, limit }));
        }
        let lens: Vec<usize> = lens.into_iter().map(|n| n as usize).collect();
        let mut gathered: Vec<Vec<u8>> = lens.iter().map(|&n| Vec::with_capacity(n)).collect();
        let take = |from: usize, _: usize, chunk: &[u8]| gathered[from].extend_from_slice(chunk);
        self.gather_chunks(&mut call_state, &call, bytes, &lens, take)?;
        Ok(gathered)
    }

    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let call = CollectiveCall::describe_shared_window(self.position, counts, dtype.size());
        let (mut call_state, call) = self.begin_call(call)?;
        let bytes = counts.iter().sum::<usize>() * dtype.size();
        let (position, end) = self.segment.compute_window_position(call_state.window_bytes, bytes)?;
        // A rank that lacks the address space aborts the group before a peer uses the window.
        let mapping = WindowMapping::open(self.fd.as_fd(), position, bytes)
            .map_err(|error| self.abort_on_error(error))?;
        call_state.window_bytes = end;
        self.enter_round(&mut call_state, &call);
        self.wait_for_round(&call_state, &call)?;
        let start = mapping.start();
        let rank = self.position.rank;
        // SAFETY: mapped with this length; page-aligned; all ranks gave the same counts and type.
        Ok(Some(unsafe { SharedWindow::new(Arc::new(mapping), start, dtype, counts, rank) }))
    }

    fn barrier(&self) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::describe_barrier()))?;
        self.enter_round(&mut call_state, &call);
        self.wait_for_round(&call_state, &call)
    }

    fn abort(&self, reason: &str) {
        self.abort_with_reason(&AbortReason::from_request(reason));
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.segment.header().abort_reason()
    }
}

impl Drop for ShmComm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let rank = self.to_job_rank(self.position.rank);
            self.abort_with_reason(&AbortReason::RankPanicked { rank });
        }
        self.leave();
    }
}

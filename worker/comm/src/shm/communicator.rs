//! [`ShmComm`]: the communicator of one rank, in a group of processes that share a memory segment.
//! Also the steps (rounds) of its collectives.
use super::limits::ShmLimits;
use super::segment::Segment;
use super::wait::{WaitError, store_words};
use crate::{
    AbortReason, CallMismatch, CommError, GroupError, Result,
    call::{CollectiveCall, GroupPosition},
    call_error::ArgumentError,
};
use device::Buf;
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Mutex, MutexGuard, atomic::Ordering},
};

/// Maximum number of bytes that a rank writes to shared memory per data exchange, when a collective
/// transfers data in chunks. If a staging slot is smaller, the size of the slot is the limit.
pub(super) const MAX_CHUNK_BYTES: usize = 512 << 10;

/// The number of `f32` elements in a cache line.
pub(super) const CACHE_LINE_ELEMENTS: usize = 16;

/// The communicator of one rank of a group of processes on one host, which exchange data through
/// shared memory.
///
/// Dropping it leaves the group: peers that need this rank then get [`CommError::Aborted`].
pub struct ShmComm {
    /// The rank within the segment, and the number of ranks that share the segment.
    pub(super) position: GroupPosition,
    pub(super) job_ranks: JobRankMap,
    pub(super) limits: ShmLimits,
    /// Whether this rank spins briefly before it sleeps while it waits for peers. True only if the
    /// machine has at least one processor per rank.
    pub(super) can_spin: bool,
    pub(super) segment: Segment,
    /// The file (a memfd) that contains the shared memory segment. Shared windows are stored in the
    /// file after the segment.
    pub(super) fd: OwnedFd,
    /// The call state of this rank. A collective holds the lock, so that collectives of one rank
    /// never overlap.
    pub(super) call_state: Mutex<ShmCallState>,
}

/// Table that converts the number of a rank on its host (from 0) to its rank in the job, for error
/// messages.
#[derive(Clone, Debug)]
pub(crate) struct JobRankMap {
    /// Maps each rank's number within the shared memory segment to its rank within the job.
    pub(crate) ranks: Vec<usize>,
    /// Number of ranks of the job.
    pub(crate) world: usize,
}

/// Mutable state of one rank's communicator: counters of its collectives and of their data
/// exchanges, a reusable buffer, and the size of its shared windows.
pub(crate) struct ShmCallState {
    /// Number of collectives called so far.
    pub(super) calls: u64,
    /// Number of rounds entered so far.
    pub(super) rounds: u64,
    /// Memory in which a rank assembles received pieces that do not fit into the staging memory.
    /// All calls reuse it.
    pub(super) scratch: Buf,
    /// Bytes that shared windows occupy after the segment in the file.
    pub(super) window_bytes: usize,
}

impl ShmCallState {
    /// Returns which of this rank's two staging slots in shared memory, 0 or 1, the rank fills in
    /// its next data exchange. A staging slot is the memory in which a rank publishes data. Rounds
    /// alternate between them.
    pub(super) fn next_slot(&self) -> usize {
        ((self.rounds + 1) % 2) as usize
    }
}

impl ShmComm {
    /// Joins the group of processes that share the memory file `fd`, as rank `rank` of `world`.
    /// Returns when all ranks have joined.
    ///
    /// `fd` is one memfd that every rank inherited, of size 0 at first. Fails if a rank does not
    /// join within `limits.join_timeout`, or if ranks disagree about `world` or the staging size.
    pub fn join(fd: OwnedFd, rank: usize, world: usize, limits: ShmLimits) -> Result<ShmComm> {
        ShmComm::join_host_group(fd, rank, limits, JobRankMap { ranks: (0..world).collect(), world })
    }

    /// Joins the shared-memory group of this host's ranks as number `rank` within the host, in a
    /// job that spans several hosts. Within the job, this rank is `job_ranks.ranks[rank]`.
    pub(crate) fn join_host_group(
        fd: OwnedFd,
        rank: usize,
        limits: ShmLimits,
        job_ranks: JobRankMap,
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

    /// Converts `rank`, the number of a rank within this host's group, to its rank within the job.
    pub(super) fn to_job_rank(&self, rank: usize) -> usize {
        self.job_ranks.ranks[rank]
    }

    /// Fails with [`CommError::Aborted`] if the group is aborted.
    pub(super) fn check_not_aborted(&self) -> Result<()> {
        self.segment.header().abort_reason().map_or(Ok(()), |reason| Err(CommError::Aborted(reason)))
    }

    /// Records in shared memory that this rank has left its group. Peers that wait for this rank
    /// now or later fail.
    pub(crate) fn leave(&self) {
        self.segment.rank_status(self.position.rank).has_left.store(1, Ordering::SeqCst);
        self.segment.header().wake_sleepers();
    }

    /// Aborts the group of processes for `reason`, so that collectives fail on every rank. Keeps
    /// the first reason if the group is already aborted.
    pub(crate) fn abort_with_reason(&self, reason: &AbortReason) {
        self.segment.header().abort(reason);
    }

    /// Begins a collective: checks its arguments, assigns the next call number, and locks the
    /// rank's communicator until the collective ends. Fails if the group is aborted or the
    /// arguments are invalid. Invalid arguments abort the group.
    pub(super) fn begin_call(
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
            .with_call_number(call_state.calls);
        call_state.calls += 1;
        Ok((call_state, call))
    }

    /// Aborts the group because of `error`, so that every rank fails, and returns `error`. Without
    /// the abort, this rank's later calls would be paired with the wrong calls of its peers.
    pub(super) fn abort_on_error(&self, error: CommError) -> CommError {
        self.abort_with_reason(&error.to_abort_reason(self.to_job_rank(self.position.rank)));
        error
    }

    /// Aborts the group because of `mismatch`, which shows that two of its ranks made different
    /// calls. Returns the mismatch as an error.
    pub(super) fn abort_on_mismatch(&self, mismatch: CallMismatch) -> CommError {
        self.abort_on_error(CommError::Mismatch(mismatch))
    }

    /// Converts numbers of ranks within this host's group to their ranks within the job.
    pub(super) fn to_job_ranks(&self, ranks: Vec<usize>) -> Vec<usize> {
        ranks.into_iter().map(|rank| self.to_job_rank(rank)).collect()
    }

    /// Aborts the group because this rank waited in vain for all peers to join. Returns the error
    /// for the caller.
    pub(super) fn abort_on_failed_join(&self, error: WaitError) -> CommError {
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

    /// Aborts the group because waiting for peers in the collective `call` failed with `error`.
    /// Returns the error for the caller.
    pub(super) fn abort_on_failed_wait(&self, error: WaitError, call: &CollectiveCall) -> CommError {
        match error {
            WaitError::Aborted(reason) => CommError::Aborted(reason),
            WaitError::PeerLeft(rank) => self.abort_on_departed_peer(rank, call.to_string()),
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

    /// Aborts the group because rank `rank` left while this rank waited for it in `collective`, and
    /// returns the error for the caller.
    pub(super) fn abort_on_departed_peer(&self, rank: usize, collective: String) -> CommError {
        let reason = AbortReason::PeerLeft { rank: self.to_job_rank(rank), collective };
        self.abort_on_error(CommError::Aborted(reason))
    }

    /// Publishes the data that this rank wrote to its part of shared memory, so that peers may read
    /// the data in the next exchange of the collective `call`. From now on peers may read this
    /// rank's staging slot.
    pub(super) fn enter_round(&self, call_state: &mut ShmCallState, call: &CollectiveCall) {
        call_state.rounds += 1;
        self.segment.enter_round(self.position.rank, call_state.rounds, call.to_words());
    }

    /// Waits until all ranks have begun the current round (one exchange of data) of the collective
    /// `call`. Fails, and aborts the group, if a rank made a different call or if the wait fails.
    pub(super) fn wait_for_round(&self, call_state: &ShmCallState, call: &CollectiveCall) -> Result<()> {
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

    /// Returns the ranks of all peers, starting with the rank after this one. With this order, all
    /// ranks read from different peers at the same time.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let GroupPosition { rank, world } = self.position;
        (1..world).map(move |i| (rank + i) % world)
    }

    /// Returns how many `f32` elements a rank writes to shared memory per data exchange, when a
    /// long collective consists of several exchanges.
    pub(super) fn count_chunk_elements(&self) -> usize {
        MAX_CHUNK_BYTES.min(self.segment.layout.staging_bytes) / size_of::<f32>()
    }

    /// Returns how many `f32` elements a rank can send to each peer in one exchange through shared
    /// memory if all peers get different data. The result is a multiple of a cache line.
    pub(super) fn count_peer_chunk_elements(&self) -> usize {
        (self.count_chunk_elements() / (self.position.world - 1)) & !(CACHE_LINE_ELEMENTS - 1)
    }

    /// Returns the offset of the chunk for rank `dest` in the staging slot, the shared memory in
    /// which rank `owner` places one chunk for each peer. The chunks have the length `chunk`, and
    /// the result has the unit of `chunk` (elements or bytes).
    pub(super) fn compute_peer_chunk_offset(&self, owner: usize, dest: usize, chunk: usize) -> usize {
        (dest - usize::from(dest > owner)) * chunk
    }

    /// Gathers `number` from every rank with one exchange through shared memory, and returns the
    /// numbers indexed by rank.
    pub(super) fn gather_u64(
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
}

/// Returns the part of the index range `0..len` that begins at `offset` and has at most `chunk`
/// indices. The part is empty if `offset` is beyond the end.
pub(super) fn compute_chunk_range(len: usize, offset: usize, chunk: usize) -> std::ops::Range<usize> {
    offset.min(len)..offset.saturating_add(chunk).min(len)
}

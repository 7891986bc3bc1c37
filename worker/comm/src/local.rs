//! [`LocalComm`]: collectives between threads of one process, which read each other's buffers
//! directly.
//!
//! A collective is one or two *exchanges*. In an exchange every rank publishes the addresses of its
//! data, waits until all have published, reads its peers' memory, and waits until all have finished
//! reading. The second wait makes the borrowed addresses sound: **no rank leaves an exchange while
//! a peer still reads**, not even when the group was aborted. After an abort no rank begins to
//! read. A rank that is already reading never waits for another rank, so the second wait ends.
use crate::{
    AbortReason, CallMismatch, Comm, CommError, PartialSink, Result, SharedWindow,
    call::{self, BufferShape, CollectiveCall, CollectiveKind, GroupPosition},
    error::ArgumentError,
    shared_window::WindowMemory,
    tree_sum::tree_sum,
};
use device::{Buf, Dtype, View, ViewMut};
use std::{
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long a rank waits for its peers in one collective of a group from [`create_group`].
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The largest timeout of a collective. Longer timeouts are reduced to it, so that deadlines do not
/// overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The largest length, in elements, up to which every rank computes the whole sum of an all-reduce,
/// with one exchange instead of two.
const MAX_SINGLE_EXCHANGE_LEN: usize = 1024;

/// Creates the communicators of `world` ranks, indexed by rank. Each communicator is meant for one
/// thread.
///
/// # Panics
///
/// Panics if `world` is 0 or above [`crate::MAX_WORLD`].
pub fn create_group(world: usize) -> Vec<LocalComm> {
    create_group_with_timeout(world, DEFAULT_TIMEOUT)
}

/// Creates the communicators of `world` ranks, as [`create_group`] does. A collective fails on
/// every rank if a peer does not enter it within `timeout`.
pub fn create_group_with_timeout(world: usize, timeout: Duration) -> Vec<LocalComm> {
    assert!(
        (1..=crate::MAX_WORLD).contains(&world),
        "a group has 1 to {} ranks, not {world}",
        crate::MAX_WORLD
    );
    let state = GroupState {
        contributions: vec![None; world],
        entered: vec![0; world],
        finished: vec![0; world],
        has_left: vec![false; world],
        readers: 0,
        window: None,
        aborted: None,
    };
    let timeout = timeout.min(MAX_TIMEOUT);
    let group = Arc::new(LocalGroup { timeout, state: Mutex::new(state), changed: Condvar::new() });
    let member = |rank| LocalComm {
        position: GroupPosition { rank, world },
        group: group.clone(),
        call_state: Mutex::new(LocalCallState { calls: 0, exchanges: 0 }),
    };
    (0..world).map(member).collect()
}

/// The communicator of one rank of a group of threads.
///
/// Dropping it leaves the group: peers that need this rank then get [`CommError::Aborted`].
pub struct LocalComm {
    position: GroupPosition,
    group: Arc<LocalGroup>,
    /// Serializes the collectives of this rank.
    call_state: Mutex<LocalCallState>,
}

/// How many collectives and exchanges one rank has begun.
struct LocalCallState {
    /// Number of collectives called so far.
    calls: u64,
    /// Number of exchanges entered so far.
    exchanges: u64,
}

/// The state that the ranks of a group of threads share.
struct LocalGroup {
    timeout: Duration,
    state: Mutex<GroupState>,
    changed: Condvar,
}

/// The state of a group that its lock protects: the progress of every rank, and why the group was
/// aborted.
struct GroupState {
    contributions: Vec<Option<Arc<Contribution>>>,
    /// By rank: the number of the last exchange that the rank entered.
    entered: Vec<u64>,
    /// By rank: the number of the last exchange in which the rank has finished reading.
    finished: Vec<u64>,
    /// By rank: whether the rank's communicator was dropped.
    has_left: Vec<bool>,
    /// Number of ranks that are reading their peers' memory now.
    readers: usize,
    /// The memory that rank 0 allocated for the latest [`Comm::shared_window`].
    window: Option<Arc<LocalWindow>>,
    aborted: Option<AbortReason>,
}

/// The memory of a shared window ([`Comm::shared_window`]). All ranks are threads of this process,
/// so it is ordinary memory.
struct LocalWindow {
    start: NonNull<u8>,
    /// Keeps the window's memory allocated. Ranks access the memory through buffers over its parts.
    _memory: Buf,
}

// SAFETY: an address and the memory behind it. `Comm::shared_window` states who accesses it when.
unsafe impl Send for LocalWindow {}
// SAFETY: see `Send`.
unsafe impl Sync for LocalWindow {}

impl WindowMemory for LocalWindow {
    /// Does nothing: the window is ordinary memory of this process, which counts once for all
    /// ranks.
    fn release_pages(&self, _: Range<usize>) {}
}

/// The data of one rank that its peers read in one exchange.
struct Contribution {
    call: CollectiveCall,
    slices: Vec<PublishedSlice>,
    /// By rank: the number of elements that this rank expects in an all-to-all; empty in other
    /// collectives.
    expected: Vec<usize>,
}

/// An address range of one rank's memory that peers may read during one exchange.
#[derive(Clone, Copy)]
struct PublishedSlice {
    address: *const u8,
    bytes: usize,
    element_bytes: usize,
}

// SAFETY: the memory is read only inside an exchange, which ends after all reads (module comment).
unsafe impl Send for PublishedSlice {}
// SAFETY: see `Send`; the memory is never written through this address.
unsafe impl Sync for PublishedSlice {}

impl PublishedSlice {
    /// Creates the published form of a slice of `f32` elements, for [`PublishedSlice::as_f32`] on
    /// the peers.
    fn from_f32(x: &[f32]) -> Self {
        let (address, bytes) = (x.as_ptr().cast(), size_of_val(x));
        PublishedSlice { address, bytes, element_bytes: size_of::<f32>() }
    }

    /// Creates the published form of a slice of elements with `element_bytes` bytes each.
    fn from_bytes(x: &[u8], element_bytes: usize) -> Self {
        PublishedSlice { address: x.as_ptr(), bytes: x.len(), element_bytes }
    }

    /// Returns the number of elements in the published slice.
    fn len(&self) -> usize {
        self.bytes / self.element_bytes
    }

    /// Returns the published elements as `f32`.
    ///
    /// # Safety
    ///
    /// [`PublishedSlice::from_f32`] must have created this value. The caller must not use the
    /// returned elements after the end of the exchange in which the slice was published. From then
    /// on, the rank that published the slice may overwrite or free the memory.
    unsafe fn as_f32<'a>(&self) -> &'a [f32] {
        // SAFETY: the caller's promise; the owner does not write or free the memory before the end.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len()) }
    }

    /// Returns the bytes of the published elements.
    ///
    /// # Safety
    ///
    /// The caller must not use the returned bytes after the end of the exchange in which the slice
    /// was published. From then on, the rank that published the slice may overwrite or free the
    /// memory.
    unsafe fn as_bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

impl LocalGroup {
    fn lock_state(&self) -> MutexGuard<'_, GroupState> {
        // no code panics while it holds the lock, so the state is consistent
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock of the group's state until a rank changes the state, at most until
    /// `deadline`. Returns the lock, locked again.
    fn wait_for_change<'a>(
        &self,
        state: MutexGuard<'a, GroupState>,
        deadline: Instant,
    ) -> MutexGuard<'a, GroupState> {
        let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Aborts the group for `reason` and wakes all waiting ranks. Keeps the first reason if the
    /// group is already aborted.
    fn abort(&self, reason: AbortReason) {
        self.lock_state().aborted.get_or_insert(reason);
        self.changed.notify_all();
    }
}

/// Counts this rank as a reader of its peers' memory until dropped. Dropping it, on return or
/// during a panic, blocks until no peer reads this rank's memory any more.
struct ReadGuard<'a> {
    comm: &'a LocalComm,
    exchange: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let group = &*self.comm.group;
        let rank = self.comm.position.rank;
        let mut state = group.lock_state();
        state.readers -= 1;
        state.finished[rank] = self.exchange;
        if std::thread::panicking() {
            state.aborted.get_or_insert(AbortReason::RankPanicked { rank });
        }
        let is_over = |s: &GroupState| {
            s.finished.iter().all(|&f| f >= self.exchange) || (s.aborted.is_some() && s.readers == 0)
        };
        if is_over(&state) {
            group.changed.notify_all();
        }
        let mut deadline = Instant::now() + group.timeout;
        while !is_over(&state) {
            if Instant::now() >= deadline {
                // A sink that never returns: abort the group, but keep the memory that it reads.
                let message = format!(
                    "a peer of rank {rank} reads its memory for longer than {}",
                    crate::error::format_seconds(group.timeout)
                );
                state.aborted.get_or_insert(AbortReason::RankFailed { rank, message });
                deadline = Instant::now() + group.timeout;
                group.changed.notify_all();
            }
            state = group.wait_for_change(state, deadline);
        }
    }
}

impl LocalComm {
    /// Begins a collective: locks this rank's call state and gives the call its number. Fails if
    /// the group is aborted or the arguments are invalid. Invalid arguments abort the group.
    fn begin_call(
        &self,
        call: std::result::Result<CollectiveCall, ArgumentError>,
    ) -> Result<(MutexGuard<'_, LocalCallState>, CollectiveCall)> {
        let mut call_state = self.call_state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = self.group.lock_state().aborted.clone() {
            return Err(CommError::Aborted(reason));
        }
        let rank = self.position.rank;
        let call = call
            .map_err(|error| self.abort_on_error(CommError::InvalidArguments { rank, error }))?
            .with_number(call_state.calls);
        call_state.calls += 1;
        Ok((call_state, call))
    }

    /// Aborts the group because of `error`, and returns `error`. Without the abort, this rank's
    /// later calls would be paired with the wrong calls of its peers.
    fn abort_on_error(&self, error: CommError) -> CommError {
        self.group.abort(error.to_abort_reason(self.position.rank));
        error
    }

    /// Runs one exchange: publishes `contribution`, waits for every rank, checks that all made the
    /// same call, and lets `read` read the contributions of all ranks. Returns when no rank reads
    /// any more.
    fn exchange_contributions(
        &self,
        call_state: &mut LocalCallState,
        contribution: Contribution,
        read: impl FnOnce(&[Arc<Contribution>]),
    ) -> Result<()> {
        call_state.exchanges += 1;
        let exchange = call_state.exchanges;
        let contributions = self.publish_and_wait_for_peers(exchange, contribution)?;
        let guard = ReadGuard { comm: self, exchange };
        read(&contributions);
        drop(guard);
        let state = self.group.lock_state();
        match &state.aborted {
            Some(reason) if state.finished.iter().any(|&f| f < exchange) => {
                Err(CommError::Aborted(reason.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Publishes `contribution` and waits until all ranks have published theirs for this exchange.
    /// Returns the contributions of all ranks. On success this rank counts as a reader.
    fn publish_and_wait_for_peers(
        &self,
        exchange: u64,
        contribution: Contribution,
    ) -> Result<Vec<Arc<Contribution>>> {
        let group = &*self.group;
        let call = contribution.call;
        let deadline = Instant::now() + group.timeout;
        let mut state = group.lock_state();
        state.contributions[self.position.rank] = Some(Arc::new(contribution));
        state.entered[self.position.rank] = exchange;
        let is_complete = |s: &GroupState| s.entered.iter().all(|&e| e >= exchange);
        if is_complete(&state) {
            group.changed.notify_all();
        }
        while !is_complete(&state) && state.aborted.is_none() {
            let ranks = 0..self.position.world;
            let missing: Vec<usize> = ranks.filter(|&r| state.entered[r] < exchange).collect();
            if let Some(&rank) = missing.iter().find(|&&r| state.has_left[r]) {
                let collective = call.kind.name().to_owned();
                state.aborted.get_or_insert(AbortReason::PeerLeft { rank, collective });
                group.changed.notify_all();
                break;
            }
            if Instant::now() >= deadline {
                let error = self.build_timeout_error(&call, missing);
                state.aborted.get_or_insert_with(|| error.to_abort_reason(self.position.rank));
                group.changed.notify_all();
                return Err(error); // not all ranks have entered, so no rank reads
            }
            state = group.wait_for_change(state, deadline);
        }
        // Compare before checking for an abort: every rank that met the others reports the
        // mismatch.
        if is_complete(&state) {
            let contributions: Vec<Arc<Contribution>> =
                state.contributions.iter().flatten().cloned().collect();
            if let Err(mismatch) = self.check_contributions(&call, &contributions) {
                let error = CommError::Mismatch(mismatch);
                state.aborted.get_or_insert_with(|| error.to_abort_reason(self.position.rank));
                group.changed.notify_all();
                return self.wait_for_readers(state, error);
            }
            if state.aborted.is_none() {
                state.readers += 1;
                return Ok(contributions);
            }
        }
        let reason = state.aborted.clone().unwrap_or(AbortReason::Lost);
        self.wait_for_readers(state, CommError::Aborted(reason))
    }

    /// Waits until no rank reads its peers' memory, and then returns `error`. The group must be
    /// aborted, so that no further rank begins to read.
    fn wait_for_readers<T>(&self, mut state: MutexGuard<'_, GroupState>, error: CommError) -> Result<T> {
        while state.readers > 0 {
            state = self.group.wait_for_change(state, Instant::now() + self.group.timeout);
        }
        Err(error)
    }

    /// Builds the error of a rank that waited for the ranks in `missing`.
    fn build_timeout_error(&self, call: &CollectiveCall, missing: Vec<usize>) -> CommError {
        let GroupPosition { rank, world } = self.position;
        let (collective, call_number, timeout) = (call.kind, call.number, self.group.timeout);
        CommError::Timeout { rank, world, collective, call_number, timeout, missing }
    }

    /// Compares the contributions of all ranks. Fails if two ranks made different calls, or if the
    /// ranks of an all-to-all do not expect the lengths that are sent to them.
    fn check_contributions(
        &self,
        call: &CollectiveCall,
        contributions: &[Arc<Contribution>],
    ) -> std::result::Result<(), CallMismatch> {
        let rank = self.position.rank;
        for (peer, theirs) in contributions.iter().enumerate() {
            call.check_peer_call(rank, peer, theirs.call.to_words())?;
        }
        if call.kind == CollectiveKind::AllToAll {
            let ours = &contributions[rank];
            for (peer, theirs) in contributions.iter().enumerate() {
                let (sent, expected) = (theirs.slices[rank].len(), ours.expected[peer]);
                call::check_transfer_lengths(peer, rank, sent as u64, expected as u64)?;
                let (sent, expected) = (ours.slices[peer].len(), theirs.expected[rank]);
                call::check_transfer_lengths(rank, peer, sent as u64, expected as u64)?;
            }
        }
        Ok(())
    }

    /// Runs an all-reduce in two exchanges: each rank sums its share of `x`, then all ranks gather
    /// the shares.
    fn all_reduce_large(
        &self,
        call_state: &mut LocalCallState,
        call: CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let share = call::compute_even_share(x.len(), self.position.rank, self.position.world);
        let mut sum = vec![0.0; share.len()];
        let contribution =
            Contribution { call, slices: vec![PublishedSlice::from_f32(x)], expected: Vec::new() };
        self.exchange_contributions(call_state, contribution, |peers| {
            // SAFETY: inside the exchange; `x` is not written before it ends.
            let addends: Vec<&[f32]> =
                peers.iter().map(|p| unsafe { &p.slices[0].as_f32()[share.clone()] }).collect();
            tree_sum(&mut sum, &addends);
        })?;
        let contribution =
            Contribution { call, slices: vec![PublishedSlice::from_f32(&sum)], expected: Vec::new() };
        self.exchange_contributions(call_state, contribution, |peers| {
            let len = x.len();
            for (rank, peer) in peers.iter().enumerate() {
                // SAFETY: inside the exchange.
                let sum = unsafe { peer.slices[0].as_f32() };
                x[call::compute_even_share(len, rank, peers.len())].copy_from_slice(sum);
            }
        })
    }
}

impl Comm for LocalComm {
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
        let slices = vec![PublishedSlice::from_bytes(send, shapes.1.element_bytes)];
        self.exchange_contributions(
            &mut call_state,
            Contribution { call, slices, expected: Vec::new() },
            |peers| {
                let mut rest = recv;
                for peer in peers {
                    // SAFETY: inside the exchange.
                    let part = unsafe { peer.slices[0].as_bytes() };
                    let (to, tail) = rest.split_at_mut(part.len());
                    to.copy_from_slice(part);
                    rest = tail;
                }
            },
        )
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
        let start = call::compute_offsets(counts)[self.position.rank];
        let part = start..start + counts[self.position.rank];
        let slices = partials.iter().map(|p| PublishedSlice::from_f32(p.host())).collect();
        self.exchange_contributions(
            &mut call_state,
            Contribution { call, slices, expected: Vec::new() },
            |peers| {
                for (rank, peer) in peers.iter().enumerate() {
                    for (i, slice) in peer.slices.iter().enumerate() {
                        // SAFETY: inside the exchange.
                        let partial = unsafe { slice.as_f32() };
                        sink(rank, i, (&partial[part.clone()]).into());
                    }
                }
            },
        )
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let call = CollectiveCall::describe_reduce_scatter(self.position, recv.len(), send.len(), counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host(), send.host());
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let start = call::compute_offsets(counts)[self.position.rank];
        let part = start..start + recv.len();
        let slices = vec![PublishedSlice::from_f32(send)];
        self.exchange_contributions(
            &mut call_state,
            Contribution { call, slices, expected: Vec::new() },
            |peers| {
                // SAFETY: inside the exchange.
                let addends: Vec<&[f32]> =
                    peers.iter().map(|p| unsafe { &p.slices[0].as_f32()[part.clone()] }).collect();
                tree_sum(recv, &addends);
            },
        )
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::describe_all_reduce(x.len())))?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x = x.host();
        if x.len() > MAX_SINGLE_EXCHANGE_LEN {
            return self.all_reduce_large(&mut call_state, call, x);
        }
        let mut sum = vec![0.0; x.len()];
        let slices = vec![PublishedSlice::from_f32(x)];
        self.exchange_contributions(
            &mut call_state,
            Contribution { call, slices, expected: Vec::new() },
            |peers| {
                // SAFETY: inside the exchange; `x` is not written before it ends.
                let addends: Vec<&[f32]> = peers.iter().map(|p| unsafe { p.slices[0].as_f32() }).collect();
                tree_sum(&mut sum, &addends);
            },
        )?;
        x.copy_from_slice(&sum);
        Ok(())
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let call = CollectiveCall::describe_broadcast(self.position, x.len(), root);
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x = x.host();
        let is_root = self.position.rank == root;
        let slices = if is_root { vec![PublishedSlice::from_f32(x)] } else { Vec::new() };
        self.exchange_contributions(
            &mut call_state,
            Contribution { call, slices, expected: Vec::new() },
            |peers| {
                if !is_root {
                    // SAFETY: inside the exchange.
                    x.copy_from_slice(unsafe { peers[root].slices[0].as_f32() });
                }
            },
        )
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
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let size = shapes.1.element_bytes;
        let starts = call::compute_offsets(send_counts);
        let slice = |(&start, &n)| PublishedSlice::from_bytes(&send[start * size..(start + n) * size], size);
        let slices = starts.iter().zip(send_counts).map(slice).collect();
        let contribution = Contribution { call, slices, expected: recv_counts.to_vec() };
        self.exchange_contributions(&mut call_state, contribution, |peers| {
            let mut rest = recv;
            for peer in peers {
                // SAFETY: inside the exchange.
                let part = unsafe { peer.slices[self.position.rank].as_bytes() };
                let (to, tail) = rest.split_at_mut(part.len());
                to.copy_from_slice(part);
                rest = tail;
            }
        })
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut call_state, call) =
            self.begin_call(CollectiveCall::describe_all_gather_bytes(bytes.len()))?;
        let mut gathered = Vec::with_capacity(self.position.world);
        let slices = vec![PublishedSlice::from_bytes(bytes, 1)];
        self.exchange_contributions(
            &mut call_state,
            Contribution { call, slices, expected: Vec::new() },
            |peers| {
                // SAFETY: inside the exchange.
                gathered.extend(peers.iter().map(|p| unsafe { p.slices[0].as_bytes() }.to_vec()));
            },
        )?;
        Ok(gathered)
    }

    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let call = CollectiveCall::describe_shared_window(self.position, counts, dtype.size());
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.rank == 0 {
            let mut memory = Buf::zeroed_as(dtype, counts.iter().sum());
            let start = NonNull::from(memory.view_mut().bytes()).cast();
            self.group.lock_state().window = Some(Arc::new(LocalWindow { start, _memory: memory }));
        }
        let mut window = None;
        let contribution = Contribution { call, slices: Vec::new(), expected: Vec::new() };
        // Rank 0 replaces the window only in a later call, and no rank leaves this call before all
        // have read it.
        self.exchange_contributions(&mut call_state, contribution, |_| {
            window = self.group.lock_state().window.clone()
        })?;
        let window = window.expect("rank 0 allocates the window before it enters the exchange");
        let start = window.start;
        // SAFETY: the window has this many elements of this type: all ranks gave the same counts.
        Ok(Some(unsafe { SharedWindow::new(window, start, dtype, counts, self.position.rank) }))
    }

    fn barrier(&self) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::describe_barrier()))?;
        let contribution = Contribution { call, slices: Vec::new(), expected: Vec::new() };
        self.exchange_contributions(&mut call_state, contribution, |_| ())
    }

    fn abort(&self, reason: &str) {
        self.group.abort(AbortReason::from_request(reason));
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.group.lock_state().aborted.clone()
    }
}

impl Drop for LocalComm {
    fn drop(&mut self) {
        let rank = self.position.rank;
        let mut state = self.group.lock_state();
        state.has_left[rank] = true;
        if std::thread::panicking() {
            state.aborted.get_or_insert(AbortReason::RankPanicked { rank });
        }
        self.group.changed.notify_all();
    }
}

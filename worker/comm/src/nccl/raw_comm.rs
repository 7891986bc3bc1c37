//! [`RawNcclComm`]: the wrapper of an `ncclComm_t`, NCCL's communicator of one rank. It adds
//! timeouts and aborts.
use super::binding::{ID_BYTES, IN_PROGRESS, NcclFunctions, SUCCESS, Status, create_non_blocking_config};
use super::library::NcclLibrary;
use crate::abort_reason::AbortReason;
use crate::communicator::Comm;
use crate::nccl_error::{NcclError, Result};
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// How long a thread that waits for an NCCL communicator polls it without sleeping. From NCCL 2.23
/// on, every call of a non-blocking communicator is completed by another thread, in some tens of
/// microseconds.
const SPIN_TIME: Duration = Duration::from_micros(500);
/// How long a thread sleeps between the first two polls of an NCCL communicator for which it waits;
/// later delays are longer.
const MIN_POLL_DELAY: Duration = Duration::from_micros(20);
/// The longest time for which a thread sleeps between two polls of an NCCL communicator for which
/// it waits.
const MAX_POLL_DELAY: Duration = Duration::from_millis(2);

/// Waits between two polls of a communicator with increasing delays: yields the CPU at first, then
/// sleeps, until a timeout expires.
struct PollBackoff {
    spin_until: Instant,
    deadline: Instant,
    timeout: Duration,
    delay: Duration,
}

impl PollBackoff {
    fn new(timeout: Duration) -> Self {
        let now = Instant::now();
        PollBackoff { spin_until: now + SPIN_TIME, deadline: now + timeout, timeout, delay: MIN_POLL_DELAY }
    }

    /// Waits until the caller should poll the communicator again, by yielding the CPU or by
    /// sleeping. Fails once the timeout has expired; `operation` names the unfinished operation in
    /// the error.
    fn wait_for_next_poll(&mut self, operation: &str) -> Result<()> {
        let now = Instant::now();
        if now >= self.deadline {
            return Err(NcclError::Timeout { operation: operation.to_owned(), timeout: self.timeout });
        }
        if now < self.spin_until {
            thread::yield_now();
            return Ok(());
        }
        thread::sleep(self.delay);
        self.delay = (self.delay * 2).min(MAX_POLL_DELAY);
        Ok(())
    }
}

/// The lock-protected state of a communicator: NCCL's handle, and the error with which it was
/// aborted. The lock is held only for calls that do not wait.
struct CommunicatorState {
    /// NCCL's handle of the communicator; null after the communicator was aborted.
    comm: ncclComm_t,
    aborted: Option<NcclError>,
}

// SAFETY: a communicator may be used from any thread, one at a time, which the lock ensures.
unsafe impl Send for CommunicatorState {}

/// Wrapper of an `ncclComm_t`, NCCL's communicator of one rank, whose calls do not block longer
/// than a timeout. Its collectives enqueue work on a CUDA stream and return.
pub struct RawNcclComm {
    nccl: NcclLibrary,
    state: Mutex<CommunicatorState>,
    rank: usize,
    world: usize,
    timeout: Duration,
}

impl RawNcclComm {
    /// Creates this rank's communicator in the NCCL group with the unique id `id`, and returns when
    /// all ranks of the group have joined. Fails if `host_comm` is aborted first, or after
    /// `timeout`.
    fn join(
        nccl: &NcclLibrary,
        id: [u8; ID_BYTES],
        host_comm: &dyn Comm,
        timeout: Duration,
    ) -> Result<RawNcclComm> {
        let (rank, world) = (host_comm.rank(), host_comm.world_size());
        let mut comm = ptr::null_mut();
        let mut config = create_non_blocking_config();
        // SAFETY: writes one handle; the configuration contains its size and version.
        let status = unsafe {
            (nccl.api.ncclCommInitRankConfig)(
                &mut comm,
                world as c_int,
                ncclUniqueId { internal: bytemuck::cast(id) },
                rank as c_int,
                &mut config,
            )
        };
        let state = Mutex::new(CommunicatorState { comm, aborted: None });
        // from here on a failure aborts the communicator
        let group = RawNcclComm { nccl: nccl.clone(), state, rank, world, timeout };
        nccl.check_status("ncclCommInitRankConfig", status, comm)?;
        let operation = format!("joining a group of {world} ranks");
        let check_abort =
            || host_comm.abort_reason().map_or(Ok(()), |reason| Err(NcclError::Aborted(reason)));
        group
            .wait_until_accepted_or_aborted(&operation, &check_abort)
            .inspect_err(|e| group.abort_communicator(e.clone()))?;
        Ok(group)
    }

    /// Creates an NCCL communicator of the ranks of `host_comm`, through which rank 0 sends NCCL's
    /// unique id to all of them. Every rank of `host_comm` must call this function, because it is a
    /// collective. An abort of `host_comm` ends the wait.
    ///
    /// Either all ranks get a communicator or none does. `timeout` applies to this call and to
    /// every later wait, until [`RawNcclComm::set_timeout`]. The rank uses the GPU of the calling
    /// thread's CUDA context.
    pub fn connect(nccl: &NcclLibrary, host_comm: &dyn Comm, timeout: Duration) -> Result<RawNcclComm> {
        // The first byte distinguishes an id from an error message.
        let announcement = match host_comm.rank() {
            0 => match nccl.create_unique_id() {
                Ok(id) => [&[1], &id[..]].concat(),
                Err(e) => [&[0], e.to_string().as_bytes()].concat(),
            },
            _ => Vec::new(),
        };
        let announcements = host_comm.all_gather_bytes(&announcement)?;
        let id = match announcements.first().and_then(|a| a.split_first()) {
            Some((1, id)) => <[u8; ID_BYTES]>::try_from(id).ok(),
            _ => None,
        };
        let id = id.ok_or_else(|| {
            let message = announcements.first().and_then(|a| a.get(1..)).unwrap_or_default();
            NcclError::PeerFailed { rank: 0, message: String::from_utf8_lossy(message).into_owned() }
        })?;
        let joined = RawNcclComm::join(nccl, id, host_comm, timeout);
        let error = joined.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let errors = host_comm.all_gather_bytes(error.as_bytes())?;
        let group = joined?;
        match errors.iter().enumerate().find(|(_, error)| !error.is_empty()) {
            None => Ok(group),
            Some((rank, error)) => {
                let message = String::from_utf8_lossy(error).into_owned();
                Err(NcclError::PeerFailed { rank, message })
            }
        }
    }

    /// Sets the longest time for which later calls wait for this communicator.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the rank of this communicator.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.world
    }

    /// Locks the mutex of NCCL's communicator handle.
    fn lock_communicator(&self) -> MutexGuard<'_, CommunicatorState> {
        // no code panics while it holds the lock, so the state is consistent
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Aborts this rank's communicator: every waiting and later call of this rank returns
    /// [`NcclError::Aborted`], and its work on the GPU ends. Callable from any thread.
    ///
    /// NCCL does not inform the peers. The caller must abort their communicators, too.
    pub fn abort(&self, reason: &str) {
        self.abort_with_reason(AbortReason::from_request(reason));
    }

    /// Aborts this rank's NCCL communicator, because the group of ranks was aborted for `reason`.
    pub(super) fn abort_with_reason(&self, reason: AbortReason) {
        self.abort_communicator(NcclError::Aborted(reason));
    }

    /// Aborts this rank's NCCL communicator, so that all its later calls return `error`. Keeps the
    /// error of the first abort if the communicator is already aborted.
    fn abort_communicator(&self, error: NcclError) {
        let mut state = self.lock_communicator();
        state.aborted.get_or_insert(error);
        let comm = std::mem::replace(&mut state.comm, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: aborted once. An error of the call changes nothing.
            let _ = unsafe { (self.nccl.api.ncclCommAbort)(comm) };
        }
    }

    /// Calls the NCCL function `f` with this rank's communicator, unless the communicator was
    /// aborted. `function` is its name for errors. Fails if the communicator was aborted. A failed
    /// call aborts the communicator.
    fn call_nccl_function(
        &self,
        function: &str,
        f: impl FnOnce(&NcclFunctions, ncclComm_t) -> Status,
    ) -> Result<()> {
        let state = self.lock_communicator();
        if let Some(error) = &state.aborted {
            return Err(error.clone());
        }
        let status = f(&self.nccl.api, state.comm);
        let result = self.nccl.check_status(function, status, state.comm);
        drop(state);
        result.inspect_err(|e| self.abort_communicator(e.clone()))
    }

    /// Asks NCCL once whether an earlier call on this communicator is still in progress, and
    /// returns true if so. If the communicator reports an asynchronous error, aborts the
    /// communicator and fails with that error.
    fn poll_is_busy(&self, operation: &str) -> Result<bool> {
        let mut state = SUCCESS;
        self.call_nccl_function(operation, |api, comm| {
            // SAFETY: writes one number.
            let status = unsafe { (api.ncclCommGetAsyncError)(comm, &mut state) };
            if status == SUCCESS { state } else { status }
        })?;
        Ok(state == IN_PROGRESS)
    }

    /// Fails if the collective `operation`, which has been running for `running_for`, has caused an
    /// NCCL error or exceeded its timeout. If the communicator reports an error, or the timeout has
    /// expired, aborts the communicator and fails.
    pub(super) fn check_running_call(&self, operation: &str, running_for: Duration) -> Result<()> {
        self.poll_is_busy(operation)?;
        if running_for < self.timeout {
            return Ok(());
        }
        let error = NcclError::Timeout { operation: operation.to_owned(), timeout: self.timeout };
        self.abort_communicator(error.clone());
        Err(error)
    }

    /// Blocks until NCCL has enqueued the work of the latest call on this communicator. Fails after
    /// the timeout, or with the communicator's error.
    fn wait_until_accepted(&self, operation: &str) -> Result<()> {
        self.wait_until_accepted_or_aborted(operation, &|| Ok(()))
    }

    /// Blocks until NCCL has enqueued the work of the latest call on this communicator, or until
    /// `check_abort` reports that the ranks' group was aborted. Also fails after the timeout, or
    /// with the communicator's error.
    fn wait_until_accepted_or_aborted(
        &self,
        operation: &str,
        check_abort: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let mut backoff = PollBackoff::new(self.timeout);
        while self.poll_is_busy(operation)? {
            check_abort()?;
            backoff.wait_for_next_poll(operation)?;
        }
        Ok(())
    }

    /// Blocks until `is_done`, which checks for the end of work on a GPU stream, returns true.
    /// `operation` names the work in errors.
    ///
    /// Fails as soon as the library reports an error, the group is aborted, or the timeout has
    /// expired. The communicator is then aborted, and its kernels on the GPU end.
    pub fn wait_until_done(&self, operation: &str, mut is_done: impl FnMut() -> bool) -> Result<()> {
        let mut backoff = PollBackoff::new(self.timeout);
        loop {
            self.poll_is_busy(operation)?;
            if is_done() {
                return Ok(());
            }
            backoff.wait_for_next_poll(operation).inspect_err(|e| self.abort_communicator(e.clone()))?;
        }
    }

    /// Calls the NCCL function `f`, which enqueues work on a stream, and blocks until NCCL has
    /// enqueued that work.
    fn enqueue_and_wait_until_accepted(
        &self,
        function: &str,
        f: impl FnOnce(&NcclFunctions, ncclComm_t) -> Status,
    ) -> Result<()> {
        self.call_nccl_function(function, f)?;
        self.wait_until_accepted(function)
    }

    /// Enqueues an all-gather that concatenates the `send` buffers of all ranks (`count` elements
    /// each) in `recv`, in rank order. `send` may be this rank's part of `recv`.
    ///
    /// # Safety
    ///
    /// Each address must point to as many elements of type `dtype` in the memory of this rank's GPU
    /// as the collective reads or writes there. Until the enqueued work is done, the caller must
    /// not free the memory, write the elements, or read elements that the collective writes.
    pub unsafe fn all_gather(
        &self,
        recv: u64,
        send: u64,
        count: usize,
        dtype: ncclDataType_t,
        stream: CudaStream,
    ) -> Result<()> {
        let (from, to) = (to_pointer(send), to_pointer(recv));
        self.enqueue_and_wait_until_accepted("ncclAllGather", |api, comm| {
            // SAFETY: the caller's promise.
            unsafe { (api.ncclAllGather)(from, to, count, dtype, comm, stream.0.cast()) }
        })
    }

    /// Enqueues a reduce-scatter that sums the `send` buffers of all ranks (`count` elements per
    /// rank), and stores this rank's part of the sum in `recv`. NCCL chooses the order of each sum,
    /// which depends on the number of ranks.
    ///
    /// # Safety
    ///
    /// See [`RawNcclComm::all_gather`].
    pub unsafe fn reduce_scatter(
        &self,
        recv: u64,
        send: u64,
        count: usize,
        dtype: ncclDataType_t,
        stream: CudaStream,
    ) -> Result<()> {
        let (from, to) = (to_pointer(send), to_pointer(recv));
        self.enqueue_and_wait_until_accepted("ncclReduceScatter", |api, comm| {
            // SAFETY: the caller's promise.
            unsafe {
                (api.ncclReduceScatter)(from, to, count, dtype, ncclRedOp_t::ncclSum, comm, stream.0.cast())
            }
        })
    }

    /// Enqueues one operation that sends ranges of GPU memory to peers and receives ranges of GPU
    /// memory from them. All of them run at the same time.
    ///
    /// Between two ranks, the n-th send matches the n-th receive. Collectives with parts of unequal
    /// size consist of such sends and receives.
    ///
    /// # Safety
    ///
    /// The requirements of [`RawNcclComm::all_gather`] apply to every address, until the enqueued
    /// work is done.
    pub unsafe fn exchange(
        &self,
        sends: &[PeerBuffer],
        receives: &[PeerBuffer],
        dtype: ncclDataType_t,
        stream: CudaStream,
    ) -> Result<()> {
        let mut peers = sends.iter().chain(receives).map(|buffer| buffer.peer);
        if let Some(peer) = peers.find(|peer| *peer >= self.world) {
            return Err(NcclError::PeerOutOfRange { peer, world: self.world });
        }
        self.enqueue_and_wait_until_accepted("ncclGroupEnd", |api, comm| {
            // SAFETY: the caller's promise. Calls between start and end are only recorded.
            unsafe {
                let mut status = (api.ncclGroupStart)();
                for &PeerBuffer { peer, address, len } in sends {
                    let next =
                        (api.ncclSend)(to_pointer(address), len, dtype, peer as c_int, comm, stream.0.cast());
                    status = select_failed_status(status, next);
                }
                for &PeerBuffer { peer, address, len } in receives {
                    let next =
                        (api.ncclRecv)(to_pointer(address), len, dtype, peer as c_int, comm, stream.0.cast());
                    status = select_failed_status(status, next);
                }
                // called after an error, too
                select_failed_status(status, (api.ncclGroupEnd)())
            }
        })
    }
}

impl Drop for RawNcclComm {
    fn drop(&mut self) {
        let mut state = self.lock_communicator();
        let comm = std::mem::replace(&mut state.comm, ptr::null_mut());
        if !comm.is_null() {
            // SAFETY: aborted once. Destroying the communicator instead would wait for peers, which
            // may be gone, and no code waits for this rank's work any more.
            let _ = unsafe { (self.nccl.api.ncclCommAbort)(comm) };
        }
    }
}

/// A range of GPU memory that [`RawNcclComm::exchange`] sends to a peer or receives from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerBuffer {
    /// The rank that receives or sends the elements.
    pub peer: usize,
    /// GPU address of the first element.
    pub address: u64,
    /// Number of elements.
    pub len: usize,
}

/// Pointer to a CUDA stream (`cudaStream_t`) on which NCCL enqueues work.
#[derive(Clone, Copy, Debug)]
pub struct CudaStream(pub *mut c_void);

/// Converts a GPU address to the pointer type of NCCL's functions.
fn to_pointer(address: u64) -> *mut c_void {
    address as *mut c_void
}

/// Returns the status of the first failed call, given the statuses of two NCCL calls. Without an
/// error, returns "in progress" if a call is in progress, otherwise success.
fn select_failed_status(first: Status, second: Status) -> Status {
    match first {
        SUCCESS | IN_PROGRESS if second != SUCCESS => second,
        _ => first,
    }
}

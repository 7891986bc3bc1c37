//! [`NcclComm`]: the communicator of one rank whose buffers may be in GPU memory, with collectives
//! by NCCL.
//!
//! Everything else uses a transport between host memories: lengths, reports, barriers, aborts, and
//! buffers in host memory.
//!
//! Transfers are enqueued on the stream of the calling thread's GPU work. A call returns before
//! they are done, and they run in order with the operations around them. Only pieces are
//! transferred; the caller sums them in the same fixed order as on every other transport. Only
//! [`Comm::reduce_scatter`] is summed by NCCL, in an order that depends on the number of ranks.
use super::equal_parts::{EqualPartsPlan, intersect_ranges};
use super::library::NcclLibrary;
use super::raw_comm::{CudaStream, PeerBuffer, RawNcclComm};
use super::watchdog::{EnteredCall, Watchdog};
use crate::{
    AbortReason, ArgumentError, Comm, CommError, LinkDelays, PartialSink, Result,
    call::{BufferShape, CollectiveCall, GroupPosition, compute_part_offsets},
    staged::StagedComm,
    thread_comm::DEFAULT_TIMEOUT,
};
use cudarc::nccl::sys::ncclDataType_t;
use device::{Buf, Cuda, Dtype, Storage, View, ViewMut, ops::VectorOps};
use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// The communicator of one rank with a GPU: runs collectives on GPU memory through NCCL, and those
/// on host memory through another communicator.
pub struct NcclComm {
    group: Arc<RawNcclComm>,
    watchdog: Watchdog,
    /// The transport for everything that NCCL does not transfer: buffers in host memory, and all
    /// calls of [`Comm::all_reduce`] and [`Comm::broadcast`].
    host_comm: Arc<StagedComm>,
    cuda: Arc<Cuda>,
    /// GPU memory for pieces received from peers, reused by all calls.
    received: Mutex<Buf>,
}

impl NcclComm {
    /// Creates this rank's NCCL communicator for GPU memory, for the group of all ranks of the
    /// host-memory communicator `host_comm`. The result uses `host_comm` for buffers in host
    /// memory. Every rank of `host_comm` must call this function, because it is a collective. Fails
    /// if a rank does not join within `timeout`.
    ///
    /// `timeout` does not apply to the collectives of the returned communicator. Their timeout is
    /// [`DEFAULT_TIMEOUT`], which is long enough for NCCL to connect two ranks when they first
    /// exchange data.
    pub fn connect(
        nccl: &NcclLibrary,
        cuda: Arc<Cuda>,
        host_comm: Arc<dyn Comm>,
        timeout: Duration,
    ) -> crate::nccl_error::Result<NcclComm> {
        cuda.make_current()?;
        cuda.release_unused_memory()?; // NCCL allocates its buffers outside the pool
        let mut group = RawNcclComm::connect(nccl, host_comm.as_ref(), timeout)?;
        group.set_timeout(DEFAULT_TIMEOUT);
        let (group, host_comm) = (Arc::new(group), Arc::new(StagedComm::new(host_comm, cuda.clone())));
        let watchdog = Watchdog::start(group.clone(), host_comm.clone(), cuda.clone())?;
        Ok(NcclComm { group, watchdog, host_comm, cuda, received: Mutex::default() })
    }

    /// Launches the GPU calls that the calling thread has recorded but not launched yet, and
    /// returns the CUDA stream on which they run. Fails if the GPU has failed, so that no invalid
    /// data is sent.
    fn flush_stream(&self) -> Result<CudaStream> {
        Ok(CudaStream(self.cuda.flush_and_get_stream()?))
    }

    /// Enqueues one NCCL operation that sends the buffers `sends` to peers and receives the buffers
    /// `receives` from peers, with elements of type `dtype`. NCCL runs all of them at the same
    /// time.
    fn exchange_parts(&self, sends: &[PeerBuffer], receives: &[PeerBuffer], dtype: Dtype) -> Result<()> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        self.cuda.make_current()?;
        // SAFETY: the callers pass addresses of views on this GPU. They are read and written in the
        // order of the stream, as is any later use of their memory.
        let enqueued =
            unsafe { self.group.exchange(sends, receives, to_nccl_type(dtype), self.flush_stream()?) };
        Ok(enqueued.map_err(|error| self.watchdog.replace_by_abort_reason(error))?)
    }

    /// Enqueues NCCL's all-gather of `len` elements of each rank into `recv`. `send` is this rank's
    /// part, which may already be in its place in `recv`.
    fn gather_equal_parts(&self, recv: View, send: View, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.cuda.make_current()?;
        let (to, from, dtype) = (recv.address(), send.address(), to_nccl_type(send.dtype()));
        // SAFETY: see `exchange_parts`.
        let enqueued = unsafe { self.group.all_gather(to, from, len, dtype, self.flush_stream()?) };
        Ok(enqueued.map_err(|error| self.watchdog.replace_by_abort_reason(error))?)
    }

    /// Enqueues an all-gather of parts of different lengths: ranks first exchange elements until
    /// all parts are equally long, and then gather the parts with NCCL. Copies this rank's part to
    /// its place in `recv`, exchanges the elements by which the parts differ from equal parts, and
    /// gathers the equal parts in place.
    ///
    /// No other memory is needed, and each rank copies only its own part. Padding each part to the
    /// longest one would need a second vector and a copy of the whole vector.
    fn gather_unequal_parts(&self, mut recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let (parts, me) = (EqualPartsPlan::new(counts), self.rank());
        self.cuda.copy(recv.slice_mut(parts.owned_range(me)), send);
        let recv = recv.as_view();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for peer in 0..self.world_size() {
            let buffer = |elements: Range<usize>| {
                let part = recv.slice(elements);
                PeerBuffer { peer, address: part.address(), len: part.len() }
            };
            sends.extend(parts.list_moves(me, peer).into_iter().map(buffer));
            receives.extend(parts.list_moves(peer, me).into_iter().map(buffer));
        }
        self.exchange_parts(&sends, &receives, recv.dtype())?;
        let len = parts.part_len();
        self.gather_equal_parts(recv, recv.slice(me * len..(me + 1) * len), len)
    }

    /// Enqueues a reduce-scatter of parts with different lengths: NCCL sums parts of equal length,
    /// and then ranks exchange the elements by which the lengths differ. Ranks also
    /// exchange the summands of the remainder, which no equal part contains. Each rank adds the
    /// summands of its elements of the remainder, in the order of the ranks.
    fn reduce_scatter_unequal_parts(
        &self,
        mut recv: ViewMut,
        send: View,
        parts: &EqualPartsPlan,
        scratch: &mut Buf,
    ) -> Result<()> {
        let (me, len, world) = (self.rank(), parts.part_len(), self.world_size());
        let (part, owned, remainder) = (parts.equal_part(me), parts.owned_range(me), parts.remainder());
        let summands = intersect_ranges(&owned, &remainder);
        let required = len + world * summands.len();
        if scratch.len() < required {
            *scratch = self.cuda.zeroed(Dtype::F32, required);
        }
        if len > 0 {
            self.cuda.make_current()?;
            let (to, from) = (scratch.view().address(), send.address());
            // SAFETY: see `exchange_parts`.
            let enqueued = unsafe {
                self.group.reduce_scatter(to, from, len, to_nccl_type(Dtype::F32), self.flush_stream()?)
            };
            enqueued.map_err(|error| self.watchdog.replace_by_abort_reason(error))?;
        }
        // the summands of rank r for this rank's elements of the remainder
        let summands_of = |rank: usize| len + rank * summands.len()..len + (rank + 1) * summands.len();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for peer in 0..world {
            let buffer = |x: View| PeerBuffer { peer, address: x.address(), len: x.len() };
            sends.extend(parts.list_moves(peer, me).into_iter().map(|elements| {
                let is_summed = elements.start < remainder.start;
                let shift = |i: usize| i - part.start;
                buffer(if is_summed {
                    scratch.view().slice(shift(elements.start)..shift(elements.end))
                } else {
                    send.slice(elements)
                })
            }));
            receives.extend(parts.list_moves(me, peer).into_iter().map(|elements| {
                let is_summed = elements.start < remainder.start;
                let shift = |i: usize| i - owned.start;
                buffer(if is_summed {
                    recv.as_view().slice(shift(elements.start)..shift(elements.end))
                } else {
                    scratch.view().slice(summands_of(peer))
                })
            }));
        }
        self.exchange_parts(&sends, &receives, Dtype::F32)?;
        let mine = intersect_ranges(&owned, &part);
        if !mine.is_empty() {
            self.cuda.copy(
                recv.slice_mut(mine.start - owned.start..mine.end - owned.start),
                scratch.view().slice(mine.start - part.start..mine.end - part.start),
            );
        }
        if summands.is_empty() {
            return Ok(());
        }
        let sums = summands.start - owned.start..summands.end - owned.start;
        self.cuda.fill_with_zeros(recv.slice_mut(sums.clone()));
        for rank in 0..world {
            let piece = if rank == me {
                send.slice(summands.clone())
            } else {
                scratch.view().slice(summands_of(rank))
            };
            self.cuda.add(recv.slice_mut(sums.clone()), piece);
        }
        Ok(())
    }

    /// Returns this rank and the number of ranks in its group.
    fn group_position(&self) -> GroupPosition {
        GroupPosition { rank: self.rank(), world: self.world_size() }
    }

    /// Begins a collective: checks its arguments, assigns the next call number, and makes the
    /// watchdog thread check the collective for errors and its timeout. Fails if its arguments
    /// contradict each other, or if an earlier collective has failed.
    fn begin_call(
        &self,
        call: std::result::Result<CollectiveCall, ArgumentError>,
    ) -> Result<EnteredCall<'_>> {
        let call = call.map_err(|error| CommError::InvalidArguments { rank: self.rank(), error })?;
        self.watchdog.enter_call(call)
    }

    /// Makes the watchdog thread check the collective `call`, whose work is now enqueued on the
    /// GPU, until that work completes or fails.
    fn watch_enqueued_call(&self, call: EnteredCall) {
        // Recording the event may wait for the work.
        call.watch_until(self.cuda.record_event());
    }

    /// Runs the collective `run` on buffers in host memory through the communicator for host memory
    /// instead of NCCL. If this rank's NCCL has failed, returns that failure, because of which the
    /// transport was aborted.
    fn run_host_collective<T>(&self, run: impl FnOnce(&StagedComm) -> Result<T>) -> Result<T> {
        self.watchdog.replace_result_by_found_error(run(&self.host_comm))
    }
}

/// Converts the element type of a buffer to the constant with which NCCL names this type.
fn to_nccl_type(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::F32 => ncclDataType_t::ncclFloat32,
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F16 => ncclDataType_t::ncclFloat16,
    }
}

/// Divides `x` into consecutive parts of `counts[r]` elements for each rank r, and lists the GPU
/// address and length of each non-empty part.
fn list_peer_buffers(x: View, counts: &[usize]) -> Vec<PeerBuffer> {
    let element_bytes = x.dtype().size();
    let part = |(peer, (start, &len)): (usize, (usize, &usize))| {
        let address = x.address() + (start * element_bytes) as u64;
        (len > 0).then_some(PeerBuffer { peer, address, len })
    };
    compute_part_offsets(counts).into_iter().zip(counts).enumerate().filter_map(part).collect()
}

impl Comm for NcclComm {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn list_rank_hosts(&self) -> Vec<usize> {
        self.host_comm.list_rank_hosts()
    }

    fn take_link_delays(&self) -> Option<LinkDelays> {
        self.host_comm.take_link_delays()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let recv_view = recv.as_view();
        if recv_view.is_on_host() && send.is_on_host() {
            return self.run_host_collective(|host| host.all_gather(recv, send, counts));
        }
        let shapes = (BufferShape::new(recv_view), BufferShape::new(send));
        let call = CollectiveCall::summarize_all_gather(self.group_position(), shapes.0, shapes.1, counts);
        let call = self.begin_call(call)?;
        if counts.iter().all(|n| *n == send.len()) {
            self.gather_equal_parts(recv_view, send, send.len())?;
        } else {
            self.gather_unequal_parts(recv, send, counts)?;
        }
        self.watch_enqueued_call(call);
        Ok(())
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let position = self.group_position();
        let call = CollectiveCall::summarize_reduce_scatter_ordered(position, lens, partial_counts, counts);
        let call = self.begin_call(call)?;
        let len = counts[self.rank()];
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let required = len * partial_counts.iter().sum::<usize>();
        if received.len() < required {
            *received = self.cuda.zeroed(Dtype::F32, required);
        }
        let sends: Vec<_> = partials.iter().flat_map(|partial| list_peer_buffers(*partial, counts)).collect();
        let senders = partial_counts.iter().enumerate().flat_map(|(rank, n)| std::iter::repeat_n(rank, *n));
        let start = received.view().address();
        let receive = |(i, peer): (usize, usize)| {
            let address = start + (i * len * size_of::<f32>()) as u64;
            (len > 0).then_some(PeerBuffer { peer, address, len })
        };
        let receives: Vec<_> = senders.enumerate().filter_map(receive).collect();
        self.exchange_parts(&sends, &receives, Dtype::F32)?;
        self.watch_enqueued_call(call);
        let mut i = 0;
        for (rank, &n) in partial_counts.iter().enumerate() {
            for index in 0..n {
                sink(rank, index, received.view().slice(i * len..(i + 1) * len));
                i += 1;
            }
        }
        Ok(())
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        if recv.as_view().is_on_host() && send.is_on_host() {
            return self.run_host_collective(|host| host.reduce_scatter(recv, send, counts));
        }
        let lens = (recv.len(), send.len());
        let call = CollectiveCall::summarize_reduce_scatter(self.group_position(), lens.0, lens.1, counts);
        let call = self.begin_call(call)?;
        let mut scratch = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        self.reduce_scatter_unequal_parts(recv, send, &EqualPartsPlan::new(counts), &mut scratch)?;
        self.watch_enqueued_call(call);
        Ok(())
    }

    fn has_native_reduce_scatter(&self) -> bool {
        true
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        self.run_host_collective(|host| host.all_reduce(x))
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        self.run_host_collective(|host| host.broadcast(x, root))
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let recv_view = recv.as_view();
        if recv_view.is_on_host() && send.is_on_host() {
            return self.run_host_collective(|host| host.all_to_all(recv, recv_counts, send, send_counts));
        }
        let shapes = [BufferShape::new(recv_view), BufferShape::new(send)];
        let call = CollectiveCall::summarize_all_to_all(
            self.group_position(),
            shapes[0],
            recv_counts,
            shapes[1],
            send_counts,
        );
        let call = self.begin_call(call)?;
        let (sends, receives) =
            (list_peer_buffers(send, send_counts), list_peer_buffers(recv_view, recv_counts));
        self.exchange_parts(&sends, &receives, send.dtype())?;
        self.watch_enqueued_call(call);
        Ok(())
    }

    fn all_to_all_bytes(
        &self,
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()> {
        self.run_host_collective(|host| host.all_to_all_bytes(recv, recv_counts, send, send_counts))
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.run_host_collective(|host| host.all_gather_bytes(bytes))
    }

    fn barrier(&self) -> Result<()> {
        self.run_host_collective(|host| host.barrier())
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
        self.host_comm.abort(reason);
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.host_comm.abort_reason()
    }
}

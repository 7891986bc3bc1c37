//! [`Comm`]: the trait with all collectives, which every transport (threads, shared memory, TCP,
//! NCCL) implements.
use crate::abort_reason::AbortReason;
use crate::call_error::CallMismatch;
use crate::error::{CommError, Result};
use crate::link_delays::LinkDelays;
use crate::shared_window::SharedWindow;
use device::{Dtype, View, ViewMut};

/// Callback that receives one piece of a vector in [`Comm::reduce_scatter_ordered`]: the source
/// rank, the index of the vector on that rank, and the piece.
///
/// The callback may call [`Comm::abort`], but no collective. The address of a piece is a multiple
/// of 4 bytes, the alignment of `f32`, and not of more.
pub type PartialSink<'a> = dyn FnMut(usize, usize, View<'_>) + 'a;

/// The communicator of one rank, through which the rank calls the collectives of its group.
///
/// In every collective, `counts[r]` is the number of elements of rank r's part. Parts may be empty
/// and unequal. All ranks must pass the same `counts`. Sums and broadcasts accept `f32` elements
/// only.
pub trait Comm: Send + Sync {
    /// Returns the rank of this communicator.
    fn rank(&self) -> usize;
    /// Returns the number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Stores the `send` buffers of all ranks one after another in `recv`, in rank order.
    ///
    /// `send` must have `counts[rank]` elements, and `recv` must have `Σ counts` elements. The
    /// elements may have any type, but must have the same type on all ranks.
    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()>;

    /// Passes to `sink` on each rank r the part r of every vector in every rank's `partials`, so
    /// that `sink` can sum the parts. The order is (source rank, index of the vector).
    ///
    /// Rank r passes `partial_counts[r]` vectors, each `Σ counts` long. All ranks must pass the
    /// same `partial_counts`. The collective sums nothing; the caller reduces the pieces in the
    /// order in which they arrive.
    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()>;

    /// Sums the `send` buffers of all ranks elementwise, and stores this rank's part of the sum
    /// (`counts[rank]` elements) in `recv`. The additions follow a fixed binary tree over ranks,
    /// unless [`Comm::has_native_reduce_scatter`].
    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()>;

    /// Returns true if the transport itself sums data in transit (as NCCL does), so that
    /// [`Comm::reduce_scatter`] transfers less data than [`Comm::reduce_scatter_ordered`]. The
    /// order of its additions then depends on the number of ranks and on the transport.
    fn has_native_reduce_scatter(&self) -> bool {
        false
    }

    /// Replaces `x` on every rank by the elementwise sum of the `x` of all ranks. The additions
    /// follow a fixed binary tree over ranks, so every rank gets the same bits.
    fn all_reduce(&self, x: ViewMut) -> Result<()>;

    /// Replaces `x` on every rank by the `x` of rank `root`.
    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()>;

    /// Sends `send_counts[r]` elements of `send` to each rank r, and stores `recv_counts[r]`
    /// elements from rank r in `recv`. In both buffers the parts are stored one after another, in
    /// rank order.
    ///
    /// The elements may have any type, but must have the same type on all ranks.
    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()>;

    /// Sends `send_counts[r]` bytes of `send` to each rank r, and stores `recv_counts[r]` bytes
    /// from rank r in `recv`. In both buffers the parts are stored one after another, in rank
    /// order.
    fn all_to_all_bytes(
        &self,
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()>;

    /// Sends `send_counts[r]` numbers of `send` to each rank r, and returns the received numbers.
    /// The received numbers are `recv_counts[r]` from each rank r, in rank order.
    fn all_to_all_u64(&self, recv_counts: &[usize], send: &[u64], send_counts: &[usize]) -> Result<Vec<u64>> {
        let to_bytes = |counts: &[usize]| counts.iter().map(|n| n * size_of::<u64>()).collect::<Vec<usize>>();
        let mut received = vec![0u64; recv_counts.iter().sum()];
        self.all_to_all_bytes(
            bytemuck::cast_slice_mut(&mut received),
            &to_bytes(recv_counts),
            bytemuck::cast_slice(send),
            &to_bytes(send_counts),
        )?;
        Ok(received)
    }

    /// Gathers a byte string from every rank and returns the byte strings of all ranks, indexed by
    /// rank.
    ///
    /// The collective is meant for small payloads such as reports and errors. Fails if a rank
    /// passes more than [`crate::MAX_GATHER_BYTES`].
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Gathers a list of numbers from every rank, and returns the lists of all ranks, indexed by
    /// rank. The lists may differ in length. Has the limit of [`Comm::all_gather_bytes`].
    fn all_gather_u64(&self, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
        let gathered = self.all_gather_bytes(bytemuck::cast_slice(numbers))?;
        let incomplete = |rank: usize, bytes: usize| CallMismatch::IncompleteNumber { rank, bytes };
        let to_numbers = |(rank, bytes): (usize, Vec<u8>)| match bytes.as_chunks::<8>() {
            (numbers, []) => Ok(numbers.iter().map(|number| u64::from_ne_bytes(*number)).collect()),
            _ => Err(CommError::Mismatch(incomplete(rank, bytes.len()))),
        };
        gathered.into_iter().enumerate().map(to_numbers).collect()
    }

    /// Allocates zeroed memory that every rank of the group can access directly (a shared window),
    /// if the ranks can share memory. It holds `counts[r]` elements of each rank r, in rank order.
    ///
    /// Each rank writes its own elements and reads those of all ranks. The ranks must call a
    /// collective, such as [`Comm::barrier`], between a write and the reads of other ranks, and
    /// between these reads and the next write. Returns `None`, without waiting for any rank, if the
    /// ranks cannot share memory.
    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let _ = (dtype, counts);
        Ok(None)
    }

    /// Returns for each rank a number that identifies its host. Ranks have the same number if they
    /// exchange data inside a host, without a network.
    fn list_rank_hosts(&self) -> Vec<usize> {
        vec![0; self.world_size()]
    }

    /// Returns the longest and shortest time, over the connections to other hosts, for which data
    /// from this rank stayed unacknowledged since the previous call. Returns `None` if no data was
    /// sent, or if the transport does not measure the time. Blocks while a collective of this rank
    /// runs.
    fn take_link_delays(&self) -> Option<LinkDelays> {
        None
    }

    /// Blocks until every rank of the group has called `barrier`.
    fn barrier(&self) -> Result<()>;

    /// Aborts the group, so that its collectives fail on every rank, and passes the text `reason`
    /// to every reachable rank. Every waiting and later call on every reachable rank returns
    /// [`crate::CommError::Aborted`]. Callable from any thread.
    fn abort(&self, reason: &str);

    /// Returns why the group was aborted, or `None` if this rank knows of no abort. Does not block;
    /// callable from any thread.
    fn abort_reason(&self) -> Option<AbortReason>;
}

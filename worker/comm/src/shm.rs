//! [`ShmComm`]: collectives among processes of one host, through a shared memory segment.
//!
//! A collective is a series of *rounds*. In a round every rank fills its slot of the staging
//! memory, enters the round, waits until all have entered it, and reads what it needs from the
//! peers' slots. Each rank has two slots that alternate, so one wait per round is enough (`wait.rs`
//! explains why). Rounds of streaming collectives move `MAX_CHUNK_BYTES`, which stay in the
//! processors' caches between the writer and the reader.
//!
//! Memory: a rank touches 2 × min(`MAX_CHUNK_BYTES`, staging) of the segment in streaming
//! collectives and up to 2 × staging in [`reduce_scatter_ordered`](Comm::reduce_scatter_ordered).
//! If the partial vectors do not fit into the staging memory, the latter also keeps a private
//! buffer of 8 × staging or two of the largest pieces, whichever is more (`ordered_reduce.rs`). The
//! kernel allocates a page of the segment when it is first accessed. If the machine has no memory
//! left at that time, the rank gets SIGBUS.
use crate::{
    AbortReason, CallMismatch, Comm, PartialSink, Result, SharedWindow,
    call::{self, BufferShape, CollectiveCall, compute_consecutive_ranges},
};
use device::{Dtype, View, ViewMut};
use segment::{HeaderMapping, WindowMapping};
use std::{
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

mod communicator;
mod host_exchange;
mod limits;
mod ordered_reduce;
mod segment;
mod streaming_copy;
#[cfg(test)]
mod tests;
mod tree_reduce;
mod wait;

pub(crate) use communicator::JobRankMap;
pub use communicator::ShmComm;
pub(crate) use host_exchange::OutgoingMessage;
pub use limits::ShmLimits;
pub use ordered_reduce::count_piece_buffer_elements;
pub(crate) use ordered_reduce::partition_into_windows;

/// Aborts the group of processes that share the memory file `fd`, so that their collectives fail
/// with the text `reason`. The calling process need not be one of the group's ranks, and ranks may
/// still be joining.
pub fn abort_group(fd: BorrowedFd<'_>, reason: &str) -> Result<()> {
    HeaderMapping::open(fd)?.header().abort(&AbortReason::from_request(reason));
    Ok(())
}

impl ShmComm {
    /// Runs an all-to-all: sends `send_counts[r]` elements of `send` to each rank r, and receives
    /// `recv_counts[r]` elements from rank r in `recv`. `recv_shape` and `send_shape` describe the
    /// two buffers.
    fn exchange_parts(
        &self,
        [recv_shape, send_shape]: [BufferShape; 2],
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()> {
        let call = CollectiveCall::summarize_all_to_all(
            self.position,
            recv_shape,
            recv_counts,
            send_shape,
            send_counts,
        );
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let size = send_shape.element_bytes;
        let to_ranges = |counts: &[usize]| {
            compute_consecutive_ranges(&counts.iter().map(|n| n * size).collect::<Vec<_>>())
        };
        let (recv_ranges, send_ranges) = (to_ranges(recv_counts), to_ranges(send_counts));
        let (parts, me) = ([send], self.position.rank);
        recv[recv_ranges[me].clone()].copy_from_slice(&send[send_ranges[me].clone()]);
        let message = |range: Range<usize>| OutgoingMessage { parts: &parts, range };
        let messages: Vec<OutgoingMessage> = send_ranges.into_iter().map(message).collect();
        self.exchange_messages(&mut call_state, &call, &messages, recv, &recv_ranges)
    }
}

impl Comm for ShmComm {
    fn rank(&self) -> usize {
        self.position.rank
    }

    fn world_size(&self) -> usize {
        self.position.world
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let shapes = (BufferShape::new(recv.as_view()), BufferShape::new(send));
        let call = CollectiveCall::summarize_all_gather(self.position, shapes.0, shapes.1, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host_bytes_mut(), send.host_bytes());
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let lens: Vec<usize> = counts.iter().map(|n| n * shapes.1.element_bytes).collect();
        let starts = call::compute_part_offsets(&lens);
        let bypass_cache = recv.len() >= streaming_copy::MIN_STREAMING_BYTES;
        self.gather_in_chunks(&mut call_state, &call, send, &lens, |from, offset, chunk| {
            let start = starts[from] + offset.min(lens[from]);
            streaming_copy::copy_bytes_streaming(&mut recv[start..start + chunk.len()], chunk, bypass_cache);
        })
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let call =
            CollectiveCall::summarize_reduce_scatter_ordered(self.position, lens, partial_counts, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            partials.iter().enumerate().for_each(|(i, p)| sink(0, i, *p));
            return Ok(());
        }
        let partials: Vec<&[f32]> = partials.iter().map(|p| p.host_slice()).collect();
        self.reduce_scatter_ordered_rounds(&mut call_state, &call, &partials, counts, sink)
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let call = CollectiveCall::summarize_reduce_scatter(self.position, recv.len(), send.len(), counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host_slice_mut(), send.host_slice());
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        self.reduce_scatter_in_chunks(&mut call_state, &call, recv, send, counts)
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::summarize_all_reduce(x.len())))?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x = x.host_slice_mut();
        self.all_reduce_in_rounds(&mut call_state, &call, x)
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let call = CollectiveCall::summarize_broadcast(self.position, x.len(), root);
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x: &mut [u8] = bytemuck::cast_slice_mut(x.host_slice_mut());
        let mut ranges = vec![Vec::new(); self.position.world];
        ranges[root].push(0..x.len());
        self.replicate_ranges(&mut call_state, &call, x, &ranges)
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let shapes = [BufferShape::new(recv.as_view()), BufferShape::new(send)];
        self.exchange_parts(shapes, recv.host_bytes_mut(), recv_counts, send.host_bytes(), send_counts)
    }

    fn all_to_all_bytes(
        &self,
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()> {
        let shapes = [BufferShape::from_byte_count(recv), BufferShape::from_byte_count(send)];
        self.exchange_parts(shapes, recv, recv_counts, send, send_counts)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut call_state, call) =
            self.begin_call(CollectiveCall::summarize_all_gather_bytes(bytes.len()))?;
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
        self.gather_in_chunks(&mut call_state, &call, bytes, &lens, take)?;
        Ok(gathered)
    }

    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let call = CollectiveCall::summarize_shared_window(self.position, counts, dtype.size());
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
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::summarize_barrier()))?;
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

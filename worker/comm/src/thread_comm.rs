//! [`ThreadComm`]: collectives between threads of one process, which read each other's buffers
//! directly.
//!
//! In a collective, the threads exchange the addresses of their buffers once or twice
//! (`exchange.rs`).
use crate::{
    AbortReason, Comm, PartialSink, Result, SharedWindow,
    call::{self, BufferShape, CollectiveCall, GroupPosition},
    tree_sum::tree_sum,
};
use communicator::ThreadCallState;
use device::{Dtype, View, ViewMut};
use group::{Contribution, ThreadGroup};
use published_slice::PublishedSlice;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use thread_window::ThreadWindow;

mod communicator;
mod exchange;
mod group;
mod published_slice;
mod thread_window;

pub use communicator::ThreadComm;

/// How long a rank waits for its peers in one collective, in a group of threads that was created
/// without an explicit timeout.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The largest timeout that a collective between threads can have. Longer timeouts are reduced to
/// it, so that deadlines do not overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The largest number of elements of an all-reduce in which every rank reads the vectors of all
/// ranks and computes the whole sum itself. A larger all-reduce takes two exchanges, and each rank
/// sums only its share.
const MAX_SINGLE_EXCHANGE_LEN: usize = 1024;

/// Creates a group of `world` ranks in this process and returns their communicators, indexed by
/// rank. Each communicator is meant for one thread.
///
/// # Panics
///
/// Panics if `world` is 0 or above [`crate::MAX_WORLD_SIZE`].
pub fn create_thread_group(world: usize) -> Vec<ThreadComm> {
    create_thread_group_with_timeout(world, DEFAULT_TIMEOUT)
}

/// Creates a group of `world` ranks in this process, whose collectives fail on every rank if a peer
/// does not enter them within `timeout`.
pub fn create_thread_group_with_timeout(world: usize, timeout: Duration) -> Vec<ThreadComm> {
    assert!(
        (1..=crate::MAX_WORLD_SIZE).contains(&world),
        "a group has 1 to {} ranks, not {world}",
        crate::MAX_WORLD_SIZE
    );
    let group = Arc::new(ThreadGroup::new(world, timeout.min(MAX_TIMEOUT)));
    let member = |rank| ThreadComm {
        position: GroupPosition { rank, world },
        group: group.clone(),
        call_state: Mutex::new(ThreadCallState { calls: 0, exchanges: 0 }),
    };
    (0..world).map(member).collect()
}

impl ThreadComm {
    /// Replaces `x` by its sum over all ranks in two steps: each rank sums one part of the vectors,
    /// and then all ranks read the sums.
    fn all_reduce_large(
        &self,
        call_state: &mut ThreadCallState,
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
        let starts = call::compute_part_offsets(send_counts);
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
}

impl Comm for ThreadComm {
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
        let start = call::compute_part_offsets(counts)[self.position.rank];
        let part = start..start + counts[self.position.rank];
        let slices = partials.iter().map(|p| PublishedSlice::from_f32(p.host_slice())).collect();
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
        let call = CollectiveCall::summarize_reduce_scatter(self.position, recv.len(), send.len(), counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host_slice_mut(), send.host_slice());
        if self.position.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let start = call::compute_part_offsets(counts)[self.position.rank];
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
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::summarize_all_reduce(x.len())))?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x = x.host_slice_mut();
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
        let call = CollectiveCall::summarize_broadcast(self.position, x.len(), root);
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.world == 1 {
            return Ok(());
        }
        let x = x.host_slice_mut();
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
        let call = CollectiveCall::summarize_shared_window(self.position, counts, dtype.size());
        let (mut call_state, call) = self.begin_call(call)?;
        if self.position.rank == 0 {
            let window = ThreadWindow::new(dtype, counts.iter().sum());
            self.group.lock_state().window = Some(Arc::new(window));
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
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::summarize_barrier()))?;
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

impl Drop for ThreadComm {
    fn drop(&mut self) {
        self.group.leave(self.position.rank);
    }
}

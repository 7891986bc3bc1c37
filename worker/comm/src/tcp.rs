//! [`TcpComm`]: collectives between ranks on several hosts, with TCP between the hosts and shared
//! memory within each host.
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
    AbortReason, CallMismatch, Comm, CommError, LinkDelays, PartialSink, Result,
    call::{self, BufferShape, CollectiveCall, compute_consecutive_ranges},
    shm::{OutgoingMessage, partition_into_windows},
};
use communicator::{AbortOnPanic, TcpCallState};
use device::{View, ViewMut};
use std::ops::Range;

mod communicator;
mod connection_setup;
mod control_frame;
mod handshake;
mod link_delay_meter;
mod network_step;
mod peer_monitor;
mod rank_listener;
mod topology;
mod untrusted;

pub use communicator::{TcpComm, TcpLimits};
pub(crate) use untrusted::{create_fuzz_seeds, parse_control_frames, parse_handshake};

pub use rank_listener::{AbortHandle, GroupMember, GroupSpec, KEY_BYTES, RankListener};

/// The largest size, in bytes, of an all-reduce in which each rank sends its whole vector to all
/// ranks, and every rank computes the whole sum. A larger all-reduce takes two steps per block, and
/// each rank sums only its share.
const MAX_SINGLE_STEP_BYTES: usize = 16 << 10;
/// The largest number of vectors that one rank may pass to an ordered reduce-scatter (in which the
/// receivers sum the vectors).
const MAX_PARTIALS: u64 = 1 << 16;

impl TcpComm {
    /// Runs an all-to-all over the network and shared memory: sends `send_counts[r]` elements of
    /// `send` to each rank r and receives `recv_counts[r]` elements from rank r in `recv`. `shapes`
    /// are the shapes of `recv` and `send`.
    fn exchange_parts(
        &self,
        [recv_shape, send_shape]: [BufferShape; 2],
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()> {
        let call = CollectiveCall::summarize_all_to_all(
            self.group_position(),
            recv_shape,
            recv_counts,
            send_shape,
            send_counts,
        );
        let (mut call_state, call) = self.begin_call(call)?;
        let size = send_shape.element_bytes;
        let to_ranges = |counts: &[usize]| {
            compute_consecutive_ranges(&counts.iter().map(|n| n * size).collect::<Vec<_>>())
        };
        let (recv_ranges, send_ranges) = (to_ranges(recv_counts), to_ranges(send_counts));
        let parts = [send];
        let me = self.rank();
        recv[recv_ranges[me].clone()].copy_from_slice(&parts[0][send_ranges[me].clone()]);
        let message = |r: &Range<usize>| OutgoingMessage { parts: &parts, range: r.clone() };
        let messages: Vec<OutgoingMessage> = send_ranges.iter().map(message).collect();
        self.exchange_messages(&mut call_state.connections, &call, &messages, recv, &recv_ranges)
    }
}

impl Comm for TcpComm {
    fn rank(&self) -> usize {
        self.topology.rank
    }

    fn world_size(&self) -> usize {
        self.topology.world_size()
    }

    fn list_rank_hosts(&self) -> Vec<usize> {
        self.topology.host_by_rank.clone()
    }

    fn take_link_delays(&self) -> Option<LinkDelays> {
        let mut state = self.call_state.lock().ok()?;
        let TcpCallState { connections, link_clock, .. } = &mut *state;
        let streams =
            connections.iter().enumerate().filter_map(|(rank, c)| Some((rank, &c.as_ref()?.stream)));
        link_clock.take_delays(streams)
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let shapes = (BufferShape::new(recv.as_view()), BufferShape::new(send));
        let call = CollectiveCall::summarize_all_gather(self.group_position(), shapes.0, shapes.1, counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let lens: Vec<usize> = counts.iter().map(|n| n * shapes.1.element_bytes).collect();
        let parts = compute_consecutive_ranges(&lens);
        let recv = recv.host_bytes_mut();
        recv[parts[self.rank()].clone()].copy_from_slice(send.host_bytes());
        self.replicate_parts(&mut call_state.connections, &call, recv, &parts)
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let call = CollectiveCall::summarize_reduce_scatter_ordered(
            self.group_position(),
            lens,
            partial_counts,
            counts,
        );
        let (mut call_state, call) = self.begin_call(call)?;
        let _guard = AbortOnPanic(self);
        let partials: Vec<&[u8]> = partials.iter().map(|p| bytemuck::cast_slice(p.host_slice())).collect();
        // peers are not trusted to pass what they agreed to pass
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
            self.exchange_and_deliver_window(&mut call_state, &call, &partials, &window, counts, sink)?;
        }
        Ok(())
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let call =
            CollectiveCall::summarize_reduce_scatter(self.group_position(), recv.len(), send.len(), counts);
        let (mut call_state, call) = self.begin_call(call)?;
        let (recv, send) = (recv.host_slice_mut(), send.host_slice());
        let starts = call::compute_part_offsets(counts);
        let longest = counts.iter().copied().max().unwrap_or(0);
        let chunk_len = (self.compute_scratch_elements(0) / self.world_size()).max(1);
        let mut offset = 0;
        loop {
            let chunk = |r: usize| counts[r].min(offset)..counts[r].min(offset + chunk_len);
            let ranges: Vec<Range<usize>> = (0..self.world_size())
                .map(|r| starts[r] + chunk(r).start..starts[r] + chunk(r).end)
                .collect();
            let out = &mut recv[chunk(self.rank())];
            self.reduce_scatter_ranges(&mut call_state, &call, send, &ranges, out)?;
            offset += chunk_len;
            if offset >= longest {
                return Ok(());
            }
        }
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::summarize_all_reduce(x.len())))?;
        let x = x.host_slice_mut();
        match size_of_val(x) <= MAX_SINGLE_STEP_BYTES {
            true => self.all_reduce_small(&mut call_state, &call, x),
            false => self.all_reduce_large(&mut call_state, &call, x),
        }
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let call = CollectiveCall::summarize_broadcast(self.group_position(), x.len(), root);
        let (mut call_state, call) = self.begin_call(call)?;
        let x: &mut [u8] = bytemuck::cast_slice_mut(x.host_slice_mut());
        let part = |r: usize| if r == root { 0..x.len() } else { 0..0 };
        let parts: Vec<Range<usize>> = (0..self.world_size()).map(part).collect();
        self.replicate_parts(&mut call_state.connections, &call, x, &parts)
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
        let lens = self.all_gather_u64(&mut call_state.connections, &call, bytes.len() as u64)?;
        let limit = crate::MAX_GATHER_BYTES as u64;
        if let Some(rank) = lens.iter().position(|&n| n > limit) {
            let mismatch = CallMismatch::TooManyBytes { rank, bytes: lens[rank], limit };
            return Err(self.abort_on_error(CommError::Mismatch(mismatch)));
        }
        let parts = compute_consecutive_ranges(&lens.iter().map(|&n| n as usize).collect::<Vec<_>>());
        let mut gathered = vec![0; parts.last().map_or(0, |p| p.end)];
        gathered[parts[self.rank()].clone()].copy_from_slice(bytes);
        self.replicate_parts(&mut call_state.connections, &call, &mut gathered, &parts)?;
        Ok(parts.into_iter().map(|part| gathered[part].to_vec()).collect())
    }

    fn barrier(&self) -> Result<()> {
        let (mut call_state, call) = self.begin_call(Ok(CollectiveCall::summarize_barrier()))?;
        self.replicate_parts(&mut call_state.connections, &call, &mut [], &vec![0..0; self.world_size()])
    }

    fn abort(&self, reason: &str) {
        self.health.abort(&AbortReason::from_request(reason));
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.health.abort_reason().or_else(|| self.shm.as_ref()?.abort_reason())
    }
}

//! The all-reduce and the reduce-scatter between processes of one host ([`ShmComm`]). Each rank
//! reads the values of its peers in shared memory and sums them in the fixed order of a binary tree
//! over ranks.
use super::communicator::{MAX_CHUNK_BYTES, ShmCallState, ShmComm, compute_chunk_range};
use crate::{
    Result,
    call::{self, CollectiveCall},
    tree_sum::tree_sum,
};

/// The largest size, in bytes, of an all-reduce in which every rank reads the data of all ranks and
/// computes the whole sum itself. A larger all-reduce takes several rounds, and each rank sums only
/// its share.
const MAX_SINGLE_ROUND_BYTES: usize = 16 << 10;

impl ShmComm {
    /// Replaces `x` by its sum over all ranks through shared memory, with one data exchange for a
    /// small `x` and several exchanges for a large `x`.
    pub(super) fn all_reduce_in_rounds(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        if size_of_val(x) <= MAX_SINGLE_ROUND_BYTES.min(self.segment.layout.staging_bytes) {
            return self.all_reduce_small(call_state, call, x);
        }
        self.all_reduce_large(call_state, call, x)
    }

    /// Replaces the small vector `x` by its sum over all ranks with one exchange through shared
    /// memory, after which every rank computes the whole sum.
    fn all_reduce_small(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (rank, world) = (self.position.rank, self.position.world);
        let slot = call_state.next_slot();
        // SAFETY: this rank's slot of the next round.
        unsafe { self.segment.slot_f32_mut(rank, slot, 0, x.len()) }.copy_from_slice(x);
        self.enter_round(call_state, call);
        self.wait_for_round(call_state, call)?;
        // SAFETY: read within the round.
        let addend = |r| unsafe { self.segment.slot_f32(r, slot, 0, x.len()) };
        let addends: Vec<&[f32]> = (0..world).map(addend).collect();
        tree_sum(x, &addends);
        Ok(())
    }

    /// Replaces the vector `x` by its sum over all ranks through shared memory, one block of `x` at
    /// a time. Each rank sums a share of each block. Each rank computes a share of each block's
    /// sum. Takes one round per block and one more round.
    ///
    /// In each round a rank publishes the peers' shares of a block in the first half of its slot.
    /// In the second half it publishes the sum of this rank's share of the previous block.
    fn all_reduce_large(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (rank, world) = (self.position.rank, self.position.world);
        let block_len = MAX_CHUNK_BYTES.min(self.segment.layout.staging_bytes / 2) / size_of::<f32>();
        let mut previous: &mut [f32] = &mut [];
        for block in x.chunks_mut(block_len).chain([&mut [][..]]) {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let share = call::compute_even_share(block.len(), peer, world);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.segment.slot_f32_mut(rank, slot, share.start, share.len()) };
                to.copy_from_slice(&block[share]);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let share = call::compute_even_share(previous.len(), peer, world);
                let start = block_len + share.start;
                // SAFETY: read within the round.
                let sum = unsafe { self.segment.slot_f32(peer, slot, start, share.len()) };
                previous[share].copy_from_slice(sum);
            }
            let share = call::compute_even_share(block.len(), rank, world);
            let start = block_len + share.start;
            // SAFETY: this rank's slot of the next round. All ranks have entered this round, so no
            // rank reads that slot any more.
            let sum = unsafe { self.segment.slot_f32_mut(rank, 1 - slot, start, share.len()) };
            let addend = |r: usize| match r == rank {
                true => &block[share.clone()],
                // SAFETY: read within the round.
                false => unsafe { self.segment.slot_f32(r, slot, share.start, share.len()) },
            };
            tree_sum(sum, &(0..world).map(addend).collect::<Vec<_>>());
            block[share].copy_from_slice(sum);
            previous = block;
        }
        Ok(())
    }

    /// Sums the `send` buffers of all ranks elementwise through shared memory, in chunks, and
    /// stores this rank's part of the sum in `recv`. Each round publishes the next chunk of each
    /// peer's part and sums the chunks of this rank's part, until the longest part is done.
    pub(super) fn reduce_scatter_in_chunks(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        recv: &mut [f32],
        send: &[f32],
        counts: &[usize],
    ) -> Result<()> {
        let (rank, world) = (self.position.rank, self.position.world);
        let (starts, chunk_len) = (call::compute_part_offsets(counts), self.count_peer_chunk_elements());
        let longest = counts.iter().copied().max().unwrap_or(0);
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let range = compute_chunk_range(counts[peer], offset, chunk_len);
                let start = self.compute_peer_chunk_offset(rank, peer, chunk_len);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_f32_mut(rank, slot, start, range.len()) }
                    .copy_from_slice(&send[starts[peer]..][range]);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            let range = compute_chunk_range(recv.len(), offset, chunk_len);
            let addend = |r: usize| match r == rank {
                true => &send[starts[rank]..][range.clone()],
                false => {
                    let start = self.compute_peer_chunk_offset(r, rank, chunk_len);
                    // SAFETY: read within the round.
                    unsafe { self.segment.slot_f32(r, slot, start, range.len()) }
                }
            };
            tree_sum(&mut recv[range.clone()], &(0..world).map(addend).collect::<Vec<_>>());
            offset += chunk_len;
            if offset >= longest {
                return Ok(());
            }
        }
    }
}

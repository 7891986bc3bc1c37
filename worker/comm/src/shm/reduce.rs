//! All-reduce and reduce-scatter: sums by the fixed tree over ranks, read from the peers' slots.
use super::{CallState, MAX_CHUNK_BYTES, ShmComm, chunk_range};
use crate::{
    Result,
    call::{self, CollectiveCall},
    sum::tree_sum,
};

/// Up to this size, every rank computes the whole sum of an all-reduce: one round instead of two.
const MAX_SINGLE_ROUND_BYTES: usize = 16 << 10;

impl ShmComm {
    /// Replaces `x` by its sum over ranks, with the algorithm for its size.
    pub(super) fn all_reduce_rounds(
        &self,
        call_state: &mut CallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        if size_of_val(x) <= MAX_SINGLE_ROUND_BYTES.min(self.segment.layout.staging_bytes) {
            return self.all_reduce_small(call_state, call, x);
        }
        self.all_reduce_large(call_state, call, x)
    }

    /// Computes the whole sum on every rank, in one round.
    fn all_reduce_small(
        &self,
        call_state: &mut CallState,
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

    /// Sums block by block, in one round per block and one more.
    ///
    /// In a round a rank publishes the peers' shares of a block (first half of the slot), and its
    /// sum of its share of the previous block (second half).
    fn all_reduce_large(
        &self,
        call_state: &mut CallState,
        call: &CollectiveCall,
        x: &mut [f32],
    ) -> Result<()> {
        let (rank, world) = (self.position.rank, self.position.world);
        let block_len = MAX_CHUNK_BYTES.min(self.segment.layout.staging_bytes / 2) / size_of::<f32>();
        let mut previous: &mut [f32] = &mut [];
        for block in x.chunks_mut(block_len).chain([&mut [][..]]) {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let share = call::even_share(block.len(), peer, world);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.segment.slot_f32_mut(rank, slot, share.start, share.len()) };
                to.copy_from_slice(&block[share]);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let share = call::even_share(previous.len(), peer, world);
                let start = block_len + share.start;
                // SAFETY: read within the round.
                let sum = unsafe { self.segment.slot_f32(peer, slot, start, share.len()) };
                previous[share].copy_from_slice(sum);
            }
            let share = call::even_share(block.len(), rank, world);
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

    /// Publishes the next chunk of each peer's part, and sums the chunks of this rank's part, until
    /// the longest part is done.
    pub(super) fn reduce_scatter_chunks(
        &self,
        call_state: &mut CallState,
        call: &CollectiveCall,
        recv: &mut [f32],
        send: &[f32],
        counts: &[usize],
    ) -> Result<()> {
        let (rank, world) = (self.position.rank, self.position.world);
        let (starts, chunk_len) = (call::offsets(counts), self.peer_chunk_elements());
        let longest = counts.iter().copied().max().unwrap_or(0);
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let range = chunk_range(counts[peer], offset, chunk_len);
                let start = self.peer_chunk_offset(rank, peer, chunk_len);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_f32_mut(rank, slot, start, range.len()) }
                    .copy_from_slice(&send[starts[peer]..][range]);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            let range = chunk_range(recv.len(), offset, chunk_len);
            let addend = |r: usize| match r == rank {
                true => &send[starts[rank]..][range.clone()],
                false => {
                    let start = self.peer_chunk_offset(r, rank, chunk_len);
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

//! The all-gather, the broadcast and the all-to-all of [`ShmComm`], which move data chunk by chunk
//! through the staging slots, one round per chunk.
use super::communicator::{ShmCallState, ShmComm, compute_chunk_range};
use super::wait::store_words;
use crate::{
    Result,
    call::{self, CollectiveCall, GroupPosition},
};
use std::sync::atomic::Ordering;

impl ShmComm {
    /// Gathers `send` from all ranks in chunks, one round per chunk. Calls `take(rank, offset,
    /// chunk)` for every chunk of every rank, including this one. `offset` is the position of the
    /// chunk within the bytes of `rank`.
    ///
    /// Rank r sends `lens[r]` bytes. All ranks must pass the same `lens`.
    pub(super) fn gather_chunks(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        send: &[u8],
        lens: &[usize],
        mut take: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let (rank, chunk_bytes) = (self.position.rank, self.count_chunk_elements() * size_of::<f32>());
        let longest = lens.iter().copied().max().unwrap_or(0);
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            let range = compute_chunk_range(send.len(), offset, chunk_bytes);
            // SAFETY: this rank's slot of the next round.
            unsafe { self.segment.slot_mut(rank, slot, 0, range.len()) }
                .copy_from_slice(&send[range.clone()]);
            self.enter_round(call_state, call);
            take(rank, offset, &send[range]);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let len = compute_chunk_range(lens[peer], offset, chunk_bytes).len();
                // SAFETY: read within the round.
                take(peer, offset, unsafe { self.segment.slot(peer, slot, 0, len) });
            }
            offset += chunk_bytes;
            if offset >= longest {
                return Ok(());
            }
        }
    }

    /// Copies `x` of the rank `root` to `x` of all ranks in chunks, one round per chunk.
    pub(super) fn broadcast_in_chunks(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        x: &mut [f32],
        root: usize,
    ) -> Result<()> {
        let is_root = self.position.rank == root;
        let (len, chunk) = (x.len(), self.count_chunk_elements());
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            let range = compute_chunk_range(len, offset, chunk);
            if is_root {
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_f32_mut(root, slot, 0, range.len()) }
                    .copy_from_slice(&x[range.clone()]);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            if !is_root {
                // SAFETY: read within the round.
                let chunk = unsafe { self.segment.slot_f32(root, slot, 0, range.len()) };
                x[range].copy_from_slice(chunk);
            }
            offset += chunk;
            if offset >= len {
                return Ok(());
            }
        }
    }

    /// Sends to each rank its part of `send`, and receives this rank's part of every peer's data in
    /// `recv`. Takes a round to compare lengths and one round per chunk.
    ///
    /// `recv_counts` and `send_counts` are numbers of elements of `element_bytes` bytes, by rank.
    /// The parts are stored in rank order.
    pub(super) fn all_to_all_in_chunks(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        (recv, recv_counts): (&mut [u8], &[usize]),
        (send, send_counts): (&[u8], &[usize]),
        element_bytes: usize,
    ) -> Result<()> {
        let rank = self.position.rank;
        let longest = self.exchange_transfer_lengths(call_state, call, recv_counts, send_counts)?;
        let longest = longest.saturating_mul(element_bytes);
        let to_bytes = |counts: &[usize]| counts.iter().map(|n| n * element_bytes).collect::<Vec<_>>();
        let (send_lens, recv_lens) = (to_bytes(send_counts), to_bytes(recv_counts));
        let (send_starts, recv_starts) =
            (call::compute_offsets(&send_lens), call::compute_offsets(&recv_lens));
        let chunk_bytes = self.count_peer_chunk_elements() * size_of::<f32>();
        recv[recv_starts[rank]..][..recv_lens[rank]]
            .copy_from_slice(&send[send_starts[rank]..][..send_lens[rank]]);
        let mut offset = 0;
        while offset < longest {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let range = compute_chunk_range(send_lens[peer], offset, chunk_bytes);
                let start = self.compute_peer_chunk_offset(rank, peer, chunk_bytes);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_mut(rank, slot, start, range.len()) }
                    .copy_from_slice(&send[send_starts[peer]..][range]);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let range = compute_chunk_range(recv_lens[peer], offset, chunk_bytes);
                let start = self.compute_peer_chunk_offset(peer, rank, chunk_bytes);
                // SAFETY: read within the round.
                let chunk = unsafe { self.segment.slot(peer, slot, start, range.len()) };
                recv[recv_starts[peer]..][range].copy_from_slice(chunk);
            }
            offset = offset.saturating_add(chunk_bytes);
        }
        Ok(())
    }

    /// Runs the round of an all-to-all in which ranks compare lengths: publishes how many elements
    /// this rank sends to each peer and expects from each peer. Returns the length of the longest
    /// message between any two ranks. Fails, and aborts the group, if a rank sends another length
    /// than its peer expects.
    fn exchange_transfer_lengths(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        recv_counts: &[usize],
        send_counts: &[usize],
    ) -> Result<usize> {
        let GroupPosition { rank, world } = self.position;
        let slot = call_state.next_slot();
        let words = send_counts.iter().chain(recv_counts).map(|&n| n as u64);
        store_words(self.segment.number_table(rank, slot), words);
        self.enter_round(call_state, call);
        self.wait_for_round(call_state, call)?;
        let mut longest = 0;
        for peer in 0..world {
            let table = self.segment.number_table(peer, slot);
            let table: Vec<u64> = table.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            call::check_transfer_lengths(peer, rank, table[rank], recv_counts[peer] as u64)
                .and_then(|()| {
                    call::check_transfer_lengths(rank, peer, send_counts[peer] as u64, table[world + rank])
                })
                .map_err(|mismatch| self.abort_on_mismatch(mismatch))?;
            let sent = (0..world).filter(|&to| to != peer).map(|to| table[to]).max();
            longest = longest.max(sent.unwrap_or(0));
        }
        // An invalid number of a peer causes more rounds, but allocates no memory.
        Ok(usize::try_from(longest).unwrap_or(usize::MAX))
    }
}

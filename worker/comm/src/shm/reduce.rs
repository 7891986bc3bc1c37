//! all_reduce and reduce_scatter: sums by the fixed tree over ranks, read straight from the peers' slots.
use super::{CHUNK, ShmComm, Turn, piece};
use crate::{
    Result,
    call::{self, Call},
    sum::tree_sum,
};

/// Up to this many bytes every rank sums all of an all_reduce for itself: one round instead of two.
const SMALL: usize = 16 << 10;

impl ShmComm {
    pub(super) fn all_reduce_any(&self, turn: &mut Turn, call: &Call, x: &mut [f32]) -> Result<()> {
        if size_of_val(x) <= SMALL.min(self.seg.layout.staging) {
            return self.all_reduce_small(turn, call, x);
        }
        self.all_reduce_large(turn, call, x)
    }

    /// Sums all of `x` here: a single round.
    fn all_reduce_small(&self, turn: &mut Turn, call: &Call, x: &mut [f32]) -> Result<()> {
        let slot = turn.next_slot();
        // SAFETY: this rank's slot of the next round.
        unsafe { self.seg.slot_f32_mut(self.at.rank, slot, 0, x.len()) }.copy_from_slice(x);
        self.post(turn, call);
        self.meet(turn, call)?;
        // SAFETY: read within the round.
        let parts: Vec<&[f32]> =
            (0..self.at.world).map(|r| unsafe { self.seg.slot_f32(r, slot, 0, x.len()) }).collect();
        tree_sum(x, &parts);
        Ok(())
    }

    /// Block by block, one round each and one more. A round shows what the peers need to sum their shares of a block (first
    /// half of the slot) and this rank's sum of its share of the block before (second half).
    fn all_reduce_large(&self, turn: &mut Turn, call: &Call, x: &mut [f32]) -> Result<()> {
        let (rank, world) = (self.at.rank, self.at.world);
        let block = CHUNK.min(self.seg.layout.staging / 2) / size_of::<f32>();
        let mut before: &mut [f32] = &mut [];
        for now in x.chunks_mut(block).chain([&mut [][..]]) {
            let slot = turn.next_slot();
            for peer in self.peers() {
                let part = call::share(now.len(), peer, world);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.seg.slot_f32_mut(rank, slot, part.start, part.len()) };
                to.copy_from_slice(&now[part]);
            }
            self.post(turn, call);
            self.meet(turn, call)?;
            for peer in self.peers() {
                let part = call::share(before.len(), peer, world);
                // SAFETY: read within the round.
                let sum = unsafe { self.seg.slot_f32(peer, slot, block + part.start, part.len()) };
                before[part].copy_from_slice(sum);
            }
            let mine = call::share(now.len(), rank, world);
            // SAFETY: this rank's slot of the next round: all have entered this one, so nobody reads it any more.
            let sum = unsafe { self.seg.slot_f32_mut(rank, 1 - slot, block + mine.start, mine.len()) };
            let part = |r: usize| match r == rank {
                true => &now[mine.clone()],
                // SAFETY: read within the round.
                false => unsafe { self.seg.slot_f32(r, slot, mine.start, mine.len()) },
            };
            tree_sum(sum, &(0..world).map(part).collect::<Vec<_>>());
            now[mine].copy_from_slice(sum);
            before = now;
        }
        Ok(())
    }

    /// Every rank shows each peer the next chunk of its part, and sums what it is shown.
    pub(super) fn reduce_scatter_chunks(
        &self,
        turn: &mut Turn,
        call: &Call,
        recv: &mut [f32],
        send: &[f32],
        counts: &[usize],
    ) -> Result<()> {
        let (rank, world) = (self.at.rank, self.at.world);
        let (starts, each) = (call::starts(counts), self.chunk_each());
        let longest = counts.iter().copied().max().unwrap_or(0);
        let mut at = 0;
        loop {
            let slot = turn.next_slot();
            for peer in self.peers() {
                let part = piece(counts[peer], at, each);
                let start = self.dest_at(rank, peer, each);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.seg.slot_f32_mut(rank, slot, start, part.len()) }
                    .copy_from_slice(&send[starts[peer]..][part]);
            }
            self.post(turn, call);
            self.meet(turn, call)?;
            let mine = piece(recv.len(), at, each);
            let part = |r: usize| match r == rank {
                true => &send[starts[rank]..][mine.clone()],
                // SAFETY: read within the round.
                false => unsafe { self.seg.slot_f32(r, slot, self.dest_at(r, rank, each), mine.len()) },
            };
            tree_sum(&mut recv[mine.clone()], &(0..world).map(part).collect::<Vec<_>>());
            at += each;
            if at >= longest {
                return Ok(());
            }
        }
    }
}

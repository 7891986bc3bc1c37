//! Exchanges data among the ranks of one host through shared memory. Data moves through the staging
//! slots chunk by chunk, one round per chunk. Such an exchange is also a step of collectives that
//! span several hosts. Lengths and offsets are in bytes.
//!
//! Ranks in this module are ranks within the segment, which are local ranks of the job. Every
//! function of [`ShmComm`] that exchanges data runs at least one round, so it is also a barrier of
//! the host.
use super::communicator::{CACHE_LINE_ELEMENTS, ShmCallState, ShmComm, compute_chunk_range};
use super::wait::store_words;
use crate::{Result, call::CollectiveCall};
use std::{
    ops::Range,
    sync::{MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};

/// A message from one rank to another, which consists of the byte range `range` of each buffer in
/// `parts`, one after another.
#[derive(Clone, Debug)]
pub(crate) struct OutgoingMessage<'a> {
    pub(crate) parts: &'a [&'a [u8]],
    pub(crate) range: Range<usize>,
}

impl OutgoingMessage<'_> {
    /// Returns the size of the message in bytes.
    pub(crate) fn len(&self) -> usize {
        self.parts.len() * self.range.len()
    }

    /// Returns the longest contiguous part of the message that begins at byte `offset`. Panics if
    /// `offset` is not inside the message.
    pub(crate) fn contiguous_bytes_from(&self, offset: usize) -> &[u8] {
        let (part, skip) = (offset / self.range.len(), offset % self.range.len());
        &self.parts[part][self.range.start + skip..self.range.end]
    }

    /// Fills the buffer `to` with bytes of the message, starting at byte `offset` of the message.
    fn copy_to(&self, mut to: &mut [u8], mut offset: usize) {
        while !to.is_empty() {
            let from = self.contiguous_bytes_from(offset);
            let n = from.len().min(to.len());
            let (head, tail) = to.split_at_mut(n);
            head.copy_from_slice(&from[..n]);
            to = tail;
            offset += n;
        }
    }
}

impl ShmComm {
    /// Locks the mutable state of this rank's communicator (counters and reusable memory) for the
    /// duration of one collective.
    pub(crate) fn lock_call_state(&self) -> MutexGuard<'_, ShmCallState> {
        // A panic inside a collective aborts the group, so no inconsistent state is used.
        self.call_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gathers the bytes `send` of all ranks of the host through shared memory in chunks, and calls
    /// `take` with each chunk that arrives. Calls `take(rank, offset, chunk)` for every chunk of
    /// every rank, including this one; `offset` is the chunk's position in that rank's bytes.
    ///
    /// Rank r sends `lens[r]` bytes. All ranks must pass the same `lens`.
    pub(super) fn gather_in_chunks(
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
            unsafe { self.segment.slot_bytes_mut(rank, slot, 0, range.len()) }
                .copy_from_slice(&send[range.clone()]);
            self.enter_round(call_state, call);
            take(rank, offset, &send[range]);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let len = compute_chunk_range(lens[peer], offset, chunk_bytes).len();
                // SAFETY: read within the round.
                take(peer, offset, unsafe { self.segment.slot_bytes(peer, slot, 0, len) });
            }
            offset += chunk_bytes;
            if offset >= longest {
                return Ok(());
            }
        }
    }

    /// Copies the byte ranges `ranges[r]` of `buf` from each rank r of the host to all other ranks
    /// of the host.
    ///
    /// All ranks pass the same `ranges`.
    pub(crate) fn replicate_ranges(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        buf: &mut [u8],
        ranges: &[Vec<Range<usize>>],
    ) -> Result<()> {
        let chunk_bytes = self.count_chunk_elements() * size_of::<f32>();
        let total = |rank: usize| ranges[rank].iter().map(Range::len).sum::<usize>();
        let longest = (0..self.position.world).map(total).max().unwrap_or(0);
        let mut offset = 0;
        loop {
            let slot = call_state.next_slot();
            let len = compute_chunk_range(total(self.position.rank), offset, chunk_bytes).len();
            // SAFETY: this rank's slot of the next round.
            let to = unsafe { self.segment.slot_bytes_mut(self.position.rank, slot, 0, len) };
            visit_chunk_ranges(&ranges[self.position.rank], offset, len, |position, range| {
                to[position..position + range.len()].copy_from_slice(&buf[range]);
            });
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let len = compute_chunk_range(total(peer), offset, chunk_bytes).len();
                // SAFETY: read within the round.
                let from = unsafe { self.segment.slot_bytes(peer, slot, 0, len) };
                visit_chunk_ranges(&ranges[peer], offset, len, |position, range| {
                    let n = range.len();
                    buf[range].copy_from_slice(&from[position..position + n]);
                });
            }
            offset += chunk_bytes;
            if offset >= longest {
                return Ok(());
            }
        }
    }

    /// Sends `messages[r]` to each rank r of the host, and receives the message of rank r in
    /// `buf[recv_ranges[r]]`.
    ///
    /// The entries for this rank itself are ignored.
    pub(crate) fn exchange_messages(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        messages: &[OutgoingMessage],
        buf: &mut [u8],
        recv_ranges: &[Range<usize>],
    ) -> Result<()> {
        let me = self.position.rank;
        let longest = self.exchange_message_lengths(call_state, call, messages, recv_ranges)?;
        let chunk_bytes = self.count_peer_chunk_elements() * size_of::<f32>();
        debug_assert!(chunk_bytes >= CACHE_LINE_ELEMENTS);
        let mut offset = 0;
        while offset < longest {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let range = compute_chunk_range(messages[peer].len(), offset, chunk_bytes);
                let start = self.compute_peer_chunk_offset(me, peer, chunk_bytes);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.segment.slot_bytes_mut(me, slot, start, range.len()) };
                messages[peer].copy_to(to, range.start);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let range = compute_chunk_range(recv_ranges[peer].len(), offset, chunk_bytes);
                let start = self.compute_peer_chunk_offset(peer, me, chunk_bytes);
                // SAFETY: read within the round.
                let from = unsafe { self.segment.slot_bytes(peer, slot, start, range.len()) };
                buf[recv_ranges[peer].start + range.start..][..range.len()].copy_from_slice(from);
            }
            offset = offset.saturating_add(chunk_bytes);
        }
        Ok(())
    }

    /// Exchanges the sizes of the messages that ranks are about to send each other, and fails if a
    /// receiver expects another size. Fails, and aborts the group, if two sizes differ. Returns the
    /// size in bytes of the longest message between any two ranks.
    fn exchange_message_lengths(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        messages: &[OutgoingMessage],
        recv_ranges: &[Range<usize>],
    ) -> Result<usize> {
        let (me, world) = (self.position.rank, self.position.world);
        let slot = call_state.next_slot();
        let (sent, expected) =
            (messages.iter().map(OutgoingMessage::len), recv_ranges.iter().map(Range::len));
        store_words(self.segment.number_table(me, slot), sent.chain(expected).map(|n| n as u64));
        self.enter_round(call_state, call);
        self.wait_for_round(call_state, call)?;
        let mut longest = 0;
        for peer in self.peers() {
            let table = self.segment.number_table(peer, slot);
            let word = |i: usize| table[i].load(Relaxed);
            let (my_rank, peer_rank) = (self.to_job_rank(me), self.to_job_rank(peer));
            let (sent, expected) = (messages[peer].len() as u64, recv_ranges[peer].len() as u64);
            call.check_transfer_bytes(peer_rank, my_rank, word(me), expected)
                .and_then(|()| call.check_transfer_bytes(my_rank, peer_rank, sent, word(world + me)))
                .map_err(|mismatch| self.abort_on_mismatch(mismatch))?;
            let most = (0..world).filter(|&to| to != peer).map(word).max();
            longest = longest.max(most.unwrap_or(0));
        }
        let ours = self.peers().map(|p| messages[p].len() as u64).max().unwrap_or(0);
        // An invalid number of a peer causes more rounds, but allocates no memory.
        Ok(usize::try_from(longest.max(ours)).unwrap_or(usize::MAX))
    }
}

/// Calls `visit` for each memory range that contains a part of one chunk of a byte stream, with the
/// offset of the part in the chunk. The stream consists of `ranges`, one after another, and the
/// chunk is its `len` bytes starting at `offset`.
fn visit_chunk_ranges(
    ranges: &[Range<usize>],
    offset: usize,
    len: usize,
    mut visit: impl FnMut(usize, Range<usize>),
) {
    let (mut skip, mut visited) = (offset, 0);
    for range in ranges {
        if visited == len {
            return;
        }
        if skip >= range.len() {
            skip -= range.len();
            continue;
        }
        let n = (range.len() - skip).min(len - visited);
        visit(visited, range.start + skip..range.start + skip + n);
        visited += n;
        skip = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_of_the_ranges_is_visited_once() {
        let ranges = [3..5, 7..7, 10..14, 20..21];
        let stream: Vec<usize> = ranges.iter().cloned().flatten().collect();
        for offset in 0..=stream.len() {
            for len in 0..=stream.len() - offset {
                let mut visited = Vec::new();
                visit_chunk_ranges(&ranges, offset, len, |position, range| {
                    assert_eq!(position, visited.len());
                    visited.extend(range);
                });
                assert_eq!(visited, stream[offset..offset + len]);
            }
        }
    }

    #[test]
    fn a_message_is_one_range_of_each_part() {
        let (a, b) = ([0u8, 1, 2, 3], [10u8, 11, 12, 13]);
        let message = OutgoingMessage { parts: &[&a, &b], range: 1..3 };
        let mut to = [0; 3];
        message.copy_to(&mut to, 1);
        assert_eq!((message.len(), to), (4, [2, 11, 12]));
    }
}

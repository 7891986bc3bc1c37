//! One host's part of a collective over several hosts: what the ranks of a segment exchange among themselves, as bytes.
//!
//! Places are places in the segment. Every function here is at least one round, so it is also a barrier of the host.
use super::{LINE, ShmComm, Turn, piece, publish};
use crate::{
    Result,
    call::{self, Call},
};
use std::{
    ops::Range,
    sync::{MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};

/// What one rank sends to another: the same range of each of some parts, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing<'a> {
    pub(crate) parts: &'a [&'a [u8]],
    pub(crate) range: Range<usize>,
}

impl Outgoing<'_> {
    pub(crate) fn len(&self) -> usize {
        self.parts.len() * self.range.len()
    }

    /// The longest contiguous bytes from `at` on; `at` is inside.
    pub(crate) fn contiguous(&self, at: usize) -> &[u8] {
        let (part, offset) = (at / self.range.len(), at % self.range.len());
        &self.parts[part][self.range.start + offset..self.range.end]
    }

    fn copy_to(&self, mut to: &mut [u8], mut at: usize) {
        while !to.is_empty() {
            let from = self.contiguous(at);
            let n = from.len().min(to.len());
            let (head, tail) = to.split_at_mut(n);
            head.copy_from_slice(&from[..n]);
            to = tail;
            at += n;
        }
    }
}

impl ShmComm {
    /// The right to use the segment for one collective.
    pub(crate) fn part(&self) -> MutexGuard<'_, Turn> {
        // A panic inside a collective aborts the group, so nothing is read that is not whole.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the segment's group was aborted, if it was.
    pub(crate) fn aborted(&self) -> Option<String> {
        self.seg.header().aborted()
    }

    /// Everybody's `buf` gets every place's `ranges` of it: place p holds `ranges[p]` already. Ranges are the same on all.
    pub(crate) fn share(
        &self,
        turn: &mut Turn,
        call: &Call,
        buf: &mut [u8],
        ranges: &[Vec<Range<usize>>],
    ) -> Result<()> {
        let chunk = self.chunk() * size_of::<f32>();
        let total = |place: usize| ranges[place].iter().map(Range::len).sum::<usize>();
        let longest = (0..self.at.world).map(total).max().unwrap_or(0);
        let mut at = 0;
        loop {
            let slot = turn.next_slot();
            let len = piece(total(self.at.rank), at, chunk).len();
            // SAFETY: this rank's slot of the next round.
            let to = unsafe { self.seg.slot_mut(self.at.rank, slot, 0, len) };
            walk(&ranges[self.at.rank], at, len, |done, part| {
                to[done..done + part.len()].copy_from_slice(&buf[part]);
            });
            self.post(turn, call);
            self.meet(turn, call)?;
            for peer in self.peers() {
                let len = piece(total(peer), at, chunk).len();
                // SAFETY: read within the round.
                let from = unsafe { self.seg.slot(peer, slot, 0, len) };
                walk(&ranges[peer], at, len, |done, part| {
                    let n = part.len();
                    buf[part].copy_from_slice(&from[done..done + n]);
                });
            }
            at += chunk;
            if at >= longest {
                return Ok(());
            }
        }
    }

    /// `out[p]` goes to place p, and what place p sends arrives in `buf[room[p]]`; one's own is the caller's business.
    pub(crate) fn trade(
        &self,
        turn: &mut Turn,
        call: &Call,
        out: &[Outgoing],
        buf: &mut [u8],
        room: &[Range<usize>],
    ) -> Result<()> {
        let me = self.at.rank;
        let longest = self.agree_lengths(turn, call, out, room)?;
        let each = self.chunk_each() * size_of::<f32>();
        debug_assert!(each >= LINE);
        let mut at = 0;
        while at < longest {
            let slot = turn.next_slot();
            for peer in self.peers() {
                let part = piece(out[peer].len(), at, each);
                let start = self.dest_at(me, peer, each);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.seg.slot_mut(me, slot, start, part.len()) };
                out[peer].copy_to(to, part.start);
            }
            self.post(turn, call);
            self.meet(turn, call)?;
            for peer in self.peers() {
                let part = piece(room[peer].len(), at, each);
                let start = self.dest_at(peer, me, each);
                // SAFETY: read within the round.
                let from = unsafe { self.seg.slot(peer, slot, start, part.len()) };
                buf[room[peer].start + part.start..][..part.len()].copy_from_slice(from);
            }
            at = at.saturating_add(each);
        }
        Ok(())
    }

    /// One round that checks that everybody expects what it is sent; the longest message between any two, bytes.
    fn agree_lengths(
        &self,
        turn: &mut Turn,
        call: &Call,
        out: &[Outgoing],
        room: &[Range<usize>],
    ) -> Result<usize> {
        let (me, world) = (self.at.rank, self.at.world);
        let slot = turn.next_slot();
        let (sent, expected) = (out.iter().map(Outgoing::len), room.iter().map(Range::len));
        publish(self.seg.table(me, slot), sent.chain(expected).map(|n| n as u64));
        self.post(turn, call);
        self.meet(turn, call)?;
        let mut longest = 0;
        let name = |place: usize| self.names.ranks[place];
        for peer in self.peers() {
            let table = self.seg.table(peer, slot);
            let word = |i: usize| table[i].load(Relaxed);
            fits(name(peer), name(me), word(me), room[peer].len() as u64)
                .and_then(|()| fits(name(me), name(peer), out[peer].len() as u64, word(world + me)))
                .map_err(|what| self.disagree(what))?;
            let most = (0..world).filter(|&to| to != peer).map(word).max();
            longest = longest.max(most.unwrap_or(0));
        }
        let ours = self.peers().map(|p| out[p].len() as u64).max().unwrap_or(0);
        // A peer that publishes nonsense makes rounds, not memory.
        Ok(usize::try_from(longest.max(ours)).unwrap_or(usize::MAX))
    }
}

/// Fails unless the bytes that `from` sends to `to` are what `to` expects; says so in elements.
pub(crate) fn fits(from: usize, to: usize, sent: u64, expected: u64) -> std::result::Result<(), String> {
    let element = size_of::<f32>() as u64;
    call::pair(from, to, sent / element, expected / element).and(match sent == expected {
        true => Ok(()),
        false => Err(format!("rank {from} sends {sent} bytes to rank {to}, which expects {expected}")),
    })
}

/// Calls `visit(position in the piece, range)` for `len` bytes from `at` of the stream that `ranges` form.
fn walk(ranges: &[Range<usize>], at: usize, len: usize, mut visit: impl FnMut(usize, Range<usize>)) {
    let (mut skip, mut done) = (at, 0);
    for range in ranges {
        if done == len {
            return;
        }
        if skip >= range.len() {
            skip -= range.len();
            continue;
        }
        let n = (range.len() - skip).min(len - done);
        visit(done, range.start + skip..range.start + skip + n);
        done += n;
        skip = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_visits_each_byte_of_the_stream_once() {
        let ranges = [3..5, 7..7, 10..14, 20..21];
        let stream: Vec<usize> = ranges.iter().cloned().flatten().collect();
        for at in 0..=stream.len() {
            for len in 0..=stream.len() - at {
                let mut seen = Vec::new();
                walk(&ranges, at, len, |done, part| {
                    assert_eq!(done, seen.len());
                    seen.extend(part);
                });
                assert_eq!(seen, stream[at..at + len]);
            }
        }
    }

    #[test]
    fn what_goes_out_is_one_range_of_each_part() {
        let (a, b) = ([0u8, 1, 2, 3], [10u8, 11, 12, 13]);
        let out = Outgoing { parts: &[&a, &b], range: 1..3 };
        let mut to = [0; 3];
        out.copy_to(&mut to, 1);
        assert_eq!((out.len(), to), (4, [2, 11, 12]));
    }
}

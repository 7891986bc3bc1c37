//! reduce_scatter_fold: whole pieces of the peers' partials, in the order (rank, index).
//!
//! *Direct*: when all that every rank has for its peers fits into its staging slot, one round shows it all and the sink
//! reads it there: no copy on the reader's side. Slots hold, for each partial, the pieces of the peers in rank order, each
//! beginning at a cache line.
//!
//! *Windows*: otherwise the partials of all ranks, in sink order, are cut into windows. Within a window all ranks send at
//! the same time, chunk by chunk, and each receiver puts its pieces together in a private buffer before the sink sees them.
//! A window is as long as any rank's buffer then stays within 8 × staging or twice the largest piece, whichever is
//! more; a larger window means more ranks that send at the same time.
use super::{LINE, ShmComm, Turn, piece, stream};
use crate::{Comm, Result, Sink, call::Call};
use device::Buf;
use std::ops::Range;

/// A window's pieces may take this many times `staging` in a rank's private buffer.
const WINDOW: usize = 8;

/// The most partials of one rank.
const MAX_PARTIALS: u64 = 1 << 16;

/// The partials of one window: of each rank a range of its indices.
pub(crate) type Window = Vec<Range<usize>>;

/// Aborts the group when the sink panics, so that peers don't wait for this rank.
struct OnPanic<'a>(&'a ShmComm);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .abort(&format!("rank {} panicked inside a collective", self.0.names.ranks[self.0.at.rank]));
        }
    }
}

impl ShmComm {
    /// The collective for two ranks and more; lengths are checked.
    pub(super) fn fold(
        &self,
        turn: &mut Turn,
        call: &Call,
        partials: &[&[f32]],
        counts: &[usize],
        sink: &mut Sink,
    ) -> Result<()> {
        let _guard = OnPanic(self);
        let slot = turn.next_slot();
        // Staged before it is known whether the peers' fit too: that saves a round whenever they do.
        let staging = self.seg.layout.staging;
        if fits(self.at.rank, partials.len(), counts, staging) {
            self.stage(slot, partials, counts);
        }
        let numbers = self.gather_number(turn, call, partials.len() as u64)?;
        if let Some(rank) = numbers.iter().position(|&n| n > MAX_PARTIALS) {
            return Err(self.disagree(format!(
                "rank {rank} gives {} partials to reduce_scatter_fold; at most {MAX_PARTIALS} are allowed",
                numbers[rank]
            )));
        }
        let numbers: Vec<usize> = numbers.into_iter().map(|n| n as usize).collect();
        if all_fit(&numbers, counts, staging) {
            self.deliver_staged(slot, partials, &numbers, counts, sink);
            return Ok(());
        }
        for window in windows(&numbers, counts, window_elements(counts, staging)) {
            self.deliver_window(turn, call, partials, &window, counts, sink)?;
        }
        Ok(())
    }

    /// Where in `owner`'s slot the piece of `dest` of partial `i` begins.
    fn staged_at(&self, owner: usize, i: usize, dest: usize, counts: &[usize]) -> usize {
        let before: usize = (0..dest).filter(|&r| r != owner).map(|r| padded(counts[r])).sum();
        i * staged(owner, counts) + before
    }

    fn stage(&self, slot: usize, partials: &[&[f32]], counts: &[usize]) {
        let rank = self.at.rank;
        let starts = crate::call::starts(counts);
        for (i, partial) in partials.iter().enumerate() {
            for peer in self.peers() {
                let at = self.staged_at(rank, i, peer, counts);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.seg.slot_f32_mut(rank, slot, at, counts[peer]) }
                    .copy_from_slice(&partial[starts[peer]..][..counts[peer]]);
            }
        }
    }

    fn deliver_staged(
        &self,
        slot: usize,
        partials: &[&[f32]],
        numbers: &[usize],
        counts: &[usize],
        sink: &mut Sink,
    ) {
        let me = self.at.rank;
        let start = crate::call::starts(counts)[me];
        for (rank, &n) in numbers.iter().enumerate() {
            if rank == me {
                partials
                    .iter()
                    .enumerate()
                    .for_each(|(i, own)| sink(me, i, (&own[start..][..counts[me]]).into()));
                continue;
            }
            for i in 0..n {
                let at = self.staged_at(rank, i, me, counts);
                // SAFETY: read within the round: nothing is posted before the sink has seen all.
                sink(rank, i, unsafe { self.seg.slot_f32(rank, slot, at, counts[me]) }.into());
            }
        }
    }

    /// Moves one window's pieces into the private buffer, then shows them to the sink.
    fn deliver_window(
        &self,
        turn: &mut Turn,
        call: &Call,
        partials: &[&[f32]],
        window: &Window,
        counts: &[usize],
        sink: &mut Sink,
    ) -> Result<()> {
        let me = self.at.rank;
        let mine = counts[me];
        let mut room = vec![0; self.at.world];
        let mut need = 0;
        for peer in (0..self.at.world).filter(|&r| r != me) {
            room[peer] = need;
            need += window[peer].len() * mine;
        }
        let mut scratch = std::mem::replace(&mut turn.scratch, Buf::zeroed(0));
        if scratch.len() < need {
            drop(scratch);
            scratch = Buf::zeroed(need);
        }
        let moved = self.assemble(turn, call, partials, window, counts, &room, scratch.host_mut());
        if moved.is_ok() {
            let start = crate::call::starts(counts)[me];
            for (rank, indices) in window.iter().enumerate() {
                for (k, i) in indices.clone().enumerate() {
                    let piece = match rank == me {
                        true => &partials[i][start..][..mine],
                        false => &scratch.host()[room[rank] + k * mine..][..mine],
                    };
                    sink(rank, i, piece.into());
                }
            }
        }
        turn.scratch = scratch;
        moved
    }

    /// The rounds of a window. A rank's pieces for one peer form one stream, cut into chunks; rank r's stream to here is
    /// written from `room[r]`.
    fn assemble(
        &self,
        turn: &mut Turn,
        call: &Call,
        partials: &[&[f32]],
        window: &Window,
        counts: &[usize],
        room: &[usize],
        scratch: &mut [f32],
    ) -> Result<()> {
        let (me, each) = (self.at.rank, self.chunk_each());
        let starts = crate::call::starts(counts);
        let ours = &partials[window[me].clone()];
        let most = window.iter().map(Range::len).max().unwrap_or(0);
        let longest = most.saturating_mul(counts.iter().copied().max().unwrap_or(0));
        let large = size_of_val(scratch) >= stream::LARGE;
        let mut at = 0;
        while at < longest {
            let slot = turn.next_slot();
            for peer in self.peers() {
                let part = piece(ours.len() * counts[peer], at, each);
                let start = self.dest_at(me, peer, each);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.seg.slot_f32_mut(me, slot, start, part.len()) };
                copy_stream(to, ours, starts[peer], counts[peer], part.start);
            }
            self.post(turn, call);
            self.meet(turn, call)?;
            for peer in self.peers() {
                let part = piece(window[peer].len() * counts[me], at, each);
                let start = self.dest_at(peer, me, each);
                // SAFETY: read within the round.
                let chunk = unsafe { self.seg.slot_f32(peer, slot, start, part.len()) };
                let to = &mut scratch[room[peer]..][part];
                stream::copy(bytemuck::cast_slice_mut(to), bytemuck::cast_slice(chunk), large);
            }
            at = at.saturating_add(each);
        }
        Ok(())
    }
}

/// Elements that `rank` stages for one partial.
fn staged(rank: usize, counts: &[usize]) -> usize {
    let all: usize = counts.iter().map(|&n| padded(n)).sum();
    all - padded(counts[rank])
}

fn fits(rank: usize, partials: usize, counts: &[usize], staging: usize) -> bool {
    let slot = staging / size_of::<f32>();
    staged(rank, counts).checked_mul(partials).is_some_and(|n| n <= slot)
}

fn all_fit(numbers: &[usize], counts: &[usize], staging: usize) -> bool {
    numbers.iter().enumerate().all(|(rank, &n)| fits(rank, n, counts, staging))
}

/// How many elements a rank may assemble.
fn window_elements(counts: &[usize], staging: usize) -> usize {
    let largest = counts.iter().copied().max().unwrap_or(0);
    (WINDOW * staging / size_of::<f32>()).max(largest.saturating_mul(2))
}

/// Elements that `rank` assembles in private memory, where rank r gives `numbers[r]` partials of which rank s gets `counts[s]`
/// elements each: none where all fit into staging. For estimates of memory.
pub fn assembled(rank: usize, numbers: &[usize], counts: &[usize], staging: usize) -> usize {
    if all_fit(numbers, counts, staging) {
        return 0;
    }
    let of_peers = |w: Window| w.iter().enumerate().filter(|(r, _)| *r != rank).map(|(_, i)| i.len()).sum();
    let windows = windows(numbers, counts, window_elements(counts, staging)).into_iter();
    windows.map(of_peers).max().unwrap_or(0_usize) * counts[rank]
}

/// Fills `to` from element `at` of the stream that consists of `partials[..][start..start + count]`.
fn copy_stream(mut to: &mut [f32], partials: &[&[f32]], start: usize, count: usize, mut at: usize) {
    while !to.is_empty() {
        let (i, offset) = (at / count, at % count);
        let n = to.len().min(count - offset);
        let (head, tail) = to.split_at_mut(n);
        head.copy_from_slice(&partials[i][start + offset..][..n]);
        to = tail;
        at += n;
    }
}

/// Pieces in staging begin at a cache line.
fn padded(n: usize) -> usize {
    n.next_multiple_of(LINE)
}

/// Cuts the partials of all ranks, in the order (rank, index), into windows of which no rank assembles more than `most`
/// elements, or of one partial where even that is more.
pub(crate) fn windows(numbers: &[usize], counts: &[usize], most: usize) -> Vec<Window> {
    let world = numbers.len();
    let empty = || (0..world).map(|_| 0..0).collect::<Window>();
    let mut all = Vec::new();
    let mut window = empty();
    let mut items = 0;
    for (rank, &n) in numbers.iter().enumerate() {
        for i in 0..n {
            // what rank r assembles: everything but its own
            let fits = (0..world).all(|r| {
                let own = window[r].len() + usize::from(r == rank);
                (items + 1 - own).saturating_mul(counts[r]) <= most
            });
            if items > 0 && !fits {
                all.push(std::mem::replace(&mut window, empty()));
                items = 0;
            }
            window[rank] = if window[rank].is_empty() { i..i + 1 } else { window[rank].start..i + 1 };
            items += 1;
        }
    }
    if items > 0 {
        all.push(window);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank's index range and counts as (rank, index) in order.
    fn order(windows: &[Window]) -> Vec<(usize, usize)> {
        let one = |w: &Window| -> Vec<(usize, usize)> {
            w.iter().enumerate().flat_map(|(r, is)| is.clone().map(move |i| (r, i))).collect()
        };
        windows.iter().flat_map(one).collect()
    }

    proptest::proptest! {
        #[test]
        fn windows_keep_the_order_and_the_bound(
            ranks in proptest::collection::vec((0usize..6, 0usize..9), 1..7),
            most in 0usize..60,
        ) {
            let (numbers, counts): (Vec<usize>, Vec<usize>) = ranks.into_iter().unzip();
            let cut = windows(&numbers, &counts, most);
            let want: Vec<_> =
                numbers.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| (r, i))).collect();
            assert_eq!(order(&cut), want);
            for w in &cut {
                let items: usize = w.iter().map(Range::len).sum();
                assert!(items > 0);
                for r in 0..w.len() {
                    let assembled = (items - w[r].len()) * counts[r];
                    assert!(items == 1 || assembled <= most, "{assembled} > {most}");
                }
            }
        }
    }

    #[test]
    fn all_ranks_send_together_where_it_fits() {
        assert_eq!(windows(&[1, 1], &[8, 8], 8).len(), 1);
        assert_eq!(windows(&[1, 1], &[8, 8], 7).len(), 2);
    }

    #[test]
    fn what_fits_into_staging_is_not_assembled() {
        // Two ranks, a page of elements for each: one slot shows that, or rank 1 puts together what rank 0 gives it.
        assert_eq!(assembled(1, &[1, 1], &[1024, 1024], 4096), 0);
        assert_eq!(assembled(1, &[2, 1], &[1024, 1024], 4096), 2 * 1024);
        // More than a window holds: twice the largest piece.
        assert_eq!(assembled(0, &[1, 30], &[10240, 10240], 4096), 2 * 10240);
    }

    #[test]
    fn a_stream_crosses_the_borders_of_partials() {
        let (a, b) = ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]);
        let mut to = [0.0; 3];
        copy_stream(&mut to, &[&a, &b], 1, 2, 1);
        assert_eq!(to, [2.0, 11.0, 12.0]);
    }
}

//! [`ShmComm`]'s ordered reduce-scatter: each rank receives its piece of every rank's vectors,
//! ordered by source rank and vector index, and sums the pieces itself.
//!
//! *Staged*: if every rank's pieces for its peers fit into its staging slot, one round publishes
//! them, and the sink reads them in the slot without a copy. A slot contains, for each partial
//! vector, the pieces for the peers in rank order. Each piece begins at a cache line.
//!
//! *Windows*: otherwise the partial vectors of all ranks, in sink order, are divided into windows.
//! Within a window all ranks send at the same time, chunk by chunk, and each receiver assembles the
//! pieces in a private buffer before it passes them to the sink. A window is as long as possible
//! while the buffer of every rank stays within 8 × staging or twice the largest piece, whichever is
//! more. In a longer window more ranks send at the same time.
use super::communicator::{CACHE_LINE_ELEMENTS, ShmCallState, ShmComm, compute_chunk_range};
use super::streaming_copy;
use crate::{AbortReason, CallMismatch, PartialSink, Result, call::CollectiveCall};
use device::Buf;
use std::ops::Range;

/// Size limit of a rank's private buffer for data from peers, as a multiple of the rank's part of
/// the shared memory, unless large pieces need more.
const WINDOW_TO_STAGING_RATIO: usize = 8;

/// The largest number of vectors that one rank may pass to one ordered reduce-scatter (in which the
/// receivers sum the vectors).
const MAX_PARTIALS: u64 = 1 << 16;

/// For each rank, the index range of those of its vectors that are exchanged together in one round
/// of an ordered reduce-scatter.
pub(crate) type PartialRanges = Vec<Range<usize>>;

/// Guard that aborts the group if the callback that receives the pieces of a reduce-scatter panics,
/// so that peers do not wait for this rank.
struct AbortOnPanic<'a>(&'a ShmComm);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let rank = self.0.to_job_rank(self.0.position.rank);
            self.0.abort_with_reason(&AbortReason::RankPanicked { rank });
        }
    }
}

impl ShmComm {
    /// Delivers to each rank, through shared memory, the rank's piece of every vector of all ranks,
    /// and leaves the summing to the receiver. The caller must have checked the lengths of the
    /// vectors.
    pub(super) fn reduce_scatter_ordered_rounds(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        partials: &[&[f32]],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let _guard = AbortOnPanic(self);
        let slot = call_state.next_slot();
        // Stage before it is known whether the peers' partials fit, too. That saves a round if they
        // do.
        let staging = self.segment.layout.staging_bytes;
        if do_pieces_fit_staging(self.position.rank, partials.len(), counts, staging) {
            self.stage_partials(slot, partials, counts);
        }
        let partial_counts = self.gather_u64(call_state, call, partials.len() as u64)?;
        if let Some(rank) = partial_counts.iter().position(|&n| n > MAX_PARTIALS) {
            let (partials, rank) = (partial_counts[rank], self.to_job_rank(rank));
            let mismatch = CallMismatch::TooManyPartials { rank, partials, limit: MAX_PARTIALS };
            return Err(self.abort_on_mismatch(mismatch));
        }
        let partial_counts: Vec<usize> = partial_counts.into_iter().map(|n| n as usize).collect();
        if do_all_ranks_fit_staging(&partial_counts, counts, staging) {
            self.deliver_staged_pieces(slot, partials, &partial_counts, counts, sink);
            return Ok(());
        }
        for window in
            partition_into_windows(&partial_counts, counts, compute_max_window_elements(counts, staging))
        {
            self.exchange_and_deliver_window(call_state, call, partials, &window, counts, sink)?;
        }
        Ok(())
    }

    /// Returns the index, in `f32` elements of the shared memory of rank `owner`, at which the
    /// piece of vector `i` for rank `dest` begins.
    fn compute_staged_offset(&self, owner: usize, i: usize, dest: usize, counts: &[usize]) -> usize {
        let lower = (0..dest).filter(|&r| r != owner);
        let before: usize = lower.map(|r| round_up_to_cache_line(counts[r])).sum();
        i * count_staged_elements(owner, counts) + before
    }

    /// Copies the pieces that peers need from each of this rank's vectors to the staging slot
    /// `slot`, a part of shared memory that peers read.
    fn stage_partials(&self, slot: usize, partials: &[&[f32]], counts: &[usize]) {
        let rank = self.position.rank;
        let starts = crate::call::compute_part_offsets(counts);
        for (i, partial) in partials.iter().enumerate() {
            for peer in self.peers() {
                let offset = self.compute_staged_offset(rank, i, peer, counts);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.segment.slot_f32_mut(rank, slot, offset, counts[peer]) }
                    .copy_from_slice(&partial[starts[peer]..][..counts[peer]]);
            }
        }
    }

    /// Passes this rank's pieces of all ranks' vectors to the callback `sink`, ordered by source
    /// rank and vector index. Reads the peers' pieces directly in their staging slots.
    fn deliver_staged_pieces(
        &self,
        slot: usize,
        partials: &[&[f32]],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) {
        let me = self.position.rank;
        let start = crate::call::compute_part_offsets(counts)[me];
        for (rank, &n) in partial_counts.iter().enumerate() {
            if rank == me {
                for (i, partial) in partials.iter().enumerate() {
                    sink(me, i, (&partial[start..][..counts[me]]).into());
                }
                continue;
            }
            for i in 0..n {
                let offset = self.compute_staged_offset(rank, i, me, counts);
                // SAFETY: read within the round, because this rank enters the next one later.
                sink(rank, i, unsafe { self.segment.slot_f32(rank, slot, offset, counts[me]) }.into());
            }
        }
    }

    /// Exchanges the pieces of one group of vectors (`window`: a range of vector indices per rank)
    /// through shared memory, and passes this rank's piece of each vector to `sink`. A private
    /// buffer collects the peers' pieces.
    fn exchange_and_deliver_window(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        partials: &[&[f32]],
        window: &PartialRanges,
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let me = self.position.rank;
        let len = counts[me];
        let mut recv_starts = vec![0; self.position.world];
        let mut required = 0;
        for peer in (0..self.position.world).filter(|&r| r != me) {
            recv_starts[peer] = required;
            required += window[peer].len() * len;
        }
        let mut scratch = std::mem::replace(&mut call_state.scratch, Buf::zeroed(0));
        if scratch.len() < required {
            drop(scratch);
            scratch = Buf::zeroed(required);
        }
        let recv = scratch.host_slice_mut();
        let received =
            self.exchange_window_pieces(call_state, call, partials, window, counts, &recv_starts, recv);
        if received.is_ok() {
            let start = crate::call::compute_part_offsets(counts)[me];
            for (rank, indices) in window.iter().enumerate() {
                for (k, i) in indices.clone().enumerate() {
                    let piece = match rank == me {
                        true => &partials[i][start..][..len],
                        false => &scratch.host_slice()[recv_starts[rank] + k * len..][..len],
                    };
                    sink(rank, i, piece.into());
                }
            }
        }
        call_state.scratch = scratch;
        received
    }

    /// Sends each peer its piece of every vector in one group (`window`: a range of vector indices
    /// per rank) through shared memory, and stores received pieces in `recv`.
    ///
    /// The pieces of a rank for one peer form one stream, which is sent in chunks. The stream from
    /// rank r is stored in `recv` from `recv_starts[r]` on.
    fn exchange_window_pieces(
        &self,
        call_state: &mut ShmCallState,
        call: &CollectiveCall,
        partials: &[&[f32]],
        window: &PartialRanges,
        counts: &[usize],
        recv_starts: &[usize],
        recv: &mut [f32],
    ) -> Result<()> {
        let (me, chunk_len) = (self.position.rank, self.count_peer_chunk_elements());
        let starts = crate::call::compute_part_offsets(counts);
        let sent = &partials[window[me].clone()];
        let most_partials = window.iter().map(Range::len).max().unwrap_or(0);
        let longest = most_partials.saturating_mul(counts.iter().copied().max().unwrap_or(0));
        let bypass_cache = size_of_val(recv) >= streaming_copy::MIN_STREAMING_BYTES;
        let mut offset = 0;
        while offset < longest {
            let slot = call_state.next_slot();
            for peer in self.peers() {
                let range = compute_chunk_range(sent.len() * counts[peer], offset, chunk_len);
                let start = self.compute_peer_chunk_offset(me, peer, chunk_len);
                // SAFETY: this rank's slot of the next round.
                let to = unsafe { self.segment.slot_f32_mut(me, slot, start, range.len()) };
                copy_from_concatenated_pieces(to, sent, starts[peer], counts[peer], range.start);
            }
            self.enter_round(call_state, call);
            self.wait_for_round(call_state, call)?;
            for peer in self.peers() {
                let range = compute_chunk_range(window[peer].len() * counts[me], offset, chunk_len);
                let start = self.compute_peer_chunk_offset(peer, me, chunk_len);
                // SAFETY: read within the round.
                let chunk = unsafe { self.segment.slot_f32(peer, slot, start, range.len()) };
                let to = &mut recv[recv_starts[peer]..][range];
                let (to, chunk) = (bytemuck::cast_slice_mut(to), bytemuck::cast_slice(chunk));
                streaming_copy::copy_bytes_streaming(to, chunk, bypass_cache);
            }
            offset = offset.saturating_add(chunk_len);
        }
        Ok(())
    }
}

/// Returns how many `f32` elements of shared memory the rank `rank` fills with the pieces of one
/// vector for its peers. Each piece is padded to whole cache lines.
fn count_staged_elements(rank: usize, counts: &[usize]) -> usize {
    let total: usize = counts.iter().map(|&n| round_up_to_cache_line(n)).sum();
    total - round_up_to_cache_line(counts[rank])
}

/// Returns true if the `staging` bytes of shared memory of `rank` have space for the pieces of its
/// `partials` vectors for all peers.
fn do_pieces_fit_staging(rank: usize, partials: usize, counts: &[usize], staging: usize) -> bool {
    let slot = staging / size_of::<f32>();
    count_staged_elements(rank, counts).checked_mul(partials).is_some_and(|n| n <= slot)
}

/// Returns true if every rank r can store the pieces of its `partial_counts[r]` vectors for all
/// peers in its `staging` bytes of shared memory.
fn do_all_ranks_fit_staging(partial_counts: &[usize], counts: &[usize], staging: usize) -> bool {
    partial_counts.iter().enumerate().all(|(rank, &n)| do_pieces_fit_staging(rank, n, counts, staging))
}

/// Returns the maximum number of `f32` elements in a rank's private buffer for vector pieces from
/// peers, given `staging` bytes of shared memory per rank.
fn compute_max_window_elements(counts: &[usize], staging: usize) -> usize {
    let largest = counts.iter().copied().max().unwrap_or(0);
    (WINDOW_TO_STAGING_RATIO * staging / size_of::<f32>()).max(largest.saturating_mul(2))
}

/// Returns the size, in `f32` elements, of the private buffer in which `rank` collects the vector
/// pieces from its peers during an ordered reduce-scatter.
///
/// Rank r passes `partial_counts[r]` partial vectors, and rank s gets `counts[s]` elements of each
/// partial vector. The result is 0 if the pieces of every rank fit into `staging` bytes.
pub fn count_piece_buffer_elements(
    rank: usize,
    partial_counts: &[usize],
    counts: &[usize],
    staging: usize,
) -> usize {
    if do_all_ranks_fit_staging(partial_counts, counts, staging) {
        return 0;
    }
    let peer_partials =
        |w: PartialRanges| w.iter().enumerate().filter(|(r, _)| *r != rank).map(|(_, i)| i.len()).sum();
    let max_elements = compute_max_window_elements(counts, staging);
    let windows = partition_into_windows(partial_counts, counts, max_elements).into_iter();
    windows.map(peer_partials).max().unwrap_or(0_usize) * counts[rank]
}

/// Copies part of a stream of elements to `to`, from element `offset` of the stream on, where equal
/// ranges of several vectors form the stream. The stream consists of the elements `start..start +
/// count` of each of `partials`, one after another.
fn copy_from_concatenated_pieces(
    mut to: &mut [f32],
    partials: &[&[f32]],
    start: usize,
    count: usize,
    mut offset: usize,
) {
    while !to.is_empty() {
        let (i, skip) = (offset / count, offset % count);
        let n = to.len().min(count - skip);
        let (head, tail) = to.split_at_mut(n);
        head.copy_from_slice(&partials[i][start + skip..][..n]);
        to = tail;
        offset += n;
    }
}

/// Rounds `n`, a number of `f32` elements, up to whole cache lines.
fn round_up_to_cache_line(n: usize) -> usize {
    n.next_multiple_of(CACHE_LINE_ELEMENTS)
}

/// Divides the vectors of a reduce-scatter into groups that ranks exchange one after another, so
/// that no rank collects more than `max_elements` elements at a time. Each part makes no rank
/// collect more than `max_elements`. A vector that exceeds the limit is a part by itself.
pub(crate) fn partition_into_windows(
    partial_counts: &[usize],
    counts: &[usize],
    max_elements: usize,
) -> Vec<PartialRanges> {
    let world = partial_counts.len();
    let empty = || (0..world).map(|_| 0..0).collect::<PartialRanges>();
    let mut windows = Vec::new();
    let mut window = empty();
    let mut partials = 0;
    for (rank, &n) in partial_counts.iter().enumerate() {
        for i in 0..n {
            // rank r assembles every partial except its own
            let fits = (0..world).all(|r| {
                let from_r = window[r].len() + usize::from(r == rank);
                (partials + 1 - from_r).saturating_mul(counts[r]) <= max_elements
            });
            if partials > 0 && !fits {
                windows.push(std::mem::replace(&mut window, empty()));
                partials = 0;
            }
            window[rank] = if window[rank].is_empty() { i..i + 1 } else { window[rank].start..i + 1 };
            partials += 1;
        }
    }
    if partials > 0 {
        windows.push(window);
    }
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists the vectors of all `windows` as pairs (rank, index), in the order of the windows.
    fn list_partials(windows: &[PartialRanges]) -> Vec<(usize, usize)> {
        let of_window = |w: &PartialRanges| -> Vec<(usize, usize)> {
            w.iter().enumerate().flat_map(|(r, is)| is.clone().map(move |i| (r, i))).collect()
        };
        windows.iter().flat_map(of_window).collect()
    }

    proptest::proptest! {
        #[test]
        fn windows_keep_the_order_and_the_limit(
            ranks in proptest::collection::vec((0usize..6, 0usize..9), 1..7),
            max_elements in 0usize..60,
        ) {
            let (partial_counts, counts): (Vec<usize>, Vec<usize>) = ranks.into_iter().unzip();
            let windows = partition_into_windows(&partial_counts, &counts, max_elements);
            let expected: Vec<_> =
                partial_counts.iter().enumerate().flat_map(|(r, &n)| (0..n).map(move |i| (r, i))).collect();
            assert_eq!(list_partials(&windows), expected);
            for w in &windows {
                let partials: usize = w.iter().map(Range::len).sum();
                assert!(partials > 0);
                for r in 0..w.len() {
                    let assembled = (partials - w[r].len()) * counts[r];
                    assert!(partials == 1 || assembled <= max_elements, "{assembled} > {max_elements}");
                }
            }
        }
    }

    #[test]
    fn all_ranks_send_in_one_window_if_their_pieces_fit() {
        assert_eq!(partition_into_windows(&[1, 1], &[8, 8], 8).len(), 1);
        assert_eq!(partition_into_windows(&[1, 1], &[8, 8], 7).len(), 2);
    }

    #[test]
    fn partials_that_fit_into_staging_are_not_assembled() {
        // Two ranks with a page of elements each: one slot holds it, or rank 1 assembles two
        // pieces.
        assert_eq!(count_piece_buffer_elements(1, &[1, 1], &[1024, 1024], 4096), 0);
        assert_eq!(count_piece_buffer_elements(1, &[2, 1], &[1024, 1024], 4096), 2 * 1024);
        // More than a window holds: twice the largest piece.
        assert_eq!(count_piece_buffer_elements(0, &[1, 30], &[10240, 10240], 4096), 2 * 10240);
    }

    #[test]
    fn a_stream_crosses_the_borders_of_partials() {
        let (a, b) = ([0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]);
        let mut to = [0.0; 3];
        copy_from_concatenated_pieces(&mut to, &[&a, &b], 1, 2, 1);
        assert_eq!(to, [2.0, 11.0, 12.0]);
    }
}

//! [`HostGroups`]: reduces gradients in two levels. The ranks of a host first add their gradients,
//! and then send the sums to other hosts.
//!
//! Ranks with the same position on their hosts form a *column*. On each host, the rank of a column
//! sums the pieces that the column's ranks own. In the second level, the ranks of a column exchange
//! these sums. Each host thus sends one sum of its gradients, instead of the gradients of all its
//! ranks. The sums of a host are nodes of the tree in which [`MicroBatchSums`] adds gradients, so
//! the result has the same bits as a reduction in one level.
use super::micro_batch_sums::{MicroBatchRange, MicroBatchSums, merge_tree_ranges};
use super::owner_collectives::ExchangeBuffers;
use comm::{Comm, Result};
use device::{Ops, View};
use std::ops::Range;

/// The distribution of ranks over hosts: several hosts with an equal number of consecutive ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostGroups {
    hosts: usize,
    ranks_per_host: usize,
}

/// A gradient that ranks reduce: the micro-batches that each partial sum of each rank covers, and
/// the numbers of elements of which each rank owns the sum.
#[derive(Clone, Copy)]
pub struct ReducedPieces<'a> {
    /// For each rank, the micro-batches of its partial sums.
    pub ranges: &'a [Vec<MicroBatchRange>],
    /// For each rank, the length of its part of the gradient.
    pub counts: &'a [usize],
}

impl HostGroups {
    /// Returns the distribution of ranks over hosts, where `rank_hosts` has the host of each rank.
    /// Returns `None` if two levels are not possible or have no advantage: if there is one host, or
    /// if hosts do not have an equal number of at least two consecutive ranks.
    pub fn find(rank_hosts: &[usize]) -> Option<HostGroups> {
        let groups: Vec<&[usize]> = rank_hosts.chunk_by(|a, b| a == b).collect();
        let ranks_per_host = groups.first()?.len();
        let mut hosts: Vec<usize> = groups.iter().map(|group| group[0]).collect();
        hosts.sort_unstable();
        let is_contiguous = hosts.windows(2).all(|pair| pair[0] < pair[1]);
        let is_even = groups.iter().all(|group| group.len() == ranks_per_host);
        let is_useful = groups.len() > 1 && ranks_per_host > 1;
        (is_contiguous && is_even && is_useful).then_some(HostGroups { hosts: groups.len(), ranks_per_host })
    }

    /// Returns the ranks of the host number `host`.
    fn ranks_of_host(self, host: usize) -> Range<usize> {
        host * self.ranks_per_host..(host + 1) * self.ranks_per_host
    }

    /// Returns the ranks that have the position of `rank` on their hosts.
    fn column_of_rank(self, rank: usize) -> impl Iterator<Item = usize> + Clone {
        (rank % self.ranks_per_host..self.hosts * self.ranks_per_host).step_by(self.ranks_per_host)
    }

    /// Returns the micro-batches that each sum of the host number `host` covers.
    fn list_host_ranges(self, host: usize, ranges: &[Vec<MicroBatchRange>]) -> Vec<MicroBatchRange> {
        merge_tree_ranges(self.ranks_of_host(host).flat_map(|rank| ranges[rank].iter().copied()))
    }

    /// Reduces `partials`, this rank's partial sums of a gradient, to the ranks that own its parts.
    /// Passes the sums of each host for this rank's part to `sink`, in the order of the
    /// micro-batches.
    ///
    /// Collective: every rank must call it.
    pub(super) fn reduce(
        self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        buffers: &mut ExchangeBuffers,
        partials: &[View],
        pieces: ReducedPieces,
        sink: &mut dyn FnMut(MicroBatchRange, View),
    ) -> Result<()> {
        let me = comm.rank();
        let sums = self.sum_within_host(comm, ops, buffers, partials, pieces)?;
        let ReducedPieces { ranges, counts } = pieces;
        let column: Vec<usize> = self.column_of_rank(me).collect();
        let kept: Vec<View> = sums.partial_sums().map(|(_, sum)| sum).collect();
        let mut end = 0;
        let parts = column.iter().map(|owner| {
            end += counts[*owner];
            end - counts[*owner]..end
        });
        let sent = parts.flat_map(|part| kept.iter().map(move |sum| sum.slice(part.clone())));
        let of_column = |count: &dyn Fn(usize) -> usize| {
            let mut by_rank = vec![0; counts.len()];
            column.iter().for_each(|rank| by_rank[*rank] = count(*rank));
            by_rank
        };
        let host_ranges: Vec<_> = (0..self.hosts).map(|host| self.list_host_ranges(host, ranges)).collect();
        let sent_counts = of_column(&|rank| kept.len() * counts[rank]);
        let received_counts = of_column(&|rank| host_ranges[rank / self.ranks_per_host].len() * counts[me]);
        let received = buffers.exchange(comm, ops, sent, &sent_counts, &received_counts)?;
        let mut at = 0;
        for range in host_ranges.into_iter().flatten() {
            sink(range, received.slice(at..at + counts[me]));
            at += counts[me];
        }
        buffers.give_back_host_sums(sums);
        Ok(())
    }

    /// Adds the partial sums of the ranks of this host, for those elements whose owners are in the
    /// column of this rank. Collective: every rank must call it.
    fn sum_within_host(
        self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        buffers: &mut ExchangeBuffers,
        partials: &[View],
        ReducedPieces { ranges, counts }: ReducedPieces,
    ) -> Result<MicroBatchSums> {
        let me = comm.rank();
        let peers = self.ranks_of_host(me / self.ranks_per_host);
        let mut starts = vec![0];
        counts.iter().for_each(|count| starts.push(starts[starts.len() - 1] + count));
        let column_len = |rank| self.column_of_rank(rank).map(|owner| counts[owner]).sum::<usize>();
        let of_host = |count: &dyn Fn(usize) -> usize| -> Vec<usize> {
            (0..counts.len()).map(|rank| if peers.contains(&rank) { count(rank) } else { 0 }).collect()
        };
        let sent = peers.clone().flat_map(|peer| {
            partials
                .iter()
                .flat_map(move |partial| self.column_of_rank(peer).map(move |owner| (partial, owner)))
        });
        let sent = sent.map(|(partial, owner)| partial.slice(starts[owner]..starts[owner + 1]));
        let sent_counts = of_host(&|rank| partials.len() * column_len(rank));
        let len = column_len(me);
        let received_counts = of_host(&|rank| ranges[rank].len() * len);
        let mut sums = buffers.take_host_sums(len);
        let received = buffers.exchange(comm, ops, sent, &sent_counts, &received_counts)?;
        let of_peers = peers.flat_map(|rank| ranges[rank].iter());
        for (i, range) in of_peers.enumerate() {
            sums.push_copy(ops, *range, received.slice(i * len..(i + 1) * len));
        }
        Ok(sums)
    }
}

/// Computes how many elements the buffers of a reduction in two levels have for one gradient of
/// `len` elements, of which each rank has at most `partial_sums` sums: those that a rank sends and
/// receives, and the sums of its host.
pub fn count_buffer_elements(ranks_per_host: usize, partial_sums: usize, len: usize) -> usize {
    let column = len.div_ceil(ranks_per_host);
    let kept = 1 + ranks_per_host.ilog2() as usize;
    2 * partial_sums * len + kept * column
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zero::micro_batch_sums::split_into_tree_ranges;
    use comm::thread_comm::create_thread_group;
    use device::{Buf, Cpu, Dtype};
    use std::thread;

    #[test]
    fn two_levels_need_hosts_with_equal_numbers_of_consecutive_ranks() {
        let groups = |hosts, ranks_per_host| Some(HostGroups { hosts, ranks_per_host });
        assert_eq!(HostGroups::find(&[0, 0, 1, 1]), groups(2, 2));
        assert_eq!(HostGroups::find(&[7, 7, 7, 2, 2, 2]), groups(2, 3));
        for one_level in [&[][..], &[0, 0], &[0, 1], &[0, 1, 0, 1], &[0, 0, 1], &[0, 0, 1, 1, 0, 0]] {
            assert_eq!(HostGroups::find(one_level), None, "{one_level:?}");
        }
    }

    /// Returns the summand of micro-batch `s` for element `i`; the sum depends on the order.
    fn compute_summand(s: usize, i: usize) -> f32 {
        ((i * 7919 + s * 104_729) % 2003) as f32 / 1000.0 - 1.0
    }

    /// Reduces the gradients of ranks whose micro-batches are `micro_batches`, and returns the bits
    /// of the whole sum.
    fn reduce(groups: HostGroups, micro_batches: &[Range<usize>], counts: &[usize]) -> Vec<u32> {
        let ranges: Vec<_> = micro_batches.iter().map(|r| split_into_tree_ranges(r.clone())).collect();
        let len = counts.iter().sum();
        let run_rank = |comm: &dyn Comm| {
            let (ops, me) = (Cpu::new(1), comm.rank());
            let mut local_sums = MicroBatchSums::new(len);
            for s in micro_batches[me].clone() {
                let values: Vec<f32> = (0..len).map(|i| compute_summand(s, i)).collect();
                local_sums.push_copy(&ops, MicroBatchRange::from_micro_batch(s), values[..].into());
            }
            let partials: Vec<View> = local_sums.partial_sums().map(|(_, sum)| sum).collect();
            let (mut buffers, mut sums) = (ExchangeBuffers::default(), MicroBatchSums::new(counts[me]));
            let pieces = ReducedPieces { ranges: &ranges, counts };
            for _ in 0..2 {
                sums.clear(); // the buffers are used again
                let sink = &mut |range, piece: View| sums.push_copy(&ops, range, piece);
                groups.reduce(comm, &ops, &mut buffers, &partials, pieces, sink).expect("reduced");
            }
            sums.finish_sum(&ops).unwrap_or_else(|| Buf::zeroed_as(Dtype::F32, 0))
        };
        let parts: Vec<Buf> = thread::scope(|scope| {
            let run_rank = &run_rank;
            let group = create_thread_group(counts.len()).into_iter();
            let ranks: Vec<_> = group.map(|comm| scope.spawn(move || run_rank(&comm))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("the rank ended")).collect()
        });
        parts.iter().flat_map(|part| part.host_slice().iter().map(|x| x.to_bits())).collect()
    }

    /// A tested reduction: the numbers of hosts and of ranks on each host, the micro-batches of
    /// each rank, and the length of the part that each rank owns.
    type ReductionCase = (usize, usize, Vec<Range<usize>>, Vec<usize>);

    #[test]
    fn two_levels_have_the_bits_of_one_level() {
        let one_by_one = |world: usize, first: usize| (0..world).map(|r| first + r..first + r + 1).collect();
        let cases: [ReductionCase; 5] = [
            (2, 2, one_by_one(4, 0), vec![5, 0, 7, 3]),
            (2, 2, one_by_one(4, 8), vec![4; 4]),
            (3, 2, one_by_one(6, 6), vec![1, 2, 3, 4, 5, 6]),
            (2, 3, vec![0..3, 3..6, 6..9, 9..12, 12..15, 15..17], vec![9, 8, 7, 6, 5, 4]),
            (2, 2, vec![0..1, 1..2, 2..3, 3..3], vec![6; 4]),
        ];
        for (hosts, ranks_per_host, micro_batches, counts) in cases {
            let ops = Cpu::new(1);
            let len: usize = counts.iter().sum();
            let mut expected = MicroBatchSums::new(len);
            for s in micro_batches.iter().flat_map(Clone::clone) {
                let values: Vec<f32> = (0..len).map(|i| compute_summand(s, i)).collect();
                expected.push_copy(&ops, MicroBatchRange::from_micro_batch(s), values[..].into());
            }
            let expected = expected.finish_sum(&ops).expect("a sum");
            let expected: Vec<u32> = expected.host_slice().iter().map(|x| x.to_bits()).collect();
            let groups = HostGroups { hosts, ranks_per_host };
            assert_eq!(reduce(groups, &micro_batches, &counts), expected, "{micro_batches:?}");
        }
    }
}

//! Gathers and reduces parameter units (tensors that are gathered together) that only some ranks
//! own, such as experts. Each gather or reduction is one `all_to_all` of all ranks, in which ranks
//! that do not own the unit send and receive nothing. So every rank runs the same sequence of
//! collectives.
use super::{
    MicroBatchSchedule,
    buffer_pool::resize_buffer,
    micro_batch_sums::{
        MicroBatchRange, MicroBatchSums, count_peak_gradient_buffers, split_into_tree_ranges,
    },
    partition::Partition,
};
use crate::params::{OwnerRanks, ParamUnit};
use comm::{Comm, Result};
use device::{Buf, Dtype, Ops, View, ViewMut};
use std::{collections::HashMap, ops::Range};

/// The purpose that out-of-memory errors state for the buffers in which ranks exchange parameters
/// and gradients that only some ranks own.
const EXCHANGE_BUFFERS_LABEL: &str = "exchanged parameters and gradients";

/// Reusable send and receive buffers for gathering parameters that only some ranks own (such as
/// experts), and for reducing their gradients.
#[derive(Default)]
pub(super) struct ExchangeBuffers {
    sent: Buf,
    /// The send buffer for 16-bit elements.
    sent_rounded: Buf,
    received: Buf,
    /// A copy of the owned shard of a vector that is gathered in place.
    owned: Buf,
    /// The sums of the gradients of this host, for other hosts, by the length of their vectors.
    host_sums: HashMap<usize, MicroBatchSums>,
}

impl ExchangeBuffers {
    /// Returns the first `len` elements of the reusable buffer for data of type `dtype` that this
    /// rank sends, which is enlarged if it is too short.
    fn reserve_send_buffer(&mut self, ops: &dyn Ops, dtype: Dtype, len: usize) -> ViewMut<'_> {
        if dtype == Dtype::F32 {
            return resize_buffer(ops, EXCHANGE_BUFFERS_LABEL, &mut self.sent, len);
        }
        resize_buffer(
            ops,
            EXCHANGE_BUFFERS_LABEL,
            replace_if_other_dtype(ops, &mut self.sent_rounded, dtype),
            len,
        )
    }

    /// Copies the fp32 views `sent` one after the other to the send buffer, sends `sent_counts[r]`
    /// elements to each rank r, and returns the received elements, `received_counts[r]` of each
    /// rank r. Collective: every rank must call it.
    pub(super) fn exchange<'a>(
        &mut self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        sent: impl Iterator<Item = View<'a>>,
        sent_counts: &[usize],
        received_counts: &[usize],
    ) -> Result<View<'_>> {
        let len = sent_counts.iter().sum();
        self.reserve_send_buffer(ops, Dtype::F32, len);
        let ExchangeBuffers { sent: send, received, .. } = self;
        let mut send = send.view_mut().slice(0..len);
        let mut end = 0;
        for part in sent.filter(|part| !part.is_empty()) {
            end += part.len();
            ops.copy(send.slice_mut(end - part.len()..end), part);
        }
        let received_len = received_counts.iter().sum();
        let mut buffer = resize_buffer(ops, EXCHANGE_BUFFERS_LABEL, received, received_len);
        comm.all_to_all(buffer.reborrow(), received_counts, send.as_view(), sent_counts)?;
        Ok(buffer.into_view())
    }

    /// Takes empty sums for vectors of `len` elements. Must be followed by
    /// [`ExchangeBuffers::give_back_host_sums`].
    pub(super) fn take_host_sums(&mut self, len: usize) -> MicroBatchSums {
        self.host_sums.remove(&len).unwrap_or_else(|| MicroBatchSums::new(len))
    }

    /// Takes back the sums of this host, to reuse their memory.
    pub(super) fn give_back_host_sums(&mut self, mut sums: MicroBatchSums) {
        sums.clear();
        self.host_sums.insert(sums.len(), sums);
    }

    /// Copies `owned`, this rank's shard of a parameter unit (tensors that are gathered together),
    /// to a reusable buffer, from which it is sent to other ranks. Must be followed by
    /// [`ExchangeBuffers::give_back_shard_buffer`].
    ///
    /// The buffer is reused because the allocator would keep several buffers if each unit allocated
    /// one.
    pub(super) fn copy_shard_to_reusable_buffer(&mut self, ops: &dyn Ops, owned: View) -> Buf {
        let mut buffer = std::mem::take(&mut self.owned);
        let typed = replace_if_other_dtype(ops, &mut buffer, owned.dtype());
        ops.copy(resize_buffer(ops, EXCHANGE_BUFFERS_LABEL, typed, owned.len()), owned);
        buffer
    }

    /// Takes back the reusable buffer into which this rank's shard was copied.
    pub(super) fn give_back_shard_buffer(&mut self, copy: Buf) {
        self.owned = copy;
    }

    /// Gathers a parameter unit (tensors that are gathered together) from the ranks that own its
    /// parts into the buffer `whole`, which is filled on each of these ranks. Collective: every
    /// rank must call it.
    ///
    /// `shard_lengths` are the lengths of all ranks' shards, and `owned` is this rank's shard. On
    /// ranks that do not own the unit, `owned` and `whole` are empty.
    pub(super) fn gather_from_owners(
        &mut self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        owners: OwnerRanks,
        shard_lengths: &[usize],
        whole: ViewMut,
        owned: View,
    ) -> Result<()> {
        if owners.includes_all_ranks() {
            return comm.all_gather(whole, owned, shard_lengths);
        }
        let world = comm.world_size();
        let mine = owners.contains(comm.rank());
        let only = |counts: &dyn Fn(usize) -> usize| -> Vec<usize> {
            (0..world).map(|r| if mine && owners.contains(r) { counts(r) } else { 0 }).collect()
        };
        let (sent, received) = (only(&|_| owned.len()), only(&|r| shard_lengths[r]));
        let mut send = self.reserve_send_buffer(ops, owned.dtype(), sent.iter().sum());
        for copy in 0..send.len().checked_div(owned.len()).unwrap_or(0) {
            ops.copy(send.slice_mut(copy * owned.len()..(copy + 1) * owned.len()), owned);
        }
        comm.all_to_all(whole, &received, send.as_view(), &sent)
    }

    /// Sends this rank's gradient sums of a parameter unit (tensors that are gathered together) to
    /// the unit's owner ranks, and receives theirs for this rank's shard. Passes received shards to
    /// `sink` in the order of the micro-batches.
    ///
    /// Collective: every rank must call it.
    pub(super) fn exchange_partial_sums(
        &mut self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        (unit, part): (&ParamUnit, &Partition),
        schedule: &MicroBatchSchedule,
        round: usize,
        partial_sums: &MicroBatchSums,
        sink: &mut dyn FnMut(MicroBatchRange, View),
    ) -> Result<()> {
        let (owners, world, me) = (unit.owners, comm.world_size(), comm.rank());
        let parts: Vec<_> = (0..world).map(|r| unit.to_trained_range(part.shard_range(r))).collect();
        let owned = parts[me].len();
        let kept: Vec<View> = partial_sums.partial_sums().map(|(_, v)| v).collect();
        let theirs: Vec<Vec<MicroBatchRange>> = (0..world)
            .map(|r| {
                if owners.contains(r) {
                    list_group_tree_ranges(schedule, owners, r, round)
                } else {
                    Vec::new()
                }
            })
            .collect();
        let sent: Vec<usize> = parts.iter().map(|p| p.len() * kept.len()).collect();
        let received: Vec<usize> = theirs.iter().map(|ranges| ranges.len() * owned).collect();
        self.reserve_send_buffer(ops, Dtype::F32, sent.iter().sum());
        let ExchangeBuffers { sent: send, received: buffer, .. } = self;
        let (mut send, mut buffer) = (
            send.view_mut().slice(0..sent.iter().sum()),
            resize_buffer(ops, EXCHANGE_BUFFERS_LABEL, buffer, received.iter().sum()),
        );
        let mut end = 0;
        for part in parts {
            for v in &kept {
                let part = v.slice(part.clone());
                end += part.len();
                ops.copy(send.slice_mut(end - part.len()..end), part);
            }
        }
        comm.all_to_all(buffer.reborrow(), &received, send.as_view(), &sent)?;
        let mut at = 0;
        for range in theirs.into_iter().flatten() {
            sink(range, buffer.as_view().slice(at..at + owned));
            at += owned;
        }
        Ok(())
    }
}

/// Returns the buffer `buf`, which is replaced by an empty buffer for elements of type `dtype` if
/// it has another element type.
fn replace_if_other_dtype<'a>(ops: &dyn Ops, buf: &'a mut Buf, dtype: Dtype) -> &'a mut Buf {
    if buf.is_empty() || buf.dtype() != dtype {
        *buf = ops.zeroed(dtype, 0);
    }
    buf
}

/// Computes how many elements a rank sends and receives at most when it gathers the parameters, or
/// reduces the gradients, of a unit that only some ranks own.
///
/// The results are three numbers of elements: those that a gather of the unit's parameters sends,
/// those that a reduction of the unit's gradients sends, and those that this reduction receives.
/// This rank owns `owned` elements of the unit, of which `own_trained` are trained.
pub fn compute_exchange_buffer_lengths(
    unit: &ParamUnit,
    schedule: &MicroBatchSchedule,
    rank: usize,
    (owned, own_trained): (usize, usize),
) -> (usize, usize, usize) {
    if unit.owners.includes_all_ranks() || !unit.owners.contains(rank) {
        return (0, 0, 0);
    }
    let owners = unit.owners.count_owners_below(schedule.world);
    let most = |of: &dyn Fn(usize) -> usize| (0..schedule.count_rounds()).map(of).max().unwrap_or(0);
    let sent = most(&|round| list_group_tree_ranges(schedule, unit.owners, rank, round).len());
    let ranks = || (0..schedule.world).filter(|&r| unit.owners.contains(r));
    let received =
        most(&|round| ranks().map(|r| list_group_tree_ranges(schedule, unit.owners, r, round).len()).sum());
    let gathered = if owners > 1 { owners * owned } else { 0 };
    (gathered, sent * unit.trained_len(), received * own_trained)
}

/// Returns the micro-batches that all ranks of the expert-parallel group of `rank` compute in round
/// number `round` (one forward and backward pass).
fn list_group_micro_batches(
    schedule: &MicroBatchSchedule,
    owners: OwnerRanks,
    rank: usize,
    round: usize,
) -> Range<usize> {
    let first = rank / owners.stride * owners.stride;
    let micro_batches: Vec<usize> =
        (first..first + owners.stride).filter_map(|r| schedule.find_micro_batch(r, round)).collect();
    micro_batches.first().map_or(0..0, |&a| a..a + micro_batches.len())
}

/// Returns the micro-batches that the expert-parallel group of `rank` computes in one round, as
/// ranges whose gradients are each sent as one sum.
pub(super) fn list_group_tree_ranges(
    schedule: &MicroBatchSchedule,
    owners: OwnerRanks,
    rank: usize,
    round: usize,
) -> Vec<MicroBatchRange> {
    split_into_tree_ranges(list_group_micro_batches(schedule, owners, rank, round))
}

/// Returns how many gradient buffers a rank needs at most in one round to sum expert gradients over
/// the micro-batches of its expert-parallel group. The memory estimate uses the result.
pub fn count_peak_group_buffers(schedule: &MicroBatchSchedule, owners: OwnerRanks, rank: usize) -> usize {
    let buffers_in_round = |round| {
        count_peak_gradient_buffers(
            list_group_micro_batches(schedule, owners, rank, round).map(MicroBatchRange::from_micro_batch),
            true,
        )
    };
    (0..schedule.count_rounds()).map(buffers_in_round).max().unwrap_or(0)
}

/// Returns how many gradient buffers a rank needs at most during one step to sum the gradients of a
/// parameter unit that it owns. The memory estimate uses the result.
pub fn count_peak_owner_buffers(schedule: &MicroBatchSchedule, owners: OwnerRanks) -> usize {
    let ranks = || (0..schedule.world).filter(|&r| owners.contains(r));
    let ranges = (0..schedule.count_rounds())
        .flat_map(|round| ranks().flat_map(move |r| list_group_tree_ranges(schedule, owners, r, round)));
    count_peak_gradient_buffers(ranges, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the buffers in which a group and an owner sum gradients, for a step of
    /// `micro_batches` micro-batches on four ranks, of which every `stride`-th owns the unit.
    fn count_peak_buffers_of_both(micro_batches: usize, stride: usize) -> (usize, usize) {
        let (schedule, owners) = (
            MicroBatchSchedule { micro_batches, world: 4, interleaved: true },
            OwnerRanks { first: 0, stride },
        );
        (count_peak_group_buffers(&schedule, owners, 0), count_peak_owner_buffers(&schedule, owners))
    }

    #[test]
    fn sums_of_a_group_save_buffers_at_the_owner() {
        assert_eq!(count_peak_buffers_of_both(4, 1), (1, 2));
        assert_eq!(count_peak_buffers_of_both(4, 2), (2, 1));
        assert_eq!(count_peak_buffers_of_both(4, 4), (3, 1));
        // two rounds: the sum of the first waits for the sum of the second
        assert_eq!(count_peak_buffers_of_both(8, 1), (1, 3));
        assert_eq!(count_peak_buffers_of_both(8, 2), (2, 2));
        assert_eq!(count_peak_buffers_of_both(8, 4), (3, 1));
        // one micro-batch for four ranks
        assert_eq!(count_peak_buffers_of_both(1, 4), (1, 1));
    }
}

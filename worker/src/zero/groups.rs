//! Collectives of a unit that only some ranks own: one `all_to_all` of all ranks, in which the others give and get nothing, so
//! that the schedule is the same everywhere.
use super::{
    Slots,
    fold::{FoldStack, Run, buffers, maximal_runs},
    partition::Partition,
    pool::grow,
};
use crate::params::{Owners, Unit};
use comm::{Comm, Result};
use device::{Buf, Dtype, Ops, View, ViewMut};
use std::ops::Range;

/// Where messages are put together and arrive: used again by every collective.
#[derive(Default)]
pub(super) struct Messages {
    sent: Buf,
    /// The same in the 16 bits of a precision.
    sent_rounded: Buf,
    received: Buf,
    /// The own part of what is gathered in place.
    own: Buf,
}

impl Messages {
    fn sent(&mut self, ops: &dyn Ops, dtype: Dtype, len: usize) -> ViewMut<'_> {
        if dtype == Dtype::F32 {
            return grow(ops, &mut self.sent, len);
        }
        grow(ops, of_type(ops, &mut self.sent_rounded, dtype), len)
    }

    /// A buffer that begins with a copy of `own`, to be put back: allocated anew for each unit it would be kept by the allocator,
    /// several times over.
    pub(super) fn take_copy(&mut self, ops: &dyn Ops, own: View) -> Buf {
        let mut room = std::mem::take(&mut self.own);
        ops.copy(grow(ops, of_type(ops, &mut room, own.dtype()), own.len()), own);
        room
    }

    pub(super) fn put_back(&mut self, copy: Buf) {
        self.own = copy;
    }
}

/// `buf`, or in its place an empty one of these ops where it is none of theirs yet, or its elements are of another type.
fn of_type<'a>(ops: &dyn Ops, buf: &'a mut Buf, dtype: Dtype) -> &'a mut Buf {
    if buf.is_empty() || buf.dtype() != dtype {
        *buf = ops.zeroed(dtype, 0);
    }
    buf
}

/// Elements of [`Messages`] for a unit of which this rank owns `own` elements, for the estimate: sent by a gather of its
/// parameters; sent and received by a reduction of its gradients. `own_trained`: of those.
pub fn messages(
    unit: &Unit,
    slots: &Slots,
    rank: usize,
    (own, own_trained): (usize, usize),
) -> (usize, usize, usize) {
    if unit.owners.all() || !unit.owners.has(rank) {
        return (0, 0, 0);
    }
    let owners = unit.owners.below(slots.world);
    let most = |of: &dyn Fn(usize) -> usize| (0..slots.rounds()).map(of).max().unwrap_or(0);
    let sent = most(&|round| runs_of(slots, unit.owners, rank, round).len());
    let ranks = || (0..slots.world).filter(|&r| unit.owners.has(r));
    let received = most(&|round| ranks().map(|r| runs_of(slots, unit.owners, r, round).len()).sum());
    let gathered = if owners > 1 { owners * own } else { 0 };
    (gathered, sent * unit.trained_len(), received * own_trained)
}

/// `whole` becomes the owners' `parts` of a unit, on its owners. Every rank takes part; those that own nothing of the unit give
/// and get nothing, and `own` and `whole` are empty.
pub(super) fn gather(
    comm: &dyn Comm,
    ops: &dyn Ops,
    messages: &mut Messages,
    owners: Owners,
    parts: &[usize],
    whole: ViewMut,
    own: View,
) -> Result<()> {
    if owners.all() {
        return comm.all_gather(whole, own, parts);
    }
    let world = comm.world();
    let mine = owners.has(comm.rank());
    let only = |counts: &dyn Fn(usize) -> usize| -> Vec<usize> {
        (0..world).map(|r| if mine && owners.has(r) { counts(r) } else { 0 }).collect()
    };
    let (sent, received) = (only(&|_| own.len()), only(&|r| parts[r]));
    let mut send = messages.sent(ops, own.dtype(), sent.iter().sum());
    for copy in 0..send.len().checked_div(own.len()).unwrap_or(0) {
        ops.copy(send.part(copy * own.len()..(copy + 1) * own.len()), own);
    }
    comm.all_to_all(whole, &received, send.as_view(), &sent)
}

/// The slots that the group of `rank` has in `round`.
fn dealt(slots: &Slots, owners: Owners, rank: usize, round: usize) -> Range<usize> {
    let first = rank / owners.stride * owners.stride;
    let dealt: Vec<usize> = (first..first + owners.stride).filter_map(|r| slots.slot(r, round)).collect();
    dealt.first().map_or(0..0, |&a| a..a + dealt.len())
}

/// The runs of slots that the group of `rank` has in `round`, folded as far as they go.
pub(super) fn runs_of(slots: &Slots, owners: Owners, rank: usize, round: usize) -> Vec<Run> {
    maximal_runs(dealt(slots, owners, rank, round))
}

/// Buffers of the stack in which the group of `rank` folds the gradients of a unit by the slots of a round, for the estimate.
pub fn buffers_of_group(slots: &Slots, owners: Owners, rank: usize) -> usize {
    let of = |round| buffers(dealt(slots, owners, rank, round).map(Run::slot), true);
    (0..slots.rounds()).map(of).max().unwrap_or(0)
}

/// Buffers of the stack in which an owner sums what comes of a unit in a step, for the estimate.
pub fn buffers_of_owner(slots: &Slots, owners: Owners) -> usize {
    let ranks = || (0..slots.world).filter(|&r| owners.has(r));
    let runs =
        (0..slots.rounds()).flat_map(|round| ranks().flat_map(move |r| runs_of(slots, owners, r, round)));
    buffers(runs, false)
}

/// Each owner gets its part of every owner's runs, in the order of the slots.
pub(super) fn trade_runs(
    comm: &dyn Comm,
    ops: &dyn Ops,
    messages: &mut Messages,
    (unit, part): (&Unit, &Partition),
    slots: &Slots,
    round: usize,
    runs: &FoldStack,
    sink: &mut dyn FnMut(Run, View),
) -> Result<()> {
    let (owners, world, me) = (unit.owners, comm.world(), comm.rank());
    let parts: Vec<_> = (0..world).map(|r| unit.trained_range(part.range(r))).collect();
    let own = parts[me].len();
    let kept: Vec<View> = runs.partials().map(|(_, v)| v).collect();
    let theirs: Vec<Vec<Run>> = (0..world)
        .map(|r| if owners.has(r) { runs_of(slots, owners, r, round) } else { Vec::new() })
        .collect();
    let sent: Vec<usize> = parts.iter().map(|p| p.len() * kept.len()).collect();
    let received: Vec<usize> = theirs.iter().map(|runs| runs.len() * own).collect();
    messages.sent(ops, Dtype::F32, sent.iter().sum());
    let Messages { sent: send, received: room, .. } = messages;
    let (mut send, mut room) =
        (send.view_mut().slice(0..sent.iter().sum()), grow(ops, room, received.iter().sum()));
    let mut end = 0;
    for part in parts {
        for v in &kept {
            let part = v.slice(part.clone());
            end += part.len();
            ops.copy(send.part(end - part.len()..end), part);
        }
    }
    comm.all_to_all(room.reborrow(), &received, send.as_view(), &sent)?;
    let mut at = 0;
    for run in theirs.into_iter().flatten() {
        sink(run, room.as_view().slice(at..at + own));
        at += own;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers of a group and of an owner, of a step of `slots` on four ranks of which every `stride`-th has a part.
    fn of(slots: usize, stride: usize) -> (usize, usize) {
        let (slots, owners) = (Slots { slots, world: 4, interleaved: true }, Owners { first: 0, stride });
        (buffers_of_group(&slots, owners, 0), buffers_of_owner(&slots, owners))
    }

    #[test]
    fn what_a_group_has_folded_needs_fewer_sums_at_the_owner() {
        assert_eq!(of(4, 1), (1, 2));
        assert_eq!(of(4, 2), (2, 1));
        assert_eq!(of(4, 4), (3, 1));
        // Two rounds: the first one's sum waits for the second one's.
        assert_eq!(of(8, 1), (1, 3));
        assert_eq!(of(8, 2), (2, 2));
        assert_eq!(of(8, 4), (3, 1));
        // One slot for four ranks.
        assert_eq!(of(1, 4), (1, 1));
    }
}

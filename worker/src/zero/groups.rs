//! Collectives of a unit that only some ranks own: one `all_to_all` of all ranks, in which the others give and get nothing, so
//! that the schedule is the same everywhere.
use super::{
    Slots,
    fold::{FoldStack, Run, maximal_runs},
    partition::Partition,
    pool::grow,
};
use crate::params::{Owners, Unit};
use comm::{Comm, Result};
use device::{Buf, Dtype, Ops, View, ViewMut};

/// Where messages are put together and arrive: used again by every collective.
#[derive(Default)]
pub(super) struct Messages {
    sent: Buf,
    /// The same in the 16 bits of a precision.
    sent_rounded: Buf,
    received: Buf,
}

impl Messages {
    fn sent(&mut self, ops: &dyn Ops, dtype: Dtype, len: usize) -> ViewMut<'_> {
        if dtype == Dtype::F32 {
            return grow(ops, &mut self.sent, len);
        }
        if self.sent_rounded.dtype() != dtype {
            self.sent_rounded = ops.zeroed(dtype, 0);
        }
        grow(ops, &mut self.sent_rounded, len)
    }
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

/// The runs of slots that the group of `rank` has in `round`, folded as far as they go.
pub(super) fn runs_of(slots: &Slots, owners: Owners, rank: usize, round: usize) -> Vec<Run> {
    let first = rank / owners.stride * owners.stride;
    let dealt: Vec<usize> = (first..first + owners.stride).filter_map(|r| slots.slot(r, round)).collect();
    dealt.first().map_or_else(Vec::new, |&a| maximal_runs(a..a + dealt.len()))
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

//! Weights in bf16 that have no masters: widened for their update, which is computed in f32, and rounded stochastically, so that
//! what is less than half a step of theirs is not lost.
use super::UnitStates;
use crate::{
    params::{Segment, Unit},
    rng::{Purpose, Stream},
};
use device::{Buf, Dtype, Ops, ViewMut, needed_for, ops::StochasticRounding};
use std::ops::Range;

/// Elements that are updated at a time.
const PIECE: usize = 1 << 22;

/// How the weights of a run are rounded.
pub(super) struct Narrow {
    /// Per unit, per parameter: of its random numbers.
    keys: Vec<Vec<[u32; 2]>>,
    /// A piece as f32.
    room: Buf,
}

/// Elements of the room in which these ranges of units are updated.
pub fn room_len<'a>(ranges: impl Iterator<Item = (&'a Unit, Range<usize>)>) -> usize {
    let largest = |(unit, range): (&Unit, Range<usize>)| {
        unit.trained_segments(range).iter().map(|s| s.flat.len()).max().unwrap_or(0)
    };
    ranges.map(largest).max().unwrap_or(0).min(PIECE)
}

impl Narrow {
    pub(super) fn new(ops: &dyn Ops, seed: u64, units: &[Unit], states: &[UnitStates]) -> Self {
        let key = |name: &str| Stream::new(seed, Purpose::StochasticRounding, name).key();
        let keys = units.iter().map(|u| u.params.iter().map(|p| key(&p.name)).collect()).collect();
        let len = room_len(units.iter().zip(states).map(|(unit, st)| (unit, st.range.clone())));
        let room = needed_for("the weights being updated", || ops.zeroed(Dtype::F32, len));
        Narrow { keys, room }
    }

    /// Runs `update` on `p`, the elements of `seg` of unit `u`, as f32: on one piece after the other, with the range of `p` that it
    /// is. `step`: of the optimizer.
    fn widened(
        &mut self,
        ops: &dyn Ops,
        (u, seg): (usize, &Segment),
        step: u64,
        mut p: ViewMut,
        mut update: impl FnMut(ViewMut, Range<usize>),
    ) {
        let key = self.keys[u][seg.param];
        for from in (0..p.len()).step_by(PIECE) {
            let r = from..p.len().min(from + PIECE);
            let (first, len) = ((seg.elements.start + from) as u64, r.len());
            ops.cast(self.room.view_mut().slice(0..len), p.part(r.clone()).into_view());
            update(self.room.view_mut().slice(0..len), r.clone());
            let draw = StochasticRounding { key, first, step };
            ops.round_stochastically(p.part(r), self.room.view().slice(0..len), &draw);
        }
    }
}

/// Runs `update` on `p`, the elements of a segment, as f32: where they lie, or as [`Narrow::widened`] says.
pub(super) fn in_f32(
    narrow: &mut Option<Narrow>,
    ops: &dyn Ops,
    of: (usize, &Segment),
    step: u64,
    p: ViewMut,
    mut update: impl FnMut(ViewMut, Range<usize>),
) {
    let all = 0..p.len();
    match narrow {
        Some(narrow) => narrow.widened(ops, of, step, p, update),
        None => update(p, all),
    }
}

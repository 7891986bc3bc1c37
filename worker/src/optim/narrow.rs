//! Weights in bf16 that have no masters: widened for their update, which is computed in f32, and rounded stochastically, so that
//! what is less than half a step of theirs is not lost.
use super::UnitStates;
use crate::{
    params::{Segment, Unit},
    rng::{Purpose, Stream},
};
use device::{Buf, Dtype, Ops, ViewMut, needed_for, ops::StochasticRounding};
use std::ops::Range;

/// Most elements that are updated at a time.
const PIECE: usize = 1 << 22;

/// How the weights of a run are rounded.
pub(super) struct Narrow {
    /// Per unit, per parameter: of its random numbers.
    keys: Vec<Vec<[u32; 2]>>,
    /// A piece as f32; pieces are as long as it is.
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
        let (key, piece) = (self.keys[u][seg.param], self.room.len().max(1));
        for from in (0..p.len()).step_by(piece) {
            let r = from..p.len().min(from + piece);
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

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;

    /// Elements `elements` of a tensor after an update that adds 1/1000 to each, in pieces of this length.
    fn updated(piece: usize, elements: Range<usize>) -> Vec<u16> {
        let cpu = Cpu::new(2);
        let key = Stream::new(3, Purpose::StochasticRounding, "w").key();
        let mut narrow = Some(Narrow { keys: vec![vec![key]], room: Buf::zeroed(piece) });
        let mut p = Buf::zeroed_as(Dtype::Bf16, elements.len());
        let first: Vec<f32> = elements.clone().map(|i| 1.0 + (i % 50) as f32 / 64.0).collect();
        cpu.cast(p.view_mut(), first[..].into());
        let seg = Segment { param: 0, flat: 0..elements.len(), elements };
        let mut seen = 0;
        in_f32(&mut narrow, &cpu, (0, &seg), 7, p.view_mut(), |mut values, r| {
            assert_eq!((r.start, r.len()), (seen, values.len()), "one after the other");
            seen = r.end;
            cpu.offset(values.reborrow(), 1e-3);
        });
        assert_eq!(seen, seg.flat.len());
        p.view().halves().to_vec()
    }

    #[test]
    fn pieces_and_parts_of_a_tensor_are_rounded_as_the_whole() {
        let whole = updated(1000, 0..1000);
        for piece in [1, 7, 64, 999] {
            assert_eq!(updated(piece, 0..1000), whole, "pieces of {piece}");
        }
        assert_eq!([updated(64, 0..301), updated(7, 301..1000)].concat(), whole);
        let moved = whole.iter().enumerate().filter(|(i, bits)| {
            let before = 1.0 + (i % 50) as f32 / 64.0;
            f32::from_bits(u32::from(**bits) << 16) != before
        });
        // an eighth of a step of 1/128
        assert!((70..190).contains(&moved.count()), "some go on, most stay");
    }
}

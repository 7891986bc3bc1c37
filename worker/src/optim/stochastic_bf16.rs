//! [`StochasticUpdate`]: updates bf16 weights without fp32 master weights. Updates are rounded
//! stochastically, so that updates smaller than half a bf16 step are not lost.
use super::unit_states::UnitStates;
use crate::{
    params::{ParamUnit, Segment},
    rng::{Purpose, RandomStream},
};
use device::{Buf, Dtype, Ops, ViewMut, ops::StochasticRounding};
use std::ops::Range;

/// The largest number of bf16 weights that are converted to fp32 at a time for an update.
const MAX_CHUNK_ELEMENTS: usize = 1 << 22;

/// Updates bf16 weights that have no fp32 master weights: computes in an fp32 buffer, and rounds
/// the results stochastically to bf16.
pub(super) struct StochasticUpdate {
    /// For each unit and parameter, the key of the parameter's random numbers.
    keys: Vec<Vec<[u32; 2]>>,
    /// The fp32 values of the elements that are being updated.
    chunk: Buf,
}

/// Returns the number of elements of the fp32 buffer in which bf16 weights are updated: the longest
/// part of a trained tensor that the rank owns, at most [`MAX_CHUNK_ELEMENTS`].
pub fn compute_update_chunk_len<'a>(ranges: impl Iterator<Item = (&'a ParamUnit, Range<usize>)>) -> usize {
    let largest = |(unit, range): (&ParamUnit, Range<usize>)| {
        unit.list_trained_segments(range).iter().map(|s| s.flat.len()).max().unwrap_or(0)
    };
    ranges.map(largest).max().unwrap_or(0).min(MAX_CHUNK_ELEMENTS)
}

impl StochasticUpdate {
    /// Allocates the fp32 buffer for updating the bf16 weights of this rank. The random numbers for
    /// rounding derive from `seed`.
    pub(super) fn new(ops: &dyn Ops, seed: u64, units: &[ParamUnit], states: &[UnitStates]) -> Self {
        let key = |name: &str| RandomStream::new(seed, Purpose::StochasticRounding, name).key();
        let keys = units.iter().map(|u| u.params.iter().map(|p| key(&p.name)).collect()).collect();
        let len =
            compute_update_chunk_len(units.iter().zip(states).map(|(unit, st)| (unit, st.range.clone())));
        let chunk = ops.zeroed_with_purpose("the weights being updated", Dtype::F32, len);
        StochasticUpdate { keys, chunk }
    }

    /// Updates the bf16 weights `p` in chunks: copies each chunk to fp32, lets the function
    /// `update` change the copy, and rounds the copy stochastically back to bf16. Calls `update`
    /// once for each chunk, with an fp32 copy of the chunk and the chunk's range in `p`. Then
    /// rounds the changed copy stochastically and writes it to `p`.
    ///
    /// `p` must contain the elements of segment `seg` of unit `u`. These elements and `step`, the
    /// number of the optimizer's step, determine the random numbers.
    fn update_in_chunks(
        &mut self,
        ops: &dyn Ops,
        (u, seg): (usize, &Segment),
        step: u64,
        mut p: ViewMut,
        mut update: impl FnMut(ViewMut, Range<usize>),
    ) {
        let (key, chunk_len) = (self.keys[u][seg.param], self.chunk.len().max(1));
        for from in (0..p.len()).step_by(chunk_len) {
            let r = from..p.len().min(from + chunk_len);
            let (first, len) = ((seg.elements.start + from) as u64, r.len());
            ops.cast(self.chunk.view_mut().slice(0..len), p.slice_mut(r.clone()).into_view());
            update(self.chunk.view_mut().slice(0..len), r.clone());
            let draw = StochasticRounding { key, first_element: first, step };
            ops.round_stochastically(p.slice_mut(r), self.chunk.view().slice(0..len), &draw);
        }
    }
}

/// Calls the function `update` with the weights `p` as fp32 values, of which a changed copy is
/// rounded stochastically back to bf16 if the weights are bf16.
///
/// If `rounding` is `Some`, `p` has bf16 weights, and `update` is called for each chunk
/// ([`StochasticUpdate::update_in_chunks`]). If `rounding` is `None`, `update` is called once, with
/// `p` itself.
pub(super) fn update_in_f32(
    rounding: &mut Option<StochasticUpdate>,
    ops: &dyn Ops,
    segment: (usize, &Segment),
    step: u64,
    p: ViewMut,
    mut update: impl FnMut(ViewMut, Range<usize>),
) {
    let every_element = 0..p.len();
    match rounding {
        Some(rounding) => rounding.update_in_chunks(ops, segment, step, p, update),
        None => update(p, every_element),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Cpu, ops::VectorOps};

    /// Adds 1/1000 to a range of a test tensor, in chunks of `chunk_len` elements. Returns the bits
    /// of the rounded results.
    fn update_and_round(chunk_len: usize, elements: Range<usize>) -> Vec<u16> {
        let cpu = Cpu::new(2);
        let key = RandomStream::new(3, Purpose::StochasticRounding, "w").key();
        let mut rounding = Some(StochasticUpdate { keys: vec![vec![key]], chunk: Buf::zeroed(chunk_len) });
        let mut p = Buf::zeroed_as(Dtype::Bf16, elements.len());
        let first: Vec<f32> = elements.clone().map(|i| 1.0 + (i % 50) as f32 / 64.0).collect();
        cpu.cast(p.view_mut(), first[..].into());
        let seg = Segment { param: 0, flat: 0..elements.len(), elements };
        let mut seen = 0;
        update_in_f32(&mut rounding, &cpu, (0, &seg), 7, p.view_mut(), |mut values, r| {
            assert_eq!((r.start, r.len()), (seen, values.len()), "chunks are consecutive");
            seen = r.end;
            cpu.add_scalar(values.reborrow(), 1e-3);
        });
        assert_eq!(seen, seg.flat.len());
        p.view().half_bits().to_vec()
    }

    #[test]
    fn rounding_does_not_depend_on_chunks_or_shards() {
        let whole = update_and_round(1000, 0..1000);
        for chunk_len in [1, 7, 64, 999] {
            assert_eq!(update_and_round(chunk_len, 0..1000), whole, "chunks of {chunk_len}");
        }
        assert_eq!([update_and_round(64, 0..301), update_and_round(7, 301..1000)].concat(), whole);
        let moved = whole.iter().enumerate().filter(|(i, bits)| {
            let before = 1.0 + (i % 50) as f32 / 64.0;
            f32::from_bits(u32::from(**bits) << 16) != before
        });
        // 1/1000 is an eighth of the bf16 step of 1/128
        assert!((70..190).contains(&moved.count()), "an eighth of the elements is rounded up");
    }
}

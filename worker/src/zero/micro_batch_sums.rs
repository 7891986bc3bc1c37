//! [`MicroBatchSums`]: sums gradients over micro-batches in a fixed order, so that the result does
//! not depend on the number of ranks. The order is a binary tree over `0..L` for `L` micro-batches.
//!
//! A partial sum covers an aligned range of micro-batches whose length is a power of two. Partial
//! sums are pushed in the order of the micro-batches, and two siblings merge immediately, so at
//! most log₂L + 1 are kept. [`MicroBatchSums::finish_sum`] adds the remaining ones from the right.
//! Pushing single micro-batches or merged ranges gives the same bits.
//!
//! [`MicroBatchSums::new_with_arrival_order`] keeps a single vector instead, to which each
//! following range is added. The bits of that sum depend on how micro-batches are distributed over
//! ranks.
use device::{Buf, Dtype, Ops, View};

/// Consecutive micro-batches of a step whose gradients are summed together. In the fixed order of
/// summation, the range is a node of a binary tree: `len` is a power of two, and `start` a multiple
/// of `len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchRange {
    /// The first micro-batch of the range.
    pub start: usize,
    /// Number of micro-batches.
    pub len: usize,
}

impl MicroBatchRange {
    /// Creates a range that contains only the micro-batch with the number `start`.
    pub fn from_micro_batch(start: usize) -> Self {
        MicroBatchRange { start, len: 1 }
    }

    /// Returns the range of micro-batches that joins this range with `right`, if the two are the
    /// children of one node in the binary tree of gradient sums. Returns `None` otherwise.
    pub fn join_with_sibling(self, right: MicroBatchRange) -> Option<MicroBatchRange> {
        let siblings = self.len == right.len
            && self.start.is_multiple_of(2 * self.len)
            && right.start == self.start + self.len;
        siblings.then_some(MicroBatchRange { start: self.start, len: 2 * self.len })
    }

    /// Returns the range of micro-batches that joins this range with the range `right`, if `right`
    /// begins where this range ends. Returns `None` otherwise.
    fn join_with_adjacent(self, right: MicroBatchRange) -> Option<MicroBatchRange> {
        let len = self.len + right.len;
        (right.start == self.start + self.len).then_some(MicroBatchRange { start: self.start, len })
    }
}

/// Splits a range of micro-batches into the fewest parts that each are a whole subtree of the
/// binary tree in which gradients are summed.
pub fn split_into_tree_ranges(range: std::ops::Range<usize>) -> Vec<MicroBatchRange> {
    merge_tree_ranges(range.map(MicroBatchRange::from_micro_batch))
}

/// Returns the ranges that remain when `ranges` are pushed one after the other, and siblings merge.
pub fn merge_tree_ranges(ranges: impl IntoIterator<Item = MicroBatchRange>) -> Vec<MicroBatchRange> {
    let mut kept = Vec::new();
    ranges.into_iter().for_each(|range| push_and_merge_ranges(&mut kept, range));
    kept
}

/// Appends the micro-batch range `top` to the list `kept`, and repeatedly joins the last two ranges
/// if they are siblings in the binary tree of gradient sums.
fn push_and_merge_ranges(kept: &mut Vec<MicroBatchRange>, mut top: MicroBatchRange) {
    while let Some(merged) = kept.last().and_then(|left| left.join_with_sibling(top)) {
        kept.pop();
        top = merged;
    }
    kept.push(top);
}

/// An accumulator that sums one vector per micro-batch, such as a gradient, and keeps partial sums
/// until they can be added in order.
pub struct MicroBatchSums {
    len: usize,
    in_arrival_order: bool,
    stack: Vec<(MicroBatchRange, Buf)>,
    free_buffers: Vec<Buf>,
}

impl MicroBatchSums {
    /// Creates an empty accumulator for vectors of `len` elements, which adds the vectors of
    /// micro-batches in the fixed order of a binary tree.
    pub fn new(len: usize) -> Self {
        MicroBatchSums { len, in_arrival_order: false, stack: Vec::new(), free_buffers: Vec::new() }
    }

    /// Creates an empty accumulator for vectors of `len` elements, which adds the vectors of
    /// micro-batches in the order in which they arrive.
    pub fn new_with_arrival_order(len: usize) -> Self {
        MicroBatchSums { in_arrival_order: true, ..MicroBatchSums::new(len) }
    }

    /// Returns which micro-batches the newest partial sum would cover after adding a vector for
    /// `right`, or `None` if the vector must be kept as a separate partial sum.
    fn merged_range_if_pushed(&self, right: MicroBatchRange) -> Option<MicroBatchRange> {
        let (left, _) = self.stack.last()?;
        if self.in_arrival_order { left.join_with_adjacent(right) } else { left.join_with_sibling(right) }
    }

    /// Returns the number of elements of each summed vector.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the sum contains no vector.
    pub fn is_empty(&self) -> bool {
        self.stack.is_empty()
    }

    /// Returns a free buffer, with unspecified content, for the next vector that will be added to
    /// this accumulator. The caller fills it and passes it to [`MicroBatchSums::push_owned`].
    ///
    /// The free buffer with the lowest address is used, so that each step uses the same buffers and
    /// CUDA graphs can be replayed.
    pub fn take_buffer(&mut self, ops: &dyn Ops) -> Buf {
        let first = (0..self.free_buffers.len()).min_by_key(|i| self.free_buffers[*i].view().address());
        first.map_or_else(
            || ops.zeroed_with_purpose("gradients", Dtype::F32, self.len),
            |i| self.free_buffers.swap_remove(i),
        )
    }

    /// Adds the vector `x`, which is the sum over the micro-batches in `range`, to this
    /// accumulator, which copies the vector if necessary. If `x` cannot be merged with the newest
    /// partial sum immediately, keeps a copy of `x` until its sibling arrives.
    pub fn push_copy(&mut self, ops: &dyn Ops, range: MicroBatchRange, x: View) {
        assert_eq!(x.len(), self.len, "partial of another length");
        match self.merged_range_if_pushed(range) {
            Some(merged) => {
                let (_, mut sum) = self.stack.pop().expect("just seen");
                ops.add(sum.view_mut(), x);
                self.push_owned(ops, merged, sum);
            }
            None => {
                let mut buf = self.take_buffer(ops);
                ops.copy(buf.view_mut(), x);
                self.stack.push((range, buf));
            }
        }
    }

    /// Adds the vector `sum`, which is the sum over the micro-batches in `range`, to this
    /// accumulator, which takes ownership of the vector's buffer. Takes ownership of the buffer
    /// instead of copying it.
    pub fn push_owned(&mut self, ops: &dyn Ops, mut range: MicroBatchRange, mut sum: Buf) {
        assert_eq!(sum.len(), self.len, "partial of another length");
        while let Some(merged) = self.merged_range_if_pushed(range) {
            let (_, mut left) = self.stack.pop().expect("just seen");
            ops.add(left.view_mut(), sum.view());
            self.free_buffers.push(std::mem::replace(&mut sum, left));
            range = merged;
        }
        self.stack.push((range, sum));
    }

    /// Returns the partial sums and the ranges of micro-batches that they cover, in the order of
    /// the micro-batches.
    pub fn partial_sums(&self) -> impl Iterator<Item = (MicroBatchRange, View<'_>)> {
        self.stack.iter().map(|(r, b)| (*r, b.view()))
    }

    /// Adds the remaining partial sums, and returns the sum of all vectors that were added, or
    /// `None` if there were none. Afterwards no partial sum is kept.
    pub fn finish_sum(&mut self, ops: &dyn Ops) -> Option<Buf> {
        let (_, mut sum) = self.stack.pop()?;
        while let Some((_, mut left)) = self.stack.pop() {
            ops.add(left.view_mut(), sum.view());
            self.free_buffers.push(std::mem::replace(&mut sum, left));
        }
        Some(sum)
    }

    /// Removes all vectors that were added to this accumulator, and keeps the buffers for reuse.
    pub fn clear(&mut self) {
        self.free_buffers.extend(self.stack.drain(..).map(|(_, b)| b));
    }

    /// Takes back a buffer that [`MicroBatchSums::finish_sum`] returned, to reuse its memory.
    pub fn recycle_buffer(&mut self, buf: Buf) {
        if buf.len() == self.len {
            self.free_buffers.push(buf);
        }
    }
}

/// Sums one number per micro-batch, such as its loss, in a fixed order (that of a binary tree), so
/// that the bits do not depend on the number of ranks.
pub fn sum_in_fixed_order(micro_batches: &[f64]) -> f64 {
    let mut stack: Vec<(MicroBatchRange, f64)> = Vec::new();
    for (s, &x) in micro_batches.iter().enumerate() {
        let mut top = (MicroBatchRange::from_micro_batch(s), x);
        while let Some(merged) = stack.last().and_then(|(left, _)| left.join_with_sibling(top.0)) {
            let (_, left) = stack.pop().expect("just seen");
            top = (merged, left + top.1);
        }
        stack.push(top);
    }
    let mut sum = match stack.pop() {
        Some((_, x)) => x,
        None => return 0.0,
    };
    while let Some((_, left)) = stack.pop() {
        sum += left;
    }
    sum
}

/// Computes how many gradient buffers are in use at most while the gradients of the micro-batch
/// ranges `ranges` are summed one after the other.
///
/// If `owned` is set, ranges are added with [`MicroBatchSums::push_owned`] and each has a buffer.
/// Otherwise they are added with [`MicroBatchSums::push_copy`], and a range whose left sibling is
/// the last partial sum needs no buffer.
pub fn count_peak_gradient_buffers(ranges: impl IntoIterator<Item = MicroBatchRange>, owned: bool) -> usize {
    let (mut kept, mut most) = (Vec::<MicroBatchRange>::new(), 0);
    for range in ranges {
        if owned || kept.last().and_then(|left| left.join_with_sibling(range)).is_none() {
            most = most.max(kept.len() + 1);
        }
        push_and_merge_ranges(&mut kept, range);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;
    use proptest::prelude::*;

    /// Computes the fixed-order sum by its recursive definition, as the reference of the tests. The
    /// left part has the largest power of two below `n`.
    fn compute_recursive_sum(x: &[f64]) -> f64 {
        match x.len() {
            0 => 0.0,
            1 => x[0],
            n => {
                let left = n.next_power_of_two() / 2;
                compute_recursive_sum(&x[..left]) + compute_recursive_sum(&x[left..])
            }
        }
    }

    proptest! {
        #[test]
        fn the_sum_is_the_tree_however_partials_arrive(x in prop::collection::vec(-1e6f32..1e6, 1..40), cuts in prop::collection::vec(0usize..40, 0..6)) {
            let ops = Cpu::new(1);
            let one = |v: f32| Buf::from_slice(&[v]);
            let mut whole = MicroBatchSums::new(1);
            for (s, &v) in x.iter().enumerate() {
                whole.push_copy(&ops, MicroBatchRange::from_micro_batch(s), one(v).view());
            }
            let expected = whole.finish_sum(&ops).unwrap().host_slice()[0];
            // Each rank sums a contiguous range and sends its partial sums.
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c % x.len()).chain([0, x.len()]).collect();
            cuts.sort_unstable();
            let mut owner = MicroBatchSums::new(1);
            for w in cuts.windows(2) {
                let mut rank = MicroBatchSums::new(1);
                for (s, &v) in x.iter().enumerate().take(w[1]).skip(w[0]) {
                    rank.push_owned(&ops, MicroBatchRange::from_micro_batch(s), one(v));
                }
                let ranges: Vec<MicroBatchRange> = rank.partial_sums().map(|(r, _)| r).collect();
                prop_assert_eq!(ranges, split_into_tree_ranges(w[0]..w[1]));
                for (range, v) in rank.partial_sums() {
                    owner.push_copy(&ops, range, v);
                }
            }
            prop_assert_eq!(owner.finish_sum(&ops).unwrap().host_slice()[0].to_bits(), expected.to_bits());
        }

        #[test]
        fn in_arrival_order_each_vector_is_added_to_the_previous_ones(x in prop::collection::vec(-1e6f32..1e6, 1..40)) {
            let ops = Cpu::new(1);
            let mut sum = MicroBatchSums::new_with_arrival_order(1);
            for (s, &v) in x.iter().enumerate() {
                let one = Buf::from_slice(&[v]);
                if s % 3 == 0 { sum.push_owned(&ops, MicroBatchRange::from_micro_batch(s), one) } else { sum.push_copy(&ops, MicroBatchRange::from_micro_batch(s), one.view()) }
                prop_assert_eq!(sum.partial_sums().map(|(range, _)| range).collect::<Vec<_>>(), [MicroBatchRange { start: 0, len: s + 1 }]);
            }
            let expected = x.iter().copied().reduce(|a, b| a + b).unwrap();
            prop_assert_eq!(sum.finish_sum(&ops).unwrap().host_slice()[0].to_bits(), expected.to_bits());
        }

        #[test]
        fn numbers_are_summed_by_the_same_tree(x in prop::collection::vec(-1e6f64..1e6, 0..40)) {
            prop_assert_eq!(sum_in_fixed_order(&x).to_bits(), compute_recursive_sum(&x).to_bits());
        }
    }

    #[test]
    fn sums_allocate_the_estimated_number_of_buffers_and_reuse_them() {
        let ops = Cpu::new(1);
        for micro_batches in 1..40 {
            let (mut pushed, mut owned) = (MicroBatchSums::new(1), MicroBatchSums::new(1));
            for _ in 0..3 {
                for s in 0..micro_batches {
                    pushed.push_copy(&ops, MicroBatchRange::from_micro_batch(s), Buf::zeroed(1).view());
                    let leaf = owned.take_buffer(&ops);
                    owned.push_owned(&ops, MicroBatchRange::from_micro_batch(s), leaf);
                }
                for (stack, direct) in [(&mut pushed, false), (&mut owned, true)] {
                    let sum = stack.finish_sum(&ops).unwrap();
                    stack.recycle_buffer(sum);
                    let estimate = count_peak_gradient_buffers(
                        (0..micro_batches).map(MicroBatchRange::from_micro_batch),
                        direct,
                    );
                    assert_eq!(
                        stack.free_buffers.len(),
                        estimate,
                        "{micro_batches} micro_batches, owned: {direct}"
                    );
                }
            }
        }
    }
}

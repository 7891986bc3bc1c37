//! The one shape of every sum over slots: a fixed binary tree over `0..slots`, whoever computes which slot.
//!
//! A partial is the sum of an aligned run of slots whose length is a power of two. Partials are pushed in slot order; two
//! siblings merge at once, so at most log₂(slots) + 1 are kept. What is left at the end is folded from the right.
//! Pushing single slots or already merged partials gives the same bits.
//!
//! Or, where that is asked for ([`FoldStack::in_order`]), one partial to which each run is added that follows it: one vector however
//! many slots there are, and bits that depend on what was summed elsewhere before.
use device::{Buf, Dtype, Ops, View};

/// An aligned run of slots, `start % len == 0`, `len` a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First slot.
    pub start: usize,
    /// Number of slots.
    pub len: usize,
}

impl Run {
    /// One slot.
    pub fn slot(start: usize) -> Self {
        Run { start, len: 1 }
    }

    /// The parent run when `self` (left) and `right` are siblings.
    pub fn merge(self, right: Run) -> Option<Run> {
        let siblings = self.len == right.len
            && self.start.is_multiple_of(2 * self.len)
            && right.start == self.start + self.len;
        siblings.then_some(Run { start: self.start, len: 2 * self.len })
    }

    /// Both, where `right` begins where `self` ends.
    fn followed_by(self, right: Run) -> Option<Run> {
        let len = self.len + right.len;
        (right.start == self.start + self.len).then_some(Run { start: self.start, len })
    }
}

/// The runs that are left after pushing single slots `range` in order.
pub fn maximal_runs(range: std::ops::Range<usize>) -> Vec<Run> {
    let mut kept = Vec::new();
    range.for_each(|s| keep(&mut kept, Run::slot(s)));
    kept
}

/// Adds `top` to the runs that are kept, which merge as far as they can.
fn keep(kept: &mut Vec<Run>, mut top: Run) {
    while let Some(merged) = kept.last().and_then(|left| left.merge(top)) {
        kept.pop();
        top = merged;
    }
    kept.push(top);
}

/// Partials of vectors of one length, kept until they can be merged.
pub struct FoldStack {
    len: usize,
    in_order: bool,
    stack: Vec<(Run, Buf)>,
    free: Vec<Buf>,
}

impl FoldStack {
    /// For vectors of `len` elements.
    pub fn new(len: usize) -> Self {
        FoldStack { len, in_order: false, stack: Vec::new(), free: Vec::new() }
    }

    /// The same, in which what comes is added to what came before.
    pub fn in_order(len: usize) -> Self {
        FoldStack { in_order: true, ..FoldStack::new(len) }
    }

    /// What the last partial and `right` become together, if they are summed now.
    fn merged(&self, right: Run) -> Option<Run> {
        let (left, _) = self.stack.last()?;
        if self.in_order { left.followed_by(right) } else { left.merge(right) }
    }

    /// Elements of a vector.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Nothing kept?
    pub fn is_empty(&self) -> bool {
        self.stack.is_empty()
    }

    /// A buffer of the stack's length with unspecified content, to be filled and given to [`FoldStack::push_owned`]. The first in
    /// memory: so a step has the buffers of the step before, and a card may be asked for the same work again.
    pub fn take(&mut self, ops: &dyn Ops) -> Buf {
        let first = (0..self.free.len()).min_by_key(|i| self.free[*i].view().address());
        first.map_or_else(|| ops.zeroed(Dtype::F32, self.len), |i| self.free.swap_remove(i))
    }

    /// Adds a partial that lies elsewhere; it is added straight into its left sibling when that is on top.
    pub fn push(&mut self, ops: &dyn Ops, run: Run, x: View) {
        assert_eq!(x.len(), self.len, "partial of another length");
        match self.merged(run) {
            Some(merged) => {
                let (_, mut sum) = self.stack.pop().expect("just seen");
                ops.add(sum.view_mut(), x);
                self.push_owned(ops, merged, sum);
            }
            None => {
                let mut buf = self.take(ops);
                ops.copy(buf.view_mut(), x);
                self.stack.push((run, buf));
            }
        }
    }

    /// Adds a partial, taking its buffer.
    pub fn push_owned(&mut self, ops: &dyn Ops, mut run: Run, mut sum: Buf) {
        assert_eq!(sum.len(), self.len, "partial of another length");
        while let Some(merged) = self.merged(run) {
            let (_, mut left) = self.stack.pop().expect("just seen");
            ops.add(left.view_mut(), sum.view());
            self.free.push(std::mem::replace(&mut sum, left));
            run = merged;
        }
        self.stack.push((run, sum));
    }

    /// The partials kept, in slot order.
    pub fn partials(&self) -> impl Iterator<Item = (Run, View<'_>)> {
        self.stack.iter().map(|(r, b)| (*r, b.view()))
    }

    /// The sum of everything pushed; the stack is empty afterwards. `None` when nothing was pushed.
    pub fn finish(&mut self, ops: &dyn Ops) -> Option<Buf> {
        let (_, mut sum) = self.stack.pop()?;
        while let Some((_, mut left)) = self.stack.pop() {
            ops.add(left.view_mut(), sum.view());
            self.free.push(std::mem::replace(&mut sum, left));
        }
        Some(sum)
    }

    /// Forgets everything pushed, keeping the memory.
    pub fn clear(&mut self) {
        self.free.extend(self.stack.drain(..).map(|(_, b)| b));
    }

    /// Gives a buffer that [`FoldStack::finish`] returned back for reuse.
    pub fn recycle(&mut self, buf: Buf) {
        if buf.len() == self.len {
            self.free.push(buf);
        }
    }
}

/// The same tree over plain numbers (losses), one per slot.
pub fn fold_f64(slots: &[f64]) -> f64 {
    let mut stack: Vec<(Run, f64)> = Vec::new();
    for (s, &x) in slots.iter().enumerate() {
        let mut top = (Run::slot(s), x);
        while let Some(merged) = stack.last().and_then(|(left, _)| left.merge(top.0)) {
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

/// Most buffers in use while `runs` are summed one after the other: the partials kept, and the run that comes.
///
/// With [`FoldStack::push_owned`] every run has a buffer; with [`FoldStack::push`] one that has its left sibling on top is added
/// straight into that.
pub fn buffers(runs: impl IntoIterator<Item = Run>, owned: bool) -> usize {
    let (mut kept, mut most) = (Vec::<Run>::new(), 0);
    for run in runs {
        if owned || kept.last().and_then(|left| left.merge(run)).is_none() {
            most = most.max(kept.len() + 1);
        }
        keep(&mut kept, run);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Cpu;
    use proptest::prelude::*;

    /// The definition, by recursion: the largest power of two below `n` goes left.
    fn twin(x: &[f64]) -> f64 {
        match x.len() {
            0 => 0.0,
            1 => x[0],
            n => {
                let left = n.next_power_of_two() / 2;
                twin(&x[..left]) + twin(&x[left..])
            }
        }
    }

    proptest! {
        #[test]
        fn the_sum_is_the_tree_however_partials_arrive(x in prop::collection::vec(-1e6f32..1e6, 1..40), cuts in prop::collection::vec(0usize..40, 0..6)) {
            let ops = Cpu::new(1);
            let one = |v: f32| Buf::from_slice(&[v]);
            let mut whole = FoldStack::new(1);
            for (s, &v) in x.iter().enumerate() {
                whole.push(&ops, Run::slot(s), one(v).view());
            }
            let expected = whole.finish(&ops).unwrap().host()[0];
            // Each rank folds a contiguous run by itself and sends what is left.
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c % x.len()).chain([0, x.len()]).collect();
            cuts.sort_unstable();
            let mut owner = FoldStack::new(1);
            for w in cuts.windows(2) {
                let mut rank = FoldStack::new(1);
                for (s, &v) in x.iter().enumerate().take(w[1]).skip(w[0]) {
                    rank.push_owned(&ops, Run::slot(s), one(v));
                }
                let runs: Vec<Run> = rank.partials().map(|(r, _)| r).collect();
                prop_assert_eq!(runs, maximal_runs(w[0]..w[1]));
                for (run, v) in rank.partials() {
                    owner.push(&ops, run, v);
                }
            }
            prop_assert_eq!(owner.finish(&ops).unwrap().host()[0].to_bits(), expected.to_bits());
        }

        #[test]
        fn in_order_each_is_added_to_those_before(x in prop::collection::vec(-1e6f32..1e6, 1..40)) {
            let ops = Cpu::new(1);
            let mut sum = FoldStack::in_order(1);
            for (s, &v) in x.iter().enumerate() {
                let one = Buf::from_slice(&[v]);
                if s % 3 == 0 { sum.push_owned(&ops, Run::slot(s), one) } else { sum.push(&ops, Run::slot(s), one.view()) }
                prop_assert_eq!(sum.partials().map(|(run, _)| run).collect::<Vec<_>>(), [Run { start: 0, len: s + 1 }]);
            }
            let expected = x.iter().copied().reduce(|a, b| a + b).unwrap();
            prop_assert_eq!(sum.finish(&ops).unwrap().host()[0].to_bits(), expected.to_bits());
        }

        #[test]
        fn numbers_are_summed_by_the_same_tree(x in prop::collection::vec(-1e6f64..1e6, 0..40)) {
            prop_assert_eq!(fold_f64(&x).to_bits(), twin(&x).to_bits());
        }
    }

    #[test]
    fn no_more_buffers_than_announced_and_none_is_lost() {
        let ops = Cpu::new(1);
        for slots in 1..40 {
            let (mut pushed, mut owned) = (FoldStack::new(1), FoldStack::new(1));
            for _ in 0..3 {
                for s in 0..slots {
                    pushed.push(&ops, Run::slot(s), Buf::zeroed(1).view());
                    let leaf = owned.take(&ops);
                    owned.push_owned(&ops, Run::slot(s), leaf);
                }
                for (stack, direct) in [(&mut pushed, false), (&mut owned, true)] {
                    let sum = stack.finish(&ops).unwrap();
                    stack.recycle(sum);
                    let announced = buffers((0..slots).map(Run::slot), direct);
                    assert_eq!(stack.free.len(), announced, "{slots} slots, owned: {direct}");
                }
            }
        }
    }
}

//! Activations of one micro-batch: allocated once, used by every step.
use crate::model::{Activations, Model};
use contract::job::Recompute;
use device::{Buf, Dtype, Ops};

/// Everything between the tokens and the loss.
pub struct Workspace {
    /// Input of layer `l` at `x[l]`; the head's input last. `[rows, hidden]` each.
    pub x: Vec<Buf>,
    /// What each layer left for its backward; one for all when layers are recomputed.
    pub saved: Vec<Activations>,
    /// Shared by all layers.
    pub scratch: Activations,
    /// Gradient of the residual stream, `[rows, hidden]`: `f32` in every precision, since every layer adds to it.
    pub dx: Buf,
    /// Loss of each row.
    pub loss: Buf,
    /// The same on the host, where it doesn't lie there.
    pub losses: Buf,
    /// Layers below this one need no backward and keep nothing for it.
    first: usize,
}

/// Lengths of all buffers of a [`Workspace`], for allocation and for the estimate. `first`: the first layer that needs a
/// backward.
pub fn lengths(
    model: &dyn Model,
    layers: usize,
    b: usize,
    t: usize,
    recompute: Recompute,
    first: usize,
) -> (usize, usize, Vec<usize>, Vec<usize>) {
    let saved_sets = match recompute {
        Recompute::None => (layers - first).max(layers.min(1)),
        Recompute::Block => layers.min(1),
    };
    (b * t * model.hidden(), saved_sets, model.saved_lengths(b, t), model.scratch_lengths(b, t))
}

impl Workspace {
    /// For micro-batches of `b` sequences of `t` tokens; `dtype` of all that isn't a statistic.
    pub fn new(
        ops: &dyn Ops,
        model: &dyn Model,
        layers: usize,
        b: usize,
        t: usize,
        recompute: Recompute,
        first: usize,
        dtype: Dtype,
    ) -> Self {
        let (x, sets, saved, scratch) = lengths(model, layers, b, t, recompute, first);
        let statistics = model.statistics();
        Workspace {
            x: (0..=layers).map(|_| ops.zeroed(dtype, x)).collect(),
            saved: (0..sets).map(|_| Activations::new(ops, &saved, dtype, statistics.saved)).collect(),
            scratch: Activations::new(ops, &scratch, dtype, statistics.scratch),
            dx: ops.zeroed(Dtype::F32, x),
            loss: ops.zeroed(Dtype::F32, b * t),
            losses: Buf::default(),
            first,
        }
    }

    /// The saved set of layer `l`. Layers without a backward share one with the first that has one.
    pub fn saved_index(&self, l: usize) -> usize {
        l.saturating_sub(self.first).min(self.saved.len() - 1)
    }

    /// Bytes of all buffers.
    pub fn bytes(
        model: &dyn Model,
        layers: usize,
        b: usize,
        t: usize,
        recompute: Recompute,
        first: usize,
        dtype: Dtype,
    ) -> u64 {
        let (x, sets, saved, scratch) = lengths(model, layers, b, t, recompute, first);
        let statistics = model.statistics();
        let bytes = |lengths: &[usize], statistics: &[usize]| -> usize {
            let size = |i: usize| if statistics.contains(&i) { 4 } else { dtype.size() };
            lengths.iter().enumerate().map(|(i, n)| n * size(i)).sum()
        };
        let stream = x * ((layers + 1) * dtype.size() + 4);
        let kept = sets * bytes(&saved, statistics.saved) + bytes(&scratch, statistics.scratch);
        (stream + kept + 4 * b * t) as u64
    }
}

//! The activation buffers of one micro-batch, allocated once and used by every step.
use crate::model::{Activations, Model};
use contract::job::Recompute;
use device::{Buf, Dtype, Ops};

/// The activations between the tokens and the loss.
pub struct Workspace {
    /// `x[l]` is the input of layer `l`, and the last element is the input of the head; each is
    /// `[rows, hidden]`.
    pub x: Vec<Buf>,
    /// The activations that each layer saves for its backward pass; one set for all layers with
    /// recomputation.
    pub saved: Vec<Activations>,
    /// Scratch memory that all layers share.
    pub scratch: Activations,
    /// The gradient of the residual stream, `[rows, hidden]`, `f32` in every precision because
    /// every layer adds to it.
    pub dx: Buf,
    /// The loss of each row.
    pub loss: Buf,
    /// A host copy of `loss` when the backend is not the host.
    pub losses: Buf,
    /// The first layer with a backward pass; lower layers save no activations.
    first: usize,
}

/// The buffer lengths of a [`Workspace`]: of each element of `x`, the number of saved sets, and the
/// buffers of a saved set and of the scratch memory. `b` sequences of `t` tokens form a
/// micro-batch; `first` is the first layer with a backward pass.
pub fn buffer_lengths(
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
    /// Allocates buffers for micro-batches of `b` sequences of `t` tokens. `dtype` is the type of
    /// all buffers except statistics, which are `f32`.
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
        let (x, sets, saved, scratch) = buffer_lengths(model, layers, b, t, recompute, first);
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

    /// The index of the saved set of layer `l`. Layers without a backward pass share the set of the
    /// first layer that has one.
    pub fn saved_index(&self, l: usize) -> usize {
        l.saturating_sub(self.first).min(self.saved.len() - 1)
    }

    /// The total size of the buffers, bytes.
    pub fn buffer_bytes(
        model: &dyn Model,
        layers: usize,
        b: usize,
        t: usize,
        recompute: Recompute,
        first: usize,
        dtype: Dtype,
    ) -> u64 {
        let (x, sets, saved, scratch) = buffer_lengths(model, layers, b, t, recompute, first);
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

//! [`MicroBatchActivations`]: the activation buffers of one micro-batch, allocated once and used by
//! every step.
use crate::model::{ActivationBuffers, Model};
use contract::job::Recompute;
use device::{Buf, Dtype, Ops};

/// The activations between the tokens and the loss.
pub struct MicroBatchActivations {
    /// `x[l]` is the input of layer `l`, and the last element is the input of the head; each is
    /// `[rows, hidden]`.
    pub layer_inputs: Vec<Buf>,
    /// The activations that each layer saves for its backward pass; one set for all layers with
    /// recomputation.
    pub saved: Vec<ActivationBuffers>,
    /// Scratch memory that all layers share.
    pub scratch: ActivationBuffers,
    /// The gradient of the residual stream, `[rows, hidden]`, `f32` in every precision because
    /// every layer adds to it.
    pub residual_grad: Buf,
    /// The loss of each row.
    pub row_losses: Buf,
    /// A host copy of `loss` when the backend is not the host.
    pub host_losses: Buf,
    /// The first layer with a backward pass; lower layers save no activations.
    first_backward_layer: usize,
}

/// The buffer lengths of a [`MicroBatchActivations`]: of each element of `x`, the number of saved
/// sets, and the buffers of a saved set and of the scratch memory. `b` sequences of `t` tokens form
/// a micro-batch; `first` is the first layer with a backward pass.
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
    (b * t * model.hidden_size(), saved_sets, model.saved_lengths(b, t), model.scratch_lengths(b, t))
}

impl MicroBatchActivations {
    /// Allocates buffers for micro-batches of `b` sequences of `t` tokens. `dtype` is the type of
    /// all buffers except statistics, which are `f32`.
    pub fn new(
        ops: &dyn Ops,
        model: &dyn Model,
        layers: usize,
        b: usize,
        t: usize,
        recompute: Recompute,
        first_backward_layer: usize,
        dtype: Dtype,
    ) -> Self {
        let (x, sets, saved, scratch) = buffer_lengths(model, layers, b, t, recompute, first_backward_layer);
        let statistics = model.f32_buffers();
        MicroBatchActivations {
            layer_inputs: (0..=layers).map(|_| ops.zeroed(dtype, x)).collect(),
            saved: (0..sets).map(|_| ActivationBuffers::new(ops, &saved, dtype, statistics.saved)).collect(),
            scratch: ActivationBuffers::new(ops, &scratch, dtype, statistics.scratch),
            residual_grad: ops.zeroed(Dtype::F32, x),
            row_losses: ops.zeroed(Dtype::F32, b * t),
            host_losses: Buf::default(),
            first_backward_layer,
        }
    }

    /// The index of the saved set of layer `l`. Layers without a backward pass share the set of the
    /// first layer that has one.
    pub fn saved_index(&self, l: usize) -> usize {
        l.saturating_sub(self.first_backward_layer).min(self.saved.len() - 1)
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
        let statistics = model.f32_buffers();
        let bytes = |lengths: &[usize], statistics: &[usize]| -> usize {
            let size = |i: usize| if statistics.contains(&i) { 4 } else { dtype.size() };
            lengths.iter().enumerate().map(|(i, n)| n * size(i)).sum()
        };
        let stream = x * ((layers + 1) * dtype.size() + 4);
        let kept = sets * bytes(&saved, statistics.saved) + bytes(&scratch, statistics.scratch);
        (stream + kept + 4 * b * t) as u64
    }
}

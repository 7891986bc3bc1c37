//! [`MicroBatchActivations`]: the activation buffers of one micro-batch, allocated once and used by
//! every step.
use crate::model::{ActivationBuffers, BufferSpec, Model};
use device::{Buf, Dtype, Ops};
use jobspec::RecomputeMode;

/// The activation buffers of one micro-batch, between the tokens and the loss.
pub struct MicroBatchActivations {
    /// The inputs of the layers, followed by the input of the head. Each is `[rows, hidden]`.
    pub layer_inputs: Vec<Buf>,
    /// The activations that each layer saves for its backward pass. With recomputation, all layers
    /// share one set.
    pub saved: Vec<ActivationBuffers>,
    /// Scratch memory that all layers share.
    pub scratch: ActivationBuffers,
    /// The gradient of the residual stream, `[rows, hidden]`. The gradient is `f32` in every
    /// precision, because every layer adds to it.
    pub residual_grad: Buf,
    /// The loss of each row.
    pub row_losses: Buf,
    /// A host copy of `row_losses` if the backend is not the host.
    pub host_losses: Buf,
    /// The first layer with a backward pass. Lower layers save no activations.
    first_backward_layer: usize,
}

/// Lists the buffers of a [`MicroBatchActivations`].
///
/// The results are the number of elements of each of the `layer_inputs`, the number of saved sets,
/// and the buffers of a saved set and of the scratch memory. A micro-batch has `b` sequences of `t`
/// tokens; `first` is the first layer with a backward pass.
pub fn list_activation_buffers(
    model: &dyn Model,
    layers: usize,
    b: usize,
    t: usize,
    recompute: RecomputeMode,
    first: usize,
) -> (usize, usize, Vec<BufferSpec>, Vec<BufferSpec>) {
    let saved_sets = match recompute {
        RecomputeMode::None => (layers - first).max(layers.min(1)),
        RecomputeMode::Block => layers.min(1),
    };
    (b * t * model.sizes().hidden, saved_sets, model.saved_buffers(b, t), model.scratch_buffers(b, t))
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
        recompute: RecomputeMode,
        first_backward_layer: usize,
        dtype: Dtype,
    ) -> Self {
        let (x, sets, saved, scratch) =
            list_activation_buffers(model, layers, b, t, recompute, first_backward_layer);
        MicroBatchActivations {
            layer_inputs: (0..=layers).map(|_| ops.zeroed_for("activations", dtype, x)).collect(),
            saved: (0..sets).map(|_| ActivationBuffers::new(ops, &saved, dtype)).collect(),
            scratch: ActivationBuffers::new(ops, &scratch, dtype),
            residual_grad: ops.zeroed_for("activations", Dtype::F32, x),
            row_losses: ops.zeroed_for("activations", Dtype::F32, b * t),
            host_losses: Buf::default(),
            first_backward_layer,
        }
    }

    /// Returns the index of the saved set of layer `l`. Layers without a backward pass share the
    /// set of the first layer that has one.
    pub fn select_saved_set(&self, l: usize) -> usize {
        l.saturating_sub(self.first_backward_layer).min(self.saved.len() - 1)
    }

    /// Computes the total size of the buffers in bytes, for the memory estimate.
    pub fn count_activation_bytes(
        model: &dyn Model,
        layers: usize,
        b: usize,
        t: usize,
        recompute: RecomputeMode,
        first: usize,
        dtype: Dtype,
    ) -> u64 {
        let (x, sets, saved, scratch) = list_activation_buffers(model, layers, b, t, recompute, first);
        let bytes = |buffers: &[BufferSpec]| -> usize { buffers.iter().map(|b| b.count_bytes(dtype)).sum() };
        let stream = x * ((layers + 1) * dtype.size() + 4);
        (stream + sets * bytes(&saved) + bytes(&scratch) + 4 * b * t) as u64
    }
}

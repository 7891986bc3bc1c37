//! [`MicroBatchActivations`]: the activation buffers of one micro-batch, which every step reuses.
//! [`ActivationPlan`] has their number and sizes.
use crate::{
    model::{ActivationBuffers, BufferSpec, LayerBuffers, Model},
    param_groups::find_first_backward_layer,
    params::ParamUnit,
    zero::param_dtypes::ParamDtypes,
};
use device::{Buf, Dtype, Ops, View, ViewMut, storage::Event};
use jobspec::{RecomputeMode, TrainSpec};

/// Which activation buffers a rank allocates for one micro-batch: their number and sizes, by the
/// model and the job's `train` section.
pub struct ActivationPlan {
    /// The type of all buffers except statistics, which are `f32`.
    dtype: Dtype,
    /// The number of tokens of a micro-batch.
    rows: usize,
    /// The number of elements of the residual stream of a micro-batch.
    stream_len: usize,
    layers: usize,
    /// The number of sets of buffers in which layers save activations for their backward pass.
    saved_sets: usize,
    saved: Vec<BufferSpec>,
    scratch: Vec<BufferSpec>,
    first_backward_layer: usize,
}

impl ActivationPlan {
    /// Plans the activation buffers that a rank needs for the model and the job's `train` section.
    /// `units` are the units of the model with the trained parameters marked.
    pub fn new(model: &Model, train: &TrainSpec, units: &[ParamUnit]) -> Self {
        let (b, t) = (train.batch.micro as usize, train.data.seq_len as usize);
        let (sizes, first_backward_layer) = (model.sizes(), find_first_backward_layer(units));
        let saved_sets = match train.recompute {
            RecomputeMode::None => (sizes.layers - first_backward_layer).max(sizes.layers.min(1)),
            RecomputeMode::Block => sizes.layers.min(1),
        };
        ActivationPlan {
            dtype: ParamDtypes::for_job(train).compute,
            rows: b * t,
            stream_len: b * t * sizes.hidden,
            layers: sizes.layers,
            saved_sets,
            saved: model.declare_saved_buffers(b, t),
            scratch: model.declare_scratch_buffers(b, t),
            first_backward_layer,
        }
    }

    /// Computes the total size of the activation buffers in bytes, for the memory estimate.
    pub fn count_bytes(&self) -> u64 {
        let bytes =
            |buffers: &[BufferSpec]| -> usize { buffers.iter().map(|b| b.count_bytes(self.dtype)).sum() };
        let stream = self.stream_len * ((self.layers + 1) * self.dtype.size() + 4);
        (stream + self.saved_sets * bytes(&self.saved) + bytes(&self.scratch) + 4 * self.rows) as u64
    }
}

/// All activation buffers of one micro-batch, from the tokens to the loss.
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
    /// Host copies of `row_losses`, one for each micro-batch of this rank.
    pub host_losses: Buf,
    /// An event after which `row_losses` may be overwritten and the copies are complete.
    pub losses_copied: Event,
    /// The first layer with a backward pass. Lower layers save no activations.
    first_backward_layer: usize,
}

/// The activation buffers of one layer, which its forward pass writes and its backward pass reads.
pub struct LayerActivations<'a> {
    /// The input of the layer, `[rows, hidden]`.
    pub x: View<'a>,
    /// The output of the layer, `[rows, hidden]`.
    pub y: ViewMut<'a>,
    /// The gradient of the residual stream, `[rows, hidden]`.
    pub residual_grad: ViewMut<'a>,
    /// The saved and scratch buffers of the layer.
    pub buffers: LayerBuffers<'a>,
}

impl MicroBatchActivations {
    /// Allocates the activation buffers that `plan` lists.
    pub fn new(ops: &dyn Ops, plan: &ActivationPlan) -> Self {
        let allocate = |dtype, len| ops.zeroed_with_purpose("activations", dtype, len);
        let set = |specs: &[BufferSpec]| ActivationBuffers::new(ops, specs, plan.dtype);
        MicroBatchActivations {
            layer_inputs: (0..=plan.layers).map(|_| allocate(plan.dtype, plan.stream_len)).collect(),
            saved: (0..plan.saved_sets).map(|_| set(&plan.saved)).collect(),
            scratch: set(&plan.scratch),
            residual_grad: allocate(Dtype::F32, plan.stream_len),
            row_losses: allocate(Dtype::F32, plan.rows),
            host_losses: Buf::default(),
            losses_copied: Event::default(),
            first_backward_layer: plan.first_backward_layer,
        }
    }

    /// Returns the activation buffers for layer number `l`, of which several layers share some if
    /// activations are recomputed. Layers without a backward pass share the saved buffers of the
    /// first layer that has one.
    pub fn select_layer_buffers(&mut self, l: usize) -> LayerActivations<'_> {
        let set = l.saturating_sub(self.first_backward_layer).min(self.saved.len() - 1);
        let (before, after) = self.layer_inputs.split_at_mut(l + 1);
        LayerActivations {
            x: before[l].view(),
            y: after[0].view_mut(),
            residual_grad: self.residual_grad.view_mut(),
            buffers: LayerBuffers { saved: &mut self.saved[set], scratch: &mut self.scratch },
        }
    }
}

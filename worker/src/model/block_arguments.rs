//! The inputs and outputs of a model's blocks, which are the embedding, the layers and the head.
//!
//! Shapes: `rows` is the number of tokens of the micro-batch, `hidden` the width of the residual
//! stream.
use super::{activation_buffers::ActivationBuffers, micro_batch::MicroBatch};
use device::{Ops, View, ViewMut};

/// What the forward and the backward pass of a decoder layer read: the parameters, the micro-batch
/// and the layer's input.
pub struct LayerInput<'a> {
    /// The compute backend.
    pub ops: &'a dyn Ops,
    /// The parameters of the layer's unit, as one flat vector.
    pub params: View<'a>,
    /// The micro-batch for which the layer is computed.
    pub batch: &'a MicroBatch,
    /// The residual stream before the layer, `[rows, hidden]`.
    pub x: View<'a>,
    /// The number of the layer, from 0.
    pub layer: usize,
}

/// The buffers of a layer's forward and backward pass: values saved between the two passes, and
/// scratch memory.
pub struct LayerBuffers<'a> {
    /// The values that the layer's forward pass saves for its backward pass.
    pub saved: &'a mut ActivationBuffers,
    /// The scratch memory that all blocks share.
    pub scratch: &'a mut ActivationBuffers,
}

/// What the model's head (last norm and output layer) reads to compute logits or the loss: its
/// parameters, and the output of the last layer.
pub struct HeadInput<'a> {
    /// The compute backend.
    pub ops: &'a dyn Ops,
    /// The parameters of the head's unit, as one flat vector.
    pub params: View<'a>,
    /// The parameters of the embedding unit, as one flat vector. `None` if the model has no tied
    /// embeddings.
    pub embedding: Option<View<'a>>,
    /// The residual stream after the last layer, `[rows, hidden]`.
    pub x: View<'a>,
}

/// The buffers to which the backward pass of the model's head (last norm and output layer) writes
/// its gradients. The backward pass overwrites all buffers.
pub struct HeadGrads<'a> {
    /// The gradient of the head's input, `[rows, hidden]`.
    pub dx: ViewMut<'a>,
    /// The gradient of the parameters of the head's unit, as one flat vector.
    pub head: ViewMut<'a>,
    /// The gradient of the parameters of the embedding unit, as one flat vector. `None` if the
    /// model has no tied embeddings or the embedding is frozen.
    pub embedding: Option<ViewMut<'a>>,
    /// The factor by which the gradients of the logits are multiplied.
    pub scale: f32,
}

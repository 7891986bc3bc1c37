//! [`Blocks`]: the forward and backward pass of each block of a model: embedding, layers, head.
use super::{
    activation_buffers::{ActivationBuffers, BufferSpec},
    micro_batch::MicroBatch,
};
use device::{Ops, View, ViewMut};

/// The input of a layer's forward pass, which the backward pass receives, too.
pub struct LayerInput<'a> {
    /// The flat vector of the parameters of the layer's unit.
    pub params: View<'a>,
    /// The micro-batch of which the layer is computed.
    pub batch: &'a MicroBatch,
    /// The residual stream before the layer, `[rows, hidden]`.
    pub x: View<'a>,
    /// The number of the layer, from 0.
    pub layer: usize,
}

/// The parameters that the head uses.
pub struct HeadParams<'a> {
    /// The flat vector of the parameters of the head's unit.
    pub head: View<'a>,
    /// The flat vector of the parameters of the embedding unit. `None` if the model has no tied
    /// embeddings.
    pub embedding: Option<View<'a>>,
}

/// The output buffers of the head's backward pass. The backward pass overwrites all buffers.
pub struct HeadGrads<'a> {
    /// The gradient of the head's input, `[rows, hidden]`.
    pub dx: ViewMut<'a>,
    /// The flat vector of the gradient of the head's unit.
    pub head: ViewMut<'a>,
    /// The flat vector of the gradient of the embedding unit. `None` if the model has no tied
    /// embeddings or the embedding is frozen.
    pub embedding: Option<ViewMut<'a>>,
    /// The factor by which the gradients of the logits are multiplied.
    pub scale: f32,
}

/// The forward and backward pass of each block of a model.
///
/// Shapes: `rows` is the number of tokens of the micro-batch, `hidden` the width of the residual
/// stream.
pub trait Blocks {
    /// Declares the buffers in which a layer's forward pass saves values for its backward pass. The
    /// micro-batch has `b` sequences of `t` tokens.
    fn saved_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec>;
    /// Declares the scratch buffers that all blocks share. The micro-batch has `b` sequences of `t`
    /// tokens.
    fn scratch_buffers(&self, b: usize, t: usize) -> Vec<BufferSpec>;
    /// Moves constants, such as the tables of rotary embedding, to the device of `ops`.
    fn move_to_device(&mut self, _ops: &dyn Ops) {}

    /// Computes the embedding of each token and writes it to `x`, `[rows, hidden]`. `params` is the
    /// flat vector of the embedding unit.
    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, x: ViewMut);
    /// Adds the gradient of the embedding to `grads`, the flat gradient of the embedding unit.
    /// `dx`, `[rows, hidden]`, is the gradient of the embedding's output. Leaves unspecified values
    /// in `dx`.
    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, dx: ViewMut);

    /// Computes a layer. Writes the output to `y`, `[rows, hidden]`, and values for the backward
    /// pass to `saved`. If `y` is `None`, computes only the saved values (recomputation).
    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    );
    /// Computes the gradients of a layer. `dx`, `[rows, hidden]`, is the gradient of the layer's
    /// output on entry and of its input on return. Overwrites `grads`, the gradient of the layer's
    /// unit.
    fn layer_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    );

    /// Computes the logits `out`, `[vocab]`, of one row `x`, `[hidden]`, of the head's input.
    fn compute_logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        out: ViewMut,
        scratch: &mut ActivationBuffers,
    );

    /// Computes the cross-entropy `loss`, `[rows]`, from the head's input `x`, `[rows, hidden]`.
    /// Also computes the backward pass if `grads` are given.
    fn compute_head_loss(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &MicroBatch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    );
}

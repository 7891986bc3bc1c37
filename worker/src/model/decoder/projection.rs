//! [`Projection`]: the backward pass of a matrix of a decoder layer and of the matrix's adapters.
use super::DecoderModel;
use crate::model::{LayerInput, linear_precision::MatmulSizes, lora::LoraScratchBuffers};
use device::{Ops, View, ViewMut};
use std::ops::Range;

/// A matrix of a decoder layer by which rows are multiplied, such as those of q, k and v together.
pub(super) struct Projection {
    /// The range of the matrix in the flat vector of the layer.
    pub(super) weight: Range<usize>,
    /// Whether the gradient of the matrix is computed.
    pub(super) needs_grad: bool,
    /// The index of the matrix's adapters in [`crate::model::lora::LayerAdapters`].
    pub(super) adapters: usize,
    /// The sizes of the matmul.
    pub(super) sizes: MatmulSizes,
}

impl DecoderModel {
    /// Computes the gradients of a matmul with `projection` and of the matrix's adapters.
    /// `input_and_dy` is the input of the matmul and the gradient of its output. Writes the
    /// parameter gradients to `g`, the gradient of the layer's unit, and the gradient of the
    /// matmul's input to `dx`.
    pub(super) fn projection_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        projection: Projection,
        g: &mut ViewMut,
        mut dx: ViewMut,
        input_and_dy: (View, View),
        scratch: &mut LoraScratchBuffers,
    ) {
        let Projection { weight, needs_grad, adapters, sizes } = projection;
        let (x, dy) = input_and_dy;
        if needs_grad {
            self.linear.backward_weight(ops, g.slice_mut(weight.clone()), dy, x, sizes);
        }
        self.linear.backward_input(ops, dx.reborrow(), dy, input.params.slice(weight), sizes);
        self.adapters_backward_weight(ops, input, adapters, g, input_and_dy, scratch);
        self.adapters_backward_input(ops, input, adapters, dx, scratch);
    }
}

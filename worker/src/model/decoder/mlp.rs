//! Forward and backward pass of the MLP half of a decoder layer without experts, from the output of
//! attention to the output of the layer.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    decoder_config::Activation,
    model::Model,
};
use crate::model::block_arguments::{LayerBuffers, LayerInput};
use device::{View, ViewMut};

impl Model {
    /// Computes the activation function of the MLP from `gate_up`, the outputs of its first matmul,
    /// and writes the result to `act`, `[rows, intermediate]`.
    fn mlp_activation_forward(&self, input: &LayerInput, act: ViewMut, gate_up: View) {
        let (ops, m, f) = (input.ops, input.batch.row_count(), self.config.intermediate_size);
        match self.config.activation {
            Activation::Swiglu => ops.swiglu_forward(act, gate_up, m, f),
            Activation::Geglu => ops.geglu_forward(act, gate_up, m, f),
            Activation::Gelu => ops.gelu_forward(act, gate_up),
        }
    }

    /// Computes the backward pass of the MLP's activation function, and writes the gradients of its
    /// inputs (gate and up) to `dgate_up`. `dact` is the gradient of the activation on entry, and
    /// the activation itself on return.
    fn mlp_activation_backward(&self, input: &LayerInput, dgate_up: ViewMut, dact: ViewMut, gate_up: View) {
        let (ops, m, f) = (input.ops, input.batch.row_count(), self.config.intermediate_size);
        match self.config.activation {
            Activation::Swiglu => ops.swiglu_backward(dgate_up, dact, gate_up, m, f),
            Activation::Geglu => ops.geglu_backward(dgate_up, dact, gate_up, m, f),
            Activation::Gelu => ops.gelu_backward(dgate_up, dact, gate_up),
        }
    }

    /// Computes the forward pass of a layer's second half from the projected output of attention:
    /// residual addition, norm, MLP and residual addition. Writes the layer's output to `y`. If `y`
    /// is `None`, computes only the saved values.
    pub(super) fn mlp_half_forward(
        &self,
        input: &LayerInput,
        y: Option<ViewMut>,
        buffers: &mut LayerBuffers,
    ) {
        let (ops, s) = (input.ops, &self.spans);
        let SavedBuffers { residual, mlp_in_stats, gate_up, mlp_out, mlp_out_stats, .. } =
            buffers.saved.borrow_as_struct_mut();
        let ScratchBuffers { norm, act, norm_factors, mut lora, .. } = buffers.scratch.borrow_as_struct_mut();
        let norm_in = self.create_input_norm(input, s.mlp_in_norm.as_ref(), norm_factors);
        let x = norm_in.add_and_norm_forward(residual, input.x, norm, mlp_in_stats);
        let up = self.linears.select_linear(input, &s.gate_up);
        let needs_activation = y.is_some() || s.mlp_out_norm.is_some();
        let has_gelu = needs_activation && self.config.activation == Activation::Gelu;
        if !has_gelu || !up.forward_with_gelu(x, gate_up.view_mut(), act.view_mut()) {
            up.forward(x, gate_up.view_mut(), &mut lora);
            if !needs_activation {
                return;
            }
            self.mlp_activation_forward(input, act.view_mut(), gate_up.view());
        }
        let down = self.linears.select_linear(input, &s.down);
        let Some(norm_out) = self.create_norm_if_present(input, s.mlp_out_norm.as_ref(), norm_factors) else {
            if let Some(mut y) = y {
                down.forward(act.view(), y.reborrow(), &mut lora);
                let dropout = &self.layer_dropout[input.layer].mlp_out;
                dropout.apply_dropout(ops, input.batch, self.config.sizes.hidden, y.reborrow());
                ops.add(y, residual.view());
            }
            return;
        };
        down.forward(act.view(), mlp_out.view_mut(), &mut lora);
        // Without `y`, the backward pass needs only the statistics; the normalized rows are
        // discarded.
        let (is_recomputation, mut y) = (y.is_none(), y.unwrap_or_else(|| norm.view_mut()));
        norm_out.forward(y.reborrow(), mlp_out_stats.view_mut(), mlp_out.view());
        if !is_recomputation {
            ops.add(y, residual.view());
        }
    }

    /// Computes the backward pass of the MLP half of a layer: the gradients of its parameters, and
    /// that of the residual stream after attention. Writes the parameter gradients to `g`, the
    /// gradient of the layer's unit. `dx` is the gradient of the layer's output on entry, and of
    /// the residual stream after attention on return.
    pub(super) fn mlp_half_backward(
        &self,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        buffers: &mut LayerBuffers,
    ) {
        let s = &self.spans;
        let SavedBuffers { residual, mlp_in_stats, gate_up, mlp_out, mlp_out_stats, .. } =
            buffers.saved.borrow_as_struct_mut();
        let ScratchBuffers { norm, dnorm, act, dgate_up, norm_factors, mut lora, .. } =
            buffers.scratch.borrow_as_struct_mut();
        let (up, down) =
            (self.linears.select_linear(input, &s.gate_up), self.linears.select_linear(input, &s.down));
        let branch = (s.mlp_out_norm.as_ref(), &self.layer_dropout[input.layer].mlp_out);
        let out = (mlp_out.view(), mlp_out_stats.view());
        let dout = self.branch_output_backward(input, branch, g, dx.as_view(), norm, out, norm_factors);
        down.backward_bias(g, dout);
        let dout = self.linears.format.round_gradient(input.ops, dout, dnorm);
        if self.linears.has_adapters() {
            self.mlp_activation_forward(input, act.view_mut(), gate_up.view());
            down.backward_adapters(g, (act.view(), dout), &mut lora);
        }
        let (dpre, y, pre) = (dgate_up.view_mut(), act.view_mut(), gate_up.view());
        let has_gelu = self.config.activation == Activation::Gelu;
        if !has_gelu || !down.backward_input_through_gelu(dpre, y, dout, pre) {
            down.backward_input(act.view_mut(), dout, &mut lora);
            self.mlp_activation_backward(input, dgate_up.view_mut(), act.view_mut(), gate_up.view());
        }
        down.backward_weight(g, (act.view(), dout));
        up.backward_bias(g, dgate_up.view());
        let norm_in = self.create_input_norm(input, s.mlp_in_norm.as_ref(), norm_factors);
        let x = norm_in.forward(residual.view(), norm, mlp_in_stats);
        up.backward(g, dnorm.view_mut(), (x, dgate_up.view()), &mut lora);
        norm_in.backward(g, dx, dnorm.view(), (residual.view(), mlp_in_stats.view()));
    }
}

//! Forward and backward pass of the second half of a dense decoder layer: residual addition, norm,
//! SwiGLU or GeGLU (Shazeer 2020), norm of the output, residual addition.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    decoder_model::DecoderModel,
};
use crate::model::{activation_buffers::ActivationBuffers, blocks::LayerInput, lora::LoraScratch};
use device::{Buf, Ops, View, ViewMut};

impl DecoderModel {
    /// Adds the layer's input to the projected output of attention, and computes the MLP. Writes
    /// the layer's output to `y`. If `y` is `None`, computes only the saved values.
    pub(super) fn mlp_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let SavedBuffers { residual, mlp_in_rstd, gate_up, mlp_out, mlp_out_rstd, .. } =
            saved.borrow_set_mut();
        let ScratchBuffers { norm, act, norm_factors, mut lora, .. } = scratch.borrow_set_mut();
        let norm_in = self.prepare_norm(ops, p, s.mlp_in_norm.as_ref(), norm_factors);
        let x = self.add_input_norm_forward(ops, norm_in.as_ref(), input, residual, norm, mlp_in_rstd);
        self.linears.forward(ops, input, &s.gate_up, x, gate_up.view_mut(), &mut lora);
        if y.is_none() && s.mlp_out_norm.is_none() {
            return;
        }
        self.gate_forward(ops, act.view_mut(), gate_up.view(), m);
        let Some(norm_out) = self.prepare_norm(ops, p, s.mlp_out_norm.as_ref(), norm_factors) else {
            if let Some(mut y) = y {
                self.linears.forward(ops, input, &s.down, act.view(), y.reborrow(), &mut lora);
                ops.add(y, residual.view());
            }
            return;
        };
        self.linears.forward(ops, input, &s.down, act.view(), mlp_out.view_mut(), &mut lora);
        // Without `y`, the backward pass needs only the 1/rms; the normalized rows are discarded.
        let (is_recomputation, mut y) = (y.is_none(), y.unwrap_or_else(|| norm.view_mut()));
        let (d, eps, rstd) = (self.config.sizes.hidden, self.config.norm_eps, mlp_out_rstd.view_mut());
        ops.rmsnorm_forward(y.reborrow(), rstd, mlp_out.view(), norm_out.factors, m, d, eps);
        if !is_recomputation {
            ops.add(y, residual.view());
        }
    }

    /// Computes the gated activation `act`, `[m, intermediate]`, from gate and up.
    fn gate_forward(&self, ops: &dyn Ops, act: ViewMut, gate_up: View, m: usize) {
        match self.config.uses_gelu {
            true => ops.geglu_forward(act, gate_up, m, self.config.intermediate_size),
            false => ops.swiglu_forward(act, gate_up, m, self.config.intermediate_size),
        }
    }

    /// Computes the gradients of gate and up. `dact` is the gradient of the gated activation on
    /// entry, and the gated activation itself on return.
    fn gate_backward(&self, ops: &dyn Ops, dgate_up: ViewMut, dact: ViewMut, gate_up: View, m: usize) {
        match self.config.uses_gelu {
            true => ops.geglu_backward(dgate_up, dact, gate_up, m, self.config.intermediate_size),
            false => ops.swiglu_backward(dgate_up, dact, gate_up, m, self.config.intermediate_size),
        }
    }

    /// Computes the gradients of the MLP. Writes the parameter gradients to `g`, the gradient of
    /// the layer's unit. `dx` is the gradient of the layer's output on entry, and of the residual
    /// stream after attention on return.
    pub(super) fn mlp_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s) = (input.params, &self.spans);
        let SavedBuffers { residual, mlp_in_rstd, gate_up, mlp_out, mlp_out_rstd, .. } =
            saved.borrow_set_mut();
        let ScratchBuffers { norm, dnorm, act, dgate_up, norm_factors, mut lora, .. } =
            scratch.borrow_set_mut();
        let (span, out) = (s.mlp_out_norm.as_ref(), (mlp_out.view(), mlp_out_rstd.view()));
        let dout = self.output_norm_backward(ops, input, span, g, dx.as_view(), norm, out, norm_factors);
        self.linears.backward_bias(ops, input, &s.down, g, dout);
        let dout = self.linears.format.round_gradient(ops, dout, dnorm);
        self.down_backward(ops, input, g, dout, gate_up.view(), act, dgate_up, &mut lora);
        self.linears.backward_bias(ops, input, &s.gate_up, g, dgate_up.view());
        let norm_in = self.prepare_norm(ops, p, s.mlp_in_norm.as_ref(), norm_factors);
        let x = self.input_norm_forward(ops, norm_in.as_ref(), residual.view(), norm, mlp_in_rstd);
        let xy = (x, dgate_up.view());
        self.linears.backward(ops, input, &s.gate_up, g, dnorm.view_mut(), xy, &mut lora);
        let x = (residual.view(), mlp_in_rstd.view());
        self.input_norm_backward(ops, norm_in.as_ref(), g, dnorm.view(), x, dx);
    }

    /// Computes the gradients of the down projection and of the gated activation. `dout` is the
    /// gradient of the projection's output. Writes the parameter gradients to `g`, the gradient of
    /// the layer's unit, and the gradients of gate and up to `dgate_up`. On return, `act` contains
    /// the gated activation itself.
    fn down_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dout: View,
        gate_up: View,
        act: &mut Buf,
        dgate_up: &mut Buf,
        lora: &mut LoraScratch,
    ) {
        let (m, down) = (input.batch.rows(), &self.spans.down);
        if self.linears.has_adapters() {
            self.gate_forward(ops, act.view_mut(), gate_up, m);
            self.linears.backward_adapters(ops, input, down, g, (act.view(), dout), lora);
        }
        self.linears.backward_input(ops, input, down, act.view_mut(), dout, lora);
        self.gate_backward(ops, dgate_up.view_mut(), act.view_mut(), gate_up, m);
        self.linears.backward_weight(ops, input, down, g, (act.view(), dout));
    }
}

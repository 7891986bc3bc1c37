//! Forward and backward pass of the second half of a dense decoder layer: residual addition, norm,
//! SwiGLU or GeGLU (Shazeer 2020), residual addition.
use super::{
    DecoderModel,
    layer_adapters::{DOWN_ADAPTERS, GATE_UP_ADAPTERS},
    projection::Projection,
};
use crate::model::{ActivationBuffers, LayerInput, borrow_first_buffers, lora::LoraScratchBuffers};
use device::{Buf, Ops, View, ViewMut, ops::WriteMode};

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
        let (p, s) = (input.params, &self.spans);
        let (m, d, f) = (input.batch.rows(), self.config.hidden_size, self.config.intermediate_size);
        let [_, _, _, _, mid, rstd2, gate_up, _, _, _, _, branch, branch_rstd] =
            borrow_first_buffers::<13>(saved);
        let [norm, _, act, _, _, _, norm_buffer, _, _, lora_scratch @ ..] =
            borrow_first_buffers::<14>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        let (w_post, eps) =
            (self.compute_norm_factors(ops, p.slice(s.post_norm.clone()), norm_buffer), self.config.norm_eps);
        let x = input.x;
        ops.add_rmsnorm_forward(norm.view_mut(), rstd2.view_mut(), mid.view_mut(), x, w_post, m, d, eps);
        let w_gate_up = p.slice(s.gate_up.clone());
        let bias = s.gate_up_bias.clone().map(|b| p.slice(b));
        self.linear.forward(ops, gate_up.view_mut(), norm.view(), w_gate_up, bias, (m, d, 2 * f));
        self.adapters_forward(
            ops,
            input,
            GATE_UP_ADAPTERS,
            norm.view(),
            gate_up.view_mut(),
            &mut lora_scratch,
        );
        if y.is_none() && s.mlp_out_norm.is_none() {
            return;
        }
        self.gate_forward(ops, act.view_mut(), gate_up.view(), m);
        let mut down = |mut out: ViewMut| {
            let (w_down, bias) = (p.slice(s.down.clone()), s.down_bias.clone().map(|b| p.slice(b)));
            self.linear.forward(ops, out.reborrow(), act.view(), w_down, bias, (m, f, d));
            self.adapters_forward(ops, input, DOWN_ADAPTERS, act.view(), out, &mut lora_scratch);
        };
        if s.mlp_out_norm.is_some() {
            down(branch.view_mut());
        }
        let Some(mut y) = y else {
            // The backward pass needs the 1/rms of the output; the normalized rows are discarded.
            if let Some(at) = &s.mlp_out_norm {
                let (w, rstd) = (
                    self.compute_norm_factors(ops, p.slice(at.clone()), norm_buffer),
                    branch_rstd.view_mut(),
                );
                ops.rmsnorm_forward(norm.view_mut(), rstd, branch.view(), w, m, d, eps);
            }
            return;
        };
        match &s.mlp_out_norm {
            None => down(y.reborrow()),
            Some(at) => {
                let (w, rstd) = (
                    self.compute_norm_factors(ops, p.slice(at.clone()), norm_buffer),
                    branch_rstd.view_mut(),
                );
                ops.rmsnorm_forward(y.reborrow(), rstd, branch.view(), w, m, d, eps);
            }
        }
        ops.add(y, mid.view());
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
        let (m, d, f) = (input.batch.rows(), self.config.hidden_size, self.config.intermediate_size);
        let [_, _, _, _, mid, rstd2, gate_up, _, _, _, _, branch, branch_rstd] =
            borrow_first_buffers::<13>(saved);
        let [norm, dnorm, act, dgate_up, _, _, norm_buffer, _, _, lora_scratch @ ..] =
            borrow_first_buffers::<14>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        let (at, branch) = (s.mlp_out_norm.as_ref(), (branch.view(), branch_rstd.view()));
        let dout = self.output_norm_backward(ops, input, at, g, dx.as_view(), norm, branch, norm_buffer);
        if let Some(bias) = &s.down_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dout, m, d);
        }
        let dout = self.linear.round_gradient(ops, dout, dnorm);
        self.down_backward(ops, input, g, dout, gate_up.view(), act, dgate_up, &mut lora_scratch);
        if let Some(bias) = &s.gate_up_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dgate_up.view(), m, 2 * f);
        }
        let w_post = self.compute_norm_factors(ops, p.slice(s.post_norm.clone()), norm_buffer);
        ops.rmsnorm_forward(
            norm.view_mut(),
            rstd2.view_mut(),
            mid.view(),
            w_post,
            m,
            d,
            self.config.norm_eps,
        );
        let projection = Projection {
            weight: s.gate_up.clone(),
            needs_grad: self.grad_masks[input.layer].gate_up,
            adapters: GATE_UP_ADAPTERS,
            sizes: (m, d, 2 * f),
        };
        let x_and_dy = (norm.view(), dgate_up.view());
        self.projection_backward(ops, input, projection, g, dnorm.view_mut(), x_and_dy, &mut lora_scratch);
        let dw_post = g.slice_mut(s.post_norm.clone());
        ops.rmsnorm_backward(
            dx,
            dw_post,
            dnorm.view(),
            mid.view(),
            w_post,
            rstd2.view(),
            m,
            d,
            WriteMode::Accumulate,
        );
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
        lora_scratch: &mut LoraScratchBuffers,
    ) {
        let (s, m) = (&self.spans, input.batch.rows());
        let sizes = (m, self.config.intermediate_size, self.config.hidden_size);
        if self.has_adapters(input.layer) {
            self.gate_forward(ops, act.view_mut(), gate_up, m);
            let act_and_dout = (act.view(), dout);
            self.adapters_backward_weight(ops, input, DOWN_ADAPTERS, g, act_and_dout, lora_scratch);
        }
        let w_down = input.params.slice(s.down.clone());
        self.linear.backward_input(ops, act.view_mut(), dout, w_down, sizes);
        self.adapters_backward_input(ops, input, DOWN_ADAPTERS, act.view_mut(), lora_scratch);
        self.gate_backward(ops, dgate_up.view_mut(), act.view_mut(), gate_up, m);
        if self.grad_masks[input.layer].down {
            let dw_down = g.slice_mut(s.down.clone());
            self.linear.backward_weight(ops, dw_down, dout, act.view(), sizes);
        }
    }
}

//! [`MoeModel`] of a [`DecoderModel`], for the second half of a decoder layer with experts:
//! residual addition, norm and router, and the weighted sum of the experts' outputs. The formulas
//! are those of `MixtralSparseMoeBlock` and `Qwen3MoeSparseMoeBlock` of transformers.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    decoder_model::DecoderModel,
    decoder_moe_config::DecoderMoeConfig,
};
use crate::model::{
    activation_buffers::ActivationBuffers,
    blocks::LayerInput,
    moe::{ExpertOutputGrads, ExpertShape, MoeModel, RouterLossCoefficients, RouterOutput},
};
use crate::params::{ParamInit, ParamSpec};
use device::{Ops, View, ViewMut, ops::WriteMode};

impl DecoderModel {
    /// Returns the configuration of the model's experts.
    ///
    /// # Panics
    ///
    /// Panics if the model is dense.
    fn moe_config(&self) -> &DecoderMoeConfig {
        self.config.moe.as_ref().expect("`MoeModel` is only used with experts")
    }
}

impl MoeModel for DecoderModel {
    fn expert_shape(&self) -> ExpertShape {
        self.moe_config().shape
    }

    fn is_moe_layer(&self, layer: usize) -> bool {
        self.config.is_moe_layer(layer)
    }

    fn router_loss_coefficients(&self) -> RouterLossCoefficients {
        self.moe_config().losses
    }

    fn expert_params(&self, layer: usize, expert: usize) -> Vec<ParamSpec> {
        let DecoderMoeConfig { shape: s, names, .. } = self.moe_config();
        let [gate, up, down] = names.matrices;
        let tensor = |name: &str, shape: Vec<usize>| ParamSpec {
            name: format!("model.layers.{layer}.{}.experts.{expert}.{name}.weight", names.block),
            shape,
            init: ParamInit::Normal(self.config.init_std),
        };
        let input_shape = vec![s.intermediate, s.hidden];
        vec![
            tensor(gate, input_shape.clone()),
            tensor(up, input_shape),
            tensor(down, vec![s.hidden, s.intermediate]),
        ]
    }

    fn route_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        routing: &mut RouterOutput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        self.attention_forward(ops, input, saved, scratch);
        let (p, m, d, shape) =
            (input.params, input.batch.rows(), self.config.sizes.hidden, self.expert_shape());
        let SavedBuffers { residual, mlp_in_rstd, .. } = saved.borrow_set_mut();
        let ScratchBuffers { norm, norm_factors, router_logits, .. } = scratch.borrow_set_mut();
        let norm_in = self.prepare_norm(ops, p, self.spans.mlp_in_norm.as_ref(), norm_factors);
        let x = self.add_input_norm_forward(ops, norm_in.as_ref(), input, residual, norm, mlp_in_rstd);
        let w = p.slice(self.router_span());
        ops.matmul_forward(router_logits.view_mut(), x, w, m, shape.experts, d, WriteMode::Overwrite);
        routing.router_forward(ops, router_logits.view(), shape);
    }

    fn normed_rows<'a>(&self, scratch: &'a ActivationBuffers) -> View<'a> {
        let ScratchBuffers { norm, .. } = scratch.borrow_set();
        norm.view()
    }

    fn combine_forward(
        &self,
        ops: &dyn Ops,
        mut y: ViewMut,
        rows: View,
        choice_rows: &[u32],
        routing: &RouterOutput,
        saved: &mut ActivationBuffers,
    ) {
        let SavedBuffers { residual, .. } = saved.borrow_set();
        let d = self.config.sizes.hidden;
        let (m, weights) = (y.len() / d, Some(routing.weights.view()));
        ops.combine_rows(y.reborrow(), rows, weights, choice_rows, m, d, WriteMode::Overwrite);
        ops.add(y, residual.view());
    }

    fn route_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        mut dx: ViewMut,
        expert_grads: &ExpertOutputGrads,
        routing: &RouterOutput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, m, d, shape) =
            (input.params, input.batch.rows(), self.config.sizes.hidden, self.expert_shape());
        let (mut g, router) = (grads, self.router_span());
        for span in self.spans.list_accumulated_spans().filter(|s| s.end <= router.start) {
            ops.clear(g.slice_mut(span));
        }
        let SavedBuffers { residual, mlp_in_rstd, .. } = saved.borrow_set_mut();
        let ScratchBuffers { norm, dnorm, norm_factors, router_logits: dlogits, .. } =
            scratch.borrow_set_mut();
        let (rows, choices) = (expert_grads.rows, expert_grads.choice_rows);
        ops.combine_rows(dnorm.view_mut(), rows, None, choices, m, d, WriteMode::Overwrite);
        routing.router_backward(ops, dlogits.view_mut(), expert_grads, shape);
        let norm_in = self.prepare_norm(ops, p, self.spans.mlp_in_norm.as_ref(), norm_factors);
        let x = self.input_norm_forward(ops, norm_in.as_ref(), residual.view(), norm, mlp_in_rstd);
        let (experts, dlogits) = (shape.experts, dlogits.view());
        if self.needs_router_grad[input.layer] {
            let dw = g.slice_mut(router.clone());
            ops.matmul_backward_weight(dw, dlogits, x, m, experts, d, WriteMode::Overwrite);
        }
        let w = p.slice(router);
        ops.matmul_backward_input(dnorm.view_mut(), dlogits, w, m, experts, d, WriteMode::Accumulate);
        let x = (residual.view(), mlp_in_rstd.view());
        self.input_norm_backward(ops, norm_in.as_ref(), &mut g, dnorm.view(), x, dx.reborrow());
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }
}

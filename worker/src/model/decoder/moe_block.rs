//! [`MoeModel`] of a [`DecoderModel`], for the second half of a decoder layer with experts:
//! residual addition, norm and router, and the weighted sum of the experts' outputs. The formulas
//! are those of `MixtralSparseMoeBlock` and `Qwen3MoeSparseMoeBlock` of transformers.
use super::{DecoderConfig, DecoderModel, borrow_first_buffers};
use crate::model::{
    ActivationBuffers, LayerInput,
    moe::{ExpertOutputGrads, ExpertShape, MoeModel, RouterLossCoefficients, RouterOutput},
};
use crate::params::{ParamInit, ParamSpec};
use device::{Ops, View, ViewMut, ops::WriteMode};

/// The sizes, layers and names of the experts of a decoder.
pub(in crate::model) struct DecoderMoeConfig {
    /// The sizes of each expert.
    pub(in crate::model) shape: ExpertShape,
    /// The coefficients of the router losses.
    pub(in crate::model) losses: RouterLossCoefficients,
    /// For each layer, whether the layer has experts.
    pub(in crate::model) moe_layers: Vec<bool>,
    /// The names of the router and expert tensors.
    pub(in crate::model) names: ExpertTensorNames,
}

/// The parts of the names of router and expert tensors that differ between model families.
pub(in crate::model) struct ExpertTensorNames {
    /// The name of the module with router and experts within a layer, such as `mlp`.
    pub(in crate::model) block: &'static str,
    /// The names of the gate, up and down projections of an expert.
    pub(in crate::model) matrices: [&'static str; 3],
}

impl DecoderConfig {
    /// Returns whether this layer has experts instead of a dense MLP.
    pub(super) fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.moe_layers.get(layer).is_some_and(|is_moe| *is_moe))
    }

    /// Returns the width of gate and up in dense layers, or 0 if every layer has experts.
    pub(super) fn dense_mlp_width(&self) -> usize {
        let has_dense_layers = (0..self.layers).any(|l| !self.is_moe_layer(l));
        if has_dense_layers { self.intermediate_size } else { 0 }
    }
}

impl DecoderModel {
    /// Returns the configuration of the model's experts.
    ///
    /// # Panics
    ///
    /// Panics if the model is dense.
    fn moe_config(&self) -> &DecoderMoeConfig {
        self.config.moe.as_ref().expect("`MoeModel` is only used with experts")
    }

    /// Returns the range of the router's matrix, `[experts, hidden]`, in the flat vector of a layer
    /// with experts.
    pub(super) fn router_span(&self) -> std::ops::Range<usize> {
        let at = self.spans.post_norm.end;
        at..at + self.moe_config().shape.experts * self.config.hidden_size
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
            (input.params, input.batch.rows(), self.config.hidden_size, self.expert_shape());
        let [_, _, _, _, mid, rstd2, ..] = borrow_first_buffers::<9>(saved);
        let [norm, _, _, _, _, _, norm_buffer, logits] = borrow_first_buffers::<8>(scratch);
        let w_post = self.compute_norm_factors(ops, p.slice(self.spans.post_norm.clone()), norm_buffer);
        let (normed, rstd2, eps) = (norm.view_mut(), rstd2.view_mut(), self.config.norm_eps);
        ops.add_rmsnorm_forward(normed, rstd2, mid.view_mut(), input.x, w_post, m, d, eps);
        let w = p.slice(self.router_span());
        ops.matmul_forward(logits.view_mut(), norm.view(), w, m, shape.experts, d, WriteMode::Overwrite);
        routing.router_forward(ops, logits.view(), shape);
    }

    fn normed_rows<'a>(&self, scratch: &'a ActivationBuffers) -> View<'a> {
        scratch.0[0].view()
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
        let [_, _, _, _, mid, ..] = borrow_first_buffers::<9>(saved);
        let d = self.config.hidden_size;
        let (m, weights) = (y.len() / d, Some(routing.weights.view()));
        ops.combine_rows(y.reborrow(), rows, weights, choice_rows, m, d, WriteMode::Overwrite);
        ops.add(y, mid.view());
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
            (input.params, input.batch.rows(), self.config.hidden_size, self.expert_shape());
        let (mut g, router) = (grads, self.router_span());
        for span in self.spans.list_accumulated_spans().filter(|s| s.end <= router.start) {
            ops.clear(g.slice_mut(span));
        }
        let [_, _, _, _, mid, rstd2, ..] = borrow_first_buffers::<9>(saved);
        let [norm, dnorm, _, _, _, _, norm_buffer, dlogits] = borrow_first_buffers::<8>(scratch);
        ops.combine_rows(
            dnorm.view_mut(),
            expert_grads.rows,
            None,
            expert_grads.choice_rows,
            m,
            d,
            WriteMode::Overwrite,
        );
        routing.router_backward(ops, dlogits.view_mut(), expert_grads, shape);
        let w_post = self.compute_norm_factors(ops, p.slice(self.spans.post_norm.clone()), norm_buffer);
        ops.rmsnorm_forward(
            norm.view_mut(),
            rstd2.view_mut(),
            mid.view(),
            w_post,
            m,
            d,
            self.config.norm_eps,
        );
        if self.grad_masks[input.layer].router {
            let dw = g.slice_mut(router.clone());
            ops.matmul_backward_weight(
                dw,
                dlogits.view(),
                norm.view(),
                m,
                shape.experts,
                d,
                WriteMode::Overwrite,
            );
        }
        let w = p.slice(router);
        ops.matmul_backward_input(
            dnorm.view_mut(),
            dlogits.view(),
            w,
            m,
            shape.experts,
            d,
            WriteMode::Accumulate,
        );
        let dw_post = g.slice_mut(self.spans.post_norm.clone());
        let (dy, x, rstd) = (dnorm.view(), mid.view(), rstd2.view());
        ops.rmsnorm_backward(dx.reborrow(), dw_post, dy, x, w_post, rstd, m, d, WriteMode::Accumulate);
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }
}

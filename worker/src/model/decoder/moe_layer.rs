//! [`MoeModel`]: the mixture-of-experts layers of a [`Model`], apart from the experts' own
//! computation. This module computes the second half of such a layer except the experts: residual
//! addition, norm and router, and the weighted sum of the experts' outputs. The formulas are those
//! of `MixtralSparseMoeBlock` and `Qwen3MoeSparseMoeBlock` of transformers.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    decoder_moe_config::DecoderMoeConfig,
    model::Model,
};
use crate::model::{
    activation_buffers::ActivationBuffers,
    block_arguments::{LayerBuffers, LayerInput},
    moe::{ExpertShape, RouterBackwardGrads, RouterLossCoefficients, RouterOutput},
};
use crate::params::{ParamInit, ParamSpec};
use device::{Ops, View, ViewMut, ops::WriteMode};

/// A [`Model`] with mixture-of-experts layers, with methods that compute everything in these layers
/// except the experts.
#[derive(Clone, Copy)]
pub struct MoeModel<'a> {
    model: &'a Model,
    config: &'a DecoderMoeConfig,
}

impl<'a> MoeModel<'a> {
    /// Returns a [`MoeModel`] for `model`, or `None` if the model has no experts.
    pub fn from_model(model: &'a Model) -> Option<Self> {
        model.config.moe.as_ref().map(|config| MoeModel { model, config })
    }

    /// Returns the sizes of the experts: their number, width, and how many of them a token selects.
    pub fn expert_shape(&self) -> ExpertShape {
        self.config.shape
    }

    /// Returns whether layer number `layer` has experts instead of a dense MLP.
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        self.model.config.is_moe_layer(layer)
    }

    /// Returns the numbers of the layers that have experts, in ascending order.
    pub fn list_moe_layers(&self) -> impl Iterator<Item = usize> {
        let moe_layers = self.config.moe_layers.iter().enumerate();
        moe_layers.filter(|(_, is_moe)| **is_moe).map(|(layer, _)| layer)
    }

    /// Returns the factors with which the router losses (load-balancing loss and z-loss) are
    /// weighted.
    pub fn router_loss_coefficients(&self) -> RouterLossCoefficients {
        self.config.losses
    }

    /// Returns the name, shape and initial values of each tensor of one expert, in the order gate,
    /// up, down.
    pub fn expert_params(&self, layer: usize, expert: usize) -> Vec<ParamSpec> {
        let DecoderMoeConfig { shape: s, names, .. } = self.config;
        let [gate, up, down] = names.matrices;
        let prefix = format!("{}.{}.experts.{expert}", self.model.config.layer_prefix(layer), names.block);
        let tensor = |name: &str, shape: Vec<usize>| ParamSpec {
            name: format!("{prefix}.{name}.weight"),
            shape,
            init: ParamInit::Normal(self.model.config.init_std),
        };
        let input_shape = vec![s.intermediate, s.hidden];
        vec![
            tensor(gate, input_shape.clone()),
            tensor(up, input_shape),
            tensor(down, vec![s.hidden, s.intermediate]),
        ]
    }

    /// Computes the forward pass of a mixture-of-experts layer up to its router: attention, and
    /// which experts each token selects. Writes the router's output to `routing`, and the experts
    /// to `selected_experts`, unless this is `None` because they are known (recomputation).
    /// [`MoeModel::normed_expert_inputs`] then returns the input rows of the experts.
    pub fn attention_and_router_forward(
        &self,
        input: &LayerInput,
        routing: &mut RouterOutput,
        selected_experts: Option<&mut [u32]>,
        buffers: &mut LayerBuffers,
    ) {
        let model = self.model;
        model.attention_half_forward(input, buffers);
        let (ops, m, shape) = (input.ops, input.batch.row_count(), self.config.shape);
        let SavedBuffers { residual, mlp_in_stats, .. } = buffers.saved.borrow_as_struct_mut();
        let ScratchBuffers { norm, norm_factors, router_logits, .. } = buffers.scratch.borrow_as_struct_mut();
        let norm_in = model.create_input_norm(input, model.spans.mlp_in_norm.as_ref(), norm_factors);
        let x = norm_in.add_and_norm_forward(residual, input.x, norm, mlp_in_stats);
        let (logits, w) = (router_logits.view_mut(), input.params.slice(model.router_span()));
        ops.matmul_forward(logits, x, w, m, shape.experts, shape.hidden, WriteMode::Overwrite);
        routing.router_forward(ops, router_logits.view(), shape, selected_experts);
    }

    /// Returns the normalized hidden states that the experts of the current layer receive as input,
    /// one row for each token, `[tokens, hidden]`. These are the normalized rows that the most
    /// recent call of [`MoeModel::attention_and_router_forward`] wrote to `scratch`.
    pub fn normed_expert_inputs<'b>(&self, scratch: &'b ActivationBuffers) -> View<'b> {
        let ScratchBuffers { norm, .. } = scratch.borrow_as_struct();
        norm.view()
    }

    /// Computes the output of a mixture-of-experts layer, which for each token is the residual
    /// stream plus the weighted sum of its experts' outputs. The output of a token is the residual
    /// stream plus the sum of the outputs of the token's experts, each multiplied by the router's
    /// factor for this expert ([`RouterOutput::weights`]).
    ///
    /// `rows` contains one output row for each token and each of its experts. `choice_rows`,
    /// `[tokens, per_token]`, contains the indices in `rows` of the outputs for each token.
    pub fn combine_forward(
        &self,
        ops: &dyn Ops,
        mut y: ViewMut,
        rows: View,
        choice_rows: &[u32],
        routing: &RouterOutput,
        saved: &ActivationBuffers,
    ) {
        let SavedBuffers { residual, .. } = saved.borrow_as_struct();
        let d = self.config.shape.hidden;
        let (m, weights) = (y.len() / d, Some(routing.weights.view()));
        ops.combine_rows(y.reborrow(), rows, weights, choice_rows, m, d, WriteMode::Overwrite);
        ops.add(y, residual.view());
    }

    /// Computes the backward pass of a mixture-of-experts layer except its experts, from the
    /// gradients that the experts' backward pass returned. `dx`, `[rows, hidden]`, is the gradient
    /// of the layer's output on entry and of its input on return. Overwrites `g`, the gradient of
    /// the layer's unit.
    pub fn attention_and_router_backward(
        &self,
        input: &LayerInput,
        mut g: ViewMut,
        mut dx: ViewMut,
        expert_grads: &RouterBackwardGrads,
        routing: &RouterOutput,
        buffers: &mut LayerBuffers,
    ) {
        let (model, shape, router) = (self.model, self.config.shape, self.model.router_span());
        let (ops, m, d, experts) = (input.ops, input.batch.row_count(), shape.hidden, shape.experts);
        for span in model.spans.list_norm_and_bias_spans().filter(|s| s.end <= router.start) {
            ops.fill_with_zeros(g.slice_mut(span));
        }
        let SavedBuffers { residual, mlp_in_stats, .. } = buffers.saved.borrow_as_struct_mut();
        let ScratchBuffers { norm, dnorm, norm_factors, router_logits: dlogits, .. } =
            buffers.scratch.borrow_as_struct_mut();
        let (rows, choices) = (expert_grads.rows, expert_grads.choice_rows);
        ops.combine_rows(dnorm.view_mut(), rows, None, choices, m, d, WriteMode::Overwrite);
        routing.router_backward(ops, dlogits.view_mut(), expert_grads, shape);
        let norm_in = model.create_input_norm(input, model.spans.mlp_in_norm.as_ref(), norm_factors);
        let x = norm_in.forward(residual.view(), norm, mlp_in_stats);
        let dlogits = dlogits.view();
        if model.needs_router_grad[input.layer] {
            let dw = g.slice_mut(router.clone());
            ops.matmul_backward_weight(dw, dlogits, x, m, experts, d, WriteMode::Overwrite);
        }
        let w = input.params.slice(router);
        ops.matmul_backward_input(dnorm.view_mut(), dlogits, w, m, experts, d, WriteMode::Accumulate);
        norm_in.backward(&mut g, dx.reborrow(), dnorm.view(), (residual.view(), mlp_in_stats.view()));
        model.attention_half_backward(input, &mut g, dx, buffers);
    }
}

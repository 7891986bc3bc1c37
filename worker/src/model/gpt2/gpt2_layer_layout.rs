//! The layout of a layer of GPT-2 (`GPT2Block` of transformers): its tensors, matmuls and dropout
//! modules.
use super::gpt2_config::Gpt2Config;
use crate::{
    model::{dropout_module::DropoutModule, linear_layout::LinearLayout},
    params::{ParamInit, ParamSpec, ParamUnit},
};
use std::ops::Range;

/// The prefix of all stored names except that of the head. Files of the model without its head have
/// names without the prefix.
pub(super) const STORED_NAME_PREFIX: &str = "transformer.";

/// The ranges of weight and bias of a module in the flat vector of the layer's unit. The bias
/// follows the weight.
pub(super) struct WeightBiasSpans {
    pub(super) w: Range<usize>,
    pub(super) b: Range<usize>,
}

/// The layout of a layer's tensors in the flat vector of its unit.
pub(super) struct Gpt2LayerSpans {
    pub(super) ln_1: WeightBiasSpans,
    pub(super) c_attn: LinearLayout,
    pub(super) attn_proj: LinearLayout,
    pub(super) ln_2: WeightBiasSpans,
    pub(super) c_fc: LinearLayout,
    pub(super) mlp_proj: LinearLayout,
}

impl Gpt2LayerSpans {
    /// Returns the matmuls of the layer by [`LinearLayout::index`].
    pub(super) fn list_linears(&self) -> [&LinearLayout; 4] {
        [&self.c_attn, &self.attn_proj, &self.c_fc, &self.mlp_proj]
    }

    /// Returns the matmuls of the layer by [`LinearLayout::index`].
    pub(super) fn into_linears(self) -> [LinearLayout; 4] {
        [self.c_attn, self.attn_proj, self.c_fc, self.mlp_proj]
    }

    /// Returns the ranges of norms and biases. Ops add to the gradients of these tensors, so the
    /// gradients must be cleared before the backward pass.
    pub(super) fn list_accumulated_spans(&self) -> impl Iterator<Item = Range<usize>> {
        let norms = [&self.ln_1, &self.ln_2].map(|norm| norm.w.start..norm.b.end);
        norms.into_iter().chain(self.list_linears().into_iter().filter_map(|linear| linear.bias.clone()))
    }
}

/// The dropout modules of a layer.
pub(super) struct Gpt2LayerDropout {
    pub(super) attention: DropoutModule,
    pub(super) attention_out: DropoutModule,
    pub(super) mlp_out: DropoutModule,
}

impl Gpt2LayerDropout {
    /// Creates the dropout modules of a layer, with their names in transformers.
    pub(super) fn new(config: &Gpt2Config, layer: usize, seed: u64) -> Self {
        let module =
            |rate, name| DropoutModule::new(rate, seed, &format!("{STORED_NAME_PREFIX}h.{layer}.{name}"));
        Gpt2LayerDropout {
            attention: module(config.dropout_rates.attention, "attn.attn_dropout"),
            attention_out: module(config.dropout_rates.residual, "attn.resid_dropout"),
            mlp_out: module(config.dropout_rates.residual, "mlp.dropout"),
        }
    }
}

/// Builds the parameter unit of a layer, and the ranges of its tensors in the unit's flat vector.
pub(super) fn build_layer_unit_and_spans(config: &Gpt2Config, layer: usize) -> (ParamUnit, Gpt2LayerSpans) {
    let (d, f) = (config.sizes.hidden, config.intermediate_size);
    let mut params: Vec<ParamSpec> = Vec::new();
    let mut at = 0;
    let mut add = |name: &str, shape: &[usize], init| {
        let name = format!("{STORED_NAME_PREFIX}h.{layer}.{name}");
        let spec = ParamSpec { name, shape: shape.into(), init };
        let from = at;
        at += spec.len();
        params.push(spec);
        from..at
    };
    let matrix = ParamInit::Normal(config.init_std);
    // The more layers, the smaller are the initial weights of the output projections, as in
    // `GPT2PreTrainedModel`.
    let projection = ParamInit::Normal(config.init_std / (2.0 * config.sizes.layers as f32).sqrt());
    let mut pair = |name: &str, shape: &[usize], init| WeightBiasSpans {
        w: add(&format!("{name}.weight"), shape, init),
        b: add(&format!("{name}.bias"), &shape[shape.len() - 1..], ParamInit::Zeros),
    };
    let ln_1 = pair("ln_1", &[d], ParamInit::Ones);
    let c_attn = pair("attn.c_attn", &[d, 3 * d], matrix);
    let attn_proj = pair("attn.c_proj", &[d, d], projection);
    let ln_2 = pair("ln_2", &[d], ParamInit::Ones);
    let c_fc = pair("mlp.c_fc", &[d, f], matrix);
    let mlp_proj = pair("mlp.c_proj", &[f, d], projection);
    let linear = |index, WeightBiasSpans { w, b }: WeightBiasSpans, inputs, name| {
        let modules = vec![(name, b.len())];
        LinearLayout { weight: w, bias: Some(b), inputs, modules, index }
    };
    let spans = Gpt2LayerSpans {
        ln_1,
        c_attn: linear(0, c_attn, d, "attn.c_attn"),
        attn_proj: linear(1, attn_proj, d, "attn.c_proj"),
        ln_2,
        c_fc: linear(2, c_fc, d, "mlp.c_fc"),
        mlp_proj: linear(3, mlp_proj, f, "mlp.c_proj"),
    };
    (ParamUnit::new(format!("layer {layer}"), params), spans)
}

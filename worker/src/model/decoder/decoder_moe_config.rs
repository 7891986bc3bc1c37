//! [`DecoderMoeConfig`]: the sizes and names of the experts of a decoder, read from config.json.
use crate::model::{
    error::Result,
    hf_config::{HfConfigFields, invalid_value_error},
    model_sizes::ModelSizes,
    moe::{ExpertShape, RouterLossCoefficients, select_router_loss_coefficients},
};
use jobspec::ExpertsSpec;

/// The largest number of experts that a layer may have.
const MAX_EXPERTS_PER_LAYER: u32 = 1 << 16;

/// The experts of a decoder: their sizes, the layers that have them, and the names of their
/// tensors.
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

/// The names of the mixture-of-experts module (such as `mlp`) and of an expert's three matrices,
/// which are parts of the tensor names in checkpoint files.
pub(in crate::model) struct ExpertTensorNames {
    /// The name of the module with router and experts within a layer, such as `mlp`.
    pub(in crate::model) block: &'static str,
    /// The names of the gate, up and down projections of an expert.
    pub(in crate::model) matrices: [&'static str; 3],
}

impl DecoderMoeConfig {
    /// Reads the keys of config.json that all model families with experts share. Gives every layer
    /// `count` experts of width `intermediate`; a family with dense layers marks these afterwards.
    /// `count_key` is the key of the number of experts.
    pub(in crate::model) fn from_fields(
        fields: &HfConfigFields,
        (count_key, count): (&str, u32),
        sizes: ModelSizes,
        intermediate: usize,
        names: ExpertTensorNames,
    ) -> Result<Self> {
        let per_token = fields.read_size("num_experts_per_tok")?;
        if per_token > count {
            let expected = format!("at most the number of experts of a layer ({count})");
            return Err(invalid_value_error("num_experts_per_tok", &per_token.into(), expected));
        }
        if count > MAX_EXPERTS_PER_LAYER {
            let expected = format!("at most {MAX_EXPERTS_PER_LAYER}");
            return Err(invalid_value_error(count_key, &count.into(), expected));
        }
        // Without effect: the key adds router logits to the output of transformers' forward pass.
        // `train.experts` decides about the losses of routers.
        fields.read_flag("output_router_logits")?;
        let aux = fields.read_optional_number("router_aux_loss_coef")?.unwrap_or(0.001);
        if aux < 0.0 {
            return Err(invalid_value_error("router_aux_loss_coef", &aux.into(), "a number of at least 0"));
        }
        let shape = ExpertShape {
            experts: count as usize,
            per_token: per_token as usize,
            hidden: sizes.hidden,
            intermediate,
            normalize_weights: false,
        };
        let losses = select_router_loss_coefficients(&ExpertsSpec::default(), aux);
        Ok(DecoderMoeConfig { shape, losses, moe_layers: vec![true; sizes.layers], names })
    }
}

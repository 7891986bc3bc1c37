//! [`DecoderConfig`]: the sizes and options of a decoder, read from config.json, and the
//! config.json of a model that job.yaml describes.
use super::moe_block::{ExpertTensorNames, MoeConfig};
use crate::{
    model::{
        error::Result,
        hf_config::{ConfigFields, invalid_value},
        moe::{ExpertShape, router_loss_coefficients},
        rope::RopeConfig,
    },
    params::ParamInit,
};
use contract::job::{ExpertsSpec, ModelSpec};
use serde_json::{Map, Value, json};

/// The config key of the dropout rate of attention probabilities.
pub(in crate::model) const ATTENTION_DROPOUT: &str = "attention_dropout";

/// The sizes of a decoder and the options in which families differ.
pub(in crate::model) struct DecoderConfig {
    /// Number of tokens in the vocabulary.
    pub(in crate::model) vocab_size: usize,
    /// Width of the residual stream.
    pub(in crate::model) hidden_size: usize,
    /// Width of the MLP between its two matmuls.
    pub(in crate::model) intermediate_size: usize,
    /// Number of layers.
    pub(in crate::model) layers: usize,
    /// Query heads of each layer.
    pub(in crate::model) heads: usize,
    /// Key and value heads of each layer (grouped-query attention); divides `heads`.
    pub(in crate::model) kv_heads: usize,
    /// Width of a head, even.
    pub(in crate::model) head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub(in crate::model) norm_eps: f32,
    /// Rotary position embedding of layers with full attention.
    pub(in crate::model) rope: RopeConfig,
    /// The head uses the embedding matrix.
    pub(in crate::model) ties_embeddings: bool,
    /// Standard deviation of the initial weights of matrices.
    pub(in crate::model) init_std: f32,
    /// The q, k and v projections have biases.
    pub(in crate::model) has_qkv_bias: bool,
    /// The output projection of attention has a bias.
    pub(in crate::model) has_o_bias: bool,
    /// The gate, up and down projections have biases.
    pub(in crate::model) has_mlp_bias: bool,
    /// Each head of q and k is normalized by an RMSNorm before the rotation.
    pub(in crate::model) has_qk_norm: bool,
    /// Norms multiply by 1 + weight instead of by the weight.
    pub(in crate::model) norms_add_one: bool,
    /// The outputs of attention and MLP are normalized before they are added to the residual
    /// stream.
    pub(in crate::model) has_output_norms: bool,
    /// The activation of the MLP's gate is GELU (tanh approximation) instead of SiLU.
    pub(in crate::model) uses_gelu: bool,
    /// Factor of embedded tokens; `None` for 1.
    pub(in crate::model) embedding_scale: Option<f32>,
    /// Factor of attention scores.
    pub(in crate::model) attention_scale: f32,
    /// Soft cap of attention scores: a score s becomes cap·tanh(s / cap).
    pub(in crate::model) attention_softcap: Option<f32>,
    /// Soft cap of logits, by the formula of `attention_softcap`.
    pub(in crate::model) logit_softcap: Option<f32>,
    /// Dropout rate of attention probabilities.
    pub(in crate::model) attention_dropout: f64,
    /// Rotary position embedding of sliding-window layers; `None` if it equals `rope`.
    pub(in crate::model) sliding_rope: Option<RopeConfig>,
    /// The token whose embedding gets no gradient, as `padding_idx` of `torch.nn.Embedding`.
    pub(in crate::model) padding_token: Option<u32>,
    /// Tokens that a token of a sliding-window layer attends to, including itself.
    pub(in crate::model) sliding_window: Option<usize>,
    /// For each layer whether it attends only to the sliding window.
    pub(in crate::model) sliding_layers: Vec<bool>,
    /// The mixture-of-experts layers; `None` for a dense model.
    pub(in crate::model) moe: Option<MoeConfig>,
}

impl DecoderConfig {
    /// Reads the keys that all families share, and checks that they fit together.
    pub(in crate::model) fn read(fields: &ConfigFields) -> Result<Self> {
        fields.require_one_of("hidden_act", &[json!("silu"), json!("swish")])?;
        Self::read_without_activation(fields, fields.rope()?)
    }

    /// Reads the keys that all families share, except `hidden_act` and those of `rope`.
    pub(in crate::model) fn read_without_activation(fields: &ConfigFields, rope: RopeConfig) -> Result<Self> {
        let attention_dropout = fields.dropout_rate(ATTENTION_DROPOUT, 0.0)?;
        fields.require_one_of("pretraining_tp", &[json!(1)])?;
        fields.require_one_of("is_encoder_decoder", &[json!(false)])?;
        fields.require_one_of("add_cross_attention", &[json!(false)])?;
        fields.require_one_of("chunk_size_feed_forward", &[json!(0)])?;
        fields.require_one_of("partial_rotary_factor", &[json!(1)])?;
        let (hidden, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
        let kv_heads = fields.optional_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            return Err(invalid_value("num_key_value_heads", &kv_heads.into(), expected));
        }
        let head_dim = match fields.optional_size("head_dim")? {
            Some(n) => n,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a divisor of hidden_size ({hidden})");
                return Err(invalid_value("num_attention_heads", &heads.into(), expected));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(invalid_value("head_dim", &head_dim.into(), "an even number"));
        }
        fields.size("max_position_embeddings")?;
        let layers = fields.layer_count("num_hidden_layers")?;
        let vocab_size = fields.size("vocab_size")? as usize;
        Ok(DecoderConfig {
            vocab_size,
            hidden_size: hidden as usize,
            intermediate_size: fields.size("intermediate_size")? as usize,
            layers,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            norm_eps: fields.positive_number("rms_norm_eps", 1e-6)? as f32,
            rope,
            ties_embeddings: fields.flag("tie_word_embeddings")?,
            init_std: fields.positive_number("initializer_range", 0.02)? as f32,
            has_qkv_bias: false,
            has_o_bias: false,
            has_mlp_bias: false,
            has_qk_norm: false,
            norms_add_one: false,
            has_output_norms: false,
            uses_gelu: false,
            embedding_scale: None,
            attention_scale: (1.0 / f64::from(head_dim).sqrt()) as f32,
            attention_softcap: None,
            logit_softcap: None,
            attention_dropout,
            sliding_rope: None,
            padding_token: read_padding_token(fields, vocab_size),
            sliding_window: None,
            sliding_layers: vec![false; layers],
            moe: None,
        })
    }

    /// Reads the keys that families with experts share. Every layer gets `count` experts of width
    /// `intermediate`; a family with dense layers marks them afterwards. `count_key` is the config
    /// key of the count.
    pub(in crate::model) fn read_experts(
        &mut self,
        fields: &ConfigFields,
        (count_key, count): (&str, u32),
        intermediate: usize,
        names: ExpertTensorNames,
    ) -> Result<()> {
        let per_token = fields.size("num_experts_per_tok")?;
        if per_token > count {
            let expected = format!("at most the number of experts of a layer ({count})");
            return Err(invalid_value("num_experts_per_tok", &per_token.into(), expected));
        }
        if count > EXPERTS_MAX {
            let expected = format!("at most {EXPERTS_MAX}");
            return Err(invalid_value(count_key, &count.into(), expected));
        }
        // Without effect: the key adds router logits to the output of transformers' forward pass.
        // `train.experts` decides about the losses of routers.
        fields.flag("output_router_logits")?;
        let aux = fields.optional_number("router_aux_loss_coef")?.unwrap_or(0.001);
        if aux < 0.0 {
            return Err(invalid_value("router_aux_loss_coef", &aux.into(), "a number of at least 0"));
        }
        let (experts, per_token, hidden) = (count as usize, per_token as usize, self.hidden_size);
        let shape = ExpertShape { experts, per_token, hidden, intermediate, normalise_weights: false };
        let losses = router_loss_coefficients(&ExpertsSpec::default(), aux);
        self.moe = Some(MoeConfig { shape, losses, moe_layers: vec![true; self.layers], names });
        Ok(())
    }

    /// The initial weights of norms, with which a norm multiplies by 1.
    pub(super) fn norm_init(&self) -> ParamInit {
        if self.norms_add_one { ParamInit::Zeros } else { ParamInit::Ones }
    }

    /// Reads the keys by which Qwen selects sliding-window layers.
    pub(in crate::model) fn read_sliding_layers(&mut self, fields: &ConfigFields) -> Result<()> {
        const FIRST_LAYER: &str = "max_window_layers";
        let enabled = fields.flag("use_sliding_window")?;
        let window = fields.optional_size("sliding_window")?.filter(|_| enabled);
        let first = match fields.get(FIRST_LAYER) {
            None => 28,
            Some(v) => v.as_u64().ok_or_else(|| invalid_value(FIRST_LAYER, v, "a number of layers"))?,
        };
        self.sliding_window = window.map(|n| n as usize);
        self.sliding_layers = (0..self.layers).map(|l| window.is_some() && l as u64 >= first).collect();
        self.read_layer_types(fields)
    }

    /// Reads `layer_types`, which replaces the other selection of sliding-window layers.
    pub(in crate::model) fn read_layer_types(&mut self, fields: &ConfigFields) -> Result<()> {
        const KEY: &str = "layer_types";
        let Some(value) = fields.get(KEY) else { return Ok(()) };
        let invalid = || invalid_value(KEY, value, "`full_attention` or `sliding_attention` for each layer");
        let types = value.as_array().filter(|t| t.len() == self.layers).ok_or_else(invalid)?;
        for (is_sliding, layer_type) in self.sliding_layers.iter_mut().zip(types) {
            *is_sliding = match layer_type.as_str() {
                Some("full_attention") => false,
                Some("sliding_attention") if self.sliding_window.is_some() => true,
                Some("sliding_attention") => {
                    let expected = "only `full_attention`, because the model has no sliding window";
                    return Err(invalid_value(KEY, layer_type, expected));
                }
                _ => return Err(invalid()),
            };
        }
        Ok(())
    }
}

/// The largest number of experts that a layer may have.
const EXPERTS_MAX: u32 = 1 << 16;

/// `pad_token_id`, read like `padding_idx` of `torch.nn.Embedding`: a negative number counts from
/// the end of the vocabulary.
fn read_padding_token(fields: &ConfigFields, vocab_size: usize) -> Option<u32> {
    let id = fields.get("pad_token_id")?.as_i64()?;
    let id = if id < 0 { id.checked_add(vocab_size as i64)? } else { id };
    u32::try_from(id).ok()
}

/// The config.json of a model that job.yaml describes: the keys that all families share, and
/// `family_keys`.
pub(in crate::model) fn spec_to_hf_config(
    spec: &ModelSpec,
    model_type: &str,
    architecture: &str,
    family_keys: Value,
) -> Map<String, Value> {
    let shared = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": null,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": spec.vocab_size,
    });
    let entries = |v: Value| match v {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    let mut map = entries(shared);
    map.extend(entries(family_keys));
    map
}

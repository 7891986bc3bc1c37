//! [`Gpt2Config`]: the sizes and options of a GPT-2 model, read from config.json.
use crate::model::{
    architecture::ModelSizes,
    error::Result,
    hf_config::{HfConfigFields, invalid_value_error},
};
use serde_json::json;

/// The config keys of the dropout rates of attention probabilities, of the embedding, and of the
/// branches that are added to the residual stream.
pub(in crate::model) const DROPOUT_KEYS: [&str; 3] = ["attn_pdrop", "embd_pdrop", "resid_pdrop"];

/// The sizes and options of a GPT-2 model, read from config.json.
pub(super) struct Gpt2Config {
    /// The sizes. `heads` divides `hidden` and equals `kv_heads`.
    pub(super) sizes: ModelSizes,
    /// Number of learned positions, the length of the longest sequence.
    pub(super) max_positions: usize,
    /// Width of the MLP between its two matmuls.
    pub(super) intermediate_size: usize,
    /// Epsilon of every LayerNorm.
    pub(super) norm_eps: f32,
    /// Whether the head uses the embedding matrix.
    pub(super) ties_embeddings: bool,
    /// Standard deviation of the initial weights of matrices.
    pub(super) init_std: f32,
    /// Whether attention scores are divided by √head_dim (`scale_attn_weights`).
    pub(super) scales_scores: bool,
    /// Whether attention scores are divided by the number of the layer, counted from 1
    /// (`scale_attn_by_inverse_layer_idx`).
    pub(super) scales_by_layer_index: bool,
    /// The dropout rates.
    pub(super) dropout_rates: Gpt2DropoutRates,
}

/// The dropout rates of a GPT-2 model, each from 0 to below 1.
pub(super) struct Gpt2DropoutRates {
    /// The rate of attention probabilities.
    pub(super) attention: f64,
    /// The rate of the embedding.
    pub(super) embedding: f64,
    /// The rate of the branches that are added to the residual stream.
    pub(super) residual: f64,
}

/// Config keys of GPT-2 without effect on training: heads for other tasks, and settings of
/// transformers' attention in 16 bits.
const GPT2_IGNORED_KEYS: [&str; 10] = [
    "n_special",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "n_ctx",
];

impl Gpt2Config {
    /// Reads the config keys of GPT-2, and checks that their values are consistent.
    pub(super) fn from_fields(fields: &HfConfigFields) -> Result<Self> {
        let activations = [json!("gelu_new"), json!("gelu_pytorch_tanh")];
        fields.require_one_of("activation_function", &activations)?;
        fields.require_one_of("add_cross_attention", &[json!(false)])?;
        fields.require_one_of("is_encoder_decoder", &[json!(false)])?;
        fields.require_one_of("chunk_size_feed_forward", &[json!(0)])?;
        let [attention, embedding, residual] = DROPOUT_KEYS.map(|key| fields.read_dropout_rate(key, 0.1));
        for key in GPT2_IGNORED_KEYS {
            fields.read_value(key);
        }
        let (hidden, heads) = (fields.read_size("n_embd")?, fields.read_size("n_head")?);
        if !hidden.is_multiple_of(heads) {
            return Err(invalid_value_error(
                "n_head",
                &heads.into(),
                format!("a divisor of n_embd ({hidden})"),
            ));
        }
        let hidden_size = hidden as usize;
        Ok(Gpt2Config {
            sizes: ModelSizes {
                vocab: fields.read_size("vocab_size")? as usize,
                hidden: hidden_size,
                layers: fields.read_layer_count("n_layer")?,
                heads: heads as usize,
                kv_heads: heads as usize,
                head_dim: (hidden / heads) as usize,
            },
            max_positions: fields.read_size("n_positions")? as usize,
            intermediate_size: fields.read_optional_size("n_inner")?.map_or(4 * hidden_size, |n| n as usize),
            norm_eps: fields.read_positive_number("layer_norm_epsilon", 1e-5)? as f32,
            ties_embeddings: fields.read_flag_or("tie_word_embeddings", true)?,
            init_std: fields.read_positive_number("initializer_range", 0.02)? as f32,
            scales_scores: fields.read_flag_or("scale_attn_weights", true)?,
            scales_by_layer_index: fields.read_flag("scale_attn_by_inverse_layer_idx")?,
            dropout_rates: Gpt2DropoutRates {
                attention: attention?,
                embedding: embedding?,
                residual: residual?,
            },
        })
    }
}

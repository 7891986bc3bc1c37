//! `train.model`: the model that is trained.
use super::{
    decode::{JobDecoder, JobSection},
    param_groups::share_reader,
    readers::{int32_reader, keyword_or_reader, number_reader, read_boolean, read_positive, read_text},
    sections::read_path,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// `train.model`: the model config. Sizes and options have the names of Hugging Face's config.json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// A Hugging Face directory, relative to the workdir; `None` for a new model. Its config.json
    /// replaces the settings below, and its weights are the initial weights.
    #[serde(default)]
    pub from: Option<PathBuf>,
    /// The value of all dropout rates, from 0 to below 1. If this value is `None`, the rates of
    /// config.json apply, and a new model has no dropout.
    #[serde(default)]
    pub dropout: Option<f64>,
    /// The name of the model family, e.g. `llama`, which decides the architecture.
    pub family: String,
    /// The number of rows of the embedding matrix; 0 for the size of the tokenizer's vocabulary.
    pub vocab_size: u32,
    /// The width of the residual stream, in elements.
    pub hidden_size: u32,
    /// The width of the feed-forward network's hidden layer, in elements.
    pub intermediate_size: u32,
    /// The number of transformer blocks.
    pub num_hidden_layers: u32,
    /// The number of query heads.
    pub num_attention_heads: u32,
    /// The number of key/value heads.
    pub num_key_value_heads: u32,
    /// The width of an attention head, in elements. The default is `hidden_size /
    /// num_attention_heads`.
    pub head_dim: u32,
    /// The number of experts per layer. If this value is `None`, a model family with experts has 8.
    #[serde(default)]
    pub num_experts: Option<u32>,
    /// The number of experts that process each token. If this value is `None`, a model family with
    /// experts uses 2.
    #[serde(default)]
    pub num_experts_per_tok: Option<u32>,
    /// The width of an expert's hidden layer; `None` for `intermediate_size`.
    #[serde(default)]
    pub moe_intermediate_size: Option<u32>,
    /// The length of the longest sequence, in tokens; 0 for `data.seq_len`.
    pub max_position_embeddings: u32,
    /// The constant that RMSNorm adds to the mean square.
    pub rms_norm_eps: f64,
    /// The base of the frequencies of rotary embeddings.
    pub rope_theta: f64,
    /// Whether the embedding and the output layer share one matrix.
    pub tie_word_embeddings: bool,
    /// The standard deviation of the normal distribution from which initial weights are drawn.
    pub initializer_range: f64,
}

impl ModelSpec {
    /// Returns a copy of the settings in which `from` is joined to `workdir`.
    pub fn resolve_paths(&self, workdir: &Path) -> ModelSpec {
        ModelSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// The model family with learned positions, LayerNorm and a tied output layer, whose defaults
/// differ from those of other families.
pub(super) const GPT2: &str = "gpt2";

/// Decodes the section `train.model`. Sizes that are absent are computed from the other sizes.
pub(super) fn decode_model(d: &mut JobDecoder, train: &JobSection<'_>) -> ModelSpec {
    let t = d.open_section(train, "train.model");
    let auto = |range| keyword_or_reader("auto", 0, int32_reader(range));
    let hidden_size = d.decode_value(&t, "train.model.hidden_size", int32_reader(1..=1 << 20));
    let heads = d.decode_value(&t, "train.model.num_attention_heads", int32_reader(1..=1 << 16));
    let family = d.decode_value(&t, "train.model.family", read_text);
    let gpt2 = family == GPT2;
    let tied = gpt2 || family.starts_with("gemma");
    ModelSpec {
        from: d.decode_optional(&t, "train.model.from", read_path),
        dropout: d.decode_optional(&t, "train.model.dropout", share_reader("a number from 0 to below 1")),
        family,
        vocab_size: d.decode_value(&t, "train.model.vocab_size", auto(1..=1 << 24)),
        hidden_size,
        intermediate_size: d
            .decode_optional(&t, "train.model.intermediate_size", int32_reader(1..=1 << 22))
            .unwrap_or_else(|| match gpt2 {
                true => 4 * hidden_size,
                false => (hidden_size * 8).div_ceil(3).next_multiple_of(16),
            }),
        num_hidden_layers: d.decode_value(&t, "train.model.num_hidden_layers", int32_reader(1..=4096)),
        num_attention_heads: heads,
        num_key_value_heads: d
            .decode_optional(&t, "train.model.num_key_value_heads", int32_reader(1..=1 << 16))
            .unwrap_or(heads),
        head_dim: d
            .decode_optional(&t, "train.model.head_dim", int32_reader(1..=1 << 16))
            .unwrap_or(hidden_size / heads),
        num_experts: d.decode_optional(&t, "train.model.num_experts", int32_reader(1..=1 << 16)),
        num_experts_per_tok: d.decode_optional(
            &t,
            "train.model.num_experts_per_tok",
            int32_reader(1..=1 << 16),
        ),
        moe_intermediate_size: d.decode_optional(
            &t,
            "train.model.moe_intermediate_size",
            int32_reader(1..=1 << 22),
        ),
        max_position_embeddings: d.decode_value(&t, "train.model.max_position_embeddings", auto(1..=1 << 24)),
        rms_norm_eps: d.decode_value(&t, "train.model.rms_norm_eps", read_positive),
        rope_theta: d.decode_value(
            &t,
            "train.model.rope_theta",
            number_reader("a number above 0", |x| x > 0.0),
        ),
        tie_word_embeddings: d
            .decode_optional(&t, "train.model.tie_word_embeddings", read_boolean)
            .unwrap_or(tied),
        initializer_range: d.decode_value(&t, "train.model.initializer_range", read_positive),
    }
}

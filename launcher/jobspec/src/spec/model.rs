//! `train.model`: the model that is trained.
use super::families::{self, LEARNED_POSITION_FAMILIES};
use crate::keys::{
    key::Key,
    key_info::{Condition, Rule},
    numbers::{boolean_type, fraction_type, integer_type, positive_f32_type, positive_number_type},
    section::section,
    text::{path_type, text_type},
    value_type::ValueType,
};
use std::path::{Path, PathBuf};

section! {
    /// The model config. Sizes and options have the names of Hugging Face's config.json.
    pub struct ModelSpec at "train.model", rules NEW_MODEL_RULES;
    /// The directory of a pretrained model, in the layout of Hugging Face.
    ///
    /// The path is relative to the workdir. `None` stands for a new model. The directory's
    /// config.json replaces the settings below, and its weights are the initial weights.
    #[serde(default)]
    pub from: Option<PathBuf> =
        Key::optional(path_type(), "none: a new model from these keys").ignoring_section_rules();
    /// The dropout rate, in place of all rates of config.json.
    ///
    /// If this value is `None`, the rates of config.json apply, and a new model has no dropout.
    #[serde(default)]
    pub dropout: Option<f64> =
        Key::optional(fraction_type(), "0; with `from` the rates of config.json").ignoring_section_rules();
    /// The model family.
    ///
    /// The family decides the architecture.
    pub family: String = Key::new(text_type(), families::DEFAULT_FAMILY);
    /// The number of rows of the embedding; `auto`: the vocabulary size of the tokenizer.
    ///
    /// 0 stands for `auto`.
    pub vocab_size: u32 = Key::new(size_or_auto_type(), "auto");
    /// The width; without `head_dim`, a multiple of `num_attention_heads`.
    pub hidden_size: u32 = Key::new(integer_type(1..=1 << 20), "256");
    /// The width of the feed-forward network.
    pub intermediate_size: u32 = Key::computed(
        integer_type(1..=1 << 22),
        families::INTERMEDIATE_SIZE_DEFAULT_TEXT,
        |m: &ModelSpec, _| families::default_intermediate_size(&m.family, m.hidden_size),
    );
    /// The number of blocks.
    pub num_hidden_layers: u32 = Key::new(integer_type(1..=4096), "4");
    /// The number of query heads.
    pub num_attention_heads: u32 = Key::new(integer_type(1..=1 << 16), "4");
    /// The number of key and value heads (grouped-query attention); divides `num_attention_heads`.
    pub num_key_value_heads: u32 =
        Key::computed(integer_type(1..=1 << 16), "`num_attention_heads`", |m: &ModelSpec, _| m.num_attention_heads);
    /// The width of a head.
    pub head_dim: u32 = Key::computed(
        integer_type(1..=1 << 16).documented_as("integer from 2 to 65536, even"),
        "`hidden_size` / `num_attention_heads`",
        |m: &ModelSpec, _| m.hidden_size / m.num_attention_heads,
    );
    /// The number of experts per layer in a family with experts.
    #[serde(default)]
    pub num_experts: Option<u32> = Key::optional(integer_type(1..=1 << 16), "8 in a family with experts");
    /// The number of experts per token; at most `num_experts`.
    #[serde(default)]
    pub num_experts_per_tok: Option<u32> = Key::optional(integer_type(1..=1 << 16), "2 in a family with experts");
    /// The width of an expert; only in families in which it can differ from `intermediate_size`.
    #[serde(default)]
    pub moe_intermediate_size: Option<u32> = Key::optional(integer_type(1..=1 << 22), "`intermediate_size`");
    /// The longest sequence; `auto`: `data.seq_len`.
    ///
    /// 0 stands for `auto`.
    pub max_position_embeddings: u32 = Key::new(size_or_auto_type(), "auto");
    /// The constant added under the root of RMSNorm.
    pub rms_norm_eps: f64 = Key::new(positive_f32_type(), "1e-6").with_rules(ROTARY_AND_RMSNORM_RULES);
    /// The base of the frequencies of rotary embeddings.
    pub rope_theta: f64 = Key::new(positive_number_type(), "10000").with_rules(ROTARY_AND_RMSNORM_RULES);
    /// Share one matrix between embedding and output.
    pub tie_word_embeddings: bool =
        Key::computed(boolean_type(), families::TIED_EMBEDDINGS_DEFAULT_TEXT, |m: &ModelSpec, _| families::ties_embeddings_by_default(&m.family));
    /// The standard deviation of the initial weights.
    pub initializer_range: f64 = Key::new(positive_f32_type(), "0.02");
}

/// The rule that rejects other keys of `train.model` in a job with `train.model.from`, whose
/// config.json contains their values.
const NEW_MODEL_RULES: &[Rule] = &[Rule::conflict(&[Condition::Given("train.model.from")])
    .with_help("remove it; config.json of the directory has {name}")];
/// The rule that rejects `rope_theta` and `rms_norm_eps` for model families such as `gpt2`, which
/// have neither rotary embeddings nor RMSNorm.
const ROTARY_AND_RMSNORM_RULES: &[Rule] =
    &[Rule::conflict(&[Condition::OneOf("train.model.family", LEARNED_POSITION_FAMILIES)])
        .with_help(FAMILY_HELP)];
/// The help text of the error about a `train.model` key that model families such as GPT-2 do not
/// have.
pub(crate) const FAMILY_HELP: &str = "remove it; the family has LayerNorm, learned positions, and as many key heads \
    as query heads, of width `hidden_size` / `num_attention_heads`";

impl ModelSpec {
    /// Returns a copy of the settings in which the path of the pretrained model (`from`) is joined
    /// to the working directory `workdir`.
    pub fn resolve_paths(&self, workdir: &Path) -> ModelSpec {
        ModelSpec { from: self.from.as_ref().map(|f| workdir.join(f)), ..self.clone() }
    }
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept sizes from 1 and
/// `auto`. The value `auto` becomes 0.
fn size_or_auto_type() -> ValueType<u32> {
    integer_type(1..=1 << 24).or_keywords(&[("auto", 0)])
}

//! The properties of model families that determine defaults and checks of `train.model`.

/// The model family, `llama`, of a new model if the job does not set `train.model.family`.
pub(crate) const DEFAULT_FAMILY: &str = "llama";
/// The model families with learned positions and LayerNorm in place of rotary embeddings and
/// RMSNorm. Their heads have the width `hidden_size` / `num_attention_heads`, and there are as many
/// key heads as query heads.
pub(crate) const LEARNED_POSITION_FAMILIES: &[&str] = &["gpt2"];
/// The text by which docs/job.md describes the defaults of `intermediate_size`.
pub(crate) const INTERMEDIATE_SIZE_DEFAULT_TEXT: &str =
    "8/3 `hidden_size`, rounded up to a multiple of 16; `gpt2`: 4 `hidden_size`";
/// The text by which docs/job.md describes the defaults of `tie_word_embeddings`.
pub(crate) const TIED_EMBEDDINGS_DEFAULT_TEXT: &str = "`false`; `true` with `gpt2` and `gemma…`";

/// Returns whether models of the family `family` use learned position embeddings and LayerNorm, as
/// GPT-2 does.
pub(crate) fn has_learned_positions(family: &str) -> bool {
    LEARNED_POSITION_FAMILIES.contains(&family)
}

/// Returns whether, by default, the embedding and the output layer of the models of a family share
/// one matrix.
pub(crate) fn ties_embeddings_by_default(family: &str) -> bool {
    has_learned_positions(family) || family.starts_with("gemma")
}

/// Returns the default width of the feed-forward networks in the models of a family.
pub(crate) fn default_intermediate_size(family: &str, hidden_size: u32) -> u32 {
    match has_learned_positions(family) {
        true => 4 * hidden_size,
        false => (hidden_size * 8).div_ceil(3).next_multiple_of(16),
    }
}

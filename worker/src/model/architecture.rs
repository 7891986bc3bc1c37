//! [`Architecture`]: the sizes, parameters and names of a model.
use crate::params::ParamUnit;
use serde_json::{Map, Value};

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    /// The number of tokens in the vocabulary.
    pub vocab: usize,
    /// The width of the residual stream.
    pub hidden: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of query heads of each layer.
    pub heads: usize,
    /// The number of key and value heads of each layer (grouped-query attention). Divides `heads`.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_dim: usize,
}

impl ModelSizes {
    /// Returns the width of the concatenated outputs of the attention heads.
    pub fn attention_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the number of elements of q, k and v of one token together.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// A second name of a stored tensor (`_tied_weights_keys` in transformers).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedWeight {
    /// The name that is not stored.
    pub alias: String,
    /// The name of the stored tensor.
    pub target: String,
}

/// The sizes, parameters and names of a model, which follow from its config.json.
pub trait Architecture {
    /// Returns the config.json from which the model was built.
    fn hf_config(&self) -> &Map<String, Value>;
    /// Returns the sizes of the model.
    fn sizes(&self) -> ModelSizes;
    /// Returns the parameter units: embedding, layers, head. Experts are in separate units
    /// ([`crate::model::moe::MoeModel::expert_params`]).
    fn param_units(&self) -> Vec<ParamUnit>;
    /// Returns the number of inputs and outputs of each matmul of a layer, without experts and
    /// adapters.
    fn linear_shapes(&self) -> Vec<(usize, usize)>;
    /// Returns whether the head uses the embedding matrix (`tie_word_embeddings`).
    fn has_tied_embeddings(&self) -> bool;
    /// Returns the second names of tied weights, with the names under which the tensors are stored.
    fn tied_weights(&self) -> Vec<TiedWeight>;
    /// Returns whether matrices are stored as `[in, out]`, as in `Conv1D` of transformers, instead
    /// of `[out, in]`. PEFT calls this `fan_in_fan_out`.
    fn stores_transposed_matrices(&self) -> bool {
        false
    }
    /// Returns the prefix of stored names that is absent in files of the model without its head
    /// (`base_model_prefix` in transformers).
    fn base_model_prefix(&self) -> Option<&'static str> {
        None
    }
    /// Returns whether the tensor of this name is a constant. Older checkpoints contain constants;
    /// they are not loaded.
    fn is_constant_tensor(&self, _name: &str) -> bool {
        false
    }
    /// Returns the number of tokens to which a token attends in sliding-window layers, including
    /// itself, or `None` if every layer has full attention.
    fn sliding_window(&self) -> Option<usize> {
        None
    }
    /// Computes the floating-point operations of matmuls per token in forward and backward pass,
    /// without recomputation, for sequences of `seq_len` tokens.
    fn compute_flops_per_token(&self, seq_len: usize) -> f64;
}

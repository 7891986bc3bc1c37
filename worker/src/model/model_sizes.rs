//! [`ModelSizes`], the sizes of a model, and [`TiedWeight`], a tensor that two modules share and
//! that files store under one of two names.

/// The sizes of a decoder-only transformer: vocabulary, width, layers and heads.
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

/// A tensor that is stored in files only once although it has two names, such as an embedding
/// matrix that is also the output layer's matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedWeight {
    /// The name that is not stored.
    pub alias: String,
    /// The name of the stored tensor.
    pub target: String,
}

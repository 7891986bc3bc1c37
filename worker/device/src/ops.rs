//! The operations of which models and optimizers consist, as traits that each backend implements
//! ([`Ops`]). Each group of ops is a trait. The method for the backward pass of an op follows the
//! method for its forward pass.
//!
//! Matrices are row-major, and `y[m, n]` denotes a matrix of `m` rows and `n` columns. Weights have
//! the layout of Hugging Face, `w[out, in]`. Once its scratch memory is allocated, an op allocates
//! nothing.
//!
//! **Element types.** Activations, their gradients and weights may be `f32` or 16 bits
//! ([`crate::Dtype`]), each argument independently. An op computes in `f32` and rounds its result
//! once, to nearest, ties to even. Statistics (`rstd`, `lse`, `loss`), the tables of rotary
//! embeddings, outputs of the router, gradients of weights, and optimizer states are `f32`.
//!
//! **Determinism.** The result of an op depends only on its arguments. It is bit-equal for any
//! number of threads and any alignment of the buffers, because every sum has one fixed order.
//!
//! **Errors.** Ops return no errors. A failure is recorded in the backend's status
//! ([`Storage::check_status`]). A wrong length or type is a bug, and panics.
mod activation;
mod arguments;
mod attention;
mod epilogues;
mod experts;
mod matmul;
mod norm;
mod optimizers;
mod vectors;
mod vocabulary;

use crate::storage::Storage;
pub use activation::ActivationOps;
pub use arguments::WriteMode;
pub(crate) use arguments::{expect_len, expect_lens};
pub use attention::{AttentionDropout, AttentionOps, AttentionShape, RopeOps, RopeShape};
pub use epilogues::{EpilogueMatmul, EpilogueOps, MatmulEpilogue};
pub use experts::{RouterBackwardInputs, RouterOps, RouterShape, RowOps};
pub use matmul::{FP8_COLUMN_MULTIPLE, Fp8Operand, Fp8Ops, GroupedMatmulOps, MatmulOps, RowGroup};
pub use norm::{BiasOps, HeadLayout, HeadNormOps, LayerNormOps, LayerNormParams, RmsNormOps};
pub(crate) use optimizers::{AdamWCoefficients, LionCoefficients};
pub use optimizers::{AdamWHyperparams, LionHyperparams, OptimizerOps, SgdHyperparams};
pub use vectors::{NORM_BLOCK_LEN, PendingSumsOfSquares, SampleDropout, StochasticRounding, VectorOps};
pub use vocabulary::{ClassifierGrads, ClassifierOps, ClassifierShape, EmbeddingOps, IGNORE_LABEL};

/// All operations (ops) for models and optimizers, which each backend (CPU or GPU) implements. The
/// backends are the CPU ([`crate::Cpu`]) and NVIDIA GPUs ([`crate::Cuda`]).
pub trait Ops:
    Storage
    + MatmulOps
    + Fp8Ops
    + GroupedMatmulOps
    + EmbeddingOps
    + ClassifierOps
    + RmsNormOps
    + HeadNormOps
    + LayerNormOps
    + BiasOps
    + RopeOps
    + AttentionOps
    + ActivationOps
    + EpilogueOps
    + RouterOps
    + RowOps
    + VectorOps
    + OptimizerOps
{
}

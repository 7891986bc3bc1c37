//! [`MODEL_FAMILIES`]: the list of supported model families. Each family has a module.
mod gemma;
mod gpt2;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod qwen2;
mod qwen3;
mod qwen3_moe;

use super::family::ModelFamily;

/// The supported model families, such as Llama and Qwen 3.
pub const MODEL_FAMILIES: &[ModelFamily] = &[
    gemma::GEMMA2,
    gemma::GEMMA3,
    gpt2::FAMILY,
    llama::FAMILY,
    mistral::FAMILY,
    mixtral::FAMILY,
    olmo2::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_moe::FAMILY,
];

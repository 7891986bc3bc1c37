//! `train:` — what the built-in runtime trains.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What the built-in runtime trains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainSpec {
    pub model: ModelSpec,
    pub data: DataSpec,
    pub zero: ZeroSpec,
    pub precision: Precision,
    pub batch: BatchSpec,
    pub optimizer: OptimizerSpec,
    pub schedule: ScheduleSpec,
    /// Global L2 norm limit; `None`: no clipping.
    pub clip_norm: Option<f32>,
    /// Optimizer steps in all, counted from step 0 of the first run.
    pub steps: u64,
    pub seed: u64,
    pub recompute: Recompute,
    pub eval: Option<EvalSpec>,
}

/// `model:` — the family and its numbers, by their Hugging Face names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// A name of the families table, e.g. `llama`.
    pub family: String,
    /// 0: the tokenizer's size.
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub num_hidden_layers: u32,
    pub num_attention_heads: u32,
    pub num_key_value_heads: u32,
    /// Default hidden_size / num_attention_heads.
    pub head_dim: u32,
    /// 0: `data.seq_len`.
    pub max_position_embeddings: u32,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    pub initializer_range: f32,
}

/// `data:` — text to samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// Files and globs, relative to the workdir.
    pub files: Vec<String>,
    /// For `.jsonl` files: the field that holds the text. Default `text`.
    pub field: String,
    pub tokenizer: Tokenizer,
    /// Tokens per sample that get a loss.
    pub seq_len: u32,
    /// Several documents per sample, none attending to another; else one document (or piece of one) per sample.
    pub pack: bool,
    pub shuffle: bool,
    /// Share of documents kept out of training, 0.0..1.0; used by `eval` without files of its own.
    pub held_out: f64,
    /// Where token caches lie. Default `.launch-cache` in the workdir.
    pub cache: PathBuf,
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tokenizer {
    /// 256 byte values and one end-of-document token, 256.
    Bytes,
    /// A Hugging Face tokenizer.json.
    File(PathBuf),
}

/// `zero:` — sharding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ZeroSpec {
    /// 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are sharded.
    pub stage: u8,
    /// Blocks gathered ahead of use in stage 3 (0: none).
    pub prefetch: u32,
}

/// `precision:`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    Fp32,
}

/// `batch:` — samples per optimizer step and per forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSpec {
    /// Samples per optimizer step over all workers; a multiple of `micro`.
    pub global: u32,
    /// Samples per forward: one logical slot (docs/numerics.md).
    pub micro: u32,
}

/// `optimizer:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    pub name: OptimizerName,
    pub lr: f64,
    pub betas: (f32, f32),
    pub eps: f32,
    /// SGD only.
    pub momentum: f32,
    pub weight_decay: f32,
    /// Patterns (`*`, `?`) of parameter names without weight decay.
    pub no_decay: Vec<String>,
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    Adamw,
    Sgd,
}

/// `schedule:` — learning rate over steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleSpec {
    pub name: ScheduleName,
    pub warmup_steps: u64,
    pub min_lr: f64,
    /// wsd: steps of the final decay.
    pub decay_steps: u64,
}

/// Shape of the schedule after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScheduleName {
    Cosine,
    Linear,
    Constant,
    Wsd,
}

/// `recompute:` — what is computed again in the backward pass instead of kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Recompute {
    None,
    /// Keep only each block's input.
    Block,
}

/// `eval:` — held-out loss while training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalSpec {
    /// Optimizer steps between evaluations.
    pub every: u64,
    /// Empty: the held-out share of `data.files`.
    pub files: Vec<String>,
    /// At most this many samples.
    pub samples: u32,
}

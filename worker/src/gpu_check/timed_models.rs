//! [`TimedModel`]: a model whose training `launch gpu-check` times, and the list of these models.
use super::check_job::{build_check_job, require_train_section};
use crate::{model, trainer_stages::resolve_model_section};
use diagnostic::{Diagnostic, codes};
use jobspec::{JobSpec, OffloadTarget, RecomputeMode, TrainSpec, ZeroSpec};
use serde_json::{Value, json};
use std::time::Duration;

/// A model whose training `launch gpu-check` times, with its settings.
pub(super) struct TimedModel {
    pub(super) name: &'static str,
    /// The name of the model in the names of parts.
    pub(super) part_name: &'static str,
    /// Keys of `train.model` with their values, as YAML.
    pub(super) model: &'static str,
    /// Further keys of `train` with their values, separated by spaces.
    pub(super) rest: &'static str,
    /// Whether saving is measured, too.
    pub(super) saves: bool,
    /// Whether optimizer states are offloaded to host memory.
    pub(super) offload: bool,
    /// About how many seconds the part takes on an H100.
    pub(super) expected_seconds: u64,
    /// The position of the model among the parts that time models, lowest first.
    pub(super) order: u8,
    /// Whether the model is timed after most other parts, because it takes long.
    pub(super) is_late: bool,
    /// The GPU memory in GiB without which the model is skipped.
    pub(super) min_gib: u16,
}

const GPT2: &str = "family: gpt2, vocab_size: 50257, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12, tie_word_embeddings: true";
const QWEN_05B: &str = "family: qwen2, vocab_size: 151936, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2, tie_word_embeddings: true";
const QWEN_15B: &str = "family: qwen2, vocab_size: 151936, hidden_size: 1536, intermediate_size: 8960, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2, tie_word_embeddings: true";
const LLAMA_1B: &str = "vocab_size: 128256, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, tie_word_embeddings: true";
const LLAMA_8B: &str = "vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8";
const BATCH_32X1024: &str = "data.seq_len=1024 batch.global=32 batch.micro=32";
const BATCH_4X16X1024: &str = "data.seq_len=1024 batch.global=64 batch.micro=16";
const BATCH_4X8X2048: &str = "data.seq_len=2048 batch.global=32 batch.micro=8";

/// Builds the entry of a model in the list of models whose training `launch gpu-check` times.
/// `part_name` is its name in the names of parts, and `order` its position among the timed models.
const fn define_timed_model(
    (part_name, order, expected_seconds): (&'static str, u8, u64),
    name: &'static str,
    model: &'static str,
    rest: &'static str,
) -> TimedModel {
    TimedModel {
        name,
        part_name,
        model,
        rest,
        saves: false,
        offload: false,
        expected_seconds,
        order,
        is_late: false,
        min_gib: 0,
    }
}

/// Builds the entry of a large model in the list of timed models, which needs `min_gib` GiB of GPU
/// memory and is timed after the smaller models.
const fn define_large_model(
    part: (&'static str, u8, u64),
    min_gib: u16,
    name: &'static str,
    rest: &'static str,
) -> TimedModel {
    TimedModel { min_gib, is_late: true, ..define_timed_model(part, name, LLAMA_8B, rest) }
}

/// The models whose training `launch gpu-check` times, with their settings.
const TIMED_MODELS: [TimedModel; 16] = [
    TimedModel {
        saves: true,
        ..define_timed_model(("gpt2-124m", 0, 8), "GPT-2 124M, 32 × 1024", GPT2, BATCH_32X1024)
    },
    define_timed_model(("qwen-0.5b", 8, 12), "Qwen2.5-0.5B, 4 × (16 × 1024)", QWEN_05B, BATCH_4X16X1024),
    TimedModel {
        saves: true,
        ..define_timed_model(("qwen-1.5b", 9, 16), "Qwen2.5-1.5B, 4 × (16 × 1024)", QWEN_15B, BATCH_4X16X1024)
    },
    define_timed_model(("llama-1b", 2, 14), "Llama-3.2-1B, 4 × (8 × 2048)", LLAMA_1B, BATCH_4X8X2048),
    define_large_model(
        ("llama-8b", 20, 60),
        125,
        "Llama-3.1-8B, 2 × 2048, ZeRO stage 3",
        "data.seq_len=2048 batch.global=2 batch.micro=2 zero.stage=3",
    ),
    define_large_model(
        ("llama-8b-fast", 21, 80),
        125, // With `deterministic: false` gradients need one running sum. The fixed-order tree over
        // eight micro-batches would need four sums.
        "Llama-3.1-8B, 8 × (2 × 2048), ZeRO stage 3, deterministic: false",
        "data.seq_len=2048 batch.global=16 batch.micro=2 zero.stage=3 deterministic=false",
    ),
    define_large_model(
        ("llama-8b-recompute", 22, 70),
        125,
        "Llama-3.1-8B, 8 × 2048, ZeRO stage 3, recompute",
        "data.seq_len=2048 batch.global=8 batch.micro=8 zero.stage=3 recompute=block",
    ),
    define_large_model(
        ("llama-8b-no-master", 23, 60),
        110,
        "Llama-3.1-8B, 4 × 2048, no master weights",
        "data.seq_len=2048 batch.global=4 batch.micro=4 master_weights=false",
    ),
    TimedModel {
        offload: true,
        is_late: true,
        ..define_timed_model(
            ("qwen-1.5b-offload", 19, 30),
            "Qwen2.5-1.5B, 4 × (16 × 1024), optimizer states on the host",
            QWEN_15B,
            BATCH_4X16X1024,
        )
    },
    define_timed_model(
        ("llama-1b-fp8", 7, 14),
        "Llama-3.2-1B, 4 × (8 × 2048), fp8 matmuls",
        LLAMA_1B,
        "data.seq_len=2048 batch.global=32 batch.micro=8 precision=fp8",
    ),
    // These models are limited by kernel launches. They are timed without and with CUDA graphs.
    define_timed_model(
        ("gpt2-small-batch", 5, 6),
        "GPT-2 124M, 2 × 256",
        GPT2,
        "data.seq_len=256 batch.global=2 batch.micro=2 cuda_graphs=false",
    ),
    define_timed_model(
        ("gpt2-small-batch-graphs", 6, 6),
        "GPT-2 124M, 2 × 256, CUDA graphs",
        GPT2,
        "data.seq_len=256 batch.global=2 batch.micro=2 cuda_graphs=true",
    ),
    // Models from above with the fastest, non-deterministic algorithms, to show the cost of
    // determinism.
    define_timed_model(
        ("gpt2-124m-fast", 1, 18),
        "GPT-2 124M, 32 × 1024, deterministic: false",
        GPT2,
        "data.seq_len=1024 batch.global=32 batch.micro=32 deterministic=false",
    ),
    define_timed_model(
        ("qwen-0.5b-fast", 10, 20),
        "Qwen2.5-0.5B, 4 × (16 × 1024), deterministic: false",
        QWEN_05B,
        "data.seq_len=1024 batch.global=64 batch.micro=16 deterministic=false",
    ),
    define_timed_model(
        ("qwen-1.5b-fast", 4, 22),
        "Qwen2.5-1.5B, 4 × (16 × 1024), deterministic: false",
        QWEN_15B,
        "data.seq_len=1024 batch.global=64 batch.micro=16 deterministic=false",
    ),
    define_timed_model(
        ("llama-1b-fast", 3, 24),
        "Llama-3.2-1B, 4 × (8 × 2048), deterministic: false",
        LLAMA_1B,
        "data.seq_len=2048 batch.global=32 batch.micro=8 deterministic=false",
    ),
];
const TINY_LLAMA: &str =
    "vocab_size: 257, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2";
const BATCH_1X6: &str = "data.seq_len=6 batch.global=1 batch.micro=1";
/// The small models whose training tests of `launch gpu-check` time (option `--tiny`).
const TINY_TIMED_MODELS: [TimedModel; 5] = [
    TimedModel {
        saves: true,
        ..define_timed_model(("llama", 0, 3), "a tiny Llama, 1 × 6", TINY_LLAMA, BATCH_1X6)
    },
    TimedModel {
        saves: true,
        offload: true,
        ..define_timed_model(
            ("llama-offload", 1, 3),
            "a tiny Llama, optimizer states on the host",
            TINY_LLAMA,
            BATCH_1X6,
        )
    },
    define_timed_model(
        ("llama-fp8", 2, 3),
        "a tiny Llama, fp8 matmuls",
        "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1",
        "data.seq_len=6 batch.global=1 batch.micro=1 precision=fp8",
    ),
    define_timed_model(
        ("llama-fast", 3, 3),
        "a tiny Llama, deterministic: false, no master weights",
        TINY_LLAMA,
        "data.seq_len=6 batch.global=1 batch.micro=1 deterministic=false master_weights=false",
    ),
    define_timed_model(
        ("llama-graphs", 4, 3),
        "a tiny Llama, CUDA graphs",
        TINY_LLAMA,
        "data.seq_len=6 batch.global=1 batch.micro=1 cuda_graphs=true",
    ),
];

/// How long `launch gpu-check` measures the training of a model, after the first steps.
const MEASURED_DURATION: Duration = Duration::from_secs(3);

/// Returns the models whose training `launch gpu-check` times, and for how long each is measured.
pub(super) fn select_timed_models(tiny: bool) -> (&'static [TimedModel], Duration) {
    if tiny { (&TINY_TIMED_MODELS, Duration::ZERO) } else { (&TIMED_MODELS, MEASURED_DURATION) }
}

/// Finds the model number `number`, counted from 0, among those whose training `launch gpu-check`
/// times. Fails if there is none.
pub(super) fn find_model_by_number(tiny: bool, number: usize) -> diagnostic::Result<&'static TimedModel> {
    let models = select_timed_models(tiny).0;
    models.get(number).ok_or_else(|| {
        let message = format!("model {number} does not exist; models are 0 to {}", models.len() - 1);
        Diagnostic::error(codes::command::USAGE, message)
    })
}

/// Returns a JSON description of each model that `launch gpu-check` times, with the model's
/// config.json, so that other programs can time these models, too.
pub(super) fn describe_timed_models_as_json(tiny: bool) -> diagnostic::Result<Value> {
    let models = select_timed_models(tiny).0.iter().map(|timed| {
        let spec = timed.build_job()?.1;
        let model = resolve_model_section(&spec.model, spec.model.vocab_size, spec.data.seq_len)?;
        let model = model::build_model(&model, spec.data.seq_len).map_err(Diagnostic::from)?;
        Ok(json!({
            "what": timed.name,
            "config": model.hf_config(),
            "samples": spec.batch.micro,
            "accumulated": spec.batch.global / spec.batch.micro,
            "seq_len": spec.data.seq_len,
            "recompute": spec.recompute != RecomputeMode::None,
            "precision": spec.precision.name(),
            "offload": timed.offload,
            "master_weights": spec.master_weights,
            "deterministic": spec.deterministic,
            "cuda_graphs": spec.cuda_graphs.name(),
        }))
    });
    models.collect()
}

impl TimedModel {
    /// Builds the job by which `launch gpu-check` trains this model, in bf16 and without ZeRO
    /// sharding, and returns it with its `train` section.
    pub(super) fn build_job(&self) -> diagnostic::Result<(JobSpec, TrainSpec)> {
        let job = build_check_job(self.model, &format!("precision=bf16 zero.stage=0 {}", self.rest))?;
        let mut spec = require_train_section(&job)?.clone();
        spec.zero = ZeroSpec { offload: self.offload.then_some(OffloadTarget::Cpu), ..spec.zero };
        Ok((job, spec))
    }
}

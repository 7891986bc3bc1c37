//! Measures the speed of training on a GPU, for `launch gpu-check`. Models have random weights, and
//! the data are generated.
use super::{
    curves::{OpenGpu, build_check_job, build_trainer, require_train_section, take_step},
    panic_to_diagnostic,
};
use crate::{
    checkpoint_mapping::build_checkpoint_model_spec,
    error::Error,
    gpu::{collect_library_search_paths, select_attention_backend},
    model,
    save::{CheckpointSaver, RunMetadata},
    stages::{RunningTrainer, resolve_model},
    storage_topology::StorageTopology,
};
use comm::{Comm, local, staged::StagedComm};
use contract::job::{CudaGraphMode, JobSpec, OffloadTarget, Precision, RecomputeMode, TrainSpec, ZeroSpec};
use device::{Cuda, Storage};
use diagnostic::{Diagnostic, codes};
use serde_json::{Value, json};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// A model whose training is timed.
struct TimedModel {
    name: &'static str,
    /// Keys of `train.model`.
    model: &'static str,
    /// Further keys of `train`.
    rest: &'static str,
    /// Whether saving is measured, too.
    saves: bool,
    /// Whether optimizer states are offloaded to host memory.
    offload: bool,
}

const GPT2: &str = "family: gpt2, vocab_size: 50257, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12, tie_word_embeddings: true";
const QWEN_05B: &str = "family: qwen2, vocab_size: 151936, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2, tie_word_embeddings: true";
const QWEN_15B: &str = "family: qwen2, vocab_size: 151936, hidden_size: 1536, intermediate_size: 8960, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2, tie_word_embeddings: true";
const LLAMA_1B: &str = "vocab_size: 128256, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, tie_word_embeddings: true";
const LLAMA_8B: &str = "vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8";
const BATCH_32X1024: &str = "data.seq_len=1024 batch.global=32 batch.micro=32";
const BATCH_4X16X1024: &str = "data.seq_len=1024 batch.global=64 batch.micro=16";
const BATCH_4X8X2048: &str = "data.seq_len=2048 batch.global=32 batch.micro=8";

/// Defines a model that is timed without saving and offloading.
const fn define_timed_model(name: &'static str, model: &'static str, rest: &'static str) -> TimedModel {
    TimedModel { name, model, rest, saves: false, offload: false }
}

const TIMED_MODELS: [TimedModel; 15] = [
    TimedModel { saves: true, ..define_timed_model("GPT-2 124M, 32 × 1024", GPT2, BATCH_32X1024) },
    define_timed_model("Qwen2.5-0.5B, 4 × (16 × 1024)", QWEN_05B, BATCH_4X16X1024),
    TimedModel {
        saves: true,
        ..define_timed_model("Qwen2.5-1.5B, 4 × (16 × 1024)", QWEN_15B, BATCH_4X16X1024)
    },
    define_timed_model("Llama-3.2-1B, 4 × (8 × 2048)", LLAMA_1B, BATCH_4X8X2048),
    define_timed_model(
        "Llama-3.1-8B, 2 × 2048, ZeRO stage 3",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=2 batch.micro=2 zero.stage=3",
    ),
    define_timed_model(
        // With `deterministic: false` gradients need one running sum. The fixed-order tree over
        // eight micro-batches would need four sums.
        "Llama-3.1-8B, 8 × (2 × 2048), ZeRO stage 3, deterministic: false",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=16 batch.micro=2 zero.stage=3 deterministic=false",
    ),
    define_timed_model(
        "Llama-3.1-8B, 8 × 2048, ZeRO stage 3, recompute",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=8 batch.micro=8 zero.stage=3 recompute=block",
    ),
    define_timed_model(
        "Llama-3.1-8B, 4 × 2048, no master weights",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=4 batch.micro=4 master_weights=false",
    ),
    TimedModel {
        offload: true,
        ..define_timed_model(
            "Qwen2.5-1.5B, 4 × (16 × 1024), optimizer states on the host",
            QWEN_15B,
            BATCH_4X16X1024,
        )
    },
    define_timed_model(
        "Llama-3.2-1B, 4 × (8 × 2048), fp8 matmuls",
        LLAMA_1B,
        "data.seq_len=2048 batch.global=32 batch.micro=8 precision=fp8",
    ),
    // These models are limited by kernel launches. They are timed without and with CUDA graphs.
    define_timed_model(
        "GPT-2 124M, 2 × 256",
        GPT2,
        "data.seq_len=256 batch.global=2 batch.micro=2 cuda_graphs=false",
    ),
    define_timed_model(
        "GPT-2 124M, 2 × 256, CUDA graphs",
        GPT2,
        "data.seq_len=256 batch.global=2 batch.micro=2 cuda_graphs=true",
    ),
    // Models from above with the fastest, non-deterministic algorithms, to show the cost of
    // determinism.
    define_timed_model(
        "GPT-2 124M, 32 × 1024, deterministic: false",
        GPT2,
        "data.seq_len=1024 batch.global=32 batch.micro=32 deterministic=false",
    ),
    define_timed_model(
        "Qwen2.5-0.5B, 4 × (16 × 1024), deterministic: false",
        QWEN_05B,
        "data.seq_len=1024 batch.global=64 batch.micro=16 deterministic=false",
    ),
    define_timed_model(
        "Qwen2.5-1.5B, 4 × (16 × 1024), deterministic: false",
        QWEN_15B,
        "data.seq_len=1024 batch.global=64 batch.micro=16 deterministic=false",
    ),
];
const TINY_LLAMA: &str =
    "vocab_size: 257, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2";
const BATCH_1X6: &str = "data.seq_len=6 batch.global=1 batch.micro=1";
const TINY_TIMED_MODELS: [TimedModel; 5] = [
    TimedModel { saves: true, ..define_timed_model("a tiny Llama, 1 × 6", TINY_LLAMA, BATCH_1X6) },
    TimedModel {
        saves: true,
        offload: true,
        ..define_timed_model("a tiny Llama, optimizer states on the host", TINY_LLAMA, BATCH_1X6)
    },
    define_timed_model(
        "a tiny Llama, fp8 matmuls",
        "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1",
        "data.seq_len=6 batch.global=1 batch.micro=1 precision=fp8",
    ),
    define_timed_model(
        "a tiny Llama, deterministic: false, no master weights",
        TINY_LLAMA,
        "data.seq_len=6 batch.global=1 batch.micro=1 deterministic=false master_weights=false",
    ),
    define_timed_model(
        "a tiny Llama, CUDA graphs",
        TINY_LLAMA,
        "data.seq_len=6 batch.global=1 batch.micro=1 cuda_graphs=true",
    ),
];

/// The dense bf16 operations per second of GPUs, from NVIDIA's data sheets (SXM).
const PEAK_BF16_FLOPS: [(&str, f64); 4] =
    [("H100", 989.5e12), ("H200", 989.5e12), ("A100", 312e12), ("B200", 2250e12)];

/// Returns the models to time, and the duration for which each model is timed.
fn select_timed_models(tiny: bool) -> (&'static [TimedModel], Duration) {
    if tiny { (&TINY_TIMED_MODELS, Duration::ZERO) } else { (&TIMED_MODELS, Duration::from_secs(10)) }
}

/// Measures and prints speed, memory and the cost of saving for each model.
pub(super) fn measure_and_print_speed(open: OpenGpu, tiny: bool) {
    println!(
        "| training, bf16 and AdamW | tokens/s | TFLOP/s | MFU (bf16 peak) | GPU memory | save: blocked, total, slowdown |"
    );
    println!("|---|---|---|---|---|---|");
    let (models, duration) = select_timed_models(tiny);
    for timed in models {
        let row = measure_or_report_panic(timed, open, duration).map(|m| m.to_table_cells());
        println!("| {} | {} |", timed.name, row.unwrap_or_else(|e| format!("{e} | | | |")));
    }
    println!();
}

/// Describes the timed models as JSON, each with its `config.json`, so that other programs can
/// train the models.
pub(super) fn describe_models(tiny: bool) -> diagnostic::Result<Value> {
    let models = select_timed_models(tiny).0.iter().map(|timed| {
        let spec = timed.build_spec()?.1;
        let model = resolve_model(&spec.model, spec.model.vocab_size, spec.data.seq_len)?;
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

/// Measures speed and memory of the model with this number. Returns the measured values as JSON.
pub(super) fn measure_model(open: OpenGpu, tiny: bool, number: usize) -> diagnostic::Result<Value> {
    let (timed, duration) = (find_model_by_number(tiny, number)?, select_timed_models(tiny).1);
    let Measurement { tokens_per_s, flops, mfu, memory, .. } =
        measure_or_report_panic(&TimedModel { saves: false, ..*timed }, open, duration)?;
    Ok(json!({
        "what": timed.name, "tokens_per_s": tokens_per_s, "flops": flops, "mfu": mfu, "memory": memory,
    }))
}

/// The measurements of one model.
struct Measurement {
    tokens_per_s: f64,
    /// Floating-point operations per second.
    flops: f64,
    /// `flops` as a share of the GPU's peak, or `None` if the peak is not known.
    mfu: Option<f64>,
    /// The peak memory of the GPU in bytes.
    memory: u64,
    /// The text of the cell about saving, or `None` if saving was not measured.
    save: Option<String>,
}

impl Measurement {
    /// Formats the measured values as cells of a table row, separated by ` | `.
    fn to_table_cells(&self) -> String {
        let mfu = self.mfu.map_or_else(|| "?".to_owned(), |mfu| format!("{:.1} %", 100.0 * mfu));
        let memory = self.memory as f64 / f64::from(1 << 30);
        let save = self.save.as_deref().unwrap_or("-");
        format!("{:.0} | {:.1} | {mfu} | {memory:.2} GiB | {save}", self.tokens_per_s, self.flops / 1e12)
    }
}

impl TimedModel {
    /// Builds the job and its `train` section.
    fn build_spec(&self) -> diagnostic::Result<(JobSpec, TrainSpec)> {
        let job = build_check_job(self.model, &format!("precision=bf16 zero.stage=0 {}", self.rest))?;
        let mut spec = require_train_section(&job)?.clone();
        spec.zero = ZeroSpec { offload: self.offload.then_some(OffloadTarget::Cpu), ..spec.zero };
        Ok((job, spec))
    }

    /// Opens the GPU, builds the model on it and runs the first steps.
    fn warm_up(&self, open: OpenGpu) -> diagnostic::Result<WarmModel> {
        let (job, spec) = self.build_spec()?;
        let cuda = open()?;
        if spec.precision == Precision::Fp8 {
            cuda.require_fp8()?;
        }
        if !spec.deterministic {
            cuda.enable_matmul_autotuning();
        }
        let paths = collect_library_search_paths(&[], Path::new(""));
        // The reason why cuDNN is not usable is printed before the tables.
        let _unusable = cuda.set_attention_backend(select_attention_backend(&spec), &paths)?;
        // Only models that set `cuda_graphs=true` use CUDA graphs, so the other models stay
        // comparable.
        cuda.set_graphs_enabled(spec.cuda_graphs == CudaGraphMode::Always);
        let comm: Arc<dyn Comm> = Arc::new(local::create_group(1).remove(0));
        let comm = Arc::new(StagedComm::new(comm, cuda.clone()));
        let mut running = build_trainer(&spec, comm, cuda.clone())?.start_fresh();
        for _ in 0..3 {
            take_step(&mut running)?;
        }
        Ok(WarmModel { job, spec, cuda, running })
    }
}

/// A trainer that has run its first steps on an open GPU.
struct WarmModel {
    job: JobSpec,
    spec: TrainSpec,
    cuda: Arc<Cuda>,
    running: RunningTrainer,
}

/// Prints the time of each operation in a step of the model with this number.
pub(super) fn profile_model(open: OpenGpu, tiny: bool, number: usize) -> diagnostic::Result<()> {
    let timed = find_model_by_number(tiny, number)?;
    let printed = catch_unwind(AssertUnwindSafe(|| profile_and_print_step(timed, open)));
    printed.unwrap_or_else(|panic| Err(panic_to_diagnostic(panic.as_ref())))
}

/// Profiles one step of the model and prints the time of each operation.
fn profile_and_print_step(timed: &TimedModel, open: OpenGpu) -> diagnostic::Result<()> {
    let WarmModel { cuda, mut running, .. } = timed.warm_up(open)?;
    let seconds = time_steps(&mut running, &mut |steps, _| steps >= 5)?;
    cuda.start_profiling();
    take_step(&mut running)?;
    let profile = cuda.stop_profiling()?;
    let sum: f64 = profile.iter().map(|spent| spent.seconds).sum();
    println!(
        "{}: one step takes {:.2} ms; the sum of its operations is {:.2} ms\n",
        timed.name,
        1e3 * seconds,
        1e3 * sum
    );
    println!("| operation | calls | time, ms | share |\n|---|---|---|---|");
    for spent in profile {
        let share = 100.0 * spent.seconds / sum.max(f64::MIN_POSITIVE);
        println!("| {} | {} | {:.3} | {share:.1} % |", spent.name, spent.calls, 1e3 * spent.seconds);
    }
    Ok(())
}

/// Finds the model with this number, counted from 0. Fails if there is none.
fn find_model_by_number(tiny: bool, number: usize) -> diagnostic::Result<&'static TimedModel> {
    let models = select_timed_models(tiny).0;
    models.get(number).ok_or_else(|| {
        let message = format!("model {number} does not exist; models are 0 to {}", models.len() - 1);
        Diagnostic::error(codes::command::USAGE, message)
    })
}

/// Measures the training of a model. Converts a panic of a device operation to an error.
fn measure_or_report_panic(
    timed: &TimedModel,
    open: OpenGpu,
    duration: Duration,
) -> diagnostic::Result<Measurement> {
    let measured = catch_unwind(AssertUnwindSafe(|| measure_training(timed, open, duration)));
    measured.unwrap_or_else(|panic| Err(panic_to_diagnostic(panic.as_ref())))
}

/// Measures speed, memory and, if [`TimedModel::saves`] is set, the cost of saving.
fn measure_training(
    timed: &TimedModel,
    open: OpenGpu,
    duration: Duration,
) -> diagnostic::Result<Measurement> {
    let WarmModel { job, spec, cuda, mut running } = timed.warm_up(open)?;
    let is_enough = &mut |steps, elapsed| steps >= 3 && elapsed >= duration;
    let seconds = time_steps(&mut running, is_enough)?;
    let tokens_per_s = running.trainer.global_batch() as f64 * f64::from(spec.data.seq_len) / seconds;
    let flops = tokens_per_s * running.trainer.model.compute_flops_per_token(spec.data.seq_len as usize);
    let peak = PEAK_BF16_FLOPS.iter().find(|(name, _)| cuda.properties().name.contains(name));
    let mfu = peak.map(|(_, peak)| flops / peak);
    let memory = cuda.peak_memory_bytes();
    let save = timed.saves.then(|| measure_save(&mut running, &job, seconds)).transpose()?;
    Ok(Measurement { tokens_per_s, flops, mfu, memory, save })
}

/// Runs steps until `is_enough` accepts their number and time. Returns the mean seconds of one
/// step.
fn time_steps(
    running: &mut RunningTrainer,
    is_enough: &mut dyn FnMut(u32, Duration) -> bool,
) -> Result<f64, Error> {
    let (began, mut steps) = (Instant::now(), 0);
    while !is_enough(steps, began.elapsed()) {
        take_step(running)?;
        steps += 1;
    }
    running.trainer.ops.synchronize();
    Ok(began.elapsed().as_secs_f64() / f64::from(steps.max(1)))
}

/// A directory that is removed when this object is dropped.
struct TemporaryDirectory(PathBuf);

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // A directory that cannot be removed does not change the result of the check.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Measures one save while training continues. Returns the text of the cell about saving.
/// `step_seconds` is the time of a step without saving.
fn measure_save(
    running: &mut RunningTrainer,
    job: &JobSpec,
    step_seconds: f64,
) -> diagnostic::Result<String> {
    let here = std::env::current_dir().map_err(|e| {
        let message = "cannot determine the current directory";
        Diagnostic::error(codes::command::CURRENT_DIRECTORY_UNAVAILABLE, message).with_cause(&e)
    })?;
    let directory = TemporaryDirectory(here.join(format!("gpu-check-{}", std::process::id())));
    let mut saver = build_checkpoint_saver(running, job, &directory.0);
    // A run allocates staging memory when it starts, so the allocation is not measured.
    saver.wait_for_staging(running)?;
    running.trainer.ops.synchronize();
    let began = Instant::now();
    saver.begin_save(running)?;
    let blocked = began.elapsed().as_secs_f64();
    let during = time_steps(running, &mut |steps, _| steps > 0 && !saver.is_writing())?;
    let saved = saver.finish_save(running)?.ok_or_else(|| {
        Diagnostic::error(codes::training::CHECKPOINT_WRITER_FAILED, "no checkpoint was saved")
    })?;
    let slowdown = 100.0 * (1.0 - step_seconds / during);
    Ok(format!("{:.0} ms, {:.1} s, {slowdown:.1} %", 1e3 * blocked, saved.seconds))
}

/// Creates the saver of a checkpoint in `directory`.
fn build_checkpoint_saver(running: &RunningTrainer, job: &JobSpec, directory: &Path) -> CheckpointSaver {
    let units: Vec<_> = running.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let metadata = RunMetadata {
        model: build_checkpoint_model_spec(running.trainer.model.as_ref(), &units, running.train_spec(), 0),
        tokenizer: Vec::new(),
        job: job.clone(),
        data_digest: "generated".into(),
        rng_generation: 0,
        rng_decision: serde_json::Value::Null,
    };
    CheckpointSaver::new(
        directory.into(),
        job.checkpoint.clone(),
        metadata,
        None,
        StorageTopology::for_shared_directory(1),
    )
}

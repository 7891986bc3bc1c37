//! Measures the speed of training on a GPU with random weights and generated data, for `launch
//! gpu-check`.
use super::{
    check_job::{OpenGpu, build_trainer, run_check, take_step},
    timed_models::{TimedModel, find_model_by_number, select_timed_models},
};
use crate::{
    checkpoint::{
        save::{CheckpointSaver, RunMetadata},
        storage_topology::StorageTopology,
    },
    error::Error,
    gpu::{collect_library_search_paths, select_attention_backend},
    train::running_trainer::RunningTrainer,
};
use comm::{Comm, local, staged::StagedComm};
use device::{Cuda, Storage};
use diagnostic::{Diagnostic, codes};
use jobspec::{CudaGraphMode, JobSpec, Precision, TrainSpec};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// The peak rates of GPUs in dense bf16 operations per second, from NVIDIA's data sheets (SXM).
const PEAK_BF16_FLOPS: [(&str, f64); 4] =
    [("H100", 989.5e12), ("H200", 989.5e12), ("A100", 312e12), ("B200", 2250e12)];

/// Measures and prints for each model the speed and the memory of its training, and the cost of
/// saving.
pub(super) fn measure_and_print_speed(open: OpenGpu, tiny: bool) {
    println!(
        "| training, bf16 and AdamW | tokens/s | TFLOP/s | MFU (bf16 peak) | GPU memory | save: blocked, total, slowdown |"
    );
    println!("|---|---|---|---|---|---|");
    let (models, duration) = select_timed_models(tiny);
    for timed in models {
        let row = open().and_then(|cuda| run_check(|| measure_training(timed, cuda, duration)));
        let row = row.map(|measured| measured.to_table_cells());
        println!("| {} | {} |", timed.name, row.unwrap_or_else(|e| format!("{e} | | | |")));
    }
    println!();
}

/// Measures the speed and the memory of training model number `number`. Returns the measured values
/// as JSON.
pub(super) fn measure_model(open: OpenGpu, tiny: bool, number: usize) -> diagnostic::Result<Value> {
    let timed = &TimedModel { saves: false, ..*find_model_by_number(tiny, number)? };
    let (cuda, duration) = (open()?, select_timed_models(tiny).1);
    let Measurement { tokens_per_s, flops, mfu, memory, .. } =
        run_check(|| measure_training(timed, cuda, duration))?;
    Ok(json!({
        "what": timed.name, "tokens_per_s": tokens_per_s, "flops": flops, "mfu": mfu, "memory": memory,
    }))
}

/// The measured values of one model's training: speed, peak memory and cost of saving.
struct Measurement {
    tokens_per_s: f64,
    /// Floating-point operations per second.
    flops: f64,
    /// `flops` as a share of the GPU's peak, or `None` if the peak is not known.
    mfu: Option<f64>,
    /// The peak memory of the GPU in bytes.
    memory: u64,
    /// The text of the table cell about the cost of saving, or `None` if saving was not measured.
    save: Option<String>,
}

impl Measurement {
    /// Formats the measurement as the cells of a table row, separated by ` | `.
    fn to_table_cells(&self) -> String {
        let mfu = self.mfu.map_or_else(|| "?".to_owned(), |mfu| format!("{:.1} %", 100.0 * mfu));
        let memory = self.memory as f64 / f64::from(1 << 30);
        let save = self.save.as_deref().unwrap_or("-");
        format!("{:.0} | {:.1} | {mfu} | {memory:.2} GiB | {save}", self.tokens_per_s, self.flops / 1e12)
    }
}

/// Builds the model on the GPU and runs the first steps, which are not timed.
fn warm_up_model(timed: &TimedModel, cuda: Arc<Cuda>) -> diagnostic::Result<WarmModel> {
    let (job, spec) = timed.build_spec()?;
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

/// A trainer that has already run the first steps, which are slower, on an open GPU.
struct WarmModel {
    job: JobSpec,
    spec: TrainSpec,
    cuda: Arc<Cuda>,
    running: RunningTrainer,
}

/// Prints how long each operation of a training step takes, for model number `number`.
pub(super) fn profile_model(open: OpenGpu, tiny: bool, number: usize) -> diagnostic::Result<()> {
    let timed = find_model_by_number(tiny, number)?;
    let cuda = open()?;
    run_check(|| {
        let WarmModel { cuda, mut running, .. } = warm_up_model(timed, cuda)?;
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
    })
}

/// Measures the speed and the memory of training, and the cost of saving if [`TimedModel::saves`]
/// is set.
fn measure_training(
    timed: &TimedModel,
    cuda: Arc<Cuda>,
    duration: Duration,
) -> diagnostic::Result<Measurement> {
    let WarmModel { job, spec, cuda, mut running } = warm_up_model(timed, cuda)?;
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

/// Runs training steps until `is_enough` accepts their number and total time. Returns the mean
/// seconds of one step.
fn time_steps(
    running: &mut RunningTrainer,
    is_enough: &mut dyn FnMut(u32, Duration) -> bool,
) -> Result<f64, Error> {
    let (began, mut steps) = (Instant::now(), 0);
    while !is_enough(steps, began.elapsed()) {
        take_step(running)?;
        steps += 1;
    }
    running.trainer.ops.synchronize()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(steps.max(1)))
}

/// Guard that removes a temporary directory when dropped.
struct TemporaryDirectory(PathBuf);

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // A directory that cannot be removed does not change the result of the check.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Measures one checkpoint save while training continues, and returns the text of the table cell
/// about it. `step_seconds` is the time of a step without saving.
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
    running.trainer.ops.synchronize()?;
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

/// Creates the object that saves checkpoints of the training in `directory`.
fn build_checkpoint_saver(running: &RunningTrainer, job: &JobSpec, directory: &Path) -> CheckpointSaver {
    let (trainer, train, digest) = (&running.trainer, running.train_spec(), "generated".to_owned());
    let metadata = RunMetadata::new(trainer, train, job, digest, (Vec::new(), 0));
    let layout = StorageTopology::for_shared_directory(1);
    CheckpointSaver::new(directory.into(), job.checkpoint.clone(), metadata, None, layout)
}

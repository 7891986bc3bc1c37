//! Measures the speed of training on a GPU with random weights and generated data, for `launch
//! gpu-check`.
use super::{
    check_job::{GpuOpener, build_trainer, run_check, train_one_step},
    environment::{query_clocks, report_used_kernels},
    message::{PartOutput, ResultRow},
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
use comm::{Comm, staged::StagedComm, thread_comm};
use device::{Cuda, Storage, cuda::ProfileEntry};
use diagnostic::{Diagnostic, codes, quantity::format_count};
use jobspec::{CudaGraphMode, JobSpec, Precision, TrainSpec};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// The smallest share (0 to 1) of a training step's time for which an operation gets a row in the
/// result table.
const MIN_PRINTED_TIME_SHARE: f64 = 0.01;
/// The names of GPUs, each with its peak speed in dense bf16 operations per second, from NVIDIA's
/// data sheets (SXM versions).
const PEAK_BF16_FLOPS: [(&str, f64); 4] =
    [("H100", 989.5e12), ("H200", 989.5e12), ("A100", 312e12), ("B200", 2250e12)];

/// Trains one of the timed models of the GPU check, and reports the training speed and the time of
/// each operation in a step as rows of the result table.
pub(super) fn report_model_speed(
    output: &PartOutput,
    open: GpuOpener,
    tiny: bool,
    number: usize,
) -> diagnostic::Result<()> {
    let (timed, duration) = (find_model_by_number(tiny, number)?, select_timed_models(tiny).1);
    let Some(mut model) = warm_up_if_it_fits(output, timed, open()?)? else { return Ok(()) };
    let before = query_clocks(&model.cuda).1;
    let measured = measure_training(&mut model, duration)?;
    let (clocks, after) = query_clocks(&model.cuda);
    output.send_details("clocks", json!({"before": before, "after": after}));
    let values = [measured.to_text(), clocks].into_iter().filter(|text| !text.is_empty());
    let values = values.collect::<Vec<_>>().join(", ");
    output.send_row(ResultRow::measured(timed.name, values, measured.to_json(timed)));
    while let Some(notice) = model.cuda.record_step_duration(Duration::ZERO) {
        output.send_row(ResultRow::measured(format!("- {notice}"), "", Value::Null));
    }
    report_step_profile(output, timed, &mut model, MIN_PRINTED_TIME_SHARE)?;
    report_used_kernels(output, &model.cuda)
}

/// Trains one of the timed models of the GPU check for a few steps, and reports the time of each
/// operation in a step as a table row.
pub(super) fn report_model_profile(
    output: &PartOutput,
    open: GpuOpener,
    tiny: bool,
    number: usize,
) -> diagnostic::Result<()> {
    let timed = find_model_by_number(tiny, number)?;
    let Some(mut model) = warm_up_if_it_fits(output, timed, open()?)? else { return Ok(()) };
    let seconds = time_steps(&mut model.running, &mut |steps, _| steps >= 5)?;
    let values = format!("one step takes {:.2} ms", 1e3 * seconds);
    output.send_row(ResultRow::measured(timed.name, values, json!({"step_seconds": seconds})));
    report_step_profile(output, timed, &mut model, 0.0)
}

/// Measures for how long saving a checkpoint blocks and slows down the training of one of the timed
/// models, and reports the result as a table row.
pub(super) fn report_save_cost(
    output: &PartOutput,
    open: GpuOpener,
    tiny: bool,
    number: usize,
) -> diagnostic::Result<()> {
    let timed = find_model_by_number(tiny, number)?;
    let Some(mut model) = warm_up_if_it_fits(output, timed, open()?)? else { return Ok(()) };
    let seconds = time_steps(&mut model.running, &mut |steps, _| steps >= 3)?;
    let save = measure_save_cost(&mut model.running, &model.job, seconds)?;
    let values = format!(
        "blocked {:.0} ms, written in {:.1} s, training {:.1} % slower meanwhile",
        1e3 * save.blocked_seconds,
        save.seconds,
        100.0 * save.slowdown
    );
    let data = json!({
        "blocked_seconds": save.blocked_seconds, "seconds": save.seconds, "slowdown": save.slowdown,
    });
    output.send_row(ResultRow::measured(timed.name, values, data));
    Ok(())
}

/// Builds a model on the GPU and runs the first, slower training steps, or reports the model as
/// skipped and returns `None` if too little GPU memory is free.
fn warm_up_if_it_fits(
    output: &PartOutput,
    timed: &TimedModel,
    cuda: Arc<Cuda>,
) -> diagnostic::Result<Option<WarmedUpModel>> {
    let free_gib = cuda.query_memory_info()?.0 as f64 / f64::from(1 << 30);
    if free_gib < f64::from(timed.min_gib) {
        let cause = format!("needs {} GiB of GPU memory, and {free_gib:.1} GiB are free", timed.min_gib);
        output.send_row(ResultRow::skipped(timed.name, cause));
        return Ok(None);
    }
    warm_up_model(timed, cuda).map(Some)
}

/// Trains one of the timed models of the GPU check on the GPU, and returns the training speed and
/// the peak GPU memory as JSON. Returns the measured values as JSON.
pub(super) fn measure_model(open: GpuOpener, tiny: bool, number: usize) -> diagnostic::Result<Value> {
    let timed = find_model_by_number(tiny, number)?;
    let (cuda, duration) = (open()?, select_timed_models(tiny).1);
    let measured = run_check(|| measure_training(&mut warm_up_model(timed, cuda)?, duration))?;
    Ok(measured.to_json(timed))
}

/// What was measured while a model was trained on the GPU: speed, peak memory, and how much saving
/// a checkpoint slows down training.
struct TrainingMeasurement {
    tokens_per_s: f64,
    /// Floating-point operations per second.
    flops: f64,
    /// `flops` as a share of the GPU's peak, or `None` if the peak is not known.
    mfu: Option<f64>,
    /// The peak memory of the GPU in bytes.
    memory: u64,
}

impl TrainingMeasurement {
    /// Formats the measurement of a model's training as the values of a row of the result table.
    fn to_text(&self) -> String {
        let mfu = self.mfu.map_or_else(String::new, |mfu| format!(", MFU {:.1} %", 100.0 * mfu));
        let memory = self.memory as f64 / f64::from(1 << 30);
        let TrainingMeasurement { tokens_per_s, flops, .. } = self;
        format!("{tokens_per_s:.0} tokens/s, {:.1} TFLOP/s{mfu}, {memory:.2} GiB", flops / 1e12)
    }

    /// Returns the measurement of training the model `timed` as JSON.
    fn to_json(&self, timed: &TimedModel) -> Value {
        let TrainingMeasurement { tokens_per_s, flops, mfu, memory } = self;
        json!({
            "what": timed.name, "tokens_per_s": tokens_per_s, "flops": flops, "mfu": mfu, "memory": memory,
        })
    }
}

/// Builds the model on the GPU and runs the first steps, which are slower and not measured.
fn warm_up_model(timed: &TimedModel, cuda: Arc<Cuda>) -> diagnostic::Result<WarmedUpModel> {
    let (job, spec) = timed.build_job()?;
    if spec.precision == Precision::Fp8 {
        cuda.require_fp8()?;
    }
    if !spec.deterministic {
        cuda.enable_matmul_autotuning();
        cuda.enable_matmul_epilogues_where_faster();
    }
    let paths = collect_library_search_paths(&[], Path::new(""));
    // The environment reports the reason why cuDNN is not usable.
    let _unusable = cuda.set_attention_backend(select_attention_backend(&spec), &paths)?;
    // Only models that set `cuda_graphs=true` use CUDA graphs, so the other models stay
    // comparable.
    cuda.set_graphs_enabled(spec.cuda_graphs == CudaGraphMode::Always);
    let comm: Arc<dyn Comm> = Arc::new(thread_comm::create_thread_group(1).remove(0));
    let comm = Arc::new(StagedComm::new(comm, cuda.clone()));
    let mut running = build_trainer(&spec, comm, cuda.clone())?.start_with_random_params();
    for _ in 0..3 {
        train_one_step(&mut running)?;
    }
    Ok(WarmedUpModel { job, spec, cuda, running })
}

/// A model's trainer on an open GPU after its first training steps, which are slower than later
/// steps and not measured.
struct WarmedUpModel {
    job: JobSpec,
    spec: TrainSpec,
    cuda: Arc<Cuda>,
    running: RunningTrainer,
}

/// Measures the time of each operation of a training step, and reports operations with a large
/// share as rows of the result table. Reports a row for each operation that takes at least the
/// share `min_share` of the step, and all operations in the JSON file.
fn report_step_profile(
    output: &PartOutput,
    timed: &TimedModel,
    model: &mut WarmedUpModel,
    min_share: f64,
) -> diagnostic::Result<()> {
    model.cuda.start_profiling();
    train_one_step(&mut model.running)?;
    let profile = model.cuda.stop_profiling()?;
    let sum: f64 = profile.iter().map(|spent| spent.seconds).sum();
    let entry = |spent: &ProfileEntry| json!([spent.name, spent.calls, spent.seconds]);
    output.send_details("operations", profile.iter().map(entry).collect());
    let values = format!("{:.2} ms", 1e3 * sum);
    let subject = format!("{}: sum of all operations of a step", timed.name);
    output.send_row(ResultRow::measured(subject, values, json!({"seconds": sum})));
    for spent in profile {
        let share = spent.seconds / sum.max(f64::MIN_POSITIVE);
        if share >= min_share {
            let calls = format_count(spent.calls, "call");
            let values = format!("{:.3} ms, {calls}, {:.1} %", 1e3 * spent.seconds, 100.0 * share);
            output.send_row(ResultRow::measured(format!("- {}", spent.name), values, Value::Null));
        }
    }
    Ok(())
}

/// Runs training steps for the time `duration`, and measures their speed and the peak GPU memory.
fn measure_training(
    model: &mut WarmedUpModel,
    duration: Duration,
) -> diagnostic::Result<TrainingMeasurement> {
    let WarmedUpModel { spec, cuda, running, .. } = model;
    let is_enough = &mut |steps, elapsed| steps >= 3 && elapsed >= duration;
    let seconds = time_steps(running, is_enough)?;
    let tokens_per_s = running.trainer.global_batch_size() as f64 * f64::from(spec.data.seq_len) / seconds;
    let flops = tokens_per_s * running.trainer.model.compute_flops_per_token(spec.data.seq_len as usize);
    let peak = PEAK_BF16_FLOPS.iter().find(|(name, _)| cuda.properties().name.contains(name));
    let mfu = peak.map(|(_, peak)| flops / peak);
    Ok(TrainingMeasurement { tokens_per_s, flops, mfu, memory: cuda.peak_memory_bytes() })
}

/// Runs training steps until the function `is_enough` returns true for the number of steps and
/// their total time. Returns the mean seconds of one step.
fn time_steps(
    running: &mut RunningTrainer,
    is_enough: &mut dyn FnMut(u32, Duration) -> bool,
) -> Result<f64, Error> {
    let (began, mut steps) = (Instant::now(), 0);
    while !is_enough(steps, began.elapsed()) {
        train_one_step(running)?;
        steps += 1;
    }
    running.trainer.ops.synchronize()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(steps.max(1)))
}

/// A temporary directory for checkpoints of the measured training, which is removed when this value
/// is dropped.
struct TemporaryDirectory(PathBuf);

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // A directory that cannot be removed does not change the result of the check.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The cost of saving a checkpoint during training: the time for which training is blocked, and the
/// slowdown of training until the save ends.
struct SaveCost {
    /// How long training waited for the start of the save.
    blocked_seconds: f64,
    /// The time until the checkpoint was complete.
    seconds: f64,
    /// The share of its speed that training lost meanwhile.
    slowdown: f64,
}

/// Saves one checkpoint during training, and measures how long training is blocked and how much
/// training is slowed down until the save ends. `step_seconds` is the time of a step without
/// saving.
fn measure_save_cost(
    running: &mut RunningTrainer,
    job: &JobSpec,
    step_seconds: f64,
) -> diagnostic::Result<SaveCost> {
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
    let during = time_steps(running, &mut |steps, _| steps > 0 && !saver.is_writing_in_background())?;
    let saved = saver.finish_and_commit_save(running)?.ok_or_else(|| {
        Diagnostic::error(codes::training::CHECKPOINT_WRITER_FAILED, "no checkpoint was saved")
    })?;
    let slowdown = 1.0 - step_seconds / during;
    Ok(SaveCost { blocked_seconds: blocked, seconds: saved.seconds, slowdown })
}

/// Creates the [`CheckpointSaver`] that saves the measured training to `directory`, so that the
/// cost of a save can be measured.
fn build_checkpoint_saver(running: &RunningTrainer, job: &JobSpec, directory: &Path) -> CheckpointSaver {
    let (trainer, train, digest) = (&running.trainer, running.train_spec(), "generated".to_owned());
    let metadata = RunMetadata::new(trainer, train, job, digest, (Vec::new(), 0));
    let layout = StorageTopology::for_shared_directory(1);
    CheckpointSaver::new(directory.into(), job.checkpoint.clone(), metadata, None, layout)
}

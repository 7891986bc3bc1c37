//! Checks a `train` section without running it: whether its keys fit the model and the data, and
//! how much memory each rank will need.
use crate::{
    checkpoint::resume::open_matching_adapters,
    data,
    expert_layout::ExpertLayout,
    gpu::collect_library_search_paths,
    model::{self, Model},
    param_groups::{self, LORA_FROM_KEY},
    params::ParamUnit,
    trainer_stages::{resolve_lora_section, resolve_model_section},
};
use diagnostic::{Diagnostic, codes};
use jobspec::{JobSpec, TrainSpec};
use memory_estimator::MemoryEstimator;
use protocol::{
    preflight::{MAX_TRAINING_WORKERS, Preflight, PreflightReport},
    probe::LibraryReport,
};
use std::path::{Path, PathBuf};

mod collective_memory;
mod gradient_memory;
mod memory_estimator;
mod parameter_memory;

pub use memory_estimator::CUDA_CONTEXT_BYTES;

// The launcher, which rejects more workers before it starts any, does not depend on crate comm.
const _: () = assert!(MAX_TRAINING_WORKERS as usize == comm::MAX_WORLD_SIZE);

/// The checks that the launcher runs before a job with built-in training (section `train`) starts.
pub struct TrainPreflight;

impl Preflight for TrainPreflight {
    fn check_gpus(&self, job: &JobSpec) -> diagnostic::Result<u64> {
        let search = collect_library_search_paths(&job.cluster.cuda_library_paths, &job.run.workdir);
        device::cuda::check_driver_and_libraries(&search).map_err(crate::gpu::to_unusable_gpu_error)
    }

    fn inspect_gpu_libraries(&self, directories: &[PathBuf]) -> Vec<LibraryReport> {
        crate::gpu::probe_gpu_libraries(&collect_library_search_paths(directories, Path::new("/")))
    }

    fn check_job(&self, job: &JobSpec, world: u32, threads: u32) -> PreflightReport {
        let mut report = PreflightReport::default();
        if let Some(train) = &job.train {
            check_train_section(job, train, world, threads, &mut report);
        }
        report
    }
}

/// Checks the `train` section of a job before it starts, and adds every error and warning to the
/// report. Checks that need the result of a failed check are skipped.
fn check_train_section(
    job: &JobSpec,
    train: &TrainSpec,
    world: u32,
    threads: u32,
    report: &mut PreflightReport,
) {
    let data = check_data(job, train, report);
    // The model can be checked without the data, except for its vocabulary.
    let (vocab, tokens) = data.unwrap_or((train.model.vocab_size.max(1), 0));
    let (train, model, units) = match build_checked_model(job, train, vocab, world) {
        Ok(checked) => checked,
        Err(errors) => return report.errors.extend(errors),
    };
    report.parameters = units.iter().map(|u| u.trained_len() as u64).sum();
    let groups = param_groups::assign_param_groups(&train.optimizer, &units, &model.tied_weights());
    report.errors.extend(groups.err().unwrap_or_default());
    if data.is_none() {
        return;
    }
    report.warnings.extend(find_idle_worker_warning(&train, world));
    let plan = MemoryEstimator {
        job,
        train: &train,
        model: &model,
        units: &units,
        world: world as usize,
        threads: threads as usize,
        tokens,
    };
    report.memory = (0..world).map(|rank| plan.estimate_rank_memory(rank)).collect();
    if job.checkpoint.memory.is_some() {
        report.state_bytes =
            (0..world).map(|rank| plan.count_checkpoint_shard_bytes(rank as usize)).collect();
    }
}

/// Checks the training and evaluation data of a job without running it, and adds errors and
/// warnings to the report. Returns the tokenizer's vocabulary size and the number of tokens, or
/// `None` if the training data cannot be read.
fn check_data(job: &JobSpec, train: &TrainSpec, report: &mut PreflightReport) -> Option<(u32, u64)> {
    let eval_files = train.eval.as_ref().map_or(&[][..], |eval| &eval.files);
    let checked = data::check_data(&train.data, eval_files, &job.run.workdir);
    report.errors.extend(checked.errors.into_iter().map(Diagnostic::from));
    let eval_errors = checked.eval_errors.into_iter().map(Diagnostic::from);
    report.errors.extend(eval_errors.map(|error| match error.subject() {
        Some("train.data.files") => error.with_subject("train.eval.files"),
        _ => error,
    }));
    // Landlock denies less than seccomp, so a kernel without Landlock is no reason for a warning.
    if checked.confinement.is_some_and(|confinement| !confinement.seccomp) {
        let message = "the kernel has no seccomp, so tokenizers, chat templates and Parquet files are \
                       interpreted with limits of memory and CPU time only";
        report.warnings.push(
            Diagnostic::warning(codes::data::SANDBOX_INCOMPLETE, message)
                .with_subject("train.data")
                .with_help("use only data, tokenizers and templates from sources that you trust"),
        );
    }
    checked.estimate.map(|estimate| (estimate.vocab_size, estimate.tokens))
}

/// What the checks before a job starts need to know of its model: the completed `train` section,
/// the model, and its parameter units (tensors that are gathered together).
type CheckedModel = (TrainSpec, Model, Vec<ParamUnit>);

/// Builds the job's model with LoRA adapters and expert placement for `world` ranks, without
/// allocating parameter values, for checks before the job starts. Fails if the model cannot be
/// built or trained with these settings, and reports all mistakes.
fn build_checked_model(
    job: &JobSpec,
    train: &TrainSpec,
    vocab: u32,
    world: u32,
) -> Result<CheckedModel, Vec<Diagnostic>> {
    let one = |error: Diagnostic| vec![error];
    let workdir = &job.run.workdir;
    let spec =
        resolve_model_section(&train.model.resolve_paths(workdir), vocab, train.data.seq_len).map_err(one)?;
    let mut model = model::build_model_with_router_losses(&spec, &train.experts, train.data.seq_len)
        .map_err(|e| {
            one(match &spec.from {
                Some(directory) => e.into_diagnostic_of_file(directory).with_subject("train.model.from"),
                None => Diagnostic::from(e).with_subject("train.model.family"),
            })
        })?;
    let lora = train.lora.as_ref().map(|l| l.resolve_paths(workdir));
    let train = TrainSpec { lora: resolve_lora_section(lora.as_ref()).map_err(one)?, ..train.clone() };
    let layout = ExpertLayout::new(&train.experts, &model, world as usize).map_err(one)?;
    let units = param_groups::build_trainable_units(&mut model, layout.as_ref(), &train)?;
    if let Some(directory) = train.lora.as_ref().and_then(|l| l.from.as_ref()) {
        open_matching_adapters(directory, &units).map_err(|e| one(e.with_subject(LORA_FROM_KEY)))?;
    }
    Ok((train, model, units))
}

/// Returns a warning that some workers will have no work if the global batch has fewer
/// micro-batches than the job has workers.
fn find_idle_worker_warning(train: &TrainSpec, world: u32) -> Option<Diagnostic> {
    let micro_batch_count = train.batch.global / train.batch.micro;
    (micro_batch_count < world).then(|| {
        let micro_batches = if micro_batch_count == 1 {
            "1 micro-batch"
        } else {
            &format!("{micro_batch_count} micro-batches")
        };
        let message = format!(
            "a step has {micro_batches} (global / micro) for {world} workers, of which {} compute nothing",
            world - micro_batch_count
        );
        Diagnostic::warning(codes::training::BATCH_LEAVES_WORKERS_IDLE, message)
            .with_subject("train.batch")
            .with_field("micro_batches", micro_batch_count)
            .with_field("workers", world)
            .with_help("raise `train.batch.global` or lower `train.batch.micro`")
    })
}

//! Builds the jobs and trainers of `launch gpu-check`: models with random weights, trained on
//! generated samples.
use crate::{
    error::Error,
    model::MicroBatch,
    train::{
        running_trainer::RunningTrainer,
        step::{RankStepReport, SampleSource},
    },
    trainer_stages::{ResolvedSpec, UninitializedTrainer},
};
use comm::Comm;
use device::{Cuda, Ops, storage::extract_panic_message};
use diagnostic::{Category, Diagnostic, codes};
use jobspec::{JobSpec, TrainSpec};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

/// A function that opens the GPU of `launch gpu-check`, called once for each rank of a training
/// run.
pub(super) type GpuOpener<'a> = &'a (dyn Fn() -> diagnostic::Result<Arc<Cuda>> + Sync);

/// A source of training samples whose tokens are computed from the number of the sample, without
/// data files.
struct GeneratedSamples {
    vocab: u32,
}

impl SampleSource for GeneratedSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<(), Error> {
        let t = batch.seq_len;
        for i in 0..batch.sequences * t {
            let position = (first + (i / t) as u64) * (t as u64 + 1) + (i % t) as u64;
            let token = |n: u64| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u32 % self.vocab;
            (batch.tokens[i], batch.labels[i], batch.starts[i]) = (token(position), token(position + 1), 0);
        }
        Ok(())
    }
}

/// Builds a job for `launch gpu-check` that trains the given model, with the values of further
/// `train` keys, such as the batch size, from the text `rest`. `model` is the section `train.model`
/// as YAML. `rest` sets further keys of `train`, separated by spaces; all other keys have their
/// defaults.
pub(super) fn build_check_job(model: &str, rest: &str) -> diagnostic::Result<JobSpec> {
    let text = format!("name: gpu-check\ntrain: {{data: {{files: [none]}}, model: {{{model}}}}}\n");
    let set: Vec<String> = rest.split_whitespace().map(|s| format!("train.{s}")).collect();
    let loaded = jobspec::load_job(jobspec::JobSource::Text { name: "gpu-check".into(), text }, &set);
    let (mut job, ..) = loaded.map_err(|mistakes| {
        let summary = Diagnostic::error(codes::run::INTERNAL, "the job of the check is not valid");
        mistakes.into_iter().fold(summary, Diagnostic::with_detail_diagnostic)
    })?;
    job.checkpoint.keep = 1;
    Ok(job)
}

/// Returns the `train` section of a job that the GPU check has built, and fails if there is none.
pub(super) fn require_train_section(job: &JobSpec) -> diagnostic::Result<&TrainSpec> {
    job.train.as_ref().ok_or_else(|| {
        Diagnostic::error(codes::training::TRAIN_SECTION_MISSING, "the job has no `train` section")
    })
}

/// Builds the trainer of one rank, for training in the GPU check, from a job's `train` section.
/// Collective: every rank must call it.
pub(super) fn build_trainer(
    train: &TrainSpec,
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
) -> Result<UninitializedTrainer, Error> {
    let parameters = ResolvedSpec::new(train, train.model.vocab_size)?.build_model()?;
    parameters.shard_model(comm, ops)?.into_uninitialized_trainer()
}

/// Runs one optimizer step of a trainer on generated samples, and returns the loss and the gradient
/// norm.
pub(super) fn train_one_step(running: &mut RunningTrainer) -> Result<(f64, f64), Error> {
    let source = GeneratedSamples { vocab: running.train_spec().model.vocab_size };
    let (outcome, _) = running.run_step(&source, RankStepReport::default())?;
    Ok((outcome.loss, outcome.grad_norm))
}

/// Runs a function that checks an open GPU, and returns its result, or an internal error if the
/// function panics. Every error has the category `Failed`, because the GPU was usable.
pub(super) fn run_check<T>(check: impl FnOnce() -> diagnostic::Result<T>) -> diagnostic::Result<T> {
    catch_panic(check).map_err(|error| error.with_category(Category::Failed))
}

/// Runs the function `work`, and converts a panic in it to an internal error.
pub(super) fn catch_panic<T>(work: impl FnOnce() -> diagnostic::Result<T>) -> diagnostic::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(Diagnostic::error(codes::run::INTERNAL, extract_panic_message(panic.as_ref())))
    })
}

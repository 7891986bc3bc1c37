//! Resumes a run: selects and loads a checkpoint, checks that it belongs to the job, and reports
//! differences between job and checkpoint.
mod adapters;
mod batch_job;
mod candidates;
mod differences;
mod external;
mod memory;
mod native;
mod pretrained;
mod resume_point;
mod weight_match;

pub use adapters::open_matching_adapters;
pub use candidates::CheckpointLocations;
pub use pretrained::{PretrainedModel, start_without_checkpoint};
pub use resume_point::{EventSink, MemoryResumeState, ResumePoint};

use crate::{
    checkpoint::host_local::CheckpointCandidate,
    error::{Error, Result},
    trainer_stages::UninitializedTrainer,
};
use batch_job::{build_continuation_notice, list_batch_job_checkpoints};
use candidates::{NamedCheckpoint, find_named_checkpoint, list_candidates};
use diagnostic::{Diagnostic, codes::training as codes};
use external::load_external_state;
use jobspec::{JobSpec, ResumeFrom};
use memory::{MemoryCopyStepRange, MemorySearchOutcome, resume_from_memory};
use native::{LoadError, load_native_checkpoint};
use protocol::{
    control::{BatchJobRecord, FromWorker},
    event::Event,
};
use std::path::{Path, PathBuf};
use weight_match::list_weight_shapes;

/// Loads the training state from which the job resumes, a checkpoint or copies in the memory of
/// hosts, into the trainers of all ranks. Returns `None` if the run starts at step 0. Collective:
/// every rank must call it.
///
/// Copies in memory are those of an earlier attempt of this run. A state in memory is preferred,
/// unless `checkpoint.dir` has a newer checkpoint that is not damaged.
///
/// `batch_job` is a batch job that may have been started again. Without `resume.from: auto`, the
/// run continues from the newest checkpoint of this batch job, if there is one. `data_digest` is
/// the digest of the training data. Of several checkpoints, damaged ones are skipped with a notice
/// in favour of older ones. A checkpoint of another model is an error of the job and never skipped.
pub fn resume_from_checkpoint(
    ready: &mut UninitializedTrainer,
    job: &JobSpec,
    dirs: &CheckpointLocations,
    batch_job: Option<&BatchJobRecord>,
    data_digest: &str,
    events: &mut EventSink,
) -> Result<Option<ResumePoint>> {
    let root = dirs.root;
    let (listed, continued) = list_preferred_checkpoints(ready, job, dirs, batch_job, events)?;
    let newest_saved = listed.first().map(|newest| newest.path.clone());
    let from = listed.first().and_then(CheckpointCandidate::step);
    let range = MemoryCopyStepRange { from, below: None };
    let mut reason = match resume_from_memory(ready, dirs, range, data_digest, events)? {
        MemorySearchOutcome::Resumed(mut resumed) => {
            resumed.memory.newest_saved = newest_saved;
            return Ok(Some(resumed));
        }
        MemorySearchOutcome::Unusable(reason) => reason,
    };
    let (candidates, is_named) = match &job.resume.from {
        _ if continued.is_some() => (listed, false),
        ResumeFrom::Never => return Ok(None),
        ResumeFrom::Auto => (listed, false),
        ResumeFrom::Path(path) => match find_named_checkpoint(ready, dirs, &dirs.workdir.join(path))? {
            NamedCheckpoint::Native(candidate) => (vec![candidate], true),
            NamedCheckpoint::External(mut source, path) => {
                source.unfuse_experts(&list_weight_shapes(ready));
                return load_external_state(ready, &source, &path, job, reason, events).map(Some);
            }
        },
    };
    let mut skipped: Vec<(PathBuf, Error)> = Vec::new();
    let mut candidates = candidates.into_iter().peekable();
    while let Some(candidate) = candidates.next() {
        match load_native_checkpoint(ready, dirs, &candidate, (data_digest, reason.clone()), events) {
            Ok(resumed) => {
                report_skipped_checkpoints(&skipped, events)?;
                if let Some(batch_job) = continued {
                    let notice = build_continuation_notice(batch_job, &job.resume.from, &candidate.path);
                    events(FromWorker::Event(notice))?;
                }
                return Ok(Some(resumed));
            }
            Err(LoadError::Fatal(e)) => return Err(e),
            Err(LoadError::Damaged(e)) if is_named => return Err(e),
            Err(LoadError::Damaged(e)) => skipped.push((candidate.path.clone(), e)),
        }
        // States in memory that are older than this checkpoint, but newer than the next one.
        let from = candidates.peek().and_then(CheckpointCandidate::step);
        let range = MemoryCopyStepRange { from, below: candidate.step() };
        match resume_from_memory(ready, dirs, range, data_digest, events)? {
            MemorySearchOutcome::Resumed(mut resumed) => {
                resumed.memory.newest_saved = newest_saved;
                report_skipped_checkpoints(&skipped, events)?;
                return Ok(Some(resumed));
            }
            MemorySearchOutcome::Unusable(further) => reason = further.or(reason),
        }
    }
    match skipped.is_empty() {
        true => Ok(None),
        false => Err(build_no_usable_checkpoint_error(root, &skipped, continued)),
    }
}

/// Lists, newest first, the checkpoints that a resume tries before any others: with `resume.from:
/// auto` all in `checkpoint.dir`, otherwise those of the restarted batch job. Also returns the
/// batch job if the checkpoints are those of a batch job. Collective: every rank must call it.
fn list_preferred_checkpoints<'a>(
    ready: &UninitializedTrainer,
    job: &JobSpec,
    dirs: &CheckpointLocations,
    batch_job: Option<&'a BatchJobRecord>,
    events: &mut EventSink,
) -> Result<(Vec<CheckpointCandidate>, Option<&'a BatchJobRecord>)> {
    let root = dirs.root;
    if job.resume.from == ResumeFrom::Auto {
        return Ok((list_candidates(ready, dirs, root, &mut |_| true)?, None));
    }
    let Some(batch_job) = batch_job else { return Ok((Vec::new(), None)) };
    let listed = list_batch_job_checkpoints(ready, dirs, batch_job, &job.resume.from, events)?;
    let continued = Some(batch_job).filter(|_| !listed.is_empty());
    Ok((listed, continued))
}

/// Reports to the user each checkpoint that the resume skipped because it is damaged or incomplete,
/// with the reason.
fn report_skipped_checkpoints(skipped: &[(PathBuf, Error)], events: &mut EventSink) -> Result<()> {
    for (path, error) in skipped {
        let state = if is_shard_unreachable(error) { "incomplete" } else { "damaged" };
        let message = format!("skipped {state} checkpoint {}: {error}", path.display());
        events(FromWorker::Event(Event::new_diagnostic_notice(None, message, error.diagnostic())))?;
    }
    Ok(())
}

/// Returns true if `error` reports that a required shard of the checkpoint is stored on no host of
/// the job. Such an error does not mean that a file is damaged.
fn is_shard_unreachable(error: &Error) -> bool {
    error.code() == codes::RESUME_SHARD_UNREACHABLE
}

/// Builds the error which reports that the directory `root` contains no checkpoint that can be used
/// to resume the job. `skipped` has the newest checkpoint first.
fn build_no_usable_checkpoint_error(
    root: &Path,
    skipped: &[(PathBuf, Error)],
    continued: Option<&BatchJobRecord>,
) -> Error {
    let (_, newest) = &skipped[0];
    if skipped.iter().all(|(_, e)| is_shard_unreachable(e)) {
        return newest.clone();
    }
    let of_job = continued.map_or_else(String::new, |batch_job| format!(" of {}", batch_job.label));
    let message = match skipped.len() {
        1 => format!("the only checkpoint{of_job} in {} is damaged", root.display()),
        n => format!("all {n} checkpoints{of_job} in {} are damaged or incomplete", root.display()),
    };
    // Without its checkpoints, a batch job does what `resume.from` states.
    let begins = match continued {
        Some(_) => "or submit the job again, so that `resume.from` applies",
        None => "or set `resume.from: never` to start at step 0",
    };
    Diagnostic::error(codes::RESUME_NO_USABLE_CHECKPOINT, message)
        .with_subject(root.display().to_string())
        .with_field("checkpoints", skipped.len())
        .with_cause(newest)
        .with_help("rebuild one with `launch ckpt repair`, or remove them")
        .with_help(begins)
        .into()
}

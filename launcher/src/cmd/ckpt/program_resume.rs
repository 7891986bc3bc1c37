//! Prepares the checkpoint directory that a program resumes from (`resume.from`) for the world size
//! of the job, before any worker starts.
use crate::plan::Plan;
use ckpt::rng_files::{
    reconcile::{ReconcileOptions, ReconcilePolicy},
    resume_preparation,
};
use diagnostic::{
    Diagnostic,
    codes::{command, job as job_codes},
};
use jobspec::{JobSpec, ResumeFrom, RngPolicy, env};
use std::path::{Path, PathBuf};

/// The text in `run.command` that launch replaces by the path of the checkpoint directory from
/// which the program resumes. If the program starts from the beginning, an empty text replaces the
/// placeholder.
const RESUME_PLACEHOLDER: &str = "{resume}";

/// Finds the checkpoint that `resume.from` selects, adapts it to the job's world size, and passes
/// its path to the planned workers.
///
/// Adds the path to the environment of each planned worker, replaces `{resume}` in each worker's
/// command, and adds notes to the warnings of the plan. Leaves plans of built-in training
/// unchanged.
pub(crate) fn prepare_program_resume(job: &JobSpec, plan: &mut Plan) -> diagnostic::Result<()> {
    if job.run.command.is_none() {
        return Ok(());
    }
    let (path, notes) = prepare_resume_directory(job, plan.world)?;
    plan.warnings.extend(notes);
    let text = match &path {
        Some(path) => path.to_str().ok_or_else(|| path_not_utf8_error(path))?,
        None => "",
    };
    for worker in plan.host_plans.iter_mut().flat_map(|host| &mut host.workers) {
        if job.resume.from != ResumeFrom::Never {
            worker.env.push((env::LAUNCH_RESUME_FROM.to_owned(), text.to_owned()));
        }
        for word in worker.command.iter_mut().flatten().filter(|w| w.contains(RESUME_PLACEHOLDER)) {
            *word = word.replace(RESUME_PLACEHOLDER, text);
        }
    }
    Ok(())
}

/// Finds the checkpoint directory that `resume.from` selects and, if its random generator states
/// are for another world size, prepares a directory for `world` workers.
///
/// Returns the absolute path, or `None` if the program starts without a checkpoint. Also returns
/// notes for the user. A note about the changes of the checkpoint has the fields `path`, the
/// prepared directory, and `reused`, whether an earlier start made the directory.
fn prepare_resume_directory(
    job: &JobSpec,
    world: u32,
) -> diagnostic::Result<(Option<PathBuf>, Vec<Diagnostic>)> {
    let workdir = &job.run.workdir;
    let build_note =
        |message: String| Diagnostic::note(job_codes::JOB_RESUME_NOTICE, message).with_subject("resume.from");
    let (found, skipped) = match &job.resume.from {
        ResumeFrom::Never => return Ok((None, Vec::new())),
        ResumeFrom::Auto => resume_preparation::find_newest_complete(&workdir.join(&job.checkpoint.dir))?,
        ResumeFrom::Path(path) => (Some(workdir.join(path)), Vec::new()),
    };
    let mut notes: Vec<Diagnostic> = skipped.into_iter().map(build_note).collect();
    let Some(dir) = found else {
        let checkpoints = job.checkpoint.dir.display();
        notes.push(build_note(format!(
            "{checkpoints} has no checkpoint yet; the program starts from the beginning"
        )));
        return Ok((None, notes));
    };
    let policy = match job.resume.rng {
        RngPolicy::Reconcile => ReconcilePolicy::Reconcile,
        RngPolicy::Strict => ReconcilePolicy::Strict,
        RngPolicy::Reseed => ReconcilePolicy::Reseed,
    };
    let prepared = resume_preparation::prepare_resume_directory(&dir, &ReconcileOptions::new(world, policy))
        .map_err(|error| Diagnostic::from(error).with_field("key", "resume.from"))?;
    let path = prepared.path.display().to_string();
    notes.extend(prepared.lines.into_iter().map(|line| {
        build_note(line).with_field("path", path.as_str()).with_field("reused", prepared.is_reused)
    }));
    notes.push(build_note(format!("the program resumes from {path}")));
    Ok((Some(prepared.path), notes))
}

/// Creates the error that the path of a checkpoint cannot be passed to a program, because the path
/// is not UTF-8.
fn path_not_utf8_error(path: &Path) -> Diagnostic {
    let path = path.display().to_string();
    Diagnostic::error(
        command::RESUME_PATH_NOT_UTF8,
        format!("the path to resume from is not UTF-8 text: {path}"),
    )
    .with_subject("resume.from")
    .with_field("path", path)
}

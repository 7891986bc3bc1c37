//! Checks the checkpoint that `resume.from` names, before a job starts.
use ckpt::CkptError;
use diagnostic::{Category, Diagnostic};
use jobspec::{JobSpec, ResumeFrom};

/// Fails if the path that `resume.from` names is no checkpoint, is damaged, or lacks a file. Checks
/// only jobs with built-in training, because the checkpoint of a program may have any format.
pub(crate) fn check_resume_path(job: &JobSpec) -> diagnostic::Result<()> {
    let (ResumeFrom::Path(path), Some(_)) = (&job.resume.from, &job.train) else { return Ok(()) };
    match ckpt::open_checkpoint(&job.run.workdir.join(path)) {
        Err(
            error @ (CkptError::NotFound { .. }
            | CkptError::NotACheckpoint { .. }
            | CkptError::Missing { .. }
            | CkptError::Damaged { .. }),
        ) => Err(Diagnostic::from(error).with_category(Category::Checkpoint).with_subject("resume.from")),
        // A worker, which knows the trained weights, may open it.
        Ok(_) | Err(_) => Ok(()),
    }
}

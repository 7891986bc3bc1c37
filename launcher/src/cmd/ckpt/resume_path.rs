//! Checks the checkpoint that `resume.from` names, before a job starts.
use diagnostic::{Category, Diagnostic};
use jobspec::{JobSpec, ResumeFrom};

/// Fails if no checkpoint can be opened at the path that `resume.from` names. Checks only jobs with
/// built-in training, because the checkpoint of a program may have any format.
pub(crate) fn check_resume_path(job: &JobSpec) -> diagnostic::Result<()> {
    let (ResumeFrom::Path(path), Some(_)) = (&job.resume.from, &job.train) else { return Ok(()) };
    match ckpt::open_checkpoint(&job.run.workdir.join(path)) {
        Ok(_) => Ok(()),
        Err(error) => {
            Err(Diagnostic::from(error).with_category(Category::Checkpoint).with_subject("resume.from"))
        }
    }
}

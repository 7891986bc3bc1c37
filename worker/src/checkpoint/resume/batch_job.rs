//! Finds the checkpoints that earlier runs of the same batch job have saved, for example before
//! Slurm requeued the job. If a scheduler starts a batch job again, the run continues from the
//! newest of them, whatever `resume.from` states.
use super::{
    candidates::{CheckpointLocations, list_candidates},
    resume_point::EventSink,
};
use crate::{
    checkpoint::{host_local::CheckpointCandidate, save::BATCH_JOB_KEY},
    error::{Result, to_unreadable_checkpoint_error},
    trainer_stages::UninitializedTrainer,
};
use ckpt::{Checkpoint, CkptError};
use diagnostic::{Diagnostic, codes::training as codes};
use jobspec::ResumeFrom;
use protocol::{
    control::{BatchJobRecord, FromWorker},
    event::Event,
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The largest number of checkpoints of earlier runs of a batch job that are listed, beginning with
/// the newest. More are needed only if all of these are damaged.
const MAX_CHECKPOINTS: usize = 16;
/// The largest number of checkpoints with unreadable manifests (tables of contents) that are
/// reported to the user.
const MAX_REPORTED: usize = 3;

/// Lists the checkpoints in `checkpoint.dir` that earlier runs of the batch job `batch_job` (such
/// as a requeued Slurm job) saved, newest first. Reports manifests that rank 0 cannot read, because
/// these checkpoints may be of the batch job. Also reports if there are no checkpoints, so that
/// `resume.from`, which is `from`, applies.
///
/// Collective: every rank must call it.
pub(super) fn list_batch_job_checkpoints(
    ready: &UninitializedTrainer,
    dirs: &CheckpointLocations,
    batch_job: &BatchJobRecord,
    from: &ResumeFrom,
    events: &mut EventSink,
) -> Result<Vec<CheckpointCandidate>> {
    let mut selection = BatchJobSelection::new(batch_job);
    let listed = list_candidates(ready, dirs, dirs.root, &mut |path: &Path| {
        !selection.is_full()
            && selection
                .select_if_of_batch_job(path, Checkpoint::read_run_facts(path).map(|facts| facts.cursor))
    })?;
    for (path, error) in selection.unreadable {
        let error = to_unreadable_checkpoint_error(error);
        let message = format!("skipped damaged checkpoint {}: {error}", path.display());
        events(FromWorker::Event(Event::new_diagnostic_notice(None, message, error.diagnostic())))?;
    }
    if listed.is_empty() {
        let other_command = selection.other_command.as_deref();
        let notice = build_no_checkpoint_notice(batch_job, from, dirs.root, other_command);
        notice.map_or(Ok(()), |notice| events(FromWorker::Event(notice)))?;
    }
    Ok(listed)
}

/// Filter that accepts the checkpoints which runs of one batch job (such as a requeued Slurm job)
/// have saved, and counts them.
struct BatchJobSelection<'a> {
    batch_job: &'a BatchJobRecord,
    /// The number of selected checkpoints.
    selected: usize,
    /// The newest checkpoint that another command of the batch job has saved.
    other_command: Option<PathBuf>,
    /// The first checkpoints whose manifests cannot be read.
    unreadable: Vec<(PathBuf, CkptError)>,
}

impl BatchJobSelection<'_> {
    /// Creates the filter for checkpoints that runs of the batch job `batch_job` have saved; the
    /// filter's count of accepted checkpoints starts at zero.
    fn new(batch_job: &BatchJobRecord) -> BatchJobSelection<'_> {
        BatchJobSelection { batch_job, selected: 0, other_command: None, unreadable: Vec::new() }
    }

    /// Returns whether the maximum of [`MAX_CHECKPOINTS`] checkpoints of the batch job has been
    /// accepted.
    fn is_full(&self) -> bool {
        self.selected == MAX_CHECKPOINTS
    }

    /// Returns whether a run of this batch job has saved the checkpoint at `path`, and updates the
    /// number of accepted checkpoints. `cursor` is the cursor in the manifest of the checkpoint.
    /// Records the error if the manifest cannot be read.
    fn select_if_of_batch_job(&mut self, path: &Path, cursor: ckpt::Result<Value>) -> bool {
        match cursor {
            Ok(cursor) => {
                let id = cursor.get(BATCH_JOB_KEY).and_then(Value::as_str).unwrap_or_default();
                let is_selected = id == self.batch_job.id;
                self.selected += usize::from(is_selected);
                if self.other_command.is_none() && self.batch_job.is_other_command_of_same_job(id) {
                    self.other_command = Some(path.to_owned());
                }
                is_selected
            }
            Err(error) => {
                if self.unreadable.len() < MAX_REPORTED {
                    self.unreadable.push((path.to_owned(), error));
                }
                false
            }
        }
    }
}

/// Builds the notice that this run of a restarted batch job continues from the checkpoint `path` of
/// an earlier run and does not follow `resume.from`.
pub(super) fn build_continuation_notice(batch_job: &BatchJobRecord, from: &ResumeFrom, path: &Path) -> Event {
    let (label, shown) = (&batch_job.label, path.display());
    let message = format!(
        "{label} was started again: the run continues from {shown}, which an earlier run of the job saved; \
         `resume.from: {}` applies only to the first run",
        format_resume_from(from)
    );
    let notice = build_batch_job_resume_note(batch_job, &message).with_field("path", shown.to_string());
    Event::new_diagnostic_notice(None, message, &notice)
}

/// Builds the message that earlier runs of the restarted batch job have saved no checkpoint in
/// `root`, and that this run therefore uses `resume.from`. `other_command` is a checkpoint that a
/// run of another command of the batch job has saved. Returns `None` if it is not known that the
/// batch job has had an earlier run.
fn build_no_checkpoint_notice(
    batch_job: &BatchJobRecord,
    from: &ResumeFrom,
    root: &Path,
    other_command: Option<&Path>,
) -> Option<Event> {
    let (label, root, from) = (&batch_job.label, root.display(), format_resume_from(from));
    let (message, other_command) = match other_command {
        Some(other) => (
            format!(
                "{label} was started again, but only runs with another command line completed a checkpoint in \
                 {root}: `resume.from: {from}` applies"
            ),
            Some(other.display().to_string()),
        ),
        None if batch_job.restarts.is_some_and(|restarts| restarts > 0) => (
            format!(
                "{label} was started again, but no earlier run of the job completed a checkpoint in {root}: \
                 `resume.from: {from}` applies"
            ),
            None,
        ),
        None => return None,
    };
    let note = build_batch_job_resume_note(batch_job, &message);
    let note = other_command.into_iter().fold(note, |note, other| note.with_field("other_command", other));
    Some(Event::new_diagnostic_notice(None, message, &note))
}

/// Builds a diagnostic of the level "note" with the text `message` about the checkpoint from which
/// a restarted batch job resumes.
fn build_batch_job_resume_note(batch_job: &BatchJobRecord, message: &str) -> Diagnostic {
    Diagnostic::note(codes::RESUME_BATCH_JOB, message)
        .with_subject("resume.from")
        .with_field("batch_job", batch_job.label.as_str())
}

/// Formats a value of the key `resume.from` as the user writes it in job.yaml.
fn format_resume_from(from: &ResumeFrom) -> String {
    match from {
        ResumeFrom::Auto => "auto".to_owned(),
        ResumeFrom::Never => "never".to_owned(),
        ResumeFrom::Path(path) => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn create_batch_job(restarts: Option<u32>) -> BatchJobRecord {
        BatchJobRecord { id: "7:mine".into(), label: "Slurm job 7".into(), restarts }
    }

    /// Returns the diagnostic of a notice.
    fn expect_notice(event: Event) -> Diagnostic {
        let Event::Notice { diagnostics, .. } = event else { panic!("{event:?}") };
        diagnostics.into_iter().next().expect("a diagnostic")
    }

    #[test]
    fn notices_name_the_checkpoint_and_the_value_that_does_not_apply() {
        let path = Path::new("/c/step-00000005");
        let notice = build_continuation_notice(&create_batch_job(None), &ResumeFrom::Never, path);
        let notice = expect_notice(notice);
        assert_eq!((notice.code(), notice.subject()), (codes::RESUME_BATCH_JOB, Some("resume.from")));
        assert_eq!(notice.field("path"), Some(&json!("/c/step-00000005")));
        assert_eq!(notice.field("batch_job"), Some(&json!("Slurm job 7")));
        let from = ResumeFrom::Path("/old".into());
        for (restarts, other_command, is_reported) in [
            (None, None, false),
            (Some(0), None, false),
            (Some(1), None, true),
            (None, Some(path), true),
            (Some(1), Some(path), true),
        ] {
            let batch_job = create_batch_job(restarts);
            let notice = build_no_checkpoint_notice(&batch_job, &from, Path::new("/c"), other_command);
            let notice = notice.map(expect_notice);
            assert_eq!(notice.is_some(), is_reported, "{restarts:?}");
            let Some(notice) = notice else { continue };
            assert_eq!((notice.code(), notice.field("path")), (codes::RESUME_BATCH_JOB, None));
            let other_command = other_command.map(|path| json!(path));
            assert_eq!(notice.field("other_command"), other_command.as_ref());
        }
    }

    proptest! {
        /// Checks that exactly the newest checkpoints with the id of the batch job are selected.
        #[test]
        fn only_checkpoints_of_the_batch_job_are_selected(
            kinds in proptest::collection::vec(0u8..6, 0..60),
        ) {
            let batch_job = create_batch_job(Some(1));
            let mut selection = BatchJobSelection::new(&batch_job);
            let mut selected = Vec::new();
            for (position, kind) in kinds.iter().enumerate() {
                let cursor = match kind {
                    0 => Ok(json!({"at": {}, "batch_job": "7:mine"})),
                    1 => Ok(json!({"at": {}, "batch_job": "7:another"})),
                    2 => Ok(json!({"at": {}, "batch_job": "8:mine"})),
                    3 => Ok(json!({"at": {}, "batch_job": ["7:mine"]})),
                    4 => Ok(Value::Null),
                    _ => Err(CkptError::NotFound { path: PathBuf::from("/c") }),
                };
                if !selection.is_full() && selection.select_if_of_batch_job(Path::new("/c"), cursor) {
                    selected.push(position);
                }
            }
            let mine = (0..kinds.len()).filter(|position| kinds[*position] == 0);
            let selected_all = !selection.is_full();
            prop_assert_eq!(selected, mine.take(MAX_CHECKPOINTS).collect::<Vec<_>>());
            prop_assert!(selection.unreadable.len() <= MAX_REPORTED);
            if selected_all {
                prop_assert_eq!(selection.other_command.is_some(), kinds.contains(&1));
            }
        }
    }
}

//! [`JobFileWatch`]: finds out, while a job runs, which changes of its job file take effect.
use super::file_watch::{WatchedFileContent, watch_file};
use crate::format::format_first_error;
use diagnostic::Diagnostic;
use jobspec::{JobSource, JobSpec, MAX_JOB_BYTES, ReloadValues, SourceMap, compare_jobs, load_job};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, path::PathBuf};
use tokio::sync::mpsc;

/// The path of a job file, with the overrides of the command line (`--set`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobFile {
    /// The path of the file.
    pub(crate) path: PathBuf,
    /// The arguments of `--set`, which override keys of the file.
    pub(crate) set: Vec<String>,
}

impl JobFile {
    /// Converts the path of the job file to an absolute path, for use by a process with another
    /// working directory.
    pub(super) fn with_absolute_path(self) -> JobFile {
        let path = std::path::absolute(&self.path).unwrap_or(self.path);
        JobFile { path, ..self }
    }
}

/// What a changed job file means for the run: notices for the user, and the new values of keys that
/// can change without a restart.
#[derive(Debug, Default, PartialEq)]
pub(super) struct JobFileChange {
    /// Notices that describe the change, or its errors, to the user.
    pub(super) notices: Vec<String>,
    /// The new values for the running workers and for later attempts; `None` if no reloadable key
    /// changed.
    pub(super) values: Option<ReloadValues>,
}

/// Watches the job file of a run for changes. A run without a job file gets no changes.
pub(super) struct JobFileWatch {
    file: Option<(JobFile, mpsc::Receiver<WatchedFileContent>)>,
    /// Changed keys that were already reported as not reloadable.
    reported: BTreeSet<String>,
}

impl JobFileWatch {
    /// Starts to watch the job file of a run, so that changes of this file can be applied while the
    /// job runs. Without a job file, the watch reports no change. With `reports_first`, the present
    /// content counts as a change.
    pub(super) fn start(file: Option<JobFile>, reports_first: bool) -> JobFileWatch {
        let watch = |file: JobFile| {
            let (path, job_file) = (file.path.clone(), file.clone());
            let is_complete = move |text: &str| load_job_text(&job_file, text).is_ok();
            (file, watch_file(path, MAX_JOB_BYTES, reports_first, is_complete))
        };
        JobFileWatch { file: file.map(watch), reported: BTreeSet::new() }
    }

    /// Waits for the next change of the job file and returns the file's new content. Waits forever
    /// without a job file. Cancel-safe.
    pub(super) async fn wait_for_change(&mut self) -> WatchedFileContent {
        let content = match &mut self.file {
            Some((_, receiver)) => receiver.recv().await,
            None => None,
        };
        match content {
            Some(content) => content,
            None => std::future::pending().await,
        }
    }

    /// Compares the new content of the job file with the running job, and returns the new values of
    /// keys that can change without a restart. Returns the new values of keys that can be reloaded,
    /// which the caller must apply, and notices for the user. Each changed key that is not
    /// reloadable is reported in a notice once. A file that cannot be read or is not valid results
    /// in a notice and no values.
    pub(super) fn evaluate_change(
        &mut self,
        running: &JobSpec,
        content: WatchedFileContent,
    ) -> JobFileChange {
        let Some((file, _)) = &self.file else { return JobFileChange::default() };
        let name = file.path.display();
        let notice = |notice: String| JobFileChange { notices: vec![notice], values: None };
        let text = match content {
            WatchedFileContent::Text(text) => text,
            WatchedFileContent::Unreadable(error) => {
                return notice(format!("cannot read {name}: {error}; the run continues unchanged"));
            }
        };
        let job = match load_job_text(file, &text) {
            Ok((job, _, _)) => job,
            Err(errors) => {
                return notice(format!(
                    "the changed {name} is not valid, and the run continues unchanged: {}",
                    format_first_error(&errors)
                ));
            }
        };
        let comparison = compare_jobs(running, &job);
        let mut notices = Vec::new();
        let ignored: Vec<String> =
            comparison.not_reloadable.into_iter().filter(|key| self.reported.insert(key.clone())).collect();
        if !ignored.is_empty() {
            let keys: Vec<String> = ignored.iter().map(|key| format!("`{key}`")).collect();
            let (keys, verb) = (keys.join(", "), if keys.len() == 1 { "is" } else { "are" });
            notices.push(format!("{name}: {keys} {verb} not reloadable; the change is ignored in this run"));
        }
        if comparison.changed.is_empty() {
            return JobFileChange { notices, values: None };
        }
        let changes = comparison.changed.iter().map(|(key, old, new)| format!("`{key}` {old} → {new}"));
        let changes = changes.collect::<Vec<_>>().join(", ");
        notices.push(format!("{name}: reloading {changes}, effective from the next step"));
        JobFileChange { notices, values: Some(comparison.values) }
    }
}

/// A job that was loaded from text, with the position of each key in the text and the warnings
/// about the job.
type LoadedJob = (JobSpec, SourceMap, Vec<Diagnostic>);

/// Loads a job from the text of its file, and applies the overrides of the command line (`--set`).
fn load_job_text(file: &JobFile, text: &str) -> Result<LoadedJob, Vec<Diagnostic>> {
    load_job(JobSource::Text { name: file.path.display().to_string(), text: text.to_owned() }, &file.set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::file_watch::FileReadError;
    use jobspec::SaveInterval;

    /// Creates the watch of a job file to which the overrides `set` apply (arguments of `--set`).
    fn create_watch_with_overrides(set: &[&str]) -> JobFileWatch {
        let set = set.iter().map(|s| (*s).to_owned()).collect();
        let file = JobFile { path: "job.yaml".into(), set };
        JobFileWatch { file: Some((file, mpsc::channel(1).1)), reported: BTreeSet::new() }
    }

    /// The content of the job file in tests, before it changes.
    const JOB: &str = "train: {data: {files: [a]}, steps: 100}\n";

    #[test]
    fn reloadable_changes_take_effect_and_others_are_reported_once() {
        let mut watch = create_watch_with_overrides(&["train.seed=5"]);
        let file = watch.file.as_ref().expect("a file").0.clone();
        let mut running = load_job_text(&file, JOB).expect("a job").0;
        let mut notices = Vec::new();
        let mut apply = |running: &JobSpec, content: WatchedFileContent| {
            let change = watch.evaluate_change(running, content);
            notices.extend(change.notices);
            change.values
        };
        let text = |text: &str| WatchedFileContent::Text(text.to_owned());
        assert_eq!(apply(&running, text(JOB)), None);
        let changed = format!("{JOB}checkpoint: {{every: 7}}\nrun: {{grace_period: 1s}}\n");
        apply(&running, text(&changed)).expect("values").apply_to(&mut running);
        assert_eq!(running.checkpoint.every, SaveInterval::Steps(7));
        // Ignored keys are reported once, and the override takes precedence over the file.
        let again = "train: {data: {files: [a]}, steps: 100, seed: 9}\ncheckpoint: {every: 7}\nrun: {grace_period: 1s}\n";
        assert_eq!(apply(&running, text(again)), None);
        assert_eq!(apply(&running, text("train: {data: {files: [a]}, stepps: 1, seed: x}\n")), None);
        assert_eq!(apply(&running, WatchedFileContent::Unreadable(FileReadError::Missing)), None);
        insta::assert_snapshot!(notices.join("\n"));
    }
}

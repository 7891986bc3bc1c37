//! [`JobFileWatch`]: the job file while its job runs; which of its changes take effect.
use super::file_watch::{FileContent, watch_file};
use crate::report::and_more;
use contract::{
    JobSpec, Source, SourceMap,
    job::{MAX_JOB, ReloadValues, compare_jobs, load},
};
use diagnostic::Diagnostic;
use std::{collections::BTreeSet, path::PathBuf};
use tokio::sync::mpsc;

/// A job file, with the overrides of the command line.
#[derive(Clone, Debug)]
pub struct JobFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The arguments of `--set`.
    pub set: Vec<String>,
}

/// What to do about a changed job file.
#[derive(Debug, Default, PartialEq)]
pub(super) struct JobFileChange {
    /// Messages for the user.
    pub(super) notices: Vec<String>,
    /// The new values, for the running workers and for later attempts.
    pub(super) values: Option<ReloadValues>,
}

/// The watched job file of a run; a run without one has no changes.
pub(super) struct JobFileWatch {
    file: Option<(JobFile, mpsc::Receiver<FileContent>)>,
    /// Changed keys that were already reported as ignored.
    reported: BTreeSet<String>,
}

impl JobFileWatch {
    pub(super) fn start(file: Option<JobFile>) -> JobFileWatch {
        let watch = |file: JobFile| {
            let (path, job_file) = (file.path.clone(), file.clone());
            let is_complete = move |text: &str| load_text(&job_file, text).is_ok();
            (file, watch_file(path, MAX_JOB, is_complete))
        };
        JobFileWatch { file: file.map(watch), reported: BTreeSet::new() }
    }

    /// Waits for the next change. Cancel-safe.
    pub(super) async fn next(&mut self) -> FileContent {
        let content = match &mut self.file {
            Some((_, receiver)) => receiver.recv().await,
            None => None,
        };
        match content {
            Some(content) => content,
            None => std::future::pending().await,
        }
    }

    /// Compares the changed file with the running job.
    pub(super) fn apply(&mut self, running: &JobSpec, content: FileContent) -> JobFileChange {
        let Some((file, _)) = &self.file else { return JobFileChange::default() };
        let name = file.path.display();
        let notice = |notice: String| JobFileChange { notices: vec![notice], values: None };
        let text = match content {
            FileContent::Text(text) => text,
            FileContent::Unreadable(error) => {
                return notice(format!("cannot read {name}: {error}; the run continues unchanged"));
            }
        };
        let job = match load_text(file, &text) {
            Ok((job, _, _)) => job,
            Err(errors) => {
                return notice(format!(
                    "the changed {name} is not valid, and the run continues unchanged: {}",
                    and_more(&errors)
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

type LoadedJob = (JobSpec, SourceMap, Vec<Diagnostic>);

fn load_text(file: &JobFile, text: &str) -> Result<LoadedJob, Vec<Diagnostic>> {
    load(Source::Text { name: file.path.display().to_string(), text: text.to_owned() }, &file.set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::file_watch::UnreadableFile;
    use contract::job::SaveInterval;

    fn watch_with_overrides(set: &[&str]) -> JobFileWatch {
        let set = set.iter().map(|s| (*s).to_owned()).collect();
        let file = JobFile { path: "job.yaml".into(), set };
        JobFileWatch { file: Some((file, mpsc::channel(1).1)), reported: BTreeSet::new() }
    }

    const JOB: &str = "train: {data: {files: [a]}, steps: 100}\n";

    #[test]
    fn reloadable_changes_take_effect_and_others_are_reported_once() {
        let mut watch = watch_with_overrides(&["train.seed=5"]);
        let file = watch.file.as_ref().expect("a file").0.clone();
        let mut running = load_text(&file, JOB).expect("a job").0;
        let mut notices = Vec::new();
        let mut apply = |running: &JobSpec, content: FileContent| {
            let change = watch.apply(running, content);
            notices.extend(change.notices);
            change.values
        };
        let text = |text: &str| FileContent::Text(text.to_owned());
        assert_eq!(apply(&running, text(JOB)), None);
        let changed = format!("{JOB}checkpoint: {{every: 7}}\nrun: {{grace_period: 1s}}\n");
        apply(&running, text(&changed)).expect("values").apply(&mut running);
        assert_eq!(running.checkpoint.every, SaveInterval::Steps(7));
        // Ignored keys are reported once, and the override takes precedence over the file.
        let again = "train: {data: {files: [a]}, steps: 100, seed: 9}\ncheckpoint: {every: 7}\nrun: {grace_period: 1s}\n";
        assert_eq!(apply(&running, text(again)), None);
        assert_eq!(apply(&running, text("train: {data: {files: [a]}, stepps: 1, seed: x}\n")), None);
        assert_eq!(apply(&running, FileContent::Unreadable(UnreadableFile::Missing)), None);
        insta::assert_snapshot!(notices.join("\n"));
    }
}

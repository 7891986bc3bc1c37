//! The job file while its job runs: what of a change takes effect, and what is said about the rest.
use super::watch::{Seen, watch};
use contract::{
    JobSpec, Problem, Source, SourceMap,
    job::{MAX_JOB, Reload, compare, load},
};
use std::{collections::BTreeSet, path::PathBuf};
use tokio::sync::mpsc;

/// A job's file and the changes to it that were typed.
#[derive(Clone, Debug)]
pub struct JobFile {
    pub path: PathBuf,
    /// `--set` overrides.
    pub set: Vec<String>,
}

/// What to do about a changed job file.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Change {
    /// For a person.
    pub(super) notices: Vec<String>,
    /// To be told to the agents, and to be started with from now on.
    pub(super) values: Option<Reload>,
}

/// The watched job file of a run; without one nothing ever changes.
pub(super) struct Watched {
    file: Option<(JobFile, mpsc::Receiver<Seen>)>,
    /// Keys that were already reported as left alone.
    reported: BTreeSet<String>,
}

impl Watched {
    pub(super) fn start(file: Option<JobFile>) -> Watched {
        let watched = |file: JobFile| {
            let (path, seen_as) = (file.path.clone(), file.clone());
            let whole = move |text: &str| read(&seen_as, text).is_ok();
            (file, watch(path, MAX_JOB, whole))
        };
        Watched { file: file.map(watched), reported: BTreeSet::new() }
    }

    /// The next time that the file says something else. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Seen {
        let seen = match &mut self.file {
            Some((_, receiver)) => receiver.recv().await,
            None => None,
        };
        match seen {
            Some(seen) => seen,
            None => std::future::pending().await,
        }
    }

    /// Compares it with the job that runs.
    pub(super) fn take_up(&mut self, running: &JobSpec, seen: Seen) -> Change {
        let Some((file, _)) = &self.file else { return Change::default() };
        let name = file.path.display();
        let said = |notice: String| Change { notices: vec![notice], values: None };
        let text = match seen {
            Seen::Text(text) => text,
            Seen::Unreadable(why) => {
                return said(format!("{name} can't be read ({why}): the run goes on as it is"));
            }
        };
        let job = match read(file, &text) {
            Ok((job, _, _)) => job,
            Err(problems) => {
                let first = problems.first().map_or_else(String::new, ToString::to_string);
                let more = match problems.len() {
                    0 | 1 => String::new(),
                    n => format!(" (and {} more)", n - 1),
                };
                return said(format!(
                    "{name} has changed and is wrong, so the run goes on as it is: {first}{more}"
                ));
            }
        };
        let found = compare(running, &job);
        let mut notices = Vec::new();
        let new: Vec<String> =
            found.left_alone.into_iter().filter(|key| self.reported.insert(key.clone())).collect();
        if !new.is_empty() {
            let keys: Vec<String> = new.iter().map(|key| format!("`{key}`")).collect();
            notices
                .push(format!("{name}: {} can't change while the run goes on: left alone", keys.join(", ")));
        }
        if found.changed.is_empty() {
            return Change { notices, values: None };
        }
        let changes = found.changed.iter().map(|(key, old, new)| format!("`{key}` {old} → {new}"));
        notices.push(format!("{name}: {}, from the next step on", changes.collect::<Vec<_>>().join(", ")));
        Change { notices, values: Some(found.values) }
    }
}

fn read(file: &JobFile, text: &str) -> Result<(JobSpec, SourceMap, Vec<Problem>), Vec<Problem>> {
    load(Source::Text { name: file.path.display().to_string(), text: text.to_owned() }, &file.set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::job::Every;

    fn watched(set: &[&str]) -> Watched {
        let set = set.iter().map(|s| (*s).to_owned()).collect();
        let file = JobFile { path: "job.yaml".into(), set };
        Watched { file: Some((file, mpsc::channel(1).1)), reported: BTreeSet::new() }
    }

    const JOB: &str = "train: {data: {files: [a]}, steps: 100}\n";

    #[test]
    fn changes_are_taken_up_reported_once_or_refused() {
        let mut watched = watched(&["train.seed=5"]);
        let file = watched.file.as_ref().expect("a file").0.clone();
        let mut running = read(&file, JOB).expect("a job").0;
        let mut take = |running: &JobSpec, text: &str| watched.take_up(running, Seen::Text(text.to_owned()));
        assert_eq!(take(&running, JOB), Change::default());
        let change = take(&running, &format!("{JOB}checkpoint: {{every: 7}}\nrun: {{grace: 1s}}\n"));
        assert_eq!(
            change.notices,
            [
                "job.yaml: `run.grace` can't change while the run goes on: left alone",
                "job.yaml: `checkpoint.every` 100 → 7, from the next step on",
            ]
        );
        change.values.expect("values").apply(&mut running);
        assert_eq!(running.checkpoint.every, Every::Steps(7));
        // Once is enough; and the override still stands over what the file says.
        let change = take(
            &running,
            "train: {data: {files: [a]}, steps: 100, seed: 9}\ncheckpoint: {every: 7}\nrun: {grace: 1s}\n",
        );
        assert_eq!(change, Change::default());
        let change = take(&running, "train: {data: {files: [a]}, stepps: 1, seed: x}\n");
        assert!(change.values.is_none());
        assert!(
            change.notices[0].contains("is wrong") && change.notices[0].contains("job.yaml:1:"),
            "{:?}",
            change.notices
        );
        let gone = watched.take_up(&running, Seen::Unreadable("it is gone".to_owned()));
        assert_eq!(gone.notices, ["job.yaml can't be read (it is gone): the run goes on as it is"]);
    }
}

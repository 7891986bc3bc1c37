//! Compares a running job with its edited job file: finds the changed keys, and which of them may
//! change while the job runs.
use crate::{
    ids::Rank,
    key_table::KEYS,
    spec::{checkpoint::SaveInterval, job::JobSpec, schedule::ScheduleSpec},
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The values of those keys of a job that a user may change in job.yaml while the job runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReloadValues {
    /// `run.logs.show`: the ranks whose output is shown. In events and journals the field is named
    /// `show`.
    #[serde(rename = "show")]
    pub log_ranks: Vec<Rank>,
    /// `checkpoint.every`: the interval between checkpoints.
    pub checkpoint_every: SaveInterval,
    /// The reloadable values of `train`; `None` in a job that runs a program.
    pub train: Option<ReloadTrainValues>,
}

/// The values of those keys of the section `train` that a user may change in job.yaml while the job
/// runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReloadTrainValues {
    /// `train.steps`: the number of steps, at which the schedule also ends.
    pub steps: u64,
    /// `train.eval.every`: the number of steps between evaluations; `None` in a job without
    /// evaluation.
    pub eval_every: Option<u64>,
    /// `train.schedule.min_lr`: the learning rate at the end of the schedule.
    pub min_lr: f64,
    /// `train.schedule.decay_steps`: the number of steps of the final decay.
    pub decay_steps: u64,
}

/// The keys in which an edited job file differs from the running job.
#[derive(Clone, Debug, PartialEq)]
pub struct ReloadChanges {
    /// The reloadable keys that changed. Each item has the path of the key, the old value and the
    /// new value in YAML.
    pub changed: Vec<(String, String, String)>,
    /// The paths of other keys that changed. Their new values are ignored.
    pub not_reloadable: Vec<String>,
    /// The values that all reloadable keys have from now on.
    pub values: ReloadValues,
}

impl ReloadValues {
    /// Returns the values of those keys of `job` that may change while the job runs.
    pub fn from_job(job: &JobSpec) -> ReloadValues {
        let train = job.train.as_ref().map(|t| ReloadTrainValues {
            steps: t.steps,
            eval_every: t.eval.as_ref().map(|e| e.every),
            min_lr: t.schedule.min_lr,
            decay_steps: t.schedule.decay_steps,
        });
        ReloadValues { log_ranks: job.run.logs.show.clone(), checkpoint_every: job.checkpoint.every, train }
    }

    /// Sets those keys of `job` that may change while the job runs to these values.
    pub fn apply_to(&self, job: &mut JobSpec) {
        job.run.logs.show.clone_from(&self.log_ranks);
        job.checkpoint.every = self.checkpoint_every;
        let (Some(values), Some(train)) = (&self.train, &mut job.train) else { return };
        train.steps = values.steps;
        train.schedule =
            ScheduleSpec { min_lr: values.min_lr, decay_steps: values.decay_steps, ..train.schedule.clone() };
        if let (Some(eval), Some(every)) = (&mut train.eval, values.eval_every) {
            eval.every = every;
        }
    }
}

/// Compares a running job with its edited job file, and returns the changed keys and the new values
/// of the reloadable ones.
pub fn compare_jobs(running: &JobSpec, file: &JobSpec) -> ReloadChanges {
    let (before, after) = (list_key_values(running), list_key_values(file));
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let (mut changed, mut not_reloadable) = (Vec::new(), Vec::new());
    for key in keys {
        let (old, new) = (before.get(key), after.get(key));
        match (old, new) {
            _ if old == new => {}
            (Some(old), Some(new)) if is_reloadable(key) => {
                changed.push((key.clone(), old.clone(), new.clone()));
            }
            _ => not_reloadable.push(key.clone()),
        }
    }
    let mut values = ReloadValues::from_job(file);
    // Adding or removing the section `eval` is not reloadable, so the running job decides whether
    // it exists.
    if let (Some(values), Some(running)) = (&mut values.train, &running.train) {
        values.eval_every = running.eval.as_ref().map(|e| values.eval_every.unwrap_or(e.every));
    }
    ReloadChanges { changed, not_reloadable, values }
}

/// Returns the YAML values, by key path, of all keys that have an effect in a job.
pub fn list_key_values(job: &JobSpec) -> BTreeMap<String, String> {
    job.list_used_values().list_paths_and_values().into_iter().collect()
}

/// Returns whether the key `path` may change while the job runs.
fn is_reloadable(path: &str) -> bool {
    KEYS.iter().any(|key| key.reloadable && key.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobSource, load_job};

    fn parse_job(text: &str) -> JobSpec {
        load_job(JobSource::Text { name: "a.yaml".to_owned(), text: text.to_owned() }, &[]).expect("a job").0
    }

    const TRAIN: &str = "train: {data: {files: [a], held_out: 0.1}, steps: 100, eval: {every: 10}";

    #[test]
    fn reloadable_and_other_changes_are_separated() {
        let running = parse_job(&format!("{TRAIN}}}\ncheckpoint: {{every: 10}}"));
        let edited = parse_job(
            "run: {logs: {show: [0, 1]}, env: {TOKEN: secret}}\ncheckpoint: {every: 10m}\n\
             train: {data: {files: [a], held_out: 0.1}, steps: 50, eval: {every: 5}, seed: 7}",
        );
        let changes = compare_jobs(&running, &edited);
        let changed: Vec<String> = changes.changed.iter().map(|(k, a, b)| format!("{k} {a} {b}")).collect();
        assert_eq!(
            changed,
            [
                "checkpoint.every 10 600s",
                "run.logs.show [0] [0, 1]",
                "train.eval.every 10 5",
                "train.steps 100 50"
            ]
        );
        assert_eq!(changes.not_reloadable, ["run.env", "run.env.TOKEN", "train.seed"]);
        let mut after = running.clone();
        changes.values.apply_to(&mut after);
        let train = after.train.expect("train");
        assert_eq!((train.steps, train.seed, train.eval.expect("eval").every), (50, 1234, 5));
        assert_eq!(
            (after.checkpoint.every, after.run.logs.show),
            (SaveInterval::Duration(600_000), vec![0, 1])
        );
        assert!(after.run.env.is_empty());
    }

    #[test]
    fn adding_or_removing_a_section_is_not_reloadable() {
        let (with, without) =
            (parse_job(&format!("{TRAIN}}}")), parse_job("train: {data: {files: [a]}, steps: 100}"));
        let changes = compare_jobs(&with, &without);
        assert!(
            changes.changed.is_empty() && changes.not_reloadable.contains(&"train.eval.every".to_owned())
        );
        let mut after = with.clone();
        changes.values.apply_to(&mut after);
        assert_eq!(after, with);
        let mut after = without.clone();
        compare_jobs(&without, &with).values.apply_to(&mut after);
        assert_eq!(after, without);
    }

    #[test]
    fn steps_and_decay_of_the_schedule_are_reloadable() {
        let schedule = |steps: u32, more: &str| {
            parse_job(&format!(
                "train: {{data: {{files: [a]}}, steps: {steps}, schedule: {{name: wsd, min_lr: 0{more}}}}}"
            ))
        };
        let changes = compare_jobs(&schedule(100, ""), &schedule(200, ""));
        let keys: Vec<&str> = changes.changed.iter().map(|(k, ..)| k.as_str()).collect();
        assert_eq!(keys, ["train.schedule.decay_steps", "train.steps"], "a fifth of the steps");
        assert!(compare_jobs(&schedule(100, ""), &schedule(100, "")).changed.is_empty());
        let changes = compare_jobs(&schedule(100, ""), &schedule(100, ", warmup_steps: 5"));
        assert_eq!(changes.not_reloadable, ["train.schedule.warmup_steps"]);
    }
}

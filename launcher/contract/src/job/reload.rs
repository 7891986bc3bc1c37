//! What of a job may change while it runs.
use super::{Every, JobSpec, ScheduleSpec};
use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Keys that take effect while the job runs.
const RELOADABLE: &[&str] = &[
    "checkpoint.every",
    "run.logs.show",
    "train.eval.every",
    "train.schedule.decay_steps",
    "train.schedule.min_lr",
    "train.steps",
];

/// The present values of all reloadable keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reload {
    /// `run.logs.show`.
    pub show: Vec<Rank>,
    /// `checkpoint.every`.
    pub checkpoint_every: Every,
    /// The reloadable keys of `train`.
    pub train: Option<ReloadTrain>,
}

/// The reloadable values of `train`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReloadTrain {
    /// `train.steps`, where the schedule ends too.
    pub steps: u64,
    /// `train.eval.every`.
    pub eval_every: Option<u64>,
    /// Where the learning rate ends.
    pub min_lr: f64,
    /// How long it goes down there (wsd).
    pub decay_steps: u64,
}

/// What became of a job file that changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Reloaded {
    /// Key, value before and after, for a person.
    pub changed: Vec<(String, String, String)>,
    /// Keys that changed and can't while the job runs.
    pub left_alone: Vec<String>,
    /// What to go on with.
    pub values: Reload,
}

impl Reload {
    /// The values of this job.
    pub fn of(job: &JobSpec) -> Reload {
        let train = job.train.as_ref().map(|t| ReloadTrain {
            steps: t.steps,
            eval_every: t.eval.as_ref().map(|e| e.every),
            min_lr: t.schedule.min_lr,
            decay_steps: t.schedule.decay_steps,
        });
        Reload { show: job.run.logs.show.clone(), checkpoint_every: job.checkpoint.every, train }
    }

    /// Puts the values into a job.
    pub fn apply(&self, job: &mut JobSpec) {
        job.run.logs.show.clone_from(&self.show);
        job.checkpoint.every = self.checkpoint_every;
        let (Some(mine), Some(train)) = (&self.train, &mut job.train) else { return };
        train.steps = mine.steps;
        train.schedule =
            ScheduleSpec { min_lr: mine.min_lr, decay_steps: mine.decay_steps, ..train.schedule.clone() };
        if let (Some(eval), Some(every)) = (&mut train.eval, mine.eval_every) {
            eval.every = every;
        }
    }
}

/// Compares the job that runs with what its file says now.
pub fn compare(running: &JobSpec, file: &JobSpec) -> Reloaded {
    let (before, after) = (keys(running), keys(file));
    let all: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let (mut changed, mut left_alone) = (Vec::new(), Vec::new());
    for key in all {
        let (old, new) = (before.get(key), after.get(key));
        match (old, new) {
            _ if old == new => {}
            (Some(old), Some(new)) if RELOADABLE.contains(&key.as_str()) => {
                changed.push((key.clone(), old.clone(), new.clone()));
            }
            _ => left_alone.push(key.clone()),
        }
    }
    let mut values = Reload::of(file);
    // A section that came or went is not one of values that changed.
    if let (Some(values), Some(running)) = (&mut values.train, &running.train) {
        values.eval_every = running.eval.as_ref().map(|e| values.eval_every.unwrap_or(e.every));
    }
    Reloaded { changed, left_alone, values }
}

/// Every key that the job has, with its value as YAML.
fn keys(job: &JobSpec) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    let mut path: Vec<String> = Vec::new();
    for line in job.to_yaml().lines() {
        let depth = (line.len() - line.trim_start().len()) / 2;
        let Some((key, value)) = line.trim_start().split_once(':') else { continue };
        path.truncate(depth);
        path.push(key.to_owned());
        if !value.trim().is_empty() {
            keys.insert(path.join("."), value.trim().to_owned());
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Source, load};

    fn job(text: &str) -> JobSpec {
        load(Source::Text { name: "a.yaml".to_owned(), text: text.to_owned() }, &[]).expect("a job").0
    }

    const TRAIN: &str = "train: {data: {files: [a], held_out: 0.1}, steps: 100, eval: {every: 10}";

    #[test]
    fn what_may_change_is_told_apart_from_what_may_not() {
        let running = job(&format!("{TRAIN}}}\ncheckpoint: {{every: 10}}"));
        let edited = job("run: {logs: {show: [0, 1]}, env: {TOKEN: geheim}}\ncheckpoint: {every: 10m}\n\
             train: {data: {files: [a], held_out: 0.1}, steps: 50, eval: {every: 5}, seed: 7}");
        let found = compare(&running, &edited);
        let changed: Vec<String> = found.changed.iter().map(|(k, a, b)| format!("{k} {a} {b}")).collect();
        assert_eq!(
            changed,
            [
                "checkpoint.every 10 600s",
                "run.logs.show [0] [0, 1]",
                "train.eval.every 10 5",
                "train.steps 100 50"
            ]
        );
        assert_eq!(found.left_alone, ["run.env", "run.env.TOKEN", "train.seed"]);
        let mut after = running.clone();
        found.values.apply(&mut after);
        let train = after.train.expect("train");
        assert_eq!((train.steps, train.seed, train.eval.expect("eval").every), (50, 1234, 5));
        assert_eq!((after.checkpoint.every, after.run.logs.show), (Every::Duration(600_000), vec![0, 1]));
        assert!(after.run.env.is_empty());
    }

    #[test]
    fn a_section_that_comes_or_goes_is_left_alone() {
        let (with, without) = (job(&format!("{TRAIN}}}")), job("train: {data: {files: [a]}, steps: 100}"));
        let found = compare(&with, &without);
        assert!(found.changed.is_empty() && found.left_alone.contains(&"train.eval.every".to_owned()));
        let mut after = with.clone();
        found.values.apply(&mut after);
        assert_eq!(after, with);
        let mut after = without.clone();
        compare(&without, &with).values.apply(&mut after);
        assert_eq!(after, without);
    }

    #[test]
    fn the_end_of_the_schedule_moves() {
        let schedule = |steps: u32, more: &str| {
            job(&format!(
                "train: {{data: {{files: [a]}}, steps: {steps}, schedule: {{name: wsd, min_lr: 0{more}}}}}"
            ))
        };
        let found = compare(&schedule(100, ""), &schedule(200, ""));
        let keys: Vec<&str> = found.changed.iter().map(|(k, ..)| k.as_str()).collect();
        assert_eq!(keys, ["train.schedule.decay_steps", "train.steps"], "a fifth of the steps");
        assert!(compare(&schedule(100, ""), &schedule(100, "")).changed.is_empty());
        let found = compare(&schedule(100, ""), &schedule(100, ", warmup_steps: 5"));
        assert_eq!(found.left_alone, ["train.schedule.warmup_steps"]);
    }
}

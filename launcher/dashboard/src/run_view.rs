//! [`RunView`]: the state of a run as the dashboard shows it, built from the lines of the run's
//! journal (`events.jsonl`).
use crate::{
    event_log::EventLog,
    journal_line::{JournalLine, StepValues},
    rank_grid::{RankGrid, RankState},
    run_progress::{CheckpointSummary, RunProgress},
    series::Series,
};
use protocol::event::Event;
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;

/// The largest number of curve marks (such as checkpoints and restarts) of a run that the dashboard
/// keeps. The oldest are removed first.
const MAX_CURVE_MARKS: usize = 1000;

/// The names of the curves over the optimizer steps that the dashboard keeps of each run. The order
/// is that of the page.
pub(crate) const SERIES_NAMES: [&str; SERIES_COUNT] =
    ["loss", "eval_loss", "tokens_per_s", "step_s", "grad_norm", "lr", "peak_rss", "exposed_comm_s"];
/// The number of curves over the optimizer steps that the dashboard keeps of each run.
pub(crate) const SERIES_COUNT: usize = 8;

/// A mark in the curves of a run: the optimizer step at which, for example, a restart or a
/// checkpoint happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct CurveMark {
    /// The kind of the mark: `restart`, `resume`, `checkpoint`, `reload` or `failure`.
    kind: &'static str,
    step: u64,
    time: f64,
}

/// The state of a run as the dashboard shows it: its progress, curves, newest events and ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunView {
    pub(crate) numbers: RunProgress,
    /// The curves, in the order of [`SERIES_NAMES`].
    pub(crate) series: [Series; SERIES_COUNT],
    pub(crate) marks: VecDeque<CurveMark>,
    /// The number of marks that were added.
    pub(crate) mark_count: u64,
    pub(crate) log: EventLog,
    pub(crate) grid: RankGrid,
    /// Whether the workers perform the built-in training, which reports when it begins.
    is_training: bool,
    /// The name of the host of a run on one host.
    host: String,
}

impl RunView {
    /// Creates the state of a run before the first line of its journal (`events.jsonl`) is read.
    /// `is_training` is whether the job is a built-in training, and `host` the name of its host if
    /// it has only one.
    pub(crate) fn new(is_training: bool, host: &str) -> RunView {
        RunView { is_training, host: host.to_owned(), ..RunView::default() }
    }

    /// Updates the state of the run with the next line of its journal (`events.jsonl`).
    pub(crate) fn add_journal_line(&mut self, line: &[u8]) {
        if line.iter().all(u8::is_ascii_whitespace) && !line.is_empty() {
            return;
        }
        match JournalLine::parse(line) {
            Some(JournalLine::Step(numbers)) => self.add_step(&numbers),
            Some(JournalLine::Event { time, event, json }) => {
                self.numbers.time = Some(time);
                self.add_event(*event, time, &json);
                self.log.add(json);
            }
            Some(JournalLine::Unknown { time, json }) => {
                self.numbers.time = Some(time);
                self.log.add(json);
            }
            None => self.numbers.damaged_lines += 1,
        }
    }

    /// Updates the progress and the curves of the run with the values of a `step` event.
    fn add_step(&mut self, step: &StepValues) {
        let numbers = &mut self.numbers;
        let previous = numbers.step.zip(numbers.time);
        let step_s = previous.filter(|(before, _)| *before < step.step).map(|(before, time)| {
            // An event may report several steps.
            (step.time - time).max(0.0) / (step.step - before) as f64
        });
        numbers.step_s = step_s.filter(|_| !self.series[0].is_empty()).or(numbers.step_s);
        numbers.time = Some(step.time);
        numbers.step = Some(step.step);
        numbers.loss = Some(step.loss);
        numbers.grad_norm = Some(step.grad_norm);
        numbers.lr = Some(step.lr);
        numbers.tokens = Some(step.tokens);
        numbers.tokens_per_s = Some(step.tokens_per_s);
        numbers.peak_rss = Some(step.peak_rss);
        numbers.exposed_comm_s = Some(step.exposed_comm_s);
        let values = [
            Some(step.loss),
            None,
            Some(step.tokens_per_s),
            numbers.step_s.filter(|_| step_s.is_some()),
            Some(step.grad_norm),
            Some(step.lr),
            Some(step.peak_rss as f64),
            Some(step.exposed_comm_s),
        ];
        for (series, value) in self.series.iter_mut().zip(values) {
            if let Some(value) = value {
                series.add_value(step.step, value);
            }
        }
    }

    /// Updates the state of the run with an event other than `step`.
    fn add_event(&mut self, event: Event, time: f64, json: &Value) {
        let numbers = &mut self.numbers;
        match event {
            Event::Start { world, .. } => {
                self.grid.begin_attempt_on_one_host(world, &self.host);
                self.mark_ranks_running();
            }
            Event::Placement { attempt, world, hosts, workers } => {
                numbers.attempt = attempt;
                match hosts.len() {
                    1 => self.grid.begin_attempt_on_one_host(world, &hosts[0]),
                    _ => self.grid.begin_attempt(world, &hosts, &workers),
                }
                self.mark_ranks_running();
            }
            Event::Ready { step, total_steps, parameters, tokens_per_step } => {
                numbers.step = Some(step);
                numbers.total_steps = Some(total_steps);
                numbers.parameters = Some(parameters);
                numbers.tokens_per_step = Some(tokens_per_step);
                self.grid.set_all_states(RankState::Running);
            }
            Event::Resume { step, .. } => self.add_curve_mark("resume", step, time),
            Event::Overflow { skipped, .. } => numbers.skipped_steps = skipped,
            Event::Eval { step, loss, .. } => {
                numbers.eval_loss = Some(loss);
                self.series[1].add_value(step, loss);
            }
            Event::Checkpoint { step, bytes, seconds, .. } => {
                numbers.checkpoints += 1;
                numbers.checkpoint = Some(CheckpointSummary { step, bytes, seconds, time });
                self.add_curve_mark("checkpoint", step, time);
            }
            Event::Reload { step, .. } => self.add_curve_mark("reload", step, time),
            Event::Notice { rank: Some(rank), .. } => self.grid.count_notice(rank),
            Event::Failure(failure) => self.add_failure("failure", failure.rank, time, json),
            Event::Restart { attempt, failure, .. } => {
                numbers.restarts += 1;
                numbers.attempt = attempt;
                self.add_failure("restart", failure.rank, time, json);
            }
            Event::Done { exit_code, step, seconds } => {
                numbers.exit_code = Some(exit_code);
                numbers.seconds = Some(seconds);
                numbers.step = step.or(numbers.step);
                self.grid.record_run_end(exit_code == 0);
            }
            Event::Step { .. }
            | Event::StepTimes(_)
            | Event::Straggler(_)
            | Event::Sample { .. }
            | Event::Gather { .. }
            | Event::Takeover { .. }
            | Event::Notice { rank: None, .. } => {}
        }
    }

    /// Marks all ranks as running if the job runs the user's program, because only the built-in
    /// training reports when its ranks have started.
    fn mark_ranks_running(&mut self) {
        if !self.is_training {
            self.grid.set_all_states(RankState::Running);
        }
    }

    /// Records a failure of the run: in the states of its ranks, as its newest failure, and as a
    /// mark in its curves.
    fn add_failure(&mut self, kind: &'static str, rank: Option<u32>, time: f64, json: &Value) {
        self.grid.record_failure(rank);
        self.numbers.failure = Some(json.clone());
        self.add_curve_mark(kind, self.numbers.step.unwrap_or(0), time);
    }

    /// Adds a mark to the curves of the run, and drops the oldest mark if there are too many.
    fn add_curve_mark(&mut self, kind: &'static str, step: u64, time: f64) {
        self.mark_count += 1;
        self.marks.push_back(CurveMark { kind, step, time });
        if self.marks.len() > MAX_CURVE_MARKS {
            self.marks.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::JOURNAL;
    use std::collections::BTreeMap;

    fn build(text: &str) -> RunView {
        let mut view = RunView::new(true, "a");
        text.lines().for_each(|line| view.add_journal_line(line.as_bytes()));
        view
    }

    #[test]
    fn a_journal_becomes_numbers_curves_marks_and_ranks() {
        let view = build(JOURNAL);
        let numbers = &view.numbers;
        assert_eq!((numbers.step, numbers.total_steps, numbers.loss), (Some(3), Some(10), Some(3.0)));
        assert_eq!((numbers.restarts, numbers.attempt, numbers.checkpoints), (1, 1, 1));
        assert_eq!(numbers.failure.as_ref().map(|f| f["rank"].clone()), Some(2.into()));
        let kinds: Vec<_> = view.marks.iter().map(|mark| (mark.kind, mark.step)).collect();
        assert_eq!(kinds, [("checkpoint", 2), ("restart", 3)]);
        assert_eq!(view.grid.to_json(&BTreeMap::new()).states, "eefe");
        let loss: Vec<_> = view.series[0].list_points().iter().map(|p| (p.step, p.value)).collect();
        assert_eq!(loss, [(1, 5.0), (2, 4.0), (3, 3.0)]);
        let durations: Vec<_> = view.series[3].list_points().iter().map(|p| (p.step, p.value)).collect();
        assert_eq!(durations[0], (2, 0.5));
        let mut view = view;
        view.add_journal_line(br#"{"event":"done","exit_code":1,"step":3,"seconds":9.0,"time":110.0}"#);
        assert_eq!((view.numbers.exit_code, view.numbers.seconds), (Some(1), Some(9.0)));
    }

    #[test]
    fn a_damaged_journal_is_shown_as_far_as_it_is_readable() {
        let lines = JOURNAL.replace("\"step\":2,\"loss\"", "\"step\":2,\"lo");
        let mut view = build(&lines);
        assert_eq!((view.numbers.damaged_lines, view.numbers.step), (1, Some(3)));
        view.add_journal_line(b"\0\0\0\0");
        view.add_journal_line(b"");
        assert_eq!(view.numbers.damaged_lines, 3);
        view.add_journal_line(
            br#"{"event":"start","run":"r","run_dir":"/r","world":4294967295,"time":1e300}"#,
        );
        assert_eq!(view.grid.world(), u32::MAX);
        (0..5000).for_each(|step| view.add_curve_mark("reload", step, 0.0));
        assert_eq!(view.marks.len(), MAX_CURVE_MARKS);
    }

    #[test]
    fn every_cut_of_a_journal_is_accepted() {
        for end in 0..JOURNAL.len() {
            build(&JOURNAL[..end]);
        }
    }
}

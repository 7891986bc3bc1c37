//! Measures whether training steps are faster with or without CUDA graphs ([`GraphUseAutotuner`]).
use std::time::Duration;

/// Number of training steps that run without being timed before each of the two measurements
/// (without and with CUDA graphs). In these steps, algorithms are chosen and graphs are captured.
const WARM_UP_STEPS: usize = 5;
/// Number of training steps that are timed in each of the two measurements (without and with CUDA
/// graphs).
const TIMED_STEPS: usize = 9;
/// Number of training steps (warm-up and timed) in each half of the comparison: the first half runs
/// without CUDA graphs, the second with them.
const STEPS_PER_PHASE: usize = WARM_UP_STEPS + TIMED_STEPS;

/// If GPU calls take at least this many seconds on average, CUDA graphs are not tried, because
/// issuing the calls one by one keeps the GPU busy. Large models also need the memory that graphs
/// would take.
const LONG_CALL_SECONDS: f64 = 100e-6;

/// Times training steps first without CUDA graphs and then with graphs, to decide whether graphs
/// are used.
#[derive(Default)]
pub(in super::super) struct GraphUseAutotuner {
    step_seconds: Vec<f64>,
    /// Number of GPU calls that were enqueued before the first timed step.
    calls_before: u64,
}

/// Decision after each timed training step in the comparison of steps with and without CUDA graphs,
/// such as to turn graphs on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum GraphTuningDecision {
    /// Run the next step in the same way as this one.
    Continue,
    /// Run the next steps with graphs.
    EnableGraphs,
    /// The measurement is complete. The values are median seconds of a step.
    Measured { step_seconds_without: f64, step_seconds_with: f64 },
    /// Graphs are not worth trying. The value is the GPU's seconds of work per call.
    NotNeeded { seconds_per_call: f64 },
}

impl GraphUseAutotuner {
    /// Records the duration of a training step, and returns what to do next, such as to turn CUDA
    /// graphs on. `calls` is the number of GPU calls that the process has enqueued so far.
    pub(in super::super) fn record_step(&mut self, duration: Duration, calls: u64) -> GraphTuningDecision {
        self.step_seconds.push(duration.as_secs_f64());
        match self.step_seconds.len() {
            WARM_UP_STEPS => {
                self.calls_before = calls;
                GraphTuningDecision::Continue
            }
            STEPS_PER_PHASE => {
                let calls = calls.saturating_sub(self.calls_before) as f64 / TIMED_STEPS as f64;
                let seconds_per_call = compute_median(&self.step_seconds[WARM_UP_STEPS..]) / calls.max(1.0);
                if seconds_per_call >= LONG_CALL_SECONDS {
                    GraphTuningDecision::NotNeeded { seconds_per_call }
                } else {
                    GraphTuningDecision::EnableGraphs
                }
            }
            n if n >= 2 * STEPS_PER_PHASE => {
                let (without, with) = self.step_seconds.split_at(STEPS_PER_PHASE);
                GraphTuningDecision::Measured {
                    step_seconds_without: compute_median(&without[WARM_UP_STEPS..]),
                    step_seconds_with: compute_median(&with[WARM_UP_STEPS..]),
                }
            }
            _ => GraphTuningDecision::Continue,
        }
    }
}

/// Returns the median of `seconds`, the durations of training steps. Evaluations, saves and other
/// jobs prolong single steps, which would distort the mean.
fn compute_median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_long_steps_and_warm_up_steps_do_not_count() {
        let mut tuner = GraphUseAutotuner::default();
        let mut decisions = Vec::new();
        for step in 0..2 * STEPS_PER_PHASE {
            let has_graphs = step >= STEPS_PER_PHASE;
            let is_warm_up = step % STEPS_PER_PHASE < WARM_UP_STEPS;
            let ms = if is_warm_up || step % 5 == 0 { 900 } else { 20 - 7 * u64::from(has_graphs) };
            decisions.push(tuner.record_step(Duration::from_millis(ms), 1000 * step as u64));
        }
        assert_eq!(
            decisions.iter().position(|d| *d == GraphTuningDecision::EnableGraphs),
            Some(STEPS_PER_PHASE - 1)
        );
        assert_eq!(
            decisions.last(),
            Some(&GraphTuningDecision::Measured { step_seconds_without: 0.020, step_seconds_with: 0.013 })
        );
        let continued = decisions.iter().filter(|d| **d == GraphTuningDecision::Continue).count();
        assert_eq!(continued, decisions.len() - 2);
    }

    #[test]
    fn graphs_are_not_tried_if_calls_are_long() {
        let mut tuner = GraphUseAutotuner::default();
        let decisions: Vec<GraphTuningDecision> = (1..=STEPS_PER_PHASE as u64)
            .map(|step| tuner.record_step(Duration::from_millis(60), 5000 + 300 * step))
            .collect();
        let Some(GraphTuningDecision::NotNeeded { seconds_per_call }) = decisions.last() else {
            panic!("{:?}", decisions.last());
        };
        assert!((seconds_per_call - 2e-4).abs() < 1e-9, "{seconds_per_call}");
    }
}

//! [`GraphAutotuner`]: measures whether steps are faster with CUDA graphs.
use std::time::Duration;

/// Steps without graphs, and with graphs, that are not counted: algorithms are chosen and graphs
/// captured in them.
const WARM_UP_STEPS: usize = 5;
/// Steps without graphs, and with graphs, that are counted.
const COUNTED_STEPS: usize = 9;
const STEPS: usize = WARM_UP_STEPS + COUNTED_STEPS;

/// GPU seconds per call from which on graphs are not tried. A call takes some µs to issue, so the
/// GPU never waits for calls then, and large models need the memory that graphs would take.
const LONG_CALL_SECONDS: f64 = 100e-6;

/// Compares the durations of steps without graphs to those of the following steps with graphs, and
/// decides which are faster.
#[derive(Default)]
pub(in super::super) struct GraphAutotuner {
    step_seconds: Vec<f64>,
    /// The number of calls before the first counted step.
    calls_before: u64,
}

/// What to do after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum TuningDecision {
    /// Run the next step like the last one.
    Continue,
    /// Run the next steps with graphs.
    EnableGraphs,
    /// The measurement is complete. The values are median seconds of a step.
    Measured { step_seconds_without: f64, step_seconds_with: f64 },
    /// Graphs are not worth trying. The value is the GPU's seconds of work per call.
    NotNeeded { seconds_per_call: f64 },
}

impl GraphAutotuner {
    /// Records the duration of a step. `calls` is the number of calls so far.
    pub(in super::super) fn record_step(&mut self, duration: Duration, calls: u64) -> TuningDecision {
        self.step_seconds.push(duration.as_secs_f64());
        match self.step_seconds.len() {
            WARM_UP_STEPS => {
                self.calls_before = calls;
                TuningDecision::Continue
            }
            STEPS => {
                let calls = calls.saturating_sub(self.calls_before) as f64 / COUNTED_STEPS as f64;
                let seconds_per_call = median(&self.step_seconds[WARM_UP_STEPS..]) / calls.max(1.0);
                if seconds_per_call >= LONG_CALL_SECONDS {
                    TuningDecision::NotNeeded { seconds_per_call }
                } else {
                    TuningDecision::EnableGraphs
                }
            }
            n if n >= 2 * STEPS => {
                let (without, with) = self.step_seconds.split_at(STEPS);
                TuningDecision::Measured {
                    step_seconds_without: median(&without[WARM_UP_STEPS..]),
                    step_seconds_with: median(&with[WARM_UP_STEPS..]),
                }
            }
            _ => TuningDecision::Continue,
        }
    }
}

/// Returns the median of the durations. Evaluations, saves and other jobs prolong single steps,
/// which would distort the mean.
fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_long_steps_and_warm_up_steps_do_not_count() {
        let mut tuner = GraphAutotuner::default();
        let mut decisions = Vec::new();
        for step in 0..2 * STEPS {
            let has_graphs = step >= STEPS;
            let is_warm_up = step % STEPS < WARM_UP_STEPS;
            let ms = if is_warm_up || step % 5 == 0 { 900 } else { 20 - 7 * u64::from(has_graphs) };
            decisions.push(tuner.record_step(Duration::from_millis(ms), 1000 * step as u64));
        }
        assert_eq!(decisions.iter().position(|d| *d == TuningDecision::EnableGraphs), Some(STEPS - 1));
        assert_eq!(
            decisions.last(),
            Some(&TuningDecision::Measured { step_seconds_without: 0.020, step_seconds_with: 0.013 })
        );
        let continued = decisions.iter().filter(|d| **d == TuningDecision::Continue).count();
        assert_eq!(continued, decisions.len() - 2);
    }

    #[test]
    fn graphs_are_not_tried_if_calls_are_long() {
        let mut tuner = GraphAutotuner::default();
        let decisions: Vec<TuningDecision> = (1..=STEPS as u64)
            .map(|step| tuner.record_step(Duration::from_millis(60), 5000 + 300 * step))
            .collect();
        let Some(TuningDecision::NotNeeded { seconds_per_call }) = decisions.last() else {
            panic!("{:?}", decisions.last());
        };
        assert!((seconds_per_call - 2e-4).abs() < 1e-9, "{seconds_per_call}");
    }
}

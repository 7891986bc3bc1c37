//! With graphs or without: found by the clock.
use std::time::Duration;

/// Steps of each way that aren't counted: algorithms are chosen, graphs made.
const FIRST: usize = 5;
/// Steps of each way that are.
const COUNTED: usize = 9;

/// Seconds of work for each call from which on nobody waits for calls: to ask for one takes some µs. Graphs aren't tried then; their
/// scratch memory would only take room that large models need.
const LONG: f64 = 100e-6;

/// Some steps without graphs, as many with them.
#[derive(Default)]
pub(in super::super) struct Trial {
    steps: Vec<f64>,
    /// Calls that had been asked for before the first step that counts.
    before: u64,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum Next {
    /// More steps as the last one.
    Same,
    /// Steps with graphs.
    With,
    /// The end, with the seconds that a step took without graphs and with them.
    Known { without: f64, with: f64 },
    /// The end: without graphs the card has so many seconds of work for each call.
    Needless { each: f64 },
}

impl Trial {
    /// A step took so long; `asked`: calls that were asked for until now.
    pub(in super::super) fn took(&mut self, time: Duration, asked: u64) -> Next {
        self.steps.push(time.as_secs_f64());
        let each = FIRST + COUNTED;
        match self.steps.len() {
            FIRST => {
                self.before = asked;
                Next::Same
            }
            n if n == each => {
                let calls = asked.saturating_sub(self.before) as f64 / COUNTED as f64;
                let each = median(&self.steps[FIRST..]) / calls.max(1.0);
                if each >= LONG { Next::Needless { each } } else { Next::With }
            }
            n if n >= 2 * each => {
                let (without, with) = self.steps.split_at(each);
                let [without, with] = [without, with].map(|steps| median(&steps[FIRST..]));
                Next::Known { without, with }
            }
            _ => Next::Same,
        }
    }
}

/// Evaluations, saves and other jobs make single steps long.
fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_long_steps_and_the_first_ones_dont_count() {
        let mut trial = Trial::default();
        let mut all = Vec::new();
        for step in 0..2 * (FIRST + COUNTED) {
            let with = step >= FIRST + COUNTED;
            let first = step % (FIRST + COUNTED) < FIRST;
            let ms = if first || step % 5 == 0 { 900 } else { 20 - 7 * u64::from(with) };
            all.push(trial.took(Duration::from_millis(ms), 1000 * step as u64));
        }
        assert_eq!(all.iter().position(|next| *next == Next::With), Some(FIRST + COUNTED - 1));
        assert_eq!(all.last(), Some(&Next::Known { without: 0.020, with: 0.013 }));
        assert_eq!(all.iter().filter(|next| **next == Next::Same).count(), all.len() - 2);
    }

    #[test]
    fn a_card_with_much_work_for_each_call_needs_none() {
        let mut trial = Trial::default();
        let all: Vec<Next> = (1..=FIRST as u64 + COUNTED as u64)
            .map(|step| trial.took(Duration::from_millis(60), 5000 + 300 * step))
            .collect();
        let needless = |next: &Next| matches!(next, Next::Needless { each } if (each - 2e-4).abs() < 1e-9);
        assert!(all.last().is_some_and(needless), "{:?}", all.last());
    }
}

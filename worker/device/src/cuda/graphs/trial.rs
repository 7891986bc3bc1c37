//! With graphs or without: found by the clock.
use std::time::Duration;

/// Steps of each way that aren't counted: algorithms are chosen, graphs made.
const FIRST: usize = 5;
/// Steps of each way that are.
const COUNTED: usize = 9;

/// Some steps without graphs, as many with them.
#[derive(Default)]
pub(in super::super) struct Trial {
    steps: Vec<f64>,
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
}

impl Trial {
    /// A step took so long.
    pub(in super::super) fn took(&mut self, time: Duration) -> Next {
        self.steps.push(time.as_secs_f64());
        let each = FIRST + COUNTED;
        match self.steps.len() {
            n if n == each => Next::With,
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
            all.push(trial.took(Duration::from_millis(ms)));
        }
        assert_eq!(all.iter().position(|next| *next == Next::With), Some(FIRST + COUNTED - 1));
        assert_eq!(all.last(), Some(&Next::Known { without: 0.020, with: 0.013 }));
        assert_eq!(all.iter().filter(|next| **next == Next::Same).count(), all.len() - 2);
    }
}

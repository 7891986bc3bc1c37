//! fp16: the loss is multiplied by a power of two, so that small gradients don't vanish in 16 bits. The factor halves when
//! a gradient overflows, which costs the step, and doubles after many steps without. Every rank sees the same norm, so all
//! of them have the same factor.
use contract::job::LossScaleSpec;
use serde::{Deserialize, Serialize};

/// The factor never exceeds this, so that it stays finite in `f32`.
const MOST: f64 = (1u64 << 60) as f64;

/// What goes on across a resume.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The factor.
    pub scale: f64,
    /// Steps since it last changed.
    pub steps: u64,
    /// Steps skipped since the run began.
    pub skipped: u64,
}

/// The factor of the loss, and when it changes.
pub struct LossScale {
    /// `None`: the factor is 1, always.
    spec: Option<LossScaleSpec>,
    state: State,
}

impl LossScale {
    /// `None`: a precision that needs none.
    pub fn new(spec: Option<LossScaleSpec>) -> Self {
        let scale = spec.as_ref().map_or(1.0, |s| f64::from(s.initial_scale_power).exp2());
        LossScale { spec, state: State { scale, steps: 0, skipped: 0 } }
    }

    /// What the loss is multiplied by.
    pub fn factor(&self) -> f32 {
        self.state.scale as f32
    }

    /// Does an overflow cost only the step?
    pub fn is_dynamic(&self) -> bool {
        self.spec.is_some()
    }

    /// For checkpoints; `None` where there is nothing to keep.
    pub fn state(&self) -> Option<State> {
        self.spec.is_some().then_some(self.state)
    }

    /// Goes on from a checkpoint's state; without a loss scale here it has no use.
    pub fn restore(&mut self, state: State) -> Result<(), String> {
        let bits = state.scale.to_bits() & ((1 << 52) - 1);
        if bits != 0 || !(f64::from(f32::MIN_POSITIVE)..=MOST).contains(&state.scale) {
            return Err(format!("the loss scale {} is no power of two in its range", state.scale));
        }
        if self.spec.is_some() {
            self.state = state;
        }
        Ok(())
    }

    /// After a step without overflow.
    pub fn good_step(&mut self) {
        let Some(spec) = &self.spec else { return };
        self.state.steps += 1;
        if self.state.steps >= spec.loss_scale_window {
            self.state = State { scale: (self.state.scale * 2.0).min(MOST), steps: 0, ..self.state };
        }
    }

    /// After a step whose gradients overflowed: halves the factor. `false` where it can't get smaller.
    #[must_use]
    pub fn overflow(&mut self) -> bool {
        let least = self.spec.as_ref().map_or(1.0, |s| s.min_loss_scale);
        self.state.skipped += 1;
        if self.state.scale / 2.0 < least {
            return false;
        }
        self.state = State { scale: self.state.scale / 2.0, steps: 0, ..self.state };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(power: u32, window: u64, min: f64) -> Option<LossScaleSpec> {
        Some(LossScaleSpec { initial_scale_power: power, loss_scale_window: window, min_loss_scale: min })
    }

    #[test]
    fn it_halves_at_an_overflow_and_doubles_after_a_window() {
        let mut s = LossScale::new(spec(4, 3, 2.0));
        assert_eq!(s.factor(), 16.0);
        s.good_step();
        s.good_step();
        assert!(s.overflow());
        assert_eq!(s.state(), Some(State { scale: 8.0, steps: 0, skipped: 1 }));
        s.good_step();
        s.good_step();
        assert_eq!(s.factor(), 8.0, "the window begins again at an overflow");
        s.good_step();
        assert_eq!(s.state(), Some(State { scale: 16.0, steps: 0, skipped: 1 }));
        assert!(s.overflow() && s.overflow() && s.overflow());
        assert!(!s.overflow(), "2 is the least");
        assert_eq!(s.state(), Some(State { scale: 2.0, steps: 0, skipped: 5 }));
    }

    #[test]
    fn a_state_is_restored_or_refused() {
        let mut s = LossScale::new(spec(16, 2000, 1.0));
        let state = State { scale: 256.0, steps: 7, skipped: 3 };
        assert_eq!(s.restore(state), Ok(()));
        assert_eq!(s.state(), Some(state));
        for scale in [0.0, -2.0, 3.0, f64::NAN, f64::INFINITY, 2f64.powi(61), 2f64.powi(-200)] {
            assert!(s.restore(State { scale, ..state }).is_err(), "{scale}");
        }
        let mut none = LossScale::new(None);
        assert_eq!(none.restore(state), Ok(()));
        assert_eq!((none.factor(), none.state()), (1.0, None));
    }
}

//! [`LossScale`]: the factor by which the loss is multiplied in fp16, so that small gradients do
//! not underflow. The scale is halved when a gradient overflows, which skips the step, and doubled
//! after many steps without overflow. Every rank computes the same gradient norm and so the same
//! scale.
use diagnostic::{Diagnostic, codes};
use jobspec::LossScaleSpec;
use serde::{Deserialize, Serialize};

/// The largest value that the fp16 loss scale, the factor by which the loss is multiplied, may
/// reach. It is finite in `f32`.
const MAX_SCALE: f64 = (1u64 << 60) as f64;

/// The fp16 loss scale and its counters, which checkpoints store so that a resumed run continues
/// with them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaleState {
    /// The factor by which the loss is multiplied, a power of two.
    pub scale: f64,
    /// The number of steps since the scale changed.
    pub steps: u64,
    /// The number of steps that were skipped since step 0.
    pub skipped: u64,
}

/// The factor by which the loss is multiplied in fp16, and the rules by which it grows and, after
/// an overflow, shrinks.
pub struct LossScale {
    /// The settings of the loss scale. `None` for a precision without loss scale; the factor is
    /// then always 1.
    spec: Option<LossScaleSpec>,
    state: LossScaleState,
}

impl LossScale {
    /// Creates an fp16 loss scale whose factor is the initial one that the job sets. If `spec` is
    /// `None`, the factor is always 1.
    pub fn new(spec: Option<LossScaleSpec>) -> Self {
        let scale = spec.as_ref().map_or(1.0, |s| f64::from(s.initial_scale_power).exp2());
        LossScale { spec, state: LossScaleState { scale, steps: 0, skipped: 0 } }
    }

    /// Returns the factor by which the loss is multiplied at present.
    pub fn factor(&self) -> f32 {
        self.state.scale as f32
    }

    /// Returns whether a gradient overflow skips the step instead of ending the run.
    pub fn skips_step_on_overflow(&self) -> bool {
        self.spec.is_some()
    }

    /// Returns the loss scale and its counters for a checkpoint, or `None` for a precision without
    /// loss scale.
    pub fn checkpoint_state(&self) -> Option<LossScaleState> {
        self.spec.is_some().then_some(self.state)
    }

    /// Sets the loss scale and its counters to `state`, which was read from a checkpoint. For a
    /// precision without loss scale, only checks `state`.
    ///
    /// # Errors
    ///
    /// Fails if the scale is not a power of two between the smallest normal `f32` and 2⁶⁰.
    pub fn restore_state(&mut self, state: LossScaleState) -> diagnostic::Result<()> {
        let bits = state.scale.to_bits() & ((1 << 52) - 1);
        if bits != 0 || !(f64::from(f32::MIN_POSITIVE)..=MAX_SCALE).contains(&state.scale) {
            let message = format!("loss scale {} is not a power of two from 2^-126 to 2^60", state.scale);
            return Err(Diagnostic::error(codes::training::RESUME_POSITION_INVALID, message)
                .with_field("loss_scale", state.scale));
        }
        if self.spec.is_some() {
            self.state = state;
        }
        Ok(())
    }

    /// Counts a step whose gradients did not overflow fp16, to decide when the loss scale grows.
    /// Doubles the loss scale after `loss_scale_window` such steps.
    pub fn record_step_without_overflow(&mut self) {
        let Some(spec) = &self.spec else { return };
        self.state.steps += 1;
        if self.state.steps >= spec.loss_scale_window {
            self.state =
                LossScaleState { scale: (self.state.scale * 2.0).min(MAX_SCALE), steps: 0, ..self.state };
        }
    }

    /// Records a step whose gradients overflowed fp16, and halves the loss scale. Returns `false`
    /// if the scale is already at its minimum.
    #[must_use]
    pub fn record_overflow(&mut self) -> bool {
        let least = self.spec.as_ref().map_or(1.0, |s| s.min_loss_scale);
        self.state.skipped += 1;
        if self.state.scale / 2.0 < least {
            return false;
        }
        self.state = LossScaleState { scale: self.state.scale / 2.0, steps: 0, ..self.state };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates loss scale settings with the initial scale `2^power`.
    fn make_spec(power: u32, window: u64, min: f64) -> Option<LossScaleSpec> {
        Some(LossScaleSpec { initial_scale_power: power, loss_scale_window: window, min_loss_scale: min })
    }

    #[test]
    fn the_scale_is_halved_by_an_overflow_and_doubled_after_a_window() {
        let mut s = LossScale::new(make_spec(4, 3, 2.0));
        assert_eq!(s.factor(), 16.0);
        s.record_step_without_overflow();
        s.record_step_without_overflow();
        assert!(s.record_overflow());
        assert_eq!(s.checkpoint_state(), Some(LossScaleState { scale: 8.0, steps: 0, skipped: 1 }));
        s.record_step_without_overflow();
        s.record_step_without_overflow();
        assert_eq!(s.factor(), 8.0, "an overflow restarts the window");
        s.record_step_without_overflow();
        assert_eq!(s.checkpoint_state(), Some(LossScaleState { scale: 16.0, steps: 0, skipped: 1 }));
        assert!(s.record_overflow() && s.record_overflow() && s.record_overflow());
        assert!(!s.record_overflow(), "2 is the minimum");
        assert_eq!(s.checkpoint_state(), Some(LossScaleState { scale: 2.0, steps: 0, skipped: 5 }));
    }

    #[test]
    fn a_state_is_restored_or_rejected() {
        let mut s = LossScale::new(make_spec(16, 2000, 1.0));
        let state = LossScaleState { scale: 256.0, steps: 7, skipped: 3 };
        assert_eq!(s.restore_state(state), Ok(()));
        assert_eq!(s.checkpoint_state(), Some(state));
        for scale in [0.0, -2.0, 3.0, f64::NAN, f64::INFINITY, 2f64.powi(61), 2f64.powi(-200)] {
            assert!(s.restore_state(LossScaleState { scale, ..state }).is_err(), "{scale}");
        }
        let mut none = LossScale::new(None);
        assert_eq!(none.restore_state(state), Ok(()));
        assert_eq!((none.factor(), none.checkpoint_state()), (1.0, None));
    }
}

//! Learning rate schedules: the learning rate as a function of the step. The formulas are those of
//! the `get_*_schedule*` functions of transformers, with `min_lr` as the lower limit.
//!
//! `s` is the step about to be computed, from 0. `w` is the number of warm-up steps, and `T` is
//! `train.steps`. During warm-up (`s < w`) the rate is `lr · s/w`, for wsd `min_lr + (lr − min_lr)
//! · s/w`. Afterwards:
//!
//! - constant: `lr`
//! - linear: `min_lr + (lr − min_lr) · (T − s)/(T − w)`, which is
//!   `get_linear_schedule_with_warmup` when `min_lr` is 0
//! - cosine: `min_lr + (lr − min_lr) · ½(1 + cos(π(s − w)/(T − w)))`, which is
//!   `get_cosine_with_min_lr_schedule_with_warmup`
//! - wsd: `lr` until `d = T − decay_steps`, then
//!   `min_lr + (lr − min_lr) · ½(1 + cos(π(s − d)/decay_steps))`, which is `get_wsd_schedule`
//!
//! The first step of a schedule with warm-up therefore has learning rate 0 (wsd: `min_lr`). From
//! step `T` the rate stays at `min_lr` (constant: `lr`). When warm-up and decay of wsd overlap, the
//! rest of the decay follows the warm-up.
use jobspec::{ScheduleName, ScheduleSpec};

/// Computes the learning rate of the optimizer step `step`, counted from 0, of `total_steps` steps
/// by the job's schedule.
pub fn compute_learning_rate(spec: &ScheduleSpec, base_lr: f64, total_steps: u64, step: u64) -> f64 {
    let warm = spec.warmup_steps;
    let above = |floor: f64, factor: f64| floor + (base_lr - floor) * factor;
    if step < warm {
        let floor = if spec.name == ScheduleName::Wsd { spec.min_lr } else { 0.0 };
        return above(floor, step as f64 / warm as f64);
    }
    match spec.name {
        ScheduleName::Constant => base_lr,
        ScheduleName::Linear => above(spec.min_lr, 1.0 - compute_progress_fraction(step, warm, total_steps)),
        ScheduleName::Cosine => {
            above(spec.min_lr, compute_half_cosine(compute_progress_fraction(step, warm, total_steps)))
        }
        ScheduleName::Wsd => {
            let decay_from = total_steps.saturating_sub(spec.decay_steps);
            if step < decay_from {
                return base_lr;
            }
            above(spec.min_lr, compute_half_cosine(compute_progress_fraction(step, decay_from, total_steps)))
        }
    }
}

/// Returns which fraction of the steps between `from` and `to` is done at the step `step`, at most
/// 1.
fn compute_progress_fraction(step: u64, from: u64, to: u64) -> f64 {
    if step >= to {
        return 1.0;
    }
    step.saturating_sub(from) as f64 / (to - from) as f64
}

/// Computes half a cosine wave, which falls from 1 at `progress` = 0 to 0 at `progress` = 1. `libm`
/// gives the same bits on every machine.
fn compute_half_cosine(progress: f64) -> f64 {
    0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the learning rates of all steps of a schedule whose base rate is 1.
    fn compute_rates(
        name: ScheduleName,
        warmup_steps: u64,
        min_lr: f64,
        decay_steps: u64,
        total: u64,
    ) -> Vec<f64> {
        let spec = ScheduleSpec { name, warmup_steps, min_lr, decay_steps };
        (0..=total + 1).map(|s| compute_learning_rate(&spec, 1.0, total, s)).collect()
    }

    /// Checks that two lists of learning rates are equal up to rounding.
    fn assert_close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!((g - w).abs() < 1e-12, "step {i}: {g} is not {w} in {got:?}");
        }
    }

    #[test]
    fn a_constant_rate_follows_the_warm_up() {
        assert_close(&compute_rates(ScheduleName::Constant, 2, 0.3, 0, 4), &[0.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_linear_schedule_decays_to_the_minimum() {
        assert_close(
            &compute_rates(ScheduleName::Linear, 2, 0.0, 0, 6),
            &[0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
        );
        assert_close(&compute_rates(ScheduleName::Linear, 0, 0.2, 0, 4), &[1.0, 0.8, 0.6, 0.4, 0.2, 0.2]);
    }

    /// Checks a cosine schedule against rates that follow from cos(π/6) = √3/2 and cos(π/3) = ½.
    #[test]
    fn a_cosine_schedule_decays_to_the_minimum() {
        let h = 3f64.sqrt() / 2.0;
        let half = [1.0, (1.0 + h) / 2.0, 0.75, 0.5, 0.25, (1.0 - h) / 2.0, 0.0, 0.0];
        let want: Vec<f64> = [0.0, 0.5].into_iter().chain(half).collect();
        assert_close(&compute_rates(ScheduleName::Cosine, 2, 0.0, 0, 8), &want);
        let want: Vec<f64> = half.iter().map(|f| 0.1 + 0.9 * f).collect();
        assert_close(&compute_rates(ScheduleName::Cosine, 0, 0.1, 0, 6), &want);
    }

    #[test]
    fn a_wsd_schedule_is_constant_and_then_decays() {
        let want = [0.1, 0.55, 1.0, 1.0, 1.0, 0.775, 0.325, 0.1, 0.1];
        assert_close(&compute_rates(ScheduleName::Wsd, 2, 0.1, 3, 7), &want);
        // without a constant part, and without decay
        assert_close(&compute_rates(ScheduleName::Wsd, 0, 0.0, 2, 2), &[1.0, 0.5, 0.0, 0.0]);
        assert_close(&compute_rates(ScheduleName::Wsd, 0, 0.0, 0, 2), &[1.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn degenerate_lengths_stay_finite() {
        for name in [ScheduleName::Constant, ScheduleName::Linear, ScheduleName::Cosine, ScheduleName::Wsd] {
            for (warm, decay, total) in [(0, 0, 0), (5, 0, 3), (3, 9, 3), (2, 9, 5)] {
                for lr in compute_rates(name, warm, 0.01, decay, total) {
                    assert!((0.0..=1.0).contains(&lr), "{name:?} {warm} {decay} {total}: {lr}");
                }
            }
        }
    }

    /// Checks that the schedules have the same rates as those of transformers 5.23 (LambdaLR with
    /// lr 3e-4).
    #[test]
    fn rates_equal_those_of_transformers() {
        let lr = |name, min_lr, decay_steps, step| {
            compute_learning_rate(
                &ScheduleSpec { name, warmup_steps: 20, min_lr, decay_steps },
                3e-4,
                200,
                step,
            )
        };
        for &(step, cosine, linear, wsd) in GOLDEN {
            for (got, want) in [
                (lr(ScheduleName::Cosine, 3e-5, 0, step), cosine),
                (lr(ScheduleName::Linear, 0.0, 0, step), linear),
                (lr(ScheduleName::Wsd, 3e-5, 50, step), wsd),
            ] {
                assert!((got - want).abs() <= 1e-15, "step {step}: {got:e} is not {want:e}");
            }
        }
    }

    /// Expected learning rates for each step with a cosine, a linear and a wsd schedule.
    const GOLDEN: &[(u64, f64, f64, f64)] = &[
        (0, 0.0, 0.0, 2.9999999999999997e-05),
        (1, 1.4999999999999999e-05, 1.4999999999999999e-05, 4.35e-05),
        (7, 0.00010499999999999999, 0.00010499999999999999, 0.0001245),
        (19, 0.000285, 0.000285, 0.00028649999999999997),
        (20, 0.0003, 0.0003, 0.0003),
        (21, 0.0002999794388461128, 0.00029833333333333334, 0.0003),
        (64, 0.0002621108730457179, 0.00022666666666666663, 0.0003),
        (110, 0.000165, 0.00015, 0.0003),
        (149, 8.004174720827197e-05, 8.499999999999999e-05, 0.0003),
        (150, 7.822367269231717e-05, 8.333333333333333e-05, 0.0003),
        (151, 7.643203108628153e-05, 8.166666666666665e-05, 0.00029973360833781664),
        (175, 4.264844875005226e-05, 4.1666666666666665e-05, 0.000165),
        (198, 3.008223835242207e-05, 3.3333333333333333e-06, 3.10645153225455e-05),
        (199, 3.002056115388718e-05, 1.6666666666666667e-06, 3.0266391662183335e-05),
    ];
}

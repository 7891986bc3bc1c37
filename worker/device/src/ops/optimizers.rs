//! Ops that update parameters: AdamW, SGD, Lion, and Muon's Nesterov momentum.
use crate::buffer::{View, ViewMut};

/// Ops for optimizers: updates of AdamW, SGD and Lion, and Muon's momentum.
pub trait OptimizerOps {
    /// Updates the parameters `p` and the two AdamW moments `exp_avg` and `exp_avg_sq` with one
    /// AdamW step, from the gradient `g`. If `rounded` is given, also writes the updated parameters
    /// to it, rounded to the nearest value of its type.
    fn adamw(
        &self,
        p: ViewMut,
        rounded: Option<ViewMut>,
        g: View,
        exp_avg: ViewMut,
        exp_avg_sq: ViewMut,
        hyper: &AdamWHyperparams,
    );
    /// Updates the parameters `p` with one SGD step, from the gradient `g`. Also updates
    /// `momentum_buffer`, which must be empty if the momentum is 0.
    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, hyper: &SgdHyperparams);
    /// Updates the parameters `p` and the moving average `exp_avg` of the gradients with one Lion
    /// step, from the gradient `g`.
    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, hyper: &LionHyperparams);
    /// Replaces the gradient by Muon's Nesterov momentum, in place. With g' = scale·g: `buffer +=
    /// (1 − mu)·(g' − buffer)`, then `g = g' + mu·(buffer − g')`.
    fn nesterov_momentum(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32);
}

/// Hyper-parameters of one AdamW update with decoupled weight decay. The arithmetic is that of
/// `torch.optim.AdamW` for a single tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWHyperparams {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment `exp_avg`.
    pub beta1: f64,
    /// Decay of the second moment `exp_avg_sq`.
    pub beta2: f64,
    /// Number that is added to the denominator of the update.
    pub eps: f64,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// Number of this update, from 1; used by the bias correction.
    pub step: u64,
    /// Factor by which the update first multiplies the gradient. The factor contains the division
    /// by the number of tokens and gradient clipping.
    pub grad_scale: f32,
}

/// Hyper-parameters of one SGD update. The arithmetic is that of `torch.optim.SGD` with dampening
/// 0, without Nesterov momentum, and with weight decay added to the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdHyperparams {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the momentum buffer; 0 for no momentum.
    pub momentum: f64,
    /// Weight decay: the parameter times this factor is added to the gradient.
    pub weight_decay: f64,
    /// Factor by which the update first multiplies the gradient. The factor contains the division
    /// by the number of tokens and gradient clipping.
    pub grad_scale: f32,
}

/// Hyper-parameters of one Lion update with decoupled weight decay (Chen et al., "Symbolic
/// Discovery of Optimization Algorithms", 2023).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionHyperparams {
    /// Learning rate.
    pub lr: f64,
    /// Weight of `exp_avg` in its weighted sum with the gradient; the sign of the sum is the
    /// update.
    pub beta1: f64,
    /// Decay of `exp_avg`, the moving average of the gradients.
    pub beta2: f64,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// Factor by which the update first multiplies the gradient. The factor contains the division
    /// by the number of tokens and gradient clipping.
    pub grad_scale: f32,
}

/// The constants of one AdamW update, such as learning rate and bias corrections, precomputed in
/// `f64` and rounded to `f32` as torch does. The layout is that of `AdamWScalars` in
/// elementwise.cu.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AdamWCoefficients {
    /// Factor by which the gradient is multiplied first.
    pub(crate) grad_scale: f32,
    /// Factor of the parameter for weight decay: 1 − lr·weight_decay.
    pub(crate) decay_factor: f32,
    /// Weight of the interpolation of the first moment towards the gradient, 1 − beta1. If
    /// `from_end` is set, it is −beta1.
    pub(crate) weight: f32,
    /// Factor of the previous second moment: beta2.
    pub(crate) beta2: f32,
    /// Factor of the squared gradient in the second moment: 1 − beta2.
    pub(crate) one_minus_beta2: f32,
    /// Bias correction of the second moment: √(1 − beta2ᵗ).
    pub(crate) correction2: f32,
    /// Number that is added to the denominator of the update.
    pub(crate) eps: f32,
    /// Factor of the first moment in the update: −lr / (1 − beta1ᵗ).
    pub(crate) step: f32,
    /// 1 if the interpolation starts from its end, the gradient, and 0 if it starts from the first
    /// moment. As in `torch.lerp`, it starts from the nearer one.
    pub(crate) from_end: i64,
}

impl AdamWHyperparams {
    /// Computes the constants of one AdamW update, such as the bias corrections for the current
    /// step, which all elements share. Panics if the number is 0.
    pub(crate) fn compute_coefficients(&self) -> AdamWCoefficients {
        assert!(self.step > 0, "adamw: the step is 0, but steps count from 1");
        let (weight, t) = ((1.0 - self.beta1) as f32, self.step as f64);
        let from_end = weight >= 0.5;
        AdamWCoefficients {
            grad_scale: self.grad_scale,
            decay_factor: (1.0 - self.lr * self.weight_decay) as f32,
            weight: if from_end { weight - 1.0 } else { weight },
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            correction2: (1.0 - libm::pow(self.beta2, t)).sqrt() as f32,
            eps: self.eps as f32,
            step: -(self.lr / (1.0 - libm::pow(self.beta1, t))) as f32,
            from_end: i64::from(from_end),
        }
    }
}

/// The constants of one Lion update, such as the factor for weight decay, precomputed in `f64` and
/// rounded to `f32`. The layout is that of `LionScalars` in elementwise.cu.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct LionCoefficients {
    /// Factor by which the gradient is multiplied first.
    pub(crate) grad_scale: f32,
    /// Factor of the parameter for weight decay: 1 − lr·weight_decay.
    pub(crate) decay_factor: f32,
    /// Weight of the moving average in the sum whose sign is the update.
    pub(crate) beta1: f32,
    /// Weight of the gradient in the sum whose sign is the update.
    pub(crate) one_minus_beta1: f32,
    /// Factor of the previous moving average.
    pub(crate) beta2: f32,
    /// Factor of the gradient in the moving average.
    pub(crate) one_minus_beta2: f32,
    /// Learning rate.
    pub(crate) lr: f32,
}

impl LionHyperparams {
    /// Computes the constants of one Lion update, which are equal for all elements, from the
    /// hyper-parameters.
    pub(crate) fn compute_coefficients(&self) -> LionCoefficients {
        LionCoefficients {
            grad_scale: self.grad_scale,
            decay_factor: (1.0 - self.lr * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            lr: self.lr as f32,
        }
    }
}

//! The optimizer AdamW (Loshchilov and Hutter, 2019).
use crate::optim::{
    unit_states::StateViews,
    update_rule::{ElementwiseUpdate, UpdateInputs, UpdateMethod, UpdateRule},
};
use ckpt::TensorRole;
use device::{Ops, View, ViewMut, ops::AdamWHyperparams};
use jobspec::OptimizerSpec;

/// The optimizer AdamW, which keeps a first and a second moment for each parameter element.
pub(super) struct AdamW;

impl UpdateRule for AdamW {
    fn list_state_roles(&self, _: &OptimizerSpec) -> Vec<TensorRole> {
        vec![TensorRole::ExpAvg, TensorRole::ExpAvgSq]
    }

    fn select_method(&self, _: &[usize], _: bool) -> UpdateMethod {
        UpdateMethod {
            direction: None,
            update: ElementwiseUpdate::WithRounding(|ops, p, rounded, g, states, inputs| {
                let roles = [TensorRole::ExpAvg, TensorRole::ExpAvgSq];
                update_with_moments(ops, (p, rounded), g, states, roles, inputs);
            }),
        }
    }
}

/// Applies AdamW's update to a part of a parameter and to the corresponding part of its first and
/// second moments. `roles` are the roles of the first and the second moment. If `rounded` is given,
/// also writes the updated part of the parameter to it, rounded to its type.
pub(super) fn update_with_moments(
    ops: &dyn Ops,
    (p, rounded): (ViewMut, Option<ViewMut>),
    g: View,
    mut states: StateViews,
    roles: [TensorRole; 2],
    inputs: &UpdateInputs<'_>,
) {
    let (lr, step, grad_scale) = (inputs.lr, inputs.update, inputs.grad_scale);
    let ((beta1, beta2), eps, weight_decay) =
        (inputs.group.betas, inputs.group.eps, inputs.group.weight_decay);
    let h = AdamWHyperparams { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
    let [exp_avg, exp_avg_sq] = roles.map(|role| states.take_state(role));
    ops.adamw(p, rounded, g, exp_avg, exp_avg_sq, &h);
}

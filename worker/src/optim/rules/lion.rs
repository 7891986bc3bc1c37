//! The optimizer Lion (Chen and others, 2023).
use crate::optim::{
    unit_states::StateViews,
    update_rule::{ElementwiseUpdate, UpdateInputs, UpdateMethod, UpdateRule},
};
use ckpt::TensorRole;
use device::{Ops, View, ViewMut, ops::LionHyperparams};
use jobspec::OptimizerSpec;

/// The optimizer Lion, which keeps one momentum for each parameter element and moves the element by
/// the sign of an update.
pub(super) struct Lion;

impl UpdateRule for Lion {
    fn list_state_roles(&self, _: &OptimizerSpec) -> Vec<TensorRole> {
        vec![TensorRole::ExpAvg]
    }

    fn select_method(&self, _: &[usize], _: bool) -> UpdateMethod {
        UpdateMethod { direction: None, update: ElementwiseUpdate::InPlace(update) }
    }
}

/// Applies Lion's update to a part of a parameter and to the corresponding part of its momentum.
fn update(ops: &dyn Ops, p: ViewMut, g: View, mut states: StateViews, inputs: &UpdateInputs<'_>) {
    let ((beta1, beta2), weight_decay) = (inputs.group.betas, inputs.group.weight_decay);
    let h = LionHyperparams { lr: inputs.lr, beta1, beta2, weight_decay, grad_scale: inputs.grad_scale };
    ops.lion(p, g, states.take_state(TensorRole::ExpAvg), &h);
}

//! The optimizer Lion (Chen and others, 2023).
use crate::optim::{
    unit_states::StateViews,
    update_rule::{UpdateInputs, UpdateMethod, UpdateRule},
};
use ckpt::TensorRole;
use device::{Ops, View, ViewMut, ops::LionHyperparams};
use jobspec::OptimizerSpec;

/// The optimizer Lion: which states it keeps, and how it updates a parameter.
pub(super) struct Lion;

impl UpdateRule for Lion {
    fn list_state_roles(&self, _: &OptimizerSpec) -> Vec<TensorRole> {
        vec![TensorRole::ExpAvg]
    }

    fn select_method(&self, _: &[usize], _: bool) -> UpdateMethod {
        UpdateMethod { direction: None, update }
    }
}

/// Applies a Lion update to the consecutive elements `p` of a parameter and to their momentum.
fn update(ops: &dyn Ops, p: ViewMut, g: View, mut states: StateViews, inputs: &UpdateInputs<'_>) {
    let ((beta1, beta2), weight_decay) = (inputs.group.betas, inputs.group.weight_decay);
    let h = LionHyperparams { lr: inputs.lr, beta1, beta2, weight_decay, grad_scale: inputs.grad_scale };
    ops.lion(p, g, states.take_state(TensorRole::ExpAvg), &h);
}

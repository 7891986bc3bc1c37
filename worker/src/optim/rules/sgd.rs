//! The optimizer SGD: stochastic gradient descent with momentum.
use crate::optim::{
    unit_states::StateViews,
    update_rule::{ElementwiseUpdate, UpdateInputs, UpdateMethod, UpdateRule},
};
use ckpt::TensorRole;
use device::{Ops, View, ViewMut, ops::SgdHyperparams};
use jobspec::OptimizerSpec;

/// The optimizer SGD (stochastic gradient descent), which keeps a momentum for each parameter
/// element if the job sets one.
pub(super) struct Sgd;

impl UpdateRule for Sgd {
    fn list_state_roles(&self, spec: &OptimizerSpec) -> Vec<TensorRole> {
        if spec.momentum == 0.0 { Vec::new() } else { vec![TensorRole::Momentum] }
    }

    fn select_method(&self, _: &[usize], _: bool) -> UpdateMethod {
        UpdateMethod { direction: None, update: ElementwiseUpdate::InPlace(update) }
    }
}

/// Applies SGD's update to a part of a parameter and, if the job sets a momentum, to the
/// corresponding part of its momentum. Either all parameters have momentum, or none.
fn update(ops: &dyn Ops, p: ViewMut, g: View, mut states: StateViews, inputs: &UpdateInputs<'_>) {
    let (momentum, weight_decay) = (inputs.group.momentum, inputs.group.weight_decay);
    let h = SgdHyperparams { lr: inputs.lr, momentum, weight_decay, grad_scale: inputs.grad_scale };
    let no_buffer: &mut [f32] = &mut [];
    let buffer =
        if inputs.spec.momentum == 0.0 { no_buffer.into() } else { states.take_state(TensorRole::Momentum) };
    ops.sgd(p, g, buffer, &h);
}

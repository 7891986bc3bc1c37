//! The list of optimizers, such as AdamW and Muon, from which the job selects one. Each has a
//! module, which implements [`UpdateRule`].
mod adafactor;
mod adamw;
mod lion;
mod muon;
mod sgd;

use super::update_rule::{UpdateMethod, UpdateRule};
use crate::params::ParamUnit;
use ckpt::TensorRole;
use jobspec::{OptimizerName, OptimizerSpec};

/// Returns the implementation of the optimizer with the name `name`, such as AdamW.
fn select_rule(name: OptimizerName) -> &'static dyn UpdateRule {
    match name {
        OptimizerName::Adamw => &adamw::AdamW,
        OptimizerName::Sgd => &sgd::Sgd,
        OptimizerName::Lion => &lion::Lion,
        OptimizerName::Muon => &muon::Muon,
        OptimizerName::Adafactor => &adafactor::Adafactor,
    }
}

/// Lists the kinds of states (such as first moments) that an optimizer keeps for each parameter, in
/// the order in which checkpoints store them.
pub fn list_state_roles(spec: &OptimizerSpec) -> Vec<TensorRole> {
    select_rule(spec.name).list_state_roles(spec)
}

/// Selects for each parameter of the model the method by which the optimizer updates it, such as
/// Muon for matrices and AdamW for others. The method of a frozen parameter is meaningless.
pub(crate) fn select_update_methods(spec: &OptimizerSpec, units: &[ParamUnit]) -> Vec<Vec<UpdateMethod>> {
    let head = units.iter().filter(|u| !u.holds_experts()).count().saturating_sub(1);
    let rule = select_rule(spec.name);
    let select = |(u, unit): (usize, &ParamUnit)| {
        let is_in_layer = u != 0 && u != head;
        unit.params.iter().map(|p| rule.select_method(&p.shape, is_in_layer)).collect()
    };
    units.iter().enumerate().map(select).collect()
}

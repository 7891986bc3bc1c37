//! The optimizer: update rules, and the optimizer states for the parameters that this rank updates.
mod rules;
pub mod schedule;
mod state_staging;
mod state_storage;
mod stochastic_bf16;
mod unit_states;
mod update_rule;

pub use rules::list_state_roles;
pub(crate) use rules::select_update_methods;
pub use state_storage::StateVector;
pub use stochastic_bf16::compute_update_chunk_len;
pub use unit_states::{SameKindStates, UnitStates, count_state_elements};
pub(crate) use update_rule::UpdateMethod;

use crate::{
    model::TiedWeight,
    param_groups::{self, GroupHyperparams, ParamGroups},
    params::{ParamUnit, list_tensors_in_canonical_order},
};
use device::{Ops, View, ViewMut};
use diagnostic::Diagnostic;
use jobspec::{OffloadTarget, OptimizerSpec};
use state_staging::StateStagingBuffers;
use std::{collections::HashMap, io, ops::Range, path::PathBuf};
use stochastic_bf16::{StochasticUpdate, update_in_f32};
use update_rule::{ElementwiseUpdate, UpdateInputs};

/// The name, the optimizer settings and the parameter names of one parameter group, in the form in
/// which checkpoints store them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ParamGroup {
    /// The name of the group: `decay` or `no_decay`, or `group 1` or `group 1 no_decay` for entry 1
    /// of `optimizer.groups`.
    pub name: String,
    /// The base learning rate of the group, before the factor of the schedule.
    pub lr: f64,
    /// The decay rates of the moments (AdamW, Lion).
    pub betas: (f64, f64),
    /// The constant added to the root of the second moment (AdamW).
    pub eps: f64,
    /// The momentum factor (SGD, Muon).
    pub momentum: f64,
    /// The weight decay: decoupled for AdamW, Lion and Muon, added to the gradient for SGD.
    pub weight_decay: f64,
    /// The names of the group's parameters.
    pub params: Vec<String>,
}

/// The learning rate, the step number and the gradient scale of one optimizer step, which apply to
/// the updates of all parameters.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs {
    /// The learning rate of this step for groups with an `lr_scale` of 1.
    pub lr: f64,
    /// The number of the step, counted from 1.
    pub step: u64,
    /// The factor by which the optimizer multiplies the summed gradient. The factor turns the sum
    /// into the gradient of the mean loss per target token, undoes the loss scale, and clips.
    pub grad_scale: f32,
}

/// The optimizer of one rank, with the optimizer states for the parameters that this rank updates.
pub struct Optimizer {
    spec: OptimizerSpec,
    /// The hyper-parameters of each group.
    groups: Vec<GroupHyperparams>,
    /// For each unit and parameter, how the parameter is updated. Meaningless for frozen
    /// parameters.
    params: Vec<Vec<ParamUpdateSettings>>,
    units: Vec<UnitStates>,
    /// Rounds updated bf16 weights stochastically. `None` unless bf16 weights have no master
    /// weights and are rounded stochastically.
    rounding: Option<StochasticUpdate>,
    /// Device memory for offloaded states. Declared after `units`, because dropping a state vector
    /// waits for its copies to these buffers.
    staging: StateStagingBuffers,
}

/// How the optimizer updates one parameter: the method (such as Muon or AdamW), the parameter
/// group, and the number of updates that the parameter missed while frozen.
struct ParamUpdateSettings {
    /// The index of the parameter's group.
    group: usize,
    method: UpdateMethod,
    /// The number of updates by which the parameter lags behind the steps of the run.
    step_lag: u64,
}

impl ParamUpdateSettings {
    /// Returns the values with which one parameter is updated in an optimizer step, such as its
    /// group's learning rate and the number of its updates so far. `shape` is the parameter's
    /// shape.
    fn build_update_inputs<'a>(
        &self,
        spec: &'a OptimizerSpec,
        groups: &'a [GroupHyperparams],
        shape: &'a [usize],
        step: StepInputs,
    ) -> UpdateInputs<'a> {
        let group = &groups[self.group];
        let update = step.step.saturating_sub(self.step_lag).max(1);
        UpdateInputs { spec, group, shape, lr: step.lr * group.lr_scale, update, grad_scale: step.grad_scale }
    }
}

impl Optimizer {
    /// Creates the optimizer of one rank, with zeroed optimizer states for the parameters that this
    /// rank updates.
    ///
    /// `rounding_seed` is the run's seed if bf16 weights have no master weights and are rounded
    /// stochastically.
    ///
    /// # Errors
    ///
    /// Fails if parameter groups are invalid, or if offload storage cannot be created.
    pub fn new(
        ops: &dyn Ops,
        spec: &OptimizerSpec,
        units: &[ParamUnit],
        ties: &[TiedWeight],
        ranges: impl Iterator<Item = Range<usize>>,
        offload: Option<&OffloadTarget>,
        rounding_seed: Option<u64>,
    ) -> Result<Self, Vec<Diagnostic>> {
        let ParamGroups { hyperparams, group_indices } =
            param_groups::assign_param_groups(spec, units, ties)?;
        let roles = list_state_roles(spec);
        let states =
            ranges.zip(units).map(|(range, unit)| UnitStates::zeroed(ops, &roles, unit, range, offload));
        let states =
            states.collect::<io::Result<Vec<_>>>().map_err(|e| vec![build_offload_error(offload, &e)])?;
        let param_updates = |(groups, methods): (Vec<usize>, Vec<UpdateMethod>)| {
            let params = groups.into_iter().zip(methods);
            params.map(|(group, method)| ParamUpdateSettings { group, method, step_lag: 0 }).collect()
        };
        let params = group_indices.into_iter().zip(select_update_methods(spec, units)).map(param_updates);
        let rounding = rounding_seed.map(|seed| StochasticUpdate::new(ops, seed, units, &states));
        let staging = StateStagingBuffers::new(ops, &states);
        Ok(Optimizer {
            spec: spec.clone(),
            groups: hyperparams,
            params: params.collect(),
            units: states,
            rounding,
            staging,
        })
    }

    /// Sets for every parameter how many optimizer steps it missed while it was frozen, by the
    /// parameter's name in `lags`, or 0 if the name is absent.
    ///
    /// The bias correction of a parameter depends on the parameter's number of updates, which is
    /// smaller than the step if the parameter was frozen for a while.
    pub fn set_step_lags(&mut self, units: &[ParamUnit], lags: &HashMap<String, u64>) {
        let params = units.iter().flat_map(|u| &u.params).zip(self.params.iter_mut().flatten());
        params.for_each(|(p, update)| update.step_lag = lags.get(&p.name).copied().unwrap_or(0));
    }

    /// Returns the names of trained parameters that were frozen for some steps of the run, each
    /// with the number of missed updates.
    pub fn collect_step_lags(&self, units: &[ParamUnit]) -> HashMap<String, u64> {
        let lags = units.iter().zip(&self.params).flat_map(|(u, updates)| {
            let trained = (0..u.params.len()).filter(|&i| u.is_trained(i));
            trained.map(|i| (u.params[i].name.clone(), updates[i].step_lag))
        });
        lags.filter(|(_, lag)| *lag > 0).collect()
    }

    /// Returns the optimizer states of parameter unit `u` (tensors that are gathered together).
    pub fn states(&self, u: usize) -> &UnitStates {
        &self.units[u]
    }

    /// Starts to copy offloaded optimizer states of parameter unit `u` (tensors that are gathered
    /// together) to the device before the update of the unit needs them.
    pub fn prefetch_states(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        st.roles.iter().for_each(|states| states.vector.read_ahead());
        self.staging.prefetch(ops, u, st);
    }

    /// Starts to copy the updated optimizer states of parameter unit `u` (tensors that are gathered
    /// together) from the device back to their offload storage.
    pub fn write_back_states(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        self.staging.write_back(ops, u, st);
        self.evict_states(u);
    }

    /// Starts to write optimizer states of parameter unit `u` (tensors that are gathered together)
    /// to their file and frees their memory, if they are offloaded to files.
    pub fn evict_states(&self, u: usize) {
        self.units.get(u).into_iter().flat_map(|st| &st.roles).for_each(|states| states.vector.evict_pages());
    }

    /// Returns the optimizer states of parameter unit `u` (tensors that are gathered together) for
    /// modification.
    pub fn states_mut(&mut self, u: usize) -> &mut UnitStates {
        &mut self.units[u]
    }

    /// Returns the optimizer states of every parameter unit (tensors that are gathered together)
    /// for modification.
    pub fn all_states_mut(&mut self) -> impl Iterator<Item = &mut UnitStates> {
        self.units.iter_mut()
    }

    /// Returns the optimizer settings from the job file, such as the name of the optimizer and the
    /// learning rate.
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// Lists the parameter groups in the form that checkpoints store, sorted by name.
    pub fn list_param_groups(&self, units: &[ParamUnit]) -> Vec<ParamGroup> {
        let mut groups: Vec<ParamGroup> = self.groups.iter().map(|n| self.to_param_group(n)).collect();
        for (u, i) in
            list_tensors_in_canonical_order(units).into_iter().filter(|&(u, i)| units[u].is_trained(i))
        {
            groups[self.params[u][i].group].params.push(units[u].params[i].name.clone());
        }
        groups.sort_by_key(|g| g.name.clone());
        groups
    }

    /// Converts a parameter group's optimizer settings to the form in which checkpoints store them,
    /// at first with no parameter names.
    fn to_param_group(&self, n: &GroupHyperparams) -> ParamGroup {
        let params = Vec::new();
        let GroupHyperparams { name, betas, eps, momentum, weight_decay, .. } = n.clone();
        ParamGroup { name, lr: self.spec.lr * n.lr_scale, betas, eps, momentum, weight_decay, params }
    }

    /// Returns whether the update of parameter unit `u` (tensors that are gathered together) needs
    /// gradients of whole tensors, as Muon does, instead of only this rank's shard.
    pub fn needs_whole_gradient(&self, u: usize, unit: &ParamUnit) -> bool {
        (0..unit.params.len()).any(|i| unit.is_trained(i) && self.params[u][i].method.direction.is_some())
    }

    /// Converts this rank's gradients of those tensors that an optimizer such as Muon updates as a
    /// whole to the values that ranks then gather, such as the momentum. Muon replaces the
    /// gradients by the momentum. On entry, `grad` is the gradient of the trained elements in this
    /// rank's range of the unit. Overwrites the elements of these parameters.
    ///
    /// If the range is not the whole unit, the caller must afterwards gather the changed `grad` of
    /// all ranks, and pass it to [`Optimizer::update_unit`].
    pub fn prepare_whole_tensor_gradient(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &ParamUnit,
        mut grad: ViewMut,
        step: StepInputs,
    ) {
        let range = self.units[u].range.clone();
        let mut states = self.staging.fetch_to_device(ops, u, &mut self.units[u]);
        let mut at = 0;
        for seg in unit.list_trained_segments(range) {
            let r = at..at + seg.flat.len();
            at = r.end;
            let param = &self.params[u][seg.param];
            if let Some(direction) = param.method.direction {
                let inputs =
                    param.build_update_inputs(&self.spec, &self.groups, &unit.params[seg.param].shape, step);
                direction.prepare_gradient(
                    ops,
                    grad.slice_mut(r),
                    states.select_sharded_states(seg.param),
                    &inputs,
                );
            }
        }
    }

    /// Returns whether [`Optimizer::update_unit`] can also write the updated parameters of `unit`,
    /// number `u`, rounded to 16 bits.
    pub fn can_round_unit(&self, u: usize, unit: &ParamUnit) -> bool {
        let can_round =
            |i: usize| matches!(self.params[u][i].method.update, ElementwiseUpdate::WithRounding(_));
        (0..unit.params.len()).all(|i| !unit.is_trained(i) || can_round(i))
    }

    /// Updates this rank's parameters of the parameter unit `u` (tensors that are gathered
    /// together) and their optimizer states by one optimizer step. If `rounded` is given, also
    /// writes the updated parameters to it, rounded to its type, which requires
    /// [`Optimizer::can_round_unit`].
    ///
    /// If [`Optimizer::needs_whole_gradient`] is true, [`Optimizer::prepare_whole_tensor_gradient`]
    /// must have changed `grad`, and `whole_grad` must be the changed gradient of the unit's
    /// trained vector. Otherwise `whole_grad` is not used.
    pub fn update_unit(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &ParamUnit,
        (mut params, mut rounded): (ViewMut, Option<ViewMut>),
        grad: View,
        whole_grad: View,
        step: StepInputs,
    ) {
        let range = self.units[u].range.clone();
        assert!(
            params.len() == range.len() && grad.len() == unit.to_trained_range(range.clone()).len(),
            "parameters and gradient have the lengths of the optimizer's range"
        );
        let mut states = self.staging.fetch_to_device(ops, u, &mut self.units[u]);
        let mut at = 0;
        for seg in unit.list_trained_segments(range.clone()) {
            let updated = seg.flat.start - range.start..seg.flat.end - range.start;
            let p = params.slice_mut(updated.clone());
            let mut rounded = rounded.as_mut().map(|rounded| rounded.slice_mut(updated));
            let r = at..at + seg.flat.len();
            at = r.end;
            let param = &self.params[u][seg.param];
            let inputs =
                param.build_update_inputs(&self.spec, &self.groups, &unit.params[seg.param].shape, step);
            let UpdateMethod { direction, update } = param.method;
            let direction = direction.map(|direction| {
                let whole = whole_grad.slice(unit.to_trained_range(unit.tensor_range(seg.param)));
                direction.compute_direction(ops, whole, states.select_replicated_states(seg.param), &inputs)
            });
            let g =
                direction.as_ref().map_or_else(|| grad.slice(r), |d| d.view().slice(seg.elements.clone()));
            let mut states = states.select_sharded_states(seg.param);
            update_in_f32(&mut self.rounding, ops, (u, &seg), step.step, p, |p, piece| {
                let rounded = rounded.as_mut().map(|rounded| rounded.slice_mut(piece.clone()));
                let (g, states) = (g.slice(piece.clone()), states.slice_mut(piece));
                match update {
                    ElementwiseUpdate::InPlace(update) => update(ops, p, g, states, &inputs),
                    ElementwiseUpdate::WithRounding(update) => update(ops, p, rounded, g, states, &inputs),
                }
            });
        }
    }
}

/// Builds the error which reports that storage for offloaded optimizer states (in host memory or
/// files) could not be created.
fn build_offload_error(offload: Option<&OffloadTarget>, e: &io::Error) -> Diagnostic {
    let directory =
        offload.cloned().map(|offload| PathBuf::from(offload).display().to_string()).unwrap_or_default();
    let message = format!("cannot create a file for optimizer states in {directory}");
    Diagnostic::error(diagnostic::codes::training::OFFLOAD_STORAGE_UNUSABLE, message)
        .with_subject("train.zero.offload")
        .with_field("path", directory)
        .with_cause(e)
}

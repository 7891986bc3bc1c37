//! The optimizer: states of the shards that this rank updates, and their update rules.
mod muon;
pub mod schedule;
mod state_staging;
mod state_storage;
mod stochastic_bf16;
mod unit_states;

pub use state_storage::StateVector;
pub use stochastic_bf16::compute_update_chunk_len;
pub use unit_states::UnitStates;

use crate::{
    model::TiedWeight,
    param_groups::{self, GroupHyperparams, ParamGroups},
    params::{ParamUnit, list_tensors_in_canonical_order},
};
use device::{
    Ops, View, ViewMut,
    ops::{AdamWHyperparams, LionHyperparams, SgdHyperparams},
};
use diagnostic::Diagnostic;
use jobspec::{OffloadTarget, OptimizerName, OptimizerSpec};
use state_staging::StateStagingBuffers;
use std::{collections::HashMap, io, ops::Range, path::PathBuf};
use stochastic_bf16::{StochasticUpdate, update_in_f32};

/// Parameters with equal hyper-parameters, in the form that checkpoints store.
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

/// The inputs of an update that change with every step.
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

/// The optimizer of the unit ranges that this rank updates, with the optimizer states.
pub struct Optimizer {
    spec: OptimizerSpec,
    /// The hyper-parameters of each group.
    groups: Vec<GroupHyperparams>,
    /// For each unit and parameter, the index of the parameter's group.
    group_indices: Vec<Vec<usize>>,
    /// For each unit and parameter, whether Muon updates the parameter. Muon updates only matrices.
    is_muon_matrix: Vec<Vec<bool>>,
    /// For each unit and parameter, the number of updates by which the parameter lags behind the
    /// steps of the run.
    step_lags: Vec<Vec<u64>>,
    units: Vec<UnitStates>,
    /// Set if bf16 weights have no master weights and are rounded stochastically.
    rounding: Option<StochasticUpdate>,
    /// Device memory for offloaded states. Declared after `units`, because dropping a state vector
    /// waits for its copies to these buffers.
    staging: StateStagingBuffers,
}

impl Optimizer {
    /// Creates zero states for the given range of each unit.
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
        let ParamGroups { hyperparams, group_indices } = param_groups::assign_groups(spec, units, ties)?;
        let (first, second) = needs_state_vectors(spec);
        let states = ranges.zip(units).map(|(range, unit)| -> io::Result<UnitStates> {
            let trained = unit.compute_trained_range(range.clone());
            let vector = |kept: bool| StateVector::zeroed(ops, if kept { trained.len() } else { 0 }, offload);
            Ok(UnitStates { first: vector(first)?, second: vector(second)?, range, trained })
        });
        let states =
            states.collect::<io::Result<Vec<_>>>().map_err(|e| vec![build_offload_error(offload, &e)])?;
        let is_muon_matrix = find_muon_matrices(spec, units);
        let step_lags = units.iter().map(|u| vec![0; u.params.len()]).collect();
        let rounding = rounding_seed.map(|seed| StochasticUpdate::new(ops, seed, units, &states));
        let staging = StateStagingBuffers::new(ops, &states);
        Ok(Optimizer {
            spec: spec.clone(),
            groups: hyperparams,
            group_indices,
            is_muon_matrix,
            step_lags,
            units: states,
            rounding,
            staging,
        })
    }

    /// Sets the step lags of the named parameters, and 0 for all others.
    ///
    /// The bias correction of a parameter depends on the parameter's number of updates, which is
    /// smaller than the step if the parameter was frozen for a while.
    pub fn set_step_lags(&mut self, units: &[ParamUnit], lags: &HashMap<String, u64>) {
        let unit_lags =
            |u: &ParamUnit| u.params.iter().map(|p| lags.get(&p.name).copied().unwrap_or(0)).collect();
        self.step_lags = units.iter().map(unit_lags).collect();
    }

    /// Returns the trained parameters that lag behind the steps of the run, with the number of
    /// missing updates.
    pub fn collect_step_lags(&self, units: &[ParamUnit]) -> HashMap<String, u64> {
        let lags = units.iter().zip(&self.step_lags).flat_map(|(u, unit_lags)| {
            (0..u.params.len()).filter(|&i| u.is_trained(i)).map(|i| (u.params[i].name.clone(), unit_lags[i]))
        });
        lags.filter(|(_, lag)| *lag > 0).collect()
    }

    /// Returns the states of unit `u`.
    pub fn states(&self, u: usize) -> &UnitStates {
        &self.units[u]
    }

    /// Starts to copy offloaded states of unit `u` to the device, so that the next update need not
    /// wait for the whole copy.
    pub fn prefetch_states(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        [&st.first, &st.second].into_iter().for_each(StateVector::read_ahead);
        self.staging.prefetch(ops, u, st);
    }

    /// Starts to copy the updated states of unit `u` back to their offload storage.
    pub fn write_back_states(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        self.staging.write_back(ops, u, st);
        self.evict_states(u);
    }

    /// Allows the operating system to write file-backed states of unit `u` to their file and to
    /// free their memory.
    pub fn evict_states(&self, u: usize) {
        self.units
            .get(u)
            .into_iter()
            .flat_map(|st| [&st.first, &st.second])
            .for_each(StateVector::evict_pages);
    }

    /// Returns the states of unit `u` for modification.
    pub fn states_mut(&mut self, u: usize) -> &mut UnitStates {
        &mut self.units[u]
    }

    /// Returns the states of every unit for modification.
    pub fn all_states_mut(&mut self) -> impl Iterator<Item = &mut UnitStates> {
        self.units.iter_mut()
    }

    /// Returns the optimizer's settings in the job.
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// Lists the parameter groups in the form that checkpoints store, sorted by name.
    pub fn list_param_groups(&self, units: &[ParamUnit]) -> Vec<ParamGroup> {
        let mut groups: Vec<ParamGroup> = self.groups.iter().map(|n| self.to_param_group(n)).collect();
        for (u, i) in
            list_tensors_in_canonical_order(units).into_iter().filter(|&(u, i)| units[u].is_trained(i))
        {
            groups[self.group_indices[u][i]].params.push(units[u].params[i].name.clone());
        }
        groups.sort_by_key(|g| g.name.clone());
        groups
    }

    /// Converts a group's hyper-parameters to the form that checkpoints store, with an empty list
    /// of parameters.
    fn to_param_group(&self, n: &GroupHyperparams) -> ParamGroup {
        let params = Vec::new();
        let GroupHyperparams { name, betas, eps, momentum, weight_decay, .. } = n.clone();
        ParamGroup { name, lr: self.spec.lr * n.lr_scale, betas, eps, momentum, weight_decay, params }
    }

    /// Returns whether Muon updates a matrix of unit `u`.
    pub fn has_muon_matrices(&self, u: usize) -> bool {
        self.is_muon_matrix[u].contains(&true)
    }

    /// Prepares the update of unit `u` if Muon updates matrices of the unit. On entry, `grad` is
    /// the gradient of the trained elements in this rank's range of the unit.
    ///
    /// For the elements of Muon's matrices, updates the stored momentum, and overwrites the
    /// gradient in `grad` with the Nesterov momentum. Other elements of `grad` do not change.
    ///
    /// Muon needs whole matrices. If the range is not the whole unit, the caller must afterwards
    /// gather the changed `grad` of all ranks. The caller must pass the result for the whole unit
    /// to [`Optimizer::update_unit`] as `directions`.
    pub fn apply_muon_momentum(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &ParamUnit,
        mut grad: ViewMut,
        step: StepInputs,
    ) {
        let st = &mut self.units[u];
        let segments = unit.list_trained_segments(st.range.clone());
        let [mut first, _] = self.staging.fetch_to_device(ops, u, st);
        let mut at = 0;
        for seg in segments {
            let r = at..at + seg.flat.len();
            at = r.end;
            if self.is_muon_matrix[u][seg.param] {
                let mu = self.groups[self.group_indices[u][seg.param]].momentum;
                ops.nesterov_momentum(first.slice_mut(r.clone()), grad.slice_mut(r), mu, step.grad_scale);
            }
        }
    }

    /// Updates the elements of Muon's matrices in `params`, this rank's range of unit `u`. Other
    /// elements do not change. `directions` has the layout of the unit's trained vector, and
    /// contains the Nesterov momentum of each of Muon's matrices.
    fn update_muon_matrices(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &ParamUnit,
        params: &mut ViewMut,
        directions: View,
        step: StepInputs,
    ) {
        let st = &self.units[u];
        for seg in unit
            .list_trained_segments(st.range.clone())
            .into_iter()
            .filter(|s| self.is_muon_matrix[u][s.param])
        {
            let (spec, n) = (&unit.params[seg.param], &self.groups[self.group_indices[u][seg.param]]);
            let (rows, columns) = (spec.shape[0], spec.shape[1]);
            let matrix = unit.compute_trained_range(unit.tensor_range(seg.param));
            let direction = muon::orthogonalize(ops, directions.slice(matrix), rows, columns);
            let lr = step.lr * n.lr_scale;
            let (keep, by) =
                ((1.0 - lr * n.weight_decay) as f32, (lr * muon::compute_lr_factor(rows, columns)) as f32);
            let p = params.slice_mut(seg.flat.start - st.range.start..seg.flat.end - st.range.start);
            let direction = direction.view().slice(seg.elements.clone());
            update_in_f32(&mut self.rounding, ops, (u, &seg), step.step, p, |p, r| {
                ops.axpby(p, keep, direction.slice(r), -by);
            });
        }
    }

    /// Updates the trained parameters in `params`, this rank's range of unit `u`, and their
    /// optimizer states. `grad` is the gradient of the trained elements in the range.
    ///
    /// If Muon updates matrices of the unit, `grad` must have been passed to
    /// [`Optimizer::apply_muon_momentum`], and `directions` must be the changed `grad` of the whole
    /// unit, gathered from all ranks. Otherwise `directions` is `None`.
    pub fn update_unit(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &ParamUnit,
        mut params: ViewMut,
        grad: View,
        directions: Option<View>,
        step: StepInputs,
    ) {
        if let Some(directions) = directions {
            self.update_muon_matrices(ops, u, unit, &mut params, directions, step);
        }
        let st = &mut self.units[u];
        assert!(
            params.len() == st.range.len() && grad.len() == st.trained.len(),
            "parameters and gradient have the lengths of the optimizer's range"
        );
        let (range, segments) = (st.range.clone(), unit.list_trained_segments(st.range.clone()));
        let mut states = self.staging.fetch_to_device(ops, u, st);
        let mut at = 0;
        for seg in segments {
            let p = params.slice_mut(seg.flat.start - range.start..seg.flat.end - range.start);
            let r = at..at + seg.flat.len();
            at = r.end;
            if self.is_muon_matrix[u][seg.param] {
                continue;
            }
            let n = &self.groups[self.group_indices[u][seg.param]];
            let param_update = step.step.saturating_sub(self.step_lags[u][seg.param]).max(1);
            let param_step = StepInputs { step: param_update, lr: step.lr * n.lr_scale, ..step };
            update_in_f32(&mut self.rounding, ops, (u, &seg), step.step, p, |p, piece| {
                let r = r.start + piece.start..r.start + piece.end;
                update_segment(ops, self.spec.name, n, p, grad.slice(r.clone()), &mut states, r, param_step);
            });
        }
    }
}

/// Builds the error of offload storage that cannot be created.
fn build_offload_error(offload: Option<&OffloadTarget>, e: &io::Error) -> Diagnostic {
    let directory =
        offload.cloned().map(|offload| PathBuf::from(offload).display().to_string()).unwrap_or_default();
    let message = format!("cannot create a file for optimizer states in {directory}");
    Diagnostic::error(diagnostic::codes::training::OFFLOAD_STORAGE_UNUSABLE, message)
        .with_subject("train.zero.offload")
        .with_field("path", directory)
        .with_cause(e)
}

/// Determines, for each unit and parameter, whether Muon updates the parameter. Every flag is false
/// if the job's optimizer is not Muon.
///
/// Muon updates the trained matrices of layers and experts. With this optimizer, AdamW updates the
/// embedding, the head and everything that is not a matrix.
pub(crate) fn find_muon_matrices(spec: &OptimizerSpec, units: &[ParamUnit]) -> Vec<Vec<bool>> {
    let head = units.iter().filter(|u| !u.holds_experts()).count().saturating_sub(1);
    let is_matrix = |(u, unit): (usize, &ParamUnit)| -> Vec<bool> {
        let layer = spec.name == OptimizerName::Muon && u != 0 && u != head;
        (0..unit.params.len())
            .map(|i| layer && unit.is_trained(i) && unit.params[i].shape.len() == 2)
            .collect()
    };
    units.iter().enumerate().map(is_matrix).collect()
}

/// Updates `p`, consecutive elements of one tensor, and their optimizer states. `g` is the gradient
/// of these elements, and `r` is the range of their states in both state vectors.
fn update_segment(
    ops: &dyn Ops,
    name: OptimizerName,
    n: &GroupHyperparams,
    p: ViewMut,
    g: View,
    [first, second]: &mut [ViewMut; 2],
    r: Range<usize>,
    step: StepInputs,
) {
    let StepInputs { lr, step, grad_scale } = step;
    let (weight_decay, (beta1, beta2)) = (n.weight_decay, n.betas);
    match name {
        OptimizerName::Adamw | OptimizerName::Muon => {
            let h = AdamWHyperparams { lr, beta1, beta2, eps: n.eps, weight_decay, step, grad_scale };
            ops.adamw(p, g, first.slice_mut(r.clone()), second.slice_mut(r), &h);
        }
        OptimizerName::Sgd => {
            let h = SgdHyperparams { lr, momentum: n.momentum, weight_decay, grad_scale };
            let buffer = if n.momentum == 0.0 { 0..0 } else { r };
            ops.sgd(p, g, first.slice_mut(buffer), &h);
        }
        OptimizerName::Lion => {
            ops.lion(
                p,
                g,
                first.slice_mut(r),
                &LionHyperparams { lr, beta1, beta2, weight_decay, grad_scale },
            );
        }
    }
}

/// Returns two flags: whether the optimizer needs the first and the second state vector.
pub fn needs_state_vectors(spec: &OptimizerSpec) -> (bool, bool) {
    match spec.name {
        OptimizerName::Adamw | OptimizerName::Muon => (true, true),
        OptimizerName::Sgd => (spec.momentum != 0.0, false),
        OptimizerName::Lion => (true, false),
    }
}

//! The optimizer: states of the shards that this rank updates, and their update rules.
mod muon;
pub mod schedule;
mod staging;
mod state_storage;
mod stochastic_bf16;

pub use state_storage::StateVector;
pub use stochastic_bf16::chunk_len;

use crate::{
    model::Tie,
    param_groups::{self, GroupHyperparams, ParamGroups},
    params::{Unit, canonical_order},
};
use contract::job::{Offload, OptimizerName, OptimizerSpec};
use device::{
    Ops, View, ViewMut,
    ops::{AdamW, Lion, Sgd},
};
use diagnostic::Diagnostic;
use staging::StagingBuffers;
use std::{collections::HashMap, io, ops::Range, path::PathBuf};
use stochastic_bf16::{StochasticUpdate, in_f32};

/// Parameters that share hyper-parameters, in the form that checkpoints store.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ParamGroup {
    /// `decay`, `no_decay`, or the name of an item of `optimizer.groups`.
    pub name: String,
    /// The learning rate before the schedule.
    pub lr: f64,
    /// Decay rates of the moments (AdamW, Lion).
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
pub struct StepParams {
    /// The learning rate of this step for groups with a scale of 1.
    pub lr: f64,
    /// The number of the step, from 1.
    pub step: u64,
    /// The factor of the summed gradient: mean over targets times clipping.
    pub grad_scale: f32,
}

/// The optimizer of the unit ranges that this rank updates.
pub struct Optimizer {
    spec: OptimizerSpec,
    /// The hyper-parameters of each group.
    groups: Vec<GroupHyperparams>,
    /// The group of each parameter, by unit.
    group_of: Vec<Vec<usize>>,
    /// Whether each parameter, by unit, is a matrix that Muon updates.
    whole: Vec<Vec<bool>>,
    /// By how many updates each parameter, by unit, lags behind the steps of the run.
    late: Vec<Vec<u64>>,
    units: Vec<UnitStates>,
    /// Stochastic rounding of bf16 weights without master weights.
    narrow: Option<StochasticUpdate>,
    /// Declared after `units`, because dropping a state vector waits for its copies to these
    /// buffers.
    staging: StagingBuffers,
}

/// The optimizer states of one unit on this rank. The vectors contain trained elements only.
pub struct UnitStates {
    /// The flat range of the unit that this rank updates.
    pub range: Range<usize>,
    /// The corresponding range of the unit's trained elements.
    pub trained: Range<usize>,
    /// The first moment of AdamW and Lion, or the momentum of SGD and Muon. Empty for SGD without
    /// momentum.
    pub first: StateVector,
    /// The second moment of AdamW; empty for other optimizers. Matrices that Muon updates leave
    /// theirs at zero.
    pub second: StateVector,
}

impl Optimizer {
    /// Creates zero states for the given range of each unit. `rounding` is the run's seed when bf16
    /// weights have no master weights and are rounded stochastically.
    ///
    /// Errors: invalid parameter groups, or offload storage that cannot be created.
    pub fn new(
        ops: &dyn Ops,
        spec: &OptimizerSpec,
        units: &[Unit],
        ties: &[Tie],
        ranges: impl Iterator<Item = Range<usize>>,
        offload: Option<&Offload>,
        rounding: Option<u64>,
    ) -> Result<Self, Vec<Diagnostic>> {
        let ParamGroups { hyperparams: numbers, group_of: of } =
            param_groups::assign_groups(spec, units, ties)?;
        let (first, second) = state_vectors(spec);
        let states = ranges.zip(units).map(|(range, unit)| -> io::Result<UnitStates> {
            let trained = unit.trained_range(range.clone());
            let vector = |kept: bool| StateVector::zeroed(ops, if kept { trained.len() } else { 0 }, offload);
            Ok(UnitStates { first: vector(first)?, second: vector(second)?, range, trained })
        });
        let states = states.collect::<io::Result<Vec<_>>>().map_err(|e| vec![offload_error(offload, &e)])?;
        let whole = muon_matrices(spec, units);
        let late = units.iter().map(|u| vec![0; u.params.len()]).collect();
        let narrow = rounding.map(|seed| StochasticUpdate::new(ops, seed, units, &states));
        let staging = StagingBuffers::new(ops, &states);
        Ok(Optimizer {
            spec: spec.clone(),
            groups: numbers,
            group_of: of,
            whole,
            late,
            units: states,
            narrow,
            staging,
        })
    }

    /// Sets by how many updates the named parameters lag behind the steps of the run; other
    /// parameters have no lag. A group that was added to the optimizer later has a separate count
    /// of updates, which its bias correction depends on.
    pub fn set_step_lag(&mut self, units: &[Unit], late: &HashMap<String, u64>) {
        let lags = |u: &Unit| u.params.iter().map(|p| late.get(&p.name).copied().unwrap_or(0)).collect();
        self.late = units.iter().map(lags).collect();
    }

    /// The trained parameters that lag behind the steps of the run, with the number of missing
    /// updates.
    pub fn step_lag(&self, units: &[Unit]) -> HashMap<String, u64> {
        let lags = units.iter().zip(&self.late).flat_map(|(u, late)| {
            (0..u.params.len()).filter(|&i| u.is_trained(i)).map(|i| (u.params[i].name.clone(), late[i]))
        });
        lags.filter(|(_, late)| *late > 0).collect()
    }

    /// The states of unit `u`.
    pub fn states(&self, u: usize) -> &UnitStates {
        &self.units[u]
    }

    /// Starts to copy the states of unit `u` to the device, because they are updated soon.
    pub fn prefetch_states(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        [&st.first, &st.second].into_iter().for_each(StateVector::advise_needed);
        self.staging.prefetch(ops, u, st);
    }

    /// Starts to copy the updated states of unit `u` back to their storage.
    pub fn write_back_states(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        self.staging.write_back(ops, u, st);
        self.evict_states(u);
    }

    /// Allows the system to write file-backed states of unit `u` and drop them from memory.
    pub fn evict_states(&self, u: usize) {
        self.units
            .get(u)
            .into_iter()
            .flat_map(|st| [&st.first, &st.second])
            .for_each(StateVector::advise_unneeded);
    }

    /// The states of unit `u` for modification.
    pub fn states_mut(&mut self, u: usize) -> &mut UnitStates {
        &mut self.units[u]
    }

    /// The states of every unit for modification.
    pub fn all_states_mut(&mut self) -> impl Iterator<Item = &mut UnitStates> {
        self.units.iter_mut()
    }

    /// The optimizer's settings in the job.
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// The parameter groups in the form that checkpoints store.
    pub fn groups(&self, units: &[Unit]) -> Vec<ParamGroup> {
        let mut groups: Vec<ParamGroup> = self.groups.iter().map(|n| self.group(n)).collect();
        for (u, i) in canonical_order(units).into_iter().filter(|&(u, i)| units[u].is_trained(i)) {
            groups[self.group_of[u][i]].params.push(units[u].params[i].name.clone());
        }
        groups.sort_by_key(|g| g.name.clone());
        groups
    }

    fn group(&self, n: &GroupHyperparams) -> ParamGroup {
        let params = Vec::new();
        let GroupHyperparams { name, betas, eps, momentum, weight_decay, .. } = n.clone();
        ParamGroup { name, lr: self.spec.lr * n.lr_scale, betas, eps, momentum, weight_decay, params }
    }

    /// Whether Muon updates a matrix of unit `u`.
    pub fn has_muon_matrices(&self, u: usize) -> bool {
        self.whole[u].contains(&true)
    }

    /// Replaces the gradient of Muon's matrices in the range of unit `u` by their Nesterov
    /// momentum. [`Optimizer::update`] takes the momentum of the whole unit.
    pub fn muon_momentum(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &Unit,
        mut grad: ViewMut,
        step: StepParams,
    ) {
        let st = &mut self.units[u];
        let segments = unit.trained_segments(st.range.clone());
        let [mut first, _] = self.staging.on_device(ops, u, st);
        let mut at = 0;
        for seg in segments {
            let r = at..at + seg.flat.len();
            at = r.end;
            if self.whole[u][seg.param] {
                let mu = self.groups[self.group_of[u][seg.param]].momentum;
                ops.nesterov(first.slice_mut(r.clone()), grad.slice_mut(r), mu, step.grad_scale);
            }
        }
    }

    /// Updates the elements of Muon's matrices in the range of unit `u`. `directions` is the
    /// momentum of all trained elements of the unit.
    fn update_muon_matrices(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &Unit,
        params: &mut ViewMut,
        directions: View,
        step: StepParams,
    ) {
        let st = &self.units[u];
        for seg in unit.trained_segments(st.range.clone()).into_iter().filter(|s| self.whole[u][s.param]) {
            let (spec, n) = (&unit.params[seg.param], &self.groups[self.group_of[u][seg.param]]);
            let (rows, columns) = (spec.shape[0], spec.shape[1]);
            let matrix = unit.trained_range(unit.range(seg.param));
            let direction = muon::orthogonalize(ops, directions.slice(matrix), rows, columns);
            let lr = step.lr * n.lr_scale;
            let (keep, by) =
                ((1.0 - lr * n.weight_decay) as f32, (lr * muon::lr_factor(rows, columns)) as f32);
            let p = params.slice_mut(seg.flat.start - st.range.start..seg.flat.end - st.range.start);
            let direction = direction.view().slice(seg.elements.clone());
            in_f32(&mut self.narrow, ops, (u, &seg), step.step, p, |p, r| {
                ops.blend(p, keep, direction.slice(r), -by);
            });
        }
    }

    /// Updates the parameters of unit `u`. `params` covers the range of this optimizer and `grad`
    /// its trained elements. `directions` is the result of [`Optimizer::muon_momentum`], gathered
    /// for the whole unit, when the unit has Muon matrices.
    pub fn update(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &Unit,
        mut params: ViewMut,
        grad: View,
        directions: Option<View>,
        step: StepParams,
    ) {
        if let Some(directions) = directions {
            self.update_muon_matrices(ops, u, unit, &mut params, directions, step);
        }
        let st = &mut self.units[u];
        assert!(params.len() == st.range.len() && grad.len() == st.trained.len(), "update of another range");
        let (range, segments) = (st.range.clone(), unit.trained_segments(st.range.clone()));
        let mut states = self.staging.on_device(ops, u, st);
        let mut at = 0;
        for seg in segments {
            let p = params.slice_mut(seg.flat.start - range.start..seg.flat.end - range.start);
            let r = at..at + seg.flat.len();
            at = r.end;
            if self.whole[u][seg.param] {
                continue;
            }
            let n = &self.groups[self.group_of[u][seg.param]];
            let own_step = step.step.saturating_sub(self.late[u][seg.param]).max(1);
            let param_step = StepParams { step: own_step, lr: step.lr * n.lr_scale, ..step };
            in_f32(&mut self.narrow, ops, (u, &seg), step.step, p, |p, piece| {
                let r = r.start + piece.start..r.start + piece.end;
                update_segment(ops, self.spec.name, n, p, grad.slice(r.clone()), &mut states, r, param_step);
            });
        }
    }
}

/// The error of offload storage that cannot be created.
fn offload_error(offload: Option<&Offload>, e: &io::Error) -> Diagnostic {
    let directory =
        offload.cloned().map(|place| PathBuf::from(place).display().to_string()).unwrap_or_default();
    let message =
        format!("no file for the optimizer's states can be made in {directory}: {e}; name another directory");
    let code = diagnostic::codes::training::OFFLOAD_STORAGE_UNUSABLE;
    Diagnostic::error(code, message).with_subject("train.zero.offload")
}

/// Whether Muon updates each parameter, by unit: it updates the matrices of layers and experts.
/// AdamW updates embedding, head and everything that is not a matrix.
pub(crate) fn muon_matrices(spec: &OptimizerSpec, units: &[Unit]) -> Vec<Vec<bool>> {
    let head = units.iter().filter(|u| !u.holds_experts()).count().saturating_sub(1);
    let is_matrix = |(u, unit): (usize, &Unit)| -> Vec<bool> {
        let layer = spec.name == OptimizerName::Muon && u != 0 && u != head;
        (0..unit.params.len())
            .map(|i| layer && unit.is_trained(i) && unit.params[i].shape.len() == 2)
            .collect()
    };
    units.iter().enumerate().map(is_matrix).collect()
}

/// Updates the elements `p` of one tensor with their gradient `g`. `r` is the range of their states
/// in both vectors.
fn update_segment(
    ops: &dyn Ops,
    name: OptimizerName,
    n: &GroupHyperparams,
    p: ViewMut,
    g: View,
    [first, second]: &mut [ViewMut; 2],
    r: Range<usize>,
    step: StepParams,
) {
    let StepParams { lr, step, grad_scale } = step;
    let (weight_decay, (beta1, beta2)) = (n.weight_decay, n.betas);
    match name {
        OptimizerName::Adamw | OptimizerName::Muon => {
            let h = AdamW { lr, beta1, beta2, eps: n.eps, weight_decay, step, grad_scale };
            ops.adamw(p, g, first.slice_mut(r.clone()), second.slice_mut(r), &h);
        }
        OptimizerName::Sgd => {
            let h = Sgd { lr, momentum: n.momentum, weight_decay, grad_scale };
            let buffer = if n.momentum == 0.0 { 0..0 } else { r };
            ops.sgd(p, g, first.slice_mut(buffer), &h);
        }
        OptimizerName::Lion => {
            ops.lion(p, g, first.slice_mut(r), &Lion { lr, beta1, beta2, weight_decay, grad_scale });
        }
    }
}

/// Whether the optimizer needs the first and the second state vector.
pub fn state_vectors(spec: &OptimizerSpec) -> (bool, bool) {
    match spec.name {
        OptimizerName::Adamw | OptimizerName::Muon => (true, true),
        OptimizerName::Sgd => (spec.momentum != 0.0, false),
        OptimizerName::Lion => (true, false),
    }
}

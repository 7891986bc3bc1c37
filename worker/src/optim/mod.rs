//! Optimizer states of this rank's part and their update.
mod muon;
mod narrow;
mod place;
mod rooms;
pub mod schedule;

pub use narrow::room_len;
pub use place::States;

use crate::{
    error::Fault,
    model::Tie,
    params::{Unit, canonical_order},
    trained::{self, Groups, Numbers},
};
use contract::job::{Offload, OptimizerName, OptimizerSpec};
use device::{
    Ops, View, ViewMut,
    ops::{AdamW, Lion, Sgd},
};
use narrow::{Narrow, in_f32};
use rooms::Rooms;
use std::{collections::HashMap, io, ops::Range, path::PathBuf};

/// Parameters that share hyper-parameters, as checkpoints list them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Group {
    /// `decay`, `no_decay`, or an item of `optimizer.groups`.
    pub name: String,
    /// Base learning rate, before the schedule.
    pub lr: f64,
    /// AdamW and Lion.
    pub betas: (f64, f64),
    /// AdamW.
    pub eps: f64,
    /// SGD and Muon.
    pub momentum: f64,
    /// Decoupled (AdamW, Lion, Muon) or added to the gradient (SGD).
    pub weight_decay: f64,
    /// Names of its parameters.
    pub params: Vec<String>,
}

/// What varies from step to step.
#[derive(Clone, Copy, Debug)]
pub struct StepFacts {
    /// Learning rate of this step, of a group that has none of its own.
    pub lr: f64,
    /// 1-based.
    pub step: u64,
    /// Factor of the summed gradient: mean over targets, clipping.
    pub grad_scale: f32,
}

/// The optimizer bound to the units and ranges that this rank updates.
pub struct Optimizer {
    spec: OptimizerSpec,
    /// Numbers of each group.
    groups: Vec<Numbers>,
    /// Per unit, per parameter: its group.
    group_of: Vec<Vec<usize>>,
    /// Per unit, per parameter: does it move as a whole matrix (Muon)?
    whole: Vec<Vec<bool>>,
    /// Per unit, per parameter: updates that it has had fewer than the run has done steps.
    late: Vec<Vec<u64>>,
    units: Vec<UnitStates>,
    /// Of weights in bf16 that have no masters.
    narrow: Option<Narrow>,
    /// Behind the units: these wait for copies to and from the rooms when they are dropped.
    rooms: Rooms,
}

/// States of the range of one unit that this rank updates: vectors of its trained tensors alone.
pub struct UnitStates {
    /// Flat range of the unit.
    pub range: Range<usize>,
    /// The same in the unit's trained vector.
    pub trained: Range<usize>,
    /// AdamW's first moment, Lion's, or the momentum of SGD (empty without momentum) and Muon.
    pub first: States,
    /// AdamW's second moment; empty for others. With Muon matrices leave theirs at zero.
    pub second: States,
}

impl Optimizer {
    /// Zero states for the given range of each unit. `rounding`: the run's seed, where weights in bf16 have no masters and are
    /// rounded stochastically.
    pub fn bind(
        ops: &dyn Ops,
        spec: &OptimizerSpec,
        units: &[Unit],
        ties: &[Tie],
        ranges: impl Iterator<Item = Range<usize>>,
        offload: Option<&Offload>,
        rounding: Option<u64>,
    ) -> Result<Self, Vec<Fault>> {
        let Groups { numbers, of } = trained::groups(spec, units, ties)?;
        let (first, second) = state_vectors(spec);
        let states = ranges.zip(units).map(|(range, unit)| -> io::Result<UnitStates> {
            let trained = unit.trained_range(range.clone());
            let vector = |kept: bool| States::zeroed(ops, if kept { trained.len() } else { 0 }, offload);
            Ok(UnitStates { first: vector(first)?, second: vector(second)?, range, trained })
        });
        let states = states.collect::<io::Result<Vec<_>>>().map_err(|e| vec![no_place(offload, &e)])?;
        let whole = whole_matrices(spec, units);
        let late = units.iter().map(|u| vec![0; u.params.len()]).collect();
        let narrow = rounding.map(|seed| Narrow::new(ops, seed, units, &states));
        let rooms = Rooms::of(ops, &states);
        Ok(Optimizer {
            spec: spec.clone(),
            groups: numbers,
            group_of: of,
            whole,
            late,
            units: states,
            narrow,
            rooms,
        })
    }

    /// Says by how many updates parameters are behind the run; those not named are not. (A group that another program
    /// added to the optimizer later has its own count, which decides its bias correction.)
    pub fn set_late(&mut self, units: &[Unit], late: &HashMap<String, u64>) {
        let of = |u: &Unit| u.params.iter().map(|p| late.get(&p.name).copied().unwrap_or(0)).collect();
        self.late = units.iter().map(of).collect();
    }

    /// Trained parameters that are behind the run, with the number of updates.
    pub fn late(&self, units: &[Unit]) -> HashMap<String, u64> {
        let all = units.iter().zip(&self.late).flat_map(|(u, late)| {
            (0..u.params.len()).filter(|&i| u.is_trained(i)).map(|i| (u.params[i].name.clone(), late[i]))
        });
        all.filter(|(_, late)| *late > 0).collect()
    }

    /// States of unit `u`.
    pub fn states(&self, u: usize) -> &UnitStates {
        &self.units[u]
    }

    /// The states of unit `u` are updated soon: wherever they lie, they begin to come to where that happens.
    pub fn expect(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        [&st.first, &st.second].into_iter().for_each(States::expect);
        self.rooms.bring(ops, u, st);
    }

    /// The states of unit `u` were updated, and begin to go back to where they lie.
    pub fn put_away(&mut self, ops: &dyn Ops, u: usize) {
        let Some(st) = self.units.get_mut(u) else { return };
        self.rooms.take_back(ops, u, st);
        self.let_go(u);
    }

    /// The states of unit `u` aren't used for a while.
    pub fn let_go(&self, u: usize) {
        self.units.get(u).into_iter().flat_map(|st| [&st.first, &st.second]).for_each(States::put_away);
    }

    /// States of unit `u`, to spread them.
    pub fn states_mut(&mut self, u: usize) -> &mut UnitStates {
        &mut self.units[u]
    }

    /// States of every unit, to load them.
    pub fn all_states_mut(&mut self) -> impl Iterator<Item = &mut UnitStates> {
        self.units.iter_mut()
    }

    /// The optimizer's numbers.
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// The parameter groups, for checkpoints.
    pub fn groups(&self, units: &[Unit]) -> Vec<Group> {
        let mut groups: Vec<Group> = self.groups.iter().map(|n| self.group(n)).collect();
        for (u, i) in canonical_order(units).into_iter().filter(|&(u, i)| units[u].is_trained(i)) {
            groups[self.group_of[u][i]].params.push(units[u].params[i].name.clone());
        }
        groups.sort_by_key(|g| g.name.clone());
        groups
    }

    fn group(&self, n: &Numbers) -> Group {
        let params = Vec::new();
        let Numbers { name, betas, eps, momentum, weight_decay, .. } = n.clone();
        Group { name, lr: self.spec.lr * n.lr_scale, betas, eps, momentum, weight_decay, params }
    }

    /// Has unit `u` matrices that move as a whole?
    pub fn moves_whole(&self, u: usize) -> bool {
        self.whole[u].contains(&true)
    }

    /// Makes of the gradient of the bound range of unit `u` the directions of its whole matrices, which
    /// [`Optimizer::update`] then wants of the whole unit.
    pub fn direct(&mut self, ops: &dyn Ops, u: usize, unit: &Unit, mut grad: ViewMut, step: StepFacts) {
        let st = &mut self.units[u];
        let segments = unit.trained_segments(st.range.clone());
        let [mut first, _] = self.rooms.at_hand(ops, u, st);
        let mut at = 0;
        for seg in segments {
            let r = at..at + seg.flat.len();
            at = r.end;
            if self.whole[u][seg.param] {
                let mu = self.groups[self.group_of[u][seg.param]].momentum;
                ops.nesterov(first.part(r.clone()), grad.part(r), mu, step.grad_scale);
            }
        }
    }

    /// Moves the parts of whole matrices of unit `u` that the bound range has. `directions`: the unit's whole trained
    /// vector.
    fn move_whole(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &Unit,
        params: &mut ViewMut,
        directions: View,
        step: StepFacts,
    ) {
        let st = &self.units[u];
        for seg in unit.trained_segments(st.range.clone()).into_iter().filter(|s| self.whole[u][s.param]) {
            let (spec, n) = (&unit.params[seg.param], &self.groups[self.group_of[u][seg.param]]);
            let (rows, columns) = (spec.shape[0], spec.shape[1]);
            let of = unit.trained_range(unit.range(seg.param));
            let direction = muon::orthogonal(ops, directions.slice(of), rows, columns);
            let lr = step.lr * n.lr_scale;
            let (keep, by) =
                ((1.0 - lr * n.weight_decay) as f32, (lr * muon::lr_factor(rows, columns)) as f32);
            let p = params.part(seg.flat.start - st.range.start..seg.flat.end - st.range.start);
            let direction = direction.view().slice(seg.elements.clone());
            in_f32(&mut self.narrow, ops, (u, &seg), step.step, p, |p, r| {
                ops.blend(p, keep, direction.slice(r), -by);
            });
        }
    }

    /// Updates `params` of unit `u`: `params` covers the bound range, `grad` its trained part. `directions`: of a unit whose
    /// matrices move whole, what [`Optimizer::direct`] made of the gradient, of the whole unit.
    pub fn update(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &Unit,
        mut params: ViewMut,
        grad: View,
        directions: Option<View>,
        step: StepFacts,
    ) {
        if let Some(directions) = directions {
            self.move_whole(ops, u, unit, &mut params, directions, step);
        }
        let st = &mut self.units[u];
        assert!(params.len() == st.range.len() && grad.len() == st.trained.len(), "update of another range");
        let (range, segments) = (st.range.clone(), unit.trained_segments(st.range.clone()));
        let mut states = self.rooms.at_hand(ops, u, st);
        let mut at = 0;
        for seg in segments {
            let p = params.part(seg.flat.start - range.start..seg.flat.end - range.start);
            let r = at..at + seg.flat.len();
            at = r.end;
            if self.whole[u][seg.param] {
                continue;
            }
            let n = &self.groups[self.group_of[u][seg.param]];
            let own_step = step.step.saturating_sub(self.late[u][seg.param]).max(1);
            let own = StepFacts { step: own_step, lr: step.lr * n.lr_scale, ..step };
            in_f32(&mut self.narrow, ops, (u, &seg), step.step, p, |p, piece| {
                let r = r.start + piece.start..r.start + piece.end;
                update_segment(ops, self.spec.name, n, p, grad.slice(r.clone()), &mut states, r, own);
            });
        }
    }
}

/// There is no place for the states.
fn no_place(offload: Option<&Offload>, e: &io::Error) -> Fault {
    let directory =
        offload.cloned().map(|place| PathBuf::from(place).display().to_string()).unwrap_or_default();
    let message =
        format!("no file for the optimizer's states can be made in {directory}: {e}; name another directory");
    Fault { key: "train.zero.offload", message }
}

/// Per unit, per parameter: Muon moves the matrices of layers and experts; embedding and head are AdamW's, and so is
/// everything that is no matrix.
pub(crate) fn whole_matrices(spec: &OptimizerSpec, units: &[Unit]) -> Vec<Vec<bool>> {
    let head = units.iter().filter(|u| !u.holds_experts()).count().saturating_sub(1);
    let of = |(u, unit): (usize, &Unit)| -> Vec<bool> {
        let layer = spec.name == OptimizerName::Muon && u != 0 && u != head;
        (0..unit.params.len())
            .map(|i| layer && unit.is_trained(i) && unit.params[i].shape.len() == 2)
            .collect()
    };
    units.iter().enumerate().map(of).collect()
}

/// One tensor's part `p` with its gradient; `r`: where its states are in both vectors.
fn update_segment(
    ops: &dyn Ops,
    name: OptimizerName,
    n: &Numbers,
    p: ViewMut,
    g: View,
    [first, second]: &mut [ViewMut; 2],
    r: Range<usize>,
    step: StepFacts,
) {
    let StepFacts { lr, step, grad_scale } = step;
    let (weight_decay, (beta1, beta2)) = (n.weight_decay, n.betas);
    match name {
        OptimizerName::Adamw | OptimizerName::Muon => {
            let h = AdamW { lr, beta1, beta2, eps: n.eps, weight_decay, step, grad_scale };
            ops.adamw(p, g, first.part(r.clone()), second.part(r), &h);
        }
        OptimizerName::Sgd => {
            let h = Sgd { lr, momentum: n.momentum, weight_decay, grad_scale };
            let buffer = if n.momentum == 0.0 { 0..0 } else { r };
            ops.sgd(p, g, first.part(buffer), &h);
        }
        OptimizerName::Lion => {
            ops.lion(p, g, first.part(r), &Lion { lr, beta1, beta2, weight_decay, grad_scale });
        }
    }
}

/// Which state vectors the optimizer keeps: (first, second).
pub fn state_vectors(spec: &OptimizerSpec) -> (bool, bool) {
    match spec.name {
        OptimizerName::Adamw | OptimizerName::Muon => (true, true),
        OptimizerName::Sgd => (spec.momentum != 0.0, false),
        OptimizerName::Lion => (true, false),
    }
}

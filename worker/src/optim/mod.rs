//! Optimizer states of this rank's part and their update.
pub mod schedule;

use crate::params::{Unit, canonical_order};
use contract::job::{OptimizerName, OptimizerSpec};
use device::{
    Buf, Ops, View,
    ops::{AdamW, Sgd},
};
use globset::{Glob, GlobSet, GlobSetBuilder};
use std::{collections::HashMap, ops::Range};

/// Parameters that share hyper-parameters, as checkpoints list them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Group {
    /// `decay` or `no_decay`.
    pub name: String,
    /// Base learning rate, before the schedule.
    pub lr: f64,
    /// AdamW.
    pub betas: (f64, f64),
    /// AdamW.
    pub eps: f64,
    /// SGD.
    pub momentum: f64,
    /// Decoupled (AdamW) or added to the gradient (SGD).
    pub weight_decay: f64,
    /// Names of its parameters.
    pub params: Vec<String>,
}

/// What varies from step to step.
#[derive(Clone, Copy, Debug)]
pub struct StepFacts {
    /// Learning rate of this step.
    pub lr: f64,
    /// 1-based.
    pub step: u64,
    /// Factor of the summed gradient: mean over targets, clipping.
    pub grad_scale: f32,
}

/// The optimizer bound to the units and ranges that this rank updates.
pub struct Optimizer {
    spec: OptimizerSpec,
    /// Per unit, per parameter: is it decayed?
    decay: Vec<Vec<bool>>,
    /// Per unit, per parameter: updates that it has had fewer than the run has done steps.
    late: Vec<Vec<u64>>,
    units: Vec<UnitStates>,
}

/// States of the range of one unit that this rank updates.
pub struct UnitStates {
    /// Flat range of the unit.
    pub range: Range<usize>,
    /// AdamW's first moment, or SGD's momentum buffer (empty without momentum).
    pub first: Buf,
    /// AdamW's second moment; empty for SGD.
    pub second: Buf,
}

/// Parameters without weight decay; a pattern that matches no parameter is an error naming it.
pub fn no_decay_set(patterns: &[String], units: &[Unit]) -> Result<GlobSet, String> {
    let mut set = GlobSetBuilder::new();
    for p in patterns {
        let glob = Glob::new(p).map_err(|e| format!("optimizer.no_decay: bad pattern `{p}`: {e}"))?;
        set.add(glob);
    }
    set.build().map_err(|e| format!("optimizer.no_decay: {e}")).inspect(|_| debug_assert!(!units.is_empty()))
}

impl Optimizer {
    /// Zero states for the given range of each unit.
    pub fn bind(
        spec: &OptimizerSpec,
        units: &[Unit],
        ranges: impl Iterator<Item = Range<usize>>,
    ) -> Result<Self, String> {
        let no_decay = no_decay_set(&spec.no_decay, units)?;
        let decay =
            units.iter().map(|u| u.params.iter().map(|p| !no_decay.is_match(&p.name)).collect()).collect();
        let (first, second) = state_vectors(spec);
        let states = ranges.map(|range| UnitStates {
            first: Buf::zeroed(if first { range.len() } else { 0 }),
            second: Buf::zeroed(if second { range.len() } else { 0 }),
            range,
        });
        let late = units.iter().map(|u| vec![0; u.params.len()]).collect();
        Ok(Optimizer { spec: spec.clone(), decay, late, units: states.collect() })
    }

    /// Says by how many updates parameters are behind the run; those not named are not. (A group that another program
    /// added to the optimizer later has its own count, which decides its bias correction.)
    pub fn set_late(&mut self, units: &[Unit], late: &HashMap<String, u64>) {
        let of = |u: &Unit| u.params.iter().map(|p| late.get(&p.name).copied().unwrap_or(0)).collect();
        self.late = units.iter().map(of).collect();
    }

    /// Parameters that are behind the run, with the number of updates.
    pub fn late(&self, units: &[Unit]) -> HashMap<String, u64> {
        let all = units.iter().zip(&self.late).flat_map(|(u, l)| u.params.iter().zip(l));
        all.filter(|(_, late)| **late > 0).map(|(p, late)| (p.name.clone(), *late)).collect()
    }

    /// States of unit `u`.
    pub fn states(&self, u: usize) -> &UnitStates {
        &self.units[u]
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
        [true, false]
            .into_iter()
            .map(|decayed| self.group(units, decayed))
            .filter(|g| !g.params.is_empty())
            .collect()
    }

    fn group(&self, units: &[Unit], decayed: bool) -> Group {
        let s = &self.spec;
        let names = canonical_order(units).into_iter().map(|(u, i)| (&units[u].params[i], &self.decay[u][i]));
        Group {
            name: if decayed { "decay" } else { "no_decay" }.into(),
            lr: s.lr,
            betas: s.betas,
            eps: s.eps,
            momentum: s.momentum,
            weight_decay: if decayed { s.weight_decay } else { 0.0 },
            params: names.filter(|(_, d)| **d == decayed).map(|(p, _)| p.name.clone()).collect(),
        }
    }

    /// Updates `params` of unit `u`; both vectors cover the bound range.
    pub fn update(
        &mut self,
        ops: &dyn Ops,
        u: usize,
        unit: &Unit,
        params: &mut [f32],
        grad: View,
        step: StepFacts,
    ) {
        let st = &mut self.units[u];
        assert!(params.len() == st.range.len() && grad.len() == st.range.len(), "update of another range");
        let base = st.range.start;
        for seg in unit.segments(st.range.clone()) {
            let r = seg.flat.start - base..seg.flat.end - base;
            let weight_decay = if self.decay[u][seg.param] { self.spec.weight_decay } else { 0.0 };
            let (p, g) = ((&mut params[r.clone()]).into(), grad.slice(r.clone()));
            match self.spec.name {
                OptimizerName::Adamw => {
                    let h = AdamW {
                        lr: step.lr,
                        beta1: self.spec.betas.0,
                        beta2: self.spec.betas.1,
                        eps: self.spec.eps,
                        weight_decay,
                        step: step.step.saturating_sub(self.late[u][seg.param]).max(1),
                        grad_scale: step.grad_scale,
                    };
                    ops.adamw(p, g, st.first.view_mut().slice(r.clone()), st.second.view_mut().slice(r), &h);
                }
                OptimizerName::Sgd => {
                    let momentum = self.spec.momentum;
                    let h = Sgd { lr: step.lr, momentum, weight_decay, grad_scale: step.grad_scale };
                    let buffer = if st.first.is_empty() { 0..0 } else { r };
                    ops.sgd(p, g, st.first.view_mut().slice(buffer), &h);
                }
            }
        }
    }
}

/// Which state vectors the optimizer keeps: (first, second).
pub fn state_vectors(spec: &OptimizerSpec) -> (bool, bool) {
    match spec.name {
        OptimizerName::Adamw => (true, true),
        OptimizerName::Sgd => (spec.momentum != 0.0, false),
    }
}

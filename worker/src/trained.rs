//! Which parameters are trained, and with which numbers of the optimizer: patterns of names, each of which must match.
//!
//! With low-rank adapters these are all that is trained.
//!
//! A tied matrix has two names and is one parameter: a pattern that matches either of them means it.
use crate::{
    error::Fault,
    experts::{self, Placement},
    model::{Model, Tie, lora::Lora},
    params::Unit,
};
use ckpt::peft::is_adapter;
use contract::job::{OptimizerSpec, Precision, TrainSpec};
use globset::{Glob, GlobMatcher};

const FREEZE: &str = "train.freeze";
const ONLY: &str = "train.train_only";
const GROUPS: &str = "train.optimizer.groups";
/// Where adapters come from.
pub const LORA_FROM: &str = "train.lora.from";
const PRECISION: &str = "train.precision";
const NO_DECAY: &str = "train.optimizer.no_decay";

/// Gives the model its adapters, and its layers' products their precision; its units and those of its experts, in which each
/// parameter is trained or frozen; the model is told.
pub fn units(
    model: &mut dyn Model,
    placement: Option<&Placement>,
    train: &TrainSpec,
) -> Result<Vec<Unit>, Vec<Fault>> {
    if train.precision == Precision::Fp8 {
        model.multiply_in_fp8().map_err(|message| vec![Fault { key: PRECISION, message }])?;
    }
    if let Some(spec) = &train.lora {
        let lora = Lora { spec: spec.clone(), seed: train.seed };
        let key = if spec.from.is_some() { LORA_FROM } else { "train.lora.targets" };
        model.adapt(&lora).map_err(|message| vec![Fault { key, message }])?;
    }
    model.seed(train.seed);
    let mut units = experts::units(model, placement);
    choose(&mut units, &model.ties(), train)?;
    let own = units.iter().filter(|u| !u.holds_experts()).count();
    model.train(&units[..own]);
    Ok(units)
}

/// Decides which parameters of all these units are trained.
pub fn choose(units: &mut [Unit], ties: &[Tie], train: &TrainSpec) -> Result<(), Vec<Fault>> {
    let names = || units.iter().flat_map(|u| &u.params).map(|p| p.name.as_str());
    let mut faults = Vec::new();
    let freeze = Patterns::new(FREEZE, &train.freeze, names(), ties, &mut faults);
    let only = Patterns::new(ONLY, &train.train_only, names(), ties, &mut faults);
    let chosen = !train.train_only.is_empty();
    for unit in units.iter_mut() {
        unit.train_where(|name| match train.lora {
            Some(_) => is_adapter(name),
            None => !freeze.matches(name, ties) && (!chosen || only.matches(name, ties)),
        });
    }
    if faults.is_empty() && !units.iter().any(Unit::any_trained) {
        let message = "it freezes every parameter: nothing is left to train".into();
        faults.push(Fault { key: FREEZE, message });
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    Ok(())
}

/// The first of the model's own units that has a trained tensor, or whose experts have one: below it nothing needs a
/// gradient.
pub fn lowest_trained<'a>(units: impl Iterator<Item = &'a Unit>) -> usize {
    let own = |(i, u): (usize, &Unit)| u.any_trained().then(|| u.expert_layer().map_or(i, |l| l + 1));
    units.enumerate().filter_map(own).min().unwrap_or(0)
}

/// The first layer that needs a backward: below it everything is frozen.
pub fn first_backward(units: &[Unit]) -> usize {
    let layers = units.iter().filter(|u| !u.holds_experts()).count().saturating_sub(2);
    lowest_trained(units.iter()).saturating_sub(1).min(layers)
}

/// Patterns of one key.
struct Patterns(Vec<GlobMatcher>);

impl Patterns {
    /// Each must be a pattern and match one of these names; what isn't so is a fault.
    fn new<'a>(
        key: &'static str,
        patterns: &[String],
        names: impl Iterator<Item = &'a str> + Clone,
        ties: &[Tie],
        faults: &mut Vec<Fault>,
    ) -> Self {
        let all = Patterns::compiled(key, patterns, faults);
        for pattern in &all.0 {
            if !names.clone().any(|n| is_match(pattern, n, ties)) {
                let some: Vec<&str> = names.clone().take(3).collect();
                let pattern = pattern.glob();
                let message = format!(
                    "the pattern `{pattern}` matches no parameter; names are like {}",
                    some.join(", ")
                );
                faults.push(Fault { key, message });
            }
        }
        all
    }

    /// The same, and a pattern may match nothing.
    fn compiled(key: &'static str, patterns: &[String], faults: &mut Vec<Fault>) -> Self {
        let mut all = Vec::new();
        for p in patterns {
            match Glob::new(p) {
                Ok(glob) => all.push(glob.compile_matcher()),
                Err(e) => faults.push(Fault { key, message: format!("bad pattern `{p}`: {}", e.kind()) }),
            }
        }
        Patterns(all)
    }

    fn matches(&self, name: &str, ties: &[Tie]) -> bool {
        self.0.iter().any(|p| is_match(p, name, ties))
    }
}

fn is_match(pattern: &GlobMatcher, name: &str, ties: &[Tie]) -> bool {
    let second = |t: &Tie| t.target == name && pattern.is_match(&t.alias);
    pattern.is_match(name) || ties.iter().any(second)
}

/// Numbers of some parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    /// `decay`, `no_decay`, or of `optimizer.groups`: `group 1`, `group 1 no_decay`.
    pub name: String,
    /// Factor of the learning rate.
    pub lr_scale: f64,
    /// As in the job.
    pub betas: (f64, f64),
    /// As in the job.
    pub eps: f64,
    /// As in the job.
    pub momentum: f64,
    /// 0 where a parameter isn't decayed.
    pub weight_decay: f64,
}

/// The groups of the optimizer that have a trained parameter.
pub struct Groups {
    /// Numbers of each.
    pub numbers: Vec<Numbers>,
    /// Per unit, per parameter: its group (of a frozen one it means nothing).
    pub of: Vec<Vec<usize>>,
}

/// Puts each trained parameter into a group.
pub fn groups(spec: &OptimizerSpec, units: &[Unit], ties: &[Tie]) -> Result<Groups, Vec<Fault>> {
    let mut faults = Vec::new();
    let no_decay = Patterns::compiled(NO_DECAY, &spec.no_decay, &mut faults);
    let trained = units.iter().flat_map(Unit::trained_params).map(|p| p.name.as_str());
    let mut rules = Vec::new();
    for g in &spec.groups {
        rules.push(Patterns::new(GROUPS, &g.r#match, trained.clone(), ties, &mut faults));
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut groups: Vec<Numbers> = Vec::new();
    let mut group_of = Vec::with_capacity(units.len());
    for unit in units {
        let mut of = Vec::with_capacity(unit.params.len());
        for (i, p) in unit.params.iter().enumerate() {
            let rule = rules.iter().position(|r| r.matches(&p.name, ties));
            let numbers = numbers(spec, rule, no_decay.matches(&p.name, ties));
            let at = groups.iter().position(|g| *g == numbers);
            of.push(at.unwrap_or(groups.len()));
            if at.is_none() && unit.is_trained(i) {
                groups.push(numbers);
            }
        }
        group_of.push(of);
    }
    Ok(Groups { numbers: groups, of: group_of })
}

fn numbers(spec: &OptimizerSpec, rule: Option<usize>, no_decay: bool) -> Numbers {
    let plain = if no_decay { 0.0 } else { spec.weight_decay };
    let of_rest = if no_decay { "no_decay" } else { "decay" };
    let Some((n, g)) = rule.and_then(|n| Some((n + 1, spec.groups.get(n)?))) else {
        let (betas, eps, momentum) = (spec.betas, spec.eps, spec.momentum);
        return Numbers { name: of_rest.into(), lr_scale: 1.0, betas, eps, momentum, weight_decay: plain };
    };
    Numbers {
        name: match g.weight_decay {
            None if no_decay => format!("group {n} no_decay"),
            _ => format!("group {n}"),
        },
        lr_scale: g.lr.map(|lr| lr / spec.lr).or(g.lr_scale).unwrap_or(1.0),
        betas: g.betas.unwrap_or(spec.betas),
        eps: g.eps.unwrap_or(spec.eps),
        momentum: g.momentum.unwrap_or(spec.momentum),
        weight_decay: g.weight_decay.unwrap_or(plain),
    }
}

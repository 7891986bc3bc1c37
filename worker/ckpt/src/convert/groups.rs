//! Which weights are in which group of the optimizer: as the checkpoint says it, or the caller where it doesn't.
use super::{ConvertOptions, Target};
use crate::catalog::{Role, TensorInfo};
use crate::error::Result;
use crate::passthrough::{Extras, ParamGroup};
use crate::formats::order;
use crate::pickle::Object;
use crate::source::Source;
use crate::state::TrainingState;
use std::collections::{BTreeMap, HashMap, HashSet};

type Said<T> = std::result::Result<T, String>;

/// A group of the optimizer.
pub(super) struct Group {
    /// Indices of tensors.
    pub(super) weights: Vec<usize>,
    /// Updates that each has had.
    pub(super) steps: Vec<f64>,
    pub(super) options: Vec<(String, Object)>,
}

/// All of them.
pub(super) struct Groups<G> {
    pub(super) groups: Vec<G>,
    /// Weights of which nothing says in which group they are.
    pub(super) loose: Option<G>,
}

/// Trained weights of which a checkpoint doesn't say in which of its groups they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ungrouped {
    pub names: Vec<String>,
    /// Groups that there are.
    pub groups: usize,
}

/// Finds those for which [`ConvertOptions::groups`] has a use.
pub fn ungrouped(source: &dyn Source) -> Result<Ungrouped> {
    let groups = listed(&source.state(), &mut source.extras()?);
    let trained = trained(&source.tensors());
    let names = match one(&groups) {
        true => Vec::new(),
        false => free(&groups, &trained),
    };
    Ok(Ungrouped { names, groups: groups.len() })
}

/// The groups as the checkpoint lists them.
pub(super) fn listed(said: &TrainingState, extras: &mut Extras) -> Vec<ParamGroup> {
    let mut groups = std::mem::take(&mut extras.groups);
    if groups.is_empty() {
        groups = said.groups.iter().map(|group| ParamGroup::of(group, &said.steps)).collect();
    }
    groups.retain(|g| !g.names.is_empty() || !g.options.is_empty());
    groups
}

/// `it has 2 groups of parameters and doesn't say in which of them 21 parameters are`
pub(super) fn unknown(count: usize, groups: usize) -> String {
    format!("it has {groups} groups of parameters and doesn't say in which of them {count} parameters are")
}

/// Weights with states of the optimizer.
fn trained(tensors: &[TensorInfo]) -> Vec<String> {
    let states = tensors.iter().filter(|t| t.role.is_optimizer_state());
    let has: HashSet<&str> = states.map(|t| t.name.as_str()).collect();
    let weights = tensors.iter().filter(|t| t.role == Role::Weight && has.contains(t.name.as_str()));
    weights.map(|t| t.name.clone()).collect()
}

/// One group, or none that is listed, needs no names: it is all that is trained.
fn one(groups: &[ParamGroup]) -> bool {
    groups.len() <= 1 && groups.iter().all(|g| g.names.is_empty())
}

/// Those of the weights that are in no group.
fn free(groups: &[ParamGroup], trained: &[String]) -> Vec<String> {
    let grouped: HashSet<&str> = groups.iter().flat_map(|g| g.names.iter().map(String::as_str)).collect();
    trained.iter().filter(|name| !grouped.contains(name.as_str())).cloned().collect()
}

/// The groups with the names of their parameters, for a target. `Err` says what it needs and isn't known.
pub(super) fn complete(
    mut groups: Vec<ParamGroup>,
    tensors: &[TensorInfo],
    steps: &BTreeMap<String, u64>,
    options: &ConvertOptions,
) -> Said<Groups<ParamGroup>> {
    let trained = trained(tensors);
    let free = free(&groups, &trained);
    check(&groups, &free, options)?;
    if one(&groups) && !free.is_empty() {
        groups.resize_with(1, ParamGroup::default);
    } else if !free.is_empty() && options.groups.is_empty() {
        let steps = free.iter().map(|name| steps.get(name).map(|&s| s as f64)).collect();
        let loose = Some(ParamGroup { names: free, steps, options: Vec::new() });
        return Ok(Groups { groups, loose });
    }
    let mut added: Vec<Vec<String>> = vec![Vec::new(); groups.len()];
    for name in free {
        let n = options.groups.get(&name).copied().unwrap_or(0);
        added[n].push(name);
    }
    let orders = order::registered(&trained.iter().map(String::as_str).collect::<Vec<_>>());
    for (group, names) in groups.iter_mut().zip(added).filter(|(_, names)| !names.is_empty()) {
        group.steps.resize(group.names.len(), None);
        group.steps.extend(names.iter().map(|name| steps.get(name).map(|&s| s as f64)));
        group.names.extend(names);
        if !put_in_order(group, &orders) && options.to == Target::DeepSpeed {
            return Err(format!(
                "it doesn't say in which order its optimizer has {} and the other parameters of that group, nor is the \
                 order of such a model known; a ZeRO checkpoint goes by it, --to universal goes by names",
                group.names[0]
            ));
        }
    }
    let names = || groups.iter().flat_map(|g| &g.names);
    match names().count() == names().collect::<HashSet<_>>().len() {
        true => Ok(Groups { groups, loose: None }),
        false => Err("a parameter is in two groups".into()),
    }
}

/// Refuses what the target needs and nobody says, and what is said of parameters whose group is known.
fn check(groups: &[ParamGroup], free: &[String], options: &ConvertOptions) -> Said<()> {
    let said = &options.groups;
    if said.is_empty() {
        let needed = options.to != Target::Native && !free.is_empty() && !one(groups);
        return match needed {
            false => Ok(()),
            true => Err(format!(
                "{}, which this target needs: say it with --group 'PATTERN=N' (such as --group '*norm*=1'; what no pattern \
                 matches is in group 0), or use --to native",
                unknown(free.len(), groups.len())
            )),
        };
    }
    let open: HashSet<&str> = match one(groups) {
        true => HashSet::new(),
        false => free.iter().map(String::as_str).collect(),
    };
    if let Some(name) = said.keys().find(|name| !open.contains(name.as_str())) {
        return Err(format!("{name} is no parameter of which it doesn't say the group"));
    }
    match said.values().find(|n| **n >= groups.len()) {
        Some(n) => Err(format!("it has the groups 0 to {}, and no group {n}", groups.len() - 1)),
        None => Ok(()),
    }
}

/// Brings a group into the order in which its model registers the parameters; false where that isn't known.
fn put_in_order(group: &mut ParamGroup, orders: &[Vec<&str>]) -> bool {
    let steps: HashMap<&str, Option<f64>> =
        group.names.iter().map(String::as_str).zip(group.steps.iter().copied()).collect();
    let mut found: Vec<Vec<&str>> = Vec::new();
    for order in orders {
        let own: Vec<&str> = order.iter().copied().filter(|name| steps.contains_key(name)).collect();
        if own.len() == group.names.len() && !found.contains(&own) {
            found.push(own);
        }
    }
    let [names] = found.as_slice() else { return group.names.len() == 1 };
    let steps = names.iter().map(|name| steps[name]).collect();
    (group.names, group.steps) = (names.iter().map(|&name| name.to_owned()).collect(), steps);
    true
}

impl Groups<ParamGroup> {
    /// The same with the tensors of a source; every weight must have a state of each of these roles.
    pub(super) fn found(
        self,
        index: &HashMap<(Role, String), usize>,
        roles: &[Role],
        step: u64,
    ) -> Said<Groups<Group>> {
        let found = |given: ParamGroup| -> Said<Group> {
            let mut weights = Vec::with_capacity(given.names.len());
            for name in &given.names {
                for &role in [Role::Weight].iter().chain(roles) {
                    if !index.contains_key(&(role, name.clone())) {
                        return Err(format!("{name} is in a group but has no {role}"));
                    }
                }
                weights.extend(index.get(&(Role::Weight, name.clone())));
            }
            let of = |i: usize| given.steps.get(i).copied().flatten().unwrap_or(step as f64);
            let steps = (0..weights.len()).map(of).collect();
            Ok(Group { steps, weights, options: given.options })
        };
        let groups = self.groups.into_iter().map(found).collect::<Said<_>>()?;
        Ok(Groups { groups, loose: self.loose.map(found).transpose()? })
    }
}

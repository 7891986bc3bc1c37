//! Assigns weights to the optimizer's parameter groups, either as the source checkpoint records, or
//! as the user has chosen by options of the conversion.
use super::options::{ConvertOptions, ConvertTarget};
use crate::catalog::{ParamGroup, PassthroughState, TensorInfo, TensorSource, TrainingState};
use crate::codec::pickle::PythonObject;
use crate::error::{ConvertError, Result};
use crate::layout::hf::module_order;
use crate::tensor::TensorRole;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The result of assigning weights to parameter groups.
type ParamGroupResult<T> = std::result::Result<T, ConvertError>;

/// A parameter group of the optimizer, which refers to its weights by their indices in the source
/// checkpoint's list of tensors.
pub(super) struct IndexedParamGroup {
    /// Indices of the weights' tensors, in the order of the optimizer.
    pub(super) weights: Vec<usize>,
    /// Update count of each weight.
    pub(super) steps: Vec<f64>,
    /// Hyper-parameters by their names in torch.
    pub(super) options: Vec<(String, PythonObject)>,
}

/// The parameter groups of an optimizer, and one extra group with the trained weights whose
/// parameter group is unknown.
pub(super) struct ParamGroupSet<G> {
    pub(super) groups: Vec<G>,
    /// Trained weights whose group is unknown.
    pub(super) ungrouped: Option<G>,
}

/// Trained weights that a checkpoint does not assign to its parameter groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UngroupedWeights {
    /// Names of the weights.
    pub names: Vec<String>,
    /// Number of parameter groups of the checkpoint.
    pub groups: usize,
}

/// Finds the trained weights that the checkpoint `source` does not assign to a parameter group.
/// [`ConvertOptions::groups`] can assign these weights.
///
/// # Errors
/// Fails if the optimizer of the source can't be read.
pub fn find_ungrouped_weights(source: &dyn TensorSource) -> Result<UngroupedWeights> {
    let groups = take_recorded_groups(&source.training_state(), &mut source.read_passthrough()?);
    let trained = find_trained_weights(&source.tensors());
    let names = match is_single_unnamed_group(&groups) {
        true => Vec::new(),
        false => find_weights_without_group(&groups, &trained),
    };
    Ok(UngroupedWeights { names, groups: groups.len() })
}

/// Returns the parameter groups that the source checkpoint records, some of which may have
/// hyper-parameters but no list of weights. Takes the groups out of `passthrough`, or makes them
/// from `state` if `passthrough` has no groups.
pub(super) fn take_recorded_groups(
    state: &TrainingState,
    passthrough: &mut PassthroughState,
) -> Vec<ParamGroup> {
    let mut groups = std::mem::take(&mut passthrough.groups);
    if groups.is_empty() {
        groups = state.groups.iter().map(|group| ParamGroup::from_info(group, &state.steps)).collect();
    }
    groups.retain(|g| !g.names.is_empty() || !g.options.is_empty());
    groups
}

/// Returns the names of the weights that have an optimizer state in the checkpoint, in the order of
/// the list `tensors`.
fn find_trained_weights(tensors: &[TensorInfo]) -> Vec<String> {
    let states = tensors.iter().filter(|t| t.role.is_optimizer_state());
    let names: HashSet<&str> = states.map(|t| t.name.as_str()).collect();
    let weights = tensors.iter().filter(|t| t.role == TensorRole::Weight && names.contains(t.name.as_str()));
    weights.map(|t| t.name.clone()).collect()
}

/// Returns true if the source checkpoint has at most one parameter group, and records no weight
/// names for this group.
fn is_single_unnamed_group(groups: &[ParamGroup]) -> bool {
    groups.len() <= 1 && groups.iter().all(|g| g.names.is_empty())
}

/// Returns the names of those trained weights that no parameter group lists.
fn find_weights_without_group(groups: &[ParamGroup], trained: &[String]) -> Vec<String> {
    let grouped: HashSet<&str> = groups.iter().flat_map(|g| g.names.iter().map(String::as_str)).collect();
    trained.iter().filter(|name| !grouped.contains(name.as_str())).cloned().collect()
}

/// Assigns every trained weight that the source checkpoint lists in no parameter group to one of
/// `groups`, according to the user's options. If there is a single group without names, this group
/// gets all these weights. Otherwise `options.groups` assigns them. If `options.groups` is empty,
/// returns them as ungrouped, which only a native target allows.
///
/// # Errors
/// Fails if the target needs names or an order that neither the checkpoint nor the options provide,
/// or a weight is in two groups.
pub(super) fn assign_weights_to_groups(
    mut groups: Vec<ParamGroup>,
    tensors: &[TensorInfo],
    steps: &BTreeMap<String, u64>,
    options: &ConvertOptions,
) -> ParamGroupResult<ParamGroupSet<ParamGroup>> {
    let trained = find_trained_weights(tensors);
    let ungrouped = find_weights_without_group(&groups, &trained);
    check_group_options(&groups, &ungrouped, options)?;
    if is_single_unnamed_group(&groups) && !ungrouped.is_empty() {
        groups.resize_with(1, ParamGroup::default);
    } else if !ungrouped.is_empty() && options.groups.is_empty() {
        let steps = ungrouped.iter().map(|name| steps.get(name).map(|&s| s as f64)).collect();
        let ungrouped = Some(ParamGroup { names: ungrouped, steps, options: Vec::new() });
        return Ok(ParamGroupSet { groups, ungrouped });
    }
    let mut added: Vec<Vec<String>> = vec![Vec::new(); groups.len()];
    for name in ungrouped {
        let group = options.groups.get(&name).copied().unwrap_or(0);
        added[group].push(name);
    }
    let orders =
        module_order::sort_in_registration_orders(&trained.iter().map(String::as_str).collect::<Vec<_>>());
    for (group, names) in groups.iter_mut().zip(added).filter(|(_, names)| !names.is_empty()) {
        group.steps.resize(group.names.len(), None);
        group.steps.extend(names.iter().map(|name| steps.get(name).map(|&s| s as f64)));
        group.names.extend(names);
        if !sort_by_registration(group, &orders) && options.target == ConvertTarget::DeepSpeed {
            return Err(ConvertError::OrderUnknown { name: group.names[0].clone() });
        }
    }
    let mut unique = HashSet::new();
    match groups.iter().flat_map(|g| &g.names).find(|name| !unique.insert(name.as_str())) {
        None => Ok(ParamGroupSet { groups, ungrouped: None }),
        Some(name) => Err(ConvertError::InTwoGroups { name: name.clone() }),
    }
}

/// Fails if the user's options do not assign weights without a parameter group although the target
/// format needs it, or assign a wrong weight or group.
fn check_group_options(
    groups: &[ParamGroup],
    ungrouped: &[String],
    options: &ConvertOptions,
) -> ParamGroupResult<()> {
    let assigned = &options.groups;
    let is_single = is_single_unnamed_group(groups);
    if assigned.is_empty() {
        let needed = options.target != ConvertTarget::Native && !ungrouped.is_empty() && !is_single;
        return match needed {
            false => Ok(()),
            true => {
                let (parameters, groups) = (ungrouped.len(), groups.len());
                Err(ConvertError::GroupsUnknown { parameters, groups })
            }
        };
    }
    let assignable: HashSet<&str> = match is_single {
        true => HashSet::new(),
        false => ungrouped.iter().map(String::as_str).collect(),
    };
    if let Some(name) = assigned.keys().find(|name| !assignable.contains(name.as_str())) {
        return Err(ConvertError::GroupNotAssignable { name: name.clone() });
    }
    match assigned.values().find(|group| **group >= groups.len()) {
        Some(&group) => Err(ConvertError::GroupOutOfRange { group, groups: groups.len() }),
        None => Ok(()),
    }
}

/// Sorts the weights of a parameter group in the order in which the model registers its parameters.
/// `orders` are the orders that are possible for the model. If more than one order of these weights
/// is possible, or `orders` lack a weight, returns false and leaves a group of several weights
/// unsorted.
fn sort_by_registration(group: &mut ParamGroup, orders: &[Vec<&str>]) -> bool {
    let steps: HashMap<&str, Option<f64>> =
        group.names.iter().map(String::as_str).zip(group.steps.iter().copied()).collect();
    let mut found: Vec<Vec<&str>> = Vec::new();
    for order in orders {
        let sorted: Vec<&str> = order.iter().copied().filter(|name| steps.contains_key(name)).collect();
        if sorted.len() == group.names.len() && !found.contains(&sorted) {
            found.push(sorted);
        }
    }
    let [names] = found.as_slice() else { return group.names.len() == 1 };
    let steps = names.iter().map(|name| steps[name]).collect();
    (group.names, group.steps) = (names.iter().map(|&name| name.to_owned()).collect(), steps);
    true
}

impl ParamGroupSet<ParamGroup> {
    /// Converts parameter groups that list the names of weights to groups that list the indices of
    /// the weights in `tensors`, the source checkpoint's tensors. Unknown update counts become
    /// `step`.
    ///
    /// # Errors
    /// Fails if `index` lacks the tensor of a weight, or its optimizer state of a role in `roles`.
    pub(super) fn resolve_weight_indices(
        self,
        tensors: &[TensorInfo],
        index: &HashMap<(TensorRole, String), usize>,
        roles: &[TensorRole],
        step: u64,
    ) -> ParamGroupResult<ParamGroupSet<IndexedParamGroup>> {
        let resolve = |given: ParamGroup| -> ParamGroupResult<IndexedParamGroup> {
            let mut weights = Vec::with_capacity(given.names.len());
            for name in &given.names {
                let find = |role| {
                    let missing = || ConvertError::TensorMissing { name: name.clone(), role };
                    index.get(&(role, name.clone())).copied().ok_or_else(missing)
                };
                let weight = find(TensorRole::Weight)?;
                let shape = &tensors[weight].shape;
                let mut states = roles.iter().filter(|role| role.tensor_shape_for_weight(shape).is_some());
                states.try_for_each(|&role| find(role).map(drop))?;
                weights.push(weight);
            }
            let updates = |i: usize| given.steps.get(i).copied().flatten().unwrap_or(step as f64);
            let steps = (0..weights.len()).map(updates).collect();
            Ok(IndexedParamGroup { steps, weights, options: given.options })
        };
        let groups = self.groups.into_iter().map(resolve).collect::<ParamGroupResult<_>>()?;
        Ok(ParamGroupSet { groups, ungrouped: self.ungrouped.map(resolve).transpose()? })
    }
}

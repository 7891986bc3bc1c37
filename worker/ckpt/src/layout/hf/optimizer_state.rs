//! Reads the `state_dict` of a torch optimizer, and assigns its states to weights. Parameters are
//! numbers (torch) or names (full FSDP states).
use super::param_matching;
use super::weights::read_pickled_number;
use crate::catalog::{
    ALLOWED_GLOBALS, BorrowedWeightShape, ExternalCheckpointBuilder, ExternalTensor, FusedExperts,
    ParamGroupInfo, SeparateExpertTensor, StepValue, borrow_weight_shapes, convert_step_to_integer,
};
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TensorView, TorchFile};
use crate::error::{MatchError, OptimizerStateError, Result};
use crate::format_constants::HYPER_PARAMETER_VALUES_MAX;
use crate::tensor::TensorRole;
use serde_json::{Map, Value as Json};
use std::collections::{BTreeSet, HashMap};

/// How the `state_dict` of an optimizer identifies a parameter: by a number or by a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ParamId {
    /// The number that torch gives to the parameter.
    Number(u64),
    /// The name of the parameter, which FSDP writes instead of a number.
    Name(String),
}

/// The optimizer state of one parameter: its tensors and its step.
#[derive(Default)]
pub(crate) struct ParamState {
    /// Role and view of each tensor of the state.
    pub(crate) tensors: Vec<(TensorRole, TensorView)>,
    pub(crate) step: Option<StepValue>,
}

/// The `state_dict` of a torch optimizer, without the elements of its tensors.
pub(crate) struct OptimizerStateDict {
    pub(crate) states: HashMap<ParamId, ParamState>,
    /// Hyper-parameters of each parameter group, and its parameters in the order of the group.
    pub(crate) groups: Vec<(Map<String, Json>, Vec<ParamId>)>,
    /// Keys of unknown optimizer states, which are ignored.
    pub(crate) unknown: BTreeSet<String>,
}

impl OptimizerStateDict {
    /// Reads the `state_dict` of a torch optimizer from `root`, a value of the torch file `file`,
    /// without the elements of tensors.
    ///
    /// # Errors
    /// Fails if the dict has another structure, or a parameter with a state is not in exactly one
    /// group.
    pub(crate) fn read(
        file: &TorchFile,
        root: PickleView<'_>,
    ) -> std::result::Result<OptimizerStateDict, OptimizerStateError> {
        use OptimizerStateError::*;
        let mut optimizer =
            OptimizerStateDict { states: HashMap::new(), groups: Vec::new(), unknown: BTreeSet::new() };
        let states = root.get("state").and_then(PickleView::as_pairs).ok_or(NoStates)?;
        for (key, value) in states {
            let id = parse_param_id(key).ok_or(InvalidParamId)?;
            let state = optimizer.read_state(file, value)?;
            if optimizer.states.insert(id.clone(), state).is_some() {
                return Err(DuplicateState(id.label()));
            }
        }
        let groups = root.get("param_groups").and_then(PickleView::as_items).ok_or(NoParamGroups)?;
        let (mut seen, mut values_left) = (BTreeSet::new(), HYPER_PARAMETER_VALUES_MAX);
        for group in groups.iter() {
            let hyper = group.to_json_map("params", &mut values_left).ok_or(InvalidGroup)?;
            let params = group.get("params").and_then(PickleView::as_items).ok_or(InvalidGroup)?;
            let ids: Option<Vec<ParamId>> = params.iter().map(parse_param_id).collect();
            let ids = ids.ok_or(InvalidParamId)?;
            if let Some(twice) = ids.iter().find(|id| !seen.insert(id.label())) {
                return Err(InTwoGroups(twice.label()));
            }
            optimizer.groups.push((hyper, ids));
        }
        match optimizer.states.keys().find(|id| !seen.contains(&id.label())) {
            Some(id) => Err(InNoGroup(id.label())),
            None => Ok(optimizer),
        }
    }

    /// Reads the optimizer state of one parameter from its entry in the `state_dict`. Adds the keys
    /// of unknown tensors to `self.unknown`.
    fn read_state(
        &mut self,
        file: &TorchFile,
        value: PickleView<'_>,
    ) -> std::result::Result<ParamState, OptimizerStateError> {
        let mut state = ParamState::default();
        for (key, value) in value.as_pairs().ok_or(OptimizerStateError::InvalidState)? {
            let key = key.as_short_str().ok_or(OptimizerStateError::InvalidState)?;
            let tensor = file
                .parse_tensor(value)
                .map_err(|error| OptimizerStateError::Tensor { key: key.to_owned(), error })?;
            match (key, TensorRole::from_torch_key(key), tensor) {
                ("step", _, Some(view)) => state.step = Some(StepValue::Tensor(view)),
                ("step", _, None) => state.step = read_pickled_number(value).map(StepValue::Number),
                (_, Some(role), Some(view)) => state.tensors.push((role, view)),
                (_, None, Some(_)) => {
                    self.unknown.insert(key.to_owned());
                }
                (_, _, None) => {}
            }
        }
        Ok(state)
    }

    /// Returns, for each parameter group, the shape of the first state tensor of every parameter,
    /// which is normally the shape of the weight.
    pub(crate) fn state_shapes(&self) -> Vec<param_matching::StateShapes> {
        let shape = |id: &ParamId| Some(self.states.get(id)?.tensors.first()?.1.shape.clone());
        self.groups.iter().map(|(_, ids)| ids.iter().map(shape).collect()).collect()
    }

    /// Returns, for each parameter group, the names of the weights to which the optimizer's
    /// parameters belong, as the file records them or as shapes imply. If the file has only
    /// numbers, [`param_matching::match_states_to_weights`] finds the names in `weights`.
    /// `in_order` states whether `weights` are in the order of the model.
    ///
    /// # Errors
    ///
    /// Fails if a recorded name or the shape of its state contradicts `weights`, or if numbered
    /// parameters cannot be assigned to `weights`.
    pub(crate) fn find_parameter_names(
        &self,
        weights: &[BorrowedWeightShape<'_>],
        in_order: bool,
    ) -> std::result::Result<GroupNames, MatchError> {
        let name = |id: &ParamId| match id {
            ParamId::Name(name) => Some(name.clone()),
            ParamId::Number(_) => None,
        };
        let named: Option<Vec<Vec<String>>> =
            self.groups.iter().map(|(_, ids)| ids.iter().map(name).collect()).collect();
        match named {
            Some(names) => self.check_recorded_names(names, weights),
            None => param_matching::match_states_to_weights(&self.state_shapes(), weights, in_order),
        }
    }

    /// Checks that each weight name in the optimizer file occurs in `weights`, with the shape of
    /// the weight's optimizer state, and returns the names. Fails if a name is not in `weights`, or
    /// if the weight's shape differs from the shape of the state.
    fn check_recorded_names(
        &self,
        names: Vec<Vec<String>>,
        weights: &[BorrowedWeightShape<'_>],
    ) -> std::result::Result<GroupNames, MatchError> {
        let known: HashMap<&str, &[u64]> = weights.iter().copied().collect();
        for (group, shapes) in names.iter().zip(self.state_shapes()) {
            for (name, shape) in group.iter().zip(shapes) {
                let expected = known.get(name.as_str());
                let expected = expected.ok_or_else(|| MatchError::UnknownWeight(name.clone()))?;
                if let Some(found) = shape.filter(|s| s != expected) {
                    let (weight, expected) = (name.clone(), expected.to_vec());
                    return Err(MatchError::NamedShape { weight, found, expected });
                }
            }
        }
        Ok(names)
    }
}

impl ParamId {
    /// Returns the name of the parameter, or text such as `parameter 3`, for messages.
    fn label(&self) -> String {
        match self {
            ParamId::Number(n) => format!("parameter {n}"),
            ParamId::Name(name) => name.clone(),
        }
    }
}

/// Parses the number or the name by which `state` or `params` of a `state_dict` identifies a
/// parameter. Returns `None` if the value is neither a non-negative integer nor text.
fn parse_param_id(value: PickleView<'_>) -> Option<ParamId> {
    value
        .as_count()
        .map(ParamId::Number)
        .or_else(|| value.as_short_str().map(|s| ParamId::Name(s.to_owned())))
}

/// The names of the weights in each of the optimizer's parameter groups.
type GroupNames = Vec<Vec<String>>;

/// Reads the torch optimizer's `state_dict` in the file `name`, and adds its states, steps and
/// parameter groups to the opened checkpoint. States that cannot be assigned to the builder's
/// weights are skipped with a notice.
pub(crate) fn add_optimizer_file(builder: &mut ExternalCheckpointBuilder, name: &str) -> Result<()> {
    let (file, torch) = builder.add_torch_file(name, ALLOWED_GLOBALS)?;
    let optimizer = OptimizerStateDict::read(&torch, torch.value())
        .map_err(|error| builder.damaged_file_error(name, error))?;
    let weights: Vec<(String, Vec<u64>)> =
        builder.weights().map(|(n, s)| (n.to_owned(), s.to_vec())).collect();
    let borrowed = borrow_weight_shapes(&weights);
    match match_listed_or_fused_names(&optimizer, &borrowed) {
        Ok((names, fused)) => add_states(builder, name, file, &optimizer, names, &fused),
        Err(error) => add_trained_states(builder, name, file, optimizer, &borrowed, error),
    }
}

/// Finds the weight of each optimizer parameter, in the list `weights` or in a variant of the list
/// with one tensor for all experts of a layer. Also returns the fused experts, which are empty if
/// the names are those of `weights`.
fn match_listed_or_fused_names(
    optimizer: &OptimizerStateDict,
    weights: &[BorrowedWeightShape<'_>],
) -> std::result::Result<(GroupNames, FusedExperts), MatchError> {
    let listed = match optimizer.find_parameter_names(weights, false) {
        Ok(names) => return Ok((names, FusedExperts::default())),
        Err(error) => error,
    };
    let Some(fused) = FusedExperts::from_separate_experts(weights) else { return Err(listed) };
    match optimizer.find_parameter_names(&borrow_weight_shapes(&fused.weights), false) {
        Ok(names) => Ok((names, fused)),
        Err(error) => Err(MatchError::Fused { listed: Box::new(listed), fused: Box::new(error) }),
    }
}

/// Assigns optimizer states without weight names to those weights that the job trains, if the
/// shapes match, and adds them to the checkpoint's tensors. A notice reports the assignment, since
/// the file itself does not identify the weights. Skips the states otherwise, or if the trained
/// weights are unknown. `error` states why the states do not match all weights.
fn add_trained_states(
    builder: &mut ExternalCheckpointBuilder,
    name: &str,
    file: usize,
    optimizer: OptimizerStateDict,
    weights: &[BorrowedWeightShape<'_>],
    mut error: MatchError,
) -> Result<()> {
    let is_trained = |w: &&BorrowedWeightShape<'_>| builder.trained.as_ref().is_some_and(|t| t.contains(w.0));
    let (trained, frozen): (Vec<_>, Vec<_>) = weights.iter().partition(is_trained);
    let trained: Vec<BorrowedWeightShape<'_>> = trained.into_iter().copied().collect();
    if builder.trained.is_some() && !frozen.is_empty() {
        match match_listed_or_fused_names(&optimizer, &trained) {
            Ok((names, fused)) => {
                builder.add_notice(format!(
                    "{name} has unnamed states of {} of {} weights; they match the weights that are trained here \
                     and are assigned to them",
                    trained.len(),
                    weights.len()
                ));
                builder.facts.state.frozen.extend(frozen.into_iter().map(|(n, _)| (*n).to_owned()));
                return add_states(builder, name, file, &optimizer, names, &fused);
            }
            Err(other) => {
                let (all_weights, trained) = (Box::new(error), Box::new(other));
                error = MatchError::Trained { all_weights, trained };
            }
        }
    }
    builder.record_skipped_optimizer(format!("ignoring the optimizer state in {name}: {error}"));
    builder.facts.state.groups =
        optimizer.groups.into_iter().map(|(hyper, _)| ParamGroupInfo { hyper, names: Vec::new() }).collect();
    Ok(())
}

/// Adds the optimizer states, update counts and parameter groups of an optimizer file to the opened
/// checkpoint, using the weight names in `names`. `names` are the names of the parameters of each
/// group.
fn add_states(
    builder: &mut ExternalCheckpointBuilder,
    name: &str,
    file: usize,
    optimizer: &OptimizerStateDict,
    names: GroupNames,
    fused: &FusedExperts,
) -> Result<()> {
    for ((_, ids), names) in optimizer.groups.iter().zip(&names) {
        for (id, weight) in ids.iter().zip(names) {
            let Some(state) = optimizer.states.get(id) else { continue };
            for (role, view) in &state.tensors {
                let entries = make_state_tensors(weight, *role, file, view, fused);
                builder.entries.extend(entries.map_err(|error| builder.damaged_file_error(name, error))?);
            }
            let Some(step) = &state.step else { continue };
            let step = convert_step_to_integer(builder.store.read_step(file, step)?).map_err(|error| {
                let weight = weight.clone();
                builder.damaged_file_error(name, OptimizerStateError::Step { weight, error })
            })?;
            builder.facts.state.steps.extend(fused.stored_names(weight).map(|name| (name, step)));
        }
    }
    builder.add_unknown_states_notice(&optimizer.unknown);
    for ((hyper, _), names) in optimizer.groups.iter().zip(names) {
        let names = names.iter().flat_map(|weight| fused.stored_names(weight)).collect();
        builder.facts.state.groups.push(ParamGroupInfo { hyper: hyper.clone(), names });
    }
    Ok(())
}

/// Describes the tensor `view` in a torch file as the optimizer state `role` (such as Adam's first
/// moment) of the weight `weight`. There is one tensor, or one per stored member if the weight is
/// fused.
fn make_state_tensors(
    weight: &str,
    role: TensorRole,
    file: usize,
    view: &TensorView,
    fused: &FusedExperts,
) -> std::result::Result<Vec<ExternalTensor>, OptimizerStateError> {
    let Some(members) = fused.parts_of_weight(weight) else {
        return Ok(vec![ExternalTensor::from_whole_view(weight, role, file, view)]);
    };
    let count = members.last().map_or(0, |m| m.elements.end);
    if view.element_count() != count {
        return Err(OptimizerStateError::Elements {
            role,
            weight: weight.to_owned(),
            shape: view.shape.clone(),
            expected: count,
        });
    }
    let entry = |m: &SeparateExpertTensor| {
        ExternalTensor::from_view_elements(&m.name, role, &m.shape, file, view, m.elements.clone())
    };
    Ok(members.iter().map(entry).collect())
}

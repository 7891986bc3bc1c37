//! [`SourceState`]: the tensors and the training state of the checkpoint to convert, from which the
//! output files of every target format are planned.
use super::notice::ConvertNotice;
use super::options::{ConvertOptions, ConvertTarget, WORLD_SIZE_MAX};
use super::param_groups::{self, IndexedParamGroup, ParamGroupSet};
use crate::catalog::{LossScale, PassthroughState, TensorInfo, TensorSource, TiedWeight, TrainingState};
use crate::codec::disk::is_plain_file_name;
use crate::codec::pickle::PythonObject;
use crate::error::{CkptError, ConvertError, OptionProblem, Result};
use crate::tensor::{Dtype, TensorRole};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

/// Limit on the number of ranks times the number of tensors of a conversion, because an untrusted
/// checkpoint may claim any number of ranks.
const RANKS_TIMES_TENSORS_MAX: u64 = 4 << 20;
/// Number that is added to the number of tensors before it is compared with
/// [`RANKS_TIMES_TENSORS_MAX`], so that checkpoints with few tensors have a limit, too.
const EXTRA_TENSORS_PER_RANK: u64 = 64;
/// The DeepSpeed version that a converted checkpoint claims if the source checkpoint does not
/// record one.
const DEEPSPEED_VERSION: &str = "0.19.8";

/// The tensors and the training state of the checkpoint to convert, supplemented by the user's
/// options where the checkpoint lacks a value. Fields refer to tensors by their indices in
/// `tensors`.
pub(super) struct SourceState {
    pub(super) path: PathBuf,
    pub(super) tensors: Vec<TensorInfo>,
    index: HashMap<(TensorRole, String), usize>,
    /// Parameter groups, with their weights in the order of the optimizer.
    pub(super) groups: Vec<IndexedParamGroup>,
    /// Trained weights whose group is unknown. Only the native format can store such weights.
    pub(super) ungrouped: Option<IndexedParamGroup>,
    /// Whether the options assign weights to groups.
    pub(super) regrouped: bool,
    /// Weights that are in no group, in ascending order. Empty if the source checkpoint has no
    /// training state.
    pub(super) frozen: Vec<usize>,
    /// Weights that were frozen when the source checkpoint was saved. Some of these weights may be
    /// in a group.
    pub(super) frozen_at_save: Vec<usize>,
    pub(super) buffers: Vec<usize>,
    /// Roles of the states that the optimizer keeps for each weight.
    pub(super) roles: Vec<TensorRole>,
    pub(super) step: u64,
    /// Number of samples that the run had consumed, if the source checkpoint contains this number.
    pub(super) samples: Option<u64>,
    pub(super) tokens: u64,
    pub(super) config: Map<String, Value>,
    pub(super) text_files: Vec<crate::catalog::TextFile>,
    /// Dtype of the copies of trained weights in DeepSpeed's model files.
    pub(super) precision: Dtype,
    /// ZeRO stage of the converted checkpoint, 1 to 3.
    pub(super) stage: u8,
    /// Number of ranks of the converted checkpoint.
    pub(super) world: u32,
    /// DeepSpeed version that the converted checkpoint states.
    pub(super) version: String,
    pub(super) ties: Vec<TiedWeight>,
    /// Dynamic loss scale of FP16 training, if the source checkpoint has one.
    pub(super) loss_scale: Option<LossScale>,
    /// Number of ranks that saved the source checkpoint.
    pub(super) source_world: Option<u32>,
    pub(super) passthrough: PassthroughState,
    pub(super) notices: Vec<ConvertNotice>,
}

impl SourceState {
    /// Reads the tensors and the training state of the checkpoint `source`, and fills in values
    /// that the checkpoint lacks from the user's options.
    ///
    /// # Errors
    /// Fails if the target format needs something that neither the source checkpoint nor the
    /// options provide.
    pub(super) fn from_source(source: &dyn TensorSource, options: &ConvertOptions) -> Result<SourceState> {
        let (state, mut passthrough) = (source.training_state(), source.read_passthrough()?);
        let given = param_groups::take_recorded_groups(&state, &mut passthrough);
        if passthrough.scheduler == PythonObject::None {
            passthrough.scheduler = PythonObject::from_json(&state.scheduler);
        }
        let mut notices =
            std::mem::take(&mut passthrough.notices).into_iter().map(ConvertNotice::Source).collect();
        let tensors = source.tensors();
        let index: HashMap<(TensorRole, String), usize> =
            tensors.iter().enumerate().map(|(i, t)| ((t.role, t.name.clone()), i)).collect();
        let roles = find_optimizer_roles(&tensors);
        let at_source = |error: ConvertError| CkptError::unsupported(source.path(), error);
        let world = choose_world_size(options, &state, tensors.len())?;
        let has_groups = passthrough.native_facts.is_some() || !given.is_empty();
        let step =
            determine_step(source, &roles, has_groups, options.target, &mut notices).map_err(at_source)?;
        let ParamGroupSet { groups, ungrouped } =
            param_groups::assign_weights_to_groups(given, &tensors, &state.steps, options)
                .and_then(|given| given.resolve_weight_indices(&tensors, &index, &roles, step))
                .map_err(at_source)?;
        if let Some(ungrouped) = &ungrouped {
            let (parameters, groups) = (ungrouped.weights.len(), groups.len());
            notices.push(ConvertNotice::GroupsUnknown { parameters, groups });
        }
        let step = match options.target {
            ConvertTarget::Native if passthrough.native_facts.is_none() => {
                choose_step_from_updates(step, groups.iter().chain(&ungrouped), &mut notices)
            }
            _ => step,
        };
        let (frozen, frozen_at_save) =
            find_frozen_weights(source, &tensors, groups.iter().chain(&ungrouped), &state, &passthrough);
        Ok(SourceState {
            path: source.path().to_owned(),
            groups,
            ungrouped,
            regrouped: !options.groups.is_empty(),
            frozen,
            frozen_at_save,
            buffers: find_tensors_with_role(&tensors, TensorRole::Buffer).collect(),
            roles,
            step,
            samples: state.samples,
            tokens: source.trained_token_count().unwrap_or(0),
            config: source.hf_config().cloned().unwrap_or_default(),
            text_files: source.exported_text_files().to_vec(),
            precision: options.dtype.or(passthrough.precision).unwrap_or(Dtype::F32),
            stage: options.stage.or(state.stage.filter(|s| (1..=3).contains(s))).unwrap_or(2),
            world,
            version: passthrough.deepspeed_version.clone().unwrap_or_else(|| DEEPSPEED_VERSION.into()),
            notices,
            loss_scale: state.parse_loss_scale(),
            ties: state.ties,
            source_world: state.world,
            passthrough,
            index,
            tensors,
        })
    }

    /// Fails with [`ConvertError::StateUnsupported`] if the source checkpoint has a kind of
    /// optimizer state that torch's optimizers do not use.
    pub(super) fn require_torch_optimizer_states(&self) -> Result<()> {
        match self.roles.iter().find(|role| role.torch_key().is_none()) {
            Some(&role) => Err(CkptError::unsupported(&self.path, ConvertError::StateUnsupported { role })),
            None => Ok(()),
        }
    }

    /// Finds the index of the tensor that stores the optimizer state `role` (such as Adam's first
    /// moment) of the weight with the index `weight`.
    pub(super) fn find_optimizer_state_index(&self, weight: usize, role: TensorRole) -> Option<usize> {
        self.index.get(&(role, self.tensors[weight].name.clone())).copied()
    }

    /// Returns the number of elements of the tensor with the index `tensor`.
    pub(super) fn element_count(&self, tensor: usize) -> u64 {
        self.tensors[tensor].element_count()
    }

    /// Returns the name of the tensor with the index `tensor`.
    pub(super) fn tensor_name(&self, tensor: usize) -> &str {
        &self.tensors[tensor].name
    }

    /// Chooses the tag of a converted ZeRO checkpoint, that is the name of the directory that
    /// contains its files.
    pub(super) fn choose_tag(&self) -> String {
        let tag =
            self.passthrough.tag.as_ref().filter(|t| is_plain_file_name(t) && !t.ends_with("_universal"));
        tag.cloned().unwrap_or_else(|| format!("global_step{}", self.step))
    }

    /// Returns the number of optimizer updates that each weight at the positions `members` of a
    /// parameter group has received, which must be one number for all. Returns the step of the
    /// source checkpoint if there are no such weights.
    ///
    /// # Errors
    /// Fails with [`ConvertError::UpdatesDiffer`] if the update counts of two weights differ.
    pub(super) fn require_common_update_count(
        &self,
        group: &IndexedParamGroup,
        members: Range<usize>,
    ) -> Result<f64> {
        let steps = &group.steps[members.clone()];
        let first_updates = steps.first().copied().unwrap_or(self.step as f64);
        match steps.iter().position(|&s| s != first_updates) {
            None => Ok(first_updates),
            Some(i) => {
                let name = |position: usize| self.tensor_name(group.weights[position]).to_owned();
                let (first, second) = (name(members.start), name(members.start + i));
                let (first_updates, second_updates) = (first_updates as u64, steps[i] as u64);
                let error = ConvertError::UpdatesDiffer { first, first_updates, second, second_updates };
                Err(CkptError::unsupported(&self.path, error))
            }
        }
    }
}

/// Returns the number of ranks of the converted checkpoint: the number in the options, else that of
/// the source checkpoint, else 1.
///
/// # Errors
/// Fails if the options have no number of ranks and that of the source is too large for `tensors`
/// tensors. One number in an untrusted file could otherwise demand a plan of any size.
fn choose_world_size(options: &ConvertOptions, state: &TrainingState, tensors: usize) -> Result<u32> {
    if let Some(world) = options.world {
        return Ok(world);
    }
    let world = state.world.unwrap_or(1).max(1);
    let limit = (RANKS_TIMES_TENSORS_MAX / (tensors as u64 + EXTRA_TENSORS_PER_RANK))
        .clamp(1, u64::from(WORLD_SIZE_MAX)) as u32;
    match world > limit {
        true => Err(CkptError::invalid_option(OptionProblem::SourceWorldSize { world, limit })),
        false => Ok(world),
    }
}

/// Finds out which weights are frozen in the converted checkpoint, and which were frozen when the
/// source checkpoint was saved. A weight is frozen if no group in `groups` contains it and the
/// source has a training state. A weight was frozen at the save if no group contains it, or if the
/// source lists it as frozen.
fn find_frozen_weights<'a>(
    source: &dyn TensorSource,
    tensors: &[TensorInfo],
    groups: impl Iterator<Item = &'a IndexedParamGroup>,
    state: &TrainingState,
    passthrough: &PassthroughState,
) -> (Vec<usize>, Vec<usize>) {
    let grouped: HashSet<usize> = groups.flat_map(|g| g.weights.iter().copied()).collect();
    let listed: HashSet<&str> =
        state.frozen.iter().chain(&passthrough.frozen_late).map(String::as_str).collect();
    // a source without training state has neither trained nor frozen weights
    let has_training_state = !source.has_only_weights();
    let weights = || find_tensors_with_role(tensors, TensorRole::Weight);
    let frozen = weights().filter(|i| has_training_state && !grouped.contains(i)).collect();
    let is_frozen_at_save = |i: &usize| !grouped.contains(i) || listed.contains(tensors[*i].name.as_str());
    (frozen, weights().filter(is_frozen_at_save).collect())
}

/// Iterates over the indices of the tensors with the role `role` (weight, optimizer state or
/// buffer).
fn find_tensors_with_role(tensors: &[TensorInfo], role: TensorRole) -> impl Iterator<Item = usize> {
    (0..tensors.len()).filter(move |&i| tensors[i].role == role)
}

/// Returns the roles, such as Adam's first moment, of the optimizer states that the source
/// checkpoint has.
fn find_optimizer_roles(tensors: &[TensorInfo]) -> Vec<TensorRole> {
    let roles = TensorRole::ALL.into_iter().filter(|r| r.is_optimizer_state());
    roles.filter(|&role| tensors.iter().any(|t| t.role == role)).collect()
}

/// Chooses the step that a checkpoint converted to launch's own format states: the largest number
/// of optimizer updates that any weight has received. Returns `steps` if there are no update
/// counts. Adds a notice if the result differs from `steps`.
fn choose_step_from_updates<'a>(
    steps: u64,
    groups: impl Iterator<Item = &'a IndexedParamGroup>,
    notices: &mut Vec<ConvertNotice>,
) -> u64 {
    let most = groups
        .flat_map(|g| &g.steps)
        .copied()
        .fold(None, |most: Option<f64>, s| Some(most.map_or(s, |most| most.max(s))));
    let Some(updates) = most.map(|s| s as u64).filter(|&updates| updates != steps) else { return steps };
    notices.push(ConvertNotice::StepFromUpdates { updates, steps });
    updates
}

/// Returns the number of optimizer steps that the source checkpoint has completed. If the source
/// has only weights and the target is native, returns 0 and adds a notice to `notices`. `roles` are
/// the roles of the source's optimizer states. `has_groups` states whether the source has parameter
/// groups. A source with groups and without optimizer states is valid for a native target, since
/// SGD without momentum keeps no states.
///
/// # Errors
/// Fails if the source isn't a training state that the target can store.
fn determine_step(
    source: &dyn TensorSource,
    roles: &[TensorRole],
    has_groups: bool,
    target: ConvertTarget,
    notices: &mut Vec<ConvertNotice>,
) -> std::result::Result<u64, ConvertError> {
    let has_states = !roles.is_empty();
    if let Some(reason) = source.ignored_optimizer_reason().filter(|_| !has_states) {
        return Err(ConvertError::StatesUnreadable { reason: reason.to_string() });
    }
    let weights_only = source.has_only_weights();
    if weights_only && target == ConvertTarget::Native {
        notices.push(ConvertNotice::WeightsOnly);
        return Ok(0);
    }
    match (source.completed_steps(), has_states) {
        (_, false) if weights_only => Err(ConvertError::WeightsOnly),
        (None, false) => Err(ConvertError::StepAndOptimizerMissing),
        (None, true) => Err(ConvertError::StepMissing),
        (Some(step), false) if !has_groups => Err(ConvertError::OptimizerMissing { step }),
        (Some(_), false) if target != ConvertTarget::Native => Err(ConvertError::OptimizerRequired),
        (Some(step), _) => Ok(step),
    }
}

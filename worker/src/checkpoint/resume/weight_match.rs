//! Finds for each parameter of the job's model the tensor with its values in a checkpoint of
//! another program ([`match_weights`]).
use crate::{
    error::{Result, build_checkpoint_error, to_unreadable_checkpoint_error},
    model::{Model, TiedWeight},
    optim::list_state_roles,
    params::ParamUnit,
    trainer_stages::UninitializedTrainer,
};
use ckpt::{ExternalCheckpoint, F32ReadRequest, TensorInfo, TensorRole, TensorSource};
use diagnostic::{Diagnostic, codes::training as codes};
use jobspec::OptimizerSpec;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The largest number of tensor names that one error message lists.
const MAX_LISTED_NAMES: usize = 4;
/// Number of elements of each of two stored weights that are read and compared at a time, to limit
/// the memory of the comparison.
const COMPARE_CHUNK_ELEMENTS: usize = 1 << 18;

/// How the tensors of a checkpoint of another program correspond to the parameters of the job:
/// renamed weights, and parameters without optimizer states.
#[derive(Debug, Default, PartialEq)]
pub(super) struct WeightMatch {
    /// Maps a weight's name in the job to its name in the checkpoint. Contains only weights whose
    /// names differ, such as a tied matrix that is stored under its other name.
    pub(super) renamed: HashMap<String, String>,
    /// Whether the checkpoint has the optimizer's states. Otherwise only weights are read.
    pub(super) has_optimizer_state: bool,
    /// Trained parameters that are frozen in the checkpoint, so their states start at zero.
    pub(super) reset_states: HashSet<String>,
    /// Names of buffers in the checkpoint that the job's model does not have.
    pub(super) unused: Vec<String>,
    /// Tied weights that are stored under both names: the alias, and the name of the weight whose
    /// values must be equal.
    aliases: Vec<(String, String)>,
}

/// The parameters, pairs of tied weights and optimizer states that the job needs from a checkpoint
/// of another program.
pub(super) struct ModelRequirements<'a> {
    /// The `model_type` in the model's `config.json`.
    pub(super) family: &'a str,
    pub(super) units: &'a [ParamUnit],
    pub(super) ties: &'a [TiedWeight],
    pub(super) model: &'a Model,
    /// The optimizer whose states are needed, or `None` if only weights are needed.
    pub(super) optimizer: Option<&'a OptimizerSpec>,
    /// Returns whether the parameter with the given name is needed.
    pub(super) selects: fn(&str) -> bool,
}

/// Joins names for a message to the user, and replaces all but the first few by their number: `a,
/// b, c, d and 3 more`.
pub(super) fn format_names<S: AsRef<str>>(names: &[S]) -> String {
    let listed: Vec<&str> = names.iter().take(MAX_LISTED_NAMES).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(MAX_LISTED_NAMES) {
        0 => listed.join(", "),
        more => format!("{} and {more} more", listed.join(", ")),
    }
}

/// Lists the names and shapes of all weights of the model.
pub(super) fn list_weight_shapes(ready: &UninitializedTrainer) -> Vec<(String, Vec<u64>)> {
    let params = ready.trainer.engine.shards.iter().flat_map(|s| &s.unit.params);
    params.map(|p| (p.name.clone(), p.shape.iter().map(|&n| n as u64).collect())).collect()
}

/// Lists every name under which a checkpoint may store a weight that this job trains, including the
/// second name of a tied weight.
pub(super) fn list_trained_names(ready: &UninitializedTrainer) -> HashSet<String> {
    let (ties, model) = (ready.trainer.model.tied_weights(), &ready.trainer.model);
    let mut names = HashSet::new();
    for param in ready.trainer.engine.shards.iter().flat_map(|s| s.unit.list_trained_params()) {
        let alias = ties.iter().find(|t| t.target == param.name).map(|t| t.alias.clone());
        let unprefixed =
            model.base_model_prefix().and_then(|prefix| param.name.strip_prefix(prefix)).map(str::to_owned);
        names.extend([Some(param.name.clone()), alias, unprefixed].into_iter().flatten());
    }
    names
}

/// Finds for each parameter of the model the tensor that contains its values in an external
/// checkpoint (written by another program).
///
/// # Errors
///
/// Fails if the checkpoint is of another model or optimizer, or incomplete. The message lists the
/// first few tensors that do not match.
pub(super) fn match_weights(
    source: &ExternalCheckpoint,
    required: &ModelRequirements<'_>,
) -> Result<WeightMatch> {
    source.require_all_weights().map_err(to_unreadable_checkpoint_error)?;
    let tensors = source.tensors();
    let stored: HashMap<(TensorRole, &str), &TensorInfo> =
        tensors.iter().map(|t| ((t.role, t.name.as_str()), t)).collect();
    let mut matched = WeightMatch::default();
    let mut mismatches = TensorMismatches::default();
    let mut used = BTreeSet::new();
    for param in required.units.iter().flat_map(|u| &u.params).filter(|p| (required.selects)(&p.name)) {
        let name = find_stored_name(source, &stored, required, &param.name);
        let Some(tensor) = name.and_then(|name| stored.get(&(TensorRole::Weight, name))) else {
            mismatches.missing.push(param.name.clone());
            continue;
        };
        mismatches.record_shape_mismatch(&param.name, &tensor.shape, &param.shape, "job");
        used.insert(tensor.name.as_str());
        if tensor.name != param.name {
            matched.renamed.insert(param.name.clone(), tensor.name.clone());
        }
    }
    for tensor in tensors.iter().filter(|t| t.role == TensorRole::Weight && !used.contains(t.name.as_str())) {
        match required.ties.iter().find(|t| t.alias == tensor.name) {
            Some(tie) => matched.aliases.push((tensor.name.clone(), tie.target.clone())),
            None if required.model.is_constant_tensor(&tensor.name) => {
                matched.unused.push(tensor.name.clone())
            }
            None => mismatches.extra.push(tensor.name.clone()),
        }
    }
    reject_mismatches(source, mismatches, required.family)?;
    matched.unused.extend(tensors.iter().filter(|t| t.role == TensorRole::Buffer).map(|t| t.name.clone()));
    (matched.has_optimizer_state, matched.reset_states) =
        match_optimizer_states(source, required, &matched.renamed, &stored)?;
    Ok(matched)
}

/// Returns the name under which an external checkpoint (written by another program) stores the
/// job's weight `name`, or `None` if the weight is missing.
fn find_stored_name<'a>(
    source: &'a ExternalCheckpoint,
    stored: &HashMap<(TensorRole, &'a str), &'a TensorInfo>,
    required: &ModelRequirements<'a>,
    name: &'a str,
) -> Option<&'a str> {
    let is_stored = |name: &&'a str| stored.contains_key(&(TensorRole::Weight, *name));
    let tied_in_checkpoint =
        source.facts().state.ties.iter().find(|t| t.alias == name).map(|t| t.target.as_str());
    // A matrix that the job ties may be stored only under its alias.
    let tied_in_job = required.ties.iter().find(|t| t.target == name).map(|t| t.alias.as_str());
    // Names in a model that was saved without its head have no prefix.
    let unprefixed = required.model.base_model_prefix().and_then(|prefix| name.strip_prefix(prefix));
    [Some(name), unprefixed, tied_in_checkpoint, tied_in_job].into_iter().flatten().find(is_stored)
}

/// Returns the `model_type` in the text of a Hugging Face config.json, if it contains one.
pub(super) fn read_model_type(config: &Map<String, Value>) -> Option<&str> {
    config.get("model_type").and_then(Value::as_str)
}

/// Names of the tensors that prevent a checkpoint or adapter directory from being loaded: missing
/// ones, unexpected ones, and ones with a wrong shape.
#[derive(Default)]
pub(super) struct TensorMismatches {
    pub(super) missing: Vec<String>,
    /// The tensors of another shape, each with both shapes.
    pub(super) shapes: Vec<String>,
    pub(super) extra: Vec<String>,
}

impl TensorMismatches {
    /// Adds the tensor `name` to the list of tensors with a wrong shape if `stored`, its shape in
    /// the checkpoint, differs from `expected`. `owner` names the side that expects this shape in
    /// the message: `model` or `job`.
    pub(super) fn record_shape_mismatch(
        &mut self,
        name: &str,
        stored: &[u64],
        expected: &[usize],
        owner: &str,
    ) {
        if !stored.iter().copied().eq(expected.iter().map(|&n| n as u64)) {
            self.shapes.push(format!("{name} {stored:?} ({owner}: {expected:?})"));
        }
    }

    /// Formats the names of the tensors that do not fit the job's model (missing, wrong shape,
    /// unexpected) for an error message. Only the first few names of each kind are listed. Kinds
    /// without tensors are left out.
    pub(super) fn describe(&self) -> Vec<String> {
        let kinds = [
            ("missing", &self.missing),
            ("of another shape", &self.shapes),
            ("not in the model", &self.extra),
        ];
        let present = kinds.iter().filter(|(_, names)| !names.is_empty());
        present.map(|(kind, names)| format!("{kind}: {}", format_names(names))).collect()
    }

    /// Adds the lists of missing, unexpected and wrongly shaped tensors to the machine-readable
    /// fields of `error`, and returns the error.
    pub(super) fn add_names_to_error(self, error: Diagnostic) -> Diagnostic {
        error
            .with_field("missing", self.missing)
            .with_field("shapes", self.shapes)
            .with_field("extra", self.extra)
    }
}

/// Fails if `mismatches` contains a tensor of an external checkpoint (written by another program)
/// that does not fit the job's model.
fn reject_mismatches(source: &ExternalCheckpoint, mismatches: TensorMismatches, family: &str) -> Result<()> {
    let mut parts = mismatches.describe();
    if parts.is_empty() {
        return Ok(());
    }
    if let Some(stored) = source.hf_config().and_then(read_model_type).filter(|stored| *stored != family) {
        let families = format!(
            "config.json of the checkpoint names the family {stored}, but the job's model is {family}"
        );
        parts.insert(0, families);
    }
    let message = format!(
        "the weights of {} ({}) do not fit the job's model; {}",
        source.path().display(),
        source.facts().writer,
        parts.join("; ")
    );
    let error = mismatches.add_names_to_error(build_checkpoint_error(
        codes::RESUME_MODEL_MISMATCH,
        source.path(),
        message,
    ));
    let help =
        "set `train.model` to the model of the checkpoint, such as `from: DIRECTORY` with its config.json";
    Err(error.with_help(help).into())
}

/// Checks that a checkpoint of another program has the optimizer states that the job needs, and
/// returns the parameters that were frozen and therefore lack states.
///
/// Fails if another optimizer state is missing, or if the training state has no optimizer state.
fn match_optimizer_states(
    source: &ExternalCheckpoint,
    required: &ModelRequirements<'_>,
    renamed: &HashMap<String, String>,
    stored: &HashMap<(TensorRole, &str), &TensorInfo>,
) -> Result<(bool, HashSet<String>)> {
    let none = HashSet::new();
    let Some(optimizer) = required.optimizer else { return Ok((false, none)) };
    let (facts, roles) = (source.facts(), list_state_roles(optimizer));
    let has_any = stored.keys().any(|(role, _)| role.is_optimizer_state());
    if roles.is_empty() || (!has_any && !facts.is_training_state()) {
        return Ok((has_any || (roles.is_empty() && facts.state.step.is_some()), none));
    }
    let (mut missing, mut frozen) = (Vec::new(), HashSet::new());
    for param in required.units.iter().flat_map(ParamUnit::list_trained_params) {
        let name = renamed.get(&param.name).unwrap_or(&param.name);
        let shape: Vec<u64> = param.shape.iter().map(|&n| n as u64).collect();
        let lacks = |role: &&TensorRole| {
            let tensor = stored.get(&(**role, name.as_str()));
            role.tensor_shape_for_weight(&shape).is_some_and(|shape| tensor.is_none_or(|t| t.shape != shape))
        };
        match roles.iter().find(lacks) {
            Some(_) if facts.state.frozen.contains(name) => {
                frozen.insert(param.name.clone());
            }
            Some(role) => missing.push(format!("{role} of {}", param.name)),
            None => {}
        }
    }
    if !missing.is_empty() {
        return Err(build_incomplete_state_error(source, &missing).into());
    }
    let mut stored_roles = stored.keys().map(|(role, _)| *role);
    if let Some(role) = stored_roles.find(|r| r.is_optimizer_state() && !roles.contains(r)) {
        let name = optimizer.name.name();
        let message =
            format!("{} has {role}, which the optimizer {name} does not use", source.path().display());
        return Err(build_checkpoint_error(codes::RESUME_OPTIMIZER_MISMATCH, source.path(), message)
            .with_field("role", role.to_string())
            .with_field("optimizer", name)
            .with_help("use the checkpoint's optimizer, or resume from its weights (`launch ckpt gather`)")
            .into());
    }
    Ok((true, frozen))
}

/// Builds the error which reports that an external checkpoint (written by another program) lacks
/// the optimizer states of the parameters in `missing`.
fn build_incomplete_state_error(source: &ExternalCheckpoint, missing: &[String]) -> Diagnostic {
    let facts = source.facts();
    let step = facts.state.step.map_or("an unknown step".into(), |step| format!("step {step}"));
    let count = match missing.len() {
        1 => "1 optimizer state".to_owned(),
        n => format!("{n} optimizer states"),
    };
    let reason = facts.ignored_optimizer_reason().map(|why| format!("; {why}")).unwrap_or_default();
    let message = format!(
        "{} has the training state of {step}, but lacks {count}: {}{reason}",
        source.path().display(),
        format_names(missing)
    );
    build_checkpoint_error(codes::RESUME_STATE_INCOMPLETE, source.path(), message)
        .with_field("missing", missing.len())
        .with_help("use another checkpoint, or resume from its weights (`launch ckpt gather`)")
}

/// Fails if the checkpoint contains two copies with different values of a weight that the model
/// uses in two places (tied weight).
pub(super) fn require_equal_tied_values(source: &ExternalCheckpoint, matched: &WeightMatch) -> Result<()> {
    let tensors = source.tensors();
    let elements = |name: &str| {
        let tensor = tensors.iter().find(|t| t.role == TensorRole::Weight && t.name == name);
        tensor.map(TensorInfo::element_count)
    };
    for (alias, target) in &matched.aliases {
        let target = matched.renamed.get(target).unwrap_or(target);
        let (Some(n), Some(m)) = (elements(alias), elements(target)) else { continue };
        if n != m || !have_equal_values(source, alias, target, n)? {
            let message = format!(
                "{}: {alias} and {target} have different values, but the job ties them",
                source.path().display()
            );
            return Err(build_checkpoint_error(codes::RESUME_TIED_WEIGHTS_DIFFER, source.path(), message)
                .with_field("tensors", vec![alias.clone(), target.clone()])
                .with_help("set `train.model.tie_word_embeddings: false`")
                .into());
        }
    }
    Ok(())
}

/// Reads the weights named `a` and `b` from a checkpoint of another program, and returns whether
/// all elements have equal bits.
fn have_equal_values(source: &ExternalCheckpoint, a: &str, b: &str, elements: u64) -> Result<bool> {
    let (mut a_values, mut b_values) =
        (vec![0f32; COMPARE_CHUNK_ELEMENTS], vec![0f32; COMPARE_CHUNK_ELEMENTS]);
    let role = TensorRole::Weight;
    for start in (0..elements).step_by(COMPARE_CHUNK_ELEMENTS) {
        let len = (elements - start).min(COMPARE_CHUNK_ELEMENTS as u64) as usize;
        let (a_values, b_values) = (&mut a_values[..len], &mut b_values[..len]);
        source
            .read_verified(&mut [
                F32ReadRequest { name: a, role, start_element: start, out: a_values },
                F32ReadRequest { name: b, role, start_element: start, out: b_values },
            ])
            .map_err(to_unreadable_checkpoint_error)?;
        if a_values.iter().zip(b_values.iter()).any(|(x, y)| x.to_bits() != y.to_bits()) {
            return Ok(false);
        }
    }
    Ok(true)
}

//! Reads DeepSpeed's universal checkpoints, which store each weight and its optimizer states in
//! separate files.
//!
//! If DeepSpeed converted a checkpoint of stage 1 or 2, the files of a weight are dicts with a
//! shaped `param`. If DeepSpeed converted a checkpoint of stage 3, the files are flat tensors whose
//! shapes are in the model files. Frozen weights and buffers are in the model files.
use super::collect;
use super::file_names::TagFiles;
use super::states::{
    ALLOWED_GLOBALS, ModelStates, NumberedParamGroup, read_loss_scaler, read_param_groups, read_zero_stage,
};
use super::tag::TagContents;
use crate::catalog::{
    ExternalCheckpoint, ExternalCheckpointBuilder, ExternalTensor, convert_step_to_integer,
};
use crate::codec::disk::Directory;
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TensorView, TorchFile};
use crate::error::{CkptError, DamageReason, DeepSpeedError, LayoutError, MissingPart, Result};
use crate::format_constants::{CONVERT_RECORD_FILE, TENSORS_MAX};
use crate::layout::hf::companion_files;
use crate::layout::hf::weights::read_pickled_number;
use crate::parallel;
use crate::tensor::{TensorRole, count_elements};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

/// Name of the directory in a universal checkpoint that contains one subdirectory per weight.
const ZERO_DIR: &str = "zero";
/// Path of the file in a universal checkpoint with everything that applies to all weights:
/// hyper-parameters, steps and loss scaler.
const OPTIMIZER_STATE_FILE: &str = "zero/optimizer_state.pt";
/// Number of subdirectories (weights) of a universal checkpoint whose files are opened and read at
/// a time.
const DIRS_PER_BATCH: usize = 128;
/// Maximum number of threads that open files of a universal checkpoint.
const THREADS_MAX: usize = 8;
/// Name of the file with the FP32 values of one weight in a universal checkpoint.
const FP32_FILE: &str = "fp32.pt";

/// Returns true if `path` is the directory of a universal checkpoint, which has a subdirectory
/// [`ZERO_DIR`].
pub(crate) fn is_universal_directory(path: &Path) -> bool {
    path.join(ZERO_DIR).symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// The contents of `optimizer_state.pt` in a universal checkpoint, which apply to all weights.
#[derive(Default)]
struct OptimizerSettings {
    groups: Vec<NumberedParamGroup>,
    /// Maps the index of each flat group to the group's step. Only checkpoints of stage 3 record
    /// steps in this file.
    steps: BTreeMap<u64, f64>,
    stage: Option<u8>,
    /// Whether DeepSpeed wrote the checkpoint. `launch ckpt convert` stores the step of each
    /// weight, which may differ within a group.
    is_of_deepspeed: bool,
    loss_scaler: Json,
}

/// What was read from the files of one weight in a universal checkpoint.
struct ParameterFiles {
    name: String,
    /// Index of the FP32 file in `StoredFiles`, and the view of its tensor.
    fp32: (usize, TensorView),
    /// True if the FP32 file records the shape of the weight.
    is_shaped: bool,
    /// Role, index of the file in `StoredFiles`, and view of each optimizer state.
    states: Vec<(TensorRole, usize, TensorView)>,
    step: Option<f64>,
}

/// Opens the universal checkpoint at `path`. The directory `root` may have a config, a tokenizer
/// and companion files. `notices` come first among the notices of the checkpoint.
pub(crate) fn open_universal(path: &Path, root: &Path, notices: Vec<String>) -> Result<ExternalCheckpoint> {
    let mut tag = TagContents::open_empty(path, notices)?;
    for (&rank, name) in &TagFiles::list_universal(&tag.builder.directory)?.model {
        let mut states = tag.read_file(rank, name, ModelStates::read)?;
        if rank > 0 {
            states.1.drop_parts_needed_from_rank_0_only();
        }
        tag.model.insert(rank, states);
    }
    tag.check_equal_world_sizes()?;
    let mut settings = read_optimizer_settings(&mut tag)?;
    settings.is_of_deepspeed = !Directory::open(root)?.has_entry(CONVERT_RECORD_FILE)?;
    let (parameters, unknown) = read_parameters(&mut tag)?;
    let Some((_, model)) = tag.model.get(&0) else {
        return Err(tag
            .builder
            .missing_part_error("the model file (mp_rank_00_model_states.pt or that of rank 0)"));
    };
    let stage = settings.stage.or(model.stage).unwrap_or(2);
    let groups = settings.groups.iter().map(|g| g.name_parameters(model)).collect();
    collect::add_model_file_facts(&mut tag.builder.facts, model, stage, path);
    collect_tensors(&mut tag, stage, parameters, &settings, &unknown)?;
    let facts = &mut tag.builder.facts;
    facts.kind = "DeepSpeed universal";
    (facts.state.groups, facts.state.loss_scaler) = (groups, settings.loss_scaler);
    companion_files::read_companion_files(facts, &Directory::open(root)?)?;
    tag.builder.finish_with_paths(path, root)
}

/// Reads the hyper-parameters, steps and loss scaler of a universal checkpoint from its file
/// `optimizer_state.pt`.
fn read_optimizer_settings(tag: &mut TagContents) -> Result<OptimizerSettings> {
    if tag.builder.directory.file_size(OPTIMIZER_STATE_FILE)?.is_none() {
        let part = format!("{OPTIMIZER_STATE_FILE}, which contains the hyper-parameters");
        return Err(tag.builder.missing_part_error(part));
    }
    let (index, file) = tag.builder.add_torch_file(OPTIMIZER_STATE_FILE, ALLOWED_GLOBALS)?;
    let root = file.value();
    let damaged = |error: DeepSpeedError| tag.builder.damaged_file_error(OPTIMIZER_STATE_FILE, error);
    let inner = root.get("optimizer_state_dict");
    let groups = match root.get("param_groups") {
        Some(_) => read_param_groups(root),
        None => inner.map_or(Ok(Vec::new()), read_param_groups),
    };
    let groups = groups.map_err(damaged)?;
    let mut steps = BTreeMap::new();
    for (group, state) in
        inner.and_then(|i| i.get("state")).and_then(PickleView::as_pairs).into_iter().flatten()
    {
        let (Some(group), Some(step)) = (group.as_count(), state.get("step")) else { continue };
        match file.parse_tensor(step).map_err(|error| damaged(error.into()))? {
            Some(view) => drop(steps.insert(group, f64::from(tag.builder.store.read_scalar(index, &view)?))),
            None => steps.extend(read_pickled_number(step).map(|s| (group, s))),
        }
    }
    let stage = root.get("zero_stage").and_then(read_zero_stage);
    let loss_scaler = root.get("loss_scaler").map_or(Json::Null, read_loss_scaler);
    Ok(OptimizerSettings { groups, steps, stage, is_of_deepspeed: true, loss_scaler })
}

/// The subdirectory of one weight in a universal checkpoint, with the paths of its files.
struct ParameterDir {
    name: String,
    /// Key and path of each file. The key is the file name without `.pt`, and the path is relative
    /// to the checkpoint directory.
    files: Vec<(String, String)>,
}

/// Lists the subdirectories of a universal checkpoint that contain one weight each, with their
/// files. Also returns the keys of unknown optimizer states.
fn list_parameter_dirs(directory: &Directory) -> Result<(Vec<ParameterDir>, BTreeSet<String>)> {
    let (mut dirs, mut unknown) = (Vec::new(), BTreeSet::new());
    for name in directory.list_subdirectory(ZERO_DIR)? {
        if dirs.len() == TENSORS_MAX {
            let reason = DamageReason::TooManyTensors { limit: TENSORS_MAX };
            return Err(CkptError::damaged(directory.path(), ZERO_DIR, reason));
        }
        let inside = format!("{ZERO_DIR}/{name}");
        if !directory.has_directory(&inside)? {
            continue;
        }
        let mut files = Vec::new();
        for file in directory.list_subdirectory(&inside)? {
            match file.strip_suffix(".pt") {
                Some(key)
                    if file == FP32_FILE || key == "step" || TensorRole::from_torch_key(key).is_some() =>
                {
                    files.push((key.to_owned(), format!("{inside}/{file}")));
                }
                Some(key) => drop(unknown.insert(key.to_owned())),
                None => {}
            }
        }
        dirs.push(ParameterDir { name, files });
    }
    Ok((dirs, unknown))
}

/// Reads the files of every weight in a universal checkpoint, without the elements of its FP32
/// values and optimizer states, and adds the files to the opened checkpoint. Also returns the keys
/// of unknown optimizer states.
fn read_parameters(tag: &mut TagContents) -> Result<(Vec<ParameterFiles>, BTreeSet<String>)> {
    let (dirs, unknown) = list_parameter_dirs(&tag.builder.directory)?;
    let mut parameters = Vec::with_capacity(dirs.len());
    for batch in dirs.chunks(DIRS_PER_BATCH) {
        let paths: Vec<&str> = batch.iter().flat_map(|l| &l.files).map(|(_, path)| path.as_str()).collect();
        let mut opened = open_torch_files(&tag.builder.directory, &paths).into_iter();
        for ParameterDir { name, files } in batch {
            let (mut fp32, mut states, mut step) = (None, Vec::new(), None);
            for ((key, path), file) in files.iter().zip(&mut opened) {
                let (index, view, is_shaped) = read_parameter_file(tag, file?, path, key)?;
                match TensorRole::from_torch_key(key) {
                    Some(role) => states.push((role, index, view)),
                    None if key == "step" => {
                        step = Some(f64::from(tag.builder.store.read_scalar(index, &view)?));
                    }
                    None => fp32 = Some((index, view, is_shaped)),
                }
            }
            let missing = || {
                tag.builder.missing_part_error(MissingPart::File(format!("{ZERO_DIR}/{name}/{FP32_FILE}")))
            };
            let (index, view, is_shaped) = fp32.ok_or_else(missing)?;
            let (name, fp32) = (name.clone(), (index, view));
            parameters.push(ParameterFiles { name, fp32, is_shaped, states, step });
        }
    }
    Ok((parameters, unknown))
}

/// Opens torch files with up to [`THREADS_MAX`] threads, since the latency of the disk limits a
/// single thread that opens thousands of small files. Returns the results in the order of `paths`.
/// Results after the first error may be absent.
fn open_torch_files(directory: &Directory, paths: &[&str]) -> Vec<Result<TorchFile>> {
    let open = |_: &mut (), i: usize| TorchFile::open(directory, paths[i], ALLOWED_GLOBALS);
    parallel::map_indices(THREADS_MAX, paths.len(), || (), open)
}

/// Reads which tensor one open file of a universal checkpoint stores, without its elements, and
/// adds the file to the opened checkpoint. Returns the file's index in `StoredFiles`, the view of
/// its tensor, and true if the file records the shape.
///
/// # Errors
/// Fails if the file has no tensor, or was written under a different name than `key`.
fn read_parameter_file(
    tag: &mut TagContents,
    file: TorchFile,
    path: &str,
    key: &str,
) -> Result<(usize, TensorView, bool)> {
    let damaged = |error: DeepSpeedError| tag.builder.damaged_file_error(path, error);
    // torch names the directory inside of a file after the file that it writes
    if ["fp32", "exp_avg", "exp_avg_sq", "step"].iter().any(|other| file.root == *other && key != *other) {
        return Err(damaged(DeepSpeedError::FilesExchanged(file.root)));
    }
    let root = file.value();
    let (value, is_shaped) = match root.get("param") {
        Some(param) => (param, true),
        None => (root, false),
    };
    let view = file.parse_tensor(value).map_err(|error| damaged(error.into()))?;
    let view = view.ok_or_else(|| damaged(DeepSpeedError::NoTensor))?;
    let index = tag.builder.store.add_file(&tag.builder.directory, path, file.size, file.members);
    Ok((index, view, is_shaped))
}

/// Adds the weights and optimizer states from the files of a universal checkpoint to the list of
/// tensors, and records each weight's update count. Fails if a file of a trained weight is missing
/// or contradicts the shape of the weight.
fn collect_tensors(
    tag: &mut TagContents,
    stage: u8,
    parameters: Vec<ParameterFiles>,
    settings: &OptimizerSettings,
    unknown: &BTreeSet<String>,
) -> Result<()> {
    let (builder, Some((file, model))) = (&mut tag.builder, tag.model.get(&0)) else { return Ok(()) };
    let shapes: KnownShapes<'_> = (0u64..)
        .zip(&model.groups)
        .flat_map(|(g, group)| group.iter().map(move |(name, shape)| (name.as_str(), (g, shape))))
        .collect();
    let roles: BTreeSet<TensorRole> =
        parameters.iter().flat_map(|h| h.states.iter().map(|(r, ..)| *r)).collect();
    let any_step = parameters.iter().any(|h| h.step.is_some());
    let mut untrained = Vec::new();
    for one in &parameters {
        let inside = format!("{ZERO_DIR}/{}", one.name);
        let known = shapes.get(one.name.as_str());
        if known.is_none() && one.states.is_empty() && one.step.is_none() {
            untrained.push(one);
            continue;
        }
        if let Some(role) = roles.iter().find(|r| one.states.iter().all(|(role, ..)| role != *r)) {
            return Err(builder.missing_part_error(MissingPart::File(format!("{inside}/{role}.pt"))));
        }
        if any_step && one.step.is_none() {
            return Err(builder.missing_part_error(MissingPart::File(format!("{inside}/step.pt"))));
        }
        let shape = known.map(|(_, shape)| shape.as_slice());
        let tensors = one.make_tensors(shape);
        builder.entries.extend(tensors.map_err(|error| builder.damaged_file_error(&one.fp32_path(), error))?);
        let step = one.step.or_else(|| known.and_then(|(g, _)| settings.steps.get(g).copied()));
        if let Some(step) = step {
            let step = convert_step_to_integer(step);
            let step =
                step.map_err(|error| builder.damaged_file_error(&inside, DeepSpeedError::Step(error)))?;
            builder.facts.state.steps.insert(one.name.clone(), step);
        }
    }
    if settings.is_of_deepspeed {
        builder.facts.warnings.extend(find_step_contradictions(&parameters, &shapes, settings));
    }
    let present: BTreeSet<&str> = parameters.iter().map(|h| h.name.as_str()).collect();
    if let Some(name) = shapes.keys().filter(|n| !present.contains(*n)).min() {
        return Err(builder.missing_part_error(MissingPart::File(format!("{ZERO_DIR}/{name}"))));
    }
    // slices of frozen weights are in the model files of all ranks, which may not have been copied
    let is_complete =
        stage < 3 || model.frozen_fragments.is_empty() || tag.model.len() as u64 >= u64::from(model.world);
    if is_complete && !model.frozen_fragments.is_empty() {
        collect::collect_frozen_weights(builder, &tag.model, model, stage)?;
    }
    collect::collect_tied_weights(builder, model);
    add_untrained_weights(builder, model, untrained)?;
    collect::collect_module_tensors(builder, *file, model, stage);
    collect::sort_in_module_order(builder, model);
    builder.add_unknown_states_notice(unknown);
    Ok(())
}

/// A map from the name of each trained weight in a universal checkpoint's model file to the index
/// of its parameter group and to its shape.
type KnownShapes<'m> = HashMap<&'m str, (u64, &'m Vec<u64>)>;

/// Returns warnings about weights of a universal checkpoint whose number of updates differs from
/// that of their parameter group. DeepSpeed updates a group as a whole, so such files belong to
/// different checkpoints. Returns at most one warning of each kind per group.
fn find_step_contradictions(
    parameters: &[ParameterFiles],
    known: &KnownShapes<'_>,
    settings: &OptimizerSettings,
) -> Vec<String> {
    let mut first: BTreeMap<u64, (&str, f64)> = BTreeMap::new();
    let (mut reported, mut warnings) = (BTreeSet::new(), Vec::new());
    for one in parameters {
        let (Some(step), Some((group, _))) = (one.step, known.get(one.name.as_str())) else { continue };
        let (other, expected) = *first.entry(*group).or_insert((&one.name, step));
        if other == one.name {
            let recorded = settings.steps.get(group).filter(|recorded| **recorded != step);
            warnings.extend(recorded.map(|recorded| {
                format!(
                    "{ZERO_DIR}/{other}/step.pt is of step {step}, {OPTIMIZER_STATE_FILE} of step {recorded}"
                )
            }));
        } else if step != expected && reported.insert(group) {
            warnings.push(format!(
                "{ZERO_DIR}/{}/step.pt is of step {step}, {ZERO_DIR}/{other}/step.pt of the same parameter group of \
                 step {expected}",
                one.name
            ));
        }
    }
    warnings
}

impl ParameterFiles {
    /// Returns the path of the file with the FP32 values of the weight, relative to the checkpoint
    /// directory.
    fn fp32_path(&self) -> String {
        format!("{ZERO_DIR}/{}/{FP32_FILE}", self.name)
    }

    /// Returns the descriptions of the tensors with the FP32 values and the optimizer states of the
    /// weight. `known` is the shape that the model files record, or `None`. Fails if the shape is
    /// unknown or does not match a tensor.
    fn make_tensors(
        &self,
        known: Option<&[u64]>,
    ) -> std::result::Result<Vec<ExternalTensor>, DeepSpeedError> {
        let stored = self.is_shaped.then_some(self.fp32.1.shape.as_slice());
        let shape = known.or(stored).ok_or(DeepSpeedError::UnknownShape)?;
        let impossible = || LayoutError::ImpossibleShape { name: self.name.clone(), shape: shape.to_vec() };
        let expected = count_elements(shape).ok_or_else(impossible)?;
        let fp32 = std::iter::once((TensorRole::Weight, self.fp32.0, &self.fp32.1));
        let tensor = |(role, file, view): (TensorRole, usize, &TensorView)| {
            let elements = view.element_count();
            if elements != expected {
                let shape = shape.to_vec();
                return Err(LayoutError::TensorLength { role, elements, shape, expected }.into());
            }
            Ok(ExternalTensor::from_view_elements(&self.name, role, shape, file, view, 0..expected))
        };
        fp32.chain(self.states.iter().map(|(r, f, v)| (*r, *f, v))).map(tensor).collect()
    }
}

/// Adds those weights of a universal checkpoint that have no optimizer states to the list of
/// tensors, and records them as frozen weights. Skips weights that are known from the model files.
fn add_untrained_weights(
    builder: &mut ExternalCheckpointBuilder,
    model: &ModelStates,
    untrained: Vec<&ParameterFiles>,
) -> Result<()> {
    let ties = builder.facts.state.ties.iter().map(|tie| tie.alias.clone());
    let known: HashSet<String> = builder.weights().map(|(name, _)| name.to_owned()).chain(ties).collect();
    let in_module: HashMap<&str, &TensorView> = model.module.iter().map(|(n, v)| (n.as_str(), v)).collect();
    for one in untrained.into_iter().filter(|one| !known.contains(&one.name)) {
        let shape = in_module.get(one.name.as_str()).map(|view| view.shape.as_slice());
        let shape = shape.filter(|s| count_elements(s) == Some(one.fp32.1.element_count()));
        let tensors = one.make_tensors(shape);
        builder.entries.extend(tensors.map_err(|error| builder.damaged_file_error(&one.fp32_path(), error))?);
        builder.facts.state.frozen.push(one.name.clone());
    }
    Ok(())
}

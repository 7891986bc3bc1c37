//! Reads DeepSpeed's universal checkpoints, which have
//! `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt` for each weight, and copies of the model files.
//!
//! If DeepSpeed converted a checkpoint of stage 1 or 2, the files of a weight are dicts with a
//! shaped `param`. If DeepSpeed converted a checkpoint of stage 3, the files are flat tensors whose
//! shapes are in the model files. Frozen weights and buffers are in the model files.
use super::collect::CollectedTensors;
use super::file_names::TagFiles;
use super::states::{GLOBALS, ModelStates, read_param_groups};
use super::tag::TagContents;
use crate::catalog::{
    ExternalCheckpoint, ExternalTensor, ParamGroupInfo, StoredFile, TensorPart, parse_optimizer_state_role,
    to_whole_step,
};
use crate::codec::disk::Directory;
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TensorView, TorchFile};
use crate::error::{CkptError, DeepSpeedError, LayoutError, MissingPart, Result, format_names};
use crate::layout::hf::weights::parse_number;
use crate::tensor::{TensorRole, count_elements};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Name of the directory with one subdirectory per weight.
const ZERO_DIR: &str = "zero";
/// Path of the file with the hyper-parameters, the steps and the loss scaler.
const OPTIMIZER_STATE_FILE: &str = "zero/optimizer_state.pt";
/// Number of subdirectories whose files are opened in one batch.
const BATCH_DIRS: usize = 128;
/// The largest number of threads that open files.
const THREADS_MAX: usize = 8;
/// Name of the file with the FP32 values of a weight.
const FP32_FILE: &str = "fp32.pt";

/// Returns true if `path` is the directory of a universal checkpoint, which has a subdirectory
/// [`ZERO_DIR`].
pub(crate) fn is_universal_directory(path: &Path) -> bool {
    path.join(ZERO_DIR).symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// The contents of `optimizer_state.pt`, which apply to all weights.
#[derive(Default)]
struct OptimizerSettings {
    groups: Vec<crate::layout::deepspeed::states::NumberedGroup>,
    /// Step of each flat group, by index. Only checkpoints of stage 3 record steps in this file.
    steps: BTreeMap<u64, f64>,
    stage: Option<u8>,
    loss_scaler: Json,
}

/// The contents of the files of one weight.
struct ParameterFiles {
    name: String,
    /// Index of the FP32 file in the store, and the view of its tensor.
    fp32: (usize, TensorView),
    /// True if the FP32 file records the shape of the weight.
    is_shaped: bool,
    /// Role, index of the file in the store, and view of each optimizer state.
    states: Vec<(TensorRole, usize, TensorView)>,
    step: Option<f64>,
}

/// Opens the universal checkpoint at `path`. The directory `root` may have a config, a tokenizer
/// and companion files. `notices` come first among the notices of the checkpoint.
pub(crate) fn open_universal(path: &Path, root: &Path, notices: Vec<String>) -> Result<ExternalCheckpoint> {
    let mut tag = TagContents::open_empty(path)?;
    for (&rank, name) in &TagFiles::list_universal(&tag.directory)?.model {
        let states = tag.read_file(rank, name, ModelStates::read)?;
        tag.model.insert(rank, states);
    }
    let settings = read_settings(&mut tag)?;
    let (parameters, unknown) = read_parameters(&mut tag)?;
    let Some((_, model)) = tag.model.get(&0) else {
        return Err(tag.missing("the model file (mp_rank_00_model_states.pt or that of rank 0)"));
    };
    let stage = settings.stage.or(model.stage).unwrap_or(2);
    let (mut found, steps) = collect_tensors(&tag, model, stage, parameters, &settings, &unknown)?;
    let names = |g: u64| model.groups.get(g as usize).into_iter().flatten().map(|(n, _)| n.clone());
    let groups: Vec<ParamGroupInfo> = settings
        .groups
        .iter()
        .map(|g| ParamGroupInfo {
            hyper: g.hyper.clone(),
            names: g.ids.iter().flat_map(|&i| names(i)).collect(),
        })
        .collect();
    let mut facts = found.take_facts(model, stage, path, notices);
    facts.kind = "DeepSpeed universal";
    (facts.state.groups, facts.state.steps) = (groups, steps);
    facts.state.loss_scaler = settings.loss_scaler;
    found.add_companion_facts(&mut facts, root)?;
    ExternalCheckpoint::new(path, root, facts, tag.store, found.entries)
}

/// Reads the contents of `optimizer_state.pt` and adds the file to the store of the tag.
fn read_settings(tag: &mut TagContents) -> Result<OptimizerSettings> {
    if tag.directory.file_size(OPTIMIZER_STATE_FILE)?.is_none() {
        return Err(tag.missing(format!("{OPTIMIZER_STATE_FILE}, which contains the hyper-parameters")));
    }
    let file = TorchFile::open(&tag.directory, OPTIMIZER_STATE_FILE, GLOBALS)?;
    let root = file.value();
    let damaged = |error: DeepSpeedError| CkptError::damaged(&tag.path, OPTIMIZER_STATE_FILE, error);
    let inner = root.get("optimizer_state_dict");
    let groups = match root.get("param_groups") {
        Some(_) => read_param_groups(root),
        None => inner.map_or(Ok(Vec::new()), read_param_groups),
    };
    let groups = groups.map_err(damaged)?;
    let index = tag.store.files.len();
    let mut steps = BTreeMap::new();
    let mut tensors = Vec::new();
    for (group, state) in
        inner.and_then(|i| i.get("state")).and_then(PickleView::as_pairs).into_iter().flatten()
    {
        let (Some(group), Some(step)) = (group.as_count(), state.get("step")) else { continue };
        match file.parse_tensor(step).map_err(|error| damaged(error.into()))? {
            Some(view) => tensors.push((group, view)),
            None => steps.extend(parse_number(step).map(|s| (group, s))),
        }
    }
    let stage = root.get("zero_stage").and_then(crate::layout::deepspeed::states::read_zero_stage);
    let loss_scaler =
        root.get("loss_scaler").map_or(Json::Null, crate::layout::deepspeed::states::read_loss_scaler);
    tag.store.files.push(StoredFile::from_torch_file(
        tag.directory.clone(),
        OPTIMIZER_STATE_FILE.to_owned(),
        file,
    ));
    for (group, view) in tensors {
        steps.insert(group, f64::from(tag.store.read_scalar(index, &view)?));
    }
    Ok(OptimizerSettings { groups, steps, stage, loss_scaler })
}

/// The subdirectory of one weight, with the paths of its files.
struct ParameterDir {
    name: String,
    /// Key and path of each file. The key is the file name without `.pt`, and the path is relative
    /// to the checkpoint directory.
    files: Vec<(String, String)>,
}

/// Lists the subdirectories of the weights with their files of known keys. Also returns the keys of
/// unknown optimizer states.
fn list_parameter_dirs(tag: &TagContents) -> Result<(Vec<ParameterDir>, BTreeSet<String>)> {
    let (mut dirs, mut unknown) = (Vec::new(), BTreeSet::new());
    for name in tag.directory.list_subdirectory(ZERO_DIR)? {
        let inside = format!("{ZERO_DIR}/{name}");
        if !tag.directory.has_directory(&inside)? {
            continue;
        }
        let mut files = Vec::new();
        for file in tag.directory.list_subdirectory(&inside)? {
            match file.strip_suffix(".pt") {
                Some(key)
                    if file == FP32_FILE || key == "step" || parse_optimizer_state_role(key).is_some() =>
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

/// Reads the files of every weight and adds them to the store of the tag. Also returns the keys of
/// unknown optimizer states.
fn read_parameters(tag: &mut TagContents) -> Result<(Vec<ParameterFiles>, BTreeSet<String>)> {
    let (dirs, unknown) = list_parameter_dirs(tag)?;
    let mut parameters = Vec::with_capacity(dirs.len());
    for batch in dirs.chunks(BATCH_DIRS) {
        let paths: Vec<&str> = batch.iter().flat_map(|l| &l.files).map(|(_, path)| path.as_str()).collect();
        let mut opened = open_torch_files(&tag.directory, &paths).into_iter();
        for ParameterDir { name, files } in batch {
            let fp32 = (0, TensorView::scalar_placeholder());
            let mut parameter =
                ParameterFiles { name: name.clone(), fp32, is_shaped: false, states: Vec::new(), step: None };
            let mut has_fp32 = false;
            for ((key, path), file) in files.iter().zip(&mut opened) {
                let (index, view, is_shaped) = read_parameter_file(tag, file?, path, key)?;
                match parse_optimizer_state_role(key) {
                    Some(role) => parameter.states.push((role, index, view)),
                    None if key == "step" => {
                        parameter.step = Some(f64::from(tag.store.read_scalar(index, &view)?))
                    }
                    None => {
                        (parameter.fp32, parameter.is_shaped, has_fp32) = ((index, view), is_shaped, true)
                    }
                }
            }
            if !has_fp32 {
                return Err(tag.missing(MissingPart::File(format!("{ZERO_DIR}/{name}/{FP32_FILE}"))));
            }
            parameters.push(parameter);
        }
    }
    Ok((parameters, unknown))
}

/// Opens files with up to [`THREADS_MAX`] threads, since the latency of the disk limits a single
/// thread that opens thousands of small files. Returns the results in the order of `paths`.
fn open_torch_files(directory: &Directory, paths: &[&str]) -> Vec<Result<TorchFile>> {
    let next = AtomicUsize::new(0);
    let opened: Vec<OnceLock<Result<TorchFile>>> = paths.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let (Some(path), Some(slot)) = (paths.get(i), opened.get(i)) else { return };
            // `set` cannot fail, since each slot is set once
            let _ = slot.set(TorchFile::open(directory, path, GLOBALS));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS_MAX.min(paths.len()) {
            scope.spawn(work);
        }
        work();
    });
    let not_opened = || Err(CkptError::internal("a thread ended early"));
    opened.into_iter().map(|slot| slot.into_inner().unwrap_or_else(not_opened)).collect()
}

/// Reads one opened file of a weight and adds it to the store. Returns the file's index in the
/// store, the view of its tensor, and true if the file records the shape.
///
/// # Errors
/// Fails if the file has no tensor, or was written under another name than `key`.
fn read_parameter_file(
    tag: &mut TagContents,
    file: TorchFile,
    path: &str,
    key: &str,
) -> Result<(usize, TensorView, bool)> {
    let damaged = |error: DeepSpeedError| CkptError::damaged(&tag.path, path, error);
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
    tag.store.files.push(StoredFile::from_torch_file(tag.directory.clone(), path.to_owned(), file));
    Ok((tag.store.files.len() - 1, view, is_shaped))
}

/// Collects the trained weights from their files and the other tensors from the model files. Also
/// returns the number of updates of each weight. Fails if a file of a trained weight is missing or
/// contradicts the shape of the weight.
fn collect_tensors(
    tag: &TagContents,
    model: &ModelStates,
    stage: u8,
    parameters: Vec<ParameterFiles>,
    settings: &OptimizerSettings,
    unknown: &BTreeSet<String>,
) -> Result<(CollectedTensors, BTreeMap<String, u64>)> {
    let mut found = CollectedTensors::default();
    let mut steps = BTreeMap::new();
    let shapes: HashMap<&str, (u64, &Vec<u64>)> = (0u64..)
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
            return Err(tag.missing(MissingPart::File(format!("{inside}/{role}.pt"))));
        }
        if any_step && one.step.is_none() {
            return Err(tag.missing(MissingPart::File(format!("{inside}/step.pt"))));
        }
        add_parameter(&mut found, one, known.map(|(_, shape)| shape.as_slice()))
            .map_err(|error| CkptError::damaged(&tag.path, format!("{inside}/{FP32_FILE}"), error))?;
        let step = one.step.or_else(|| known.and_then(|(g, _)| settings.steps.get(g).copied()));
        if let Some(step) = step {
            let step = to_whole_step(step).map_err(|error| {
                CkptError::damaged(&tag.path, inside.as_str(), DeepSpeedError::Step(error))
            })?;
            steps.insert(one.name.clone(), step);
        }
    }
    let present: BTreeSet<&str> = parameters.iter().map(|h| h.name.as_str()).collect();
    if let Some(name) = shapes.keys().filter(|n| !present.contains(*n)).min() {
        return Err(tag.missing(MissingPart::File(format!("{ZERO_DIR}/{name}"))));
    }
    add_untrained_tensors(tag, model, stage, &mut found, untrained)?;
    if !unknown.is_empty() {
        let unknown: Vec<String> = unknown.iter().cloned().collect();
        found.notices.push(format!("ignoring unknown optimizer states: {}", format_names(&unknown)));
    }
    Ok((found, steps))
}

/// Adds the FP32 values and the optimizer states of a weight to `found`. `known` is the shape that
/// the model files record, or `None`. Fails if the shape is unknown or does not match a tensor.
fn add_parameter(
    found: &mut CollectedTensors,
    parameter: &ParameterFiles,
    known: Option<&[u64]>,
) -> std::result::Result<(), DeepSpeedError> {
    let shape = match known {
        Some(shape) => shape,
        None if parameter.is_shaped => parameter.fp32.1.shape.as_slice(),
        None => return Err(DeepSpeedError::UnknownShape),
    };
    let count = count_elements(shape).ok_or_else(|| LayoutError::ImpossibleShape {
        name: parameter.name.clone(),
        shape: shape.to_vec(),
    })?;
    let fp32 = std::iter::once((TensorRole::Weight, parameter.fp32.0, &parameter.fp32.1));
    for (role, file, view) in fp32.chain(parameter.states.iter().map(|(r, f, v)| (*r, *f, v))) {
        if view.elements() != count {
            let (elements, shape) = (view.elements(), shape.to_vec());
            return Err(LayoutError::TensorLength { role, elements, shape, expected: count }.into());
        }
        let parts = if count > 0 { vec![TensorPart::new(file, view, 0..count, 0)] } else { Vec::new() };
        found.entries.push(ExternalTensor::from_parts(
            &parameter.name,
            role,
            view.dtype,
            shape.to_vec(),
            parts,
        ));
    }
    Ok(())
}

/// Adds the tensors that are not trained to `found`. These are the frozen weights, buffers and ties
/// of the model files, and the weights `untrained`, which have files but no optimizer states.
fn add_untrained_tensors(
    tag: &TagContents,
    model: &ModelStates,
    stage: u8,
    found: &mut CollectedTensors,
    untrained: Vec<&ParameterFiles>,
) -> Result<()> {
    // slices of frozen weights are in the model files of all ranks, which may not have been copied
    let is_complete =
        stage < 3 || model.frozen_fragments.is_empty() || tag.model.len() as u64 >= u64::from(model.world);
    if is_complete && !model.frozen_fragments.is_empty() {
        found.collect_frozen(tag, model, stage)?;
    }
    found.collect_ties(model);
    for one in untrained {
        let taken =
            found.entries.iter().any(|e| e.info.role == TensorRole::Weight && e.info.name == one.name);
        if taken || found.ties.iter().any(|t| t.alias == one.name) {
            continue;
        }
        let known = model.module.iter().find(|(n, _)| *n == one.name).map(|(_, v)| v.shape.clone());
        let shape = known.filter(|s| count_elements(s) == Some(one.fp32.1.elements()));
        let shape = shape.or(one.is_shaped.then(|| one.fp32.1.shape.clone()));
        let damaged = |error: DeepSpeedError| {
            CkptError::damaged(&tag.path, format!("{ZERO_DIR}/{}/{FP32_FILE}", one.name), error)
        };
        let shape = shape.ok_or_else(|| damaged(DeepSpeedError::UnknownShape))?;
        add_parameter(found, one, Some(&shape)).map_err(damaged)?;
        found.frozen.push(one.name.clone());
    }
    if let Some((file, _)) = tag.model.get(&0) {
        found.collect_module(*file, model, stage);
    }
    found.sort_by_module(model);
    Ok(())
}

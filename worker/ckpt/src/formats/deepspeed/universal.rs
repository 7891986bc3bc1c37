//! Reads DeepSpeed's universal checkpoints: `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt` per
//! weight, and copies of the model files.
//!
//! Converted from stage 1 or 2, the files are dicts with a shaped `param`. Converted from stage 3,
//! they are flat tensors whose shapes are in the model files. Frozen weights and buffers are in the
//! model files.
use super::collect::CollectedTensors;
use super::error::{DeepSpeedError, LayoutError};
use super::file_names::TagFiles;
use super::states::{GLOBALS, ModelStates, param_groups};
use super::{Tag, add_companions};
use crate::catalog::{TensorRole, elements};
use crate::disk::Directory;
use crate::error::{CkptError, MissingPart, Result, list_some};
use crate::external::builder::{optimizer_state_role, whole_step};
use crate::external::store::{StoredFile, TensorPart};
use crate::external::{ExternalCheckpoint, ExternalFacts, ExternalTensor};
use crate::formats::torch_file::{TensorView, TorchFile};
use crate::formats::weights::number;
use crate::pickle::View;
use crate::state::ParamGroupInfo;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The directory with one subdirectory per weight.
const ZERO: &str = "zero";
const STATE: &str = "zero/optimizer_state.pt";
/// Subdirectories whose files are opened in one batch.
const BATCH_DIRS: usize = 128;
/// Threads that open files.
const THREADS: usize = 8;
const FP32: &str = "fp32.pt";

/// True for the directory of a universal checkpoint.
pub(crate) fn is_universal(path: &Path) -> bool {
    path.join(ZERO).symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// The contents of `optimizer_state.pt`.
#[derive(Default)]
struct OptimizerSettings {
    groups: Vec<super::states::NumberedGroup>,
    /// Steps of the flat groups (stage 3).
    steps: BTreeMap<u64, f64>,
    stage: Option<u8>,
    loss_scaler: Json,
}

/// The files of one weight.
struct Parameter {
    name: String,
    fp32: (usize, TensorView),
    /// The FP32 file records the shape.
    is_shaped: bool,
    states: Vec<(TensorRole, usize, TensorView)>,
    step: Option<f64>,
}

/// Opens the universal checkpoint at `path`; `root` may have a config and other parts of a training
/// state.
pub(crate) fn open(path: &Path, root: &Path, notices: Vec<String>) -> Result<ExternalCheckpoint> {
    let mut tag = Tag::empty(path)?;
    for (&rank, name) in &TagFiles::list_universal(&tag.directory)?.model {
        let states = tag.read(rank, name, ModelStates::read)?;
        tag.model.insert(rank, states);
    }
    let settings = read_settings(&mut tag)?;
    let (parameters, unknown) = read_parameters(&mut tag)?;
    let Some((_, model)) = tag.model.get(&0) else {
        return Err(tag.missing("the model file (mp_rank_00_model_states.pt or that of rank 0)"));
    };
    let stage = settings.stage.or(model.stage).unwrap_or(2);
    let (found, steps) = collect(&tag, model, stage, parameters, &settings, &unknown)?;
    let names = |g: u64| model.groups.get(g as usize).into_iter().flatten().map(|(n, _)| n.clone());
    let groups: Vec<ParamGroupInfo> = settings
        .groups
        .iter()
        .map(|g| ParamGroupInfo {
            hyper: g.hyper.clone(),
            names: g.ids.iter().flat_map(|&i| names(i)).collect(),
        })
        .collect();
    let facts = ExternalFacts {
        kind: "DeepSpeed universal",
        writer: format!("DeepSpeed {}", model.version.as_deref().unwrap_or("of unknown version")),
        tag: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        step: model.step,
        samples: model.samples,
        world: Some(model.world),
        stage: Some(stage),
        groups,
        steps,
        scheduler: model.scheduler.clone(),
        loss_scaler: settings.loss_scaler,
        ties: found.ties,
        frozen: found.frozen,
        lost: found.lost,
        notices: notices.into_iter().chain(found.notices).collect(),
        ..ExternalFacts::default()
    };
    let facts = add_companions(facts, root, &found.entries)?;
    ExternalCheckpoint::new(path, root, facts, tag.store, found.entries)
}

/// Reads `optimizer_state.pt`.
fn read_settings(tag: &mut Tag) -> Result<OptimizerSettings> {
    if tag.directory.size_of(STATE)?.is_none() {
        return Err(tag.missing(format!("{STATE}, which contains the hyper-parameters")));
    }
    let file = TorchFile::open(&tag.directory, STATE, GLOBALS)?;
    let root = file.value();
    let damaged = |error: DeepSpeedError| CkptError::damaged(&tag.path, STATE, error);
    let inner = root.get("optimizer_state_dict");
    let groups = match root.get("param_groups") {
        Some(_) => param_groups(root),
        None => inner.map_or(Ok(Vec::new()), param_groups),
    };
    let groups = groups.map_err(damaged)?;
    let index = tag.store.files.len();
    let mut steps = BTreeMap::new();
    let mut tensors = Vec::new();
    for (group, state) in inner.and_then(|i| i.get("state")).and_then(View::pairs).into_iter().flatten() {
        let (Some(group), Some(step)) = (group.count(), state.get("step")) else { continue };
        match file.tensor(step).map_err(|error| damaged(error.into()))? {
            Some(view) => tensors.push((group, view)),
            None => steps.extend(number(step).map(|s| (group, s))),
        }
    }
    let stage = root.get("zero_stage").and_then(super::states::stage_of);
    let loss_scaler = root.get("loss_scaler").map_or(Json::Null, super::states::scaler);
    tag.store.files.push(StoredFile::torch(tag.directory.clone(), STATE.to_owned(), file));
    for (group, view) in tensors {
        steps.insert(group, f64::from(tag.store.scalar(index, &view)?));
    }
    Ok(OptimizerSettings { groups, steps, stage, loss_scaler })
}

/// The subdirectory of a weight, with the keys and names of its files.
struct ParameterDir {
    name: String,
    files: Vec<(String, String)>,
}

/// Lists the subdirectories of the weights, and the keys of unknown states.
fn list_parameter_dirs(tag: &Tag) -> Result<(Vec<ParameterDir>, BTreeSet<String>)> {
    let (mut dirs, mut unknown) = (Vec::new(), BTreeSet::new());
    for name in tag.directory.names_in(ZERO)? {
        let inside = format!("{ZERO}/{name}");
        if !tag.directory.has_directory(&inside)? {
            continue;
        }
        let mut files = Vec::new();
        for file in tag.directory.names_in(&inside)? {
            match file.strip_suffix(".pt") {
                Some(key) if file == FP32 || key == "step" || optimizer_state_role(key).is_some() => {
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

/// Reads the files of every weight.
fn read_parameters(tag: &mut Tag) -> Result<(Vec<Parameter>, BTreeSet<String>)> {
    let (dirs, unknown) = list_parameter_dirs(tag)?;
    let mut parameters = Vec::with_capacity(dirs.len());
    for batch in dirs.chunks(BATCH_DIRS) {
        let paths: Vec<&str> = batch.iter().flat_map(|l| &l.files).map(|(_, path)| path.as_str()).collect();
        let mut opened = open_all(&tag.directory, &paths).into_iter();
        for ParameterDir { name, files } in batch {
            let fp32 = (0, TensorView::scalar());
            let mut parameter =
                Parameter { name: name.clone(), fp32, is_shaped: false, states: Vec::new(), step: None };
            let mut has_fp32 = false;
            for ((key, path), file) in files.iter().zip(&mut opened) {
                let (index, view, is_shaped) = read_parameter_file(tag, file?, path, key)?;
                match optimizer_state_role(key) {
                    Some(role) => parameter.states.push((role, index, view)),
                    None if key == "step" => {
                        parameter.step = Some(f64::from(tag.store.scalar(index, &view)?))
                    }
                    None => {
                        (parameter.fp32, parameter.is_shaped, has_fp32) = ((index, view), is_shaped, true)
                    }
                }
            }
            if !has_fp32 {
                return Err(tag.missing(MissingPart::File(format!("{ZERO}/{name}/{FP32}"))));
            }
            parameters.push(parameter);
        }
    }
    Ok((parameters, unknown))
}

/// Opens files in parallel, since opening thousands of small files is limited by the disk.
fn open_all(directory: &Directory, paths: &[&str]) -> Vec<Result<TorchFile>> {
    let next = AtomicUsize::new(0);
    let opened: Vec<OnceLock<Result<TorchFile>>> = paths.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let (Some(path), Some(place)) = (paths.get(i), opened.get(i)) else { return };
            // each cell is set once
            let _ = place.set(TorchFile::open(directory, path, GLOBALS));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS.min(paths.len()) {
            scope.spawn(work);
        }
        work();
    });
    let not_opened = || Err(CkptError::internal("a thread ended early"));
    opened.into_iter().map(|place| place.into_inner().unwrap_or_else(not_opened)).collect()
}

/// Reads one file; returns the index of the file, the tensor, and whether the file records the
/// shape.
fn read_parameter_file(
    tag: &mut Tag,
    file: TorchFile,
    path: &str,
    key: &str,
) -> Result<(usize, TensorView, bool)> {
    let damaged = |error: DeepSpeedError| CkptError::damaged(&tag.path, path, error);
    // the directory inside of a torch file is named for the file that was written
    if ["fp32", "exp_avg", "exp_avg_sq", "step"].iter().any(|other| file.root == *other && key != *other) {
        return Err(damaged(DeepSpeedError::FilesExchanged(file.root)));
    }
    let root = file.value();
    let (value, is_shaped) = match root.get("param") {
        Some(param) => (param, true),
        None => (root, false),
    };
    let view = file.tensor(value).map_err(|error| damaged(error.into()))?;
    let view = view.ok_or_else(|| damaged(DeepSpeedError::NoTensor))?;
    tag.store.files.push(StoredFile::torch(tag.directory.clone(), path.to_owned(), file));
    Ok((tag.store.files.len() - 1, view, is_shaped))
}

/// Collects all tensors: trained weights from their files, the others from the model files; returns
/// the step of each weight too.
fn collect(
    tag: &Tag,
    model: &ModelStates,
    stage: u8,
    parameters: Vec<Parameter>,
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
        let inside = format!("{ZERO}/{}", one.name);
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
            .map_err(|error| CkptError::damaged(&tag.path, format!("{inside}/{FP32}"), error))?;
        let step = one.step.or_else(|| known.and_then(|(g, _)| settings.steps.get(g).copied()));
        if let Some(step) = step {
            let step = whole_step(step).map_err(|error| {
                CkptError::damaged(&tag.path, inside.as_str(), DeepSpeedError::Step(error))
            })?;
            steps.insert(one.name.clone(), step);
        }
    }
    let present: BTreeSet<&str> = parameters.iter().map(|h| h.name.as_str()).collect();
    if let Some(name) = shapes.keys().filter(|n| !present.contains(*n)).min() {
        return Err(tag.missing(MissingPart::File(format!("{ZERO}/{name}"))));
    }
    add_untrained(tag, model, stage, &mut found, untrained)?;
    if !unknown.is_empty() {
        let unknown: Vec<String> = unknown.iter().cloned().collect();
        found.notices.push(format!("ignoring unknown optimizer states: {}", list_some(&unknown)));
    }
    Ok((found, steps))
}

/// Adds the entries of a weight; `known` is its shape in the model files.
fn add_parameter(
    found: &mut CollectedTensors,
    parameter: &Parameter,
    known: Option<&[u64]>,
) -> std::result::Result<(), DeepSpeedError> {
    let shape = match known {
        Some(shape) => shape,
        None if parameter.is_shaped => parameter.fp32.1.shape.as_slice(),
        None => return Err(DeepSpeedError::UnknownShape),
    };
    let count = elements(shape).ok_or_else(|| LayoutError::ImpossibleShape {
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

/// Adds what is not trained: frozen weights, buffers and ties of the model files, and weights
/// without states.
fn add_untrained(
    tag: &Tag,
    model: &ModelStates,
    stage: u8,
    found: &mut CollectedTensors,
    untrained: Vec<&Parameter>,
) -> Result<()> {
    // slices of frozen weights are in the model files of all ranks, which may not have been copied
    let is_complete =
        stage < 3 || model.frozen.is_empty() || tag.model.len() as u64 >= u64::from(model.world);
    if is_complete && !model.frozen.is_empty() {
        found.collect_frozen(tag, model, stage)?;
    }
    found.ties(model);
    for one in untrained {
        let taken =
            found.entries.iter().any(|e| e.info.role == TensorRole::Weight && e.info.name == one.name);
        if taken || found.ties.iter().any(|t| t.alias == one.name) {
            continue;
        }
        let known = model.module.iter().find(|(n, _)| *n == one.name).map(|(_, v)| v.shape.clone());
        let shape = known.filter(|s| elements(s) == Some(one.fp32.1.elements()));
        let shape = shape.or(one.is_shaped.then(|| one.fp32.1.shape.clone()));
        let damaged = |error: DeepSpeedError| {
            CkptError::damaged(&tag.path, format!("{ZERO}/{}/{FP32}", one.name), error)
        };
        let shape = shape.ok_or_else(|| damaged(DeepSpeedError::UnknownShape))?;
        add_parameter(found, one, Some(&shape)).map_err(damaged)?;
        found.frozen.push(one.name.clone());
    }
    if let Some((file, _)) = tag.model.get(&0) {
        found.module(*file, model, stage);
    }
    found.in_module_order(model);
    Ok(())
}

//! DeepSpeed's universal checkpoints: `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt` per weight, and copies of model files.
//!
//! Written from stage 1 or 2 the files are dicts with a shaped `param`; from stage 3 bare flat tensors, whose shapes only
//! the model files say. Frozen weights and buffers are in the model files.
use super::collect::Collected;
use super::names::Names;
use super::states::{GLOBALS, ModelStates, groups_of};
use super::{Tag, beside_facts};
use crate::catalog::{Role, elements};
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use crate::external::draft::{role_of, some, whole_step};
use crate::external::store::{Part, StoredFile};
use crate::external::{Entry, Foreign, ForeignFacts};
use crate::formats::torch_file::{TensorView, TorchFile};
use crate::formats::weights::number;
use crate::pickle::View;
use crate::state::Group;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Folder of the weights' folders.
const ZERO: &str = "zero";
const STATE: &str = "zero/optimizer_state.pt";
/// Weights' folders whose files are open at a time.
const FOLDERS_AT_A_TIME: usize = 128;
/// Threads that open files.
const THREADS: usize = 8;
const FP32: &str = "fp32.pt";

/// True for a universal checkpoint's own folder.
pub(crate) fn is(path: &Path) -> bool {
    path.join(ZERO).symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// What the optimizer's own file says.
#[derive(Default)]
struct Whole {
    groups: Vec<super::states::NumberedGroup>,
    /// Steps of flat groups, of stage 3.
    steps: BTreeMap<u64, f64>,
    stage: Option<u8>,
    loss_scaler: Json,
}

/// A weight's folder.
struct Held {
    name: String,
    fp32: (usize, TensorView),
    /// The fp32 file says its shape.
    shaped: bool,
    states: Vec<(Role, usize, TensorView)>,
    step: Option<f64>,
}

/// Opens the universal checkpoint in `path`; `beside` may hold a config and the rest of a training state.
pub(crate) fn open(path: &Path, beside: &Path, notices: Vec<String>) -> Result<Foreign> {
    let mut tag = Tag::empty(path)?;
    for (&rank, name) in &Names::of_universal(&tag.folder)?.model {
        let states = tag.read(rank, name, ModelStates::read)?;
        tag.model.insert(rank, states);
    }
    let whole = whole(&mut tag)?;
    let (held, unknown) = held(&mut tag)?;
    let Some((_, model)) = tag.model.get(&0) else {
        return Err(tag.missing("its model file (mp_rank_00_model_states.pt or that of rank 0)".into()));
    };
    let stage = whole.stage.or(model.stage).unwrap_or(2);
    let (found, steps) = collect(&tag, model, stage, held, &whole, &unknown)?;
    let names = |g: u64| model.groups.get(g as usize).into_iter().flatten().map(|(n, _)| n.clone());
    let groups: Vec<Group> = whole
        .groups
        .iter()
        .map(|g| Group { hyper: g.hyper.clone(), names: g.ids.iter().flat_map(|&i| names(i)).collect() })
        .collect();
    let facts = ForeignFacts {
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
        loss_scaler: whole.loss_scaler,
        ties: found.ties,
        frozen: found.frozen,
        lost: found.lost,
        notices: notices.into_iter().chain(found.notices).collect(),
        ..ForeignFacts::default()
    };
    let facts = beside_facts(facts, beside, &found.entries)?;
    Foreign::new(path, beside, facts, tag.store, found.entries)
}

/// Reads `optimizer_state.pt`.
fn whole(tag: &mut Tag) -> Result<Whole> {
    if tag.folder.size_of(STATE)?.is_none() {
        return Err(tag.missing(format!("{STATE}, which holds the optimizer's settings,")));
    }
    let file = TorchFile::open(&tag.folder, STATE, GLOBALS)?;
    let root = file.value();
    let damaged = |why: String| CkptError::damaged(&tag.path, STATE, why);
    let inner = root.get("optimizer_state_dict");
    let groups = match root.get("param_groups") {
        Some(_) => groups_of(root),
        None => inner.map_or(Ok(Vec::new()), groups_of),
    };
    let groups = groups.map_err(damaged)?;
    let index = tag.store.files.len();
    let mut steps = BTreeMap::new();
    let mut tensors = Vec::new();
    for (group, state) in inner.and_then(|i| i.get("state")).and_then(View::pairs).into_iter().flatten() {
        let (Some(group), Some(step)) = (group.count(), state.get("step")) else { continue };
        match file.tensor(step).map_err(damaged)? {
            Some(view) => tensors.push((group, view)),
            None => steps.extend(number(step).map(|s| (group, s))),
        }
    }
    let stage = root.get("zero_stage").and_then(super::states::stage_of);
    let loss_scaler = root.get("loss_scaler").map_or(Json::Null, super::states::scaler);
    tag.store.files.push(StoredFile::torch(tag.folder.clone(), STATE.to_owned(), file));
    for (group, view) in tensors {
        steps.insert(group, f64::from(tag.store.scalar(index, &view)?));
    }
    Ok(Whole { groups, steps, stage, loss_scaler })
}

/// A weight's folder and the files in it that are read: their keys and names.
struct Listed {
    name: String,
    files: Vec<(String, String)>,
}

/// The weights' folders, and states that aren't understood.
fn listed(tag: &Tag) -> Result<(Vec<Listed>, BTreeSet<String>)> {
    let (mut all, mut unknown) = (Vec::new(), BTreeSet::new());
    for name in tag.folder.names_in(ZERO)? {
        let inside = format!("{ZERO}/{name}");
        if !tag.folder.has_folder(&inside)? {
            continue;
        }
        let mut files = Vec::new();
        for file in tag.folder.names_in(&inside)? {
            match file.strip_suffix(".pt") {
                Some(key) if file == FP32 || key == "step" || role_of(key).is_some() => {
                    files.push((key.to_owned(), format!("{inside}/{file}")));
                }
                Some(key) => drop(unknown.insert(key.to_owned())),
                None => {}
            }
        }
        all.push(Listed { name, files });
    }
    Ok((all, unknown))
}

/// Reads the weights' folders.
fn held(tag: &mut Tag) -> Result<(Vec<Held>, BTreeSet<String>)> {
    let (listed, unknown) = listed(tag)?;
    let mut all = Vec::with_capacity(listed.len());
    for some in listed.chunks(FOLDERS_AT_A_TIME) {
        let paths: Vec<&str> = some.iter().flat_map(|l| &l.files).map(|(_, path)| path.as_str()).collect();
        let mut opened = open_all(&tag.folder, &paths).into_iter();
        for Listed { name, files } in some {
            let fp32 = (0, TensorView::scalar());
            let mut held = Held { name: name.clone(), fp32, shaped: false, states: Vec::new(), step: None };
            let mut has_fp32 = false;
            for ((key, path), file) in files.iter().zip(&mut opened) {
                let (index, view, shaped) = one(tag, file?, path, key)?;
                match role_of(key) {
                    Some(role) => held.states.push((role, index, view)),
                    None if key == "step" => held.step = Some(f64::from(tag.store.scalar(index, &view)?)),
                    None => (held.fp32, held.shaped, has_fp32) = ((index, view), shaped, true),
                }
            }
            if !has_fp32 {
                return Err(tag.missing(format!("{ZERO}/{name}/{FP32}")));
            }
            all.push(held);
        }
    }
    Ok((all, unknown))
}

/// Opens files in parallel: thousands of small ones wait for the disk more than for the processor.
fn open_all(folder: &Folder, paths: &[&str]) -> Vec<Result<TorchFile>> {
    let next = AtomicUsize::new(0);
    let opened: Vec<OnceLock<Result<TorchFile>>> = paths.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let (Some(path), Some(place)) = (paths.get(i), opened.get(i)) else { return };
            // each place is set once
            let _ = place.set(TorchFile::open(folder, path, GLOBALS));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS.min(paths.len()) {
            scope.spawn(work);
        }
        work();
    });
    let early = || Err(CkptError::invalid("a thread ended early"));
    opened.into_iter().map(|place| place.into_inner().unwrap_or_else(early)).collect()
}

/// The tensor in one file, and whether the file says its shape.
fn one(tag: &mut Tag, file: TorchFile, path: &str, key: &str) -> Result<(usize, TensorView, bool)> {
    let damaged = |why: String| CkptError::damaged(&tag.path, path, why);
    // the folder inside a torch file has the name that the file was written under
    if ["fp32", "exp_avg", "exp_avg_sq", "step"].iter().any(|other| file.root == *other && key != *other) {
        return Err(damaged(format!("it was written as {}.pt: files were exchanged", file.root)));
    }
    let root = file.value();
    let (value, shaped) = match root.get("param") {
        Some(param) => (param, true),
        None => (root, false),
    };
    let view = file.tensor(value).map_err(damaged)?.ok_or_else(|| damaged("it holds no tensor".into()))?;
    tag.store.files.push(StoredFile::torch(tag.folder.clone(), path.to_owned(), file));
    Ok((tag.store.files.len() - 1, view, shaped))
}

/// All tensors: the folders' for trained weights, the model files' for the others; and the step of each weight.
fn collect(
    tag: &Tag,
    model: &ModelStates,
    stage: u8,
    held: Vec<Held>,
    whole: &Whole,
    unknown: &BTreeSet<String>,
) -> Result<(Collected, BTreeMap<String, u64>)> {
    let mut found = Collected::default();
    let mut steps = BTreeMap::new();
    let shapes: HashMap<&str, (u64, &Vec<u64>)> = (0u64..)
        .zip(&model.groups)
        .flat_map(|(g, group)| group.iter().map(move |(name, shape)| (name.as_str(), (g, shape))))
        .collect();
    let roles: BTreeSet<Role> = held.iter().flat_map(|h| h.states.iter().map(|(r, ..)| *r)).collect();
    let stepped = held.iter().any(|h| h.step.is_some());
    let mut lone = Vec::new();
    for one in &held {
        let inside = format!("{ZERO}/{}", one.name);
        let known = shapes.get(one.name.as_str());
        if known.is_none() && one.states.is_empty() && one.step.is_none() {
            lone.push(one);
            continue;
        }
        if let Some(role) = roles.iter().find(|r| one.states.iter().all(|(own, ..)| own != *r)) {
            return Err(tag.missing(format!("{inside}/{role}.pt")));
        }
        if stepped && one.step.is_none() {
            return Err(tag.missing(format!("{inside}/step.pt")));
        }
        add(tag, &mut found, one, known.map(|(_, shape)| shape.as_slice()))
            .map_err(|why| CkptError::damaged(&tag.path, format!("{inside}/{FP32}"), why))?;
        let step = one.step.or_else(|| known.and_then(|(g, _)| whole.steps.get(g).copied()));
        if let Some(step) = step {
            let step = whole_step(step).map_err(|why| CkptError::damaged(&tag.path, inside.as_str(), why))?;
            steps.insert(one.name.clone(), step);
        }
    }
    let there: BTreeSet<&str> = held.iter().map(|h| h.name.as_str()).collect();
    if let Some(name) = shapes.keys().filter(|n| !there.contains(*n)).min() {
        return Err(tag.missing(format!("the folder {ZERO}/{name}")));
    }
    others(tag, model, stage, &mut found, lone)?;
    if !unknown.is_empty() {
        let unknown: Vec<String> = unknown.iter().cloned().collect();
        found.notices.push(format!("states of the optimizer that aren't read: {}", some(&unknown)));
    }
    Ok((found, steps))
}

/// The entries of a trained weight.
fn add(
    _tag: &Tag,
    found: &mut Collected,
    held: &Held,
    known: Option<&[u64]>,
) -> std::result::Result<(), String> {
    let shape = match known {
        Some(shape) => shape,
        None if held.shaped => held.fp32.1.shape.as_slice(),
        None => return Err("it is flat, and no model file says its shape".into()),
    };
    let count = elements(shape).ok_or_else(|| format!("it has the impossible shape {shape:?}"))?;
    let fp32 = std::iter::once((Role::Weight, held.fp32.0, &held.fp32.1));
    for (role, file, view) in fp32.chain(held.states.iter().map(|(r, f, v)| (*r, *f, v))) {
        if view.elements() != count {
            return Err(format!("{role} has {} elements, {shape:?} has {count}", view.elements()));
        }
        let parts = if count > 0 { vec![Part::of(file, view, 0..count, 0)] } else { Vec::new() };
        found.entries.push(Entry::of(&held.name, role, view.dtype, shape.to_vec(), parts));
    }
    Ok(())
}

/// What isn't trained: frozen weights, buffers and ties of the model files; of folders without states what is left.
fn others(tag: &Tag, model: &ModelStates, stage: u8, found: &mut Collected, lone: Vec<&Held>) -> Result<()> {
    // frozen slices are spread over the model files of all ranks, and those may be left behind
    let whole = stage < 3 || model.frozen.is_empty() || tag.model.len() as u64 >= u64::from(model.world);
    if whole && !model.frozen.is_empty() {
        found.frozen(tag, model, stage)?;
    }
    found.ties(model);
    for one in lone {
        let taken = found.entries.iter().any(|e| e.info.role == Role::Weight && e.info.name == one.name);
        if taken || found.ties.iter().any(|t| t.alias == one.name) {
            continue;
        }
        let known = model.module.iter().find(|(n, _)| *n == one.name).map(|(_, v)| v.shape.clone());
        let shape = known.filter(|s| elements(s) == Some(one.fp32.1.elements()));
        let held_shape = shape.or(one.shaped.then(|| one.fp32.1.shape.clone()));
        let why = || {
            let why = "it is flat, and no model file says its shape";
            CkptError::damaged(&tag.path, format!("{ZERO}/{}/{FP32}", one.name), why)
        };
        add(tag, found, one, Some(&held_shape.ok_or_else(why)?))
            .map_err(|why| CkptError::damaged(&tag.path, format!("{ZERO}/{}", one.name), why))?;
        found.frozen.push(one.name.clone());
    }
    if let Some((file, _)) = tag.model.get(&0) {
        found.module(*file, model, stage);
    }
    found.in_module_order(model);
    Ok(())
}

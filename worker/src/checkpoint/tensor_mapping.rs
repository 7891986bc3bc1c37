//! Determines which ranges of weights and optimizer states a rank writes to a checkpoint or reads
//! from it, and the tensor names in the checkpoint.
use crate::{
    consensus::exchange_first_error,
    error::{Error, Result, build_checkpoint_error, to_unreadable_checkpoint_error},
    model::{Model, MoeModel},
    optim::{Optimizer, list_state_roles},
    params::{ParamSpec, ParamUnit, Segment, list_tensors_in_canonical_order},
    trainer_stages::UninitializedTrainer,
    zero::engine::{ZeroEngine, copy_or_cast},
};
use ckpt::{
    Checkpoint, CkptError, F32ReadRequest, TensorInfo, TensorRole, TensorSource, TiedWeight, WeightShape,
    peft::AdapterConfig,
};
use device::{Buf, Dtype, Ops, View, ViewMut};
use diagnostic::codes;
use jobspec::{LoraSpec, LoraTargets, ModelSpec, OptimizerSpec, TrainSpec};
use serde_json::Value;
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::RwLockReadGuard,
};

/// Builds the description of the model (family, sizes and options) that checkpoints store with the
/// weights. `eod` is the id of the end-of-document token.
pub fn build_checkpoint_model_spec(
    model: &Model,
    units: &[ParamUnit],
    train: &TrainSpec,
    eod: u32,
) -> ckpt::ModelSpec {
    let (spec, lora) = (&train.model, train.lora.as_ref());
    ckpt::ModelSpec {
        family: spec.family.clone(),
        hf_config: build_hf_config(model, spec, eod),
        weights: list_canonical_weight_shapes(units),
        ties: model
            .tied_weights()
            .into_iter()
            .map(|t| TiedWeight { alias: t.alias, target: t.target })
            .collect(),
        frozen: list_frozen_names(units),
        buffers: Vec::new(),
        adapter: lora.map(|lora| build_adapter_config(model, units, lora, spec)),
    }
}

/// Builds the content of PEFT's `adapter_config.json` for the LoRA adapters that `lora` configures.
fn build_adapter_config(model: &Model, units: &[ParamUnit], lora: &LoraSpec, spec: &ModelSpec) -> Value {
    let modules = units.iter().flat_map(|u| &u.params).filter_map(|p| p.name.strip_suffix(".lora_A.weight"));
    // Short names would be ambiguous: some versions of transformers use them inside experts, too.
    let has_full_names = MoeModel::from_model(model).is_some();
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let modules: BTreeSet<String> =
        modules.map(|m| if has_full_names { m.to_owned() } else { last(m) }).collect();
    let targets = match &lora.targets {
        LoraTargets::Names(names) if !has_full_names => names.clone(),
        _ => modules.into_iter().collect(),
    };
    let config = AdapterConfig {
        rank: lora.rank,
        alpha: lora.alpha,
        use_rslora: lora.rslora,
        dropout: lora.dropout.unwrap_or(0.0),
        targets,
        fan_in_fan_out: model.stores_transposed_matrices(),
    };
    config.to_json(spec.from.as_ref().map(|f| f.to_string_lossy()).as_deref())
}

/// Builds the content of the Hugging Face config.json that a checkpoint stores, from the sizes and
/// options of the model.
///
/// Returns the original config if the job names a model directory (`train.model.from`). For a new
/// model, adds `eod` as `bos_token_id` and `eos_token_id`.
fn build_hf_config(model: &Model, spec: &ModelSpec, eod: u32) -> Value {
    let mut config = model.hf_config().clone();
    if spec.from.is_none() {
        for key in ["bos_token_id", "eos_token_id"] {
            config.insert(key.into(), eod.into());
        }
    }
    Value::Object(config)
}

/// Lists the names and shapes of all weights of the model, in an order that does not depend on
/// which rank has which experts.
fn list_canonical_weight_shapes(units: &[ParamUnit]) -> Vec<WeightShape> {
    let shape = |s: &[usize]| s.iter().map(|&n| n as u64).collect();
    let params = list_tensors_in_canonical_order(units).into_iter().map(|(u, i)| &units[u].params[i]);
    params.map(|p| WeightShape { name: p.name.clone(), shape: shape(&p.shape) }).collect()
}

/// Lists the names of all frozen weights (which are not trained), in an order that does not depend
/// on the placement of experts on ranks.
fn list_frozen_names(units: &[ParamUnit]) -> Vec<String> {
    let frozen = list_tensors_in_canonical_order(units).into_iter().filter(|&(u, i)| !units[u].is_trained(i));
    frozen.map(|(u, i)| units[u].params[i].name.clone()).collect()
}

/// Returns the names of the trained parameters for which some optimizer state is missing in
/// `tensors`, the tensors of a checkpoint. These states then start at zero.
pub fn find_params_without_state(
    tensors: &[TensorInfo],
    units: &[ParamUnit],
    optimizer: &OptimizerSpec,
) -> HashSet<String> {
    let held: HashSet<(TensorRole, &str)> = tensors.iter().map(|t| (t.role, t.name.as_str())).collect();
    let roles = list_state_roles(optimizer);
    let lacks = |p: &&ParamSpec| {
        let mut needed = roles.iter().filter(|role| role.tensor_shape_for_weight(&p.shape).is_some());
        needed.any(|role| !held.contains(&(*role, p.name.as_str())))
    };
    let params = units.iter().flat_map(ParamUnit::list_trained_params);
    params.filter(lacks).map(|p| p.name.clone()).collect()
}

/// A range of a weight or of an optimizer state that this rank must write to checkpoints, with the
/// values of the range.
pub struct OwnedRange<'a> {
    /// The tensor's name.
    pub name: &'a str,
    /// Whether the values are the weight or one of its optimizer states.
    pub role: TensorRole,
    /// The index, among the elements of the tensor, at which the range starts.
    pub start_element: u64,
    /// The values, in host or device memory.
    pub values: View<'a>,
}

/// Lists all ranges of weights and optimizer states that this rank owns, with their values, for
/// writing a checkpoint. `params` must contain a read lock on the resident parameters of each unit,
/// in the order of the units.
pub fn list_owned_ranges<'a>(
    engine: &'a ZeroEngine,
    optimizer: &'a Optimizer,
    params: &'a [RwLockReadGuard<Buf>],
) -> Vec<OwnedRange<'a>> {
    let mut out = Vec::new();
    for (u, shard) in engine.shards.iter().enumerate() {
        let (own, resident) = (engine.owned_range(u), engine.resident_range(u));
        let unit = &shard.unit;
        let piece = |role, seg: &Segment, values| OwnedRange {
            name: &unit.params[seg.param].name,
            role,
            start_element: seg.elements.start as u64,
            values,
        };
        let weights = params[u].view().slice(own.start - resident.start..own.end - resident.start);
        out.extend(unit.list_segments(own.clone()).iter().map(|seg| {
            let in_shard = seg.flat.start - own.start..seg.flat.end - own.start;
            piece(TensorRole::Weight, seg, weights.slice(in_shard))
        }));
        for states in optimizer.states(u).states_by_role() {
            let values = states.view();
            let written = states.list_saved_segments(unit, own.clone());
            out.extend(written.iter().map(|seg| piece(states.role(), seg, values.slice(seg.flat.clone()))));
        }
    }
    out
}

/// Fails if the weights or optimizer states in a checkpoint do not have the names, shapes and kinds
/// that the job needs.
///
/// # Errors
///
/// Fails if the weights of the checkpoint do not match the names and shapes in `units`. Also fails
/// if the checkpoint contains more than weights, and its optimizer states are not those of
/// `optimizer`.
pub fn require_compatible(ckpt: &Checkpoint, units: &[ParamUnit], optimizer: &OptimizerSpec) -> Result<()> {
    ckpt.require_matching_model(&list_canonical_weight_shapes(units))
        .map_err(to_unreadable_checkpoint_error)?;
    let roles = list_state_roles(optimizer);
    if ckpt.has_only_weights() {
        return Ok(());
    }
    let states: Vec<TensorInfo> = ckpt.tensors().filter(|t| t.role.is_optimizer_state()).collect();
    let with_states: HashSet<&str> = states.iter().map(|t| t.name.as_str()).collect();
    // A parameter without any state was frozen, and begins with new states.
    let needs = |role: TensorRole, p: &ParamSpec| {
        role.tensor_shape_for_weight(&p.shape).is_some()
            && (states.is_empty() || with_states.contains(p.name.as_str()))
    };
    let is_missing = |role: TensorRole| {
        let mut trained = units.iter().flat_map(ParamUnit::list_trained_params);
        states.iter().all(|t| t.role != role) && trained.any(|p| needs(role, p))
    };
    let error = |what: String, role: &TensorRole| {
        let message = format!("checkpoint {} {what}", ckpt.path().display());
        build_checkpoint_error(codes::training::RESUME_OPTIMIZER_MISMATCH, ckpt.path(), message)
            .with_field("role", role.to_string())
            .with_field("optimizer", optimizer.name.name())
            .with_help("use the checkpoint's optimizer, or set `resume.from: never` to start at step 0")
    };
    let name = optimizer.name.name();
    if let Some(role) = roles.iter().find(|role| is_missing(**role)) {
        return Err(error(format!("has no {role}, which the optimizer {name} needs"), role).into());
    }
    if let Some(role) = states.iter().map(|t| &t.role).find(|role| !roles.contains(role)) {
        return Err(error(format!("has {role}, which the optimizer {name} does not use"), role).into());
    }
    Ok(())
}

/// Distributes the parameters and optimizer states that each rank has read from a checkpoint to the
/// other ranks that store them, too. Every rank must first have read its owned ranges from a
/// checkpoint. Collective: every rank must call it.
pub fn sync_loaded_replicas(ready: &mut UninitializedTrainer) -> Result<()> {
    let (engine, optimizer) = (&mut ready.trainer.engine, &mut ready.trainer.optimizer);
    for u in 0..engine.shards.len() {
        engine.start_updated_param_gather(u, false);
        if !engine.policy.shard_optimizer {
            sync_replicated_states(ready.trainer.ops.as_ref(), engine, optimizer, u)?;
        }
        optimizer.evict_states(u);
    }
    Ok(engine.wait_for_updated_param_gathers()?)
}

/// Instructions for reading a checkpoint into the trainer: the checkpoint, the names of stored
/// weights, and which parameters and optimizer states to read.
pub struct ReadPlan<'a> {
    /// The checkpoint, of any format.
    pub source: &'a dyn TensorSource,
    /// Maps a weight's name in the job to its name in the checkpoint. Contains only weights whose
    /// names differ.
    pub renamed: &'a HashMap<String, String>,
    /// Whether the optimizer states are read.
    pub with_states: bool,
    /// Names of the parameters whose states are not read, so that they start at zero.
    pub reset_states: &'a HashSet<String>,
    /// Returns whether the parameter with the given name is read.
    pub selects: fn(&str) -> bool,
}

/// Reads the ranges of weights and optimizer states that this rank owns from a checkpoint into the
/// trainer.
///
/// Values in device memory or in 16 bits are first read into a host buffer, one unit at a time.
pub fn read_owned_ranges(
    ready: &mut UninitializedTrainer,
    reading: &ReadPlan,
) -> std::result::Result<(), CkptError> {
    let count = ready.trainer.engine.shards.len();
    let in_place = ready.trainer.ops.is_host() && ready.trainer.engine.param_dtypes().updated == Dtype::F32;
    let at_once = if in_place { count } else { 1 };
    (0..count)
        .step_by(at_once.max(1))
        .try_for_each(|u| read_units(ready, u..(u + at_once).min(count), reading))
}

/// Reads on each rank the tensor ranges that the rank owns from a checkpoint, and copies them to
/// the other ranks that also store them. If a rank cannot read its ranges, returns the error of the
/// lowest such rank, and copies nothing. Collective: every rank must call it.
pub fn read_on_all_ranks(ready: &mut UninitializedTrainer, reading: &ReadPlan) -> Result<Option<Error>> {
    let failed = read_owned_ranges(ready, reading).err().map(to_unreadable_checkpoint_error);
    match exchange_first_error(ready.trainer.engine.queue(), failed)? {
        Some(e) => Ok(Some(e)),
        None => sync_loaded_replicas(ready).map(|()| None),
    }
}

/// Reads from a checkpoint, in one request, this rank's ranges of weights and optimizer states in
/// `units` (groups of parameters that are gathered together).
fn read_units(
    ready: &mut UninitializedTrainer,
    units: Range<usize>,
    reading: &ReadPlan,
) -> std::result::Result<(), CkptError> {
    let (engine, optimizer, ops) = (&ready.trainer.engine, &mut ready.trainer.optimizer, &ready.trainer.ops);
    let mut guards: Vec<_> = units.clone().map(|u| engine.lock_resident_params_mut(u)).collect();
    let mut vectors = Vec::new();
    let states = optimizer.all_states_mut().skip(units.start);
    for ((u, params), st) in units.zip(&mut guards).zip(states) {
        let (unit, own, base) =
            (&engine.shards[u].unit, engine.owned_range(u), engine.resident_range(u).start);
        let weights = params.view_mut().slice(own.start - base..own.end - base);
        vectors.push((
            unit,
            TensorRole::Weight,
            unit.list_segments(own.clone()),
            HostF32Values::new(ops.as_ref(), weights),
        ));
        for states in st.states_by_role_mut().iter_mut().filter(|_| reading.with_states) {
            let role = states.role();
            for (segments, values) in states.list_loaded_segments_mut(unit, own.clone()) {
                vectors.push((unit, role, segments, HostF32Values::new(ops.as_ref(), values)));
            }
        }
    }
    let mut requests = Vec::new();
    for (unit, role, segments, values) in &mut vectors {
        requests.extend(build_read_requests(unit, *role, std::mem::take(segments), values.values()));
    }
    requests.retain(|r| {
        (reading.selects)(r.name) && !(r.role.is_optimizer_state() && reading.reset_states.contains(r.name))
    });
    for request in &mut requests {
        if let Some(stored_name) = reading.renamed.get(request.name) {
            request.name = stored_name;
        }
    }
    reading.source.read_verified(&mut requests)?;
    vectors.into_iter().for_each(|(.., values)| values.write_back(ops.as_ref()));
    Ok(())
}

/// The elements of a tensor as `f32` in host memory, either in place or as a copy that is written
/// back after changes.
enum HostF32Values<'a> {
    InPlace(&'a mut [f32]),
    Copy { values: Buf, target: ViewMut<'a> },
}

impl<'a> HostF32Values<'a> {
    /// Makes the elements of a tensor available as `f32` in host memory, in a copy if they have
    /// another type or are in device memory.
    fn new(ops: &dyn Ops, target: ViewMut<'a>) -> Self {
        let current = target.as_view();
        if current.dtype() != Dtype::F32 {
            let mut wide = ops.zeroed(Dtype::F32, current.len());
            ops.cast(wide.view_mut(), current);
            let values = if current.is_on_host() { wide } else { ops.clone_to_host(wide.view()) };
            return HostF32Values::Copy { values, target };
        }
        match current.is_on_host() {
            true => HostF32Values::InPlace(target.host_slice_mut()),
            false => HostF32Values::Copy { values: ops.clone_to_host(current), target },
        }
    }

    /// Returns the elements of the tensor as `f32` in host memory, to read and change.
    fn values(&mut self) -> &mut [f32] {
        match self {
            HostF32Values::InPlace(values) => values,
            HostF32Values::Copy { values, .. } => values.host_slice_mut(),
        }
    }

    /// Writes the changed copy of the values back to the tensor, rounded to the tensor's element
    /// type; does nothing without a copy. Unchanged elements keep their bits, because the copy
    /// represents 16-bit values exactly.
    fn write_back(self, ops: &dyn Ops) {
        if let HostF32Values::Copy { values, target } = self {
            copy_or_cast(ops, target, values.view());
        }
    }
}

/// Builds one request to read from a checkpoint for each range in `segments`, the ranges of
/// parameters that this rank owns. `values` is the memory for the elements of all segments, in the
/// order of the segments.
fn build_read_requests<'a>(
    unit: &'a ParamUnit,
    role: TensorRole,
    segments: Vec<Segment>,
    mut values: &'a mut [f32],
) -> Vec<F32ReadRequest<'a>> {
    let requests = segments.into_iter().map(|seg| {
        let (out, after) = std::mem::take(&mut values).split_at_mut(seg.flat.len());
        values = after;
        F32ReadRequest {
            name: &unit.params[seg.param].name,
            role,
            start_element: seg.elements.start as u64,
            out,
        }
    });
    requests.collect()
}

/// Completes on every rank the optimizer states of one group of parameters (unit `u`) with the
/// ranges that other ranks have read from the checkpoint. Collective: every rank must call it.
fn sync_replicated_states(
    ops: &dyn Ops,
    engine: &ZeroEngine,
    optimizer: &mut Optimizer,
    u: usize,
) -> Result<()> {
    let unit = &engine.shards[u].unit;
    let st = optimizer.states_mut(u);
    let len = unit.to_trained_range(st.range.clone()).len();
    for states in st.states_by_role_mut().iter_mut().filter(|states| states.is_any_sharded(unit)) {
        let mine = states.pack_trained(ops, unit, engine.owned_range(u));
        let whole = engine.gather_trained_vector(u, mine, ops.zeroed(Dtype::F32, len))?;
        states.unpack_trained(ops, unit, whole.view());
    }
    Ok(())
}

//! Between memory and checkpoint: which pieces this rank writes, and which it reads back.
use crate::{
    error::{Error, Result},
    model::Model,
    optim::{Optimizer, state_vectors},
    params::{Segment, Unit, canonical_order},
    stages::ScheduleBound,
    zero::engine::{Engine, put},
};
use ckpt::{
    Checkpoint, CkptError, ModelCard, Request, Role, Source, TensorInfo, Tie, WeightShape,
    peft::AdapterConfig,
};
use contract::job::{LoraSpec, LoraTargets, ModelSpec, OptimizerName, OptimizerSpec, TrainSpec};
use device::{Buf, Dtype, Ops, View, ViewMut};
use serde_json::Value;
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::RwLockReadGuard,
};

/// The model as checkpoints describe it.
pub fn model_card(model: &dyn Model, units: &[Unit], train: &TrainSpec, eod: u32) -> ModelCard {
    let (of, lora) = (&train.model, train.lora.as_ref());
    ModelCard {
        family: of.family.clone(),
        hf_config: hf_config(model, of, eod),
        weights: weight_shapes(units),
        ties: model.ties().into_iter().map(|t| Tie { alias: t.alias, target: t.target }).collect(),
        frozen: frozen(units),
        buffers: Vec::new(),
        adapter: lora.map(|spec| adapter_config(model, units, spec, of)),
    }
}

/// PEFT's `adapter_config.json`; `of`: the model's own numbers.
fn adapter_config(model: &dyn Model, units: &[Unit], spec: &LoraSpec, of: &ModelSpec) -> Value {
    let modules = units.iter().flat_map(|u| &u.params).filter_map(|p| p.name.strip_suffix(".lora_A.weight"));
    // other versions have matrices of the same names inside of experts
    let whole = model.sparse().is_some();
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let all: BTreeSet<String> = modules.map(|m| if whole { m.to_owned() } else { last(m) }).collect();
    let targets = match &spec.targets {
        LoraTargets::Names(names) if !whole => names.clone(),
        _ => all.into_iter().collect(),
    };
    let config = AdapterConfig {
        rank: spec.rank,
        alpha: spec.alpha,
        rslora: spec.rslora,
        dropout: spec.dropout.unwrap_or(0.0),
        targets,
        fan_in_fan_out: model.in_out(),
    };
    config.json(of.from.as_ref().map(|f| f.to_string_lossy()).as_deref())
}

/// `config.json`: a folder's own as it was; a new model's with the token that ends a document.
fn hf_config(model: &dyn Model, spec: &ModelSpec, eod: u32) -> Value {
    let mut config = model.hf_config().clone();
    if spec.from.is_none() {
        for key in ["bos_token_id", "eos_token_id"] {
            config.insert(key.into(), eod.into());
        }
    }
    Value::Object(config)
}

/// Every stored weight, in canonical order.
fn weight_shapes(units: &[Unit]) -> Vec<WeightShape> {
    let shape = |s: &[usize]| s.iter().map(|&n| n as u64).collect();
    let params = canonical_order(units).into_iter().map(|(u, i)| &units[u].params[i]);
    params.map(|p| WeightShape { name: p.name.clone(), shape: shape(&p.shape) }).collect()
}

/// Names of the weights that are not trained.
fn frozen(units: &[Unit]) -> Vec<String> {
    let all = canonical_order(units).into_iter().filter(|&(u, i)| !units[u].is_trained(i));
    all.map(|(u, i)| units[u].params[i].name.clone()).collect()
}

/// Trained parameters of which a checkpoint with these tensors lacks some of the optimizer's states: they begin anew.
pub fn without_states(tensors: &[TensorInfo], units: &[Unit], optimizer: &OptimizerSpec) -> HashSet<String> {
    let held: HashSet<(Role, &str)> = tensors.iter().map(|t| (t.role, t.name.as_str())).collect();
    let roles = state_roles(optimizer);
    let lacks = |name: &str| roles.iter().any(|role| !held.contains(&(*role, name)));
    let names = units.iter().flat_map(Unit::trained_params).map(|p| &p.name);
    names.filter(|name| lacks(name)).cloned().collect()
}

/// Roles of the optimizer's two state vectors.
pub fn state_roles(spec: &OptimizerSpec) -> Vec<Role> {
    let (first, second) = match spec.name {
        OptimizerName::Adamw => (Role::ExpAvg, Role::ExpAvgSq),
        OptimizerName::Sgd => (Role::Momentum, Role::Momentum),
        OptimizerName::Lion => (Role::ExpAvg, Role::ExpAvg),
        // so that it isn't taken for AdamW's
        OptimizerName::Muon => (Role::Momentum, Role::ExpAvgSq),
    };
    let (has_first, has_second) = state_vectors(spec);
    [(has_first, first), (has_second, second)]
        .into_iter()
        .filter(|(has, _)| *has)
        .map(|(_, role)| role)
        .collect()
}

/// A range of a tensor that this rank owns.
pub struct Owned<'a> {
    /// The tensor.
    pub name: &'a str,
    /// What of it.
    pub role: Role,
    /// First element of the tensor.
    pub start_element: u64,
    /// The values, wherever they lie.
    pub values: View<'a>,
}

/// Everything this rank owns, borrowed for as long as the guards live.
pub fn owned<'a>(
    engine: &'a Engine,
    optimizer: &'a Optimizer,
    params: &'a [RwLockReadGuard<Buf>],
) -> Vec<Owned<'a>> {
    let roles = state_roles(optimizer.spec());
    let mut out = Vec::new();
    for (u, shard) in engine.shards.iter().enumerate() {
        let (own, resident, st) = (engine.own(u), engine.resident(u), optimizer.states(u));
        let unit = &shard.unit;
        let piece = |role, seg: &Segment, values| Owned {
            name: &unit.params[seg.param].name,
            role,
            start_element: seg.elements.start as u64,
            values,
        };
        let weights = params[u].view().slice(own.start - resident.start..own.end - resident.start);
        out.extend(unit.segments(own.clone()).iter().map(|seg| {
            let there = seg.flat.start - own.start..seg.flat.end - own.start;
            piece(Role::Weight, seg, weights.slice(there))
        }));
        for (role, states) in roles.iter().zip([&st.first, &st.second]) {
            let mut at = unit.trained_before(own.start) - st.trained.start;
            for seg in unit.trained_segments(own.clone()) {
                let values = states.view().slice(at..at + seg.flat.len());
                at += seg.flat.len();
                out.push(piece(*role, &seg, values));
            }
        }
    }
    out
}

/// Refuses a checkpoint of another model, naming the first tensor that differs, or one without the optimizer's states.
pub fn check_fits(ckpt: &Checkpoint, units: &[Unit], optimizer: &OptimizerSpec) -> Result<()> {
    ckpt.require_model(&weight_shapes(units)).map_err(|e| Error::checkpoint(e.to_string()))?;
    let roles = state_roles(optimizer);
    if ckpt.is_weights_alone() {
        return Ok(());
    }
    for role in &roles {
        if !ckpt.tensors().any(|t| t.role == *role) {
            return Err(Error::checkpoint(format!(
                "{} holds no {role}: it was written with another optimizer than {:?}; use that one, or start anew with resume.from: never",
                ckpt.path().display(),
                optimizer.name
            )));
        }
    }
    if let Some(other) = ckpt.tensors().map(|t| t.role).find(|r| r.is_optimizer_state() && !roles.contains(r))
    {
        return Err(Error::checkpoint(format!(
            "{} holds {other}, which {:?} has not: it was written with another optimizer; use that one, or start anew with resume.from: never",
            ckpt.path().display(),
            optimizer.name
        )));
    }
    Ok(())
}

/// Brings resident copies up to date after every rank has read its part. Collective.
pub fn spread(bound: &mut ScheduleBound) -> Result<()> {
    let (engine, optimizer) = (&mut bound.trainer.engine, &mut bound.trainer.optimizer);
    for u in 0..engine.shards.len() {
        engine.publish(u);
        if !engine.policy.shard_optimizer {
            spread_states(bound.trainer.ops.as_ref(), engine, optimizer, u)?;
        }
        optimizer.let_go(u);
    }
    Ok(engine.settle()?)
}

/// What is read.
pub struct Reading<'a> {
    /// Of any format.
    pub source: &'a dyn Source,
    /// Our name of a weight → its name there, where they differ.
    pub renamed: &'a HashMap<String, String>,
    /// The optimizer's states too.
    pub states: bool,
    /// Parameters whose states begin anew.
    pub anew: &'a HashSet<String>,
    /// Only parameters of these names are read.
    pub meant: fn(&str) -> bool,
}

/// Reads the owned range of every vector of every unit; by way of a copy on the host, where those in a card's memory or in 16
/// bits have one, a unit at a time.
pub fn read_own(bound: &mut ScheduleBound, reading: &Reading) -> std::result::Result<(), CkptError> {
    let count = bound.trainer.engine.shards.len();
    let in_place = bound.trainer.ops.is_host() && bound.trainer.engine.weights().updated == Dtype::F32;
    let at_once = if in_place { count } else { 1 };
    (0..count)
        .step_by(at_once.max(1))
        .try_for_each(|u| read_units(bound, u..(u + at_once).min(count), reading))
}

fn read_units(
    bound: &mut ScheduleBound,
    units: Range<usize>,
    reading: &Reading,
) -> std::result::Result<(), CkptError> {
    let (engine, optimizer, ops) = (&bound.trainer.engine, &mut bound.trainer.optimizer, &bound.trainer.ops);
    let roles = if reading.states { state_roles(optimizer.spec()) } else { Vec::new() };
    let mut guards: Vec<_> = units.clone().map(|u| engine.params_mut(u)).collect();
    let mut vectors = Vec::new();
    let states = optimizer.all_states_mut().skip(units.start);
    for ((u, params), st) in units.zip(&mut guards).zip(states) {
        let (unit, own, base) = (&engine.shards[u].unit, engine.own(u), engine.resident(u).start);
        let weights = params.view_mut().slice(own.start - base..own.end - base);
        vectors.push((unit, Role::Weight, unit.segments(own.clone()), OnHost::of(ops.as_ref(), weights)));
        let trained = unit.trained_range(own.clone());
        for (role, buf) in roles.iter().zip([&mut st.first, &mut st.second]) {
            let states =
                buf.view_mut().slice(trained.start - st.trained.start..trained.end - st.trained.start);
            let states = OnHost::of(ops.as_ref(), states);
            vectors.push((unit, *role, unit.trained_segments(own.clone()), states));
        }
    }
    let mut requests = Vec::new();
    for (unit, role, segments, values) in &mut vectors {
        requests.extend(requests_of(unit, *role, std::mem::take(segments), values.values()));
    }
    requests.retain(|r| {
        (reading.meant)(r.name) && !(r.role.is_optimizer_state() && reading.anew.contains(r.name))
    });
    for request in &mut requests {
        if let Some(there) = reading.renamed.get(request.name) {
            request.name = there;
        }
    }
    reading.source.read_many(&mut requests)?;
    vectors.into_iter().for_each(|(.., values)| values.put_back(ops.as_ref()));
    Ok(())
}

/// Values that the host writes as `f32`, wherever and in whichever type they lie.
enum OnHost<'a> {
    Here(&'a mut [f32]),
    Copy { values: Buf, there: ViewMut<'a> },
}

impl<'a> OnHost<'a> {
    fn of(ops: &dyn Ops, there: ViewMut<'a>) -> Self {
        let now = there.as_view();
        if now.dtype() != Dtype::F32 {
            let mut wide = ops.zeroed(Dtype::F32, now.len());
            ops.cast(wide.view_mut(), now);
            let values = if now.is_on_host() { wide } else { ops.downloaded(wide.view()) };
            return OnHost::Copy { values, there };
        }
        match now.is_on_host() {
            true => OnHost::Here(there.host()),
            false => OnHost::Copy { values: ops.downloaded(now), there },
        }
    }

    fn values(&mut self) -> &mut [f32] {
        match self {
            OnHost::Here(values) => values,
            OnHost::Copy { values, .. } => values.host_mut(),
        }
    }

    /// 16-bit ones are rounded to the nearest, which leaves those alone that were not written.
    fn put_back(self, ops: &dyn Ops) {
        if let OnHost::Copy { values, there } = self {
            put(ops, there, values.view());
        }
    }
}

/// What fills `values`, which holds these segments one after the other.
fn requests_of<'a>(
    unit: &'a Unit,
    role: Role,
    segments: Vec<Segment>,
    mut values: &'a mut [f32],
) -> Vec<Request<'a>> {
    let requests = segments.into_iter().map(|seg| {
        let (out, after) = std::mem::take(&mut values).split_at_mut(seg.flat.len());
        values = after;
        Request { name: &unit.params[seg.param].name, role, start_element: seg.elements.start as u64, out }
    });
    requests.collect()
}

/// Replicated optimizer states: puts the owners' parts together on every rank.
fn spread_states(ops: &dyn Ops, engine: &Engine, optimizer: &mut Optimizer, u: usize) -> Result<()> {
    let own = engine.shards[u].unit.trained_range(engine.own(u));
    let (first, second) = state_vectors(optimizer.spec());
    let st = optimizer.states_mut(u);
    let mine = own.start - st.trained.start..own.end - st.trained.start;
    for (buf, _) in [(&mut st.first, first), (&mut st.second, second)].into_iter().filter(|(_, kept)| *kept) {
        let mine = ops.copied(buf.view().slice(mine.clone()));
        let whole = engine.gather_whole(u, mine, ops.zeroed(Dtype::F32, buf.len()))?;
        ops.copy(buf.view_mut(), whole.view());
    }
    Ok(())
}

//! A ZeRO checkpoint in DeepSpeed's own layout, for any stage and number of ranks.
use super::file::{FilePlan, Span, Storages};
use super::groups::Group;
use super::state::State;
use super::{Content, ConvertOptions, Plan};
use crate::catalog::Role;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::pickle::Object;
use crate::state::LossScale;
use std::ops::Range;

const SCALER: &str = "deepspeed.runtime.fp16.loss_scaler.LossScaler";
const DYNAMIC_SCALER: &str = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler";
const STAGE: &str = "deepspeed.runtime.zero.config.ZeroStageEnum";
const FRAGMENT: &str = "deepspeed.utils.tensor_fragment.fragment_address";

/// Parameters that lie together: a group, or in stage 3 a part of one.
struct Flat {
    group: usize,
    /// Positions in the group.
    members: Range<usize>,
    step: f64,
}

/// One state of the optimizer under its name in torch.
fn key(role: Role) -> &'static str {
    match role {
        Role::Momentum => "momentum_buffer",
        other => other.name(),
    }
}

pub(super) fn plan(state: &mut State, options: &ConvertOptions) -> Result<Plan> {
    let (stage, world, tag) = (state.stage, state.world, state.tag());
    complete_options(state);
    let flats = flats(state, options.sub_group_size)?;
    let mut files = Vec::new();
    let prefix = if state.precision == Dtype::BF16 { "bf16_" } else { "" };
    for rank in 0..world {
        let path = format!("{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
        files.push(match stage {
            3 => optimizer3(state, &flats, rank, path),
            _ => optimizer12(state, &flats, rank, path),
        });
    }
    for rank in 0..if stage == 3 { world } else { 1 } {
        let path = match stage {
            3 => format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"),
            _ => format!("{tag}/mp_rank_00_model_states.pt"),
        };
        files.push(model(state, &flats, rank, path));
    }
    files.push(FilePlan { path: "latest".into(), content: Content::Bytes(tag.into_bytes()) });
    if options.sub_group_size < 1_000_000_000 && stage == 3 {
        let n = options.sub_group_size;
        state.notices.push(format!("the config that loads this must say \"sub_group_size\": {n}"));
    }
    Ok(Plan { files, stage: Some(stage), world })
}

/// What torch's optimizers need in every group and a checkpoint of another program may not have.
pub(super) fn complete_options(state: &mut State) {
    let adam = state.roles.contains(&Role::ExpAvg);
    for group in &mut state.groups {
        let mut default = |key: &str, value: Object| {
            if !group.options.iter().any(|(k, _)| k == key) {
                group.options.push((key.into(), value));
            }
        };
        if adam {
            default("decoupled_weight_decay", Object::Bool(true));
            for key in ["amsgrad", "maximize", "capturable", "differentiable"] {
                default(key, Object::Bool(false));
            }
            default("foreach", Object::None);
            default("fused", Object::None);
        }
    }
}

/// The groups, cut as stage 3 cuts them.
fn flats(state: &State, sub_group_size: u64) -> Result<Vec<Flat>> {
    let mut flats = Vec::new();
    for (g, group) in state.groups.iter().enumerate() {
        let mut cut = |members: Range<usize>| -> Result<()> {
            let step = state.one_step(group, members.clone())?;
            flats.push(Flat { group: g, members, step });
            Ok(())
        };
        let count = group.weights.len();
        if state.stage < 3 {
            cut(0..count)?;
            continue;
        }
        let (mut from, mut filled) = (0, 0);
        for (i, &weight) in group.weights.iter().enumerate() {
            filled += share(state, weight);
            if filled >= sub_group_size || i + 1 == count {
                cut(from..i + 1)?;
                (from, filled) = (i + 1, 0);
            }
        }
    }
    Ok(flats)
}

/// Elements of a parameter that each rank holds in stage 3.
fn share(state: &State, tensor: usize) -> u64 {
    state.elements(tensor).div_ceil(u64::from(state.world))
}

impl Flat {
    fn weights<'a>(&self, state: &'a State) -> &'a [usize] {
        &state.groups[self.group].weights[self.members.clone()]
    }
}

/// The tensors of a role of some weights; every weight of a group has all of them.
fn of_role(state: &State, weights: &[usize], role: Role) -> Vec<usize> {
    match role {
        Role::Weight => weights.to_vec(),
        _ => weights.iter().filter_map(|&w| state.state_of(w, role)).collect(),
    }
}

/// Elements `range` of the concatenation of tensors, filled up with zeros to the end of the range.
fn concatenated(state: &State, tensors: &[usize], range: Range<u64>) -> Vec<Span> {
    let (mut spans, mut begin) = (Vec::new(), 0);
    for &tensor in tensors {
        let end = begin + state.elements(tensor);
        let (from, to) = (range.start.max(begin), range.end.min(end));
        if from < to {
            spans.push(Span::Of(tensor, from - begin..to - begin));
        }
        begin = end;
    }
    let rest = range.end.saturating_sub(begin.max(range.start));
    spans.push(Span::Zeros(rest));
    spans
}

/// The rank's slice of a tensor in stage 3, filled up with zeros.
fn slice(state: &State, tensor: usize, rank: u32) -> Vec<Span> {
    let (count, share) = (state.elements(tensor), share(state, tensor));
    let from = (u64::from(rank) * share).min(count);
    let to = (from + share).min(count);
    vec![Span::Of(tensor, from..to), Span::Zeros(share - (to - from))]
}

/// DeepSpeed's loss scaler: one that moves, with its defaults, where the source has one of another program, else one that is 1.
fn scaler(state: &State) -> Object {
    let Some(LossScale { scale, steps }) = state.loss_scale else {
        let attributes = [("cur_scale", Object::Float(1.0)), ("dynamic", Object::Bool(false))];
        return Object::Instance { class: SCALER.into(), state: Box::new(Object::dict(attributes)) };
    };
    let attributes = [
        ("cur_scale", Object::Float(scale)),
        ("dynamic", Object::Bool(true)),
        ("cur_iter", Object::count(steps)),
        ("last_overflow_iter", Object::Int(-1)),
        ("scale_factor", Object::Float(2.0)),
        ("scale_window", Object::Int(1000)),
        ("min_scale", Object::Int(1)),
        ("delayed_shift", Object::Int(1)),
        ("cur_hysteresis", Object::Int(1)),
        ("consecutive_hysteresis", Object::Bool(false)),
        ("raise_error_at_min_scale", Object::Bool(true)),
        ("dtype", Object::Global("torch.float16".into())),
    ];
    Object::Instance { class: DYNAMIC_SCALER.into(), state: Box::new(Object::dict(attributes)) }
}

/// What the source's optimizer file has beside states, or what a run without loss scaling has.
fn taken(state: &State, key: &str) -> Object {
    let own = state.extras.optimizer.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    own.unwrap_or_else(|| match key {
        "loss_scaler" => scaler(state),
        "dynamic_loss_scale" => Object::Bool(state.loss_scale.is_some()),
        _ => Object::Bool(false),
    })
}

/// The limit of the gradient's norm where the source says it. Stage 3 has none; one made up would take the place of the
/// config's when stages 1 and 2 load it.
fn add_clipping(state: &State, optimizer: &mut Object) {
    if let Some((key, clip)) = state.extras.optimizer.iter().find(|(key, _)| key == "clip_grad") {
        optimizer.set(key, clip.clone());
    }
}

fn zero_stage(stage: u8) -> Object {
    Object::Call { function: STAGE.into(), args: vec![Object::Int(stage.into())] }
}

/// `{state, param_groups}` of torch's optimizer; `spans(flat, role)` is what the rank holds.
fn torch_state(
    state: &State,
    flats: &[Flat],
    storages: &mut Storages,
    spans: &dyn Fn(&Flat, Role) -> Vec<Span>,
) -> Object {
    let mut states = Vec::new();
    for (i, flat) in flats.iter().enumerate() {
        let mut own = vec![("step", storages.scalar(flat.step))];
        own.extend(state.roles.iter().map(|&role| (key(role), storages.flat(spans(flat, role)))));
        states.push((Object::count(i as u64), Object::dict(own)));
    }
    let ids = |g: usize| {
        let own = flats.iter().enumerate().filter(|(_, f)| f.group == g);
        Object::List(own.map(|(i, _)| Object::count(i as u64)).collect())
    };
    let group = |(g, group): (usize, &Group)| {
        let mut options = group.options.clone();
        options.push(("params".into(), ids(g)));
        Object::dict(options)
    };
    let groups = state.groups.iter().enumerate().map(group).collect();
    Object::dict([("state", Object::Dict(states)), ("param_groups", Object::List(groups))])
}

/// A rank's optimizer file of stages 1 and 2: a piece of each flat group, equal for all ranks with its padding.
fn optimizer12(state: &State, flats: &[Flat], rank: u32, path: String) -> FilePlan {
    let world = u64::from(state.world);
    let mut storages = Storages::default();
    let total = |flat: &Flat| flat.weights(state).iter().map(|&w| state.elements(w)).sum::<u64>();
    // a piece begins at an even element, as DeepSpeed wants for its collectives
    let piece = |flat: &Flat| total(flat).next_multiple_of(2 * world) / world;
    let range = |flat: &Flat| u64::from(rank) * piece(flat)..(u64::from(rank) + 1) * piece(flat);
    let lean = |flat: &Flat| total(flat).clamp(range(flat).start, range(flat).end) - range(flat).start;
    let base = torch_state(state, flats, &mut storages, &|flat, role| {
        concatenated(state, &of_role(state, flat.weights(state), role), range(flat))
    });
    let masters = flats.iter().map(|flat| {
        let start = range(flat).start;
        storages.flat(concatenated(state, flat.weights(state), start..start + lean(flat)))
    });
    let masters = Object::List(masters.collect());
    let per_flat = |f: &dyn Fn(&Flat) -> Object| Object::List(flats.iter().map(f).collect());
    let mut optimizer = Object::dict([
        ("loss_scaler", storages.taken(&taken(state, "loss_scaler"))),
        ("dynamic_loss_scale", taken(state, "dynamic_loss_scale")),
        ("overflow", taken(state, "overflow")),
        ("base_optimizer_state", base),
        ("single_partition_of_fp32_groups", masters),
        ("zero_stage", zero_stage(state.stage)),
        ("group_paddings", per_flat(&|f| Object::count(piece(f) - lean(f)))),
        (
            "param_alignment_paddings",
            per_flat(&|f| Object::List(f.weights(state).iter().map(|_| Object::Int(0)).collect())),
        ),
        ("partition_count", per_flat(&|_| Object::count(world))),
        ("ds_version", Object::text(&state.version)),
        ("param_slice_mappings", per_flat(&|f| fragments(state, f.weights(state), range(f)))),
    ]);
    add_clipping(state, &mut optimizer);
    finish(state, storages, optimizer, path)
}

/// Which part of which parameter a piece holds.
fn fragments(state: &State, weights: &[usize], range: Range<u64>) -> Object {
    let (mut found, mut begin) = (Vec::new(), 0);
    for &w in weights {
        let end = begin + state.elements(w);
        let (from, to) = (range.start.max(begin), range.end.min(end));
        if from < to {
            let place = [("numel", Object::count(to - from)), ("start", Object::count(from - range.start))];
            let place = Object::Instance { class: FRAGMENT.into(), state: Box::new(Object::dict(place)) };
            found.push((state.name(w), place));
        }
        begin = end;
    }
    Object::ordered(found)
}

/// A rank's optimizer file of stage 3: a slice of each parameter.
fn optimizer3(state: &State, flats: &[Flat], rank: u32, path: String) -> FilePlan {
    let mut storages = Storages::default();
    let slices = |flat: &Flat, role: Role| -> Vec<Span> {
        of_role(state, flat.weights(state), role).into_iter().flat_map(|t| slice(state, t, rank)).collect()
    };
    let base = torch_state(state, flats, &mut storages, &slices);
    let masters = flats.iter().map(|flat| storages.flat(slices(flat, Role::Weight))).collect();
    let mut optimizer = Object::dict([
        ("zero_stage", zero_stage(3)),
        ("loss_scaler", storages.taken(&taken(state, "loss_scaler"))),
        ("dynamic_loss_scale", taken(state, "dynamic_loss_scale")),
        ("overflow", taken(state, "overflow")),
        ("partition_count", Object::count(state.world.into())),
        ("optimizer_state_dict", base),
        ("fp32_flat_groups", Object::List(masters)),
    ]);
    add_clipping(state, &mut optimizer);
    finish(state, storages, optimizer, path)
}

fn finish(state: &State, mut storages: Storages, optimizer: Object, path: String) -> FilePlan {
    let value = Object::dict([
        ("optimizer_state_dict", optimizer),
        ("ds_config", storages.taken(&config(state))),
        ("ds_version", Object::text(&state.version)),
    ]);
    storages.file(path, value)
}

/// The source's config with the stage of the result.
pub(super) fn config(state: &State) -> Object {
    let own = state.extras.model.iter().find(|(k, _)| k == "ds_config").map(|(_, v)| v.clone());
    let mut config = own.filter(|c| matches!(c, Object::Dict(_))).unwrap_or(Object::Dict(Vec::new()));
    let mut zero = config.get("zero_optimization").cloned().unwrap_or(Object::Dict(Vec::new()));
    zero.set("stage", Object::Int(state.stage.into()));
    config.set("zero_optimization", zero);
    // the batch of all ranks follows from the others
    if let (Some(Object::Int(micro)), Some(Object::Int(steps)), Some(_)) = (
        config.get("train_micro_batch_size_per_gpu").cloned(),
        config.get("gradient_accumulation_steps").cloned(),
        config.get("train_batch_size"),
    ) {
        let all = micro.saturating_mul(steps).saturating_mul(state.world.into());
        config.set("train_batch_size", Object::Int(all));
    }
    config
}

/// Names and shapes.
pub(super) fn shapes(state: &State, weights: &[usize]) -> Object {
    Object::ordered(weights.iter().map(|&w| (state.name(w), Object::Size(state.tensors[w].shape.clone()))))
}

/// `alias → stored name`.
pub(super) fn shared(state: &State) -> Object {
    Object::dict(state.ties.iter().map(|t| (&t.alias, Object::text(&t.target))))
}

/// The type of a weight in the module.
fn module_dtype(state: &State, weight: usize) -> Dtype {
    match state.frozen.contains(&weight) {
        true => state.tensors[weight].dtype,
        false => state.precision,
    }
}

/// A whole tensor of a type that torch computes with, or as it is stored.
pub(super) fn whole(state: &State, storages: &mut Storages, tensor: usize, dtype: Dtype) -> Object {
    let info = &state.tensors[tensor];
    let n = info.elements();
    match info.dtype.is_float() {
        true => storages.tensor(dtype, info.shape.clone(), vec![Span::Of(tensor, 0..n)]),
        false => storages.tensor(info.dtype, info.shape.clone(), vec![Span::Raw(tensor, n)]),
    }
}

/// The module: weights (empty in stage 3), their aliases, and buffers, in the module's own order where it is known.
fn module(state: &State, storages: &mut Storages) -> Object {
    let mut found: Vec<(String, Object)> = Vec::new();
    let weights = state.groups.iter().flat_map(|g| g.weights.iter()).chain(&state.frozen);
    for &w in weights {
        let dtype = module_dtype(state, w);
        let tensor = match state.stage {
            3 => storages.tensor(dtype, vec![0], Vec::new()),
            _ => whole(state, storages, w, dtype),
        };
        found.push((state.name(w).to_owned(), tensor));
    }
    let value_of = |found: &[(String, Object)], name: &str| {
        found.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone())
    };
    for tie in &state.ties {
        if let Some(tensor) = value_of(&found, &tie.target) {
            found.push((tie.alias.clone(), tensor));
        }
    }
    for &b in &state.buffers {
        found.push((state.name(b).to_owned(), whole(state, storages, b, state.tensors[b].dtype)));
    }
    let place = |name: &str| state.extras.module.iter().position(|n| n == name).unwrap_or(usize::MAX);
    let order: std::collections::HashMap<String, usize> = match state.extras.module.is_empty() {
        true => (0..state.tensors.len()).map(|i| (state.tensors[i].name.clone(), i)).collect(),
        false => found.iter().map(|(n, _)| (n.clone(), place(n))).collect(),
    };
    found.sort_by_key(|(name, _)| order.get(name).copied().unwrap_or(usize::MAX));
    Object::ordered(found)
}

fn model(state: &State, flats: &[Flat], rank: u32, path: String) -> FilePlan {
    let mut storages = Storages::default();
    let module = module(state, &mut storages);
    let fragments: Vec<(String, Object)> = state
        .said_frozen
        .iter()
        .map(|&w| {
            let dtype = module_dtype(state, w);
            let tensor = match state.stage {
                3 => storages.tensor(dtype, vec![share(state, w)], slice(state, w, rank)),
                _ => whole(state, &mut storages, w, dtype),
            };
            (state.name(w).to_owned(), tensor)
        })
        .collect();
    let groups = flats.iter().map(|f| shapes(state, f.weights(state))).collect();
    let mut pairs = vec![
        ("module".to_owned(), module),
        ("buffer_names".into(), names(state, &state.buffers)),
        ("optimizer".into(), Object::None),
        ("param_shapes".into(), Object::List(groups)),
        ("frozen_param_shapes".into(), shapes(state, &state.said_frozen)),
        ("shared_params".into(), shared(state)),
        ("frozen_param_fragments".into(), Object::ordered(fragments)),
    ];
    pairs.extend(engine(state, &mut storages, state.world));
    storages.file(path, Object::dict(pairs))
}

pub(super) fn names(state: &State, tensors: &[usize]) -> Object {
    Object::List(tensors.iter().map(|&t| Object::text(state.name(t))).collect())
}

/// What the engine and the client keep in a model file.
pub(super) fn engine(state: &State, storages: &mut Storages, world: u32) -> Vec<(String, Object)> {
    let taken = |key: &str| state.extras.model.iter().find(|(k, _)| k == key).map(|(_, v)| v);
    let mut pairs = vec![("lr_scheduler".to_owned(), storages.taken(&state.extras.scheduler))];
    for key in ["data_sampler", "random_ltd"] {
        pairs.push((key.into(), storages.taken(taken(key).unwrap_or(&Object::None))));
    }
    pairs.push(("skipped_steps".into(), Object::count(state.extras.skipped)));
    pairs.push(("global_steps".into(), Object::count(state.step)));
    // without it DeepSpeed counts steps × batch
    pairs.extend(state.samples.map(|n| ("global_samples".to_owned(), Object::count(n))));
    pairs.push(("dp_world_size".into(), Object::count(world.into())));
    pairs.push(("mp_world_size".into(), Object::Int(1)));
    pairs.push(("ds_config".into(), storages.taken(&config(state))));
    pairs.push(("ds_version".into(), Object::text(&state.version)));
    let made: Vec<String> = pairs.iter().map(|(k, _)| k.clone()).collect();
    for (key, value) in &state.extras.model {
        if !made.contains(key) {
            pairs.push((key.clone(), storages.taken(value)));
        }
    }
    pairs
}

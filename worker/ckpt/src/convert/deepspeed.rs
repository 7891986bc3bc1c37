//! Plans a ZeRO checkpoint in DeepSpeed's layout, for any stage and number of ranks.
use super::file_plan::{FilePlan, StorageBuilder, StorageSpan};
use super::notice::ConvertNotice;
use super::param_groups::WeightGroup;
use super::training_state::SourceState;
use super::{ConvertOptions, FileContent, OutputPlan};
use crate::catalog::TensorRole;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::pickle::Object;
use crate::state::LossScale;
use std::ops::Range;

const LOSS_SCALER_CLASS: &str = "deepspeed.runtime.fp16.loss_scaler.LossScaler";
const DYNAMIC_LOSS_SCALER_CLASS: &str = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler";
const STAGE_ENUM: &str = "deepspeed.runtime.zero.config.ZeroStageEnum";
const FRAGMENT_CLASS: &str = "deepspeed.utils.tensor_fragment.fragment_address";

/// Parameters that DeepSpeed flattens into one array: a parameter group, or in stage 3 a sub-group
/// of one.
struct FlatGroup {
    /// Index of the parameter group.
    group: usize,
    /// Positions of the parameters in the group.
    members: Range<usize>,
    /// Number of updates that the parameters had.
    step: f64,
}

/// The name of an optimizer state in torch's `state_dict`.
fn torch_state_name(role: TensorRole) -> &'static str {
    match role {
        TensorRole::Momentum => "momentum_buffer",
        other => other.name(),
    }
}

/// Plans the optimizer and model files of every rank, and `latest`.
pub(super) fn plan(state: &mut SourceState, options: &ConvertOptions) -> Result<OutputPlan> {
    let (stage, world, tag) = (state.stage, state.world, state.tag());
    complete_options(state);
    let flats = flat_groups(state, options.sub_group_size)?;
    let mut files = Vec::new();
    let prefix = if state.precision == Dtype::BF16 { "bf16_" } else { "" };
    for rank in 0..world {
        let path = format!("{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
        files.push(match stage {
            3 => stage3_optimizer_file(state, &flats, rank, path),
            _ => stage12_optimizer_file(state, &flats, rank, path),
        });
    }
    for rank in 0..if stage == 3 { world } else { 1 } {
        let path = match stage {
            3 => format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"),
            _ => format!("{tag}/mp_rank_00_model_states.pt"),
        };
        files.push(model_file(state, &flats, rank, path));
    }
    files.push(FilePlan { path: "latest".into(), content: FileContent::Bytes(tag.into_bytes()) });
    if options.sub_group_size < 1_000_000_000 && stage == 3 {
        state.notices.push(ConvertNotice::SubGroupSize { elements: options.sub_group_size });
    }
    Ok(OutputPlan { files, stage: Some(stage), world })
}

/// Adds the options that torch's optimizers require in every group and that the source may lack.
pub(super) fn complete_options(state: &mut SourceState) {
    let adam = state.roles.contains(&TensorRole::ExpAvg);
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

/// The flat groups; in stage 3 each parameter group is split into sub-groups the way DeepSpeed does
/// it.
fn flat_groups(state: &SourceState, sub_group_size: u64) -> Result<Vec<FlatGroup>> {
    let mut flats = Vec::new();
    for (g, group) in state.groups.iter().enumerate() {
        let mut push = |members: Range<usize>| -> Result<()> {
            let step = state.common_update_count(group, members.clone())?;
            flats.push(FlatGroup { group: g, members, step });
            Ok(())
        };
        let count = group.weights.len();
        if state.stage < 3 {
            push(0..count)?;
            continue;
        }
        let (mut from, mut filled) = (0, 0);
        for (i, &weight) in group.weights.iter().enumerate() {
            filled += elements_per_rank(state, weight);
            if filled >= sub_group_size || i + 1 == count {
                push(from..i + 1)?;
                (from, filled) = (i + 1, 0);
            }
        }
    }
    Ok(flats)
}

/// Elements of a tensor that each rank stores in stage 3, padding included.
fn elements_per_rank(state: &SourceState, tensor: usize) -> u64 {
    state.elements(tensor).div_ceil(u64::from(state.world))
}

impl FlatGroup {
    fn group_weights<'a>(&self, state: &'a SourceState) -> &'a [usize] {
        &state.groups[self.group].weights[self.members.clone()]
    }
}

/// The tensors of one role for these weights; every weight of a group has them.
fn role_tensors(state: &SourceState, weights: &[usize], role: TensorRole) -> Vec<usize> {
    match role {
        TensorRole::Weight => weights.to_vec(),
        _ => weights.iter().filter_map(|&w| state.optimizer_state_index(w, role)).collect(),
    }
}

/// Elements `range` of the concatenated tensors, padded with zeros to the end of the range.
fn concatenated_spans(state: &SourceState, tensors: &[usize], range: Range<u64>) -> Vec<StorageSpan> {
    let (mut spans, mut begin) = (Vec::new(), 0);
    for &tensor in tensors {
        let end = begin + state.elements(tensor);
        let (from, to) = (range.start.max(begin), range.end.min(end));
        if from < to {
            spans.push(StorageSpan::Elements(tensor, from - begin..to - begin));
        }
        begin = end;
    }
    let rest = range.end.saturating_sub(begin.max(range.start));
    spans.push(StorageSpan::Zeros(rest));
    spans
}

/// A rank's slice of a tensor in stage 3, padded with zeros.
fn rank_slice(state: &SourceState, tensor: usize, rank: u32) -> Vec<StorageSpan> {
    let (count, share) = (state.elements(tensor), elements_per_rank(state, tensor));
    let from = (u64::from(rank) * share).min(count);
    let to = (from + share).min(count);
    vec![StorageSpan::Elements(tensor, from..to), StorageSpan::Zeros(share - (to - from))]
}

/// DeepSpeed's loss scaler: dynamic with default settings where the source has a loss scale,
/// otherwise static with scale 1.
fn loss_scaler(state: &SourceState) -> Object {
    let Some(LossScale { scale, steps }) = state.loss_scale else {
        let attributes = [("cur_scale", Object::Float(1.0)), ("dynamic", Object::Bool(false))];
        return Object::Instance {
            class: LOSS_SCALER_CLASS.into(),
            state: Box::new(Object::dict(attributes)),
        };
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
    Object::Instance { class: DYNAMIC_LOSS_SCALER_CLASS.into(), state: Box::new(Object::dict(attributes)) }
}

/// An entry of DeepSpeed's optimizer file other than the states: that of the source, or its
/// default.
fn optimizer_field(state: &SourceState, key: &str) -> Object {
    let value = state.passthrough.optimizer.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    value.unwrap_or_else(|| match key {
        "loss_scaler" => loss_scaler(state),
        "dynamic_loss_scale" => Object::Bool(state.loss_scale.is_some()),
        _ => Object::Bool(false),
    })
}

/// Adds the gradient-norm limit where the source has one. Files of stage 3 have none, and an
/// invented one would override the config's when stages 1 and 2 load it.
fn add_clipping(state: &SourceState, optimizer: &mut Object) {
    if let Some((key, clip)) = state.passthrough.optimizer.iter().find(|(key, _)| key == "clip_grad") {
        optimizer.set(key, clip.clone());
    }
}

fn zero_stage(stage: u8) -> Object {
    Object::Call { function: STAGE_ENUM.into(), args: vec![Object::Int(stage.into())] }
}

/// `{state, param_groups}` of torch's optimizer. `spans(flat, role)` are the elements that the rank
/// stores.
fn optimizer_state_object(
    state: &SourceState,
    flats: &[FlatGroup],
    storages: &mut StorageBuilder,
    spans: &dyn Fn(&FlatGroup, TensorRole) -> Vec<StorageSpan>,
) -> Object {
    let mut states = Vec::new();
    for (i, flat) in flats.iter().enumerate() {
        let mut values = vec![("step", storages.scalar(flat.step))];
        values.extend(
            state.roles.iter().map(|&role| (torch_state_name(role), storages.flat_tensor(spans(flat, role)))),
        );
        states.push((Object::count(i as u64), Object::dict(values)));
    }
    let ids = |g: usize| {
        let members = flats.iter().enumerate().filter(|(_, f)| f.group == g);
        Object::List(members.map(|(i, _)| Object::count(i as u64)).collect())
    };
    let group = |(g, group): (usize, &WeightGroup)| {
        let mut options = group.options.clone();
        options.push(("params".into(), ids(g)));
        Object::dict(options)
    };
    let groups = state.groups.iter().enumerate().map(group).collect();
    Object::dict([("state", Object::Dict(states)), ("param_groups", Object::List(groups))])
}

/// A rank's optimizer file of stages 1 and 2. It stores a piece of each flat group; with padding,
/// all ranks' pieces have equal sizes.
fn stage12_optimizer_file(state: &SourceState, flats: &[FlatGroup], rank: u32, path: String) -> FilePlan {
    let world = u64::from(state.world);
    let mut storages = StorageBuilder::default();
    let total = |flat: &FlatGroup| flat.group_weights(state).iter().map(|&w| state.elements(w)).sum::<u64>();
    // DeepSpeed's collectives need pieces that begin at an even element
    let piece = |flat: &FlatGroup| total(flat).next_multiple_of(2 * world) / world;
    let range = |flat: &FlatGroup| u64::from(rank) * piece(flat)..(u64::from(rank) + 1) * piece(flat);
    let unpadded =
        |flat: &FlatGroup| total(flat).clamp(range(flat).start, range(flat).end) - range(flat).start;
    let base = optimizer_state_object(state, flats, &mut storages, &|flat, role| {
        concatenated_spans(state, &role_tensors(state, flat.group_weights(state), role), range(flat))
    });
    let masters = flats.iter().map(|flat| {
        let start = range(flat).start;
        storages.flat_tensor(concatenated_spans(
            state,
            flat.group_weights(state),
            start..start + unpadded(flat),
        ))
    });
    let masters = Object::List(masters.collect());
    let per_flat = |f: &dyn Fn(&FlatGroup) -> Object| Object::List(flats.iter().map(f).collect());
    let mut optimizer = Object::dict([
        ("loss_scaler", storages.adopt(&optimizer_field(state, "loss_scaler"))),
        ("dynamic_loss_scale", optimizer_field(state, "dynamic_loss_scale")),
        ("overflow", optimizer_field(state, "overflow")),
        ("base_optimizer_state", base),
        ("single_partition_of_fp32_groups", masters),
        ("zero_stage", zero_stage(state.stage)),
        ("group_paddings", per_flat(&|f| Object::count(piece(f) - unpadded(f)))),
        (
            "param_alignment_paddings",
            per_flat(&|f| Object::List(f.group_weights(state).iter().map(|_| Object::Int(0)).collect())),
        ),
        ("partition_count", per_flat(&|_| Object::count(world))),
        ("ds_version", Object::text(&state.version)),
        ("param_slice_mappings", per_flat(&|f| fragments(state, f.group_weights(state), range(f)))),
    ]);
    add_clipping(state, &mut optimizer);
    finish_optimizer_file(state, storages, optimizer, path)
}

/// The parameters in a piece, each with the position and number of its elements.
fn fragments(state: &SourceState, weights: &[usize], range: Range<u64>) -> Object {
    let (mut found, mut begin) = (Vec::new(), 0);
    for &w in weights {
        let end = begin + state.elements(w);
        let (from, to) = (range.start.max(begin), range.end.min(end));
        if from < to {
            let address = [("numel", Object::count(to - from)), ("start", Object::count(from - range.start))];
            let address =
                Object::Instance { class: FRAGMENT_CLASS.into(), state: Box::new(Object::dict(address)) };
            found.push((state.name(w), address));
        }
        begin = end;
    }
    Object::ordered(found)
}

/// A rank's optimizer file of stage 3, which stores a slice of each parameter.
fn stage3_optimizer_file(state: &SourceState, flats: &[FlatGroup], rank: u32, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let slices = |flat: &FlatGroup, role: TensorRole| -> Vec<StorageSpan> {
        role_tensors(state, flat.group_weights(state), role)
            .into_iter()
            .flat_map(|t| rank_slice(state, t, rank))
            .collect()
    };
    let base = optimizer_state_object(state, flats, &mut storages, &slices);
    let masters = flats.iter().map(|flat| storages.flat_tensor(slices(flat, TensorRole::Weight))).collect();
    let mut optimizer = Object::dict([
        ("zero_stage", zero_stage(3)),
        ("loss_scaler", storages.adopt(&optimizer_field(state, "loss_scaler"))),
        ("dynamic_loss_scale", optimizer_field(state, "dynamic_loss_scale")),
        ("overflow", optimizer_field(state, "overflow")),
        ("partition_count", Object::count(state.world.into())),
        ("optimizer_state_dict", base),
        ("fp32_flat_groups", Object::List(masters)),
    ]);
    add_clipping(state, &mut optimizer);
    finish_optimizer_file(state, storages, optimizer, path)
}

fn finish_optimizer_file(
    state: &SourceState,
    mut storages: StorageBuilder,
    optimizer: Object,
    path: String,
) -> FilePlan {
    let value = Object::dict([
        ("optimizer_state_dict", optimizer),
        ("ds_config", storages.adopt(&deepspeed_config(state))),
        ("ds_version", Object::text(&state.version)),
    ]);
    storages.into_file(path, value)
}

/// The source's DeepSpeed config with the stage and batch size of the result.
pub(super) fn deepspeed_config(state: &SourceState) -> Object {
    let source = state.passthrough.model.iter().find(|(k, _)| k == "ds_config").map(|(_, v)| v.clone());
    let mut config = source.filter(|c| matches!(c, Object::Dict(_))).unwrap_or(Object::Dict(Vec::new()));
    let mut zero = config.get("zero_optimization").cloned().unwrap_or(Object::Dict(Vec::new()));
    zero.set("stage", Object::Int(state.stage.into()));
    config.set("zero_optimization", zero);
    // the global batch follows from micro-batch, accumulation steps and ranks
    if let (Some(Object::Int(micro)), Some(Object::Int(steps)), Some(_)) = (
        config.get("train_micro_batch_size_per_gpu").cloned(),
        config.get("gradient_accumulation_steps").cloned(),
        config.get("train_batch_size"),
    ) {
        let global = micro.saturating_mul(steps).saturating_mul(state.world.into());
        config.set("train_batch_size", Object::Int(global));
    }
    config
}

/// The ordered dict of the weights' names and shapes.
pub(super) fn shape_dict(state: &SourceState, weights: &[usize]) -> Object {
    Object::ordered(weights.iter().map(|&w| (state.name(w), Object::Size(state.tensors[w].shape.clone()))))
}

/// The dict of tied weights: alias → stored name.
pub(super) fn tied_names(state: &SourceState) -> Object {
    Object::dict(state.ties.iter().map(|t| (&t.alias, Object::text(&t.target))))
}

/// The dtype of a weight in the module.
fn module_dtype(state: &SourceState, weight: usize) -> Dtype {
    match state.frozen.contains(&weight) {
        true => state.tensors[weight].dtype,
        false => state.precision,
    }
}

/// A complete tensor: a floating-point one as `dtype`, any other in its stored dtype.
pub(super) fn full_tensor(
    state: &SourceState,
    storages: &mut StorageBuilder,
    tensor: usize,
    dtype: Dtype,
) -> Object {
    let info = &state.tensors[tensor];
    let n = info.elements();
    match info.dtype.is_float() {
        true => storages.tensor(dtype, info.shape.clone(), vec![StorageSpan::Elements(tensor, 0..n)]),
        false => storages.tensor(info.dtype, info.shape.clone(), vec![StorageSpan::Raw(tensor, n)]),
    }
}

/// The module's `state_dict`: weights (empty in stage 3), their aliases, and buffers, in the
/// module's order where it is known.
fn module_dict(state: &SourceState, storages: &mut StorageBuilder) -> Object {
    let mut found: Vec<(String, Object)> = Vec::new();
    let weights = state.groups.iter().flat_map(|g| g.weights.iter()).chain(&state.frozen);
    for &w in weights {
        let dtype = module_dtype(state, w);
        let tensor = match state.stage {
            3 => storages.tensor(dtype, vec![0], Vec::new()),
            _ => full_tensor(state, storages, w, dtype),
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
        found.push((state.name(b).to_owned(), full_tensor(state, storages, b, state.tensors[b].dtype)));
    }
    let position = |name: &str| state.passthrough.module.iter().position(|n| n == name).unwrap_or(usize::MAX);
    let order: std::collections::HashMap<String, usize> = match state.passthrough.module.is_empty() {
        true => (0..state.tensors.len()).map(|i| (state.tensors[i].name.clone(), i)).collect(),
        false => found.iter().map(|(n, _)| (n.clone(), position(n))).collect(),
    };
    found.sort_by_key(|(name, _)| order.get(name).copied().unwrap_or(usize::MAX));
    Object::ordered(found)
}

/// A rank's model file. In stage 3 each rank has one, with slices of the frozen weights.
fn model_file(state: &SourceState, flats: &[FlatGroup], rank: u32, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let module = module_dict(state, &mut storages);
    let fragments: Vec<(String, Object)> = state
        .frozen_at_save
        .iter()
        .map(|&w| {
            let dtype = module_dtype(state, w);
            let tensor = match state.stage {
                3 => storages.tensor(dtype, vec![elements_per_rank(state, w)], rank_slice(state, w, rank)),
                _ => full_tensor(state, &mut storages, w, dtype),
            };
            (state.name(w).to_owned(), tensor)
        })
        .collect();
    let groups = flats.iter().map(|f| shape_dict(state, f.group_weights(state))).collect();
    let mut pairs = vec![
        ("module".to_owned(), module),
        ("buffer_names".into(), name_list(state, &state.buffers)),
        ("optimizer".into(), Object::None),
        ("param_shapes".into(), Object::List(groups)),
        ("frozen_param_shapes".into(), shape_dict(state, &state.frozen_at_save)),
        ("shared_params".into(), tied_names(state)),
        ("frozen_param_fragments".into(), Object::ordered(fragments)),
    ];
    pairs.extend(engine_entries(state, &mut storages, state.world));
    storages.into_file(path, Object::dict(pairs))
}

pub(super) fn name_list(state: &SourceState, tensors: &[usize]) -> Object {
    Object::List(tensors.iter().map(|&t| Object::text(state.name(t))).collect())
}

/// The entries that DeepSpeed's engine and its client keep in a model file.
pub(super) fn engine_entries(
    state: &SourceState,
    storages: &mut StorageBuilder,
    world: u32,
) -> Vec<(String, Object)> {
    let source_entry = |key: &str| state.passthrough.model.iter().find(|(k, _)| k == key).map(|(_, v)| v);
    let mut pairs = vec![("lr_scheduler".to_owned(), storages.adopt(&state.passthrough.scheduler))];
    for key in ["data_sampler", "random_ltd"] {
        pairs.push((key.into(), storages.adopt(source_entry(key).unwrap_or(&Object::None))));
    }
    pairs.push(("skipped_steps".into(), Object::count(state.passthrough.skipped)));
    pairs.push(("global_steps".into(), Object::count(state.step)));
    // without this entry DeepSpeed computes steps × batch
    pairs.extend(state.samples.map(|n| ("global_samples".to_owned(), Object::count(n))));
    pairs.push(("dp_world_size".into(), Object::count(world.into())));
    pairs.push(("mp_world_size".into(), Object::Int(1)));
    pairs.push(("ds_config".into(), storages.adopt(&deepspeed_config(state))));
    pairs.push(("ds_version".into(), Object::text(&state.version)));
    let written: Vec<String> = pairs.iter().map(|(k, _)| k.clone()).collect();
    for (key, value) in &state.passthrough.model {
        if !written.contains(key) {
            pairs.push((key.clone(), storages.adopt(value)));
        }
    }
    pairs
}

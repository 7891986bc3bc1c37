//! Plans the files of a ZeRO checkpoint in DeepSpeed's layout, into which another checkpoint is
//! converted.
use super::file_plan::{FileContent, FilePlan, OutputPlan, StorageBuilder, StorageSpan};
use super::notice::ConvertNotice;
use super::options::ConvertOptions;
use super::param_groups::IndexedParamGroup;
use super::source_state::SourceState;
use crate::catalog::LossScale;
use crate::codec::pickle::PythonObject;
use crate::error::Result;
use crate::tensor::{Dtype, TensorRole};
use std::collections::HashMap;
use std::ops::Range;

/// Name of DeepSpeed's Python class for a constant loss scale.
const LOSS_SCALER_CLASS: &str = "deepspeed.runtime.fp16.loss_scaler.LossScaler";
/// Name of DeepSpeed's Python class for a dynamic loss scale.
const DYNAMIC_LOSS_SCALER_CLASS: &str = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler";
/// Name of DeepSpeed's Python enum for ZeRO stages.
const STAGE_ENUM_CLASS: &str = "deepspeed.runtime.zero.config.ZeroStageEnum";
/// Name of DeepSpeed's Python class for the address of a parameter in a flat array.
const FRAGMENT_ADDRESS_CLASS: &str = "deepspeed.utils.tensor_fragment.fragment_address";

/// A group of consecutive parameters whose elements DeepSpeed stores in its optimizer files as one
/// flat array. These are all parameters of a group at stages 1 and 2, and the parameters of a
/// sub-group at stage 3.
struct FlatGroup {
    /// Index of the parameter group.
    group: usize,
    /// Positions of the flattened parameters in the list of the parameter group's weights.
    members: Range<usize>,
    /// Update count, which all parameters of the flat group share.
    step: f64,
}

/// Plans the files of a ZeRO checkpoint in DeepSpeed's layout: the optimizer and model files of
/// every rank, and `latest`. Also adds missing options to the parameter groups in `state`, and
/// notices for the user.
///
/// # Errors
/// Fails if the parameters of a group had different numbers of updates.
pub(super) fn plan_deepspeed(state: &mut SourceState, options: &ConvertOptions) -> Result<OutputPlan> {
    let (stage, world, tag) = (state.stage, state.world, state.choose_tag());
    add_default_options(state);
    let flats = plan_flat_groups(state, options.sub_group_size)?;
    let mut files = Vec::new();
    let prefix = if state.precision == Dtype::BF16 { "bf16_" } else { "" };
    for rank in 0..world {
        let path = format!("{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
        files.push(match stage {
            3 => plan_stage3_optimizer_file(state, &flats, rank, path),
            _ => plan_stage12_optimizer_file(state, &flats, rank, path),
        });
    }
    for rank in 0..if stage == 3 { world } else { 1 } {
        let path = match stage {
            3 => format!("{tag}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"),
            _ => format!("{tag}/mp_rank_00_model_states.pt"),
        };
        files.push(plan_model_file(state, &flats, rank, path));
    }
    files.push(FilePlan { path: "latest".into(), content: FileContent::Bytes(tag.into_bytes()) });
    if options.sub_group_size < 1_000_000_000 && stage == 3 {
        state.notices.push(ConvertNotice::SubGroupSize { elements: options.sub_group_size });
    }
    Ok(OutputPlan { files, stage: Some(stage), world })
}

/// Adds to each parameter group the options that torch's AdamW requires and that the source
/// checkpoint lacks, with their default values. Does nothing for other optimizers.
pub(super) fn add_default_options(state: &mut SourceState) {
    let adam = state.roles.contains(&TensorRole::ExpAvg);
    for group in &mut state.groups {
        let mut default = |key: &str, value: PythonObject| {
            if !group.options.iter().any(|(k, _)| k == key) {
                group.options.push((key.into(), value));
            }
        };
        if adam {
            default("decoupled_weight_decay", PythonObject::Bool(true));
            for key in ["amsgrad", "maximize", "capturable", "differentiable"] {
                default(key, PythonObject::Bool(false));
            }
            default("foreach", PythonObject::None);
            default("fused", PythonObject::None);
        }
    }
}

/// Determines which consecutive parameters of each parameter group DeepSpeed concatenates to one
/// flat array. At stage 3 splits each group into sub-groups of `sub_group_size` elements per rank,
/// by DeepSpeed's algorithm.
///
/// # Errors
/// Fails if the parameters of a flat group had different numbers of updates.
fn plan_flat_groups(state: &SourceState, sub_group_size: u64) -> Result<Vec<FlatGroup>> {
    let mut flats = Vec::new();
    for (g, group) in state.groups.iter().enumerate() {
        let mut push = |members: Range<usize>| -> Result<()> {
            let step = state.require_common_update_count(group, members.clone())?;
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
            filled += count_elements_per_rank(state, weight);
            if filled >= sub_group_size || i + 1 == count {
                push(from..i + 1)?;
                (from, filled) = (i + 1, 0);
            }
        }
    }
    Ok(flats)
}

/// Returns how many elements of a tensor one rank stores at ZeRO stage 3, which is the number of
/// all elements divided by the ranks, rounded up.
fn count_elements_per_rank(state: &SourceState, tensor: usize) -> u64 {
    state.element_count(tensor).div_ceil(u64::from(state.world))
}

impl FlatGroup {
    /// Returns the indices, in the source checkpoint's list of tensors, of the weights that this
    /// flat array contains.
    fn weight_indices<'a>(&self, state: &'a SourceState) -> &'a [usize] {
        &state.groups[self.group].weights[self.members.clone()]
    }
}

/// Returns the indices of the source checkpoint's tensors that store one kind of optimizer state,
/// such as Adam's first moment, for the given weights. Skips weights without such a tensor.
fn find_role_tensors(state: &SourceState, weights: &[usize], role: TensorRole) -> Vec<usize> {
    match role {
        TensorRole::Weight => weights.to_vec(),
        _ => weights.iter().filter_map(|&w| state.find_optimizer_state_index(w, role)).collect(),
    }
}

/// Returns the ranges of source tensors that make up the elements `range` of a flat array, which is
/// the concatenation of the tensors `tensors`. If the range ends after the last tensor, zeros fill
/// the rest.
fn plan_concatenated_spans(state: &SourceState, tensors: &[usize], range: Range<u64>) -> Vec<StorageSpan> {
    let inside = intersect_concatenation(state, tensors, range.clone());
    let mut spans: Vec<StorageSpan> =
        inside.into_iter().map(|(tensor, _, elements)| StorageSpan::Elements(tensor, elements)).collect();
    let total: u64 = tensors.iter().map(|&tensor| state.element_count(tensor)).sum();
    spans.push(StorageSpan::Zeros(range.end.saturating_sub(total.max(range.start))));
    spans
}

/// Finds the parts of source tensors that fall into the range `range` of a flat array, in which the
/// tensors `tensors` follow one another. Returns for each tensor in the range its index, the
/// position of its first such element within the range, and its elements in the range.
fn intersect_concatenation(
    state: &SourceState,
    tensors: &[usize],
    range: Range<u64>,
) -> Vec<(usize, u64, Range<u64>)> {
    let (mut found, mut begin) = (Vec::new(), 0);
    for &tensor in tensors {
        let end = begin + state.element_count(tensor);
        let (from, to) = (range.start.max(begin), range.end.min(end));
        if from < to {
            found.push((tensor, from - range.start, from - begin..to - begin));
        }
        begin = end;
    }
    found
}

/// Returns the elements of one source tensor that the rank `rank` stores at ZeRO stage 3, and the
/// number of zeros that follow them. Zeros pad the slice to the length that all ranks store.
fn plan_rank_slice(state: &SourceState, tensor: usize, rank: u32) -> Vec<StorageSpan> {
    let (count, share) = (state.element_count(tensor), count_elements_per_rank(state, tensor));
    let from = (u64::from(rank) * share).min(count);
    let to = (from + share).min(count);
    vec![StorageSpan::Elements(tensor, from..to), StorageSpan::Zeros(share - (to - from))]
}

/// Creates the loss scaler object that DeepSpeed expects in its optimizer files.
fn make_loss_scaler(state: &SourceState) -> PythonObject {
    let Some(LossScale { scale, steps }) = state.loss_scale else {
        let attributes = [("cur_scale", PythonObject::Float(1.0)), ("dynamic", PythonObject::Bool(false))];
        return PythonObject::new_instance(LOSS_SCALER_CLASS, attributes);
    };
    let attributes = [
        ("cur_scale", PythonObject::Float(scale)),
        ("dynamic", PythonObject::Bool(true)),
        ("cur_iter", PythonObject::from_count(steps)),
        ("last_overflow_iter", PythonObject::Int(-1)),
        ("scale_factor", PythonObject::Float(2.0)),
        ("scale_window", PythonObject::Int(1000)),
        ("min_scale", PythonObject::Int(1)),
        ("delayed_shift", PythonObject::Int(1)),
        ("cur_hysteresis", PythonObject::Int(1)),
        ("consecutive_hysteresis", PythonObject::Bool(false)),
        ("raise_error_at_min_scale", PythonObject::Bool(true)),
        ("dtype", PythonObject::Global("torch.float16".into())),
    ];
    PythonObject::new_instance(DYNAMIC_LOSS_SCALER_CLASS, attributes)
}

/// Returns the value for the key `key` of a DeepSpeed optimizer file, as the source checkpoint
/// stores it or with a default value. Takes the value from the source, or the default of this key
/// if the source lacks the entry.
fn make_optimizer_file_entry(state: &SourceState, key: &str) -> PythonObject {
    state.passthrough.deepspeed_optimizer_entry(key).cloned().unwrap_or_else(|| match key {
        "loss_scaler" => make_loss_scaler(state),
        "dynamic_loss_scale" => PythonObject::Bool(state.loss_scale.is_some()),
        _ => PythonObject::Bool(false),
    })
}

/// Adds the limit of the gradient norm to `optimizer`, the dict of an optimizer file, if the source
/// checkpoint records the limit. A source checkpoint of stage 3 does not have this limit. No
/// default is added, since at stages 1 and 2 DeepSpeed would use the default instead of the limit
/// in its config.
fn add_gradient_clipping(state: &SourceState, optimizer: &mut PythonObject) {
    if let Some(clip) = state.passthrough.deepspeed_optimizer_entry("clip_grad") {
        optimizer.set("clip_grad", clip.clone());
    }
}

/// Returns the Python object by which DeepSpeed's files state the ZeRO stage `stage`.
fn make_zero_stage_object(stage: u8) -> PythonObject {
    PythonObject::Call { function: STAGE_ENUM_CLASS.into(), args: vec![PythonObject::Int(stage.into())] }
}

/// Creates the `state_dict` of torch's optimizer for one rank's optimizer file, and adds a storage
/// for each tensor of the `state_dict` to `storages`. `spans(flat, role)` must return the elements
/// that the rank stores of the tensors of this role in a flat group.
fn make_optimizer_state(
    state: &SourceState,
    flats: &[FlatGroup],
    storages: &mut StorageBuilder,
    spans: &dyn Fn(&FlatGroup, TensorRole) -> Vec<StorageSpan>,
) -> PythonObject {
    let mut states = Vec::new();
    for (i, flat) in flats.iter().enumerate() {
        let mut values = vec![("step", storages.add_scalar(flat.step))];
        values.extend(state.roles.iter().filter_map(|&role| {
            role.torch_key().map(|key| (key, storages.add_flat_tensor(spans(flat, role))))
        }));
        states.push((PythonObject::from_count(i as u64), PythonObject::dict_from_pairs(values)));
    }
    let ids = |g: usize| {
        let members = flats.iter().enumerate().filter(|(_, f)| f.group == g);
        PythonObject::List(members.map(|(i, _)| PythonObject::from_count(i as u64)).collect())
    };
    let group = |(g, group): (usize, &IndexedParamGroup)| {
        let mut options = group.options.clone();
        options.push(("params".into(), ids(g)));
        PythonObject::dict_from_pairs(options)
    };
    let groups = state.groups.iter().enumerate().map(group).collect();
    PythonObject::dict_from_pairs([
        ("state", PythonObject::Dict(states)),
        ("param_groups", PythonObject::List(groups)),
    ])
}

/// Plans the optimizer file of one rank in a checkpoint of ZeRO stage 1 or 2. The file stores a
/// piece of each flat group. The flat group is padded, so that the pieces of all ranks have equal
/// sizes.
fn plan_stage12_optimizer_file(
    state: &SourceState,
    flats: &[FlatGroup],
    rank: u32,
    path: String,
) -> FilePlan {
    let world = u64::from(state.world);
    let mut storages = StorageBuilder::default();
    let total =
        |flat: &FlatGroup| flat.weight_indices(state).iter().map(|&w| state.element_count(w)).sum::<u64>();
    // DeepSpeed's collectives need pieces that begin at an even element
    let piece = |flat: &FlatGroup| total(flat).next_multiple_of(2 * world) / world;
    let range = |flat: &FlatGroup| u64::from(rank) * piece(flat)..(u64::from(rank) + 1) * piece(flat);
    let unpadded =
        |flat: &FlatGroup| total(flat).clamp(range(flat).start, range(flat).end) - range(flat).start;
    let base = make_optimizer_state(state, flats, &mut storages, &|flat, role| {
        plan_concatenated_spans(
            state,
            &find_role_tensors(state, flat.weight_indices(state), role),
            range(flat),
        )
    });
    let masters = flats.iter().map(|flat| {
        let start = range(flat).start;
        storages.add_flat_tensor(plan_concatenated_spans(
            state,
            flat.weight_indices(state),
            start..start + unpadded(flat),
        ))
    });
    let masters = PythonObject::List(masters.collect());
    let per_flat = |f: &dyn Fn(&FlatGroup) -> PythonObject| PythonObject::List(flats.iter().map(f).collect());
    let mut optimizer = PythonObject::dict_from_pairs([
        ("loss_scaler", storages.import_value(&make_optimizer_file_entry(state, "loss_scaler"))),
        ("dynamic_loss_scale", make_optimizer_file_entry(state, "dynamic_loss_scale")),
        ("overflow", make_optimizer_file_entry(state, "overflow")),
        ("base_optimizer_state", base),
        ("single_partition_of_fp32_groups", masters),
        ("zero_stage", make_zero_stage_object(state.stage)),
        ("group_paddings", per_flat(&|f| PythonObject::from_count(piece(f) - unpadded(f)))),
        (
            "param_alignment_paddings",
            per_flat(&|f| {
                PythonObject::List(f.weight_indices(state).iter().map(|_| PythonObject::Int(0)).collect())
            }),
        ),
        ("partition_count", per_flat(&|_| PythonObject::from_count(world))),
        ("ds_version", PythonObject::from_text(&state.version)),
        (
            "param_slice_mappings",
            per_flat(&|f| make_fragment_addresses(state, f.weight_indices(state), range(f))),
        ),
    ]);
    add_gradient_clipping(state, &mut optimizer);
    plan_optimizer_file(state, storages, optimizer, path)
}

/// Returns a Python dict that states, for each parameter, where its elements begin within one
/// rank's range of a flat array, and how many they are. `weights` are the parameters of the flat
/// array, and `range` is the range of its elements in the piece. Leaves out parameters without
/// elements in the piece.
fn make_fragment_addresses(state: &SourceState, weights: &[usize], range: Range<u64>) -> PythonObject {
    let address = |(weight, start, elements): (usize, u64, Range<u64>)| {
        let address = [
            ("numel", PythonObject::from_count(elements.end - elements.start)),
            ("start", PythonObject::from_count(start)),
        ];
        (state.tensor_name(weight), PythonObject::new_instance(FRAGMENT_ADDRESS_CLASS, address))
    };
    let inside = intersect_concatenation(state, weights, range);
    PythonObject::ordered_dict_from_pairs(inside.into_iter().map(address))
}

/// Plans the optimizer file of one rank in a checkpoint of ZeRO stage 3, which stores a slice of
/// each parameter.
fn plan_stage3_optimizer_file(state: &SourceState, flats: &[FlatGroup], rank: u32, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let slices = |flat: &FlatGroup, role: TensorRole| -> Vec<StorageSpan> {
        find_role_tensors(state, flat.weight_indices(state), role)
            .into_iter()
            .flat_map(|t| plan_rank_slice(state, t, rank))
            .collect()
    };
    let base = make_optimizer_state(state, flats, &mut storages, &slices);
    let masters =
        flats.iter().map(|flat| storages.add_flat_tensor(slices(flat, TensorRole::Weight))).collect();
    let mut optimizer = PythonObject::dict_from_pairs([
        ("zero_stage", make_zero_stage_object(3)),
        ("loss_scaler", storages.import_value(&make_optimizer_file_entry(state, "loss_scaler"))),
        ("dynamic_loss_scale", make_optimizer_file_entry(state, "dynamic_loss_scale")),
        ("overflow", make_optimizer_file_entry(state, "overflow")),
        ("partition_count", PythonObject::from_count(state.world.into())),
        ("optimizer_state_dict", base),
        ("fp32_flat_groups", PythonObject::List(masters)),
    ]);
    add_gradient_clipping(state, &mut optimizer);
    plan_optimizer_file(state, storages, optimizer, path)
}

/// Plans the DeepSpeed optimizer file at `path`, whose entry `optimizer_state_dict` is the dict
/// `optimizer`. The file contains the dict `optimizer` together with DeepSpeed's config and
/// version. `storages` are the storages to which tensors in `optimizer` refer.
fn plan_optimizer_file(
    state: &SourceState,
    mut storages: StorageBuilder,
    optimizer: PythonObject,
    path: String,
) -> FilePlan {
    let value = PythonObject::dict_from_pairs([
        ("optimizer_state_dict", optimizer),
        ("ds_config", storages.import_value(&make_deepspeed_config(state))),
        ("ds_version", PythonObject::from_text(&state.version)),
    ]);
    storages.into_file_plan(path, value)
}

/// Returns the source checkpoint's DeepSpeed config with the ZeRO stage and the global batch size
/// replaced by those of the converted checkpoint.
fn make_deepspeed_config(state: &SourceState) -> PythonObject {
    let source = state.passthrough.deepspeed_model_entry("ds_config");
    let empty = PythonObject::Dict(Vec::new());
    let mut config = source.filter(|c| matches!(c, PythonObject::Dict(_))).unwrap_or(&empty).clone();
    let mut zero = config.get("zero_optimization").unwrap_or(&empty).clone();
    zero.set("stage", PythonObject::Int(state.stage.into()));
    config.set("zero_optimization", zero);
    // the global batch follows from micro-batch, accumulation steps and ranks
    if let (Some(PythonObject::Int(micro)), Some(PythonObject::Int(steps)), Some(_)) = (
        config.get("train_micro_batch_size_per_gpu").cloned(),
        config.get("gradient_accumulation_steps").cloned(),
        config.get("train_batch_size"),
    ) {
        let global = micro.saturating_mul(steps).saturating_mul(state.world.into());
        config.set("train_batch_size", PythonObject::Int(global));
    }
    config
}

/// Returns a Python `OrderedDict` with the name and the shape of each weight in `weights`, in the
/// order of `weights`.
pub(super) fn make_shape_dict(state: &SourceState, weights: &[usize]) -> PythonObject {
    PythonObject::ordered_dict_from_pairs(
        weights.iter().map(|&w| (state.tensor_name(w), PythonObject::Size(state.tensors[w].shape.clone()))),
    )
}

/// Returns a Python dict that maps the alias of each tied weight to the name of the stored weight.
fn make_tie_dict(state: &SourceState) -> PythonObject {
    PythonObject::dict_from_pairs(state.ties.iter().map(|t| (&t.alias, PythonObject::from_text(&t.target))))
}

/// Chooses the dtype in which DeepSpeed's model file of the converted checkpoint stores a weight.
/// Frozen weights keep their stored dtype. Trained weights get the dtype in which the model
/// computes.
fn choose_module_dtype(state: &SourceState, weight: usize) -> Dtype {
    match state.frozen.binary_search(&weight).is_ok() {
        true => state.tensors[weight].dtype,
        false => state.precision,
    }
}

/// Adds a source tensor with all its elements to the planned torch file, and returns the Python
/// object that refers to the tensor in the pickle. A floating-point tensor is converted to `dtype`.
/// Other tensors keep their dtype.
pub(super) fn add_full_tensor(
    state: &SourceState,
    storages: &mut StorageBuilder,
    tensor: usize,
    dtype: Dtype,
) -> PythonObject {
    let info = &state.tensors[tensor];
    let n = info.element_count();
    match info.dtype.is_float() {
        true => storages.add_tensor(dtype, info.shape.clone(), vec![StorageSpan::Elements(tensor, 0..n)]),
        false => storages.add_tensor(info.dtype, info.shape.clone(), vec![StorageSpan::Raw(tensor, n)]),
    }
}

/// Creates the model's `state_dict` for a DeepSpeed model file, in which weights have all their
/// elements at ZeRO stages 1 and 2 and none at stage 3. The entries have the order of the module if
/// known, otherwise the order of the source's tensors.
fn make_model_state_dict(state: &SourceState, storages: &mut StorageBuilder) -> PythonObject {
    let mut found: Vec<(String, PythonObject)> = Vec::new();
    let weights = state.groups.iter().flat_map(|g| g.weights.iter()).chain(&state.frozen);
    for &w in weights {
        let dtype = choose_module_dtype(state, w);
        let tensor = match state.stage {
            3 => storages.add_tensor(dtype, vec![0], Vec::new()),
            _ => add_full_tensor(state, storages, w, dtype),
        };
        found.push((state.tensor_name(w).to_owned(), tensor));
    }
    let mut places: HashMap<String, usize> = found.iter().map(|(name, _)| name.clone()).zip(0..).collect();
    for tie in &state.ties {
        let Some(&target) = places.get(&tie.target) else { continue };
        places.insert(tie.alias.clone(), found.len());
        found.push((tie.alias.clone(), found[target].1.clone()));
    }
    for &b in &state.buffers {
        found.push((
            state.tensor_name(b).to_owned(),
            add_full_tensor(state, storages, b, state.tensors[b].dtype),
        ));
    }
    let of_module = state.passthrough.module_tensor_names.iter().map(String::as_str);
    let of_tensors = state.tensors.iter().map(|t| t.name.as_str());
    let order: HashMap<&str, usize> = match state.passthrough.module_tensor_names.is_empty() {
        true => of_tensors.zip(0..).collect(),
        false => of_module.zip(0..).collect(),
    };
    found.sort_by_key(|(name, _)| order.get(name.as_str()).copied().unwrap_or(usize::MAX));
    PythonObject::ordered_dict_from_pairs(found)
}

/// Plans the content of one DeepSpeed model file: that of rank `rank` at ZeRO stage 3, or the only
/// model file at stages 1 and 2. At stage 3 every rank has a model file, which stores a slice of
/// each frozen weight. At stages 1 and 2 there is one file, which stores whole weights.
fn plan_model_file(state: &SourceState, flats: &[FlatGroup], rank: u32, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let module = make_model_state_dict(state, &mut storages);
    let fragments: Vec<(String, PythonObject)> = state
        .frozen_at_save
        .iter()
        .map(|&w| {
            let dtype = choose_module_dtype(state, w);
            let tensor = match state.stage {
                3 => storages.add_tensor(
                    dtype,
                    vec![count_elements_per_rank(state, w)],
                    plan_rank_slice(state, w, rank),
                ),
                _ => add_full_tensor(state, &mut storages, w, dtype),
            };
            (state.tensor_name(w).to_owned(), tensor)
        })
        .collect();
    let groups = flats.iter().map(|f| make_shape_dict(state, f.weight_indices(state))).collect();
    let pairs = make_model_entries(state, &mut storages, module, groups, (&state.frozen_at_save, fragments));
    storages.into_file_plan(path, PythonObject::dict_from_pairs(pairs))
}

/// Returns the keys and values of a DeepSpeed model file, such as the model's `state_dict` and the
/// shapes of the parameters.
pub(super) fn make_model_entries(
    state: &SourceState,
    storages: &mut StorageBuilder,
    module: PythonObject,
    groups: Vec<PythonObject>,
    (frozen, fragments): (&[usize], Vec<(String, PythonObject)>),
) -> Vec<(String, PythonObject)> {
    let mut pairs = vec![
        ("module".to_owned(), module),
        ("buffer_names".into(), make_name_list(state, &state.buffers)),
        ("optimizer".into(), PythonObject::None),
        ("param_shapes".into(), PythonObject::List(groups)),
        ("frozen_param_shapes".into(), make_shape_dict(state, frozen)),
        ("shared_params".into(), make_tie_dict(state)),
        ("frozen_param_fragments".into(), PythonObject::ordered_dict_from_pairs(fragments)),
    ];
    pairs.extend(make_engine_entries(state, storages));
    pairs
}

/// Returns a Python list with the names of the tensors `tensors`.
fn make_name_list(state: &SourceState, tensors: &[usize]) -> PythonObject {
    PythonObject::List(tensors.iter().map(|&t| PythonObject::from_text(state.tensor_name(t))).collect())
}

/// Returns the entries of a DeepSpeed model file that belong to the engine and the training
/// program, such as step counters, scheduler and config.
fn make_engine_entries(state: &SourceState, storages: &mut StorageBuilder) -> Vec<(String, PythonObject)> {
    let mut pairs = vec![("lr_scheduler".to_owned(), storages.import_value(&state.passthrough.scheduler))];
    for key in ["data_sampler", "random_ltd"] {
        let value = state.passthrough.deepspeed_model_entry(key).unwrap_or(&PythonObject::None);
        pairs.push((key.into(), storages.import_value(value)));
    }
    pairs.push(("skipped_steps".into(), PythonObject::from_count(state.passthrough.skipped_steps)));
    pairs.push(("global_steps".into(), PythonObject::from_count(state.step)));
    // without this entry DeepSpeed computes steps × batch
    pairs.extend(state.samples.map(|n| ("global_samples".to_owned(), PythonObject::from_count(n))));
    pairs.push(("dp_world_size".into(), PythonObject::from_count(state.world.into())));
    pairs.push(("mp_world_size".into(), PythonObject::Int(1)));
    pairs.push(("ds_config".into(), storages.import_value(&make_deepspeed_config(state))));
    pairs.push(("ds_version".into(), PythonObject::from_text(&state.version)));
    let written: Vec<String> = pairs.iter().map(|(k, _)| k.clone()).collect();
    for (key, value) in &state.passthrough.model_entries {
        if !written.contains(key) {
            pairs.push((key.clone(), storages.import_value(value)));
        }
    }
    pairs
}

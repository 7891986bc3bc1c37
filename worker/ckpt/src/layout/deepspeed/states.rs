//! Reads the contents of DeepSpeed's model and optimizer files.
use super::embedded_optimizer::EmbeddedOptimizer;
use super::passthrough::{ModelPassthrough, OptimizerPassthrough};
use crate::catalog::{ParamGroupInfo, StepValue, TiedWeight};
use crate::codec::pickle::{PickleItems, PickleView, parse_shape};
use crate::codec::torch_file::{DTYPE_GLOBALS, PLAIN_GLOBALS, TENSOR_GLOBALS, TensorView, TorchFile};
use crate::error::DeepSpeedError;
use crate::format_constants::{HYPER_PARAMETER_VALUES_MAX, TENSORS_MAX};
use crate::tensor::{Dtype, TensorRole};
use serde_json::{Map, Value as Json};
use std::collections::HashMap;

/// Python classes and functions that the pickles of DeepSpeed's model and optimizer files may name.
pub(crate) const ALLOWED_GLOBALS: &[&[&str]] = &[
    TENSOR_GLOBALS,
    DTYPE_GLOBALS,
    PLAIN_GLOBALS,
    &[
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    ],
];

/// Maximum length of the list `partition_count` in a DeepSpeed optimizer file, which has an item
/// for each flat array of parameters.
const PARTITIONS_MAX: usize = 1 << 16;
/// Maximum number of unknown optimizer state keys that the reader of an optimizer file collects for
/// a warning.
const UNKNOWN_KEYS_MAX: usize = 16;

/// The result of reading a model or optimizer file: a value, or a [`DeepSpeedError`].
type Result<T> = std::result::Result<T, DeepSpeedError>;

/// The contents of a DeepSpeed model file (`*_model_states.pt`).
pub(crate) struct ModelStates {
    /// Name and view of every tensor of the module, in the module's order. In stage 3, the views of
    /// parameters are empty.
    pub(crate) module: Vec<(String, TensorView)>,
    /// Names of the buffers of the module.
    pub(crate) buffers: Vec<String>,
    /// For each flat group, the name and the shape of each parameter in the order of the flat
    /// tensor. Empty in stage 0.
    pub(crate) groups: Vec<Vec<(String, Vec<u64>)>>,
    /// Name and full shape of each frozen weight.
    pub(crate) frozen_shapes: Vec<(String, Vec<u64>)>,
    /// The rank's slice of each frozen weight. In stages below 3, the whole weight.
    pub(crate) frozen_fragments: Vec<(String, TensorView)>,
    pub(crate) ties: Vec<TiedWeight>,
    /// State of the learning rate scheduler, or null if the file has no scheduler.
    pub(crate) scheduler: Json,
    /// Number of steps of the run, including steps that a loss scaler skipped. `None` if not
    /// recorded.
    pub(crate) step: Option<u64>,
    /// Samples consumed by all ranks together. `None` if not recorded.
    pub(crate) samples: Option<u64>,
    /// Number of steps that a loss scaler skipped.
    pub(crate) skipped: u64,
    /// Number of ranks that wrote the checkpoint.
    pub(crate) world: u32,
    /// Number of ranks among which tensor or pipeline parallelism divides the model. `None` if not
    /// recorded.
    pub(crate) model_parallel_world: Option<u64>,
    /// ZeRO stage in the DeepSpeed config.
    pub(crate) stage: Option<u8>,
    /// Version of DeepSpeed that wrote the file.
    pub(crate) version: Option<String>,
    /// The states and parameter groups of the optimizer in stage 0, where the model file contains
    /// them. `None` in all other stages.
    pub(crate) embedded_optimizer: Option<EmbeddedOptimizer>,
    pub(crate) passthrough: ModelPassthrough,
}

/// One rank's part of a flat array, in which DeepSpeed concatenates parameters: the FP32 weights,
/// their optimizer states and their update count.
pub(crate) struct FlatGroupShard {
    /// View of the rank's flat FP32 master weights.
    pub(crate) fp32: TensorView,
    /// Role and view of each flat optimizer state.
    pub(crate) states: Vec<(TensorRole, TensorView)>,
    pub(crate) step: Option<StepValue>,
    /// Number of elements by which the states are longer than the weights. `None` if not recorded.
    pub(crate) padding: Option<u64>,
    /// Number of elements of padding after each parameter. Empty if not recorded.
    pub(crate) alignment: Vec<u64>,
    /// Keys of unknown optimizer states, which are ignored.
    pub(crate) unknown: Vec<String>,
}

/// The contents of a DeepSpeed optimizer file (`*_optim_states.pt`).
pub(crate) struct OptimizerStates {
    pub(crate) stage: u8,
    /// True if the file records `zero_stage`. The partitions of such files have no padding.
    pub(crate) is_unpadded: bool,
    /// Number of ranks among which each flat group is divided.
    pub(crate) partitions: Vec<u64>,
    /// The rank's part of each flat group.
    pub(crate) shards: Vec<FlatGroupShard>,
    /// Hyper-parameters of each parameter group, and the indices of its flat groups.
    pub(crate) groups: Vec<NumberedParamGroup>,
    /// State of the loss scaler, or null if the scale is always 1.
    pub(crate) loss_scaler: Json,
    pub(crate) passthrough: OptimizerPassthrough,
}

/// A parameter group of torch's `state_dict`, which refers to parameters by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct NumberedParamGroup {
    /// Maps the name of each hyper-parameter to its value.
    pub(crate) hyper: Map<String, Json>,
    /// Numbers of the parameters in this group. In optimizer files, these are the indices of flat
    /// groups.
    pub(crate) ids: Vec<u64>,
}

impl NumberedParamGroup {
    /// Returns a copy of this parameter group in which the numbers of parameters are replaced by
    /// their names. `model` has the names of the parameters in each flat group.
    pub(super) fn name_parameters(&self, model: &ModelStates) -> ParamGroupInfo {
        let flat_groups = self.ids.iter().filter_map(|&i| model.groups.get(i as usize));
        let names = flat_groups.flatten().map(|(name, _)| name.clone()).collect();
        ParamGroupInfo { hyper: self.hyper.clone(), names }
    }
}

/// Returns the value for the string key `key` in `value`, a dict that was read from a DeepSpeed
/// file. Fails with [`DeepSpeedError::MissingField`] if the key is missing.
fn read_field<'a>(value: PickleView<'a>, key: &'static str) -> Result<PickleView<'a>> {
    value.get(key).ok_or(DeepSpeedError::MissingField(key))
}

/// Reads a dict that maps names to tensors from a DeepSpeed file, in the order of the dict and
/// without the data of the tensors. Skips values that are not tensors. Returns an empty list for
/// Python's `None`. `key` is the key of the dict, for errors.
fn read_tensor_dict(
    file: &TorchFile,
    key: &'static str,
    value: PickleView<'_>,
) -> Result<Vec<(String, TensorView)>> {
    let mut found = Vec::new();
    if value.is_none() {
        return Ok(found);
    }
    for (name, tensor) in value.as_pairs().ok_or(DeepSpeedError::InvalidField(key))? {
        let name = name.as_short_str().ok_or(DeepSpeedError::InvalidField(key))?;
        // `module` may contain values that are not tensors (extra states)
        let view = file.parse_tensor(tensor);
        let view = view.map_err(|error| DeepSpeedError::Tensor { name: name.to_owned(), error })?;
        if let Some(view) = view {
            found.push((name.to_owned(), view));
        }
    }
    Ok(found)
}

/// Reads a dict that maps the names of parameters to their shapes from a DeepSpeed file, in the
/// order of the dict. Fails if there are more than [`TENSORS_MAX`] shapes. `key` is the key of the
/// dict, for errors.
fn read_shape_dict(key: &'static str, value: PickleView<'_>) -> Result<Vec<(String, Vec<u64>)>> {
    let pairs = value.as_pairs().ok_or(DeepSpeedError::InvalidField(key))?;
    let shapes =
        pairs.take(TENSORS_MAX + 1).map(|(name, shape)| match (name.as_short_str(), parse_shape(shape)) {
            (Some(name), Some(shape)) => Ok((name.to_owned(), shape)),
            _ => Err(DeepSpeedError::InvalidField(key)),
        });
    let shapes: Vec<_> = shapes.collect::<Result<_>>()?;
    if shapes.len() > TENSORS_MAX { Err(DeepSpeedError::InvalidField(key)) } else { Ok(shapes) }
}

impl ModelStates {
    /// Frees those contents of another rank's model file that are read only from the file of rank
    /// 0, such as the list of buffers. Called for the files of the other ranks.
    pub(crate) fn drop_parts_needed_from_rank_0_only(&mut self) {
        (self.module, self.buffers, self.groups, self.frozen_shapes) = Default::default();
        (self.ties, self.scheduler, self.embedded_optimizer, self.passthrough) = Default::default();
    }

    /// Reads the contents of a DeepSpeed model file, without the data of tensors. Fails if an entry
    /// is invalid, or if `module` or `dp_world_size` is missing.
    pub(crate) fn read(file: &TorchFile) -> Result<ModelStates> {
        let root = file.value();
        let optional = |key: &str| root.get(key).filter(|v| !v.is_none());
        let count = |key: &str| optional(key).and_then(PickleView::as_count);
        let texts = |v: PickleView<'_>| {
            v.as_items().map(|i| {
                i.iter().take(TENSORS_MAX).filter_map(|n| Some(n.as_short_str()?.to_owned())).collect()
            })
        };
        let no_list = DeepSpeedError::InvalidField("param_shapes");
        let groups = match optional("param_shapes").map(|v| v.as_items().ok_or(no_list)) {
            Some(list) => {
                list?.iter().map(|g| read_shape_dict("param_shapes", g)).collect::<Result<Vec<_>>>()?
            }
            None => Vec::new(),
        };
        if groups.iter().map(Vec::len).sum::<usize>() > TENSORS_MAX {
            return Err(DeepSpeedError::InvalidField("param_shapes"));
        }
        let ties = optional("shared_params").and_then(PickleView::as_pairs).into_iter().flatten();
        let ties = ties.take(TENSORS_MAX).filter_map(|(alias, target)| {
            Some(TiedWeight {
                alias: alias.as_short_str()?.to_owned(),
                target: target.as_short_str()?.to_owned(),
            })
        });
        let frozen_shapes = match optional("frozen_param_shapes") {
            Some(v) => read_shape_dict("frozen_param_shapes", v)?,
            None => Vec::new(),
        };
        let frozen = match optional("frozen_param_fragments") {
            Some(v) => read_tensor_dict(file, "frozen_param_fragments", v)?,
            None => Vec::new(),
        };
        let world = count("dp_world_size").ok_or(DeepSpeedError::MissingField("dp_world_size"))?;
        let zero = optional("ds_config").and_then(|c| c.get("zero_optimization"));
        Ok(ModelStates {
            module: read_tensor_dict(file, "module", read_field(root, "module")?)?,
            buffers: optional("buffer_names").and_then(texts).unwrap_or_default(),
            groups,
            frozen_shapes,
            frozen_fragments: frozen,
            ties: ties.collect(),
            scheduler: optional("lr_scheduler").map_or(Json::Null, PickleView::to_json),
            step: count("global_steps"),
            samples: count("global_samples"),
            skipped: count("skipped_steps").unwrap_or(0),
            world: u32::try_from(world)
                .ok()
                .filter(|&w| w > 0)
                .ok_or(DeepSpeedError::InvalidField("dp_world_size"))?,
            model_parallel_world: count("mp_world_size"),
            stage: zero
                .and_then(|z| z.get("stage"))
                .and_then(PickleView::as_count)
                .and_then(|s| u8::try_from(s).ok()),
            version: optional("ds_version").and_then(PickleView::as_short_str).map(str::to_owned),
            embedded_optimizer: match optional("optimizer") {
                Some(value) => EmbeddedOptimizer::read(file, value)?,
                None => None,
            },
            passthrough: ModelPassthrough::read(file),
        })
    }
}

impl OptimizerStates {
    /// Frees those contents of another rank's optimizer file that are read only from the file of
    /// rank 0, such as the parameter groups. Called for the files of the other ranks.
    pub(crate) fn drop_parts_needed_from_rank_0_only(&mut self) {
        (self.groups, self.loss_scaler, self.passthrough) = Default::default();
        self.shards.iter_mut().for_each(|shard| shard.alignment = Vec::new());
    }

    /// Reads the contents of a DeepSpeed optimizer file, without the data of tensors. Fails if an
    /// entry is missing or invalid, or if a flat tensor is not F32.
    pub(crate) fn read(file: &TorchFile) -> Result<OptimizerStates> {
        let root = read_field(file.value(), "optimizer_state_dict")?;
        let stage = root.get("zero_stage").and_then(read_zero_stage);
        let partitions = read_field(root, "partition_count")?;
        let partitions = match partitions.as_items() {
            Some(items) if items.get(PARTITIONS_MAX).is_some() => None,
            Some(items) => items.to_counts(),
            None => partitions.as_count().map(|n| vec![n]),
        };
        let third = root.get("fp32_flat_groups");
        let (flats, base) = match third {
            Some(flats) => (flats, read_field(root, "optimizer_state_dict")?),
            None => (
                read_field(root, "single_partition_of_fp32_groups")?,
                read_field(root, "base_optimizer_state")?,
            ),
        };
        let flats = flats.as_items().ok_or(DeepSpeedError::InvalidField("fp32_flat_groups"))?;
        let fields = PerFlatGroupFields::new(root, base);
        let mut shards = Vec::new();
        for (i, flat) in flats.iter().enumerate() {
            let fp32 = file.parse_tensor(flat)?.ok_or(DeepSpeedError::InvalidField("fp32_flat_groups"))?;
            if fp32.dtype != Dtype::F32 {
                return Err(DeepSpeedError::FlatGroupDtype { group: i, dtype: fp32.dtype });
            }
            shards.push(FlatGroupShard::read_shard(file, &fields, i, fp32)?);
        }
        Ok(OptimizerStates {
            stage: if third.is_some() { 3 } else { stage.unwrap_or(1) },
            is_unpadded: stage.is_some(),
            partitions: partitions.ok_or(DeepSpeedError::InvalidField("partition_count"))?,
            shards,
            groups: read_param_groups(base)?,
            loss_scaler: root.get("loss_scaler").map_or(Json::Null, read_loss_scaler),
            passthrough: OptimizerPassthrough::read(root, base),
        })
    }
}

/// Reads a ZeRO stage, which is stored as a number or as an enum with a numeric value. Returns
/// `None` for other values.
pub(crate) fn read_zero_stage(value: PickleView<'_>) -> Option<u8> {
    let number = match value.as_object() {
        Some((_, args, _)) => args.as_items()?.get(0)?,
        None => value,
    };
    number.as_count().and_then(|n| u8::try_from(n).ok())
}

/// Reads the parameter groups of an optimizer's `state_dict`. Returns an empty list if
/// `param_groups` is missing.
pub(crate) fn read_param_groups(optimizer: PickleView<'_>) -> Result<Vec<NumberedParamGroup>> {
    let Some(groups) = optimizer.get("param_groups") else { return Ok(Vec::new()) };
    let wrong = || DeepSpeedError::InvalidField("param_groups");
    let mut values_left = HYPER_PARAMETER_VALUES_MAX;
    let one = |group: PickleView<'_>| {
        let hyper = group.to_json_map("params", &mut values_left).ok_or_else(wrong)?;
        let ids = group.get("params").and_then(PickleView::as_items).and_then(|i| i.to_counts());
        Ok(NumberedParamGroup { hyper, ids: ids.ok_or_else(wrong)? })
    };
    groups.as_items().ok_or_else(wrong)?.iter().map(one).collect()
}

/// Returns the state of the pickled object `loss_scaler` in a DeepSpeed optimizer file as JSON.
/// Returns null if the scale is always 1.
pub(crate) fn read_loss_scaler(value: PickleView<'_>) -> Json {
    let Some((_, _, state)) = value.as_object() else { return Json::Null };
    let fixed = state.get("dynamic").is_some_and(|d| d.to_json() == false);
    match fixed && state.get("cur_scale").is_some_and(|s| s.to_json() == 1.0) {
        true => Json::Null,
        false => state.to_json(),
    }
}

/// The entries of a DeepSpeed optimizer file that have one item per flat array of concatenated
/// parameters: optimizer states and lengths of padding.
struct PerFlatGroupFields<'t> {
    /// Maps the index of each flat group to the state that the torch optimizer keeps for it.
    states: HashMap<u64, PickleView<'t>>,
    group_paddings: Option<PickleItems<'t>>,
    alignment_paddings: Option<PickleItems<'t>>,
}

impl<'t> PerFlatGroupFields<'t> {
    /// Finds the entries of a DeepSpeed optimizer file that have one item per flat array: the
    /// optimizer states and the lengths of padding. `root` is the state of DeepSpeed's optimizer,
    /// and `base` the state of the torch optimizer that it wraps.
    fn new(root: PickleView<'t>, base: PickleView<'t>) -> PerFlatGroupFields<'t> {
        // an elastic checkpoint has a list of states without padding
        let states = match base.as_items() {
            Some(list) => (0..).zip(list.iter()).collect(),
            None => {
                let states = base.get("state").and_then(PickleView::as_pairs).into_iter().flatten();
                states.filter_map(|(group, state)| Some((group.as_count()?, state))).collect()
            }
        };
        let items = |key: &str| root.get(key).and_then(PickleView::as_items);
        let (group_paddings, alignment_paddings) =
            (items("group_paddings"), items("param_alignment_paddings"));
        PerFlatGroupFields { states, group_paddings, alignment_paddings }
    }
}

impl FlatGroupShard {
    /// Reads the optimizer states, the update count and the padding of flat array number `i` from
    /// one rank's DeepSpeed optimizer file.
    fn read_shard(
        file: &TorchFile,
        fields: &PerFlatGroupFields<'_>,
        i: usize,
        fp32: TensorView,
    ) -> Result<FlatGroupShard> {
        let alignment = fields.alignment_paddings.and_then(|g| g.get(i)).filter(|v| !v.is_none());
        let alignment = alignment.map(|v| {
            v.as_items()
                .and_then(|v| v.to_counts())
                .ok_or(DeepSpeedError::InvalidField("param_alignment_paddings"))
        });
        let mut shard = FlatGroupShard {
            padding: fields.group_paddings.and_then(|g| g.get(i)).and_then(PickleView::as_count),
            alignment: alignment.transpose()?.unwrap_or_default(),
            fp32,
            states: Vec::new(),
            step: None,
            unknown: Vec::new(),
        };
        let state = fields.states.get(&(i as u64)).copied();
        for (key, value) in state.and_then(PickleView::as_pairs).into_iter().flatten() {
            let key = key.as_short_str().ok_or(DeepSpeedError::InvalidField("state"))?;
            let tensor = file
                .parse_tensor(value)
                .map_err(|error| DeepSpeedError::Tensor { name: format!("{key} of group {i}"), error })?;
            shard.add_state(key, tensor, value);
        }
        Ok(shard)
    }

    /// Stores an entry of the torch optimizer's state for a flat array, such as `exp_avg` or
    /// `step`, in this description of one rank's part. The entry is a tensor of a known role, the
    /// step, or a tensor with an unknown key. Ignores other values.
    fn add_state(&mut self, key: &str, tensor: Option<TensorView>, value: PickleView<'_>) {
        match (key, TensorRole::from_torch_key(key), tensor) {
            ("step", _, Some(view)) => self.step = Some(StepValue::Tensor(view)),
            ("step", _, None) => self.step = value.as_int().map(|i| StepValue::Number(i as f64)),
            (_, Some(role), Some(view)) => self.states.push((role, view)),
            (_, None, Some(_)) if self.unknown.len() < UNKNOWN_KEYS_MAX => self.unknown.push(key.to_owned()),
            _ => {}
        }
    }
}

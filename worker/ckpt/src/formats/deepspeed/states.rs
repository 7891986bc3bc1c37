//! Reads DeepSpeed's model and optimizer files.
use super::error::DeepSpeedError;
use super::passthrough::{ModelPassthrough, OptimizerPassthrough};
use super::stage0::EmbeddedOptimizer;
use crate::catalog::{TensorRole, Tie};
use crate::dtype::Dtype;
use crate::external::builder::optimizer_state_role;
pub(super) use crate::formats::optimizer::StepValue;
use crate::formats::torch_file::{PLAIN, TENSORS, TensorView, TorchFile, shape_of};
use crate::pickle::View;
use serde_json::{Map, Value as Json};

/// Classes and functions that the files may name.
pub(super) const GLOBALS: &[&[&str]] = &[
    TENSORS,
    PLAIN,
    &[
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    ],
];

type Result<T> = std::result::Result<T, DeepSpeedError>;

/// The contents of a model file.
pub(super) struct ModelStates {
    /// Every tensor of the module, in its order. Parameters are empty in stage 3.
    pub(super) module: Vec<(String, TensorView)>,
    pub(super) buffers: Vec<String>,
    /// Name and shape per flat group, in the order of the flat tensor. Empty in stage 0.
    pub(super) groups: Vec<Vec<(String, Vec<u64>)>>,
    pub(super) frozen_shapes: Vec<(String, Vec<u64>)>,
    pub(super) frozen: Vec<(String, TensorView)>,
    pub(super) ties: Vec<Tie>,
    pub(super) scheduler: Json,
    pub(super) step: Option<u64>,
    /// Samples consumed by all ranks together.
    pub(super) samples: Option<u64>,
    pub(super) skipped: u64,
    pub(super) world: u32,
    pub(super) stage: Option<u8>,
    pub(super) version: Option<String>,
    /// The optimizer, when this file contains it (stage 0).
    pub(super) embedded_optimizer: Option<EmbeddedOptimizer>,
    pub(super) passthrough: ModelPassthrough,
}

/// One rank's part of a flat group.
pub(super) struct Shard {
    pub(super) fp32: TensorView,
    pub(super) states: Vec<(TensorRole, TensorView)>,
    pub(super) step: Option<StepValue>,
    /// Elements by which the states are longer than the weights, if recorded.
    pub(super) padding: Option<u64>,
    /// Elements of padding after each parameter.
    pub(super) alignment: Vec<u64>,
    /// Keys of unknown states.
    pub(super) unknown: Vec<String>,
}

/// The contents of an optimizer file.
pub(super) struct OptimizerStates {
    pub(super) stage: u8,
    /// `zero_stage` is recorded, so partitions have no padding.
    pub(super) lean: bool,
    /// Number of ranks that share each group.
    pub(super) partitions: Vec<u64>,
    pub(super) shards: Vec<Shard>,
    /// Hyper-parameters per group, and the indices of its flat groups.
    pub(super) groups: Vec<NumberedGroup>,
    /// State of the loss scaler; null for a scale that is always 1.
    pub(super) loss_scaler: Json,
    pub(super) passthrough: OptimizerPassthrough,
}

/// A parameter group of torch's `state_dict`, in which parameters are numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct NumberedGroup {
    pub(crate) hyper: Map<String, Json>,
    pub(crate) ids: Vec<u64>,
}

fn read_field<'a>(value: View<'a>, key: &'static str) -> Result<View<'a>> {
    value.get(key).ok_or(DeepSpeedError::MissingField(key))
}

fn read_tensors(file: &TorchFile, key: &'static str, value: View<'_>) -> Result<Vec<(String, TensorView)>> {
    let mut found = Vec::new();
    if value.is_none() {
        return Ok(found);
    }
    for (name, tensor) in value.pairs().ok_or(DeepSpeedError::InvalidField(key))? {
        let name = name.str().ok_or(DeepSpeedError::InvalidField(key))?;
        // `module` may have other values (extra states)
        let view = file.tensor(tensor);
        let view = view.map_err(|error| DeepSpeedError::Tensor { name: name.to_owned(), error })?;
        if let Some(view) = view {
            found.push((name.to_owned(), view));
        }
    }
    Ok(found)
}

fn read_shapes(key: &'static str, value: View<'_>) -> Result<Vec<(String, Vec<u64>)>> {
    let pairs = value.pairs().ok_or(DeepSpeedError::InvalidField(key))?;
    pairs
        .map(|(name, shape)| match (name.str(), shape_of(shape)) {
            (Some(name), Some(shape)) => Ok((name.to_owned(), shape)),
            _ => Err(DeepSpeedError::InvalidField(key)),
        })
        .collect()
}

impl ModelStates {
    pub(super) fn read(file: &TorchFile) -> Result<ModelStates> {
        let root = file.value();
        let optional = |key: &str| root.get(key).filter(|v| !v.is_none());
        let count = |key: &str| optional(key).and_then(View::count);
        let texts =
            |v: View<'_>| v.items().map(|i| i.iter().filter_map(|n| n.str().map(str::to_owned)).collect());
        let no_list = DeepSpeedError::InvalidField("param_shapes");
        let groups = match optional("param_shapes").map(|v| v.items().ok_or(no_list)) {
            Some(list) => list?.iter().map(|g| read_shapes("param_shapes", g)).collect::<Result<Vec<_>>>()?,
            None => Vec::new(),
        };
        let ties = optional("shared_params").and_then(View::pairs).into_iter().flatten();
        let ties = ties.filter_map(|(alias, target)| {
            Some(Tie { alias: alias.str()?.to_owned(), target: target.str()?.to_owned() })
        });
        let frozen_shapes = match optional("frozen_param_shapes") {
            Some(v) => read_shapes("frozen_param_shapes", v)?,
            None => Vec::new(),
        };
        let frozen = match optional("frozen_param_fragments") {
            Some(v) => read_tensors(file, "frozen_param_fragments", v)?,
            None => Vec::new(),
        };
        let world = count("dp_world_size").ok_or(DeepSpeedError::MissingField("dp_world_size"))?;
        let zero = optional("ds_config").and_then(|c| c.get("zero_optimization"));
        Ok(ModelStates {
            module: read_tensors(file, "module", read_field(root, "module")?)?,
            buffers: optional("buffer_names").and_then(texts).unwrap_or_default(),
            groups,
            frozen_shapes,
            frozen,
            ties: ties.collect(),
            scheduler: optional("lr_scheduler").map_or(Json::Null, View::json),
            step: count("global_steps"),
            samples: count("global_samples"),
            skipped: count("skipped_steps").unwrap_or(0),
            world: u32::try_from(world)
                .ok()
                .filter(|&w| w > 0)
                .ok_or(DeepSpeedError::InvalidField("dp_world_size"))?,
            stage: zero.and_then(|z| z.get("stage")).and_then(View::count).and_then(|s| u8::try_from(s).ok()),
            version: optional("ds_version").and_then(View::str).map(str::to_owned),
            embedded_optimizer: match optional("optimizer") {
                Some(value) => EmbeddedOptimizer::read(file, value)?,
                None => None,
            },
            passthrough: ModelPassthrough::read(file),
        })
    }
}

impl OptimizerStates {
    pub(super) fn read(file: &TorchFile) -> Result<OptimizerStates> {
        let root = read_field(file.value(), "optimizer_state_dict")?;
        let stage = root.get("zero_stage").and_then(stage_of);
        let partitions = read_field(root, "partition_count")?;
        let partitions = match partitions.items() {
            Some(items) => items.counts(),
            None => partitions.count().map(|n| vec![n]),
        };
        let third = root.get("fp32_flat_groups");
        let (flats, base) = match third {
            Some(flats) => (flats, read_field(root, "optimizer_state_dict")?),
            None => (
                read_field(root, "single_partition_of_fp32_groups")?,
                read_field(root, "base_optimizer_state")?,
            ),
        };
        let mut shards = Vec::new();
        for (i, flat) in
            flats.items().ok_or(DeepSpeedError::InvalidField("fp32_flat_groups"))?.iter().enumerate()
        {
            let fp32 = file.tensor(flat)?.ok_or(DeepSpeedError::InvalidField("fp32_flat_groups"))?;
            if fp32.dtype != Dtype::F32 {
                return Err(DeepSpeedError::FlatGroupDtype { group: i, dtype: fp32.dtype });
            }
            shards.push(Shard::read(file, root, base, i, fp32)?);
        }
        Ok(OptimizerStates {
            stage: if third.is_some() { 3 } else { stage.unwrap_or(1) },
            lean: stage.is_some(),
            partitions: partitions.ok_or(DeepSpeedError::InvalidField("partition_count"))?,
            shards,
            groups: param_groups(base)?,
            loss_scaler: root.get("loss_scaler").map_or(Json::Null, scaler),
            passthrough: OptimizerPassthrough::read(root, base),
        })
    }
}

/// Reads a ZeRO stage, which is stored as a number or as an enum whose value is a number.
pub(super) fn stage_of(value: View<'_>) -> Option<u8> {
    let number = match value.object() {
        Some((_, args, _)) => args.items()?.get(0)?,
        None => value,
    };
    number.count().and_then(|n| u8::try_from(n).ok())
}

/// Reads the parameter groups. Returns an empty list if `param_groups` is absent.
pub(crate) fn param_groups(optimizer: View<'_>) -> Result<Vec<NumberedGroup>> {
    let Some(groups) = optimizer.get("param_groups") else { return Ok(Vec::new()) };
    let wrong = || DeepSpeedError::InvalidField("param_groups");
    let one = |group: View<'_>| {
        let Json::Object(mut hyper) = group.json() else { return Err(wrong()) };
        hyper.remove("params");
        let ids = group.get("params").and_then(View::items).and_then(|i| i.counts());
        Ok(NumberedGroup { hyper, ids: ids.ok_or_else(wrong)? })
    };
    groups.items().ok_or_else(wrong)?.iter().map(one).collect()
}

/// Reads the state of a loss scaler; null for a scale that is always 1.
pub(super) fn scaler(value: View<'_>) -> Json {
    let Some((_, _, state)) = value.object() else { return Json::Null };
    let fixed = state.get("dynamic").is_some_and(|d| d.json() == false);
    match fixed && state.get("cur_scale").is_some_and(|s| s.json() == 1.0) {
        true => Json::Null,
        false => state.json(),
    }
}

impl Shard {
    /// Reads group `i` of the optimizer state `root`.
    fn read(file: &TorchFile, root: View<'_>, base: View<'_>, i: usize, fp32: TensorView) -> Result<Shard> {
        // an elastic checkpoint has a list of states without padding
        let state = match base.items() {
            Some(list) => list.get(i),
            None => base.get("state").and_then(|s| s.get_int(i as i64)),
        };
        let entry = |key: &str| root.get(key).and_then(View::items).and_then(|g| g.get(i));
        let alignment = entry("param_alignment_paddings").filter(|v| !v.is_none());
        let alignment = alignment.map(|v| {
            v.items().and_then(|v| v.counts()).ok_or(DeepSpeedError::InvalidField("param_alignment_paddings"))
        });
        let mut shard = Shard {
            padding: entry("group_paddings").and_then(View::count),
            alignment: alignment.transpose()?.unwrap_or_default(),
            fp32,
            states: Vec::new(),
            step: None,
            unknown: Vec::new(),
        };
        for (key, value) in state.and_then(View::pairs).into_iter().flatten() {
            let key = key.str().ok_or(DeepSpeedError::InvalidField("state"))?;
            let tensor = file
                .tensor(value)
                .map_err(|error| DeepSpeedError::Tensor { name: format!("{key} of group {i}"), error })?;
            shard.add(key, tensor, value);
        }
        Ok(shard)
    }

    fn add(&mut self, key: &str, tensor: Option<TensorView>, value: View<'_>) {
        match (key, optimizer_state_role(key), tensor) {
            ("step", _, Some(view)) => self.step = Some(StepValue::Tensor(view)),
            ("step", _, None) => self.step = value.int().map(|i| StepValue::Number(i as f64)),
            (_, Some(role), Some(view)) => self.states.push((role, view)),
            (_, None, Some(_)) => self.unknown.push(key.to_owned()),
            (_, _, None) => {}
        }
    }
}

//! What DeepSpeed's files say.
use super::extras::{ModelExtras, OptimizerExtras};
use super::stage0::Own;
use crate::catalog::{Role, Tie};
use crate::dtype::Dtype;
pub(super) use crate::formats::optimizer::Step;
use crate::formats::torch_file::{PLAIN, TENSORS, TensorView, TorchFile, shape_of};
use crate::pickle::View;
use serde_json::{Map, Value as Json};

/// Globals in the files beside those of tensors.
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

/// `Err` is one line that says what is wrong with the file.
type Said<T> = Result<T, String>;

/// A model file.
pub(super) struct ModelStates {
    /// Every tensor of the module under its name, in its order. Of stage 3 parameters are empty here.
    pub(super) module: Vec<(String, TensorView)>,
    pub(super) buffers: Vec<String>,
    /// Per flat group: name and shape in the order of the flat buffer. Of stage 0 there are none.
    pub(super) groups: Vec<Vec<(String, Vec<u64>)>>,
    pub(super) frozen_shapes: Vec<(String, Vec<u64>)>,
    pub(super) frozen: Vec<(String, TensorView)>,
    pub(super) ties: Vec<Tie>,
    pub(super) scheduler: Json,
    pub(super) step: Option<u64>,
    /// Of all ranks together.
    pub(super) samples: Option<u64>,
    pub(super) skipped: u64,
    pub(super) world: u32,
    pub(super) stage: Option<u8>,
    pub(super) version: Option<String>,
    /// The optimizer, where it is kept in this file (stage 0).
    pub(super) own_optimizer: Option<Own>,
    pub(super) extras: ModelExtras,
}

/// A rank's part of one flat group.
pub(super) struct Shard {
    pub(super) fp32: TensorView,
    pub(super) states: Vec<(Role, TensorView)>,
    pub(super) step: Option<Step>,
    /// Elements by which the states are longer than the weights, where it says so.
    pub(super) padding: Option<u64>,
    /// Elements of padding after each parameter.
    pub(super) alignment: Vec<u64>,
    /// Keys of states that are not understood.
    pub(super) unknown: Vec<String>,
}

/// An optimizer file.
pub(super) struct OptimizerStates {
    pub(super) stage: u8,
    /// `zero_stage` is written: partitions hold no padding.
    pub(super) lean: bool,
    /// Ranks that share each group.
    pub(super) partitions: Vec<u64>,
    pub(super) shards: Vec<Shard>,
    /// Hyper-parameters per group, and the numbers of its flat groups.
    pub(super) groups: Vec<NumberedGroup>,
    /// State of the loss scaler; null for one that never scales.
    pub(super) loss_scaler: Json,
    pub(super) extras: OptimizerExtras,
}

/// A group as torch's `state_dict` has it: parameters are numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct NumberedGroup {
    pub(crate) hyper: Map<String, Json>,
    pub(crate) ids: Vec<u64>,
}

fn need<'a>(value: View<'a>, key: &str) -> Said<View<'a>> {
    value.get(key).ok_or_else(|| format!("it has no {key}"))
}

fn tensors(file: &TorchFile, key: &str, value: View<'_>) -> Said<Vec<(String, TensorView)>> {
    let mut found = Vec::new();
    if value.is_none() {
        return Ok(found);
    }
    for (name, tensor) in value.pairs().ok_or_else(|| format!("its {key} is no dict"))? {
        let name = name.str().ok_or_else(|| format!("its {key} has a name that is no text"))?;
        // `module` may hold other things (extra states)
        if let Some(view) = file.tensor(tensor).map_err(|e| format!("{name}: {e}"))? {
            found.push((name.to_owned(), view));
        }
    }
    Ok(found)
}

fn shapes(key: &str, value: View<'_>) -> Said<Vec<(String, Vec<u64>)>> {
    let pairs = value.pairs().ok_or_else(|| format!("its {key} is no dict"))?;
    pairs
        .map(|(name, shape)| match (name.str(), shape_of(shape)) {
            (Some(name), Some(shape)) => Ok((name.to_owned(), shape)),
            _ => Err(format!("its {key} has something else than names and shapes")),
        })
        .collect()
}

impl ModelStates {
    pub(super) fn read(file: &TorchFile) -> Said<ModelStates> {
        let root = file.value();
        let optional = |key: &str| root.get(key).filter(|v| !v.is_none());
        let count = |key: &str| optional(key).and_then(View::count);
        let texts =
            |v: View<'_>| v.items().map(|i| i.iter().filter_map(|n| n.str().map(str::to_owned)).collect());
        let groups = match optional("param_shapes").map(|v| v.items().ok_or("its param_shapes is no list")) {
            Some(list) => list?.iter().map(|g| shapes("param_shapes", g)).collect::<Said<Vec<_>>>()?,
            None => Vec::new(),
        };
        let ties = optional("shared_params").and_then(View::pairs).into_iter().flatten();
        let ties = ties.filter_map(|(alias, target)| {
            Some(Tie { alias: alias.str()?.to_owned(), target: target.str()?.to_owned() })
        });
        let frozen_shapes = match optional("frozen_param_shapes") {
            Some(v) => shapes("frozen_param_shapes", v)?,
            None => Vec::new(),
        };
        let frozen = match optional("frozen_param_fragments") {
            Some(v) => tensors(file, "frozen_param_fragments", v)?,
            None => Vec::new(),
        };
        let world = count("dp_world_size").ok_or("it has no dp_world_size")?;
        let zero = optional("ds_config").and_then(|c| c.get("zero_optimization"));
        Ok(ModelStates {
            module: tensors(file, "module", need(root, "module")?)?,
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
                .ok_or("its dp_world_size is no number of ranks")?,
            stage: zero.and_then(|z| z.get("stage")).and_then(View::count).and_then(|s| u8::try_from(s).ok()),
            version: optional("ds_version").and_then(View::str).map(str::to_owned),
            own_optimizer: match optional("optimizer") {
                Some(own) => Own::read(file, own)?,
                None => None,
            },
            extras: ModelExtras::read(file),
        })
    }
}

impl OptimizerStates {
    pub(super) fn read(file: &TorchFile) -> Said<OptimizerStates> {
        let root = need(file.value(), "optimizer_state_dict")?;
        let stage = root.get("zero_stage").and_then(stage_of);
        let partitions = need(root, "partition_count")?;
        let partitions = match partitions.items() {
            Some(items) => items.counts(),
            None => partitions.count().map(|n| vec![n]),
        };
        let third = root.get("fp32_flat_groups");
        let (flats, base) = match third {
            Some(flats) => (flats, need(root, "optimizer_state_dict")?),
            None => (need(root, "single_partition_of_fp32_groups")?, need(root, "base_optimizer_state")?),
        };
        let mut shards = Vec::new();
        for (i, flat) in flats.items().ok_or("its flat groups are no list")?.iter().enumerate() {
            let fp32 = file.tensor(flat)?.ok_or("its flat groups are no tensors")?;
            if fp32.dtype != Dtype::F32 {
                return Err(format!("its flat group {i} is {}, not F32", fp32.dtype));
            }
            shards.push(Shard::read(file, root, base, i, fp32)?);
        }
        Ok(OptimizerStates {
            stage: if third.is_some() { 3 } else { stage.unwrap_or(1) },
            lean: stage.is_some(),
            partitions: partitions.ok_or("its partition_count is no number")?,
            shards,
            groups: groups_of(base)?,
            loss_scaler: root.get("loss_scaler").map_or(Json::Null, scaler),
            extras: OptimizerExtras::read(root, base),
        })
    }
}

/// A stage is a number, or an enum of one.
pub(super) fn stage_of(value: View<'_>) -> Option<u8> {
    let number = match value.object() {
        Some((_, args, _)) => args.items()?.get(0)?,
        None => value,
    };
    number.count().and_then(|n| u8::try_from(n).ok())
}

/// Hyper-parameters per group: everything but the parameters' numbers. Nothing when there are no groups.
pub(crate) fn groups_of(optimizer: View<'_>) -> Said<Vec<NumberedGroup>> {
    let Some(groups) = optimizer.get("param_groups") else { return Ok(Vec::new()) };
    let wrong = || "its param_groups are no list of dicts".to_owned();
    let one = |group: View<'_>| {
        let Json::Object(mut hyper) = group.json() else { return Err(wrong()) };
        hyper.remove("params");
        let ids = group.get("params").and_then(View::items).and_then(|i| i.counts());
        Ok(NumberedGroup { hyper, ids: ids.ok_or_else(wrong)? })
    };
    groups.items().ok_or_else(wrong)?.iter().map(one).collect()
}

/// What a loss scaler keeps; null for one that never scales.
pub(super) fn scaler(value: View<'_>) -> Json {
    let Some((_, _, state)) = value.object() else { return Json::Null };
    let fixed = state.get("dynamic").is_some_and(|d| d.json() == false);
    match fixed && state.get("cur_scale").is_some_and(|s| s.json() == 1.0) {
        true => Json::Null,
        false => state.json(),
    }
}

impl Shard {
    /// Group `i` of the rank whose optimizer state is `root`.
    fn read(file: &TorchFile, root: View<'_>, base: View<'_>, i: usize, fp32: TensorView) -> Said<Shard> {
        // an elastic checkpoint has a list of states, without padding
        let state = match base.items() {
            Some(list) => list.get(i),
            None => base.get("state").and_then(|s| s.get_int(i as i64)),
        };
        let of_group = |key: &str| root.get(key).and_then(View::items).and_then(|g| g.get(i));
        let alignment = of_group("param_alignment_paddings").filter(|v| !v.is_none());
        let alignment =
            alignment.map(|v| v.items().and_then(|v| v.counts()).ok_or("its alignment is no list"));
        let mut shard = Shard {
            padding: of_group("group_paddings").and_then(View::count),
            alignment: alignment.transpose()?.unwrap_or_default(),
            fp32,
            states: Vec::new(),
            step: None,
            unknown: Vec::new(),
        };
        for (key, value) in state.and_then(View::pairs).into_iter().flatten() {
            let key = key.str().ok_or("its optimizer state has a key that is no text")?;
            shard.add(key, file.tensor(value).map_err(|e| format!("{key} of group {i}: {e}"))?, value);
        }
        Ok(shard)
    }

    fn add(&mut self, key: &str, tensor: Option<TensorView>, value: View<'_>) {
        let role = match key {
            "exp_avg" => Some(Role::ExpAvg),
            "exp_avg_sq" => Some(Role::ExpAvgSq),
            "momentum_buffer" => Some(Role::Momentum),
            _ => None,
        };
        match (key, role, tensor) {
            ("step", _, Some(view)) => self.step = Some(Step::Tensor(view)),
            ("step", _, None) => self.step = value.int().map(|i| Step::Number(i as f64)),
            (_, Some(role), Some(view)) => self.states.push((role, view)),
            (_, None, Some(_)) => self.unknown.push(key.to_owned()),
            (_, _, None) => {}
        }
    }
}

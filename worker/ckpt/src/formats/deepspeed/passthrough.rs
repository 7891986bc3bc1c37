//! Collects the passthrough state of DeepSpeed's files: objects that a conversion copies unchanged.
use super::Tag;
use super::states::{ModelStates, OptimizerStates, StepValue};
use crate::dtype::Dtype;
use crate::error::{Result, list_some};
use crate::external::ExternalFacts;
use crate::external::store::TensorPart;
use crate::formats::torch_file::{TensorView, TorchFile};
use crate::passthrough::{ParamGroup, PassthroughState};
use crate::pickle::{Object, StoredTensor, View};
use std::cell::RefCell;

/// Limit on the values copied from one file.
const VALUES_MAX: usize = 1 << 20;
/// Limit on the tensors copied from one file, bytes.
const TENSORS_MAX: u64 = 64 << 20;
/// Entries of a model file that a conversion regenerates.
const REGENERATED: [&str; 13] = [
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "universal_checkpoint_info",
];
/// Entries of an optimizer file that are copied.
const COPIED: [&str; 4] = ["loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"];

/// Values by name, in the order of the file.
type Options = Vec<(String, Object)>;

/// Passthrough state of a model file.
#[derive(Default)]
pub(super) struct ModelPassthrough {
    rest: Vec<(String, Object)>,
    scheduler: Object,
    /// The tensors in `rest` and `scheduler`, by storage index.
    tensors: Vec<TensorView>,
    /// Names of entries that cannot be copied.
    dropped: Vec<String>,
}

/// Passthrough state of an optimizer file.
#[derive(Default)]
pub(super) struct OptimizerPassthrough {
    /// Per group: hyper-parameters, and the indices of its flat groups.
    groups: Vec<(Options, Vec<u64>)>,
    rest: Options,
}

impl ModelPassthrough {
    pub(super) fn read(file: &TorchFile) -> ModelPassthrough {
        let tensors = RefCell::new(Vec::new());
        let tensor = |value: View<'_>| {
            let view = file.tensor(value).ok().flatten().filter(TensorView::is_contiguous)?;
            let (dtype, shape) = (view.dtype, view.shape.clone());
            let stored = view.elements();
            let mut tensors = tensors.borrow_mut();
            tensors.push(view);
            Some(Object::Tensor(StoredTensor { storage: tensors.len() - 1, dtype, stored, shape }))
        };
        let mut found = ModelPassthrough::default();
        let mut left = VALUES_MAX;
        for (key, value) in file.value().pairs().into_iter().flatten() {
            let Some(key) = key.str() else { continue };
            let scheduler = key == "lr_scheduler";
            if REGENERATED.contains(&key) && !scheduler {
                continue;
            }
            match value.to_object(&mut left, &tensor) {
                Some(value) if scheduler => found.scheduler = value,
                Some(value) => found.rest.push((key.to_owned(), value)),
                None => found.dropped.push(key.to_owned()),
            }
        }
        found.tensors = tensors.into_inner();
        found
    }
}

impl OptimizerPassthrough {
    pub(super) fn read(root: View<'_>, base: View<'_>) -> OptimizerPassthrough {
        let mut left = VALUES_MAX;
        let mut copied = |v: View<'_>| v.to_object(&mut left, &|_| None);
        let mut groups = Vec::new();
        let listed = match base.items() {
            // an elastic checkpoint has a list of states
            Some(_) => None,
            None => base.get("param_groups"),
        };
        for group in listed.and_then(View::items).iter().flat_map(|g| g.iter()) {
            let mut options = Vec::new();
            for (key, value) in group.pairs().into_iter().flatten() {
                if let (Some(key), Some(value)) = (key.str().filter(|k| *k != "params"), copied(value)) {
                    options.push((key.to_owned(), value));
                }
            }
            let flats = group.get("params").and_then(View::items).and_then(|p| p.counts());
            groups.push((options, flats.unwrap_or_default()));
        }
        let kept = |key: &&str| Some(((*key).to_owned(), copied(root.get(key)?)?));
        OptimizerPassthrough { rest: COPIED.iter().filter_map(kept).collect(), groups }
    }
}

/// Collects the passthrough state of a tag from the files of rank 0.
pub(super) fn collect(tag: &Tag, facts: &ExternalFacts) -> Result<PassthroughState> {
    let Some((file, model)) = tag.model.get(&0) else { return Ok(PassthroughState::default()) };
    let mut notices = Vec::new();
    let literal = |value: &Object| TensorInliner { tag, file: *file, model, left: TENSORS_MAX }.inline(value);
    let mut dropped = model.passthrough.dropped.clone();
    let mut rest = Vec::new();
    for (key, value) in &model.passthrough.rest {
        match literal(value)? {
            Some(value) => rest.push((key.clone(), value)),
            None => dropped.push(key.clone()),
        }
    }
    let scheduler = literal(&model.passthrough.scheduler)?;
    if !dropped.is_empty() {
        notices.push(format!("not copied from the model file: {}", list_some(&dropped)));
    }
    let optimizer = tag.optimizer.get(&0);
    let frozen = model.frozen_shapes.iter().map(|(name, _)| name.clone());
    Ok(PassthroughState {
        groups: groups(tag, model)?,
        module: model.module.iter().map(|(name, _)| name.clone()).collect(),
        frozen_late: frozen.filter(|n| !facts.frozen.contains(n)).collect(),
        precision: precision(model),
        scheduler: scheduler.unwrap_or_default(),
        native: None,
        skipped: model.skipped,
        model: rest,
        optimizer: optimizer.map(|(_, o)| o.passthrough.rest.clone()).unwrap_or_default(),
        version: model.version.clone(),
        tag: Some(facts.tag.clone()),
        notices,
    })
}

/// The dtype of the first trained parameter in the module.
fn precision(model: &ModelStates) -> Option<Dtype> {
    let trained = model.groups.iter().flatten().next().map(|(name, _)| name.as_str());
    let named = |name: &str| model.module.iter().find(|(n, _)| n == name).map(|(_, v)| v.dtype);
    trained.and_then(named).or_else(|| model.module.first().map(|(_, v)| v.dtype))
}

/// The parameter groups with names. A group that was split into several flat groups is merged
/// again.
fn groups(tag: &Tag, model: &ModelStates) -> Result<Vec<ParamGroup>> {
    let Some((file, states)) = tag.optimizer.get(&0) else { return Ok(Vec::new()) };
    let steps = steps(tag, *file, states)?;
    let flats = model.groups.len();
    let given = &states.passthrough.groups;
    let mut listed: Vec<u64> = given.iter().flat_map(|(_, flats)| flats.iter().copied()).collect();
    listed.sort_unstable();
    // the indices are valid only if every flat group is in exactly one group
    let are_valid = listed.iter().copied().eq(0..flats as u64);
    let mut groups = Vec::new();
    for (i, (options, indices)) in given.iter().enumerate() {
        let flat_groups: Vec<usize> = match are_valid {
            true => indices.iter().map(|&f| f as usize).collect(),
            false if given.len() == flats => vec![i],
            false => Vec::new(),
        };
        let mut group = ParamGroup { options: options.clone(), ..ParamGroup::default() };
        for flat in flat_groups {
            group.names.extend(model.groups[flat].iter().map(|(name, _)| name.clone()));
            group.steps.resize(group.names.len(), steps.get(flat).copied().flatten());
        }
        groups.push(group);
    }
    Ok(groups)
}

/// The step of each flat group.
fn steps(tag: &Tag, file: usize, states: &OptimizerStates) -> Result<Vec<Option<f64>>> {
    let step = |shard: &super::states::Shard| match &shard.step {
        Some(StepValue::Number(n)) => Ok(Some(*n)),
        Some(StepValue::Tensor(view)) => tag.store.scalar(file, view).map(|s| Some(f64::from(s))),
        None => Ok(None),
    };
    states.shards.iter().map(step).collect()
}

/// Replaces references to tensors in the file by copies of the tensors.
struct TensorInliner<'a> {
    tag: &'a Tag,
    file: usize,
    model: &'a ModelStates,
    /// Bytes that may still be read.
    left: u64,
}

impl TensorInliner<'_> {
    /// Returns `None` when the tensors are too large.
    fn inline(&mut self, value: &Object) -> Result<Option<Object>> {
        let inline_all = |this: &mut Self, v: &[Object]| -> Result<Option<Vec<Object>>> {
            v.iter().map(|o| this.inline(o)).collect::<Result<Option<Vec<_>>>>()
        };
        Ok(match value {
            Object::List(v) => inline_all(self, v)?.map(Object::List),
            Object::Tuple(v) => inline_all(self, v)?.map(Object::Tuple),
            Object::Dict(pairs) => {
                let keys: Vec<Object> = pairs.iter().map(|(k, _)| k.clone()).collect();
                let values: Vec<Object> = pairs.iter().map(|(_, v)| v.clone()).collect();
                inline_all(self, &values)?.map(|values| Object::Dict(keys.into_iter().zip(values).collect()))
            }
            Object::Tensor(t) => self.inline_tensor(t)?,
            other => Some(other.clone()),
        })
    }

    fn inline_tensor(&mut self, t: &StoredTensor) -> Result<Option<Object>> {
        let Some(view) = self.model.passthrough.tensors.get(t.storage) else { return Ok(None) };
        let count = view.elements();
        let bytes = count.saturating_mul(view.dtype.size());
        let Some(left) = self.left.checked_sub(bytes) else { return Ok(None) };
        self.left = left;
        let mut content = vec![0u8; bytes as usize];
        let part = TensorPart::new(self.file, view, 0..count, 0);
        self.tag.store.read_raw(&part, view.dtype, 0..count, &mut content, |_| Vec::new())?;
        Ok(Some(Object::Literal { dtype: t.dtype, shape: t.shape.clone(), bytes: content.into() }))
    }
}

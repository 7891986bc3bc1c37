//! Collects the parts of a DeepSpeed checkpoint that a conversion copies unchanged.
use super::states::{ModelStates, OptimizerStates};
use super::tag::TagContents;
use crate::catalog::{ParamGroup, PassthroughState, TensorPart};
use crate::codec::pickle::{PythonObject, StoredTensor};
use crate::error::{Result, format_names};
use crate::tensor::Dtype;
use std::collections::HashSet;

/// Limit on the total size in bytes of the tensors that a conversion copies from one DeepSpeed
/// file.
const TENSOR_BYTES_MAX: u64 = 64 << 20;

/// Collects the parts of a DeepSpeed checkpoint that a conversion copies unchanged, from the files
/// of rank 0. Tensors in this state are read into memory. Entries that cannot be copied are dropped
/// with a notice.
pub(super) fn collect_passthrough(tag: &TagContents) -> Result<PassthroughState> {
    let facts = &tag.builder.facts;
    let Some((file, model)) = tag.model.get(&0) else { return Ok(PassthroughState::default()) };
    let mut notices = Vec::new();
    let literal = |value: &PythonObject| {
        TensorInliner { tag, file: *file, model, left: TENSOR_BYTES_MAX }.inline_tensors(value)
    };
    let mut dropped = model.passthrough.dropped.clone();
    let mut rest = Vec::new();
    for (key, value) in &model.passthrough.other_entries {
        match literal(value)? {
            Some(value) => rest.push((key.clone(), value)),
            None => dropped.push(key.clone()),
        }
    }
    let scheduler = literal(&model.passthrough.scheduler)?;
    if !dropped.is_empty() {
        notices.push(format!("not copied from the model file: {}", format_names(&dropped)));
    }
    let optimizer = tag.optimizer.get(&0);
    let collected: HashSet<&String> = facts.state.frozen.iter().collect();
    let frozen_late = model.frozen_shapes.iter().map(|(name, _)| name).filter(|n| !collected.contains(n));
    Ok(PassthroughState {
        groups: collect_param_groups(tag, model)?,
        module_tensor_names: model.module.iter().map(|(name, _)| name.clone()).collect(),
        frozen_late: frozen_late.cloned().collect(),
        precision: find_compute_dtype(model),
        scheduler: scheduler.unwrap_or_default(),
        native_facts: None,
        skipped_steps: model.skipped,
        model_entries: rest,
        optimizer_entries: optimizer.map(|(_, o)| o.passthrough.other_entries.clone()).unwrap_or_default(),
        deepspeed_version: model.version.clone(),
        tag: Some(facts.tag.clone()),
        notices,
    })
}

/// Returns the dtype in which the model computed during training, which is that of the first
/// trained parameter in the DeepSpeed model file. Without a trained parameter, returns the dtype of
/// the module's first tensor.
fn find_compute_dtype(model: &ModelStates) -> Option<Dtype> {
    let trained = model.groups.iter().flatten().next().map(|(name, _)| name.as_str());
    let named = |name: &str| model.module.iter().find(|(n, _)| n == name).map(|(_, v)| v.dtype);
    trained.and_then(named).or_else(|| model.module.first().map(|(_, v)| v.dtype))
}

/// Builds the optimizer's parameter groups from rank 0's DeepSpeed optimizer file, with the name
/// and the update count of each parameter. Flat arrays into which DeepSpeed split one parameter
/// group are merged again.
fn collect_param_groups(tag: &TagContents, model: &ModelStates) -> Result<Vec<ParamGroup>> {
    let Some((file, states)) = tag.optimizer.get(&0) else { return Ok(Vec::new()) };
    let steps = read_group_steps(tag, *file, states)?;
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

/// Reads the number of optimizer updates of each flat array, in which DeepSpeed concatenates the
/// parameters of a group, from one rank's optimizer file. The step is `None` for a group without a
/// step.
fn read_group_steps(tag: &TagContents, file: usize, states: &OptimizerStates) -> Result<Vec<Option<f64>>> {
    let read = |step| tag.builder.store.read_step(file, step);
    states.shards.iter().map(|shard| shard.step.as_ref().map(read).transpose()).collect()
}

/// Loads the tensors to which a value of a DeepSpeed model file refers into memory, up to a limit
/// on their total size.
struct TensorInliner<'a> {
    tag: &'a TagContents,
    /// Index of the model file in `StoredFiles`.
    file: usize,
    model: &'a ModelStates,
    /// Bytes of tensors that may still be copied.
    left: u64,
}

impl TensorInliner<'_> {
    /// Returns a copy of `value` in which each tensor contains its elements instead of a reference
    /// to a file. Returns `None` if a tensor is unknown, or if the tensors have more than `left`
    /// bytes. Subtracts the number of copied bytes from `left`.
    fn inline_tensors(&mut self, value: &PythonObject) -> Result<Option<PythonObject>> {
        let inline_all = |this: &mut Self, v: &[PythonObject]| -> Result<Option<Vec<PythonObject>>> {
            v.iter().map(|o| this.inline_tensors(o)).collect::<Result<Option<Vec<_>>>>()
        };
        Ok(match value {
            PythonObject::List(v) => inline_all(self, v)?.map(PythonObject::List),
            PythonObject::Tuple(v) => inline_all(self, v)?.map(PythonObject::Tuple),
            PythonObject::Dict(pairs) => {
                let (keys, values): (Vec<_>, Vec<_>) = pairs.iter().cloned().unzip();
                inline_all(self, &values)?
                    .map(|values| PythonObject::Dict(keys.into_iter().zip(values).collect()))
            }
            PythonObject::Tensor(t) => self.inline_tensor(t)?,
            other => Some(other.clone()),
        })
    }

    /// Returns a copy of the tensor `t` with its elements in memory, or `None` if the elements
    /// would exceed the limit on the total size. Subtracts the number of copied bytes from `left`.
    fn inline_tensor(&mut self, t: &StoredTensor) -> Result<Option<PythonObject>> {
        let Some(view) = self.model.passthrough.tensors.get(t.storage) else { return Ok(None) };
        let count = view.element_count();
        let bytes = count.saturating_mul(view.dtype.size());
        let Some(left) = self.left.checked_sub(bytes) else { return Ok(None) };
        self.left = left;
        let mut content = vec![0u8; bytes as usize];
        let part = TensorPart::new(self.file, view, 0..count, 0);
        self.tag.builder.store.read_raw(&part, view.dtype, 0..count, &mut content, &[])?;
        Ok(Some(PythonObject::Literal { dtype: t.dtype, shape: t.shape.clone(), bytes: content.into() }))
    }
}

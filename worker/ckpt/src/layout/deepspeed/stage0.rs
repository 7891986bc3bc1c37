//! Adds the optimizer of stage 0 to the collected tensors: the states, which are numbered, and the
//! FP32 master weights.
use super::collect::CollectedTensors;
use super::embedded_optimizer::EmbeddedOptimizer;
use super::states::ModelStates;
use super::tag::TagContents;
use crate::catalog::{ExternalTensor, ParamGroupInfo, to_whole_step};
use crate::codec::torch_file::TensorView;
use crate::error::{DeepSpeedError, Result, format_names};
use crate::layout::hf::optimizer_state::{ParamId, StepValue};
use crate::tensor::{Dtype, TensorRole};
use std::collections::{BTreeMap, HashMap};

/// Replaces the 16-bit weights in `found` by the master weights, and adds the optimizer states.
/// Returns the parameter groups, and the number of updates of each weight. If the states cannot be
/// assigned to weights, adds only a notice and returns empty results.
pub(super) fn add_embedded_optimizer(
    tag: &TagContents,
    file: usize,
    model: &ModelStates,
    found: &mut CollectedTensors,
) -> Result<(Vec<ParamGroupInfo>, BTreeMap<String, u64>)> {
    let Some(embedded) = &model.embedded_optimizer else { return Ok(Default::default()) };
    let weights: Vec<(String, Vec<u64>)> = found
        .entries
        .iter()
        .filter(|e| e.info.role == TensorRole::Weight)
        .map(|e| (e.info.name.clone(), e.info.shape.clone()))
        .collect();
    let borrowed: Vec<(&str, &[u64])> = weights.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
    let names = match embedded.optimizer.name_parameters(&borrowed, true) {
        Ok(names) => names,
        Err(error) => {
            let notice = format!("ignoring the optimizer state in the model file: {error}");
            found.ignored_optimizer = Some(notice.clone());
            found.notices.push(notice);
            return Ok(Default::default());
        }
    };
    let damaged = |error: DeepSpeedError| tag.damaged(file, error);
    let mut steps = BTreeMap::new();
    for ((_, ids), names) in embedded.optimizer.groups.iter().zip(&names) {
        for (id, name) in ids.iter().zip(names) {
            if let Some(step) = add_param_states(tag, file, embedded, id, name, found)? {
                let step = to_whole_step(step)
                    .map_err(|error| damaged(DeepSpeedError::WeightStep { name: name.clone(), error }))?;
                steps.insert(name.clone(), step);
            }
        }
    }
    apply_master_weights(file, embedded, &names, found).map_err(damaged)?;
    if !embedded.optimizer.unknown.is_empty() {
        let unknown: Vec<String> = embedded.optimizer.unknown.iter().cloned().collect();
        found.notices.push(format!("ignoring unknown optimizer states: {}", format_names(&unknown)));
    }
    let groups = embedded.optimizer.groups.iter().zip(names);
    Ok((groups.map(|((hyper, _), names)| ParamGroupInfo { hyper: hyper.clone(), names }).collect(), steps))
}

/// Adds the optimizer states of the parameter `id` to `found`, as states of the weight `name`.
/// Returns the parameter's step, or `None` if the parameter has no step.
fn add_param_states(
    tag: &TagContents,
    file: usize,
    embedded: &EmbeddedOptimizer,
    id: &ParamId,
    name: &str,
    found: &mut CollectedTensors,
) -> Result<Option<f64>> {
    let Some(state) = embedded.optimizer.states.get(id) else { return Ok(None) };
    for (role, view) in &state.tensors {
        found.entries.push(ExternalTensor::from_whole_view(name, *role, file, view));
    }
    Ok(match &state.step {
        None => None,
        Some(StepValue::Number(n)) => Some(*n),
        Some(StepValue::Tensor(view)) => Some(f64::from(tag.store.read_scalar(file, view)?)),
    })
}

/// Replaces the 16-bit weights in `found` by the FP32 master weights. `names` are the names of the
/// weights of each group. Does nothing without master weights.
///
/// # Errors
/// Fails if the masters do not match the weights in number, dtype or shape.
fn apply_master_weights(
    file: usize,
    embedded: &EmbeddedOptimizer,
    names: &[Vec<String>],
    found: &mut CollectedTensors,
) -> std::result::Result<(), DeepSpeedError> {
    if embedded.masters.is_empty() {
        return Ok(());
    }
    let mut by_name: HashMap<&str, &TensorView> = HashMap::new();
    for (g, (views, names)) in embedded.masters.iter().zip(names).enumerate() {
        if views.len() != names.len() {
            return Err(DeepSpeedError::MasterCount { group: g, weights: views.len(), states: names.len() });
        }
        by_name.extend(names.iter().map(String::as_str).zip(views));
    }
    for entry in found.entries.iter_mut().filter(|e| e.info.role == TensorRole::Weight) {
        let Some(view) = by_name.get(entry.info.name.as_str()) else { continue };
        if view.dtype != Dtype::F32 || view.shape != entry.info.shape {
            return Err(DeepSpeedError::MasterMismatch {
                name: entry.info.name.clone(),
                dtype: view.dtype,
                found: view.shape.clone(),
                expected: entry.info.shape.clone(),
            });
        }
        *entry = ExternalTensor::from_whole_view(&entry.info.name, TensorRole::Weight, file, view);
    }
    Ok(())
}

//! Adds the optimizer states and the FP32 master weights in a DeepSpeed model file of ZeRO stage 0
//! to the checkpoint that is being read.
use super::embedded_optimizer::EmbeddedOptimizer;
use crate::catalog::{
    BorrowedWeightShape, ExternalCheckpointBuilder, ExternalTensor, ParamGroupInfo, convert_step_to_integer,
};
use crate::codec::torch_file::TensorView;
use crate::error::{DeepSpeedError, Result};
use crate::layout::hf::optimizer_state::ParamId;
use crate::tensor::{Dtype, TensorRole};
use std::collections::HashMap;

/// Adds the FP32 master weights and the optimizer state in a DeepSpeed model file of ZeRO stage 0
/// to the list of the checkpoint's contents. If the states cannot be assigned to weights, adds only
/// a notice. `file` is the index of the model file in `StoredFiles`.
pub(super) fn add_embedded_optimizer(
    builder: &mut ExternalCheckpointBuilder,
    file: usize,
    embedded: &EmbeddedOptimizer,
) -> Result<()> {
    let optimizer = &embedded.optimizer;
    let weights: Vec<BorrowedWeightShape<'_>> = builder.weights().collect();
    let names = match optimizer.find_parameter_names(&weights, true) {
        Ok(names) => names,
        Err(error) => {
            builder
                .record_skipped_optimizer(format!("ignoring the optimizer state in the model file: {error}"));
            return Ok(());
        }
    };
    for ((_, ids), names) in optimizer.groups.iter().zip(&names) {
        for (id, name) in ids.iter().zip(names) {
            add_states_of_parameter(builder, file, embedded, id, name)?;
        }
    }
    replace_by_master_weights(file, embedded, &names, &mut builder.entries)
        .map_err(|error| builder.damaged_stored_file_error(file, error))?;
    builder.add_unknown_states_notice(&optimizer.unknown);
    let groups = optimizer.groups.iter().zip(names);
    builder.facts.state.groups =
        groups.map(|((hyper, _), names)| ParamGroupInfo { hyper: hyper.clone(), names }).collect();
    Ok(())
}

/// Adds the states and the update count that the optimizer keeps for its parameter `id` to the
/// checkpoint, as those of the weight `name`.
fn add_states_of_parameter(
    builder: &mut ExternalCheckpointBuilder,
    file: usize,
    embedded: &EmbeddedOptimizer,
    id: &ParamId,
    name: &str,
) -> Result<()> {
    let Some(state) = embedded.optimizer.states.get(id) else { return Ok(()) };
    for (role, view) in &state.tensors {
        builder.entries.push(ExternalTensor::from_whole_view(name, *role, file, view));
    }
    if let Some(step) = &state.step {
        let step = convert_step_to_integer(builder.store.read_step(file, step)?).map_err(|error| {
            builder
                .damaged_stored_file_error(file, DeepSpeedError::WeightStep { name: name.to_owned(), error })
        })?;
        builder.facts.state.steps.insert(name.to_owned(), step);
    }
    Ok(())
}

/// Replaces each 16-bit weight in the tensor list `entries` by the FP32 master weight that the
/// DeepSpeed model file contains for it. `names` are the names of the weights of each group. Does
/// nothing without master weights.
///
/// # Errors
/// Fails if the masters do not match the weights in number, dtype or shape.
fn replace_by_master_weights(
    file: usize,
    embedded: &EmbeddedOptimizer,
    names: &[Vec<String>],
    entries: &mut [ExternalTensor],
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
    for entry in entries.iter_mut().filter(|e| e.info.role == TensorRole::Weight) {
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

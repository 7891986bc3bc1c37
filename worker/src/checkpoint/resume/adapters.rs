//! Opens and loads the pretrained LoRA adapters in the directory that `train.lora.from` names.
use super::weight_match::TensorMismatches;
use crate::{
    checkpoint::tensor_mapping::{ReadPlan, read_owned_ranges, sync_loaded_replicas},
    consensus::require_on_all_ranks,
    error::{Result, to_unreadable_adapters_error, to_unreadable_checkpoint_error},
    param_groups::LORA_FROM_KEY,
    params::ParamUnit,
    trainer_stages::UninitializedTrainer,
};
use ckpt::{
    ExternalCheckpoint, TensorSource,
    peft::{is_lora_matrix, open_peft_adapters},
};
use diagnostic::{Diagnostic, codes};
use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

/// Opens a directory with pretrained LoRA adapters, and checks that they have the names and shapes
/// of the model's adapters.
pub fn open_matching_adapters(
    directory: &Path,
    units: &[ParamUnit],
) -> diagnostic::Result<ExternalCheckpoint> {
    let source = open_peft_adapters(directory).map_err(|e| to_unreadable_adapters_error(e, LORA_FROM_KEY))?;
    let tensors = source.tensors();
    let mut stored: HashMap<&str, &[u64]> =
        tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let mut mismatches = TensorMismatches::default();
    for p in units.iter().flat_map(|u| &u.params).filter(|p| is_lora_matrix(&p.name)) {
        match stored.remove(p.name.as_str()) {
            None => mismatches.missing.push(p.name.clone()),
            Some(shape) => mismatches.record_shape_mismatch(&p.name, shape, &p.shape, "model"),
        }
    }
    mismatches.extra = stored.into_keys().map(str::to_owned).collect();
    mismatches.extra.sort_unstable();
    let parts = mismatches.describe();
    if parts.is_empty() {
        return Ok(source);
    }
    let message = format!(
        "the adapters in {} belong to another model than `train.model.from`; {}",
        directory.display(),
        parts.join("; ")
    );
    let error = Diagnostic::error(codes::training::ADAPTER_MODEL_MISMATCH, message)
        .with_subject(LORA_FROM_KEY)
        .with_field("path", directory.display().to_string());
    Err(mismatches.add_names_to_error(error))
}

/// Loads pretrained LoRA adapters into the trainers of all ranks if `train.lora.from` names a
/// directory. Each rank reads the ranges that it owns. Collective: every rank must call it.
pub(super) fn load_pretrained_adapters(ready: &mut UninitializedTrainer) -> Result<()> {
    let Some(directory) = ready.train_spec().lora.as_ref().and_then(|l| l.from.clone()) else {
        return Ok(());
    };
    let units = ready.trainer.engine.clone_units();
    let opened = open_matching_adapters(&directory, &units).map_err(crate::error::Error::from);
    let source = require_on_all_ranks(ready.trainer.engine.queue(), opened)?;
    let plan = ReadPlan {
        source: &source,
        renamed: &HashMap::new(),
        with_states: false,
        reset_states: &HashSet::new(),
        selects: is_lora_matrix,
    };
    let read = read_owned_ranges(ready, &plan).map_err(to_unreadable_checkpoint_error);
    require_on_all_ranks(ready.trainer.engine.queue(), read)?;
    sync_loaded_replicas(ready)
}

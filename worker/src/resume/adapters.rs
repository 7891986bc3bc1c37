//! Pretrained adapters: the directory that `train.lora.from` names.
use super::weight_match::list_names;
use crate::{
    checkpoint_mapping::{ReadPlan, read_owned_ranges, sync_replicas},
    consensus::exchange_values,
    error::{Result, unreadable_adapters, unreadable_checkpoint},
    param_groups::LORA_FROM,
    params::ParamUnit,
    stages::ReadyTrainer,
};
use ckpt::{
    ExternalCheckpoint, TensorSource,
    peft::{is_adapter, open_adapters},
};
use diagnostic::{Diagnostic, codes};
use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

/// Opens the directory and checks that its adapters have the names and shapes of the model's.
pub fn check_adapters(directory: &Path, units: &[ParamUnit]) -> diagnostic::Result<ExternalCheckpoint> {
    let source = open_adapters(directory).map_err(|e| unreadable_adapters(e, LORA_FROM))?;
    let tensors = source.tensors();
    let mut stored: HashMap<&str, &[u64]> =
        tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let (mut missing, mut shapes) = (Vec::new(), Vec::new());
    for p in units.iter().flat_map(|u| &u.params).filter(|p| is_adapter(&p.name)) {
        match stored.remove(p.name.as_str()) {
            None => missing.push(p.name.clone()),
            Some(shape) if !shape.iter().copied().eq(p.shape.iter().map(|&n| n as u64)) => {
                shapes.push(format!("{} {shape:?} (model: {:?})", p.name, p.shape));
            }
            Some(_) => {}
        }
    }
    let mut extra: Vec<String> = stored.into_keys().map(str::to_owned).collect();
    extra.sort();
    let kinds = [("missing", &missing), ("of another shape", &shapes), ("not in the model", &extra)];
    let parts: Vec<String> = kinds
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("{kind}: {}", list_names(names)))
        .collect();
    if parts.is_empty() {
        return Ok(source);
    }
    let message = format!(
        "the adapters in {} belong to another model than `train.model.from`; {}",
        directory.display(),
        parts.join("; ")
    );
    Err(Diagnostic::error(codes::training::ADAPTER_MODEL_MISMATCH, message)
        .with_subject(LORA_FROM)
        .with_field("path", directory.display().to_string())
        .with_field("missing", missing)
        .with_field("shapes", shapes)
        .with_field("extra", extra))
}

/// Loads the adapters if the job names a directory: each rank reads its owned ranges. Collective.
pub(super) fn load_adapters(ready: &mut ReadyTrainer) -> Result<()> {
    let Some(directory) = ready.train_spec().lora.as_ref().and_then(|l| l.from.clone()) else {
        return Ok(());
    };
    let units: Vec<ParamUnit> = ready.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let opened = check_adapters(&directory, &units).map_err(crate::error::Error::from);
    let result = opened.as_ref().map(|_| ()).map_err(Clone::clone);
    exchange_values(ready.trainer.engine.queue(), result)?;
    let source = opened?;
    let plan = ReadPlan {
        source: &source,
        renamed: &HashMap::new(),
        with_states: false,
        reset_states: &HashSet::new(),
        selects: is_adapter,
    };
    let read = read_owned_ranges(ready, &plan).map_err(unreadable_checkpoint);
    exchange_values(ready.trainer.engine.queue(), read)?;
    sync_replicas(ready)
}

//! Collects the tensors of a DeepSpeed checkpoint from the files of all ranks. If several files
//! contain a weight with different values, chooses one of them.
use super::file_names;
use super::partitions::{self, FlatGroupShardOfRank};
use super::states::{ModelStates, OptimizerStates};
use super::tag::{RankContents, TagContents};
use crate::catalog::{ExternalCheckpointBuilder, ExternalFacts, ExternalTensor, TiedWeight};
use crate::codec::torch_file::TensorView;
use crate::error::{DeepSpeedError, Result, format_names};
use crate::tensor::TensorRole;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Collects the weights, buffers and optimizer states of one DeepSpeed checkpoint from the model
/// and optimizer files of all ranks. `stage` is the ZeRO stage. Collects nothing if the model file
/// of rank 0 is missing.
pub(super) fn collect_tensors(tag: &mut TagContents, stage: u8) -> Result<()> {
    let TagContents { builder, model, optimizer } = tag;
    let Some((file, first)) = model.get(&0) else { return Ok(()) };
    if stage > 0 {
        collect_flat_groups(builder, optimizer, first, stage)?;
    }
    collect_frozen_weights(builder, model, first, stage)?;
    collect_tied_weights(builder, first);
    collect_module_tensors(builder, *file, first, stage);
    sort_in_module_order(builder, first);
    let shards = optimizer.values().flat_map(|(_, states)| &states.shards);
    builder.add_unknown_states_notice(shards.flat_map(|shard| &shard.unknown));
    Ok(())
}

/// Copies values that describe the run, such as the step and the number of ranks, from rank 0's
/// DeepSpeed model file to `facts`. `path` is the directory of the tag.
pub(super) fn add_model_file_facts(facts: &mut ExternalFacts, model: &ModelStates, stage: u8, path: &Path) {
    facts.writer = format!("DeepSpeed {}", model.version.as_deref().unwrap_or("of unknown version"));
    facts.tag = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let state = &mut facts.state;
    (state.step, state.samples) = (model.step, model.samples);
    (state.world, state.stage) = (Some(model.world), Some(stage));
    state.scheduler = model.scheduler.clone();
    let tag = facts.tag.strip_suffix(file_names::UNIVERSAL_SUFFIX).unwrap_or(&facts.tag);
    let named = file_names::parse_step_in_tag(tag);
    if let (Some(named), Some(step)) = (named, model.step.filter(|step| Some(*step) != named)) {
        let warning = format!("the model file is of step {step}, the directory is named for step {named}");
        facts.warnings.push(warning);
    }
}

/// Returns the names of the weights that were collected so far.
fn collected_weight_names(builder: &ExternalCheckpointBuilder) -> HashSet<String> {
    builder.weights().map(|(name, _)| name.to_owned()).collect()
}

/// Collects the FP32 master weights and the optimizer states of all trained parameters from the
/// optimizer files of a DeepSpeed checkpoint of ZeRO stage 1 to 3.
fn collect_flat_groups(
    builder: &mut ExternalCheckpointBuilder,
    optimizer: &RankContents<OptimizerStates>,
    model: &ModelStates,
    stage: u8,
) -> Result<()> {
    for (file, states) in optimizer.values() {
        if states.shards.len() != model.groups.len() {
            let (found, expected) = (states.shards.len(), model.groups.len());
            return Err(
                builder.damaged_stored_file_error(*file, DeepSpeedError::GroupCount { found, expected })
            );
        }
    }
    let is_unpadded = optimizer.values().all(|(_, s)| s.is_unpadded);
    for (g, group) in model.groups.iter().enumerate() {
        let ranks: Vec<FlatGroupShardOfRank<'_>> = optimizer
            .values()
            .filter_map(|(file, states)| {
                Some(FlatGroupShardOfRank { file: *file, shard: states.shards.get(g)? })
            })
            .collect();
        let entries = match stage {
            3 => partitions::locate_partitioned_params(group, &ranks),
            _ => partitions::locate_flat_params(group, &ranks, is_unpadded),
        };
        builder.entries.extend(entries.map_err(|error| {
            builder.damaged_file_error("optimizer files", DeepSpeedError::Group { group: g, error })
        })?);
    }
    Ok(())
}

/// Collects the frozen weights of a DeepSpeed checkpoint from its model files. For a frozen weight
/// that the optimizer files contain, keeps the FP32 values of the optimizer and adds a notice.
pub(super) fn collect_frozen_weights(
    builder: &mut ExternalCheckpointBuilder,
    models: &RankContents<ModelStates>,
    model: &ModelStates,
    stage: u8,
) -> Result<()> {
    let trained = collected_weight_names(builder);
    let (frozen_late, frozen): (Vec<_>, Vec<_>) =
        model.frozen_shapes.iter().partition(|(n, _)| trained.contains(n));
    if !frozen_late.is_empty() {
        let names: Vec<String> = frozen_late.iter().map(|(n, _)| n.clone()).collect();
        builder.add_notice(format!(
            "{} frozen after the optimizer was created ({}); using the optimizer's FP32 values",
            if names.len() == 1 { "a weight was" } else { "weights were" },
            format_names(&names)
        ));
    }
    let files: Vec<(usize, HashMap<&str, &TensorView>)> = models
        .values()
        .filter(|_| stage > 0)
        .map(|(file, m)| (*file, m.frozen_fragments.iter().map(|(n, v)| (n.as_str(), v)).collect()))
        .collect();
    // below stage 3, one model file has the whole weight
    let files = if stage == 3 { &files[..] } else { &files[..files.len().min(1)] };
    for (name, shape) in frozen {
        let mut slices = Vec::with_capacity(files.len());
        for (file, fragments) in files {
            let Some(view) = fragments.get(name.as_str()) else {
                return Err(
                    builder.damaged_stored_file_error(*file, DeepSpeedError::FrozenMissing(name.clone()))
                );
            };
            slices.push((*file, *view));
        }
        let entry = partitions::locate_frozen_param(name, shape, &slices)
            .map_err(|error| builder.damaged_file_error("model files", DeepSpeedError::Frozen(error)))?;
        builder.entries.push(entry);
        builder.facts.state.frozen.push(name.clone());
    }
    Ok(())
}

/// Collects which weights of a DeepSpeed checkpoint are tied, that is, stored under one name and
/// used under a second one (alias). If the alias of a tie is stored as a separate weight, adds a
/// notice instead of the tie.
pub(super) fn collect_tied_weights(builder: &mut ExternalCheckpointBuilder, model: &ModelStates) {
    let stored = collected_weight_names(builder);
    for tie in &model.ties {
        if stored.contains(&tie.alias) {
            builder.add_notice(format!(
                "{} was tied to {} after the optimizer was created; using its own FP32 values",
                tie.alias, tie.target
            ));
        } else if stored.contains(&tie.target) {
            builder.facts.state.ties.push(tie.clone());
        }
    }
}

/// Adds the buffers in a DeepSpeed model file to the list of tensors, and those weights that the
/// optimizer files do not contain.
///
/// Records these weights as frozen in stages 1 to 3. Weights without values are recorded as lost,
/// and aliases of collected weights as ties. `file` is the index of the model file in
/// `StoredFiles`.
pub(super) fn collect_module_tensors(
    builder: &mut ExternalCheckpointBuilder,
    file: usize,
    model: &ModelStates,
    stage: u8,
) {
    let mut known = collected_weight_names(builder);
    let (facts, entries) = (&mut builder.facts, &mut builder.entries);
    known.extend(facts.state.ties.iter().map(|t| t.alias.clone()));
    let buffers: HashSet<&str> = model.buffers.iter().map(String::as_str).collect();
    let targets: HashMap<&str, &str> =
        model.ties.iter().rev().map(|t| (t.alias.as_str(), t.target.as_str())).collect();
    let mut fallback = Vec::new();
    let mut locations: HashMap<_, &str> = HashMap::new();
    for (name, view) in &model.module {
        if buffers.contains(name.as_str()) {
            entries.push(ExternalTensor::from_whole_view(name, TensorRole::Buffer, file, view));
            continue;
        } else if known.contains(name) {
            continue;
        } else if stage == 3 && view.element_count() == 0 {
            facts.lost.push(name.clone());
            continue;
        }
        let tie = targets.get(name.as_str()).filter(|target| known.contains(**target));
        // stage 0 does not list ties
        let shared =
            (stage == 0 && view.element_count() > 0).then(|| locations.get(&view.location())).flatten();
        if let Some(target) = tie.or(shared) {
            facts.state.ties.push(TiedWeight { alias: name.clone(), target: (*target).to_owned() });
            continue;
        }
        locations.insert(view.location(), name);
        entries.push(ExternalTensor::from_whole_view(name, TensorRole::Weight, file, view));
        known.insert(name.clone());
        fallback.push(name.clone());
    }
    if stage > 0 && !fallback.is_empty() {
        facts.notices.push(format!(
            "{} in no parameter group and not frozen ({}); using the values of the 16-bit module",
            if fallback.len() == 1 { "a weight is" } else { "weights are" },
            format_names(&fallback)
        ));
        facts.state.frozen.extend(fallback);
    }
    if !facts.lost.is_empty() {
        facts.notices.push(format!("weights without stored values: {}", format_names(&facts.lost)));
    }
}

/// Sorts the collected tensors of a DeepSpeed checkpoint in the order in which the model's
/// `state_dict` in a model file lists their names.
pub(super) fn sort_in_module_order(builder: &mut ExternalCheckpointBuilder, model: &ModelStates) {
    builder.sort_tensors(model.module.iter().map(|(name, _)| name.as_str()));
}

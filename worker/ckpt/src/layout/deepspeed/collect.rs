//! Collects every tensor of a tag, and decides between contradicting sources of a weight.
use super::partitions::{self, RankShard};
use super::states::ModelStates;
use super::tag::TagContents;
use crate::catalog::{ExternalFacts, ExternalTensor, StatePart, TiedWeight, TrainingState};
use crate::codec::disk::Directory;
use crate::codec::torch_file::TensorView;
use crate::error::{CkptError, DeepSpeedError, Result, format_names};
use crate::layout::hf::companion_files;
use crate::tensor::TensorRole;
use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::path::Path;

/// The tensors of a tag, with the ties, frozen weights, lost weights and notices.
#[derive(Default)]
pub(super) struct CollectedTensors {
    pub(super) entries: Vec<ExternalTensor>,
    /// Names of weights that are not trained.
    pub(super) frozen: Vec<String>,
    /// Names of weights that the tag lists without storing their values.
    pub(super) lost: Vec<String>,
    pub(super) ties: Vec<TiedWeight>,
    /// Why an existing optimizer state is ignored. `None` if no optimizer state is ignored.
    pub(super) ignored_optimizer: Option<String>,
    pub(super) notices: Vec<String>,
}

/// Collects the tensors of a tag from the files of all ranks. `stage` is the ZeRO stage. Returns no
/// tensors if the model file of rank 0 is missing.
pub(super) fn collect_tensors(tag: &TagContents, stage: u8) -> Result<CollectedTensors> {
    let mut found = CollectedTensors::default();
    let Some((file, model)) = tag.model.get(&0) else { return Ok(found) };
    found.collect_groups(tag, model, stage)?;
    found.collect_frozen(tag, model, stage)?;
    found.collect_ties(model);
    found.collect_module(*file, model, stage);
    found.sort_by_module(model);
    found.report_unknown_states(tag);
    Ok(found)
}

impl CollectedTensors {
    /// Returns the facts that the model file of rank 0 and the collected tensors contain. Takes the
    /// ties, the frozen and lost weights and the notices, which `notices` precede. `path` is the
    /// directory of the tag.
    pub(super) fn take_facts(
        &mut self,
        model: &ModelStates,
        stage: u8,
        path: &Path,
        mut notices: Vec<String>,
    ) -> ExternalFacts {
        notices.append(&mut self.notices);
        ExternalFacts {
            writer: format!("DeepSpeed {}", model.version.as_deref().unwrap_or("of unknown version")),
            tag: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            state: TrainingState {
                step: model.step,
                samples: model.samples,
                world: Some(model.world),
                stage: Some(stage),
                scheduler: model.scheduler.clone(),
                ties: take(&mut self.ties),
                frozen: take(&mut self.frozen),
                ..TrainingState::default()
            },
            lost: take(&mut self.lost),
            ignored_optimizer: self.ignored_optimizer.take(),
            notices,
            ..ExternalFacts::default()
        }
    }

    /// Reads the companion files in `root` into the facts. Adds an absent optimizer state and
    /// absent companion files to `facts.missing`.
    pub(super) fn add_companion_facts(&self, facts: &mut ExternalFacts, root: &Path) -> Result<()> {
        if !self.entries.iter().any(|e| e.info.role.is_optimizer_state()) {
            facts.missing.push(StatePart::OptimizerState);
        }
        companion_files::add_companion_facts(facts, &Directory::open(root)?)
    }

    /// Returns the names of the weights collected so far.
    fn weight_names(&self) -> HashSet<&str> {
        self.entries
            .iter()
            .filter(|e| e.info.role == TensorRole::Weight)
            .map(|e| e.info.name.as_str())
            .collect()
    }

    /// Collects the FP32 master weights and optimizer states of the trained parameters from the
    /// optimizer files. Does nothing in stage 0, which has no optimizer files.
    fn collect_groups(&mut self, tag: &TagContents, model: &ModelStates, stage: u8) -> Result<()> {
        if stage == 0 {
            return Ok(());
        }
        for (file, states) in tag.optimizer.values() {
            if states.shards.len() != model.groups.len() {
                let (found, expected) = (states.shards.len(), model.groups.len());
                return Err(tag.damaged(*file, DeepSpeedError::GroupCount { found, expected }));
            }
        }
        let is_unpadded = tag.optimizer.values().all(|(_, s)| s.is_unpadded);
        for (g, group) in model.groups.iter().enumerate() {
            let ranks: Vec<RankShard<'_>> = tag
                .optimizer
                .values()
                .filter_map(|(file, states)| Some(RankShard { file: *file, shard: states.shards.get(g)? }))
                .collect();
            let entries = match stage {
                3 => partitions::locate_partitioned_params(group, &ranks),
                _ => partitions::locate_flat_params(group, &ranks, is_unpadded),
            };
            self.entries.extend(entries.map_err(|error| {
                let error = DeepSpeedError::Group { group: g, error };
                CkptError::damaged(&tag.path, "optimizer files", error)
            })?);
        }
        Ok(())
    }

    /// Collects the frozen weights from the model files. For a frozen weight that the optimizer
    /// files contain, keeps the FP32 values of the optimizer and adds a notice.
    pub(super) fn collect_frozen(&mut self, tag: &TagContents, model: &ModelStates, stage: u8) -> Result<()> {
        let trained: HashSet<String> = self.weight_names().into_iter().map(str::to_owned).collect();
        let (frozen_late, frozen): (Vec<_>, Vec<_>) =
            model.frozen_shapes.iter().partition(|(n, _)| trained.contains(n));
        if !frozen_late.is_empty() {
            let names: Vec<String> = frozen_late.iter().map(|(n, _)| n.clone()).collect();
            self.notices.push(format!(
                "{} frozen after the optimizer was created ({}); using the optimizer's FP32 values",
                if names.len() == 1 { "a weight was" } else { "weights were" },
                format_names(&names)
            ));
        }
        let files: Vec<(usize, HashMap<&str, &TensorView>)> = tag
            .model
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
                    return Err(tag.damaged(*file, DeepSpeedError::FrozenMissing(name.clone())));
                };
                slices.push((*file, *view));
            }
            let entry = partitions::locate_frozen_param(name, shape, &slices).map_err(|error| {
                CkptError::damaged(&tag.path, "model files", DeepSpeedError::Frozen(error))
            })?;
            self.entries.push(entry);
            self.frozen.push(name.clone());
        }
        Ok(())
    }

    /// Collects the ties between weights. If the alias of a tie is stored as a separate weight,
    /// adds a notice instead of the tie.
    pub(super) fn collect_ties(&mut self, model: &ModelStates) {
        let stored: HashSet<String> = self.weight_names().into_iter().map(str::to_owned).collect();
        for tie in &model.ties {
            if stored.contains(&tie.alias) {
                self.notices.push(format!(
                    "{} was tied to {} after the optimizer was created; using its own FP32 values",
                    tie.alias, tie.target
                ));
            } else if stored.contains(&tie.target) {
                self.ties.push(tie.clone());
            }
        }
    }

    /// Collects the buffers, and the weights that were not collected before, with the values of the
    /// 16-bit module. Records these weights as frozen in stages 1 to 3. Weights without values are
    /// recorded as lost, and aliases of collected weights as ties. `file` is the index of the model
    /// file in the store.
    pub(super) fn collect_module(&mut self, file: usize, model: &ModelStates, stage: u8) {
        let mut known: HashSet<String> = self.weight_names().into_iter().map(str::to_owned).collect();
        known.extend(self.ties.iter().map(|t| t.alias.clone()));
        let buffers: HashSet<&str> = model.buffers.iter().map(String::as_str).collect();
        let mut fallback = Vec::new();
        let mut locations: HashMap<_, &str> = HashMap::new();
        for (name, view) in &model.module {
            if buffers.contains(name.as_str()) {
                self.entries.push(ExternalTensor::from_whole_view(name, TensorRole::Buffer, file, view));
            } else if known.contains(name) {
                continue;
            } else if stage == 3 && view.elements() == 0 {
                self.lost.push(name.clone());
            } else if let Some(target) = find_tie_target(model, name)
                && known.contains(target)
            {
                self.ties.push(TiedWeight { alias: name.clone(), target: target.to_owned() });
            } else if stage == 0
                && view.elements() > 0
                && let Some(target) = locations.get(&view.location())
            {
                // stage 0 does not list ties
                self.ties.push(TiedWeight { alias: name.clone(), target: (*target).to_owned() });
            } else {
                locations.insert(view.location(), name);
                self.entries.push(ExternalTensor::from_whole_view(name, TensorRole::Weight, file, view));
                known.insert(name.clone());
                fallback.push(name.clone());
            }
        }
        if stage > 0 && !fallback.is_empty() {
            self.notices.push(format!(
                "{} in no parameter group and not frozen ({}); using the values of the 16-bit module",
                if fallback.len() == 1 { "a weight is" } else { "weights are" },
                format_names(&fallback)
            ));
            self.frozen.extend(fallback);
        }
        if !self.lost.is_empty() {
            self.notices.push(format!("weights without stored values: {}", format_names(&self.lost)));
        }
    }

    /// Sorts the tensors in the order of the module in the model file, which is the order of the
    /// model.
    pub(super) fn sort_by_module(&mut self, model: &ModelStates) {
        let order: HashMap<&str, usize> =
            model.module.iter().enumerate().map(|(i, (name, _))| (name.as_str(), i)).collect();
        self.entries.sort_by_key(|e| order.get(e.info.name.as_str()).copied().unwrap_or(usize::MAX));
    }

    /// Adds a notice about optimizer states of unknown kinds, which are ignored.
    fn report_unknown_states(&mut self, tag: &TagContents) {
        let mut unknown: Vec<String> = tag
            .optimizer
            .values()
            .flat_map(|(_, s)| s.shards.iter().flat_map(|s| s.unknown.clone()))
            .collect();
        unknown.sort();
        unknown.dedup();
        if !unknown.is_empty() {
            self.notices.push(format!("ignoring unknown optimizer states: {}", format_names(&unknown)));
        }
    }
}

/// Returns the name of the weight to which the weight `alias` is tied, or `None` if `alias` is not
/// tied.
fn find_tie_target<'a>(model: &'a ModelStates, alias: &str) -> Option<&'a str> {
    model.ties.iter().find(|t| t.alias == alias).map(|t| t.target.as_str())
}

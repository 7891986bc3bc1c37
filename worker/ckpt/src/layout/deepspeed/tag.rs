//! [`TagContents`]: reads every file of a tag and checks that the files belong together.
use super::file_names::{self, TagFiles};
use super::states::{FlatGroupShard, GLOBALS, ModelStates, OptimizerStates};
use crate::catalog::{ParamGroupInfo, StoredFile, StoredFiles};
use crate::codec::disk::Directory;
use crate::codec::torch_file::TorchFile;
use crate::error::{CkptError, DeepSpeedError, InvalidStep, MissingPart, RANKS_LISTED_MAX, Result};
use crate::layout::hf::optimizer_state::StepValue;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The directory of a DeepSpeed tag, with the contents of its files.
pub(super) struct TagContents {
    pub(super) path: PathBuf,
    pub(super) directory: Arc<Directory>,
    /// Index in the store and contents of each model file, by rank.
    pub(super) model: BTreeMap<u32, (usize, ModelStates)>,
    /// Index in the store and contents of each optimizer file, by rank.
    pub(super) optimizer: BTreeMap<u32, (usize, OptimizerStates)>,
    /// The model and optimizer files, to which the indices in `model` and `optimizer` refer.
    pub(super) store: StoredFiles,
}

impl TagContents {
    /// Opens the directory of a tag without reading its files.
    pub(super) fn open_empty(path: &Path) -> Result<TagContents> {
        Ok(TagContents {
            path: path.to_owned(),
            directory: Arc::new(Directory::open(path)?),
            model: BTreeMap::new(),
            optimizer: BTreeMap::new(),
            store: StoredFiles::default(),
        })
    }

    /// Opens the directory of a tag and reads all model and optimizer files.
    pub(super) fn load(path: &Path) -> Result<TagContents> {
        let mut tag = TagContents::open_empty(path)?;
        let names = TagFiles::list(&tag.directory)?;
        for (&rank, name) in &names.model {
            let states = tag.read_file(rank, name, ModelStates::read)?;
            tag.model.insert(rank, states);
        }
        for (&rank, name) in &names.optimizer {
            let states = tag.read_file(rank, name, OptimizerStates::read)?;
            tag.optimizer.insert(rank, states);
        }
        Ok(tag)
    }

    /// Reads the file of one rank and adds it to the store. Returns the file's index in the store,
    /// and the contents that `read` returns for the file.
    ///
    /// # Errors
    /// Fails if the file is damaged, or was written by another rank.
    pub(super) fn read_file<T>(
        &mut self,
        rank: u32,
        name: &str,
        read: impl Fn(&TorchFile) -> std::result::Result<T, DeepSpeedError>,
    ) -> Result<(usize, T)> {
        let file = TorchFile::open(&self.directory, name, GLOBALS)?;
        let states = read(&file).map_err(|error| CkptError::damaged(&self.path, name, error))?;
        if let Some(written) = file_names::parse_rank_in_root(&file.root).filter(|&w| w != rank) {
            return Err(CkptError::damaged(&self.path, name, DeepSpeedError::WrongRank(written)));
        }
        self.store.files.push(StoredFile::from_torch_file(self.directory.clone(), name.to_owned(), file));
        Ok((self.store.files.len() - 1, states))
    }

    /// Returns [`CkptError::Missing`] for the part `part` of the tag.
    pub(super) fn missing(&self, part: impl Into<MissingPart>) -> CkptError {
        CkptError::missing(&self.path, part)
    }

    /// Fails with [`CkptError::Missing`] if a rank below `world` has no entry in `files`. `kind` is
    /// `model` or `optimizer`, for the error.
    fn require_files_of_ranks<T>(
        &self,
        kind: &'static str,
        files: &BTreeMap<u32, T>,
        world: u32,
    ) -> Result<()> {
        // an untrusted file may state any world size, so the list is bounded
        let absent = (0..world).filter(|rank| !files.contains_key(rank)).take(RANKS_LISTED_MAX + 1);
        let ranks: Vec<u32> = absent.collect();
        match ranks.is_empty() {
            true => Ok(()),
            false => Err(self.missing(MissingPart::RankFiles { kind, ranks, world })),
        }
    }

    /// Returns [`CkptError::Damaged`] for the file with index `file` in the store.
    pub(super) fn damaged(&self, file: usize, error: DeepSpeedError) -> CkptError {
        CkptError::damaged(&self.path, self.store.files[file].name.as_str(), error)
    }

    /// Returns the ZeRO stage. Fails if a rank's file is missing, a file's rank is not below the
    /// world size, or the files contradict each other in stage or world size.
    pub(super) fn check_ranks(&self) -> Result<u8> {
        let Some((_, model)) = self.model.get(&0) else {
            return Err(self.missing("the model file of rank 0"));
        };
        let world = model.world;
        let stage = match self.optimizer.values().next() {
            Some((_, states)) => states.stage,
            None => model.stage.unwrap_or(0),
        };
        if stage > 0 {
            self.require_files_of_ranks("optimizer", &self.optimizer, world)?;
        }
        if stage == 3 {
            self.require_files_of_ranks("model", &self.model, world)?;
        }
        let optimizer_file = |(&rank, &(file, _)): (&u32, &(usize, OptimizerStates))| (rank, file);
        let model_file = |(&rank, &(file, _)): (&u32, &(usize, ModelStates))| (rank, file);
        let mut ranks = self.optimizer.iter().map(optimizer_file).chain(self.model.iter().map(model_file));
        if let Some((_, file)) = ranks.find(|&(rank, _)| rank >= world) {
            return Err(self.damaged(file, DeepSpeedError::RankOutsideWorld(world)));
        }
        for (file, states) in self.optimizer.values() {
            if states.stage != stage || states.partitions.iter().any(|&p| p != u64::from(world)) {
                let error = DeepSpeedError::StageMismatch {
                    stage: states.stage,
                    partitions: states.partitions.clone(),
                    expected_stage: stage,
                    world,
                };
                return Err(self.damaged(*file, error));
            }
        }
        Ok(stage)
    }

    /// Returns the optimizer step, or `None` if no optimizer file records a step. Fails if the
    /// optimizer files, or the model files, of two ranks have different steps.
    pub(super) fn check_steps(&self) -> Result<Option<f64>> {
        let mut first: Option<(f64, u32)> = None;
        let mut global: Option<(u64, u32)> = None;
        for (&rank, (file, states)) in &self.optimizer {
            let mut rank_step: Option<f64> = None;
            for shard in &states.shards {
                let Some(step) = self.read_shard_step(*file, shard)? else { continue };
                // the groups of a rank may have different steps, since a group may have been added
                // later, but all ranks must have equal steps
                rank_step = Some(rank_step.map_or(step, |s| s.max(step)));
            }
            match (first, rank_step) {
                (Some((expected, rank)), Some(found)) if expected != found => {
                    return Err(self.damaged(*file, DeepSpeedError::StepMismatch { found, rank, expected }));
                }
                (None, Some(step)) => first = Some((step, rank)),
                _ => {}
            }
        }
        for (&rank, (file, model)) in &self.model {
            match (global, model.step) {
                (Some((expected, rank)), Some(found)) if expected != found => {
                    let (found, expected) = (found as f64, expected as f64);
                    return Err(self.damaged(*file, DeepSpeedError::StepMismatch { found, rank, expected }));
                }
                (None, Some(step)) => global = Some((step, rank)),
                _ => {}
            }
        }
        Ok(first.map(|(step, _)| step))
    }
}

impl TagContents {
    /// Returns the parameter groups with the names of their parameters, and the state of the loss
    /// scaler. Both come from the optimizer file of rank 0, and are empty without this file.
    pub(super) fn collect_param_groups(&self, model: &ModelStates, stage: u8) -> (Vec<ParamGroupInfo>, Json) {
        let Some((_, first)) = self.optimizer.get(&0) else { return (Vec::new(), Json::Null) };
        let names = |g: usize| model.groups.get(g).into_iter().flatten().map(|(name, _)| name.clone());
        let mut groups: Vec<ParamGroupInfo> = first
            .groups
            .iter()
            .map(|g| ParamGroupInfo {
                hyper: g.hyper.clone(),
                names: g.ids.iter().flat_map(|&i| names(i as usize)).collect(),
            })
            .collect();
        if groups.is_empty() && stage < 3 {
            // an elastic checkpoint has no hyper-parameters
            groups = (0..model.groups.len())
                .map(|g| ParamGroupInfo { names: names(g).collect(), ..ParamGroupInfo::default() })
                .collect();
        }
        (groups, first.loss_scaler.clone())
    }

    /// Reads the number of updates of each weight from the flat groups of rank 0.
    pub(super) fn read_weight_steps(&self, model: &ModelStates) -> Result<BTreeMap<String, u64>> {
        let mut steps = BTreeMap::new();
        let Some((file, first)) = self.optimizer.get(&0) else { return Ok(steps) };
        for (shard, group) in first.shards.iter().zip(&model.groups) {
            if let Some(step) = self.read_shard_step(*file, shard)? {
                steps.extend(group.iter().map(|(name, _)| (name.clone(), step as u64)));
            }
        }
        Ok(steps)
    }

    /// Reads the step of the flat group part `shard` in the file with index `file`. Returns `None`
    /// if the group has no step.
    ///
    /// # Errors
    /// Fails if the step is not a whole number.
    pub(super) fn read_shard_step(&self, file: usize, shard: &FlatGroupShard) -> Result<Option<f64>> {
        let step = match &shard.step {
            Some(StepValue::Number(n)) => *n,
            Some(StepValue::Tensor(view)) => f64::from(self.store.read_scalar(file, view)?),
            None => return Ok(None),
        };
        match step >= 0.0 && step.fract() == 0.0 && step < 9e15 {
            true => Ok(Some(step)),
            false => Err(self.damaged(file, InvalidStep(step).into())),
        }
    }
}

//! [`TagContents`]: reads the files of all ranks in a DeepSpeed checkpoint, and checks that they
//! agree on step, ZeRO stage and number of ranks.
use super::file_names::{self, TagFiles};
use super::states::{ALLOWED_GLOBALS, FlatGroupShard, ModelStates, OptimizerStates};
use crate::catalog::{ExternalCheckpointBuilder, ParamGroupInfo, convert_step_to_integer};
use crate::codec::torch_file::TorchFile;
use crate::error::{CkptError, DeepSpeedError, MissingPart, RANKS_LISTED_MAX, Result, UnsupportedFeature};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

/// A map from each rank to the content of its model or optimizer file and the index of this file.
pub(super) type RankContents<T> = BTreeMap<u32, (usize, T)>;

/// The contents of all model and optimizer files in the directory of a DeepSpeed checkpoint (tag).
pub(super) struct TagContents {
    /// The stored files, the tensors, and the facts about the checkpoint that were collected so
    /// far.
    pub(super) builder: ExternalCheckpointBuilder,
    pub(super) model: RankContents<ModelStates>,
    pub(super) optimizer: RankContents<OptimizerStates>,
}

impl TagContents {
    /// Opens the directory of a DeepSpeed checkpoint without reading any file in it. `notices` come
    /// first among the notices of the checkpoint.
    pub(super) fn open_empty(path: &Path, notices: Vec<String>) -> Result<TagContents> {
        let mut builder = ExternalCheckpointBuilder::new(path)?;
        builder.facts.notices = notices;
        Ok(TagContents { builder, model: BTreeMap::new(), optimizer: BTreeMap::new() })
    }

    /// Opens the directory of a DeepSpeed checkpoint and reads all model and optimizer files.
    pub(super) fn load(path: &Path, notices: Vec<String>) -> Result<TagContents> {
        let mut tag = TagContents::open_empty(path, notices)?;
        let names = TagFiles::list(&tag.builder.directory)?;
        for (&rank, name) in &names.model {
            let mut states = tag.read_file(rank, name, ModelStates::read)?;
            if rank > 0 {
                states.1.drop_parts_needed_from_rank_0_only();
            }
            tag.model.insert(rank, states);
        }
        for (&rank, name) in &names.optimizer {
            let mut states = tag.read_file(rank, name, OptimizerStates::read)?;
            if rank > 0 {
                states.1.drop_parts_needed_from_rank_0_only();
            }
            tag.optimizer.insert(rank, states);
        }
        Ok(tag)
    }

    /// Reads the model or optimizer file `name` of one rank and adds it to the files of the
    /// checkpoint. Returns the file's index in `StoredFiles`, and what `read` returns for the file.
    ///
    /// # Errors
    /// Fails if the file is damaged, or was written by another rank.
    pub(super) fn read_file<T>(
        &mut self,
        rank: u32,
        name: &str,
        read: impl Fn(&TorchFile) -> std::result::Result<T, DeepSpeedError>,
    ) -> Result<(usize, T)> {
        let (index, file) = self.builder.add_torch_file(name, ALLOWED_GLOBALS)?;
        let states = read(&file).map_err(|error| self.builder.damaged_file_error(name, error))?;
        match file_names::parse_rank_in_zip_root(&file.root).filter(|&written| written != rank) {
            Some(written) => Err(self.builder.damaged_file_error(name, DeepSpeedError::WrongRank(written))),
            None => Ok((index, states)),
        }
    }

    /// Fails if `files`, the model or optimizer files of a DeepSpeed checkpoint by rank, has no
    /// file of one of the `world` ranks. `kind` is `model` or `optimizer`, for the error.
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
            false => Err(self.builder.missing_part_error(MissingPart::RankFiles { kind, ranks, world })),
        }
    }

    /// Fails if the model files of two ranks record different numbers of ranks, or if tensor or
    /// pipeline parallelism divides the model, of which other ranks then have the rest.
    pub(super) fn check_equal_world_sizes(&self) -> Result<()> {
        let worlds = self.model.iter().map(|(&rank, (file, model))| (rank, *file, u64::from(model.world)));
        self.require_equal_world_sizes("dp_world_size", worlds)?;
        let worlds =
            self.model.iter().filter_map(|(&rank, (file, m))| Some((rank, *file, m.model_parallel_world?)));
        match self.require_equal_world_sizes("mp_world_size", worlds)? {
            Some((file, 2..)) => {
                let file = self.builder.store.files[file].name.clone();
                let feature = UnsupportedFeature::ModelParallelism { file };
                Err(CkptError::unsupported(self.builder.directory.path(), feature))
            }
            _ => Ok(()),
        }
    }

    /// Fails if the model file of one rank records another number under `key` than the file of the
    /// first rank. Each item is a rank, the index of its file in `StoredFiles`, and the number.
    /// Returns the index and the number of the first rank, or `None` if no file records it.
    fn require_equal_world_sizes(
        &self,
        key: &'static str,
        mut worlds: impl Iterator<Item = (u32, usize, u64)>,
    ) -> Result<Option<(usize, u64)>> {
        let Some((rank, first, expected)) = worlds.next() else { return Ok(None) };
        match worlds.find(|(.., found)| *found != expected) {
            Some((_, file, found)) => {
                let error = DeepSpeedError::WorldSizeMismatch { key, found, rank, expected };
                Err(self.builder.damaged_stored_file_error(file, error))
            }
            None => Ok(Some((first, expected))),
        }
    }

    /// Returns the ZeRO stage of the checkpoint, after checking that all ranks have their files and
    /// that they agree on the numbers of ranks and the optimizer files on the stage. Fails if a
    /// rank's file is missing, a file's rank is not below the world size, or the files contradict
    /// each other in stage or world size.
    pub(super) fn check_rank_files(&self) -> Result<u8> {
        let Some((_, model)) = self.model.get(&0) else {
            return Err(self.builder.missing_part_error("the model file of rank 0"));
        };
        let world = model.world;
        self.check_equal_world_sizes()?;
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
        let optimizer = self.optimizer.range(world..).next().map(|(_, (file, _))| *file);
        let outside = optimizer.or(self.model.range(world..).next().map(|(_, (file, _))| *file));
        if let Some(file) = outside {
            return Err(self
                .builder
                .damaged_stored_file_error(file, DeepSpeedError::RankOutsideWorld(world)));
        }
        for (file, states) in self.optimizer.values() {
            if states.stage != stage || states.partitions.iter().any(|&p| p != u64::from(world)) {
                let error = DeepSpeedError::StageMismatch {
                    stage: states.stage,
                    partitions: states.partitions.clone(),
                    expected_stage: stage,
                    world,
                };
                return Err(self.builder.damaged_stored_file_error(*file, error));
            }
        }
        Ok(stage)
    }

    /// Returns the number of optimizer updates that the optimizer files state, after checking that
    /// the files of all ranks belong to one training step. Fails if the optimizer files, or the
    /// model files, of two ranks have different steps.
    pub(super) fn check_equal_steps(&self) -> Result<Option<f64>> {
        let (mut updates, mut steps) = (Vec::new(), Vec::new());
        for (&rank, (file, states)) in &self.optimizer {
            // the groups of a rank may have different steps, since a group may have been added
            // later, but all ranks must have equal steps
            let mut newest: Option<f64> = None;
            for shard in &states.shards {
                if let Some(step) = self.read_shard_step(*file, shard)? {
                    newest = Some(newest.map_or(step, |s| s.max(step)));
                }
            }
            updates.extend(newest.map(|step| (rank, *file, step)));
        }
        for (&rank, (file, model)) in &self.model {
            steps.extend(model.step.map(|step| (rank, *file, step as f64)));
        }
        self.require_equal_steps(&updates)?;
        self.require_equal_steps(&steps)?;
        Ok(updates.first().map(|(.., step)| *step))
    }

    /// Fails if the file of one rank contains another step than the file of another rank. Each item
    /// is a rank, the index of its file in `StoredFiles`, and the step in the file.
    fn require_equal_steps(&self, steps: &[(u32, usize, f64)]) -> Result<()> {
        let Some(&(rank, _, expected)) = steps.first() else { return Ok(()) };
        match steps.iter().find(|(.., found)| *found != expected) {
            Some(&(_, file, found)) => {
                let error = DeepSpeedError::StepMismatch { found, rank, expected };
                Err(self.builder.damaged_stored_file_error(file, error))
            }
            None => Ok(()),
        }
    }

    /// Returns the parameter groups and the loss scaler state from the optimizer file of rank 0,
    /// with names in place of parameter numbers. Both are empty without this file.
    pub(super) fn collect_param_groups(&self, model: &ModelStates, stage: u8) -> (Vec<ParamGroupInfo>, Json) {
        let Some((_, first)) = self.optimizer.get(&0) else { return (Vec::new(), Json::Null) };
        let mut groups: Vec<ParamGroupInfo> = first.groups.iter().map(|g| g.name_parameters(model)).collect();
        if groups.is_empty() && stage < 3 {
            // an elastic checkpoint has no hyper-parameters
            let names = |group: &Vec<(String, _)>| group.iter().map(|(name, _)| name.clone()).collect();
            let unnamed = |group| ParamGroupInfo { names: names(group), ..ParamGroupInfo::default() };
            groups = model.groups.iter().map(unnamed).collect();
        }
        (groups, first.loss_scaler.clone())
    }

    /// Reads from the optimizer file of rank 0 how many optimizer updates each weight has received.
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

    /// Reads the number of optimizer updates that one rank's part of a flat array, `shard`, has
    /// received, from the optimizer file number `file`. Returns `None` if the group has no step.
    ///
    /// # Errors
    /// Fails if the step is not a whole number.
    pub(super) fn read_shard_step(&self, file: usize, shard: &FlatGroupShard) -> Result<Option<f64>> {
        let Some(step) = &shard.step else { return Ok(None) };
        let step = self.builder.store.read_step(file, step)?;
        match convert_step_to_integer(step) {
            Ok(_) => Ok(Some(step)),
            Err(error) => Err(self.builder.damaged_stored_file_error(file, DeepSpeedError::Step(error))),
        }
    }
}

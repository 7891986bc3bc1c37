//! A tag's folder: every file of it, and whether they belong together.
use super::names::{self, Names};
use super::states::{GLOBALS, ModelStates, OptimizerStates, Shard, Step};
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use crate::external::store::{Store, StoredFile};
use crate::formats::torch_file::TorchFile;
use crate::state::Group;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A tag's folder with everything that its files say.
pub(super) struct Tag {
    pub(super) path: PathBuf,
    pub(super) folder: Arc<Folder>,
    pub(super) model: BTreeMap<u32, (usize, ModelStates)>,
    pub(super) optimizer: BTreeMap<u32, (usize, OptimizerStates)>,
    /// The indices above are of these files.
    pub(super) store: Store,
}

impl Tag {
    pub(super) fn empty(path: &Path) -> Result<Tag> {
        Ok(Tag {
            path: path.to_owned(),
            folder: Arc::new(Folder::open(path)?),
            model: BTreeMap::new(),
            optimizer: BTreeMap::new(),
            store: Store::default(),
        })
    }

    pub(super) fn load(path: &Path) -> Result<Tag> {
        let mut tag = Tag::empty(path)?;
        let names = Names::of(&tag.folder)?;
        for (&rank, name) in &names.model {
            let states = tag.read(rank, name, ModelStates::read)?;
            tag.model.insert(rank, states);
        }
        for (&rank, name) in &names.optimizer {
            let states = tag.read(rank, name, OptimizerStates::read)?;
            tag.optimizer.insert(rank, states);
        }
        Ok(tag)
    }

    /// Reads one file; the index is that of the file in the store.
    pub(super) fn read<T>(
        &mut self,
        rank: u32,
        name: &str,
        read: impl Fn(&TorchFile) -> std::result::Result<T, String>,
    ) -> Result<(usize, T)> {
        let file = TorchFile::open(&self.folder, name, GLOBALS)?;
        let states = read(&file).map_err(|why| CkptError::damaged(&self.path, name, why))?;
        if let Some(written) = names::rank_in_root(&file.root).filter(|&w| w != rank) {
            let why = format!("it was written by rank {written}: files of two ranks were exchanged");
            return Err(CkptError::damaged(&self.path, name, why));
        }
        self.store.files.push(StoredFile::torch(self.folder.clone(), name.to_owned(), file));
        Ok((self.store.files.len() - 1, states))
    }

    pub(super) fn missing(&self, what: String) -> CkptError {
        CkptError::Missing { path: self.path.clone(), what }
    }

    pub(super) fn damaged(&self, file: usize, why: String) -> CkptError {
        CkptError::damaged(&self.path, self.store.files[file].name.as_str(), why)
    }

    /// The stage. Every rank's files are there, and no other's, and all are of the same stage and world.
    pub(super) fn check_ranks(&self) -> Result<u8> {
        let Some((_, model)) = self.model.get(&0) else {
            return Err(self.missing("the model file (of rank 0)".into()));
        };
        let world = model.world;
        let stage = match self.optimizer.values().next() {
            Some((_, states)) => states.stage,
            None => model.stage.unwrap_or(0),
        };
        if stage > 0 {
            all_there(&self.optimizer, world)
                .map_err(|ranks| self.missing(format!("the optimizer file of {ranks} of {world}")))?;
        }
        if stage == 3 {
            all_there(&self.model, world)
                .map_err(|ranks| self.missing(format!("the model file of {ranks} of {world}")))?;
        }
        let of_rank = |(&rank, &(file, _)): (&u32, &(usize, OptimizerStates))| (rank, file);
        let of_model = |(&rank, &(file, _)): (&u32, &(usize, ModelStates))| (rank, file);
        let mut ranks = self.optimizer.iter().map(of_rank).chain(self.model.iter().map(of_model));
        if let Some((_, file)) = ranks.find(|&(rank, _)| rank >= world) {
            return Err(self.damaged(file, format!("the checkpoint is of {world} ranks")));
        }
        for (file, states) in self.optimizer.values() {
            if states.stage != stage || states.partitions.iter().any(|&p| p != u64::from(world)) {
                let why = format!(
                    "it is of stage {} on {:?} ranks, the checkpoint of stage {stage} on {world}",
                    states.stage, states.partitions
                );
                return Err(self.damaged(*file, why));
            }
        }
        Ok(stage)
    }

    /// The optimizer's step. All ranks and groups have the same, or it is an error that names the file.
    pub(super) fn check_steps(&self) -> Result<Option<f64>> {
        let mut first: Option<(f64, u32)> = None;
        let mut global: Option<(u64, u32)> = None;
        for (&rank, (file, states)) in &self.optimizer {
            let mut own: Option<f64> = None;
            for shard in &states.shards {
                let Some(step) = self.step_of(*file, shard)? else { continue };
                // groups may differ (one that began later); ranks may not
                own = Some(own.map_or(step, |s| s.max(step)));
            }
            match (first, own) {
                (Some((step, of)), Some(own)) if step != own => {
                    let why =
                        format!("its optimizer state is of step {own}, that of rank {of} of step {step}");
                    return Err(self.damaged(*file, why));
                }
                (None, Some(own)) => first = Some((own, rank)),
                _ => {}
            }
        }
        for (&rank, (file, model)) in &self.model {
            match (global, model.step) {
                (Some((step, of)), Some(own)) if step != own => {
                    return Err(
                        self.damaged(*file, format!("it is of step {own}, that of rank {of} of step {step}"))
                    );
                }
                (None, Some(own)) => global = Some((own, rank)),
                _ => {}
            }
        }
        Ok(first.map(|(step, _)| step))
    }
}

impl Tag {
    /// The optimizer's groups by name, and the state of the loss scaler.
    pub(super) fn groups(&self, model: &ModelStates, stage: u8) -> (Vec<Group>, Json) {
        let Some((_, first)) = self.optimizer.get(&0) else { return (Vec::new(), Json::Null) };
        let names = |g: usize| model.groups.get(g).into_iter().flatten().map(|(name, _)| name.clone());
        let mut groups: Vec<Group> = first
            .groups
            .iter()
            .map(|g| Group {
                hyper: g.hyper.clone(),
                names: g.ids.iter().flat_map(|&i| names(i as usize)).collect(),
            })
            .collect();
        if groups.is_empty() && stage < 3 {
            // an elastic checkpoint keeps no hyper-parameters
            groups = (0..model.groups.len())
                .map(|g| Group { names: names(g).collect(), ..Group::default() })
                .collect();
        }
        (groups, first.loss_scaler.clone())
    }

    /// Updates per weight, as rank 0's flat groups say.
    pub(super) fn steps(&self, model: &ModelStates) -> Result<BTreeMap<String, u64>> {
        let mut steps = BTreeMap::new();
        let Some((file, first)) = self.optimizer.get(&0) else { return Ok(steps) };
        for (shard, group) in first.shards.iter().zip(&model.groups) {
            if let Some(step) = self.step_of(*file, shard)? {
                steps.extend(group.iter().map(|(name, _)| (name.clone(), step as u64)));
            }
        }
        Ok(steps)
    }

    /// The step of a flat group.
    pub(super) fn step_of(&self, file: usize, shard: &Shard) -> Result<Option<f64>> {
        let step = match &shard.step {
            Some(Step::Number(n)) => *n,
            Some(Step::Tensor(view)) => f64::from(self.store.scalar(file, view)?),
            None => return Ok(None),
        };
        match step >= 0.0 && step.fract() == 0.0 && step < 9e15 {
            true => Ok(Some(step)),
            false => Err(self.damaged(file, format!("its optimizer state is of step {step}, which is none"))),
        }
    }
}

/// `Err` names the ranks that aren't there.
fn all_there<T>(found: &BTreeMap<u32, T>, world: u32) -> std::result::Result<(), String> {
    // a world may be as large as a file claims: only so many are named
    let absent: Vec<String> =
        (0..world).filter(|rank| !found.contains_key(rank)).take(17).map(|r| r.to_string()).collect();
    match absent.as_slice() {
        [] => Ok(()),
        [one] => Err(format!("rank {one}")),
        [.., _] if absent.len() == 17 => Err(format!("ranks {} and more", absent[..16].join(", "))),
        [first @ .., last] => Err(format!("ranks {} and {last}", first.join(", "))),
    }
}

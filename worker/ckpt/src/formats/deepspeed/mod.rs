//! Folders of DeepSpeed's ZeRO stages 0 to 3, also inside those of HF Trainer and Accelerate.
//!
//! `DIR/latest` names a tag; `DIR/TAG` holds model states and, per rank, optimizer states. Where sources of a weight
//! contradict, one in the flat groups (`param_shapes`) wins, then a frozen one, then the 16-bit `module`.
mod collect;
mod layout;
mod names;
mod states;

use self::collect::Collected;
use self::names::Names;
use self::states::{GLOBALS, ModelStates, OptimizerStates, Step};
use crate::catalog::is_plain_file_name;
use crate::disk::{Folder, exists, parent_of};
use crate::error::{CkptError, Result};
use crate::foreign::store::{Store, StoredFile};
use crate::foreign::{Foreign, ForeignFacts, RANDOM_STATE_OF};
use crate::formats::torch_file::TorchFile;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LATEST: &str = "latest";
const LATEST_UNIVERSAL: &str = "latest_universal";

/// Opens a folder of DeepSpeed's, or a tag's folder inside one. `None` when it is neither.
pub(crate) fn open(path: &Path) -> Result<Option<Foreign>> {
    let folder = Folder::open(path)?;
    if is_universal(path) || (exists(&path.join(LATEST_UNIVERSAL)) && !exists(&path.join(LATEST))) {
        return Ok(None);
    }
    if !Names::of(&folder)?.model.is_empty() {
        return open_tag(path, path, &parent_of(path), Vec::new()).map(Some);
    }
    let tags = tags(path)?;
    let latest = match folder.size_of(LATEST)? {
        Some(_) => Some(latest(&folder)?),
        None => None,
    };
    match latest {
        Some(tag) if is_tag(&path.join(&tag)) => {
            let notices = stale(path, &tag, &tags)?;
            open_tag(path, &path.join(&tag), path, notices).map(Some)
        }
        Some(_) if tags.is_empty() => Ok(None),
        Some(tag) => {
            let what = format!("{tag}, which `latest` names (there are {}),", tags.join(", "));
            Err(CkptError::Missing { path: path.to_owned(), what })
        }
        None if tags.is_empty() => Ok(None),
        None => newest(path, &tags).map(Some),
    }
}

/// The tag that `latest` names.
fn latest(folder: &Folder) -> Result<String> {
    let text = folder.read(LATEST, 4096)?;
    let tag = std::str::from_utf8(&text).map(str::trim).unwrap_or_default();
    match is_plain_file_name(tag) {
        true => Ok(tag.to_owned()),
        false => Err(CkptError::damaged(folder.path(), LATEST, "it names no folder in here")),
    }
}

/// True for a folder of a universal checkpoint: a folder per parameter.
fn is_universal(path: &Path) -> bool {
    path.join("zero").symlink_metadata().is_ok_and(|m| m.is_dir())
}

/// True for a folder with files of DeepSpeed's.
fn is_tag(path: &Path) -> bool {
    if !path.symlink_metadata().is_ok_and(|m| m.is_dir()) || is_universal(path) {
        return false;
    }
    match Folder::open(path).and_then(|f| Names::of(&f)) {
        Ok(names) => names.count() > 0,
        // what is wrong with it is said when it is opened
        Err(e) => !matches!(e, CkptError::Io { .. }),
    }
}

/// All tags, the oldest first.
fn tags(path: &Path) -> Result<Vec<String>> {
    let mut tags = Folder::open(path)?.names()?;
    tags.retain(|t| is_plain_file_name(t) && is_tag(&path.join(t)));
    tags.sort_by_key(|t| (names::step_of(t), t.clone()));
    Ok(tags)
}

/// Says so when a newer tag than the one that `latest` names has as many files.
fn stale(path: &Path, tag: &str, tags: &[String]) -> Result<Vec<String>> {
    let files = |tag: &str| Ok((Names::of(&Folder::open(&path.join(tag))?)?).count());
    let (Some(step), Some(newest)) = (names::step_of(tag), tags.last()) else { return Ok(Vec::new()) };
    let newer = names::step_of(newest).is_some_and(|s| s > step) && files(newest)? >= files(tag)?;
    let notice = format!(
        "`latest` names {tag}, but a newer complete checkpoint is there: {newest}; to use it, give {}",
        path.join(newest).display()
    );
    Ok(if newer { vec![notice] } else { Vec::new() })
}

/// Without `latest`: the newest tag that opens.
fn newest(path: &Path, tags: &[String]) -> Result<Foreign> {
    let mut notices = Vec::new();
    let mut first = None;
    for tag in tags.iter().rev() {
        let mut said = notices.clone();
        said.push(format!("there is no `latest`: {tag} is the newest complete checkpoint"));
        match open_tag(path, &path.join(tag), path, said) {
            Ok(foreign) => return Ok(foreign),
            Err(e) => {
                notices.push(format!("passed over: {e}"));
                first = first.or(Some(e));
            }
        }
    }
    Err(first.unwrap_or(CkptError::NotACheckpoint { path: path.to_owned(), why: "it has no tag".into() }))
}

/// A tag's folder with everything that its files say.
struct Tag {
    path: PathBuf,
    folder: Arc<Folder>,
    model: BTreeMap<u32, (usize, ModelStates)>,
    optimizer: BTreeMap<u32, (usize, OptimizerStates)>,
    /// The indices above are of these files.
    store: Store,
}

impl Tag {
    fn load(path: &Path) -> Result<Tag> {
        let folder = Arc::new(Folder::open(path)?);
        let names = Names::of(&folder)?;
        let mut tag = Tag {
            path: path.to_owned(),
            folder,
            model: BTreeMap::new(),
            optimizer: BTreeMap::new(),
            store: Store::default(),
        };
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
    fn read<T>(
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

    fn missing(&self, what: String) -> CkptError {
        CkptError::Missing { path: self.path.clone(), what }
    }

    fn damaged(&self, file: usize, why: String) -> CkptError {
        CkptError::damaged(&self.path, self.store.files[file].name.as_str(), why)
    }

    /// The stage. Every rank's files are there, and no other's, and all are of the same stage and world.
    fn check_ranks(&self) -> Result<u8> {
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
                .map_err(|r| self.missing(format!("the optimizer file of rank {r} of {world}")))?;
        }
        if stage == 3 {
            all_there(&self.model, world)
                .map_err(|r| self.missing(format!("the model file of rank {r} of {world}")))?;
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
    fn check_steps(&self) -> Result<Option<f64>> {
        let mut first: Option<(f64, u32)> = None;
        let mut global: Option<(u64, u32)> = None;
        for (&rank, (file, states)) in &self.optimizer {
            let mut own: Option<f64> = None;
            for shard in &states.shards {
                let step = match &shard.step {
                    Some(Step::Number(n)) => *n,
                    Some(Step::Tensor(view)) => f64::from(self.store.scalar(*file, view)?),
                    None => continue,
                };
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

impl Names {
    fn count(&self) -> usize {
        self.model.len() + self.optimizer.len()
    }
}

/// `Err` is the first rank that isn't there.
fn all_there<T>(found: &BTreeMap<u32, T>, world: u32) -> std::result::Result<(), u32> {
    match (0..world).find(|rank| !found.contains_key(rank)) {
        Some(rank) => Err(rank),
        None => Ok(()),
    }
}

/// Opens the tag at `path`, which the user named as `given`; `beside` may hold a config and a tokenizer.
fn open_tag(given: &Path, path: &Path, beside: &Path, mut notices: Vec<String>) -> Result<Foreign> {
    let tag = Tag::load(path)?;
    let stage = tag.check_ranks()?;
    let steps = tag.check_steps()?;
    let Collected { entries, frozen, lost, ties, notices: said } = collect::weights(&tag, stage)?;
    notices.extend(said);
    let Some((_, model)) = tag.model.get(&0) else { return Err(tag.missing("the model file".into())) };
    if let (Some(done), Some(step)) = (model.step, steps)
        && done.saturating_sub(model.skipped) as f64 != step
    {
        notices.push(format!(
            "the model is of step {done} ({} skipped), the optimizer state of step {step}",
            model.skipped
        ));
    }
    let rng_files = rng_files(beside)?;
    let first = tag.optimizer.get(&0).map(|(_, states)| &states.groups);
    let groups = first.or(model.own_optimizer.as_ref()).cloned().unwrap_or(Json::Null);
    let mut missing = Vec::new();
    if !entries.iter().any(|e| e.info.role.is_optimizer_state()) {
        missing.push("optimizer state".into());
    }
    if model.scheduler.is_null()
        && !exists(&beside.join("scheduler.pt"))
        && !exists(&beside.join("scheduler.bin"))
    {
        missing.push("scheduler".into());
    }
    missing.extend(missing_rng(&rng_files, model.world));
    let facts = ForeignFacts {
        kind: kind(beside),
        writer: format!("DeepSpeed {}", model.version.as_deref().unwrap_or("of unknown version")),
        tag: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        step: model.step,
        world: model.world,
        stage,
        groups,
        scheduler: model.scheduler.clone(),
        ties,
        frozen,
        lost,
        rng_files,
        notices,
        missing,
    };
    Foreign::new(given, beside, facts, tag.store, entries)
}

/// Which program drove DeepSpeed, by what lies beside the tag.
fn kind(beside: &Path) -> &'static str {
    let has = |name: &str| exists(&beside.join(name));
    match () {
        () if has("trainer_state.json") => "HF Trainer with DeepSpeed",
        () if has("random_states_0.pkl") => "Accelerate with DeepSpeed",
        () => "DeepSpeed",
    }
}

fn rng_files(beside: &Path) -> Result<Vec<String>> {
    let mut names = Folder::open(beside)?.names()?;
    names.retain(|n| {
        (n.starts_with("rng_state") && n.ends_with(".pth"))
            || (n.starts_with("random_states_") && n.ends_with(".pkl"))
    });
    Ok(names)
}

/// Where some ranks have a file of random states, those that have none.
fn missing_rng(found: &[String], world: u32) -> Vec<String> {
    let there = |rank: u32| {
        let own = [format!("rng_state_{rank}.pth"), format!("random_states_{rank}.pkl")];
        found.iter().any(|n| own.contains(n) || (n == "rng_state.pth" && world == 1))
    };
    match found.is_empty() {
        true => vec!["random states".into()],
        false => (0..world).filter(|&r| !there(r)).map(|r| format!("{RANDOM_STATE_OF} {r}")).collect(),
    }
}

//! A checkpoint of HF Trainer or Accelerate for another number of ranks: a folder `launch-wM/NAME` beside it, in which
//! everything that stays is a hard link, random states are by the rule, and what counts processes is set right. The
//! original is never touched.
use super::folder::{self, Record, Stored};
use super::link::{self, Scratch};
use super::rewrite;
use super::rule::{Asked, Decision, Policy, reconcile};
use super::scheduler;
use super::streams::Writer;
use crate::commit::{Swap, publish};
use crate::disk::{self, Folder, exists};
use crate::error::{CkptError, Result};
use crate::external::{self, Foreign};
use crate::formats::deepspeed;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest `trainer_state.json` that is read, bytes (it has a line of history per logged step).
const TRAINER_STATE_MAX: u64 = 1 << 30;
const TRAINER_STATE: &str = "trainer_state.json";
/// The optimizer of FSDP's sharded states.
const FSDP_OPTIMIZER: &str = "optimizer_0";

/// Where the result goes.
#[derive(Clone, Debug)]
pub enum Place {
    /// `launch-wM/NAME` beside the folder `NAME`.
    Sibling,
    /// This folder, which doesn't exist.
    At(PathBuf),
    /// The folder itself is replaced, in one go.
    InPlace,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The folder to resume from; the original where nothing had to be done.
    pub path: PathBuf,
    /// What was decided about random states; `None` when there are none, or they fit as they are.
    pub decision: Option<Decision>,
    /// One line each, for a person.
    pub lines: Vec<String>,
}

/// Makes random states for exactly `asked.world` ranks and changes nothing else.
pub fn rng(dir: &Path, asked: &Asked, place: &Place) -> Result<Prepared> {
    let found = Found::look(dir)?;
    let Some(stored) = &found.stored else {
        return Err(CkptError::Missing {
            path: dir.to_owned(),
            what: "every file of random states (rng_state*.pth or random_states_*.pkl)".into(),
        });
    };
    let (ranks, decision) = found.reconciled(stored, asked)?;
    let lines = vec![decision.line()];
    let record = Record::new(found.name.clone(), decision.clone());
    let path = build(dir, place, asked.world, &found.name, &|name| folder::is_state(name), &mut |staged| {
        folder::write(staged, stored.writer, &ranks, &record)
    })?;
    Ok(Prepared { path, decision: Some(decision), lines })
}

/// Makes of a checkpoint of HF Trainer or Accelerate one from which an unmodified script resumes with `asked.world` ranks;
/// where nothing has to be done it stays the original.
pub fn program(dir: &Path, asked: &Asked) -> Result<Prepared> {
    let found = Found::look(dir)?;
    let Some(old) = found.world() else {
        let lines = vec![format!(
            "{} has no random states: its streams begin as the program seeds them",
            dir.display()
        )];
        if asked.policy == Policy::Strict {
            let what = "every file of random states, which resume.rng: strict needs,".into();
            return Err(CkptError::Missing { path: dir.to_owned(), what });
        }
        return Ok(Prepared { path: dir.to_owned(), decision: None, lines });
    };
    let cut = found.state.as_ref().filter(|s| rewrite::is_needed(s, asked.world));
    if cut.is_none() && old == asked.world && asked.policy != Policy::Reseed {
        return Ok(Prepared { path: dir.to_owned(), decision: None, lines: Vec::new() });
    }
    let record = rewrite::Prepared::of(
        dir,
        &found.name,
        asked.world,
        format!("{:?}, seed {:?}, GPUs {:?}", asked.policy, asked.run_seed, asked.gpus),
    )?;
    if let Some(state) = cut {
        rewrite::check(dir, state)?;
        // cutting anew takes time, so what an earlier start made of the same files is used
        if let Some((path, earlier)) = found.earlier(asked.world).filter(|(_, e)| e.is_like(&record)) {
            let lines = vec![format!("{} (done at an earlier start)", earlier.line)];
            let decision = Record::read(&path)?.map(|r| r.decision);
            return Ok(Prepared { path, decision, lines });
        }
    }
    remade(dir, &found, old, asked, cut, record)
}

/// The folder for another number of ranks, or with random states seeded anew; `cut`: DeepSpeed's part where it must be cut.
fn remade(
    dir: &Path,
    found: &Found,
    old: u32,
    asked: &Asked,
    cut: Option<&Foreign>,
    mut record: rewrite::Prepared,
) -> Result<Prepared> {
    let mut lines = vec![format!("{} was saved by {old} ranks and goes on with {}", found.name, asked.world)];
    let made = match &found.stored {
        Some(stored) => {
            let (ranks, decision) = found.reconciled(stored, asked)?;
            lines.push(decision.line());
            Some((stored.writer, ranks, decision))
        }
        None => None,
    };
    let rescaled = scheduler::rescaled(&Folder::open(dir)?, old, asked.world, found.updates(dir)?)?;
    lines.extend(rescaled.iter().map(|r| r.line.clone()));
    let skip = |name: &str| {
        folder::is_state(name)
            || name == rewrite::RECORD
            || rescaled.as_ref().is_some_and(|r| r.name == name)
            || cut.is_some_and(|state| rewrite::replaces(state, name))
    };
    let path = build(dir, &Place::Sibling, asked.world, &found.name, &skip, &mut |staged| {
        if let Some(state) = cut {
            lines.insert(1, rewrite::write(state, asked.world, staged)?);
        }
        if let Some(r) = &rescaled {
            disk::write_file(staged.join(r.name), &r.bytes)?;
        }
        if let Some((writer, ranks, decision)) = &made {
            folder::write(staged, *writer, ranks, &Record::new(found.name.clone(), decision.clone()))?;
        }
        record.line = lines.join("; ");
        record.write(staged)
    })?;
    Ok(Prepared { path, decision: made.map(|(_, _, decision)| decision), lines: vec![record.line] })
}

/// The newest whole `checkpoint-N` of a directory of HF Trainer, with a line for each newer one that isn't whole.
pub fn newest(dir: &Path) -> Result<(Option<PathBuf>, Vec<String>)> {
    let mut lines = Vec::new();
    if !exists(dir) {
        return Ok((None, lines));
    }
    let number = |name: &String| {
        let digits = name.strip_prefix("checkpoint-")?;
        digits.parse::<u64>().ok().filter(|n| n.to_string() == digits)
    };
    let mut names: Vec<(u64, String)> =
        Folder::open(dir)?.names()?.into_iter().filter_map(|n| Some((number(&n)?, n))).collect();
    names.sort_by(|a, b| b.cmp(a));
    for (step, name) in names {
        let path = dir.join(name);
        match whole(&path, step) {
            Ok(()) => return Ok((Some(path), lines)),
            Err(e) => lines.push(format!("passed over {}: {e}", path.display())),
        }
    }
    Ok((None, lines))
}

/// Trainer writes its state last, so a folder that has it, of the right step, with readable random states, was finished.
fn whole(path: &Path, step: u64) -> Result<()> {
    match trainer_state(&Folder::open(path)?)? {
        Some(found) if found == step => {}
        Some(found) => {
            return Err(CkptError::damaged(path, TRAINER_STATE, format!("it is of step {found}")));
        }
        None => return Err(CkptError::Missing { path: path.to_owned(), what: TRAINER_STATE.into() }),
    }
    Found::look(path).map(drop)
}

/// `global_step` of `trainer_state.json`, which must be whole; `None` when there is no such file.
fn trainer_state(folder: &Folder) -> Result<Option<u64>> {
    if folder.size_of(TRAINER_STATE)?.is_none() {
        return Ok(None);
    }
    let damaged = |why: String| CkptError::damaged(folder.path(), TRAINER_STATE, why);
    let text = folder.read(TRAINER_STATE, TRAINER_STATE_MAX)?;
    let state: Value = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
    let step = state.get("global_step").and_then(Value::as_u64);
    step.map(Some).ok_or_else(|| damaged("it has no global_step".into()))
}

/// What is in a folder.
struct Found {
    name: String,
    parent: PathBuf,
    stored: Option<Stored>,
    /// DeepSpeed's part.
    state: Option<Foreign>,
    step: u64,
}

impl Found {
    fn look(dir: &Path) -> Result<Found> {
        let not = |why: &str| CkptError::NotACheckpoint { path: dir.to_owned(), why: why.to_owned() };
        if !exists(dir) {
            return Err(not("there is no such directory"));
        }
        let absolute = fs::canonicalize(dir).map_err(CkptError::io("find", dir))?;
        let name = absolute.file_name().and_then(|n| n.to_str());
        let name = name.ok_or_else(|| not("it has no name of UTF-8 text"))?.to_owned();
        let opened = Folder::open(dir)?;
        let trainer = trainer_state(&opened)?;
        let state = deepspeed::open(dir)?;
        let stored = folder::read(dir, state.as_ref().and_then(|s| s.facts().world))?;
        if trainer.is_none() && state.is_none() && stored.is_none() && !is_accelerate(&opened)? {
            return Err(not(
                "it is neither of HF Trainer nor of Accelerate (no trainer_state.json, no random states)",
            ));
        }
        let counted = stored.as_ref().and_then(|s| s.ranks.first()?.step).and_then(|s| u64::try_from(s).ok());
        let step = trainer.or_else(|| state.as_ref()?.facts().step).or(counted).unwrap_or(0);
        Ok(Found { name, parent: disk::parent_of(&absolute), stored, state, step })
    }

    /// Ranks that wrote it, where anything says so.
    fn world(&self) -> Option<u32> {
        let told = self.state.as_ref().and_then(|s| s.facts().world);
        told.or(self.stored.as_ref().map(|s| s.ranks.len() as u32))
    }

    /// Updates that the optimizer has made, where its states aren't in one file: of DeepSpeed, of FSDP in shards.
    fn updates(&self, dir: &Path) -> Result<Option<u64>> {
        let most = |state: &Foreign| state.facts().steps.values().copied().max();
        if let Some(state) = &self.state {
            return Ok(most(state));
        }
        match exists(&dir.join(FSDP_OPTIMIZER)) {
            true => Ok(external::open(dir)?.as_ref().and_then(most)),
            false => Ok(None),
        }
    }

    /// What an earlier start made of it for `world` ranks.
    fn earlier(&self, world: u32) -> Option<(PathBuf, rewrite::Prepared)> {
        let path = sibling(&self.parent, world, &self.name);
        let record = rewrite::Prepared::read(&path)?;
        Some((path, record))
    }

    fn reconciled(
        &self,
        stored: &Stored,
        asked: &Asked,
    ) -> Result<(Vec<super::streams::RankStates>, Decision)> {
        let asked = Asked { step: self.step, generation: self.generation()?, ..asked.clone() };
        let path = self.parent.join(&self.name);
        reconcile(&stored.ranks, &asked).map_err(|what| CkptError::Unsupported { path, what }).map(
            |(mut ranks, decision)| {
                if stored.writer == Writer::Accelerate {
                    ranks.iter_mut().for_each(|r| r.step = stored.ranks.first().and_then(|f| f.step));
                }
                (ranks, decision)
            },
        )
    }

    /// One more than the newest that is recorded in the folder itself or, of earlier steps, beside it.
    fn generation(&self) -> Result<u64> {
        let mut newest = Record::read(&self.parent.join(&self.name))?.map_or(0, |r| r.decision.generation);
        for beside in Folder::open(&self.parent)?.names()?.iter().filter(|n| n.starts_with("launch-w")) {
            let prepared = self.parent.join(beside);
            let names = Folder::open(&prepared).and_then(|f| f.names()).unwrap_or_default();
            for name in names.iter().filter(|n| !n.starts_with('.')) {
                // one that can't be read decides nothing here
                let record = Record::read(&prepared.join(name)).ok().flatten();
                let earlier = record.filter(|r| r.decision.step < self.step);
                newest = newest.max(earlier.map_or(0, |r| r.decision.generation));
            }
        }
        Ok(newest.saturating_add(1))
    }
}

fn is_accelerate(folder: &Folder) -> Result<bool> {
    Ok(folder.size_of("optimizer.bin")?.is_some() || exists(&folder.path().join("pytorch_model_fsdp_0")))
}

fn sibling(parent: &Path, world: u32, name: &str) -> PathBuf {
    parent.join(format!("launch-w{world}")).join(name)
}

/// True when the folder was made here of the one that is called `name`.
fn is_of(target: &Path, name: &str) -> Result<bool> {
    let prepared = rewrite::Prepared::read(target).is_some_and(|r| r.from == name);
    Ok(prepared || Record::read(target)?.is_some_and(|r| r.from == name))
}

/// Makes the folder in hiding, and gives it its name when it is whole.
fn build(
    dir: &Path,
    place: &Place,
    world: u32,
    name: &str,
    skip: &dyn Fn(&str) -> bool,
    fill: &mut dyn FnMut(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let original = fs::canonicalize(dir).map_err(CkptError::io("find", dir))?;
    let target = match place {
        Place::Sibling => sibling(&disk::parent_of(dir), world, name),
        Place::At(path) => path.clone(),
        Place::InPlace => original.clone(),
    };
    let parent = disk::parent_of(&target);
    disk::make_dirs(&parent)?;
    let refused = |why: &str| CkptError::Refused { path: target.clone(), why: why.to_owned() };
    match place {
        Place::At(_) if exists(&target) => return Err(refused("it is there already")),
        Place::Sibling if exists(&target) && !is_of(&target, name)? => {
            return Err(refused("launch didn't make it; move it away, or give another place"));
        }
        _ => {}
    }
    let _lock = disk::lock_dir(&parent)?;
    let target_name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let scratch = Scratch::new(&parent, &target_name)?;
    link::folder(&original, &scratch.dir, skip)?;
    fill(&scratch.dir)?;
    disk::sync_dir(&scratch.dir)?;
    // what had the name before is in the scratch folder afterwards, and goes with it
    publish(&scratch.dir, &target, Swap::Atomic)?;
    Ok(target)
}

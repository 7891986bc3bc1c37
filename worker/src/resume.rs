//! Going on from a checkpoint: which one, whether it fits, and what a person should know about it.
use crate::{
    agree::agree,
    error::{Error, Result},
    optim::Group,
    stages::{Cursor, ScheduleBound},
    state::{check_fits, read_own, spread},
};
use ckpt::{Checkpoint, Facts};
use contract::{
    event::Event,
    job::{JobSpec, ResumeFrom, ScheduleName},
};
use std::path::{Path, PathBuf};

/// Where the run goes on.
pub struct Resumed {
    /// The checkpoint.
    pub path: PathBuf,
    /// How far it was.
    pub cursor: Cursor,
}

/// Reports what a person should know (rank 0's are shown).
pub type Tell<'a> = dyn FnMut(Event) -> Result<()> + 'a;

/// Loads the checkpoint that the job asks for. `None`: the run starts at step 0. Collective.
///
/// With `auto`, a damaged checkpoint is passed over for the next older one, and said so. A checkpoint of another model is
/// never passed over: that is a mistake in the job.
pub fn resume(
    bound: &mut ScheduleBound,
    job: &JobSpec,
    root: &Path,
    workdir: &Path,
    data: &str,
    tell: &mut Tell,
) -> Result<Option<Resumed>> {
    let (candidates, named) = match &job.resume.from {
        ResumeFrom::Never => return Ok(None),
        ResumeFrom::Auto => (list(bound, root)?, false),
        ResumeFrom::Path(p) => (named(bound, &workdir.join(p))?, true),
    };
    let mut damaged = Vec::new();
    for path in candidates {
        match load(bound, &path, data, tell) {
            Ok(resumed) => {
                for message in damaged {
                    tell(Event::Notice { rank: None, message })?;
                }
                return Ok(Some(resumed));
            }
            Err(Refusal::Unusable(e)) => return Err(e),
            Err(Refusal::Damaged(e)) if named => return Err(e),
            Err(Refusal::Damaged(e)) => {
                damaged.push(format!("passed over {}: {}", path.display(), e.message))
            }
        }
    }
    match damaged.first() {
        None => Ok(None),
        Some(why) => Err(Error::checkpoint(format!(
            "no checkpoint in {} can be used; {why}. Repair or remove them, or set resume.from: never to start anew",
            root.display()
        ))),
    }
}

enum Refusal {
    /// Its bytes are not what was written: an older one may do.
    Damaged(Error),
    /// It is sound, but not for this job; or the job is ending.
    Unusable(Error),
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Self {
        Refusal::Unusable(e)
    }
}

/// All checkpoints under `root`, newest first, as rank 0 sees them.
fn list(bound: &ScheduleBound, root: &Path) -> Result<Vec<PathBuf>> {
    let queue = bound.trainer.engine.queue();
    let mine = if bound.trainer.engine.rank() == 0 { ckpt::list(root) } else { Ok(Vec::new()) };
    let mine = mine.map(|all| all.into_iter().map(|(_, p)| p).collect::<Vec<_>>());
    Ok(agree(queue, mine.map_err(|e| Error::checkpoint(e.to_string())))?.swap_remove(0))
}

/// The checkpoint that was named, or the newest in the directory that was named.
fn named(bound: &ScheduleBound, path: &Path) -> Result<Vec<PathBuf>> {
    if path.join("manifest.json").exists() {
        return Ok(vec![path.to_path_buf()]);
    }
    match list(bound, path)?.into_iter().next() {
        Some(newest) => Ok(vec![newest]),
        None => Err(Error::checkpoint(format!(
            "resume.from: {} is not a checkpoint and holds none (looked for manifest.json and step-* folders)",
            path.display()
        ))),
    }
}

fn load(
    bound: &mut ScheduleBound,
    path: &Path,
    data: &str,
    tell: &mut Tell,
) -> std::result::Result<Resumed, Refusal> {
    let opened = Checkpoint::open(path).map_err(|e| Error::checkpoint(e.to_string()));
    let failed = opened.as_ref().err().cloned();
    let errors = agree_on_damage(bound, failed)?;
    let checkpoint = match (opened, errors) {
        (Ok(c), None) => c,
        (_, Some(e)) | (Err(e), None) => return Err(Refusal::Damaged(e)),
    };
    let shown = path.display().to_string();
    let units: Vec<_> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    check_fits(&checkpoint, &units, bound.trainer.optimizer.spec())?;
    let cursor = cursor(checkpoint.facts(), &shown)?;
    let read = read_own(bound, &checkpoint).err().map(|e| Error::checkpoint(e.to_string()));
    if let Some(e) = agree_on_damage(bound, read)? {
        return Err(Refusal::Damaged(e));
    }
    spread(bound)?;
    let facts = checkpoint.facts();
    tell(Event::Resume { step: facts.step, path: path.into(), world: facts.world, stage: facts.stage })?;
    for message in differences(bound, facts, data) {
        tell(Event::Notice { rank: None, message })?;
    }
    Ok(Resumed { path: path.into(), cursor })
}

/// The first damage that any rank found; the same answer on every rank.
fn agree_on_damage(bound: &ScheduleBound, mine: Option<Error>) -> Result<Option<Error>> {
    let all = agree(bound.trainer.engine.queue(), Ok(mine.map(|e| e.message)))?;
    Ok(all.into_iter().flatten().next().map(Error::checkpoint))
}

fn cursor(facts: &Facts, path: &str) -> Result<Cursor> {
    let at = facts.cursor.get("at").cloned().unwrap_or_default();
    serde_json::from_value(at)
        .map_err(|e| Error::checkpoint(format!("{path}: the manifest's cursor can't be read: {e}")))
}

/// What this job does differently from the one that wrote the checkpoint. The job's word counts; none of it is silent.
fn differences(bound: &ScheduleBound, facts: &Facts, data: &str) -> Vec<String> {
    let mut out = Vec::new();
    let train = bound.train();
    if facts.run_seed != train.seed {
        out.push(format!(
            "seed is {} here and {} in the checkpoint: the order of samples changes",
            train.seed, facts.run_seed
        ));
    }
    if facts.cursor.get("data").and_then(|d| d.as_str()) != Some(data) {
        out.push("the training data is not what the checkpoint was trained on: sample numbers go on, their content differs".into());
    }
    if train.schedule.name != ScheduleName::Constant
        && let Some(steps) = facts.job["train"]["steps"].as_u64().filter(|s| *s != train.steps)
    {
        out.push(format!(
            "train.steps is {} here and {steps} in the checkpoint: the learning rate falls along another curve from now on",
            train.steps
        ));
    }
    let units: Vec<_> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let here = bound.trainer.optimizer.groups(&units);
    let there: Vec<Group> = serde_json::from_value(facts.groups.clone()).unwrap_or_default();
    for g in &here {
        match there.iter().find(|t| t.name == g.name) {
            Some(t) if t == g => {}
            Some(t) => out.push(group_difference(g, t)),
            None => out.push(format!("parameter group `{}` is new", g.name)),
        }
    }
    out
}

fn group_difference(here: &Group, there: &Group) -> String {
    let fields = [
        ("lr", here.lr.to_string(), there.lr.to_string()),
        ("betas", format!("{:?}", here.betas), format!("{:?}", there.betas)),
        ("eps", here.eps.to_string(), there.eps.to_string()),
        ("momentum", here.momentum.to_string(), there.momentum.to_string()),
        ("weight_decay", here.weight_decay.to_string(), there.weight_decay.to_string()),
        ("parameters", here.params.len().to_string(), there.params.len().to_string()),
    ];
    let changed: Vec<String> = fields
        .iter()
        .filter(|(_, h, t)| h != t)
        .map(|(name, h, t)| format!("{name} {h} (checkpoint: {t})"))
        .collect();
    format!("parameter group `{}` goes on with {}", here.name, changed.join(", "))
}

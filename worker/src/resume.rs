//! Going on from a checkpoint: which one, whether it fits, and what a person should know about it.
mod adapters;
mod fit;
mod foreign;
mod origin;

pub use adapters::check_adapters;
pub use origin::{Origin, begin};

use crate::{
    agree::agree,
    error::{Error, Result},
    optim::Group,
    params::Unit,
    host_local::{self, Candidate, Scattered},
    stages::{Cursor, ScheduleBound},
    state::{Reading, check_fits, read_own, spread, without_states},
    storage::Layout,
    train::loss_scale::State,
};
use ckpt::{Checkpoint, Dtype, Facts, Foreign, Found, Role, Source, TensorInfo};
use contract::{
    event::Event,
    exit::WorkerExit,
    job::{JobSpec, Precision, ResumeFrom, RngPolicy, ScheduleName},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::{BTreeSet, HashMap, HashSet},
    path::{Path, PathBuf},
};

/// Where the run goes on.
pub struct Resumed {
    /// The checkpoint.
    pub path: PathBuf,
    /// How far it was.
    pub cursor: Cursor,
    /// It is one of ours, so nothing needs to be saved before a step is done.
    pub native: bool,
    /// How often random streams were seeded anew before it was written.
    pub rng_generation: u64,
}

impl Resumed {
    /// What is decided about random streams: the new generation, and the record for the next checkpoint. The built-in
    /// runtime's streams have no state: `reseed` counts a new generation and changes no number.
    pub fn rng(&self, policy: RngPolicy, world: usize) -> (u64, Value) {
        let generation = self.rng_generation + u64::from(policy == RngPolicy::Reseed);
        let policy = match policy {
            RngPolicy::Reconcile => "reconcile",
            RngPolicy::Strict => "strict",
            RngPolicy::Reseed => "reseed",
        };
        let path = self.path.display().to_string();
        (generation, json!({ "from": path, "world": world, "policy": policy, "streams": "stateless" }))
    }
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
    place: &Place,
    data: &str,
    tell: &mut Tell,
) -> Result<Option<Resumed>> {
    let root = place.root;
    let (candidates, named) = match &job.resume.from {
        ResumeFrom::Never => return Ok(None),
        ResumeFrom::Auto => (list(bound, place, root)?, false),
        ResumeFrom::Path(p) => match named(bound, place, &place.workdir.join(p))? {
            Named::Native(one) => (vec![one], true),
            Named::Foreign(mut source, path) => {
                source.list_experts(&listed(bound));
                return foreign::load(bound, &source, &path, job, tell).map(Some);
            }
        },
    };
    let mut damaged = Vec::new();
    for candidate in candidates {
        let path = candidate.path.clone();
        match load(bound, place, &candidate, data, tell) {
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

/// Names and shapes of the model's weights, as its files list them.
fn listed(bound: &ScheduleBound) -> Vec<(String, Vec<u64>)> {
    let params = bound.trainer.engine.shards.iter().flat_map(|s| &s.unit.params);
    params.map(|p| (p.name.clone(), p.shape.iter().map(|&n| n as u64).collect())).collect()
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

/// Where checkpoints are.
pub struct Place<'a> {
    /// `checkpoint.dir`.
    pub root: &'a Path,
    /// What `resume.from` is relative to.
    pub workdir: &'a Path,
    /// Which ranks share `root`.
    pub layout: &'a Layout,
}

/// All checkpoints under `root`, newest first, as rank 0 sees them; of hosts with directories of their own, all that any
/// has.
fn list(bound: &ScheduleBound, place: &Place, root: &Path) -> Result<Vec<Candidate>> {
    let queue = bound.trainer.engine.queue();
    if !place.layout.is_shared() {
        return host_local::list(queue, place.layout, root);
    }
    let mine = if bound.trainer.engine.rank() == 0 { ckpt::list(root) } else { Ok(Vec::new()) };
    let mine = mine.map(|all| all.into_iter().map(|(_, p)| p).collect::<Vec<_>>());
    let all = agree(queue, mine.map_err(|e| Error::checkpoint(e.to_string())))?.swap_remove(0);
    Ok(all.into_iter().map(Candidate::at).collect())
}

/// What `resume.from` names.
enum Named {
    Native(Candidate),
    Foreign(Box<Foreign>, PathBuf),
}

/// The checkpoint that was named, or the newest in the directory that was named; or one of another program. Collective.
fn named(bound: &ScheduleBound, place: &Place, path: &Path) -> Result<Named> {
    let here = path.join("manifest.json").exists();
    // a host that has none of it sees no manifest
    if agree(bound.trainer.engine.queue(), Ok(here))?.contains(&true) {
        return Ok(Named::Native(Candidate::at(path.to_path_buf())));
    }
    if let Some(newest) = list(bound, place, path)?.into_iter().next() {
        return Ok(Named::Native(newest));
    }
    let trained = fit::trained_names(bound);
    let opened =
        ckpt::find_trained(path, Some(&trained)).map_err(|e| Error::checkpoint(format!("resume.from: {e}")));
    if let Some(e) = agree_on_damage(bound, opened.as_ref().err().cloned())? {
        return Err(e);
    }
    match opened? {
        Found::Foreign(source) => Ok(Named::Foreign(source, path.to_path_buf())),
        Found::Native(newest) => Ok(Named::Native(Candidate::at(newest.checkpoint.path().to_path_buf()))),
    }
}

fn load(
    bound: &mut ScheduleBound,
    place: &Place,
    candidate: &Candidate,
    data: &str,
    tell: &mut Tell,
) -> std::result::Result<Resumed, Refusal> {
    let path = candidate.path.as_path();
    let opened = open(bound, place, candidate)?;
    let failed = opened.as_ref().err().cloned();
    let errors = agree_on_damage(bound, failed)?;
    let opened = match (opened, errors) {
        (Ok(c), None) => c,
        (_, Some(e)) | (Err(e), None) => return Err(Refusal::Damaged(e)),
    };
    let (checkpoint, source): (&Checkpoint, &dyn Source) = match &opened {
        Opened::Whole(c) => (c, &**c),
        Opened::Scattered(s) => (s.checkpoint(), &**s),
    };
    let shown = path.display().to_string();
    let units: Vec<_> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let alone = checkpoint.is_weights_alone();
    check_fits(checkpoint, &units, bound.trainer.optimizer.spec())?;
    let (cursor, guessed) = match alone {
        true => (Cursor::default(), Some(foreign::weights_alone(path))),
        false => cursor(bound, checkpoint.facts(), &shown)?,
    };
    let anew = match alone {
        true => HashSet::new(),
        false => without_states(&source.tensors(), &units, bound.trainer.optimizer.spec()),
    };
    let mut late = late(checkpoint.facts(), &shown)?;
    late.extend(anew.iter().map(|name| (name.clone(), cursor.step)));
    bound.trainer.optimizer.set_late(&units, &late);
    restore_loss_scale(bound, checkpoint.facts(), &shown)?;
    let reading = Reading { source, renamed: &HashMap::new(), states: !alone, anew: &anew, meant: |_| true };
    let read = read_own(bound, &reading).err().map(|e| Error::checkpoint(e.to_string()));
    if let Some(e) = agree_on_damage(bound, read)? {
        return Err(Refusal::Damaged(e));
    }
    spread(bound)?;
    let facts = checkpoint.facts();
    tell(Event::Resume {
        step: facts.step,
        path: path.into(),
        world: Some(facts.world),
        stage: Some(facts.stage),
    })?;
    let mut told: Vec<String> = guessed.into_iter().chain(other_masters(bound, &source.tensors())).collect();
    if !alone {
        told.extend(frozen_otherwise(&units, &source.tensors(), &anew));
        told.extend(differences(bound, facts, data));
    }
    for message in told {
        tell(Event::Notice { rank: None, message })?;
    }
    let rng_generation = facts.rng.get("generation").and_then(Value::as_u64).unwrap_or(0);
    Ok(Resumed { path: path.into(), cursor, native: true, rng_generation })
}

/// A checkpoint that every rank can read all of.
enum Opened {
    Whole(Box<Checkpoint>),
    Scattered(Box<Scattered>),
}

/// Outer error: the job ends. Collective.
fn open(bound: &ScheduleBound, place: &Place, candidate: &Candidate) -> Result<Result<Opened>> {
    let damaged = |e: ckpt::CkptError| Error::checkpoint(e.to_string());
    if place.layout.is_shared() {
        let opened = Checkpoint::open(&candidate.path).and_then(|c| c.require_whole().map(|()| c));
        return Ok(opened.map(|c| Opened::Whole(Box::new(c))).map_err(damaged));
    }
    let queue = bound.trainer.engine.queue();
    match Scattered::open(queue, place.layout, &candidate.path, candidate.hash.as_deref()) {
        Ok(opened) => Ok(Ok(Opened::Scattered(Box::new(opened)))),
        // a collective that failed is the end; a checkpoint that can't be used may have an older one
        Err(e) if e.exit == WorkerExit::Checkpoint => Ok(Err(e)),
        Err(e) => Err(e),
    }
}

/// The first damage that any rank found; the same answer on every rank.
fn agree_on_damage(bound: &ScheduleBound, mine: Option<Error>) -> Result<Option<Error>> {
    let all = agree(bound.trainer.engine.queue(), Ok(mine.map(|e| e.message)))?;
    Ok(all.into_iter().flatten().next().map(Error::checkpoint))
}

/// Where the run goes on. A checkpoint that was converted from another program's has no cursor of ours: then it is step
/// times batch, and a line says so.
fn cursor(bound: &ScheduleBound, facts: &Facts, path: &str) -> Result<(Cursor, Option<String>)> {
    let unreadable =
        |e: String| Error::checkpoint(format!("{path}: the manifest's cursor can't be read: {e}"));
    match facts.cursor.get("at") {
        Some(at) if !at.is_null() => {
            Ok((serde_json::from_value(at.clone()).map_err(|e| unreadable(e.to_string()))?, None))
        }
        _ => {
            let batch = bound.trainer.global_batch();
            let samples = facts.step.checked_mul(batch).ok_or_else(|| unreadable("too many steps".into()))?;
            let said = format!(
                "data goes on at sample {samples} ({} steps × {batch} samples, since the checkpoint doesn't say)",
                facts.step
            );
            Ok((Cursor { step: facts.step, consumed_samples: samples, tokens: facts.tokens }, Some(said)))
        }
    }
}

/// Weights in fp32 that become the only ones in bf16, or the other way round.
fn other_masters(bound: &ScheduleBound, tensors: &[TensorInfo]) -> Option<String> {
    let kept = |dtype| tensors.iter().any(|t| t.role == Role::Weight && t.dtype == dtype);
    let weights = bound.trainer.engine.weights();
    match weights.updated {
        device::Dtype::F32 if kept(Dtype::BF16) => Some(format!(
            "the checkpoint has weights in bf16 and no fp32 master weights: {} begin at their values",
            if weights.has_masters() { "the master weights" } else { "the fp32 weights" }
        )),
        device::Dtype::Bf16 if kept(Dtype::F32) => Some(
            "train.master_weights is false here: the checkpoint's fp32 weights are rounded to bf16, once, to the nearest"
                .into(),
        ),
        _ => None,
    }
}

/// What of the optimizer's states applies no longer, or not yet.
fn frozen_otherwise(units: &[Unit], tensors: &[TensorInfo], anew: &HashSet<String>) -> Vec<String> {
    let mut out = Vec::new();
    if !anew.is_empty() {
        let names: BTreeSet<&String> = anew.iter().collect();
        out.push(format!(
            "{} parameters have no optimizer state in the checkpoint, which had them frozen: their states begin anew ({})",
            names.len(),
            fit::some(&names.into_iter().collect::<Vec<_>>())
        ));
    }
    let trained: HashSet<&str> =
        units.iter().flat_map(Unit::trained_params).map(|p| p.name.as_str()).collect();
    let has = tensors.iter().filter(|t| t.role.is_optimizer_state()).map(|t| t.name.as_str());
    let left: BTreeSet<&str> = has.filter(|name| !trained.contains(name)).collect();
    if !left.is_empty() {
        out.push(format!(
            "{} parameters are frozen here and were trained in the checkpoint: their optimizer states are left out ({})",
            left.len(),
            fit::some(&left.into_iter().collect::<Vec<_>>())
        ));
    }
    out
}

/// With fp16: the scale that the checkpoint's run had found.
fn restore_loss_scale(bound: &mut ScheduleBound, facts: &Facts, path: &str) -> Result<()> {
    let Some(state) = facts.cursor.get("loss_scale").filter(|s| !s.is_null()) else { return Ok(()) };
    let read = State::deserialize(state).map_err(|e| e.to_string());
    read.and_then(|state| bound.trainer.loss_scale.restore(state))
        .map_err(|e| Error::checkpoint(format!("{path}: the manifest's loss scale can't be read: {e}")))
}

/// Updates by which parameters are behind the run.
fn late(facts: &Facts, path: &str) -> Result<HashMap<String, u64>> {
    match facts.cursor.get("late") {
        None | Some(Value::Null) => Ok(HashMap::new()),
        Some(late) => serde_json::from_value(late.clone())
            .map_err(|e| Error::checkpoint(format!("{path}: the manifest's cursor can't be read: {e}"))),
    }
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
    let there = facts.job["train"]["model"]["dropout"].as_f64();
    if there != train.model.dropout {
        let said = |rate: Option<f64>| rate.map_or("not given".to_owned(), |rate| rate.to_string());
        out.push(format!(
            "train.model.dropout is {} here and {} in the checkpoint",
            said(train.model.dropout),
            said(there)
        ));
    }
    if facts.cursor.get("data").and_then(|d| d.as_str()) != Some(data) {
        out.push("the training data is not what the checkpoint was trained on: sample numbers go on, their content differs".into());
    }
    let there = &facts.job["train"]["precision"];
    let masters_there = facts.job["train"]["master_weights"] != json!(false);
    if let Some(there) = Precision::deserialize(there).ok().filter(|there| *there != train.precision) {
        out.push(format!(
            "precision is {} here and {} in the checkpoint: it goes on from the checkpoint's {} weights",
            train.precision.name(),
            there.name(),
            if masters_there { "fp32 master" } else { "bf16" }
        ));
    }
    if train.schedule.name != ScheduleName::Constant
        && let Some(steps) = facts.job["train"]["steps"].as_u64().filter(|s| *s != train.steps)
    {
        out.push(format!(
            "train.steps is {} here and {steps} in the checkpoint: the learning rate falls along another curve from now on",
            train.steps
        ));
    }
    let lay = &facts.job["train"]["experts"];
    let lie = json!({ "parallel": train.experts.parallel, "placement": train.experts.placement });
    if bound.trainer.experts.is_some() && ["parallel", "placement"].iter().any(|key| lay[key] != lie[key]) {
        out.push(format!(
            "experts lie otherwise than in the checkpoint (groups of {} there, of {} here): weights and states follow",
            lay["parallel"], train.experts.parallel
        ));
    }
    let units: Vec<_> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let here = bound.trainer.optimizer.groups(&units);
    let there: Vec<Group> = serde_json::from_value(facts.groups.clone()).unwrap_or_default();
    for g in &here {
        match there.iter().find(|t| t.name == g.name) {
            Some(t) if t == g => {}
            Some(t) => out.extend(group_difference(g, t)),
            None => out.push(format!("parameter group `{}` is new", g.name)),
        }
    }
    out
}

fn group_difference(here: &Group, there: &Group) -> Option<String> {
    let fields = [
        ("lr", here.lr.to_string(), there.lr.to_string()),
        ("betas", format!("{:?}", here.betas), format!("{:?}", there.betas)),
        ("eps", here.eps.to_string(), there.eps.to_string()),
        ("momentum", here.momentum.to_string(), there.momentum.to_string()),
        ("weight_decay", here.weight_decay.to_string(), there.weight_decay.to_string()),
        ("parameters", here.params.len().to_string(), there.params.len().to_string()),
    ];
    // which parameters were in it may not be known of another program's group
    let counted = |name: &str| name != "parameters" || !there.params.is_empty();
    let changed: Vec<String> = fields
        .iter()
        .filter(|(name, h, t)| h != t && counted(name))
        .map(|(name, h, t)| format!("{name} {h} (checkpoint: {t})"))
        .collect();
    let said = || format!("parameter group `{}` goes on with {}", here.name, changed.join(", "));
    (!changed.is_empty()).then(said)
}

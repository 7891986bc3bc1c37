//! Going on from a checkpoint that another program wrote: the training state where it is whole, or weights alone.
use super::{Resumed, Tell, agree_on_damage, fit::*, frozen_otherwise, other_masters};
use crate::{
    agree::agree,
    error::{Error, Result},
    optim::{Group, schedule::lr_at},
    params::Unit,
    stages::{Cursor, ScheduleBound},
    state::{Reading, read_own, spread},
    train::loss_scale::State,
};
use ckpt::{Foreign, LossScale, Source, peft::is_adapter};
use contract::{
    event::Event,
    job::{JobSpec, RngPolicy},
};
use serde_json::{Map, Value};
use std::{collections::HashMap, path::Path};

/// Loads it into the engine: each rank reads its own part. Collective.
pub(super) fn load(
    bound: &mut ScheduleBound,
    source: &Foreign,
    path: &Path,
    job: &JobSpec,
    tell: &mut Tell,
) -> Result<Resumed> {
    let units: Vec<Unit> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let ties = bound.trainer.model.ties();
    let model = bound.trainer.model.clone();
    let family = family_of(bound);
    let optimizer = Some(bound.trainer.optimizer.spec());
    let model = model.as_ref();
    let wanted = Wanted { family: &family, units: &units, ties: &ties, model, optimizer, meant: |_| true };
    let fit = fit(source, &wanted)?;
    let leader = bound.trainer.engine.rank() == 0;
    let aliases = if leader { check_aliases(source, &fit) } else { Ok(()) };
    agree(bound.trainer.engine.queue(), aliases)?;
    check_rng(source, job, bound)?;
    let (cursor, mut notices) = match fit.moments {
        true => cursor(bound, source, &fit, &units)?,
        false => (Cursor::default(), vec![weights_alone(source.path())]),
    };
    let reading =
        Reading { source, renamed: &fit.renamed, states: fit.moments, anew: &fit.anew, meant: |_| true };
    let read = read_own(bound, &reading).err().map(|e| Error::checkpoint(e.to_string()));
    if let Some(e) = agree_on_damage(bound, read)? {
        return Err(e);
    }
    spread(bound)?;
    if fit.moments {
        notices.extend(frozen_otherwise(&units, &source.tensors(), &fit.anew));
        notices.extend(differences(bound, source, &fit, &units, cursor.step));
        notices.extend(loss_scale(bound, source));
    }
    if bound.train().rounds_stochastically() {
        notices.extend(other_masters(bound, &source.tensors()));
    }
    notices.extend(left_out(source, &fit));
    let facts = source.facts();
    tell(Event::Resume { step: cursor.step, path: path.into(), world: facts.world, stage: facts.stage })?;
    for message in facts.notices.iter().cloned().chain(notices) {
        tell(Event::Notice { rank: None, message })?;
    }
    Ok(Resumed { path: path.into(), cursor, native: false, rng_generation: 0 })
}

/// Loads the weights alone, whatever else is there; adapters are not among them. Collective.
pub(super) fn load_weights(bound: &mut ScheduleBound, source: &Foreign, tell: &mut Tell) -> Result<()> {
    let units: Vec<Unit> = bound.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let ties = bound.trainer.model.ties();
    let model = bound.trainer.model.clone();
    let family = family_of(bound);
    let meant = |name: &str| !is_adapter(name);
    let wanted =
        Wanted { family: &family, units: &units, ties: &ties, model: model.as_ref(), optimizer: None, meant };
    let fit = fit(source, &wanted)?;
    let leader = bound.trainer.engine.rank() == 0;
    let aliases = if leader { check_aliases(source, &fit) } else { Ok(()) };
    agree(bound.trainer.engine.queue(), aliases)?;
    let reading = Reading { source, renamed: &fit.renamed, states: false, anew: &fit.anew, meant };
    let read = read_own(bound, &reading).err().map(|e| Error::checkpoint(e.to_string()));
    if let Some(e) = agree_on_damage(bound, read)? {
        return Err(e);
    }
    spread(bound)?;
    if !fit.unused.is_empty() {
        let message =
            format!("buffers without a place in the job's model are left out: {}", some(&fit.unused));
        tell(Event::Notice { rank: None, message })?;
    }
    Ok(())
}

/// The job's `model_type`.
fn family_of(bound: &ScheduleBound) -> String {
    model_type(bound.trainer.model.hf_config()).unwrap_or_default().to_owned()
}

pub(super) fn weights_alone(path: &Path) -> String {
    format!(
        "{} holds weights alone: the optimizer, the learning rate and the data begin at step 0",
        path.display()
    )
}

/// `resume.rng: strict` can't be had when ranks come or go: the streams of the others have no place here.
fn check_rng(source: &Foreign, job: &JobSpec, bound: &ScheduleBound) -> Result<()> {
    let (facts, world) = (source.facts(), bound.trainer.engine.world());
    let Some(wrote) = facts.world.filter(|w| *w as usize != world) else { return Ok(()) };
    if job.resume.rng == RngPolicy::Strict && !facts.rng_files.is_empty() {
        return Err(Error::checkpoint(format!(
            "{}: {wrote} ranks wrote random states and {world} would go on; resume.rng: strict refuses that, \
             use reconcile",
            source.path().display()
        )));
    }
    Ok(())
}

/// Where the run goes on, with the lines that say how that is known; sets each parameter's own count of updates.
fn cursor(
    bound: &mut ScheduleBound,
    source: &Foreign,
    fit: &Fit,
    units: &[Unit],
) -> Result<(Cursor, Vec<String>)> {
    let facts = source.facts();
    let own = |name: &str| {
        let there = fit.renamed.get(name).map_or(name, String::as_str);
        facts.steps.get(there).copied()
    };
    let names = || units.iter().flat_map(|u| &u.params).map(|p| p.name.as_str());
    let Some(step) = names().filter_map(own).max().or(facts.step) else {
        return Err(Error::checkpoint(format!(
            "{} doesn't say how many steps its optimizer has done; resume from another checkpoint, or from its weights alone",
            source.path().display()
        )));
    };
    let mut late: HashMap<String, u64> =
        names().filter_map(|n| Some((n.to_owned(), step - own(n)?))).filter(|(_, late)| *late > 0).collect();
    late.retain(|name, _| !fit.anew.contains(name));
    let mut notices = Vec::new();
    if !late.is_empty() {
        notices.push(format!(
            "{} parameters have had fewer updates than the others: each goes on with its own count",
            late.len()
        ));
    }
    late.extend(fit.anew.iter().map(|name| (name.clone(), step)));
    bound.trainer.optimizer.set_late(units, &late);
    let batch = bound.trainer.global_batch();
    let by_steps = || {
        step.checked_mul(batch).ok_or_else(|| Error::checkpoint("its step is no number of steps".to_string()))
    };
    let (consumed_samples, why) = match facts.samples {
        Some(n) => (n, "as the checkpoint says".to_owned()),
        None => (by_steps()?, format!("{step} steps × {batch} samples, since the checkpoint doesn't say")),
    };
    let seq_len = u64::from(bound.train().data.seq_len);
    notices.push(format!("data goes on at sample {consumed_samples} in this job's order ({why})"));
    let tokens = consumed_samples.checked_mul(seq_len);
    let tokens = tokens
        .ok_or_else(|| Error::checkpoint("its number of samples is no number of samples".to_string()))?;
    Ok((Cursor { step, consumed_samples, tokens }, notices))
}

/// With fp16: goes on with the scale that the checkpoint's run had found, or says why not.
fn loss_scale(bound: &mut ScheduleBound, source: &Foreign) -> Option<String> {
    let LossScale { scale, steps } = source.state().loss_scale()?;
    let restored = bound.trainer.loss_scale.restore(State { scale, steps, skipped: 0 });
    restored.err().map(|why| format!("the loss scale begins anew: {why}"))
}

/// What of the checkpoint has no use here.
fn left_out(source: &Foreign, fit: &Fit) -> Vec<String> {
    let mut out = Vec::new();
    if !fit.unused.is_empty() {
        out.push(format!("buffers without a place in the job's model are left out: {}", some(&fit.unused)));
    }
    if !source.facts().rng_files.is_empty() {
        out.push(
            "the checkpoint's random states are of Python and torch: the built-in runtime's randomness has no state and needs none"
                .into(),
        );
    }
    out
}

/// What this job does differently from the one that wrote the checkpoint: hyper-parameters by group, the learning rate.
fn differences(bound: &ScheduleBound, source: &Foreign, fit: &Fit, units: &[Unit], step: u64) -> Vec<String> {
    let facts = source.facts();
    let theirs = &facts.groups;
    let mut out = Vec::new();
    for here in bound.trainer.optimizer.groups(units) {
        for there in theirs {
            let from = |name: &String| {
                let name = fit.renamed.get(name).unwrap_or(name);
                // a format that doesn't say which group a weight was in has one group for all
                match there.names.as_slice() {
                    [] => theirs.len() == 1,
                    names => names.contains(name),
                }
            };
            let count = here.params.iter().filter(|n| from(n)).count();
            let changed = changed(&here, &there.hyper);
            if count > 0 && !changed.is_empty() {
                let of = match count == here.params.len() {
                    true => String::new(),
                    false => format!(" for {count} of its {} parameters", here.params.len()),
                };
                out.push(format!("parameter group `{}` goes on with {}{of}", here.name, changed.join(", ")));
            }
        }
    }
    out.extend(learning_rate(bound, theirs, step));
    // Accelerate steps a scheduler once for each process, and its scripts make it for that
    let each = facts.world.and_then(|world| step.checked_mul(world.into()));
    if let Some(position) = position(&facts.scheduler).filter(|p| *p != step && Some(*p) != each) {
        out.push(format!(
            "the checkpoint's scheduler stands at {position}, its optimizer at {step}: the learning rate is that of train.schedule at step {step}"
        ));
    }
    out
}

fn changed(here: &Group, there: &Map<String, Value>) -> Vec<String> {
    let number = |key: &str| there.get(key).and_then(Value::as_f64);
    let betas = there
        .get("betas")
        .and_then(Value::as_array)
        .map(|b| b.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
    let mut out = Vec::new();
    for (key, value) in [("eps", here.eps), ("momentum", here.momentum), ("weight_decay", here.weight_decay)]
    {
        if let Some(there) = number(key).filter(|t| *t != value) {
            out.push(format!("{key} {value} (checkpoint: {there})"));
        }
    }
    if let Some(there) = betas.filter(|b| b.as_slice() != [here.betas.0, here.betas.1]) {
        out.push(format!("betas {:?} (checkpoint: {there:?})", here.betas));
    }
    let asked = [("amsgrad", true), ("maximize", true), ("decoupled_weight_decay", false)];
    for (key, other) in asked {
        let matters = key != "decoupled_weight_decay" || number("weight_decay") != Some(0.0);
        if matters && there.get(key).and_then(Value::as_bool) == Some(other) {
            out.push(format!("{key} {} (checkpoint: {other})", !other));
        }
    }
    out
}

/// The next step's learning rate, when it isn't the one that every group of the checkpoint was about to use.
fn learning_rate(bound: &ScheduleBound, theirs: &[ckpt::Group], step: u64) -> Option<String> {
    let train = bound.train();
    let here = lr_at(&train.schedule, train.optimizer.lr, train.steps, step);
    let mut there: Vec<f64> = theirs.iter().filter_map(|g| g.hyper.get("lr")?.as_f64()).collect();
    there.dedup();
    let same = there.iter().all(|t| (t - here).abs() <= 1e-9 * here.abs().max(t.abs()));
    (!same).then(|| {
        let there: Vec<String> = there.iter().map(f64::to_string).collect();
        format!(
            "the next step's learning rate is {here} by train.schedule; the checkpoint's was {}",
            there.join(", ")
        )
    })
}

/// Steps that the scheduler has counted: DeepSpeed's count from −1, torch's from 0.
fn position(scheduler: &Value) -> Option<u64> {
    let number = |key: &str| scheduler.get(key).and_then(Value::as_i64);
    let position = number("last_epoch").or_else(|| number("last_batch_iteration")?.checked_add(1));
    position.and_then(|p| u64::try_from(p).ok())
}

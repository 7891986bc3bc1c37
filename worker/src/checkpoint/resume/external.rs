//! Resumes from a checkpoint that another program, such as DeepSpeed, wrote (external checkpoint),
//! with its training state or with its weights only.
use super::{
    differences::{
        collect_frozen_parameter_notices, find_precision_change_notice, format_group_notice,
        format_weights_only_notice,
    },
    resume_point::{EventSink, MemoryResumeState, ResumePoint},
    weight_match::{
        ModelRequirements, WeightMatch, format_names, match_weights, read_model_type,
        require_equal_tied_values,
    },
};
use crate::{
    checkpoint::tensor_mapping::{ReadPlan, read_on_all_ranks},
    consensus::require_on_all_ranks,
    error::{Result, build_checkpoint_error},
    optim::{ParamGroup, schedule::compute_learning_rate},
    params::ParamUnit,
    train::{loss_scale::LossScaleState, running_trainer::Cursor},
    trainer_stages::UninitializedTrainer,
};
use ckpt::{ExternalCheckpoint, LossScale, TensorSource, peft::is_lora_matrix};
use diagnostic::{Diagnostic, codes::training as codes};
use jobspec::{JobSpec, RngPolicy};
use protocol::{
    control::FromWorker,
    event::{Event, ResumeSource},
};
use serde_json::{Map, Value};
use std::{collections::HashMap, path::Path};

/// Loads the training state of an external checkpoint (one that another program wrote) into the
/// trainers of all ranks. Each rank reads the tensor ranges that it owns. Collective: every rank
/// must call it.
pub(super) fn load_external_state(
    ready: &mut UninitializedTrainer,
    source: &ExternalCheckpoint,
    path: &Path,
    job: &JobSpec,
    reason: Option<String>,
    events: &mut EventSink,
) -> Result<ResumePoint> {
    let units = ready.trainer.engine.clone_units();
    let matched = match_model_weights(ready, source, &units, true, |_| true)?;
    reject_changed_world_with_strict_rng(source, job, ready)?;
    let (cursor, mut notices) = match matched.has_optimizer_state {
        true => restore_position(ready, source, &matched, &units)?,
        false => (Cursor::default(), vec![format_weights_only_notice(source.path())]),
    };
    read_matched_ranges(ready, source, &matched, |_| true)?;
    if matched.has_optimizer_state {
        notices.extend(collect_frozen_parameter_notices(&units, &source.tensors(), &matched.reset_states));
        notices.extend(collect_hyperparam_notices(ready, source, &matched, &units, cursor.step));
        notices.extend(restore_loss_scale(ready, source));
    }
    if ready.train_spec().rounds_stochastically() {
        notices.extend(find_precision_change_notice(ready, &source.tensors()));
    }
    notices.extend(collect_unused_part_notices(source, &matched));
    let facts = source.facts();
    events(FromWorker::Event(Event::Resume {
        step: cursor.step,
        path: path.into(),
        world: facts.state.world,
        stage: facts.state.stage,
        source: ResumeSource::Checkpoint,
        reason,
    }))?;
    for message in facts.notices.iter().map(ToString::to_string).chain(notices) {
        events(FromWorker::Event(Event::new_notice(None, message)))?;
    }
    let memory = MemoryResumeState::default();
    Ok(ResumePoint { path: path.into(), cursor, is_native: false, rng_generation: 0, memory })
}

/// Loads the weights, but no other training state, of an external checkpoint (written by another
/// program) into the trainers of all ranks. Collective: every rank must call it.
pub(super) fn load_external_weights(
    ready: &mut UninitializedTrainer,
    source: &ExternalCheckpoint,
    events: &mut EventSink,
) -> Result<()> {
    let units = ready.trainer.engine.clone_units();
    let selects = |name: &str| !is_lora_matrix(name);
    let matched = match_model_weights(ready, source, &units, false, selects)?;
    read_matched_ranges(ready, source, &matched, selects)?;
    if let Some(message) = find_unused_buffer_notice(&matched) {
        events(FromWorker::Event(Event::new_notice(None, message)))?;
    }
    Ok(())
}

/// Determines on every rank, for each parameter of the model, the tensor of the external checkpoint
/// (written by another program) that contains its values. Rank 0 also checks that tied weights are
/// equal.
///
/// Collective: every rank must call it.
fn match_model_weights(
    ready: &UninitializedTrainer,
    source: &ExternalCheckpoint,
    units: &[ParamUnit],
    with_states: bool,
    selects: fn(&str) -> bool,
) -> Result<WeightMatch> {
    let model = ready.trainer.model.as_ref();
    let family = read_model_type(model.hf_config()).unwrap_or_default().to_owned();
    let optimizer = with_states.then(|| ready.trainer.optimizer.spec());
    let required =
        ModelRequirements { family: &family, units, ties: &model.tied_weights(), model, optimizer, selects };
    let matched = match_weights(source, &required)?;
    let is_leader = ready.trainer.engine.rank() == 0;
    let aliases = if is_leader { require_equal_tied_values(source, &matched) } else { Ok(()) };
    require_on_all_ranks(ready.trainer.engine.queue(), aliases.map(|()| matched))
}

/// Reads this rank's ranges of the weights, and of the optimizer states if available, from an
/// external checkpoint (written by another program) into the trainer. Collective: every rank must
/// call it.
fn read_matched_ranges(
    ready: &mut UninitializedTrainer,
    source: &ExternalCheckpoint,
    matched: &WeightMatch,
    selects: fn(&str) -> bool,
) -> Result<()> {
    let plan = ReadPlan {
        source,
        renamed: &matched.renamed,
        with_states: matched.has_optimizer_state,
        reset_states: &matched.reset_states,
        selects,
    };
    match read_on_all_ranks(ready, &plan)? {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

/// Fails if `resume.rng: strict` is set and the external checkpoint (written by another program)
/// has the random generator states of another number of ranks.
fn reject_changed_world_with_strict_rng(
    source: &ExternalCheckpoint,
    job: &JobSpec,
    ready: &UninitializedTrainer,
) -> Result<()> {
    let (facts, world) = (source.facts(), ready.trainer.engine.world());
    let Some(written_by) = facts.state.world.filter(|w| *w as usize != world) else { return Ok(()) };
    if job.resume.rng == RngPolicy::Strict && !facts.rng_files.is_empty() {
        let message = format!(
            "{} has the RNG states of {written_by} ranks, but {world} ranks resume; `resume.rng: strict` \
             requires the same number",
            source.path().display()
        );
        return Err(Diagnostic::error(codes::RESUME_RNG_STRICT, message)
            .with_subject("resume.rng")
            .with_field("checkpoint_ranks", written_by)
            .with_field("ranks", world)
            .with_help("set `resume.rng: reconcile`")
            .into());
    }
    Ok(())
}

/// Restores the completed steps, samples and tokens from an external checkpoint (written by another
/// program), and the number of updates of each parameter. Returns the progress with notices about
/// how it was determined.
fn restore_position(
    ready: &mut UninitializedTrainer,
    source: &ExternalCheckpoint,
    matched: &WeightMatch,
    units: &[ParamUnit],
) -> Result<(Cursor, Vec<String>)> {
    let facts = source.facts();
    let path = source.path().display();
    let invalid = |message: String| {
        build_checkpoint_error(codes::RESUME_POSITION_INVALID, source.path(), message)
            .with_help("resume from another checkpoint, or from its weights only (`launch ckpt gather`)")
    };
    let updates = |name: &str| {
        let stored_name = matched.renamed.get(name).map_or(name, String::as_str);
        facts.state.steps.get(stored_name).copied()
    };
    let names = || units.iter().flat_map(|u| &u.params).map(|p| p.name.as_str());
    let step =
        names().filter_map(updates).max().or(facts.state.step).ok_or_else(|| {
            invalid(format!("{path} does not record how many steps its optimizer has done"))
        })?;
    let mut step_lag: HashMap<String, u64> = names()
        .filter_map(|n| Some((n.to_owned(), step - updates(n)?)))
        .filter(|(_, lag)| *lag > 0)
        .collect();
    step_lag.retain(|name, _| !matched.reset_states.contains(name));
    let mut notices = Vec::new();
    if !step_lag.is_empty() {
        let count = match step_lag.len() {
            1 => "1 parameter has".to_owned(),
            n => format!("{n} parameters have"),
        };
        notices.push(format!("{count} had fewer updates than the others; each keeps its update count"));
    }
    step_lag.extend(matched.reset_states.iter().map(|name| (name.clone(), step)));
    ready.trainer.optimizer.set_step_lags(units, &step_lag);
    let batch = ready.trainer.global_batch_size();
    let (consumed_samples, reason) = match facts.state.samples {
        Some(n) => (n, "recorded in the checkpoint".to_owned()),
        None => {
            let samples = step
                .checked_mul(batch)
                .ok_or_else(|| invalid(format!("{path}: step {step} is out of range")))?;
            (samples, format!("step {step} × global batch {batch}; the checkpoint records no position"))
        }
    };
    notices.push(format!("data resumes at sample {consumed_samples} in this job's order ({reason})"));
    let tokens = consumed_samples
        .checked_mul(u64::from(ready.train_spec().data.seq_len))
        .ok_or_else(|| invalid(format!("{path}: sample {consumed_samples} is out of range")))?;
    Ok((Cursor { step, consumed_samples, tokens, is_evaluation_due: false }, notices))
}

/// Sets the trainer's fp16 loss scale to the one that an external checkpoint (written by another
/// program) contains, if any. Returns a notice if this loss scale is not usable.
fn restore_loss_scale(ready: &mut UninitializedTrainer, source: &ExternalCheckpoint) -> Option<String> {
    let LossScale { scale, steps } = source.training_state().parse_loss_scale()?;
    let restored = ready.trainer.loss_scale.restore_state(LossScaleState { scale, steps, skipped: 0 });
    restored.err().map(|why| format!("the loss scale starts at its initial value: {why}"))
}

/// Returns messages about data in an external checkpoint (written by another program) that this job
/// ignores, such as optimizer states or random generator states.
fn collect_unused_part_notices(source: &ExternalCheckpoint, matched: &WeightMatch) -> Vec<String> {
    let rng = (!source.facts().rng_files.is_empty()).then(|| {
        "the checkpoint's RNG states of Python and torch are not loaded: the built-in runtime's random \
         numbers have no state"
            .to_owned()
    });
    find_unused_buffer_notice(matched).into_iter().chain(rng).collect()
}

/// Returns a message about buffers (tensors that are not trained) of the checkpoint that the job's
/// model lacks, or `None` if there are none.
fn find_unused_buffer_notice(matched: &WeightMatch) -> Option<String> {
    let has_unused = !matched.unused.is_empty();
    has_unused.then(|| {
        format!("buffers that the job's model does not have are ignored: {}", format_names(&matched.unused))
    })
}

/// Returns messages about hyper-parameters, such as weight decay and learning rate, whose values in
/// the job and in the external checkpoint differ.
fn collect_hyperparam_notices(
    ready: &UninitializedTrainer,
    source: &ExternalCheckpoint,
    matched: &WeightMatch,
    units: &[ParamUnit],
    step: u64,
) -> Vec<String> {
    let facts = source.facts();
    let stored_groups = &facts.state.groups;
    let mut notices = Vec::new();
    for ours in ready.trainer.optimizer.list_param_groups(units) {
        for stored in stored_groups {
            let is_member = |name: &String| {
                let name = matched.renamed.get(name).unwrap_or(name);
                // A format that does not record the members of groups has one group with all
                // weights.
                match stored.names.as_slice() {
                    [] => stored_groups.len() == 1,
                    names => names.contains(name),
                }
            };
            let count = ours.params.iter().filter(|n| is_member(n)).count();
            let changed = describe_changed_hyperparams(&ours, &stored.hyper);
            if count > 0 && !changed.is_empty() {
                let scope = match count == ours.params.len() {
                    true => String::new(),
                    false => format!(" for {count} of {} parameters", ours.params.len()),
                };
                notices.push(format_group_notice(&ours.name, &changed) + &scope);
            }
        }
    }
    notices.extend(find_learning_rate_notice(ready, stored_groups, step));
    // Accelerate steps a scheduler once per process, and its training scripts allow for that.
    let per_process = facts.state.world.and_then(|world| step.checked_mul(world.into()));
    let position = read_scheduler_step(&facts.state.scheduler);
    if let Some(position) = position.filter(|p| *p != step && Some(*p) != per_process) {
        notices.push(format!(
            "the checkpoint's scheduler is at step {position}, its optimizer at step {step}: the learning rate is \
             that of train.schedule at step {step}"
        ));
    }
    notices
}

/// Returns a text for each hyper-parameter of a parameter group whose values differ between the job
/// and a checkpoint of another program. A value that is no number, such as a list of numbers,
/// differs from every number of the job.
fn describe_changed_hyperparams(ours: &ParamGroup, stored: &Map<String, Value>) -> Vec<String> {
    let given = |key: &str| stored.get(key).filter(|value| !value.is_null());
    let betas = stored
        .get("betas")
        .and_then(Value::as_array)
        .map(|b| b.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
    let mut changed = Vec::new();
    for (key, value) in [("eps", ours.eps), ("momentum", ours.momentum), ("weight_decay", ours.weight_decay)]
    {
        match given(key).map(|stored| (stored, stored.as_f64())) {
            Some((_, Some(stored))) if stored != value => {
                changed.push(format!("{key} {value} (checkpoint: {stored})"));
            }
            // Adafactor has two values of `eps`.
            Some((stored, None)) if key != "eps" => {
                changed.push(format!("{key} {value} (checkpoint: {stored})"));
            }
            _ => {}
        }
    }
    if let Some(stored) = betas.filter(|b| b.as_slice() != [ours.betas.0, ours.betas.1]) {
        changed.push(format!("betas {:?} (checkpoint: {stored:?})", [ours.betas.0, ours.betas.1]));
    }
    // Options of torch's optimizers that launch does not have, each with the value that is not
    // supported.
    let unsupported = [("amsgrad", true), ("maximize", true), ("decoupled_weight_decay", false)];
    for (key, value) in unsupported {
        let weight_decay = given("weight_decay").and_then(Value::as_f64);
        let matters = key != "decoupled_weight_decay" || weight_decay != Some(0.0);
        if matters && stored.get(key).and_then(Value::as_bool) == Some(value) {
            changed.push(format!("{key} {} (checkpoint: {value})", !value));
        }
    }
    changed
}

/// Returns a message if the job's learning rate for the next step differs from the learning rate
/// stored in the external checkpoint.
fn find_learning_rate_notice(
    ready: &UninitializedTrainer,
    stored_groups: &[ckpt::ParamGroupInfo],
    step: u64,
) -> Option<String> {
    let train = ready.train_spec();
    let ours = compute_learning_rate(&train.schedule, train.optimizer.lr, train.steps, step);
    let mut stored: Vec<f64> = stored_groups.iter().flat_map(list_learning_rates).collect();
    stored.dedup();
    let is_equal = stored.iter().all(|t| (t - ours).abs() <= 1e-9 * ours.abs().max(t.abs()));
    (!is_equal).then(|| {
        let stored: Vec<String> = stored.iter().map(f64::to_string).collect();
        format!(
            "the learning rate of the next step is {ours} by train.schedule (checkpoint: {})",
            stored.join(", ")
        )
    })
}

/// Returns the learning rates of a parameter group in a checkpoint of another program, which may be
/// one number or a list.
fn list_learning_rates(group: &ckpt::ParamGroupInfo) -> Vec<f64> {
    match group.hyper.get("lr") {
        Some(Value::Array(rates)) => rates.iter().filter_map(Value::as_f64).collect(),
        rate => rate.and_then(Value::as_f64).into_iter().collect(),
    }
}

/// Returns how many steps a learning rate scheduler had done, according to its state in a
/// checkpoint of DeepSpeed or torch. DeepSpeed's schedulers count from −1, torch's from 0.
fn read_scheduler_step(scheduler: &Value) -> Option<u64> {
    let number = |key: &str| scheduler.get(key).and_then(Value::as_i64);
    let position = number("last_epoch").or_else(|| number("last_batch_iteration")?.checked_add(1));
    position.and_then(|p| u64::try_from(p).ok())
}

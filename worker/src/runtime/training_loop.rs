//! The training loop: runs the steps and, between steps, saves, evaluations and reloads of the job
//! file.
use super::{session::AgentSession, step_clock::StepClock, step_times_collector::StepTimesCollector};
use crate::{
    checkpoint::save::CheckpointSaver,
    consensus::{all_gather_results, is_any_true},
    error::{Error, Result},
    train::{
        boundary_flags::{RELOAD, SAVE, STOP, WRITING},
        generation::GenerationRequest,
        loss_scale::LossScaleState,
        running_trainer::RunningTrainer,
        step::{RankStepReport, SampleSource, StepOutcome},
    },
};
use device::storage::BackendNotice;
use diagnostic::{Diagnostic, codes};
use jobspec::{JobSpec, ReloadValues, SaveInterval};
use protocol::{
    event::{Event, WorkerPhase},
    exit::WorkerExit,
    straggler::StragglerRules,
};
use std::time::{Duration, Instant};

/// The settings for evaluating the model on held-out samples: which samples, how many
/// micro-batches, after how many steps, and which text to generate.
pub(super) struct HeldOutEval<'a> {
    /// The held-out samples, in order.
    pub(super) source: &'a dyn SampleSource,
    /// The number of micro-batches that an evaluation uses.
    pub(super) micro_batches: usize,
    /// The number of steps between evaluations.
    pub(super) every: u64,
    /// The text to generate after each evaluation, and the decoder of its tokens.
    pub(super) generation: Option<(GenerationRequest, DecodeGeneratedText<'a>)>,
}

/// A function that converts the tokens of a prompt and the generated continuation to two texts: the
/// prompt and the continuation.
pub(super) type DecodeGeneratedText<'a> = Box<dyn Fn(&[u32]) -> Result<(String, String)> + 'a>;

/// What the training loop needs in addition to the trainer: the job, the connection to the agent
/// (launch's process on the host), and the samples.
pub(super) struct RunContext<'a> {
    /// The job of the run.
    pub(super) job: &'a JobSpec,
    /// The session with the agent.
    pub(super) session: &'a AgentSession,
    /// The training samples.
    pub(super) source: &'a dyn SampleSource,
    /// The evaluation, if the job has one.
    pub(super) held_out: Option<HeldOutEval<'a>>,
    /// Whether this rank reports events for all ranks.
    pub(super) is_leader: bool,
}

/// Trains until all steps are done or a stop is requested, with saves, evaluations and reloads of
/// the job file between steps. Returns whether the run is done or was stopped.
///
/// A stop request takes effect after the step, micro-batch of an evaluation, generated token or
/// foreground save in progress. Collective: every rank must call it.
pub(super) fn train_until_done(
    running: &mut RunningTrainer,
    run: &RunContext,
    saver: &mut CheckpointSaver,
) -> Result<WorkerExit> {
    let mut values = ReloadValues::from_job(run.job);
    saver.start_staging_allocation(running)?;
    let mut last_save = Instant::now();
    // A save that was requested during a skipped step follows the next completed step.
    let mut deferred_flags = 0;
    run.session.set_phase(WorkerPhase::Training)?;
    if !complete_resumed_step(running, run, saver)? {
        return Ok(WorkerExit::Stopped);
    }
    let mut clock = StepClock::default();
    let mut collector = create_times_collector(running, run);
    while !running.is_done() {
        let mut report = build_step_report(run, &values, saver, last_save);
        report.flags |= deferred_flags;
        let report = clock.add_times_to_report(running.trainer.engine.queue(), report);
        let began = Instant::now();
        let (outcome, lr) = running.run_step(run.source, report)?;
        let took = began.elapsed();
        clock.record_step(running.trainer.engine.queue(), took);
        report_step_times(running, run, &mut collector, &outcome)?;
        if outcome.skipped {
            deferred_flags = outcome.report.flags & SAVE;
            report_overflow(running, run, &outcome)?;
            continue;
        }
        deferred_flags = 0;
        if !has_finite_loss_and_norm(&outcome) {
            // complete the checkpoint in progress before the run ends
            finish_save(running, run, saver)?;
            return Err(build_non_finite_error(&outcome, running, saver));
        }
        let event = build_step_event(running, &outcome, lr, took);
        let flags = outcome.report.flags;
        let reload = match flags & RELOAD {
            0 => None,
            _ => apply_reloaded_job_values(running, run, &mut values)?,
        };
        complete_step(running, run, saver, &values, [Some(event), reload])?;
        report_backend_notice(running, run, took)?;
        if saver.has_pending_save() && flags & WRITING == 0 {
            finish_save(running, run, saver)?;
        }
        evaluate_and_copy(running, run, saver)?;
        let mut stop = flags & STOP != 0 || running.position.is_evaluation_due;
        let last = running.is_done();
        if stop || last || flags & SAVE != 0 || is_save_due(&values, running.position.step) {
            if stop {
                cancel_mostly_unwritten_save(running, run, saver)?;
            }
            save_checkpoint(running, run, saver, stop || last)?;
            last_save = Instant::now();
            stop = stop || is_stopping_after_save(running, run, saver)?;
        }
        if stop {
            break;
        }
    }
    finish_save(running, run, saver)?;
    report_skipped_steps(running, run)?;
    let is_complete = running.is_done() && !running.position.is_evaluation_due;
    Ok(if is_complete { WorkerExit::Done } else { WorkerExit::Stopped })
}

/// Performs the evaluation and the checkpoint save for the step from which this run resumed, if an
/// earlier run stopped before it had performed them. Returns false after a request to stop, which
/// leaves the evaluation due. Collective: every rank must call it.
fn complete_resumed_step(
    running: &mut RunningTrainer,
    run: &RunContext,
    saver: &mut CheckpointSaver,
) -> Result<bool> {
    let had_evaluation_due = running.position.is_evaluation_due;
    evaluate_if_due(running, run)?;
    let is_stopped = running.position.is_evaluation_due;
    // If the run resumed at the last step, the evaluation is complete now, or this is the first
    // native checkpoint after an external one. A run that stops must not lose copies in memory.
    let saves = match is_stopped {
        true => saver.is_unsaved_since_memory_resume(),
        false => running.is_done() && (had_evaluation_due || saver.must_save_without_new_step()),
    };
    if saves {
        save_checkpoint(running, run, saver, true)?;
    }
    Ok(!is_stopped)
}

/// Ends a step: copies the training state to the memory of hosts if such a copy is due, and then
/// sends `events`, which report the step. The first of `events` is that of the step. Collective:
/// every rank must call it.
///
/// A step is reported only when its copy is complete, so that a run that resumes from copies does
/// not report a step twice. The copy contains the step event, in case that the worker or its host
/// is lost before the event is sent.
fn complete_step(
    running: &mut RunningTrainer,
    run: &RunContext,
    saver: &mut CheckpointSaver,
    values: &ReloadValues,
    events: [Option<Event>; 2],
) -> Result<()> {
    running.position.is_evaluation_due = is_evaluation_due(running, run, values);
    if let ([Some(event), _], true) = (&events, run.is_leader) {
        saver.record_step_event(event);
    }
    let is_first = !saver.has_copied_to_memory();
    let cost = saver.copy_to_memory_if_due(running)?.filter(|_| is_first);
    run.session.set_step(running.position.step);
    let notice = cost.map(|cost| Event::new_notice(None, cost.to_string()));
    for event in events.into_iter().chain([notice]).flatten().filter(|_| run.is_leader) {
        run.session.send_event(event)?;
    }
    Ok(())
}

/// Evaluates the model if an evaluation is due after this step, and then copies the training state
/// to host memory so that a resumed run does not evaluate again. A run that resumes from this copy
/// does not repeat the evaluation. Collective: every rank must call it.
fn evaluate_and_copy(
    running: &mut RunningTrainer,
    run: &RunContext,
    saver: &mut CheckpointSaver,
) -> Result<()> {
    let evaluates = running.position.is_evaluation_due;
    evaluate_if_due(running, run)?;
    if evaluates && !running.position.is_evaluation_due {
        saver.copy_to_memory_if_due(running)?;
    }
    Ok(())
}

/// Builds the report that this rank sends to all ranks with the losses of a step: flags, such as
/// that of a stop request, and the rank's peak memory use. On the leader, takes a pending request
/// to save.
fn build_step_report(
    run: &RunContext,
    values: &ReloadValues,
    saver: &CheckpointSaver,
    last_save: Instant,
) -> RankStepReport {
    let timed = match values.checkpoint_every {
        SaveInterval::Duration(ms) => last_save.elapsed() >= Duration::from_millis(ms),
        SaveInterval::Never | SaveInterval::Steps(_) => false,
    };
    // a request reaches the ranks at different steps; only the leader acts on it, so that it is
    // served once
    let save = run.is_leader && (run.session.requests.take_save_request() || timed);
    let changed = run.is_leader && run.session.requests.has_reload_values();
    let bits = [
        (STOP, run.session.requests.is_stop_requested()),
        (SAVE, save),
        (WRITING, saver.is_writing_in_background()),
        (RELOAD, changed),
    ];
    let flags = bits.iter().filter(|(_, on)| *on).map(|(bit, _)| bit).sum();
    RankStepReport { flags, peak_rss: read_peak_resident_bytes(), ..RankStepReport::default() }
}

/// Creates the collector of the step times of all ranks, on rank 0 only.
fn create_times_collector(running: &RunningTrainer, run: &RunContext) -> Option<StepTimesCollector> {
    let spec = &run.job.run.straggler;
    let rules = spec.share.map(|share| StragglerRules { share, steps: spec.steps });
    let hosts = || running.trainer.engine.queue().comm().list_rank_hosts();
    run.is_leader.then(|| StepTimesCollector::new(rules, hosts(), Instant::now()))
}

/// Sends step times of all ranks from rank 0 to the controller of the run, if the interval for such
/// messages has passed.
fn report_step_times(
    running: &RunningTrainer,
    run: &RunContext,
    collector: &mut Option<StepTimesCollector>,
    outcome: &StepOutcome,
) -> Result<()> {
    let Some(collector) = collector else { return Ok(()) };
    let messages = collector.add_step(running.position.step, &outcome.rank_times, Instant::now());
    messages.iter().try_for_each(|message| run.session.send_message(message))
}

/// Distributes the values that rank 0 has reloaded from a changed job file to all ranks, and
/// applies the values on each rank. Returns the event that reports this. Collective: every rank
/// must call it.
fn apply_reloaded_job_values(
    running: &mut RunningTrainer,
    run: &RunContext,
    values: &mut ReloadValues,
) -> Result<Option<Event>> {
    let mine = if run.is_leader { run.session.requests.take_reload_values() } else { None };
    let reloaded = all_gather_results(running.trainer.engine.queue(), Ok(&mine))?;
    let Some(first) = reloaded.into_iter().next().transpose()?.flatten() else { return Ok(None) };
    if let Some(train) = &first.train {
        running.apply_reloaded_values(train);
    }
    *values = first;
    Ok(Some(Event::Reload { step: running.position.step, values: values.clone() }))
}

/// Sends the user a notice that the compute backend produced after a step, such as its choice
/// between CUDA graphs and single kernel launches.
///
/// The rank itself reports a notice about its device. The leader reports all other notices.
fn report_backend_notice(running: &RunningTrainer, run: &RunContext, took: Duration) -> Result<()> {
    let rank = Some(running.trainer.engine.rank() as u32);
    match running.trainer.ops.record_step_duration(took) {
        Some(BackendNotice::Degraded(warning)) => {
            run.session.send_event(Event::new_diagnostic_notice(rank, warning.to_string(), &warning))
        }
        Some(notice) if run.is_leader => run.session.send_event(Event::new_notice(None, notice.to_string())),
        _ => Ok(()),
    }
}

/// Returns whether step number `step` is a multiple of the number of steps in `checkpoint.every`,
/// after which a checkpoint must be saved.
fn is_save_due(values: &ReloadValues, step: u64) -> bool {
    matches!(values.checkpoint_every, SaveInterval::Steps(n) if step.is_multiple_of(n))
}

/// Returns whether the loss and the gradient norm are finite.
fn has_finite_loss_and_norm(outcome: &StepOutcome) -> bool {
    outcome.loss.is_finite() && outcome.grad_norm.is_finite()
}

/// Reports a step that was skipped because a gradient overflowed fp16.
fn report_overflow(running: &RunningTrainer, run: &RunContext, outcome: &StepOutcome) -> Result<()> {
    match running.trainer.loss_scale.checkpoint_state() {
        Some(state) if run.is_leader => run.session.send_event(Event::Overflow {
            step: running.position.step + 1,
            loss: outcome.loss,
            loss_scale: state.scale,
            skipped: state.skipped,
        }),
        _ => Ok(()),
    }
}

/// Reports how many steps of the run were skipped because fp16 gradients overflowed, at the end of
/// the run.
fn report_skipped_steps(running: &RunningTrainer, run: &RunContext) -> Result<()> {
    match running.trainer.loss_scale.checkpoint_state() {
        Some(LossScaleState { skipped, scale, .. }) if run.is_leader && skipped > 0 => {
            let steps = if skipped == 1 { "step" } else { "steps" };
            let message = format!(
                "skipped {skipped} {steps} since step 0 because gradients overflowed fp16; loss scale {scale}"
            );
            run.session.send_event(Event::new_notice(None, message))
        }
        _ => Ok(()),
    }
}

/// Returns advice on how to avoid an infinite or NaN loss or gradient, for the error message that
/// ends the run.
fn describe_non_finite_remedy(running: &RunningTrainer) -> String {
    match running.trainer.loss_scale.checkpoint_state() {
        Some(state) => {
            let scale = state.scale;
            format!(
                "the largest fp16 value is 65504 (loss scale {scale}): use `train.precision: bf16`, lower \
                 `train.optimizer.lr`, or examine the samples of that step"
            )
        }
        None => {
            "lower `train.optimizer.lr`, set `train.clip_norm`, or examine the samples of that step".into()
        }
    }
}

/// Builds the error that ends a run whose loss or gradient norm is infinite or NaN.
fn build_non_finite_error(outcome: &StepOutcome, running: &RunningTrainer, saver: &CheckpointSaver) -> Error {
    let (step, advice) = (running.position.step + 1, describe_non_finite_remedy(running));
    let what = if outcome.loss.is_finite() { "gradient norm" } else { "loss" };
    let value = if outcome.loss.is_finite() { outcome.grad_norm } else { outcome.loss };
    let checkpoint = match saver.last_checkpoint() {
        Some(path) => format!("the last complete checkpoint is {}", path.display()),
        None => "no checkpoint has been written".into(),
    };
    let code = match outcome.loss.is_finite() {
        true => codes::training::GRADIENT_NOT_FINITE,
        false => codes::training::LOSS_NOT_FINITE,
    };
    let message = format!("the {what} is {value} at step {step}; the step was not applied; {checkpoint}");
    let checkpoint = saver.last_checkpoint().map(|path| path.display().to_string());
    Diagnostic::error(code, message)
        .with_field("step", step)
        .with_field("checkpoint", checkpoint)
        .with_help(advice)
        .into()
}

/// Builds the event that reports a completed optimizer step with its loss, gradient norm, learning
/// rate and duration.
fn build_step_event(running: &RunningTrainer, outcome: &StepOutcome, lr: f64, took: Duration) -> Event {
    let tokens_per_step = running.trainer.global_batch_size() * u64::from(running.train_spec().data.seq_len);
    Event::Step {
        step: running.position.step,
        loss: outcome.loss,
        grad_norm: outcome.grad_norm,
        lr,
        tokens: running.position.tokens,
        tokens_per_s: tokens_per_step as f64 / took.as_secs_f64(),
        peak_rss: outcome.report.peak_rss,
        exposed_comm_s: outcome.report.exposed_comm,
    }
}

/// Returns whether the job requires an evaluation after the step that was just completed.
fn is_evaluation_due(running: &RunningTrainer, run: &RunContext, values: &ReloadValues) -> bool {
    let Some(held_out) = &run.held_out else { return false };
    let every = values.train.as_ref().and_then(|t| t.eval_every).unwrap_or(held_out.every);
    running.position.step.is_multiple_of(every) || running.is_done()
}

/// Evaluates the model and generates text if an evaluation is due, and reports the results. A stop
/// request ends the evaluation early and without results, so that the evaluation remains due.
/// Collective: every rank must call it.
fn evaluate_if_due(running: &mut RunningTrainer, run: &RunContext) -> Result<()> {
    let Some(held_out) = run.held_out.as_ref().filter(|_| running.position.is_evaluation_due) else {
        running.position.is_evaluation_due = false;
        return Ok(());
    };
    run.session.set_phase(WorkerPhase::Evaluating)?;
    let events = evaluate_held_out(running, run, held_out)?;
    running.position.is_evaluation_due = events.is_none();
    let interrupted = || {
        let step = running.position.step;
        let message = format!("interrupted the evaluation of step {step}; the resumed run repeats it");
        vec![Event::new_notice(None, message)]
    };
    for event in events.unwrap_or_else(interrupted).into_iter().filter(|_| run.is_leader) {
        run.session.send_event(event)?;
    }
    run.session.set_phase(WorkerPhase::Training)
}

/// Evaluates the model on held-out samples, and generates text if the job requests it. Returns the
/// events with the results, or `None` after a stop request. Collective: every rank must call it.
fn evaluate_held_out(
    running: &mut RunningTrainer,
    run: &RunContext,
    held_out: &HeldOutEval,
) -> Result<Option<Vec<Event>>> {
    let is_stopping = || run.session.requests.is_stop_requested();
    let (step, trainer) = (running.position.step, &mut running.trainer);
    let evaluated = trainer.evaluate(held_out.source, 0, held_out.micro_batches, &is_stopping)?;
    let Some(StepOutcome { loss, targets, .. }) = evaluated else { return Ok(None) };
    let mut events = vec![Event::Eval { step, loss, perplexity: loss.exp(), tokens: targets }];
    if let Some((request, decode)) = &held_out.generation {
        let Some(tokens) = request.generate(trainer, step, &is_stopping)? else { return Ok(None) };
        let (prompt, text) = decode(&tokens)?;
        events.push(Event::Sample { step, prompt, text });
    }
    Ok(Some(events))
}

/// Starts to save a checkpoint of the training state, and waits for its completion unless the job
/// allows saves in the background. If `wait` is set or saves do not run in the background, returns
/// only when the checkpoint is complete. Collective: every rank must call it.
fn save_checkpoint(
    running: &mut RunningTrainer,
    run: &RunContext,
    saver: &mut CheckpointSaver,
    wait: bool,
) -> Result<()> {
    run.session.set_phase(WorkerPhase::Saving)?;
    finish_save(running, run, saver)?;
    saver.begin_save(running)?;
    if let Some(message) = saver.take_staging_notice() {
        run.session.send_event(Event::new_notice(Some(running.trainer.engine.rank() as u32), message))?;
    }
    if wait || !run.job.checkpoint.r#async {
        finish_save(running, run, saver)?;
    }
    run.session.set_phase(WorkerPhase::Training)
}

/// Returns whether the run ends now because no save is running and any rank was requested to stop
/// during the save that has just completed. The run then ends with this checkpoint, without another
/// step and save. Collective: every rank must call it.
fn is_stopping_after_save(
    running: &RunningTrainer,
    run: &RunContext,
    saver: &CheckpointSaver,
) -> Result<bool> {
    let is_requested = run.session.requests.is_stop_requested();
    Ok(!saver.has_pending_save() && is_any_true(running.trainer.engine.queue(), is_requested)?)
}

/// Cancels the background save of a checkpoint if a rank has written less than half of its shard,
/// because the stopping run saves a newer checkpoint anyway. Collective: every rank must call it.
fn cancel_mostly_unwritten_save(
    running: &RunningTrainer,
    run: &RunContext,
    saver: &mut CheckpointSaver,
) -> Result<()> {
    match saver.cancel_mostly_unwritten_save(running)? {
        Some(step) if run.is_leader => {
            let message = format!("cancelled the save of step {step}, because the run saves and stops");
            run.session.send_event(Event::new_notice(None, message))
        }
        _ => Ok(()),
    }
}

/// Completes the save of a checkpoint that is in progress, and reports the saved checkpoint. Does
/// nothing if no checkpoint is in progress. Collective: every rank must call it.
fn finish_save(running: &RunningTrainer, run: &RunContext, saver: &mut CheckpointSaver) -> Result<()> {
    match saver.finish_and_commit_save(running)? {
        Some(done) if run.is_leader => run.session.send_event(Event::Checkpoint {
            step: done.step,
            path: done.path,
            bytes: done.bytes,
            seconds: done.seconds,
        }),
        _ => Ok(()),
    }
}

/// Reads the largest resident set of this process so far, in bytes. Returns 0 if the size is
/// unknown.
pub fn read_peak_resident_bytes() -> u64 {
    // VmHWM counts this program only; the figure of getrusage survives exec and includes the
    // parent's
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

//! The run: steps, and what happens between them.
use super::{
    boundary::{RELOAD, SAVE, STOP, WRITING},
    loss_scale::State,
    sample::Sampling,
    step::{Outcome, Source, Word},
};
use crate::{
    agree::exchange,
    error::{Error, Result},
    save::Saver,
    session::Session,
    stages::Running,
};
use contract::{
    event::{Event, Phase},
    exit::WorkerExit,
    job::{Every, JobSpec, Reload},
};
use device::storage::Said;
use std::time::{Duration, Instant};

/// Held-out samples.
pub struct HeldOut<'a> {
    /// The samples, in order.
    pub source: &'a dyn Source,
    /// How many slots are evaluated.
    pub slots: usize,
    /// Steps between evaluations.
    pub every: u64,
    /// What the model goes on with after each, and how its tokens become a text.
    pub sample: Option<(Sampling, Show<'a>)>,
}

/// The text of a sampled continuation, as an event's prompt and text.
pub type Show<'a> = Box<dyn Fn(&[u32]) -> Result<(String, String)> + 'a>;

/// What a run works with.
pub struct Run<'a> {
    /// The job.
    pub job: &'a JobSpec,
    /// The link to the agent.
    pub session: &'a Session,
    /// Training samples.
    pub source: &'a dyn Source,
    /// Held-out samples, when the job asks for them.
    pub held_out: Option<HeldOut<'a>>,
    /// Reports for all ranks.
    pub leader: bool,
}

/// Takes steps until all are done or a stop is asked for; returns how it ended.
pub fn run(running: &mut Running, run: &Run, saver: &mut Saver) -> Result<WorkerExit> {
    let mut values = Reload::of(run.job);
    saver.prepare(running)?;
    let mut last_save = Instant::now();
    // Asked for in a step that was skipped: the next one that counts is saved.
    let mut owed = 0;
    run.session.phase(Phase::Training)?;
    if running.at.step >= running.train().steps && saver.last().is_none() {
        // Resumed at the end from another program's checkpoint: the run leaves one of its own all the same.
        save(running, run, saver, true)?;
    }
    while running.at.step < running.train().steps {
        let began = Instant::now();
        let mut word = word(running, run, &values, saver, last_save);
        word.flags |= owed;
        let (outcome, lr) = running.step(run.source, word)?;
        if outcome.skipped {
            owed = outcome.word.flags & SAVE;
            skipped(running, run, &outcome)?;
            continue;
        }
        owed = 0;
        if !is_finite(&outcome) {
            // What was saved before is complete before the run ends.
            finish(running, run, saver)?;
            return Err(not_finite(&outcome, running, saver));
        }
        run.session.at_step(running.at.step);
        let took = began.elapsed();
        if run.leader {
            run.session.event(step_event(running, &outcome, lr, took))?;
        }
        ways(running, run, took)?;
        let flags = outcome.word.flags;
        if saver.pending() && flags & WRITING == 0 {
            finish(running, run, saver)?;
        }
        if flags & RELOAD != 0 {
            reload(running, run, &mut values)?;
        }
        let last = running.at.step >= running.train().steps;
        evaluate(running, run, &values)?;
        let stop = flags & STOP != 0;
        if stop || last || flags & SAVE != 0 || due(&values, running.at.step) {
            save(running, run, saver, stop || last)?;
            last_save = Instant::now();
        }
        if stop && !last {
            all_skipped(running, run)?;
            return Ok(WorkerExit::Stopped);
        }
    }
    finish(running, run, saver)?;
    all_skipped(running, run)?;
    Ok(WorkerExit::Done)
}

fn word(running: &Running, run: &Run, values: &Reload, saver: &Saver, last_save: Instant) -> Word {
    let timed = match values.checkpoint_every {
        Every::Duration(ms) => last_save.elapsed() >= Duration::from_millis(ms),
        Every::Never | Every::Steps(_) => false,
    };
    // One ask reaches the ranks at slightly different moments: only the leader's counts, or it would be answered twice.
    let save = run.leader && (run.session.asks.take_save() || timed);
    let changed = run.leader && run.session.asks.reload();
    let bits = [(STOP, run.session.asks.stop()), (SAVE, save), (WRITING, saver.writing()), (RELOAD, changed)];
    let flags = bits.iter().filter(|(_, on)| *on).map(|(bit, _)| bit).sum();
    Word { flags, peak_rss: peak_rss(), exposed_comm: running.trainer.engine.queue().exposed() }
}

/// All ranks go on with the values that rank 0 has.
fn reload(running: &mut Running, run: &Run, values: &mut Reload) -> Result<()> {
    let mine = if run.leader { run.session.asks.take_reload() } else { None };
    let all = exchange(running.trainer.engine.queue(), Ok(&mine))?;
    let Some(first) = all.into_iter().next().transpose()?.flatten() else { return Ok(()) };
    if let Some(train) = &first.train {
        running.reload(train);
    }
    *values = first;
    if run.leader {
        run.session.event(Event::Reload { step: running.at.step, values: values.clone() })?;
    }
    Ok(())
}

/// What the backend found out about the ways that it has. What doesn't work is a matter of each rank.
fn ways(running: &Running, run: &Run, took: Duration) -> Result<()> {
    let rank = Some(running.trainer.engine.rank() as u32);
    match running.trainer.ops.step_took(took) {
        Some(Said::Found(message)) if run.leader => run.session.event(Event::Notice { rank: None, message }),
        Some(Said::Failed(message)) => run.session.event(Event::Notice { rank, message }),
        Some(Said::Found(_)) | None => Ok(()),
    }
}

fn due(values: &Reload, step: u64) -> bool {
    matches!(values.checkpoint_every, Every::Steps(n) if step.is_multiple_of(n))
}

fn is_finite(outcome: &Outcome) -> bool {
    outcome.loss.is_finite() && outcome.grad_norm.is_finite()
}

/// fp16: a gradient overflowed, and the loss is scaled less from now on.
fn skipped(running: &Running, run: &Run, outcome: &Outcome) -> Result<()> {
    match running.trainer.loss_scale.state() {
        Some(state) if run.leader => run.session.event(Event::Overflow {
            step: running.at.step + 1,
            loss: outcome.loss,
            loss_scale: state.scale,
            skipped: state.skipped,
        }),
        _ => Ok(()),
    }
}

/// The count, once more at the end of the run.
fn all_skipped(running: &Running, run: &Run) -> Result<()> {
    match running.trainer.loss_scale.state() {
        Some(State { skipped, scale, .. }) if run.leader && skipped > 0 => {
            let steps = if skipped == 1 { "step was" } else { "steps were" };
            let message = format!(
                "{skipped} {steps} skipped since step 0 because a gradient overflowed fp16; the loss scale is {scale}"
            );
            run.session.event(Event::Notice { rank: None, message })
        }
        _ => Ok(()),
    }
}

/// What helps, as far as the precision has a part in it.
fn advice(running: &Running) -> String {
    match running.trainer.loss_scale.state() {
        Some(state) => {
            let scale = state.scale;
            format!(
                "fp16 ends at 65504 (loss scale {scale}): use precision: bf16, lower optimizer.lr, or look at the samples of that step"
            )
        }
        None => "Lower optimizer.lr, set clip_norm, or look at the samples of that step".into(),
    }
}

/// A loss that is not a number ends the run before it spoils a checkpoint.
fn not_finite(outcome: &Outcome, running: &Running, saver: &Saver) -> Error {
    let (step, advice) = (running.at.step + 1, advice(running));
    let what = if outcome.loss.is_finite() { "gradient norm" } else { "loss" };
    let value = if outcome.loss.is_finite() { outcome.grad_norm } else { outcome.loss };
    let kept = match saver.last() {
        Some(path) => format!("the last complete checkpoint is {}", path.display()),
        None => "no checkpoint was written yet".into(),
    };
    Error::failed(format!(
        "the {what} became {value} at step {step}; nothing of that step was applied; {kept}. {advice}"
    ))
}

fn step_event(running: &Running, outcome: &Outcome, lr: f64, took: Duration) -> Event {
    let tokens_per_step = running.trainer.global_batch() * u64::from(running.train().data.seq_len);
    Event::Step {
        step: running.at.step,
        loss: outcome.loss,
        grad_norm: outcome.grad_norm,
        lr,
        tokens: running.at.tokens,
        tokens_per_s: tokens_per_step as f64 / took.as_secs_f64(),
        peak_rss: outcome.word.peak_rss,
        exposed_comm_s: outcome.word.exposed_comm,
    }
}

fn evaluate(running: &mut Running, run: &Run, values: &Reload) -> Result<()> {
    let Some(h) = &run.held_out else { return Ok(()) };
    let step = running.at.step;
    let every = values.train.as_ref().and_then(|t| t.eval_every).unwrap_or(h.every);
    if !step.is_multiple_of(every) && step < running.train().steps {
        return Ok(());
    }
    run.session.phase(Phase::Evaluating)?;
    let outcome = running.trainer.evaluate(h.source, 0, h.slots)?;
    if run.leader {
        let (loss, tokens) = (outcome.loss, outcome.targets);
        run.session.event(Event::Eval { step, loss, perplexity: loss.exp(), tokens })?;
    }
    if let Some((asked, show)) = &h.sample {
        let tokens = running.trainer.sample(asked, step)?;
        if run.leader {
            let (prompt, text) = show(&tokens)?;
            run.session.event(Event::Sample { step, prompt, text })?;
        }
    }
    run.session.phase(Phase::Training)
}

fn save(running: &mut Running, run: &Run, saver: &mut Saver, wait: bool) -> Result<()> {
    run.session.phase(Phase::Saving)?;
    finish(running, run, saver)?;
    saver.begin(running)?;
    if let Some(message) = saver.notice() {
        run.session.event(Event::Notice { rank: Some(running.trainer.engine.rank() as u32), message })?;
    }
    if wait || !run.job.checkpoint.r#async {
        finish(running, run, saver)?;
    }
    run.session.phase(Phase::Training)
}

/// Completes the checkpoint under way, if there is one.
fn finish(running: &Running, run: &Run, saver: &mut Saver) -> Result<()> {
    match saver.finish(running)? {
        Some(done) if run.leader => run.session.event(Event::Checkpoint {
            step: done.step,
            path: done.path,
            bytes: done.bytes,
            seconds: done.seconds,
        }),
        _ => Ok(()),
    }
}

/// Largest resident set of this process so far, bytes.
pub fn peak_rss() -> u64 {
    // VmHWM is of this program alone; getrusage's figure survives exec and would count the parent's.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

//! What is shown of each thing that happens.
use super::{
    Item, Setup, Summary,
    curve::Curve,
    live::Console,
    text::{activity, by_rank, bytes, clock, harmless, short, took},
};
use crate::controller::advice;
use contract::{
    event::{Event, Phase},
    ids::Rank,
};
use std::{
    collections::BTreeMap,
    io::{self, IsTerminal},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Without a terminal: at most this long without a step line while steps are made.
const STEP_LINE_EVERY: Duration = Duration::from_secs(10);
/// Without a terminal: about this many step lines in a run.
const STEP_LINES: u64 = 20;
/// The time of a step is averaged over about this many seconds.
const PACE_SECONDS: f64 = 10.0;

/// What is known of the run so far, and where it is shown.
pub(super) struct View {
    setup: Setup,
    console: Console,
    phases: BTreeMap<Rank, Phase>,
    curve: Curve,
    total_steps: u64,
    last_step: Option<(u64, Instant)>,
    /// Average seconds of a step.
    pace: f64,
    last_line: Option<Instant>,
    /// The numbers of the last step, for the live line.
    numbers: String,
    checkpoint: Option<(u64, PathBuf)>,
    weights: Option<PathBuf>,
    failed: bool,
}

impl View {
    pub(super) fn new(setup: Setup) -> Self {
        // Two streams on one terminal: event lines on stdout would tear the live view on stderr.
        let live = !(setup.json && io::stdout().is_terminal());
        let mut view = View {
            setup,
            console: Console::new(live),
            phases: BTreeMap::new(),
            curve: Curve::default(),
            total_steps: 0,
            last_step: None,
            pace: 0.0,
            last_line: None,
            numbers: String::new(),
            checkpoint: None,
            weights: None,
            failed: false,
        };
        view.status(None);
        view
    }

    pub(super) fn show(&mut self, item: Item) {
        match item {
            Item::Event(event) => self.event(&event),
            Item::Line { rank, stderr, text } => self.line(rank, stderr, &text),
            Item::Progress { rank, phase } => {
                if self.phases.insert(rank, phase) != Some(phase) {
                    self.status(None);
                }
            }
            Item::Talk(text) => {
                if !text.is_empty() {
                    self.console.talk(&harmless(&text));
                }
            }
            Item::Finish(summary) => self.finish(&summary),
        }
    }

    fn line(&mut self, rank: Rank, stderr: bool, text: &str) {
        let prefix = if self.setup.prefix { format!("[rank {rank}] ") } else { String::new() };
        // On a pipe or in a file the worker's bytes are the reader's business; a terminal is protected.
        // What the built-in runtime prints is talk.
        if stderr || self.setup.json || self.setup.builtin {
            let text = if io::stderr().is_terminal() { harmless(text) } else { text.to_owned() };
            self.console.talk(&format!("{prefix}{text}"));
        } else {
            let text = if io::stdout().is_terminal() { harmless(text) } else { text.to_owned() };
            self.console.data(&format!("{prefix}{text}"));
        }
    }

    fn event(&mut self, event: &Event) {
        if self.setup.json
            && let Ok(line) = serde_json::to_string(event)
        {
            self.console.data(&line);
        }
        match event {
            Event::Start { run, run_dir, world } => {
                if self.setup.builtin {
                    let s = if *world == 1 { "" } else { "s" };
                    self.say(&format!("run {run}: {world} worker{s}, files in {}", run_dir.display()));
                }
            }
            Event::Ready { step, total_steps, parameters, tokens_per_step } => {
                self.total_steps = *total_steps;
                self.console.steps(*total_steps, *step);
                let (parameters, tokens) = (short(*parameters as f64), short(*tokens_per_step as f64));
                self.say(&format!("training {parameters} parameters from step {step} to {total_steps}, {tokens} tokens a step"));
            }
            Event::Resume { step, path, world, stage } => {
                let by = format!("written by {world} workers at ZeRO stage {stage}");
                self.say(&format!("going on from step {step} of {} ({by})", path.display()));
            }
            Event::Step { .. } => self.step(event),
            Event::Eval { step, loss, perplexity, .. } => {
                self.say(&format!("step {step}: held-out loss {loss:.4}, perplexity {perplexity:.2}"));
            }
            Event::Checkpoint { step, path, bytes: size, seconds } => {
                self.checkpoint = Some((*step, path.clone()));
                let size = bytes(*size);
                self.say(&format!("step {step}: checkpoint {} ({size} in {seconds:.1} s)", path.display()));
            }
            Event::Gathered { step, path, bytes: size } => {
                self.weights = Some(path.clone());
                self.say(&format!("step {step}: weights {} ({})", path.display(), bytes(*size)));
            }
            Event::Notice { rank: None, message } => self.say(message),
            Event::Notice { rank: Some(rank), message } => self.say(&format!("rank {rank}: {message}")),
            Event::Failure { .. } => self.failure(event),
            Event::Done { .. } => {}
        }
    }

    fn say(&mut self, text: &str) {
        self.console.talk(&format!("launch: {}", harmless(text)));
    }

    // ---- steps ----

    fn step(&mut self, event: &Event) {
        let Event::Step { step, loss, grad_norm, lr, tokens_per_s, .. } = event else { return };
        self.curve.push(*step, *loss);
        let now = Instant::now();
        if let Some((before, at)) = self.last_step {
            let took = (now - at).as_secs_f64();
            let each = took / step.saturating_sub(before).max(1) as f64;
            let weight = if self.pace == 0.0 { 1.0 } else { 1.0 - (-took / PACE_SECONDS).exp() };
            self.pace += weight * (each - self.pace);
        }
        self.last_step = Some((*step, now));
        self.numbers = format!("loss {loss:.4}  {} tokens/s", short(*tokens_per_s));
        self.status(Some(*step));
        let spacing = self.total_steps.div_ceil(STEP_LINES).max(1);
        let due = self.last_line.is_none_or(|at| now - at >= STEP_LINE_EVERY)
            || step % spacing == 0
            || *step == self.total_steps;
        if due && !self.console.is_live() && !self.setup.json {
            self.last_line = Some(now);
            let speed = short(*tokens_per_s);
            let of = self.total_steps;
            self.console.talk(&format!(
                "step {step}/{of}  loss {loss:.4}  grad norm {grad_norm:.3}  lr {lr:.3e}  {speed} tokens/s"
            ));
        }
    }

    /// Brings the live line up to date.
    fn status(&mut self, done: Option<u64>) {
        if !self.console.is_live() {
            return;
        }
        let mut parts = Vec::new();
        if !self.numbers.is_empty() {
            parts.push(self.numbers.clone());
            let left = self.last_step.map_or(0, |(step, _)| self.total_steps.saturating_sub(step));
            parts.push(format!("{} left", clock(left as f64 * self.pace)));
        }
        parts.push(if self.setup.builtin {
            activity(&self.phases)
        } else {
            format!("{} workers run", self.setup.world)
        });
        self.console.status(done, parts.join("  "));
    }

    // ---- the end ----

    fn failure(&mut self, event: &Event) {
        let Event::Failure { rank, host, pid, cause, log, tail } = event else { return };
        self.failed = true;
        self.console.clear();
        let who = match rank {
            Some(rank) if *pid != 0 => format!("rank {rank} (pid {pid} on {host}): "),
            Some(rank) => format!("rank {rank} (on {host}): "),
            None => String::new(),
        };
        self.say(&format!("failed: {who}{cause}"));
        if !tail.is_empty() {
            self.console.talk("  the last lines of its output:");
        }
        for line in tail {
            self.console.talk(&format!("  | {}", harmless(line)));
        }
        if let Some(log) = log.as_ref().filter(|_| *pid != 0) {
            self.console.talk(&format!("  all of it: {}", log.display()));
        }
        if let Some(advice) = advice(cause) {
            self.console.talk(&format!("  what to do: {advice}"));
        }
    }

    fn finish(&mut self, summary: &Summary) {
        self.console.clear();
        for (ranks, how) in by_rank(summary.others.iter().map(|(r, how)| (*r, how))) {
            self.console.talk(&format!("  then: rank {ranks}: {how}"));
        }
        if self.setup.builtin && !self.setup.json {
            self.curve.draw().iter().for_each(|line| self.console.talk(line));
        }
        let time = took(summary.seconds);
        match summary {
            _ if self.failed => {}
            Summary { killed: true, .. } => {
                self.say(&format!("killed after {time}; nothing was saved since the last checkpoint"))
            }
            Summary { stopped: true, .. } => self.say(&format!("stopped after {time}")),
            Summary { exit_code: 0, .. } => self.say(&format!("done in {time}")),
            Summary { exit_code, .. } => self.say(&format!("ended with exit code {exit_code}")),
        }
        self.whereabouts(summary);
    }

    /// Where things lie, and how to go on.
    fn whereabouts(&mut self, summary: &Summary) {
        let weights = self.weights.as_ref().map(|path| format!("  weights     {}", path.display()));
        let checkpoint = self
            .checkpoint
            .as_ref()
            .map(|(step, path)| format!("  checkpoint  {} (step {step})", path.display()));
        let files = Some(format!("  run files   {}", summary.run_dir.display()));
        let go_on = self.setup.builtin && (self.failed || summary.stopped);
        let go_on = go_on.then(|| format!("  to go on    {}", summary.resume));
        for line in [weights, checkpoint, files, go_on].into_iter().flatten() {
            self.console.talk(&line);
        }
    }
}

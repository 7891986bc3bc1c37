//! What is shown of each thing that happens.
use super::{
    Item, Setup, Summary,
    dedup::{Deduplicator, Line},
    curve::Curve,
    limit::{Limit, Verdict},
    live::Console,
    sentence::{failed, sentence},
    text::{activity, by_rank, clock, harmless, ranks, short, took},
};
use crate::controller::{Other, advice};
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
    collapse: Deduplicator,
    limit: Limit,
    began: Instant,
    /// Are stdout and stderr terminals?
    terminals: (bool, bool),
}

impl View {
    pub(super) fn new(setup: Setup) -> Self {
        // Two streams on one terminal: event lines on stdout would tear the live view on stderr.
        let live = !(setup.json && io::stdout().is_terminal());
        let collapse = Deduplicator::new(setup.shown);
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
            collapse,
            limit: Limit::new(),
            began: Instant::now(),
            terminals: (io::stdout().is_terminal(), io::stderr().is_terminal()),
        };
        view.status(None);
        view
    }

    pub(super) fn show(&mut self, item: Item) {
        // What a rank said before something happened is shown before it.
        if !matches!(item, Item::Line { .. } | Item::Progress { .. }) {
            let lines = self.collapse.flush();
            self.lines(lines);
        }
        match item {
            Item::Event(event) => self.event(&event),
            Item::Line { rank, stderr, text } => self.line(rank, stderr, text),
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

    fn line(&mut self, rank: Rank, stderr: bool, text: String) {
        if self.setup.prefix {
            let lines = self.collapse.push(self.began.elapsed(), rank, stderr, text);
            self.lines(lines);
        } else {
            self.write(String::new(), stderr, &text);
        }
    }

    /// How long nothing needs to be done when nothing comes.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.collapse.deadline().map(|at| at.saturating_sub(self.began.elapsed()))
    }

    /// Shows the lines that have waited long enough.
    pub(super) fn on_time(&mut self) {
        let lines = self.collapse.due(self.began.elapsed());
        self.lines(lines);
    }

    fn lines(&mut self, lines: Vec<Line>) {
        for line in lines {
            let all: Vec<Rank> = line.ranks.into_iter().collect();
            let s = if all.len() == 1 { "" } else { "s" };
            self.write(format!("[rank{s} {}] ", ranks(&all)), line.stderr, &line.text);
        }
    }

    /// Says that lines were left out.
    fn left_out(&mut self, count: u64) {
        let (s, logs) = (if count == 1 { "" } else { "s" }, self.setup.logs.display());
        self.console.talk(&format!("[{count} line{s} left out here: {logs} has all of them]"));
    }

    fn write(&mut self, prefix: String, stderr: bool, text: &str) {
        // A file or another program takes what it gets; a person reads only so fast.
        let talk = stderr || self.setup.json || self.setup.builtin;
        let person = self.setup.detached || if talk { self.terminals.1 } else { self.terminals.0 };
        let verdict = if person { self.limit.line(self.began.elapsed()) } else { Verdict::Show };
        match verdict {
            Verdict::Show => {}
            Verdict::ShowAfter(count) => self.left_out(count),
            Verdict::LeaveOut => return,
            Verdict::Tell(count) => return self.left_out(count),
        }
        // On a pipe or in a file the worker's bytes are the reader's business; a terminal is protected.
        // What the built-in runtime prints is talk.
        if talk {
            let text = if self.terminals.1 { harmless(text) } else { text.to_owned() };
            self.console.talk(&format!("{prefix}{text}"));
        } else {
            let text = if self.terminals.0 { harmless(text) } else { text.to_owned() };
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
            Event::Start { .. } if !self.setup.builtin => {}
            Event::Step { .. } => self.step(event),
            Event::Done { .. } => {}
            Event::Failure { .. } => self.failure(event),
            Event::Restart { .. } => self.restart(event),
            _ => {
                self.note(event);
                self.say(&sentence(event));
            }
        }
    }

    /// Keeps what the last words and the live line need.
    fn note(&mut self, event: &Event) {
        match event {
            Event::Ready { step, total_steps, .. } => {
                self.total_steps = *total_steps;
                self.console.steps(*total_steps, *step);
            }
            Event::Checkpoint { step, path, .. } => self.checkpoint = Some((*step, path.clone())),
            Event::Gathered { path, .. } => self.weights = Some(path.clone()),
            Event::Reload { step, values } => {
                if let Some(train) = &values.train {
                    self.total_steps = train.steps;
                    self.console.steps(train.steps, *step);
                }
            }
            Event::Placed { world, .. } => {
                self.setup.world = *world;
                self.phases.clear();
            }
            _ => {}
        }
    }

    fn say(&mut self, text: &str) {
        self.console.talk(&format!("launch: {}", harmless(text)));
    }

    // ---- steps ----

    fn step(&mut self, event: &Event) {
        let Event::Step { step, loss, grad_norm, lr, tokens_per_s, exposed_comm_s, .. } = event else {
            return;
        };
        self.curve.push(*step, *loss);
        let now = Instant::now();
        if let Some((before, at)) = self.last_step {
            let took = (now - at).as_secs_f64();
            let each = took / step.saturating_sub(before).max(1) as f64;
            let weight = if self.pace == 0.0 { 1.0 } else { 1.0 - (-took / PACE_SECONDS).exp() };
            self.pace += weight * (each - self.pace);
        }
        self.last_step = Some((*step, now));
        let speed =
            format!("{} tokens/s{}", short(*tokens_per_s), in_collectives(*exposed_comm_s, self.pace));
        self.numbers = format!("loss {loss:.4}  {speed}");
        self.status(Some(*step));
        let spacing = self.total_steps.div_ceil(STEP_LINES).max(1);
        let due = self.last_line.is_none_or(|at| now - at >= STEP_LINE_EVERY)
            || step % spacing == 0
            || *step == self.total_steps;
        if due && !self.console.is_live() && !self.setup.json {
            self.last_line = Some(now);
            let of = self.total_steps;
            self.console.talk(&format!(
                "step {step}/{of}  loss {loss:.4}  grad norm {grad_norm:.3}  lr {lr:.3e}  {speed}"
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
        self.say(&failed(*rank, host, *pid, cause));
        self.cause(*pid, cause, log.as_ref(), tail);
    }

    fn restart(&mut self, event: &Event) {
        let Event::Restart { epoch, left, pause_s, rank, host, pid, cause, log, tail } = event else {
            return;
        };
        self.say(&failed(*rank, host, *pid, cause));
        self.cause(*pid, cause, log.as_ref(), tail);
        let total = u64::from(*epoch) + u64::from(*left);
        self.say(&format!("restart {epoch} of {total} in {pause_s:.1} s"));
    }

    /// What is known of a failure beside its sentence.
    fn cause(&mut self, pid: u32, cause: &str, log: Option<&PathBuf>, tail: &[String]) {
        if !tail.is_empty() {
            self.console.talk("  the last lines of its output:");
        }
        for line in tail {
            self.console.talk(&format!("  | {}", harmless(line)));
        }
        if let Some(log) = log.filter(|_| pid != 0) {
            self.console.talk(&format!("  all of it: {}", log.display()));
        }
        if let Some(advice) = advice(cause) {
            self.console.talk(&format!("  what to do: {advice}"));
        }
    }

    fn finish(&mut self, summary: &Summary) {
        if let count @ 1.. = self.limit.take() {
            self.left_out(count);
        }
        self.console.clear();
        let ends: Vec<(Rank, String)> = summary.others.iter().map(|o| (o.rank, self.end_of(o))).collect();
        for (ranks, how) in by_rank(ends.iter().map(|(rank, how)| (*rank, how))) {
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

    /// How another rank ended; with several hosts also where.
    fn end_of(&self, other: &Other) -> String {
        if self.setup.hosts > 1 { format!("{} (on {})", other.how, other.host) } else { other.how.clone() }
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

/// How much of a step computation waits for collectives, where that is worth a word. Both in seconds.
fn in_collectives(exposed: f64, step: f64) -> String {
    let share = if step > 0.0 { (exposed / step).min(1.0) } else { 0.0 };
    if share < 0.05 { String::new() } else { format!("  {:.0} % in collectives", 100.0 * share) }
}

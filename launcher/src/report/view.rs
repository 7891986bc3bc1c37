//! Defines [`RunView`], which shows the events, the workers' output lines and the messages of a run
//! on the console. The reporting thread owns the view.
use super::{
    console::Console,
    deduplicator::{Deduplicator, MergedLine},
    event_text::{format_event, format_failure, format_restart},
    line_rate_limit::{LineDecision, LineRateLimit},
    loss_curve::LossCurve,
    report_item::{ReportConfig, ReportItem, RunSummary},
    resume_command::format_resume_command,
};
use crate::{
    format::{format_number, format_phases, format_rank_label, format_ranks, group_ranks_by_value},
    worker_end::PeerWorkerEnd,
};
use diagnostic::{
    quantity::{format_clock, format_count, format_duration},
    terminal_text::{escape_unprintable_in_json, filter_line},
};
use jobspec::ids::Rank;
use protocol::event::{Event, FailureReport, WorkerPhase};
use std::{
    collections::BTreeMap,
    io::{self, IsTerminal},
    path::PathBuf,
    time::{Duration, Instant},
};

/// The time since the last printed step line after which a run without a progress bar prints the
/// next training step in any case. After this time, the next step gets a line, even if the step is
/// not one of the [`STEP_LINE_COUNT`]. Applies only without a progress bar.
const STEP_LINE_INTERVAL: Duration = Duration::from_secs(10);
/// The approximate number of lines about training steps that are shown during a run without a
/// progress bar.
const STEP_LINE_COUNT: u64 = 20;
/// The time constant of the exponential average of step durations, in seconds.
const STEP_TIME_AVERAGING_SECONDS: f64 = 10.0;
/// The smallest share of a step's duration, from 0 to 1, at which the time spent waiting for
/// collectives is shown to the user. Smaller shares are omitted.
const MIN_SHOWN_EXPOSED_SHARE: f64 = 0.05;

/// The state from which a run is shown on the console, such as the newest step, the losses and the
/// waiting output lines.
pub(super) struct RunView {
    config: ReportConfig,
    console: Console,
    phases: BTreeMap<Rank, WorkerPhase>,
    loss_curve: LossCurve,
    total_steps: u64,
    last_step: Option<(u64, Instant)>,
    /// The average duration of a step, in seconds; 0 before the second step.
    step_seconds: f64,
    last_step_line: Option<Instant>,
    /// The loss and the speed of the most recent step, as text for the progress bar.
    metrics: String,
    checkpoint: Option<(u64, PathBuf)>,
    weights: Option<PathBuf>,
    has_failed: bool,
    dedup: Deduplicator,
    rate_limit: LineRateLimit,
    started_at: Instant,
    stdout_is_terminal: bool,
    stderr_is_terminal: bool,
}

impl RunView {
    /// Creates the view of a run, with an empty loss curve and no shown steps or lines.
    pub(super) fn new(config: ReportConfig) -> Self {
        let stdout_is_terminal = io::stdout().is_terminal();
        // JSON lines on the same terminal would break the progress bar.
        let with_bar = config.json.is_none() || !stdout_is_terminal;
        let dedup = Deduplicator::new(config.shown_ranks);
        let mut view = RunView {
            config,
            console: Console::new(with_bar),
            phases: BTreeMap::new(),
            loss_curve: LossCurve::default(),
            total_steps: 0,
            last_step: None,
            step_seconds: 0.0,
            last_step_line: None,
            metrics: String::new(),
            checkpoint: None,
            weights: None,
            has_failed: false,
            dedup,
            rate_limit: LineRateLimit::new(),
            started_at: Instant::now(),
            stdout_is_terminal,
            stderr_is_terminal: io::stderr().is_terminal(),
        };
        view.update_bar(None);
        view
    }

    /// Shows an event, an output line, a message or another item from the reporting thread's queue
    /// on the console. Before an event, a message or the summary, shows all lines that wait for
    /// equal lines of other ranks.
    pub(super) fn show_item(&mut self, item: ReportItem) {
        // Lines that arrived before an event must be shown before the event.
        if !matches!(item, ReportItem::Line { .. } | ReportItem::Progress { .. }) {
            let lines = self.dedup.take_all_lines();
            self.show_lines(lines);
        }
        match item {
            ReportItem::Event(event) => self.show_event(&event),
            ReportItem::Context(event) => {
                self.update_summary_state(&event);
                self.write_message(&format_event(&event));
            }
            ReportItem::Line { rank, stderr, text } => self.queue_worker_line(rank, stderr, text),
            ReportItem::Progress { rank, phase } => {
                if self.phases.insert(rank, phase) != Some(phase) {
                    self.update_bar(None);
                }
            }
            ReportItem::Message(text) => {
                if !text.is_empty() {
                    self.console.write_stderr_line(&filter_line(&text));
                }
            }
            ReportItem::Finish(summary) => self.show_summary(&summary),
        }
    }

    /// Adds an output line of a worker to the lines that wait for equal lines of other ranks.
    fn queue_worker_line(&mut self, rank: Rank, stderr: bool, text: String) {
        if self.config.prefix {
            let lines = self.dedup.push_line(self.started_at.elapsed(), rank, stderr, text);
            self.show_lines(lines);
        } else {
            self.write_worker_line(String::new(), stderr, &text);
        }
    }

    /// Returns how long the caller must wait before it calls [`RunView::show_due_lines`], which
    /// shows the oldest waiting output line. Returns `None` if no line is waiting.
    pub(super) fn time_to_deadline(&self) -> Option<Duration> {
        self.dedup.next_line_deadline().map(|at| at.saturating_sub(self.started_at.elapsed()))
    }

    /// Shows the output lines that have waited long enough for equal lines of other ranks.
    pub(super) fn show_due_lines(&mut self) {
        let lines = self.dedup.take_due_lines(self.started_at.elapsed());
        self.show_lines(lines);
    }

    /// Writes output lines to the console, each preceded by the numbers of the ranks that printed
    /// the line.
    fn show_lines(&mut self, lines: Vec<MergedLine>) {
        for line in lines {
            let ranks: Vec<Rank> = line.ranks.into_iter().collect();
            let prefix = format!("[{}] ", format_rank_label(&format_ranks(&ranks)));
            self.write_worker_line(prefix, line.stderr, &line.text);
        }
    }

    /// Writes a message with the number of lines that the rate limit omitted and the directory of
    /// the logs.
    fn report_omitted_lines(&mut self, omitted: u64) {
        let (lines, logs) = (format_count(omitted, "line"), self.config.logs.display());
        self.console.write_stderr_line(&format!("[{lines} omitted here; {logs} has the complete output]"));
    }

    /// Writes a worker's output line to the console after `prefix`, a text with the numbers of the
    /// ranks that printed the line. `stderr` is whether the worker printed the line to stderr.
    ///
    /// A line that the user's program printed to its stdout is written to stdout, unless stdout
    /// carries JSON events. All other lines, and all lines of the built-in runtime, are written to
    /// stderr. On a terminal or in a detached run, the rate of lines is limited: lines above the
    /// limit are omitted, and a message reports their number.
    fn write_worker_line(&mut self, prefix: String, stderr: bool, text: &str) {
        // The output of the built-in runtime is messages. The rate is limited for people only, not
        // for files and programs.
        let is_message = stderr || self.config.json.is_some() || self.config.builtin;
        let to_terminal = if is_message { self.stderr_is_terminal } else { self.stdout_is_terminal };
        let is_limited = self.config.detached || to_terminal;
        let decision = match is_limited {
            true => self.rate_limit.decide_line(self.started_at.elapsed()),
            false => LineDecision::Show,
        };
        match decision {
            LineDecision::Show => {}
            LineDecision::ShowAfterReport(omitted) => self.report_omitted_lines(omitted),
            LineDecision::Omit => return,
            LineDecision::OmitAndReport(omitted) => return self.report_omitted_lines(omitted),
        }
        self.console.write_worker_line(&format!("{prefix}{text}"), is_message);
    }

    /// Shows an event to the user as text or, with `--json`, as one line of JSON on stdout. Writes
    /// the text of most events to stderr, and updates the progress bar.
    fn show_event(&mut self, event: &Event) {
        if let Some(schema) = self.config.json
            && let Ok(line) = event.to_json(schema)
        {
            self.console.write_stdout_line(&escape_unprintable_in_json(&line));
        }
        match event {
            Event::Start { .. } if !self.config.builtin => {}
            Event::Step { .. } => self.show_step(event),
            Event::Done { .. } | Event::StepTimes(_) => {}
            Event::Failure(failure) => {
                self.has_failed = true;
                self.console.remove_bar();
                self.show_failure(failure);
            }
            Event::Restart { attempt, restarts_left, pause_s, failure } => {
                self.show_failure(failure);
                self.write_message(&format_restart(*attempt, *restarts_left, *pause_s));
            }
            Event::Start { .. }
            | Event::Ready { .. }
            | Event::Resume { .. }
            | Event::Overflow { .. }
            | Event::Straggler(_)
            | Event::Eval { .. }
            | Event::Sample { .. }
            | Event::Checkpoint { .. }
            | Event::Gather { .. }
            | Event::Reload { .. }
            | Event::Takeover { .. }
            | Event::Notice { .. }
            | Event::Placement { .. } => {
                self.update_summary_state(event);
                self.write_message(&format_event(event));
            }
        }
    }

    /// Stores those values of an event that are shown later in the progress bar or the final
    /// messages, such as a checkpoint's path.
    fn update_summary_state(&mut self, event: &Event) {
        match event {
            Event::Ready { step, total_steps, .. } => {
                self.total_steps = *total_steps;
                self.console.set_total_steps(*total_steps, *step);
            }
            Event::Checkpoint { step, path, .. } => self.checkpoint = Some((*step, path.clone())),
            Event::Gather { path, .. } => self.weights = Some(path.clone()),
            Event::Reload { step, values } => {
                if let Some(train) = &values.train {
                    self.total_steps = train.steps;
                    self.console.set_total_steps(train.steps, *step);
                }
            }
            Event::Placement { world, .. } => {
                self.config.world = *world;
                self.phases.clear();
            }
            _ => {}
        }
    }

    /// Writes a message to stderr, above the progress bar.
    fn write_message(&mut self, text: &str) {
        self.console.write_stderr_line(&format!("launch: {}", filter_line(text)));
    }

    // ---- steps ----

    /// Shows the metrics of a training step, such as loss and speed, in the progress bar or as a
    /// line. Without a progress bar and `--json`, writes lines about some steps (see
    /// [`STEP_LINE_COUNT`] and [`STEP_LINE_INTERVAL`]).
    fn show_step(&mut self, event: &Event) {
        let Event::Step { step, loss, grad_norm, lr, tokens_per_s, exposed_comm_s, .. } = event else {
            return;
        };
        self.loss_curve.push_loss(*step, *loss);
        let now = Instant::now();
        if let Some((before, at)) = self.last_step {
            let elapsed = (now - at).as_secs_f64();
            let per_step = elapsed / step.saturating_sub(before).max(1) as f64;
            let weight = if self.step_seconds == 0.0 {
                1.0
            } else {
                1.0 - (-elapsed / STEP_TIME_AVERAGING_SECONDS).exp()
            };
            self.step_seconds += weight * (per_step - self.step_seconds);
        }
        self.last_step = Some((*step, now));
        let speed = format!(
            "{} tokens/s{}",
            format_number(*tokens_per_s),
            format_exposed_share(*exposed_comm_s, self.step_seconds)
        );
        self.metrics = format!("loss {loss:.4}  {speed}");
        self.update_bar(Some(*step));
        let spacing = self.total_steps.div_ceil(STEP_LINE_COUNT).max(1);
        let is_due = self.last_step_line.is_none_or(|at| now - at >= STEP_LINE_INTERVAL)
            || step % spacing == 0
            || *step == self.total_steps;
        if is_due && !self.console.has_bar() && self.config.json.is_none() {
            self.last_step_line = Some(now);
            let total = self.total_steps;
            self.console.write_stderr_line(&format!(
                "step {step}/{total}  loss {loss:.4}  grad norm {grad_norm:.3}  lr {lr:.3e}  {speed}"
            ));
        }
    }

    /// Updates the text of the progress bar and the number of finished steps. `done` is the number
    /// of finished steps, or `None` to keep the position.
    fn update_bar(&mut self, done: Option<u64>) {
        if !self.console.has_bar() {
            return;
        }
        let mut parts = Vec::new();
        if !self.metrics.is_empty() {
            parts.push(self.metrics.clone());
            let left = self.last_step.map_or(0, |(step, _)| self.total_steps.saturating_sub(step));
            parts.push(format!("{} left", format_clock(left as f64 * self.step_seconds)));
        }
        parts.push(if self.config.builtin {
            format_phases(&self.phases)
        } else {
            format!("{} running", format_count(self.config.world, "worker"))
        });
        self.console.set_bar_text(done, parts.join("  "));
    }

    // ---- failures and the end ----

    /// Writes a failure to stderr, with the last output lines of the failed rank, the path of its
    /// log and advice.
    fn show_failure(&mut self, failure: &FailureReport) {
        self.console.write_stderr_line(&filter_line(&format_failure(failure)));
        if !failure.tail.is_empty() {
            self.console.write_stderr_line("  last lines of its output:");
        }
        for line in &failure.tail {
            self.console.write_stderr_line(&format!("  | {line}"));
        }
        if let Some(log) = failure.log.as_ref().filter(|_| failure.pid != 0) {
            self.console.write_stderr_line(&format!("  log: {}", filter_line(&log.display().to_string())));
        }
        for help in &failure.help {
            self.console.write_stderr_line(&format!("  help: {}", filter_line(help)));
        }
    }

    /// Writes the final messages of a run to stderr, such as its duration and result, the loss
    /// curve and the paths of its files.
    fn show_summary(&mut self, summary: &RunSummary) {
        if let omitted @ 1.. = self.rate_limit.take_omitted_count() {
            self.report_omitted_lines(omitted);
        }
        self.console.remove_bar();
        let ends: Vec<(Rank, String)> =
            summary.peers.iter().map(|peer| (peer.rank, self.format_peer_end(peer))).collect();
        for (ranks, end) in group_ranks_by_value(ends.iter().map(|(rank, end)| (*rank, end))) {
            self.console.write_stderr_line(&format!("  then {}: {end}", format_rank_label(&ranks)));
        }
        if self.config.builtin && self.config.json.is_none() {
            self.loss_curve.draw_lines().iter().for_each(|line| self.console.write_stderr_line(line));
        }
        let time = format_duration(summary.seconds);
        match summary {
            _ if self.has_failed => {}
            RunSummary { killed: true, .. } => self.write_message(&format!(
                "killed after {time}; the progress since the last checkpoint is lost"
            )),
            RunSummary { stopped: true, .. } => self.write_message(&format!("stopped after {time}")),
            RunSummary { exit_code: 0, .. } => self.write_message(&format!("done in {time}")),
            RunSummary { exit_code, .. } => {
                self.write_message(&format!("ended with exit code {exit_code} after {time}"));
            }
        }
        self.show_file_paths(summary);
    }

    /// Describes how a rank ended that did not cause the failure of the job, with its host if the
    /// run has several hosts.
    fn format_peer_end(&self, peer: &PeerWorkerEnd) -> String {
        if self.config.hosts > 1 { format!("{} (on {})", peer.end, peer.host) } else { peer.end.to_string() }
    }

    /// Writes the paths of the run's files, such as logs and checkpoints, to stderr. For a built-in
    /// training that failed or was stopped, also writes the command that resumes the training.
    fn show_file_paths(&mut self, summary: &RunSummary) {
        let weights = self.weights.as_ref().map(|path| format!("  weights      {}", path.display()));
        let checkpoint = self
            .checkpoint
            .as_ref()
            .map(|(step, path)| format!("  checkpoint   {} (step {step})", path.display()));
        let files = Some(format!("  run files    {}", summary.run_dir.display()));
        let is_resumable = self.config.builtin && (self.has_failed || summary.stopped);
        let RunSummary { command, resume_from, has_checkpoint, .. } = summary;
        let command = is_resumable.then(|| format_resume_command(command, resume_from, *has_checkpoint));
        let resume = command.flatten().map(|command| format!("  resume with  {command}"));
        for line in [weights, checkpoint, files, resume].into_iter().flatten() {
            self.console.write_stderr_line(&line);
        }
    }
}

/// Formats the share of a step's duration in which computation waits for collectives. Returns an
/// empty text if the share is less than [`MIN_SHOWN_EXPOSED_SHARE`].
///
/// `exposed` is the waiting time, and `step` the duration of the step, both in seconds.
fn format_exposed_share(exposed: f64, step: f64) -> String {
    let share = if step > 0.0 { (exposed / step).min(1.0) } else { 0.0 };
    if share < MIN_SHOWN_EXPOSED_SHARE {
        String::new()
    } else {
        format!("  {:.0} % waiting for collectives", 100.0 * share)
    }
}

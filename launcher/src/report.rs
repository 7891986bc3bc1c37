//! [`Reporter`]: shows the events and output of a run to the user.
//!
//! A separate thread writes to the terminal, so that the job never waits for a paused terminal, a
//! pager or a closed pipe. No other code writes to the terminal during a run.
//!
//! stdout carries data: events with `--json`, otherwise the stdout of the shown ranks of a program.
//! stderr carries messages: a progress bar on a terminal, plain lines elsewhere.
pub(crate) mod command_output;
mod console;
mod deduplicator;
mod event_text;
mod format;
mod loss_curve;
mod rate_limit;
mod view;

pub(crate) use event_text::format_event;
pub(crate) use format::{
    format_binary_bytes, format_clock, format_count, format_duration, format_first_error, format_ranks,
    replace_all_control_characters, replace_control_characters,
};

use crate::controller::PeerEnd;
use contract::{
    event::{Event, EventSchema, WorkerPhase},
    ids::Rank,
};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

/// The largest number of items that wait in the queue of the reporting thread.
const QUEUE_CAPACITY: usize = 1 << 16;
/// The largest number of lines of workers that wait in the queue of the reporting thread.
const MAX_QUEUED_LINES: usize = 2048;
/// The time without accepted output at the end of a run after which the remaining output is
/// dropped. A pager and a paused terminal accept no output.
const STUCK_TIMEOUT: Duration = Duration::from_secs(60);

/// The options and sizes of a run that determine how the run is shown to the user.
#[derive(Clone, Debug)]
pub(crate) struct ReportConfig {
    /// The schema in which events are printed to stdout as JSON lines; `None` without `--json`.
    pub(crate) json: Option<EventSchema>,
    /// Whether `[rank N]` is printed before each line of a worker, and equal lines of several ranks
    /// are printed once.
    pub(crate) prefix: bool,
    /// Whether stdout and stderr are a file because the run is detached from the terminal.
    pub(crate) detached: bool,
    /// The number of ranks whose output is shown.
    pub(crate) shown_ranks: usize,
    /// The directory with the log of each rank.
    pub(crate) logs: PathBuf,
    /// Whether the workers run the built-in runtime instead of a program.
    pub(crate) builtin: bool,
    /// The number of workers of the run.
    pub(crate) world: u32,
    /// The number of hosts of the run.
    pub(crate) hosts: usize,
}

/// The result of a run, which [`Reporter::finish`] shows in the final messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunSummary {
    pub(crate) exit_code: u8,
    /// Whether a stop request ended the run.
    pub(crate) stopped: bool,
    /// Whether a stop request ended the run immediately, without saving a checkpoint.
    pub(crate) killed: bool,
    /// The ends of the ranks that were not the root cause of a failure.
    pub(crate) peers: Vec<PeerEnd>,
    pub(crate) run_dir: PathBuf,
    /// The command line that resumes the job.
    pub(crate) resume: String,
    pub(crate) seconds: f64,
}

/// An item in the queue of the reporting thread, which shows the item to the user.
#[derive(Debug)]
enum ReportItem {
    Event(Event),
    Line { rank: Rank, stderr: bool, text: String },
    Progress { rank: Rank, phase: WorkerPhase },
    Message(String),
    Finish(RunSummary),
}

/// The handle of the thread that shows a run to the user. Only [`Reporter::finish`] blocks.
#[derive(Debug)]
pub(crate) struct Reporter {
    queue: SyncSender<ReportItem>,
    done: Receiver<()>,
    counters: Arc<ReportCounters>,
    /// The number of items that were dropped because the queue was full and that were not reported
    /// yet.
    dropped: u64,
}

/// Counters that the reporting thread and the [`Reporter`] share.
#[derive(Debug, Default)]
struct ReportCounters {
    /// The number of items that the reporting thread has shown.
    shown: AtomicU64,
    /// The number of lines of workers in the queue.
    queued_lines: AtomicUsize,
}

impl Reporter {
    /// Starts the reporting thread. Fails if the thread cannot be started.
    pub(crate) fn start(config: ReportConfig) -> std::io::Result<Reporter> {
        let (queue, items) = sync_channel(QUEUE_CAPACITY);
        let (finished, done) = sync_channel(1);
        let counters = Arc::new(ReportCounters::default());
        let thread_counters = counters.clone();
        thread::Builder::new().name("report".into()).spawn(move || {
            let mut view = view::RunView::new(config);
            loop {
                let item = match view.time_to_deadline() {
                    Some(timeout) => items.recv_timeout(timeout),
                    None => items.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                let item = match item {
                    Ok(item) => item,
                    Err(RecvTimeoutError::Timeout) => {
                        view.show_due_lines();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                if matches!(item, ReportItem::Line { .. }) {
                    thread_counters.queued_lines.fetch_sub(1, Ordering::Relaxed);
                }
                let is_last = matches!(item, ReportItem::Finish(_));
                view.show_item(item);
                thread_counters.shown.fetch_add(1, Ordering::Relaxed);
                if is_last {
                    break;
                }
            }
            _ = finished.send(());
        })?;
        Ok(Reporter { queue, done, counters, dropped: 0 })
    }

    /// Queues an event for the reporting thread. Drops and counts the event if the queue is full.
    pub(crate) fn show_event(&mut self, event: Event) {
        self.enqueue(ReportItem::Event(event));
    }

    /// Queues a line of a worker for the reporting thread. Drops and counts the line if
    /// [`MAX_QUEUED_LINES`] lines are waiting.
    pub(crate) fn show_line(&mut self, rank: Rank, stderr: bool, text: String) {
        if self.counters.queued_lines.load(Ordering::Relaxed) >= MAX_QUEUED_LINES {
            self.dropped += 1;
            return;
        }
        self.counters.queued_lines.fetch_add(1, Ordering::Relaxed);
        if !self.enqueue(ReportItem::Line { rank, stderr, text }) {
            self.counters.queued_lines.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Queues the current phase of a rank, which the progress bar shows.
    pub(crate) fn show_phase(&mut self, rank: Rank, phase: WorkerPhase) {
        self.enqueue(ReportItem::Progress { rank, phase });
    }

    /// Queues a message that the reporting thread writes to stderr.
    pub(crate) fn show_message(&mut self, text: String) {
        self.enqueue(ReportItem::Message(text));
    }

    /// Adds an item to the queue. If items were dropped, a message with their number precedes the
    /// item.
    ///
    /// Returns `false` if the queue is full. The item is then dropped and counted.
    fn enqueue(&mut self, item: ReportItem) -> bool {
        if self.dropped > 0 {
            let lines = format::format_count(self.dropped, "line", "lines");
            let text =
                format!("[{lines} not shown: output arrived faster than it could be written; see the logs]");
            if self.queue.try_send(ReportItem::Message(text)).is_ok() {
                self.dropped = 0;
            }
        }
        let sent = self.queue.try_send(item).is_ok();
        self.dropped += u64::from(!sent);
        sent
    }

    /// Shows the summary of the run. Blocks until all queued items are written, or until stdout and
    /// stderr have accepted no output for [`STUCK_TIMEOUT`].
    pub(crate) fn finish(mut self, summary: RunSummary) {
        self.enqueue(ReportItem::Message(String::new())); // reports dropped lines
        let mut item = ReportItem::Finish(summary);
        let pause = Duration::from_millis(10);
        let (mut shown_before, mut stuck_for) = (u64::MAX, Duration::ZERO);
        let mut sent = false;
        while stuck_for < STUCK_TIMEOUT {
            if !sent {
                match self.queue.try_send(item) {
                    Ok(()) => {
                        sent = true;
                        item = ReportItem::Message(String::new());
                    }
                    Err(TrySendError::Full(returned)) => item = returned,
                    Err(TrySendError::Disconnected(_)) => return,
                }
            }
            match self.done.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
            let shown = self.counters.shown.load(Ordering::Relaxed);
            stuck_for = if shown == shown_before { stuck_for + pause } else { Duration::ZERO };
            shown_before = shown;
        }
    }
}

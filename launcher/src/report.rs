//! [`Report`]: shows a run to the user. It is the only writer to the terminal, on a separate
//! thread, so that the job never waits for a paused terminal, a pager or a closed pipe.
//!
//! stdout carries data: events with `--json`, otherwise the stdout of the shown ranks. stderr
//! carries messages: a progress bar on a terminal, plain lines elsewhere.
mod console;
mod dedup;
mod event_text;
mod format;
mod loss_curve;
pub(crate) mod plain;
mod rate_limit;
mod view;

pub(crate) use event_text::event_text;
pub(crate) use format::{and_more, count, format_clock, format_duration, format_ranks, strip_control};

use crate::controller::PeerEnd;
use contract::{
    event::{Event, EventSchema, Phase},
    ids::Rank,
};
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel},
    },
    thread,
    time::Duration,
};

/// Capacity of the queue of items.
const QUEUE: usize = 1 << 16;
/// Limit of lines of workers in the queue.
const MAX_QUEUED_LINES: usize = 2048;
/// At the end: how long stdout and stderr may accept nothing (a pager, a paused terminal) before
/// the rest is dropped.
const STUCK_TIMEOUT: Duration = Duration::from_secs(60);

/// How to show a run.
#[derive(Clone, Debug)]
pub(crate) struct ReportConfig {
    /// Prints events as JSON lines on stdout, in this schema.
    pub(crate) json: Option<EventSchema>,
    /// Prints `[rank N]` before each line of a worker, and equal lines of several ranks once.
    pub(crate) prefix: bool,
    /// Whether the output goes to a file because the run is detached from the terminal.
    pub(crate) detached: bool,
    /// The number of ranks whose output is shown.
    pub(crate) shown_ranks: usize,
    /// The directory with the log of each rank.
    pub(crate) logs: PathBuf,
    /// Whether workers run the built-in runtime.
    pub(crate) builtin: bool,
    /// The number of workers.
    pub(crate) world: u32,
    /// The number of hosts.
    pub(crate) hosts: usize,
}

/// How the run ended, for the final messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunSummary {
    pub(crate) exit_code: u8,
    /// Ended by a stop request.
    pub(crate) stopped: bool,
    /// Ended by a stop request, without a save.
    pub(crate) killed: bool,
    /// How the ranks ended that were not the root cause.
    pub(crate) peers: Vec<PeerEnd>,
    pub(crate) run_dir: PathBuf,
    /// The command line that resumes the job.
    pub(crate) resume: String,
    pub(crate) seconds: f64,
}

#[derive(Debug)]
enum Item {
    Event(Event),
    Line { rank: Rank, stderr: bool, text: String },
    Progress { rank: Rank, phase: Phase },
    Message(String),
    Finish(RunSummary),
}

/// The handle of the reporting thread. No method waits, except [`Report::finish`].
#[derive(Debug)]
pub(crate) struct Report {
    queue: SyncSender<Item>,
    done: Receiver<()>,
    counters: Arc<Counters>,
    /// Items that were dropped because the queue was full.
    dropped: u64,
}

#[derive(Debug, Default)]
struct Counters {
    /// Items shown so far.
    shown: AtomicU64,
    /// Lines in the queue.
    queued_lines: AtomicUsize,
}

impl Report {
    /// Starts the reporting thread.
    pub(crate) fn start(config: ReportConfig) -> std::io::Result<Report> {
        let (queue, items) = sync_channel(QUEUE);
        let (finished, done) = channel();
        let counters = Arc::new(Counters::default());
        let thread_counters = counters.clone();
        thread::Builder::new().name("report".into()).spawn(move || {
            let mut view = view::View::new(config);
            loop {
                let item = match view.time_to_deadline() {
                    Some(timeout) => items.recv_timeout(timeout),
                    None => items.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                let item = match item {
                    Ok(item) => item,
                    Err(RecvTimeoutError::Timeout) => {
                        view.on_deadline();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                if matches!(item, Item::Line { .. }) {
                    thread_counters.queued_lines.fetch_sub(1, Ordering::Relaxed);
                }
                let is_last = matches!(item, Item::Finish(_));
                view.show_item(item);
                thread_counters.shown.fetch_add(1, Ordering::Relaxed);
                if is_last {
                    break;
                }
            }
            _ = finished.send(());
        })?;
        Ok(Report { queue, done, counters, dropped: 0 })
    }

    /// Shows an event.
    pub(crate) fn event(&mut self, event: Event) {
        self.enqueue(Item::Event(event));
    }

    /// Shows a line of a worker.
    pub(crate) fn line(&mut self, rank: Rank, stderr: bool, text: String) {
        if self.counters.queued_lines.load(Ordering::Relaxed) >= MAX_QUEUED_LINES {
            self.dropped += 1;
            return;
        }
        self.counters.queued_lines.fetch_add(1, Ordering::Relaxed);
        if !self.enqueue(Item::Line { rank, stderr, text }) {
            self.counters.queued_lines.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Shows what a rank is doing.
    pub(crate) fn progress(&mut self, rank: Rank, phase: Phase) {
        self.enqueue(Item::Progress { rank, phase });
    }

    /// Shows a message.
    pub(crate) fn message(&mut self, text: String) {
        self.enqueue(Item::Message(text));
    }

    fn enqueue(&mut self, item: Item) -> bool {
        if self.dropped > 0 {
            let lines = format::count(self.dropped, "line", "lines");
            let text =
                format!("[{lines} not shown: output arrived faster than it could be written; see the logs]");
            if self.queue.try_send(Item::Message(text)).is_ok() {
                self.dropped = 0;
            }
        }
        let sent = self.queue.try_send(item).is_ok();
        self.dropped += u64::from(!sent);
        sent
    }

    /// Shows the summary, and waits until everything is written or the output makes no progress.
    pub(crate) fn finish(mut self, summary: RunSummary) {
        self.enqueue(Item::Message(String::new())); // reports dropped lines
        let mut item = Item::Finish(summary);
        let pause = Duration::from_millis(10);
        let (mut shown_before, mut stuck_for) = (u64::MAX, Duration::ZERO);
        let mut sent = false;
        while stuck_for < STUCK_TIMEOUT {
            if !sent {
                match self.queue.try_send(item) {
                    Ok(()) => {
                        sent = true;
                        item = Item::Message(String::new());
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

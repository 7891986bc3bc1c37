//! [`Reporter`]: passes the events and output of a run to the thread that shows them.
use super::{
    report_item::{ReportConfig, ReportItem, RunSummary},
    view::RunView,
};
use diagnostic::quantity::format_count;
use jobspec::ids::Rank;
use protocol::event::{Event, WorkerPhase};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

/// The largest number of events and messages that wait for the thread that shows the run to the
/// user.
const QUEUE_CAPACITY: usize = 1 << 16;
/// The largest number of output lines of workers that wait for the thread that shows the run to the
/// user.
const MAX_QUEUED_LINES: usize = 2048;
/// How long the controller waits at the end of a run while the terminal or pipe does not accept the
/// remaining output. After that, the remaining output is dropped. A pager and a paused terminal
/// accept no output.
const STUCK_OUTPUT_TIMEOUT: Duration = Duration::from_secs(60);

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

/// Two counters that the controller and the thread that shows the run share: the items shown so
/// far, and the output lines in the queue.
#[derive(Debug, Default)]
struct ReportCounters {
    /// The number of items that the reporting thread has shown.
    shown: AtomicU64,
    /// The number of lines of workers in the queue.
    queued_lines: AtomicUsize,
}

impl Reporter {
    /// Starts the thread that shows a run to the user. Fails if the thread cannot be started.
    pub(crate) fn start(config: ReportConfig) -> std::io::Result<Reporter> {
        let (queue, items) = sync_channel(QUEUE_CAPACITY);
        let (finished, done) = sync_channel(1);
        let counters = Arc::new(ReportCounters::default());
        let thread_counters = counters.clone();
        thread::Builder::new().name("report".into()).spawn(move || {
            let mut view = RunView::new(config);
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

    /// Queues an event of the run for the thread that shows the run to the user. Drops and counts
    /// the event if the queue is full.
    pub(crate) fn show_event(&mut self, event: Event) {
        self.enqueue(ReportItem::Event(event));
    }

    /// Queues an event from an earlier controller of the run, which is shown to the user as text
    /// only, and never as JSON.
    pub(crate) fn show_event_of_earlier_controller(&mut self, event: Event) {
        self.enqueue(ReportItem::Context(event));
    }

    /// Queues an output line of a worker for the thread that shows the run to the user. Drops and
    /// counts the line if [`MAX_QUEUED_LINES`] lines are waiting.
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

    /// Queues the phase of a rank (what the rank currently does, such as `training`) for the
    /// progress bar.
    pub(crate) fn show_phase(&mut self, rank: Rank, phase: WorkerPhase) {
        self.enqueue(ReportItem::Progress { rank, phase });
    }

    /// Queues a message for the thread that shows the run to the user, which writes the message to
    /// stderr.
    pub(crate) fn show_message(&mut self, text: String) {
        self.enqueue(ReportItem::Message(text));
    }

    /// Adds an item to the queue of the thread that shows the run to the user. If items were
    /// dropped, a message with their number precedes the item.
    ///
    /// Returns `false` if the queue is full. The item is then dropped and counted.
    fn enqueue(&mut self, item: ReportItem) -> bool {
        if self.dropped > 0 {
            let lines = format_count(self.dropped, "line");
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

    /// Shows the final messages of a run to the user, and waits until the whole output of the run
    /// is written. Blocks until all queued items are written, or until stdout and stderr have
    /// accepted no output for [`STUCK_OUTPUT_TIMEOUT`].
    pub(crate) fn finish(mut self, summary: RunSummary) {
        self.enqueue(ReportItem::Message(String::new())); // reports dropped lines
        let mut item = ReportItem::Finish(summary);
        let pause = Duration::from_millis(10);
        let (mut shown_before, mut stuck_for) = (u64::MAX, Duration::ZERO);
        let mut sent = false;
        while stuck_for < STUCK_OUTPUT_TIMEOUT {
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

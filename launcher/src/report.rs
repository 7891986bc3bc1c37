//! What the person sees. The only writer to the terminal, on a thread of its own: whatever stdout and stderr are
//! connected to (a paused terminal, a pager, a closed pipe), the job does not wait for it.
//!
//! stdout is data: events with `--json`, else the shown ranks' own stdout. stderr is talk: a live view on a terminal,
//! plain lines elsewhere.
mod dedup;
mod curve;
mod limit;
mod live;
pub(crate) mod plain;
mod sentence;
mod text;
mod view;

pub(crate) use sentence::sentence;
pub(crate) use text::{clock, harmless as clean, ranks, took};

use crate::controller::Other;
use contract::{
    event::{Event, Phase},
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

/// Items waiting to be shown.
const QUEUE: usize = 1 << 16;
/// Of them, lines of workers.
const LINES: usize = 2048;
/// At the end, when no process of the job is left: how long stdout and stderr may take nothing (a pager, a paused
/// terminal) before what is left is given up.
const STUCK: Duration = Duration::from_secs(60);

/// How to show a run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Events as JSON lines on stdout.
    pub(crate) json: bool,
    /// `[rank N]` before each line of a worker; then equal lines of several ranks are shown once.
    pub(crate) prefix: bool,
    /// Nobody looks on: what is printed goes to a file.
    pub(crate) detached: bool,
    /// Ranks that are shown at first.
    pub(crate) shown: usize,
    /// Where each rank's own log lies.
    pub(crate) logs: PathBuf,
    /// A training job of the built-in runtime.
    pub(crate) builtin: bool,
    pub(crate) world: u32,
    /// Number of hosts.
    pub(crate) hosts: usize,
}

/// How it ended, for the last words.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) exit_code: u8,
    pub(crate) stopped: bool,
    pub(crate) killed: bool,
    pub(crate) others: Vec<Other>,
    pub(crate) run_dir: PathBuf,
    /// The command line that goes on with this job.
    pub(crate) resume: String,
    pub(crate) seconds: f64,
}

#[derive(Debug)]
enum Item {
    Event(Event),
    Line { rank: Rank, stderr: bool, text: String },
    Progress { rank: Rank, phase: Phase },
    Talk(String),
    Finish(Summary),
}

/// The handle of the reporting thread. Nothing here waits, except [`Report::finish`].
#[derive(Debug)]
pub(crate) struct Report {
    queue: SyncSender<Item>,
    done: Receiver<()>,
    shared: Arc<Shared>,
    lost: u64,
}

#[derive(Debug, Default)]
struct Shared {
    /// Items shown so far: whether the thread gets on.
    shown: AtomicU64,
    /// Lines waiting.
    lines: AtomicUsize,
}

impl Report {
    /// Starts the reporting thread.
    pub(crate) fn start(setup: Setup) -> std::io::Result<Report> {
        let (queue, items) = sync_channel(QUEUE);
        let (finished, done) = channel();
        let shared = Arc::new(Shared::default());
        let seen = shared.clone();
        thread::Builder::new().name("report".into()).spawn(move || {
            let mut view = view::View::new(setup);
            loop {
                let item = match view.pause() {
                    Some(pause) => items.recv_timeout(pause),
                    None => items.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                let item = match item {
                    Ok(item) => item,
                    Err(RecvTimeoutError::Timeout) => {
                        view.on_time();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                if matches!(item, Item::Line { .. }) {
                    seen.lines.fetch_sub(1, Ordering::Relaxed);
                }
                let last = matches!(item, Item::Finish(_));
                view.show(item);
                seen.shown.fetch_add(1, Ordering::Relaxed);
                if last {
                    break;
                }
            }
            _ = finished.send(());
        })?;
        Ok(Report { queue, done, shared, lost: 0 })
    }

    /// Something happened.
    pub(crate) fn event(&mut self, event: Event) {
        self.put(Item::Event(event));
    }

    /// A shown worker's line.
    pub(crate) fn line(&mut self, rank: Rank, stderr: bool, text: String) {
        if self.shared.lines.load(Ordering::Relaxed) >= LINES {
            self.lost += 1;
            return;
        }
        self.shared.lines.fetch_add(1, Ordering::Relaxed);
        if !self.put(Item::Line { rank, stderr, text }) {
            self.shared.lines.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What a rank is doing.
    pub(crate) fn progress(&mut self, rank: Rank, phase: Phase) {
        self.put(Item::Progress { rank, phase });
    }

    /// Something for a person to read.
    pub(crate) fn talk(&mut self, text: String) {
        self.put(Item::Talk(text));
    }

    fn put(&mut self, item: Item) -> bool {
        if self.lost > 0 {
            let text = format!(
                "[{} lines not shown here: output came faster than it could be written; the logs have them]",
                self.lost
            );
            if self.queue.try_send(Item::Talk(text)).is_ok() {
                self.lost = 0;
            }
        }
        let sent = self.queue.try_send(item).is_ok();
        self.lost += u64::from(!sent);
        sent
    }

    /// Shows the end and waits until all is written, or nothing gets on any more.
    pub(crate) fn finish(mut self, summary: Summary) {
        self.put(Item::Talk(String::new())); // tells of lost lines
        let mut item = Item::Finish(summary);
        let pause = Duration::from_millis(10);
        let (mut shown, mut still) = (u64::MAX, Duration::ZERO);
        let mut sent = false;
        while still < STUCK {
            if !sent {
                match self.queue.try_send(item) {
                    Ok(()) => {
                        sent = true;
                        item = Item::Talk(String::new());
                    }
                    Err(TrySendError::Full(back)) => item = back,
                    Err(TrySendError::Disconnected(_)) => return,
                }
            }
            match self.done.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
            let now = self.shared.shown.load(Ordering::Relaxed);
            still = if now == shown { still + pause } else { Duration::ZERO };
            shown = now;
        }
    }
}

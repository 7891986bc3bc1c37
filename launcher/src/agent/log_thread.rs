//! [`LogThread`]: the thread that writes the logs of all ranks of an agent.
use crate::background_thread::{BackgroundThread, WriteRetrySwitch};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// The largest amount of workers' output, in bytes, that may wait in the agent's memory until the
/// disk accepts it. Further output is dropped and counted.
const MAX_WAITING_LOG_BYTES: usize = 32 << 20;
/// How long an agent that is about to end still repeats log writes that fail because the disk is
/// full, before it gives up. The controller kills an agent on its own machine that does not end
/// within a second.
const FULL_DISK_TIMEOUT: Duration = Duration::from_millis(500);
/// How long an agent that is about to end waits for log writes that block because the disk does not
/// respond.
const STALLED_DISK_TIMEOUT: Duration = Duration::from_secs(20);

/// A handle of the thread that writes the logs of all ranks of an agent, through which writes are
/// queued for the thread.
#[derive(Clone, Debug)]
pub(crate) struct LogThread {
    thread: BackgroundThread,
    retries: WriteRetrySwitch,
    /// The bytes of output that the disk did not accept before the end of the agent.
    lost_bytes: Arc<AtomicU64>,
}

/// Output of workers that could not be written to their logs before the agent ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LostOutput {
    /// The disk has rejected this number of bytes, because it is full for example.
    Rejected { bytes: u64 },
    /// The disk does not answer, so the amount is unknown.
    Stalled,
}

impl LogThread {
    /// Starts the thread that writes the ranks' logs, with at most [`MAX_WAITING_LOG_BYTES`] of
    /// output that may wait to be written.
    pub(crate) fn start() -> io::Result<LogThread> {
        LogThread::with_capacity(MAX_WAITING_LOG_BYTES)
    }

    /// Starts the thread that writes the ranks' logs; at most `max_bytes` bytes of output may wait
    /// to be written.
    pub(crate) fn with_capacity(max_bytes: usize) -> io::Result<LogThread> {
        let thread = BackgroundThread::start("rank-logs", max_bytes)?;
        Ok(LogThread { thread, retries: WriteRetrySwitch::default(), lost_bytes: Arc::default() })
    }

    /// Queues the function `write`, which writes output to a rank's log, to be called on the log
    /// thread after all earlier writes. `write` returns the number of bytes that the disk has not
    /// accepted. Returns `false` if too much output waits to accept another `bytes` bytes. Never
    /// blocks.
    pub(crate) fn queue_write(
        &self,
        bytes: usize,
        write: impl FnOnce(&WriteRetrySwitch) -> u64 + Send + 'static,
    ) -> bool {
        let (retries, lost_bytes) = (self.retries.clone(), self.lost_bytes.clone());
        self.thread.enqueue_job(bytes, move || {
            lost_bytes.fetch_add(write(&retries), Ordering::Relaxed);
        })
    }

    /// Waits, when the agent ends, until all output of workers is written to their logs, for a
    /// limited time. Gives up writes that the disk still rejects after [`FULL_DISK_TIMEOUT`], and
    /// stops waiting for a disk that does not answer after another [`STALLED_DISK_TIMEOUT`].
    /// Returns the output that was lost; `None` if all output was written.
    pub(crate) fn finish(&self) -> Option<LostOutput> {
        if !self.thread.flush(FULL_DISK_TIMEOUT) {
            self.retries.switch_off();
            if !self.thread.flush(STALLED_DISK_TIMEOUT) {
                return Some(LostOutput::Stalled);
            }
        }
        let bytes = self.lost_bytes.load(Ordering::Relaxed);
        (bytes > 0).then_some(LostOutput::Rejected { bytes })
    }

    /// Waits, for at most the time `limit`, until all output that is now queued for the log thread
    /// is written. Returns whether all of this output was written.
    #[cfg(test)]
    pub(crate) fn wait_for_queued_writes(&self, limit: Duration) -> bool {
        self.thread.flush(limit)
    }

    /// Returns how long ago the log thread began the log write that it is executing. Returns zero
    /// if no write runs.
    #[cfg(test)]
    pub(crate) fn current_write_time(&self) -> Duration {
        self.thread.busy_time()
    }
}

impl std::fmt::Display for LostOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LostOutput::Rejected { bytes } => write!(
                f,
                "the last output of the workers ({bytes} bytes) is not in their logs, because the disk rejected it"
            ),
            LostOutput::Stalled => f.write_str(
                "the last output of the workers is not in their logs, because the disk does not answer",
            ),
        }
    }
}

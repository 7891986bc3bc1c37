//! [`StatusFile`]: writes the newest measurements of a run to a file, for `launch serve` and
//! `launch top`.
use crate::{background_thread::BackgroundThread, runs::replace_file_without_sync};
use protocol::run_measurements::{RunMeasurements, STATUS_FILE};
use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

/// The shortest time between two writes of the run's status file.
const WRITE_INTERVAL: Duration = Duration::from_secs(2);
/// The additional time between two writes of the status file for each rank of the run, which limits
/// the written bytes per second.
const WRITE_INTERVAL_PER_RANK: Duration = Duration::from_millis(1);
/// The largest size of the run's status file, in bytes. Larger measurements are not written.
const MAX_BYTES: usize = 8 << 20;

/// The status file of a run, which a separate thread writes, so that a slow disk does not block the
/// controller.
#[derive(Debug)]
pub(super) struct StatusFile {
    thread: BackgroundThread,
    interval: Duration,
    next_write: Instant,
}

impl StatusFile {
    /// Starts the thread that writes the status file of a run with `world` ranks.
    pub(super) fn start(world: u32) -> io::Result<StatusFile> {
        let interval = WRITE_INTERVAL + WRITE_INTERVAL_PER_RANK * world;
        Ok(StatusFile {
            thread: BackgroundThread::start("status", MAX_BYTES)?,
            interval,
            next_write: Instant::now(),
        })
    }

    /// Returns whether the status file is to be written again now.
    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.next_write && self.thread.busy_time() == Duration::ZERO
    }

    /// Lets a separate thread write the measurements `status` to the status file in the run
    /// directory `run_dir`, in place of the file's old content. Never blocks. A file that cannot be
    /// written is tried again with the next measurements, and the journal reports the state of the
    /// disk.
    pub(super) fn write(&mut self, run_dir: PathBuf, status: &RunMeasurements) {
        self.next_write = Instant::now() + self.interval;
        let Ok(bytes) = serde_json::to_vec(status) else { return };
        let size = bytes.len();
        self.thread.enqueue_job(size, move || _ = replace_file_without_sync(&run_dir, STATUS_FILE, &bytes));
    }
}

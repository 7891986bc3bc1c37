//! [`OpenedLogs`]: the logs of the workers of one attempt, opened before the workers start.
use crate::{
    agent::rank_log::RankLog,
    background_thread::{RetryPauses, is_transient},
};
use diagnostic::{Diagnostic, codes};
use jobspec::ids::Rank;
use protocol::control::HostPlan;
use std::{
    collections::HashMap,
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// How long the agent retries to create a worker's log on a full disk, before the start of the
/// workers fails.
const OPEN_LOG_TIMEOUT: Duration = Duration::from_secs(60);

/// The open logs of all workers of this host for one attempt (start of all workers), or the error
/// of the first log that cannot be opened.
pub(super) struct OpenedLogs {
    pub(super) attempt: u32,
    pub(super) logs: Result<HashMap<Rank, RankLog>, (Rank, Diagnostic)>,
}

impl Default for OpenedLogs {
    fn default() -> Self {
        OpenedLogs { attempt: 0, logs: Ok(HashMap::new()) }
    }
}

/// Opens the log file of each worker that the controller has assigned to this host, and returns the
/// open logs by rank. Blocks while the disk stalls. On a full disk, tries again until
/// [`OPEN_LOG_TIMEOUT`].
pub(super) fn open_logs(plan: &HostPlan) -> Result<HashMap<Rank, RankLog>, (Rank, Diagnostic)> {
    let (began, mut pauses) = (Instant::now(), RetryPauses::default());
    let mut logs = HashMap::new();
    for worker in &plan.workers {
        let log = loop {
            match RankLog::open(&worker.log, plan.job.run.logs.max_size) {
                Ok(log) => break log,
                Err(error) if is_transient(&error) && began.elapsed() < OPEN_LOG_TIMEOUT => {
                    thread::sleep(pauses.next_pause());
                }
                Err(error) => return Err((worker.rank, build_log_open_error(&worker.log, &error))),
            }
        };
        logs.insert(worker.rank, log);
    }
    Ok(logs)
}

/// Builds the error that the log file `log` of a worker cannot be opened.
fn build_log_open_error(log: &Path, error: &io::Error) -> Diagnostic {
    let file = log.display().to_string();
    Diagnostic::error(codes::host::WORKER_LOG_UNWRITABLE, format!("cannot open the log {file}"))
        .with_subject(file)
        .with_cause(error)
}

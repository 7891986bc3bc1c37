//! [`RunSnapshot`]: the present state of a run, for terminal views.
use crate::{
    dashboard::{Dashboard, lock_ignoring_poison},
    log_files::{list_logs, read_log_part},
    rank_grid::RankState,
    run_source::RunInfo,
    status_reader::is_recent,
};
use protocol::run_measurements::RunMeasurements;
use serde_json::Value;
use std::time::Duration;

/// The largest number of events in a snapshot of a run.
const MAX_EVENTS: usize = 500;

/// A host of a run, and the consecutive ranks on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotHost {
    /// The name of the host.
    pub host: String,
    /// The first rank of the host.
    pub first_rank: u32,
    /// The number of ranks of the host.
    pub workers: u32,
}

/// The present state of a run: its progress, hosts, ranks, measurements, newest events and losses.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSnapshot {
    /// The run and its state.
    pub info: RunInfo,
    /// The number of optimizer steps that are done.
    pub step: Option<u64>,
    /// The number of optimizer steps of the whole training.
    pub total_steps: Option<u64>,
    /// The loss of the newest step.
    pub loss: Option<f64>,
    /// The loss of the newest evaluation.
    pub eval_loss: Option<f64>,
    /// The tokens per second of all ranks.
    pub tokens_per_s: Option<f64>,
    /// The duration of the newest step, in seconds.
    pub step_s: Option<f64>,
    /// The largest resident set of a rank, in bytes.
    pub peak_rss: Option<u64>,
    /// The number of the attempt, from 0.
    pub attempt: u32,
    /// The number of restarts.
    pub restarts: u64,
    /// The number of checkpoints that were saved.
    pub checkpoints: u64,
    /// The exit code of a run that has ended.
    pub exit_code: Option<u8>,
    /// The number of ranks.
    pub world: u32,
    /// The hosts, in the order of their ranks.
    pub hosts: Vec<SnapshotHost>,
    /// The state of each rank.
    pub states: Vec<RankState>,
    /// The newest measurements; `None` if there are none, or if they are old.
    pub status: Option<RunMeasurements>,
    /// The newest events, oldest first, as JSON objects. Steps are left out.
    pub events: Vec<Value>,
    /// The loss over the steps, as pairs of step and loss.
    pub losses: Vec<(u64, f64)>,
}

impl Dashboard {
    /// Reads the journal (file of events) of a run to its end, but for at most the time `limit`,
    /// and returns the present state of the run. Returns `None` if there is no such run.
    pub fn take_snapshot(&self, run: &str, limit: Duration) -> Option<RunSnapshot> {
        let shared = self.load_run(run, limit)?;
        let tracked = lock_ignoring_poison(&shared);
        let (numbers, grid) = (&tracked.view.numbers, &tracked.view.grid);
        let hosts = grid.hosts().iter().map(|row| SnapshotHost {
            host: row.host.clone(),
            first_rank: row.first_rank,
            workers: row.workers,
        });
        let after = tracked.view.log.added_count().saturating_sub(MAX_EVENTS as u64);
        Some(RunSnapshot {
            step: numbers.step,
            total_steps: numbers.total_steps,
            loss: numbers.loss,
            eval_loss: numbers.eval_loss,
            tokens_per_s: numbers.tokens_per_s,
            step_s: numbers.step_s,
            peak_rss: numbers.peak_rss,
            attempt: numbers.attempt,
            restarts: numbers.restarts,
            checkpoints: numbers.checkpoints,
            exit_code: numbers.exit_code,
            world: grid.world(),
            hosts: hosts.collect(),
            states: grid.states().to_vec(),
            status: tracked.status.clone().filter(|s| tracked.info.is_active && is_recent(s)),
            events: tracked.view.log.list_after(after).into_iter().map(|e| e.event.clone()).collect(),
            losses: tracked.view.series[0].list_points().iter().map(|p| (p.step, p.value)).collect(),
            info: tracked.info.clone(),
        })
    }

    /// Reads the last lines of a rank's log file, without unprintable characters. Returns `None` if
    /// the log is not on this machine.
    pub fn read_log_end(&self, run: &str, rank: u32) -> Option<Vec<String>> {
        let shared = self.find_or_track_run(run)?;
        let directory = lock_ignoring_poison(&shared).info.run_dir.join("logs");
        let path = list_logs(&directory).remove(&rank)?;
        Some(read_log_part(self.source(), &path, None).ok()?.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::untrusted::testing::build_dashboard;

    #[test]
    fn a_snapshot_has_the_state_of_the_run() {
        let (_directory, dashboard) = build_dashboard("job");
        let run = dashboard.take_snapshot("r1", Duration::from_secs(10)).expect("a run");
        assert_eq!((run.step, run.total_steps, run.loss, run.restarts), (Some(3), Some(10), Some(3.0), 1));
        assert_eq!(run.losses, [(1, 5.0), (2, 4.0), (3, 3.0)]);
        assert_eq!(
            run.hosts.iter().map(|h| (h.host.as_str(), h.workers)).collect::<Vec<_>>(),
            [("a", 1), ("b", 3)]
        );
        assert_eq!(run.states[2], RankState::Failed);
        assert_eq!((run.events.len(), run.status), (5, None));
        assert_eq!(dashboard.read_log_end("r1", 0).map(|lines| lines.len()), Some(2));
        assert_eq!(dashboard.read_log_end("r1", 9), None);
        assert!(dashboard.take_snapshot("r2", Duration::ZERO).is_none());
    }
}

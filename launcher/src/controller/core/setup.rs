//! [`CoreSetup`]: the settings of a job on which the controller's decisions depend.
use crate::cluster::ArrivalLimits;
use jobspec::{ControllerLossAction, JobSpec, MinHosts, StopSignal};
use protocol::control::ControllerToken;
use std::{path::PathBuf, time::Duration};

/// How long an agent that has lost its controller needs to kill its workers.
const ORPHAN_END_TIME: Duration = Duration::from_secs(10);
/// How long built-in workers on CPUs may take to leave a failed attempt (start of all workers) so
/// that their processes can join the next one. Workers that need longer are killed.
const CPU_LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long built-in workers on GPUs may take to leave a failed attempt. NCCL may need more than a
/// second to abort its collectives, and a new process on a GPU needs many seconds to start.
const GPU_LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The name of a host of the job, and whether the host is remote.
#[derive(Clone, Debug)]
pub(crate) struct HostSetup {
    /// The host's name in the job.
    pub(crate) name: String,
    /// Whether the host is another machine, so that its agent is not a child of the controller.
    pub(crate) remote: bool,
}

/// The settings of a job on which the decisions of the controller depend, such as its hosts, time
/// limits and restarts.
#[derive(Clone, Debug)]
pub(crate) struct CoreSetup {
    pub(crate) hosts: Vec<HostSetup>,
    /// Whether workers run the built-in runtime instead of programs.
    pub(crate) builtin: bool,
    /// Whether workers copy their states to the memory of hosts (`checkpoint.memory`), so that a
    /// restart costs little.
    pub(crate) has_memory_copies: bool,
    /// How long workers that did not fail may take to leave an attempt that ends, so that they keep
    /// their processes. `None` if they do not keep them (`checkpoint.memory.keep_workers`).
    pub(crate) leave_timeout: Option<Duration>,
    /// The signal that asks programs to save and stop (`run.stop_signal`).
    pub(crate) stop_signal: StopSignal,
    /// The time from a request to stop until programs get SIGTERM. Zero if `stop_signal` is
    /// SIGTERM.
    pub(crate) sigterm_delay: Duration,
    /// The time from SIGTERM to SIGKILL of programs.
    pub(crate) grace: Duration,
    /// The silence after which the agent of another host counts as lost (`run.host_lease`).
    pub(crate) host_lease: Duration,
    /// The token of the controller.
    pub(crate) token: ControllerToken,
    /// Whether workers continue when the controller is lost.
    pub(crate) outlives_controller: bool,
    /// The time after which the agent of a lost host that cannot be reached has ended its workers
    /// at the latest.
    pub(crate) orphan_timeout: Duration,
    /// The number of restarts that `run.restarts` allows.
    pub(crate) restarts: u32,
    /// The number of hosts that an attempt uses if enough hosts are available.
    pub(crate) use_hosts: usize,
    /// Whether a change of the list of hosts sets `use_hosts` to the number of listed hosts.
    pub(crate) use_all_listed: bool,
    /// The smallest number of hosts with which an attempt starts (`run.min_hosts`).
    pub(crate) min_hosts: usize,
    /// The seed of the random jitter of the pauses before restarts.
    pub(crate) seed: u64,
    /// The time limits for agents that were requested, and how often a lost agent is awaited again.
    pub(crate) arrival: ArrivalLimits,
    /// The run directory, which messages for the user name.
    pub(crate) run_dir: PathBuf,
}

impl CoreSetup {
    /// Derives the settings of the controller's state machine from a job and its list of hosts.
    /// `loss` is what agents do when the controller with this token is lost.
    pub(crate) fn new(
        job: &JobSpec,
        hosts: Vec<HostSetup>,
        seed: u64,
        (token, loss): (ControllerToken, ControllerLossAction),
    ) -> Self {
        let count = hosts.len();
        let use_hosts = job.cluster.use_hosts.map_or(count, |n| (n as usize).min(count));
        let min_hosts = match job.run.min_hosts {
            MinHosts::All => use_hosts,
            MinHosts::AtLeast(n) => (n as usize).min(use_hosts),
        };
        // A job that cannot run on fewer hosts does not use more either. An added host is a spare.
        let use_all_listed = job.cluster.use_hosts.is_none() && job.run.min_hosts != MinHosts::All;
        CoreSetup {
            hosts,
            builtin: job.run.command.is_none(),
            has_memory_copies: job.checkpoint.memory.is_some(),
            leave_timeout: find_leave_timeout(job),
            stop_signal: job.run.stop_signal,
            sigterm_delay: Duration::from_millis(job.run.sigterm_delay_ms()),
            grace: Duration::from_millis(job.run.grace_period_ms),
            host_lease: Duration::from_millis(job.run.host_lease_ms),
            token,
            outlives_controller: loss == ControllerLossAction::Continue,
            orphan_timeout: match loss {
                ControllerLossAction::Stop => Duration::from_millis(job.run.controller_lease_ms),
                ControllerLossAction::Continue => {
                    let stop_ms = job.run.unattended_stop_ms();
                    Duration::from_millis(job.run.controller_timeout_ms.saturating_add(stop_ms))
                }
            } + ORPHAN_END_TIME,
            restarts: job.run.restarts,
            use_hosts,
            use_all_listed,
            min_hosts,
            seed,
            arrival: ArrivalLimits::default(),
            run_dir: PathBuf::new(),
        }
    }

    /// Returns two texts for messages to the user: the name of the stop signal of the workers, and
    /// a list of the signals that are sent later. For example, these are `SIGTERM` and `SIGKILL
    /// follows in 30 s`.
    pub(super) fn describe_program_stop(&self) -> (&'static str, String) {
        let (delay, grace) = (self.sigterm_delay.as_secs_f64(), self.grace.as_secs_f64());
        let following = match self.stop_signal {
            StopSignal::Term => format!("SIGKILL follows in {grace} s"),
            _ => format!("SIGTERM follows in {delay} s and SIGKILL {grace} s later"),
        };
        (self.stop_signal.name(), following)
    }
}

/// Returns how long the workers of a job may take to leave an attempt that ends, so that they keep
/// their processes. Returns `None` if the job does not keep them.
fn find_leave_timeout(job: &JobSpec) -> Option<Duration> {
    let keeps_workers = job.checkpoint.memory.as_ref().is_some_and(|memory| memory.keep_workers);
    let is_builtin = job.run.command.is_none();
    let timeout = if job.cluster.trains_on_gpus() { GPU_LEAVE_TIMEOUT } else { CPU_LEAVE_TIMEOUT };
    (is_builtin && keeps_workers).then_some(timeout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample_job;

    /// Returns the orphan timeout of a job, in seconds.
    fn compute_orphan_timeout(job: &JobSpec, loss: ControllerLossAction) -> u64 {
        let token = ControllerToken { epoch: 1, id: 1 };
        CoreSetup::new(job, Vec::new(), 0, (token, loss)).orphan_timeout.as_secs()
    }

    #[test]
    fn workers_without_a_controller_have_time_to_save_and_stop() {
        let mut job = sample_job();
        assert_eq!(compute_orphan_timeout(&job, ControllerLossAction::Stop), 60 + 10);
        assert_eq!(compute_orphan_timeout(&job, ControllerLossAction::Continue), 900 + 3 + 10);
        job.run.stop_signal = StopSignal::Usr1;
        assert_eq!(compute_orphan_timeout(&job, ControllerLossAction::Continue), 900 + 60 + 3 + 10);
        job.run.command = None;
        assert_eq!(compute_orphan_timeout(&job, ControllerLossAction::Continue), 900 + 900 + 10);
        job.run.controller_timeout_ms = 60_000;
        assert_eq!(compute_orphan_timeout(&job, ControllerLossAction::Continue), 60 + 600 + 10);
    }
}

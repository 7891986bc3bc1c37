//! The controller's decisions, as a state machine without I/O and clock.
//!
//! [`ControllerCore::handle_input`] takes an input (a message of an agent, a signal, the passing of
//! time) and returns the actions that the driver has to execute. The first failure by the
//! controller's clock is the root cause, and all later failures count as its consequences. An
//! attempt is one start of all workers, and messages of other attempts have no effect. The work per
//! message does not depend on the number of hosts or workers, except for broadcasts and the end of
//! an attempt.
mod ending;
pub(super) mod host_state;
mod hosts;
mod roster;
mod workers;

use super::{
    peer_exchange::PeerExchange,
    policy::{AttemptEnd, NoRestartReason, RestartHistory},
    root_cause::{AgentEnd, RootCause},
};
use crate::{leases::HEARTBEAT_INTERVAL, worker_end::PeerEnd};
use diagnostic::Diagnostic;
pub(crate) use host_state::HostIndex;
use host_state::{AgentConnectionState, HostState, LeaseQueue};
use jobspec::{JobSpec, MinHosts, ReloadValues, ids::Rank};
use protocol::{
    control::{ExitStatus, FromAgent, HostInventory, ToAgent, WorkerAddresses},
    event::{Event, WorkerPhase},
    exit::{self, WorkerExit},
    failure::FailureReason,
};
use std::{path::PathBuf, time::Duration};

/// The time limit for planning an attempt and binding its rendezvous.
pub(crate) const PREPARE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the controller waits for the report of the root cause after a worker has exited only
/// because a peer failed.
pub(crate) const ROOT_CAUSE_TIMEOUT: Duration = Duration::from_millis(100);
/// The time from aborting the collectives of built-in workers to SIGKILL.
pub(crate) const ABORT_GRACE: Duration = Duration::from_millis(500);
/// How long a failure report waits for the last output lines of the failed rank.
pub(crate) const TAIL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an agent may take to report that its workers ended, counted from the time at which
/// SIGKILL is due.
pub(crate) const AGENT_END_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of failed attempts after which the host that caused them is excluded, if the other
/// hosts are enough for the job.
pub(crate) const MAX_HOST_FAILURES: u32 = 2;

/// A request to save and stop the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopRequest {
    /// The user pressed Ctrl-C: the controller received SIGINT.
    Interrupt,
    /// The controller received SIGTERM or SIGHUP, or a signal for which `run.signals` requests to
    /// save and stop.
    Terminate,
    /// The batch system sent its signal before the time limit of the job.
    TimeLimit,
}

impl StopRequest {
    /// Returns the exit code of `launch` for a run that this request ended.
    fn to_exit_code(self) -> u8 {
        match self {
            StopRequest::Interrupt => exit::INTERRUPTED,
            StopRequest::Terminate | StopRequest::TimeLimit => exit::TERMINATED,
        }
    }
}

/// The name of a host of the job, and whether the host is remote.
#[derive(Clone, Debug)]
pub(crate) struct HostSetup {
    /// The host's name in the job.
    pub(crate) name: String,
    /// Whether the host is another machine, so that its agent is not a child of the controller.
    pub(crate) remote: bool,
}

/// The settings of a job on which the core's decisions depend.
#[derive(Clone, Debug)]
pub(crate) struct CoreSetup {
    pub(crate) hosts: Vec<HostSetup>,
    /// Whether workers run the built-in runtime instead of programs.
    pub(crate) builtin: bool,
    /// The time from SIGTERM to SIGKILL of programs.
    pub(crate) grace: Duration,
    /// The number of restarts that `run.restarts` allows.
    pub(crate) restarts: u32,
    /// The number of hosts that an attempt uses if enough hosts are available.
    pub(crate) use_hosts: usize,
    /// Whether a change of the list of hosts sets `use_hosts` to the number of listed hosts.
    pub(crate) use_all_listed: bool,
    /// The number of hosts without which no attempt starts (`run.min_hosts`).
    pub(crate) min_hosts: usize,
    /// The seed of the random jitter of the pauses before restarts.
    pub(crate) seed: u64,
}

impl CoreSetup {
    /// Derives the settings from a job and its list of hosts.
    pub(crate) fn new(job: &JobSpec, hosts: Vec<HostSetup>, seed: u64) -> Self {
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
            grace: Duration::from_millis(job.run.grace_period_ms),
            restarts: job.run.restarts,
            use_hosts,
            use_all_listed,
            min_hosts,
            seed,
        }
    }
}

/// A worker in the plan of an attempt, reduced to what the core needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedWorker {
    /// The path of the worker's log.
    pub(crate) log: PathBuf,
}

/// An input of the core: a message, a signal, a changed file, or the passing of time.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum ControllerInput {
    /// A message of the agent on a host.
    Agent(HostIndex, FromAgent),
    /// The agent on a host is gone. As far as the controller can know, every process of the job on
    /// that host is gone with the agent.
    AgentGone { host: HostIndex, end: AgentEnd },
    /// An attempt is planned and its rendezvous is bound. `workers` holds the workers of each host
    /// that [`ControllerAction::Prepare`] named, with ranks ascending.
    Ready { attempt: u32, workers: Vec<Vec<PlannedWorker>> },
    /// An attempt could not be planned, or its rendezvous could not be bound.
    Rejected { attempt: u32, diagnostic: Diagnostic },
    /// A request to save and stop, from a signal. A second request kills the workers.
    Stop(StopRequest),
    /// A request to kill the workers without saving (SIGQUIT).
    Kill,
    /// A request to save and continue. Holds the number of the signal that programs get.
    Save(i32),
    /// The job file changed. Holds the new values of the reloadable keys.
    Reload(ReloadValues),
    /// The list of hosts changed. `added` are the new hosts. `listed` states for each known host,
    /// by [`HostIndex`], whether the new list contains the host.
    Hosts { added: Vec<HostSetup>, listed: Vec<bool> },
    /// Time passed, and a deadline may be due.
    Tick,
}

/// An action that the driver executes for the core.
#[derive(Debug, PartialEq)]
pub(crate) enum ControllerAction {
    /// Send a message to the agent on a host.
    Send(HostIndex, ToAgent),
    /// Keep the inventory that the agent of a host sent with its hello.
    RecordInventory(HostIndex, HostInventory),
    /// Plan this attempt and bind its rendezvous. The driver answers with
    /// [`ControllerInput::Ready`] or [`ControllerInput::Rejected`].
    Prepare {
        attempt: u32,
        restarts: u32,
        hosts: Vec<HostIndex>,
        /// The newest checkpoint of this run; `None` if the run has completed no checkpoint.
        resume: Option<PathBuf>,
    },
    /// Start the workers of the attempt that was prepared last.
    StartWorkers,
    /// Start the agent of a host, for the first time or again.
    StartAgent(HostIndex),
    /// Close the control connection of an agent that is no longer needed.
    ReleaseAgent(HostIndex),
    /// Send all built-in workers the addresses of their peers, with a new key for this attempt.
    SendPeers { attempt: u32, members: Vec<WorkerAddresses> },
    /// Report an event to the user and write it to the journal.
    Event(Event),
    /// Show a line of a worker's output to the user.
    Line { rank: Rank, stderr: bool, text: String },
    /// Show the user the phase in which a worker is, such as training.
    Progress { rank: Rank, phase: WorkerPhase },
    /// Kill the agent of a host, because the agent does not answer or cannot do its work.
    KillAgent(HostIndex),
    /// The run is over. No action follows.
    End(RunOutcome),
}

/// The end of a run: the exit code of `launch` and the circumstances that determine it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RunOutcome {
    /// The exit code with which `launch` ends.
    pub(crate) exit_code: u8,
    /// Whether a stop request ended the run.
    pub(crate) stopped: bool,
    /// Whether a stop request ended the run without a chance to save.
    pub(crate) killed: bool,
    /// Whether the run ended because the time limit of the batch job was near.
    pub(crate) near_time_limit: bool,
    /// Whether the root cause is the loss of a host.
    pub(crate) host_lost: bool,
    /// Whether the run completed an optimizer step. Always `true` for programs, whose steps are
    /// unknown.
    pub(crate) made_progress: bool,
    /// The last optimizer step; `None` for programs, whose steps are unknown.
    pub(crate) step: Option<u64>,
    /// The end of each rank other than the failed rank; empty if the run did not fail.
    pub(crate) peers: Vec<PeerEnd>,
}

/// The phase of the current attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttemptState {
    /// The core waits for the agents of the next attempt.
    Joining,
    /// The core waits until the attempt is planned and its rendezvous is bound.
    Preparing,
    /// The workers are started or running.
    Running,
    /// Workers save and stop because of this request. The run ends afterwards.
    Stopping(StopRequest),
    /// Workers save and stop, so that the next attempt starts without hosts that are no longer
    /// listed. With `host_lost`, one of those hosts is lost, and the other workers are killed.
    Draining { host_lost: bool },
    /// Workers are killed after a failure or a second request to stop.
    Ending,
    /// The next attempt begins at the time `until`.
    Backoff { until: Duration },
    /// The run is over.
    Finished,
}

/// A worker of the current attempt, as its agent reported it.
#[derive(Debug)]
struct WorkerState {
    host: HostIndex,
    log: PathBuf,
    /// The process id of the worker; `None` before the agent has started the process.
    pid: Option<u32>,
    /// The exit status and the last output lines of the process; `None` before its end.
    ended: Option<(ExitStatus, Vec<String>)>,
    /// Whether the kernel killed the process because the host ran out of memory.
    oom: bool,
    /// The final report of the worker: the exit code with which it was about to exit, and the
    /// reason. `None` if the worker has sent no final report.
    final_report: Option<(WorkerExit, Diagnostic)>,
    /// For how long the worker had made no progress when its agent reported the stall; `None` while
    /// the worker makes progress.
    stalled_for: Option<Duration>,
}

impl WorkerState {
    /// Whether the worker's process was started and has not ended.
    fn is_running(&self) -> bool {
        self.pid.is_some() && self.ended.is_none()
    }
}

/// The controller's state machine for one run.
pub(crate) struct ControllerCore {
    setup: CoreSetup,
    state: AttemptState,
    hosts: Vec<HostState>,
    leases: LeaseQueue,
    history: RestartHistory,
    /// The current attempt, or the next one while in backoff.
    attempt: u32,

    // ---- state of the current attempt ----
    /// The hosts of the attempt, in the order of ranks.
    members: Vec<HostIndex>,
    /// The number of hosts in `members` that may have processes of this attempt.
    active_hosts: usize,
    /// The workers of the attempt, by rank.
    workers: Vec<WorkerState>,
    /// The number of workers of the attempt that are running, on all hosts.
    running: usize,
    /// The number of running workers that make no progress, according to their agents.
    stalled: usize,
    peer_exchange: PeerExchange,
    /// A failure that is probably the consequence of another, unreported failure. The time is the
    /// deadline for the report of the other failure.
    suspect: Option<(RootCause, Duration)>,
    /// The root cause of the attempt's failure; `None` while no failure was found.
    cause: Option<RootCause>,
    /// The reason why the job is not restarted after the root cause; `None` if the job is restarted
    /// or no restarts were requested.
    no_restart: Option<NoRestartReason>,
    /// The time at which the root cause was found; `None` once the root cause is reported.
    unreported_since: Option<Duration>,
    /// The pause after the failed attempt before the next one begins; `None` if no restart is
    /// pending.
    restart_pause: Option<Duration>,
    /// The last optimizer step that this attempt has completed or resumed from; `None` if unknown.
    attempt_step: Option<u64>,
    /// Whether this attempt completed a checkpoint.
    attempt_saved: bool,
    /// Whether the run has lost any host.
    host_lost: bool,
    /// Whether the run has completed an optimizer step.
    stepped: bool,
    /// The deadline of the current phase; `None` without one. At the deadline the preparation of
    /// the attempt fails, or agents that have not ended their workers are killed.
    phase_deadline: Option<Duration>,

    // ---- state of the whole run ----
    stop_request: Option<StopRequest>,
    killed: bool,
    step: Option<u64>,
    /// The directory of the newest checkpoint that this run has completed; `None` without one.
    checkpoint: Option<PathBuf>,
    /// The message of the failure after which the run was last restarted.
    last_failure: Option<String>,
    any_remote: bool,
    next_heartbeat: Duration,
    /// The number of hosts that are no longer listed and not yet excluded.
    unlisted: usize,
    /// How many hosts of the list [`ControllerCore::try_prepare_attempt`] has examined.
    scanned: HostIndex,
    /// How many of the examined hosts take part in the next attempt.
    scanned_joined: usize,
    actions: Vec<ControllerAction>,
}

impl ControllerCore {
    /// Creates the core of a run that waits for the agents of its first attempt.
    pub(crate) fn new(setup: CoreSetup) -> Self {
        let hosts = setup.hosts.iter().map(|_| HostState::default()).collect();
        let any_remote = setup.hosts.iter().any(|h| h.remote);
        let history =
            RestartHistory { budget: setup.restarts, builtin: setup.builtin, ..RestartHistory::default() };
        ControllerCore {
            setup,
            state: AttemptState::Joining,
            hosts,
            leases: LeaseQueue::default(),
            history,
            attempt: 0,
            members: Vec::new(),
            active_hosts: 0,
            workers: Vec::new(),
            running: 0,
            stalled: 0,
            peer_exchange: PeerExchange::new(0, 0),
            suspect: None,
            cause: None,
            no_restart: None,
            unreported_since: None,
            restart_pause: None,
            attempt_step: None,
            attempt_saved: false,
            host_lost: false,
            stepped: false,
            phase_deadline: None,
            stop_request: None,
            killed: false,
            step: None,
            checkpoint: None,
            last_failure: None,
            any_remote,
            next_heartbeat: Duration::ZERO,
            unlisted: 0,
            scanned: 0,
            scanned_joined: 0,
            actions: Vec::new(),
        }
    }

    /// Begins the run: returns the actions that send a hello to the agent of each host. The caller
    /// must have started the agents just before.
    pub(crate) fn send_hellos(&mut self, now: Duration) -> Vec<ControllerAction> {
        self.next_heartbeat = now + HEARTBEAT_INTERVAL;
        for id in 0..self.hosts.len() {
            if self.hosts[id].agent == AgentConnectionState::NotStarted {
                self.send_hello(now, id);
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// Returns when the next [`ControllerInput::Tick`] is due at the latest, or `None` if no
    /// deadline is pending.
    pub(crate) fn find_next_deadline(&self) -> Option<Duration> {
        let suspect = self.suspect.as_ref().map(|(_, until)| *until);
        let tail = self.unreported_since.map(|since| since + TAIL_TIMEOUT);
        let backoff = if let AttemptState::Backoff { until } = self.state { Some(until) } else { None };
        let heartbeat = self.any_remote.then_some(self.next_heartbeat);
        [suspect, tail, backoff, heartbeat, self.phase_deadline, self.leases.find_next_check()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Processes an input and returns the actions that the driver has to execute. `now` is the time
    /// since the start of the driver's clock, and never decreases.
    pub(crate) fn handle_input(&mut self, now: Duration, input: ControllerInput) -> Vec<ControllerAction> {
        if self.state == AttemptState::Finished {
            return Vec::new();
        }
        match input {
            ControllerInput::Agent(host, message) => {
                if self.hosts.get(host).is_some_and(HostState::is_connected) {
                    self.hosts[host].last_heard = now;
                    self.handle_agent_message(now, host, message);
                }
            }
            ControllerInput::AgentGone { host, end } => {
                if host < self.hosts.len() {
                    self.handle_agent_gone(now, host, end);
                }
            }
            ControllerInput::Ready { attempt, workers } => {
                if self.is_preparing(attempt) {
                    self.start_attempt(now, workers);
                }
            }
            ControllerInput::Rejected { attempt, diagnostic } => {
                if self.is_preparing(attempt) {
                    self.reject_attempt(now, diagnostic);
                }
            }
            ControllerInput::Stop(request) => self.handle_stop_request(now, request),
            ControllerInput::Kill => {
                self.handle_stop_request(now, StopRequest::Terminate);
                self.handle_stop_request(now, StopRequest::Terminate);
            }
            ControllerInput::Save(signal) => {
                self.broadcast_to_agents(&ToAgent::Save { attempt: self.attempt, signal })
            }
            ControllerInput::Reload(values) => {
                self.broadcast_to_agents(&ToAgent::Reload { attempt: self.attempt, values })
            }
            ControllerInput::Hosts { added, listed } => self.update_roster(now, added, &listed),
            ControllerInput::Tick => {}
        }
        self.process_deadlines(now);
        self.report_failure(now);
        self.finish_attempt(now);
        std::mem::take(&mut self.actions)
    }

    /// Sends a message to every agent that has workers of this attempt.
    fn broadcast_to_agents(&mut self, message: &ToAgent) {
        let active = self.members.iter().filter(|id| self.hosts[**id].active);
        self.actions.reserve(self.active_hosts);
        self.actions.extend(active.map(|id| ControllerAction::Send(*id, message.clone())));
    }

    /// Adds an action that reports a notice to the user.
    fn emit_notice(&mut self, message: String) {
        self.actions.push(ControllerAction::Event(Event::new_notice(None, message)));
    }

    /// Processes every deadline that has passed: those of the suspected failure, the next
    /// heartbeat, the leases, the current phase and the pause before the next attempt.
    fn process_deadlines(&mut self, now: Duration) {
        if self.suspect.as_ref().is_some_and(|(_, until)| now >= *until) {
            self.promote_suspect(now);
        }
        self.send_heartbeats(now);
        self.expire_leases(now);
        if self.phase_deadline.is_some_and(|deadline| now >= deadline) {
            self.phase_deadline = None;
            self.handle_phase_timeout(now);
        }
        if matches!(self.state, AttemptState::Backoff { until } if now >= until) {
            self.begin_next_attempt(now);
        }
    }

    /// Processes a message of a connected agent. Drops messages of earlier attempts, except output
    /// lines and failures of the agent itself.
    fn handle_agent_message(&mut self, now: Duration, host: HostIndex, message: FromAgent) {
        if let FromAgent::Hello { version, pid, inventory } = message {
            return self.handle_agent_hello(now, host, version, pid, inventory);
        }
        if self.hosts[host].agent != AgentConnectionState::Joined {
            return;
        }
        // Late messages of an earlier attempt are dropped.
        let is_current = self.hosts[host].active && find_message_attempt(&message) == Some(self.attempt);
        let is_any_attempt = matches!(message, FromAgent::Line { .. } | FromAgent::Failed { rank: None, .. });
        if is_current || is_any_attempt {
            self.handle_worker_message(now, host, message);
        }
    }
}

/// Returns the attempt that a message belongs to, or `None` if the message belongs to no attempt.
fn find_message_attempt(message: &FromAgent) -> Option<u32> {
    match message {
        FromAgent::Bound { attempt, .. }
        | FromAgent::Started { attempt, .. }
        | FromAgent::Exited { attempt, .. }
        | FromAgent::Event { attempt, .. }
        | FromAgent::Progress { attempt, .. }
        | FromAgent::Listening { attempt, .. }
        | FromAgent::Stalled { attempt, .. }
        | FromAgent::Recovered { attempt, .. }
        | FromAgent::Fatal { attempt, .. }
        | FromAgent::Failed { attempt, .. }
        | FromAgent::WorkersEnded { attempt } => Some(*attempt),
        FromAgent::Hello { .. } | FromAgent::Line { .. } | FromAgent::Probed(_) | FromAgent::Heartbeat => {
            None
        }
    }
}

/// Builds the description of a failed attempt from which the restart policy decides on a restart.
fn build_attempt_end(cause: &RootCause, step: Option<u64>, saved: bool) -> AttemptEnd {
    AttemptEnd { exit_code: cause.exit_code, step, saved }
}

#[cfg(test)]
mod harness;
#[cfg(test)]
mod tests;

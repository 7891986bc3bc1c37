//! The controller's decisions, as a state machine without I/O and clock.
//!
//! [`Core::handle`] takes what happened (messages of agents, signals, time) and returns what to do.
//! The first failure by the controller's clock is the root cause; everything after it is its
//! consequence. One start of all workers is an attempt: a message of another attempt has no effect.
//! The work per message does not depend on the number of hosts or workers, except for broadcasts
//! and the end of an attempt.
mod ending;
mod hosts;
mod roster;
mod workers;

use super::{
    peer_exchange::PeerExchange,
    policy::{AttemptEnd, History, NoRestart},
    root_cause::{AgentEnd, RootCause, WorkerEnd},
};
use contract::{
    control::{ExitStatus, FromAgent, HostInventory, PeerAddress, ToAgent},
    event::{Event, Phase},
    exit::{self, WorkerExit},
    failure::FailureReason,
    ids::Rank,
    job::{JobSpec, MinHosts, ReloadValues},
};
use diagnostic::Diagnostic;
use hosts::{AgentState, HostState, LeaseQueue};
use std::{path::PathBuf, time::Duration};

/// Index of a host in the job's list of hosts.
pub(crate) type HostIndex = usize;

/// From starting an agent to its hello: a connection, a login, perhaps a copy of the executable.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// An agent on the controller's machine that sends nothing for this long is lost.
pub(crate) const AGENT_LEASE: Duration = Duration::from_secs(30);
/// An agent on another host that sends nothing for this long is lost: networks fail silently.
pub(crate) const REMOTE_LEASE: Duration = Duration::from_secs(5);
/// Between two heartbeats to an agent on another host.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A lost remote host is not used again before this. If its agent is alive, it has noticed by then
/// that the controller is silent, and has ended its workers.
pub(crate) const LOST_HOST_QUARANTINE: Duration =
    Duration::from_secs(crate::agent::CONTROLLER_LEASE.as_secs() + 7);
/// For planning an attempt and binding its rendezvous.
pub(crate) const PREPARE_TIMEOUT: Duration = Duration::from_secs(15);
/// When the first exit is only the consequence of another failure: how long to wait for that
/// failure.
pub(crate) const ROOT_CAUSE_TIMEOUT: Duration = Duration::from_millis(100);
/// From aborting the collectives of built-in workers to SIGKILL.
pub(crate) const ABORT_GRACE: Duration = Duration::from_millis(500);
/// How long a failure report waits for the last output lines of the failed rank.
pub(crate) const TAIL_TIMEOUT: Duration = Duration::from_secs(1);
/// After SIGKILL is due: how long an agent may take to report that its workers ended.
pub(crate) const AGENT_END_TIMEOUT: Duration = Duration::from_secs(10);
/// A host that made this many attempts fail is excluded when the other hosts are enough.
pub(crate) const MAX_HOST_FAILURES: u32 = 2;

/// A request to end the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopRequest {
    /// SIGINT.
    Interrupt,
    /// SIGTERM or SIGHUP.
    Terminate,
    /// The batch system's signal before the time limit.
    TimeLimit,
}

impl StopRequest {
    fn exit_code(self) -> u8 {
        match self {
            StopRequest::Interrupt => exit::INTERRUPTED,
            StopRequest::Terminate | StopRequest::TimeLimit => exit::TERMINATED,
        }
    }
}

/// A host of the job.
#[derive(Clone, Debug)]
pub(crate) struct HostSetup {
    /// The name in the job.
    pub(crate) name: String,
    /// Whether it is another machine, so that its agent is not a child of the controller.
    pub(crate) remote: bool,
}

/// What the core needs to know about the job.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) hosts: Vec<HostSetup>,
    /// Whether workers run the built-in runtime, and not programs.
    pub(crate) builtin: bool,
    /// From SIGTERM to SIGKILL of programs.
    pub(crate) grace: Duration,
    /// `run.restarts`.
    pub(crate) restarts: u32,
    /// The number of hosts that an attempt uses when they are available.
    pub(crate) use_hosts: usize,
    /// Whether `use_hosts` follows the number of listed hosts.
    pub(crate) use_all_listed: bool,
    /// The number of hosts that an attempt needs.
    pub(crate) min_hosts: usize,
    /// Seed of the jitter of pauses.
    pub(crate) seed: u64,
}

impl Setup {
    pub(crate) fn new(job: &JobSpec, hosts: Vec<HostSetup>, seed: u64) -> Self {
        let count = hosts.len();
        let use_hosts = job.cluster.use_hosts.map_or(count, |n| (n as usize).min(count));
        let min_hosts = match job.run.min_hosts {
            MinHosts::All => use_hosts,
            MinHosts::AtLeast(n) => (n as usize).min(use_hosts),
        };
        // A job that cannot run on fewer hosts does not use more either: an added host is a spare.
        let use_all_listed = job.cluster.use_hosts.is_none() && job.run.min_hosts != MinHosts::All;
        Setup {
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

/// A worker of an attempt's plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedWorker {
    pub(crate) log: PathBuf,
}

/// What happened.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Input {
    /// A message of the agent on a host.
    Agent(HostIndex, FromAgent),
    /// An agent is gone, and with it every process of its host, as far as the controller can know.
    AgentGone { host: HostIndex, end: AgentEnd },
    /// An attempt is planned: the workers of each host that [`Action::Prepare`] named, ranks
    /// ascending.
    Ready { attempt: u32, workers: Vec<Vec<PlannedWorker>> },
    /// An attempt could not be planned, or its rendezvous could not be bound.
    Rejected { attempt: u32, diagnostic: Diagnostic },
    /// A request to save and stop.
    Stop(StopRequest),
    /// A request to end without saving.
    Kill,
    /// A request to save and continue; the signal that programs get.
    Save(i32),
    /// The job file changed: the new values of reloadable keys.
    Reload(ReloadValues),
    /// The list of hosts changed: the new hosts, and which known hosts are listed (by
    /// [`HostIndex`]).
    Hosts { added: Vec<HostSetup>, listed: Vec<bool> },
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    /// Send a message to the agent on a host.
    Send(HostIndex, ToAgent),
    /// Keep the inventory that an agent sent with its hello.
    RecordInventory(HostIndex, HostInventory),
    /// Plan this attempt and bind its rendezvous; answered by [`Input::Ready`] or
    /// [`Input::Rejected`].
    Prepare {
        attempt: u32,
        restarts: u32,
        hosts: Vec<HostIndex>,
        /// The newest checkpoint of this run.
        resume: Option<PathBuf>,
    },
    /// Start the workers of the newest plan.
    StartWorkers,
    /// Start the agent of this host, for the first time or again.
    StartAgent(HostIndex),
    /// Close the control connection of an agent that is no longer needed.
    ReleaseAgent(HostIndex),
    /// Send all built-in workers the addresses of their peers, with a new key for this attempt.
    SendPeers { attempt: u32, members: Vec<PeerAddress> },
    /// Report and store an event.
    Event(Event),
    /// Show a line of a worker's output.
    Line { rank: Rank, stderr: bool, text: String },
    /// Show what a worker is doing.
    Progress { rank: Rank, phase: Phase },
    /// Kill an agent that does not answer.
    KillAgent(HostIndex),
    /// The run is over.
    End(Outcome),
}

/// How a rank that was not the root cause ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerEnd {
    pub(crate) rank: Rank,
    /// The host as the job names it.
    pub(crate) host: String,
    pub(crate) end: WorkerEnd,
}

/// How the run ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) exit_code: u8,
    /// Ended by a stop request.
    pub(crate) stopped: bool,
    /// Ended by a stop request without a chance to save.
    pub(crate) killed: bool,
    /// Ended because the time limit was near.
    pub(crate) time_limit: bool,
    /// The root cause is the loss of a host.
    pub(crate) host_lost: bool,
    /// Whether the run got further than it was at its start, as far as the controller can know.
    pub(crate) progress: bool,
    /// The last optimizer step, where steps are known.
    pub(crate) step: Option<u64>,
    /// After a failure: how the other ranks ended.
    pub(crate) peers: Vec<PeerEnd>,
}

/// The phase of the current attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttemptState {
    /// Waiting for the agents of the next attempt.
    Joining,
    /// Waiting for the plan and the rendezvous.
    Preparing,
    Running,
    /// Ended by a request: workers save and stop.
    Stopping(StopRequest),
    /// Workers save and stop, to start again without hosts that are no longer listed. `host_lost`:
    /// one of those hosts is lost, and the other workers are killed.
    Draining {
        host_lost: bool,
    },
    /// Workers are killed after a failure or a second request.
    Ending,
    /// Waiting for the next attempt, until this time.
    Backoff {
        until: Duration,
    },
    /// The run is over.
    Finished,
}

/// A worker of the current attempt.
#[derive(Debug)]
struct WorkerState {
    host: HostIndex,
    log: PathBuf,
    pid: Option<u32>,
    /// How its process ended, and the last lines of its output.
    ended: Option<(ExitStatus, Vec<String>)>,
    oom: bool,
    final_report: Option<(WorkerExit, Diagnostic)>,
    /// How long it had made no progress when its agent reported that.
    stalled_for: Option<Duration>,
}

impl WorkerState {
    fn is_running(&self) -> bool {
        self.pid.is_some() && self.ended.is_none()
    }
}

/// The state machine of a run.
pub(crate) struct Core {
    setup: Setup,
    state: AttemptState,
    hosts: Vec<HostState>,
    leases: LeaseQueue,
    history: History,
    /// The current attempt, or the next one while in backoff.
    attempt: u32,

    // ---- state of the current attempt ----
    /// Its hosts, in the order of ranks.
    members: Vec<HostIndex>,
    /// Members that may have processes of this attempt.
    active_hosts: usize,
    /// By rank.
    workers: Vec<WorkerState>,
    /// Workers that are running.
    running: usize,
    /// Running workers that make no progress.
    stalled: usize,
    peer_exchange: PeerExchange,
    /// A failure that may be the consequence of one not yet seen, and how long to wait for that
    /// one.
    suspect: Option<(RootCause, Duration)>,
    cause: Option<RootCause>,
    /// Why the job is not started again after the cause, where restarts were requested.
    no_restart: Option<NoRestart>,
    /// When the cause was found, until it is reported.
    unreported_since: Option<Duration>,
    /// The next attempt starts after this pause.
    restart_pause: Option<Duration>,
    /// The last step of this attempt.
    attempt_step: Option<u64>,
    /// Whether this attempt completed a checkpoint.
    attempt_saved: bool,
    /// Whether the run lost a host.
    host_lost: bool,
    /// Whether the run completed a step.
    stepped: bool,
    /// When preparing fails, or when agents that have not ended their workers are killed.
    phase_deadline: Option<Duration>,

    // ---- state of the whole run ----
    stop_request: Option<StopRequest>,
    killed: bool,
    step: Option<u64>,
    /// The newest checkpoint of this run.
    checkpoint: Option<PathBuf>,
    /// The message of the failure that the last restart followed.
    last_failure: Option<String>,
    any_remote: bool,
    next_heartbeat: Duration,
    /// Hosts that are no longer listed and not yet excluded.
    unlisted: usize,
    /// How many hosts of the list [`Core::try_prepare`] has looked at, and how many of them take
    /// part.
    scanned: HostIndex,
    scanned_joined: usize,
    actions: Vec<Action>,
}

impl Core {
    pub(crate) fn new(setup: Setup) -> Self {
        let hosts = setup.hosts.iter().map(|_| HostState::default()).collect();
        let any_remote = setup.hosts.iter().any(|h| h.remote);
        let history = History { budget: setup.restarts, builtin: setup.builtin, ..History::default() };
        Core {
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

    /// Sends a hello to every agent, all of which were just started.
    pub(crate) fn start(&mut self, now: Duration) -> Vec<Action> {
        self.next_heartbeat = now + HEARTBEAT_INTERVAL;
        for id in 0..self.hosts.len() {
            if self.hosts[id].agent == AgentState::NotStarted {
                self.send_hello(now, id);
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// When the next [`Input::Tick`] is due at the latest; `None`: no deadline.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let suspect = self.suspect.as_ref().map(|(_, until)| *until);
        let tail = self.unreported_since.map(|since| since + TAIL_TIMEOUT);
        let backoff = if let AttemptState::Backoff { until } = self.state { Some(until) } else { None };
        let heartbeat = self.any_remote.then_some(self.next_heartbeat);
        [suspect, tail, backoff, heartbeat, self.phase_deadline, self.leases.next()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Processes what happened at `now` (since any fixed start; monotonic) and returns what to do.
    pub(crate) fn handle(&mut self, now: Duration, input: Input) -> Vec<Action> {
        if self.state == AttemptState::Finished {
            return Vec::new();
        }
        match input {
            Input::Agent(host, message) => {
                if self.hosts.get(host).is_some_and(HostState::is_connected) {
                    self.hosts[host].last_heard = now;
                    self.agent_message(now, host, message);
                }
            }
            Input::AgentGone { host, end } => {
                if host < self.hosts.len() {
                    self.agent_gone(now, host, end);
                }
            }
            Input::Ready { attempt, workers } => {
                if self.is_preparing(attempt) {
                    self.start_attempt(now, workers);
                }
            }
            Input::Rejected { attempt, diagnostic } => {
                if self.is_preparing(attempt) {
                    self.reject_attempt(now, diagnostic);
                }
            }
            Input::Stop(request) => self.stop(now, request),
            Input::Kill => {
                self.stop(now, StopRequest::Terminate);
                self.stop(now, StopRequest::Terminate);
            }
            Input::Save(signal) => self.broadcast(&ToAgent::Save { attempt: self.attempt, signal }),
            Input::Reload(values) => self.broadcast(&ToAgent::Reload { attempt: self.attempt, values }),
            Input::Hosts { added, listed } => self.update_roster(now, added, &listed),
            Input::Tick => {}
        }
        self.check_deadlines(now);
        self.report_failure(now);
        self.finish_attempt(now);
        std::mem::take(&mut self.actions)
    }

    /// Sends a message to every agent that has workers of this attempt.
    fn broadcast(&mut self, message: &ToAgent) {
        let active = self.members.iter().filter(|id| self.hosts[**id].active);
        self.actions.reserve(self.active_hosts);
        self.actions.extend(active.map(|id| Action::Send(*id, message.clone())));
    }

    fn emit_notice(&mut self, message: String) {
        self.actions.push(Action::Event(Event::notice(None, message)));
    }

    fn check_deadlines(&mut self, now: Duration) {
        if self.suspect.as_ref().is_some_and(|(_, until)| now >= *until) {
            self.promote_suspect(now);
        }
        self.send_heartbeats(now);
        self.check_leases(now);
        if self.phase_deadline.is_some_and(|deadline| now >= deadline) {
            self.phase_deadline = None;
            self.phase_timed_out(now);
        }
        if matches!(self.state, AttemptState::Backoff { until } if now >= until) {
            self.begin_joining(now);
        }
    }

    fn agent_message(&mut self, now: Duration, host: HostIndex, message: FromAgent) {
        if let FromAgent::Hello { version, pid, inventory } = message {
            return self.agent_connected(now, host, version, pid, inventory);
        }
        if self.hosts[host].agent != AgentState::Joined {
            return;
        }
        // A late message of an earlier attempt has no effect.
        let is_current = self.hosts[host].active && message_attempt(&message) == Some(self.attempt);
        let is_any_attempt = matches!(message, FromAgent::Line { .. } | FromAgent::Failed { rank: None, .. });
        if is_current || is_any_attempt {
            self.worker_message(now, host, message);
        }
    }
}

/// The attempt that a message belongs to.
fn message_attempt(message: &FromAgent) -> Option<u32> {
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

/// How this attempt ended, for the restart policy.
fn attempt_end(cause: &RootCause, step: Option<u64>, saved: bool) -> AttemptEnd {
    AttemptEnd { exit_code: cause.exit_code, step, saved }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

//! The state machine that makes the controller's decisions: it receives each input (such as an
//! agent's message) with its time, and returns actions. It does no I/O and reads no clock.
//!
//! [`ControllerCore::handle_input`] takes an input (a message of an agent, a signal, the passing of
//! time) and returns the actions that the driver has to execute. The first failure by the
//! controller's clock is the root cause, and all later failures count as its consequences. An
//! attempt is one start of all workers, and messages of other attempts have no effect. The work per
//! message does not depend on the number of hosts or workers, except for broadcasts and the end of
//! an attempt.
mod actions;
mod adoption;
mod adoption_state;
mod attach_failure;
mod ending;
mod hang_evidence;
mod host_list_changes;
mod host_reconnection;
mod host_selection;
pub(super) mod host_state;
mod hosts;
mod memo;
mod orphans;
mod replay;
mod run_memo;
mod setup;
mod stop_request;
mod taken_over_journal;
mod takeover_continuation;
mod workers;

use super::{
    peer_exchange::PeerExchange,
    report_id::ReportId,
    restart_policy::{AttemptEnd, NoRestartReason, RestartHistory},
    root_cause::{AgentEnd, RootCause},
};
use crate::leases::HEARTBEAT_INTERVAL;
pub(crate) use actions::{ControllerAction, ControllerInput, PlannedWorker, RunOutcome};
use adoption_state::Adoption;
pub(crate) use attach_failure::AttachFailure;
use diagnostic::Diagnostic;
pub(crate) use host_state::HostIndex;
use host_state::{AgentConnectionState, HostState, LeaseQueue, OrphanedAttempt};
use protocol::{
    control::{ExitStatus, FromAgent, ToAgent},
    event::Event,
    exit::WorkerExit,
    failure::FailureReason,
    hang::RankEvidence,
};
pub(crate) use run_memo::{RunMemo, StoredMemo, UnstoredEvent};
pub(crate) use setup::{CoreSetup, HostSetup};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};
pub(crate) use stop_request::StopRequest;
pub(crate) use taken_over_journal::TakenOverJournal;

/// How long the agent of the first host may take to bind the rendezvous port (`MASTER_PORT`) before
/// the workers are started. After this time the attempt is rejected.
pub(crate) const RENDEZVOUS_BIND_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the controller waits for another worker's failure report, which contains the root
/// cause, after a worker has failed because of a peer.
pub(crate) const ROOT_CAUSE_TIMEOUT: Duration = Duration::from_millis(100);
/// How long the controller waits for another worker's failure report after a program has failed
/// because torch lost the connection to a rank. A rank that fails may close its connections seconds
/// before its process ends, because Python and the GPU driver free resources.
pub(crate) const CONNECTION_LOSS_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between the abort of the collectives of built-in workers and the SIGKILL for workers
/// that still run.
pub(crate) const ABORT_GRACE: Duration = Duration::from_millis(500);
/// How long the report of a failure to the user waits for the last output lines of the failed rank.
pub(crate) const OUTPUT_TAIL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an agent may take to report that its workers ended, counted from the time at which it
/// sends SIGKILL.
pub(crate) const AGENT_END_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of failed starts or runs of the workers that one host may cause before it is excluded
/// from the job, if enough hosts remain. With copies in memory, attempts that brought progress do
/// not count.
pub(crate) const MAX_HOST_FAILURES: u32 = 2;

/// The phase of the current attempt (one start of all workers), such as joining, running or ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttemptState {
    /// The controller takes over the run, whose previous controller was lost.
    Adopting,
    /// The controller waits for the agents of the next attempt.
    Joining,
    /// The controller waits until the attempt is planned, and then until its rendezvous is bound.
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

/// The state of a worker of the current attempt (one start of all workers), as its agent has
/// reported it.
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
    /// Whether the last reported stall shows a hang if all other workers stall, too.
    stall_shows_hang: bool,
}

impl WorkerState {
    /// Creates the state of a worker whose process is to be started on host `host`.
    fn new(host: HostIndex, log: PathBuf) -> WorkerState {
        WorkerState {
            host,
            log,
            pid: None,
            ended: None,
            oom: false,
            final_report: None,
            stalled_for: None,
            stall_shows_hang: false,
        }
    }

    /// Returns whether the worker's process was started and has not ended.
    fn is_running(&self) -> bool {
        self.pid.is_some() && self.ended.is_none()
    }
}

/// The controller's state machine for one run: receives messages, signals and the time, and returns
/// the actions to execute.
pub(crate) struct ControllerCore {
    setup: CoreSetup,
    state: AttemptState,
    hosts: Vec<HostState>,
    leases: LeaseQueue,
    history: RestartHistory,
    /// The number of the current attempt or, during the pause before a restart, of the next
    /// attempt.
    attempt: u32,

    // ---- state of the current attempt ----
    /// The hosts of the current attempt, in the order of their ranks.
    members: Vec<HostIndex>,
    /// The number of hosts in `members` that may have processes of this attempt.
    active_hosts: usize,
    /// The planned workers of each member, while their rendezvous is being bound.
    planned: Option<Vec<Vec<PlannedWorker>>>,
    /// The workers of the attempt, by rank.
    workers: Vec<WorkerState>,
    /// The number of workers of the attempt that are running, on all hosts.
    running: usize,
    /// The number of running workers that make no progress, according to their agents.
    stalled: usize,
    /// What the agents have collected about the workers of an attempt that hangs.
    evidence: Vec<RankEvidence>,
    peer_exchange: PeerExchange,
    /// A failure that is probably the consequence of another, unreported failure. The time is the
    /// deadline for the report of the other failure.
    suspect: Option<(RootCause, Duration)>,
    /// The root cause of the failure of the current attempt; `None` while no failure was found.
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
    /// Whether an agent has received a signal by which the batch system announces the end of the
    /// job.
    end_announced: bool,
    killed: bool,
    step: Option<u64>,
    /// The directory of the newest checkpoint that this run has completed; `None` without one.
    checkpoint: Option<PathBuf>,
    /// The message of the failure after which the run was last restarted.
    last_failure: Option<String>,
    /// A lost host that may still have all workers of an earlier attempt.
    orphans: Option<OrphanedAttempt>,
    /// The lost hosts whose agents were asked to end, with the times until which their answers are
    /// awaited.
    awaited_evictions: BTreeMap<HostIndex, Duration>,
    /// The takeover of the run, until it is complete.
    adoption: Option<Adoption>,
    /// The number of memos (states of the run for a later controller) that this controller has
    /// sent.
    memos: u64,
    any_remote: bool,
    next_heartbeat: Duration,
    /// The number of hosts that the hostfile no longer lists and that the run has not excluded yet.
    unlisted: usize,
    /// Maps the number of each agent's sequence of reports to the host of the agent.
    streams: BTreeMap<u64, HostIndex>,
    /// The report that is being processed, with its age. `None` if the input is not a report, or if
    /// the report has been recorded.
    current_report: Option<(ReportId, Duration)>,
    /// The time of the next connection with a lost host while the job runs; `None` if no host is
    /// lost.
    next_return: Option<Duration>,
    /// The order in which [`ControllerCore::try_prepare_attempt`] examines the hosts; empty for the
    /// order of the list.
    selection_order: Vec<HostIndex>,
    /// How many hosts [`ControllerCore::try_prepare_attempt`] has examined.
    scanned: usize,
    /// How many of the examined hosts take part in the next attempt.
    scanned_joined: usize,
    actions: Vec<ControllerAction>,
}

impl ControllerCore {
    /// Creates the state machine of a controller that waits for the agents of the first attempt
    /// (start of all workers).
    pub(crate) fn new(setup: CoreSetup) -> Self {
        let hosts = setup.hosts.iter().map(|_| HostState::default()).collect();
        let any_remote = setup.hosts.iter().any(|h| h.remote);
        let history = RestartHistory {
            budget: setup.restarts,
            builtin: setup.builtin,
            has_memory_copies: setup.has_memory_copies,
            ..RestartHistory::default()
        };
        ControllerCore {
            setup,
            state: AttemptState::Joining,
            hosts,
            leases: LeaseQueue::default(),
            history,
            attempt: 0,
            members: Vec::new(),
            active_hosts: 0,
            planned: None,
            workers: Vec::new(),
            running: 0,
            stalled: 0,
            evidence: Vec::new(),
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
            end_announced: false,
            killed: false,
            step: None,
            checkpoint: None,
            last_failure: None,
            orphans: None,
            awaited_evictions: BTreeMap::new(),
            adoption: None,
            memos: 0,
            any_remote,
            next_heartbeat: Duration::ZERO,
            unlisted: 0,
            streams: BTreeMap::new(),
            current_report: None,
            next_return: None,
            selection_order: Vec::new(),
            scanned: 0,
            scanned_joined: 0,
            actions: Vec::new(),
        }
    }

    /// Creates the state machine of a controller that takes over a run from a lost controller.
    /// `placement` is the last attempt and its hosts, as far as the journal records them. With
    /// `is_forced`, the run is taken over although hosts do not answer.
    pub(crate) fn new_for_takeover(
        setup: CoreSetup,
        placement: Option<(u32, Vec<String>)>,
        is_forced: bool,
    ) -> Self {
        let adoption = Some(Adoption::new(setup.hosts.len(), placement, is_forced));
        ControllerCore { state: AttemptState::Adopting, adoption, ..ControllerCore::new(setup) }
    }

    /// Begins the run: returns the actions that send the first message (hello) to the agent of each
    /// host. The caller must have started the agents just before.
    pub(crate) fn send_hellos(&mut self, now: Duration) -> Vec<ControllerAction> {
        self.next_heartbeat = now + HEARTBEAT_INTERVAL;
        for id in 0..self.hosts.len() {
            if self.hosts[id].agent == AgentConnectionState::NotStarted {
                self.send_hello(now, id);
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// Returns the time of the controller's next deadline, such as a heartbeat or a timeout, or
    /// `None` if no deadline is pending.
    pub(crate) fn find_next_deadline(&self) -> Option<Duration> {
        let suspect = self.suspect.as_ref().map(|(_, until)| *until);
        let tail = self.unreported_since.map(|since| since + OUTPUT_TAIL_TIMEOUT);
        let backoff = match self.state {
            AttemptState::Backoff { until } => Some(until.max(self.find_orphan_deadline())),
            _ => None,
        };
        let heartbeat = self.any_remote.then_some(self.next_heartbeat);
        let (lease, eviction) = (self.leases.find_next_check(), self.find_next_eviction_time());
        let deadlines =
            [suspect, tail, backoff, heartbeat, self.phase_deadline, lease, eviction, self.next_return];
        deadlines.into_iter().flatten().min()
    }

    /// Processes one input, such as a message of an agent or a signal, and returns the actions that
    /// the caller must execute. `now` is the time since the start of the driver's clock, and never
    /// decreases.
    pub(crate) fn handle_input(&mut self, now: Duration, input: ControllerInput) -> Vec<ControllerAction> {
        match self.state {
            AttemptState::Finished => return Vec::new(),
            AttemptState::Adopting => self.handle_adoption_input(now, input),
            _ => self.handle_run_input(now, input),
        }
        self.process_deadlines(now);
        self.report_failure(now);
        self.finish_attempt(now);
        std::mem::take(&mut self.actions)
    }

    /// Processes one input, such as a message or the loss of an agent, of a controller that is not
    /// in the middle of a takeover.
    fn handle_run_input(&mut self, now: Duration, input: ControllerInput) {
        match input {
            ControllerInput::Agent(host, message) => {
                if self.hosts.get(host).is_some_and(HostState::is_starting_or_joined) {
                    self.hosts[host].last_heard = now;
                    self.handle_report_or_message(now, host, message);
                }
            }
            ControllerInput::AgentGone { host, end } => {
                if host < self.hosts.len() {
                    self.handle_agent_gone(now, host, end);
                }
            }
            ControllerInput::Planned { attempt, workers, bind } => {
                if self.is_preparing_attempt(attempt) {
                    self.request_rendezvous_bind(now, workers, bind);
                }
            }
            ControllerInput::Rejected { attempt, diagnostic } => {
                if self.is_preparing_attempt(attempt) {
                    self.reject_attempt(now, diagnostic);
                }
            }
            ControllerInput::Stored(reports) => self.acknowledge_reports(&reports),
            ControllerInput::Stop(request) => self.handle_stop_request(now, request),
            ControllerInput::Kill => {
                self.handle_stop_request(now, StopRequest::Terminate);
                self.handle_stop_request(now, StopRequest::Terminate);
            }
            ControllerInput::Save(signal) => {
                self.broadcast_to_active_agents(&ToAgent::Save { attempt: self.attempt, signal })
            }
            ControllerInput::Reload(values) => {
                self.broadcast_to_active_agents(&ToAgent::Reload { attempt: self.attempt, values })
            }
            ControllerInput::Hosts { added, listed } => self.update_host_list(now, added, &listed),
            ControllerInput::Evicted(host) => self.record_eviction(host),
            ControllerInput::InnerHosts(changes) => self.record_inner_hosts(changes),
            ControllerInput::StartStep(host, step) => self.handle_agent_start_step(now, host, step),
            ControllerInput::JournalTaken(_) | ControllerInput::Tick => {}
        }
    }

    /// Sends a message to each agent on whose host workers of the current attempt (start of all
    /// workers) may still run.
    fn broadcast_to_active_agents(&mut self, message: &ToAgent) {
        let active = self.members.iter().filter(|id| self.hosts[**id].active);
        self.actions.reserve(self.active_hosts);
        self.actions.extend(active.map(|id| ControllerAction::Send(*id, message.clone())));
    }

    /// Adds an action that shows the notice `message` to the user and writes it to the journal.
    fn emit_notice(&mut self, message: String) {
        self.actions.push(ControllerAction::Event(Event::new_notice(None, message)));
    }

    /// Handles all deadlines that have passed, such as for heartbeats, silent agents, the end of
    /// killed workers, or the pause before a restart.
    fn process_deadlines(&mut self, now: Duration) {
        if self.suspect.as_ref().is_some_and(|(_, until)| now >= *until) {
            self.confirm_suspected_failure(now);
        }
        self.send_heartbeats(now);
        self.expire_leases(now);
        if self.phase_deadline.is_some_and(|deadline| now >= deadline) {
            self.phase_deadline = None;
            self.handle_phase_timeout(now);
        }
        self.retry_eviction(now);
        self.reconnect_lost_hosts(now);
        let earliest = self.find_orphan_deadline();
        if matches!(self.state, AttemptState::Backoff { until } if now >= until.max(earliest)) {
            self.begin_next_attempt(now);
        }
    }

    /// Handles a message of an agent, and ensures that each report is acknowledged, so that the
    /// agent can delete its copy.
    fn handle_report_or_message(&mut self, now: Duration, host: HostIndex, message: FromAgent) {
        let FromAgent::Report { seq, age_ms, message } = message else {
            return self.handle_agent_message(now, host, message);
        };
        let is_event = matches!(*message, FromAgent::Event { .. });
        let report = (self.hosts[host].stream, seq);
        self.current_report = is_event.then_some((report, Duration::from_millis(age_ms)));
        self.handle_agent_message(now, host, *message);
        if let Some((report, age)) = self.current_report.take() {
            // The agent must not keep an event that nothing records.
            self.actions.push(ControllerAction::WorkerEvent { report, age, event: None });
        }
    }

    /// Informs the agents of the reports that the journal has stored, so that the agents delete
    /// their copies of these reports.
    fn acknowledge_reports(&mut self, reports: &[ReportId]) {
        for (stream, seq) in reports {
            let host = self.streams.get(stream).copied();
            if let Some(host) = host.filter(|host| self.hosts[*host].stream == *stream) {
                self.actions.push(ControllerAction::Send(host, ToAgent::Acknowledge { seq: *seq }));
            }
        }
    }

    /// Processes a message of a connected agent, such as the start or exit of a worker, unless the
    /// message is about workers from before a restart. Output lines and failures of the agent
    /// itself are handled in any case.
    fn handle_agent_message(&mut self, now: Duration, host: HostIndex, message: FromAgent) {
        if let FromAgent::Hello { version, pid, stream, inventory } = message {
            self.hosts[host].stream = stream;
            self.streams.insert(stream, host);
            return self.handle_agent_hello(now, host, version, pid, inventory);
        }
        if self.hosts[host].agent != AgentConnectionState::Joined {
            return;
        }
        if message == FromAgent::Terminating {
            return self.handle_termination_notice(now, host);
        }
        if let FromAgent::Bound { attempt, port } = message {
            return self.handle_bound_rendezvous(now, host, attempt, port);
        }
        // Late messages of an earlier attempt are dropped.
        let is_current = self.hosts[host].active && find_message_attempt(&message) == Some(self.attempt);
        let is_any_attempt = matches!(message, FromAgent::Line { .. } | FromAgent::Failed { rank: None, .. });
        if is_current || is_any_attempt {
            self.handle_worker_message(now, host, message);
        }
    }
}

/// Returns the number of the attempt (start of all workers) that an agent's message is about, or
/// `None` for a message without such a number.
fn find_message_attempt(message: &FromAgent) -> Option<u32> {
    match message {
        FromAgent::Bound { attempt, .. }
        | FromAgent::Started { attempt, .. }
        | FromAgent::Exited { attempt, .. }
        | FromAgent::Event { attempt, .. }
        | FromAgent::Progress { attempt, .. }
        | FromAgent::StepTimes { attempt, .. }
        | FromAgent::Usage { attempt, .. }
        | FromAgent::Listening { attempt, .. }
        | FromAgent::Stalled { attempt, .. }
        | FromAgent::HangEvidence { attempt, .. }
        | FromAgent::Recovered { attempt, .. }
        | FromAgent::Fatal { attempt, .. }
        | FromAgent::Left { attempt, .. }
        | FromAgent::Failed { attempt, .. }
        | FromAgent::WorkersEnded { attempt } => Some(*attempt),
        FromAgent::Hello { .. }
        | FromAgent::Report { .. }
        | FromAgent::Adopted(_)
        | FromAgent::NotAdopted(_)
        | FromAgent::Terminating
        | FromAgent::Released { .. }
        | FromAgent::Line { .. }
        | FromAgent::Probed(_)
        | FromAgent::Exec { .. }
        | FromAgent::Heartbeat => None,
    }
}

/// Builds the description of a failed attempt for the restart policy: the exit code, the last step,
/// and whether a checkpoint was saved.
fn build_attempt_end(cause: &RootCause, step: Option<u64>, saved: bool) -> AttemptEnd {
    AttemptEnd { exit_code: cause.exit_code, step, saved }
}

#[cfg(test)]
mod harness;
#[cfg(test)]
mod tests;

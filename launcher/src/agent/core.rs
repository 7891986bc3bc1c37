//! The agent's state machine, which decides how the agent starts, supervises and ends the workers
//! of its host. Messages, process exits and time are its input, and actions are its output. The
//! state machine does no I/O and reads no clock.
mod actions;
mod controller_link;
mod kept_workers;
mod kill_request;
mod previous_controller;
mod received_memo;
mod report_log;
mod supervised_worker;
mod worker_kills;
mod worker_stops;
mod workers;

pub(crate) use actions::{AgentAction, AgentInput, ProcessGroupSignal};

use super::progress::CollectiveActivity;
use crate::leases::HEARTBEAT_INTERVAL;
use diagnostic::{Diagnostic, codes::run};
use jobspec::{ReloadValues, ids::Rank};
use kill_request::KillRequest;
use previous_controller::PreviousController;
use protocol::control::{
    FromAgent, HangDetection, HostInventory, HostPlan, SupervisionTerms, ToWorker, WorkerPeers,
};
use received_memo::ReceivedMemo;
use report_log::ReportLog;
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    time::Duration,
};
use supervised_worker::SupervisedWorker;

/// The time without a message from a built-in worker after which the agent reports the worker as
/// failed. The time is long because a worker in a debugger or on a machine that swaps is silent,
/// too.
pub(crate) const WORKER_LEASE: Duration = Duration::from_secs(30);
/// The longest time for which the agent postpones the kill of hanging workers so that their stacks
/// can be logged and all hosts can report what their workers do. After this time, the workers are
/// killed in any case.
pub(crate) const STACKS_TIMEOUT: Duration = Duration::from_secs(8);
/// The interval at which the agent measures the activity (CPU time) of its workers.
pub(crate) const ACTIVITY_INTERVAL: Duration = Duration::from_secs(1);
/// The delay of a CPU time measurement above which the agent assumes that the host was suspended,
/// and counts the delay as progress of all workers. The delay shows that the agent was suspended,
/// probably together with the workers, as by Slurm.
const MAX_ACTIVITY_DELAY: Duration = Duration::from_secs(30);
/// How long the agent waits, after the end of a worker's process, for the rest of the worker's
/// output and for its last message.
pub(crate) const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// The phase of an agent's life, from the wait for the controller's first message to the exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentState {
    /// The agent waits for the controller's hello, which is the first message.
    AwaitingHello,
    /// The agent has no workers, either before the first start or after all workers have ended.
    Idle,
    /// Workers run or are being started.
    Running,
    /// All workers have ended, and the agent kills the processes that the workers left.
    Sweeping,
    /// The agent has requested its exit.
    Exiting,
}

/// The state machine of an agent, which decides how to start, supervise and end workers.
pub(crate) struct AgentCore {
    pid: u32,
    /// The random number that identifies the agent's sequence of reports.
    stream: u64,
    inventory: HostInventory,
    /// The time of the input that is being handled.
    now: Duration,
    state: AgentState,
    /// The terms on which the agent obeys its controller. `None` before the hello, and if the agent
    /// only answers probes.
    terms: Option<SupervisionTerms>,
    reports: ReportLog,
    /// The newest memo of the controller: the state of the run that only a controller knows. A
    /// later controller receives it.
    memo: Option<ReceivedMemo>,
    /// The addresses of the workers of the current attempt; `None` before they arrive.
    peers: Option<WorkerPeers>,
    plan: Option<Rc<HostPlan>>,
    workers: BTreeMap<Rank, SupervisedWorker>,
    /// The ended workers whose end was not reported to the controller yet, in the order of their
    /// ends.
    unreported: VecDeque<Rank>,
    /// The index in the plan of the next worker to start.
    next: usize,
    /// Whether a worker is being started, or the start of the first worker is being prepared.
    spawning: bool,
    /// Whether the logs and shared resources of the attempt are being prepared.
    preparing: bool,
    /// Whether the controller has requested that the workers of the attempt stop.
    stop_requested: bool,
    /// The time at which programs that were asked to stop by `run.stop_signal` get SIGTERM. `None`
    /// without such programs, and after this time.
    terminate_at: Option<Duration>,
    /// Whether the user was warned that a program does not handle `run.stop_signal`.
    unhandled_stop_reported: bool,
    /// Whether the controller has requested that the workers of the attempt be killed.
    kill_requested: bool,
    /// The number of the current attempt or, without workers, of the previous attempt.
    attempt: u32,
    /// Whether workers may leave the attempt instead of ending.
    may_leave: bool,
    /// The time at which workers that wait for the next attempt are killed; `None` if none wait.
    waiting_until: Option<Duration>,
    /// The processes of workers that take part in the attempt that is being started, by rank.
    rejoining: BTreeMap<Rank, u32>,
    /// A kill request that is executed after the stacks were written; `None` without such a
    /// request.
    kill_after_stacks: Option<KillRequest>,
    /// The time at which the agent stops waiting for the stacks.
    stacks_deadline: Duration,
    /// The time of the next measurement of the workers' activity.
    activity_at: Duration,
    /// How the agent detects that workers hang; `None` if it does not.
    hang_detection: Option<HangDetection>,
    /// The time at which the workers are killed; `None` if no kill is scheduled.
    kill_at: Option<Duration>,
    /// The time at which the last message of the controller arrived; `None` if the controller has
    /// sent no heartbeat.
    controller_heard_at: Option<Duration>,
    /// The time since which the agent has no controller; `None` while it has one.
    unattended_since: Option<Duration>,
    /// The previous controller, until the present one has given its first command.
    previous_controller: Option<PreviousController>,
    /// Whether the agent exits as soon as no worker is left.
    is_ending: bool,
    /// The time at which the next heartbeat is sent to the controller.
    heartbeat_at: Duration,
    /// The delay with which the agent reports that a worker died of SIGKILL or SIGTERM.
    kill_report_delay: Duration,
    out: Vec<AgentAction>,
}

impl AgentCore {
    /// Creates the state machine of an agent that waits for the controller's first message. `pid`
    /// is the pid of the agent, `stream` the number that identifies its sequence of reports, and
    /// `inventory` describes its host.
    pub(crate) fn new(pid: u32, stream: u64, inventory: HostInventory) -> Self {
        AgentCore {
            pid,
            stream,
            inventory,
            now: Duration::ZERO,
            state: AgentState::AwaitingHello,
            terms: None,
            reports: ReportLog::default(),
            memo: None,
            peers: None,
            plan: None,
            workers: BTreeMap::new(),
            unreported: VecDeque::new(),
            next: 0,
            spawning: false,
            preparing: false,
            stop_requested: false,
            terminate_at: None,
            unhandled_stop_reported: false,
            kill_requested: false,
            attempt: 0,
            may_leave: false,
            waiting_until: None,
            rejoining: BTreeMap::new(),
            kill_after_stacks: None,
            stacks_deadline: Duration::MAX,
            activity_at: Duration::MAX,
            hang_detection: None,
            kill_at: None,
            controller_heard_at: None,
            unattended_since: None,
            previous_controller: None,
            is_ending: false,
            heartbeat_at: Duration::ZERO,
            kill_report_delay: Duration::ZERO,
            out: Vec::new(),
        }
    }

    /// Sets how long the agent holds back its report that a SIGKILL or SIGTERM from another process
    /// ended a worker, because a scheduler may be ending the job.
    pub(crate) fn with_kill_report_delay(self, kill_report_delay: Duration) -> Self {
        AgentCore { kill_report_delay, ..self }
    }

    /// Returns the earliest time at which the agent must act without an input, for example to send
    /// a heartbeat or kill workers.
    pub(crate) fn next_deadline(&self) -> Duration {
        if matches!(self.state, AgentState::AwaitingHello | AgentState::Exiting) {
            return Duration::MAX;
        }
        let first = self.unreported.front().and_then(|rank| self.workers.get(rank));
        let report_at = first.map(|worker| self.exit_report_time(worker));
        let heartbeat_at = self.unattended_since.is_none().then_some(self.heartbeat_at);
        let (activity_at, stacks_deadline) = (Some(self.activity_at), Some(self.stacks_deadline));
        let deadlines = [heartbeat_at, self.unattended_deadline(), self.kill_at, self.waiting_until];
        let others = [report_at, activity_at, stacks_deadline, self.terminate_at];
        let deadlines = deadlines.into_iter().chain(others);
        deadlines.flatten().fold(Duration::MAX, Duration::min)
    }

    /// Handles one input, such as a message, a process exit or the passing of time, and returns the
    /// actions that the driver (which does the agent's I/O) must execute. `now` is the time since
    /// any fixed start and must never decrease.
    pub(crate) fn handle_input(&mut self, now: Duration, input: AgentInput) -> Vec<AgentAction> {
        self.now = now;
        match input {
            AgentInput::Controller(message) => self.on_controller_message(now, message),
            AgentInput::ControllerLost => self.on_controller_lost(now, None),
            AgentInput::AttachRequested { token, purpose } => self.on_attach_requested(now, token, purpose),
            AgentInput::ControllerReplaced(token) => self.exit_for_newer_controller(token),
            AgentInput::CannotStart(diagnostic) => self.fail_and_exit(diagnostic),
            AgentInput::Prepared { attempt } => {
                if self.preparing && attempt == self.attempt {
                    self.preparing = false;
                    self.spawn_next_worker();
                }
            }
            AgentInput::Spawned { rank, pid } => self.on_spawned(now, rank, pid, false),
            AgentInput::Rejoined { rank, pid } => self.on_spawned(now, rank, pid, true),
            // A stop request ended the preparation, such as the script of `run.activate`.
            AgentInput::SpawnFailed { .. } if self.stop_requested && !self.preparing && !self.spawning => {}
            AgentInput::SpawnFailed { rank, diagnostic } => {
                (self.spawning, self.preparing) = (false, false);
                self.send_to_controller(FromAgent::Failed {
                    attempt: self.attempt,
                    rank: Some(rank),
                    diagnostic,
                });
            }
            AgentInput::Worker { rank, message } => self.on_worker_message(now, rank, message),
            AgentInput::WorkerFatal { rank, exit, diagnostic, gpu } => {
                self.on_final_report(now, rank, (exit, diagnostic), gpu);
            }
            AgentInput::WorkerConnectionEnded { rank, error } => self.on_worker_connection_ended(rank, error),
            AgentInput::WorkerExited { rank, status, oom, gpu } => {
                self.on_worker_exited(now, rank, status, oom, gpu)
            }
            AgentInput::Activity { rank, ticks, stopped, collectives } => {
                self.on_activity_measured(now, rank, (ticks, collectives), stopped);
            }
            AgentInput::Usage { attempt, usage } if attempt == self.attempt => {
                self.send_to_controller(FromAgent::Usage { attempt, usage: Box::new(usage) });
            }
            AgentInput::Usage { .. } => {}
            AgentInput::ProgressMarker { rank } => self.on_progress(now, rank),
            AgentInput::Bound { attempt, port } => {
                self.send_to_controller(FromAgent::Bound { attempt, port })
            }
            AgentInput::StacksWritten { evidence } => self.on_stacks_written(now, evidence),
            AgentInput::Drained { rank, tail, error, timeout } => {
                if let Some(worker) = self.workers.get_mut(&rank) {
                    worker.tail = Some(tail);
                    (worker.error, worker.timeout) = (error, timeout);
                }
            }
            AgentInput::Swept { left } => self.on_sweep_finished(&left),
            AgentInput::StopSignalUnhandled { rank } => self.on_stop_signal_unhandled(rank),
            AgentInput::Warning { rank, message } => self.report_warning(rank, message),
            AgentInput::Terminated => self.on_batch_system_sigterm(now),
            AgentInput::Tick => {}
        }
        self.act_on_deadlines(now);
        self.report_ended_workers(now);
        self.sweep_if_all_ended();
        std::mem::take(&mut self.out)
    }

    /// Sends the controller a warning about a worker, which the controller shows to the user.
    fn report_warning(&mut self, rank: Rank, message: String) {
        let event = protocol::event::Event::new_notice(Some(rank), message);
        let attempt = self.attempt;
        self.send_to_controller(FromAgent::Event { attempt, rank, event, is_restored: false });
    }

    /// Sends a message to the controller, and stores most kinds of messages so that they can be
    /// repeated to a later controller. Messages that a newer one replaces are not repeated to a
    /// later controller.
    fn send_to_controller(&mut self, message: FromAgent) {
        let is_transient = message.is_transient();
        match self.terms {
            Some(_) if !is_transient => self.reports.append_report(self.now, message),
            _ => self.send_if_connected(message),
        }
    }

    /// Sends a message to the present controller, and discards the message if there is no
    /// controller.
    fn send_if_connected(&mut self, message: FromAgent) {
        if self.unattended_since.is_none() {
            self.out.push(AgentAction::Send(message));
        }
    }

    /// Returns the oldest report (a message that must reach a controller) that was not sent yet,
    /// and marks the report as sent. Returns `None` if there is no report or no controller.
    pub(crate) fn take_next_report(&mut self, now: Duration) -> Option<FromAgent> {
        self.unattended_since.is_none().then(|| self.reports.take_unsent(now)).flatten()
    }

    /// Returns whether a report (a message that must reach a controller) waits to be sent to the
    /// present controller.
    pub(crate) fn has_report(&self) -> bool {
        self.unattended_since.is_none() && self.reports.has_unsent()
    }

    /// Returns whether the agent must stop reading messages of its workers, because too many worker
    /// events were reported to the controller and not yet acknowledged.
    pub(crate) fn is_backlogged(&self) -> bool {
        self.reports.is_full()
    }

    /// Reports to the controller an error that concerns the whole agent rather than one worker, and
    /// requests that the agent exit with code 1.
    fn fail_and_exit(&mut self, diagnostic: Diagnostic) {
        self.send_to_controller(FromAgent::Failed { attempt: self.attempt, rank: None, diagnostic });
        self.request_exit(1);
    }

    /// Requests that the driver, which does the agent's I/O, end the agent's process with the exit
    /// code `code`.
    fn request_exit(&mut self, code: u8) {
        self.kill_waiting_workers(|_| true);
        self.state = AgentState::Exiting;
        self.out.push(AgentAction::Exit(code));
    }

    // ---- orders of the controller ----

    /// Sends the addresses at which the ranks of the job can reach each other to the built-in
    /// workers of the current attempt (start of all workers). Ignores the addresses if the workers
    /// have them already, from an earlier controller.
    fn forward_peer_addresses(&mut self, peers: WorkerPeers) {
        let is_current = self.plan.as_ref().is_some_and(|plan| plan.attempt == peers.attempt);
        if !is_current || self.peers.is_some() {
            return;
        }
        for rank in self.running_ranks() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Peers(peers.clone()));
            }
        }
        self.peers = Some(peers);
    }

    /// Requests that all workers of this host save a checkpoint. Built-in workers get a message,
    /// and programs the signal `signal`.
    fn request_saves(&mut self, signal: i32) {
        for rank in self.running_ranks() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Save);
            } else {
                self.out.push(AgentAction::RequestSave(rank, signal));
            }
        }
    }

    /// Applies the values of a job file that the user has changed during the run, such as which
    /// ranks' output is shown to the user.
    ///
    /// Also sends the values to rank 0, if rank 0 is a built-in worker on this host. Rank 0 decides
    /// from which step on the values apply.
    fn apply_changed_job(&mut self, values: ReloadValues) {
        self.out.push(AgentAction::ShowOutput(values.log_ranks.clone()));
        if let Some(plan) = &mut self.plan {
            // A later controller takes the job from the plan.
            values.apply_to(&mut Rc::make_mut(plan).job);
        }
        if self.workers.get(&0).is_some_and(|w| w.builtin && w.is_alive()) {
            self.send_to_worker(0, ToWorker::Reload(values));
        }
    }

    /// Begins a new attempt (start of all workers of the job) on this host, for which `plan` lists
    /// the workers to start. Resets the state of the previous attempt, and requests what the start
    /// of workers needs. The workers start afterwards. Ends the agent with an error if the plan is
    /// inconsistent or workers are still running.
    fn start_attempt(&mut self, now: Duration, plan: Box<HostPlan>) {
        let ranks: std::collections::BTreeSet<Rank> = plan.workers.iter().map(|w| w.rank).collect();
        if self.state != AgentState::Idle {
            return self.fail_and_exit(build_protocol_error(
                "the controller started workers while others are running",
            ));
        }
        if ranks.len() != plan.workers.len() || ranks.last().is_some_and(|r| *r >= plan.world) {
            return self.fail_and_exit(build_protocol_error(
                "the plan names a rank twice, or a rank outside the world size",
            ));
        }
        self.state = AgentState::Running;
        self.reports.drop_reports_of_earlier_attempts();
        (self.attempt, self.kill_after_stacks, self.peers) = (plan.attempt, None, None);
        (self.stop_requested, self.kill_requested, self.may_leave) = (false, false, false);
        (self.terminate_at, self.unhandled_stop_reported) = (None, false);
        self.hang_detection = plan.hang_detection;
        self.activity_at =
            if self.hang_detection.is_some() { now + ACTIVITY_INTERVAL } else { Duration::MAX };
        self.select_rejoining_and_kill_others(now, &plan);
        self.workers.clear();
        self.unreported.clear();
        self.kill_at = None;
        self.next = 0;
        let plan: Rc<HostPlan> = plan.into();
        self.plan = Some(plan.clone());
        (self.preparing, self.spawning) = (true, true);
        let kept = self.rejoining.keys().copied().collect();
        self.out.push(AgentAction::PrepareWorkers { plan, kept });
    }

    /// Requests the start of the next worker in the controller's list of workers for this host.
    /// Does nothing if the workers have to stop, or if a kill of the workers is scheduled.
    fn spawn_next_worker(&mut self) {
        let count = self.plan.as_ref().map_or(0, |p| p.workers.len());
        let is_ending = self.stop_requested || self.kill_after_stacks.is_some() || self.kill_at.is_some();
        self.spawning = self.next < count && !is_ending;
        if self.spawning {
            let rank = self.plan.as_ref().map(|plan| plan.workers[self.next].rank);
            let rejoins = rank.is_some_and(|rank| self.rejoining.remove(&rank).is_some());
            self.out.push(match rejoins {
                true => AgentAction::Rejoin(self.next),
                false => AgentAction::Spawn(self.next),
            });
            self.next += 1;
        }
    }

    // ---- time ----

    /// Performs what is due at the time `now`: sends heartbeats, checks for silent workers and a
    /// silent controller, kills workers, or requests measurements.
    fn act_on_deadlines(&mut self, now: Duration) {
        if matches!(self.state, AgentState::AwaitingHello | AgentState::Exiting) {
            return;
        }
        if now >= self.heartbeat_at && self.unattended_since.is_none() {
            self.heartbeat_at = now + HEARTBEAT_INTERVAL;
            self.send_to_controller(FromAgent::Heartbeat);
        }
        self.check_controller_deadlines(now);
        if self.preparing && self.kill_at.is_some_and(|at| now >= at) {
            // No worker was started, and the preparation may be blocked by a disk.
            (self.preparing, self.spawning) = (false, false);
        }
        self.terminate_remaining_programs(now);
        if self.state == AgentState::Running && self.kill_at.is_some_and(|at| now >= at) {
            // The kill is repeated, so that a worker that was being started meanwhile is killed,
            // too.
            let kills: Vec<_> = self
                .running_ranks()
                .into_iter()
                .map(|r| AgentAction::Signal(r, ProcessGroupSignal::Kill))
                .collect();
            self.out.extend(kills);
            self.kill_at =
                (self.spawning || !self.running_ranks().is_empty()).then_some(now + HEARTBEAT_INTERVAL);
        }
        if self.waiting_until.is_some_and(|until| now >= until) {
            self.waiting_until = None;
            self.kill_waiting_workers(|_| true);
        }
        self.report_silent_workers(now);
        if now >= self.stacks_deadline {
            self.execute_postponed_kill(now);
        }
        if now >= self.activity_at && self.state == AgentState::Running {
            if now.saturating_sub(self.activity_at) > MAX_ACTIVITY_DELAY {
                self.running_ranks().into_iter().for_each(|rank| self.on_progress(now, rank));
            }
            self.activity_at = now + ACTIVITY_INTERVAL;
            self.out.push(AgentAction::MeasureActivity);
        }
    }

    /// Reports each built-in worker that has sent no message for [`WORKER_LEASE`] as failed to the
    /// controller, once per worker.
    fn report_silent_workers(&mut self, now: Duration) {
        let mut silent = Vec::new();
        let is_backlogged = self.is_backlogged();
        for (rank, worker) in &mut self.workers {
            if is_backlogged {
                // The agent does not read the messages of workers at present.
                worker.last_message_at = now;
            }
            if worker.builtin
                && worker.is_alive()
                && !worker.silence_reported
                && now > worker.last_message_at + WORKER_LEASE
            {
                worker.silence_reported = true;
                silent.push(*rank);
            }
        }
        for rank in silent {
            let seconds = WORKER_LEASE.as_secs();
            let message = format!("the worker sent no heartbeat for {seconds} s");
            let diagnostic = Diagnostic::error(run::WORKER_SILENT, message).with_field("seconds", seconds);
            self.send_to_controller(FromAgent::Failed {
                attempt: self.attempt,
                rank: Some(rank),
                diagnostic,
            });
        }
    }

    // ---- progress ----

    /// Decides from a new measurement of a worker's CPU time and of its collectives whether the
    /// worker makes progress, hangs or is stopped. Reports a stall to the controller if the worker
    /// has made no progress for the time of [`HangDetection`].
    fn on_activity_measured(
        &mut self,
        now: Duration,
        rank: Rank,
        (ticks, collectives): (u64, Option<CollectiveActivity>),
        stopped: bool,
    ) {
        let (Some(detection), Some(plan)) = (self.hang_detection, self.plan.as_ref()) else { return };
        let HangDetection { timeout_ms, only_in_collectives } = detection;
        let has_pattern = plan.job.run.progress_pattern.is_some() && !only_in_collectives;
        let Some(worker) = self.workers.get_mut(&rank).filter(|w| w.is_alive()) else { return };
        let is_waiting = collectives.is_some_and(|collectives| collectives.is_waiting);
        let used_cpu = worker.progress.record_cpu_time(ticks, worker.builtin, has_pattern);
        let changed = collectives.map(|collectives| worker.progress.record_collectives(collectives.count));
        let progressed = match changed {
            Some(changed) if worker.builtin => changed || used_cpu,
            // A rank that waits in a collective may use CPU time.
            Some(changed) if only_in_collectives => changed || used_cpu && !is_waiting,
            Some(changed) => changed && !has_pattern,
            None => used_cpu,
        };
        if progressed && !stopped {
            return self.on_progress(now, rank);
        }
        let timeout = Duration::from_millis(timeout_ms);
        if let Some((for_ms, stopped)) = worker.progress.take_stall_report(now, timeout, stopped) {
            self.send_to_controller(FromAgent::Stalled {
                attempt: self.attempt,
                rank,
                stalled_ms: for_ms,
                suspended: stopped && !only_in_collectives,
                shows_hang: !only_in_collectives || is_waiting && !stopped,
            });
        }
    }

    /// Records that a worker made progress at the time `now`, from which the agent measures how
    /// long a worker hangs. If a stall of the worker was reported, reports the recovery to the
    /// controller.
    fn on_progress(&mut self, now: Duration, rank: Rank) {
        if self.workers.get_mut(&rank).is_some_and(|w| w.progress.record_progress(now)) {
            self.send_to_controller(FromAgent::Recovered { attempt: self.attempt, rank });
        }
    }
}

/// Creates the error that the controller has sent a message which the protocol between controller
/// and agent does not permit. `message` states the violation.
fn build_protocol_error(message: &str) -> Diagnostic {
    Diagnostic::error(run::INTERNAL, message)
}

#[cfg(test)]
mod tests;

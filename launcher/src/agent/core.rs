//! The agent's state machine: messages, process exits and time are its input, and actions are its
//! output. The state machine does no I/O and reads no clock.
mod actions;
mod workers;

pub(crate) use actions::{AgentAction, AgentInput, GroupSignal};

use super::progress::WorkerProgress;
use crate::leases::{CONTROLLER_LEASE, HEARTBEAT_INTERVAL};
use diagnostic::{Diagnostic, codes::run};
use jobspec::{ReloadValues, ids::Rank};
use protocol::{
    control::{
        ExitStatus, FromAgent, HostInventory, HostPlan, PROTOCOL_VERSION, ToAgent, ToWorker, WorkerInit,
        WorkerPeers,
    },
    exit::WorkerExit,
    failure::GpuFault,
};
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    time::Duration,
};

/// The time without a message after which a built-in worker counts as failed. The time is
/// long because a worker in a debugger or on a machine that swaps is silent, too.
pub(crate) const WORKER_LEASE: Duration = Duration::from_secs(30);
/// The time limit for writing the stacks of hanging workers. After this time, the workers are
/// killed even if their stacks are not written.
pub(crate) const STACKS_TIMEOUT: Duration = Duration::from_secs(8);
/// The interval at which the agent measures the activity (CPU time) of its workers.
pub(crate) const ACTIVITY_INTERVAL: Duration = Duration::from_secs(1);
/// The time limit for the last output and the final report of a worker to arrive after the worker's
/// process has ended.
pub(crate) const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// The phase of an agent's life.
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

/// The state of a worker of the current attempt, in the agent's state machine.
#[derive(Debug)]
struct WorkerState {
    /// Whether the worker runs the built-in runtime instead of a program.
    builtin: bool,
    /// The worker's pid; `None` if the process was never started.
    pid: Option<u32>,
    /// The first message to a built-in worker. `None` after the message was sent, which happens
    /// when the worker's hello arrives, and for a program.
    init: Option<Box<WorkerInit>>,
    /// Messages to a built-in worker that are held back until `init` was sent.
    after_init: Vec<ToWorker>,
    last_message_at: Duration,
    /// Whether the agent has reported that the worker sent no message for [`WORKER_LEASE`].
    silence_reported: bool,
    connection_open: bool,
    status: Option<ExitStatus>,
    ended_at: Duration,
    tail: Option<Vec<String>>,
    error: Option<String>,
    oom: bool,
    gpu: Option<GpuFault>,
    progress: WorkerProgress,
}

impl WorkerState {
    /// Returns whether the worker's process was started and has not been reaped.
    fn is_alive(&self) -> bool {
        self.pid.is_some() && self.status.is_none()
    }
}

/// The state machine of an agent, which decides how to start, supervise and end workers.
pub(crate) struct AgentCore {
    pid: u32,
    inventory: HostInventory,
    state: AgentState,
    plan: Option<Rc<HostPlan>>,
    workers: BTreeMap<Rank, WorkerState>,
    /// The ended workers whose end was not reported to the controller yet, in the order of their
    /// ends.
    unreported: VecDeque<Rank>,
    /// The index in the plan of the next worker to start.
    next: usize,
    spawning: bool,
    /// The number of the current attempt or, without workers, of the last attempt.
    attempt: u32,
    /// The reason and the grace period in milliseconds of a kill request that is executed after the
    /// stacks were written; `None` without such a request.
    kill_after_stacks: Option<(String, u64)>,
    /// The time at which the agent stops waiting for the stacks.
    stacks_deadline: Duration,
    /// The time of the next measurement of the workers' activity.
    activity_at: Duration,
    /// The time without progress after which a worker counts as stalled (`run.hang_timeout`).
    hang_timeout: Option<Duration>,
    /// The time at which the workers are killed; `None` if no kill is scheduled.
    kill_at: Option<Duration>,
    /// The time at which the last message of the controller arrived; `None` if the controller has
    /// sent no heartbeat.
    controller_heard_at: Option<Duration>,
    controller_lost: bool,
    /// The time at which the next heartbeat is sent to the controller.
    heartbeat_at: Duration,
    /// The delay with which the agent reports that a worker died of SIGKILL.
    kill_report_delay: Duration,
    out: Vec<AgentAction>,
}

impl AgentCore {
    /// Creates the state machine of an agent that waits for the controller's hello. `pid` is the
    /// pid of the agent, and `inventory` describes the agent's host.
    pub(crate) fn new(pid: u32, inventory: HostInventory) -> Self {
        AgentCore {
            pid,
            inventory,
            state: AgentState::AwaitingHello,
            plan: None,
            workers: BTreeMap::new(),
            unreported: VecDeque::new(),
            next: 0,
            spawning: false,
            attempt: 0,
            kill_after_stacks: None,
            stacks_deadline: Duration::MAX,
            activity_at: Duration::MAX,
            hang_timeout: None,
            kill_at: None,
            controller_heard_at: None,
            controller_lost: false,
            heartbeat_at: Duration::ZERO,
            kill_report_delay: Duration::ZERO,
            out: Vec::new(),
        }
    }

    /// Sets the delay with which the agent reports that a worker died of SIGKILL, and returns the
    /// changed state machine.
    pub(crate) fn with_kill_report_delay(self, kill_report_delay: Duration) -> Self {
        AgentCore { kill_report_delay, ..self }
    }

    /// Returns the time at which the driver must pass an [`AgentInput::Tick`] at the latest, on the
    /// clock of [`AgentCore::handle_input`].
    pub(crate) fn next_deadline(&self) -> Duration {
        if matches!(self.state, AgentState::AwaitingHello | AgentState::Exiting) {
            return Duration::MAX;
        }
        let first = self.unreported.front().and_then(|rank| self.workers.get(rank));
        let report_at = first.map(|worker| self.report_due_at(worker));
        [self.kill_at, report_at, Some(self.activity_at), Some(self.stacks_deadline)]
            .into_iter()
            .flatten()
            .fold(self.heartbeat_at, Duration::min)
    }

    /// Handles an event and returns the actions that the driver must execute. `now` is the time
    /// since any fixed start and must never decrease.
    pub(crate) fn handle_input(&mut self, now: Duration, input: AgentInput) -> Vec<AgentAction> {
        match input {
            AgentInput::Controller(message) => self.on_controller_message(now, message),
            AgentInput::ControllerLost => self.on_controller_lost(),
            AgentInput::Spawned { rank, pid } => self.on_spawned(now, rank, pid),
            AgentInput::SpawnFailed { rank, diagnostic } => {
                self.spawning = false;
                self.send_to_controller(FromAgent::Failed {
                    attempt: self.attempt,
                    rank: Some(rank),
                    diagnostic,
                });
            }
            AgentInput::Worker { rank, message } => self.on_worker_message(now, rank, message),
            AgentInput::WorkerFatal { rank, exit, diagnostic, gpu } => {
                self.on_worker_fatal(now, rank, (exit, diagnostic), gpu);
            }
            AgentInput::WorkerConnectionEnded { rank, error } => self.on_worker_connection_ended(rank, error),
            AgentInput::WorkerExited { rank, status, oom, gpu } => {
                self.on_worker_exited(now, rank, status, oom, gpu)
            }
            AgentInput::Activity { rank, ticks, stopped } => self.on_activity(now, rank, ticks, stopped),
            AgentInput::ProgressMarker { rank } => self.on_progress(now, rank),
            AgentInput::Bound { attempt, port } => {
                self.send_to_controller(FromAgent::Bound { attempt, port })
            }
            AgentInput::StacksWritten => self.on_stacks_written(now),
            AgentInput::Drained { rank, tail, error } => {
                if let Some(worker) = self.workers.get_mut(&rank) {
                    worker.tail = Some(tail);
                    worker.error = error;
                }
            }
            AgentInput::Swept { left } => self.on_swept(&left),
            AgentInput::Warning { rank, message } => {
                let event = protocol::event::Event::new_notice(Some(rank), message);
                self.send_to_controller(FromAgent::Event { attempt: self.attempt, rank, event });
            }
            AgentInput::Tick => {}
        }
        self.act_on_deadlines(now);
        self.report_ended_workers(now);
        self.sweep_if_all_ended();
        std::mem::take(&mut self.out)
    }

    fn send_to_controller(&mut self, message: FromAgent) {
        self.out.push(AgentAction::Send(message));
    }

    /// Reports an error of the whole agent to the controller and requests an exit with code 1.
    fn fail_and_exit(&mut self, diagnostic: Diagnostic) {
        self.send_to_controller(FromAgent::Failed { attempt: self.attempt, rank: None, diagnostic });
        self.request_exit(1);
    }

    /// Requests that the driver end the agent with this exit code.
    fn request_exit(&mut self, code: u8) {
        self.state = AgentState::Exiting;
        self.out.push(AgentAction::Exit(code));
    }

    // ---- the controller ----

    fn on_controller_message(&mut self, now: Duration, message: ToAgent) {
        if self.state == AgentState::AwaitingHello {
            return match message {
                ToAgent::Hello { version } if version == PROTOCOL_VERSION => {
                    self.state = AgentState::Idle;
                    self.heartbeat_at = now + HEARTBEAT_INTERVAL;
                    let inventory = self.inventory.clone();
                    self.send_to_controller(FromAgent::Hello { version: PROTOCOL_VERSION, pid: self.pid, inventory });
                }
                ToAgent::Hello { version } => self.fail_and_exit(
                    Diagnostic::error(
                        run::AGENT_VERSION_MISMATCH,
                        format!(
                            "the agent speaks version {PROTOCOL_VERSION} of the control protocol and the controller \
                             version {version}"
                        ),
                    )
                    .with_help("install the same build of launch on every host"),
                ),
                _ => self.fail_and_exit(protocol_error("the controller's first message was not a hello")),
            };
        }
        // Every message proves that the controller is alive.
        self.controller_heard_at = self.controller_heard_at.map(|_| now);
        let is_current = |attempt: u32| attempt == self.attempt;
        match message {
            ToAgent::Hello { .. } => self.fail_and_exit(protocol_error("the controller sent a second hello")),
            // The driver answers probes, which do not change the state.
            ToAgent::Probe(_) => {}
            ToAgent::Heartbeat => self.controller_heard_at = Some(now),
            ToAgent::Bind(bind) => self.out.push(AgentAction::Bind(bind)),
            ToAgent::Start(plan) => self.start_attempt(now, plan),
            ToAgent::Stop { attempt, deadline_ms } if is_current(attempt) => {
                self.stop_workers(now, deadline_ms)
            }
            ToAgent::Save { attempt, signal } if is_current(attempt) => self.request_saves(signal),
            ToAgent::Kill { attempt, reason, grace_ms, stacks } if is_current(attempt) => {
                self.kill_workers(now, reason, grace_ms, stacks);
            }
            ToAgent::Reload { attempt, values } if is_current(attempt) => self.forward_reload(values),
            // The message is for an attempt that has ended.
            ToAgent::Stop { .. } | ToAgent::Save { .. } | ToAgent::Kill { .. } | ToAgent::Reload { .. } => {}
            ToAgent::Peers(peers) => self.forward_peers(&peers),
        }
    }

    /// Sends the addresses of all ranks to the built-in workers of the current attempt.
    fn forward_peers(&mut self, peers: &WorkerPeers) {
        if self.plan.as_ref().is_none_or(|plan| plan.attempt != peers.attempt) {
            return; // of an attempt that has ended
        }
        for rank in self.running_ranks() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Peers(peers.clone()));
            }
        }
    }

    /// Requests a save from all workers: from built-in workers by message, and from programs by the
    /// signal `signal`.
    fn request_saves(&mut self, signal: i32) {
        for rank in self.running_ranks() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Save);
            } else {
                self.out.push(AgentAction::RequestSave(rank, signal));
            }
        }
    }

    /// Applies the values of a changed job file. Updates which ranks' output is forwarded to the
    /// controller.
    ///
    /// Also sends the values to rank 0, if rank 0 is a built-in worker on this host. Rank 0 decides
    /// from which step on the values apply.
    fn forward_reload(&mut self, values: ReloadValues) {
        self.out.push(AgentAction::ShowOutput(values.log_ranks.clone()));
        if self.workers.get(&0).is_some_and(|w| w.builtin && w.is_alive()) {
            self.send_to_worker(0, ToWorker::Reload(values));
        }
    }

    /// Begins a new attempt and starts the first worker of the plan. Fails the agent if the plan is
    /// inconsistent or workers are still running.
    fn start_attempt(&mut self, now: Duration, plan: Box<HostPlan>) {
        let ranks: std::collections::BTreeSet<Rank> = plan.workers.iter().map(|w| w.rank).collect();
        if self.state != AgentState::Idle {
            return self
                .fail_and_exit(protocol_error("the controller started workers while others are running"));
        }
        if ranks.len() != plan.workers.len() || ranks.last().is_some_and(|r| *r >= plan.world) {
            return self.fail_and_exit(protocol_error(
                "the plan names a rank twice, or a rank outside the world size",
            ));
        }
        self.state = AgentState::Running;
        (self.attempt, self.kill_after_stacks) = (plan.attempt, None);
        self.hang_timeout = plan.job.run.hang_timeout_ms.map(Duration::from_millis);
        self.activity_at = if self.hang_timeout.is_some() { now + ACTIVITY_INTERVAL } else { Duration::MAX };
        self.workers.clear();
        self.unreported.clear();
        self.kill_at = None;
        self.next = 0;
        let plan: Rc<HostPlan> = plan.into();
        self.plan = Some(plan.clone());
        self.out.push(AgentAction::PrepareWorkers(plan));
        self.spawn_next();
    }

    /// Requests the start of the next worker of the plan. Does nothing if a kill of the workers is
    /// scheduled.
    fn spawn_next(&mut self) {
        let count = self.plan.as_ref().map_or(0, |p| p.workers.len());
        self.spawning = self.next < count && self.kill_at.is_none();
        if self.spawning {
            self.out.push(AgentAction::Spawn(self.next));
            self.next += 1;
        }
    }

    /// Requests that all workers stop. Schedules a kill of the workers that still run `deadline_ms`
    /// milliseconds after `now`. With `None`, no kill is scheduled.
    fn stop_workers(&mut self, now: Duration, deadline_ms: Option<u64>) {
        for rank in self.running_ranks() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Stop);
            } else {
                self.out.push(AgentAction::Signal(rank, GroupSignal::Terminate));
            }
        }
        if let Some(ms) = deadline_ms {
            self.schedule_kill(now + Duration::from_millis(ms));
        }
    }

    /// Ends all workers within the grace period of `grace_ms` milliseconds.
    ///
    /// With `stacks`, first writes the stacks of the workers to their logs. The grace period then
    /// begins after the stacks were written. A second request in this time ends the workers
    /// immediately, without waiting for the stacks.
    fn kill_workers(&mut self, now: Duration, reason: String, grace_ms: u64, stacks: bool) {
        let living = self.running_ranks();
        if stacks && self.kill_after_stacks.is_none() && !living.is_empty() {
            self.kill_after_stacks = Some((reason, grace_ms));
            self.stacks_deadline = now + STACKS_TIMEOUT;
            return self.out.push(AgentAction::WriteStacks(living));
        }
        // A second kill request does not wait for the stacks that the first one requested.
        self.kill_after_stacks = None;
        self.end_workers(now, &reason, grace_ms);
    }

    fn on_stacks_written(&mut self, now: Duration) {
        self.stacks_deadline = Duration::MAX;
        if let Some((reason, grace_ms)) = self.kill_after_stacks.take() {
            self.end_workers(now, &reason, grace_ms);
        }
    }

    /// Ends all workers now, and schedules a kill of the workers that still run after `grace_ms`
    /// milliseconds.
    ///
    /// Initialized built-in workers get an abort message, and all others get SIGTERM. With a grace
    /// period of 0, all workers are killed immediately instead.
    fn end_workers(&mut self, now: Duration, reason: &str, grace_ms: u64) {
        self.schedule_kill(now + Duration::from_millis(grace_ms));
        if grace_ms == 0 {
            return; // `act_on_deadlines` kills the workers
        }
        for rank in self.running_ranks() {
            let worker = &self.workers[&rank];
            // An initialized built-in worker exits by itself after an abort message aborts its
            // collectives.
            if worker.builtin && worker.init.is_none() {
                self.send_to_worker(rank, ToWorker::Abort { reason: reason.to_owned() });
            } else {
                self.out.push(AgentAction::Signal(rank, GroupSignal::Terminate));
            }
        }
    }

    /// Schedules a kill of the workers at the time `at`. Keeps an earlier time that is already
    /// scheduled.
    fn schedule_kill(&mut self, at: Duration) {
        if self.state == AgentState::Running {
            self.kill_at = Some(self.kill_at.map_or(at, |before| before.min(at)));
        }
    }

    fn on_controller_lost(&mut self) {
        if self.controller_lost || self.state == AgentState::Exiting {
            return;
        }
        self.controller_lost = true;
        match self.state {
            AgentState::AwaitingHello | AgentState::Idle => self.request_exit(0),
            AgentState::Running => self.kill_at = Some(Duration::ZERO),
            AgentState::Sweeping | AgentState::Exiting => {}
        }
    }

    // ---- time ----

    /// Performs what is due at `now`: heartbeats, leases, kills and measurements.
    fn act_on_deadlines(&mut self, now: Duration) {
        if matches!(self.state, AgentState::AwaitingHello | AgentState::Exiting) {
            return;
        }
        if now >= self.heartbeat_at {
            self.heartbeat_at = now + HEARTBEAT_INTERVAL;
            self.send_to_controller(FromAgent::Heartbeat);
        }
        if self.controller_heard_at.is_some_and(|heard_at| now > heard_at + CONTROLLER_LEASE) {
            self.on_controller_lost();
        }
        if self.state == AgentState::Running && self.kill_at.is_some_and(|at| now >= at) {
            // The kill is repeated, so that a worker that was being started meanwhile is killed,
            // too.
            let kills: Vec<_> =
                self.running_ranks().into_iter().map(|r| AgentAction::Signal(r, GroupSignal::Kill)).collect();
            self.out.extend(kills);
            self.kill_at =
                (self.spawning || !self.running_ranks().is_empty()).then_some(now + HEARTBEAT_INTERVAL);
        }
        self.report_silent_workers(now);
        if now >= self.stacks_deadline {
            self.on_stacks_written(now);
        }
        if now >= self.activity_at && self.state == AgentState::Running {
            self.activity_at = now + ACTIVITY_INTERVAL;
            self.out.push(AgentAction::MeasureActivity);
        }
    }

    /// Reports each built-in worker that has sent no message for [`WORKER_LEASE`] as failed to the
    /// controller, once per worker.
    fn report_silent_workers(&mut self, now: Duration) {
        let mut silent = Vec::new();
        for (rank, worker) in &mut self.workers {
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

    /// Handles a measurement of a worker's CPU time. Reports a stall to the controller if the
    /// worker has made no progress for `run.hang_timeout`.
    fn on_activity(&mut self, now: Duration, rank: Rank, ticks: u64, stopped: bool) {
        let (Some(timeout), Some(plan)) = (self.hang_timeout, self.plan.as_ref()) else { return };
        let has_pattern = plan.job.run.progress_pattern.is_some();
        let Some(worker) = self.workers.get_mut(&rank).filter(|w| w.is_alive()) else { return };
        if worker.progress.record_cpu_time(ticks, worker.builtin, has_pattern) && !stopped {
            return self.on_progress(now, rank);
        }
        if let Some((for_ms, stopped)) = worker.progress.take_stall_report(now, timeout, stopped) {
            self.send_to_controller(FromAgent::Stalled {
                attempt: self.attempt,
                rank,
                stalled_ms: for_ms,
                suspended: stopped,
            });
        }
    }

    /// Records that a worker made progress at `now`. If a stall of the worker was reported, reports
    /// the recovery to the controller.
    fn on_progress(&mut self, now: Duration, rank: Rank) {
        if self.workers.get_mut(&rank).is_some_and(|w| w.progress.record_progress(now)) {
            self.send_to_controller(FromAgent::Recovered { attempt: self.attempt, rank });
        }
    }
}

/// Returns the error of a controller that violates the control protocol.
fn protocol_error(message: &str) -> Diagnostic {
    Diagnostic::error(run::INTERNAL, message)
}

/// Returns whether a message to the controller must not be dropped, because its loss would change
/// the course or the result of the job.
pub(crate) fn is_critical(message: &FromAgent) -> bool {
    match message {
        FromAgent::Line { .. }
        | FromAgent::Progress { .. }
        | FromAgent::Heartbeat
        | FromAgent::Event { .. } => false,
        FromAgent::Fatal { exit, .. } => *exit != WorkerExit::Done,
        _ => true,
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;

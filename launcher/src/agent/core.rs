//! The agent's state machine: messages, process exits and time go in, commands come out. It does no
//! I/O and reads no clock.
mod workers;

use super::progress::WorkerProgress;
use contract::{
    control::{
        BindRendezvous, ExitStatus, FromAgent, FromWorker, HostInventory, HostPlan, Peers, ToAgent, ToWorker,
        VERSION, WorkerInit,
    },
    exit::WorkerExit,
    failure::GpuFault,
    ids::Rank,
    job::ReloadValues,
};
use diagnostic::{Diagnostic, codes::run};
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    time::Duration,
};

/// The interval of heartbeats to the controller.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// How long a built-in worker may send nothing before it counts as failed. Long, because a worker
/// in a debugger or on a machine that swaps is silent, too.
pub(crate) const WORKER_LEASE: Duration = Duration::from_secs(30);
/// How long the controller may be silent after a heartbeat before the agent ends its workers.
///
/// A controller on the same machine sends no heartbeats, because the end of its stream is enough.
pub(crate) const CONTROLLER_LEASE: Duration = Duration::from_secs(5);
/// How long writing the stacks of hanging workers may take before they are killed without.
pub(crate) const STACKS_TIMEOUT: Duration = Duration::from_secs(8);
/// The interval of checks whether workers make progress.
pub(crate) const ACTIVITY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a worker's last output and final report are awaited after its process has ended.
pub(crate) const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the report of a worker that died of SIGKILL is delayed in a Slurm step.
///
/// Slurm ends a step by killing workers and agent in any order. If the agent dies within the delay,
/// the controller reports the end of the step, and not that of a worker.
pub(crate) const STEP_KILL_DELAY: Duration = Duration::from_millis(300);

/// An event that the agent reacts to.
#[derive(Debug)]
pub(crate) enum Input {
    /// A message of the controller.
    Controller(ToAgent),
    /// The control connection to the controller ended or failed.
    ControllerLost,
    /// A worker's process was started; an answer to [`Action::Spawn`].
    Spawned { rank: Rank, pid: u32 },
    /// A worker's process could not be started; an answer to [`Action::Spawn`].
    SpawnFailed { rank: Rank, diagnostic: Diagnostic },
    /// A message of a built-in worker.
    Worker { rank: Rank, message: FromWorker },
    /// A built-in worker's final report, with the error of its GPU, if the driver reported one.
    WorkerFatal { rank: Rank, exit: WorkerExit, diagnostic: Diagnostic, gpu: Option<GpuFault> },
    /// A worker's control connection ended; `error` is set if it failed.
    WorkerConnectionEnded { rank: Rank, error: Option<Diagnostic> },
    /// A worker's process ended and was reaped, and its process group was killed.
    WorkerExited {
        rank: Rank,
        status: ExitStatus,
        /// Whether the kernel killed it because memory ran out.
        oom: bool,
        /// The error that the GPU driver reported for it.
        gpu: Option<GpuFault>,
    },
    /// The CPU time of a worker's processes so far, in clock ticks, and whether its first process
    /// is stopped by a signal; an answer to [`Action::MeasureActivity`].
    Activity { rank: Rank, ticks: u64, stopped: bool },
    /// A line of output contains `run.progress_pattern`.
    ProgressMarker { rank: Rank },
    /// The port of the rendezvous, or why it was not bound; the answer to [`Action::Bind`].
    Bound { attempt: u32, port: diagnostic::Result<u16> },
    /// The stacks are in the logs; the answer to [`Action::WriteStacks`].
    StacksWritten,
    /// The output that a worker left in its pipes is in its log; the answer to
    /// [`Action::DrainOutput`].
    Drained {
        rank: Rank,
        /// The last lines of the log.
        tail: Vec<String>,
        /// What the program recorded about its failure (`TORCHELASTIC_ERROR_FILE`).
        error: Option<String>,
    },
    /// The answer to [`Action::Sweep`]: the pids that could not be killed.
    Swept { left: Vec<i32> },
    /// A warning about a worker for the user. The worker continues.
    Warning { rank: Rank, message: String },
    /// Time has passed.
    Tick,
}

/// An action for the driver.
#[derive(Debug)]
pub(crate) enum Action {
    /// Send a message to the controller.
    Send(FromAgent),
    /// Set up what the workers of this plan share.
    PrepareWorkers(Rc<HostPlan>),
    /// Start the worker at this index of the plan; answered by [`Input::Spawned`] or
    /// [`Input::SpawnFailed`].
    Spawn(usize),
    /// Send a message to a built-in worker.
    SendToWorker(Rank, ToWorker),
    /// Forward the output lines of only these ranks to the controller from now on.
    ShowOutput(Vec<Rank>),
    /// Send a signal to a worker's process group.
    Signal(Rank, GroupSignal),
    /// Request a save by sending this signal to a program that has a handler for it.
    RequestSave(Rank, i32),
    /// Bind the rendezvous; answered by [`Input::Bound`].
    Bind(BindRendezvous),
    /// Measure the CPU time of all workers; answered by one [`Input::Activity`] for each.
    MeasureActivity,
    /// Write the stacks of these workers to their logs; answered by [`Input::StacksWritten`].
    WriteStacks(Vec<Rank>),
    /// Read what a worker that ended left in its pipes; answered by [`Input::Drained`].
    DrainOutput(Rank),
    /// Kill every process that is left; answered by [`Input::Swept`].
    Sweep,
    /// Exit with this code.
    Exit(u8),
}

/// A signal that ends the process group of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupSignal {
    /// SIGTERM, and SIGCONT for stopped processes.
    Terminate,
    /// SIGKILL.
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentState {
    /// Waits for the controller's hello.
    AwaitingHello,
    /// Has no workers: before the first start, or after all have ended.
    Idle,
    /// Workers run or are being started.
    Running,
    /// All workers have ended; processes that they left are being killed.
    Sweeping,
    /// The agent exits.
    Exiting,
}

/// A worker that was started.
#[derive(Debug)]
struct Worker {
    /// Runs the built-in runtime.
    builtin: bool,
    /// `None` if it was never started.
    pid: Option<u32>,
    /// The first message to a built-in worker, until its hello arrives.
    init: Option<Box<WorkerInit>>,
    /// Messages that follow `init`.
    after_init: Vec<ToWorker>,
    last_message_at: Duration,
    /// Its silence was reported.
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

impl Worker {
    fn is_alive(&self) -> bool {
        self.pid.is_some() && self.status.is_none()
    }
}

/// The state machine of an agent.
pub(crate) struct Core {
    pid: u32,
    inventory: HostInventory,
    state: AgentState,
    plan: Option<Rc<HostPlan>>,
    workers: BTreeMap<Rank, Worker>,
    /// Workers whose end is not reported yet, in the order of their ends.
    unreported: VecDeque<Rank>,
    /// Index of the next worker to start.
    next: usize,
    spawning: bool,
    /// The current or the last attempt.
    attempt: u32,
    /// Kill for this reason, with this grace period in ms, when the stacks are written.
    kill_after_stacks: Option<(String, u64)>,
    /// When the wait for the stacks ends.
    stacks_deadline: Duration,
    /// When the activity of workers is measured next.
    activity_at: Duration,
    /// `run.hang_timeout`.
    hang_timeout: Option<Duration>,
    /// When the workers are killed.
    kill_at: Option<Duration>,
    /// When the last message of a controller that sends heartbeats arrived.
    controller_heard_at: Option<Duration>,
    controller_lost: bool,
    /// When the next heartbeat is sent.
    heartbeat_at: Duration,
    /// The agent runs in a Slurm step.
    in_slurm_step: bool,
    out: Vec<Action>,
}

impl Core {
    /// Creates the state machine of an agent that waits for the controller's hello. `pid` is the
    /// agent's process, and `inventory` describes its host.
    pub(crate) fn new(pid: u32, inventory: HostInventory) -> Self {
        Core {
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
            in_slurm_step: false,
            out: Vec::new(),
        }
    }

    /// Sets whether the agent runs in a Slurm step; see [`STEP_KILL_DELAY`].
    pub(crate) fn with_slurm_step(self, in_slurm_step: bool) -> Self {
        Core { in_slurm_step, ..self }
    }

    /// The latest time for the next [`Input::Tick`].
    pub(crate) fn deadline(&self) -> Duration {
        if matches!(self.state, AgentState::AwaitingHello | AgentState::Exiting) {
            return Duration::MAX;
        }
        let first = self.unreported.front().and_then(|rank| self.workers.get(rank));
        let report_at = first.map(|worker| self.report_at(worker));
        [self.kill_at, report_at, Some(self.activity_at), Some(self.stacks_deadline)]
            .into_iter()
            .flatten()
            .fold(self.heartbeat_at, Duration::min)
    }

    /// Handles an event that happened at `now`, a time since any fixed start that never decreases.
    pub(crate) fn handle(&mut self, now: Duration, input: Input) -> Vec<Action> {
        match input {
            Input::Controller(message) => self.on_controller_message(now, message),
            Input::ControllerLost => self.on_controller_lost(),
            Input::Spawned { rank, pid } => self.on_spawned(now, rank, pid),
            Input::SpawnFailed { rank, diagnostic } => {
                self.spawning = false;
                self.send(FromAgent::Failed { attempt: self.attempt, rank: Some(rank), diagnostic });
            }
            Input::Worker { rank, message } => self.on_worker_message(now, rank, message),
            Input::WorkerFatal { rank, exit, diagnostic, gpu } => {
                self.on_worker_fatal(now, rank, (exit, diagnostic), gpu);
            }
            Input::WorkerConnectionEnded { rank, error } => self.on_worker_connection_ended(rank, error),
            Input::WorkerExited { rank, status, oom, gpu } => {
                self.on_worker_exited(now, rank, status, oom, gpu)
            }
            Input::Activity { rank, ticks, stopped } => self.on_activity(now, rank, ticks, stopped),
            Input::ProgressMarker { rank } => self.on_progress(now, rank),
            Input::Bound { attempt, port } => self.send(FromAgent::Bound { attempt, port }),
            Input::StacksWritten => self.on_stacks_written(now),
            Input::Drained { rank, tail, error } => {
                if let Some(worker) = self.workers.get_mut(&rank) {
                    worker.tail = Some(tail);
                    worker.error = error;
                }
            }
            Input::Swept { left } => self.on_swept(&left),
            Input::Warning { rank, message } => {
                let event = contract::event::Event::notice(Some(rank), message);
                self.send(FromAgent::Event { attempt: self.attempt, rank, event });
            }
            Input::Tick => {}
        }
        self.on_time(now);
        self.report_ended(now);
        self.sweep_if_all_ended();
        std::mem::take(&mut self.out)
    }

    fn send(&mut self, message: FromAgent) {
        self.out.push(Action::Send(message));
    }

    fn reject(&mut self, diagnostic: Diagnostic) {
        self.send(FromAgent::Failed { attempt: self.attempt, rank: None, diagnostic });
        self.exit(1);
    }

    fn exit(&mut self, code: u8) {
        self.state = AgentState::Exiting;
        self.out.push(Action::Exit(code));
    }

    // ---- the controller ----

    fn on_controller_message(&mut self, now: Duration, message: ToAgent) {
        if self.state == AgentState::AwaitingHello {
            return match message {
                ToAgent::Hello { version } if version == VERSION => {
                    self.state = AgentState::Idle;
                    self.heartbeat_at = now + HEARTBEAT_INTERVAL;
                    let found = self.inventory.clone();
                    self.send(FromAgent::Hello { version: VERSION, pid: self.pid, inventory: found });
                }
                ToAgent::Hello { version } => self.reject(
                    Diagnostic::error(
                        run::AGENT_VERSION_MISMATCH,
                        format!(
                            "the agent speaks version {VERSION} of the control protocol and the controller \
                             version {version}"
                        ),
                    )
                    .with_help("install the same build of launch on every host"),
                ),
                _ => self.reject(protocol_error("the controller's first message was not a hello")),
            };
        }
        // Every message proves that the controller is alive.
        self.controller_heard_at = self.controller_heard_at.map(|_| now);
        let is_current = |attempt: u32| attempt == self.attempt;
        match message {
            ToAgent::Hello { .. } => self.reject(protocol_error("the controller sent a second hello")),
            // The driver answers probes; they do not change the state.
            ToAgent::Probe(_) => {}
            ToAgent::Heartbeat => self.controller_heard_at = Some(now),
            ToAgent::Bind(bind) => self.out.push(Action::Bind(bind)),
            ToAgent::Start(plan) => self.start(now, plan),
            ToAgent::Stop { attempt, deadline_ms } if is_current(attempt) => self.stop(now, deadline_ms),
            ToAgent::Save { attempt, signal } if is_current(attempt) => self.save(signal),
            ToAgent::Kill { attempt, reason, grace_ms, stacks } if is_current(attempt) => {
                self.kill(now, reason, grace_ms, stacks);
            }
            ToAgent::Reload { attempt, values } if is_current(attempt) => self.reload(values),
            // Of an attempt that has ended.
            ToAgent::Stop { .. } | ToAgent::Save { .. } | ToAgent::Kill { .. } | ToAgent::Reload { .. } => {}
            ToAgent::Peers(peers) => self.forward_peers(&peers),
        }
    }

    /// Sends the addresses of the peers to the built-in workers of the attempt.
    fn forward_peers(&mut self, peers: &Peers) {
        if self.plan.as_ref().is_none_or(|plan| plan.attempt != peers.attempt) {
            return; // of an attempt that has ended
        }
        for rank in self.living() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Peers(peers.clone()));
            }
        }
    }

    /// Requests a save from all workers.
    fn save(&mut self, signal: i32) {
        for rank in self.living() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Save);
            } else {
                self.out.push(Action::RequestSave(rank, signal));
            }
        }
    }

    /// Forwards the values of a changed job file. Rank 0 decides from which step on they apply.
    fn reload(&mut self, values: ReloadValues) {
        self.out.push(Action::ShowOutput(values.log_ranks.clone()));
        if self.workers.get(&0).is_some_and(|w| w.builtin && w.is_alive()) {
            self.send_to_worker(0, ToWorker::Reload(values));
        }
    }

    /// Starts the workers of a new attempt.
    fn start(&mut self, now: Duration, plan: Box<HostPlan>) {
        let ranks: std::collections::BTreeSet<Rank> = plan.workers.iter().map(|w| w.rank).collect();
        if self.state != AgentState::Idle {
            return self.reject(protocol_error("the controller started workers while others are running"));
        }
        if ranks.len() != plan.workers.len() || ranks.last().is_some_and(|r| *r >= plan.world) {
            return self
                .reject(protocol_error("the plan names a rank twice, or a rank outside the world size"));
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
        self.out.push(Action::PrepareWorkers(plan));
        self.spawn_next();
    }

    /// Starts the next worker of the plan, unless the workers are about to be killed.
    fn spawn_next(&mut self) {
        let count = self.plan.as_ref().map_or(0, |p| p.workers.len());
        self.spawning = self.next < count && self.kill_at.is_none();
        if self.spawning {
            self.out.push(Action::Spawn(self.next));
            self.next += 1;
        }
    }

    /// Requests all workers to stop, and kills those that are left after the deadline.
    fn stop(&mut self, now: Duration, deadline_ms: Option<u64>) {
        for rank in self.living() {
            if self.workers[&rank].builtin {
                self.send_to_worker(rank, ToWorker::Stop);
            } else {
                self.out.push(Action::Signal(rank, GroupSignal::Terminate));
            }
        }
        if let Some(ms) = deadline_ms {
            self.kill_no_later_than(now + Duration::from_millis(ms));
        }
    }

    /// Ends all workers, after writing their stacks if requested.
    fn kill(&mut self, now: Duration, reason: String, grace_ms: u64, stacks: bool) {
        let living = self.living();
        if stacks && self.kill_after_stacks.is_none() && !living.is_empty() {
            self.kill_after_stacks = Some((reason, grace_ms));
            self.stacks_deadline = now + STACKS_TIMEOUT;
            return self.out.push(Action::WriteStacks(living));
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

    fn end_workers(&mut self, now: Duration, reason: &str, grace_ms: u64) {
        self.kill_no_later_than(now + Duration::from_millis(grace_ms));
        if grace_ms == 0 {
            return; // `on_time` kills the workers
        }
        for rank in self.living() {
            let worker = &self.workers[&rank];
            // A built-in worker that is initialized exits by itself when its collectives are
            // aborted.
            if worker.builtin && worker.init.is_none() {
                self.send_to_worker(rank, ToWorker::Abort { reason: reason.to_owned() });
            } else {
                self.out.push(Action::Signal(rank, GroupSignal::Terminate));
            }
        }
    }

    fn kill_no_later_than(&mut self, at: Duration) {
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
            AgentState::AwaitingHello | AgentState::Idle => self.exit(0),
            AgentState::Running => self.kill_at = Some(Duration::ZERO),
            AgentState::Sweeping | AgentState::Exiting => {}
        }
    }

    // ---- time ----

    fn on_time(&mut self, now: Duration) {
        if matches!(self.state, AgentState::AwaitingHello | AgentState::Exiting) {
            return;
        }
        if now >= self.heartbeat_at {
            self.heartbeat_at = now + HEARTBEAT_INTERVAL;
            self.send(FromAgent::Heartbeat);
        }
        if self.controller_heard_at.is_some_and(|heard_at| now > heard_at + CONTROLLER_LEASE) {
            self.on_controller_lost();
        }
        if self.state == AgentState::Running && self.kill_at.is_some_and(|at| now >= at) {
            // Repeated, so that a worker that was being started meanwhile is killed, too.
            let kills: Vec<_> =
                self.living().into_iter().map(|r| Action::Signal(r, GroupSignal::Kill)).collect();
            self.out.extend(kills);
            self.kill_at = (self.spawning || !self.living().is_empty()).then_some(now + HEARTBEAT_INTERVAL);
        }
        self.check_leases(now);
        if now >= self.stacks_deadline {
            self.on_stacks_written(now);
        }
        if now >= self.activity_at && self.state == AgentState::Running {
            self.activity_at = now + ACTIVITY_INTERVAL;
            self.out.push(Action::MeasureActivity);
        }
    }

    fn check_leases(&mut self, now: Duration) {
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
            self.send(FromAgent::Failed { attempt: self.attempt, rank: Some(rank), diagnostic });
        }
    }

    // ---- progress ----

    /// Handles a measurement of a worker's CPU time, and reports a worker that makes no progress.
    fn on_activity(&mut self, now: Duration, rank: Rank, ticks: u64, stopped: bool) {
        let (Some(timeout), Some(plan)) = (self.hang_timeout, self.plan.as_ref()) else { return };
        let has_pattern = plan.job.run.progress_pattern.is_some();
        let Some(worker) = self.workers.get_mut(&rank).filter(|w| w.is_alive()) else { return };
        if worker.progress.cpu_has_progressed(ticks, worker.builtin, has_pattern) && !stopped {
            return self.on_progress(now, rank);
        }
        if let Some((for_ms, stopped)) = worker.progress.check_stall(now, timeout, stopped) {
            self.send(FromAgent::Stalled {
                attempt: self.attempt,
                rank,
                stalled_ms: for_ms,
                suspended: stopped,
            });
        }
    }

    fn on_progress(&mut self, now: Duration, rank: Rank) {
        if self.workers.get_mut(&rank).is_some_and(|w| w.progress.record_progress(now)) {
            self.send(FromAgent::Recovered { attempt: self.attempt, rank });
        }
    }
}

/// An error of the controller that the agent cannot work with.
fn protocol_error(message: &str) -> Diagnostic {
    Diagnostic::error(run::INTERNAL, message)
}

/// Whether the loss of a message changes what the job does or reports.
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

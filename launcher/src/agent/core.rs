//! The agent's decisions: messages, exits and time go in, commands come out. No I/O, no clock.
mod workers;

use super::progress::Progress;
use contract::{
    control::{
        Bind, ExitStatus, FromAgent, FromWorker, HostInventory, HostPlan, Peers, ToAgent, ToWorker, VERSION,
        WorkerInit,
    },
    exit::WorkerExit,
    ids::Rank,
    job::Reload,
};
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    time::Duration,
};

/// Between two heartbeats to the controller.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// A built-in worker that says nothing for this long has failed. Generous: a worker stopped in a debugger, or on a
/// machine that swaps, is silent too.
pub(crate) const WORKER_LEASE: Duration = Duration::from_secs(30);
/// A controller that beats has promised to go on; silence this long after its last beat ends the job on this node.
/// One that never beats (on the same machine, where the end of its stream tells all) is trusted to be there.
pub(crate) const CONTROLLER_LEASE: Duration = Duration::from_secs(5);
/// For the stacks of workers that hang, before they are killed without.
pub(crate) const STACKS_LIMIT: Duration = Duration::from_secs(8);
/// Between two looks at whether workers get on.
pub(crate) const WATCH: Duration = Duration::from_secs(1);
/// After a process ended: how long its last output and last words are waited for.
pub(crate) const LAST_WORDS: Duration = Duration::from_millis(500);
/// A batch system that ends its step kills the workers and this agent at once, in any order. So long it is waited whether that is what killed a
/// worker: then the end of the step is what is to be told, not that of a worker.
pub(crate) const STEP_ENDS: Duration = Duration::from_millis(300);

/// What happened.
#[derive(Debug)]
pub(crate) enum Input {
    Controller(ToAgent),
    /// The control stream ended or broke.
    ControllerGone,
    Spawned {
        rank: Rank,
        pid: u32,
    },
    SpawnFailed {
        rank: Rank,
        message: String,
    },
    Worker {
        rank: Rank,
        message: FromWorker,
    },
    /// A worker's control stream ended, or broke with an error.
    WorkerLink {
        rank: Rank,
        error: Option<String>,
    },
    /// A worker's process ended and was reaped; nothing of its group lives.
    Ended {
        rank: Rank,
        status: ExitStatus,
        /// The kernel killed it because memory ran out.
        oom: bool,
        /// What the driver says of a GPU that failed under it.
        gpu: Option<String>,
    },
    /// What the worker's processes have used of the CPU so far, and whether the first of them is stopped; the answer to
    /// `Watch`.
    Activity {
        rank: Rank,
        ticks: u64,
        stopped: bool,
    },
    /// A line of output that says progress.
    Marker {
        rank: Rank,
    },
    /// The answer to `Bind`.
    Bound {
        epoch: u32,
        port: Result<u16, String>,
    },
    /// The answer to `Stacks`.
    StacksWritten,
    /// All output a worker left is in its log; its last lines.
    Drained {
        rank: Rank,
        tail: Vec<String>,
        /// What it wrote down of why it failed.
        error: Option<String>,
    },
    /// The sweep is over; processes that could not be killed, if any.
    Swept {
        left: Vec<i32>,
    },
    /// A log or an adopted process needs telling.
    Trouble {
        rank: Rank,
        message: String,
    },
    Tick,
}

/// What to do.
#[derive(Debug)]
pub(crate) enum Command {
    Send(FromAgent),
    /// Get ready for the workers of this plan.
    Begin(Rc<HostPlan>),
    /// Start the worker at this index of the plan; answered by `Spawned` or `SpawnFailed`.
    Spawn(usize),
    Tell(Rank, ToWorker),
    /// From now on the console is offered the lines of these ranks.
    Show(Vec<Rank>),
    Signal(Rank, Ending),
    /// Ask a program to save by this signal, if it has a handler for it.
    Notify(Rank, i32),
    /// Bind the rendezvous; answered by `Bound`.
    Bind(Bind),
    /// Look what the workers use of the CPU; answered by an `Activity` each.
    Watch,
    /// Write where these workers are into their logs; answered by `StacksWritten`.
    Stacks(Vec<Rank>),
    /// Read what the ended worker left in its pipes; answered by `Drained`.
    Drain(Rank),
    /// Kill every process that is left; answered by `Swept`.
    Sweep,
    Exit(u8),
}

/// How a worker's group is told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Term,
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the controller's hello.
    New,
    /// No worker: before the first start, or all gone.
    Idle,
    Running,
    Sweeping,
    Over,
}

#[derive(Debug)]
struct Worker {
    builtin: bool,
    /// `None`: never started.
    pid: Option<u32>,
    welcome: Option<Box<WorkerInit>>,
    /// Said before it was welcome; sent after the welcome.
    waiting: Vec<ToWorker>,
    heard: Duration,
    silent: bool,
    link_open: bool,
    status: Option<ExitStatus>,
    ended_at: Duration,
    tail: Option<Vec<String>>,
    error: Option<String>,
    oom: bool,
    gpu: Option<String>,
    progress: Progress,
}

impl Worker {
    fn alive(&self) -> bool {
        self.pid.is_some() && self.status.is_none()
    }
}

/// The state machine.
pub(crate) struct Core {
    pid: u32,
    found: HostInventory,
    state: State,
    plan: Option<Rc<HostPlan>>,
    workers: BTreeMap<Rank, Worker>,
    /// Ended, in the order of their ends, and not yet reported.
    ended: VecDeque<Rank>,
    /// Index of the next worker to start.
    next: usize,
    spawning: bool,
    /// The epoch that runs, or ran last.
    epoch: u32,
    /// Told to kill with this grace as soon as the stacks are written.
    writing: Option<(String, u64)>,
    /// When stacks that are still not written are given up.
    written_by: Duration,
    watch_at: Duration,
    /// `run.hang_timeout`.
    hang_timeout: Option<Duration>,
    kill_at: Option<Duration>,
    controller: Option<Duration>,
    controller_gone: bool,
    beat_at: Duration,
    /// Started by a batch system, as part of a step.
    in_step: bool,
    out: Vec<Command>,
}

impl Core {
    pub(crate) fn new(pid: u32, found: HostInventory) -> Self {
        Core {
            pid,
            found,
            state: State::New,
            plan: None,
            workers: BTreeMap::new(),
            ended: VecDeque::new(),
            next: 0,
            spawning: false,
            epoch: 0,
            writing: None,
            written_by: Duration::MAX,
            watch_at: Duration::MAX,
            hang_timeout: None,
            kill_at: None,
            controller: None,
            controller_gone: false,
            beat_at: Duration::ZERO,
            in_step: false,
            out: Vec::new(),
        }
    }

    /// Of an agent that a batch system started, as part of a step, or of another one.
    pub(crate) fn in_step(self, in_step: bool) -> Self {
        Core { in_step, ..self }
    }

    /// When the next `Tick` is due at the latest.
    pub(crate) fn deadline(&self) -> Duration {
        if matches!(self.state, State::New | State::Over) {
            return Duration::MAX;
        }
        let words = self.ended.front().and_then(|r| self.workers.get(r)).map(|w| self.told_at(w));
        [self.kill_at, words, Some(self.watch_at), Some(self.written_by)]
            .into_iter()
            .flatten()
            .fold(self.beat_at, Duration::min)
    }

    /// Takes in what happened at `now` (since any fixed start; never goes back).
    pub(crate) fn handle(&mut self, now: Duration, input: Input) -> Vec<Command> {
        match input {
            Input::Controller(message) => self.controller(now, message),
            Input::ControllerGone => self.controller_gone(),
            Input::Spawned { rank, pid } => self.spawned(now, rank, pid),
            Input::SpawnFailed { rank, message } => {
                self.spawning = false;
                self.send(FromAgent::Failed { epoch: self.epoch, rank: Some(rank), message });
            }
            Input::Worker { rank, message } => self.worker(now, rank, message),
            Input::WorkerLink { rank, error } => self.worker_link(rank, error),
            Input::Ended { rank, status, oom, gpu } => self.ended(now, rank, status, oom, gpu),
            Input::Activity { rank, ticks, stopped } => self.activity(now, rank, ticks, stopped),
            Input::Marker { rank } => self.moved(now, rank),
            Input::Bound { epoch, port } => self.send(FromAgent::Bound { epoch, port }),
            Input::StacksWritten => self.stacks_written(now),
            Input::Drained { rank, tail, error } => {
                if let Some(worker) = self.workers.get_mut(&rank) {
                    worker.tail = Some(tail);
                    worker.error = error;
                }
            }
            Input::Swept { left } => self.swept(&left),
            Input::Trouble { rank, message } => {
                let event = contract::event::Event::Notice { rank: Some(rank), message };
                self.send(FromAgent::Event { epoch: self.epoch, rank, event });
            }
            Input::Tick => {}
        }
        self.on_time(now);
        self.report_ended(now);
        self.sweep_if_all_ended();
        std::mem::take(&mut self.out)
    }

    fn send(&mut self, message: FromAgent) {
        self.out.push(Command::Send(message));
    }

    fn refuse(&mut self, message: String) {
        self.send(FromAgent::Failed { epoch: self.epoch, rank: None, message });
        self.exit(1);
    }

    fn exit(&mut self, code: u8) {
        self.state = State::Over;
        self.out.push(Command::Exit(code));
    }

    // ---- the controller ----

    fn controller(&mut self, now: Duration, message: ToAgent) {
        if self.state == State::New {
            return match message {
                ToAgent::Hello { version } if version == VERSION => {
                    self.state = State::Idle;
                    self.beat_at = now + BEAT;
                    let found = self.found.clone();
                    self.send(FromAgent::Hello { version: VERSION, pid: self.pid, found });
                }
                ToAgent::Hello { version } => self.refuse(format!(
                    "this agent speaks version {VERSION} of the control messages and the controller speaks version {version}: two \
                     different builds of `launch` are mixed; install the same one on every node"
                )),
                _ => self.refuse("the controller did not introduce itself".into()),
            };
        }
        // Whatever it says, it lives.
        self.controller = self.controller.map(|_| now);
        let of_now = |epoch: u32| epoch == self.epoch;
        match message {
            ToAgent::Hello { .. } => self.refuse("the controller introduced itself twice".into()),
            // The driver answers it itself: looking at the node changes nothing here.
            ToAgent::Probe(_) => {}
            ToAgent::Heartbeat => self.controller = Some(now),
            ToAgent::Bind(bind) => self.out.push(Command::Bind(bind)),
            ToAgent::Start(plan) => self.start(now, plan),
            ToAgent::Stop { epoch, deadline_ms } if of_now(epoch) => self.stop(now, deadline_ms),
            ToAgent::Save { epoch, signal } if of_now(epoch) => self.save(signal),
            ToAgent::Kill { epoch, reason, grace_ms, stacks } if of_now(epoch) => {
                self.kill(now, reason, grace_ms, stacks);
            }
            ToAgent::Reload { epoch, values } if of_now(epoch) => self.reload(values),
            // Of an epoch that is over.
            ToAgent::Stop { .. } | ToAgent::Save { .. } | ToAgent::Kill { .. } | ToAgent::Reload { .. } => {}
            ToAgent::Peers(peers) => self.introduce(&peers),
        }
    }

    /// Tells the built-in workers of the epoch where their peers are.
    fn introduce(&mut self, peers: &Peers) {
        if self.plan.as_ref().is_none_or(|plan| plan.epoch != peers.epoch) {
            return; // of an epoch that is over
        }
        for rank in self.living() {
            if self.workers[&rank].builtin {
                self.tell(rank, ToWorker::Peers(peers.clone()));
            }
        }
    }

    fn save(&mut self, signal: i32) {
        for rank in self.living() {
            if self.workers[&rank].builtin {
                self.tell(rank, ToWorker::Save);
            } else {
                self.out.push(Command::Notify(rank, signal));
            }
        }
    }

    /// The job file changed. Rank 0 decides when the training takes it up.
    fn reload(&mut self, values: Reload) {
        self.out.push(Command::Show(values.show.clone()));
        if self.workers.get(&0).is_some_and(|w| w.builtin && w.alive()) {
            self.tell(0, ToWorker::Reload(values));
        }
    }

    fn start(&mut self, now: Duration, plan: Box<HostPlan>) {
        let ranks: std::collections::BTreeSet<Rank> = plan.workers.iter().map(|w| w.rank).collect();
        if self.state != State::Idle {
            return self.refuse("the controller started workers while others run".into());
        }
        if ranks.len() != plan.workers.len() || ranks.last().is_some_and(|r| *r >= plan.world) {
            return self.refuse("the plan names a rank twice, or one outside the world".into());
        }
        self.state = State::Running;
        (self.epoch, self.writing) = (plan.epoch, None);
        self.hang_timeout = plan.job.run.hang_timeout_ms.map(Duration::from_millis);
        self.watch_at = if self.hang_timeout.is_some() { now + WATCH } else { Duration::MAX };
        self.workers.clear();
        self.ended.clear();
        self.kill_at = None;
        self.next = 0;
        let plan: Rc<HostPlan> = plan.into();
        self.plan = Some(plan.clone());
        self.out.push(Command::Begin(plan));
        self.spawn_next();
    }

    fn spawn_next(&mut self) {
        let count = self.plan.as_ref().map_or(0, |p| p.workers.len());
        self.spawning = self.next < count && self.kill_at.is_none();
        if self.spawning {
            self.out.push(Command::Spawn(self.next));
            self.next += 1;
        }
    }

    fn stop(&mut self, now: Duration, deadline_ms: Option<u64>) {
        for rank in self.living() {
            if self.workers[&rank].builtin {
                self.tell(rank, ToWorker::Stop);
            } else {
                self.out.push(Command::Signal(rank, Ending::Term));
            }
        }
        if let Some(ms) = deadline_ms {
            self.kill_no_later(now + Duration::from_millis(ms));
        }
    }

    fn kill(&mut self, now: Duration, reason: String, grace_ms: u64, stacks: bool) {
        let living = self.living();
        if stacks && self.writing.is_none() && !living.is_empty() {
            self.writing = Some((reason, grace_ms));
            self.written_by = now + STACKS_LIMIT;
            return self.out.push(Command::Stacks(living));
        }
        // Who doesn't want the stacks any more doesn't wait for them.
        self.writing = None;
        self.end_workers(now, &reason, grace_ms);
    }

    fn stacks_written(&mut self, now: Duration) {
        self.written_by = Duration::MAX;
        if let Some((reason, grace_ms)) = self.writing.take() {
            self.end_workers(now, &reason, grace_ms);
        }
    }

    fn end_workers(&mut self, now: Duration, reason: &str, grace_ms: u64) {
        self.kill_no_later(now + Duration::from_millis(grace_ms));
        if grace_ms == 0 {
            return; // `on_time` kills
        }
        for rank in self.living() {
            let worker = &self.workers[&rank];
            // A built-in worker leaves by itself when its collectives break; it can, once it is welcome.
            if worker.builtin && worker.welcome.is_none() {
                self.tell(rank, ToWorker::Abort { reason: reason.to_owned() });
            } else {
                self.out.push(Command::Signal(rank, Ending::Term));
            }
        }
    }

    fn kill_no_later(&mut self, at: Duration) {
        if self.state == State::Running {
            self.kill_at = Some(self.kill_at.map_or(at, |before| before.min(at)));
        }
    }

    fn controller_gone(&mut self) {
        if self.controller_gone || self.state == State::Over {
            return;
        }
        self.controller_gone = true;
        match self.state {
            State::New | State::Idle => self.exit(0),
            State::Running => self.kill_at = Some(Duration::ZERO),
            State::Sweeping | State::Over => {}
        }
    }

    // ---- time ----

    fn on_time(&mut self, now: Duration) {
        if matches!(self.state, State::New | State::Over) {
            return;
        }
        if now >= self.beat_at {
            self.beat_at = now + BEAT;
            self.send(FromAgent::Heartbeat);
        }
        if self.controller.is_some_and(|heard| now > heard + CONTROLLER_LEASE) {
            self.controller_gone();
        }
        if self.state == State::Running && self.kill_at.is_some_and(|at| now >= at) {
            // Stays due: a worker that was being started meanwhile is killed too.
            let again: Vec<_> = self.living().into_iter().map(|r| Command::Signal(r, Ending::Kill)).collect();
            self.out.extend(again);
            self.kill_at = (self.spawning || !self.living().is_empty()).then_some(now + BEAT);
        }
        self.check_leases(now);
        if now >= self.written_by {
            self.stacks_written(now);
        }
        if now >= self.watch_at && self.state == State::Running {
            self.watch_at = now + WATCH;
            self.out.push(Command::Watch);
        }
    }

    fn check_leases(&mut self, now: Duration) {
        let mut silent = Vec::new();
        for (rank, worker) in &mut self.workers {
            if worker.builtin && worker.alive() && !worker.silent && now > worker.heard + WORKER_LEASE {
                worker.silent = true;
                silent.push(*rank);
            }
        }
        for rank in silent {
            let message = format!(
                "stopped responding: nothing was heard of it for {} s (it is stopped, stuck in the kernel, or starved)",
                WORKER_LEASE.as_secs()
            );
            self.send(FromAgent::Failed { epoch: self.epoch, rank: Some(rank), message });
        }
    }

    // ---- progress ----

    /// What a look at a worker's processes says.
    fn activity(&mut self, now: Duration, rank: Rank, ticks: u64, stopped: bool) {
        let (Some(timeout), Some(plan)) = (self.hang_timeout, self.plan.as_ref()) else { return };
        let by_marker = plan.job.run.progress.is_some();
        let Some(worker) = self.workers.get_mut(&rank).filter(|w| w.alive()) else { return };
        if worker.progress.of_cpu(ticks, worker.builtin, by_marker) && !stopped {
            return self.moved(now, rank);
        }
        if let Some((for_ms, stopped)) = worker.progress.still(now, timeout, stopped) {
            self.send(FromAgent::Stalled { epoch: self.epoch, rank, for_ms, stopped });
        }
    }

    fn moved(&mut self, now: Duration, rank: Rank) {
        if self.workers.get_mut(&rank).is_some_and(|w| w.progress.moved(now)) {
            self.send(FromAgent::Recovered { epoch: self.epoch, rank });
        }
    }
}

/// `true` for messages whose loss changes what the job does or reports.
pub(crate) fn must_arrive(message: &FromAgent) -> bool {
    match message {
        FromAgent::Line { .. } | FromAgent::Progress { .. } | FromAgent::Heartbeat | FromAgent::Event { .. } => {
            false
        }
        FromAgent::Fatal { exit, .. } => *exit != WorkerExit::Done,
        _ => true,
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;

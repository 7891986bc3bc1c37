//! The agent's decisions: messages, exits and time go in, commands come out. No I/O, no clock.
use contract::{
    control::{ExitStatus, FromAgent, FromWorker, NodePlan, ToAgent, ToWorker, VERSION, Welcome},
    exit::WorkerExit,
    ids::Rank,
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
pub(crate) const CONTROLLER_LEASE: Duration = Duration::from_secs(30);
/// After a process ended: how long its last output and last words are waited for.
pub(crate) const LAST_WORDS: Duration = Duration::from_millis(500);

/// What happened.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "made and taken apart one at a time, never stored")]
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
    },
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
    Begin(Rc<NodePlan>),
    /// Start the worker at this index of the plan; answered by `Spawned` or `SpawnFailed`.
    Spawn(usize),
    Tell(Rank, ToWorker),
    Signal(Rank, Ending),
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
    welcome: Option<Box<Welcome>>,
    /// Said before it was welcome; sent after the welcome.
    waiting: Vec<ToWorker>,
    heard: Duration,
    silent: bool,
    link_open: bool,
    status: Option<ExitStatus>,
    ended_at: Duration,
    tail: Option<Vec<String>>,
    error: Option<String>,
}

impl Worker {
    fn alive(&self) -> bool {
        self.pid.is_some() && self.status.is_none()
    }
}

/// The state machine.
pub(crate) struct Core {
    host: String,
    pid: u32,
    cpus: Vec<u32>,
    state: State,
    plan: Option<Rc<NodePlan>>,
    workers: BTreeMap<Rank, Worker>,
    /// Ended, in the order of their ends, and not yet reported.
    ended: VecDeque<Rank>,
    /// Index of the next worker to start.
    next: usize,
    spawning: bool,
    kill_at: Option<Duration>,
    controller: Option<Duration>,
    controller_gone: bool,
    beat_at: Duration,
    out: Vec<Command>,
}

impl Core {
    pub(crate) fn new(host: String, pid: u32, cpus: Vec<u32>) -> Self {
        Core {
            host,
            pid,
            cpus,
            state: State::New,
            plan: None,
            workers: BTreeMap::new(),
            ended: VecDeque::new(),
            next: 0,
            spawning: false,
            kill_at: None,
            controller: None,
            controller_gone: false,
            beat_at: Duration::ZERO,
            out: Vec::new(),
        }
    }

    /// When the next `Tick` is due at the latest.
    pub(crate) fn deadline(&self) -> Duration {
        let words = self.ended.front().and_then(|r| self.workers.get(r)).map(|w| w.ended_at + LAST_WORDS);
        [self.kill_at, words].into_iter().flatten().fold(self.beat_at, Duration::min)
    }

    /// Takes in what happened at `now` (since any fixed start; never goes back).
    pub(crate) fn handle(&mut self, now: Duration, input: Input) -> Vec<Command> {
        match input {
            Input::Controller(message) => self.controller(now, message),
            Input::ControllerGone => self.controller_gone(),
            Input::Spawned { rank, pid } => self.spawned(now, rank, pid),
            Input::SpawnFailed { rank, message } => {
                self.spawning = false;
                self.send(FromAgent::Failed { rank: Some(rank), message });
            }
            Input::Worker { rank, message } => self.worker(now, rank, message),
            Input::WorkerLink { rank, error } => self.worker_link(rank, error),
            Input::Ended { rank, status } => self.ended(now, rank, status),
            Input::Drained { rank, tail, error } => {
                if let Some(worker) = self.workers.get_mut(&rank) {
                    worker.tail = Some(tail);
                    worker.error = error;
                }
            }
            Input::Swept { left } => self.swept(&left),
            Input::Trouble { rank, message } => {
                let event = contract::event::Event::Notice { rank: Some(rank), message };
                self.send(FromAgent::Event { rank, event });
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
        self.send(FromAgent::Failed { rank: None, message });
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
                    let (host, cpus) = (self.host.clone(), self.cpus.clone());
                    self.send(FromAgent::Hello { version: VERSION, host, pid: self.pid, cpus });
                }
                ToAgent::Hello { version } => self.refuse(format!(
                    "this agent speaks version {VERSION} of the control messages and the controller speaks version {version}: two \
                     different builds of `launch` are mixed; install the same one on every node"
                )),
                _ => self.refuse("the controller did not introduce itself".into()),
            };
        }
        match message {
            ToAgent::Hello { .. } => self.refuse("the controller introduced itself twice".into()),
            ToAgent::Beat => self.controller = Some(now),
            ToAgent::Start(plan) => self.start(plan),
            ToAgent::Stop { deadline_ms } => self.stop(now, deadline_ms),
            ToAgent::Save => {
                for rank in self.living() {
                    if self.workers[&rank].builtin {
                        self.tell(rank, ToWorker::Save);
                    }
                }
            }
            ToAgent::Kill { reason, grace_ms } => self.kill(now, &reason, grace_ms),
        }
    }

    fn start(&mut self, plan: NodePlan) {
        let ranks: std::collections::BTreeSet<Rank> = plan.workers.iter().map(|w| w.rank).collect();
        if self.state != State::Idle {
            return self.refuse("the controller started workers while others run".into());
        }
        if ranks.len() != plan.workers.len() || ranks.last().is_some_and(|r| *r >= plan.world) {
            return self.refuse("the plan names a rank twice, or one outside the world".into());
        }
        self.state = State::Running;
        self.workers.clear();
        self.ended.clear();
        self.kill_at = None;
        self.next = 0;
        let plan = Rc::new(plan);
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

    fn kill(&mut self, now: Duration, reason: &str, grace_ms: u64) {
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

    // ---- the workers ----

    fn living(&self) -> Vec<Rank> {
        self.workers.iter().filter(|(_, w)| w.alive()).map(|(r, _)| *r).collect()
    }

    fn tell(&mut self, rank: Rank, message: ToWorker) {
        match self.workers.get_mut(&rank) {
            Some(worker) if worker.welcome.is_some() => worker.waiting.push(message),
            _ => self.out.push(Command::Tell(rank, message)),
        }
    }

    fn spawned(&mut self, now: Duration, rank: Rank, pid: u32) {
        let Some(plan) = self.plan.clone() else { return };
        let Some(worker) = plan.workers.iter().find(|w| w.rank == rank) else { return };
        let builtin = worker.command.is_none();
        let welcome = builtin.then(|| {
            Box::new(Welcome {
                version: VERSION,
                rank,
                local_rank: worker.local_rank,
                world: plan.world,
                local_world: worker.local_world,
                threads: worker.threads,
                epoch: plan.epoch,
                run: plan.run.clone(),
                run_dir: plan.run_dir.clone(),
                workdir: worker.workdir.clone(),
                job: plan.job.clone(),
            })
        });
        let worker = Worker {
            builtin,
            pid: Some(pid),
            welcome,
            waiting: Vec::new(),
            heard: now,
            silent: false,
            link_open: builtin,
            status: None,
            ended_at: now,
            tail: None,
            error: None,
        };
        self.workers.insert(rank, worker);
        self.send(FromAgent::Started { rank, pid });
        self.spawn_next();
    }

    fn worker(&mut self, now: Duration, rank: Rank, message: FromWorker) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.heard = now;
        match message {
            FromWorker::Hello { version, pid } if version == VERSION && Some(pid) == worker.pid => {
                let (welcome, waiting) = (worker.welcome.take(), std::mem::take(&mut worker.waiting));
                let welcome = welcome.map(ToWorker::Welcome);
                self.out.extend(welcome.into_iter().chain(waiting).map(|m| Command::Tell(rank, m)));
            }
            FromWorker::Hello { version, pid } => {
                let message = format!(
                    "the worker introduced itself with version {version} and pid {pid}; version {VERSION} and pid {:?} were expected",
                    worker.pid
                );
                self.send(FromAgent::Failed { rank: Some(rank), message });
            }
            FromWorker::Progress { phase, step } => self.send(FromAgent::Progress { rank, phase, step }),
            FromWorker::Event(event) => self.send(FromAgent::Event { rank, event }),
            FromWorker::Fatal { exit, message } => self.send(FromAgent::Fatal { rank, exit, message }),
        }
    }

    fn worker_link(&mut self, rank: Rank, error: Option<String>) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        worker.link_open = false;
        if let (Some(error), true) = (error, worker.alive()) {
            self.send(FromAgent::Failed { rank: Some(rank), message: error });
        }
    }

    fn ended(&mut self, now: Duration, rank: Rank, status: ExitStatus) {
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        if worker.status.is_none() {
            worker.status = Some(status);
            worker.ended_at = now;
            self.ended.push_back(rank);
            self.out.push(Command::Drain(rank));
        }
    }

    /// Reports ended workers in the order of their ends, each when its last words are known or waited for long enough.
    fn report_ended(&mut self, now: Duration) {
        while let Some(&rank) = self.ended.front() {
            let Some(worker) = self.workers.get_mut(&rank) else { return };
            let complete = worker.tail.is_some() && !worker.link_open;
            let (Some(status), Some(pid)) = (worker.status, worker.pid) else { return };
            if !complete && now < worker.ended_at + LAST_WORDS {
                return;
            }
            let tail = worker.tail.take().unwrap_or_default();
            let error = worker.error.take().filter(|_| status != ExitStatus::Code(0));
            self.ended.pop_front();
            self.send(FromAgent::Exited { rank, pid, status, tail, error });
        }
    }

    fn sweep_if_all_ended(&mut self) {
        let all_ended = self.living().is_empty() && self.ended.is_empty() && !self.spawning;
        if self.state == State::Running && all_ended {
            self.state = State::Sweeping;
            self.out.push(Command::Sweep);
        }
    }

    fn swept(&mut self, left: &[i32]) {
        if self.state != State::Sweeping {
            return;
        }
        if !left.is_empty() {
            return self.refuse(format!(
                "processes {left:?} do not die of SIGKILL: they hang in the kernel, most often in a device or network file system"
            ));
        }
        self.state = State::Idle;
        self.send(FromAgent::AllGone);
        if self.controller_gone {
            self.exit(1);
        }
    }

    // ---- time ----

    fn on_time(&mut self, now: Duration) {
        if matches!(self.state, State::New | State::Over) {
            return;
        }
        if now >= self.beat_at {
            self.beat_at = now + BEAT;
            self.send(FromAgent::Beat);
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
            self.send(FromAgent::Failed { rank: Some(rank), message });
        }
    }
}

/// `true` for messages whose loss changes what the job does or reports.
pub(crate) fn must_arrive(message: &FromAgent) -> bool {
    match message {
        FromAgent::Line { .. } | FromAgent::Progress { .. } | FromAgent::Beat | FromAgent::Event { .. } => {
            false
        }
        FromAgent::Fatal { exit, .. } => *exit != WorkerExit::Done,
        _ => true,
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;

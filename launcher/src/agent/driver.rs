//! Executes the actions of the agent's state machine and reports events to it.
use super::{
    activity,
    core::{AgentAction, AgentCore, AgentInput, is_critical},
    debug_log, error_file,
    gpu_faults::GpuFaultWatch,
    oom::OomWatch,
    output::{OutputPump, PumpEvent, PumpOptions, RankLog},
    probe::Prober,
    process,
    stacks::{self, StackTarget},
};
use crate::{
    clock::RunningClock,
    cluster,
    connection::{FrameError, MessagePriority, Outbox, read_frames, write_frames},
    processes::{kill_descendants, reap_children},
    rendezvous::{BoundRendezvous, StoreServer},
};
use diagnostic::{Diagnostic, codes};
use jobspec::{env, ids::Rank};
use nix::sys::signal::Signal;
use protocol::{
    control::{ExitStatus, FromAgent, FromWorker, HostPlan, RendezvousRequest, ToAgent, ToWorker},
    event::Event,
};
use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::PathBuf,
    rc::Rc,
    time::Duration,
};
use tokio::{
    net::UnixStream,
    signal::unix::{Signal as SignalStream, SignalKind, signal as signal_stream},
    sync::mpsc,
    time::{Instant, sleep},
};

/// The time limit for processes to end after SIGKILL in a sweep. Processes that remain are reported
/// as unkillable.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest pause between two searches for remaining processes during a sweep.
const SWEEP_INTERVAL: Duration = Duration::from_millis(5);
/// The number of messages that fit into each channel to the event loop.
pub(super) const CHANNEL_CAPACITY: usize = 256;

/// The rank and the pid of a worker. The pid of a rank differs between attempts and reveals late
/// messages of an earlier attempt.
type WorkerId = (Rank, u32);

/// The agent's connections to a worker's process.
struct WorkerHandle {
    pid: u32,
    outbox: Option<Outbox<ToWorker>>,
    pump: Option<OutputPump>,
}

/// The receiver of the queue of messages from the controller. `Ok(None)` is the end of the control
/// connection.
type ControllerInbox = mpsc::Receiver<((), Result<Option<ToAgent>, FrameError>)>;
/// The sender and the receiver of one channel to the event loop.
type ChannelEnds<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);
/// A message of a worker, the end of the worker's control connection (`Ok(None)`), or a read error
/// of the connection.
type WorkerMessage = (WorkerId, Result<Option<FromWorker>, FrameError>);

/// Executes the actions that the agent's state machine (`core`) requests, and reports events to the
/// state machine.
pub(super) struct AgentDriver {
    core: AgentCore,
    clock: RunningClock,
    outbox: Outbox<FromAgent>,
    controller: ControllerInbox,
    controller_open: bool,
    children: SignalStream,
    pump_events: ChannelEnds<(Rank, u32, PumpEvent)>,
    worker_messages: ChannelEnds<WorkerMessage>,
    /// Delivers the number of an attempt after the stacks of the attempt's workers were written.
    stacks_written: ChannelEnds<u32>,
    /// Delivers messages of the rendezvous store to the user.
    store_messages: ChannelEnds<String>,
    rendezvous: Option<BoundRendezvous>,
    /// The rendezvous store, which serves the workers of all hosts while the workers run. `None` if
    /// this agent has no store.
    store: Option<StoreServer>,
    oom: OomWatch,
    gpu_faults: GpuFaultWatch,
    /// The lock that this agent holds while it runs; see [`AgentDriver::lock_host`].
    host_lock: Option<UnixListener>,
    /// The last attempt in which the agent warned that a program has no handler for the save
    /// signal.
    missing_handler_reported: Option<u32>,
    plan: Option<Rc<HostPlan>>,
    shm: Option<OwnedFd>,
    file_limit: process::OpenFileLimits,
    workers: HashMap<Rank, WorkerHandle>,
    /// The pids and ranks of the workers that have not been reaped.
    leaders: HashMap<u32, Rank>,
    /// The time at which the current sweep began; `None` if no sweep is running.
    sweep_started_at: Option<Duration>,
    /// The number of events that were dropped because the controller did not read in time, and that
    /// were not reported yet.
    dropped_events: u64,
    /// The exit code of the agent; `None` until the core requests the exit.
    exit: Option<u8>,
    prober: Prober,
}

impl AgentDriver {
    /// Creates a driver without workers. Reads the inventory of the host, starts the watches for
    /// OOM kills and GPU errors, and raises the limit of open files.
    pub(super) fn new(
        outbox: Outbox<FromAgent>,
        controller: ControllerInbox,
        prober: Prober,
    ) -> io::Result<Self> {
        let inventory = crate::discover::local::discover_local()?;
        let mut clock = RunningClock::start();
        clock.now();
        Ok(AgentDriver {
            core: AgentCore::new(std::process::id(), inventory.into_host_inventory())
                .with_kill_report_delay(cluster::find_kill_report_delay()),
            clock,
            outbox,
            controller,
            controller_open: true,
            children: signal_stream(SignalKind::child())?,
            pump_events: mpsc::channel(CHANNEL_CAPACITY),
            worker_messages: mpsc::channel(CHANNEL_CAPACITY),
            stacks_written: mpsc::channel(1),
            store_messages: mpsc::channel(CHANNEL_CAPACITY),
            rendezvous: None,
            store: None,
            oom: OomWatch::start(),
            gpu_faults: GpuFaultWatch::start(),
            host_lock: None,
            missing_handler_reported: None,
            plan: None,
            shm: None,
            file_limit: process::raise_file_limit()?,
            workers: HashMap::new(),
            leaders: HashMap::new(),
            sweep_started_at: None,
            dropped_events: 0,
            exit: None,
            prober,
        })
    }

    /// Runs the event loop until the core requests the exit of the agent. Returns the exit code.
    pub(super) async fn run_event_loop(&mut self) -> u8 {
        loop {
            if let Some(code) = self.exit {
                return code;
            }
            let now = self.clock.now();
            let pause = self.core.next_deadline().saturating_sub(now).min(Duration::from_secs(1));
            let pause = if self.sweep_started_at.is_some() { pause.min(SWEEP_INTERVAL) } else { pause };
            let wake = Instant::now() + pause;
            let input = tokio::select! {
                message = self.controller.recv(), if self.controller_open => self.on_controller_message(message),
                _ = self.children.recv() => AgentInput::Tick,
                Some((rank, pid, event)) = self.pump_events.1.recv() => self.on_pump_event(rank, pid, event),
                Some(message) = self.worker_messages.1.recv() => self.on_worker_message(message),
                Some(attempt) = self.stacks_written.1.recv() => self.on_stacks_written(attempt),
                Some(text) = self.store_messages.1.recv() => {
                    // The controller forwards the stderr of agents.
                    _ = writeln!(io::stderr(), "{text}");
                    AgentInput::Tick
                }
                () = sleep(wake.saturating_duration_since(Instant::now())) => AgentInput::Tick,
            };
            self.handle_input(input);
            self.reap_workers();
            self.sweep_processes();
            self.outbox.flush_overflow();
        }
    }

    // ---- events, translated for the core ----

    fn on_controller_message(
        &mut self,
        message: Option<((), Result<Option<ToAgent>, FrameError>)>,
    ) -> AgentInput {
        match message {
            Some(((), Ok(Some(ToAgent::Probe(probe))))) => {
                let mut outbox = self.outbox.clone();
                let send_answer = move |answer| {
                    _ = outbox.send_message(MessagePriority::Critical, FromAgent::Probed(answer))
                };
                if let Err(error) = self.prober.start_answering(probe, send_answer) {
                    let diagnostic =
                        Diagnostic::error(codes::host::PROBE_FAILED, "cannot start a thread for a probe")
                            .with_cause(&error);
                    self.send_to_controller(FromAgent::Failed { attempt: 0, rank: None, diagnostic });
                }
                AgentInput::Tick
            }
            Some(((), Ok(Some(message)))) => AgentInput::Controller(message),
            Some(((), Err(error))) => {
                _ = writeln!(io::stderr(), "launch agent: {}", Diagnostic::from(error));
                self.controller_open = false;
                AgentInput::ControllerLost
            }
            _ => {
                self.controller_open = false;
                AgentInput::ControllerLost
            }
        }
    }

    fn on_pump_event(&mut self, rank: Rank, pid: u32, event: PumpEvent) -> AgentInput {
        match event {
            _ if self.workers.get(&rank).is_none_or(|r| r.pid != pid) => AgentInput::Tick,
            PumpEvent::Drained(tail) => {
                let file = self.find_error_file(rank);
                AgentInput::Drained {
                    rank,
                    tail,
                    error: file.and_then(|file| error_file::read_error_message(&file)),
                }
            }
            PumpEvent::Progress => AgentInput::ProgressMarker { rank },
            PumpEvent::LogFailed(warning) => AgentInput::Warning { rank, message: warning.to_string() },
        }
    }

    /// Returns the path of the file in which the program of a rank may record its error
    /// (`TORCHELASTIC_ERROR_FILE`). Returns `None` for a worker without the variable.
    fn find_error_file(&self, rank: Rank) -> Option<PathBuf> {
        let worker = self.plan.as_ref()?.workers.iter().find(|w| w.rank == rank)?;
        let variable = worker.env.iter().find(|(name, _)| name == env::TORCHELASTIC_ERROR_FILE);
        variable.map(|(_, file)| worker.workdir.join(file))
    }

    fn on_worker_message(&mut self, ((rank, pid), message): WorkerMessage) -> AgentInput {
        match message {
            _ if self.workers.get(&rank).is_none_or(|r| r.pid != pid) => AgentInput::Tick,
            Ok(Some(FromWorker::Fatal { exit, diagnostic })) => {
                let gpu = self.gpu_faults.find_fault(pid);
                AgentInput::WorkerFatal { rank, exit, diagnostic, gpu }
            }
            Ok(Some(message)) => AgentInput::Worker { rank, message },
            Ok(None) => AgentInput::WorkerConnectionEnded { rank, error: None },
            // The connection of a killed worker may be reset instead of ended.
            Err(FrameError::Io(_)) => AgentInput::WorkerConnectionEnded { rank, error: None },
            Err(error) => {
                let message = "cannot read a control message of the worker";
                let diagnostic = Diagnostic::error(error.code(), message).with_cause(&error);
                AgentInput::WorkerConnectionEnded { rank, error: Some(diagnostic) }
            }
        }
    }

    /// Passes an input to the core and executes the requested actions. Passes the answers of the
    /// actions to the core, too, until there are no more answers.
    fn handle_input(&mut self, input: AgentInput) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            debug_log::log_input(&input);
            let now = self.clock.now();
            for command in self.core.handle_input(now, input) {
                inputs.extend(self.execute_action(command));
            }
        }
    }

    /// Reaps all child processes that have ended, and reports the ends of workers to the core.
    fn reap_workers(&mut self) {
        let mut ended = Vec::new();
        let leaders = &self.leaders;
        reap_children(|pid| leaders.contains_key(&pid), |pid, status| ended.push((pid, status)));
        for (pid, status) in ended {
            if let Some(rank) = self.leaders.remove(&pid) {
                // Checked once for each worker that died of SIGKILL, because each OOM kill explains
                // the end of one process.
                let oom = matches!(status, ExitStatus::Signal(libc::SIGKILL, _))
                    && self.oom.attribute_oom_kill(pid);
                let gpu = (status != ExitStatus::Code(0)).then(|| self.gpu_faults.find_fault(pid)).flatten();
                self.handle_input(AgentInput::WorkerExited { rank, status, oom, gpu });
            }
        }
    }

    /// Kills and reaps descendants of the agent during a sweep. Does nothing if no sweep is
    /// running.
    ///
    /// Reports the end of the sweep to the core when no process is left or [`SWEEP_TIMEOUT`] has
    /// passed.
    fn sweep_processes(&mut self) {
        let Some(since) = self.sweep_started_at else { return };
        let children_left = reap_children(|_| false, |_, _| ());
        let left = if children_left { kill_descendants(&[]) } else { Vec::new() };
        if !children_left || self.clock.now() > since + SWEEP_TIMEOUT {
            self.sweep_started_at = None;
            self.handle_input(AgentInput::Swept { left });
        }
    }

    // ---- actions of the core ----

    /// Executes an action of the core. Returns the answer if the action has an immediate answer.
    fn execute_action(&mut self, command: AgentAction) -> Option<AgentInput> {
        debug_log::log_action(&command);
        match command {
            AgentAction::Send(message) => self.send_to_controller(message),
            AgentAction::PrepareWorkers(plan) => return self.prepare_workers(plan),
            AgentAction::Spawn(index) => return self.spawn_worker(index),
            AgentAction::SendToWorker(rank, message) => {
                if let Some(outbox) = self.workers.get_mut(&rank).and_then(|r| r.outbox.as_mut()) {
                    outbox.send_message(MessagePriority::Critical, message);
                }
            }
            AgentAction::ShowOutput(ranks) => {
                for (rank, worker) in &self.workers {
                    worker.pump.iter().for_each(|pump| pump.set_shown(ranks.contains(rank)));
                }
            }
            AgentAction::Signal(rank, ending) => {
                if let Some(pid) = self.find_unreaped_pid(rank) {
                    process::signal_group(pid, ending);
                }
            }
            AgentAction::RequestSave(rank, signal) => return self.request_save(rank, signal),
            AgentAction::Bind(bind) => return Some(self.bind_rendezvous(&bind)),
            AgentAction::MeasureActivity => self.measure_activity(),
            AgentAction::WriteStacks(ranks) => self.start_writing_stacks(&ranks),
            AgentAction::DrainOutput(rank) => match self.workers.get(&rank).and_then(|r| r.pump.as_ref()) {
                Some(pump) => pump.request_drain(),
                None => return Some(AgentInput::Drained { rank, tail: Vec::new(), error: None }),
            },
            AgentAction::Sweep => {
                self.sweep_started_at = Some(self.clock.now());
            }
            AgentAction::Exit(code) => self.exit = Some(code),
        }
        None
    }

    fn on_stacks_written(&self, attempt: u32) -> AgentInput {
        let now = self.plan.as_ref().map(|plan| plan.attempt);
        if now == Some(attempt) { AgentInput::StacksWritten } else { AgentInput::Tick }
    }

    /// Returns the pid of a worker that has not been reaped. Returns `None` for a reaped worker,
    /// because another process may have got the pid.
    fn find_unreaped_pid(&self, rank: Rank) -> Option<u32> {
        self.workers.get(&rank).map(|r| r.pid).filter(|pid| self.leaders.contains_key(pid))
    }

    /// Sends the save signal to a program if the program has a handler for the signal. Otherwise
    /// returns a warning, but only once per attempt.
    fn request_save(&mut self, rank: Rank, signal: i32) -> Option<AgentInput> {
        let attempt = self.plan.as_ref()?.attempt;
        if process::signal_if_handled(self.find_unreaped_pid(rank)?, signal)
            || self.missing_handler_reported.replace(attempt) == Some(attempt)
        {
            return None;
        }
        let name = Signal::try_from(signal).map_or("the signal", Signal::as_str);
        let message = format!(
            "the program has no handler for {name}, so the signal is not sent to it, nor to other ranks \
             without a handler"
        );
        Some(AgentInput::Warning { rank, message })
    }

    /// Opens the port of the rendezvous of a new attempt, after closing the rendezvous of the
    /// earlier attempt. Returns the port or the error as the answer for the core.
    fn bind_rendezvous(&mut self, bind: &RendezvousRequest) -> AgentInput {
        // The rendezvous of the earlier attempt must be closed first, because both may use one
        // port.
        (self.rendezvous, self.store) = (None, None);
        let opened = BoundRendezvous::bind(bind, &self.store_messages.0);
        let port = opened.map(|rendezvous| {
            let port = rendezvous.port();
            self.rendezvous = Some(rendezvous);
            port
        });
        AgentInput::Bound { attempt: bind.attempt, port }
    }

    /// Measures the activity of all workers and reports each measurement to the core.
    fn measure_activity(&mut self) {
        let living: Vec<(u32, Rank)> = self.leaders.iter().map(|(pid, rank)| (*pid, *rank)).collect();
        let pids: Vec<u32> = living.iter().map(|(pid, _)| *pid).collect();
        for ((_, rank), measured) in living.into_iter().zip(activity::measure_activity(&pids)) {
            self.handle_input(AgentInput::Activity {
                rank,
                ticks: measured.ticks,
                stopped: measured.stopped,
            });
        }
    }

    /// Starts a thread that writes the stacks of these workers to the workers' logs. Does not
    /// block.
    fn start_writing_stacks(&mut self, ranks: &[Rank]) {
        let Some(plan) = self.plan.clone() else { return };
        let subject = |rank: &Rank| {
            let log = plan.workers.iter().find(|w| w.rank == *rank)?.log.clone();
            Some(StackTarget { pid: self.find_unreaped_pid(*rank)?, log })
        };
        let subjects: Vec<StackTarget> = ranks.iter().filter_map(subject).collect();
        let (written, attempt) = (self.stacks_written.0.clone(), plan.attempt);
        let work = move || {
            stacks::write_stacks(&subjects);
            // An error means that the driver has stopped waiting.
            _ = written.blocking_send(attempt);
        };
        // If the thread cannot be started, the core stops waiting after a timeout.
        _ = std::thread::Builder::new().name("stacks".into()).spawn(work);
    }

    /// Queues a message to the controller. Does not block. If the queue is full, drops a message
    /// that is not critical (see [`is_critical`]).
    ///
    /// Counts dropped events. When the queue has space again, a notice with their number precedes
    /// the next message.
    fn send_to_controller(&mut self, message: FromAgent) {
        let priority = match &message {
            FromAgent::Event { .. } => MessagePriority::Normal,
            message if is_critical(message) => MessagePriority::Critical,
            _ => MessagePriority::Low,
        };
        let dropped = self.dropped_events;
        if dropped > 0 && priority != MessagePriority::Low {
            let message = format!("{dropped} events were dropped while the controller did not read");
            let event = Event::new_notice(None, message);
            let attempt = self.plan.as_ref().map_or(0, |plan| plan.attempt);
            if self.outbox.send_message(MessagePriority::Normal, FromAgent::Event { attempt, rank: 0, event })
            {
                self.dropped_events = 0;
            }
        }
        if !self.outbox.send_message(priority, message) && priority == MessagePriority::Normal {
            self.dropped_events += 1;
        }
    }

    /// Prepares the start of the workers of a plan: locks the host, hands the rendezvous over to
    /// the workers, and creates the shared memory of built-in workers.
    ///
    /// Returns [`AgentInput::SpawnFailed`] if the lock or the shared memory is not available.
    fn prepare_workers(&mut self, plan: Rc<HostPlan>) -> Option<AgentInput> {
        // The workers run without the debug log, too.
        _ = debug_log::start_log(&plan);
        self.workers.clear();
        self.shm = None;
        if let Err(diagnostic) = self.lock_host(&plan) {
            let rank = plan.workers.first()?.rank;
            self.plan = None; // no worker is started
            return Some(AgentInput::SpawnFailed { rank, diagnostic });
        }
        // The store serves until the next start, because ranks of other hosts may need the store
        // longer than the ranks of this host.
        self.store = self.rendezvous.take().and_then(|rendezvous| rendezvous.hand_over_to_workers().1);
        self.plan = Some(plan.clone());
        let builtin = plan.workers.iter().find(|w| w.command.is_none())?;
        match process::create_shared_memory() {
            Ok(shm) => self.shm = Some(shm),
            Err(error) => {
                let message = "cannot create the shared memory of the host (memfd)";
                let diagnostic =
                    Diagnostic::error(codes::run::WORKER_START_FAILED, message).with_cause(&error);
                return Some(AgentInput::SpawnFailed { rank: builtin.rank, diagnostic });
            }
        }
        None
    }

    /// Locks this host for the workers of this agent. Fails if another agent of the run holds the
    /// lock.
    ///
    /// If an earlier agent of the run is still alive (disconnected or frozen), the earlier agent's
    /// workers may be alive, too. The lock is an abstract socket, which the kernel releases however
    /// the agent ends.
    fn lock_host(&mut self, plan: &HostPlan) -> diagnostic::Result<()> {
        if self.host_lock.is_some() {
            return Ok(());
        }
        let host = BuildHasherDefault::<DefaultHasher>::default().hash_one(&plan.host);
        let address = SocketAddr::from_abstract_name(format!("launch/{}/{host:016x}", plan.run));
        match address.and_then(|address| UnixListener::bind_addr(&address)) {
            Ok(lock) => self.host_lock = Some(lock),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let message = format!(
                    "an agent of an earlier attempt of this run is still alive on host {}",
                    plan.host
                );
                return Err(Diagnostic::error(codes::host::HOST_IN_USE, message).with_subject(&plan.host));
            }
            // Without abstract sockets only the quarantine of a lost host protects against two
            // agents.
            Err(_) => {}
        }
        Ok(())
    }

    /// Starts the worker at this index of the current plan. Returns the answer for the core:
    /// [`AgentInput::Spawned`] or [`AgentInput::SpawnFailed`].
    fn spawn_worker(&mut self, index: usize) -> Option<AgentInput> {
        let plan = self.plan.clone()?;
        let worker = plan.workers.get(index)?;
        let rank = worker.rank;
        match self.start_worker_process(&plan, index) {
            Ok(pid) => Some(AgentInput::Spawned { rank, pid }),
            Err(diagnostic) => Some(AgentInput::SpawnFailed { rank, diagnostic }),
        }
    }

    /// Opens the log of a worker, and starts the worker's process, output pump and control
    /// connection. Returns the pid of the process.
    ///
    /// Fails if one of them cannot be started. Kills the process if the pump or the connection
    /// fails.
    fn start_worker_process(&mut self, plan: &HostPlan, index: usize) -> diagnostic::Result<u32> {
        let worker = &plan.workers[index];
        let logs = &plan.job.run.logs;
        let log = RankLog::open(&worker.log, logs.max_size).map_err(|error| {
            let file = worker.log.display().to_string();
            Diagnostic::error(codes::host::WORKER_LOG_UNWRITABLE, format!("cannot open the log {file}"))
                .with_subject(file)
                .with_cause(&error)
        })?;
        let spawned =
            process::spawn_worker_process(worker, self.shm.as_ref().map(AsFd::as_fd), self.file_limit)?;
        let pid = spawned.pid;
        self.leaders.insert(pid, worker.rank);
        let mut handle = WorkerHandle { pid, outbox: None, pump: None };
        let console = self.outbox.clone();
        let (events, show) = (self.pump_events.0.clone(), logs.show.contains(&worker.rank));
        let progress_pattern =
            plan.job.run.progress_pattern.clone().filter(|_| plan.job.run.hang_timeout_ms.is_some());
        let pump = PumpOptions { rank: worker.rank, show, progress_pattern };
        let pump = OutputPump::start(pump, pid, log, spawned.stdout, spawned.stderr, console, events);
        let id = (worker.rank, pid);
        let connection =
            spawned.control.map(|stream| start_worker_connection(id, stream, &self.worker_messages.0));
        let result = match (pump, connection.transpose()) {
            (Ok(pump), Ok(outbox)) => {
                handle.pump = Some(pump);
                handle.outbox = outbox;
                Ok(pid)
            }
            (Err(error), _) | (_, Err(error)) => {
                process::signal_group(pid, super::core::GroupSignal::Kill);
                let message = "cannot read the output or the control messages of the worker";
                Err(Diagnostic::error(codes::run::WORKER_START_FAILED, message).with_cause(&error))
            }
        };
        self.workers.insert(worker.rank, handle);
        result
    }
}

/// Starts the tasks that read and write the control connection `stream` of a worker. Received
/// messages are sent to `inbox`. Returns the queue of messages to the worker.
fn start_worker_connection(
    id: WorkerId,
    stream: std::os::unix::net::UnixStream,
    inbox: &mpsc::Sender<WorkerMessage>,
) -> io::Result<Outbox<ToWorker>> {
    stream.set_nonblocking(true)?;
    let (reader, writer) = UnixStream::from_std(stream)?.into_split();
    let (outbox, outgoing) = Outbox::channel();
    tokio::spawn(read_frames(id, reader, inbox.clone()));
    tokio::spawn(write_frames(writer, outgoing));
    Ok(outbox)
}

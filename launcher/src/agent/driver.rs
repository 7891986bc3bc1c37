//! The event loop and I/O of an agent: executes the actions that the agent's state machine
//! requests, and reports events to the state machine.
mod containers;
mod controller_connection;
mod controller_messages;
mod exec_commands;
mod exec_state;
mod hang_evidence;
mod opened_logs;
mod worker_spawner;
mod worker_start;

use super::{
    attach_socket::{self, AttachConnection, HostLockError},
    core::{AgentAction, AgentCore, AgentInput},
    debug_log,
    environment_changes::EnvironmentChanges,
    gpu_faults::GpuFaultWatch,
    hang::{HookDirectory, StatusMemory, TimeoutEvidence},
    log_thread::LogThread,
    oom::OomWatch,
    output::{ControllerLineQueue, OutputPump, PumpEvent},
    probe::Prober,
    process::{self, BorrowedTerminal},
    usage::{SampledWorker, UsageSampler},
};
use crate::{
    clock::RunningClock,
    cluster,
    connection::{FrameError, MessagePriority, Outbox},
    open_file_limit::{OpenFileLimits, raise_open_file_limit},
    processes::{kill_descendants, reap_children, reap_group_leader},
    rendezvous::{BoundRendezvous, StoreServer},
};
use controller_connection::{ConnectionNumber, ControllerConnection};
use diagnostic::Diagnostic;
use exec_state::LaunchExecCommands;
use jobspec::{StopSignal, ids::Rank};
use nix::sys::signal::Signal;
use opened_logs::OpenedLogs;
use protocol::{
    control::{ExitStatus, FromWorker, HostPlan, RendezvousRequest, SupervisionTerms, ToAgent, ToWorker},
    hang::RankEvidence,
};
use std::{
    collections::{HashMap, VecDeque},
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream as StdUnixStream},
    },
    rc::Rc,
    sync::Arc,
    time::Duration,
};
use tokio::{
    signal::unix::{Signal as SignalStream, SignalKind, signal as signal_stream},
    sync::mpsc,
    time::{Instant, sleep},
};
use worker_spawner::WorkerSpawner;

/// How long the agent waits for the end of processes that workers have left behind and that the
/// agent has killed. Processes that remain are reported as unkillable.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time that the agent waits before it searches again for processes which workers have
/// left behind, to kill them.
const SWEEP_INTERVAL: Duration = Duration::from_millis(5);
/// The number of messages that fit into each channel through which tasks and threads send to the
/// agent's event loop.
const EVENT_LOOP_CHANNEL_CAPACITY: usize = 256;

/// The rank and the pid that identify one process of a worker. The pid of a rank differs between
/// attempts and reveals late messages of an earlier attempt.
type WorkerId = (Rank, u32);

/// What the agent needs to communicate with one worker's process: its pid, its message queue, the
/// thread that copies its output, and its terminal.
struct WorkerHandle {
    pid: u32,
    outbox: Option<Outbox<ToWorker>>,
    pump: Option<OutputPump>,
    /// The terminal that the worker uses; `None` after the end of the worker.
    terminal: Option<BorrowedTerminal>,
    /// The socket over which the worker gets the shared memory of a later attempt; `None` if the
    /// worker cannot take part in another attempt.
    attempts: Option<StdUnixStream>,
    /// What the worker has printed about its collectives, and the dump of its flight recorder;
    /// `None` if hangs are not detected.
    timeout_evidence: Option<TimeoutEvidence>,
}

/// A message, end of stream or error that the agent has read from a connection to a controller,
/// with the number of the connection. The number distinguishes the connections of the agent.
type ControllerMessage = (ConnectionNumber, Result<Option<ToAgent>, FrameError>);
/// The two ends of a channel through which tasks and threads send to the agent's event loop.
type ChannelEnds<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);
/// A message, end of stream or error that the agent has read from a worker's control connection,
/// with the worker's rank and pid.
type WorkerMessage = (WorkerId, Result<Option<FromWorker>, FrameError>);

/// Executes the actions that the agent's state machine (`core`) requests, and reports messages,
/// exits and time to the state machine.
pub(super) struct AgentDriver {
    core: AgentCore,
    clock: RunningClock,
    /// The connection to the controller; `None` while the agent has no controller.
    connection: Option<ControllerConnection>,
    /// The number of connections to controllers so far.
    connections: ConnectionNumber,
    /// The terms in the hello of the first controller; `None` before the hello, and if the agent
    /// only answers probes.
    terms: Option<SupervisionTerms>,
    /// The queue of output lines for the controller, which all output pumps share.
    console: ControllerLineQueue,
    controller_messages: ChannelEnds<ControllerMessage>,
    /// The controller's hello, which is handled once this agent is the only agent of the run on its
    /// host.
    waiting_hello: Option<ToAgent>,
    /// Delivers the listener of the agent's socket, once this agent is the only agent of the run on
    /// its host.
    host_locks: ChannelEnds<Result<Option<UnixListener>, HostLockError>>,
    /// Delivers the connections of other controllers and of later agents of this host.
    attach_requests: ChannelEnds<AttachConnection>,
    /// The connection on which a request arrived that the agent's state machine has not answered
    /// yet.
    undecided: Option<AttachConnection>,
    /// The connections of later agents, which wait for the end of this agent.
    evicting: Vec<AttachConnection>,
    children: SignalStream,
    /// The SIGTERM signals that this process receives; `None` if no batch system has started this
    /// agent. The agent then ignores the signal.
    termination: Option<SignalStream>,
    pump_events: ChannelEnds<(Rank, u32, PumpEvent)>,
    worker_messages: ChannelEnds<WorkerMessage>,
    /// Delivers the number of an attempt, and the evidence about its workers, after the stacks of
    /// the workers were written.
    stacks_written: ChannelEnds<(u32, Vec<RankEvidence>)>,
    /// Delivers messages of the rendezvous store to the user.
    store_messages: ChannelEnds<String>,
    rendezvous: Option<BoundRendezvous>,
    /// The rendezvous store, which serves the workers of all hosts while the workers run. `None` if
    /// this agent has no store.
    store: Option<StoreServer>,
    oom: OomWatch,
    gpu_faults: GpuFaultWatch,
    /// Measures what the host and the workers use.
    usage: UsageSampler,
    /// The thread that writes the logs of all ranks of this host.
    rank_logs: LogThread,
    /// The channel on which the thread that opens the logs of an attempt sends its result to the
    /// driver.
    opened_logs: ChannelEnds<OpenedLogs>,
    /// The opened logs of the workers that were not started yet.
    logs: OpenedLogs,
    /// The most recent attempt in which the agent warned that a program has no handler for the save
    /// signal.
    missing_handler_reported: Option<u32>,
    plan: Option<Rc<HostPlan>>,
    shm: Option<Arc<OwnedFd>>,
    /// The memory for copies of the workers' states, which outlives attempts. `None` before the
    /// first attempt, and in jobs without `checkpoint.memory`.
    copy_memory: Option<Arc<OwnedFd>>,
    /// The memory to which built-in workers write their status. `None` before the first attempt.
    status_memory: Option<Arc<StatusMemory>>,
    spawner: WorkerSpawner,
    /// The commands that end the containers of processes, by the pid of the process.
    container_removals: HashMap<u32, Vec<String>>,
    /// The number of such commands that have not ended.
    running_removals: usize,
    /// The commands of `launch exec`.
    exec: LaunchExecCommands,
    /// The directory with the hook by which programs report their collectives; `None` without
    /// `run.hang_timeout`, and if the directory cannot be created.
    hang_hook: Option<HookDirectory>,
    /// Whether the directory of the hook could not be created, which was reported.
    hang_hook_failed: bool,
    /// The changes of the environment by `run.activate`; `None` before the first activation.
    activation: Option<Arc<EnvironmentChanges>>,
    file_limit: OpenFileLimits,
    workers: HashMap<Rank, WorkerHandle>,
    /// The pids and ranks of the workers that have not been reaped.
    leaders: HashMap<u32, Rank>,
    /// The time at which the current sweep began, which kills the processes that workers left;
    /// `None` if no sweep is running.
    sweep_started_at: Option<Duration>,
    /// The pids of the workers that the current sweep does not kill.
    kept_pids: Vec<u32>,
    /// The exit code of the agent; `None` until the agent's state machine requests the exit.
    exit: Option<u8>,
    prober: Prober,
}

impl AgentDriver {
    /// Creates the driver of an agent that has no workers and no controller yet. Reads the
    /// inventory of the host, starts the watches for OOM kills and GPU errors, and raises the limit
    /// of open files.
    pub(super) fn new(prober: Prober) -> io::Result<Self> {
        let inventory = crate::discover::local_host::discover_local_host()?;
        let mut clock = RunningClock::start();
        clock.now();
        let stream = draw_report_stream_number()?;
        Ok(AgentDriver {
            core: AgentCore::new(std::process::id(), stream, inventory.without_unreported_env())
                .with_kill_report_delay(cluster::find_kill_report_delay()),
            clock,
            connection: None,
            connections: 0,
            terms: None,
            console: ControllerLineQueue::new(Outbox::channel().0),
            controller_messages: mpsc::channel(EVENT_LOOP_CHANNEL_CAPACITY),
            waiting_hello: None,
            host_locks: mpsc::channel(1),
            attach_requests: mpsc::channel(1),
            undecided: None,
            evicting: Vec::new(),
            children: signal_stream(SignalKind::child())?,
            termination: match cluster::sigterm_announces_job_end() {
                true => Some(signal_stream(SignalKind::terminate())?),
                false => None,
            },
            pump_events: mpsc::channel(EVENT_LOOP_CHANNEL_CAPACITY),
            worker_messages: mpsc::channel(EVENT_LOOP_CHANNEL_CAPACITY),
            hang_hook: None,
            hang_hook_failed: false,
            stacks_written: mpsc::channel(1),
            store_messages: mpsc::channel(EVENT_LOOP_CHANNEL_CAPACITY),
            rendezvous: None,
            store: None,
            oom: OomWatch::start(),
            gpu_faults: GpuFaultWatch::start(),
            usage: UsageSampler::start()?,
            rank_logs: LogThread::start()?,
            opened_logs: mpsc::channel(1),
            logs: OpenedLogs::default(),
            missing_handler_reported: None,
            plan: None,
            shm: None,
            spawner: WorkerSpawner::start()?,
            container_removals: HashMap::new(),
            running_removals: 0,
            exec: LaunchExecCommands::new(),
            activation: None,
            copy_memory: None,
            status_memory: None,
            file_limit: raise_open_file_limit()?,
            workers: HashMap::new(),
            leaders: HashMap::new(),
            sweep_started_at: None,
            kept_pids: Vec::new(),
            exit: None,
            prober,
        })
    }

    /// Runs the event loop until the agent's state machine requests the exit of the agent. Returns
    /// the exit code, after the last messages and the logs were written.
    pub(super) async fn run_event_loop(mut self) -> u8 {
        loop {
            if let Some(code) = self.exit {
                return self.flush_and_get_exit_code(code).await;
            }
            let now = self.clock.now();
            let pause = self.core.next_deadline().saturating_sub(now).min(Duration::from_secs(1));
            let pause = if self.sweep_started_at.is_some() { pause.min(SWEEP_INTERVAL) } else { pause };
            let wake = Instant::now() + pause;
            let input = tokio::select! {
                Some(message) = self.controller_messages.1.recv(), if self.waiting_hello.is_none() => {
                    self.on_controller_message(message)
                }
                Some(lock) = self.host_locks.1.recv() => self.on_host_lock_result(lock),
                Some(connection) = self.attach_requests.1.recv() => self.on_attach_request(connection),
                Some(logs) = self.opened_logs.1.recv() => self.on_logs_opened(logs),
                result = self.spawner.receive_result() => self.on_spawner_result(result),
                () = wait_for_queue_space(self.connection.as_ref()), if self.core.has_report() => AgentInput::Tick,
                _ = self.children.recv() => AgentInput::Tick,
                () = receive_signal(&mut self.termination) => AgentInput::Terminated,
                Some((rank, pid, event)) = self.pump_events.1.recv() => self.on_pump_event(rank, pid, event),
                Some(message) = self.worker_messages.1.recv(), if !self.core.is_backlogged() => {
                    self.on_worker_message(message)
                }
                event = self.exec.receive_event() => self.on_exec_event(event),
                (attempt, usage) = self.usage.receive_measurement() => AgentInput::Usage { attempt, usage },
                Some(written) = self.stacks_written.1.recv() => self.on_stacks_written(written),
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
            self.send_reports();
        }
    }

    /// Waits until the agent's last messages to the controller and the logs of the workers are
    /// written, and returns the exit code of the agent.
    async fn flush_and_get_exit_code(mut self, code: u8) -> u8 {
        self.send_reports();
        // The pumps write the rest of the output.
        self.workers.clear();
        self.close_connection().await;
        attach_socket::notify_evictors_of_agent_end(std::mem::take(&mut self.evicting)).await;
        if let Some(lost) = self.rank_logs.finish() {
            _ = writeln!(io::stderr(), "launch agent: {lost}");
        }
        code
    }

    // ---- events, translated for the core ----

    /// Converts an event of the thread that copies a worker's output, for example that all output
    /// was copied, to an input of the agent's state machine. An event of an earlier process of the
    /// rank becomes a tick.
    fn on_pump_event(&mut self, rank: Rank, pid: u32, event: PumpEvent) -> AgentInput {
        match event {
            _ if self.workers.get(&rank).is_none_or(|r| r.pid != pid) => AgentInput::Tick,
            PumpEvent::Drained { tail, error, timeout } => AgentInput::Drained { rank, tail, error, timeout },
            PumpEvent::Progress => AgentInput::ProgressMarker { rank },
            PumpEvent::LogFailed(warning) => AgentInput::Warning { rank, message: warning.to_string() },
        }
    }

    /// Converts a message of a worker, or the end of the worker's connection, to an input of the
    /// agent's state machine. A message of an earlier process of the rank becomes a tick.
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

    /// Passes an input to the agent's state machine, and executes the actions that the state
    /// machine requests. Passes the answers of the actions to the state machine, too, until there
    /// are no more answers.
    fn handle_input(&mut self, input: AgentInput) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            debug_log::log_input(&input);
            if matches!(input, AgentInput::Spawned { .. } | AgentInput::Rejoined { .. }) {
                self.update_sampled_workers();
            }
            let now = self.clock.now();
            for command in self.core.handle_input(now, input) {
                inputs.extend(self.execute_action(command));
            }
        }
    }

    /// Reaps all child processes that have ended, and reports the ends of workers to the agent's
    /// state machine.
    fn reap_workers(&mut self) {
        let mut ended = Vec::new();
        let (leaders, exec) = (&self.leaders, &self.exec);
        if self.spawner.is_busy() {
            // The pid of the worker that is being started is not known yet.
            let reap = |pid: &u32| reap_group_leader(*pid).map(|status| (*pid, status));
            let pids: Vec<u32> = leaders.keys().copied().chain(exec.unreaped_pids()).collect();
            ended.extend(pids.iter().filter_map(reap));
        } else {
            let is_leader = |pid| leaders.contains_key(&pid) || exec.is_running_command(pid);
            reap_children(is_leader, |pid, status| ended.push((pid, status)));
        }
        for (pid, status) in ended {
            self.remove_container_of_failed_process(pid, status);
            self.on_exec_exited(pid, status);
            let rank = self.leaders.remove(&pid);
            self.update_sampled_workers();
            // The rank may have another process by now, if the ended one was not kept.
            if let Some(rank) = rank.filter(|rank| self.workers.get(rank).is_some_and(|w| w.pid == pid)) {
                if let Some(worker) = self.workers.get_mut(&rank) {
                    drop(worker.terminal.take());
                }
                // Checked once for each worker that died of SIGKILL, because each OOM kill explains
                // the end of one process.
                let oom = matches!(status, ExitStatus::Signal(libc::SIGKILL, _))
                    && self.oom.attribute_oom_kill(pid);
                let gpu = (status != ExitStatus::Code(0)).then(|| self.gpu_faults.find_fault(pid)).flatten();
                self.handle_input(AgentInput::WorkerExited { rank, status, oom, gpu });
            }
        }
    }

    /// Kills and reaps the processes that workers have left behind (descendants of the agent), if
    /// the agent's state machine has requested this. Does nothing if no sweep is running.
    ///
    /// Reports the end of the sweep to the core when no process is left or [`SWEEP_TIMEOUT`] has
    /// passed.
    fn sweep_processes(&mut self) {
        let Some(since) = self.sweep_started_at else { return };
        // The commands that end containers would be killed.
        if self.running_removals > 0 {
            return;
        }
        let mut ended = Vec::new();
        // `reap_workers` has reaped the children that have ended. Kept workers are left, and the
        // exit of a process that is being started must not be lost.
        let is_starting = self.spawner.is_busy();
        let spares_some = is_starting || !self.kept_pids.is_empty();
        let children_left = spares_some || reap_children(|_| false, |pid, status| ended.push((pid, status)));
        ended.into_iter().for_each(|(pid, status)| self.on_exec_exited(pid, status));
        let left = if children_left { kill_descendants(&self.kept_pids) } else { Vec::new() };
        let children_left = if spares_some { is_starting || !left.is_empty() } else { children_left };
        if !children_left || self.clock.now() > since + SWEEP_TIMEOUT {
            self.sweep_started_at = None;
            self.handle_input(AgentInput::Swept { left });
        }
    }

    // ---- actions of the core ----

    /// Executes an action that the agent's state machine requests, such as sending a message or
    /// killing a worker. Returns the answer if the action has an immediate answer.
    fn execute_action(&mut self, command: AgentAction) -> Option<AgentInput> {
        debug_log::log_action(&command);
        match command {
            AgentAction::Send(message) => self.send_to_controller(message),
            AgentAction::Disconnect => self.close_connection_in_background(),
            AgentAction::AcceptController => self.accept_pending_controller(),
            AgentAction::AcceptEviction => self.evicting.extend(self.undecided.take()),
            AgentAction::RejectRequest(rejection) => {
                if let Some(connection) = self.undecided.take() {
                    tokio::spawn(attach_socket::reject_request(connection.output, rejection));
                }
            }
            AgentAction::PrepareWorkers { plan, kept } => {
                return self.prepare_shared_worker_resources(plan, &kept);
            }
            AgentAction::Spawn(index) => return self.spawn_worker(index),
            AgentAction::Rejoin(index) => return self.rejoin_worker(index),
            AgentAction::SendToWorker(rank, message) => {
                if let Some(outbox) = self.workers.get_mut(&rank).and_then(|r| r.outbox.as_mut()) {
                    outbox.send_message(MessagePriority::Critical, message);
                }
            }
            AgentAction::ShowOutput(ranks) => {
                let terminal = self.plan.as_ref().and_then(|plan| plan.job.run.terminal);
                let ranks = if terminal.is_some() { Vec::new() } else { ranks };
                for (rank, worker) in &self.workers {
                    worker.pump.iter().for_each(|pump| pump.set_console_forwarding(ranks.contains(rank)));
                }
            }
            AgentAction::Signal(rank, ending) => {
                if let Some(pid) = self.find_unreaped_pid(rank) {
                    process::signal_worker_process_group(pid, ending);
                }
            }
            AgentAction::RequestStop(rank, signal) => return self.request_stop(rank, signal),
            AgentAction::RequestSave(rank, signal) => return self.request_save(rank, signal),
            AgentAction::Bind(bind) => return Some(self.bind_rendezvous_port(&bind)),
            AgentAction::MeasureActivity => self.measure_activity(),
            AgentAction::WriteStacks(ranks) => self.start_evidence_collection(&ranks),
            AgentAction::DrainOutput(rank) => match self.workers.get(&rank).and_then(|r| r.pump.as_ref()) {
                Some(pump) => pump.request_drain(),
                None => {
                    return Some(AgentInput::Drained { rank, tail: Vec::new(), error: None, timeout: None });
                }
            },
            AgentAction::Sweep { kept } => {
                self.kept_pids = kept.into_iter().filter_map(|rank| self.find_unreaped_pid(rank)).collect();
                self.sweep_started_at = Some(self.clock.now());
            }
            AgentAction::Exit(code) => self.exit = Some(code),
        }
        None
    }

    /// Returns the pid of the worker `rank` if its process has not been reaped. Returns `None` for
    /// a reaped worker, because another process may have got the pid.
    fn find_unreaped_pid(&self, rank: Rank) -> Option<u32> {
        self.workers.get(&rank).map(|r| r.pid).filter(|pid| self.leaders.contains_key(pid))
    }

    /// Asks the program of a worker to save and stop, by sending a signal to those processes of the
    /// worker that have a handler for it. If there are none, returns this as the answer for the
    /// agent's state machine.
    fn request_stop(&self, rank: Rank, signal: StopSignal) -> Option<AgentInput> {
        let signal = match signal {
            StopSignal::Term => Signal::SIGTERM,
            StopSignal::Int => Signal::SIGINT,
            StopSignal::Hup => Signal::SIGHUP,
            StopSignal::Usr1 => Signal::SIGUSR1,
            StopSignal::Usr2 => Signal::SIGUSR2,
        };
        let is_sent = process::signal_handling_processes(self.find_unreaped_pid(rank)?, signal);
        (!is_sent).then_some(AgentInput::StopSignalUnhandled { rank })
    }

    /// Requests that a worker which runs a program save a checkpoint, by sending it the signal
    /// `signal`, if the program has a handler for the signal. Otherwise returns a warning, but only
    /// once per attempt.
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

    /// Closes the rendezvous port (at which the processes of a program meet) of the earlier attempt
    /// (start of all workers), and opens the port for the new one. Returns the port or the error as
    /// the answer for the agent's state machine.
    fn bind_rendezvous_port(&mut self, bind: &RendezvousRequest) -> AgentInput {
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

    /// Sends the list of the workers that still run to the thread that measures the resource usage
    /// of workers.
    pub(super) fn update_sampled_workers(&self) {
        let Some(plan) = &self.plan else { return };
        let is_program = |rank: Rank| plan.workers.iter().any(|w| w.rank == rank && w.command.is_some());
        let workers = self.leaders.iter().filter(|(pid, rank)| self.find_unreaped_pid(**rank) == Some(**pid));
        let mut workers: Vec<SampledWorker> = workers
            .map(|(pid, rank)| SampledWorker { rank: *rank, pid: *pid, is_program: is_program(*rank) })
            .collect();
        workers.sort_unstable_by_key(|worker| worker.rank);
        self.usage.set_workers(plan.attempt, workers);
    }
}

/// Waits for the next Unix signal from `stream`, a signal stream of the async runtime. Waits
/// forever if `stream` is `None`.
async fn receive_signal(stream: &mut Option<SignalStream>) {
    match stream {
        Some(stream) => _ = stream.recv().await,
        None => std::future::pending().await,
    }
}

/// Waits until the queue of messages to the controller has space for another report of the agent,
/// or forever if there is no controller. Waits forever if `connection` is `None`.
async fn wait_for_queue_space(connection: Option<&ControllerConnection>) {
    match connection {
        Some(connection) => connection.outbox.wait_for_space_for_report().await,
        None => std::future::pending().await,
    }
}

/// Returns a random number that identifies this agent's sequence of reports, so that a later
/// controller can recognize the reports that it already has. All programs can store the number as a
/// JSON number.
fn draw_report_stream_number() -> io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes) >> 11)
}

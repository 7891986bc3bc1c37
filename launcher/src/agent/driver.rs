//! Executes the actions of the agent's state machine and reports events to it.
use super::{
    activity, connect_back,
    core::{Action, Core, Input, is_critical},
    descendants::kill_descendants,
    error_file,
    gpu_faults::GpuFaultWatch,
    oom::OomWatch,
    output::{OutputPump, PumpEvent, PumpOptions, RankLog},
    probe::Prober,
    process,
    stacks::{self, StackTarget},
};
use crate::connection::{FrameError, Outbox, Priority, RunningClock, read_frames, write_frames};
use crate::controller::Rendezvous;
use contract::{
    control::{BindRendezvous, ExitStatus, FromAgent, FromWorker, HostPlan, ToAgent, ToWorker},
    env,
    event::Event,
    ids::Rank,
    preflight::Preflight,
};
use diagnostic::{Diagnostic, codes};
use nix::sys::signal::{SigHandler, Signal, signal};
use std::{
    collections::{HashMap, VecDeque},
    fs::OpenOptions,
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
    net::{UnixStream, unix::pipe},
    signal::unix::{Signal as SignalStream, SignalKind, signal as signal_stream},
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

/// How long killed processes may take to end before they are reported as unkillable.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two searches for processes that are left.
const SWEEP_INTERVAL: Duration = Duration::from_millis(5);
/// How long the last messages may take to reach the controller before the agent exits.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// The capacity of each channel to the event loop.
const CHANNEL_CAPACITY: usize = 256;

/// The options of the hidden command `launch agent`.
#[derive(Clone)]
pub struct AgentOptions {
    /// A line with this text and ` agent` is the first output, which separates it from the
    /// output of the login shell.
    pub marker: Option<String>,
    /// Standard input holds an invitation to connect to the controller over TCP. Otherwise standard
    /// input and output are the control connection.
    pub join: bool,
    /// Remove the executable's file after the start, because it was copied for this agent only.
    pub remove_executable: bool,
    /// Checks the libraries that training needs.
    pub preflight: &'static dyn Preflight,
}

/// Runs an agent until its controller ends the connection. Returns the exit code.
pub fn main(options: AgentOptions) -> u8 {
    if options.remove_executable {
        connect_back::remove_executable();
    }
    // An agent with a marker was started by sshd, so no other process of launch is above it.
    if options.marker.is_some() {
        match super::watchdog::fork_below_watchdog() {
            Ok(None) => {}
            Ok(Some(code)) => return code,
            Err(error) => {
                return report_start_failure(
                    &Diagnostic::error(
                        codes::host::WATCHDOG_FAILED,
                        "cannot start the watchdog process of the agent",
                    )
                    .with_cause(&error),
                );
            }
        }
    }
    run(&options).unwrap_or_else(|error| report_start_failure(&error))
}

fn run(options: &AgentOptions) -> diagnostic::Result<u8> {
    let cannot_start = |error: io::Error| {
        Diagnostic::error(codes::host::AGENT_START_FAILED, "cannot start the agent").with_cause(&error)
    };
    let mut streams = take_standard_streams(options.marker.as_deref()).map_err(cannot_start)?;
    if options.join {
        streams = connect_back::connect_back(streams.0)?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot_start)?;
    runtime.block_on(serve(streams.0, streams.1, options.preflight)).map_err(cannot_start)
}

/// Prints an error before the control connection exists. Returns the exit code.
fn report_start_failure(error: &Diagnostic) -> u8 {
    _ = writeln!(io::stderr(), "launch agent: {error} (`launch agent` is started by launch, not by hand)");
    1
}

/// Takes standard input and output for the control connection, so that nothing else uses them.
///
/// Also ignores the signals that a terminal, a batch system or an operator may send to every
/// process of the job: the controller handles them.
fn take_standard_streams(marker: Option<&str>) -> io::Result<(OwnedFd, OwnedFd)> {
    if let Some(marker) = marker {
        // The last line of the login shell's output may have no line end.
        io::stdout().write_all(format!("\n{marker} agent\n").as_bytes())?;
        io::stdout().flush()?;
    }
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let null = OpenOptions::new().read(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(io::stderr())?;
    process::set_cloexec_on_all();
    process::become_subreaper()?;
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGPIPE] {
        // SAFETY: ignoring a signal installs no handler; workers get the defaults back.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    _ = nix::sys::prctl::set_name(c"launch-agent");
    Ok((input, output))
}

async fn serve(input: OwnedFd, output: OwnedFd, preflight: &'static dyn Preflight) -> io::Result<u8> {
    for fd in [&input, &output] {
        set_nonblocking(fd)?;
    }
    let input = pipe::Receiver::from_owned_fd_unchecked(input)?;
    let output = pipe::Sender::from_owned_fd_unchecked(output)?;
    let (outbox, outgoing) = Outbox::new();
    let (inbox, controller) = mpsc::channel(CHANNEL_CAPACITY);
    tokio::spawn(read_frames((), input, inbox));
    let writer = tokio::spawn(write_frames(output, outgoing));
    let mut driver = Driver::new(outbox, controller, Prober::new(preflight))?;
    let code = driver.run().await;
    drop(driver); // ends the output pumps, and with them the last outboxes
    _ = timeout(FLUSH_TIMEOUT, writer).await;
    Ok(code)
}

fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Identifies the worker of a message: its rank, and its pid, which differs between attempts.
type WorkerId = (Rank, u32);

/// The connections to a worker's process.
struct WorkerHandle {
    pid: u32,
    outbox: Option<Outbox<ToWorker>>,
    pump: Option<OutputPump>,
}

type FromController = mpsc::Receiver<((), Result<Option<ToAgent>, FrameError>)>;
/// Both ends of a channel.
type Channel<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);
type WorkerMessage = (WorkerId, Result<Option<FromWorker>, FrameError>);

struct Driver {
    core: Core,
    clock: RunningClock,
    outbox: Outbox<FromAgent>,
    controller: FromController,
    controller_open: bool,
    children: SignalStream,
    pump_events: Channel<(Rank, u32, PumpEvent)>,
    worker_messages: Channel<WorkerMessage>,
    /// The attempt whose stacks were written.
    stacks_written: Channel<u32>,
    /// Messages of the rendezvous store for the user.
    store_messages: Channel<String>,
    rendezvous: Option<Rendezvous>,
    /// The rendezvous store, which serves the workers of all hosts while they run.
    store: Option<crate::controller::StoreServer>,
    oom: OomWatch,
    gpu_faults: GpuFaultWatch,
    /// Held while this agent runs; see [`Driver::lock_host`].
    host_lock: Option<UnixListener>,
    /// The attempt in which a missing signal handler was reported.
    missing_handler_reported: Option<u32>,
    plan: Option<Rc<HostPlan>>,
    shm: Option<OwnedFd>,
    file_limit: process::OpenFileLimit,
    workers: HashMap<Rank, WorkerHandle>,
    /// Pids of workers that have not been reaped.
    leaders: HashMap<u32, Rank>,
    /// When the sweep began.
    sweep_started_at: Option<Duration>,
    /// Events that were dropped because the controller did not read in time.
    dropped_events: u64,
    /// The exit code, once the core has ended.
    exit: Option<u8>,
    prober: Prober,
}

impl Driver {
    fn new(outbox: Outbox<FromAgent>, controller: FromController, prober: Prober) -> io::Result<Self> {
        let facts = crate::discover::local::inventory()?;
        let mut clock = RunningClock::start();
        clock.now();
        Ok(Driver {
            core: Core::new(std::process::id(), facts.into_host_inventory())
                .with_slurm_step(std::env::var_os(env::SLURM_STEP_ID).is_some()),
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

    /// Runs the event loop until the core ends. Returns the exit code.
    async fn run(&mut self) -> u8 {
        loop {
            if let Some(code) = self.exit {
                return code;
            }
            let now = self.clock.now();
            let pause = self.core.deadline().saturating_sub(now).min(Duration::from_secs(1));
            let pause = if self.sweep_started_at.is_some() { pause.min(SWEEP_INTERVAL) } else { pause };
            let wake = Instant::now() + pause;
            let input = tokio::select! {
                message = self.controller.recv(), if self.controller_open => self.on_controller(message),
                _ = self.children.recv() => Input::Tick,
                Some((rank, pid, event)) = self.pump_events.1.recv() => self.on_pump(rank, pid, event),
                Some(message) = self.worker_messages.1.recv() => self.on_worker(message),
                Some(attempt) = self.stacks_written.1.recv() => self.on_stacks(attempt),
                Some(text) = self.store_messages.1.recv() => {
                    // The controller forwards the stderr of agents.
                    _ = writeln!(io::stderr(), "{text}");
                    Input::Tick
                }
                () = sleep(wake.saturating_duration_since(Instant::now())) => Input::Tick,
            };
            self.handle(input);
            self.reap_workers();
            self.sweep_processes();
            self.outbox.flush();
        }
    }

    // ---- events, translated for the core ----

    fn on_controller(&mut self, message: Option<((), Result<Option<ToAgent>, FrameError>)>) -> Input {
        match message {
            Some(((), Ok(Some(ToAgent::Probe(probe))))) => {
                let mut outbox = self.outbox.clone();
                let send_answer =
                    move |answer| _ = outbox.send(Priority::Critical, FromAgent::Probed(answer));
                if let Err(error) = self.prober.answer(probe, send_answer) {
                    let diagnostic =
                        Diagnostic::error(codes::host::PROBE_FAILED, "cannot start a thread for a probe")
                            .with_cause(&error);
                    self.send(FromAgent::Failed { attempt: 0, rank: None, diagnostic });
                }
                Input::Tick
            }
            Some(((), Ok(Some(message)))) => Input::Controller(message),
            Some(((), Err(error))) => {
                _ = writeln!(io::stderr(), "launch agent: {}", Diagnostic::from(error));
                self.controller_open = false;
                Input::ControllerLost
            }
            _ => {
                self.controller_open = false;
                Input::ControllerLost
            }
        }
    }

    fn on_pump(&mut self, rank: Rank, pid: u32, event: PumpEvent) -> Input {
        match event {
            _ if self.workers.get(&rank).is_none_or(|r| r.pid != pid) => Input::Tick,
            PumpEvent::Drained(tail) => {
                let file = self.error_file(rank);
                Input::Drained {
                    rank,
                    tail,
                    error: file.and_then(|file| error_file::read_error_message(&file)),
                }
            }
            PumpEvent::Progress => Input::ProgressMarker { rank },
            PumpEvent::LogFailed(warning) => Input::Warning { rank, message: warning.to_string() },
        }
    }

    /// The file to which a program may write why it fails.
    fn error_file(&self, rank: Rank) -> Option<PathBuf> {
        let worker = self.plan.as_ref()?.workers.iter().find(|w| w.rank == rank)?;
        let variable = worker.env.iter().find(|(name, _)| name == env::TORCHELASTIC_ERROR_FILE);
        variable.map(|(_, file)| worker.workdir.join(file))
    }

    fn on_worker(&mut self, ((rank, pid), message): WorkerMessage) -> Input {
        match message {
            _ if self.workers.get(&rank).is_none_or(|r| r.pid != pid) => Input::Tick,
            Ok(Some(FromWorker::Fatal { exit, diagnostic })) => {
                let gpu = self.gpu_faults.find_fault(pid);
                Input::WorkerFatal { rank, exit, diagnostic, gpu }
            }
            Ok(Some(message)) => Input::Worker { rank, message },
            Ok(None) => Input::WorkerConnectionEnded { rank, error: None },
            // A killed worker's socket may reset instead of ending.
            Err(FrameError::Io(_)) => Input::WorkerConnectionEnded { rank, error: None },
            Err(error) => {
                let message = "cannot read a control message of the worker";
                let diagnostic = Diagnostic::error(error.code(), message).with_cause(&error);
                Input::WorkerConnectionEnded { rank, error: Some(diagnostic) }
            }
        }
    }

    fn handle(&mut self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let now = self.clock.now();
            for command in self.core.handle(now, input) {
                inputs.extend(self.execute(command));
            }
        }
    }

    fn reap_workers(&mut self) {
        let mut ended = Vec::new();
        let leaders = &self.leaders;
        process::reap_children(|pid| leaders.contains_key(&pid), |pid, status| ended.push((pid, status)));
        for (pid, status) in ended {
            if let Some(rank) = self.leaders.remove(&pid) {
                // Checked before the next process is reaped, because each OOM kill explains one
                // process.
                let oom =
                    matches!(status, ExitStatus::Signal(libc::SIGKILL, _)) && self.oom.was_oom_killed(pid);
                let gpu = (status != ExitStatus::Code(0)).then(|| self.gpu_faults.find_fault(pid)).flatten();
                self.handle(Input::WorkerExited { rank, status, oom, gpu });
            }
        }
    }

    fn sweep_processes(&mut self) {
        let Some(since) = self.sweep_started_at else { return };
        let children_left = process::reap_children(|_| false, |_, _| ());
        let left = if children_left { kill_descendants(&[]) } else { Vec::new() };
        if !children_left || self.clock.now() > since + SWEEP_TIMEOUT {
            self.sweep_started_at = None;
            self.handle(Input::Swept { left });
        }
    }

    // ---- actions of the core ----

    fn execute(&mut self, command: Action) -> Option<Input> {
        match command {
            Action::Send(message) => self.send(message),
            Action::PrepareWorkers(plan) => return self.prepare_workers(plan),
            Action::Spawn(index) => return self.spawn_worker(index),
            Action::SendToWorker(rank, message) => {
                if let Some(outbox) = self.workers.get_mut(&rank).and_then(|r| r.outbox.as_mut()) {
                    outbox.send(Priority::Critical, message);
                }
            }
            Action::ShowOutput(ranks) => {
                for (rank, worker) in &self.workers {
                    worker.pump.iter().for_each(|pump| pump.show(ranks.contains(rank)));
                }
            }
            Action::Signal(rank, ending) => {
                if let Some(pid) = self.leader(rank) {
                    process::signal_group(pid, ending);
                }
            }
            Action::RequestSave(rank, signal) => return self.request_save(rank, signal),
            Action::Bind(bind) => return Some(self.bind_rendezvous(&bind)),
            Action::MeasureActivity => self.measure_activity(),
            Action::WriteStacks(ranks) => self.write_stacks(&ranks),
            Action::DrainOutput(rank) => match self.workers.get(&rank).and_then(|r| r.pump.as_ref()) {
                Some(pump) => pump.drain(),
                None => return Some(Input::Drained { rank, tail: Vec::new(), error: None }),
            },
            Action::Sweep => {
                self.sweep_started_at = Some(self.clock.now());
            }
            Action::Exit(code) => self.exit = Some(code),
        }
        None
    }

    fn on_stacks(&self, attempt: u32) -> Input {
        let now = self.plan.as_ref().map(|plan| plan.attempt);
        if now == Some(attempt) { Input::StacksWritten } else { Input::Tick }
    }

    /// The pid of a worker that has not been reaped, so that no other process can have the pid.
    fn leader(&self, rank: Rank) -> Option<u32> {
        self.workers.get(&rank).map(|r| r.pid).filter(|pid| self.leaders.contains_key(pid))
    }

    fn request_save(&mut self, rank: Rank, signal: i32) -> Option<Input> {
        let attempt = self.plan.as_ref()?.attempt;
        if process::signal_if_handled(self.leader(rank)?, signal)
            || self.missing_handler_reported.replace(attempt) == Some(attempt)
        {
            return None;
        }
        let name = Signal::try_from(signal).map_or("the signal", Signal::as_str);
        let message = format!(
            "the program has no handler for {name}, so the signal is not sent to it, nor to other ranks \
             without a handler"
        );
        Some(Input::Warning { rank, message })
    }

    fn bind_rendezvous(&mut self, bind: &BindRendezvous) -> Input {
        // The rendezvous of an earlier attempt is closed first, because the port may be the same.
        (self.rendezvous, self.store) = (None, None);
        let opened = Rendezvous::open(bind, &self.store_messages.0);
        let port = opened.map(|rendezvous| {
            let port = rendezvous.port();
            self.rendezvous = Some(rendezvous);
            port
        });
        Input::Bound { attempt: bind.attempt, port }
    }

    /// Measures the activity of all workers and reports it to the core.
    fn measure_activity(&mut self) {
        let living: Vec<(u32, Rank)> = self.leaders.iter().map(|(pid, rank)| (*pid, *rank)).collect();
        let pids: Vec<u32> = living.iter().map(|(pid, _)| *pid).collect();
        for ((_, rank), measured) in living.into_iter().zip(activity::measure_activity(&pids)) {
            self.handle(Input::Activity { rank, ticks: measured.ticks, stopped: measured.stopped });
        }
    }

    fn write_stacks(&mut self, ranks: &[Rank]) {
        let Some(plan) = self.plan.clone() else { return };
        let subject = |rank: &Rank| {
            let log = plan.workers.iter().find(|w| w.rank == *rank)?.log.clone();
            Some(StackTarget { pid: self.leader(*rank)?, log })
        };
        let subjects: Vec<StackTarget> = ranks.iter().filter_map(subject).collect();
        let (written, attempt) = (self.stacks_written.0.clone(), plan.attempt);
        let work = move || {
            stacks::write_stacks(&subjects);
            // An error means that the driver has stopped waiting.
            _ = written.blocking_send(attempt);
        };
        // If the thread cannot be started, the core stops waiting after its timeout.
        _ = std::thread::Builder::new().name("stacks".into()).spawn(work);
    }

    fn send(&mut self, message: FromAgent) {
        let priority = match &message {
            FromAgent::Event { .. } => Priority::Normal,
            message if is_critical(message) => Priority::Critical,
            _ => Priority::Low,
        };
        let dropped = self.dropped_events;
        if dropped > 0 && priority != Priority::Low {
            let message = format!("{dropped} events were dropped while the controller did not read");
            let event = Event::notice(None, message);
            let attempt = self.plan.as_ref().map_or(0, |plan| plan.attempt);
            if self.outbox.send(Priority::Normal, FromAgent::Event { attempt, rank: 0, event }) {
                self.dropped_events = 0;
            }
        }
        if !self.outbox.send(priority, message) && priority == Priority::Normal {
            self.dropped_events += 1;
        }
    }

    fn prepare_workers(&mut self, plan: Rc<HostPlan>) -> Option<Input> {
        self.workers.clear();
        self.shm = None;
        if let Err(diagnostic) = self.lock_host(&plan) {
            let rank = plan.workers.first()?.rank;
            self.plan = None; // no worker is started
            return Some(Input::SpawnFailed { rank, diagnostic });
        }
        // The store serves until the next start, because ranks of other hosts may need it longer.
        self.store = self.rendezvous.take().and_then(|rendezvous| rendezvous.hand_over().1);
        self.plan = Some(plan.clone());
        let builtin = plan.workers.iter().find(|w| w.command.is_none())?;
        match process::create_shared_memory() {
            Ok(shm) => self.shm = Some(shm),
            Err(error) => {
                let message = "cannot create the shared memory of the host (memfd)";
                let diagnostic =
                    Diagnostic::error(codes::run::WORKER_START_FAILED, message).with_cause(&error);
                return Some(Input::SpawnFailed { rank: builtin.rank, diagnostic });
            }
        }
        None
    }

    /// Makes sure that only one agent of a run has workers on this host.
    ///
    /// While an earlier agent is alive (cut off, or frozen until now), its workers may be, too. The
    /// lock is an abstract socket, which the kernel frees however the agent ends.
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
            // Without abstract sockets only the quarantine of a lost host protects against this.
            Err(_) => {}
        }
        Ok(())
    }

    fn spawn_worker(&mut self, index: usize) -> Option<Input> {
        let plan = self.plan.clone()?;
        let worker = plan.workers.get(index)?;
        let rank = worker.rank;
        match self.try_spawn(&plan, index) {
            Ok(pid) => Some(Input::Spawned { rank, pid }),
            Err(diagnostic) => Some(Input::SpawnFailed { rank, diagnostic }),
        }
    }

    fn try_spawn(&mut self, plan: &HostPlan, index: usize) -> diagnostic::Result<u32> {
        let worker = &plan.workers[index];
        let logs = &plan.job.run.logs;
        let log = RankLog::open(&worker.log, logs.max_size).map_err(|error| {
            let file = worker.log.display().to_string();
            Diagnostic::error(codes::host::WORKER_LOG_UNWRITABLE, format!("cannot open the log {file}"))
                .with_subject(file)
                .with_cause(&error)
        })?;
        let spawned = process::spawn(worker, self.shm.as_ref().map(AsFd::as_fd), self.file_limit)?;
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
        let connection = spawned.control.map(|stream| start_connection(id, stream, &self.worker_messages.0));
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

/// Starts the two tasks of a worker's control connection.
fn start_connection(
    id: WorkerId,
    stream: std::os::unix::net::UnixStream,
    inbox: &mpsc::Sender<WorkerMessage>,
) -> io::Result<Outbox<ToWorker>> {
    stream.set_nonblocking(true)?;
    let (reader, writer) = UnixStream::from_std(stream)?.into_split();
    let (outbox, outgoing) = Outbox::new();
    tokio::spawn(read_frames(id, reader, inbox.clone()));
    tokio::spawn(write_frames(writer, outgoing));
    Ok(outbox)
}

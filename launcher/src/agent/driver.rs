//! The agent's hands: carries out what the core decides, and tells it what happened.
use super::{
    core::{Command, Core, Input, must_arrive},
    descendants::kill_descendants,
    error_file,
    gpu_faults::GpuFaults,
    join,
    oom::OomWatch,
    output::{Log, Pump, PumpEvent, PumpPlan},
    probe::Prober,
    process,
    stacks::{self, Subject},
    watch,
};
use crate::controller::Rendezvous;
use crate::link::{Clock, LinkError, Outbox, Priority, read_into, write_from};
use contract::{
    control::{Bind, ExitStatus, FromAgent, FromWorker, HostPlan, ToAgent, ToWorker},
    env,
    event::Event,
    ids::Rank,
    preflight::TrainJudge,
};
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

/// How long processes may take to die of SIGKILL before they are reported as stuck.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks for processes that are still there.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);
/// For the last messages to reach the controller before the agent exits.
const LAST_MESSAGES: Duration = Duration::from_secs(2);
/// Messages waiting to be read in the agent, of each kind.
const INBOX: usize = 256;

/// How an agent was started.
#[derive(Clone)]
pub struct Started {
    /// The first thing it says, on a line of its own.
    pub marker: Option<String>,
    /// Its stdin has an invitation to connect to the controller; else stdin and stdout are the control stream.
    pub join: bool,
    /// Its executable is a copy that was made for it alone.
    pub remove_own_file: bool,
    /// Knows what training needs.
    pub judge: &'static dyn TrainJudge,
}

/// Runs the agent role; its exit code.
pub fn main(started: Started) -> u8 {
    if started.remove_own_file {
        join::remove_own_file();
    }
    // By its marker a login shell's agent is known: nothing of launch is above it on this host.
    if started.marker.is_some() {
        match super::guard::stand() {
            Ok(None) => {}
            Ok(Some(code)) => return code,
            Err(error) => {
                _ = writeln!(io::stderr(), "launch agent: its guard can't be: {error}");
                return 1;
            }
        }
    }
    let streams = prepare(started.marker.as_deref())
        .and_then(|streams| if started.join { join::join(streams.0) } else { Ok(streams) });
    match streams.and_then(|(input, output)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(serve(input, output, started.judge))
    }) {
        Ok(code) => code,
        Err(error) => {
            let text = "launch agent: cannot work here (it is started by `launch` itself, not by hand)";
            _ = writeln!(io::stderr(), "{text}: {error}");
            1
        }
    }
}

/// Takes stdin and stdout for the control stream, so that nothing else writes there, and shields the agent from the
/// signals that are the controller's to handle: a terminal, a batch system or an operator may send them to everyone.
fn prepare(marker: Option<&str>) -> io::Result<(OwnedFd, OwnedFd)> {
    if let Some(marker) = marker {
        // What a login shell printed last may not have ended its line.
        io::stdout().write_all(format!("\n{marker} agent\n").as_bytes())?;
        io::stdout().flush()?;
    }
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    let null = OpenOptions::new().read(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(io::stderr())?;
    process::close_on_exec_everything();
    process::become_subreaper()?;
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGPIPE] {
        // SAFETY: ignoring a signal installs no handler; workers get the defaults back.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    _ = nix::sys::prctl::set_name(c"launch-agent");
    Ok((input, output))
}

async fn serve(input: OwnedFd, output: OwnedFd, judge: &'static dyn TrainJudge) -> io::Result<u8> {
    for fd in [&input, &output] {
        nonblocking(fd)?;
    }
    let input = pipe::Receiver::from_owned_fd_unchecked(input)?;
    let output = pipe::Sender::from_owned_fd_unchecked(output)?;
    let (outbox, outgoing) = Outbox::new();
    let (inbox, controller) = mpsc::channel(INBOX);
    tokio::spawn(read_into((), input, inbox));
    let writer = tokio::spawn(write_from(output, outgoing));
    let mut driver = Driver::new(outbox, controller, Prober::new(judge))?;
    let code = driver.run().await;
    drop(driver); // the pumps end, and with them the last outboxes
    _ = timeout(LAST_MESSAGES, writer).await;
    Ok(code)
}

fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

/// The worker a message belongs to: its rank, and its pid against confusion with an earlier epoch.
type Who = (Rank, u32);

struct Running {
    pid: u32,
    outbox: Option<Outbox<ToWorker>>,
    pump: Option<Pump>,
}

type FromController = mpsc::Receiver<((), Result<Option<ToAgent>, LinkError>)>;
/// Both ends.
type Channel<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);
type WorkerMessage = (Who, Result<Option<FromWorker>, LinkError>);

struct Driver {
    core: Core,
    clock: Clock,
    outbox: Outbox<FromAgent>,
    controller: FromController,
    controller_open: bool,
    children: SignalStream,
    pump_events: Channel<(Rank, u32, PumpEvent)>,
    worker_messages: Channel<WorkerMessage>,
    /// The epoch whose stacks were written.
    stacks_written: Channel<u32>,
    /// What the store has to say to a person.
    talk: Channel<String>,
    rendezvous: Option<Rendezvous>,
    /// Serves the workers of all nodes while they run.
    store: Option<crate::controller::Server>,
    oom: OomWatch,
    gpu_faults: GpuFaults,
    /// Held while this agent lives: see [`Driver::own_host`].
    own: Option<UnixListener>,
    /// The epoch in which it was told that a program has no handler for a signal.
    no_handler: Option<u32>,
    plan: Option<Rc<HostPlan>>,
    shm: Option<OwnedFd>,
    file_limit: process::FileLimit,
    running: HashMap<Rank, Running>,
    /// Pids of workers that have not been reaped.
    leaders: HashMap<u32, Rank>,
    sweeping: Option<Duration>,
    /// Events the controller did not read in time.
    lost_events: u64,
    exit: Option<u8>,
    prober: Prober,
}

impl Driver {
    fn new(outbox: Outbox<FromAgent>, controller: FromController, prober: Prober) -> io::Result<Self> {
        let facts = crate::discover::local::facts()?;
        let mut clock = Clock::start();
        clock.now();
        Ok(Driver {
            core: Core::new(std::process::id(), facts.found())
                .in_step(std::env::var_os(env::SLURM_STEP_ID).is_some()),
            clock,
            outbox,
            controller,
            controller_open: true,
            children: signal_stream(SignalKind::child())?,
            pump_events: mpsc::channel(INBOX),
            worker_messages: mpsc::channel(INBOX),
            stacks_written: mpsc::channel(1),
            talk: mpsc::channel(INBOX),
            rendezvous: None,
            store: None,
            oom: OomWatch::start(),
            gpu_faults: GpuFaults::start(),
            own: None,
            no_handler: None,
            plan: None,
            shm: None,
            file_limit: process::raise_file_limit()?,
            running: HashMap::new(),
            leaders: HashMap::new(),
            sweeping: None,
            lost_events: 0,
            exit: None,
            prober,
        })
    }

    /// Until the core says that it is over.
    async fn run(&mut self) -> u8 {
        loop {
            if let Some(code) = self.exit {
                return code;
            }
            let now = self.clock.now();
            let pause = self.core.deadline().saturating_sub(now).min(Duration::from_secs(1));
            let pause = if self.sweeping.is_some() { pause.min(SWEEP_PAUSE) } else { pause };
            let wake = Instant::now() + pause;
            let input = tokio::select! {
                message = self.controller.recv(), if self.controller_open => self.on_controller(message),
                _ = self.children.recv() => Input::Tick,
                Some((rank, pid, event)) = self.pump_events.1.recv() => self.on_pump(rank, pid, event),
                Some(message) = self.worker_messages.1.recv() => self.on_worker(message),
                Some(epoch) = self.stacks_written.1.recv() => self.on_stacks(epoch),
                Some(text) = self.talk.1.recv() => {
                    // The controller passes on what an agent says beside the control stream.
                    _ = writeln!(io::stderr(), "{text}");
                    Input::Tick
                }
                () = sleep(wake.saturating_duration_since(Instant::now())) => Input::Tick,
            };
            self.handle(input);
            self.reap();
            self.sweep();
            self.outbox.flush();
        }
    }

    // ---- what happened, as the core understands it ----

    fn on_controller(&mut self, message: Option<((), Result<Option<ToAgent>, LinkError>)>) -> Input {
        match message {
            Some(((), Ok(Some(ToAgent::Probe(probe))))) => {
                let mut outbox = self.outbox.clone();
                let tell = move |probed| _ = outbox.send(Priority::Must, FromAgent::Probed(probed));
                if let Err(error) = self.prober.answer(probe, tell) {
                    let message = format!("the node can't be looked at: {error}");
                    self.send(FromAgent::Failed { epoch: 0, rank: None, message });
                }
                Input::Tick
            }
            Some(((), Ok(Some(message)))) => Input::Controller(message),
            Some(((), Err(error))) => {
                _ = writeln!(io::stderr(), "launch agent: {error}");
                self.controller_open = false;
                Input::ControllerGone
            }
            _ => {
                self.controller_open = false;
                Input::ControllerGone
            }
        }
    }

    fn on_pump(&mut self, rank: Rank, pid: u32, event: PumpEvent) -> Input {
        match event {
            _ if self.running.get(&rank).is_none_or(|r| r.pid != pid) => Input::Tick,
            PumpEvent::Drained(tail) => {
                let file = self.error_file(rank);
                Input::Drained { rank, tail, error: file.and_then(|file| error_file::read(&file)) }
            }
            PumpEvent::Progress => Input::Marker { rank },
            PumpEvent::Trouble(message) => Input::Trouble { rank, message },
        }
    }

    /// Where a program was told to write why it fails.
    fn error_file(&self, rank: Rank) -> Option<PathBuf> {
        let worker = self.plan.as_ref()?.workers.iter().find(|w| w.rank == rank)?;
        let told = worker.env.iter().find(|(name, _)| name == env::TORCHELASTIC_ERROR_FILE);
        told.map(|(_, file)| worker.workdir.join(file))
    }

    fn on_worker(&mut self, ((rank, pid), message): WorkerMessage) -> Input {
        match message {
            _ if self.running.get(&rank).is_none_or(|r| r.pid != pid) => Input::Tick,
            Ok(Some(FromWorker::Fatal { exit, message })) => {
                let gpu = self.gpu_faults.of(pid).map_or_else(String::new, |fault| format!("; {fault}"));
                Input::Worker { rank, message: FromWorker::Fatal { exit, message: message + &gpu } }
            }
            Ok(Some(message)) => Input::Worker { rank, message },
            Ok(None) => Input::WorkerLink { rank, error: None },
            // A killed worker's socket may reset instead of ending.
            Err(LinkError::Io(_)) => Input::WorkerLink { rank, error: None },
            Err(error) => Input::WorkerLink { rank, error: Some(error.to_string()) },
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

    fn reap(&mut self) {
        let mut ended = Vec::new();
        let leaders = &self.leaders;
        process::reap(|pid| leaders.contains_key(&pid), |pid, status| ended.push((pid, status)));
        for (pid, status) in ended {
            if let Some(rank) = self.leaders.remove(&pid) {
                // Asked before another is reaped: each kill explains one process.
                let oom = matches!(status, ExitStatus::Signal(libc::SIGKILL, _)) && self.oom.killed(pid);
                let gpu = (status != ExitStatus::Code(0)).then(|| self.gpu_faults.of(pid)).flatten();
                self.handle(Input::Ended { rank, status, oom, gpu });
            }
        }
    }

    fn sweep(&mut self) {
        let Some(since) = self.sweeping else { return };
        let children_left = process::reap(|_| false, |_, _| ());
        let left = if children_left { kill_descendants(&[]) } else { Vec::new() };
        if !children_left || self.clock.now() > since + SWEEP_LIMIT {
            self.sweeping = None;
            self.handle(Input::Swept { left });
        }
    }

    // ---- what the core wants ----

    fn execute(&mut self, command: Command) -> Option<Input> {
        match command {
            Command::Send(message) => self.send(message),
            Command::Begin(plan) => return self.begin(plan),
            Command::Spawn(index) => return self.spawn(index),
            Command::Tell(rank, message) => {
                if let Some(outbox) = self.running.get_mut(&rank).and_then(|r| r.outbox.as_mut()) {
                    outbox.send(Priority::Must, message);
                }
            }
            Command::Show(ranks) => {
                for (rank, running) in &self.running {
                    running.pump.iter().for_each(|pump| pump.show(ranks.contains(rank)));
                }
            }
            Command::Signal(rank, ending) => {
                if let Some(pid) = self.leader(rank) {
                    process::signal_group(pid, ending);
                }
            }
            Command::Notify(rank, signal) => return self.notify(rank, signal),
            Command::Bind(bind) => return Some(self.bind(&bind)),
            Command::Watch => self.watch(),
            Command::Stacks(ranks) => self.write_stacks(&ranks),
            Command::Drain(rank) => match self.running.get(&rank).and_then(|r| r.pump.as_ref()) {
                Some(pump) => pump.drain(),
                None => return Some(Input::Drained { rank, tail: Vec::new(), error: None }),
            },
            Command::Sweep => {
                self.sweeping = Some(self.clock.now());
            }
            Command::Exit(code) => self.exit = Some(code),
        }
        None
    }

    fn on_stacks(&self, epoch: u32) -> Input {
        let now = self.plan.as_ref().map(|plan| plan.epoch);
        if now == Some(epoch) { Input::StacksWritten } else { Input::Tick }
    }

    /// Pid of a worker that has not been reaped: it can't be another's.
    fn leader(&self, rank: Rank) -> Option<u32> {
        self.running.get(&rank).map(|r| r.pid).filter(|pid| self.leaders.contains_key(pid))
    }

    fn notify(&mut self, rank: Rank, signal: i32) -> Option<Input> {
        let epoch = self.plan.as_ref()?.epoch;
        if process::notify(self.leader(rank)?, signal) || self.no_handler.replace(epoch) == Some(epoch) {
            return None;
        }
        let name = Signal::try_from(signal).map_or("the signal", Signal::as_str);
        let message = format!("has no handler for {name}, so it is not sent (nor to others like it)");
        Some(Input::Trouble { rank, message })
    }

    fn bind(&mut self, bind: &Bind) -> Input {
        // The one of an earlier epoch makes room first: the port may be the same.
        (self.rendezvous, self.store) = (None, None);
        let opened = Rendezvous::open(bind, &self.talk.0);
        let port = opened.map(|rendezvous| {
            let port = rendezvous.port();
            self.rendezvous = Some(rendezvous);
            port
        });
        Input::Bound { epoch: bind.epoch, port }
    }

    /// Looks at all workers at once; what is seen is told to the core by itself.
    fn watch(&mut self) {
        let living: Vec<(u32, Rank)> = self.leaders.iter().map(|(pid, rank)| (*pid, *rank)).collect();
        let pids: Vec<u32> = living.iter().map(|(pid, _)| *pid).collect();
        for ((_, rank), seen) in living.into_iter().zip(watch::activity(&pids)) {
            self.handle(Input::Activity { rank, ticks: seen.ticks, stopped: seen.stopped });
        }
    }

    fn write_stacks(&mut self, ranks: &[Rank]) {
        let Some(plan) = self.plan.clone() else { return };
        let subject = |rank: &Rank| {
            let log = plan.workers.iter().find(|w| w.rank == *rank)?.log.clone();
            Some(Subject { pid: self.leader(*rank)?, log })
        };
        let subjects: Vec<Subject> = ranks.iter().filter_map(subject).collect();
        let (written, epoch) = (self.stacks_written.0.clone(), plan.epoch);
        let work = move || {
            stacks::write(&subjects);
            // Nobody waits any more: it took too long.
            _ = written.blocking_send(epoch);
        };
        // Without a thread there are no stacks; the core's limit ends the wait.
        _ = std::thread::Builder::new().name("stacks".into()).spawn(work);
    }

    fn send(&mut self, message: FromAgent) {
        let priority = match &message {
            FromAgent::Event { .. } => Priority::News,
            message if must_arrive(message) => Priority::Must,
            _ => Priority::Chatter,
        };
        let lost = self.lost_events;
        if lost > 0 && priority != Priority::Chatter {
            let message = format!("{lost} events were lost while the controller did not read");
            let event = Event::Notice { rank: None, message };
            let epoch = self.plan.as_ref().map_or(0, |plan| plan.epoch);
            if self.outbox.send(Priority::News, FromAgent::Event { epoch, rank: 0, event }) {
                self.lost_events = 0;
            }
        }
        if !self.outbox.send(priority, message) && priority == Priority::News {
            self.lost_events += 1;
        }
    }

    fn begin(&mut self, plan: Rc<HostPlan>) -> Option<Input> {
        self.running.clear();
        self.shm = None;
        if let Err(message) = self.own_host(&plan) {
            let rank = plan.workers.first()?.rank;
            self.plan = None; // nothing is started
            return Some(Input::SpawnFailed { rank, message });
        }
        // It serves until the next start: ranks elsewhere may need it after this host's have ended.
        self.store = self.rendezvous.take().and_then(|rendezvous| rendezvous.ready().1);
        self.plan = Some(plan.clone());
        let builtin = plan.workers.iter().find(|w| w.command.is_none())?;
        match process::shared_memory() {
            Ok(shm) => self.shm = Some(shm),
            Err(error) => {
                let message = format!("cannot make the node's shared memory (memfd): {error}");
                return Some(Input::SpawnFailed { rank: builtin.rank, message });
            }
        }
        None
    }

    /// One agent at a time has workers of a run on a host: while another one lives (cut off, or just thawed) its workers
    /// may live too. The name is the kernel's to free, however the agent ends.
    fn own_host(&mut self, plan: &HostPlan) -> Result<(), String> {
        if self.own.is_some() {
            return Ok(());
        }
        let host = BuildHasherDefault::<DefaultHasher>::default().hash_one(&plan.host);
        let address = SocketAddr::from_abstract_name(format!("launch/{}/{host:016x}", plan.run));
        match address.and_then(|address| UnixListener::bind_addr(&address)) {
            Ok(own) => self.own = Some(own),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err("an agent of an earlier start of this run still lives on this host".into());
            }
            // No such sockets here: the pause before a lost host is used again has to do.
            Err(_) => {}
        }
        Ok(())
    }

    fn spawn(&mut self, index: usize) -> Option<Input> {
        let plan = self.plan.clone()?;
        let worker = plan.workers.get(index)?;
        let rank = worker.rank;
        match self.try_spawn(&plan, index) {
            Ok(pid) => Some(Input::Spawned { rank, pid }),
            Err(message) => Some(Input::SpawnFailed { rank, message }),
        }
    }

    fn try_spawn(&mut self, plan: &HostPlan, index: usize) -> Result<u32, String> {
        let worker = &plan.workers[index];
        let logs = &plan.job.run.logs;
        let log = Log::open(&worker.log, logs.max_size)
            .map_err(|e| format!("cannot write the log {}: {e}", worker.log.display()))?;
        let spawned = process::spawn(worker, self.shm.as_ref().map(AsFd::as_fd), self.file_limit)?;
        let pid = spawned.pid;
        self.leaders.insert(pid, worker.rank);
        let mut running = Running { pid, outbox: None, pump: None };
        let console = self.outbox.clone();
        let (events, show) = (self.pump_events.0.clone(), logs.show.contains(&worker.rank));
        let marker = plan.job.run.progress.clone().filter(|_| plan.job.run.hang_timeout_ms.is_some());
        let pump = PumpPlan { rank: worker.rank, show, marker };
        let pump = Pump::start(pump, pid, log, spawned.stdout, spawned.stderr, console, events);
        let link = spawned.control.map(|stream| connect((worker.rank, pid), stream, &self.worker_messages.0));
        let result = match (pump, link.transpose()) {
            (Ok(pump), Ok(outbox)) => {
                running.pump = Some(pump);
                running.outbox = outbox;
                Ok(pid)
            }
            (Err(error), _) | (_, Err(error)) => {
                process::signal_group(pid, super::core::Ending::Kill);
                Err(format!("cannot watch it: {error}"))
            }
        };
        self.running.insert(worker.rank, running);
        result
    }
}

/// The two tasks of a worker's control stream.
fn connect(
    who: Who,
    stream: std::os::unix::net::UnixStream,
    inbox: &mpsc::Sender<WorkerMessage>,
) -> io::Result<Outbox<ToWorker>> {
    stream.set_nonblocking(true)?;
    let (reader, writer) = UnixStream::from_std(stream)?.into_split();
    let (outbox, outgoing) = Outbox::new();
    tokio::spawn(read_into(who, reader, inbox.clone()));
    tokio::spawn(write_from(writer, outgoing));
    Ok(outbox)
}

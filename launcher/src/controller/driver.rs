//! The controller's hands: starts agents, carries messages both ways, catches signals, keeps journal and report.
use super::Requeue;
use super::{
    Fit, HostTarget, Options, Request, Secrets, Starter,
    core::{Core, HostSetup, Input, NodeId, Outcome, Output, Setup},
    job_file::{JobFile, Watched},
    journal::Journal,
    prepare::{Found, Preparation, workers_of},
    signals::{Said, Signals},
    store::Server,
    watch::Seen,
};
use crate::{
    agent::{
        self,
        descendants::{children, kill_descendants},
    },
    link::{Clock, LinkError, Outbox, Priority, encode, read_into, write_from},
    plan::{self, Epoch, Plan},
    report::{self, Report},
    runs,
    transport::{self, AgentProcess, Carrier, Transport},
};
use contract::{
    control::{ExitStatus, FromAgent, JobKey, PeerAddress, Peers, ToAgent},
    event::Event,
    exit,
    job::JobSpec,
    judge::Finding,
};
use nix::{
    sys::signal::{SigHandler, Signal, kill},
    unistd::Pid,
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    io::Read as _,
    path::PathBuf,
    time::Duration,
};
use tokio::{
    io::AsyncReadExt,
    sync::mpsc,
    time::{sleep, timeout},
};

/// Messages waiting to be read, of all agents together.
const INBOX: usize = 1024;
/// Longest piece of what an agent says outside the control stream, bytes.
const TALK: usize = 4 << 10;
/// For an agent whose stream has ended to exit, before it is killed.
const AGENT_EXIT: Duration = Duration::from_secs(1);
/// For a process that held agents elsewhere to end once they are gone, before it is asked to, and once more before it is
/// killed.
const HELPER_EXIT: Duration = Duration::from_secs(2);
/// For killed processes to go, before the controller gives up on them.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks for them.
const SWEEP_PAUSE: Duration = Duration::from_millis(2);
/// Longest sleep of the loop (the clock needs looking at).
const TICK: Duration = Duration::from_secs(1);

/// Runs the job to its end; the exit code of `launch`.
pub(super) fn run(request: Request, options: Options) -> u8 {
    let setup = report::Setup {
        json: options.json,
        prefix: request.job.run.logs.prefix,
        detached: options.starter.is_some(),
        shown: request.job.run.logs.show.iter().filter(|rank| **rank < request.plan.world).count(),
        logs: request.plan.run_dir.join("logs"),
        builtin: request.job.run.command.is_none(),
        world: request.plan.world,
        hosts: request.hosts.len(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| Ok((Report::start(setup)?, runtime))) {
        Ok((report, runtime)) => {
            let mut driver = Driver::new(request, options, report);
            let outcome = runtime.block_on(driver.run());
            driver.finish(outcome)
        }
        Err(error) => {
            report::plain::say(&format!("launch: no threads or descriptors to work with: {error}\n"));
            exit::CLUSTER
        }
    }
}

/// An agent's process and our end of the connection to it.
struct Agent {
    number: u32,
    carrier: Carrier,
    outbox: Option<Outbox<ToAgent>>,
    ended: Option<ExitStatus>,
}

impl Agent {
    /// Its pid while it is a child that hasn't been reaped.
    fn living_child(&self) -> Option<u32> {
        match self.carrier {
            Carrier::Child(pid) if self.ended.is_none() => Some(pid),
            _ => None,
        }
    }
}

/// One agent of a host; another one, after a restart, has another number.
type AgentId = (NodeId, u32);
type Message = (AgentId, Result<Option<FromAgent>, LinkError>);

struct Driver {
    job: JobSpec,
    /// The plan of the start that was made last.
    plan: Plan,
    hosts: Vec<HostTarget>,
    transport: Box<dyn Transport>,
    fit: Fit,
    found: Found,
    /// What was typed.
    command: Vec<String>,
    secrets: Secrets,
    requeue: Option<Requeue>,
    job_file: Option<JobFile>,
    /// Told when all workers of a start run.
    starter: Option<Starter>,
    /// Workers of this start that were not started yet.
    not_started: u32,
    core: Core,
    clock: Clock,
    report: Report,
    journal: Option<Journal>,
    agents: HashMap<NodeId, Agent>,
    /// Agents whose messages didn't all fit into their queues.
    behind: HashSet<NodeId>,
    /// What carrying out the core's outputs has led to, for the core to hear next.
    later: VecDeque<Input>,
    /// Counts the agents that were started.
    started: u32,
    messages: (mpsc::Sender<Message>, mpsc::Receiver<Message>),
    talk: (mpsc::Sender<String>, mpsc::Receiver<String>),
    /// The start that is being prepared.
    preparation: Option<Preparation>,
    /// Serves the workers while they run.
    store: Option<Server>,
    /// Children that were here before us (`sh -c 'other & exec launch …'`): not ours to end.
    foreign: Vec<u32>,
    outcome: Option<Outcome>,
}

impl Driver {
    fn new(request: Request, options: Options, report: Report) -> Self {
        let Request { job, plan, hosts, transport, here, fit } = request;
        let setups = hosts.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local });
        let setup = Setup::new(&job, setups.collect(), RandomState::new().hash_one(&plan.run.0));
        Driver {
            core: Core::new(setup),
            found: Found::new(here.chosen, hosts.len()),
            job,
            plan,
            hosts,
            transport,
            fit,
            command: options.command,
            secrets: options.secrets,
            requeue: options.requeue,
            job_file: options.job_file,
            starter: options.starter,
            not_started: 0,
            clock: Clock::start(),
            report,
            journal: None,
            agents: HashMap::new(),
            behind: HashSet::new(),
            later: VecDeque::new(),
            started: 0,
            messages: mpsc::channel(INBOX),
            talk: mpsc::channel(INBOX),
            preparation: None,
            store: None,
            foreign: Vec::new(),
            outcome: None,
        }
    }

    async fn run(&mut self) -> Outcome {
        match self.prepare() {
            Ok(signals) => self.serve(signals).await,
            Err(cause) => {
                self.event(Event::Failure {
                    rank: None,
                    host: String::new(),
                    pid: 0,
                    cause,
                    log: None,
                    tail: Vec::new(),
                });
                Outcome { exit_code: exit::CLUSTER, ..Outcome::default() }
            }
        }
    }

    /// Everything that can be refused before a process runs.
    fn prepare(&mut self) -> Result<Signals, String> {
        let directory = self.plan.run_dir.clone();
        let journal = Journal::create(&self.plan, &self.command);
        self.journal = Some(
            journal.map_err(|e| format!("cannot write the run directory {}: {e}", directory.display()))?,
        );
        let (run, world) = (self.plan.run.to_string(), self.plan.world);
        self.event(Event::Start { run, run_dir: directory, world });
        if let Err(error) = runs::register(&self.plan, &self.job.name, &self.command) {
            let message = format!(
                "`launch ps` and `launch stop` won't know this run: it can't be written down ({error})"
            );
            self.event(Event::Notice { rank: None, message });
        }
        for warning in self.plan.warnings.clone() {
            let hint = warning.hint.map_or_else(String::new, |hint| format!(" ({hint})"));
            let message = format!("{}: {}{hint}", warning.path, warning.message);
            self.event(Event::Notice { rank: None, message });
        }
        // A port that was asked for is refused before anything runs, when it is this machine's.
        if self.plan.master.is_some_and(|address| address.is_loopback()) {
            let preparation = Preparation::new(&self.job, self.plan.clone(), &self.found.all());
            drop(preparation.bind_here(&self.talk.0)?);
        }
        self.foreign = children();
        agent::become_subreaper().map_err(|e| format!("cannot become a subreaper: {e}"))?;
        Signals::catch(self.job.run.signals, self.requeue.is_some())
            .map_err(|e| format!("cannot catch signals: {e}"))
    }

    async fn serve(&mut self, mut signals: Signals) -> Outcome {
        let names: Vec<String> = self.hosts.iter().map(|h| h.name.clone()).collect();
        let mut failed = Vec::new();
        for (node, started) in self.transport.start(&names).into_iter().enumerate() {
            match started {
                Ok(process) => self.adopt(node, process),
                Err(error) => failed.push((node, error)),
            }
        }
        let mut watched = Watched::start(self.job_file.take());
        let now = self.clock.now();
        let outputs = self.core.start(now);
        outputs.into_iter().for_each(|output| self.execute(output));
        for (node, error) in failed {
            self.handle(Input::AgentGone { node, how: format!("could not be started: {error}") });
        }
        loop {
            if let Some(outcome) = self.outcome.take() {
                self.close().await;
                return outcome;
            }
            let now = self.clock.now();
            let pause = self.core.deadline().map_or(TICK, |at| at.saturating_sub(now).min(TICK));
            tokio::select! {
                Some((who, message)) = self.messages.1.recv() => self.on_agent(who, message).await,
                Some(text) = self.talk.1.recv() => self.report.talk(text),
                said = signals.next() => match said {
                    Said::Asked(input) => self.handle(input),
                    Said::Children => _ = self.reap(),
                    Said::Nothing => {}
                },
                seen = watched.next() => self.reload(&mut watched, seen),
                () = sleep(pause) => self.handle(Input::Tick),
            }
            self.flush();
        }
    }

    fn adopt(&mut self, node: NodeId, process: AgentProcess) {
        let (outbox, outgoing) = Outbox::new();
        self.started = self.started.wrapping_add(1);
        let number = self.started;
        tokio::spawn(read_into((node, number), process.output, self.messages.0.clone()));
        tokio::spawn(write_from(process.input, outgoing));
        tokio::spawn(read_talk(process.talk, self.talk.0.clone()));
        self.agents
            .insert(node, Agent { number, carrier: process.carrier, outbox: Some(outbox), ended: None });
    }

    /// Gives those who didn't read in time what was held back.
    fn flush(&mut self) {
        let agents = &mut self.agents;
        self.behind.retain(|node| {
            let outbox = agents.get_mut(node).and_then(|a| a.outbox.as_mut());
            outbox.is_some_and(|outbox| {
                outbox.flush();
                outbox.is_behind()
            })
        });
    }

    async fn on_agent(&mut self, (node, number): AgentId, message: Result<Option<FromAgent>, LinkError>) {
        // What an agent said that another one has replaced is of no interest.
        if self.agents.get(&node).is_none_or(|agent| agent.number != number) {
            return;
        }
        match message {
            Ok(Some(FromAgent::Bound { epoch, port })) => self.bound(node, epoch, port),
            Ok(Some(message)) => {
                if matches!(message, FromAgent::Started { .. }) {
                    self.one_started();
                }
                self.handle(Input::Agent(node, message));
            }
            Ok(None) => self.bury(node, None).await,
            Err(error) => self.bury(node, Some(error.to_string())).await,
        }
    }

    /// Tells whoever started us when the last worker runs.
    fn one_started(&mut self) {
        self.not_started = self.not_started.saturating_sub(1);
        if self.not_started == 0
            && let Some(starter) = self.starter.take()
        {
            starter.started();
        }
    }

    /// The stream of an agent has ended: makes sure that nothing of its node is left, then tells the core.
    async fn bury(&mut self, node: NodeId, error: Option<String>) {
        if let Some(agent) = self.agents.get_mut(&node) {
            agent.outbox = None;
        }
        let limit = self.clock.now() + AGENT_EXIT;
        while self.agents.get(&node).is_some_and(|a| a.living_child().is_some()) {
            self.reap();
            if self.clock.now() > limit {
                self.kill_agent(node);
            }
            sleep(SWEEP_PAUSE).await;
        }
        self.sweep().await;
        let ended = self.agents.get(&node).and_then(|a| a.ended);
        let connection = self.agents.get(&node).and_then(|a| match &a.carrier {
            Carrier::Connection(connection) => Some(connection),
            Carrier::Child(_) => None,
        });
        let ended = ended.or_else(|| connection.and_then(|c| c.status()));
        let how = match (connection.and_then(|c| c.why()), error, ended) {
            (Some(why), _, _) => match why.hint {
                Some(hint) => format!("is lost: {} ({hint})", why.message),
                None => format!("is lost: {}", why.message),
            },
            (None, Some(error), _) => error,
            (None, None, _) if connection.is_some() => {
                let ended = ended
                    .map(|status| format!(" (its agent ended: {})", super::cause::describe(status, false)));
                format!("is lost: the connection to it has ended{}", ended.unwrap_or_default())
            }
            (None, None, Some(status)) => format!("ended: {}", super::cause::describe(status, false)),
            (None, None, None) => "never ran".into(),
        };
        self.handle(Input::AgentGone { node, how });
    }

    /// Reaps what has ended: agents, and what reparented to us when an agent died.
    fn reap(&mut self) -> bool {
        let (agents, transport) = (&mut self.agents, &mut self.transport);
        agent::reap(
            |_| false,
            |pid, status| match agents.values_mut().find(|a| a.living_child() == Some(pid)) {
                Some(agent) => agent.ended = Some(status),
                None => transport.child_ended(pid, status),
            },
        )
    }

    /// Kills every process of this job that no living agent looks after.
    async fn sweep(&mut self) {
        let limit = self.clock.now() + SWEEP_LIMIT;
        // One look may miss a process that is born while it is taken.
        let mut empty_looks = 0;
        while self.reap() && empty_looks < 2 {
            let living = self.agents.values().filter_map(Agent::living_child);
            let spare = living.chain(self.foreign.iter().copied()).chain(self.transport.helpers());
            let spare: Vec<u32> = spare.collect();
            empty_looks = if kill_descendants(&spare).is_empty() { empty_looks + 1 } else { 0 };
            if self.clock.now() > limit {
                self.report
                    .talk("launch: some processes do not die of SIGKILL: they hang in the kernel".into());
                return;
            }
            sleep(SWEEP_PAUSE).await;
        }
    }

    fn kill_agent(&mut self, node: NodeId) {
        let Some(agent) = self.agents.get(&node) else { return };
        match &agent.carrier {
            Carrier::Connection(connection) => connection.break_off(),
            Carrier::Child(_) => {
                if let Some(pid) = agent.living_child() {
                    // Not reaped yet: the pid is still its own.
                    _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
                }
            }
        }
    }

    /// Agents leave when their streams close; then nothing may be left.
    async fn close(&mut self) {
        self.agents.values_mut().for_each(|a| a.outbox = None);
        let limit = self.clock.now() + AGENT_EXIT;
        while self.reap() && self.agents.values().any(|a| a.living_child().is_some()) {
            if self.clock.now() > limit {
                (0..self.hosts.len()).for_each(|node| self.kill_agent(node));
            }
            _ = timeout(SWEEP_PAUSE, self.messages.1.recv()).await;
        }
        self.end_helpers().await;
        self.sweep().await;
    }

    /// What holds agents elsewhere ends with the last of them; if not, it is ended.
    async fn end_helpers(&mut self) {
        let limit = self.clock.now() + HELPER_EXIT;
        while self.reap() && !self.transport.helpers().is_empty() {
            let now = self.clock.now();
            if now > limit {
                let signal = if now > limit + HELPER_EXIT { Signal::SIGKILL } else { Signal::SIGTERM };
                for pid in self.transport.helpers() {
                    // Not reaped yet: the pid is still its own.
                    _ = kill(Pid::from_raw(pid as i32), signal);
                }
            }
            while let Ok(text) = self.talk.1.try_recv() {
                self.report.talk(text);
            }
            _ = timeout(SWEEP_PAUSE, self.messages.1.recv()).await;
        }
    }

    // ---- what the core wants ----

    fn handle(&mut self, input: Input) {
        let now = self.clock.now();
        let outputs = self.core.handle(now, input);
        outputs.into_iter().for_each(|output| self.execute(output));
        // What the outputs have led to.
        while let Some(input) = self.later.pop_front() {
            let now = self.clock.now();
            let outputs = self.core.handle(now, input);
            outputs.into_iter().for_each(|output| self.execute(output));
        }
    }

    fn execute(&mut self, output: Output) {
        match output {
            Output::Tell(node, message) => self.tell(node, message),
            Output::Found(node, facts) => self.found.add(node, facts),
            Output::Prepare { epoch, restarts, nodes, resume } => {
                self.prepare_epoch(epoch, restarts, &nodes, resume);
            }
            Output::Start => self.start_workers(),
            Output::StartAgent(node) => self.start_agent(node),
            Output::Introduce { epoch, members } => self.introduce(epoch, members),
            Output::Event(event) => self.event(event),
            Output::Line { rank, stderr, text } => self.report.line(rank, stderr, text),
            Output::Progress { rank, phase } => self.report.progress(rank, phase),
            Output::KillAgent(node) => self.kill_agent(node),
            Output::End(outcome) => self.outcome = Some(outcome),
        }
    }

    fn tell(&mut self, node: NodeId, message: ToAgent) {
        if let Some(outbox) = self.agents.get_mut(&node).and_then(|a| a.outbox.as_mut()) {
            outbox.send(Priority::Must, message);
            if outbox.is_behind() {
                self.behind.insert(node);
            }
        }
    }

    /// Starts a host's agent again. Its core is told of a failure after what it is about to say.
    fn start_agent(&mut self, node: NodeId) {
        let Some(host) = self.hosts.get(node) else { return };
        match self.transport.start(std::slice::from_ref(&host.name)).pop() {
            Some(Ok(process)) => self.adopt(node, process),
            other => {
                let error = other.and_then(Result::err);
                let why = error.map_or_else(|| "its transport gave none".to_owned(), |e| e.to_string());
                self.agents.remove(&node);
                self.later
                    .push_back(Input::AgentGone { node, how: format!("could not be started again: {why}") });
            }
        }
    }

    fn prepare_epoch(&mut self, epoch: u32, restarts: u32, nodes: &[NodeId], resume: Option<PathBuf>) {
        // The store of the last start isn't this one's.
        self.store = None;
        let hosts = self.found.hosts(&self.hosts, nodes);
        let start = Epoch { number: epoch, restarts, resume };
        let refused = |findings: Vec<Finding>| {
            findings.iter().map(|f| format!("{}: {}", f.path, f.message)).collect::<Vec<_>>().join("; ")
        };
        let mut plan = match plan::plan(&self.job, &hosts, &self.plan.run, &start) {
            Ok(plan) => plan,
            Err(findings) => {
                return self.later.push_back(Input::Refused { epoch, message: refused(findings) });
            }
        };
        plan.warnings.clear();
        if let Err(failure) = (self.fit)(&self.job, &mut plan) {
            return self.later.push_back(Input::Refused { epoch, message: failure.line() });
        }
        let new = plan.warnings.iter().filter(|w| !self.plan.warnings.contains(w)).cloned();
        for Finding { path, message, .. } in new.collect::<Vec<_>>() {
            let message = format!("{path}: {message}");
            self.event(Event::Notice { rank: None, message });
        }
        let mut preparation = Preparation::new(&self.job, plan, &self.found.all());
        preparation.nodes = nodes.to_vec();
        let first = nodes.first().copied().unwrap_or(0);
        let here = self.hosts.get(first).is_some_and(|host| host.local);
        if here {
            match preparation.bind_here(&self.talk.0) {
                Ok(rendezvous) => preparation.rendezvous = Some(rendezvous),
                Err(message) => return self.later.push_back(Input::Refused { epoch, message }),
            }
            self.later.push_back(Input::Ready { epoch, workers: workers_of(&preparation.plan) });
        } else {
            self.tell(first, ToAgent::Bind(preparation.bind.clone()));
        }
        self.preparation = Some(preparation);
    }

    /// The agent of rank 0's node has bound the rendezvous, or can't.
    fn bound(&mut self, node: NodeId, epoch: u32, port: Result<u16, String>) {
        let Some(preparation) = &mut self.preparation else { return };
        if preparation.bind.epoch != epoch || preparation.nodes.first() != Some(&node) {
            return;
        }
        let input = match port {
            Ok(port) => {
                preparation.port = Some(port);
                Input::Ready { epoch, workers: workers_of(&preparation.plan) }
            }
            Err(message) => Input::Refused { epoch, message },
        };
        self.handle(input);
    }

    /// The workers get to know each other, and a key that nobody else has: it exists in their memory and this message only.
    fn introduce(&mut self, epoch: u32, members: Vec<PeerAddress>) {
        let mut key = JobKey([0; 32]);
        if let Err(error) = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut key.0)) {
            let message = format!("no random numbers for the job's key from /dev/urandom: {error}");
            let node = members.first().map_or(0, |m| m.node as NodeId);
            let failed = FromAgent::Failed { epoch, rank: None, message };
            return self.later.push_back(Input::Agent(node, failed));
        }
        let nodes: HashSet<NodeId> = members.iter().map(|m| m.node as NodeId).collect();
        let peers = Peers { epoch, key, members, nccl_id: None };
        nodes.into_iter().for_each(|node| self.tell(node, ToAgent::Peers(peers.clone())));
    }

    /// The job file changed.
    fn reload(&mut self, watched: &mut Watched, seen: Seen) {
        let change = watched.take_up(&self.job, seen);
        for message in change.notices {
            self.event(Event::Notice { rank: None, message });
        }
        let Some(values) = change.values else { return };
        // What is started later begins with them.
        values.apply(&mut self.job);
        let prepared = self.preparation.iter_mut().flat_map(|p| &mut p.plan.nodes);
        prepared.for_each(|node| values.apply(&mut node.job));
        self.handle(Input::Reload(values));
    }

    fn start_workers(&mut self) {
        let Some(mut preparation) = self.preparation.take() else { return };
        let (mut port, mut store) = (preparation.port, None);
        if let Some(rendezvous) = preparation.rendezvous.take() {
            let (number, kept) = rendezvous.ready();
            (port, store) = (Some(number), kept);
        }
        self.store = store;
        self.plan = preparation.plan;
        self.not_started = self.plan.world;
        for (at, node) in preparation.nodes.into_iter().enumerate() {
            let Some(mut plan) = self.plan.nodes.get(at).cloned() else { continue };
            if let Some(port) = port {
                plan.workers.iter_mut().for_each(|w| super::port::set(&mut w.env, port));
            }
            // From here on they are in the message to the agent only.
            plan.workers.iter_mut().for_each(|w| w.env.extend(self.secrets.pairs()));
            let start = ToAgent::Start(plan);
            match encode(&start) {
                Ok(_) => self.tell(node, start),
                Err(error) => {
                    self.kill_agent(node);
                    self.later.push_back(Input::AgentGone {
                        node,
                        how: format!("can't be told its plan: {error}"),
                    });
                }
            }
        }
    }

    fn event(&mut self, event: Event) {
        let result = self.journal.as_mut().map_or(Ok(()), |journal| journal.event(&event));
        if let Err(error) = result {
            let text = format!(
                "launch: the run's journal can't be written any more ({error}); the job goes on without it"
            );
            self.report.talk(text);
        }
        self.report.event(event);
    }

    fn finish(mut self, outcome: Outcome) -> u8 {
        let seconds = self.clock.now().as_secs_f64();
        let exit_code = outcome.exit_code;
        let requeue = self.requeue.take().and_then(|requeue| {
            let again = requeue.judge(&outcome)?;
            self.event(Event::Notice { rank: None, message: again.message });
            again.job
        });
        self.event(Event::Done { exit_code, step: outcome.step, seconds });
        // Nothing is left to protect: whoever has enough of waiting for a pager may end this process as any other.
        for caught in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGQUIT] {
            // SAFETY: the default action runs no code of ours.
            _ = unsafe { nix::sys::signal::signal(caught, SigHandler::SigDfl) };
        }
        self.report.finish(report::Summary {
            exit_code,
            stopped: outcome.stopped,
            killed: outcome.killed,
            others: outcome.others,
            run_dir: self.plan.run_dir,
            resume: shell(&self.command),
            seconds,
        });
        // The last thing to do: Slurm ends this process too.
        if let Some(Err(said)) = requeue.map(transport::requeue) {
            report::plain::say(&format!("launch: Slurm doesn't queue this job again: {said}\n"));
        }
        exit_code
    }
}

/// Passes on what an agent says outside the control stream.
async fn read_talk(mut stream: transport::Output, talk: mpsc::Sender<String>) {
    let mut buffer = [0; TALK];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        for line in String::from_utf8_lossy(&buffer[..n]).lines() {
            if talk.send(line.to_owned()).await.is_err() {
                return;
            }
        }
    }
}

/// A command line as a shell reads it.
fn shell(words: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    let quote = |word: &String| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_quoted_for_a_shell() {
        let words = ["launch", "my job.yaml", "--set", "a=it's", ""].map(String::from);
        assert_eq!(shell(&words), r"launch 'my job.yaml' --set 'a=it'\''s' ''");
    }
}

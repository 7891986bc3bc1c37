//! The controller's hands: starts agents, carries messages both ways, catches signals, keeps journal and report.
use super::{
    Options, Secrets,
    core::{Core, Input, NodeId, Outcome, Output, Stop},
    journal::Journal,
    port::Rendezvous,
    store::Server,
};
use crate::{
    agent::{
        self,
        descendants::{children, kill_descendants},
    },
    link::{Clock, LinkError, Outbox, Priority, encode, read_into, write_from},
    plan::Plan,
    report::{self, Report},
    transport::{Local, Transport},
};
use contract::{
    control::{ExitStatus, FromAgent, ToAgent},
    event::Event,
    exit,
};
use nix::{
    sys::signal::{SigHandler, Signal, kill},
    unistd::Pid,
};
use std::{collections::HashMap, io, time::Duration};
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    signal::unix::{Signal as SignalStream, SignalKind, signal},
    sync::mpsc,
    time::{sleep, timeout},
};

/// Messages waiting to be read, of all agents together.
const INBOX: usize = 1024;
/// Longest piece of what an agent says outside the control stream, bytes.
const TALK: usize = 4 << 10;
/// For an agent whose stream has ended to exit, before it is killed.
const AGENT_EXIT: Duration = Duration::from_secs(1);
/// For killed processes to go, before the controller gives up on them.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);
/// Between two looks for them.
const SWEEP_PAUSE: Duration = Duration::from_millis(2);
/// Longest sleep of the loop (the clock needs looking at).
const TICK: Duration = Duration::from_secs(1);

/// Runs the job to its end; the exit code of `launch`.
pub(super) fn run(plan: Plan, options: Options) -> u8 {
    let logs = plan.nodes.first().map(|n| n.job.run.logs.clone());
    let builtin = plan.nodes.iter().flat_map(|n| &n.workers).all(|w| w.command.is_none());
    let setup = report::Setup {
        json: options.json,
        prefix: logs.is_some_and(|l| l.prefix),
        builtin,
        world: plan.world,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| Ok((Report::start(setup)?, runtime))) {
        Ok((report, runtime)) => {
            let mut driver = Driver::new(plan, options, report);
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
    pid: u32,
    outbox: Option<Outbox<ToAgent>>,
    ended: Option<ExitStatus>,
}

type Message = (NodeId, Result<Option<FromAgent>, LinkError>);

struct Driver {
    plan: Plan,
    /// What was typed.
    command: Vec<String>,
    secrets: Secrets,
    core: Core,
    clock: Clock,
    report: Report,
    journal: Option<Journal>,
    agents: HashMap<NodeId, Agent>,
    messages: (mpsc::Sender<Message>, mpsc::Receiver<Message>),
    talk: (mpsc::Sender<String>, mpsc::Receiver<String>),
    rendezvous: Option<Rendezvous>,
    /// Serves the workers while they run.
    store: Option<Server>,
    /// Children that were here before us (`sh -c 'other & exec launch …'`): not ours to end.
    foreign: Vec<u32>,
    outcome: Option<Outcome>,
}

impl Driver {
    fn new(plan: Plan, options: Options, report: Report) -> Self {
        Driver {
            core: Core::new(&plan.nodes),
            plan,
            command: options.command,
            secrets: options.secrets,
            clock: Clock::start(),
            report,
            journal: None,
            agents: HashMap::new(),
            messages: mpsc::channel(INBOX),
            talk: mpsc::channel(INBOX),
            rendezvous: None,
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
        for warning in self.plan.warnings.clone() {
            let hint = warning.hint.map_or_else(String::new, |hint| format!(" ({hint})"));
            let message = format!("{}: {}{hint}", warning.path, warning.message);
            self.event(Event::Notice { rank: None, message });
        }
        if let Some(node) = self.plan.nodes.first() {
            self.rendezvous = Some(Rendezvous::open(node, &self.talk.0)?);
        }
        self.foreign = children();
        agent::become_subreaper().map_err(|e| format!("cannot become a subreaper: {e}"))?;
        Signals::catch().map_err(|e| format!("cannot catch signals: {e}"))
    }

    async fn serve(&mut self, mut signals: Signals) -> Outcome {
        for node in 0..self.plan.nodes.len() {
            if let Err(error) = self.start_agent(node) {
                let how = format!("could not be started: {error}");
                self.handle(Input::AgentGone { node, how });
            }
        }
        let now = self.clock.now();
        let outputs = self.core.start(now);
        outputs.into_iter().for_each(|output| self.execute(output));
        loop {
            if let Some(outcome) = self.outcome.take() {
                self.close().await;
                return outcome;
            }
            let now = self.clock.now();
            let pause = self.core.deadline().map_or(TICK, |at| at.saturating_sub(now).min(TICK));
            tokio::select! {
                Some((node, message)) = self.messages.1.recv() => self.on_agent(node, message).await,
                Some(text) = self.talk.1.recv() => self.report.talk(text),
                input = signals.next() => match input {
                    Some(input) => self.handle(input),
                    None => _ = self.reap(),
                },
                () = sleep(pause) => self.handle(Input::Tick),
            }
            self.agents.values_mut().filter_map(|a| a.outbox.as_mut()).for_each(Outbox::flush);
        }
    }

    fn start_agent(&mut self, node: NodeId) -> io::Result<()> {
        let started = Local.start()?;
        let (outbox, outgoing) = Outbox::new();
        tokio::spawn(read_into(node, started.output, self.messages.0.clone()));
        tokio::spawn(write_from(started.input, outgoing));
        tokio::spawn(read_talk(started.talk, self.talk.0.clone()));
        self.agents.insert(node, Agent { pid: started.pid, outbox: Some(outbox), ended: None });
        Ok(())
    }

    async fn on_agent(&mut self, node: NodeId, message: Result<Option<FromAgent>, LinkError>) {
        match message {
            Ok(Some(message)) => self.handle(Input::Agent(node, message)),
            Ok(None) => self.bury(node, None).await,
            Err(error) => self.bury(node, Some(error.to_string())).await,
        }
    }

    /// The stream of an agent has ended: makes sure that nothing of its node is left, then tells the core.
    async fn bury(&mut self, node: NodeId, error: Option<String>) {
        if let Some(agent) = self.agents.get_mut(&node) {
            agent.outbox = None;
        }
        let limit = self.clock.now() + AGENT_EXIT;
        while self.agents.get(&node).is_some_and(|a| a.ended.is_none()) {
            self.reap();
            if self.clock.now() > limit {
                self.kill_agent(node);
            }
            sleep(SWEEP_PAUSE).await;
        }
        self.sweep().await;
        let ended = self.agents.get(&node).and_then(|a| a.ended);
        let how = match (error, ended) {
            (Some(error), _) => error,
            (None, Some(status)) => format!("ended: {}", super::cause::describe(status, false)),
            (None, None) => "never ran".into(),
        };
        self.handle(Input::AgentGone { node, how });
    }

    /// Reaps what has ended: agents, and what reparented to us when an agent died.
    fn reap(&mut self) -> bool {
        let agents = &mut self.agents;
        agent::reap(
            |_| false,
            |pid, status| {
                if let Some(agent) = agents.values_mut().find(|a| a.pid == pid) {
                    agent.ended = Some(status);
                }
            },
        )
    }

    /// Kills every process of this job that no living agent looks after.
    async fn sweep(&mut self) {
        let limit = self.clock.now() + SWEEP_LIMIT;
        // One look may miss a process that is born while it is taken.
        let mut empty_looks = 0;
        while self.reap() && empty_looks < 2 {
            let living = self.agents.values().filter(|a| a.ended.is_none()).map(|a| a.pid);
            let spare: Vec<u32> = living.chain(self.foreign.iter().copied()).collect();
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
        if let Some(agent) = self.agents.get(&node).filter(|a| a.ended.is_none()) {
            // Not reaped yet: the pid is still its own.
            _ = kill(Pid::from_raw(agent.pid as i32), Signal::SIGKILL);
        }
    }

    /// Agents leave when their streams close; then nothing may be left.
    async fn close(&mut self) {
        self.agents.values_mut().for_each(|a| a.outbox = None);
        let limit = self.clock.now() + AGENT_EXIT;
        while self.reap() && self.agents.values().any(|a| a.ended.is_none()) {
            if self.clock.now() > limit {
                (0..self.plan.nodes.len()).for_each(|node| self.kill_agent(node));
            }
            _ = timeout(SWEEP_PAUSE, self.messages.1.recv()).await;
        }
        self.sweep().await;
    }

    // ---- what the core wants ----

    fn handle(&mut self, input: Input) {
        let now = self.clock.now();
        let outputs = self.core.handle(now, input);
        outputs.into_iter().for_each(|output| self.execute(output));
    }

    fn execute(&mut self, output: Output) {
        match output {
            Output::Tell(node, message) => self.tell(node, message),
            Output::Start => self.start_workers(),
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
        }
    }

    fn start_workers(&mut self) {
        let (port, store) = self.rendezvous.take().map(Rendezvous::ready).unzip();
        self.store = store.flatten();
        for node in 0..self.plan.nodes.len() {
            let mut plan = self.plan.nodes[node].clone();
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
                    self.handle(Input::AgentGone { node, how: format!("can't be told its plan: {error}") });
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
        self.event(Event::Done { exit_code, step: outcome.step, seconds });
        // Nothing is left to protect: whoever has enough of waiting for a pager may end this process as any other.
        for caught in [Signal::SIGINT, Signal::SIGTERM] {
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
        exit_code
    }
}

/// Passes on what an agent says outside the control stream.
async fn read_talk(mut stream: pipe::Receiver, talk: mpsc::Sender<String>) {
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

/// The signals the controller answers to.
struct Signals {
    interrupt: SignalStream,
    terminate: SignalStream,
    /// `None`: ignored by whoever started us (nohup), and so by us.
    hangup: Option<SignalStream>,
    save: SignalStream,
    child: SignalStream,
}

impl Signals {
    fn catch() -> io::Result<Self> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: if ignored(libc::SIGHUP) { None } else { Some(signal(SignalKind::hangup())?) },
            save: signal(SignalKind::user_defined1())?,
            child: signal(SignalKind::child())?,
        })
    }

    /// The next one; `None`: children have ended.
    async fn next(&mut self) -> Option<Input> {
        let hangup = async {
            match &mut self.hangup {
                Some(stream) => stream.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => Some(Input::Stop(Stop::Interrupt)),
            _ = self.terminate.recv() => Some(Input::Stop(Stop::Terminate)),
            _ = hangup => Some(Input::Stop(Stop::Terminate)),
            _ = self.save.recv() => Some(Input::Save),
            _ = self.child.recv() => None,
        }
    }
}

fn ignored(signal: i32) -> bool {
    // SAFETY: asks for the present action only; `action` is a valid place for it.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
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

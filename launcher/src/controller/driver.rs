//! The controller's hands: starts agents, carries messages both ways, catches signals, keeps journal and report.
mod ending;
mod starts;

use super::{
    Fit, HostTarget, Options, Request, Requeue, Secrets, Starter,
    copies::Copies,
    core::{Core, HostSetup, Input, HostIndex, Outcome, Output, Setup},
    hostfile::{self, HostFile},
    job_file::{JobFile, Watched},
    journal::Journal,
    prepare::{Found, Preparation},
    signals::{Said, Signals},
    store::Server,
    watch::Seen,
};
use crate::{
    agent::{self, descendants::children},
    link::{Clock, LinkError, Outbox, Priority, read_into, write_from},
    plan::Plan,
    report::{self, Report},
    runs,
    transport::{self, AgentProcess, Carrier, Transport},
};
use contract::{
    control::{ExitStatus, FromAgent, ToAgent},
    event::Event,
    exit,
    job::JobSpec,
};
use nix::sys::signal::{SigHandler, Signal};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tokio::{io::AsyncReadExt, sync::mpsc, time::sleep};

/// Messages waiting to be read, of all agents together.
const INBOX: usize = 1024;
/// Longest piece of what an agent says outside the control stream, bytes.
const TALK: usize = 4 << 10;
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
type AgentId = (HostIndex, u32);
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
    hostfile: Option<HostFile>,
    /// Told when all workers of a start run.
    starter: Option<Starter>,
    /// Workers of this start that were not started yet.
    not_started: u32,
    core: Core,
    clock: Clock,
    report: Report,
    journal: Option<Journal>,
    /// What ranks on other hosts say.
    copies: Copies,
    agents: HashMap<HostIndex, Agent>,
    /// Agents whose messages didn't all fit into their queues.
    behind: HashSet<HostIndex>,
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
            copies: Copies::new(plan.run_dir.join("logs"), job.run.logs.max_size),
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
            hostfile: options.hostfile,
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
        let mut list = hostfile::Watched::start(self.hostfile.take(), &self.hosts);
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
                seen = list.next() => self.list_hosts(&mut list, seen),
                () = sleep(pause) => self.handle(Input::Tick),
            }
            self.flush();
        }
    }

    fn adopt(&mut self, node: HostIndex, process: AgentProcess) {
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
            Output::ReleaseAgent(node) => {
                if let Some(agent) = self.agents.get_mut(&node) {
                    agent.outbox = None;
                }
            }
            Output::Introduce { epoch, members } => self.introduce(epoch, members),
            Output::Event(event) => self.event(event),
            Output::Line { rank, stderr, text } => {
                if let Some(trouble) = self.copies.line(rank, &text) {
                    self.report.talk(trouble);
                }
                self.report.line(rank, stderr, text);
            }
            Output::Progress { rank, phase } => self.report.progress(rank, phase),
            Output::KillAgent(node) => self.kill_agent(node),
            Output::End(outcome) => self.outcome = Some(outcome),
        }
    }

    fn tell(&mut self, node: HostIndex, message: ToAgent) {
        if let Some(outbox) = self.agents.get_mut(&node).and_then(|a| a.outbox.as_mut()) {
            outbox.send(Priority::Must, message);
            if outbox.is_behind() {
                self.behind.insert(node);
            }
        }
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

    /// The hostfile changed.
    fn list_hosts(&mut self, list: &mut hostfile::Watched, seen: Seen) {
        let change = list.take_up(&mut self.hosts, seen);
        for message in change.notices {
            self.event(Event::Notice { rank: None, message });
        }
        let Some(hosts) = change.hosts else { return };
        self.transport.learn(&hosts.reached);
        let added =
            hosts.added.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local }).collect();
        self.hosts.extend(hosts.added);
        self.handle(Input::Hosts { added, listed: hosts.listed });
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

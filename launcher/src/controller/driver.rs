//! [`Driver`]: executes what the core decides. It starts agents, carries messages, catches signals,
//! and writes the journal and the report.
mod attempt;
mod cleanup;

use super::{
    HostTarget, Options, PrepareResume, Requeue, RunRequest, Secrets, StartNotifier, StoreServer,
    core::{Action, Core, HostIndex, HostSetup, Input, Outcome, Setup},
    file_watch::FileContent,
    hostfile::{HostFile, HostfileWatch},
    job_file::{JobFile, JobFileWatch},
    journal::Journal,
    preparation::{HostInventories, Preparation},
    root_cause::AgentEnd,
    signals::{SignalEvent, SignalReceiver},
    streamed_logs::StreamedLogs,
};
use crate::{
    agent::{self, descendants::children},
    connection::{FrameError, Outbox, Priority, RunningClock, read_frames, write_frames},
    plan::Plan,
    report::{self, Report},
    runs,
    transport::{self, AgentHandle, AgentProcess, Transport},
};
use attempt::notice_text;
use contract::{
    control::{ExitStatus, FromAgent, ToAgent},
    event::{Event, FailureReport},
    exit,
    failure::FailureReason,
    job::JobSpec,
};
use diagnostic::{Diagnostic, codes};
use nix::sys::signal::{SigHandler, Signal};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tokio::{io::AsyncReadExt, sync::mpsc, time::sleep};

/// Capacity of the channel of messages from all agents.
const INBOX: usize = 1024;
/// Size of one read of an agent's stderr, bytes.
const STDERR_CHUNK: usize = 4 << 10;
/// Longest sleep of the main loop, because the clock stops while the process is stopped.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// Runs the job to its end; returns the exit code of `launch`.
pub(super) fn run(request: RunRequest, options: Options) -> u8 {
    let config = report::ReportConfig {
        json: options.json.then_some(options.schema),
        prefix: request.job.run.logs.prefix,
        detached: options.starter.is_some(),
        shown_ranks: request.job.run.logs.show.iter().filter(|rank| **rank < request.plan.world).count(),
        logs: request.plan.run_dir.join("logs"),
        builtin: request.job.run.command.is_none(),
        world: request.plan.world,
        hosts: request.hosts.len(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| Ok((Report::start(config)?, runtime))) {
        Ok((report, runtime)) => {
            let mut driver = Driver::new(request, options, report);
            let outcome = runtime.block_on(driver.run());
            driver.finish(outcome)
        }
        Err(error) => {
            let error = setup_error("cannot start the threads of the controller").with_cause(&error);
            report::plain::write_message(&diagnostic::render(&error, report::plain::use_color()));
            exit::CLUSTER
        }
    }
}

fn setup_error(message: &str) -> Diagnostic {
    Diagnostic::error(codes::run::CONTROLLER_SETUP_FAILED, message)
}

/// The process of an agent and the controller's end of its connection.
struct Agent {
    number: u32,
    handle: AgentHandle,
    outbox: Option<Outbox<ToAgent>>,
    ended: Option<ExitStatus>,
}

impl Agent {
    /// Its pid while it is a child that was not reaped.
    fn unreaped_child(&self) -> Option<u32> {
        match self.handle {
            AgentHandle::Child(pid) if self.ended.is_none() => Some(pid),
            _ => None,
        }
    }
}

/// An agent of a host; the next agent of the host has another number.
type AgentId = (HostIndex, u32);
type AgentMessage = (AgentId, Result<Option<FromAgent>, FrameError>);

struct Driver {
    job: JobSpec,
    /// The plan of the newest attempt.
    plan: Plan,
    hosts: Vec<HostTarget>,
    transport: Box<dyn Transport>,
    prepare_resume: PrepareResume,
    inventories: HostInventories,
    /// The command line.
    command: Vec<String>,
    secrets: Secrets,
    requeue: Option<Requeue>,
    job_file: Option<JobFile>,
    hostfile: Option<HostFile>,
    /// Notified when all workers of an attempt are running.
    starter: Option<StartNotifier>,
    /// Workers of this attempt that are not running yet.
    not_started: u32,
    core: Core,
    clock: RunningClock,
    report: Report,
    journal: Option<Journal>,
    streamed_logs: StreamedLogs,
    agents: HashMap<HostIndex, Agent>,
    /// Agents for which messages wait because their queues are full.
    backlogged: HashSet<HostIndex>,
    /// Inputs for the core that follow from its own actions.
    pending_inputs: VecDeque<Input>,
    /// The number of agents that were started.
    agents_started: u32,
    messages: (mpsc::Sender<AgentMessage>, mpsc::Receiver<AgentMessage>),
    /// Lines for the user.
    lines: (mpsc::Sender<String>, mpsc::Receiver<String>),
    /// The attempt that is being prepared.
    preparation: Option<Preparation>,
    /// Serves the workers of the current attempt.
    store: Option<StoreServer>,
    /// Children that existed before this program (`sh -c 'other & exec launch …'`) and must not be
    /// killed.
    preexisting_children: Vec<u32>,
    outcome: Option<Outcome>,
}

impl Driver {
    fn new(request: RunRequest, options: Options, report: Report) -> Self {
        let RunRequest { job, plan, hosts, transport, local_inventory, prepare_resume } = request;
        let setups = hosts.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local });
        let setup = Setup::new(&job, setups.collect(), RandomState::new().hash_one(&plan.run.0));
        Driver {
            core: Core::new(setup),
            streamed_logs: StreamedLogs::new(plan.run_dir.join("logs"), job.run.logs.max_size),
            inventories: HostInventories::new(local_inventory.inherited_env, hosts.len()),
            job,
            plan,
            hosts,
            transport,
            prepare_resume,
            command: options.command,
            secrets: options.secrets,
            requeue: options.requeue,
            job_file: options.job_file,
            hostfile: options.hostfile,
            starter: options.starter,
            not_started: 0,
            clock: RunningClock::start(),
            report,
            journal: None,
            agents: HashMap::new(),
            backlogged: HashSet::new(),
            pending_inputs: VecDeque::new(),
            agents_started: 0,
            messages: mpsc::channel(INBOX),
            lines: mpsc::channel(INBOX),
            preparation: None,
            store: None,
            preexisting_children: Vec::new(),
            outcome: None,
        }
    }

    async fn run(&mut self) -> Outcome {
        match self.prepare_run() {
            Ok(signals) => self.serve(signals).await,
            Err(error) => {
                let exit_code = exit::CLUSTER;
                self.emit_event(Event::Failure(Box::new(FailureReport {
                    reason: FailureReason::ControllerFailed { code: error.code() },
                    message: error.to_string(),
                    help: error.help().to_vec(),
                    diagnostics: vec![error],
                    ..FailureReport::default()
                })));
                Outcome { exit_code, ..Outcome::default() }
            }
        }
    }

    /// Everything that can fail before a process is started.
    fn prepare_run(&mut self) -> diagnostic::Result<SignalReceiver> {
        let directory = self.plan.run_dir.clone();
        let journal = Journal::create(&self.plan, &self.command).map_err(|error| {
            let message = format!("cannot write the run directory {}", directory.display());
            Diagnostic::error(codes::run::RUN_DIRECTORY_UNWRITABLE, message)
                .with_subject(directory.display().to_string())
                .with_cause(&error)
        })?;
        self.journal = Some(journal);
        let (run, world) = (self.plan.run.to_string(), self.plan.world);
        self.emit_event(Event::Start { run, run_dir: directory, world });
        if let Err(error) = runs::register(&self.plan, &self.job.name, &self.command) {
            self.emit_notice(format!(
                "cannot register the run: {error}; `launch ps` and `launch stop` will not list it"
            ));
        }
        for warning in self.plan.warnings.clone() {
            let help: String = warning.help().iter().map(|help| format!(" ({help})")).collect();
            self.emit_notice(format!("{}{help}", notice_text(&warning)));
        }
        // A requested port of this machine is checked before any process is started.
        if self.plan.master_address.is_some_and(|address| address.is_loopback()) {
            let preparation = Preparation::new(&self.job, self.plan.clone(), &self.inventories.addresses());
            drop(preparation.bind_locally(&self.lines.0)?);
        }
        self.preexisting_children = children();
        agent::become_subreaper()
            .map_err(|error| setup_error("cannot become a child subreaper").with_cause(&error))?;
        SignalReceiver::catch(self.job.run.signals, self.requeue.is_some())
            .map_err(|error| setup_error("cannot catch signals").with_cause(&error))
    }

    async fn serve(&mut self, mut signals: SignalReceiver) -> Outcome {
        let names: Vec<String> = self.hosts.iter().map(|h| h.name.clone()).collect();
        let mut failed = Vec::new();
        for (host, started) in self.transport.start_agents(&names).into_iter().enumerate() {
            match started {
                Ok(process) => self.register_agent(host, process),
                Err(error) => failed.push((host, error)),
            }
        }
        let mut job_file = JobFileWatch::start(self.job_file.take());
        let mut hostfile = HostfileWatch::start(self.hostfile.take(), &self.hosts);
        let now = self.clock.now();
        let actions = self.core.start(now);
        actions.into_iter().for_each(|action| self.execute(action));
        for (host, error) in failed {
            self.handle(Input::AgentGone { host, end: AgentEnd::NotStarted(error) });
        }
        loop {
            if let Some(outcome) = self.outcome.take() {
                self.close().await;
                return outcome;
            }
            let now = self.clock.now();
            let pause = self.core.deadline().map_or(MAX_SLEEP, |at| at.saturating_sub(now).min(MAX_SLEEP));
            tokio::select! {
                Some((agent, message)) = self.messages.1.recv() => self.on_agent(agent, message).await,
                Some(line) = self.lines.1.recv() => self.report.message(line),
                event = signals.next() => match event {
                    SignalEvent::Request(input) => self.handle(input),
                    SignalEvent::ChildrenEnded => _ = self.reap(),
                    SignalEvent::Ignored => {}
                },
                content = job_file.next() => self.reload(&mut job_file, content),
                content = hostfile.next() => self.update_hosts(&mut hostfile, content),
                () = sleep(pause) => self.handle(Input::Tick),
            }
            self.flush();
        }
    }

    fn register_agent(&mut self, host: HostIndex, process: AgentProcess) {
        let (outbox, outgoing) = Outbox::new();
        self.agents_started = self.agents_started.wrapping_add(1);
        let number = self.agents_started;
        tokio::spawn(read_frames((host, number), process.output, self.messages.0.clone()));
        tokio::spawn(write_frames(process.input, outgoing));
        tokio::spawn(forward_stderr(process.stderr, self.lines.0.clone()));
        let agent = Agent { number, handle: process.handle, outbox: Some(outbox), ended: None };
        self.agents.insert(host, agent);
    }

    /// Sends messages that waited because an agent's queue was full.
    fn flush(&mut self) {
        let agents = &mut self.agents;
        self.backlogged.retain(|host| {
            let outbox = agents.get_mut(host).and_then(|a| a.outbox.as_mut());
            outbox.is_some_and(|outbox| {
                outbox.flush();
                outbox.is_behind()
            })
        });
    }

    async fn on_agent(&mut self, (host, number): AgentId, message: Result<Option<FromAgent>, FrameError>) {
        // Messages of an agent that was replaced have no effect.
        if self.agents.get(&host).is_none_or(|agent| agent.number != number) {
            return;
        }
        match message {
            Ok(Some(FromAgent::Bound { attempt, port })) => self.on_bound(host, attempt, port),
            Ok(Some(message)) => {
                if matches!(message, FromAgent::Started { .. }) {
                    self.count_started_worker();
                }
                self.handle(Input::Agent(host, message));
            }
            Ok(None) => self.on_agent_ended(host, None).await,
            Err(error) => self.on_agent_ended(host, Some(error.into())).await,
        }
    }

    /// Notifies the process that started this one when the last worker runs.
    fn count_started_worker(&mut self) {
        self.not_started = self.not_started.saturating_sub(1);
        if self.not_started == 0
            && let Some(starter) = self.starter.take()
        {
            starter.notify();
        }
    }

    // ---- actions of the core ----

    fn handle(&mut self, input: Input) {
        let now = self.clock.now();
        let actions = self.core.handle(now, input);
        actions.into_iter().for_each(|action| self.execute(action));
        while let Some(input) = self.pending_inputs.pop_front() {
            let now = self.clock.now();
            let actions = self.core.handle(now, input);
            actions.into_iter().for_each(|action| self.execute(action));
        }
    }

    fn execute(&mut self, action: Action) {
        match action {
            Action::Send(host, message) => self.send(host, message),
            Action::RecordInventory(host, inventory) => self.inventories.insert(host, inventory),
            Action::Prepare { attempt, restarts, hosts, resume } => {
                self.prepare_attempt(attempt, restarts, &hosts, resume);
            }
            Action::StartWorkers => self.start_workers(),
            Action::StartAgent(host) => self.start_agent(host),
            Action::ReleaseAgent(host) => {
                if let Some(agent) = self.agents.get_mut(&host) {
                    agent.outbox = None;
                }
            }
            Action::SendPeers { attempt, members } => self.send_peers_and_key(attempt, members),
            Action::Event(event) => self.emit_event(event),
            Action::Line { rank, stderr, text } => {
                if let Some(warning) = self.streamed_logs.append(rank, &text) {
                    self.report.message(warning);
                }
                self.report.line(rank, stderr, text);
            }
            Action::Progress { rank, phase } => self.report.progress(rank, phase),
            Action::KillAgent(host) => self.kill_agent(host),
            Action::End(outcome) => self.outcome = Some(outcome),
        }
    }

    fn send(&mut self, host: HostIndex, message: ToAgent) {
        if let Some(outbox) = self.agents.get_mut(&host).and_then(|a| a.outbox.as_mut()) {
            outbox.send(Priority::Critical, message);
            if outbox.is_behind() {
                self.backlogged.insert(host);
            }
        }
    }

    /// Applies a change of the job file.
    fn reload(&mut self, watch: &mut JobFileWatch, content: FileContent) {
        let change = watch.apply(&self.job, content);
        change.notices.into_iter().for_each(|message| self.emit_notice(message));
        let Some(values) = change.values else { return };
        // Later attempts begin with the new values.
        values.apply(&mut self.job);
        let prepared = self.preparation.iter_mut().flat_map(|p| &mut p.plan.host_plans);
        prepared.for_each(|plan| values.apply(&mut plan.job));
        self.handle(Input::Reload(values));
    }

    /// Applies a change of the hostfile.
    fn update_hosts(&mut self, watch: &mut HostfileWatch, content: FileContent) {
        let change = watch.apply(&mut self.hosts, content);
        change.notices.into_iter().for_each(|message| self.emit_notice(message));
        let Some(hosts) = change.hosts else { return };
        self.transport.update_hosts(&hosts.addresses);
        let added =
            hosts.added.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local }).collect();
        self.hosts.extend(hosts.added);
        self.handle(Input::Hosts { added, listed: hosts.listed });
    }

    fn emit_notice(&mut self, message: String) {
        self.emit_event(Event::notice(None, message));
    }

    fn emit_event(&mut self, event: Event) {
        let result = self.journal.as_mut().map_or(Ok(()), |journal| journal.append(&event));
        if let Err(error) = result {
            self.report.message(format!(
                "launch: cannot write the journal of the run: {error}; the run continues without it"
            ));
        }
        self.report.event(event);
    }

    fn finish(mut self, outcome: Outcome) -> u8 {
        let seconds = self.clock.now().as_secs_f64();
        let exit_code = outcome.exit_code;
        let requeue = self.requeue.take().and_then(|requeue| {
            let decision = requeue.decide(&outcome)?;
            self.emit_notice(decision.message);
            decision.job
        });
        self.emit_event(Event::Done { exit_code, step: outcome.step, seconds });
        // No process of the job is left, so the default actions are safe: Ctrl-C ends a wait for a
        // pager.
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGQUIT] {
            // SAFETY: the default action runs no code of this program.
            _ = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        }
        self.report.finish(report::RunSummary {
            exit_code,
            stopped: outcome.stopped,
            killed: outcome.killed,
            peers: outcome.peers,
            run_dir: self.plan.run_dir,
            resume: quote_command(&self.command),
            seconds,
        });
        // The last step, because Slurm ends this process, too.
        if let Some(Err(error)) = requeue.map(transport::requeue_job) {
            report::plain::write_message(&diagnostic::render(&error, report::plain::use_color()));
        }
        exit_code
    }
}

/// Forwards the lines that an agent writes to stderr.
async fn forward_stderr(mut stream: transport::AgentOutput, lines: mpsc::Sender<String>) {
    let mut buffer = [0; STDERR_CHUNK];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        for line in String::from_utf8_lossy(&buffer[..n]).lines() {
            if lines.send(line.to_owned()).await.is_err() {
                return;
            }
        }
    }
}

/// The command line, quoted for a shell.
fn quote_command(words: &[String]) -> String {
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
        assert_eq!(quote_command(&words), r"launch 'my job.yaml' --set 'a=it'\''s' ''");
    }
}

//! [`ControllerDriver`]: executes what the core decides. The driver starts agents, exchanges
//! messages with them, catches signals, and writes the journal and the report.
mod cleanup;
mod debug_log;
mod start_attempt;

use super::{
    core::{ControllerAction, ControllerCore, ControllerInput, CoreSetup, HostIndex, HostSetup, RunOutcome},
    file_watch::WatchedFileContent,
    hostfile::{FilteredHostfile, HostfileWatch},
    job_file::{JobFile, JobFileWatch},
    journal::Journal,
    preparation::{AttemptPreparation, HostInventories},
    requeue::decide_requeue,
    root_cause::AgentEnd,
    run_request::{ResumePreparer, RunOptions, RunRequest},
    signals::{SignalEvent, SignalReceiver},
    streamed_logs::StreamedLogs,
};
use crate::{
    clock::RunningClock,
    cluster::{AgentHandle, AgentOutput, AgentProcess, BatchJob, HostTarget, Transport},
    connection::{FrameError, MessagePriority, Outbox, read_frames, write_frames},
    detached_controller::StartNotifier,
    format::{format_notice, quote_shell_words},
    plan::Plan,
    processes::{become_subreaper, list_children},
    rendezvous::StoreServer,
    report::{self, Reporter},
    runs,
    secrets::SecretVariables,
};
use diagnostic::{Diagnostic, codes};
use jobspec::JobSpec;
use nix::sys::signal::{SigHandler, Signal};
use protocol::{
    control::{ExitStatus, FromAgent, ToAgent},
    event::{Event, FailureReport},
    exit,
    failure::FailureReason,
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tokio::{io::AsyncReadExt, sync::mpsc, time::sleep};
use tracing::info;

/// The capacity of each of the driver's two channels, in messages: the channel for the messages of
/// all agents, and the channel for lines that are shown to the user.
const INBOX_CAPACITY: usize = 1024;
/// The size of one read of an agent's stderr, in bytes.
const STDERR_CHUNK_BYTES: usize = 4 << 10;
/// The longest sleep of the event loop. [`RunningClock`] counts at most two seconds between two
/// readings, so the clock would lag after a longer sleep.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// Runs the job to its end and returns the exit code of `launch`. Blocks.
pub(crate) fn run_job(request: RunRequest, options: RunOptions) -> u8 {
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
    match runtime.and_then(|runtime| Ok((Reporter::start(config)?, runtime))) {
        Ok((report, runtime)) => {
            let mut driver = ControllerDriver::new(request, options, report);
            let outcome = runtime.block_on(driver.run_to_end());
            driver.finish_run(outcome)
        }
        Err(error) => {
            let error = build_setup_error("cannot start the threads of the controller").with_cause(&error);
            report::command_output::write_message(&diagnostic::render(
                &error,
                report::command_output::is_color_enabled(),
            ));
            exit::CLUSTER
        }
    }
}

/// Builds the error for a controller that cannot set up its own process, for example its threads.
fn build_setup_error(message: &str) -> Diagnostic {
    Diagnostic::error(codes::run::CONTROLLER_SETUP_FAILED, message)
}

/// The process of an agent, with the controller's end of the control connection.
struct SupervisedAgent {
    /// The number that distinguishes the agent from earlier agents of its host.
    number: u32,
    handle: AgentHandle,
    /// Queues messages to the agent; `None` once the control stream is closed.
    outbox: Option<Outbox<ToAgent>>,
    /// The exit status of the agent if the agent is a child of the controller that was reaped;
    /// `None` otherwise.
    ended: Option<ExitStatus>,
}

impl SupervisedAgent {
    /// Returns the pid of the agent if it is a child of the controller that was not reaped.
    fn find_unreaped_pid(&self) -> Option<u32> {
        match self.handle {
            AgentHandle::Child(pid) if self.ended.is_none() => Some(pid),
            _ => None,
        }
    }
}

/// The host of an agent and the agent's number. Each later agent of the host gets another number.
type AgentId = (HostIndex, u32);
/// A message from an agent. `Ok(None)` or an error means that the stream has ended.
type AgentMessage = (AgentId, Result<Option<FromAgent>, FrameError>);

/// Executes the actions that the core of one run decides on.
struct ControllerDriver {
    job: JobSpec,
    /// The plan of the newest attempt. Before the first attempt, the plan for the declared hosts.
    plan: Plan,
    hosts: Vec<HostTarget>,
    transport: Box<dyn Transport>,
    prepare_resume: ResumePreparer,
    inventories: HostInventories,
    /// The command line of `launch`.
    command: Vec<String>,
    secrets: SecretVariables,
    requeue: Option<BatchJob>,
    job_file: Option<JobFile>,
    hostfile: Option<FilteredHostfile>,
    /// Notifies the process that started this detached controller, once all workers of an attempt
    /// are running. `None` after the notification, and for a run in the foreground.
    starter: Option<StartNotifier>,
    /// The number of workers of this attempt that are not running yet.
    not_started: u32,
    core: ControllerCore,
    clock: RunningClock,
    report: Reporter,
    journal: Option<Journal>,
    streamed_logs: StreamedLogs,
    agents: HashMap<HostIndex, SupervisedAgent>,
    /// The hosts whose agents have messages waiting because the queues of the agents are full.
    backlogged: HashSet<HostIndex>,
    /// Inputs for the core that follow from its own actions.
    pending_inputs: VecDeque<ControllerInput>,
    /// The number of agents that were started during the run, which is also the number of the
    /// newest agent.
    agents_started: u32,
    /// Both ends of the channel that carries the messages of all agents to the event loop.
    messages: (mpsc::Sender<AgentMessage>, mpsc::Receiver<AgentMessage>),
    /// Both ends of the channel that carries lines for the user to the event loop: the stderr of
    /// agents, and warnings of the rendezvous store.
    lines: (mpsc::Sender<String>, mpsc::Receiver<String>),
    /// The attempt that is being prepared; `None` if no attempt is.
    preparation: Option<AttemptPreparation>,
    /// The rendezvous store for the workers of the current attempt; `None` if this process serves
    /// no store.
    store: Option<StoreServer>,
    /// Children that existed before this program (`sh -c 'other & exec launch …'`) and must not be
    /// killed.
    preexisting_children: Vec<u32>,
    /// The outcome of the run; `None` until the core has ended the run.
    outcome: Option<RunOutcome>,
}

impl ControllerDriver {
    /// Creates the driver of a run. Starts no process and writes no file.
    fn new(request: RunRequest, options: RunOptions, report: Reporter) -> Self {
        let RunRequest { job, plan, hosts, transport, local_inventory, prepare_resume } = request;
        let setups = hosts.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local });
        let setup = CoreSetup::new(&job, setups.collect(), RandomState::new().hash_one(&plan.run.0));
        ControllerDriver {
            core: ControllerCore::new(setup),
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
            messages: mpsc::channel(INBOX_CAPACITY),
            lines: mpsc::channel(INBOX_CAPACITY),
            preparation: None,
            store: None,
            preexisting_children: Vec::new(),
            outcome: None,
        }
    }

    /// Runs the job and returns its outcome. Reports a failure to set up the run as the outcome.
    async fn run_to_end(&mut self) -> RunOutcome {
        match self.prepare_run() {
            Ok(signals) => self.run_event_loop(signals).await,
            Err(error) => {
                let exit_code = exit::CLUSTER;
                self.emit_event(Event::Failure(Box::new(FailureReport {
                    reason: FailureReason::ControllerFailed { code: error.code() },
                    message: error.to_string(),
                    help: error.help().to_vec(),
                    diagnostics: vec![error],
                    ..FailureReport::default()
                })));
                RunOutcome { exit_code, ..RunOutcome::default() }
            }
        }
    }

    /// Performs the steps that may fail before any process is started, such as creating the run
    /// directory, checking a requested port and installing the signal handlers.
    fn prepare_run(&mut self) -> diagnostic::Result<SignalReceiver> {
        let directory = self.plan.run_dir.clone();
        let journal = Journal::create(&self.plan, &self.command).map_err(|error| {
            let message = format!("cannot write the run directory {}", directory.display());
            Diagnostic::error(codes::run::RUN_DIRECTORY_UNWRITABLE, message)
                .with_subject(directory.display().to_string())
                .with_cause(&error)
        })?;
        self.journal = Some(journal);
        // Without this file the run is complete, so an error is only a line on the terminal.
        if let Err(error) = debuglog::open_file(&directory.join("logs/controller.debug.log")) {
            self.emit_notice(format!("cannot write the debug log: {error}"));
        }
        info!(target: "controller::plan", run = %self.plan.run, world = self.plan.world,
            hosts = self.hosts.len(), "planned run");
        let (run, world) = (self.plan.run.to_string(), self.plan.world);
        self.emit_event(Event::Start { run, run_dir: directory, world });
        if let Err(error) = runs::register_run(&self.plan, &self.job.name, &self.command) {
            self.emit_notice(format!(
                "cannot register the run: {error}; `launch ps` and `launch stop` will not list it"
            ));
        }
        for warning in self.plan.warnings.clone() {
            let help: String = warning.help().iter().map(|help| format!(" ({help})")).collect();
            self.emit_notice(format!("{}{help}", format_notice(&warning)));
        }
        // A requested port of this machine is checked before any process is started.
        if self.plan.master_address.is_some_and(|address| address.is_loopback()) {
            let preparation =
                AttemptPreparation::new(&self.job, self.plan.clone(), &self.inventories.collect_addresses());
            drop(preparation.bind_rendezvous(&self.lines.0)?);
        }
        self.preexisting_children = list_children();
        become_subreaper()
            .map_err(|error| build_setup_error("cannot become a child subreaper").with_cause(&error))?;
        SignalReceiver::install(self.job.run.signals, self.requeue.is_some())
            .map_err(|error| build_setup_error("cannot catch signals").with_cause(&error))
    }

    /// Starts the agents, then processes messages, signals, file changes and deadlines until the
    /// core ends the run. All agents have ended when this function returns.
    async fn run_event_loop(&mut self, mut signals: SignalReceiver) -> RunOutcome {
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
        let actions = self.core.send_hellos(now);
        actions.into_iter().for_each(|action| self.execute_action(action));
        for (host, error) in failed {
            self.handle_input(ControllerInput::AgentGone { host, end: AgentEnd::NotStarted(error) });
        }
        loop {
            if let Some(outcome) = self.outcome.take() {
                self.close_agents().await;
                return outcome;
            }
            let now = self.clock.now();
            let pause =
                self.core.find_next_deadline().map_or(MAX_SLEEP, |at| at.saturating_sub(now).min(MAX_SLEEP));
            tokio::select! {
                Some((agent, message)) = self.messages.1.recv() => self.handle_agent_message(agent, message).await,
                Some(line) = self.lines.1.recv() => self.report.show_message(line),
                event = signals.receive() => match event {
                    SignalEvent::Request(input) => self.handle_input(input),
                    SignalEvent::ChildrenEnded => _ = self.reap_children(),
                    SignalEvent::Ignored => {}
                },
                content = job_file.wait_for_change() => self.apply_job_file_change(&mut job_file, content),
                content = hostfile.wait_for_change() => self.apply_hostfile_change(&mut hostfile, content),
                () = sleep(pause) => self.handle_input(ControllerInput::Tick),
            }
            self.flush_outboxes();
        }
    }

    /// Starts the tasks that read from and write to a newly started agent, and stores the agent as
    /// the current agent of the host.
    fn register_agent(&mut self, host: HostIndex, process: AgentProcess) {
        let (outbox, outgoing) = Outbox::channel();
        self.agents_started = self.agents_started.wrapping_add(1);
        let number = self.agents_started;
        info!(target: "controller::transport", host, number, "started agent");
        tokio::spawn(read_frames((host, number), process.output, self.messages.0.clone()));
        tokio::spawn(write_frames(process.input, outgoing));
        tokio::spawn(forward_stderr(process.stderr, self.lines.0.clone()));
        let agent = SupervisedAgent { number, handle: process.handle, outbox: Some(outbox), ended: None };
        self.agents.insert(host, agent);
    }

    /// Moves messages that waited because an agent's queue was full into that queue, as far as the
    /// queue has space.
    fn flush_outboxes(&mut self) {
        let agents = &mut self.agents;
        self.backlogged.retain(|host| {
            let outbox = agents.get_mut(host).and_then(|a| a.outbox.as_mut());
            outbox.is_some_and(|outbox| {
                outbox.flush_overflow();
                outbox.has_overflow()
            })
        });
    }

    /// Passes a message of an agent, or the end of the agent's stream, to the core. Ignores
    /// messages of an agent that was replaced by a later agent of its host.
    async fn handle_agent_message(
        &mut self,
        (host, number): AgentId,
        message: Result<Option<FromAgent>, FrameError>,
    ) {
        // The host may have a later agent by now.
        if self.agents.get(&host).is_none_or(|agent| agent.number != number) {
            return;
        }
        match message {
            Ok(Some(FromAgent::Bound { attempt, port })) => self.handle_bound_rendezvous(host, attempt, port),
            Ok(Some(message)) => {
                if matches!(message, FromAgent::Started { .. }) {
                    self.count_started_worker();
                }
                self.handle_input(ControllerInput::Agent(host, message));
            }
            Ok(None) => self.handle_agent_end(host, None).await,
            Err(error) => self.handle_agent_end(host, Some(error.into())).await,
        }
    }

    /// Records that one more worker of the attempt runs. Once all workers of the attempt run,
    /// notifies the process that started this controller, if the controller is detached.
    fn count_started_worker(&mut self) {
        self.not_started = self.not_started.saturating_sub(1);
        if self.not_started == 0
            && let Some(starter) = self.starter.take()
        {
            starter.notify_started();
        }
    }

    // ---- actions of the core ----

    /// Gives an input to the core and executes the resulting actions. Then processes each input
    /// that these actions have produced in the same way.
    fn handle_input(&mut self, input: ControllerInput) {
        debug_log::log_input(&input);
        let now = self.clock.now();
        let actions = self.core.handle_input(now, input);
        actions.into_iter().for_each(|action| self.execute_action(action));
        while let Some(input) = self.pending_inputs.pop_front() {
            debug_log::log_input(&input);
            let now = self.clock.now();
            let actions = self.core.handle_input(now, input);
            actions.into_iter().for_each(|action| self.execute_action(action));
        }
    }

    /// Executes one action that the core has decided on. Some actions add an input to
    /// `pending_inputs`.
    fn execute_action(&mut self, action: ControllerAction) {
        debug_log::log_action(&action);
        match action {
            ControllerAction::Send(host, message) => self.send_to_agent(host, message),
            ControllerAction::RecordInventory(host, inventory) => {
                self.inventories.insert_inventory(host, inventory)
            }
            ControllerAction::Prepare { attempt, restarts, hosts, resume } => {
                self.prepare_attempt(attempt, restarts, &hosts, resume);
            }
            ControllerAction::StartWorkers => self.start_workers(),
            ControllerAction::StartAgent(host) => self.start_agent(host),
            ControllerAction::ReleaseAgent(host) => {
                if let Some(agent) = self.agents.get_mut(&host) {
                    agent.outbox = None;
                }
            }
            ControllerAction::SendPeers { attempt, members } => self.send_peers_and_key(attempt, members),
            ControllerAction::Event(event) => self.emit_event(event),
            ControllerAction::Line { rank, stderr, text } => {
                if let Some(warning) = self.streamed_logs.append_line(rank, &text) {
                    self.report.show_message(warning);
                }
                self.report.show_line(rank, stderr, text);
            }
            ControllerAction::Progress { rank, phase } => self.report.show_phase(rank, phase),
            ControllerAction::KillAgent(host) => self.kill_agent(host),
            ControllerAction::End(outcome) => self.outcome = Some(outcome),
        }
    }

    /// Queues a message to the agent of a host. Drops the message if the host has no agent or its
    /// control stream is closed.
    fn send_to_agent(&mut self, host: HostIndex, message: ToAgent) {
        if let Some(outbox) = self.agents.get_mut(&host).and_then(|a| a.outbox.as_mut()) {
            outbox.send_message(MessagePriority::Critical, message);
            if outbox.has_overflow() {
                self.backlogged.insert(host);
            }
        }
    }

    /// Applies a change of the job file: reports the change, sends the new values of reloadable
    /// keys to the workers, and uses them for later attempts.
    fn apply_job_file_change(&mut self, watch: &mut JobFileWatch, content: WatchedFileContent) {
        let change = watch.apply_change(&self.job, content);
        change.notices.into_iter().for_each(|message| self.emit_notice(message));
        let Some(values) = change.values else { return };
        // Later attempts begin with the new values.
        values.apply_to(&mut self.job);
        let prepared = self.preparation.iter_mut().flat_map(|p| &mut p.plan.host_plans);
        prepared.for_each(|plan| values.apply_to(&mut plan.job));
        self.handle_input(ControllerInput::Reload(values));
    }

    /// Applies a change of the hostfile: reports the change, and gives the new list of hosts to the
    /// core and to the transport.
    fn apply_hostfile_change(&mut self, watch: &mut HostfileWatch, content: WatchedFileContent) {
        let change = watch.apply_change(&mut self.hosts, content);
        change.notices.into_iter().for_each(|message| self.emit_notice(message));
        let Some(hosts) = change.hosts else { return };
        self.transport.update_hosts(&hosts.addresses);
        let added =
            hosts.added.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local }).collect();
        self.hosts.extend(hosts.added);
        self.handle_input(ControllerInput::Hosts { added, listed: hosts.listed });
    }

    /// Writes a notice to the journal and shows the notice to the user.
    fn emit_notice(&mut self, message: String) {
        self.emit_event(Event::new_notice(None, message));
    }

    /// Writes an event to the journal and reports the event to the user. An error of the journal is
    /// reported once and does not end the run.
    fn emit_event(&mut self, event: Event) {
        let result = self.journal.as_mut().map_or(Ok(()), |journal| journal.append_event(&event));
        if let Err(error) = result {
            self.report.show_message(format!(
                "launch: cannot write the journal of the run: {error}; the run continues without it"
            ));
        }
        self.report.show_event(event);
    }

    /// Reports the end of the run, requeues the batch job if that is due, and returns the exit code
    /// of `launch`.
    fn finish_run(mut self, outcome: RunOutcome) -> u8 {
        let seconds = self.clock.now().as_secs_f64();
        let exit_code = outcome.exit_code;
        let requeued = self.requeue.take().filter(|job| match decide_requeue(job, &outcome) {
            Some(decision) => {
                self.emit_notice(decision.message);
                decision.requeue
            }
            None => false,
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
            resume: quote_shell_words(&self.command),
            seconds,
        });
        // Requeuing is the last step, because the scheduler then ends this process, too.
        if let Some(Err(error)) = requeued.map(|job| (job.requeue)(&job.id)) {
            report::command_output::write_message(&diagnostic::render(
                &error,
                report::command_output::is_color_enabled(),
            ));
        }
        exit_code
    }
}

/// Sends each line that an agent writes to stderr to the channel `lines`. Ends when the stream ends
/// or the channel is closed.
async fn forward_stderr(mut stream: AgentOutput, lines: mpsc::Sender<String>) {
    let mut buffer = [0; STDERR_CHUNK_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        for line in String::from_utf8_lossy(&buffer[..n]).lines() {
            if lines.send(line.to_owned()).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_quoted_for_a_shell() {
        let words = ["launch", "my job.yaml", "--set", "a=it's", ""].map(String::from);
        assert_eq!(quote_shell_words(&words), r"launch 'my job.yaml' --set 'a=it'\''s' ''");
    }
}

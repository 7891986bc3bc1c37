//! [`ControllerDriver`]: executes the actions that the controller's state machine requests, such as
//! to start agents and to send messages. The driver starts agents, exchanges messages with them,
//! catches signals, and writes the journal and the report.
mod cleanup;
mod debug_log;
mod event_loop;
mod exec_commands;
mod execute_actions;
mod finish;
mod inner_hosts;
mod job_changes;
mod loop_event;
mod memo;
mod metrics;
mod mlflow;
mod pause_recovery;
mod start_attempt;
mod status;
mod takeover;

use super::{
    attempt_preparation::{AttemptPlanningResult, AttemptPreparation, HostInventories},
    controller_events::ControllerEvents,
    controller_identity::ControllerIdentity,
    core::{
        AttachFailure, ControllerCore, ControllerInput, CoreSetup, HostIndex, HostSetup, RunOutcome,
        StoredMemo,
    },
    descriptor_limit::raise_descriptor_limit,
    exec_socket::{ExecClient, ExecSocket},
    hostfile::FilteredHostfile,
    job_file::JobFile,
    journal::{Journal, JournalSummary, StoredReportReceiver},
    run_request::{AttachOptions, ResumePreparer, RunOptions, RunRequest},
    run_status::StatusKeeper,
    signals::{SignalAnnouncements, SignalReceiver},
    status_file::StatusFile,
    streamed_logs::StreamedLogs,
};
use crate::{
    clock::RunningClock,
    cluster::{self, AgentHandle, AgentStartStep, BatchJob, HostTarget, Transport},
    connection::{FrameError, Outbox},
    core_dumps::disable_core_dumps,
    detached_controller::StartNotifier,
    format::format_notice,
    metrics_server::{MetricsFile, MetricsServer},
    mlflow::{MlflowRecorder, MlflowSettings},
    plan::Plan,
    processes::{become_subreaper, list_children},
    report::{self, Reporter},
    runs,
    secrets::SecretVariables,
    supervised_controller::ForwardedSignals,
    usage_metrics::UsageMetricsSchedule,
};
use diagnostic::{Diagnostic, codes};
use jobspec::{ControllerLossAction, JobSpec, hosts::HostAddress};
use protocol::{
    control::{BatchJobRecord, ExecId, ExitStatus, FromAgent, ToAgent},
    event::{Event, FailureReport},
    exit,
    failure::FailureReason,
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tokio::sync::mpsc;
use tracing::info;

/// The largest number of messages that may wait in a channel to the controller's event loop, such
/// as the channel of the agents' messages.
const EVENT_CHANNEL_CAPACITY: usize = 1024;

/// Runs the job to its end and returns the exit code of `launch`. Blocks.
pub(crate) fn run_job(request: RunRequest, options: RunOptions) -> u8 {
    control_run(|| ControllerDriver::start(request, options, None))
}

/// Takes over a run from a lost controller, and runs the job to its end. Returns the exit code of
/// `launch`. Blocks.
pub(crate) fn attach_to_run(request: RunRequest, options: RunOptions, attach: AttachOptions) -> u8 {
    control_run(|| ControllerDriver::start(request, options, Some(attach)))
}

/// Runs the event loop of a controller until the run ends or another controller replaces it.
/// Returns the exit code of `launch`.
fn control_run(start: impl FnOnce() -> diagnostic::Result<ControllerDriver>) -> u8 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| build_setup_error("cannot start the threads of the controller").with_cause(&error));
    let result = runtime.and_then(|runtime| {
        disable_core_dumps()
            .map_err(|error| build_setup_error("cannot disable core dumps").with_cause(&error))?;
        let mut driver = start()?;
        let end = runtime.block_on(driver.run_to_end());
        Ok(match end {
            EventLoopEnd::Ended(outcome) => driver.finish_run(outcome),
            EventLoopEnd::Replaced(replacement) => driver.leave_run(&replacement),
            EventLoopEnd::Abandoned(failure) => driver.abandon_run(&failure),
        })
    });
    result.unwrap_or_else(|error: Diagnostic| {
        let is_colored = report::command_output::is_color_enabled();
        report::command_output::write_message(&diagnostic::render(&error, is_colored));
        exit::CLUSTER
    })
}

/// Builds the error that a controller cannot set up its own process, for example its threads.
fn build_setup_error(message: &str) -> Diagnostic {
    Diagnostic::error(codes::run::CONTROLLER_SETUP_FAILED, message)
}

/// The reason why a controller's event loop has ended: the run is over, another controller controls
/// the run, or the takeover of the run has failed.
enum EventLoopEnd {
    /// The run is over.
    Ended(RunOutcome),
    /// The run continues without this controller.
    Replaced(ControllerReplacement),
    /// This controller has not taken over the run.
    Abandoned(AttachFailure),
}

/// The reason why this controller no longer controls its run: another controller has replaced it,
/// or the agents continue without a controller. An agent reports this, or the journal shows it.
#[derive(Clone, Copy, Debug)]
struct ControllerReplacement {
    /// Whether another controller controls the run. Otherwise the agents obey no controller,
    /// because this one was silent for too long.
    is_controlled: bool,
    /// The time for which the agent had received no message of this controller, in milliseconds;
    /// `None` if unknown.
    silent_ms: Option<u64>,
}

/// The answer of a lost host's agent to the request to end: the agent has ended, or it obeys a
/// later controller.
#[derive(Clone, Copy, Debug)]
enum EvictionAnswer {
    /// The agent of this host has ended.
    Ended(HostIndex),
    /// The agent obeys a later controller.
    Replaced,
}

/// An agent that this controller has started: its process or connection, and the queue of messages
/// to it.
struct SupervisedAgent {
    /// The number that distinguishes the agent from earlier agents of its host.
    number: u64,
    /// Whether the process only passes messages on to an agent that another controller has started.
    is_relay: bool,
    handle: AgentHandle,
    /// Queues messages to the agent; `None` once the control stream is closed.
    outbox: Option<Outbox<ToAgent>>,
    /// The exit status of the agent if the agent is a child of the controller that was reaped;
    /// `None` otherwise.
    ended: Option<ExitStatus>,
}

impl SupervisedAgent {
    /// Returns the process ID of the agent if the agent is a child process of the controller that
    /// was not reaped.
    fn find_unreaped_pid(&self) -> Option<u32> {
        match self.handle {
            AgentHandle::Child(pid) if self.ended.is_none() => Some(pid),
            _ => None,
        }
    }
}

/// The identity of an agent: the index of its host, and a number that differs for each agent that
/// was started on this host. Each later agent of the host gets another number.
type AgentId = (HostIndex, u64);
/// A message that the controller's event loop receives from an agent. `Ok(None)` or an error means
/// that the connection has ended.
type AgentMessage = (AgentId, Result<Option<FromAgent>, FrameError>);
/// Both ends of a channel to the controller's event loop: the sender for other threads and tasks,
/// and the receiver for the loop.
type ChannelEnds<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);

/// Executes the actions that the controller's state machine requests, for one run.
struct ControllerDriver {
    job: JobSpec,
    /// The plan of the newest attempt. Before the first attempt, the plan for the declared hosts.
    plan: Plan,
    hosts: Vec<HostTarget>,
    /// The addresses of hosts that were added while the job ran.
    addresses: Vec<HostAddress>,
    transport: Box<dyn Transport>,
    prepare_resume: ResumePreparer,
    inventories: HostInventories,
    identity: ControllerIdentity,
    /// The command line of `launch`.
    command: Vec<String>,
    secrets: SecretVariables,
    requeue: Option<BatchJob>,
    /// The batch job that started the run; `None` if no scheduler did.
    batch_job: Option<BatchJobRecord>,
    /// The job file that is watched, which a later controller watches, too.
    watched_job_file: Option<JobFile>,
    hostfile: Option<FilteredHostfile>,
    /// Notifies the process that started this detached controller, once all workers of an attempt
    /// are running. `None` after the notification, and for a run in the foreground.
    starter: Option<StartNotifier>,
    /// The signals that the process which supervises this controller passes on.
    forwarded_signals: Option<ForwardedSignals>,
    /// The number of workers of this attempt that are not running yet.
    not_started: u32,
    core: ControllerCore,
    clock: RunningClock,
    report: Reporter,
    journal: Option<Journal>,
    /// Delivers the reports that the journal has stored; `None` without a journal.
    stored: Option<StoredReportReceiver>,
    /// The events of the controllers of the run.
    events: ControllerEvents,
    /// Whether this controller is taking over the run.
    is_adopting: bool,
    /// The memo of the lost controller, while the journal is being taken over.
    taken_memo: Option<StoredMemo>,
    /// Delivers the content of the journal once it is taken over.
    journal_taken: ChannelEnds<JournalSummary>,
    /// Delivers the answers of lost agents that were asked to end.
    evictions: ChannelEnds<EvictionAnswer>,
    /// The duration of the run under earlier controllers.
    earlier: Duration,
    streamed_logs: StreamedLogs,
    /// How the run is recorded with MLflow, until the recorder is started.
    mlflow_settings: Option<MlflowSettings>,
    /// Records the run with MLflow; `None` if the job does not request this.
    mlflow: Option<MlflowRecorder>,
    /// Serves the metrics of the run; `None` if the job does not request this.
    metrics: Option<MetricsServer>,
    /// Writes the metrics of the run to a file; `None` if the job does not request this.
    metrics_file: Option<MetricsFile>,
    /// The newest measurements of the run.
    status: StatusKeeper,
    status_file: StatusFile,
    /// When the measurements of a program are written to the event file of TensorBoard.
    tensorboard_usage: UsageMetricsSchedule,
    agents: HashMap<HostIndex, SupervisedAgent>,
    /// The agents on other hosts that were asked to end and whose control streams have not ended.
    released: HashSet<AgentId>,
    /// The hosts whose messages come through the agent of another host, and that host.
    inner_hosts: HashMap<HostIndex, HostIndex>,
    /// The hosts whose agents have messages waiting because the queues of the agents are full.
    backlogged: HashSet<HostIndex>,
    /// Inputs of the controller's state machine that follow from the actions that it has requested.
    pending_inputs: VecDeque<ControllerInput>,
    /// The number of agents that were started during the run, which is also the number of the
    /// newest agent.
    agents_started: u64,
    /// Carries the messages of all agents to the event loop.
    messages: ChannelEnds<AgentMessage>,
    /// Carries the steps of the starts of all agents to the event loop.
    start_steps: ChannelEnds<(AgentId, AgentStartStep)>,
    /// Carries lines for the user to the event loop: the stderr of agents, and warnings.
    lines: ChannelEnds<String>,
    /// Carries the plan of an attempt to the event loop, once the checkpoint from which programs
    /// resume is prepared.
    planned: ChannelEnds<AttemptPlanningResult>,
    /// The attempt that is planned and whose workers were not started; `None` without one.
    preparation: Option<AttemptPreparation>,
    /// Children that existed before this program (`sh -c 'other & exec launch …'`) and must not be
    /// killed.
    preexisting_children: Vec<u32>,
    /// The socket for `launch exec`; `None` if it could not be opened.
    exec_socket: Option<ExecSocket>,
    /// The clients of `launch exec`.
    exec_clients: HashMap<ExecId, ExecClient>,
    /// Why the event loop is to end; `None` until then.
    end: Option<EventLoopEnd>,
}

/// Builds the settings for the controller's output to the user, such as the JSON format, for a run
/// on `hosts` hosts.
fn build_report_config(
    job: &JobSpec,
    plan: &Plan,
    options: &RunOptions,
    hosts: usize,
) -> report::ReportConfig {
    report::ReportConfig {
        json: options.json.then_some(options.schema),
        prefix: job.run.logs.prefix,
        detached: options.starter.is_some(),
        shown_ranks: job.run.logs.show.iter().filter(|rank| **rank < plan.world).count(),
        logs: plan.run_dir.join("logs"),
        builtin: job.run.command.is_none(),
        world: plan.world,
        hosts,
    }
}

/// Creates the state machine that decides what the controller does for the run `request`. With
/// `attach`, the state machine takes over the run from a lost controller.
fn create_core(
    request: &RunRequest,
    identity: &ControllerIdentity,
    attach: Option<AttachOptions>,
) -> ControllerCore {
    let RunRequest { job, plan, hosts, transport, .. } = request;
    let hosts = hosts.iter().map(|h| HostSetup { name: h.name.clone(), remote: !h.local });
    let seed = RandomState::new().hash_one(&plan.run.0);
    let supervision = (identity.token(), identity.controller_loss_action());
    let setup = CoreSetup {
        arrival: transport.arrival_limits(),
        run_dir: plan.run_dir.clone(),
        ..CoreSetup::new(job, hosts.collect(), seed, supervision)
    };
    match attach {
        Some(attach) => ControllerCore::new_for_takeover(setup, attach.placement, attach.is_forced),
        None => ControllerCore::new(setup),
    }
}

impl ControllerDriver {
    /// Creates the part of the controller that executes actions (the driver), and starts its
    /// threads. Starts no process and writes no file. With `attach`, the driver takes over a run
    /// from a lost controller.
    fn start(
        request: RunRequest,
        options: RunOptions,
        attach: Option<AttachOptions>,
    ) -> diagnostic::Result<Self> {
        let run = &request.plan.run.0;
        let identity = match &attach {
            Some(AttachOptions { key, epoch, .. }) => {
                ControllerIdentity::create_for_takeover(run, &request.job.run, key.clone(), *epoch)?
            }
            None => ControllerIdentity::create(run, &request.job.run, options.on_controller_loss)?,
        };
        let is_adopting = attach.is_some();
        let core = create_core(&request, &identity, attach);
        let RunRequest { job, plan, hosts, transport, local_inventory, prepare_resume } = request;
        let config = build_report_config(&job, &plan, &options, hosts.len());
        let no_threads = |error: std::io::Error| {
            build_setup_error("cannot start the threads of the controller").with_cause(&error)
        };
        let lines = mpsc::channel(EVENT_CHANNEL_CAPACITY);
        let streamed_logs = StreamedLogs::start(config.logs.clone(), job.run.logs.max_size, lines.0.clone())
            .map_err(no_threads)?;
        Ok(ControllerDriver {
            status: StatusKeeper::new(&job.run.straggler, job.run.command.is_some()),
            is_adopting,
            core,
            identity,
            report: Reporter::start(config).map_err(no_threads)?,
            streamed_logs,
            status_file: StatusFile::start(plan.world).map_err(no_threads)?,
            tensorboard_usage: UsageMetricsSchedule::new(),
            inventories: HostInventories::new(local_inventory.inherited_env, hosts.len()),
            job,
            plan,
            hosts,
            addresses: options.addresses,
            transport,
            prepare_resume,
            command: options.command,
            secrets: options.secrets,
            requeue: options.requeue,
            batch_job: options.batch_job,
            watched_job_file: options.job_file,
            hostfile: options.hostfile,
            starter: options.starter,
            forwarded_signals: options.signals,
            not_started: 0,
            clock: RunningClock::start(),
            mlflow_settings: options.mlflow,
            mlflow: None,
            metrics: None,
            metrics_file: None,
            journal: None,
            stored: None,
            events: ControllerEvents::default(),
            taken_memo: None,
            journal_taken: mpsc::channel(1),
            evictions: mpsc::channel(EVENT_CHANNEL_CAPACITY),
            earlier: Duration::ZERO,
            agents: HashMap::new(),
            inner_hosts: HashMap::new(),
            released: HashSet::new(),
            backlogged: HashSet::new(),
            pending_inputs: VecDeque::new(),
            agents_started: 0,
            messages: mpsc::channel(EVENT_CHANNEL_CAPACITY),
            start_steps: mpsc::channel(EVENT_CHANNEL_CAPACITY),
            lines,
            planned: mpsc::channel(1),
            preparation: None,
            preexisting_children: Vec::new(),
            exec_socket: None,
            exec_clients: HashMap::new(),
            end: None,
        })
    }

    /// Runs the job to its end, and returns how it ended. Reports a failure to set up the run as
    /// the outcome.
    async fn run_to_end(&mut self) -> EventLoopEnd {
        let prepared = if self.is_adopting { self.prepare_takeover() } else { self.prepare_run() };
        match prepared {
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
                EventLoopEnd::Ended(RunOutcome { exit_code, ..RunOutcome::default() })
            }
        }
    }

    /// Prepares a run before any process is started: creates the run directory, checks a requested
    /// rendezvous port of this machine, and installs signal handlers. Fails if one of these steps
    /// fails.
    fn prepare_run(&mut self) -> diagnostic::Result<SignalReceiver> {
        let directory = self.plan.run_dir.clone();
        let (journal, stored) = Journal::create(&self.plan, &self.job, &self.command).map_err(|error| {
            let message = format!("cannot write the run directory {}", directory.display());
            Diagnostic::error(codes::run::RUN_DIRECTORY_UNWRITABLE, message)
                .with_subject(directory.display().to_string())
                .with_cause(&error)
        })?;
        (self.journal, self.stored) = (Some(journal), Some(stored));
        self.open_debug_log();
        info!(target: "controller::plan", run = %self.plan.run, world = self.plan.world,
            hosts = self.hosts.len(), "planned run");
        let (run, world) = (self.plan.run.to_string(), self.plan.world);
        self.emit_event(Event::Start { run, run_dir: directory, world });
        self.start_metrics_server()?;
        self.start_mlflow(false);
        self.write_control_file();
        let continues = self.identity.controller_loss_action() == ControllerLossAction::Continue;
        let timeout_ms = continues.then_some(self.job.run.controller_timeout_ms);
        let (name, batch_job) = (&self.job.name, self.batch_job.clone());
        if let Err(error) = runs::register_run(&self.plan, name, &self.command, timeout_ms, batch_job) {
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
            let preparation = AttemptPreparation::new(
                &self.job,
                self.plan.clone(),
                &self.inventories.collect_host_addresses(),
            );
            drop(preparation.bind_rendezvous(&self.lines.0)?);
        }
        self.prepare_process()
    }

    /// Prepares this process to take over a run: opens the journal of the run and installs the
    /// signal handlers. Fails if one of these steps fails.
    fn prepare_takeover(&mut self) -> diagnostic::Result<SignalReceiver> {
        let (journal, stored) = Journal::open_existing(&self.plan.run_dir).map_err(|error| {
            build_setup_error("cannot start the thread of the journal").with_cause(&error)
        })?;
        (self.journal, self.stored) = (Some(journal), Some(stored));
        self.open_debug_log();
        self.prepare_process()
    }

    /// Opens the file of the controller's debug log in the run directory.
    fn open_debug_log(&mut self) {
        // Without this file the run is complete, so an error is only a line on the terminal.
        if let Err(error) = debuglog::open_log_file(&self.plan.run_dir.join("logs/controller.debug.log")) {
            self.report.show_message(format!("launch: cannot write the debug log: {error}"));
        }
    }

    /// Prepares this process for starting child processes and catching signals.
    fn prepare_process(&mut self) -> diagnostic::Result<SignalReceiver> {
        let remote_hosts = self.hosts.iter().filter(|host| !host.local).count();
        raise_descriptor_limit(remote_hosts, self.transport.count_descriptors(remote_hosts))?;
        match ExecSocket::open(&self.plan.run.0) {
            Ok(socket) => self.exec_socket = Some(socket),
            Err(error) => {
                self.report.show_message(format!("launch: `launch exec` is not available: {error}"));
            }
        }
        self.preexisting_children = list_children();
        become_subreaper()
            .map_err(|error| build_setup_error("cannot become a child subreaper").with_cause(&error))?;
        // On nodes that join, the controller may itself be in the step that Slurm ends.
        let announcements =
            SignalAnnouncements { usr1: self.requeue.is_some(), term: cluster::sigterm_announces_job_end() };
        SignalReceiver::install(self.job.run.signals, announcements, self.forwarded_signals.as_ref())
            .map_err(|error| build_setup_error("cannot catch signals").with_cause(&error))
    }
}

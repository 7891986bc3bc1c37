//! Starts the workers of an attempt, with their logs, shared memory, processes, output pumps and
//! control connections.
use super::{
    AgentDriver, WorkerHandle, WorkerId, WorkerMessage,
    opened_logs::{OpenedLogs, open_logs},
    worker_spawner::{SpawnRequest, SpawnResult, SpawnerResult},
};
use crate::{
    agent::{
        container::{ContainerCommandBuilder, explain_missing_runtime},
        core::{AgentInput, ProcessGroupSignal},
        debug_log,
        environment_changes::EnvironmentChanges,
        hang::{HookDirectory, StatusMemory, TimeoutEvidence},
        output::{OutputPump, PumpEvent, PumpOptions},
        process::{self, InheritedEnvironment, SpawnedWorker},
        rank_log::RankLogWriter,
    },
    cluster,
    connection::{Outbox, read_frames, write_frames},
};
use diagnostic::{Diagnostic, codes};
use jobspec::{RunSpec, env, ids::Rank};
use protocol::control::{HostPlan, ToWorker, WorkerPlan};
use std::{io, os::fd::AsFd, path::PathBuf, rc::Rc, sync::Arc, thread, time::Duration};
use tokio::{net::UnixStream, sync::mpsc};

impl AgentDriver {
    /// Sets up what the workers of this host share before they start: the rendezvous port, the
    /// shared memory and the open log files. The logs are opened on a separate thread, because
    /// their disk may stall.
    ///
    /// Returns [`AgentInput::SpawnFailed`] if the shared memory or the thread is not available.
    /// Keeps the connections to the processes of the ranks `kept`.
    pub(super) fn prepare_shared_worker_resources(
        &mut self,
        plan: Rc<HostPlan>,
        kept: &[Rank],
    ) -> Option<AgentInput> {
        self.workers.retain(|rank, _| kept.contains(rank));
        (self.shm, self.logs) = (None, OpenedLogs::default());
        // The store serves until the next start, because ranks of other hosts may need the store
        // longer than the ranks of this host.
        self.store = self.rendezvous.take().and_then(|rendezvous| rendezvous.hand_over_to_workers().1);
        self.plan = Some(plan.clone());
        let first = plan.workers.first()?.rank;
        let failed = |rank, message: &str, error: &io::Error| {
            let diagnostic = Diagnostic::error(codes::run::WORKER_START_FAILED, message).with_cause(error);
            Some(AgentInput::SpawnFailed { rank, diagnostic })
        };
        if let Some(builtin) = plan.workers.iter().find(|w| w.command.is_none())
            && let Err(error) = self.create_shared_memories(&plan)
        {
            let message = "cannot create the shared memory of the host (memfd)";
            return failed(builtin.rank, message, &error);
        }
        let (opened, mut plan) = (self.opened_logs.0.clone(), (*plan).clone());
        // The logs of kept workers are open.
        plan.workers.retain(|worker| !kept.contains(&worker.rank));
        let open = move || {
            // The workers run without the debug log, too.
            _ = debug_log::start_debug_log(&plan);
            // An error means that the agent has ended.
            _ = opened.blocking_send(OpenedLogs { attempt: plan.attempt, logs: open_logs(&plan) });
        };
        match thread::Builder::new().name("open-logs".into()).spawn(open) {
            Ok(_) => None,
            Err(error) => failed(first, "cannot start a thread that opens the logs", &error),
        }
    }

    /// Creates the shared memory through which built-in workers exchange data and, once per agent,
    /// the memory for their status and for copies of their training state.
    fn create_shared_memories(&mut self, plan: &HostPlan) -> io::Result<()> {
        self.shm = Some(Arc::new(process::create_shared_memory()?));
        let status = match self.status_memory.take() {
            Some(memory) => memory,
            None => Arc::new(StatusMemory::create()?),
        };
        status.reserve(plan.workers.len())?;
        self.status_memory = Some(status);
        if plan.job.checkpoint.memory.is_some() && self.copy_memory.is_none() {
            self.copy_memory = Some(Arc::new(process::create_copy_memory()?));
        }
        Ok(())
    }

    /// Handles the opened logs of the workers: begins to activate their environment, or reports to
    /// the state machine that a log cannot be opened.
    pub(super) fn on_logs_opened(&mut self, opened: OpenedLogs) -> AgentInput {
        let attempt = opened.attempt;
        if self.plan.as_ref().is_none_or(|plan| plan.attempt != attempt) {
            return AgentInput::Tick;
        }
        match opened.logs {
            Ok(_) => {
                self.logs = opened;
                self.activate_environment(attempt)
            }
            Err((rank, diagnostic)) => AgentInput::SpawnFailed { rank, diagnostic },
        }
    }

    /// Begins to activate the environments that `run.activate` lists, if no earlier attempt (start
    /// of all workers) has activated them. Returns [`AgentInput::Prepared`] if there is nothing to
    /// activate.
    fn activate_environment(&mut self, attempt: u32) -> AgentInput {
        match &self.plan {
            Some(plan)
                if self.activation.is_none()
                    && plan.job.run.command.is_some()
                    && !plan.job.run.activate.is_empty() =>
            {
                self.spawner.begin_activation(plan, cluster::list_hidden_variables(&plan.job));
                AgentInput::Tick
            }
            _ => AgentInput::Prepared { attempt },
        }
    }

    /// Converts a result of the thread that starts processes, such as a started worker, to an input
    /// of the agent's state machine.
    pub(super) fn on_spawner_result(&mut self, result: SpawnerResult) -> AgentInput {
        let (attempt, changes) = match result {
            SpawnerResult::Worker(result) => return self.on_worker_spawned(result),
            SpawnerResult::Exec(result) => return self.on_exec_spawned(result),
            SpawnerResult::ContainerRemoved => return self.on_container_removed(),
            SpawnerResult::Activation(attempt, changes) => (attempt, changes),
        };
        let plan = self.plan.as_ref().filter(|plan| plan.attempt == attempt);
        let Some(first) = plan.and_then(|plan| plan.workers.first()) else { return AgentInput::Tick };
        match changes {
            Ok(changes) => {
                self.activation = Some(Arc::new(changes));
                AgentInput::Prepared { attempt }
            }
            Err(diagnostic) => AgentInput::SpawnFailed { rank: first.rank, diagnostic },
        }
    }

    /// Begins to start the process of the worker at the position `index` in the list of workers
    /// that the controller has assigned to this host.
    ///
    /// Returns [`AgentInput::SpawnFailed`] if the log of the worker is not open.
    pub(super) fn spawn_worker(&mut self, index: usize) -> Option<AgentInput> {
        let plan = self.plan.clone()?;
        let worker = plan.workers.get(index)?;
        if !self.logs.logs.as_ref().is_ok_and(|logs| logs.contains_key(&worker.rank)) {
            let diagnostic = Diagnostic::error(codes::run::INTERNAL, "the log is not open");
            return Some(AgentInput::SpawnFailed { rank: worker.rank, diagnostic });
        }
        let environment = InheritedEnvironment {
            changes: self.activation.clone().unwrap_or_default(),
            hidden: cluster::list_hidden_variables(&plan.job),
        };
        let rank = worker.rank;
        let mut adapted = remove_replaced_defaults(worker, &plan.job.run, &environment.changes);
        let mut container = ContainerCommandBuilder::for_worker(&plan, worker, None);
        self.add_hang_hook(&plan, &mut adapted, container.as_mut(), &environment.changes);
        if let Some(Err(diagnostic)) = container.map(|container| container.wrap_command(&mut adapted)) {
            return Some(AgentInput::SpawnFailed { rank, diagnostic });
        }
        self.spawner.begin_worker_start(SpawnRequest {
            attempt: plan.attempt,
            index,
            worker: adapted,
            environment,
            shm: self.shm.clone(),
            copy_memory: self.copy_memory.clone(),
            status_memory: self.status_memory.clone(),
            file_limit: self.file_limit,
            uses_terminal: plan.job.run.terminal == Some(rank),
        });
        None
    }

    /// Makes a worker's program load the hang hook (a Python module that reports the rank's
    /// collectives) and switches on torch's flight recorder. Without the hook, the state of the
    /// threads is the only evidence.
    fn add_hang_hook(
        &mut self,
        plan: &HostPlan,
        worker: &mut WorkerPlan,
        container: Option<&mut ContainerCommandBuilder<'_>>,
        changes: &EnvironmentChanges,
    ) {
        let Some(detection) = plan.hang_detection.filter(|_| worker.command.is_some()) else { return };
        if self.hang_hook.is_none() && !self.hang_hook_failed {
            match HookDirectory::create() {
                Ok(hook) => self.hang_hook = Some(hook),
                Err(error) => self.report_missing_hook(worker.rank, &error.to_string()),
            }
        }
        let planned_names: Vec<String> = worker.env.iter().map(|(name, _)| name.clone()).collect();
        let is_given = |name: &str| {
            planned_names.iter().any(|planned| planned == name)
                || changes.changes_variable(name)
                || std::env::var_os(name).is_some()
        };
        HookDirectory::add_recorder_variables(worker, plan.attempt, is_given);
        let Some(hook) = &self.hang_hook else { return };
        let timeout = Duration::from_millis(detection.timeout_ms);
        if let Some(container) = container {
            match container.add_hook_mounts(hook.list_container_mounts(), worker) {
                true => hook.add_to_container(worker, timeout),
                false => self.report_missing_hook(
                    worker.rank,
                    "Charliecloud cannot mount the directory of the hook, because it is not below /tmp",
                ),
            }
            return;
        }
        let path = find_variable(worker, changes, env::PYTHONPATH);
        hook.add_variables(&mut worker.env, path, timeout);
    }

    /// Warns the user once that hangs on this host are diagnosed without the hang hook (a Python
    /// module for workers), because of `reason`.
    fn report_missing_hook(&mut self, rank: Rank, reason: &str) {
        if !std::mem::replace(&mut self.hang_hook_failed, true) {
            let message = format!("hangs are diagnosed without the hang hook: {reason}");
            self.handle_input(AgentInput::Warning { rank, message });
        }
    }

    /// Creates the [`TimeoutEvidence`] of a starting worker, which later shows whether a timeout of
    /// one of its collectives ended the worker. Returns `None` if hangs are not detected.
    fn create_timeout_evidence(&self, plan: &HostPlan, worker: &WorkerPlan) -> Option<TimeoutEvidence> {
        plan.hang_detection?;
        let hook = self.hang_hook.as_ref().map(HookDirectory::path);
        let changes = self.activation.clone().unwrap_or_default();
        let names = [env::TORCH_FR_DUMP_TEMP_FILE, env::OLD_FLIGHT_RECORDER_VARIABLES[2]];
        let prefix = names.iter().find_map(|name| find_variable(worker, &changes, name)).map(PathBuf::from);
        let prefix = prefix.filter(|path| path.is_absolute());
        let evidence = TimeoutEvidence::new((worker.rank, plan.world), plan.attempt, &worker.log, hook);
        Some(evidence.with_dump_prefix(prefix))
    }

    /// Makes the process that was kept from an earlier attempt (start of all workers) continue as
    /// the worker at index `index` of this host's worker list. Passes the shared memory of the
    /// attempt to the process. If that fails, kills the process.
    pub(super) fn rejoin_worker(&mut self, index: usize) -> Option<AgentInput> {
        let rank = self.plan.as_ref()?.workers.get(index)?.rank;
        let pass = |handle: &WorkerHandle| {
            let socket = handle.attempts.as_ref().ok_or(io::ErrorKind::NotConnected)?;
            let memory = self.shm.as_ref().ok_or(io::ErrorKind::NotFound)?;
            process::pass_descriptor(socket, memory.as_fd()).map(|()| handle.pid)
        };
        let handle = self.workers.get(&rank).ok_or(io::ErrorKind::NotConnected.into());
        let error = match handle.and_then(pass) {
            Ok(pid) => return Some(AgentInput::Rejoined { rank, pid }),
            Err(error) => error,
        };
        if let Some(handle) = self.workers.remove(&rank).filter(|h| self.leaders.contains_key(&h.pid)) {
            process::signal_worker_process_group(handle.pid, ProcessGroupSignal::Kill);
        }
        let message = "the process of the worker cannot take part in another attempt";
        let diagnostic = Diagnostic::error(codes::run::WORKER_START_FAILED, message).with_cause(&error);
        Some(AgentInput::SpawnFailed { rank, diagnostic })
    }

    /// Starts copying the output of a newly started worker and exchanging messages with it, or
    /// handles the failure of the start. Returns the answer for the agent's state machine:
    /// [`AgentInput::Spawned`] or [`AgentInput::SpawnFailed`].
    fn on_worker_spawned(&mut self, result: SpawnResult) -> AgentInput {
        let SpawnResult { attempt, index, spawned } = result;
        let plan = self.plan.clone().filter(|plan| plan.attempt == attempt);
        let Some((plan, worker)) = plan.as_ref().and_then(|plan| Some((plan, plan.workers.get(index)?)))
        else {
            // No attempt begins while a worker is being started. Such a process must not run.
            spawned.iter().for_each(|spawned| {
                process::signal_worker_process_group(spawned.pid, ProcessGroupSignal::Kill)
            });
            return AgentInput::Tick;
        };
        let rank = worker.rank;
        match spawned.and_then(|spawned| self.connect_worker(plan, worker, spawned)) {
            Ok(pid) => AgentInput::Spawned { rank, pid },
            Err(diagnostic) => {
                AgentInput::SpawnFailed { rank, diagnostic: explain_missing_runtime(diagnostic, plan) }
            }
        }
    }

    /// Starts the thread that copies a worker's output to the rank's log, and the tasks that
    /// exchange messages with the worker over the control connection. Returns the pid of the
    /// process.
    ///
    /// Kills the process if one of them cannot be started.
    fn connect_worker(
        &mut self,
        plan: &HostPlan,
        worker: &WorkerPlan,
        spawned: SpawnedWorker,
    ) -> diagnostic::Result<u32> {
        let (rank, pid) = (worker.rank, spawned.pid);
        self.leaders.insert(pid, rank);
        let removal =
            ContainerCommandBuilder::for_worker(plan, worker, None).and_then(|c| c.build_removal_command());
        self.container_removals.extend(removal.map(|words| (pid, words)));
        let Some(log) = self.logs.logs.as_mut().ok().and_then(|logs| logs.remove(&rank)) else {
            process::signal_worker_process_group(pid, ProcessGroupSignal::Kill);
            return Err(Diagnostic::error(codes::run::INTERNAL, "the log is not open"));
        };
        let events = self.pump_events.0.clone();
        let warnings = events.clone();
        let warn = move |warning| {
            // An error means that the agent has ended.
            _ = warnings.blocking_send((rank, pid, PumpEvent::LogFailed(warning)));
        };
        let log = RankLogWriter::new(log, self.rank_logs.clone(), Arc::new(warn));
        let timeout_evidence = self.create_timeout_evidence(plan, worker);
        let options =
            PumpOptions { timeout_evidence: timeout_evidence.clone(), ..build_pump_options(plan, worker) };
        let pump = OutputPump::start(
            options,
            pid,
            log,
            spawned.stdout,
            spawned.stderr,
            self.console.clone(),
            events,
        );
        let connection = spawned
            .control
            .map(|stream| start_worker_connection((rank, pid), stream, &self.worker_messages.0));
        let mut handle = WorkerHandle {
            pid,
            outbox: None,
            pump: None,
            terminal: spawned.terminal,
            attempts: spawned.attempts,
            timeout_evidence,
        };
        let result = match (pump, connection.transpose()) {
            (Ok(pump), Ok(outbox)) => {
                handle.pump = Some(pump);
                handle.outbox = outbox;
                Ok(pid)
            }
            (Err(error), _) | (_, Err(error)) => {
                process::signal_worker_process_group(pid, ProcessGroupSignal::Kill);
                let message = "cannot read the output or the control messages of the worker";
                Err(Diagnostic::error(codes::run::WORKER_START_FAILED, message).with_cause(&error))
            }
        };
        self.workers.insert(rank, handle);
        result
    }
}

/// Returns the settings of a worker without those default environment variables of launch that
/// `run.activate` has changed and the job file does not set.
pub(super) fn remove_replaced_defaults(
    worker: &WorkerPlan,
    run: &RunSpec,
    changes: &EnvironmentChanges,
) -> WorkerPlan {
    let is_given = |name: &str| {
        run.env.iter().any(|(set, _)| set == name) || run.env_from.iter().any(|(set, _)| set == name)
    };
    let is_replaced = |name: &str| {
        env::USER_OVERRIDABLE_VARIABLES.contains(&name) && changes.changes_variable(name) && !is_given(name)
    };
    let mut worker = worker.clone();
    worker.env.retain(|(name, _)| !is_replaced(name));
    worker
}

/// Returns the options for copying a worker's output to its log, such as whether the user also sees
/// the output.
fn build_pump_options(plan: &HostPlan, worker: &WorkerPlan) -> PumpOptions {
    let run = &plan.job.run;
    let error_file = worker.env.iter().find(|(name, _)| name == env::TORCHELASTIC_ERROR_FILE);
    PumpOptions {
        rank: worker.rank,
        // Output would disturb the rank that has the terminal.
        show: run.terminal.is_none() && run.logs.show.contains(&worker.rank),
        progress_pattern: run.progress_pattern.clone().filter(|_| plan.hang_detection.is_some()),
        error_file: error_file.map(|(_, file)| worker.workdir.join(file)),
        timeout_evidence: None,
    }
}

/// Starts the tasks that read and write messages on `stream`, the control connection between the
/// agent and a worker. Received messages are sent to `inbox`. Returns the queue of messages to the
/// worker.
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

/// Returns the value of a variable in the environment of a worker's program, without the variables
/// that launch adds for the hang hook. `changes` are those of `run.activate`.
fn find_variable(worker: &WorkerPlan, changes: &EnvironmentChanges, name: &str) -> Option<String> {
    let planned = worker.env.iter().find(|(set, _)| set == name);
    let activated = changes.assignments().find(|(set, _)| *set == name);
    match (planned, activated) {
        (Some((_, value)), _) => Some(value.clone()),
        (None, Some((_, value))) => value.map(|value| value.to_string_lossy().into_owned()),
        (None, None) => std::env::var(name).ok(),
    }
}

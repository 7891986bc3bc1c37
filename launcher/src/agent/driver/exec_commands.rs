//! Runs the commands of `launch exec` next to the workers of the host, and sends their output to
//! the controller.
use super::{
    AgentDriver,
    exec_state::{ExecCommand, ExecEvent, ExecOutputReader, into_async_pipe},
    worker_spawner::{ExecSpawnRequest, ExecSpawnResult},
    worker_start::remove_replaced_defaults,
};
use crate::agent::{
    container::{ContainerCommandBuilder, explain_missing_runtime},
    core::{AgentInput, ProcessGroupSignal},
    process::{self, InheritedEnvironment},
};
use diagnostic::{Diagnostic, codes};
use jobspec::{env, ids::Rank};
use protocol::control::{EXEC_WINDOW_BYTES, ExecId, ExecReply, ExecRequest, ExitStatus, FromAgent};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{Semaphore, watch},
    time::sleep,
};

/// The largest number of `launch exec` commands that run on a host at the same time.
const MAX_EXEC_COMMANDS_PER_HOST: usize = 16;
/// The time from SIGTERM to SIGKILL for a command of `launch exec` whose client (the user's `launch
/// exec` process) has ended.
const EXEC_CANCEL_GRACE_PERIOD: Duration = Duration::from_secs(2);

impl AgentDriver {
    /// Handles a request of the controller about a command of `launch exec`: start it, read more of
    /// its output, or cancel it.
    pub(super) fn on_exec_request(&mut self, id: ExecId, request: ExecRequest) {
        match request {
            ExecRequest::Start { rank, command, .. } => {
                if let Err(diagnostic) = self.start_exec_command(id, rank, command) {
                    self.send_exec_reply(id, ExecReply::Failed(diagnostic));
                }
            }
            ExecRequest::Consumed { bytes } => {
                if let Some(command) = self.exec.commands.get(&id) {
                    let used = EXEC_WINDOW_BYTES as usize - command.window.available_permits();
                    command.window.add_permits(used.min(bytes as usize));
                }
            }
            ExecRequest::Cancel => self.cancel_exec_command(id),
        }
    }

    /// Requests the start of the command `words`, which a user runs with `launch exec` next to the
    /// worker of a rank. Does not wait until it has started.
    fn start_exec_command(&mut self, id: ExecId, rank: Rank, words: Vec<String>) -> diagnostic::Result<()> {
        let (Some(plan), Some(pid)) = (self.plan.clone(), self.find_unreaped_pid(rank)) else {
            let message = format!("rank {rank} does not run at present");
            return Err(Diagnostic::error(codes::command::EXEC_RANK_NOT_RUNNING, message)
                .with_field("rank", rank)
                .with_remedy());
        };
        let Some(planned) = plan.workers.iter().find(|worker| worker.rank == rank) else {
            return Err(Diagnostic::error(codes::run::INTERNAL, "the worker is not in the plan"));
        };
        if words.is_empty() || self.exec.commands.contains_key(&id) {
            let message = "the request for a command is empty or repeated";
            return Err(Diagnostic::error(codes::command::EXEC_UNAVAILABLE, message));
        }
        if self.exec.commands.len() >= MAX_EXEC_COMMANDS_PER_HOST {
            let message =
                format!("{MAX_EXEC_COMMANDS_PER_HOST} commands of `launch exec` already run on the host");
            return Err(Diagnostic::error(codes::command::EXEC_UNAVAILABLE, message));
        }
        let environment = InheritedEnvironment {
            changes: self.activation.clone().unwrap_or_default(),
            hidden: crate::cluster::list_hidden_variables(&plan.job),
        };
        let mut worker = remove_replaced_defaults(planned, &plan.job.run, &environment.changes);
        worker.wrapper = Vec::new();
        // The error of the command is not that of the worker.
        worker.env.retain(|(name, _)| name != env::TORCHELASTIC_ERROR_FILE);
        worker.command = Some(words);
        worker.env.push((env::LAUNCH_WORKER_PID.to_owned(), pid.to_string()));
        let container = ContainerCommandBuilder::for_worker(&plan, planned, Some(id));
        container.as_ref().map_or(Ok(()), |container| container.wrap_command(&mut worker))?;
        let removal = container.and_then(|container| container.build_removal_command());
        self.spawner.begin_exec_command_start(ExecSpawnRequest {
            id,
            worker,
            environment,
            file_limit: self.file_limit,
        });
        let command = ExecCommand {
            pid: None,
            status: None,
            open_pipes: 0,
            window: Arc::new(Semaphore::new(EXEC_WINDOW_BYTES as usize)),
            has_ended: watch::Sender::new(false),
            is_cancelled: false,
            removal,
        };
        self.exec.commands.insert(id, command);
        Ok(())
    }

    /// Begins to read the output of a `launch exec` command that was started, or reports to the
    /// controller why it could not be started.
    pub(super) fn on_exec_spawned(&mut self, result: ExecSpawnResult) -> AgentInput {
        let ExecSpawnResult { id, spawned } = result;
        let spawned = match spawned {
            Ok(spawned) => spawned,
            Err(diagnostic) => {
                self.exec.commands.remove(&id);
                let diagnostic = match &self.plan {
                    Some(plan) => explain_missing_runtime(diagnostic, plan),
                    None => diagnostic,
                };
                self.send_exec_reply(id, ExecReply::Failed(diagnostic));
                return AgentInput::Tick;
            }
        };
        self.exec.leaders.insert(spawned.pid, id);
        let Some(command) = self.exec.commands.get_mut(&id) else {
            process::signal_worker_process_group(spawned.pid, ProcessGroupSignal::Kill);
            return AgentInput::Tick;
        };
        command.pid = Some(spawned.pid);
        self.container_removals.extend(command.removal.take().map(|words| (spawned.pid, words)));
        for (stderr, pipe) in [(false, spawned.stdout), (true, spawned.stderr)] {
            let reader = ExecOutputReader {
                id,
                stderr,
                window: command.window.clone(),
                has_ended: command.has_ended.subscribe(),
                events: self.exec.events.0.clone(),
            };
            match into_async_pipe(pipe) {
                Ok(pipe) => {
                    command.open_pipes += 1;
                    tokio::spawn(reader.read_to_end(pipe));
                }
                // Without its output, the command only has an exit code.
                Err(_) => process::signal_worker_process_group(spawned.pid, ProcessGroupSignal::Kill),
            }
        }
        if command.is_cancelled {
            process::signal_worker_process_group(spawned.pid, ProcessGroupSignal::Kill);
        }
        AgentInput::Tick
    }

    /// Handles an event of a `launch exec` command, such as that it has written output or that its
    /// output has ended.
    pub(super) fn on_exec_event(&mut self, (id, event): (ExecId, ExecEvent)) -> AgentInput {
        match event {
            ExecEvent::Output { stderr, bytes } => {
                self.send_exec_reply(id, ExecReply::Output { stderr, bytes });
            }
            ExecEvent::PipeEnded => {
                if let Some(command) = self.exec.commands.get_mut(&id) {
                    command.open_pipes = command.open_pipes.saturating_sub(1);
                }
                self.report_exec_end(id);
            }
            ExecEvent::GraceEnded => {
                if let Some(pid) = self.exec.commands.get(&id).and_then(|command| command.pid) {
                    process::signal_worker_process_group(pid, ProcessGroupSignal::Kill);
                }
            }
        }
        AgentInput::Tick
    }

    /// Records how the process with the pid `pid` ended, if the process is a `launch exec` command.
    /// Does nothing for other processes.
    pub(super) fn on_exec_exited(&mut self, pid: u32, status: ExitStatus) {
        let Some(id) = self.exec.leaders.remove(&pid) else { return };
        if let Some(command) = self.exec.commands.get_mut(&id) {
            (command.pid, command.status) = (None, Some(status));
            command.has_ended.send_replace(true);
        }
        self.report_exec_end(id);
    }

    /// Reports the end of a `launch exec` command to the controller, once the command has ended and
    /// all its output was read.
    fn report_exec_end(&mut self, id: ExecId) {
        let status =
            self.exec.commands.get(&id).filter(|command| command.open_pipes == 0).and_then(|c| c.status);
        if let Some(status) = status {
            self.exec.commands.remove(&id);
            self.send_exec_reply(id, ExecReply::Ended(status));
        }
    }

    /// Terminates a command of `launch exec` whose client (the user's `launch exec` process) has
    /// ended. The command gets SIGTERM, and SIGKILL after [`EXEC_CANCEL_GRACE_PERIOD`]. Its output
    /// is no longer read.
    fn cancel_exec_command(&mut self, id: ExecId) {
        let Some(command) = self.exec.commands.get_mut(&id) else { return };
        command.is_cancelled = true;
        // Readers that wait for space in the window end.
        command.window.close();
        if let Some(pid) = command.pid {
            process::signal_worker_process_group(pid, ProcessGroupSignal::Terminate);
            let events = self.exec.events.0.clone();
            tokio::spawn(async move {
                sleep(EXEC_CANCEL_GRACE_PERIOD).await;
                // An error means that the agent has ended.
                _ = events.send((id, ExecEvent::GraceEnded)).await;
            });
        }
    }

    /// Terminates all `launch exec` commands of this host, because the controller to which their
    /// output is sent is lost.
    pub(super) fn cancel_exec_commands(&mut self) {
        let ids: Vec<ExecId> = self.exec.commands.keys().copied().collect();
        ids.into_iter().for_each(|id| self.cancel_exec_command(id));
    }

    /// Sends a reply about the `launch exec` command with the number `id`, such as output or an
    /// exit status, to the controller.
    fn send_exec_reply(&mut self, id: ExecId, reply: ExecReply) {
        self.send_to_controller(FromAgent::Exec { id, reply });
    }
}

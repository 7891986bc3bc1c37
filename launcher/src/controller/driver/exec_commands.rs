//! Passes messages between the `launch exec` processes that are connected to the controller and the
//! agents that run their commands.
use super::ControllerDriver;
use crate::{
    connection::MessagePriority,
    controller::{
        core::HostIndex,
        exec_socket::{ExecClient, ExecClientCommand, ExecClientEvent},
    },
};
use diagnostic::{Diagnostic, codes::command};
use jobspec::ids::Rank;
use protocol::control::{ExecId, ExecReply, ExecRequest, PROTOCOL_VERSION, ToAgent};
use std::mem;

/// The largest number of `launch exec` processes that may be connected to the controller at the
/// same time.
const MAX_CLIENTS: usize = 16;

impl ControllerDriver {
    /// Handles a connection, a request or the end of a `launch exec` process, which runs commands
    /// on the host of a worker through the controller.
    pub(super) fn handle_exec_client(&mut self, event: ExecClientEvent) {
        match event {
            ExecClientEvent::Connected(id, mut outbox) => {
                if self.exec_clients.len() >= MAX_CLIENTS {
                    let message =
                        format!("{MAX_CLIENTS} commands of `launch exec` already run next to workers");
                    let error = Diagnostic::error(command::EXEC_UNAVAILABLE, message);
                    outbox.send_message(MessagePriority::Critical, ExecReply::Failed(error));
                    return;
                }
                self.exec_clients.insert(id, ExecClient { outbox, command: ExecClientCommand::Unknown });
            }
            ExecClientEvent::Request(id, Ok(Some(request))) => self.handle_exec_request(id, request),
            ExecClientEvent::Request(id, Ok(None) | Err(_)) => {
                if let Some(host) = self.exec_clients.remove(&id).and_then(|client| client.host()) {
                    self.send_to_agent(host, ToAgent::Exec { id, request: ExecRequest::Cancel });
                }
            }
        }
    }

    /// Passes the request of a `launch exec` process to the agent on the host of the rank that the
    /// request names.
    fn handle_exec_request(&mut self, id: ExecId, request: ExecRequest) {
        let Some(client) = self.exec_clients.get(&id) else { return };
        match (&client.command, &request) {
            (ExecClientCommand::Unknown, ExecRequest::Start { version, .. }) => match *version {
                PROTOCOL_VERSION => self.start_exec_command(id, request),
                other => self.send_exec_reply(id, ExecReply::Failed(build_version_error(other))),
            },
            // The client violates the protocol.
            (_, ExecRequest::Start { .. })
            | (ExecClientCommand::Unknown | ExecClientCommand::Waiting(_), _) => {}
            (&ExecClientCommand::Requested(host), _) => {
                self.send_to_agent(host, ToAgent::Exec { id, request })
            }
        }
    }

    /// Passes the request to start a command to the agent of the rank's host, or stores it until
    /// the worker has started.
    fn start_exec_command(&mut self, id: ExecId, request: ExecRequest) {
        let ExecRequest::Start { rank, .. } = request else { return };
        let found = self.find_exec_host(rank);
        let Some(client) = self.exec_clients.get_mut(&id) else { return };
        match found {
            Ok((host, true)) => {
                client.command = ExecClientCommand::Requested(host);
                self.send_to_agent(host, ToAgent::Exec { id, request });
            }
            Ok((_, false)) => client.command = ExecClientCommand::Waiting(request),
            Err(error) => self.send_exec_reply(id, ExecReply::Failed(error)),
        }
    }

    /// Passes on those requests of `launch exec` whose workers have started since, and answers
    /// those whose workers will not start.
    pub(super) fn continue_waiting_exec_requests(&mut self) {
        let is_waiting = |client: &ExecClient| matches!(client.command, ExecClientCommand::Waiting(_));
        let clients = self.exec_clients.iter().filter(|(_, client)| is_waiting(client));
        let waiting: Vec<ExecId> = clients.map(|(id, _)| *id).collect();
        for id in waiting {
            let Some(client) = self.exec_clients.get_mut(&id) else { continue };
            let command = mem::replace(&mut client.command, ExecClientCommand::Unknown);
            if let ExecClientCommand::Waiting(request) = command {
                self.start_exec_command(id, request);
            }
        }
    }

    /// Finds the host on which the worker of a rank is started or runs, and whether it runs, for a
    /// request of `launch exec`.
    fn find_exec_host(&self, rank: Rank) -> diagnostic::Result<(HostIndex, bool)> {
        // A host whose agent is lost or released gets no messages.
        let has_agent =
            |(host, _): &(HostIndex, bool)| self.agents.get(host).is_some_and(|agent| agent.outbox.is_some());
        self.core.find_host_of_worker(rank).filter(has_agent).ok_or_else(|| {
            let (run, world) = (&self.plan.run, self.plan.world);
            let message = match rank < world {
                true => format!("rank {rank} of run {run} does not run at present"),
                false => {
                    format!("run {run} has no rank {rank}; its ranks are 0 to {}", world.saturating_sub(1))
                }
            };
            Diagnostic::error(command::EXEC_RANK_NOT_RUNNING, message).with_field("rank", rank).with_remedy()
        })
    }

    /// Passes an agent's reply, such as output of the command, to the `launch exec` process that
    /// has requested the command. The last reply ends the connection.
    pub(super) fn send_exec_reply(&mut self, id: ExecId, reply: ExecReply) {
        let is_last = reply.is_last();
        if let Some(client) = self.exec_clients.get_mut(&id) {
            client.outbox.send_message(MessagePriority::Critical, reply);
        }
        if is_last {
            self.exec_clients.remove(&id);
        }
    }

    /// Reports the end of a host's agent to all `launch exec` processes whose commands run on this
    /// host.
    pub(super) fn end_exec_commands_on_host(&mut self, host: HostIndex) {
        let ids: Vec<ExecId> = self
            .exec_clients
            .iter()
            .filter(|(_, client)| client.host() == Some(host))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            let message = "the agent of the host has ended, and the command with it";
            let error = Diagnostic::error(command::EXEC_INTERRUPTED, message);
            self.send_exec_reply(id, ExecReply::Failed(error));
        }
    }
}

/// Builds the error for a `launch exec` process that uses another version of the control protocol
/// than the controller.
fn build_version_error(version: u32) -> Diagnostic {
    let message = format!(
        "the controller speaks version {PROTOCOL_VERSION} of the control protocol, and `launch exec` version \
         {version}"
    );
    Diagnostic::error(diagnostic::codes::run::AGENT_VERSION_MISMATCH, message)
        .with_help("use the build of launch that started the run")
}

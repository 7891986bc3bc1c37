//! Exchanges messages with the controller that the agent obeys, and passes requests of other
//! controllers to the agent's state machine.
use super::{AgentDriver, ControllerMessage, controller_connection::ControllerConnection};
use crate::{
    agent::{
        attach_socket,
        attach_socket::{AttachConnection, HostLockError},
        core::AgentInput,
    },
    connection::{MessagePriority, Outbox, read_frames, write_frames},
};
use diagnostic::{Diagnostic, codes};
use protocol::control::{FromAgent, ToAgent};
use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::unix::net::UnixListener,
};
use tokio::io::{AsyncRead, AsyncWrite};

impl AgentDriver {
    /// Makes the byte streams `input` and `output` the agent's connection to its controller, and
    /// starts the tasks that read and write messages on them.
    pub(in crate::agent) fn set_controller_connection(
        &mut self,
        input: impl AsyncRead + Send + Unpin + 'static,
        output: impl AsyncWrite + Send + Unpin + 'static,
    ) {
        let number = self.connections + 1;
        self.connections = number;
        let (outbox, outgoing) = Outbox::channel();
        self.console.set_controller_outbox(outbox.clone());
        let reader = tokio::spawn(read_frames(number, input, self.controller_messages.0.clone()));
        let writer = tokio::spawn(write_frames(output, outgoing));
        self.connection = Some(ControllerConnection::new(number, outbox, reader, writer));
    }

    /// Passes the first message of the controller, which was read before the event loop began, to
    /// the event loop.
    pub(in crate::agent) async fn queue_first_message(&mut self, message: Option<ToAgent>) {
        let (sender, _) = &self.controller_messages;
        // The channel is empty, and the event loop has not begun.
        _ = sender.send((self.connections, Ok(message))).await;
    }

    /// Closes the connection to the controller in a separate task, which first writes the queued
    /// messages. The agent has no controller afterwards.
    pub(super) fn close_connection_in_background(&mut self) {
        if let Some(connection) = self.take_connection() {
            tokio::spawn(connection.close());
        }
        // A connection over SSH ends only when the standard streams are closed, too.
        if let Ok(null) = OpenOptions::new().write(true).open("/dev/null") {
            _ = nix::unistd::dup2_stdout(&null);
            _ = nix::unistd::dup2_stderr(&null);
        }
    }

    /// Closes the connection to the controller, after the queued messages were written.
    pub(super) async fn close_connection(&mut self) {
        if let Some(connection) = self.take_connection() {
            connection.close().await;
        }
    }

    /// Removes the connection to the controller from the driver and returns it. Lines of output are
    /// counted as dropped afterwards.
    fn take_connection(&mut self) -> Option<ControllerConnection> {
        self.console.set_controller_outbox(Outbox::channel().0);
        self.cancel_exec_commands();
        self.connection.take()
    }

    /// Makes this agent obey the controller whose request to control it is pending, and uses that
    /// request's connection for all further messages.
    pub(super) fn accept_pending_controller(&mut self) {
        if let Some(AttachConnection { input, output, .. }) = self.undecided.take() {
            self.set_controller_connection(input, output);
        }
    }

    /// Executes the controller's messages about `launch check` and `launch exec`, and converts all
    /// other messages to inputs of the agent's state machine. A hello, the first message, is held
    /// back until this agent is the only agent of the run on its host.
    pub(super) fn on_controller_message(&mut self, (number, message): ControllerMessage) -> AgentInput {
        if self.connection.as_ref().is_none_or(|connection| connection.number != number) {
            return AgentInput::Tick;
        }
        match message {
            Ok(Some(ToAgent::Probe(probe))) => {
                let Some(connection) = &self.connection else { return AgentInput::Tick };
                let mut outbox = connection.outbox.clone();
                let send_answer = move |answer| {
                    _ = outbox.send_message(MessagePriority::Critical, FromAgent::Probed(answer))
                };
                if let Err(error) = self.prober.start_answering(probe, send_answer) {
                    let diagnostic =
                        Diagnostic::error(codes::host::PROBE_FAILED, "cannot start a thread for a probe")
                            .with_cause(&error);
                    self.send_to_controller(FromAgent::Failed { attempt: 0, rank: None, diagnostic });
                }
                AgentInput::Tick
            }
            Ok(Some(ToAgent::Exec { id, request })) => {
                self.on_exec_request(id, request);
                AgentInput::Tick
            }
            Ok(Some(ToAgent::Hello { version, terms: Some(terms) })) if self.terms.is_none() => {
                self.terms = Some((*terms).clone());
                self.waiting_hello = Some(ToAgent::Hello { version, terms: Some(terms.clone()) });
                let locked = self.host_locks.0.clone();
                tokio::spawn(async move {
                    // An error means that the agent has ended.
                    _ = locked.send(attach_socket::lock_host(&terms).await).await;
                });
                AgentInput::Tick
            }
            Ok(Some(message)) => AgentInput::Controller(message),
            Err(error) => {
                _ = writeln!(io::stderr(), "launch agent: {}", Diagnostic::from(error));
                self.take_connection();
                AgentInput::ControllerLost
            }
            Ok(None) => {
                self.take_connection();
                AgentInput::ControllerLost
            }
        }
    }

    /// Converts the result of making this agent the only one of its run on the host to an input of
    /// the agent's state machine.
    pub(super) fn on_host_lock_result(
        &mut self,
        lock: Result<Option<UnixListener>, HostLockError>,
    ) -> AgentInput {
        let Some(hello) = self.waiting_hello.take() else { return AgentInput::Tick };
        match (lock, self.terms.clone()) {
            (Ok(Some(listener)), Some(terms)) => {
                let requests = self.attach_requests.0.clone();
                tokio::spawn(attach_socket::accept_connections(listener, terms, requests));
                AgentInput::Controller(hello)
            }
            // Without abstract sockets, no other controller can reach the agent.
            (Ok(_), _) => AgentInput::Controller(hello),
            (Err(HostLockError::Replaced(token)), _) => AgentInput::ControllerReplaced(token),
            (Err(HostLockError::InUse(error)), _) => {
                self.handle_input(AgentInput::Controller(hello));
                AgentInput::CannotStart(error)
            }
        }
    }

    /// Converts a request from the agent's Unix socket (to obey another controller, or to end) to
    /// an input of the agent's state machine.
    pub(super) fn on_attach_request(&mut self, connection: AttachConnection) -> AgentInput {
        let (token, purpose) = (connection.request.token, connection.request.purpose);
        self.undecided = Some(connection);
        AgentInput::AttachRequested { token, purpose }
    }

    /// Adds a message to the queue of messages to the controller, or drops the message if there is
    /// no controller. Does not block. If the queue is full, drops messages that a newer one
    /// replaces, such as heartbeats.
    pub(super) fn send_to_controller(&mut self, message: FromAgent) {
        let priority = if message.is_transient() { MessagePriority::Low } else { MessagePriority::Critical };
        if let Some(connection) = &mut self.connection {
            connection.outbox.send_message(priority, message);
        }
    }

    /// Sends the reports (messages that must reach a controller) that the agent's state machine has
    /// ready, until the queue of messages to the controller is full.
    pub(super) fn send_reports(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.outbox.flush_overflow();
        while connection.outbox.has_space_for_report()
            && let Some(report) = self.core.take_next_report(self.clock.now())
        {
            connection.outbox.send_message(MessagePriority::Critical, report);
        }
    }
}

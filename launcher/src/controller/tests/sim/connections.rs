//! Simulates the connections between controllers and agents: messages arrive after a delay, and
//! connections can break.
use super::{AgentInput, ControllerInput, FromAgent, HostIndex, SimEvent, Simulation, ToAgent};
use super::{ControllerIndex, ControllerState};
use protocol::control::{AttachPurpose, AttachRejection, ControllerToken};
use std::time::Duration;

/// How long a new agent waits for the end of an older agent on its host, before it gives up.
const LOCK_TIMEOUT: Duration = Duration::from_secs(8);
/// The interval at which a new agent tries again to become the only agent of its host.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The index of a simulated connection between a controller and an agent.
pub(super) type ConnectionId = usize;

/// A connection between a controller and an agent.
#[derive(Debug)]
pub(super) struct SimConnection {
    pub(super) controller: ControllerIndex,
    pub(super) host: HostIndex,
    /// The number of the agent at the end of the connection; `None` before a relay has reached it.
    pub(super) agent: Option<u32>,
    pub(super) is_open: bool,
}

/// A request to the agent that is alive on a host.
#[derive(Debug)]
pub(super) struct SimRequest {
    pub(super) controller: ControllerIndex,
    pub(super) host: HostIndex,
    pub(super) token: ControllerToken,
    pub(super) purpose: AttachPurpose,
    /// The connection of the controller; `None` for a request to end.
    pub(super) connection: Option<ConnectionId>,
    /// The connection to the new agent that waits for the end of an older one; `None` for a request
    /// of a controller.
    pub(super) new_agent: Option<ConnectionId>,
}

impl Simulation {
    /// Opens a connection from a controller to host `host`. The controller sends all later messages
    /// to the host's agent on this connection.
    pub(super) fn open_connection(
        &mut self,
        controller: ControllerIndex,
        host: HostIndex,
        agent: Option<u32>,
    ) -> ConnectionId {
        let id = self.connections.len();
        self.connections.push(SimConnection { controller, host, agent, is_open: true });
        self.controllers[controller].connections.insert(host, id);
        id
    }

    /// Schedules the arrival of a message at the agent of a host. Drops the message if the
    /// connection is broken, or the host is disconnected.
    pub(super) fn send_to_agent(&mut self, controller: ControllerIndex, host: HostIndex, message: ToAgent) {
        self.messages += 1;
        let Some(id) = self.controllers[controller].connections.get(&host).copied() else { return };
        if self.connections[id].is_open && !self.hosts[host].disconnected {
            let at = self.now + self.compute_latency(host);
            self.schedule_event(at, SimEvent::ToAgent(id, message));
        }
    }

    /// Schedules the arrival of an agent's message at the controller that the agent obeys. Drops
    /// the message if there is no controller, or the host is disconnected.
    pub(super) fn send_to_controller(&mut self, host: HostIndex, number: u32, message: FromAgent) {
        let connection = self.find_agent(host, number).and_then(|agent| agent.connection);
        if let Some(id) = connection.filter(|id| self.connections[*id].is_open) {
            self.send_on_connection(id, message);
        }
    }

    /// Schedules the arrival of a message at the controller's end of a connection.
    fn send_on_connection(&mut self, id: ConnectionId, message: FromAgent) {
        let host = self.connections[id].host;
        if !self.hosts[host].disconnected {
            let at = self.now + self.compute_latency(host);
            self.schedule_event(at, SimEvent::ToController(id, message));
        }
    }

    /// Breaks a connection. Both ends notice after a delay, unless the host is disconnected.
    pub(super) fn break_connection(&mut self, id: ConnectionId) {
        let host = self.connections[id].host;
        if !std::mem::replace(&mut self.connections[id].is_open, false) {
            return;
        }
        let at = self.now + self.compute_latency(host);
        if !self.hosts[host].disconnected {
            self.schedule_event(at, SimEvent::AgentSeesEnd(id));
        }
        self.schedule_event(at, SimEvent::ControllerSeesEnd(id));
    }

    /// Closes the connection of a controller to the agent of a host.
    pub(super) fn close_connection(&mut self, controller: ControllerIndex, host: HostIndex) {
        if let Some(id) = self.controllers[controller].connections.get(&host).copied() {
            self.break_connection(id);
        }
    }

    /// Delivers a message of a controller, or the end of its connection, to the agent. An agent
    /// that is not yet the only agent of its host processes nothing but the hello.
    pub(super) fn deliver_to_agent(&mut self, id: ConnectionId, input: AgentInput) -> Result<(), String> {
        let (host, number) = (self.connections[id].host, self.connections[id].agent);
        let Some(number) = number else { return Ok(()) };
        let until = self.now + LOCK_TIMEOUT;
        let Some(agent) = self.find_agent(host, number).filter(|agent| agent.connection == Some(id)) else {
            return Ok(());
        };
        if let Some(waiting) = &mut agent.waiting {
            waiting.push_back(input);
            return Ok(());
        }
        if matches!(input, AgentInput::Controller(ToAgent::Hello { .. })) {
            agent.waiting = Some([input].into());
            self.schedule_event(self.now, SimEvent::LockHost(id, until));
            return Ok(());
        }
        if matches!(input, AgentInput::ControllerLost) {
            agent.connection = None;
        }
        self.feed_agent(host, number, input)
    }

    /// Tries to make a new agent the only agent of its host. If an older agent is alive there, asks
    /// it to end.
    pub(super) fn lock_host(&mut self, id: ConnectionId, until: Duration) -> Result<(), String> {
        let host = self.connections[id].host;
        let Some(number) = self.connections[id].agent else { return Ok(()) };
        let Some(agent) = self.find_agent(host, number) else { return Ok(()) };
        let Some(AgentInput::Controller(ToAgent::Hello { terms: Some(terms), .. })) =
            agent.waiting.as_ref().and_then(|waiting| waiting.front())
        else {
            return Err("a new agent has no terms".to_owned());
        };
        let (token, purpose) = (terms.token, AttachPurpose::Evict { below: terms.number });
        let older = self.hosts[host].agents.iter().map(|agent| agent.number).find(|other| *other < number);
        match older {
            Some(older) if self.now < until => {
                self.schedule_event(self.now + LOCK_INTERVAL, SimEvent::LockHost(id, until));
                let controller = self.connections[id].controller;
                let new_agent = Some(id);
                let request = SimRequest { controller, host, token, purpose, connection: None, new_agent };
                self.hosts[host].request = Some(request);
                self.feed_agent(host, older, AgentInput::AttachRequested { token, purpose })
            }
            older => {
                let waiting = self.find_agent(host, number).and_then(|agent| agent.waiting.take());
                for input in waiting.into_iter().flatten() {
                    let is_hello = matches!(input, AgentInput::Controller(ToAgent::Hello { .. }));
                    if matches!(input, AgentInput::ControllerLost)
                        && let Some(agent) = self.find_agent(host, number)
                    {
                        agent.connection = None;
                    }
                    self.feed_agent(host, number, input)?;
                    if is_hello && older.is_some() {
                        let error = diagnostic::codes::host::HOST_IN_USE;
                        let error = diagnostic::Diagnostic::error(error, "an older agent is alive");
                        self.feed_agent(host, number, AgentInput::CannotStart(error))?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Passes the request of a controller to the agent that is alive on the host.
    pub(super) fn process_request(&mut self, request: SimRequest) -> Result<(), String> {
        let SimRequest { host, token, purpose, .. } = request;
        let agent = self.hosts[host].agents.iter().find(|agent| agent.waiting.is_none());
        match agent.map(|agent| agent.number) {
            Some(number) => {
                self.hosts[host].request = Some(request);
                self.feed_agent(host, number, AgentInput::AttachRequested { token, purpose })
            }
            None => {
                self.reject_request(request, AttachRejection::NoAgent);
                Ok(())
            }
        }
    }

    /// Answers a request with a rejection.
    pub(super) fn reject_request(&mut self, request: SimRequest, rejection: AttachRejection) {
        let SimRequest { controller, host, connection, new_agent, .. } = request;
        let at = self.now + self.compute_latency(host);
        let newer = match rejection {
            AttachRejection::Controlled { token, .. } if token > request.token => Some(token),
            _ => None,
        };
        match (connection, new_agent, newer) {
            (Some(id), ..) => {
                self.send_on_connection(id, FromAgent::NotAdopted(rejection));
                self.break_connection(id);
            }
            (None, Some(id), Some(token)) => {
                if let Some(number) = self.connections[id].agent {
                    let input = AgentInput::ControllerReplaced(token);
                    self.schedule_event(self.now, SimEvent::Feed(host, number, input));
                }
            }
            (None, None, Some(_)) => self.schedule_event(at, SimEvent::Replaced(controller)),
            (None, None, None) if rejection == AttachRejection::NoAgent => {
                self.schedule_event(at, SimEvent::Evicted(controller, host));
            }
            (None, ..) => {}
        }
    }

    /// Delivers a message of an agent to a controller. A message on an earlier connection to the
    /// host is dropped, as the driver does.
    pub(super) fn deliver_to_controller(&mut self, id: ConnectionId, message: FromAgent) {
        let (index, host) = (self.connections[id].controller, self.connections[id].host);
        if self.controllers[index].connections.get(&host) != Some(&id) {
            return;
        }
        if matches!(message, FromAgent::Released { .. }) {
            self.end_controller(index, ControllerState::Ended);
        } else {
            self.feed_controller(index, ControllerInput::Agent(host, message));
        }
    }
}

//! [`TreeRouter`]: forwards the messages of control connections in a tree of agents, by choosing
//! the next agent on the path for each message. The controller and every agent of the tree have a
//! router.
use super::{
    frame::{StreamId, TreeFrame, TreeParent},
    link_set::LinkId,
    resumable_stream::{ReceivedData, ResumableStream},
};
use protocol::control::MAX_ADDRESSES;
use std::{collections::HashMap, net::SocketAddr};

/// The largest number of agents whose messages one agent of the tree of agents forwards to the
/// controller. Registrations of others are ignored.
const MAX_STREAMS: usize = 1 << 16;
/// The largest number of bytes of an agent's standard error that one message in the tree of agents
/// carries. Longer texts are ignored.
const MAX_STDERR_BYTES: usize = 32 << 10;

/// An operation that the message router of the tree leaves to the caller, such as sending a message
/// on a connection, because the router does no I/O.
#[derive(Debug, PartialEq)]
pub(crate) enum RouterAction {
    /// Send a frame on a link.
    Send(LinkId, TreeFrame),
    /// Pass bytes to the reader of a local stream.
    Deliver(StreamId, Vec<u8>),
    /// A local stream accepts this number of bytes more.
    AddSpace(StreamId, usize),
    /// The reader of a local stream reads its end, and its writer cannot write any more, or (for
    /// [`StreamEnd::Finished`]) can still write.
    End(StreamId, StreamEnd),
    /// A local stream has a way to its other end.
    Attached(StreamId),
    /// The way to the other end of a local stream is broken, until it is attached again.
    Detached(StreamId),
    /// The agent of a stream accepts connections of other agents at these addresses.
    Ready(StreamId, Vec<SocketAddr>),
    /// The agent of the local stream may connect to these agents from now on.
    SetParents(Vec<TreeParent>),
    /// Show output of the agent of a stream.
    ShowStderr(StreamId, String),
}

/// The reason why an agent's control connection through the tree of agents has ended, such as an
/// abort by the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The other end has written everything.
    Finished,
    /// The other end has aborted the stream, or does not know it.
    Aborted,
    /// The neighbour has violated the protocol.
    Violation,
}

/// The kind of process to which a router of the tree of agents belongs: the controller or an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouterRole {
    /// The controller, at which all streams begin.
    Controller,
    /// An agent, which passes on the streams that are not its own.
    Agent,
}

/// The message router of one process in the tree of agents, which forwards each message to the next
/// process or handles the message itself.
#[derive(Debug)]
pub(crate) struct TreeRouter {
    side: RouterRole,
    /// The link to the neighbour above; always `None` at the controller.
    uplink: Option<LinkId>,
    /// The links through which each stream below was registered, the newest last, which carries the
    /// stream. A late registration of an old way may be the newest for a short time: the neighbour
    /// then reports that the stream is detached.
    routes: HashMap<StreamId, Vec<LinkId>>,
    /// The addresses of the agents below, which are reported again on a new uplink.
    ready: HashMap<StreamId, Vec<SocketAddr>>,
    streams: HashMap<StreamId, ResumableStream>,
    actions: Vec<RouterAction>,
}

impl TreeRouter {
    /// Creates the router of the controller, at which the control connections of all agents in the
    /// tree of agents end.
    pub(crate) fn new_controller() -> TreeRouter {
        TreeRouter::new(RouterRole::Controller)
    }

    /// Creates the router of an agent in the tree of agents, at which the agent's control
    /// connection `stream` ends.
    pub(crate) fn new_agent(stream: StreamId) -> TreeRouter {
        let mut router = TreeRouter::new(RouterRole::Agent);
        router.open_stream(stream);
        router
    }

    /// Creates a router for one process of the tree, the controller or an agent, that knows no
    /// connections to other processes yet.
    fn new(side: RouterRole) -> TreeRouter {
        TreeRouter {
            side,
            uplink: None,
            routes: HashMap::new(),
            ready: HashMap::new(),
            streams: HashMap::new(),
            actions: Vec::new(),
        }
    }

    /// Returns and clears the list of operations that the caller must execute for the router, such
    /// as sending a message to another process.
    pub(crate) fn take_actions(&mut self) -> Vec<RouterAction> {
        std::mem::take(&mut self.actions)
    }

    // ---- local streams ----

    /// Creates this process's end of an agent's control connection through the tree of agents, with
    /// the ID `stream`.
    pub(crate) fn open_stream(&mut self, stream: StreamId) {
        self.streams.insert(stream, ResumableStream::default());
    }

    /// Returns how many bytes may be written to a new control connection before the other end must
    /// acknowledge some of them.
    pub(crate) fn initial_writable_bytes() -> usize {
        super::resumable_stream::WINDOW_BYTES
    }

    /// Writes bytes to the control connection `stream`, one end of which is in this process, and
    /// sends them towards the other end. The caller observes the space.
    pub(crate) fn write_to_stream(&mut self, stream: StreamId, bytes: &[u8]) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.write(bytes);
            self.send_pending_frames(stream);
        }
    }

    /// Records that this process writes nothing more to the control connection `stream`, and sends
    /// the end of the data to the other end.
    pub(crate) fn finish_writing(&mut self, stream: StreamId) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.finish_writing();
            self.send_pending_frames(stream);
        }
    }

    /// Records that this process has read `count` bytes of the control connection `stream`, and
    /// sends an acknowledgement after enough bytes.
    pub(crate) fn record_consumed_bytes(&mut self, stream: StreamId, count: usize) {
        if let Some(state) = self.streams.get_mut(&stream)
            && state.record_consumed_bytes(count as u64)
        {
            let frame = state.build_acknowledgement(stream);
            self.send_towards_other_end(stream, frame);
        }
    }

    /// Ends an agent's control connection through the tree of agents in both directions without
    /// sending waiting data, and informs the other end.
    pub(crate) fn abort_stream(&mut self, stream: StreamId) {
        if self.streams.remove(&stream).is_some() {
            self.send_towards_other_end(stream, TreeFrame::Abort { stream });
        }
    }

    /// Sends the agent `stream` a new list of agents, through one of which it may reach the
    /// controller.
    pub(crate) fn send_possible_parents(&mut self, stream: StreamId, parents: Vec<TreeParent>) {
        self.send_towards_other_end(stream, TreeFrame::Parents { stream, parents });
    }

    /// Returns whether the other end of the control connection `stream` has acknowledged all data
    /// from this process, or the connection has ended.
    pub(crate) fn is_delivered(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_none_or(ResumableStream::is_delivered)
    }

    /// Sends a message of the control connection `stream` to the next process on the path to the
    /// other end of the connection. Drops the frame if there is no way.
    fn send_towards_other_end(&mut self, stream: StreamId, frame: TreeFrame) {
        let way = match self.side {
            RouterRole::Controller => self.find_route(stream),
            RouterRole::Agent => self.uplink,
        };
        self.actions.extend(way.map(|link| RouterAction::Send(link, frame)));
    }

    /// Sends as many waiting messages of a control connection as the limit on unacknowledged bytes
    /// permits, toward the other end of the connection.
    fn send_pending_frames(&mut self, stream: StreamId) {
        while let Some(frame) = self.streams.get_mut(&stream).and_then(|state| state.take_next_frame(stream))
        {
            self.send_towards_other_end(stream, frame);
        }
    }

    // ---- links ----

    /// Makes `link` this agent's connection towards the controller, and announces over `link` all
    /// agents whose messages this agent forwards.
    pub(crate) fn set_uplink(&mut self, link: LinkId) {
        self.uplink = Some(link);
        let local = self.streams.keys().copied();
        let streams: Vec<StreamId> = local.chain(self.routes.keys().copied()).collect();
        let register = |stream| RouterAction::Send(link, TreeFrame::Register { stream });
        self.actions.extend(streams.into_iter().map(register));
        let ready = self.ready.iter().map(|(stream, addresses)| {
            let (stream, addresses) = (*stream, addresses.clone());
            RouterAction::Send(link, TreeFrame::Ready { stream, addresses })
        });
        self.actions.extend(ready);
    }

    /// Records that the connection over which this agent reaches the controller, directly or
    /// through another agent, has ended.
    pub(crate) fn remove_uplink(&mut self) {
        self.uplink = None;
        self.streams.values_mut().for_each(|state| state.is_synchronized = false);
    }

    /// Reports to the controller the addresses at which the agent in this process accepts the
    /// connections of other agents.
    pub(crate) fn report_accepting_addresses(&mut self, stream: StreamId, addresses: Vec<SocketAddr>) {
        self.ready.insert(stream, addresses.clone());
        self.send_to_uplink(TreeFrame::Ready { stream, addresses });
    }

    /// Sends a message over this agent's connection towards the controller, or drops the message
    /// while there is no such connection.
    pub(crate) fn send_to_uplink(&mut self, frame: TreeFrame) {
        self.actions.extend(self.uplink.map(|link| RouterAction::Send(link, frame)));
    }

    /// Returns the direct connection over which the agent `stream` is reached, or `None` if this
    /// process has no path to that agent.
    pub(crate) fn find_route(&self, stream: StreamId) -> Option<LinkId> {
        self.routes.get(&stream).and_then(|links| links.last().copied())
    }

    /// Records that a direct connection to another agent has ended, so that no agents are reached
    /// over this connection any more.
    pub(crate) fn remove_child(&mut self, link: LinkId) {
        let lost: Vec<StreamId> = self
            .routes
            .iter()
            .filter(|(_, links)| links.contains(&link))
            .map(|(stream, _)| *stream)
            .collect();
        lost.into_iter().for_each(|stream| self.detach_stream(stream, link));
    }

    /// Records that the agent `stream` is no longer reached over the direct connection `link`, and
    /// switches to another connection if there is one. If the stream was registered on another
    /// link, that link carries it again.
    fn detach_stream(&mut self, stream: StreamId, link: LinkId) {
        let Some(links) = self.routes.get_mut(&stream) else { return };
        let was_carried_by = links.last().copied();
        links.retain(|other| *other != link);
        match links.last().copied() {
            Some(other) if was_carried_by == Some(link) => return self.register_stream(other, stream),
            Some(_) => return,
            None => _ = self.routes.remove(&stream),
        }
        self.ready.remove(&stream);
        match self.side {
            RouterRole::Agent => self.send_to_uplink(TreeFrame::Detached { stream }),
            RouterRole::Controller => {
                if let Some(state) = self.streams.get_mut(&stream) {
                    state.is_synchronized = false;
                    self.actions.push(RouterAction::Detached(stream));
                }
            }
        }
    }

    /// Forwards a message of an agent below in the tree towards the controller, or handles the
    /// message if this process is the controller. Ignores frames of streams that are not registered
    /// on the link, and frames that no neighbour below sends.
    pub(crate) fn process_child_frame(&mut self, link: LinkId, frame: TreeFrame) {
        let stream = match &frame {
            TreeFrame::Register { stream } => return self.add_route(link, *stream),
            TreeFrame::Ready { addresses, .. } if addresses.len() > MAX_ADDRESSES => return,
            TreeFrame::Stderr { text, .. } if text.len() > MAX_STDERR_BYTES => return,
            TreeFrame::Detached { stream }
            | TreeFrame::Ready { stream, .. }
            | TreeFrame::Stderr { stream, .. }
            | TreeFrame::Data { stream, .. }
            | TreeFrame::Fin { stream, .. }
            | TreeFrame::Ack { stream, .. }
            | TreeFrame::SyncAck { stream, .. } => *stream,
            _ => return,
        };
        if !self.routes.get(&stream).is_some_and(|links| links.contains(&link)) {
            return;
        }
        match (frame, self.side) {
            (TreeFrame::Detached { stream }, _) => self.detach_stream(stream, link),
            (TreeFrame::Ready { stream, addresses }, RouterRole::Controller) => {
                self.actions.push(RouterAction::Ready(stream, addresses));
            }
            (frame, RouterRole::Controller) => self.process_local_stream_frame(frame),
            (frame, RouterRole::Agent) => {
                if let TreeFrame::Ready { stream, addresses } = &frame {
                    self.ready.insert(*stream, addresses.clone());
                }
                self.send_to_uplink(frame);
            }
        }
    }

    /// Records that the agent `stream` is reached over the direct connection `link`, which leads
    /// away from the controller. At the controller, an agent whose stream does not exist any more
    /// is asked to end.
    fn add_route(&mut self, link: LinkId, stream: StreamId) {
        let is_known = match self.side {
            RouterRole::Controller => self.streams.contains_key(&stream),
            RouterRole::Agent if self.streams.contains_key(&stream) => false,
            RouterRole::Agent => self.routes.len() < MAX_STREAMS || self.routes.contains_key(&stream),
        };
        if is_known {
            let links = self.routes.entry(stream).or_default();
            links.retain(|other| *other != link);
            links.push(link);
            self.register_stream(link, stream);
        } else if self.side == RouterRole::Controller {
            self.actions.push(RouterAction::Send(link, TreeFrame::Abort { stream }));
        }
    }

    /// In an agent, informs the controller that another agent is reachable here; in the controller,
    /// informs the agent how many bytes have arrived.
    fn register_stream(&mut self, link: LinkId, stream: StreamId) {
        if self.side == RouterRole::Agent {
            return self.send_to_uplink(TreeFrame::Register { stream });
        }
        if let Some(state) = self.streams.get_mut(&stream) {
            state.is_synchronized = false;
            let frame = TreeFrame::Sync { stream, progress: state.build_progress_report() };
            self.actions.extend([RouterAction::Attached(stream), RouterAction::Send(link, frame)]);
        }
    }

    /// Forwards a message from the controller to the agent that must receive it, or handles the
    /// message if this agent is the receiver.
    pub(crate) fn process_uplink_frame(&mut self, frame: TreeFrame) {
        let stream = match &frame {
            TreeFrame::Data { stream, .. }
            | TreeFrame::Fin { stream, .. }
            | TreeFrame::Ack { stream, .. }
            | TreeFrame::Sync { stream, .. }
            | TreeFrame::Parents { stream, .. }
            | TreeFrame::Abort { stream } => *stream,
            // No neighbour above sends the other frames.
            _ => return,
        };
        match self.find_route(stream) {
            Some(link) => self.actions.push(RouterAction::Send(link, frame)),
            None => self.process_local_stream_frame(frame),
        }
    }

    /// Processes a message of a control connection that ends in this process, such as data, an
    /// acknowledgement or the end of the data. Ignores frames of other streams.
    fn process_local_stream_frame(&mut self, frame: TreeFrame) {
        let (stream, part) = match frame {
            TreeFrame::Data { stream, offset, bytes } => {
                let Some(state) = self.streams.get_mut(&stream) else { return };
                (stream, state.accept_received_bytes(offset, bytes.0))
            }
            TreeFrame::Fin { stream, offset } => {
                let Some(state) = self.streams.get_mut(&stream) else { return };
                (stream, state.accept_received_end(offset))
            }
            TreeFrame::Ack { stream, acknowledged } => {
                let Some(state) = self.streams.get_mut(&stream) else { return };
                let freed = state.handle_acknowledgement(acknowledged);
                return self.request_space_for_writer(stream, freed);
            }
            TreeFrame::Sync { stream, progress } | TreeFrame::SyncAck { stream, progress } => {
                let Some(state) = self.streams.get_mut(&stream) else { return };
                let freed = state.resume_sending(progress);
                if self.side == RouterRole::Agent {
                    let progress = state.build_progress_report();
                    self.send_towards_other_end(stream, TreeFrame::SyncAck { stream, progress });
                }
                self.request_space_for_writer(stream, freed);
                return self.send_pending_frames(stream);
            }
            TreeFrame::Abort { stream } => return self.end_stream(stream, StreamEnd::Aborted),
            TreeFrame::Stderr { stream, text } => {
                return self.actions.push(RouterAction::ShowStderr(stream, text));
            }
            TreeFrame::Parents { stream, parents } if self.streams.contains_key(&stream) => {
                return self.actions.push(RouterAction::SetParents(parents));
            }
            _ => return,
        };
        match part {
            ReceivedData::Bytes(bytes) => self.actions.push(RouterAction::Deliver(stream, bytes)),
            ReceivedData::End => {
                if let Some(state) = self.streams.get_mut(&stream) {
                    let frame = state.build_acknowledgement(stream);
                    self.send_towards_other_end(stream, frame);
                }
                if self.side == RouterRole::Controller {
                    // An agent that has written everything ends.
                    self.streams.remove(&stream);
                }
                self.actions.push(RouterAction::End(stream, StreamEnd::Finished));
            }
            ReceivedData::Nothing => {}
            ReceivedData::Violation => self.end_stream(stream, StreamEnd::Violation),
        }
    }

    /// Requests that the writer of a control connection in this process be permitted to write
    /// `count` more bytes.
    fn request_space_for_writer(&mut self, stream: StreamId, count: usize) {
        if count > 0 {
            self.actions.push(RouterAction::AddSpace(stream, count));
        }
    }

    /// Removes a control connection that ends in this process, and requests that its reader and
    /// writer be informed of the reason `end`.
    fn end_stream(&mut self, stream: StreamId, end: StreamEnd) {
        if self.streams.remove(&stream).is_some() {
            self.actions.push(RouterAction::End(stream, end));
        }
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;

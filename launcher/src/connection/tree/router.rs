//! [`TreeRouter`]: chooses, in each process of the tree of agents, the neighbour to which the
//! messages of each control connection are passed on. The controller and every agent of the tree
//! have a router.
use super::{
    frame::{StreamId, TreeFrame, TreeParent},
    link_set::LinkId,
    resumable_stream::{ReceivedData, ResumableStream},
};
use protocol::control::MAX_ADDRESSES;
use std::{collections::HashMap, net::SocketAddr};

/// The largest number of agents whose control connections one agent of the tree passes on to the
/// controller. Registrations of others are ignored.
const MAX_STREAMS: usize = 1 << 16;
/// The largest number of bytes of an agent's standard error that one frame (message between
/// neighbours of the tree) carries. Longer texts are ignored.
const MAX_STDERR_BYTES: usize = 32 << 10;

/// An action, such as sending a message to a neighbour, that a router of the tree requests from the
/// code that performs its I/O.
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

/// Why an agent's control connection through the tree has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The other end has written everything.
    Finished,
    /// The other end has aborted the stream, or does not know it.
    Aborted,
    /// The neighbour has violated the protocol.
    Violation,
}

/// Whether a router of the tree belongs to the controller or to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouterRole {
    /// The controller, at which all streams begin.
    Controller,
    /// An agent, which passes on the streams that are not its own.
    Agent,
}

/// The message router of one process in the tree of agents, which decides whether a message is
/// passed on to a neighbour or handled here.
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
    /// Creates the router for the controller, at which the control connections (streams) of all
    /// agents of the tree end.
    pub(crate) fn new_controller() -> TreeRouter {
        TreeRouter::new(RouterRole::Controller)
    }

    /// Creates the router for an agent of the tree, with this process's end of the agent's control
    /// connection `stream`.
    pub(crate) fn new_agent(stream: StreamId) -> TreeRouter {
        let mut router = TreeRouter::new(RouterRole::Agent);
        router.open_stream(stream);
        router
    }

    /// Creates a router for a process in the tree of agents, without connections to neighbours and
    /// without streams.
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

    /// Removes and returns the queued actions, such as sending a message to a neighbour, for the
    /// caller to execute.
    pub(crate) fn take_actions(&mut self) -> Vec<RouterAction> {
        std::mem::take(&mut self.actions)
    }

    // ---- local streams ----

    /// Opens this process's end of an agent's control connection (stream) through the tree.
    pub(crate) fn open_stream(&mut self, stream: StreamId) {
        self.streams.insert(stream, ResumableStream::default());
    }

    /// Returns the number of bytes that may be written to a new stream through the tree before the
    /// other end acknowledges some.
    pub(crate) fn initial_writable_bytes() -> usize {
        super::resumable_stream::WINDOW_BYTES
    }

    /// Writes bytes to a control connection (stream) through the tree that ends in this process,
    /// and sends them. The caller observes the space.
    pub(crate) fn write_to_stream(&mut self, stream: StreamId, bytes: &[u8]) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.write(bytes);
            self.send_pending_frames(stream);
        }
    }

    /// Records that this process writes nothing more to a control connection (stream) through the
    /// tree, and informs the other end.
    pub(crate) fn finish_writing(&mut self, stream: StreamId) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.finish_writing();
            self.send_pending_frames(stream);
        }
    }

    /// Records that the local reader of a stream has consumed `count` bytes, and sends an
    /// acknowledgement to the other end once enough bytes were consumed.
    pub(crate) fn record_consumed_bytes(&mut self, stream: StreamId, count: usize) {
        if let Some(state) = self.streams.get_mut(&stream)
            && state.record_consumed_bytes(count as u64)
        {
            let frame = state.build_acknowledgement(stream);
            self.send_towards_other_end(stream, frame);
        }
    }

    /// Ends an agent's control connection (stream) through the tree immediately in both directions,
    /// and informs the other end.
    pub(crate) fn abort_stream(&mut self, stream: StreamId) {
        if self.streams.remove(&stream).is_some() {
            self.send_towards_other_end(stream, TreeFrame::Abort { stream });
        }
    }

    /// Sends an agent the new list of agents to which it may connect to reach the controller.
    pub(crate) fn send_possible_parents(&mut self, stream: StreamId, parents: Vec<TreeParent>) {
        self.send_towards_other_end(stream, TreeFrame::Parents { stream, parents });
    }

    /// Returns whether the other end of a stream has received everything that this process has
    /// written to it, or the stream has ended.
    pub(crate) fn is_delivered(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_none_or(ResumableStream::is_delivered)
    }

    /// Sends a frame of a stream to the neighbour through which the other end of the stream is
    /// reached. Drops the frame if there is no way.
    fn send_towards_other_end(&mut self, stream: StreamId, frame: TreeFrame) {
        let way = match self.side {
            RouterRole::Controller => self.find_route(stream),
            RouterRole::Agent => self.uplink,
        };
        self.actions.extend(way.map(|link| RouterAction::Send(link, frame)));
    }

    /// Sends the pending messages (frames) of a stream that ends in this process, until none is
    /// left or the other end is unreachable.
    fn send_pending_frames(&mut self, stream: StreamId) {
        while let Some(frame) = self.streams.get_mut(&stream).and_then(|state| state.take_next_frame(stream))
        {
            self.send_towards_other_end(stream, frame);
        }
    }

    // ---- links ----

    /// Makes `link` the connection towards the controller, and registers over it every agent that
    /// is reached through this process.
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

    /// Records that the connection to the neighbour above, which leads to the controller, has
    /// ended.
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

    /// Sends a message (frame) to the neighbour on the way to the controller, or drops it if there
    /// is no connection to one.
    pub(crate) fn send_to_uplink(&mut self, frame: TreeFrame) {
        self.actions.extend(self.uplink.map(|link| RouterAction::Send(link, frame)));
    }

    /// Returns the connection to the neighbour through which the agent with the stream `stream` is
    /// reached, or `None` if the agent cannot be reached.
    pub(crate) fn find_route(&self, stream: StreamId) -> Option<LinkId> {
        self.routes.get(&stream).and_then(|links| links.last().copied())
    }

    /// Removes a neighbour's connection after its end, and records that no agent is reachable over
    /// this connection any more.
    pub(crate) fn remove_child(&mut self, link: LinkId) {
        let lost: Vec<StreamId> = self
            .routes
            .iter()
            .filter(|(_, links)| links.contains(&link))
            .map(|(stream, _)| *stream)
            .collect();
        lost.into_iter().for_each(|stream| self.detach_stream(stream, link));
    }

    /// Records that the agent with the stream `stream` is no longer reachable over the connection
    /// `link` to a neighbour. If the stream was registered on another link, that link carries it
    /// again.
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

    /// Processes a message from a neighbour below in the tree, by passing it on towards the
    /// controller or by handling it in the controller. Ignores frames of streams that are not
    /// registered on the link, and frames that no neighbour below sends.
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

    /// Records that the agent with the stream `stream` is reachable over `link`, the connection to
    /// a neighbour below in the tree. At the controller, an agent whose stream does not exist any
    /// more is asked to end.
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

    /// Announces to the controller that an agent is reachable through this process or, in the
    /// controller, sends that agent the stream's position.
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

    /// Processes a message from the neighbour towards the controller, by passing it on to an agent
    /// below or by handling it in this agent.
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

    /// Processes a message (frame) of a stream that ends in this process: received data, an
    /// acknowledgement, or the end of the stream. Ignores frames of other streams.
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

    /// Adds an action that permits the writer of a stream in this process to write `count` more
    /// bytes.
    fn request_space_for_writer(&mut self, stream: StreamId, count: usize) {
        if count > 0 {
            self.actions.push(RouterAction::AddSpace(stream, count));
        }
    }

    /// Removes a stream that ends in this process, and adds an action that informs its reader and
    /// writer of the reason `end`.
    fn end_stream(&mut self, stream: StreamId, end: StreamEnd) {
        if self.streams.remove(&stream).is_some() {
            self.actions.push(RouterAction::End(stream, end));
        }
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;

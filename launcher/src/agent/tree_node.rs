//! The part of an agent that passes on messages between the controller and those agents that are
//! connected to the controller through this agent.
//!
//! The node runs on a separate thread, so that the agents below do not depend on the agent's event
//! loop. If the link to the neighbour above ends, the node connects to another agent that the
//! controller has named. If none accepts it, the controller counts as lost.
mod child_listener;
mod executable_server;
mod neighbour_link;
mod parent_link;
mod stderr_pipe;

use crate::connection::tree::{
    HEARTBEATS_PER_LEASE, LinkId, LinkInput, LinkSet, LocalStream, LocalStreamEvent, MAX_TREE_FRAME_BYTES,
    RouterAction, StreamEnd, StreamHalves, TreeFrame, TreeRouter, TreeSetup,
};
use crate::connection::{FrameError, encode_frame, read_short_frame};
use child_listener::ChildListener;
use diagnostic::{Diagnostic, codes::host};
use neighbour_link::NeighbourLink;
use std::{io, os::fd::OwnedFd, sync::Arc, thread, time::Duration};
use tokio::{
    io::AsyncWriteExt,
    net::unix::pipe,
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep_until, timeout},
};

/// The capacity, in messages, of each channel between the tasks in which an agent passes on
/// messages of other agents.
const CHANNEL_CAPACITY: usize = 64;
/// How long a new agent waits for the controller's first message, which states through which other
/// agents the new agent can reach the controller.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// The fraction of a link's lease (the longest permitted silence) that may pass without a message
/// of the controller before the controller counts as silent. The agents below then have the rest of
/// `run.host_lease` to find another way to the controller.
const SILENT_CONTROLLER_LEASE_FRACTION: (u32, u32) = (3, 5);
/// The interval at which an agent that is about to exit checks whether other agents still reach the
/// controller through it.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// How long an agent that is about to exit waits until the next agent on the way to the controller
/// has received the exiting agent's last messages.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an agent that is about to exit still passes on messages of other agents before it asks
/// these agents to reach the controller in another way.
const LEAVE_REQUEST_DELAY: Duration = Duration::from_secs(2);
/// The longest time for which an agent that is about to exit still passes on messages for the
/// agents that reach the controller through it.
const MAX_LINGER_TIME: Duration = Duration::from_secs(10);

/// The handle of the thread in which an agent passes on messages between the controller and the
/// agents that reach the controller through this agent.
pub(super) struct TreeNodeHandle {
    /// Dropping the sender asks the node to end.
    end: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl TreeNodeHandle {
    /// Ends the thread that passes on messages for this agent and others, after a limited wait for
    /// undelivered messages and for agents that still need the thread.
    pub(super) fn finish(self) {
        drop(self.end);
        // A node that has panicked has ended, too.
        _ = self.thread.join();
    }
}

/// Connects this agent with the controller, directly or through other agents, and starts the thread
/// that passes on messages of agents connected through this one. `input` and `output` are the
/// agent's standard streams. Returns the control stream to the controller. Blocks until the agent
/// is connected. Fails if no agent of the tree can be reached.
pub(super) fn join_tree(
    input: OwnedFd,
    output: OwnedFd,
) -> diagnostic::Result<(StreamHalves, TreeNodeHandle)> {
    let cannot_start = |error: &io::Error| {
        Diagnostic::error(host::AGENT_START_FAILED, "cannot start the agent's node of the tree")
            .with_cause(error)
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| cannot_start(&error))?;
    let (started, result) = oneshot::channel();
    let (end, ending) = oneshot::channel();
    let thread = thread::Builder::new()
        .name("tree".into())
        .spawn(move || {
            runtime.block_on(async {
                match connect_node(input, output).await {
                    Ok((node, halves)) => {
                        // An error means that the agent has ended.
                        _ = started.send(Ok(halves));
                        node.pass_on_until_unneeded(ending).await;
                    }
                    Err(error) => _ = started.send(Err(error)),
                }
            });
            // Copies of the executable that are not complete are given up.
            runtime.shutdown_background();
        })
        .map_err(|error| cannot_start(&error))?;
    let result =
        result.blocking_recv().unwrap_or_else(|_| Err(cannot_start(&io::Error::other("it panicked"))));
    result.map(|halves| (halves, TreeNodeHandle { end, thread }))
}

/// Receives the controller's first message, and connects this agent to a parent in the tree of
/// agents that the message names, or directly to the controller.
async fn connect_node(input: OwnedFd, output: OwnedFd) -> diagnostic::Result<(TreeNode, StreamHalves)> {
    let cannot_start = |error: io::Error| {
        Diagnostic::error(host::AGENT_START_FAILED, "cannot start the agent's node of the tree")
            .with_cause(&error)
    };
    let open = || -> io::Result<_> {
        Ok((
            pipe::Receiver::from_owned_fd_unchecked(input.try_clone()?)?,
            pipe::Sender::from_owned_fd_unchecked(output.try_clone()?)?,
        ))
    };
    let (mut reader, mut writer) = open().map_err(cannot_start)?;
    drop((input, output));
    let first: Result<Option<TreeFrame>, FrameError> =
        timeout(FIRST_MESSAGE_TIMEOUT, read_short_frame(&mut reader, MAX_TREE_FRAME_BYTES))
            .await
            .unwrap_or(Err(FrameError::Io(io::ErrorKind::TimedOut.into())));
    let setup = match first {
        Ok(Some(TreeFrame::Setup(setup))) => *setup,
        Ok(_) => return Err(cannot_start(io::Error::other("the first message was not the agent's place"))),
        Err(error) => return Err(cannot_start(io::Error::other(error))),
    };
    let (children, accepted) = mpsc::channel(CHANNEL_CAPACITY);
    let listener = ChildListener::open(&setup, children).map_err(cannot_start)?;
    let (events_sender, events) = mpsc::channel(CHANNEL_CAPACITY);
    let (near, far) = StreamHalves::create_pair();
    let mut node = TreeNode {
        router: TreeRouter::new_agent(setup.stream),
        links: LinkSet::default(),
        uplink: None,
        local: Some(LocalStream::start(setup.stream, near, events_sender)),
        from_uplink: mpsc::channel(CHANNEL_CAPACITY),
        from_children: mpsc::channel(CHANNEL_CAPACITY),
        reconnected: mpsc::channel(1),
        attempt: None,
        reports_silence: false,
        silence_heard_at: None,
        stderr: mpsc::channel(CHANNEL_CAPACITY),
        accepted,
        events,
        listener,
        setup: Arc::new(setup),
    };
    if node.setup.parents.is_empty() {
        let link = node.links.add_link(reader, writer, node.from_uplink.0.clone());
        node.set_uplink(link);
        return Ok((node, far));
    }
    let answer = match parent_link::connect_to_parent(&node.setup).await {
        Ok(stream) => {
            node.replace_uplink(stream);
            Ok(())
        }
        Err(error) => Err(error),
    };
    let frame = match &answer {
        Ok(()) => TreeFrame::Joined,
        Err(error) => TreeFrame::NotJoined(error.clone()),
    };
    let bytes = encode_frame(&frame).map_err(|error| cannot_start(io::Error::other(error)))?;
    writer.write_all(&bytes).await.map_err(cannot_start)?;
    answer?;
    drop((reader, writer));
    // The SSH session ends when no process has its streams any more.
    stderr_pipe::redirect_output(node.stderr.0.clone()).map_err(cannot_start)?;
    Ok((node, far))
}

/// The sender and the receiver of a channel between the tasks by which an agent passes on the
/// messages of other agents.
type ChannelEnds<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);

/// The part of an agent that passes on messages between the controller and those agents that are
/// connected to the controller through this agent.
struct TreeNode {
    setup: Arc<TreeSetup>,
    router: TreeRouter,
    links: LinkSet,
    uplink: Option<LinkId>,
    /// The agent's own stream; `None` once the controller counts as lost.
    local: Option<LocalStream>,
    from_uplink: ChannelEnds<LinkInput>,
    from_children: ChannelEnds<LinkInput>,
    /// Delivers the link to another agent; after the link to the neighbour above has ended, also
    /// the error if there is no other agent.
    reconnected: ChannelEnds<diagnostic::Result<NeighbourLink>>,
    /// The task that connects to another agent.
    attempt: Option<JoinHandle<()>>,
    /// Whether the agents below are informed that nothing arrives from the controller.
    reports_silence: bool,
    /// When the neighbour above last reported that it hears nothing from the controller; `None` if
    /// it has not, or if it hears the controller again.
    silence_heard_at: Option<Instant>,
    /// Delivers what the agent writes to its standard error.
    stderr: ChannelEnds<String>,
    /// Delivers the connections of agents below.
    accepted: mpsc::Receiver<NeighbourLink>,
    events: mpsc::Receiver<LocalStreamEvent>,
    listener: ChildListener,
}

impl TreeNode {
    /// Passes on messages of the agents that reach the controller through this one, until this
    /// agent ends and is no longer needed, or the controller is lost.
    async fn pass_on_until_unneeded(mut self, mut ending: oneshot::Receiver<()>) {
        let lease = Duration::from_millis(self.setup.link_lease_ms);
        let interval = lease / HEARTBEATS_PER_LEASE;
        let mut next_tick = Instant::now() + interval;
        let mut ends_since: Option<Instant> = None;
        let mut has_left = false;
        while self.local.is_some() {
            self.execute_actions();
            if let Some(since) = ends_since {
                let elapsed = since.elapsed();
                let children = self.links.list_links_except(self.uplink);
                let is_delivered = self.router.is_delivered(self.setup.stream) || elapsed > DELIVERY_TIMEOUT;
                if (is_delivered && children.is_empty()) || elapsed > MAX_LINGER_TIME {
                    break;
                }
                if elapsed > LEAVE_REQUEST_DELAY && !has_left {
                    has_left = true;
                    self.send_leave_requests();
                }
                next_tick = next_tick.min(Instant::now() + END_CHECK_INTERVAL);
            }
            let is_congested = self.links.is_congested(self.uplink);
            tokio::select! {
                Some((link, frame)) = self.from_uplink.1.recv() => self.on_uplink_frame(link, frame),
                Some((link, frame)) = self.from_children.1.recv(), if !is_congested => {
                    self.on_child_frame(link, frame);
                }
                Some(stream) = self.accepted.recv() => self.add_child(stream),
                Some(event) = self.events.recv() => self.handle_local_event(event),
                Some(text) = self.stderr.1.recv() => {
                    self.router.send_to_uplink(TreeFrame::Stderr { stream: self.setup.stream, text });
                }
                Some(result) = self.reconnected.1.recv() => match result {
                    Ok(stream) => self.replace_uplink(stream),
                    Err(error) => self.end_stream_of_own_agent(&error.to_string()),
                },
                _ = &mut ending, if ends_since.is_none() => ends_since = Some(Instant::now()),
                () = sleep_until(next_tick) => {
                    let lateness = next_tick.elapsed();
                    next_tick = Instant::now() + interval;
                    self.send_heartbeats_and_close_silent(lease, lateness);
                }
            }
        }
        self.execute_actions();
        self.send_leave_requests();
        self.links.flush_and_close_all().await;
    }

    /// Sends heartbeats to all neighbours in the tree of agents, and closes the links over which no
    /// message has arrived for the time `lease`. The time for which this process did not run
    /// (`lateness`) does not count as silence, because frames may be waiting. While too many frames
    /// wait for the uplink, the links to the agents below are not read, and not closed.
    fn send_heartbeats_and_close_silent(&mut self, lease: Duration, lateness: Duration) {
        self.links.exclude_pause_from_silence(lateness);
        if self.links.is_congested(self.uplink) {
            self.links.reset_silence_except(self.uplink);
        }
        self.links.send_heartbeats();
        let controller = self.uplink.filter(|_| self.setup.parents.is_empty());
        let mut silent = self.links.list_silent_links(lease);
        if let Some(controller) = controller {
            silent.retain(|link| *link != controller);
            let tolerated = lease * SILENT_CONTROLLER_LEASE_FRACTION.0 / SILENT_CONTROLLER_LEASE_FRACTION.1;
            self.report_controller_silence_below(
                self.links.list_silent_links(tolerated).contains(&controller),
            );
        }
        if self.silence_heard_at.is_some_and(|heard_at| heard_at.elapsed() > lease) {
            self.end_parent_search();
        }
        for link in silent {
            self.links.close_link(link);
            self.handle_closed_link(link);
        }
        self.listener.set_child_count(self.links.list_links_except(self.uplink).len());
    }

    /// Informs the agents that reach the controller through this agent whether this agent still
    /// receives messages of the controller. The agent waits. The agents below are asked at each
    /// heartbeat to connect to another agent. If the controller is suspended, no other one accepts
    /// them.
    fn report_controller_silence_below(&mut self, is_silent: bool) {
        if is_silent != self.reports_silence {
            tracing::info!(target: "tree", stream = self.setup.stream, is_silent, "controller");
            self.reports_silence = is_silent;
            self.listener.set_connected(!is_silent);
        }
        if is_silent {
            for link in self.links.list_links_except(self.uplink) {
                self.links.send_frame(link, TreeFrame::ControllerSilent);
            }
        }
    }

    /// Executes all actions that the message router of this agent has requested, such as sending a
    /// message to a directly connected agent. Handles links that were closed because their queues
    /// were full.
    fn execute_actions(&mut self) {
        loop {
            let (actions, overflowed) = (self.router.take_actions(), self.links.take_overflowed_links());
            if actions.is_empty() && overflowed.is_empty() {
                return;
            }
            actions.into_iter().for_each(|action| self.execute_action(action));
            overflowed.into_iter().for_each(|link| self.handle_closed_link(link));
        }
    }

    /// Executes one action of this agent's message router, such as sending a message to a directly
    /// connected agent or delivering bytes to this agent.
    fn execute_action(&mut self, action: RouterAction) {
        match action {
            RouterAction::Send(link, frame) => self.links.send_frame(link, frame),
            RouterAction::Deliver(_, bytes) => {
                if let Some(local) = &self.local {
                    local.deliver_to_reader(bytes);
                }
            }
            RouterAction::AddSpace(_, count) => {
                self.local.iter().for_each(|local| local.permit_writing(count))
            }
            // The agent reads the end of the stream, and may still write.
            RouterAction::End(_, StreamEnd::Finished) => {
                self.local.iter_mut().for_each(LocalStream::end_reading);
            }
            RouterAction::End(..) => self.end_stream_of_own_agent("the controller has ended the stream"),
            // An agent that is connected with the controller has no other neighbour.
            RouterAction::SetParents(parents) => {
                if !parents.is_empty() && !self.setup.parents.is_empty() {
                    Arc::make_mut(&mut self.setup).parents = parents;
                }
            }
            RouterAction::Attached(_)
            | RouterAction::Detached(_)
            | RouterAction::Ready(..)
            | RouterAction::ShowStderr(..) => {}
        }
    }

    /// Handles the closing of the link to another agent: finds a new way to the controller if the
    /// link led to it, and otherwise forgets the agent.
    fn handle_closed_link(&mut self, link: LinkId) {
        match self.uplink == Some(link) {
            true => self.on_uplink_lost(),
            false => self.router.remove_child(link),
        }
    }

    /// Makes `link` the link over which this agent, and the agents below it in the tree, reach the
    /// controller.
    fn set_uplink(&mut self, link: LinkId) {
        self.uplink = Some(link);
        self.listener.set_connected(true);
        self.router.set_uplink(link);
        self.router.report_accepting_addresses(self.setup.stream, self.listener.addresses().to_vec());
    }

    /// Makes this agent reach the controller through a newly connected agent, and closes its
    /// previous link toward the controller.
    fn replace_uplink(&mut self, stream: NeighbourLink) {
        if let Some(earlier) = self.uplink.take() {
            tracing::info!(target: "tree", stream = self.setup.stream, "left an agent without a controller");
            self.links.close_link(earlier);
            self.router.remove_uplink();
        }
        self.silence_heard_at = None;
        let link = self.links.add_link(stream.input, stream.output, self.from_uplink.0.clone());
        self.set_uplink(link);
    }

    /// Adds a newly connected agent to those that reach the controller through this agent, and
    /// confirms this to the new agent.
    fn add_child(&mut self, stream: NeighbourLink) {
        let link = self.links.add_link(stream.input, stream.output, self.from_children.0.clone());
        self.links.send_frame(link, TreeFrame::Welcome { stream: self.setup.stream });
    }

    /// Handles a frame (message) from the neighbour above in the tree, through which this agent
    /// reaches the controller, or the end of the link to that neighbour.
    fn on_uplink_frame(&mut self, link: LinkId, frame: Option<TreeFrame>) {
        if self.uplink != Some(link) {
            return;
        }
        self.links.record_frame_arrival(link);
        match frame {
            Some(TreeFrame::Leave) | None => self.on_uplink_lost(),
            Some(TreeFrame::ControllerSilent) => self.start_parent_search(),
            Some(frame) => self.router.process_uplink_frame(frame),
        }
    }

    /// Handles a frame (message) from an agent that reaches the controller through this agent, or
    /// the end of the link to that agent.
    fn on_child_frame(&mut self, link: LinkId, frame: Option<TreeFrame>) {
        if !self.links.record_frame_arrival(link) {
            return;
        }
        match frame {
            Some(frame) => self.router.process_child_frame(link, frame),
            None => {
                self.links.close_link(link);
                self.router.remove_child(link);
            }
        }
    }

    /// Passes an event of this agent's control connection to the message router, such as bytes
    /// written to the controller or the number of bytes read.
    fn handle_local_event(&mut self, event: LocalStreamEvent) {
        match event {
            LocalStreamEvent::Written(stream, bytes) => self.router.write_to_stream(stream, &bytes),
            LocalStreamEvent::Closed(stream) => self.router.finish_writing(stream),
            LocalStreamEvent::Consumed(stream, count) => self.router.record_consumed_bytes(stream, count),
        }
    }

    /// Handles the end of the link through which this agent reaches the controller, by connecting
    /// to another agent of the tree in the background. An agent that was connected with the
    /// controller itself has lost the controller.
    fn on_uplink_lost(&mut self) {
        let Some(link) = self.uplink.take() else { return };
        self.links.close_link(link);
        self.listener.set_connected(false);
        self.router.remove_uplink();
        if self.setup.parents.is_empty() {
            return self.end_stream_of_own_agent("the SSH connection has ended");
        }
        self.silence_heard_at = None;
        let (setup, reconnected) = (self.setup.clone(), self.reconnected.0.clone());
        tracing::info!(target: "tree", stream = setup.stream, "connecting to another agent");
        self.start_connecting_to_parent(async move {
            let result = parent_link::reconnect_to_parent(&setup).await;
            // An error means that the node has ended.
            _ = reconnected.send(result).await;
        });
    }

    /// Begins to search for another agent through which this one can reach the controller, because
    /// the neighbour above reports that the controller is silent. Stops when an agent accepts this
    /// one, or when the neighbour above hears the controller again. The present link is used until
    /// then.
    fn start_parent_search(&mut self) {
        self.silence_heard_at = Some(Instant::now());
        if self.attempt.as_ref().is_some_and(|attempt| !attempt.is_finished()) {
            return;
        }
        let (setup, reconnected) = (self.setup.clone(), self.reconnected.0.clone());
        self.start_connecting_to_parent(async move {
            if let Ok(stream) = parent_link::reconnect_to_parent(&setup).await {
                // An error means that the node has ended.
                _ = reconnected.send(Ok(stream)).await;
            }
        });
    }

    /// Stops the search for another agent through which this one can reach the controller, because
    /// the neighbour above receives messages of the controller again.
    fn end_parent_search(&mut self) {
        self.silence_heard_at = None;
        if let Some(attempt) = self.attempt.take() {
            attempt.abort();
        }
    }

    /// Starts the task `attempt`, which connects this agent to another agent in order to reach the
    /// controller, and aborts the task of the previous call.
    fn start_connecting_to_parent(&mut self, attempt: impl Future<Output = ()> + Send + 'static) {
        if let Some(earlier) = self.attempt.replace(tokio::spawn(attempt)) {
            earlier.abort();
        }
    }

    /// Ends this agent's control connection, because no other agent can pass on the agent's
    /// messages to the controller.
    fn end_stream_of_own_agent(&mut self, reason: &str) {
        tracing::info!(target: "tree", stream = self.setup.stream, reason, "lost the controller");
        if let Some(local) = self.local.take() {
            local.fail_further_writes();
        }
    }

    /// Asks the agents below this one in the tree to connect to other agents, because this agent
    /// ends.
    fn send_leave_requests(&mut self) {
        self.listener.set_connected(false);
        for link in self.links.list_links_except(self.uplink) {
            self.links.send_frame(link, TreeFrame::Leave);
        }
    }
}

//! [`TreeHub`]: the controller's connection to the agents of a large job, most of which reach the
//! controller only through other agents that forward their messages.
use super::{
    planner::{ExecutableSource, TreePlace, TreePlanner},
    shared_planner::SharedPlanner,
};
use crate::{
    cluster::{
        ssh::connection_progress::ConnectionProgress,
        transport::{ConnectionStage, RemoteAgentConnection, TreeRoute},
    },
    connection::tree::{
        HEARTBEATS_PER_LEASE, LinkId, LinkInput, LinkSet, LocalStream, LocalStreamEvent, RouterAction,
        StreamHalves, StreamId, TreeFrame, TreeParent, TreeRouter, TreeSetup,
    },
};
use diagnostic::{Diagnostic, codes::host};
use jobspec::{InterfaceSelector, PortSelection};
use protocol::control::{ExitStatus, JobSecretKey};
use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    os::unix::net::UnixStream as StdStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    net::UnixStream,
    sync::mpsc,
    time::{Instant, MissedTickBehavior, sleep_until},
};

/// The largest number of commands, such as "add an agent", that may be queued for the thread that
/// exchanges messages with the tree of agents. The start of an agent has three at most.
const MAX_WAITING_COMMANDS: usize = 1 << 17;
/// The capacity, in entries, of each channel to the controller's thread for the tree of agents,
/// such as the channel for messages of agents.
const CHANNEL_CAPACITY: usize = 1024;
/// The longest time for which the controller's thread for the tree of agents sleeps if no message
/// and no deadline wakes it.
const MAX_SLEEP: Duration = Duration::from_secs(60);
/// The number of lines of an agent's standard error that may wait until the controller has read
/// them. Further ones are dropped.
const STDERR_CAPACITY: usize = 64;
/// The number of bytes of an agent's standard error that are read at once.
const STDERR_CHUNK_BYTES: usize = 4 << 10;

/// A command to the controller's thread for the tree of agents, such as to add an agent or to end
/// an agent's control connection.
enum HubCommand {
    /// Open the stream of an agent that is being started.
    Open(NewAgentStreams),
    /// Use the connection to an agent as a link.
    AddRoot { setup: Box<TreeSetup>, control: StdStream, stderr: StdStream },
    /// End a stream in both directions.
    Abort(StreamId),
}

/// The streams for the control messages and standard error of one agent, which the controller's
/// thread for the tree of agents gets before the agent starts.
struct NewAgentStreams {
    stream: StreamId,
    host: String,
    halves: StreamHalves,
    stderr: DuplexStream,
    progress: Arc<ConnectionProgress>,
    first_agent: Arc<AtomicU64>,
}

/// The controller's connection to the tree of agents, in which a few agents forward the messages
/// between the controller and all other agents. Its thread ends when the hub and all its streams
/// are dropped.
pub(crate) struct TreeHub {
    commands: mpsc::Sender<HubCommand>,
    planner: Arc<SharedPlanner>,
    streams: AtomicU64,
    key: JobSecretKey,
    settings: TreeSettings,
    fetch_token: String,
}

/// The job's settings for the tree of agents: its width, the time limit for silent hosts, and the
/// network interface and ports to use.
#[derive(Clone, Debug)]
pub(crate) struct TreeSettings {
    /// The largest number of agents below the controller, and below each agent.
    pub(crate) width: u32,
    /// How long a host may be silent.
    pub(crate) host_lease: Duration,
    pub(crate) interface: InterfaceSelector,
    pub(crate) ports: PortSelection,
}

/// Returns how long a tree connection may be silent before it counts as broken: half of
/// `host_lease`, the time limit for a host. It is then replaced before the host counts as lost.
fn compute_link_lease(host_lease: Duration) -> Duration {
    host_lease / 2
}

/// The controller's ends of the control connection and of the standard error of an agent that is
/// being started in the tree of agents.
pub(crate) struct StartingAgentStreams {
    pub(crate) id: StreamId,
    pub(crate) halves: StreamHalves,
    pub(crate) stderr: DuplexStream,
    pub(crate) connection: TreeConnection,
}

impl TreeHub {
    /// Starts the controller's thread for the tree of agents, in which a few agents forward the
    /// messages of all other agents to the controller.
    pub(crate) fn start(settings: TreeSettings) -> io::Result<TreeHub> {
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        let token = blake3::keyed_hash(&key, b"launch fetch token").to_hex().to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let planner = Arc::new(SharedPlanner::new(TreePlanner::new(settings.width as usize)));
        let (commands, received) = mpsc::channel(MAX_WAITING_COMMANDS);
        let (shared, host_lease) = (planner.clone(), settings.host_lease);
        let run = move || runtime.block_on(HubLoop::new(shared, host_lease).run_event_loop(received));
        thread::Builder::new().name("tree".into()).spawn(run)?;
        Ok(TreeHub {
            commands,
            planner,
            streams: AtomicU64::new(0),
            key: JobSecretKey(key),
            settings,
            fetch_token: token,
        })
    }

    /// Returns the secret text with which a host requests the executable of launch from another
    /// host.
    pub(crate) fn executable_fetch_token(&self) -> &str {
        &self.fetch_token
    }

    /// Creates the controller's end of the control connection to an agent that is about to be
    /// started on `host`, before the agent is reachable.
    pub(crate) fn open_agent_stream(
        &self,
        host: &str,
        progress: Arc<ConnectionProgress>,
    ) -> StartingAgentStreams {
        let stream = self.streams.fetch_add(1, Ordering::Relaxed) + 1;
        let (near, halves) = StreamHalves::create_pair();
        let (stderr_writer, stderr) = tokio::io::duplex(STDERR_CAPACITY << 10);
        let first_agent = Arc::new(AtomicU64::new(0));
        self.send_command(HubCommand::Open(NewAgentStreams {
            stream,
            host: host.to_owned(),
            halves: near,
            stderr: stderr_writer,
            progress: progress.clone(),
            first_agent: first_agent.clone(),
        }));
        let commands = self.commands.clone();
        let connection = TreeConnection { stream, commands, progress, first_agent };
        StartingAgentStreams { id: stream, halves, stderr, connection }
    }

    /// Decides whether an agent connects to the controller or to another agent, or returns `None`
    /// if no agent can accept it at the moment.
    pub(crate) fn try_place_agent(&self, stream: StreamId) -> Option<TreePlace> {
        self.planner.lock_planner().place_agent(stream)
    }

    /// Waits until an agent can connect to the controller or to another agent of the tree of
    /// agents, and returns which of them to use. Returns `None` if the start was given up.
    pub(crate) fn wait_for_place(
        &self,
        stream: StreamId,
        is_given_up: impl Fn() -> bool,
    ) -> Option<TreePlace> {
        self.planner.wait_for_decision(
            &self.planner.places,
            |planner| planner.place_agent(stream),
            is_given_up,
        )
    }

    /// Lists the agents of the tree of agents through which the agent with the ID `stream` may
    /// reach the controller at the moment. The list is empty for an agent that is connected with
    /// the controller, and if no agent accepts others.
    pub(crate) fn list_possible_parents(&self, stream: StreamId) -> Vec<TreeParent> {
        self.planner.lock_planner().list_possible_parents_of(stream)
    }

    /// Waits until the controller or a host that has the executable of launch is free to send it to
    /// another host. Returns `None` if the start was given up.
    pub(crate) fn wait_for_executable_source(
        &self,
        is_given_up: impl Fn() -> bool,
    ) -> Option<ExecutableSource> {
        self.planner.wait_for_decision(
            &self.planner.sources,
            TreePlanner::reserve_executable_source,
            is_given_up,
        )
    }

    /// Records that `source`, the host or controller that has sent launch's executable to a host,
    /// is free for another transfer.
    pub(crate) fn release_executable_source(&self, source: &ExecutableSource) {
        self.planner.change_and_wake(|planner| planner.release_executable_source(source));
    }

    /// Builds the first message to a new agent in the tree of agents, with the shared key, the
    /// agents to connect to, and the time limits.
    pub(crate) fn build_first_message(
        &self,
        stream: StreamId,
        host: &str,
        parents: Vec<TreeParent>,
    ) -> TreeSetup {
        let host_lease_ms = self.settings.host_lease.as_millis() as u64;
        TreeSetup {
            stream,
            key: self.key.clone(),
            parents,
            host: host.to_owned(),
            interface: self.settings.interface.clone(),
            ports: self.settings.ports,
            link_lease_ms: compute_link_lease(self.settings.host_lease).as_millis() as u64,
            reconnect_ms: host_lease_ms,
            // The agents below a lost neighbour need places, too.
            max_children: self.settings.width.saturating_mul(4),
            fetch_token: self.fetch_token.clone(),
        }
    }

    /// Adds an agent to the tree of agents that is connected to the controller directly, through
    /// the socket `control`. The agent gets its place first. `stderr` carries the agent's standard
    /// error.
    pub(crate) fn add_top_agent(&self, setup: TreeSetup, control: StdStream, stderr: StdStream) {
        self.send_command(HubCommand::AddRoot { setup: Box::new(setup), control, stderr });
    }

    /// Ends the control connection `stream` of an agent that could not be started.
    pub(crate) fn abort_agent_stream(&self, stream: StreamId) {
        self.send_command(HubCommand::Abort(stream));
    }

    /// Sends a command to the thread that connects the controller with the tree of agents.
    fn send_command(&self, command: HubCommand) {
        // An agent whose command does not fit counts as lost after the limit of its first message.
        _ = self.commands.try_send(command);
    }
}

/// The controller's handle of one agent in the tree of agents, with which the controller ends the
/// control connection or queries its state.
pub(crate) struct TreeConnection {
    stream: StreamId,
    commands: mpsc::Sender<HubCommand>,
    progress: Arc<ConnectionProgress>,
    /// See [`TreeRoute::first`].
    first_agent: Arc<AtomicU64>,
}

impl fmt::Debug for TreeConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {} {:?}", self.stream, self.progress)
    }
}

impl RemoteAgentConnection for TreeConnection {
    fn abort(&self) {
        self.progress.abort();
        // An error means that the hub has ended.
        _ = self.commands.try_send(HubCommand::Abort(self.stream));
    }

    fn failure(&self) -> Option<Diagnostic> {
        self.progress.failure()
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        self.progress.exit_status()
    }

    fn stage(&self) -> ConnectionStage {
        self.progress.stage()
    }

    fn shell_output(&self) -> String {
        self.progress.shell_output()
    }

    fn external_client_description(&self) -> Option<String> {
        self.progress.external_client_description()
    }

    fn tree_route(&self) -> Option<TreeRoute> {
        Some(TreeRoute { agent: self.stream, first: self.first_agent.load(Ordering::Relaxed) })
    }
}

/// The controller's end of one agent's control connection, whose bytes other agents in the tree of
/// agents may forward.
struct HubStream {
    host: String,
    local: LocalStream,
    stderr: mpsc::Sender<String>,
    progress: Arc<ConnectionProgress>,
    /// When the way to the agent broke; `None` while there is one, and before the first one.
    detached_at: Option<Instant>,
    /// See [`TreeRoute::first`].
    first_agent: Arc<AtomicU64>,
}

/// The state of the controller's thread for the tree of agents: the sockets to directly connected
/// agents, and the control connections of all agents.
struct HubLoop {
    planner: Arc<SharedPlanner>,
    /// The time for which a stream may have no way through the tree. Afterwards its agent counts as
    /// lost, before its host does.
    max_detached: Duration,
    /// The interval of the signs of life on each link.
    heartbeat_interval: Duration,
    router: TreeRouter,
    links: LinkSet,
    /// The streams of the agents that are connected with the controller.
    roots: HashMap<LinkId, StreamId>,
    streams: HashMap<StreamId, HubStream>,
    /// The streams whose ways broke, in the order in which that happened.
    detached: VecDeque<(Instant, StreamId)>,
    frames: (mpsc::Sender<LinkInput>, mpsc::Receiver<LinkInput>),
    events: (mpsc::Sender<LocalStreamEvent>, mpsc::Receiver<LocalStreamEvent>),
}

impl HubLoop {
    /// Creates the event loop for a tree of agents that contains no agents yet.
    fn new(planner: Arc<SharedPlanner>, host_lease: Duration) -> HubLoop {
        HubLoop {
            planner,
            max_detached: host_lease * 3 / 5,
            heartbeat_interval: compute_link_lease(host_lease) / HEARTBEATS_PER_LEASE,
            router: TreeRouter::new_controller(),
            links: LinkSet::default(),
            roots: HashMap::new(),
            streams: HashMap::new(),
            detached: VecDeque::new(),
            frames: mpsc::channel(CHANNEL_CAPACITY),
            events: mpsc::channel(CHANNEL_CAPACITY),
        }
    }

    /// Exchanges messages between the controller and all agents of the tree of agents, until the
    /// controller drops its ends of the control connections.
    async fn run_event_loop(mut self, mut commands: mpsc::Receiver<HubCommand>) {
        let mut heartbeats = tokio::time::interval(self.heartbeat_interval);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.execute_actions();
            let due = self.detached.front().map(|(since, _)| *since + self.max_detached);
            let due = due.unwrap_or_else(|| Instant::now() + MAX_SLEEP);
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.execute_command(command),
                    None => return,
                },
                Some((link, frame)) = self.frames.1.recv() => self.on_top_agent_frame(link, frame),
                Some(event) = self.events.1.recv() => self.handle_local_event(event),
                () = sleep_until(due) => self.end_detached_streams(),
                _ = heartbeats.tick() => {
                    self.links.send_heartbeats();
                    for (stream, parents) in self.planner.lock_planner().take_parent_updates() {
                        self.router.send_possible_parents(stream, parents);
                    }
                }
            }
        }
    }

    /// Executes one command in the controller's tree thread, such as the command to add an agent.
    fn execute_command(&mut self, command: HubCommand) {
        match command {
            HubCommand::Open(opened) => self.open_stream(opened),
            HubCommand::AddRoot { setup, control, stderr } => {
                let stream = setup.stream;
                if let Err(error) = self.add_top_agent(*setup, control, stderr) {
                    tracing::warn!(target: "tree", stream, %error, "cannot use the connection to an agent");
                    self.end_stream(stream, None);
                }
            }
            HubCommand::Abort(stream) => {
                self.router.abort_stream(stream);
                self.end_stream(stream, None);
            }
        }
    }

    /// Registers the control connection of an agent that is about to be started, before the agent
    /// has joined the tree of agents.
    fn open_stream(&mut self, opened: NewAgentStreams) {
        let NewAgentStreams { stream, host, halves, stderr, progress, first_agent } = opened;
        self.router.open_stream(stream);
        let local = LocalStream::start(stream, halves, self.events.0.clone());
        let (sender, lines) = mpsc::channel(STDERR_CAPACITY);
        tokio::spawn(write_stderr(stderr, lines));
        let state = HubStream { host, local, stderr: sender, progress, detached_at: None, first_agent };
        self.streams.insert(stream, state);
    }

    /// Adds an agent that is connected to the controller directly, through the socket `control`, to
    /// the top of the tree of agents.
    fn add_top_agent(&mut self, setup: TreeSetup, control: StdStream, stderr: StdStream) -> io::Result<()> {
        control.set_nonblocking(true)?;
        stderr.set_nonblocking(true)?;
        if let Some(state) = self.streams.get(&setup.stream) {
            tokio::spawn(forward_stderr(UnixStream::from_std(stderr)?, state.stderr.clone()));
        }
        let (input, output) = UnixStream::from_std(control)?.into_split();
        let link = self.links.add_link(input, output, self.frames.0.clone());
        self.roots.insert(link, setup.stream);
        self.links.send_frame(link, TreeFrame::Setup(Box::new(setup)));
        Ok(())
    }

    /// Handles a message from an agent that is connected to the controller directly, or the end of
    /// the connection to this agent.
    fn on_top_agent_frame(&mut self, link: LinkId, frame: Option<TreeFrame>) {
        if !self.links.record_frame_arrival(link) {
            return;
        }
        match frame {
            Some(frame) => self.router.process_child_frame(link, frame),
            None => {
                self.links.close_link(link);
                self.on_top_agent_link_ended(link);
            }
        }
    }

    /// Handles the end of the direct connection between the controller and an agent of the tree of
    /// agents. The agent cannot connect in another way, so its stream ends. The others may find
    /// another way.
    fn on_top_agent_link_ended(&mut self, link: LinkId) {
        self.router.remove_child(link);
        if let Some(stream) = self.roots.remove(&link) {
            self.router.abort_stream(stream);
            self.end_stream(stream, None);
        }
    }

    /// Handles what the controller has done with an agent's control connection: written bytes, read
    /// bytes, or closed the connection.
    fn handle_local_event(&mut self, event: LocalStreamEvent) {
        match event {
            LocalStreamEvent::Written(stream, bytes) => self.router.write_to_stream(stream, &bytes),
            LocalStreamEvent::Closed(stream) => self.router.finish_writing(stream),
            LocalStreamEvent::Consumed(stream, count) => self.router.record_consumed_bytes(stream, count),
        }
    }

    /// Executes all operations that the message router of the tree of agents has requested, such as
    /// to send a message to an agent. Handles links that were closed because their queues were
    /// full.
    fn execute_actions(&mut self) {
        loop {
            let (actions, overflowed) = (self.router.take_actions(), self.links.take_overflowed_links());
            if actions.is_empty() && overflowed.is_empty() {
                return;
            }
            actions.into_iter().for_each(|action| self.execute_action(action));
            overflowed.into_iter().for_each(|link| self.on_top_agent_link_ended(link));
        }
    }

    /// Executes one operation that the message router of the tree of agents has requested, such as
    /// to send a message to an agent.
    fn execute_action(&mut self, action: RouterAction) {
        match action {
            RouterAction::Send(link, frame) => self.links.send_frame(link, frame),
            RouterAction::Deliver(stream, bytes) => {
                if let Some(state) = self.streams.get(&stream) {
                    state.local.deliver_to_reader(bytes);
                }
            }
            RouterAction::AddSpace(stream, count) => {
                if let Some(state) = self.streams.get(&stream) {
                    state.local.permit_writing(count);
                }
            }
            RouterAction::End(stream, _) => self.end_stream(stream, None),
            RouterAction::Attached(stream) => {
                let link = self.router.find_route(stream);
                let first = link.and_then(|link| self.roots.get(&link).copied());
                if let Some(state) = self.streams.get_mut(&stream) {
                    state.detached_at = None;
                    state.first_agent.store(first.unwrap_or_default(), Ordering::Relaxed);
                }
            }
            RouterAction::Detached(stream) => {
                self.planner.change_and_wake(|planner| planner.mark_detached(stream));
                if let Some(state) = self.streams.get_mut(&stream) {
                    let now = Instant::now();
                    state.detached_at = Some(now);
                    self.detached.push_back((now, stream));
                }
            }
            RouterAction::Ready(stream, addresses) => {
                self.planner.change_and_wake(|planner| planner.mark_accepting_agents(stream, addresses));
                // Lists that were sent while the agent had no way to the controller are lost.
                let parents = self.planner.lock_planner().list_possible_parents_of(stream);
                if !parents.is_empty() {
                    self.router.send_possible_parents(stream, parents);
                }
            }
            // Frames to agents only.
            RouterAction::SetParents(_) => {}
            RouterAction::ShowStderr(stream, text) => {
                if let Some(state) = self.streams.get(&stream) {
                    // Lines for a reader that is too slow are dropped.
                    _ = state.stderr.try_send(text);
                }
            }
        }
    }

    /// Ends the control connections of all agents that the controller has not reached through other
    /// agents for too long, so that these agents count as lost.
    fn end_detached_streams(&mut self) {
        while let Some((since, stream)) = self.detached.front().copied()
            && since.elapsed() >= self.max_detached
        {
            self.detached.pop_front();
            let state = self.streams.get(&stream).filter(|state| state.detached_at == Some(since));
            if let Some(state) = state {
                let name = state.host.clone();
                let message = format!("lost host {name}: its connection to another host of the job ended");
                let error =
                    Diagnostic::error(host::TREE_CONNECTION_LOST, message).with_subject(name).with_remedy();
                self.router.abort_stream(stream);
                self.end_stream(stream, Some(error));
            }
        }
    }

    /// Ends the control connection of one agent in the tree of agents, and records the reason
    /// `failure` unless another reason is recorded already.
    fn end_stream(&mut self, stream: StreamId, failure: Option<Diagnostic>) {
        self.planner.change_and_wake(|planner| planner.remove_agent(stream));
        if let Some(state) = self.streams.remove(&stream) {
            if let Some(failure) = failure {
                state.progress.record_connection_end(Some(failure), None);
            }
            state.local.fail_further_writes();
        }
    }
}

/// Reads the standard error of an agent from its SSH connection, and forwards the text to the
/// channel `lines`.
async fn forward_stderr(mut stream: UnixStream, lines: mpsc::Sender<String>) {
    let mut buffer = vec![0; STDERR_CHUNK_BYTES];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        if lines.send(String::from_utf8_lossy(&buffer[..count]).into_owned()).await.is_err() {
            return;
        }
    }
}

/// Writes the lines of an agent's standard error to the stream that the controller reads.
async fn write_stderr(mut output: DuplexStream, mut lines: mpsc::Receiver<String>) {
    while let Some(line) = lines.recv().await {
        if output.write_all(line.as_bytes()).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;

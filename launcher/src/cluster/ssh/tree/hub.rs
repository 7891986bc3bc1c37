//! [`TreeHub`]: the controller's handle of the tree of agents, with a thread that exchanges
//! messages with all agents.
use super::planner::{ExecutableSource, TreePlace, TreePlanner};
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
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
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

/// The largest number of commands that may be queued for the controller's tree thread, which
/// exchanges messages with the agents. The start of an agent has three at most.
const MAX_WAITING_COMMANDS: usize = 1 << 17;
/// The largest number of entries in each input channel of the controller's tree thread, such as the
/// channel for messages of agents.
const CHANNEL_CAPACITY: usize = 1024;
/// How often a thread that waits for an agent's place in the tree of agents checks whether the
/// agent's start was canceled.
const GIVE_UP_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The longest time for which the thread that connects the controller with the tree of agents waits
/// for its next event.
const MAX_SLEEP: Duration = Duration::from_secs(60);
/// The number of lines of an agent's standard error that may wait until the controller has read
/// them. Further ones are dropped.
const STDERR_CAPACITY: usize = 64;
/// The number of bytes of an agent's standard error that are read at once.
const STDERR_CHUNK_BYTES: usize = 4 << 10;

/// A command to the controller's tree thread, such as to add an agent or to end an agent's control
/// connection.
enum HubCommand {
    /// Open the stream of an agent that is being started.
    Open(NewAgentStreams),
    /// Use the connection to an agent as a link.
    AddRoot { setup: Box<TreeSetup>, control: StdStream, stderr: StdStream },
    /// End a stream in both directions.
    Abort(StreamId),
}

/// The pipes and shared state that the tree thread gets for the control connection and standard
/// error of an agent about to start.
struct NewAgentStreams {
    stream: StreamId,
    host: String,
    halves: StreamHalves,
    stderr: DuplexStream,
    progress: Arc<ConnectionProgress>,
    first_agent: Arc<AtomicU64>,
}

/// The controller's handle of the tree of agents, which passes on the messages between the
/// controller and all agents. Its thread ends when the hub and all its streams are dropped.
pub(crate) struct TreeHub {
    commands: mpsc::Sender<HubCommand>,
    planner: Arc<SharedPlanner>,
    streams: AtomicU64,
    key: JobSecretKey,
    settings: TreeSettings,
    fetch_token: String,
}

/// The settings of the tree of agents that come from the job, such as the largest number of agents
/// that are connected below each agent.
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

/// The [`TreePlanner`] of the controller behind a mutex, with condition variables that wake threads
/// after the planner's state has changed.
///
/// A change wakes one thread of each kind, and a thread that gets its decision wakes the next one.
/// So the work for each decision does not depend on the number of threads.
#[derive(Debug)]
struct SharedPlanner {
    planner: Mutex<TreePlanner>,
    places: Condvar,
    sources: Condvar,
}

impl SharedPlanner {
    /// Locks the planner of the tree of agents, even if another thread has panicked while it held
    /// the lock.
    fn lock_planner(&self) -> MutexGuard<'_, TreePlanner> {
        self.planner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the tree planner's state by calling `change`, and wakes the threads that wait for a
    /// place in the tree or for launch's executable.
    fn change_and_wake(&self, change: impl FnOnce(&mut TreePlanner)) {
        change(&mut self.lock_planner());
        self.places.notify_one();
        self.sources.notify_one();
    }

    /// Waits until the function `decide` returns a result from the tree's planner, or until the
    /// function `is_given_up` returns `true`. Checks `is_given_up` every
    /// [`GIVE_UP_CHECK_INTERVAL`].
    fn wait_for_decision<T>(
        &self,
        changed: &Condvar,
        mut decide: impl FnMut(&mut TreePlanner) -> Option<T>,
        is_given_up: impl Fn() -> bool,
    ) -> Option<T> {
        let mut planner = self.lock_planner();
        loop {
            if is_given_up() {
                changed.notify_one();
                return None;
            }
            if let Some(decision) = decide(&mut planner) {
                changed.notify_one();
                return Some(decision);
            }
            let waited = changed.wait_timeout(planner, GIVE_UP_CHECK_INTERVAL);
            planner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
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
    /// Starts the thread that connects the controller with the tree of agents, in which agents pass
    /// on each other's messages to the controller.
    pub(crate) fn start(settings: TreeSettings) -> io::Result<TreeHub> {
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        let token = blake3::keyed_hash(&key, b"launch fetch token").to_hex().to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let planner = TreePlanner::new(settings.width as usize);
        let planner = Arc::new(SharedPlanner {
            planner: Mutex::new(planner),
            places: Condvar::new(),
            sources: Condvar::new(),
        });
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

    /// Creates the control connection through the tree to an agent that is about to be started on
    /// the host `host`.
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

    /// Assigns an agent its place at the top of the tree or below another agent, or returns `None`
    /// if no place is free now.
    pub(crate) fn try_place_agent(&self, stream: StreamId) -> Option<TreePlace> {
        self.planner.lock_planner().place_agent(stream)
    }

    /// Waits until an agent gets its place at the top of the tree or below another agent. Returns
    /// `None` if the start was given up.
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

    /// Lists the agents of the tree to which the agent with the ID `stream` may connect now. The
    /// list is empty for an agent that is connected with the controller, and if no agent accepts
    /// others.
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

    /// Builds the first message to an agent of the tree, with the tree's key, the agents to connect
    /// to, and the time limits.
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

    /// Adds an agent that is connected to the controller directly, through the socket `control`, to
    /// the top of the tree of agents. The agent gets its place first. `stderr` carries the agent's
    /// standard error.
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

/// The controller's handle of the connection to one agent that is reached through other agents of
/// the tree.
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

/// The controller's end of one agent's control connection, whose bytes travel through the tree of
/// agents.
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

/// The state of the controller's tree thread: its connections to the agents at the top, and the
/// control connections of all agents.
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

    /// Passes on messages between the controller and the agents of the tree until the controller no
    /// longer uses the tree.
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

    /// Registers the control stream of an agent that is about to be started in the tree of agents,
    /// before the agent has connected.
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

    /// Handles a message from an agent at the top of the tree, or the end of the controller's
    /// connection to that agent.
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

    /// Handles the end of the connection to an agent that was connected to the controller directly,
    /// at the top of the tree of agents. The agent cannot connect in another way, so its stream
    /// ends. The others may find another way.
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

    /// Executes all actions that the message router of the tree has requested, such as sending a
    /// message to an agent. Handles links that were closed because their queues were full.
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

    /// Executes one action that the message router of the tree has requested, such as sending a
    /// message to an agent.
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

    /// Ends the control connections of all agents that have been unreachable through the tree for
    /// too long, so that they count as lost.
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

    /// Ends the control connection of one agent of the tree, and records `failure` as the reason
    /// unless another reason is already recorded.
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

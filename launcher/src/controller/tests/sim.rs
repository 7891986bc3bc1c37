//! [`Simulation`]: a seeded discrete-event simulator of a run. It simulates the cores of the
//! controllers and of the agents, the connections between them, workers, the journal, and injected
//! faults, without threads, clock and I/O.
//!
//! A stream never reorders or repeats messages. It delays them, breaks (both ends notice), or goes
//! silent (no end notices).
use super::super::{
    core::{ControllerAction, ControllerCore, ControllerInput, CoreSetup, HostIndex, HostSetup, StopRequest},
    root_cause::AgentEnd,
};
use crate::{
    agent::simulated::{AgentCore, AgentInput},
    cluster::ArrivalLimits,
};
use jobspec::{ControllerLossAction, ids::Rank};
use protocol::{
    control::{ControllerToken, ExitStatus, FromAgent, ToAgent},
    event::Event,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

mod connections;
mod controllers;
mod faults;
mod hosts;
mod journals;
mod rng;

use connections::{ConnectionId, SimConnection, SimRequest};
use controllers::{ControllerIndex, ControllerState, SimController};
pub(super) use faults::InjectedFault;
use hosts::{SimHost, WorkerMessage};
pub(super) use journals::JournalLine;
pub(super) use rng::SimRng;

/// The silence after which an agent on another host counts as lost.
pub(super) const HOST_LEASE: Duration = Duration::from_secs(5);
/// The silence after which an agent counts the controller as lost.
const CONTROLLER_LEASE: Duration = Duration::from_secs(20);
/// How long the workers of a run that outlives its controller continue without one.
const CONTROLLER_TIMEOUT: Duration = Duration::from_secs(180);

/// A job to simulate, with the faults to inject.
#[derive(Clone, Debug)]
pub(super) struct SimScenario {
    pub(super) seed: u64,
    pub(super) hosts: usize,
    /// The number of ranks on each simulated host.
    pub(super) local: u32,
    /// Whether the hosts are other machines than the controller's.
    pub(super) remote: bool,
    pub(super) builtin: bool,
    /// Whether the workers copy their states to memory.
    pub(super) has_memory_copies: bool,
    pub(super) restarts: u32,
    pub(super) min_hosts: usize,
    pub(super) use_hosts: usize,
    /// The faults to inject, with their times.
    pub(super) faults: Vec<(Duration, InjectedFault)>,
    /// How long each worker runs until it finishes with exit code 0. A random delay of up to 20 ms
    /// is added.
    pub(super) work: Duration,
    /// The longest time after which another controller attaches to a run whose controller was lost;
    /// `None` if the run does not outlive its controller.
    pub(super) attach_within: Option<Duration>,
}

/// A scheduled event of the simulation, such as the arrival of a message.
#[derive(Debug)]
enum SimEvent {
    ToAgent(ConnectionId, ToAgent),
    ToController(ConnectionId, FromAgent),
    /// The agent reads the end of a control stream from a controller.
    AgentSeesEnd(ConnectionId),
    /// The controller reads the end of a control stream from an agent.
    ControllerSeesEnd(ConnectionId),
    /// A new agent tries to become the only agent of its host. The duration is the time at which
    /// the agent gives up.
    LockHost(ConnectionId, Duration),
    /// A request to the agent that is alive on a host arrives.
    RequestArrives(SimRequest),
    AgentTick(HostIndex, u32),
    ControllerTick(ControllerIndex),
    /// The simulated planning of the attempt with this number is complete.
    Planned(ControllerIndex, u32),
    /// The journal thread of a controller writes what it has received.
    WriteJournal(ControllerIndex),
    /// The journal thread of a controller takes over the journal.
    TakeOverJournal(ControllerIndex),
    /// The agent of a lost host, which was asked to end, has ended.
    Evicted(ControllerIndex, HostIndex),
    /// The agent of a lost host, which was asked to end, obeys a later controller.
    Replaced(ControllerIndex),
    /// An agent receives an input that comes from its host, such as the end of a worker.
    Feed(HostIndex, u32, AgentInput),
    /// A built-in worker sends a message to its agent.
    WorkerSends(WorkerMessage),
    WorkerEnds {
        host: HostIndex,
        attempt: u32,
        rank: Rank,
        status: ExitStatus,
    },
    InjectedFault(InjectedFault),
    Unfreeze(HostIndex),
    /// A suspended controller continues.
    ResumeController(ControllerIndex),
    /// A controller that was suspended has waited long enough for the message that another
    /// controller has replaced it.
    ControlConfirmed(ControllerIndex),
    /// Another controller attaches if no controller is alive.
    Attach,
}

impl SimScenario {
    /// Builds the settings for the state machine of a controller with this token, which knows the
    /// first `hosts` hosts.
    fn build_setup(&self, token: ControllerToken, hosts: usize) -> CoreSetup {
        CoreSetup {
            hosts: (0..hosts).map(|i| HostSetup { name: format!("h{i}"), remote: self.remote }).collect(),
            builtin: self.builtin,
            has_memory_copies: self.has_memory_copies,
            leave_timeout: (self.builtin && self.has_memory_copies).then_some(Duration::from_secs(2)),
            stop_signal: jobspec::StopSignal::Term,
            sigterm_delay: Duration::ZERO,
            grace: Duration::from_secs(3),
            host_lease: HOST_LEASE,
            token,
            outlives_controller: self.attach_within.is_some(),
            orphan_timeout: match self.loss_action() {
                ControllerLossAction::Stop => CONTROLLER_LEASE + Duration::from_secs(10),
                ControllerLossAction::Continue => CONTROLLER_TIMEOUT + Duration::from_secs(10),
            },
            restarts: self.restarts,
            use_hosts: self.use_hosts,
            use_all_listed: self.use_hosts == self.hosts && self.min_hosts < self.use_hosts,
            min_hosts: self.min_hosts,
            seed: self.seed,
            // Half of the simulated transports reach lost hosts again while the job runs.
            arrival: ArrivalLimits {
                reconnects_while_running: self.seed % 2 == 1,
                ..ArrivalLimits::default()
            },
            run_dir: "/run".into(),
        }
    }

    /// Returns what agents do when the controller is lost.
    fn loss_action(&self) -> ControllerLossAction {
        match self.attach_within {
            Some(_) => ControllerLossAction::Continue,
            None => ControllerLossAction::Stop,
        }
    }

    /// Measures how long the state machine of the first controller takes for its inputs in a
    /// simulation of the scenario. Returns the number of messages and the wall time of the state
    /// machine.
    pub(super) fn measure_core_time(self, limit: Duration) -> (u64, Duration) {
        let mut core = ControllerCore::new(self.build_setup(FIRST_TOKEN, self.hosts));
        let mut world = Simulation::new(self);
        world.recorded = Some(Vec::new());
        world.run_until(limit).expect("runs");
        assert!(world.outcome.is_some() && world.list_running_workers().is_empty());
        core.send_hellos(Duration::ZERO);
        let recorded = world.recorded.take().unwrap_or_default();
        let messages = world.messages;
        drop(world);
        let mut spent = Duration::ZERO;
        // The inputs are copied in small parts. So each of them is in the CPU cache, as is an input
        // that a driver has just created.
        for part in recorded.chunks(64) {
            let part = part.to_vec();
            let started = std::time::Instant::now();
            for (now, input) in part {
                core.handle_input(now, input);
            }
            spent += started.elapsed();
        }
        (messages, spent)
    }
}

/// The token of the first controller.
const FIRST_TOKEN: ControllerToken = ControllerToken { epoch: 1, id: 1 };

/// A running simulation: the controllers, the hosts, and the scheduled events.
pub(super) struct Simulation {
    scenario: SimScenario,
    rng: SimRng,
    now: Duration,
    /// The keys of the scheduled events, by time.
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    /// The scheduled events by key.
    events: BTreeMap<u64, SimEvent>,
    /// The number of events that were scheduled, which is the key of the newest.
    scheduled_events: u64,
    controllers: Vec<SimController>,
    connections: Vec<SimConnection>,
    hosts: Vec<SimHost>,
    /// For each host, by index, whether the list of hosts contains the host.
    listed: Vec<bool>,
    /// The number of agents that were started.
    agents_started: u32,
    /// The journals: that of the first controller, and a copy for each takeover.
    journals: Vec<Vec<JournalLine>>,
    /// The newest step that the workers of each attempt have reported, with the host that reported
    /// it.
    pub(super) steps: BTreeMap<u32, (u64, HostIndex)>,
    /// The events that the controllers reported.
    pub(super) reported: Vec<Event>,
    pub(super) outcome: Option<super::super::core::RunOutcome>,
    /// The simulated time at which the run ended or a controller was killed.
    pub(super) ended_at: Duration,
    /// The number of messages to and from the controllers.
    pub(super) messages: u64,
    /// The inputs that the state machine of the first controller has received, with their times;
    /// `None` if inputs are not recorded.
    recorded: Option<Vec<(Duration, ControllerInput)>>,
    /// The faults that had an effect.
    pub(super) injected: Vec<InjectedFault>,
    /// A description of the invariant that was violated, if one was.
    pub(super) violation: Option<String>,
    /// Why the most recently started controller did not take over the run.
    pub(super) attach_failure: Option<super::super::core::AttachFailure>,
    /// The number of takeovers.
    pub(super) takeovers: usize,
    max_pid: u32,
}

impl Simulation {
    /// Creates a simulation whose agents were just started, and schedules the faults of the
    /// scenario.
    pub(super) fn new(scenario: SimScenario) -> Simulation {
        let mut world = Simulation {
            rng: SimRng::new(scenario.seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            scheduled_events: 0,
            controllers: Vec::new(),
            connections: Vec::new(),
            hosts: (0..scenario.hosts).map(|_| SimHost::default()).collect(),
            listed: vec![true; scenario.hosts],
            agents_started: 0,
            journals: vec![Vec::new()],
            steps: BTreeMap::new(),
            reported: Vec::new(),
            outcome: None,
            ended_at: Duration::ZERO,
            messages: 0,
            recorded: None,
            injected: Vec::new(),
            violation: None,
            attach_failure: None,
            takeovers: 0,
            max_pid: 100,
            scenario,
        };
        world.start_first_controller();
        for (at, fault) in world.scenario.faults.clone() {
            world.schedule_event(at, SimEvent::InjectedFault(fault));
        }
        world
    }

    /// Schedules an event for the time `when`, or for the present time if `when` has passed.
    fn schedule_event(&mut self, when: Duration, event: SimEvent) {
        self.scheduled_events += 1;
        self.events.insert(self.scheduled_events, event);
        self.queue.push(Reverse((when.max(self.now), self.scheduled_events)));
    }

    /// Returns the delay of messages to and from a host, which is constant so that streams keep
    /// their order.
    fn compute_latency(&self, host: HostIndex) -> Duration {
        Duration::from_micros(200 + (self.scenario.seed ^ host as u64) % 3000)
    }

    /// Processes events until the run has ended and no process is left, or until no event is left.
    /// Stops without an error at the first event after the simulated time `limit`. Fails if an
    /// invariant is violated, or if the simulation has too many events to end.
    pub(super) fn run_until(&mut self, limit: Duration) -> Result<(), String> {
        let mut budget = 4_000_000 + 5000 * self.scenario.hosts;
        while let Some(Reverse((when, key))) = self.queue.pop() {
            budget -= 1;
            if budget == 0 {
                return Err(format!("no end in sight at {when:?}"));
            }
            if when > limit {
                return Ok(());
            }
            self.now = when;
            if let Some(event) = self.events.remove(&key) {
                self.process_event(event)?;
            }
            let is_over = self.outcome.is_some() || !self.has_live_controller();
            // Checking all hosts after every event would dominate the run time.
            let check_hosts = is_over && budget.is_multiple_of(1 + self.hosts.len() / 8);
            if check_hosts
                && self.list_running_workers().is_empty()
                && self.hosts.iter().all(|h| h.agents.is_empty() || h.dead)
            {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the host, attempt and rank of each worker that runs on a host that is up.
    pub(super) fn list_running_workers(&self) -> Vec<(HostIndex, u32, Rank)> {
        let hosts = self.hosts.iter().enumerate().filter(|(_, h)| !h.dead);
        hosts
            .flat_map(|(host, h)| {
                let waiting = h.waiting.iter().map(|(rank, (attempt, _))| (*attempt, *rank));
                h.workers.keys().copied().chain(waiting).map(move |(attempt, rank)| (host, attempt, rank))
            })
            .collect()
    }

    /// Returns the lines of the journal.
    pub(super) fn journal_lines(&self) -> &[JournalLine] {
        self.journals.last().map_or(&[], Vec::as_slice)
    }

    // ---- events ----

    /// Returns the host whose processes handle an event.
    fn find_event_host(&self, event: &SimEvent) -> Option<HostIndex> {
        match event {
            SimEvent::ToAgent(id, _) | SimEvent::AgentSeesEnd(id) | SimEvent::LockHost(id, _) => {
                Some(self.connections[*id].host)
            }
            SimEvent::RequestArrives(request) => Some(request.host),
            SimEvent::WorkerSends(message) => Some(message.host),
            SimEvent::AgentTick(host, _) | SimEvent::Feed(host, ..) | SimEvent::WorkerEnds { host, .. } => {
                Some(*host)
            }
            _ => None,
        }
    }

    /// Returns the controller that handles an event.
    fn find_event_controller(&self, event: &SimEvent) -> Option<ControllerIndex> {
        match event {
            SimEvent::ToController(id, _) | SimEvent::ControllerSeesEnd(id) => {
                Some(self.connections[*id].controller)
            }
            SimEvent::ControllerTick(index)
            | SimEvent::Planned(index, _)
            | SimEvent::WriteJournal(index)
            | SimEvent::TakeOverJournal(index)
            | SimEvent::Evicted(index, _)
            | SimEvent::Replaced(index) => Some(*index),
            _ => None,
        }
    }

    /// Returns an event that its host or controller can process now. Otherwise returns `None`, and
    /// keeps the event until the host is no longer frozen or the controller no longer suspended;
    /// events of dead hosts and ended controllers are dropped.
    fn take_deliverable_event(&mut self, event: SimEvent) -> Option<SimEvent> {
        if let Some(host) = self.find_event_host(&event) {
            let host = &mut self.hosts[host];
            if host.dead {
                return None;
            }
            if host.frozen {
                host.delayed.push_back(event);
                return None;
            }
        }
        if let Some(index) = self.find_event_controller(&event) {
            let controller = &mut self.controllers[index];
            match controller.state {
                ControllerState::Ended => return None,
                ControllerState::Suspended { .. } => {
                    controller.delayed.push_back(event);
                    return None;
                }
                ControllerState::Alive => {}
            }
        }
        Some(event)
    }

    /// Processes an event. Drops events of dead hosts and controllers, and delays those of frozen
    /// ones. Fails if an invariant is violated.
    fn process_event(&mut self, event: SimEvent) -> Result<(), String> {
        let Some(event) = self.take_deliverable_event(event) else { return Ok(()) };
        match event {
            SimEvent::ToAgent(id, message) => self.deliver_to_agent(id, AgentInput::Controller(message)),
            SimEvent::AgentSeesEnd(id) => self.deliver_to_agent(id, AgentInput::ControllerLost),
            SimEvent::LockHost(id, until) => self.lock_host(id, until),
            SimEvent::RequestArrives(request) => self.process_request(request),
            SimEvent::AgentTick(host, number) => {
                if let Some(agent) = self.find_agent(host, number) {
                    agent.tick_at = Duration::MAX;
                }
                self.feed_agent(host, number, AgentInput::Tick)
            }
            SimEvent::Feed(host, number, input) => self.feed_agent(host, number, input),
            SimEvent::WorkerSends(message) => self.deliver_worker_message(message),
            SimEvent::WorkerEnds { host, attempt, rank, status } => {
                self.end_worker(host, attempt, rank, status)
            }
            SimEvent::ToController(id, message) => {
                self.deliver_to_controller(id, message);
                Ok(())
            }
            SimEvent::ControllerSeesEnd(id) => {
                let (index, host) = (self.connections[id].controller, self.connections[id].host);
                if self.controllers[index].connections.get(&host) == Some(&id) {
                    let end = AgentEnd::ConnectionEnded(None);
                    self.feed_controller(index, ControllerInput::AgentGone { host, end });
                }
                Ok(())
            }
            SimEvent::ControllerTick(index) => {
                self.controllers[index].tick_at = Duration::MAX;
                self.feed_controller(index, ControllerInput::Tick);
                Ok(())
            }
            SimEvent::Planned(index, attempt) => {
                self.finish_plan(index, attempt);
                Ok(())
            }
            SimEvent::WriteJournal(index) => {
                self.write_queued_items(index);
                Ok(())
            }
            SimEvent::TakeOverJournal(index) => {
                self.take_over_journal(index);
                Ok(())
            }
            SimEvent::Evicted(index, host) => {
                self.feed_controller(index, ControllerInput::Evicted(host));
                Ok(())
            }
            SimEvent::Replaced(index) => {
                self.end_controller(index, ControllerState::Ended);
                Ok(())
            }
            SimEvent::InjectedFault(fault) => self.inject_fault(fault),
            SimEvent::Unfreeze(host) => {
                self.hosts[host].frozen = false;
                let delayed: Vec<SimEvent> = self.hosts[host].delayed.drain(..).collect();
                delayed.into_iter().try_for_each(|event| self.process_event(event))
            }
            SimEvent::ResumeController(index) => self.resume_controller(index),
            SimEvent::ControlConfirmed(index) => self.process_delayed_events(index),
            SimEvent::Attach => {
                self.start_takeover_controller();
                Ok(())
            }
        }
    }
}

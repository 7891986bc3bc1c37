//! [`Simulation`]: a seeded discrete-event simulator of a job. It simulates the cores of the
//! controller and of the agents, the connections between them, workers, and injected faults,
//! without threads, clock and I/O.
//!
//! A stream never reorders or repeats messages. It delays them, breaks (both ends notice), or goes
//! silent (no end notices). The driver drops messages of a replaced agent by its number. The
//! simulator delivers some of them to the core nevertheless, as late messages of an earlier
//! attempt.
use super::super::{
    core::{
        ControllerAction, ControllerCore, ControllerInput, CoreSetup, HostIndex, HostSetup, PlannedWorker,
        StopRequest,
    },
    root_cause::AgentEnd,
};
use crate::agent::simulated::{AgentCore, AgentInput};
use jobspec::ids::Rank;
use protocol::{
    control::{ExitStatus, FromAgent, HostInventory, HostPlan, ToAgent, WorkerPlan},
    event::Event,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

mod faults;
mod hosts;

pub(super) use faults::InjectedFault;
use hosts::{SimAgent, SimHost};

/// The random number generator of a simulation (SplitMix64).
pub(super) struct SimRng(u64);

impl SimRng {
    /// Creates a generator whose numbers depend only on the seed.
    pub(super) fn new(seed: u64) -> Self {
        SimRng(seed)
    }

    /// Returns the next pseudo-random number, uniformly distributed over all `u64`.
    pub(super) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a random number from 0 to `n` - 1, or 0 if `n` is 0.
    pub(super) fn pick_below(&mut self, n: u64) -> u64 {
        self.next_u64() % n.max(1)
    }

    /// Returns `true` with a probability of 1 in `n`.
    fn pick_one_in(&mut self, n: u64) -> bool {
        self.pick_below(n) == 0
    }

    /// Returns a random duration of `from` to `to` milliseconds, both included.
    fn pick_delay(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.pick_below(to - from + 1))
    }
}

/// A job to simulate, with the faults to inject.
#[derive(Clone, Debug)]
pub(super) struct SimScenario {
    pub(super) seed: u64,
    pub(super) hosts: usize,
    /// The number of ranks on each host.
    pub(super) local: u32,
    /// Whether the hosts are other machines than the controller's.
    pub(super) remote: bool,
    pub(super) builtin: bool,
    pub(super) restarts: u32,
    pub(super) min_hosts: usize,
    pub(super) use_hosts: usize,
    /// The faults to inject, with their times.
    pub(super) faults: Vec<(Duration, InjectedFault)>,
    /// How long each worker runs until it finishes with exit code 0. A random delay of up to 20 ms
    /// is added.
    pub(super) work: Duration,
}

/// An event of the simulation. The number of an agent distinguishes it from earlier agents of its
/// host.
#[derive(Debug)]
enum SimEvent {
    ToAgent(HostIndex, u32, ToAgent),
    ToController(HostIndex, u32, FromAgent),
    /// The agent reads the end of its control stream from the controller.
    AgentSeesEnd(HostIndex, u32),
    /// The controller reads the end of the control stream from an agent.
    ControllerSeesEnd(HostIndex, u32),
    AgentTick(HostIndex, u32),
    ControllerTick,
    /// The simulated planning of the attempt with this number is complete.
    Planned(u32),
    /// The agent receives an input from its own host, such as the message of a worker.
    Feed(HostIndex, u32, AgentInput),
    WorkerEnds {
        host: HostIndex,
        attempt: u32,
        rank: Rank,
        status: ExitStatus,
    },
    InjectedFault(InjectedFault),
    Unfreeze(HostIndex),
}

impl SimScenario {
    /// Builds the setup of the controller's core for this scenario.
    fn build_setup(&self) -> CoreSetup {
        CoreSetup {
            hosts: (0..self.hosts)
                .map(|i| HostSetup { name: format!("h{i}"), remote: self.remote })
                .collect(),
            builtin: self.builtin,
            grace: Duration::from_secs(3),
            restarts: self.restarts,
            use_hosts: self.use_hosts,
            use_all_listed: self.use_hosts == self.hosts && self.min_hosts < self.use_hosts,
            min_hosts: self.min_hosts,
            seed: self.seed,
        }
    }

    /// Simulates the scenario, then feeds the recorded inputs to a separate core. Returns the
    /// number of messages and the wall time that this core took.
    pub(super) fn measure_core(self, limit: Duration) -> (u64, Duration) {
        let mut core = ControllerCore::new(self.build_setup());
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

/// A running simulation: the controller's core, the hosts, and the scheduled events.
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
    core: ControllerCore,
    controller_alive: bool,
    hosts: Vec<SimHost>,
    /// For each host, by index, whether the list of hosts contains the host.
    listed: Vec<bool>,
    agents_started: u32,
    /// The plan of each host of the current attempt; empty after the workers were started.
    plans: Vec<(HostIndex, HostPlan)>,
    /// The attempt that is being planned: its number, the restarts so far, and its hosts.
    preparing: Option<(u32, u32, Vec<HostIndex>)>,
    /// The events that the controller reported.
    pub(super) reported: Vec<Event>,
    pub(super) outcome: Option<super::super::core::RunOutcome>,
    /// The simulated time at which the run ended or the controller was killed.
    pub(super) ended_at: Duration,
    /// The number of messages to and from the controller.
    pub(super) messages: u64,
    /// The inputs that the controller's core has received, with their times; `None` if inputs are
    /// not recorded.
    recorded: Option<Vec<(Duration, ControllerInput)>>,
    /// The time of the scheduled tick of the controller; [`Duration::MAX`] if none is scheduled.
    tick_at: Duration,
    /// The faults that had an effect.
    pub(super) injected: Vec<InjectedFault>,
    /// A description of the invariant that was violated, if one was.
    pub(super) violation: Option<String>,
    max_pid: u32,
}

impl Simulation {
    /// Creates a simulation whose agents were just started, and schedules the faults of the
    /// scenario.
    pub(super) fn new(scenario: SimScenario) -> Simulation {
        let setup = scenario.build_setup();
        let mut world = Simulation {
            rng: SimRng::new(scenario.seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            scheduled_events: 0,
            core: ControllerCore::new(setup),
            controller_alive: true,
            hosts: (0..scenario.hosts).map(|_| SimHost::default()).collect(),
            listed: vec![true; scenario.hosts],
            agents_started: 0,
            plans: Vec::new(),
            preparing: None,
            reported: Vec::new(),
            outcome: None,
            ended_at: Duration::ZERO,
            messages: 0,
            recorded: None,
            tick_at: Duration::MAX,
            injected: Vec::new(),
            violation: None,
            max_pid: 100,
            scenario,
        };
        for host in 0..world.scenario.hosts {
            world.start_agent(host);
        }
        let actions = world.core.send_hellos(world.now);
        world.execute_actions(actions);
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
        let mut budget = 2_000_000 + 5000 * self.scenario.hosts;
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
            let is_over = self.outcome.is_some() || !self.controller_alive;
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
            .flat_map(|(host, h)| h.workers.keys().map(move |(attempt, rank)| (host, *attempt, *rank)))
            .collect()
    }

    // ---- events ----

    /// Processes an event. Drops events of dead hosts and delays those of frozen hosts. Fails if an
    /// invariant is violated.
    fn process_event(&mut self, event: SimEvent) -> Result<(), String> {
        let host = match &event {
            SimEvent::ToAgent(n, ..)
            | SimEvent::AgentSeesEnd(n, _)
            | SimEvent::AgentTick(n, _)
            | SimEvent::Feed(n, ..) => Some(*n),
            SimEvent::WorkerEnds { host, .. } => Some(*host),
            _ => None,
        };
        if let Some(host) = host {
            let host = &mut self.hosts[host];
            if host.dead {
                return Ok(());
            }
            if host.frozen {
                host.delayed.push_back(event);
                return Ok(());
            }
        }
        match event {
            SimEvent::ToAgent(host, number, message) => {
                self.feed_agent(host, number, AgentInput::Controller(message))
            }
            SimEvent::AgentSeesEnd(host, number) => self.feed_agent(host, number, AgentInput::ControllerLost),
            SimEvent::AgentTick(host, number) => {
                if let Some(agent) = self.find_agent(host, number) {
                    agent.tick_at = Duration::MAX;
                }
                self.feed_agent(host, number, AgentInput::Tick)
            }
            SimEvent::Feed(host, number, input) => self.feed_agent(host, number, input),
            SimEvent::WorkerEnds { host, attempt, rank, status } => {
                self.end_worker(host, attempt, rank, status)
            }
            SimEvent::ToController(host, number, message) => {
                // The driver would drop messages of a replaced agent. The simulator delivers some
                // of them nevertheless.
                let is_current = self.hosts[host].agents.last().is_none_or(|a| a.number == number);
                if is_current || self.rng.pick_one_in(2) && !matches!(message, FromAgent::Hello { .. }) {
                    self.feed_controller(ControllerInput::Agent(host, message));
                }
                Ok(())
            }
            SimEvent::ControllerSeesEnd(host, number) => {
                if self.hosts[host].agents.last().is_none_or(|a| a.number <= number) {
                    self.feed_controller(ControllerInput::AgentGone {
                        host,
                        end: AgentEnd::ConnectionEnded(None),
                    });
                }
                Ok(())
            }
            SimEvent::ControllerTick => {
                self.tick_at = Duration::MAX;
                self.feed_controller(ControllerInput::Tick);
                Ok(())
            }
            SimEvent::Planned(attempt) => {
                self.finish_plan(attempt);
                Ok(())
            }
            SimEvent::InjectedFault(fault) => self.inject_fault(fault),
            SimEvent::Unfreeze(host) => {
                self.hosts[host].frozen = false;
                let delayed: Vec<SimEvent> = self.hosts[host].delayed.drain(..).collect();
                delayed.into_iter().try_for_each(|event| self.process_event(event))
            }
        }
    }

    // ---- the controller ----

    /// Starts an agent on a host. Does nothing if the host is dead or disconnected.
    fn start_agent(&mut self, host: HostIndex) {
        self.agents_started += 1;
        let number = self.agents_started;
        if self.hosts[host].dead || self.hosts[host].disconnected {
            return; // No process on the host answers.
        }
        let inventory = HostInventory { host: format!("h{host}"), cpus: vec![0], ..HostInventory::default() };
        let core = AgentCore::new(number, inventory);
        let agent =
            SimAgent { number, core, plan: None, is_connected: true, silent: false, tick_at: Duration::MAX };
        self.hosts[host].agents.push(agent);
    }

    /// Gives the controller's core an input and executes the resulting actions. Does nothing once
    /// the run has ended.
    fn feed_controller(&mut self, input: ControllerInput) {
        if !self.controller_alive || self.outcome.is_some() {
            return;
        }
        self.messages += 1;
        if let Some(recorded) = &mut self.recorded {
            recorded.push((self.now, input.clone()));
        }
        let actions = self.core.handle_input(self.now, input);
        self.execute_actions(actions);
    }

    /// Executes the actions of the controller's core.
    fn execute_actions(&mut self, actions: Vec<ControllerAction>) {
        for action in actions {
            match action {
                ControllerAction::Send(host, message) => self.send_to_agent(host, message),
                ControllerAction::Prepare { attempt, restarts, hosts, .. } => {
                    self.preparing = Some((attempt, restarts, hosts));
                    let at = self.now + self.rng.pick_delay(0, 20);
                    self.schedule_event(at, SimEvent::Planned(attempt));
                }
                ControllerAction::StartWorkers => {
                    for (host, plan) in std::mem::take(&mut self.plans) {
                        self.send_to_agent(host, ToAgent::Start(Box::new(plan)));
                    }
                }
                ControllerAction::StartAgent(host) => self.start_agent(host),
                // Workers of the simulation have no collectives.
                ControllerAction::SendPeers { .. } => {}
                ControllerAction::KillAgent(host) | ControllerAction::ReleaseAgent(host) => {
                    self.break_connection(host)
                }
                ControllerAction::Event(event) => {
                    self.check_placement(&event);
                    self.reported.push(event);
                }
                ControllerAction::End(outcome) => {
                    self.outcome = Some(outcome);
                    self.ended_at = self.now;
                    (0..self.hosts.len()).for_each(|host| self.break_connection(host));
                }
                ControllerAction::RecordInventory(..)
                | ControllerAction::Line { .. }
                | ControllerAction::Progress { .. } => {}
            }
        }
        if let Some(due) = self.core.find_next_deadline().filter(|_| self.outcome.is_none())
            && due < self.tick_at
        {
            self.tick_at = due;
            self.schedule_event(due, SimEvent::ControllerTick);
        }
    }

    /// Records a violation if an attempt uses an unlisted host although it has more hosts than
    /// `min_hosts` requires. Ignores events other than the placement of an attempt.
    fn check_placement(&mut self, event: &Event) {
        let Event::Placement { hosts, .. } = event else { return };
        let unlisted = |name: &String| name[1..].parse::<usize>().is_ok_and(|host| !self.listed[host]);
        if hosts.len() > self.scenario.min_hosts && hosts.iter().any(unlisted) {
            self.violation =
                Some(format!("placed on {hosts:?} at {:?}, listed are {:?}", self.now, self.listed));
        }
    }

    /// Schedules the arrival of a message at the newest agent of a host. Drops the message if the
    /// connection is broken or silent, or the host is disconnected.
    fn send_to_agent(&mut self, host: HostIndex, message: ToAgent) {
        self.messages += 1;
        let state = &self.hosts[host];
        let Some(agent) = state.agents.last().filter(|a| a.is_connected && !a.silent) else { return };
        if !state.disconnected {
            let (number, at) = (agent.number, self.now + self.compute_latency(host));
            self.schedule_event(at, SimEvent::ToAgent(host, number, message));
        }
    }

    /// Breaks the stream of a host's newest agent. Both ends notice, unless the host is
    /// disconnected or silent.
    fn break_connection(&mut self, host: HostIndex) {
        let at = self.now + self.compute_latency(host);
        let disconnected = self.hosts[host].disconnected;
        let Some(agent) = self.hosts[host].agents.last_mut().filter(|a| a.is_connected) else { return };
        let (number, is_visible) = (agent.number, !agent.silent && !disconnected);
        agent.is_connected = false;
        if is_visible {
            self.schedule_event(at, SimEvent::AgentSeesEnd(host, number));
        }
        self.schedule_event(at, SimEvent::ControllerSeesEnd(host, number));
    }

    /// Builds the plan of the attempt that is being prepared, and reports to the controller's core
    /// that the plan is ready. Does nothing if another attempt is being prepared.
    fn finish_plan(&mut self, attempt: u32) {
        let Some((number, restarts, hosts)) = self.preparing.take().filter(|(number, ..)| *number == attempt)
        else {
            return;
        };
        let (local, world) = (self.scenario.local, hosts.len() as u32 * self.scenario.local);
        let builtin = self.scenario.builtin;
        let worker = |rank: Rank| WorkerPlan {
            rank,
            local_rank: rank % local,
            local_world: local,
            command: (!builtin).then(|| vec!["true".into()]),
            env: vec![(jobspec::env::TORCHELASTIC_RESTART_COUNT.into(), restarts.to_string())],
            workdir: "/".into(),
            cpus: Vec::new(),
            threads: 1,
            log: "/log".into(),
        };
        let plan = |(at, host): (u32, &HostIndex)| {
            let workers = (at * local..(at + 1) * local).map(worker).collect();
            let job = crate::testing::sample_job();
            let (run, run_dir) = ("r".into(), "/r".into());
            (
                *host,
                HostPlan {
                    job,
                    run,
                    host: String::new(),
                    run_dir,
                    attempt: number,
                    world,
                    workers,
                    grace_ms: 3000,
                    debug_filter: String::new(),
                },
            )
        };
        self.plans = (0..).zip(&hosts).map(plan).collect();
        let planned = |(_, plan): &(HostIndex, HostPlan)| {
            plan.workers.iter().map(|w| PlannedWorker { log: w.log.clone() }).collect()
        };
        let workers = self.plans.iter().map(planned).collect();
        self.feed_controller(ControllerInput::Ready { attempt, workers });
    }
}

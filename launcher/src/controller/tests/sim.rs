//! [`World`]: a seeded discrete-event simulator of a job: the cores of the controller and of the
//! agents, the connections between them, workers, and injected faults. No threads, no clock, no
//! I/O.
//!
//! A stream never reorders or repeats messages. It delays them, breaks (both ends see that), or
//! goes silent (no end sees that). The driver drops messages of a replaced agent by its number;
//! here some of them are delivered to the core nevertheless, as late messages of an earlier
//! attempt.
use super::super::{
    core::{Action, Core, HostIndex, HostSetup, Input, PlannedWorker, Setup, StopRequest},
    root_cause::AgentEnd,
};
use crate::agent::simulated::{Core as AgentCore, Input as AgentInput};
use contract::{
    control::{ExitStatus, FromAgent, HostInventory, HostPlan, ToAgent, WorkerPlan},
    event::Event,
    ids::Rank,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

mod faults;
mod hosts;

pub(super) use faults::InjectedFault;
use hosts::{Agent, SimHost};

/// A SplitMix64 random number generator.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number from 0 to below `n`.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from + 1))
    }
}

/// What is simulated.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) hosts: usize,
    pub(super) local: u32,
    pub(super) remote: bool,
    pub(super) builtin: bool,
    pub(super) restarts: u32,
    pub(super) min_hosts: usize,
    pub(super) use_hosts: usize,
    pub(super) faults: Vec<(Duration, InjectedFault)>,
    /// How long workers run.
    pub(super) work: Duration,
}

/// Something that happens at a point in time.
#[derive(Debug)]
enum SimEvent {
    ToAgent(HostIndex, u32, ToAgent),
    ToController(HostIndex, u32, FromAgent),
    /// The agent reads the end of its stream.
    AgentSeesEnd(HostIndex, u32),
    ControllerSeesEnd(HostIndex, u32),
    AgentTick(HostIndex, u32),
    ControllerTick,
    /// The plan of this attempt is ready.
    Planned(u32),
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

impl Scenario {
    fn setup(&self) -> Setup {
        Setup {
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

    /// Simulates the scenario, then feeds the recorded inputs to a single core. Returns the number
    /// of messages and the time of that core.
    pub(super) fn time_core(self, limit: Duration) -> (u64, Duration) {
        let mut core = Core::new(self.setup());
        let mut world = World::new(self);
        world.recorded = Some(Vec::new());
        world.run(limit).expect("runs");
        assert!(world.outcome.is_some() && world.running_workers().is_empty());
        core.start(Duration::ZERO);
        let recorded = world.recorded.take().unwrap_or_default();
        let messages = world.messages;
        drop(world);
        let mut spent = Duration::ZERO;
        // Copied in small parts, so that each input is in the cache, like one that a driver has
        // just made.
        for part in recorded.chunks(64) {
            let part = part.to_vec();
            let started = std::time::Instant::now();
            for (now, input) in part {
                core.handle(now, input);
            }
            spent += started.elapsed();
        }
        (messages, spent)
    }
}

/// The state of a simulation.
pub(super) struct World {
    scenario: Scenario,
    rng: Rng,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, SimEvent>,
    count: u64,
    core: Core,
    controller_alive: bool,
    hosts: Vec<SimHost>,
    /// Whether the list contains each host.
    listed: Vec<bool>,
    agents_started: u32,
    /// The plans of this attempt with their hosts.
    plans: Vec<(HostIndex, HostPlan)>,
    preparing: Option<(u32, u32, Vec<HostIndex>)>,
    /// The events that the controller reported.
    pub(super) reported: Vec<Event>,
    pub(super) outcome: Option<super::super::core::Outcome>,
    pub(super) ended_at: Duration,
    /// Messages to and from the controller.
    pub(super) messages: u64,
    /// The inputs of the controller's core, if they are recorded.
    recorded: Option<Vec<(Duration, Input)>>,
    tick_at: Duration,
    pub(super) injected: Vec<InjectedFault>,
    /// An invariant that was violated.
    pub(super) violation: Option<String>,
    max_pid: u32,
}

impl World {
    pub(super) fn new(scenario: Scenario) -> World {
        let setup = scenario.setup();
        let mut world = World {
            rng: Rng::new(scenario.seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            count: 0,
            core: Core::new(setup),
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
        let actions = world.core.start(world.now);
        world.execute_actions(actions);
        for (at, fault) in world.scenario.faults.clone() {
            world.schedule(at, SimEvent::InjectedFault(fault));
        }
        world
    }

    fn schedule(&mut self, when: Duration, event: SimEvent) {
        self.count += 1;
        self.events.insert(self.count, event);
        self.queue.push(Reverse((when.max(self.now), self.count)));
    }

    /// The delay of messages of a host, which is constant so that streams keep their order.
    fn latency(&self, host: HostIndex) -> Duration {
        Duration::from_micros(200 + (self.scenario.seed ^ host as u64) % 3000)
    }

    /// Runs until no event is left, or until the limit.
    pub(super) fn run(&mut self, limit: Duration) -> Result<(), String> {
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
                self.process(event)?;
            }
            let is_over = self.outcome.is_some() || !self.controller_alive;
            // Checking all hosts after every event would dominate the run time.
            let check_hosts = is_over && budget.is_multiple_of(1 + self.hosts.len() / 8);
            if check_hosts
                && self.running_workers().is_empty()
                && self.hosts.iter().all(|h| h.agents.is_empty() || h.dead)
            {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The workers that run on hosts that are up: host, attempt and rank.
    pub(super) fn running_workers(&self) -> Vec<(HostIndex, u32, Rank)> {
        let hosts = self.hosts.iter().enumerate().filter(|(_, h)| !h.dead);
        hosts
            .flat_map(|(host, h)| h.workers.keys().map(move |(attempt, rank)| (host, *attempt, *rank)))
            .collect()
    }

    // ---- events ----

    fn process(&mut self, event: SimEvent) -> Result<(), String> {
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
                self.feed(host, number, AgentInput::Controller(message))
            }
            SimEvent::AgentSeesEnd(host, number) => self.feed(host, number, AgentInput::ControllerLost),
            SimEvent::AgentTick(host, number) => {
                if let Some(agent) = self.agent(host, number) {
                    agent.tick_at = Duration::MAX;
                }
                self.feed(host, number, AgentInput::Tick)
            }
            SimEvent::Feed(host, number, input) => self.feed(host, number, input),
            SimEvent::WorkerEnds { host, attempt, rank, status } => {
                self.worker_ends(host, attempt, rank, status)
            }
            SimEvent::ToController(host, number, message) => {
                // The driver would drop messages of a replaced agent; some are delivered
                // nevertheless.
                let is_current = self.hosts[host].agents.last().is_none_or(|a| a.number == number);
                if is_current || self.rng.one_in(2) && !matches!(message, FromAgent::Hello { .. }) {
                    self.input_to_controller(Input::Agent(host, message));
                }
                Ok(())
            }
            SimEvent::ControllerSeesEnd(host, number) => {
                if self.hosts[host].agents.last().is_none_or(|a| a.number <= number) {
                    self.input_to_controller(Input::AgentGone { host, end: AgentEnd::ConnectionEnded(None) });
                }
                Ok(())
            }
            SimEvent::ControllerTick => {
                self.tick_at = Duration::MAX;
                self.input_to_controller(Input::Tick);
                Ok(())
            }
            SimEvent::Planned(attempt) => {
                self.finish_plan(attempt);
                Ok(())
            }
            SimEvent::InjectedFault(fault) => self.inject(fault),
            SimEvent::Unfreeze(host) => {
                self.hosts[host].frozen = false;
                let delayed: Vec<SimEvent> = self.hosts[host].delayed.drain(..).collect();
                delayed.into_iter().try_for_each(|event| self.process(event))
            }
        }
    }

    // ---- the controller ----

    fn start_agent(&mut self, host: HostIndex) {
        self.agents_started += 1;
        let number = self.agents_started;
        if self.hosts[host].dead || self.hosts[host].disconnected {
            return; // no process answers
        }
        let inventory = HostInventory { host: format!("h{host}"), cpus: vec![0], ..HostInventory::default() };
        let core = AgentCore::new(number, inventory);
        let agent = Agent { number, core, plan: None, linked: true, silent: false, tick_at: Duration::MAX };
        self.hosts[host].agents.push(agent);
    }

    fn input_to_controller(&mut self, input: Input) {
        if !self.controller_alive || self.outcome.is_some() {
            return;
        }
        self.messages += 1;
        if let Some(recorded) = &mut self.recorded {
            recorded.push((self.now, input.clone()));
        }
        let actions = self.core.handle(self.now, input);
        self.execute_actions(actions);
    }

    fn execute_actions(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send(host, message) => self.send_to_agent(host, message),
                Action::Prepare { attempt, restarts, hosts, .. } => {
                    self.preparing = Some((attempt, restarts, hosts));
                    let at = self.now + self.rng.ms(0, 20);
                    self.schedule(at, SimEvent::Planned(attempt));
                }
                Action::StartWorkers => {
                    for (host, plan) in std::mem::take(&mut self.plans) {
                        self.send_to_agent(host, ToAgent::Start(Box::new(plan)));
                    }
                }
                Action::StartAgent(host) => self.start_agent(host),
                // Workers of the simulation have no collectives.
                Action::SendPeers { .. } => {}
                Action::KillAgent(host) | Action::ReleaseAgent(host) => self.break_link(host),
                Action::Event(event) => {
                    self.check_placement(&event);
                    self.reported.push(event);
                }
                Action::End(outcome) => {
                    self.outcome = Some(outcome);
                    self.ended_at = self.now;
                    (0..self.hosts.len()).for_each(|host| self.break_link(host));
                }
                Action::RecordInventory(..) | Action::Line { .. } | Action::Progress { .. } => {}
            }
        }
        if let Some(due) = self.core.deadline().filter(|_| self.outcome.is_none())
            && due < self.tick_at
        {
            self.tick_at = due;
            self.schedule(due, SimEvent::ControllerTick);
        }
    }

    /// Checks that a host that is not listed is used only where it is needed.
    fn check_placement(&mut self, event: &Event) {
        let Event::Placement { hosts, .. } = event else { return };
        let unlisted = |name: &String| name[1..].parse::<usize>().is_ok_and(|host| !self.listed[host]);
        if hosts.len() > self.scenario.min_hosts && hosts.iter().any(unlisted) {
            self.violation =
                Some(format!("placed on {hosts:?} at {:?}, listed are {:?}", self.now, self.listed));
        }
    }

    fn send_to_agent(&mut self, host: HostIndex, message: ToAgent) {
        self.messages += 1;
        let state = &self.hosts[host];
        let Some(agent) = state.agents.last().filter(|a| a.linked && !a.silent) else { return };
        if !state.disconnected {
            let (number, at) = (agent.number, self.now + self.latency(host));
            self.schedule(at, SimEvent::ToAgent(host, number, message));
        }
    }

    /// Breaks a stream. Both ends see that, unless the host is disconnected or silent.
    fn break_link(&mut self, host: HostIndex) {
        let at = self.now + self.latency(host);
        let disconnected = self.hosts[host].disconnected;
        let Some(agent) = self.hosts[host].agents.last_mut().filter(|a| a.linked) else { return };
        let (number, is_visible) = (agent.number, !agent.silent && !disconnected);
        agent.linked = false;
        if is_visible {
            self.schedule(at, SimEvent::AgentSeesEnd(host, number));
        }
        self.schedule(at, SimEvent::ControllerSeesEnd(host, number));
    }

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
            env: vec![(contract::env::TORCHELASTIC_RESTART_COUNT.into(), restarts.to_string())],
            workdir: "/".into(),
            cpus: Vec::new(),
            threads: 1,
            log: "/log".into(),
        };
        let plan = |(at, host): (u32, &HostIndex)| {
            let workers = (at * local..(at + 1) * local).map(worker).collect();
            let job = crate::testing::job();
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
                },
            )
        };
        self.plans = (0..).zip(&hosts).map(plan).collect();
        let planned = |(_, plan): &(HostIndex, HostPlan)| {
            plan.workers.iter().map(|w| PlannedWorker { log: w.log.clone() }).collect()
        };
        let workers = self.plans.iter().map(planned).collect();
        self.input_to_controller(Input::Ready { attempt, workers });
    }
}

//! A seeded simulator of a whole job: the controller's core and the agents' cores, with links between them, workers,
//! and faults. A discrete-event loop; no thread, no clock, no I/O.
//!
//! A stream never reorders or repeats what it carries; it delays, breaks (both ends see it) or goes silent (nobody sees
//! anything). Messages of an agent that was replaced still arrive at the driver, which knows them by their number; here
//! they are given to the core now and then all the same, as a repeated message of an old epoch.
use super::super::core::{Core, HostSetup, Input, HostIndex, Output, Planned, Setup, Stop};
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

pub(super) use faults::Fault;
use hosts::{Agent, Host};

/// SplitMix64.
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Chance(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// From 0 to below `n`.
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

#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub(super) seed: u64,
    pub(super) hosts: usize,
    pub(super) local: u32,
    pub(super) remote: bool,
    pub(super) builtin: bool,
    pub(super) restarts: u32,
    pub(super) min_hosts: usize,
    pub(super) use_hosts: usize,
    pub(super) faults: Vec<(Duration, Fault)>,
    /// How long workers work.
    pub(super) work: Duration,
}

#[derive(Debug)]
enum What {
    ToAgent(HostIndex, u32, ToAgent),
    ToController(HostIndex, u32, FromAgent),
    /// The agent sees the end of its stream.
    AgentSeesEnd(HostIndex, u32),
    ControllerSeesEnd(HostIndex, u32),
    AgentTick(HostIndex, u32),
    ControllerTick,
    Planned(u32),
    Feed(HostIndex, u32, AgentInput),
    WorkerEnds {
        node: HostIndex,
        epoch: u32,
        rank: Rank,
        status: ExitStatus,
    },
    Fault(Fault),
    Thaw(HostIndex),
}

impl Scene {
    fn setup(&self) -> Setup {
        Setup {
            hosts: (0..self.hosts)
                .map(|i| HostSetup { name: format!("h{i}"), remote: self.remote })
                .collect(),
            builtin: self.builtin,
            grace: Duration::from_secs(3),
            restarts: self.restarts,
            use_hosts: self.use_hosts,
            use_all: self.use_hosts == self.hosts && self.min_hosts < self.use_hosts,
            min_hosts: self.min_hosts,
            seed: self.seed,
        }
    }

    /// Plays it, then tells a controller alone the same again: how many messages there were, and how long that one took.
    pub(super) fn alone(self, limit: Duration) -> (u64, Duration) {
        let mut core = Core::new(self.setup());
        let mut world = World::new(self);
        world.heard = Some(Vec::new());
        world.run(limit).expect("runs");
        assert!(world.outcome.is_some() && world.living().is_empty());
        core.start(Duration::ZERO);
        let heard = world.heard.take().unwrap_or_default();
        let messages = world.messages;
        drop(world);
        let mut spent = Duration::ZERO;
        // As from a driver, each message has just been made: reading a long record from memory isn't the controller's time.
        for part in heard.chunks(64) {
            let part = part.to_vec();
            let began = std::time::Instant::now();
            for (now, input) in part {
                core.handle(now, input);
            }
            spent += began.elapsed();
        }
        (messages, spent)
    }
}

pub(super) struct World {
    scene: Scene,
    chance: Chance,
    now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, What>,
    count: u64,
    core: Core,
    controller_alive: bool,
    hosts: Vec<Host>,
    /// By host: the list names it.
    listed: Vec<bool>,
    numbers: u32,
    /// The plan of this epoch, by node.
    plans: Vec<(HostIndex, HostPlan)>,
    preparing: Option<(u32, u32, Vec<HostIndex>)>,
    pub(super) told: Vec<Event>,
    pub(super) outcome: Option<super::super::core::Outcome>,
    pub(super) ended_at: Duration,
    /// Messages to and from the controller.
    pub(super) messages: u64,
    /// What the controller's core was told, where that is kept.
    heard: Option<Vec<(Duration, Input)>>,
    tick_at: Duration,
    pub(super) injected: Vec<Fault>,
    /// What must not be.
    pub(super) wrong: Option<String>,
    max_pid: u32,
}

impl World {
    pub(super) fn new(scene: Scene) -> World {
        let setup = scene.setup();
        let mut world = World {
            chance: Chance::new(scene.seed),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            count: 0,
            core: Core::new(setup),
            controller_alive: true,
            hosts: (0..scene.hosts).map(|_| Host::default()).collect(),
            listed: vec![true; scene.hosts],
            numbers: 0,
            plans: Vec::new(),
            preparing: None,
            told: Vec::new(),
            outcome: None,
            ended_at: Duration::ZERO,
            messages: 0,
            heard: None,
            tick_at: Duration::MAX,
            injected: Vec::new(),
            wrong: None,
            max_pid: 100,
            scene,
        };
        for node in 0..world.scene.hosts {
            world.start_agent(node);
        }
        let outputs = world.core.start(world.now);
        world.carry_out(outputs);
        for (at, fault) in world.scene.faults.clone() {
            world.at(at, What::Fault(fault));
        }
        world
    }

    fn at(&mut self, when: Duration, what: What) {
        self.count += 1;
        self.events.insert(self.count, what);
        self.queue.push(Reverse((when.max(self.now), self.count)));
    }

    /// On a stream: never before what was sent on it earlier, since all take the same time in one direction.
    fn latency(&self, node: HostIndex) -> Duration {
        Duration::from_micros(200 + (self.scene.seed ^ node as u64) % 3000)
    }

    /// Until nothing is left that could happen, or the limit.
    pub(super) fn run(&mut self, limit: Duration) -> Result<(), String> {
        let mut left = 2_000_000 + 5000 * self.scene.hosts;
        while let Some(Reverse((when, key))) = self.queue.pop() {
            left -= 1;
            if left == 0 {
                return Err(format!("it goes round in circles at {when:?}"));
            }
            if when > limit {
                return Ok(());
            }
            self.now = when;
            if let Some(what) = self.events.remove(&key) {
                self.happen(what)?;
            }
            let over = self.outcome.is_some() || !self.controller_alive;
            // Looking at all hosts at every event would take longer than everything else.
            let look = over && left.is_multiple_of(1 + self.hosts.len() / 8);
            if look && self.living().is_empty() && self.hosts.iter().all(|h| h.agents.is_empty() || h.dead) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Workers that live on hosts that do.
    pub(super) fn living(&self) -> Vec<(HostIndex, u32, Rank)> {
        let hosts = self.hosts.iter().enumerate().filter(|(_, h)| !h.dead);
        hosts.flat_map(|(node, h)| h.workers.keys().map(move |(e, r)| (node, *e, *r))).collect()
    }

    // ---- what happens ----

    fn happen(&mut self, what: What) -> Result<(), String> {
        let node = match &what {
            What::ToAgent(n, ..) | What::AgentSeesEnd(n, _) | What::AgentTick(n, _) | What::Feed(n, ..) => {
                Some(*n)
            }
            What::WorkerEnds { node, .. } => Some(*node),
            _ => None,
        };
        if let Some(node) = node {
            let host = &mut self.hosts[node];
            if host.dead {
                return Ok(());
            }
            if host.frozen {
                host.held.push_back(what);
                return Ok(());
            }
        }
        match what {
            What::ToAgent(node, number, message) => self.feed(node, number, AgentInput::Controller(message)),
            What::AgentSeesEnd(node, number) => self.feed(node, number, AgentInput::ControllerGone),
            What::AgentTick(node, number) => {
                if let Some(agent) = self.agent(node, number) {
                    agent.tick_at = Duration::MAX;
                }
                self.feed(node, number, AgentInput::Tick)
            }
            What::Feed(node, number, input) => self.feed(node, number, input),
            What::WorkerEnds { node, epoch, rank, status } => self.worker_ends(node, epoch, rank, status),
            What::ToController(node, number, message) => {
                // The driver drops what a replaced agent says; the core is tried with it all the same.
                let current = self.hosts[node].agents.last().is_none_or(|a| a.number == number);
                if current || self.chance.one_in(2) && !matches!(message, FromAgent::Hello { .. }) {
                    self.tell_controller(Input::Agent(node, message));
                }
                Ok(())
            }
            What::ControllerSeesEnd(node, number) => {
                if self.hosts[node].agents.last().is_none_or(|a| a.number <= number) {
                    self.tell_controller(Input::AgentGone {
                        node,
                        how: "is lost: its stream has ended".into(),
                    });
                }
                Ok(())
            }
            What::ControllerTick => {
                self.tick_at = Duration::MAX;
                self.tell_controller(Input::Tick);
                Ok(())
            }
            What::Planned(epoch) => {
                self.planned(epoch);
                Ok(())
            }
            What::Fault(fault) => self.fault(fault),
            What::Thaw(node) => {
                self.hosts[node].frozen = false;
                let held: Vec<What> = self.hosts[node].held.drain(..).collect();
                held.into_iter().try_for_each(|what| self.happen(what))
            }
        }
    }

    // ---- the controller ----

    fn start_agent(&mut self, node: HostIndex) {
        self.numbers += 1;
        let number = self.numbers;
        if self.hosts[node].dead || self.hosts[node].cut {
            return; // nobody answers
        }
        let found = HostInventory { host: format!("h{node}"), cpus: vec![0], ..HostInventory::default() };
        let core = AgentCore::new(number, found);
        let agent = Agent { number, core, plan: None, linked: true, silent: false, tick_at: Duration::MAX };
        self.hosts[node].agents.push(agent);
    }

    fn tell_controller(&mut self, input: Input) {
        if !self.controller_alive || self.outcome.is_some() {
            return;
        }
        self.messages += 1;
        if let Some(heard) = &mut self.heard {
            heard.push((self.now, input.clone()));
        }
        let outputs = self.core.handle(self.now, input);
        self.carry_out(outputs);
    }

    fn carry_out(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Tell(node, message) => self.tell(node, message),
                Output::Prepare { epoch, restarts, nodes, .. } => {
                    self.preparing = Some((epoch, restarts, nodes));
                    let at = self.now + self.chance.ms(0, 20);
                    self.at(at, What::Planned(epoch));
                }
                Output::Start => {
                    for (node, plan) in std::mem::take(&mut self.plans) {
                        self.tell(node, ToAgent::Start(Box::new(plan)));
                    }
                }
                Output::StartAgent(node) => self.start_agent(node),
                // workers of the simulation have no collectives
                Output::Introduce { .. } => {}
                Output::KillAgent(node) | Output::ReleaseAgent(node) => self.break_link(node),
                Output::Event(event) => {
                    self.placed(&event);
                    self.told.push(event);
                }
                Output::End(outcome) => {
                    self.outcome = Some(outcome);
                    self.ended_at = self.now;
                    (0..self.hosts.len()).for_each(|node| self.break_link(node));
                }
                Output::Found(..) | Output::Line { .. } | Output::Progress { .. } => {}
            }
        }
        if let Some(due) = self.core.deadline().filter(|_| self.outcome.is_none())
            && due < self.tick_at
        {
            self.tick_at = due;
            self.at(due, What::ControllerTick);
        }
    }

    /// A host that isn't listed is used only where it is needed.
    fn placed(&mut self, event: &Event) {
        let Event::Placed { hosts, .. } = event else { return };
        let unlisted = |name: &String| name[1..].parse::<usize>().is_ok_and(|node| !self.listed[node]);
        if hosts.len() > self.scene.min_hosts && hosts.iter().any(unlisted) {
            self.wrong = Some(format!("placed on {hosts:?} at {:?}, listed are {:?}", self.now, self.listed));
        }
    }

    fn tell(&mut self, node: HostIndex, message: ToAgent) {
        self.messages += 1;
        let host = &self.hosts[node];
        let Some(agent) = host.agents.last().filter(|a| a.linked && !a.silent) else { return };
        if !host.cut {
            let (number, at) = (agent.number, self.now + self.latency(node));
            self.at(at, What::ToAgent(node, number, message));
        }
    }

    /// Both ends see the end of the stream, unless nothing passes.
    fn break_link(&mut self, node: HostIndex) {
        let at = self.now + self.latency(node);
        let cut = self.hosts[node].cut;
        let Some(agent) = self.hosts[node].agents.last_mut().filter(|a| a.linked) else { return };
        let (number, passes) = (agent.number, !agent.silent && !cut);
        agent.linked = false;
        if passes {
            self.at(at, What::AgentSeesEnd(node, number));
        }
        self.at(at, What::ControllerSeesEnd(node, number));
    }

    fn planned(&mut self, epoch: u32) {
        let Some((of, restarts, nodes)) = self.preparing.take().filter(|(of, ..)| *of == epoch) else {
            return;
        };
        let (local, world) = (self.scene.local, nodes.len() as u32 * self.scene.local);
        let builtin = self.scene.builtin;
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
        let plan = |(at, node): (u32, &HostIndex)| {
            let workers = (at * local..(at + 1) * local).map(worker).collect();
            let job = crate::testing::job();
            let (run, run_dir) = ("r".into(), "/r".into());
            (
                *node,
                HostPlan {
                    job,
                    run,
                    host: String::new(),
                    run_dir,
                    epoch: of,
                    world,
                    workers,
                    grace_ms: 3000,
                },
            )
        };
        self.plans = (0..).zip(&nodes).map(plan).collect();
        let planned = |(_, plan): &(HostIndex, HostPlan)| {
            plan.workers.iter().map(|w| Planned { log: w.log.clone() }).collect()
        };
        let workers = self.plans.iter().map(planned).collect();
        self.tell_controller(Input::Ready { epoch, workers });
    }
}

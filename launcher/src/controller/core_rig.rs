//! A controller's core in tests, with hosts that say what they are told to, and what it puts out.
use super::super::*;
use contract::control::VERSION;

pub(super) const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// `nodes` hosts on this machine.
pub(super) fn setup(nodes: u32, builtin: bool) -> Setup {
    let host = |n: u32| HostSetup { name: format!("n{n}"), remote: false };
    Setup {
        hosts: (0..nodes).map(host).collect(),
        builtin,
        grace: ms(3000),
        restarts: 0,
        use_hosts: nodes as usize,
        use_all: false,
        min_hosts: nodes as usize,
        seed: 1,
    }
}

pub(super) struct Rig {
    pub(super) core: Core,
    pub(super) now: Duration,
    pub(super) local: u32,
}

impl Rig {
    pub(super) fn new(nodes: u32, local: u32, builtin: bool) -> Rig {
        Rig::with(setup(nodes, builtin), local)
    }

    pub(super) fn with(setup: Setup, local: u32) -> Rig {
        let nodes = setup.hosts.len();
        let mut core = Core::new(setup);
        assert_eq!(core.start(ms(0)).len(), nodes);
        Rig { core, now: ms(0), local }
    }

    pub(super) fn running(nodes: u32, local: u32, builtin: bool) -> Rig {
        Rig::run(setup(nodes, builtin), local)
    }

    /// All hosts join and all ranks start.
    pub(super) fn run(setup: Setup, local: u32) -> Rig {
        let nodes = setup.hosts.len();
        let mut rig = Rig::with(setup, local);
        let mut prepared = Vec::new();
        for node in 0..nodes {
            prepared.extend(rig.hello(node).into_iter().filter_map(|o| match o {
                Output::Prepare { nodes, .. } => Some(nodes),
                _ => None,
            }));
        }
        assert_eq!(prepared.len(), 1, "one plan");
        let outputs = rig.ready();
        assert!(outputs.contains(&Output::Start), "{outputs:?}");
        rig.started();
        rig
    }

    pub(super) fn feed(&mut self, input: Input) -> Vec<Output> {
        self.core.handle(self.now, input)
    }

    pub(super) fn hello(&mut self, node: HostIndex) -> Vec<Output> {
        let found = HostInventory { host: format!("h{node}"), cpus: vec![0, 1, 2, 3], ..HostInventory::default() };
        self.feed(Input::Agent(node, FromAgent::Hello { version: VERSION, pid: 9, found }))
    }

    /// The plan of the hosts that were chosen.
    pub(super) fn ready(&mut self) -> Vec<Output> {
        let worker = |i| Planned { log: format!("/run/{i}.log").into() };
        let workers = vec![(0..self.local).map(worker).collect(); self.core.members.len()];
        self.feed(Input::Ready { epoch: self.core.epoch, workers })
    }

    /// Every rank of this epoch starts.
    pub(super) fn started(&mut self) {
        for (rank, node) in self.core.workers.iter().map(|w| w.node).enumerate().collect::<Vec<_>>() {
            let (epoch, rank) = (self.core.epoch, rank as Rank);
            self.feed(Input::Agent(node, FromAgent::Started { epoch, rank, pid: 100 + rank }));
        }
    }

    /// A message of the agent that runs `rank`.
    pub(super) fn agent(&mut self, rank: Rank, message: FromAgent) -> Vec<Output> {
        let node = self.core.workers.get(rank as usize).map_or((rank / self.local) as usize, |w| w.node);
        self.feed(Input::Agent(node, message))
    }

    pub(super) fn exit(&mut self, rank: Rank, status: ExitStatus) -> Vec<Output> {
        let tail = vec![format!("last of {rank}")];
        self.agent(
            rank,
            FromAgent::Exited {
                epoch: self.core.epoch,
                oom: false,
                rank,
                pid: 100 + rank,
                status,
                tail,
                error: None,
            },
        )
    }

    pub(super) fn fatal(&mut self, rank: Rank, exit: WorkerExit, text: &str) -> Vec<Output> {
        self.agent(rank, FromAgent::Fatal { epoch: self.core.epoch, rank, exit, message: text.into() })
    }

    pub(super) fn gone(&mut self, node: HostIndex) -> Vec<Output> {
        self.feed(Input::Agent(node, FromAgent::WorkersEnded { epoch: self.core.epoch }))
    }

    pub(super) fn at(&mut self, now: Duration) -> Vec<Output> {
        self.now = now;
        self.feed(Input::Tick)
    }
}

pub(super) fn failure(outputs: &[Output]) -> Option<(Option<Rank>, &str, &[String])> {
    outputs.iter().find_map(|o| match o {
        Output::Event(Event::Failure { rank, cause, tail, .. }) => Some((*rank, cause.as_str(), &tail[..])),
        _ => None,
    })
}

pub(super) fn kills(outputs: &[Output]) -> Vec<(HostIndex, u64)> {
    let kill = |o: &Output| match o {
        Output::Tell(node, ToAgent::Kill { grace_ms, .. }) => Some((*node, *grace_ms)),
        _ => None,
    };
    outputs.iter().filter_map(kill).collect()
}

pub(super) fn end(outputs: &[Output]) -> Option<&Outcome> {
    outputs.iter().find_map(|o| if let Output::End(outcome) = o { Some(outcome) } else { None })
}

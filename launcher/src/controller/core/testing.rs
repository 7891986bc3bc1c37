//! [`Rig`]: a core with hosts whose messages tests write.
use super::*;
use contract::{control::VERSION, event::FailureReport};
use diagnostic::codes;

pub(super) const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A setup with `hosts` hosts on this machine.
pub(super) fn setup(hosts: u32, builtin: bool) -> Setup {
    let host = |n: u32| HostSetup { name: format!("n{n}"), remote: false };
    Setup {
        hosts: (0..hosts).map(host).collect(),
        builtin,
        grace: ms(3000),
        restarts: 0,
        use_hosts: hosts as usize,
        use_all_listed: false,
        min_hosts: hosts as usize,
        seed: 1,
    }
}

pub(super) struct CoreHarness {
    pub(super) core: Core,
    pub(super) now: Duration,
    pub(super) local: u32,
}

impl CoreHarness {
    /// A core whose agents were just started.
    pub(super) fn new(hosts: u32, local: u32, builtin: bool) -> CoreHarness {
        CoreHarness::with_setup(setup(hosts, builtin), local)
    }

    pub(super) fn with_setup(setup: Setup, local: u32) -> CoreHarness {
        let hosts = setup.hosts.len();
        let mut core = Core::new(setup);
        assert_eq!(core.start(ms(0)).len(), hosts);
        CoreHarness { core, now: ms(0), local }
    }

    /// A core whose hosts have joined and whose ranks run.
    pub(super) fn running(hosts: u32, local: u32, builtin: bool) -> CoreHarness {
        CoreHarness::run(setup(hosts, builtin), local)
    }

    /// Lets all hosts join and all ranks start.
    pub(super) fn run(setup: Setup, local: u32) -> CoreHarness {
        let hosts = setup.hosts.len();
        let mut rig = CoreHarness::with_setup(setup, local);
        let mut prepared = Vec::new();
        for host in 0..hosts {
            prepared.extend(rig.hello(host).into_iter().filter_map(|o| match o {
                Action::Prepare { hosts, .. } => Some(hosts),
                _ => None,
            }));
        }
        assert_eq!(prepared.len(), 1, "one plan");
        let actions = rig.ready();
        assert!(actions.contains(&Action::StartWorkers), "{actions:?}");
        rig.started();
        rig
    }

    pub(super) fn feed(&mut self, input: Input) -> Vec<Action> {
        self.core.handle(self.now, input)
    }

    pub(super) fn hello(&mut self, host: HostIndex) -> Vec<Action> {
        let inventory =
            HostInventory { host: format!("h{host}"), cpus: vec![0, 1, 2, 3], ..HostInventory::default() };
        self.feed(Input::Agent(host, FromAgent::Hello { version: VERSION, pid: 9, inventory }))
    }

    /// The plan of the hosts that were selected is ready.
    pub(super) fn ready(&mut self) -> Vec<Action> {
        let worker = |i| PlannedWorker { log: format!("/run/{i}.log").into() };
        let workers = vec![(0..self.local).map(worker).collect(); self.core.members.len()];
        self.feed(Input::Ready { attempt: self.core.attempt, workers })
    }

    /// Every rank of this attempt has started.
    pub(super) fn started(&mut self) {
        for (rank, host) in self.core.workers.iter().map(|w| w.host).enumerate().collect::<Vec<_>>() {
            let (attempt, rank) = (self.core.attempt, rank as Rank);
            self.feed(Input::Agent(host, FromAgent::Started { attempt, rank, pid: 100 + rank }));
        }
    }

    /// A message of the agent that runs `rank`.
    pub(super) fn agent(&mut self, rank: Rank, message: FromAgent) -> Vec<Action> {
        let host = self.core.workers.get(rank as usize).map_or((rank / self.local) as usize, |w| w.host);
        self.feed(Input::Agent(host, message))
    }

    pub(super) fn exit(&mut self, rank: Rank, status: ExitStatus) -> Vec<Action> {
        let tail = vec![format!("last of {rank}")];
        self.agent(
            rank,
            FromAgent::Exited {
                attempt: self.core.attempt,
                oom: false,
                rank,
                pid: 100 + rank,
                status,
                tail,
                error: None,
                gpu: None,
            },
        )
    }

    /// The final report of a worker.
    pub(super) fn fatal(&mut self, rank: Rank, exit: WorkerExit) -> Vec<Action> {
        self.agent(
            rank,
            FromAgent::Fatal {
                attempt: self.core.attempt,
                rank,
                exit,
                diagnostic: Diagnostic::error(codes::run::INTERNAL, "the loss is NaN"),
                gpu: None,
            },
        )
    }

    /// No worker is left on a host.
    pub(super) fn workers_ended(&mut self, host: HostIndex) -> Vec<Action> {
        self.feed(Input::Agent(host, FromAgent::WorkersEnded { attempt: self.core.attempt }))
    }

    pub(super) fn at(&mut self, now: Duration) -> Vec<Action> {
        self.now = now;
        self.feed(Input::Tick)
    }
}

/// The failure that the actions report.
pub(super) fn failure(actions: &[Action]) -> Option<&FailureReport> {
    actions.iter().find_map(|action| match action {
        Action::Event(Event::Failure(failure)) => Some(&**failure),
        _ => None,
    })
}

/// The rank and reason of the failure that the actions report.
pub(super) fn failure_reason(actions: &[Action]) -> Option<(Option<Rank>, FailureReason)> {
    failure(actions).map(|failure| (failure.rank, failure.reason.clone()))
}

/// The kill messages: host and grace period, milliseconds.
pub(super) fn kills(actions: &[Action]) -> Vec<(HostIndex, u64)> {
    let kill = |action: &Action| match action {
        Action::Send(host, ToAgent::Kill { grace_ms, .. }) => Some((*host, *grace_ms)),
        _ => None,
    };
    actions.iter().filter_map(kill).collect()
}

/// The end of the run, if it is among the actions.
pub(super) fn outcome(actions: &[Action]) -> Option<&Outcome> {
    actions.iter().find_map(|action| if let Action::End(outcome) = action { Some(outcome) } else { None })
}

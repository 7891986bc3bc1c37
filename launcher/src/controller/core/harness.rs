//! [`CoreHarness`]: the controller's state machine with simulated agents, for tests.
use super::*;
use crate::cluster::ArrivalLimits;
use diagnostic::codes;
use jobspec::ids::Rank;
use protocol::{
    control::{ControllerToken, HostInventory, PROTOCOL_VERSION, RendezvousRequest},
    event::FailureReport,
};

/// The port that the simulated agents report for the rendezvous.
pub(super) const PORT: u16 = 4000;

/// Returns a duration of `n` milliseconds.
pub(super) const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Creates the request that an agent bind any free port as the rendezvous of the workers of a
/// built-in training.
pub(super) fn create_rendezvous_request(attempt: u32) -> RendezvousRequest {
    RendezvousRequest {
        attempt,
        address: std::net::Ipv4Addr::LOCALHOST.into(),
        port: 0,
        store: false,
        clients: 1,
        allowed: Vec::new(),
        coordinator: false,
        ports: jobspec::PortSelection::Any,
    }
}

/// Creates test settings of a controller whose job needs all of its `hosts` local hosts and is
/// never restarted.
pub(super) fn create_setup(hosts: u32, builtin: bool) -> CoreSetup {
    let host = |n: u32| HostSetup { name: format!("n{n}"), remote: false };
    CoreSetup {
        hosts: (0..hosts).map(host).collect(),
        builtin,
        has_memory_copies: false,
        leave_timeout: None,
        stop_signal: jobspec::StopSignal::Term,
        sigterm_delay: Duration::ZERO,
        grace: millis(3000),
        host_lease: millis(5000),
        token: ControllerToken { epoch: 1, id: 1 },
        outlives_controller: false,
        orphan_timeout: millis(70_000),
        restarts: 0,
        use_hosts: hosts as usize,
        use_all_listed: false,
        min_hosts: hosts as usize,
        seed: 1,
        arrival: ArrivalLimits::default(),
        run_dir: "/run".into(),
    }
}

/// The controller's state machine (core) for tests, with the current time and the number of ranks
/// per host.
pub(super) struct CoreHarness {
    pub(super) core: ControllerCore,
    pub(super) now: Duration,
    /// The number of ranks on each host.
    pub(super) local: u32,
}

impl CoreHarness {
    /// Creates the state machine of a controller whose agents were just started. `local` is the
    /// number of ranks on each host.
    pub(super) fn new(hosts: u32, local: u32, builtin: bool) -> CoreHarness {
        CoreHarness::new_with_setup(create_setup(hosts, builtin), local)
    }

    /// Creates the state machine of a controller with the settings `setup`, whose agents were just
    /// started.
    pub(super) fn new_with_setup(setup: CoreSetup, local: u32) -> CoreHarness {
        let hosts = setup.hosts.len();
        let mut core = ControllerCore::new(setup);
        assert_eq!(core.send_hellos(millis(0)).len(), hosts);
        CoreHarness { core, now: millis(0), local }
    }

    /// Creates the state machine of a controller whose hosts have all joined and whose ranks all
    /// run.
    pub(super) fn new_with_running_workers(hosts: u32, local: u32, builtin: bool) -> CoreHarness {
        CoreHarness::new_running_with_setup(create_setup(hosts, builtin), local)
    }

    /// Creates the state machine of a controller with the settings `setup`, lets all hosts join,
    /// and starts all ranks. Panics if the state machine does not prepare exactly one attempt.
    pub(super) fn new_running_with_setup(setup: CoreSetup, local: u32) -> CoreHarness {
        let hosts = setup.hosts.len();
        let mut harness = CoreHarness::new_with_setup(setup, local);
        let mut prepared = Vec::new();
        for host in 0..hosts {
            prepared.extend(harness.send_hello(host).into_iter().filter_map(|o| match o {
                ControllerAction::Prepare { hosts, .. } => Some(hosts),
                _ => None,
            }));
        }
        assert_eq!(prepared.len(), 1, "one plan");
        let actions = harness.report_plan_ready();
        assert!(actions.contains(&ControllerAction::StartWorkers { port: PORT }), "{actions:?}");
        harness.report_workers_started();
        harness
    }

    /// Passes an input to the state machine at the current time, and returns the requested actions.
    pub(super) fn feed_input(&mut self, input: ControllerInput) -> Vec<ControllerAction> {
        self.core.handle_input(self.now, input)
    }

    /// Passes the first message (hello) of a host's agent to the state machine, and returns the
    /// requested actions.
    pub(super) fn send_hello(&mut self, host: HostIndex) -> Vec<ControllerAction> {
        let inventory =
            HostInventory { host: format!("h{host}"), cpus: vec![0, 1, 2, 3], ..HostInventory::default() };
        self.feed_input(ControllerInput::Agent(
            host,
            FromAgent::Hello { version: PROTOCOL_VERSION, pid: 9, stream: 40 + host as u64, inventory },
        ))
    }

    /// Passes two inputs to the state machine: that the plan of the workers is ready, and that an
    /// agent has bound the rendezvous port. Returns the requested actions.
    pub(super) fn report_plan_ready(&mut self) -> Vec<ControllerAction> {
        let worker = |i| PlannedWorker { log: format!("/run/{i}.log").into() };
        let workers = vec![(0..self.local).map(worker).collect(); self.core.members.len()];
        let attempt = self.core.attempt;
        let bind = create_rendezvous_request(attempt);
        let first = self.core.members.first().copied().unwrap_or(0);
        let requested = self.feed_input(ControllerInput::Planned { attempt, workers, bind: bind.clone() });
        assert_eq!(requested, [ControllerAction::Send(first, ToAgent::Bind(bind))]);
        self.feed_input(ControllerInput::Agent(first, FromAgent::Bound { attempt, port: Ok(PORT) }))
    }

    /// Reports to the state machine that the processes of all ranks have started. Discards the
    /// requested actions.
    pub(super) fn report_workers_started(&mut self) {
        for (rank, host) in self.core.workers.iter().map(|w| w.host).enumerate().collect::<Vec<_>>() {
            let (attempt, rank) = (self.core.attempt, rank as Rank);
            self.feed_input(ControllerInput::Agent(
                host,
                FromAgent::Started { attempt, rank, pid: 100 + rank },
            ));
        }
    }

    /// Passes a message from the agent that runs `rank` to the state machine, and returns the
    /// requested actions.
    pub(super) fn send_from_agent(&mut self, rank: Rank, message: FromAgent) -> Vec<ControllerAction> {
        let host = self.core.workers.get(rank as usize).map_or((rank / self.local) as usize, |w| w.host);
        self.feed_input(ControllerInput::Agent(host, message))
    }

    /// Reports to the state machine that the process of `rank` ended with this status, and returns
    /// the requested actions.
    pub(super) fn report_worker_exit(&mut self, rank: Rank, status: ExitStatus) -> Vec<ControllerAction> {
        let tail = vec![format!("last of {rank}")];
        self.send_from_agent(
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
                timeout: None,
                lost_connection: None,
            },
        )
    }

    /// Passes a worker's final report to the state machine, and returns the requested actions. The
    /// worker is about to exit with the code `exit`.
    pub(super) fn send_final_report(&mut self, rank: Rank, exit: WorkerExit) -> Vec<ControllerAction> {
        self.send_from_agent(
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

    /// Reports to the state machine that no worker is left on a host, and returns the requested
    /// actions.
    pub(super) fn report_workers_ended(&mut self, host: HostIndex) -> Vec<ControllerAction> {
        self.feed_input(ControllerInput::Agent(host, FromAgent::WorkersEnded { attempt: self.core.attempt }))
    }

    /// Sets the time to `now`, lets the state machine process its deadlines, and returns the
    /// requested actions.
    pub(super) fn tick_at(&mut self, now: Duration) -> Vec<ControllerAction> {
        self.now = now;
        self.feed_input(ControllerInput::Tick)
    }
}

/// Returns the failure that the actions report, if there is one.
pub(super) fn find_failure(actions: &[ControllerAction]) -> Option<&FailureReport> {
    actions.iter().find_map(|action| match action {
        ControllerAction::Event(Event::Failure(failure)) => Some(&**failure),
        _ => None,
    })
}

/// Returns the rank and the reason of the failure that the actions report.
pub(super) fn find_failure_reason(actions: &[ControllerAction]) -> Option<(Option<Rank>, FailureReason)> {
    find_failure(actions).map(|failure| (failure.rank, failure.reason.clone()))
}

/// Returns the host and the grace period, in milliseconds, of each kill message among the actions.
pub(super) fn find_kill_messages(actions: &[ControllerAction]) -> Vec<(HostIndex, u64)> {
    let kill = |action: &ControllerAction| match action {
        ControllerAction::Send(host, ToAgent::Kill { grace_ms, .. }) => Some((*host, *grace_ms)),
        _ => None,
    };
    actions.iter().filter_map(kill).collect()
}

/// Returns the result of the run, if it is among the actions.
pub(super) fn find_outcome(actions: &[ControllerAction]) -> Option<&RunOutcome> {
    actions
        .iter()
        .find_map(|action| if let ControllerAction::End(outcome) = action { Some(outcome) } else { None })
}

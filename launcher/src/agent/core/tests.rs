//! Tests of the agent's state machine.
use super::*;
use jobspec::ControllerLossAction;
use protocol::{
    control::{ControllerToken, ExitStatus, FromWorker, JobSecretKey, PROTOCOL_VERSION, ToAgent, WorkerPlan},
    event::WorkerPhase,
    exit::WorkerExit,
};

mod hang_detection;
mod kept_workers;
mod leases;
mod random_events;
mod stop_signals;
mod worker_ends;

/// Returns a plan of one host with one worker for each element of `builtin`. `true` stands for a
/// built-in worker, `false` for a program.
fn make_plan(builtin: &[bool]) -> HostPlan {
    let world = builtin.len() as u32;
    let workers = builtin.iter().enumerate().map(|(rank, builtin)| WorkerPlan {
        rank: rank as u32,
        local_rank: rank as u32,
        local_world: world,
        command: (!builtin).then(|| vec!["true".into()]),
        wrapper: Vec::new(),
        env: Vec::new(),
        workdir: "/".into(),
        cpus: Vec::new(),
        threads: 1,
        log: format!("/tmp/rank-{rank}.log").into(),
    });
    HostPlan {
        job: crate::testing::sample_job(),
        run: "run".into(),
        host: "host".into(),
        run_dir: "/tmp/run".into(),
        attempt: 0,
        batch_job: None,
        continues_batch_job: false,
        world,
        workers: workers.collect(),
        hang_detection: None,
        debug_filter: String::new(),
    }
}

/// The time of silence after which the agents of these tests count their controller as lost.
const CONTROLLER_LEASE: Duration = Duration::from_secs(60);

/// Returns, for tests, the terms on which an agent obeys the first controller of a run.
fn make_terms(on_controller_loss: ControllerLossAction) -> SupervisionTerms {
    SupervisionTerms {
        run: "run".into(),
        host: "host".into(),
        key: JobSecretKey([1; 32]),
        token: ControllerToken { epoch: 1, id: 5 },
        number: 1,
        host_lease_ms: 5000,
        controller_lease_ms: CONTROLLER_LEASE.as_millis() as u64,
        on_controller_loss,
        controller_timeout_ms: 900_000,
    }
}

/// Returns the first message (hello) of a controller that only sends probes to the agent, as
/// `launch check` does.
fn make_hello(version: u32) -> ToAgent {
    ToAgent::Hello { version, terms: None }
}

/// Creates the state machine of an agent on a host without hardware.
fn create_core() -> AgentCore {
    AgentCore::new(7, 70, HostInventory::default())
}

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// An agent's state machine with a fake driver, in which every spawn succeeds immediately.
struct TestAgent {
    core: AgentCore,
    now: Duration,
    next_pid: u32,
}

impl TestAgent {
    /// Creates an agent, and starts the workers of a plan from [`make_plan`].
    fn start(builtin: &[bool]) -> TestAgent {
        TestAgent::start_with_action(builtin, ControllerLossAction::Stop)
    }

    /// Creates an agent whose reaction to the loss of the controller is `on_controller_loss`, and
    /// starts the workers of a plan from [`make_plan`].
    fn start_with_action(builtin: &[bool], on_controller_loss: ControllerLossAction) -> TestAgent {
        TestAgent::start_plan(make_plan(builtin), on_controller_loss)
    }

    /// Creates an agent whose reaction to the loss of the controller is `on_controller_loss`, and
    /// starts the workers of `plan`.
    fn start_plan(plan: HostPlan, on_controller_loss: ControllerLossAction) -> TestAgent {
        let mut agent = TestAgent { core: create_core(), now: ms(0), next_pid: 100 };
        let terms = Some(Box::new(make_terms(on_controller_loss)));
        agent.receive_message(ToAgent::Hello { version: PROTOCOL_VERSION, terms });
        agent.receive_message(ToAgent::Memo("memo".into()));
        agent.receive_message(ToAgent::Start(Box::new(plan)));
        agent
    }

    /// Passes an input to the state machine, and answers the preparations, spawns and drains that
    /// the state machine requests. Returns all requested actions. The reports to the controller are
    /// the last ones.
    fn feed_input(&mut self, input: AgentInput) -> Vec<AgentAction> {
        let mut actions = Vec::new();
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for action in self.core.handle_input(self.now, input) {
                match &action {
                    AgentAction::PrepareWorkers { plan, .. } => {
                        inputs.push_back(AgentInput::Prepared { attempt: plan.attempt });
                    }
                    AgentAction::Spawn(index) => {
                        let pid = self.next_pid;
                        self.next_pid += 1;
                        inputs.push_back(AgentInput::Spawned { rank: *index as u32, pid });
                    }
                    AgentAction::Rejoin(index) => {
                        let rank = *index as u32;
                        inputs.push_back(AgentInput::Rejoined { rank, pid: 100 + rank });
                    }
                    AgentAction::DrainOutput(rank) => inputs.push_back(AgentInput::Drained {
                        rank: *rank,
                        tail: vec!["last".into()],
                        error: Some("why".into()),
                        timeout: None,
                    }),
                    _ => {}
                }
                actions.push(action);
            }
        }
        while let Some(FromAgent::Report { message, .. }) = self.core.take_next_report(self.now) {
            actions.push(AgentAction::Send(*message));
        }
        actions
    }

    /// Passes a message of the controller to the state machine and returns the requested actions.
    fn receive_message(&mut self, message: ToAgent) -> Vec<AgentAction> {
        self.feed_input(AgentInput::Controller(message))
    }

    /// Advances the clock to `now`, passes a tick to the state machine, and returns the requested
    /// actions.
    fn advance_to(&mut self, now: Duration) -> Vec<AgentAction> {
        self.now = now;
        self.feed_input(AgentInput::Tick)
    }

    /// Reports the end of a worker's process and control connection to the state machine. Returns
    /// the requested actions.
    fn end_worker(&mut self, rank: Rank, status: ExitStatus) -> Vec<AgentAction> {
        let mut actions = self.feed_input(AgentInput::WorkerConnectionEnded { rank, error: None });
        actions.extend(self.feed_input(AgentInput::WorkerExited { rank, status, oom: false, gpu: None }));
        actions
    }
}

/// Returns the messages to the controller among the requested actions, without heartbeats.
fn select_controller_messages<'a>(commands: &'a [AgentAction]) -> Vec<&'a FromAgent> {
    let send = |c: &'a AgentAction| match c {
        AgentAction::Send(message) if *message != FromAgent::Heartbeat => Some(message),
        _ => None,
    };
    commands.iter().filter_map(send).collect()
}

/// Returns the messages to workers among the requested actions, each with the rank of the worker.
fn select_worker_messages(commands: &[AgentAction]) -> Vec<(Rank, &ToWorker)> {
    commands
        .iter()
        .filter_map(|c| if let AgentAction::SendToWorker(r, m) = c { Some((*r, m)) } else { None })
        .collect()
}

/// Returns the signals to workers among the requested actions, each with the rank of the worker.
fn select_signals(commands: &[AgentAction]) -> Vec<(Rank, ProcessGroupSignal)> {
    commands
        .iter()
        .filter_map(|c| if let AgentAction::Signal(r, e) = c { Some((*r, *e)) } else { None })
        .collect()
}

fn has_sweep(commands: &[AgentAction]) -> bool {
    commands.iter().any(|c| matches!(c, AgentAction::Sweep { .. }))
}

/// Returns the exit code if the exit of the agent is among the requested actions.
fn find_exit_code(commands: &[AgentAction]) -> Option<u8> {
    commands.iter().find_map(|c| if let AgentAction::Exit(code) = c { Some(*code) } else { None })
}

#[test]
fn a_job_without_failures_runs_to_its_end() {
    let mut agent = TestAgent::start(&[false, false]);
    let ended = agent.end_worker(0, ExitStatus::Code(0));
    let tail = vec!["last".to_owned()];
    assert_eq!(
        select_controller_messages(&ended),
        [&FromAgent::Exited {
            attempt: 0,
            rank: 0,
            pid: 100,
            status: ExitStatus::Code(0),
            oom: false,
            tail,
            error: None,
            gpu: None,
            timeout: None,
            lost_connection: None,
        }]
    );
    assert!(!has_sweep(&ended), "rank 1 still runs");
    assert!(has_sweep(&agent.end_worker(1, ExitStatus::Code(0))));
    assert_eq!(
        select_controller_messages(&agent.feed_input(AgentInput::Swept { left: vec![] })),
        [&FromAgent::WorkersEnded { attempt: 0 }]
    );
    assert_eq!(find_exit_code(&agent.feed_input(AgentInput::ControllerLost)), Some(0));
}

#[test]
fn a_hello_of_another_version_and_a_missing_hello_are_rejected() {
    for message in [make_hello(PROTOCOL_VERSION + 1), ToAgent::Save { attempt: 0, signal: 10 }] {
        let mut core = create_core();
        let commands = core.handle_input(ms(0), AgentInput::Controller(message));
        assert!(matches!(select_controller_messages(&commands)[..], [FromAgent::Failed { rank: None, .. }]));
        assert_eq!(find_exit_code(&commands), Some(1));
    }
}

#[test]
fn inconsistent_plans_are_rejected() {
    let mut twice = make_plan(&[false, false]);
    twice.workers[1].rank = 0;
    let mut outside = make_plan(&[false]);
    outside.workers[0].rank = 5;
    for bad in [twice, outside] {
        let mut core = create_core();
        core.handle_input(ms(0), AgentInput::Controller(make_hello(PROTOCOL_VERSION)));
        assert_eq!(
            find_exit_code(&core.handle_input(ms(0), AgentInput::Controller(ToAgent::Start(Box::new(bad))))),
            Some(1)
        );
    }
}

#[test]
fn after_a_failed_start_no_further_worker_is_started() {
    let mut core = create_core();
    core.handle_input(ms(0), AgentInput::Controller(make_hello(PROTOCOL_VERSION)));
    let commands = core.handle_input(
        ms(0),
        AgentInput::Controller(ToAgent::Start(Box::new(make_plan(&[false, false, false])))),
    );
    assert!(matches!(commands[..], [AgentAction::PrepareWorkers { .. }]));
    let commands = core.handle_input(ms(0), AgentInput::Prepared { attempt: 0 });
    assert!(matches!(commands[..], [AgentAction::Spawn(0)]));
    let commands = core.handle_input(ms(0), AgentInput::Spawned { rank: 0, pid: 5 });
    assert!(matches!(
        commands[..],
        [AgentAction::Send(FromAgent::Started { attempt: 0, rank: 0, pid: 5 }), AgentAction::Spawn(1)]
    ));
    let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "no such program");
    let commands = core.handle_input(ms(0), AgentInput::SpawnFailed { rank: 1, diagnostic });
    assert!(matches!(commands[..], [AgentAction::Send(FromAgent::Failed { rank: Some(1), .. })]));
    let kill = ToAgent::Kill { attempt: 0, stacks: false, reason: "no".into(), grace_ms: 0, leave_ms: None };
    assert_eq!(
        select_signals(&core.handle_input(ms(0), AgentInput::Controller(kill))),
        [(0, ProcessGroupSignal::Kill)]
    );
}

#[test]
fn a_worker_that_starts_after_a_kill_request_is_ended_in_the_grace_period() {
    for (stacks, signals) in [(false, &[(1, ProcessGroupSignal::Terminate)][..]), (true, &[])] {
        let mut core = create_core();
        core.handle_input(ms(0), AgentInput::Controller(make_hello(PROTOCOL_VERSION)));
        core.handle_input(ms(0), AgentInput::Controller(ToAgent::Start(Box::new(make_plan(&[false; 3])))));
        core.handle_input(ms(0), AgentInput::Prepared { attempt: 0 });
        core.handle_input(ms(0), AgentInput::Spawned { rank: 0, pid: 5 });
        let kill =
            ToAgent::Kill { attempt: 0, stacks, reason: "no".into(), grace_ms: 30_000, leave_ms: None };
        core.handle_input(ms(1), AgentInput::Controller(kill));
        let commands = core.handle_input(ms(2), AgentInput::Spawned { rank: 1, pid: 6 });
        assert_eq!(select_signals(&commands), signals);
        assert!(!commands.iter().any(|command| matches!(command, AgentAction::Spawn(_))), "{commands:?}");
        let commands = core.handle_input(ms(3), AgentInput::StacksWritten { evidence: Vec::new() });
        let ended = [(0, ProcessGroupSignal::Terminate), (1, ProcessGroupSignal::Terminate)];
        assert_eq!(select_signals(&commands), if stacks { &ended[..] } else { &[] });
    }
}

#[test]
fn workers_with_evidence_end_when_the_request_is_repeated_or_after_a_timeout() {
    for repeated in [true, false] {
        let mut core = create_core();
        core.handle_input(ms(0), AgentInput::Controller(make_hello(PROTOCOL_VERSION)));
        core.handle_input(ms(0), AgentInput::Controller(ToAgent::Start(Box::new(make_plan(&[false])))));
        core.handle_input(ms(0), AgentInput::Prepared { attempt: 0 });
        core.handle_input(ms(0), AgentInput::Spawned { rank: 0, pid: 5 });
        let kill = |stacks| {
            let reason = "no".into();
            let kill = ToAgent::Kill { attempt: 0, stacks, reason, grace_ms: 30_000, leave_ms: None };
            AgentInput::Controller(kill)
        };
        core.handle_input(ms(1), kill(true));
        let evidence = vec![protocol::hang::RankEvidence::default()];
        let commands = core.handle_input(ms(2), AgentInput::StacksWritten { evidence });
        assert!(matches!(commands[..], [AgentAction::Send(FromAgent::HangEvidence { .. })]), "{commands:?}");
        let ended = if repeated {
            core.handle_input(ms(3), kill(false))
        } else {
            assert_eq!(select_signals(&core.handle_input(STACKS_TIMEOUT, AgentInput::Tick)), []);
            core.handle_input(STACKS_TIMEOUT + ms(1), AgentInput::Tick)
        };
        assert_eq!(select_signals(&ended), [(0, ProcessGroupSignal::Terminate)], "repeated: {repeated}");
    }
}

#[test]
fn messages_to_a_worker_are_held_back_until_it_is_initialized() {
    let mut agent = TestAgent::start(&[true]);
    assert!(
        select_worker_messages(&agent.receive_message(ToAgent::Stop { attempt: 0, deadline_ms: None }))
            .is_empty()
    );
    assert!(
        select_worker_messages(&agent.receive_message(ToAgent::Save { attempt: 0, signal: 10 })).is_empty()
    );
    let hello = FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 };
    let commands = agent.feed_input(AgentInput::Worker { rank: 0, message: hello });
    let messages = select_worker_messages(&commands);
    assert!(
        matches!(messages[..], [(0, ToWorker::Init(_)), (0, ToWorker::Stop), (0, ToWorker::Save)]),
        "{messages:?}"
    );
}

#[test]
fn a_worker_hello_with_another_version_or_pid_is_a_failure() {
    for hello in [
        FromWorker::Hello { version: PROTOCOL_VERSION + 1, pid: 100 },
        FromWorker::Hello { version: PROTOCOL_VERSION, pid: 1 },
    ] {
        let mut agent = TestAgent::start(&[true]);
        let commands = agent.feed_input(AgentInput::Worker { rank: 0, message: hello });
        assert!(matches!(
            select_controller_messages(&commands)[..],
            [FromAgent::Failed { rank: Some(0), .. }]
        ));
    }
}

#[test]
fn stop_is_a_message_to_the_runtime_and_a_signal_to_programs() {
    let mut agent = TestAgent::start(&[false, false]);
    let commands = agent.receive_message(ToAgent::Stop { attempt: 0, deadline_ms: Some(500) });
    assert_eq!(
        select_signals(&commands),
        [(0, ProcessGroupSignal::Terminate), (1, ProcessGroupSignal::Terminate)]
    );
    assert!(select_signals(&agent.advance_to(ms(499))).is_empty());
    assert_eq!(
        select_signals(&agent.advance_to(ms(500))),
        [(0, ProcessGroupSignal::Kill), (1, ProcessGroupSignal::Kill)]
    );

    let mut agent = TestAgent::start(&[true]);
    agent.feed_input(AgentInput::Worker {
        rank: 0,
        message: FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 },
    });
    let commands = agent.receive_message(ToAgent::Stop { attempt: 0, deadline_ms: None });
    assert_eq!(select_worker_messages(&commands), [(0, &ToWorker::Stop)]);
    assert!(select_signals(&commands).is_empty());
}

#[test]
fn kill_aborts_or_terminates_at_once_and_kills_after_the_grace_period() {
    let mut agent = TestAgent::start(&[true, true, false]);
    agent.feed_input(AgentInput::Worker {
        rank: 0,
        message: FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 },
    });
    agent.now = ms(10);
    let commands = agent.receive_message(ToAgent::Kill {
        attempt: 0,
        stacks: false,
        reason: "rank 9".into(),
        grace_ms: 200,
        leave_ms: None,
    });
    assert_eq!(
        select_worker_messages(&commands),
        [(0, &ToWorker::Abort { reason: "rank 9".into(), keep: false })]
    );
    assert_eq!(
        select_signals(&commands),
        [(1, ProcessGroupSignal::Terminate), (2, ProcessGroupSignal::Terminate)],
        "rank 1 is not initialized yet"
    );
    agent.end_worker(2, ExitStatus::Signal(15, false));
    assert!(select_signals(&agent.advance_to(ms(209))).is_empty());
    assert_eq!(
        select_signals(&agent.advance_to(ms(210))),
        [(0, ProcessGroupSignal::Kill), (1, ProcessGroupSignal::Kill)]
    );
    // A second kill request with a shorter grace period takes effect immediately.
    let mut agent = TestAgent::start(&[false]);
    agent.receive_message(ToAgent::Kill {
        attempt: 0,
        stacks: false,
        reason: String::new(),
        grace_ms: 30_000,
        leave_ms: None,
    });
    let commands = agent.receive_message(ToAgent::Kill {
        attempt: 0,
        stacks: false,
        reason: String::new(),
        grace_ms: 0,
        leave_ms: None,
    });
    assert_eq!(select_signals(&commands), [(0, ProcessGroupSignal::Kill)]);
}

#[test]
fn a_restart_resets_the_state_of_the_agent() {
    let mut agent = TestAgent::start(&[false]);
    agent.receive_message(ToAgent::Kill {
        attempt: 0,
        stacks: false,
        reason: String::new(),
        grace_ms: 0,
        leave_ms: None,
    });
    agent.end_worker(0, ExitStatus::Signal(9, false));
    agent.feed_input(AgentInput::Swept { left: vec![] });
    let commands = agent
        .receive_message(ToAgent::Start(Box::new(HostPlan { attempt: 1, ..make_plan(&[false, false]) })));
    assert_eq!(commands.iter().filter(|c| matches!(c, AgentAction::Spawn(_))).count(), 2);
    assert!(select_signals(&agent.advance_to(ms(60_000))).is_empty());
}

#[test]
fn workers_get_the_addresses_of_their_attempt_only() {
    use protocol::control::WorkerAddresses;
    let mut agent = TestAgent::start(&[true, false]);
    let addresses = vec!["192.0.2.1:4000".parse().unwrap()];
    let actions = agent.feed_input(AgentInput::Worker {
        rank: 0,
        message: FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 },
    });
    assert!(!actions.is_empty());
    let listening = FromWorker::Listening { addresses: addresses.clone() };
    let actions = agent.feed_input(AgentInput::Worker { rank: 0, message: listening });
    let is_report = |c: &AgentAction| matches!(c, AgentAction::Send(FromAgent::Listening { rank: 0, attempt: 0, addresses: a }) if *a == addresses);
    assert!(actions.iter().any(is_report), "{actions:?}");
    let peers = |attempt| WorkerPeers {
        attempt,
        key: JobSecretKey([1; 32]),
        members: vec![WorkerAddresses { host_index: 0, addresses: addresses.clone() }],
        nccl_id: None,
    };
    let late = agent.receive_message(ToAgent::Peers(peers(1)));
    assert!(!late.iter().any(|c| matches!(c, AgentAction::SendToWorker(..))), "{late:?}");
    let now = agent.receive_message(ToAgent::Peers(peers(0)));
    let recipients: Vec<Rank> = now
        .iter()
        .filter_map(|c| match c {
            AgentAction::SendToWorker(rank, ToWorker::Peers(p)) if *p == peers(0) => Some(*rank),
            _ => None,
        })
        .collect();
    assert_eq!(recipients, [0], "programs have no control connection");
    assert_eq!(format!("{now:?}").matches("1, 1, 1").count(), 0, "a key must not be printed");
}

#[test]
fn a_changed_job_file_reaches_the_console_and_rank_0() {
    let values = jobspec::ReloadValues::from_job(&crate::testing::sample_job());
    let shows = |commands: &[AgentAction]| {
        commands.iter().filter(|c| matches!(c, AgentAction::ShowOutput(_))).count()
    };
    let mut agent = TestAgent::start(&[true, true]);
    // The worker is not initialized yet, so the values follow the initialization.
    let commands = agent.receive_message(ToAgent::Reload { attempt: 0, values: values.clone() });
    assert_eq!((shows(&commands), select_worker_messages(&commands).len()), (1, 0));
    let pid = agent.core.workers[&0].pid.unwrap_or(0);
    let message = FromWorker::Hello { version: PROTOCOL_VERSION, pid };
    let commands = agent.feed_input(AgentInput::Worker { rank: 0, message });
    assert_eq!(select_worker_messages(&commands)[1..], [(0, &ToWorker::Reload(values.clone()))]);
    let commands = agent.receive_message(ToAgent::Reload { attempt: 0, values: values.clone() });
    assert_eq!(select_worker_messages(&commands), [(0, &ToWorker::Reload(values.clone()))]);
    let late = agent.receive_message(ToAgent::Reload { attempt: 1, values: values.clone() });
    assert_eq!((shows(&late), select_worker_messages(&late).len()), (0, 0), "of another attempt");
    // Programs and workers that have ended get no message.
    let commands =
        TestAgent::start(&[false]).receive_message(ToAgent::Reload { attempt: 0, values: values.clone() });
    assert_eq!((shows(&commands), select_worker_messages(&commands).len()), (1, 0));
    agent.end_worker(0, ExitStatus::Code(0));
    assert!(
        select_worker_messages(&agent.receive_message(ToAgent::Reload { attempt: 0, values })).is_empty()
    );
}

/// Checks that the end of a script of `run.activate`, which a stop request causes, is no failure.
#[test]
fn a_preparation_that_a_stop_request_ends_is_no_failure() {
    let mut core = create_core();
    core.handle_input(ms(0), AgentInput::Controller(make_hello(PROTOCOL_VERSION)));
    core.handle_input(ms(0), AgentInput::Controller(ToAgent::Start(Box::new(make_plan(&[false])))));
    core.handle_input(ms(1), AgentInput::Controller(ToAgent::Stop { attempt: 0, deadline_ms: None }));
    let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "killed by signal 9");
    let commands = core.handle_input(ms(2), AgentInput::SpawnFailed { rank: 0, diagnostic });
    assert!(
        !commands.iter().any(|c| matches!(c, AgentAction::Send(FromAgent::Failed { .. }))),
        "{commands:?}"
    );
}

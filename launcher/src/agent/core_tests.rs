use super::*;
use contract::{control::WorkerPlan, event::Phase};
use proptest::prelude::*;

fn plan(builtin: &[bool]) -> HostPlan {
    let world = builtin.len() as u32;
    let workers = builtin.iter().enumerate().map(|(rank, builtin)| WorkerPlan {
        rank: rank as u32,
        local_rank: rank as u32,
        local_world: world,
        command: (!builtin).then(|| vec!["true".into()]),
        env: Vec::new(),
        workdir: "/".into(),
        cpus: Vec::new(),
        threads: 1,
        log: format!("/tmp/rank-{rank}.log").into(),
    });
    HostPlan {
        job: crate::testing::job(),
        run: "run".into(),
        host: "host".into(),
        run_dir: "/tmp/run".into(),
        attempt: 0,
        world,
        workers: workers.collect(),
        grace_ms: 1000,
    }
}

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A core with a driver whose spawns succeed at once.
struct TestAgent {
    core: Core,
    now: Duration,
    next_pid: u32,
}

impl TestAgent {
    fn started(builtin: &[bool]) -> TestAgent {
        let mut agent = TestAgent { core: Core::new(7, HostInventory::default()), now: ms(0), next_pid: 100 };
        agent.receive(ToAgent::Hello { version: VERSION });
        agent.receive(ToAgent::Start(Box::new(plan(builtin))));
        agent
    }

    /// All actions that follow from an input, with the answers to spawns and drains fed back.
    fn feed(&mut self, input: Input) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for action in self.core.handle(self.now, input) {
                match &action {
                    Action::Spawn(index) => {
                        let pid = self.next_pid;
                        self.next_pid += 1;
                        inputs.push_back(Input::Spawned { rank: *index as u32, pid });
                    }
                    Action::DrainOutput(rank) => inputs.push_back(Input::Drained {
                        rank: *rank,
                        tail: vec!["last".into()],
                        error: Some("why".into()),
                    }),
                    _ => {}
                }
                actions.push(action);
            }
        }
        actions
    }

    /// Delivers a message of the controller.
    fn receive(&mut self, message: ToAgent) -> Vec<Action> {
        self.feed(Input::Controller(message))
    }

    /// Advances the clock.
    fn at(&mut self, now: Duration) -> Vec<Action> {
        self.now = now;
        self.feed(Input::Tick)
    }

    /// Ends a worker's process and its control connection.
    fn end(&mut self, rank: Rank, status: ExitStatus) -> Vec<Action> {
        let mut actions = self.feed(Input::WorkerConnectionEnded { rank, error: None });
        actions.extend(self.feed(Input::WorkerExited { rank, status, oom: false, gpu: None }));
        actions
    }
}

/// The messages to the controller, without heartbeats.
fn sent<'a>(commands: &'a [Action]) -> Vec<&'a FromAgent> {
    let send = |c: &'a Action| match c {
        Action::Send(message) if *message != FromAgent::Heartbeat => Some(message),
        _ => None,
    };
    commands.iter().filter_map(send).collect()
}

/// The messages to workers.
fn sent_to_workers(commands: &[Action]) -> Vec<(Rank, &ToWorker)> {
    commands
        .iter()
        .filter_map(|c| if let Action::SendToWorker(r, m) = c { Some((*r, m)) } else { None })
        .collect()
}

/// The signals to workers.
fn signals(commands: &[Action]) -> Vec<(Rank, GroupSignal)> {
    commands.iter().filter_map(|c| if let Action::Signal(r, e) = c { Some((*r, *e)) } else { None }).collect()
}

fn has_sweep(commands: &[Action]) -> bool {
    commands.iter().any(|c| matches!(c, Action::Sweep))
}

/// The exit code, if the agent exits.
fn exits(commands: &[Action]) -> Option<u8> {
    commands.iter().find_map(|c| if let Action::Exit(code) = c { Some(*code) } else { None })
}

#[test]
fn a_job_runs_to_its_end() {
    let mut agent = TestAgent::started(&[false, false]);
    let ended = agent.end(0, ExitStatus::Code(0));
    let tail = vec!["last".to_owned()];
    assert_eq!(
        sent(&ended),
        [&FromAgent::Exited {
            attempt: 0,
            rank: 0,
            pid: 100,
            status: ExitStatus::Code(0),
            oom: false,
            tail,
            error: None,
            gpu: None
        }]
    );
    assert!(!has_sweep(&ended), "rank 1 still runs");
    assert!(has_sweep(&agent.end(1, ExitStatus::Code(0))));
    assert_eq!(sent(&agent.feed(Input::Swept { left: vec![] })), [&FromAgent::WorkersEnded { attempt: 0 }]);
    assert_eq!(exits(&agent.feed(Input::ControllerLost)), Some(0));
}

#[test]
fn another_version_or_a_missing_hello_is_rejected() {
    for message in [ToAgent::Hello { version: VERSION + 1 }, ToAgent::Save { attempt: 0, signal: 10 }] {
        let mut core = Core::new(7, HostInventory::default());
        let commands = core.handle(ms(0), Input::Controller(message));
        assert!(matches!(sent(&commands)[..], [FromAgent::Failed { rank: None, .. }]));
        assert_eq!(exits(&commands), Some(1));
    }
}

#[test]
fn inconsistent_plans_are_rejected() {
    let mut twice = plan(&[false, false]);
    twice.workers[1].rank = 0;
    let mut outside = plan(&[false]);
    outside.workers[0].rank = 5;
    for bad in [twice, outside] {
        let mut core = Core::new(7, HostInventory::default());
        core.handle(ms(0), Input::Controller(ToAgent::Hello { version: VERSION }));
        assert_eq!(exits(&core.handle(ms(0), Input::Controller(ToAgent::Start(Box::new(bad))))), Some(1));
    }
}

#[test]
fn after_a_failed_start_no_further_worker_is_started() {
    let mut core = Core::new(7, HostInventory::default());
    core.handle(ms(0), Input::Controller(ToAgent::Hello { version: VERSION }));
    let commands =
        core.handle(ms(0), Input::Controller(ToAgent::Start(Box::new(plan(&[false, false, false])))));
    assert!(matches!(commands[..], [Action::PrepareWorkers(_), Action::Spawn(0)]));
    let commands = core.handle(ms(0), Input::Spawned { rank: 0, pid: 5 });
    assert!(matches!(
        commands[..],
        [Action::Send(FromAgent::Started { attempt: 0, rank: 0, pid: 5 }), Action::Spawn(1)]
    ));
    let diagnostic = Diagnostic::error(run::WORKER_START_FAILED, "no such program");
    let commands = core.handle(ms(0), Input::SpawnFailed { rank: 1, diagnostic });
    assert!(matches!(commands[..], [Action::Send(FromAgent::Failed { rank: Some(1), .. })]));
    let kill = ToAgent::Kill { attempt: 0, stacks: false, reason: "no".into(), grace_ms: 0 };
    assert_eq!(signals(&core.handle(ms(0), Input::Controller(kill))), [(0, GroupSignal::Kill)]);
}

#[test]
fn messages_to_a_worker_are_held_back_until_it_is_initialized() {
    let mut agent = TestAgent::started(&[true]);
    assert!(sent_to_workers(&agent.receive(ToAgent::Stop { attempt: 0, deadline_ms: None })).is_empty());
    assert!(sent_to_workers(&agent.receive(ToAgent::Save { attempt: 0, signal: 10 })).is_empty());
    let hello = FromWorker::Hello { version: VERSION, pid: 100 };
    let commands = agent.feed(Input::Worker { rank: 0, message: hello });
    let messages = sent_to_workers(&commands);
    assert!(
        matches!(messages[..], [(0, ToWorker::Init(_)), (0, ToWorker::Stop), (0, ToWorker::Save)]),
        "{messages:?}"
    );
}

#[test]
fn a_worker_hello_with_another_version_or_pid_is_a_failure() {
    for hello in
        [FromWorker::Hello { version: VERSION + 1, pid: 100 }, FromWorker::Hello { version: VERSION, pid: 1 }]
    {
        let mut agent = TestAgent::started(&[true]);
        let commands = agent.feed(Input::Worker { rank: 0, message: hello });
        assert!(matches!(sent(&commands)[..], [FromAgent::Failed { rank: Some(0), .. }]));
    }
}

#[test]
fn stop_is_a_message_to_the_runtime_and_a_signal_to_programs() {
    let mut agent = TestAgent::started(&[false, false]);
    let commands = agent.receive(ToAgent::Stop { attempt: 0, deadline_ms: Some(500) });
    assert_eq!(signals(&commands), [(0, GroupSignal::Terminate), (1, GroupSignal::Terminate)]);
    assert!(signals(&agent.at(ms(499))).is_empty());
    assert_eq!(signals(&agent.at(ms(500))), [(0, GroupSignal::Kill), (1, GroupSignal::Kill)]);

    let mut agent = TestAgent::started(&[true]);
    agent.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    let commands = agent.receive(ToAgent::Stop { attempt: 0, deadline_ms: None });
    assert_eq!(sent_to_workers(&commands), [(0, &ToWorker::Stop)]);
    assert!(signals(&commands).is_empty());
}

#[test]
fn kill_aborts_or_terminates_at_once_and_kills_after_the_grace_period() {
    let mut agent = TestAgent::started(&[true, true, false]);
    agent.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    agent.now = ms(10);
    let commands =
        agent.receive(ToAgent::Kill { attempt: 0, stacks: false, reason: "rank 9".into(), grace_ms: 200 });
    assert_eq!(sent_to_workers(&commands), [(0, &ToWorker::Abort { reason: "rank 9".into() })]);
    assert_eq!(
        signals(&commands),
        [(1, GroupSignal::Terminate), (2, GroupSignal::Terminate)],
        "rank 1 is not initialized yet"
    );
    agent.end(2, ExitStatus::Signal(15, false));
    assert!(signals(&agent.at(ms(209))).is_empty());
    assert_eq!(signals(&agent.at(ms(210))), [(0, GroupSignal::Kill), (1, GroupSignal::Kill)]);
    // A second order with a shorter grace period takes effect at once.
    let mut agent = TestAgent::started(&[false]);
    agent.receive(ToAgent::Kill { attempt: 0, stacks: false, reason: String::new(), grace_ms: 30_000 });
    let commands =
        agent.receive(ToAgent::Kill { attempt: 0, stacks: false, reason: String::new(), grace_ms: 0 });
    assert_eq!(signals(&commands), [(0, GroupSignal::Kill)]);
}

#[test]
fn exits_are_reported_in_order_after_the_final_reports() {
    let mut agent = TestAgent::started(&[true, false]);
    agent.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    // Rank 0 ends first, but its connection has not been read to the end yet.
    assert!(
        sent(&agent.feed(Input::WorkerExited {
            rank: 0,
            status: ExitStatus::Code(1),
            oom: false,
            gpu: None
        }))
        .is_empty()
    );
    assert!(sent(&agent.end(1, ExitStatus::Code(2))).is_empty(), "rank 1 ended after rank 0");
    let diagnostic = Diagnostic::error(run::INTERNAL, "the loss is NaN");
    let fatal = FromWorker::Fatal { exit: WorkerExit::Failed, diagnostic };
    assert!(matches!(
        sent(&agent.feed(Input::Worker { rank: 0, message: fatal }))[..],
        [FromAgent::Fatal { .. }]
    ));
    let commands = agent.feed(Input::WorkerConnectionEnded { rank: 0, error: None });
    let sent = sent(&commands);
    assert!(
        matches!(sent[..], [FromAgent::Exited { rank: 0, .. }, FromAgent::Exited { rank: 1, .. }]),
        "{sent:?}"
    );
}

#[test]
fn the_wait_for_a_final_report_is_limited() {
    let mut agent = TestAgent::started(&[true]);
    agent.feed(Input::WorkerExited { rank: 0, status: ExitStatus::Code(1), oom: false, gpu: None });
    assert!(sent(&agent.at(FINAL_OUTPUT_TIMEOUT - ms(1))).is_empty());
    let commands = agent.at(FINAL_OUTPUT_TIMEOUT);
    assert!(matches!(sent(&commands)[..], [FromAgent::Exited { rank: 0, .. }]));
    assert!(has_sweep(&commands));
}

/// Slurm kills the agent of a step a moment after a worker, so the report of the worker is delayed.
#[test]
fn in_a_slurm_step_the_report_of_a_sigkill_is_delayed() {
    for (in_slurm_step, status, oom, delay) in [
        (true, ExitStatus::Signal(9, false), false, STEP_KILL_DELAY),
        (true, ExitStatus::Signal(9, false), true, ms(0)),
        (true, ExitStatus::Signal(11, false), false, ms(0)),
        (true, ExitStatus::Code(9), false, ms(0)),
        (false, ExitStatus::Signal(9, false), false, ms(0)),
    ] {
        let mut agent = TestAgent::started(&[false]);
        agent.core.in_slurm_step = in_slurm_step;
        let mut commands = agent.feed(Input::WorkerExited { rank: 0, status, oom, gpu: None });
        commands.extend(agent.feed(Input::Drained { rank: 0, tail: Vec::new(), error: None }));
        if delay > ms(0) {
            assert!(sent(&commands).is_empty(), "{status:?}: {commands:?}");
            assert_eq!(agent.core.deadline(), delay);
            assert!(sent(&agent.at(delay - ms(1))).is_empty());
            commands = agent.at(delay);
        }
        let reports = sent(&commands);
        assert!(matches!(reports[..], [FromAgent::Exited { rank: 0, .. }]), "{status:?}: {reports:?}");
    }
}

#[test]
fn silence_longer_than_the_lease_is_reported_once() {
    let mut agent = TestAgent::started(&[true, false]);
    let heartbeat = || FromWorker::Progress { phase: Phase::Training, step: 1 };
    agent.now = ms(20_000);
    agent.feed(Input::Worker { rank: 0, message: heartbeat() });
    assert!(sent(&agent.at(ms(20_000) + WORKER_LEASE)).is_empty());
    let commands = agent.at(ms(20_001) + WORKER_LEASE);
    let sent_now = sent(&commands);
    assert!(
        matches!(sent_now[..], [FromAgent::Failed { rank: Some(0), diagnostic, .. }] if diagnostic.code() == run::WORKER_SILENT)
    );
    assert!(sent(&agent.at(ms(30_000) + WORKER_LEASE)).is_empty());
}

#[test]
fn the_loss_of_the_controller_kills_all_workers() {
    let mut agent = TestAgent::started(&[true, false]);
    let commands = agent.feed(Input::ControllerLost);
    assert_eq!(signals(&commands), [(0, GroupSignal::Kill), (1, GroupSignal::Kill)]);
    agent.end(0, ExitStatus::Signal(9, false));
    assert!(has_sweep(&agent.end(1, ExitStatus::Signal(9, false))));
    assert_eq!(exits(&agent.feed(Input::Swept { left: vec![] })), Some(1));
}

#[test]
fn the_lease_applies_only_to_a_controller_that_sends_heartbeats() {
    let mut agent = TestAgent::started(&[false]);
    assert!(signals(&agent.at(Duration::from_secs(86_400))).is_empty());
    agent.receive(ToAgent::Heartbeat);
    assert!(signals(&agent.at(Duration::from_secs(86_400) + CONTROLLER_LEASE)).is_empty());
    assert_eq!(signals(&agent.at(Duration::from_secs(86_401) + CONTROLLER_LEASE)), [(0, GroupSignal::Kill)]);
}

#[test]
fn heartbeats_are_sent_every_second() {
    let mut agent = TestAgent::started(&[false]);
    let heartbeats = (1..=100u64)
        .filter(|i| agent.at(ms(i * 100)).iter().any(|c| matches!(c, Action::Send(FromAgent::Heartbeat))));
    assert_eq!(heartbeats.count(), 10);
}

#[test]
fn processes_that_cannot_be_killed_are_reported() {
    let mut agent = TestAgent::started(&[false]);
    agent.end(0, ExitStatus::Code(0));
    let commands = agent.feed(Input::Swept { left: vec![4242] });
    assert!(
        matches!(sent(&commands)[..], [FromAgent::Failed { rank: None, diagnostic, .. }] if diagnostic.code() == run::PROCESS_UNKILLABLE)
    );
    assert_eq!(exits(&commands), Some(1));
}

#[test]
fn the_recorded_error_is_reported_only_for_failed_workers() {
    let mut agent = TestAgent::started(&[false, false]);
    for (rank, status, expected) in [(0, ExitStatus::Code(0), None), (1, ExitStatus::Code(1), Some("why"))] {
        let commands = agent.end(rank, status);
        let error = sent(&commands).into_iter().find_map(|m| match m {
            FromAgent::Exited { error, .. } => Some(error.as_deref()),
            _ => None,
        });
        assert_eq!(error, Some(expected));
    }
}

#[test]
fn a_restart_resets_the_state() {
    let mut agent = TestAgent::started(&[false]);
    agent.receive(ToAgent::Kill { attempt: 0, stacks: false, reason: String::new(), grace_ms: 0 });
    agent.end(0, ExitStatus::Signal(9, false));
    agent.feed(Input::Swept { left: vec![] });
    let commands = agent.receive(ToAgent::Start(Box::new(HostPlan { attempt: 1, ..plan(&[false, false]) })));
    assert_eq!(commands.iter().filter(|c| matches!(c, Action::Spawn(_))).count(), 2);
    assert!(signals(&agent.at(ms(60_000))).is_empty());
}

/// An event of the property test.
#[derive(Clone, Debug)]
enum RandomEvent {
    Tick(u16),
    Stop(Option<u64>),
    Save,
    Kill(u64),
    Heartbeat,
    ControllerLost,
    Hello(Rank),
    Fatal(Rank),
    ConnectionEnds(Rank),
    Ends(Rank, u8),
}

fn random_event() -> impl Strategy<Value = RandomEvent> {
    prop_oneof![
        (0u16..5000).prop_map(RandomEvent::Tick),
        proptest::option::of(0u64..3000).prop_map(RandomEvent::Stop),
        Just(RandomEvent::Save),
        (0u64..3000).prop_map(RandomEvent::Kill),
        Just(RandomEvent::Heartbeat),
        Just(RandomEvent::ControllerLost),
        (0u32..4).prop_map(RandomEvent::Hello),
        (0u32..4).prop_map(RandomEvent::Fatal),
        (0u32..4).prop_map(RandomEvent::ConnectionEnds),
        (0u32..4, 0u8..3).prop_map(|(r, c)| RandomEvent::Ends(r, c)),
    ]
}

proptest! {
    /// In every order of events each process has one exit report, and one sweep follows the last
    /// exit.
    #[test]
    fn every_order_of_events_ends_cleanly(builtin in proptest::collection::vec(any::<bool>(), 1..4), events in proptest::collection::vec(random_event(), 0..40)) {
        let mut agent = TestAgent::started(&builtin);
        let mut actions = Vec::new();
        for event in events {
            actions.extend(match event {
                RandomEvent::Tick(step) => { let now = agent.now + ms(step.into()); agent.at(now) }
                RandomEvent::Stop(deadline_ms) => agent.receive(ToAgent::Stop { attempt: 0, deadline_ms }),
                RandomEvent::Save => agent.receive(ToAgent::Save { attempt: 0, signal: 10 }),
                RandomEvent::Kill(grace_ms) => agent.receive(ToAgent::Kill { attempt: 0, stacks: false, reason: "r".into(), grace_ms }),
                RandomEvent::Heartbeat => agent.receive(ToAgent::Heartbeat),
                RandomEvent::ControllerLost => agent.feed(Input::ControllerLost),
                RandomEvent::Hello(rank) => agent.feed(Input::Worker { rank, message: FromWorker::Hello { version: VERSION, pid: 100 + rank } }),
                RandomEvent::Fatal(rank) => agent.feed(Input::Worker { rank, message: FromWorker::Fatal { exit: WorkerExit::Failed, diagnostic: Diagnostic::error(run::INTERNAL, "m") } }),
                RandomEvent::ConnectionEnds(rank) => agent.feed(Input::WorkerConnectionEnded { rank, error: None }),
                RandomEvent::Ends(rank, code) => agent.feed(Input::WorkerExited { rank, status: ExitStatus::Code(code), oom: false, gpu: None }),
            });
        }
        for rank in 0..builtin.len() as u32 {
            actions.extend(agent.end(rank, ExitStatus::Code(0)));
        }
        prop_assert_eq!(actions.iter().filter(|c| matches!(c, Action::Sweep)).count(), 1);
        actions.extend(agent.feed(Input::Swept { left: vec![] }));
        for rank in 0..builtin.len() as u32 {
            let reports = sent(&actions).iter().filter(|m| matches!(m, FromAgent::Exited { rank: r, .. } if *r == rank)).count();
            prop_assert_eq!(reports, 1, "rank {}", rank);
        }
        prop_assert_eq!(sent(&actions).iter().filter(|m| ***m == FromAgent::WorkersEnded { attempt: 0 }).count(), 1);
        actions.extend(agent.feed(Input::ControllerLost));
        prop_assert!(exits(&actions).is_some());
        // A worker that has ended is not signalled, because its pid may belong to another process.
        let mut ended = std::collections::BTreeSet::new();
        for command in &actions {
            match command {
                Action::DrainOutput(rank) => _ = ended.insert(*rank),
                Action::Signal(rank, _) => prop_assert!(!ended.contains(rank)),
                _ => {}
            }
        }
    }
}

#[test]
fn workers_get_the_addresses_of_their_attempt_only() {
    use contract::control::{JobKey, PeerAddress};
    let mut agent = TestAgent::started(&[true, false]);
    let addresses = vec!["192.0.2.1:4000".parse().unwrap()];
    let actions =
        agent.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    assert!(!actions.is_empty());
    let listening = FromWorker::Listening { addresses: addresses.clone() };
    let actions = agent.feed(Input::Worker { rank: 0, message: listening });
    let is_report = |c: &Action| matches!(c, Action::Send(FromAgent::Listening { rank: 0, attempt: 0, addresses: a }) if *a == addresses);
    assert!(actions.iter().any(is_report), "{actions:?}");
    let peers = |attempt| Peers {
        attempt,
        key: JobKey([1; 32]),
        members: vec![PeerAddress { host_index: 0, addresses: addresses.clone() }],
        nccl_id: None,
    };
    let late = agent.receive(ToAgent::Peers(peers(1)));
    assert!(!late.iter().any(|c| matches!(c, Action::SendToWorker(..))), "{late:?}");
    let now = agent.receive(ToAgent::Peers(peers(0)));
    let recipients: Vec<Rank> = now
        .iter()
        .filter_map(|c| match c {
            Action::SendToWorker(rank, ToWorker::Peers(p)) if *p == peers(0) => Some(*rank),
            _ => None,
        })
        .collect();
    assert_eq!(recipients, [0], "programs have no control connection");
    assert_eq!(format!("{now:?}").matches("1, 1, 1").count(), 0, "a key must not be printed");
}

#[test]
fn a_changed_job_file_reaches_the_console_and_rank_0() {
    let values = contract::job::ReloadValues::from_job(&crate::testing::job());
    let shows = |commands: &[Action]| commands.iter().filter(|c| matches!(c, Action::ShowOutput(_))).count();
    let mut agent = TestAgent::started(&[true, true]);
    // Not initialized yet: the values follow the initialization.
    let commands = agent.receive(ToAgent::Reload { attempt: 0, values: values.clone() });
    assert_eq!((shows(&commands), sent_to_workers(&commands).len()), (1, 0));
    let pid = agent.core.workers[&0].pid.unwrap_or(0);
    let message = FromWorker::Hello { version: VERSION, pid };
    let commands = agent.feed(Input::Worker { rank: 0, message });
    assert_eq!(sent_to_workers(&commands)[1..], [(0, &ToWorker::Reload(values.clone()))]);
    let commands = agent.receive(ToAgent::Reload { attempt: 0, values: values.clone() });
    assert_eq!(sent_to_workers(&commands), [(0, &ToWorker::Reload(values.clone()))]);
    let late = agent.receive(ToAgent::Reload { attempt: 1, values: values.clone() });
    assert_eq!((shows(&late), sent_to_workers(&late).len()), (0, 0), "of another attempt");
    // Programs and workers that have ended get no message.
    let commands =
        TestAgent::started(&[false]).receive(ToAgent::Reload { attempt: 0, values: values.clone() });
    assert_eq!((shows(&commands), sent_to_workers(&commands).len()), (1, 0));
    agent.end(0, ExitStatus::Code(0));
    assert!(sent_to_workers(&agent.receive(ToAgent::Reload { attempt: 0, values })).is_empty());
}

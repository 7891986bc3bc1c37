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
        epoch: 0,
        world,
        workers: workers.collect(),
        grace_ms: 1000,
    }
}

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A core whose spawns succeed at once, as the driver's do.
struct Rig {
    core: Core,
    now: Duration,
    next_pid: u32,
}

impl Rig {
    fn started(builtin: &[bool]) -> Rig {
        let mut rig = Rig { core: Core::new(7, HostInventory::default()), now: ms(0), next_pid: 100 };
        rig.tell(ToAgent::Hello { version: VERSION });
        rig.tell(ToAgent::Start(Box::new(plan(builtin))));
        rig
    }

    /// Everything the core wants, with the answers to spawns, drains fed back.
    fn feed(&mut self, input: Input) -> Vec<Command> {
        let mut all = Vec::new();
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for command in self.core.handle(self.now, input) {
                match &command {
                    Command::Spawn(index) => {
                        let pid = self.next_pid;
                        self.next_pid += 1;
                        inputs.push_back(Input::Spawned { rank: *index as u32, pid });
                    }
                    Command::Drain(rank) => inputs.push_back(Input::Drained {
                        rank: *rank,
                        tail: vec!["last".into()],
                        error: Some("why".into()),
                    }),
                    _ => {}
                }
                all.push(command);
            }
        }
        all
    }

    fn tell(&mut self, message: ToAgent) -> Vec<Command> {
        self.feed(Input::Controller(message))
    }

    fn at(&mut self, now: Duration) -> Vec<Command> {
        self.now = now;
        self.feed(Input::Tick)
    }

    fn end(&mut self, rank: Rank, status: ExitStatus) -> Vec<Command> {
        let mut all = self.feed(Input::WorkerLink { rank, error: None });
        all.extend(self.feed(Input::Ended { rank, status, oom: false, gpu: None }));
        all
    }
}

fn sent<'a>(commands: &'a [Command]) -> Vec<&'a FromAgent> {
    let send = |c: &'a Command| match c {
        Command::Send(message) if *message != FromAgent::Heartbeat => Some(message),
        _ => None,
    };
    commands.iter().filter_map(send).collect()
}

fn told(commands: &[Command]) -> Vec<(Rank, &ToWorker)> {
    commands.iter().filter_map(|c| if let Command::Tell(r, m) = c { Some((*r, m)) } else { None }).collect()
}

fn signals(commands: &[Command]) -> Vec<(Rank, Ending)> {
    commands
        .iter()
        .filter_map(|c| if let Command::Signal(r, e) = c { Some((*r, *e)) } else { None })
        .collect()
}

fn has_sweep(commands: &[Command]) -> bool {
    commands.iter().any(|c| matches!(c, Command::Sweep))
}

fn exits(commands: &[Command]) -> Option<u8> {
    commands.iter().find_map(|c| if let Command::Exit(code) = c { Some(*code) } else { None })
}

#[test]
fn a_job_runs_to_its_end() {
    let mut rig = Rig::started(&[false, false]);
    let ended = rig.end(0, ExitStatus::Code(0));
    let tail = vec!["last".to_owned()];
    assert_eq!(
        sent(&ended),
        [&FromAgent::Exited {
            epoch: 0,
            rank: 0,
            pid: 100,
            status: ExitStatus::Code(0),
            oom: false,
            tail,
            error: None
        }]
    );
    assert!(!has_sweep(&ended), "rank 1 still runs");
    assert!(has_sweep(&rig.end(1, ExitStatus::Code(0))));
    assert_eq!(sent(&rig.feed(Input::Swept { left: vec![] })), [&FromAgent::WorkersEnded { epoch: 0 }]);
    assert_eq!(exits(&rig.feed(Input::ControllerGone)), Some(0));
}

#[test]
fn another_version_or_no_hello_is_refused() {
    for message in [ToAgent::Hello { version: VERSION + 1 }, ToAgent::Save { epoch: 0, signal: 10 }] {
        let mut core = Core::new(7, HostInventory::default());
        let commands = core.handle(ms(0), Input::Controller(message));
        assert!(matches!(sent(&commands)[..], [FromAgent::Failed { rank: None, .. }]));
        assert_eq!(exits(&commands), Some(1));
    }
}

#[test]
fn plans_that_contradict_themselves_are_refused() {
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
fn a_failed_start_starts_no_more_and_still_ends_clean() {
    let mut core = Core::new(7, HostInventory::default());
    core.handle(ms(0), Input::Controller(ToAgent::Hello { version: VERSION }));
    let commands =
        core.handle(ms(0), Input::Controller(ToAgent::Start(Box::new(plan(&[false, false, false])))));
    assert!(matches!(commands[..], [Command::Begin(_), Command::Spawn(0)]));
    let commands = core.handle(ms(0), Input::Spawned { rank: 0, pid: 5 });
    assert!(matches!(
        commands[..],
        [Command::Send(FromAgent::Started { epoch: 0, rank: 0, pid: 5 }), Command::Spawn(1)]
    ));
    let commands = core.handle(ms(0), Input::SpawnFailed { rank: 1, message: "no".into() });
    assert!(matches!(commands[..], [Command::Send(FromAgent::Failed { rank: Some(1), .. })]));
    let kill = ToAgent::Kill { epoch: 0, stacks: false, reason: "no".into(), grace_ms: 0 };
    assert_eq!(signals(&core.handle(ms(0), Input::Controller(kill))), [(0, Ending::Kill)]);
}

#[test]
fn welcome_comes_first_and_what_was_said_before_it_follows() {
    let mut rig = Rig::started(&[true]);
    assert!(told(&rig.tell(ToAgent::Stop { epoch: 0, deadline_ms: None })).is_empty());
    assert!(told(&rig.tell(ToAgent::Save { epoch: 0, signal: 10 })).is_empty());
    let hello = FromWorker::Hello { version: VERSION, pid: 100 };
    let commands = rig.feed(Input::Worker { rank: 0, message: hello });
    let told = told(&commands);
    assert!(
        matches!(told[..], [(0, ToWorker::Welcome(_)), (0, ToWorker::Stop), (0, ToWorker::Save)]),
        "{told:?}"
    );
}

#[test]
fn a_worker_of_another_version_or_pid_is_a_failure() {
    for hello in
        [FromWorker::Hello { version: VERSION + 1, pid: 100 }, FromWorker::Hello { version: VERSION, pid: 1 }]
    {
        let mut rig = Rig::started(&[true]);
        let commands = rig.feed(Input::Worker { rank: 0, message: hello });
        assert!(matches!(sent(&commands)[..], [FromAgent::Failed { rank: Some(0), .. }]));
    }
}

#[test]
fn stop_is_a_request_to_the_runtime_and_a_signal_to_programs() {
    let mut rig = Rig::started(&[false, false]);
    let commands = rig.tell(ToAgent::Stop { epoch: 0, deadline_ms: Some(500) });
    assert_eq!(signals(&commands), [(0, Ending::Term), (1, Ending::Term)]);
    assert!(signals(&rig.at(ms(499))).is_empty());
    assert_eq!(signals(&rig.at(ms(500))), [(0, Ending::Kill), (1, Ending::Kill)]);

    let mut rig = Rig::started(&[true]);
    rig.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    let commands = rig.tell(ToAgent::Stop { epoch: 0, deadline_ms: None });
    assert_eq!(told(&commands), [(0, &ToWorker::Stop)]);
    assert!(signals(&commands).is_empty());
}

#[test]
fn kill_aborts_or_terminates_at_once_and_kills_together() {
    let mut rig = Rig::started(&[true, true, false]);
    rig.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    rig.now = ms(10);
    let commands =
        rig.tell(ToAgent::Kill { epoch: 0, stacks: false, reason: "rank 9".into(), grace_ms: 200 });
    assert_eq!(told(&commands), [(0, &ToWorker::Abort { reason: "rank 9".into() })]);
    assert_eq!(signals(&commands), [(1, Ending::Term), (2, Ending::Term)], "rank 1 is not welcome yet");
    rig.end(2, ExitStatus::Signal(15, false));
    assert!(signals(&rig.at(ms(209))).is_empty());
    assert_eq!(signals(&rig.at(ms(210))), [(0, Ending::Kill), (1, Ending::Kill)]);
    // A second, more impatient order does not wait for the first.
    let mut rig = Rig::started(&[false]);
    rig.tell(ToAgent::Kill { epoch: 0, stacks: false, reason: String::new(), grace_ms: 30_000 });
    let commands = rig.tell(ToAgent::Kill { epoch: 0, stacks: false, reason: String::new(), grace_ms: 0 });
    assert_eq!(signals(&commands), [(0, Ending::Kill)]);
}

#[test]
fn ends_are_reported_in_their_order_with_their_last_words() {
    let mut rig = Rig::started(&[true, false]);
    rig.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    // Rank 0 ends first, but its socket has not been read to the end yet.
    assert!(
        sent(&rig.feed(Input::Ended { rank: 0, status: ExitStatus::Code(1), oom: false, gpu: None }))
            .is_empty()
    );
    assert!(sent(&rig.end(1, ExitStatus::Code(2))).is_empty(), "rank 1 ended after rank 0");
    let fatal = FromWorker::Fatal { exit: WorkerExit::Failed, message: "NaN".into() };
    assert!(matches!(
        sent(&rig.feed(Input::Worker { rank: 0, message: fatal }))[..],
        [FromAgent::Fatal { .. }]
    ));
    let commands = rig.feed(Input::WorkerLink { rank: 0, error: None });
    let sent = sent(&commands);
    assert!(
        matches!(sent[..], [FromAgent::Exited { rank: 0, .. }, FromAgent::Exited { rank: 1, .. }]),
        "{sent:?}"
    );
}

#[test]
fn last_words_are_not_waited_for_for_ever() {
    let mut rig = Rig::started(&[true]);
    rig.feed(Input::Ended { rank: 0, status: ExitStatus::Code(1), oom: false, gpu: None });
    assert!(sent(&rig.at(LAST_WORDS - ms(1))).is_empty());
    let commands = rig.at(LAST_WORDS);
    assert!(matches!(sent(&commands)[..], [FromAgent::Exited { rank: 0, .. }]));
    assert!(has_sweep(&commands));
}

/// Who kills a whole step kills its agents a moment later: a worker's end isn't told before that.
#[test]
fn in_a_step_sigkill_is_told_a_moment_later() {
    for (in_step, status, oom, after) in [
        (true, ExitStatus::Signal(9, false), false, STEP_ENDS),
        (true, ExitStatus::Signal(9, false), true, ms(0)),
        (true, ExitStatus::Signal(11, false), false, ms(0)),
        (true, ExitStatus::Code(9), false, ms(0)),
        (false, ExitStatus::Signal(9, false), false, ms(0)),
    ] {
        let mut rig = Rig::started(&[false]);
        rig.core.in_step = in_step;
        let mut commands = rig.feed(Input::Ended { rank: 0, status, oom, gpu: None });
        commands.extend(rig.feed(Input::Drained { rank: 0, tail: Vec::new(), error: None }));
        if after > ms(0) {
            assert!(sent(&commands).is_empty(), "{status:?}: {commands:?}");
            assert_eq!(rig.core.deadline(), after);
            assert!(sent(&rig.at(after - ms(1))).is_empty());
            commands = rig.at(after);
        }
        let told = sent(&commands);
        assert!(matches!(told[..], [FromAgent::Exited { rank: 0, .. }]), "{status:?}: {told:?}");
    }
}

#[test]
fn silence_longer_than_the_lease_is_told_once() {
    let mut rig = Rig::started(&[true, false]);
    let beat = || FromWorker::Progress { phase: Phase::Training, step: 1 };
    rig.now = ms(20_000);
    rig.feed(Input::Worker { rank: 0, message: beat() });
    assert!(sent(&rig.at(ms(20_000) + WORKER_LEASE)).is_empty());
    let commands = rig.at(ms(20_001) + WORKER_LEASE);
    let sent_now = sent(&commands);
    assert!(
        matches!(sent_now[..], [FromAgent::Failed { rank: Some(0), message, .. }] if message.contains("stopped responding"))
    );
    assert!(sent(&rig.at(ms(30_000) + WORKER_LEASE)).is_empty());
}

#[test]
fn the_end_of_the_controller_kills_everything() {
    let mut rig = Rig::started(&[true, false]);
    let commands = rig.feed(Input::ControllerGone);
    assert_eq!(signals(&commands), [(0, Ending::Kill), (1, Ending::Kill)]);
    rig.end(0, ExitStatus::Signal(9, false));
    assert!(has_sweep(&rig.end(1, ExitStatus::Signal(9, false))));
    assert_eq!(exits(&rig.feed(Input::Swept { left: vec![] })), Some(1));
}

#[test]
fn only_a_controller_that_beats_is_held_to_it() {
    let mut rig = Rig::started(&[false]);
    assert!(signals(&rig.at(Duration::from_secs(86_400))).is_empty());
    rig.tell(ToAgent::Heartbeat);
    assert!(signals(&rig.at(Duration::from_secs(86_400) + CONTROLLER_LEASE)).is_empty());
    assert_eq!(signals(&rig.at(Duration::from_secs(86_401) + CONTROLLER_LEASE)), [(0, Ending::Kill)]);
}

#[test]
fn beats_are_regular() {
    let mut rig = Rig::started(&[false]);
    let beats = (1..=100u64)
        .filter(|i| rig.at(ms(i * 100)).iter().any(|c| matches!(c, Command::Send(FromAgent::Heartbeat))));
    assert_eq!(beats.count(), 10);
}

#[test]
fn processes_that_can_not_be_killed_are_named() {
    let mut rig = Rig::started(&[false]);
    rig.end(0, ExitStatus::Code(0));
    let commands = rig.feed(Input::Swept { left: vec![4242] });
    assert!(
        matches!(sent(&commands)[..], [FromAgent::Failed { rank: None, message, .. }] if message.contains("4242"))
    );
    assert_eq!(exits(&commands), Some(1));
}

#[test]
fn only_a_failed_workers_own_account_is_passed_on() {
    let mut rig = Rig::started(&[false, false]);
    for (rank, status, expected) in [(0, ExitStatus::Code(0), None), (1, ExitStatus::Code(1), Some("why"))] {
        let commands = rig.end(rank, status);
        let error = sent(&commands).into_iter().find_map(|m| match m {
            FromAgent::Exited { error, .. } => Some(error.as_deref()),
            _ => None,
        });
        assert_eq!(error, Some(expected));
    }
}

#[test]
fn a_restart_begins_afresh() {
    let mut rig = Rig::started(&[false]);
    rig.tell(ToAgent::Kill { epoch: 0, stacks: false, reason: String::new(), grace_ms: 0 });
    rig.end(0, ExitStatus::Signal(9, false));
    rig.feed(Input::Swept { left: vec![] });
    let commands = rig.tell(ToAgent::Start(Box::new(HostPlan { epoch: 1, ..plan(&[false, false]) })));
    assert_eq!(commands.iter().filter(|c| matches!(c, Command::Spawn(_))).count(), 2);
    assert!(signals(&rig.at(ms(60_000))).is_empty());
}

/// What may happen in any order.
#[derive(Clone, Debug)]
enum Chance {
    Tick(u16),
    Stop(Option<u64>),
    Save,
    Kill(u64),
    Beat,
    Gone,
    Hello(Rank),
    Fatal(Rank),
    LinkEnds(Rank),
    Ends(Rank, u8),
}

fn chance() -> impl Strategy<Value = Chance> {
    prop_oneof![
        (0u16..5000).prop_map(Chance::Tick),
        proptest::option::of(0u64..3000).prop_map(Chance::Stop),
        Just(Chance::Save),
        (0u64..3000).prop_map(Chance::Kill),
        Just(Chance::Beat),
        Just(Chance::Gone),
        (0u32..4).prop_map(Chance::Hello),
        (0u32..4).prop_map(Chance::Fatal),
        (0u32..4).prop_map(Chance::LinkEnds),
        (0u32..4, 0u8..3).prop_map(|(r, c)| Chance::Ends(r, c)),
    ]
}

proptest! {
    /// Whatever the order: each process has one exit result, and when all have ended there is one sweep and then all is gone.
    #[test]
    fn every_order_ends(builtin in proptest::collection::vec(any::<bool>(), 1..4), chances in proptest::collection::vec(chance(), 0..40)) {
        let mut rig = Rig::started(&builtin);
        let mut all = Vec::new();
        for chance in chances {
            all.extend(match chance {
                Chance::Tick(step) => { let now = rig.now + ms(step.into()); rig.at(now) }
                Chance::Stop(deadline_ms) => rig.tell(ToAgent::Stop { epoch: 0, deadline_ms }),
                Chance::Save => rig.tell(ToAgent::Save { epoch: 0, signal: 10 }),
                Chance::Kill(grace_ms) => rig.tell(ToAgent::Kill { epoch: 0, stacks: false, reason: "r".into(), grace_ms }),
                Chance::Beat => rig.tell(ToAgent::Heartbeat),
                Chance::Gone => rig.feed(Input::ControllerGone),
                Chance::Hello(rank) => rig.feed(Input::Worker { rank, message: FromWorker::Hello { version: VERSION, pid: 100 + rank } }),
                Chance::Fatal(rank) => rig.feed(Input::Worker { rank, message: FromWorker::Fatal { exit: WorkerExit::Failed, message: "m".into() } }),
                Chance::LinkEnds(rank) => rig.feed(Input::WorkerLink { rank, error: None }),
                Chance::Ends(rank, code) => rig.feed(Input::Ended { rank, status: ExitStatus::Code(code), oom: false, gpu: None }),
            });
        }
        for rank in 0..builtin.len() as u32 {
            all.extend(rig.end(rank, ExitStatus::Code(0)));
        }
        prop_assert_eq!(all.iter().filter(|c| matches!(c, Command::Sweep)).count(), 1);
        all.extend(rig.feed(Input::Swept { left: vec![] }));
        for rank in 0..builtin.len() as u32 {
            let reports = sent(&all).iter().filter(|m| matches!(m, FromAgent::Exited { rank: r, .. } if *r == rank)).count();
            prop_assert_eq!(reports, 1, "rank {}", rank);
        }
        prop_assert_eq!(sent(&all).iter().filter(|m| ***m == FromAgent::WorkersEnded { epoch: 0 }).count(), 1);
        all.extend(rig.feed(Input::ControllerGone));
        prop_assert!(exits(&all).is_some());
        // Nobody who has ended is signalled: its pid may belong to someone else by now.
        let mut ended = std::collections::BTreeSet::new();
        for command in &all {
            match command {
                Command::Drain(rank) => _ = ended.insert(*rank),
                Command::Signal(rank, _) => prop_assert!(!ended.contains(rank)),
                _ => {}
            }
        }
    }
}

#[test]
fn workers_are_introduced_in_their_own_epoch_only() {
    use contract::control::{JobKey, PeerAddress};
    let mut rig = Rig::started(&[true, false]);
    let addresses = vec!["192.0.2.1:4000".parse().unwrap()];
    let said = rig.feed(Input::Worker { rank: 0, message: FromWorker::Hello { version: VERSION, pid: 100 } });
    assert!(!said.is_empty());
    let listening = FromWorker::Listening { addresses: addresses.clone() };
    let said = rig.feed(Input::Worker { rank: 0, message: listening });
    let told = |c: &Command| matches!(c, Command::Send(FromAgent::Listening { rank: 0, epoch: 0, addresses: a }) if *a == addresses);
    assert!(said.iter().any(told), "{said:?}");
    let peers = |epoch| Peers {
        epoch,
        key: JobKey([1; 32]),
        members: vec![PeerAddress { node: 0, addresses: addresses.clone() }],
        nccl_id: None,
    };
    let late = rig.tell(ToAgent::Peers(peers(1)));
    assert!(!late.iter().any(|c| matches!(c, Command::Tell(..))), "{late:?}");
    let now = rig.tell(ToAgent::Peers(peers(0)));
    let to: Vec<Rank> = now
        .iter()
        .filter_map(|c| match c {
            Command::Tell(rank, ToWorker::Peers(p)) if *p == peers(0) => Some(*rank),
            _ => None,
        })
        .collect();
    assert_eq!(to, [0], "the program next to it has no ear for it");
    assert!(!format!("{now:?}").contains("[1, 1"), "a key is never printed");
}

#[test]
fn a_changed_job_file_reaches_the_console_and_rank_0() {
    let values = contract::job::Reload::of(&crate::testing::job());
    let shows = |commands: &[Command]| commands.iter().filter(|c| matches!(c, Command::Show(_))).count();
    let mut rig = Rig::started(&[true, true]);
    // Not welcome yet: it is told right after its welcome.
    let commands = rig.tell(ToAgent::Reload { epoch: 0, values: values.clone() });
    assert_eq!((shows(&commands), told(&commands).len()), (1, 0));
    let pid = rig.core.workers[&0].pid.unwrap_or(0);
    let message = FromWorker::Hello { version: VERSION, pid };
    let commands = rig.feed(Input::Worker { rank: 0, message });
    assert_eq!(told(&commands)[1..], [(0, &ToWorker::Reload(values.clone()))]);
    let commands = rig.tell(ToAgent::Reload { epoch: 0, values: values.clone() });
    assert_eq!(told(&commands), [(0, &ToWorker::Reload(values.clone()))]);
    let late = rig.tell(ToAgent::Reload { epoch: 1, values: values.clone() });
    assert_eq!((shows(&late), told(&late).len()), (0, 0), "of another start");
    // A program is told nothing; a dead worker neither.
    let commands = Rig::started(&[false]).tell(ToAgent::Reload { epoch: 0, values: values.clone() });
    assert_eq!((shows(&commands), told(&commands).len()), (1, 0));
    rig.end(0, ExitStatus::Code(0));
    assert!(told(&rig.tell(ToAgent::Reload { epoch: 0, values })).is_empty());
}

#[path = "core_rig.rs"]
mod rig;

use super::*;
use contract::control::VERSION;
use proptest::prelude::*;
use rig::{Rig, end, failure, kills, ms, setup};

const DONE: ExitStatus = ExitStatus::Code(0);
const KILLED: ExitStatus = ExitStatus::Signal(9, false);

#[test]
fn a_job_that_goes_well_ends_with_0() {
    for builtin in [true, false] {
        let mut rig = Rig::running(2, 2, builtin);
        for rank in 0..4 {
            assert!(rig.exit(rank, DONE).is_empty());
        }
        assert!(rig.gone(0).is_empty());
        let outputs = rig.gone(1);
        assert_eq!(end(&outputs), Some(&Outcome { progress: !builtin, ..Outcome::default() }));
    }
}

#[test]
fn the_first_failure_is_the_cause_and_everyone_ends_at_once() {
    let mut rig = Rig::running(2, 2, false);
    let outputs = rig.exit(2, ExitStatus::Code(3));
    assert_eq!(kills(&outputs), [(0, 3000), (1, 3000)]);
    assert_eq!(failure(&outputs), Some((Some(2), "exit code 3", &["last of 2".to_owned()][..])));
    for rank in [0, 1, 3] {
        assert!(rig.exit(rank, ExitStatus::Signal(11, false)).is_empty(), "a consequence is not a cause");
    }
    rig.gone(0);
    let outputs = rig.gone(1);
    let outcome = end(&outputs).unwrap();
    assert_eq!(outcome.exit_code, 1);
    assert_eq!(outcome.others.iter().map(|o| o.rank).collect::<Vec<_>>(), [0, 1, 3]);
    assert_eq!(outcome.others[0].how, "killed by SIGSEGV");
}

#[test]
fn a_programs_own_account_is_part_of_the_cause() {
    let mut rig = Rig::running(1, 2, false);
    let (tail, error) = (Vec::new(), Some("ValueError: bad".to_owned()));
    let exited = FromAgent::Exited {
        epoch: 0,
        oom: false,
        rank: 1,
        pid: 101,
        status: ExitStatus::Code(1),
        tail,
        error,
    };
    let outputs = rig.agent(1, exited);
    assert_eq!(failure(&outputs).map(|f| f.1), Some("exit code 1: ValueError: bad"));
}

#[test]
fn built_in_workers_get_a_short_grace() {
    let mut rig = Rig::running(1, 2, true);
    let outputs = rig.exit(1, KILLED);
    assert_eq!(kills(&outputs), [(0, 500)]);
    assert_eq!(failure(&outputs).map(|f| f.1), Some("killed by SIGKILL"));
}

#[test]
fn last_words_are_better_than_exit_codes_and_carry_the_kind() {
    for (exit, code) in [
        (WorkerExit::Failed, 1),
        (WorkerExit::BadJob, 2),
        (WorkerExit::Cluster, 3),
        (WorkerExit::Checkpoint, 4),
    ] {
        let mut rig = Rig::running(1, 2, true);
        let outputs = rig.fatal(0, exit, "the reason");
        assert_eq!(kills(&outputs).len(), 1, "no need to wait for its exit");
        assert_eq!(failure(&outputs), None, "its last lines are still to come");
        let outputs = rig.exit(0, ExitStatus::Code(exit.code()));
        assert_eq!(failure(&outputs), Some((Some(0), "the reason", &["last of 0".to_owned()][..])));
        rig.exit(1, ExitStatus::Code(76));
        assert_eq!(end(&rig.gone(0)).unwrap().exit_code, code);
    }
}

#[test]
fn last_lines_are_not_waited_for_for_ever() {
    let mut rig = Rig::running(1, 2, true);
    rig.fatal(0, WorkerExit::Failed, "NaN");
    assert_eq!(failure(&rig.at(TAIL_LIMIT - ms(1))), None);
    assert_eq!(failure(&rig.at(TAIL_LIMIT)), Some((Some(0), "NaN", &[][..])));
    assert_eq!(failure(&rig.exit(0, ExitStatus::Code(1))), None, "reported once");
}

#[test]
fn a_rank_that_gave_up_is_not_the_cause_when_a_better_one_comes() {
    let mut rig = Rig::running(1, 3, true);
    let outputs = rig.exit(0, ExitStatus::Code(76));
    assert!(outputs.is_empty());
    rig.now = ms(60);
    let outputs = rig.exit(2, KILLED);
    assert_eq!(failure(&outputs).map(|f| (f.0, f.1)), Some((Some(2), "killed by SIGKILL")));
    assert!(rig.at(ms(500)).is_empty());
}

#[test]
fn a_rank_that_gave_up_alone_is_reported_after_a_while() {
    let mut rig = Rig::running(1, 2, true);
    rig.fatal(0, WorkerExit::Aborted, "rank 1 does not answer");
    rig.exit(0, ExitStatus::Code(76));
    assert!(rig.at(BETTER_CAUSE - ms(1)).is_empty());
    let outputs = rig.at(BETTER_CAUSE);
    let (rank, cause, _) = failure(&outputs).unwrap();
    assert!(rank == Some(0) && cause.contains("rank 1 does not answer"), "{cause}");
    assert_eq!(kills(&outputs).len(), 1);
}

#[test]
fn a_rank_that_gave_up_and_then_all_gone_is_still_a_failure() {
    let mut rig = Rig::running(1, 2, true);
    rig.exit(0, ExitStatus::Code(76));
    rig.exit(1, DONE);
    let outputs = rig.gone(0);
    assert!(failure(&outputs).is_some());
    assert_eq!(end(&outputs).unwrap().exit_code, 1);
}

#[test]
fn interrupt_saves_and_stops_built_in_workers() {
    for (stop, code) in [(Stop::Interrupt, 130), (Stop::Terminate, 143)] {
        let mut rig = Rig::running(1, 2, true);
        let outputs = rig.feed(Input::Stop(stop));
        assert!(outputs.contains(&Output::Tell(0, ToAgent::Stop { epoch: 0, deadline_ms: None })));
        assert!(rig.at(ms(20_000)).is_empty() && rig.agent(0, FromAgent::Heartbeat).is_empty());
        assert!(rig.exit(0, ExitStatus::Code(75)).is_empty());
        assert!(rig.exit(1, ExitStatus::Code(75)).is_empty());
        let outputs = rig.gone(0);
        let outcome = end(&outputs).unwrap();
        assert_eq!((outcome.exit_code, outcome.stopped, outcome.killed), (code, true, false));
    }
}

#[test]
fn interrupt_gives_programs_their_grace_and_takes_any_exit() {
    let mut rig = Rig::running(1, 3, false);
    let outputs = rig.feed(Input::Stop(Stop::Interrupt));
    assert!(outputs.contains(&Output::Tell(0, ToAgent::Stop { epoch: 0, deadline_ms: Some(3000) })));
    for (rank, status) in [(0, DONE), (1, ExitStatus::Code(1)), (2, ExitStatus::Signal(15, false))] {
        assert!(rig.exit(rank, status).is_empty());
    }
    assert_eq!(end(&rig.gone(0)).unwrap().exit_code, 130);
}

#[test]
fn a_second_signal_kills() {
    for builtin in [true, false] {
        let mut rig = Rig::running(1, 2, builtin);
        rig.feed(Input::Stop(Stop::Interrupt));
        assert_eq!(kills(&rig.feed(Input::Stop(Stop::Terminate))), [(0, 0)]);
        rig.exit(0, KILLED);
        rig.exit(1, KILLED);
        let outputs = rig.gone(0);
        let outcome = end(&outputs).unwrap();
        assert_eq!((outcome.exit_code, outcome.killed), (130, true), "the first signal says how it ends");
        assert_eq!(failure(&outputs), None);
    }
}

#[test]
fn a_time_limit_that_is_near_stops_the_job_and_the_limit_itself_kills_nobody() {
    for (then, limit) in [(None, true), (Some(Stop::Limit), true), (Some(Stop::Terminate), false)] {
        let mut rig = Rig::running(1, 2, true);
        let outputs = rig.feed(Input::Stop(Stop::Limit));
        assert!(outputs.contains(&Output::Tell(0, ToAgent::Stop { epoch: 0, deadline_ms: None })));
        if let Some(stop) = then {
            assert!(rig.feed(Input::Stop(stop)).is_empty(), "no second signal");
        }
        rig.exit(0, ExitStatus::Code(75));
        rig.exit(1, ExitStatus::Code(75));
        let outputs = rig.gone(0);
        let outcome = end(&outputs).unwrap();
        assert_eq!((outcome.exit_code, outcome.stopped, outcome.limit), (143, true, limit), "then {then:?}");
        assert!(!outcome.progress, "no step was seen");
    }
    let mut rig = Rig::running(1, 1, true);
    rig.feed(Input::Stop(Stop::Limit));
    assert_eq!(kills(&rig.feed(Input::Stop(Stop::Interrupt))), [(0, 0)], "a person's Ctrl-C does");
}

#[test]
fn a_signal_while_a_failed_job_ends_only_hurries() {
    let mut rig = Rig::running(1, 2, false);
    rig.exit(0, ExitStatus::Code(7));
    assert_eq!(kills(&rig.feed(Input::Stop(Stop::Interrupt))), [(0, 0)]);
    rig.exit(1, KILLED);
    let outputs = rig.gone(0);
    assert_eq!(end(&outputs).unwrap().exit_code, 1);
}

#[test]
fn a_signal_before_the_workers_started_ends_at_once() {
    let mut rig = Rig::new(2, 1, true);
    rig.hello(0);
    let outputs = rig.feed(Input::Stop(Stop::Terminate));
    assert_eq!(end(&outputs).unwrap().exit_code, 143);
}

#[test]
fn a_save_that_fails_while_stopping_is_a_failure() {
    let mut rig = Rig::running(1, 2, true);
    rig.feed(Input::Stop(Stop::Interrupt));
    rig.fatal(1, WorkerExit::Failed, "no space left");
    let outputs = rig.exit(1, ExitStatus::Code(1));
    assert_eq!(failure(&outputs).map(|f| f.1), Some("no space left"));
    rig.exit(0, ExitStatus::Code(76));
    assert_eq!(end(&rig.gone(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_that_were_done_before_the_request_are_done() {
    let mut rig = Rig::running(1, 1, true);
    rig.feed(Input::Stop(Stop::Interrupt));
    rig.exit(0, DONE);
    assert_eq!(end(&rig.gone(0)).unwrap().exit_code, 0);
}

#[test]
fn stopped_without_being_asked_is_a_failure() {
    let mut rig = Rig::running(1, 1, true);
    let outputs = rig.exit(0, ExitStatus::Code(75));
    assert!(failure(&outputs).is_some_and(|(_, cause, _)| cause.contains("without being asked")));
}

#[test]
fn a_dead_agent_is_a_failure_and_the_others_end() {
    let mut rig = Rig::running(2, 1, true);
    let outputs = rig.feed(Input::AgentGone { node: 1, how: "ended: killed by SIGKILL".into() });
    assert_eq!(kills(&outputs), [(0, 500)]);
    let (rank, cause, _) = failure(&outputs).unwrap();
    assert_eq!((rank, cause), (None, "the agent on h1 (pid 9) ended: killed by SIGKILL"));
    rig.exit(0, ExitStatus::Code(76));
    let outputs = rig.gone(0);
    assert_eq!(
        end(&outputs).unwrap().others.iter().map(|o| (o.rank, o.how.clone())).collect::<Vec<_>>(),
        [(0, "gave up after the failure".into()), (1, "lost with its agent".into())]
    );
}

#[test]
fn agents_that_are_silent_are_killed() {
    let mut rig = Rig::new(1, 1, true);
    assert!(rig.at(HELLO_LIMIT).is_empty());
    let outputs = rig.at(HELLO_LIMIT + ms(1));
    assert!(outputs.contains(&Output::KillAgent(0)));
    assert_eq!(end(&outputs).unwrap().exit_code, 3);

    let mut rig = Rig::running(1, 1, true);
    let outputs = rig.at(AGENT_LEASE + ms(1));
    assert!(outputs.contains(&Output::KillAgent(0)));
    assert_eq!(end(&outputs).unwrap().exit_code, 1);
}

#[test]
fn an_agent_that_can_not_end_its_workers_is_killed() {
    let mut rig = Rig::running(1, 2, false);
    rig.exit(0, ExitStatus::Code(1));
    let limit = ms(3000) + AGENT_LIMIT;
    rig.now = limit - ms(1);
    assert!(rig.agent(0, FromAgent::Heartbeat).is_empty());
    let outputs = rig.at(limit);
    assert!(outputs.contains(&Output::KillAgent(0)));
    assert!(end(&outputs).is_some());
}

#[test]
fn versions_are_checked_before_anything_starts() {
    let mut rig = Rig::new(1, 2, true);
    let hello = FromAgent::Hello { version: VERSION + 1, pid: 1, found: HostInventory::default() };
    let outputs = rig.feed(Input::Agent(0, hello));
    assert_eq!(end(&outputs).unwrap().exit_code, 3);
    assert!(!outputs.iter().any(|o| matches!(o, Output::Prepare { .. })));
}

#[test]
fn a_spare_that_can_not_be_used_costs_nothing() {
    let with_spare = || Setup { use_hosts: 2, min_hosts: 2, restarts: 1, ..setup(3, false) };
    let failed = |epoch| FromAgent::Failed { epoch, rank: None, message: "no memory".into() };
    let mut rig = Rig::run(with_spare(), 1);
    let outputs = rig.feed(Input::Agent(2, failed(0)));
    let told = |outputs: &[Output], part: &str| {
        outputs
            .iter()
            .any(|o| matches!(o, Output::Event(Event::Notice { message, .. }) if message.contains(part)))
    };
    assert!(told(&outputs, "no memory") && outputs.contains(&Output::KillAgent(2)), "{outputs:?}");
    assert!(failure(&outputs).is_none() && kills(&outputs).is_empty());
    rig.exit(0, DONE);
    rig.exit(1, DONE);
    rig.gone(0);
    assert_eq!(end(&rig.gone(1)).map(|o| o.exit_code), Some(0));

    // One that comes late, of another build.
    let mut rig = Rig::with(with_spare(), 1);
    rig.hello(0);
    rig.hello(1);
    rig.ready();
    rig.started();
    let hello = FromAgent::Hello {
        version: VERSION + 1,
        pid: 9,
        found: HostInventory { host: "h2".into(), ..HostInventory::default() },
    };
    let outputs = rig.feed(Input::Agent(2, hello));
    assert!(told(&outputs, "different builds") && failure(&outputs).is_none(), "{outputs:?}");

    // The agent of a host that works fails the start.
    let outputs = rig.feed(Input::Agent(1, failed(0)));
    assert!(kills(&outputs).len() == 2, "{outputs:?}");
}

#[test]
fn what_can_not_be_planned_ends_the_job() {
    let mut rig = Rig::new(2, 1, false);
    rig.hello(0);
    rig.hello(1);
    let outputs = rig.feed(Input::Refused { epoch: 0, message: "8 slots and 4 GPUs".into() });
    assert_eq!(failure(&outputs).map(|f| f.1), Some("8 slots and 4 GPUs"));
    assert_eq!(end(&outputs).unwrap().exit_code, 3);
    let mut rig = Rig::new(1, 1, false);
    rig.hello(0);
    assert!(failure(&rig.at(PREPARE_LIMIT)).is_some_and(|f| f.1.contains("rendezvous")));
}

#[test]
fn a_failed_start_is_reported_with_its_reason() {
    let mut rig = Rig::new(1, 1, false);
    rig.hello(0);
    rig.ready();
    let message = FromAgent::Failed { epoch: 0, rank: Some(0), message: "no such program in PATH".into() };
    let outputs = rig.feed(Input::Agent(0, message));
    assert_eq!(failure(&outputs).map(|f| (f.0, f.1)), Some((Some(0), "no such program in PATH")));
    assert_eq!(end(&rig.gone(0)).unwrap().exit_code, 1);
}

#[test]
fn workers_can_not_tell_the_controllers_events() {
    let mut rig = Rig::running(1, 1, true);
    let done = Event::Done { exit_code: 0, step: None, seconds: 1.0 };
    assert!(rig.agent(0, FromAgent::Event { epoch: 0, rank: 0, event: done }).is_empty());
    let notice = Event::Notice { rank: None, message: "x".into() };
    assert_eq!(
        rig.agent(0, FromAgent::Event { epoch: 0, rank: 0, event: notice.clone() }),
        [Output::Event(notice)]
    );
}

#[derive(Clone, Debug)]
enum Chance {
    Tick(u16),
    Stop(bool),
    Exit(Rank, u8),
    Signal(Rank),
    Fatal(Rank, u8),
    Lost(HostIndex),
    Gone(HostIndex),
    Failed(Option<Rank>),
}

fn chance() -> impl Strategy<Value = Chance> {
    let rank = 0u32..4;
    prop_oneof![
        (0u16..400).prop_map(Chance::Tick),
        any::<bool>().prop_map(Chance::Stop),
        (rank.clone(), prop_oneof![Just(0u8), Just(1), Just(2), Just(75), Just(76), Just(101)])
            .prop_map(|(r, c)| Chance::Exit(r, c)),
        rank.clone().prop_map(Chance::Signal),
        (rank.clone(), prop_oneof![Just(1u8), Just(2), Just(75), Just(76)])
            .prop_map(|(r, c)| Chance::Fatal(r, c)),
        (0usize..2).prop_map(Chance::Lost),
        (0usize..2).prop_map(Chance::Gone),
        proptest::option::of(rank).prop_map(Chance::Failed),
    ]
}

fn apply(rig: &mut Rig, chance: Chance) -> Vec<Output> {
    match chance {
        Chance::Tick(step) => {
            let now = rig.now + ms(step.into());
            rig.at(now)
        }
        Chance::Stop(interrupt) => {
            rig.feed(Input::Stop(if interrupt { Stop::Interrupt } else { Stop::Terminate }))
        }
        Chance::Exit(rank, code) => rig.exit(rank, ExitStatus::Code(code)),
        Chance::Signal(rank) => rig.exit(rank, KILLED),
        Chance::Fatal(rank, code) => {
            let exit = WorkerExit::from_code(code).unwrap_or(WorkerExit::Failed);
            rig.fatal(rank, exit, "why")
        }
        Chance::Lost(node) => rig.feed(Input::AgentGone { node, how: "is gone".into() }),
        Chance::Gone(node) => rig.gone(node),
        Chance::Failed(rank) => {
            let node = rank.unwrap_or(0) / rig.local;
            rig.feed(Input::Agent(node as usize, FromAgent::Failed { epoch: 0, rank, message: "m".into() }))
        }
    }
}

proptest! {
    /// Whatever happens in whatever order: at most one failure is told, all that run are told to end, and there is one end.
    #[test]
    fn every_order_ends_once(builtin in any::<bool>(), chances in proptest::collection::vec(chance(), 0..40)) {
        let mut rig = Rig::running(2, 2, builtin);
        let mut all = Vec::new();
        for chance in chances {
            let was_gone: Vec<bool> = rig.core.nodes.iter().map(|n| !n.active).collect();
            let had_cause = rig.core.cause.is_some();
            let outputs = apply(&mut rig, chance);
            if !had_cause && rig.core.cause.is_some() {
                for (node, was_gone) in was_gone.into_iter().enumerate() {
                    let told = kills(&outputs).iter().any(|(n, _)| *n == node);
                    prop_assert!(told || was_gone || !rig.core.nodes[node].active, "node {} was not told", node);
                }
            }
            all.extend(outputs);
        }
        for rank in 0..4 {
            all.extend(rig.exit(rank, DONE));
        }
        all.extend(rig.gone(0));
        all.extend(rig.gone(1));
        prop_assert_eq!(all.iter().filter(|o| matches!(o, Output::End(_))).count(), 1);
        let failures = all.iter().filter(|o| matches!(o, Output::Event(Event::Failure { .. }))).count();
        let outcome = end(&all).unwrap();
        prop_assert!(failures <= 1);
        prop_assert_eq!(failures == 1, !matches!(outcome.exit_code, 0 | 130 | 143));
        let at_end = all.iter().position(|o| matches!(o, Output::End(_)));
        prop_assert_eq!(at_end, Some(all.len() - 1), "nothing follows the end");
    }

    /// An agent that never answers again can't keep the job from ending.
    #[test]
    fn silence_ends_too(builtin in any::<bool>(), chances in proptest::collection::vec(chance(), 0..10)) {
        let mut rig = Rig::running(2, 2, builtin);
        let mut ended = chances.into_iter().any(|chance| end(&apply(&mut rig, chance)).is_some());
        for _ in 0..200 {
            let now = rig.now + ms(1000);
            ended |= end(&rig.at(now)).is_some();
        }
        prop_assert!(ended);
    }
}

#[test]
fn workers_are_introduced_when_all_listen() {
    let mut rig = Rig::running(2, 2, true);
    let address = |rank: Rank| vec![std::net::SocketAddr::from(([192, 0, 2, 1], 4000 + rank as u16))];
    let listening = |rank, epoch| FromAgent::Listening { rank, epoch, addresses: address(rank) };
    assert!(rig.agent(3, listening(3, 1)).is_empty(), "of another epoch");
    assert!(rig.feed(Input::Agent(0, listening(3, 0))).is_empty(), "another node's rank");
    for rank in [3, 1, 0] {
        assert!(rig.agent(rank, listening(rank, 0)).is_empty());
    }
    let members = (0..4).map(|r| PeerAddress { node: r / 2, addresses: address(r) }).collect();
    assert_eq!(rig.agent(2, listening(2, 0)), [Output::Introduce { epoch: 0, members }]);
}

#[test]
fn a_kill_needs_no_second_signal() {
    let mut rig = Rig::running(1, 2, true);
    assert_eq!(kills(&rig.feed(Input::Kill)), [(0, 0)]);
    rig.exit(0, KILLED);
    rig.exit(1, KILLED);
    let outputs = rig.gone(0);
    let outcome = end(&outputs).unwrap();
    assert_eq!((outcome.exit_code, outcome.killed), (143, true));
}

#[test]
fn changed_values_reach_the_hosts_that_run_and_name_their_start() {
    let mut rig = Rig::running(2, 1, true);
    let values = Reload::of(&crate::testing::job());
    let message = ToAgent::Reload { epoch: 0, values: values.clone() };
    let outputs = rig.feed(Input::Reload(values));
    assert_eq!(outputs, [Output::Tell(0, message.clone()), Output::Tell(1, message)]);
}

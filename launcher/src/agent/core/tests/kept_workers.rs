//! Tests how the agent keeps the processes of workers that leave a failed attempt.
use super::*;

/// Creates an agent with three built-in workers that have sent their hellos.
fn start_initialized_agent() -> TestAgent {
    let mut agent = TestAgent::start(&[true; 3]);
    for rank in 0..3 {
        let message = FromWorker::Hello { version: PROTOCOL_VERSION, pid: 100 + rank };
        agent.feed_input(AgentInput::Worker { rank, message });
    }
    agent
}

/// Builds the request to end the workers of attempt 0, some of which may leave.
fn build_kill(leave_ms: Option<u64>) -> ToAgent {
    ToAgent::Kill { attempt: 0, stacks: false, reason: "rank 1 failed".into(), grace_ms: 500, leave_ms }
}

/// Lets rank 1 fail and the others leave the attempt. Returns the agent after its sweep.
fn fail_rank_1() -> TestAgent {
    let mut agent = start_initialized_agent();
    agent.end_worker(1, ExitStatus::Signal(9, false));
    let actions = agent.receive_message(build_kill(Some(2000)));
    let abort = ToWorker::Abort { reason: "rank 1 failed".into(), keep: true };
    assert_eq!(select_worker_messages(&actions), [(0, &abort), (2, &abort)]);
    for rank in [0, 2] {
        let message = FromWorker::Left { attempt: 0 };
        let actions = agent.feed_input(AgentInput::Worker { rank, message });
        let left = FromAgent::Left { attempt: 0, rank, pid: 100 + rank };
        assert_eq!(select_controller_messages(&actions), [&left]);
        let kept = vec![0, 2];
        let is_sweep = |a: &AgentAction| matches!(a, AgentAction::Sweep { kept: k } if *k == kept);
        assert_eq!(actions.iter().any(is_sweep), rank == 2, "{actions:?}");
    }
    let actions = agent.feed_input(AgentInput::Swept { left: Vec::new() });
    assert_eq!(select_controller_messages(&actions), [&FromAgent::WorkersEnded { attempt: 0 }]);
    agent
}

/// Starts attempt 1 with a changed plan. Returns the requested actions.
fn start_next_attempt(agent: &mut TestAgent, change: impl FnOnce(&mut HostPlan)) -> Vec<AgentAction> {
    let mut plan = HostPlan { attempt: 1, ..make_plan(&[true; 3]) };
    change(&mut plan);
    agent.receive_message(ToAgent::Start(Box::new(plan)))
}

/// Returns the indices of the workers that the actions start and let rejoin.
fn select_starts(actions: &[AgentAction]) -> (Vec<usize>, Vec<usize>) {
    let spawned = actions.iter().filter_map(|a| if let AgentAction::Spawn(i) = a { Some(*i) } else { None });
    let rejoined =
        actions.iter().filter_map(|a| if let AgentAction::Rejoin(i) = a { Some(*i) } else { None });
    (spawned.collect(), rejoined.collect())
}

/// Builds the message that a worker sends every second.
fn build_heartbeat() -> FromWorker {
    FromWorker::Progress { phase: WorkerPhase::Training, step: 1 }
}

#[test]
fn waiting_workers_that_are_stopped_or_unreachable_are_replaced() {
    let mut agent = fail_rank_1();
    agent.now = ms(10_000);
    agent.feed_input(AgentInput::Worker { rank: 0, message: build_heartbeat() });
    let actions = start_next_attempt(&mut agent, |_| ());
    assert_eq!(select_signals(&actions), [(2, ProcessGroupSignal::Kill)], "rank 2 sent nothing for 10 s");
    assert_eq!(select_starts(&actions), (vec![1, 2], vec![0]));
    let mut agent = fail_rank_1();
    agent.feed_input(AgentInput::WorkerConnectionEnded { rank: 0, error: None });
    let actions = start_next_attempt(&mut agent, |_| ());
    assert_eq!(select_signals(&actions), [(0, ProcessGroupSignal::Kill)]);
    assert_eq!(select_starts(&actions), (vec![0, 1], vec![2]));
}

#[test]
fn a_worker_that_failed_by_its_silence_is_not_kept() {
    let mut agent = start_initialized_agent();
    agent.now = ms(20_000);
    for rank in [0, 1] {
        agent.feed_input(AgentInput::Worker { rank, message: build_heartbeat() });
    }
    agent.advance_to(ms(1) + WORKER_LEASE);
    let actions = agent.receive_message(build_kill(Some(2000)));
    let kept: Vec<_> = select_worker_messages(&actions)
        .into_iter()
        .map(|(rank, message)| (rank, matches!(message, ToWorker::Abort { keep: true, .. })))
        .collect();
    assert_eq!(kept, [(0, true), (1, true), (2, false)]);
    let message = FromWorker::Left { attempt: 0 };
    let actions = agent.feed_input(AgentInput::Worker { rank: 2, message });
    assert!(select_controller_messages(&actions).is_empty(), "{actions:?}");
}

#[test]
fn workers_that_left_take_part_in_the_next_attempt_and_get_its_instructions_at_once() {
    let mut agent = fail_rank_1();
    assert!(select_signals(&agent.advance_to(ms(599_999))).is_empty());
    for rank in [0, 2] {
        agent.feed_input(AgentInput::Worker { rank, message: build_heartbeat() });
    }
    let actions = start_next_attempt(&mut agent, |plan| {
        plan.workers[0].env = vec![("MASTER_PORT".into(), "7".into())];
        plan.job.resume.from = jobspec::ResumeFrom::Path("/c/step-5".into());
    });
    assert_eq!(select_starts(&actions), (vec![1], vec![0, 2]));
    let started = |rank, pid| FromAgent::Started { attempt: 1, rank, pid };
    assert_eq!(
        select_controller_messages(&actions),
        [&started(0, 100), &started(1, 103), &started(2, 102)],
        "rank 1 is replaced"
    );
    let has_init = |rank| {
        let is_init = |(to, m): &(Rank, &ToWorker)| {
            *to == rank && matches!(m, ToWorker::Init(init) if init.attempt == 1 && init.rank == rank)
        };
        select_worker_messages(&actions).iter().any(is_init)
    };
    assert_eq!([0, 1, 2].map(has_init), [true, false, true]);
}

#[test]
fn workers_whose_place_or_job_changes_are_killed_and_started_again() {
    for change in [
        (|plan| plan.workers[0].threads = 2) as fn(&mut HostPlan),
        |plan| plan.workers[0].env = vec![("A".into(), "1".into())],
        |plan| plan.workers[0].cpus = vec![3],
        |plan| plan.workers[0].command = Some(vec!["true".into()]),
    ] {
        let mut agent = fail_rank_1();
        let actions = start_next_attempt(&mut agent, change);
        assert_eq!(select_signals(&actions), [(0, ProcessGroupSignal::Kill)]);
        assert_eq!(select_starts(&actions), (vec![0, 1], vec![2]));
    }
    for change in [
        (|plan| plan.world = 4) as fn(&mut HostPlan),
        |plan| plan.job.name = "other".into(),
        |plan| plan.run_dir = "/tmp/other".into(),
    ] {
        let mut agent = fail_rank_1();
        let actions = start_next_attempt(&mut agent, change);
        assert_eq!(select_signals(&actions), [(0, ProcessGroupSignal::Kill), (2, ProcessGroupSignal::Kill)]);
        assert_eq!(select_starts(&actions), (vec![0, 1, 2], vec![]));
    }
}

#[test]
fn a_worker_that_does_not_leave_in_time_is_killed() {
    let mut agent = start_initialized_agent();
    agent.end_worker(1, ExitStatus::Signal(9, false));
    agent.receive_message(build_kill(Some(2000)));
    agent.feed_input(AgentInput::Worker { rank: 2, message: FromWorker::Left { attempt: 0 } });
    assert!(select_signals(&agent.advance_to(ms(1999))).is_empty());
    assert_eq!(select_signals(&agent.advance_to(ms(2000))), [(0, ProcessGroupSignal::Kill)]);
    let actions = agent.end_worker(0, ExitStatus::Signal(9, false));
    assert!(actions.iter().any(|a| matches!(a, AgentAction::Sweep { kept } if *kept == [2])), "{actions:?}");
}

#[test]
fn a_worker_that_dies_while_it_waits_is_replaced_and_fails_no_attempt() {
    let mut agent = fail_rank_1();
    let actions = agent.end_worker(0, ExitStatus::Signal(9, false));
    assert!(select_controller_messages(&actions).is_empty(), "{actions:?}");
    let actions = start_next_attempt(&mut agent, |_| ());
    assert!(select_signals(&actions).is_empty(), "a reaped pid gets no signal");
    assert_eq!(select_starts(&actions), (vec![0, 1], vec![2]));
}

#[test]
fn waiting_workers_are_killed_when_no_attempt_follows() {
    let mut agent = fail_rank_1();
    let both = [(0, ProcessGroupSignal::Kill), (2, ProcessGroupSignal::Kill)];
    assert_eq!(select_signals(&agent.advance_to(ms(600_000))), both);
    let mut agent = fail_rank_1();
    assert_eq!(select_signals(&agent.receive_message(build_kill(None))), both);
    let mut agent = fail_rank_1();
    let actions = agent.receive_message(ToAgent::End { exit_code: None });
    assert_eq!(select_signals(&actions), both);
    assert!(actions.iter().any(|a| matches!(a, AgentAction::Exit(_))));
}

#[test]
fn only_built_in_workers_leave_and_only_on_request() {
    let mut agent = start_initialized_agent();
    let left = || FromWorker::Left { attempt: 0 };
    let actions = agent.feed_input(AgentInput::Worker { rank: 0, message: left() });
    assert!(actions.is_empty(), "no request was sent: {actions:?}");
    let abort = ToWorker::Abort { reason: "rank 1 failed".into(), keep: false };
    let actions = agent.receive_message(build_kill(None));
    assert_eq!(select_worker_messages(&actions), [(0, &abort), (1, &abort), (2, &abort)]);
    let actions = agent.feed_input(AgentInput::Worker { rank: 0, message: left() });
    assert!(actions.is_empty(), "{actions:?}");
    assert_eq!(select_signals(&agent.advance_to(ms(500))).len(), 3);
    let mut agent = TestAgent::start(&[]);
    agent.feed_input(AgentInput::Swept { left: Vec::new() });
    let plan = HostPlan { attempt: 1, ..make_plan(&[false]) };
    agent.receive_message(ToAgent::Start(Box::new(plan)));
    let kill =
        ToAgent::Kill { attempt: 1, stacks: false, reason: "x".into(), grace_ms: 500, leave_ms: Some(2000) };
    assert_eq!(select_signals(&agent.receive_message(kill)), [(0, ProcessGroupSignal::Terminate)]);
    assert_eq!(select_signals(&agent.advance_to(ms(500))), [(0, ProcessGroupSignal::Kill)]);
}

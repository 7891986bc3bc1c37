//! Tests of the detection of workers that hang: what counts as progress, and what is reported.
use super::*;

/// A program on an agent with hang detection, which is measured once a second.
struct MeasuredProgram {
    agent: TestAgent,
    ticks: u64,
}

impl MeasuredProgram {
    /// Starts a program. Its hang timeout is 5 s. `only_in_collectives` is true if the user has not
    /// set the timeout.
    fn start(only_in_collectives: bool) -> MeasuredProgram {
        let mut agent = TestAgent { core: create_core(), now: ms(0), next_pid: 100 };
        let terms = Some(Box::new(make_terms(ControllerLossAction::Stop)));
        agent.receive_message(ToAgent::Hello { version: PROTOCOL_VERSION, terms });
        let hang_detection = Some(HangDetection { timeout_ms: 5000, only_in_collectives });
        let plan = HostPlan { hang_detection, ..make_plan(&[false]) };
        agent.receive_message(ToAgent::Start(Box::new(plan)));
        MeasuredProgram { agent, ticks: 0 }
    }

    /// Passes the measurement of the next second to the agent: the CPU time that the program has
    /// used in it, and its collectives. Returns `suspended` and `shows_hang` of a reported stall.
    fn measure(
        &mut self,
        used: u64,
        collectives: Option<CollectiveActivity>,
        stopped: bool,
    ) -> Option<(bool, bool)> {
        self.agent.now += ms(1000);
        self.ticks += used;
        let (ticks, rank) = (self.ticks, 0);
        let actions = self.agent.feed_input(AgentInput::Activity { rank, ticks, stopped, collectives });
        select_controller_messages(&actions).into_iter().find_map(|message| match message {
            FromAgent::Stalled { suspended, shows_hang, .. } => Some((*suspended, *shows_hang)),
            _ => None,
        })
    }

    /// Passes ten equal measurements to the agent. Returns `suspended` and `shows_hang` of the
    /// reported stall.
    fn measure_for_10_s(
        &mut self,
        used: u64,
        collectives: Option<CollectiveActivity>,
        stopped: bool,
    ) -> Option<(bool, bool)> {
        let stalls: Vec<_> = (0..10).filter_map(|_| self.measure(used, collectives, stopped)).collect();
        assert!(stalls.len() < 2, "a stall is reported once");
        stalls.first().copied()
    }
}

/// Returns the activity of a program that waits in a collective, or has completed all of them.
fn collectives(is_waiting: bool) -> Option<CollectiveActivity> {
    Some(CollectiveActivity { count: 7, is_waiting })
}

#[test]
fn a_requested_detection_reports_every_stall_as_a_hang() {
    let stall_of = |used, collectives, stopped| {
        MeasuredProgram::start(false).measure_for_10_s(used, collectives, stopped)
    };
    assert_eq!(stall_of(0, None, false), Some((false, true)), "an idle program");
    assert_eq!(stall_of(50, None, false), None);
    assert_eq!(stall_of(50, collectives(false), false), Some((false, true)), "CPU time does not count");
    assert_eq!(stall_of(0, None, true), Some((true, true)));
}

#[test]
fn by_default_only_a_program_that_waits_in_a_collective_shows_a_hang() {
    let stall_of = |used, collectives, stopped| {
        MeasuredProgram::start(true).measure_for_10_s(used, collectives, stopped)
    };
    assert_eq!(stall_of(0, None, false), Some((false, false)), "an idle program without collectives");
    assert_eq!(stall_of(50, None, false), None);
    assert_eq!(stall_of(0, collectives(false), false), Some((false, false)), "an idle server");
    assert_eq!(stall_of(50, collectives(false), false), None, "a rank that prepares data");
    assert_eq!(stall_of(0, collectives(true), false), Some((false, true)));
    assert_eq!(stall_of(50, collectives(true), false), Some((false, true)), "it spins in a collective");
    assert_eq!(stall_of(0, collectives(true), true), Some((false, false)), "a debugger has stopped it");
}

#[test]
fn a_program_that_completes_collectives_does_not_stall() {
    for only_in_collectives in [false, true] {
        let mut program = MeasuredProgram::start(only_in_collectives);
        for count in 0..20 {
            let collectives = Some(CollectiveActivity { count, is_waiting: true });
            assert_eq!(program.measure(0, collectives, false), None);
        }
    }
}

#[test]
fn the_time_in_which_the_agent_is_suspended_does_not_count() {
    let mut program = MeasuredProgram::start(true);
    program.measure(50, collectives(true), false);
    // Slurm has suspended the step for an hour.
    let now = program.agent.now + ms(3_600_000);
    assert!(program.agent.advance_to(now).iter().any(|a| matches!(a, AgentAction::MeasureActivity)));
    assert_eq!((0..4).find_map(|_| program.measure(0, collectives(true), false)), None);
    assert_eq!((0..4).find_map(|_| program.measure(0, collectives(true), false)), Some((false, true)));
}

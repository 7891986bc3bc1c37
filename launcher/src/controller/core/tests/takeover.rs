//! Tests of a takeover whose earlier controller had lost a host.
use super::*;
use crate::{
    cluster::ArrivalLimits,
    controller::{
        core::{run_memo::StoredMemo, setup::CoreSetup, taken_over_journal::TakenOverJournal},
        journal::JournalSummary,
    },
};
use protocol::control::{AdoptedAgent, ControllerToken, HostInventory, HostPlan, WorkerPlan};

/// The quarantine of a lost host in these tests.
const QUARANTINE: Duration = millis(12_000);

/// Creates the settings of a run that outlives its controllers, with two hosts of one rank each,
/// both of which it needs. `epoch` is the number of the controller.
fn create_takeover_setup(epoch: u64) -> CoreSetup {
    let mut setup = CoreSetup {
        outlives_controller: true,
        orphan_timeout: millis(1000),
        restarts: 10,
        token: ControllerToken { epoch, id: 1 },
        arrival: ArrivalLimits { quarantine: QUARANTINE, ..ArrivalLimits::default() },
        ..create_setup(2, true)
    };
    setup.hosts.iter_mut().for_each(|host| host.remote = true);
    setup
}

/// Builds the answer of the agent on the first host to a new controller, with the memo that the
/// agent got `memo_age_ms` milliseconds ago.
fn build_adopted_agent(memo: RunMemo, memo_age_ms: u64) -> FromAgent {
    let worker = WorkerPlan {
        rank: 0,
        local_rank: 0,
        local_world: 1,
        command: None,
        wrapper: Vec::new(),
        env: Vec::new(),
        workdir: "/".into(),
        cpus: Vec::new(),
        threads: 1,
        log: "/log".into(),
    };
    let plan = HostPlan {
        job: crate::testing::sample_job(),
        run: "r".into(),
        host: "n0".into(),
        run_dir: "/run".into(),
        attempt: 0,
        batch_job: None,
        continues_batch_job: false,
        world: 2,
        workers: vec![worker],
        hang_detection: None,
        debug_filter: String::new(),
    };
    let stored =
        StoredMemo { memo, newest_event: 0, unstored: Vec::new(), job_file: None, directory: "/".into() };
    FromAgent::Adopted(Box::new(AdoptedAgent {
        pid: 9,
        stream: 40,
        number: 1,
        inventory: HostInventory { host: "h0".into(), ..HostInventory::default() },
        last_report: 0,
        memo: Some(serde_json::to_string(&stored).expect("JSON")),
        memo_age_ms,
        plan: Some(Box::new(plan)),
        peers: None,
        unattended_ms: 0,
    }))
}

/// Returns the last memo that the actions send to agents.
fn find_last_memo(actions: &[ControllerAction]) -> RunMemo {
    let memo = |action: &ControllerAction| match action {
        ControllerAction::SendMemo { memo, .. } => Some(memo.as_ref().clone()),
        _ => None,
    };
    actions.iter().rev().find_map(memo).expect("a memo")
}

#[test]
fn the_quarantine_of_a_lost_host_counts_from_the_loss() {
    let gone = || ControllerInput::AgentGone { host: 1, end: AgentEnd::ConnectionEnded(None) };
    let mut earlier = CoreHarness::new_running_with_setup(create_takeover_setup(1), 1);
    earlier.now = millis(1000);
    let memo = find_last_memo(&earlier.feed_input(gone()));
    assert_eq!(memo.lost_hosts, [(1, 12_000)]);

    // The host was lost 4 s before the agent of the other host has answered.
    let names = ["n0", "n1"].map(str::to_owned).to_vec();
    let core = ControllerCore::new_for_takeover(create_takeover_setup(2), Some((0, names)), false);
    let mut harness = CoreHarness { core, now: millis(0), local: 1 };
    harness.core.send_attach_requests(millis(0));
    harness.now = millis(500);
    harness.feed_input(ControllerInput::Agent(0, build_adopted_agent(memo, 4000)));
    harness.now = millis(3000);
    let actions = harness.feed_input(gone());
    assert!(actions.iter().any(|a| matches!(a, ControllerAction::TakeOverJournal(_))), "{actions:?}");
    harness.now = millis(3500);
    let journal = TakenOverJournal::new(JournalSummary::default(), Vec::new(), 0.0);
    let actions = harness.feed_input(ControllerInput::JournalTaken(Box::new(journal)));
    let end = QUARANTINE + millis(500) - millis(4000);
    assert_eq!(harness.core.hosts[1].quarantined_until, end);
    // A third controller learns the same.
    assert_eq!(find_last_memo(&actions).lost_hosts, [(1, (end - harness.now).as_millis() as u64)]);

    // The next attempt needs the host, and begins with the end of the quarantine.
    let mut actions = harness.report_workers_ended(0);
    let starts = |actions: &[ControllerAction]| actions.contains(&ControllerAction::StartAgent(1));
    let mut started_at = None;
    while started_at.is_none() && harness.now < QUARANTINE * 2 {
        let now = harness.now + millis(100);
        harness.now = now;
        actions.extend(harness.feed_input(ControllerInput::Agent(0, FromAgent::Heartbeat)));
        actions.extend(harness.tick_at(now));
        started_at = starts(&actions).then_some(now);
    }
    assert!(
        started_at.is_some_and(|at| (end..=end + millis(100)).contains(&at)),
        "{started_at:?} {actions:?}"
    );
}

//! Tests in the simulator that add hosts to the list of hosts, and remove hosts from it, while a
//! job runs.
use super::{
    sim::{InjectedFault, SimScenario, Simulation},
    simulated_runs::{TIME_LIMIT, build_quiet_scenario, check_invariants},
};
use protocol::event::Event;
use std::time::Duration;

/// Simulates a scenario to its end. Panics if an invariant of [`check_invariants`] is violated.
/// Returns the simulation and, for each attempt, the names of its hosts.
fn simulate_placements(scenario: SimScenario) -> (Simulation, Vec<Vec<String>>) {
    let mut world = Simulation::new(scenario.clone());
    world.run_until(TIME_LIMIT).expect("runs");
    check_invariants(&world, &scenario).unwrap_or_else(|error| panic!("{error}: {:#?}", world.reported));
    let placements = world.reported.iter().filter_map(|event| match event {
        Event::Placement { hosts, .. } => Some(hosts.clone()),
        _ => None,
    });
    let placements = placements.collect();
    (world, placements)
}

/// Creates a scenario of four hosts with two ranks each. `faults` holds the faults to inject, each
/// with its time in milliseconds.
fn build_scenario(min_hosts: usize, builtin: bool, faults: &[(u64, InjectedFault)]) -> SimScenario {
    let faults = faults.iter().map(|(ms, fault)| (Duration::from_millis(*ms), *fault)).collect();
    SimScenario { min_hosts, builtin, local: 2, ..build_quiet_scenario(4, faults) }
}

/// Returns the name `hN` of each host N in `hosts`.
fn format_host_names(hosts: &[usize]) -> Vec<String> {
    hosts.iter().map(|host| format!("h{host}")).collect()
}

/// Asserts that the run succeeded without a failure or a restart.
fn assert_success(world: &Simulation) {
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.reported);
    let is_failure = |e: &Event| matches!(e, Event::Failure(_) | Event::Restart { .. });
    assert!(!world.reported.iter().any(is_failure), "{:#?}", world.reported);
}

/// Returns the texts of the notices of a run.
fn collect_notices(world: &Simulation) -> Vec<String> {
    let notices = world.reported.iter().filter_map(|event| match event {
        Event::Notice { message, .. } => Some(message.clone()),
        _ => None,
    });
    notices.collect()
}

/// The indices of the four hosts that a scenario has at its start.
const ALL_HOSTS: [usize; 4] = [0, 1, 2, 3];

#[test]
fn a_host_that_is_removed_from_the_list_is_drained() {
    let mut all_notices = Vec::new();
    for builtin in [true, false] {
        for host in [0, 1, 3] {
            let (world, attempts) =
                simulate_placements(build_scenario(3, builtin, &[(4000, InjectedFault::HostUnlisted(host))]));
            assert_success(&world);
            let rest: Vec<usize> = ALL_HOSTS.into_iter().filter(|n| *n != host).collect();
            assert_eq!(
                attempts,
                [format_host_names(&ALL_HOSTS), format_host_names(&rest)],
                "host {host}, built-in {builtin}"
            );
            all_notices.extend(collect_notices(&world));
        }
    }
    insta::assert_snapshot!(all_notices.join("\n"));
}

#[test]
fn a_removed_host_that_is_needed_stays_in_use_until_another_is_added() {
    let (world, attempts) =
        simulate_placements(build_scenario(4, true, &[(4000, InjectedFault::HostUnlisted(1))]));
    assert_success(&world);
    assert_eq!(attempts, vec![format_host_names(&ALL_HOSTS)]);
    insta::assert_snapshot!("use_of_a_removed_host", collect_notices(&world).join("\n"));
    let faults = [(4000, InjectedFault::HostUnlisted(1)), (5000, InjectedFault::HostAdded)];
    for builtin in [true, false] {
        let (world, attempts) = simulate_placements(build_scenario(4, builtin, &faults));
        assert_success(&world);
        assert_eq!(attempts, [format_host_names(&ALL_HOSTS), format_host_names(&[0, 2, 3, 4])]);
    }
    // The removed host is listed again before another one is added.
    let faults = [
        (4000, InjectedFault::HostUnlisted(1)),
        (5000, InjectedFault::HostListed(1)),
        (6000, InjectedFault::HostAdded),
    ];
    let (world, attempts) = simulate_placements(build_scenario(4, true, &faults));
    assert_success(&world);
    assert_eq!(attempts, [format_host_names(&ALL_HOSTS)]);
}

#[test]
fn an_added_host_replaces_a_lost_one_and_joins_an_elastic_job_at_its_next_attempt() {
    let faults = [(2000, InjectedFault::HostAdded), (4000, InjectedFault::HostDies(2))];
    let (world, attempts) =
        simulate_placements(SimScenario { restarts: 1, ..build_scenario(4, true, &faults) });
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.reported);
    assert_eq!(attempts, [format_host_names(&ALL_HOSTS), format_host_names(&[0, 1, 3, 4])]);
    let faults = [(2000, InjectedFault::HostAdded), (4000, InjectedFault::WorkerKilled(2))];
    let (world, attempts) =
        simulate_placements(SimScenario { restarts: 1, ..build_scenario(2, true, &faults) });
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0));
    assert_eq!(attempts, [format_host_names(&ALL_HOSTS), format_host_names(&[0, 1, 2, 3, 4])]);
}

#[test]
fn the_loss_of_a_draining_host_is_not_a_failure() {
    for (builtin, fault) in [
        (false, InjectedFault::HostDies(1)),
        (false, InjectedFault::AgentKilled(1)),
        (true, InjectedFault::ConnectionBreaks(1)),
    ] {
        let (world, attempts) = simulate_placements(build_scenario(
            3,
            builtin,
            &[(4000, InjectedFault::HostUnlisted(1)), (4001, fault)],
        ));
        assert_success(&world);
        assert_eq!(attempts, [format_host_names(&ALL_HOSTS), format_host_names(&[0, 2, 3])], "{fault:?}");
    }
}

#[test]
fn a_stop_request_while_hosts_are_drained_ends_the_run() {
    let faults = [(4000, InjectedFault::HostUnlisted(1)), (4001, InjectedFault::Interrupt)];
    for builtin in [true, false] {
        let (world, attempts) = simulate_placements(build_scenario(3, builtin, &faults));
        assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(130), "{:#?}", world.reported);
        assert_eq!(attempts.len(), 1);
    }
}

#[test]
fn a_released_host_may_be_listed_again() {
    let faults = [
        (2000, InjectedFault::HostUnlisted(3)),
        (4000, InjectedFault::HostListed(3)),
        (6000, InjectedFault::WorkerKilled(0)),
    ];
    let (world, attempts) =
        simulate_placements(SimScenario { restarts: 1, ..build_scenario(2, true, &faults) });
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.reported);
    assert_eq!(
        attempts,
        [format_host_names(&ALL_HOSTS), format_host_names(&[0, 1, 2]), format_host_names(&ALL_HOSTS)]
    );
}

#[test]
fn a_restart_from_copies_in_memory_begins_without_a_pause() {
    for fault in [InjectedFault::WorkerKilled(2), InjectedFault::HostDies(1)] {
        let find_end = |has_memory_copies| {
            let scenario = build_scenario(3, true, &[(4000, fault)]);
            let scenario = SimScenario { restarts: 1, use_hosts: 3, has_memory_copies, ..scenario };
            let (world, attempts) = simulate_placements(scenario);
            assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.reported);
            assert_eq!(attempts.len(), 2, "one host is a spare: {attempts:?}");
            world.ended_at
        };
        let gained = find_end(false).saturating_sub(find_end(true));
        let pause = Duration::from_millis(700)..Duration::from_millis(1300);
        assert!(pause.contains(&gained), "{fault:?}: {gained:?}");
    }
}

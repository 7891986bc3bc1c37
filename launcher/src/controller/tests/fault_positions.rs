//! A test in the simulator that injects every fault on the first, a middle and the last host. Each
//! run must report the right root cause and end in time.
use super::{
    sim::{HOST_LEASE, InjectedFault, SimScenario, Simulation},
    simulated_runs::{TIME_LIMIT, build_quiet_scenario, check_invariants},
};
use std::time::Duration;

/// The simulated time at which the fault is injected.
const FAULT_TIME: Duration = Duration::from_secs(4);
/// The grace period of simulated programs: the time between the request to end and SIGKILL. A
/// program that ignores SIGTERM runs until the end of the grace period.
const GRACE_PERIOD: Duration = Duration::from_secs(3);

#[test]
fn every_fault_on_every_host_ends_the_run_with_its_root_cause_in_time() {
    for host in [0, 1, 3] {
        let rank = host as u32 * 2 + 1;
        for (fault, silent) in [
            (InjectedFault::WorkerExits(rank, 9), false),
            (InjectedFault::WorkerKilled(rank), false),
            (InjectedFault::AgentKilled(host), false),
            (InjectedFault::ConnectionBreaks(host), false),
            (InjectedFault::Silence(host), true),
            (InjectedFault::HostDies(host), true),
            (InjectedFault::HostFreezes(host, 60_000), true),
        ] {
            for builtin in [true, false] {
                let scenario = SimScenario {
                    local: 2,
                    builtin,
                    work: Duration::from_secs(90),
                    ..build_quiet_scenario(4, vec![(FAULT_TIME, fault)])
                };
                let mut world = Simulation::new(scenario.clone());
                world.run_until(TIME_LIMIT).expect("runs");
                check_invariants(&world, &scenario)
                    .unwrap_or_else(|error| panic!("{error}: {:#?}", world.reported));
                assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(1), "{fault:?}");
                let lease = if silent { HOST_LEASE } else { Duration::ZERO };
                let took = world.ended_at - FAULT_TIME;
                assert!(took < lease + GRACE_PERIOD + Duration::from_secs(1), "{fault:?}: {took:?}");
            }
        }
    }
}

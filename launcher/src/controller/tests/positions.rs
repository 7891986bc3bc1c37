//! Every injected fault on the first, a middle and the last host, in the simulator: the right root
//! cause, and an end in time.
use super::{
    super::core::REMOTE_LEASE,
    sim::{InjectedFault, Scenario, World},
    simulated::{TIME_LIMIT, check, quiet_scenario},
};
use std::time::Duration;

/// When the fault is injected.
const AT: Duration = Duration::from_secs(4);
/// The grace period of programs; some of the simulated ones ignore SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

#[test]
fn every_fault_on_every_host_ends_the_run_with_its_root_cause_in_time() {
    for host in [0, 1, 3] {
        let rank = host as u32 * 2 + 1;
        for (fault, silent) in [
            (InjectedFault::WorkerExits(rank, 9), false),
            (InjectedFault::WorkerKilled(rank), false),
            (InjectedFault::AgentKilled(host), false),
            (InjectedFault::LinkBreaks(host), false),
            (InjectedFault::Silence(host), true),
            (InjectedFault::HostDies(host), true),
            (InjectedFault::HostFreezes(host, 60_000), true),
        ] {
            for builtin in [true, false] {
                let scenario = Scenario {
                    local: 2,
                    builtin,
                    work: Duration::from_secs(90),
                    ..quiet_scenario(4, vec![(AT, fault)])
                };
                let mut world = World::new(scenario.clone());
                world.run(TIME_LIMIT).expect("runs");
                check(&world, &scenario).unwrap_or_else(|error| panic!("{error}: {:#?}", world.reported));
                assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(1), "{fault:?}");
                let lease = if silent { REMOTE_LEASE } else { Duration::ZERO };
                let took = world.ended_at - AT;
                assert!(took < lease + GRACE + Duration::from_secs(1), "{fault:?}: {took:?}");
            }
        }
    }
}

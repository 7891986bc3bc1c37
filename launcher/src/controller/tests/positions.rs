//! Every fault on the first, a middle and the last host, in the simulator: the one true cause, and in time.
use super::{
    super::core::REMOTE_LEASE,
    sim::{Fault, Scene, World},
    simulated::{LONGEST, calm, check},
};
use std::time::Duration;

/// When it strikes.
const AT: Duration = Duration::from_secs(4);
/// Some of the simulator's programs take no notice of SIGTERM, and use all of their grace.
const GRACE: Duration = Duration::from_secs(3);

#[test]
fn every_fault_at_every_position_ends_the_job_with_its_cause_in_time() {
    for node in [0, 1, 3] {
        let rank = node as u32 * 2 + 1;
        for (fault, silent) in [
            (Fault::WorkerExits(rank, 9), false),
            (Fault::WorkerKilled(rank), false),
            (Fault::AgentKilled(node), false),
            (Fault::LinkBreaks(node), false),
            (Fault::Silence(node), true),
            (Fault::HostDies(node), true),
            (Fault::HostFreezes(node, 60_000), true),
        ] {
            for builtin in [true, false] {
                let scene =
                    Scene { local: 2, builtin, work: Duration::from_secs(90), ..calm(4, vec![(AT, fault)]) };
                let mut world = World::new(scene.clone());
                world.run(LONGEST).expect("runs");
                check(&world, &scene).unwrap_or_else(|why| panic!("{why}: {:#?}", world.told));
                assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(1), "{fault:?}");
                let lease = if silent { REMOTE_LEASE } else { Duration::ZERO };
                let took = world.ended_at - AT;
                assert!(took < lease + GRACE + Duration::from_secs(1), "{fault:?}: {took:?}");
            }
        }
    }
}

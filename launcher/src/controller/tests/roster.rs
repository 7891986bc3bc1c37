//! Hosts that come and go with the list while a job runs, in the simulator.
use super::{
    sim::{Fault, Scene, World},
    simulated::{LONGEST, calm, check},
};
use contract::event::Event;
use std::time::Duration;

/// Plays a scene of four hosts to its end; the hosts of each of its starts.
fn placed(scene: Scene) -> (World, Vec<Vec<String>>) {
    let mut world = World::new(scene.clone());
    world.run(LONGEST).expect("runs");
    check(&world, &scene).unwrap_or_else(|why| panic!("{why}: {:#?}", world.told));
    let placed = world.told.iter().filter_map(|event| match event {
        Event::Placed { hosts, .. } => Some(hosts.clone()),
        _ => None,
    });
    let placed = placed.collect();
    (world, placed)
}

fn scene(min_hosts: usize, builtin: bool, faults: &[(u64, Fault)]) -> Scene {
    let faults = faults.iter().map(|(ms, fault)| (Duration::from_millis(*ms), *fault)).collect();
    Scene { min_hosts, builtin, local: 2, ..calm(4, faults) }
}

fn names(nodes: &[usize]) -> Vec<String> {
    nodes.iter().map(|node| format!("h{node}")).collect()
}

/// It went well, without a failure and without a restart that counts.
fn well(world: &World) {
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.told);
    let troubled = |e: &Event| matches!(e, Event::Failure { .. } | Event::Restart { .. });
    assert!(!world.told.iter().any(troubled), "{:#?}", world.told);
}

fn said(world: &World, part: &str) -> usize {
    let notice = |e: &&Event| matches!(e, Event::Notice { message, .. } if message.contains(part));
    world.told.iter().filter(notice).count()
}

const ALL: [usize; 4] = [0, 1, 2, 3];

#[test]
fn a_host_that_is_taken_from_the_list_is_drained() {
    for builtin in [true, false] {
        for node in [0, 1, 3] {
            let (world, placed) = placed(scene(3, builtin, &[(4000, Fault::HostUnlisted(node))]));
            well(&world);
            let rest: Vec<usize> = ALL.into_iter().filter(|n| *n != node).collect();
            assert_eq!(placed, [names(&ALL), names(&rest)], "host {node}, built-in {builtin}");
            assert_eq!(said(&world, "it is left out"), 1);
        }
    }
}

#[test]
fn a_host_that_is_needed_is_kept_until_another_one_comes() {
    let (world, starts) = placed(scene(4, true, &[(4000, Fault::HostUnlisted(1))]));
    well(&world);
    assert_eq!((starts, said(&world, "used all the same")), (vec![names(&ALL)], 1));
    let faults = [(4000, Fault::HostUnlisted(1)), (5000, Fault::HostAdded)];
    for builtin in [true, false] {
        let (world, starts) = placed(scene(4, builtin, &faults));
        well(&world);
        assert_eq!(starts, [names(&ALL), names(&[0, 2, 3, 4])]);
        assert_eq!(said(&world, "used all the same"), 1);
    }
    // Listed again before another came: it was a mistake.
    let faults = [(4000, Fault::HostUnlisted(1)), (5000, Fault::HostListed(1)), (6000, Fault::HostAdded)];
    let (world, starts) = placed(scene(4, true, &faults));
    well(&world);
    assert_eq!(starts, [names(&ALL)]);
}

#[test]
fn a_host_that_comes_takes_the_place_of_a_lost_one_and_joins_an_elastic_job_at_its_next_start() {
    let faults = [(2000, Fault::HostAdded), (4000, Fault::HostDies(2))];
    let (world, starts) = placed(Scene { restarts: 1, ..scene(4, true, &faults) });
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.told);
    assert_eq!(starts, [names(&ALL), names(&[0, 1, 3, 4])]);
    let faults = [(2000, Fault::HostAdded), (4000, Fault::WorkerKilled(2))];
    let (world, starts) = placed(Scene { restarts: 1, ..scene(2, true, &faults) });
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0));
    assert_eq!(starts, [names(&ALL), names(&[0, 1, 2, 3, 4])]);
}

#[test]
fn a_host_that_goes_while_it_is_drained_is_no_failure() {
    for (builtin, fault) in
        [(false, Fault::HostDies(1)), (false, Fault::AgentKilled(1)), (true, Fault::LinkBreaks(1))]
    {
        let (world, starts) = placed(scene(3, builtin, &[(4000, Fault::HostUnlisted(1)), (4001, fault)]));
        well(&world);
        assert_eq!(starts, [names(&ALL), names(&[0, 2, 3])], "{fault:?}");
    }
}

#[test]
fn whoever_asks_for_the_end_while_hosts_are_drained_gets_it() {
    let faults = [(4000, Fault::HostUnlisted(1)), (4001, Fault::Interrupt)];
    for builtin in [true, false] {
        let (world, starts) = placed(scene(3, builtin, &faults));
        assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(130), "{:#?}", world.told);
        assert_eq!(starts.len(), 1);
    }
}

#[test]
fn a_host_that_was_let_go_may_come_back() {
    let faults =
        [(2000, Fault::HostUnlisted(3)), (4000, Fault::HostListed(3)), (6000, Fault::WorkerKilled(0))];
    let (world, starts) = placed(Scene { restarts: 1, ..scene(2, true, &faults) });
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(0), "{:#?}", world.told);
    assert_eq!(starts, [names(&ALL), names(&[0, 1, 2]), names(&ALL)]);
}

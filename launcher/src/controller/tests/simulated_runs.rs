//! Tests that simulate runs with random injected faults, for thousands of seeds, and check the
//! invariants of each run.
//!
//! A failing seed is printed. `LAUNCH_SIM_SEED=N` simulates only that seed.
use super::sim::{HOST_LEASE, InjectedFault, SimRng, SimScenario, Simulation};
use protocol::{event::Event, failure::FailureReason};
use std::time::Duration;

/// How many random scenarios the test simulates, one for each seed from 0.
const SEED_COUNT: u64 = 2000;
/// The time limit of a run, in simulated time. The longest possible run, in which every attempt has
/// a silent host, a quarantine and a late agent, is shorter.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(1200);

/// Derives a scenario with random faults from a seed.
fn build_random_scenario(seed: u64) -> SimScenario {
    let mut chance = SimRng::new(seed ^ 0x5eed);
    let hosts = 1 + chance.pick_below(5) as usize;
    let local = 1 + chance.pick_below(3) as u32;
    let use_hosts = hosts - chance.pick_below(2).min(hosts as u64 - 1) as usize;
    let min_hosts = 1 + chance.pick_below(use_hosts as u64) as usize;
    let world = use_hosts as u64 * u64::from(local);
    let mut fault = || {
        let (host, rank) = (chance.pick_below(hosts as u64) as usize, chance.pick_below(world) as u32);
        let fault = match chance.pick_below(19) {
            0 | 1 => InjectedFault::WorkerExits(rank, 1 + chance.pick_below(60) as u8),
            2 | 3 => InjectedFault::WorkerKilled(rank),
            4 | 5 => InjectedFault::AgentKilled(host),
            6 | 7 => InjectedFault::ConnectionBreaks(host),
            8 => InjectedFault::Silence(host),
            9 => InjectedFault::HostDies(host),
            10 | 11 => InjectedFault::HostFreezes(host, 500 + chance.pick_below(30_000)),
            12 => InjectedFault::ControllerKilled,
            13 | 14 => InjectedFault::HostAdded,
            15 | 16 => InjectedFault::HostUnlisted(host),
            17 => InjectedFault::HostListed(host),
            _ => InjectedFault::Interrupt,
        };
        (Duration::from_millis(chance.pick_below(40_000)), fault)
    };
    let count = 1 + seed % 4;
    let faults = (0..count).map(|_| fault()).collect();
    let mut chance = SimRng::new(seed ^ 0xf00d);
    SimScenario {
        seed,
        hosts,
        local,
        remote: chance.pick_below(4) > 0,
        builtin: chance.pick_below(2) == 0,
        has_memory_copies: seed.is_multiple_of(3),
        restarts: chance.pick_below(4) as u32,
        min_hosts,
        use_hosts,
        faults,
        work: Duration::from_millis(5_000 + chance.pick_below(30_000)),
        attach_within: None,
    }
}

/// Simulates the random scenario of a seed and returns the simulation. Fails if the run violates an
/// invariant.
fn simulate_seed(seed: u64) -> Result<Simulation, String> {
    let scenario = build_random_scenario(seed);
    let fail = |why: String| format!("{why}\n{scenario:#?}");
    let mut world = Simulation::new(scenario.clone());
    world.run_until(TIME_LIMIT).map_err(fail)?;
    check_invariants(&world, &scenario)
        .map_err(|why| fail(format!("{why}\nreported: {:#?}", world.reported)))?;
    Ok(world)
}

/// Checks the invariants of a simulated run. The run must have ended with at most one root cause
/// and no running worker, and may have used only the restarts that the scenario permits. Fails with
/// a description of the first violation.
pub(super) fn check_invariants(world: &Simulation, scenario: &SimScenario) -> Result<(), String> {
    if let Some(violation) = &world.violation {
        return Err(violation.clone());
    }
    let killed = world.injected.contains(&InjectedFault::ControllerKilled);
    if world.outcome.is_none() && !killed {
        return Err(format!("the job did not end within {TIME_LIMIT:?}"));
    }
    if !world.list_running_workers().is_empty() {
        return Err(format!("workers run after the end: {:?}", world.list_running_workers()));
    }
    let causes: Vec<&Event> = world.reported.iter().filter(|e| matches!(e, Event::Failure(_))).collect();
    if causes.len() > 1 {
        return Err(format!("{} root causes", causes.len()));
    }
    if let Some(outcome) = &world.outcome {
        let failed = !matches!(outcome.exit_code, 0 | 130 | 143);
        if failed != (causes.len() == 1) {
            return Err(format!("exit code {} with {} causes", outcome.exit_code, causes.len()));
        }
        if world.injected.is_empty() && outcome.exit_code != 0 {
            return Err(format!("no fault was injected, but the exit code is {}", outcome.exit_code));
        }
    }
    let restarts = world.reported.iter().filter(|e| matches!(e, Event::Restart { .. })).count();
    if restarts > scenario.restarts as usize {
        return Err(format!("{restarts} restarts of {}", scenario.restarts));
    }
    check_root_cause(world)
}

/// If exactly one fault had an effect, checks that the run reported this fault as its root cause.
/// Does nothing for other runs.
fn check_root_cause(world: &Simulation) -> Result<(), String> {
    let [fault] = world.injected[..] else { return Ok(()) };
    let failure = world.reported.iter().find_map(|e| match e {
        Event::Failure(failure) | Event::Restart { failure, .. } => {
            Some((failure.rank, failure.host.clone(), failure.reason.clone()))
        }
        _ => None,
    });
    let is_right = match (fault, &failure) {
        (InjectedFault::WorkerExits(r, code), Some((rank, _, reason))) => {
            let expected = FailureReason::Exit { code, error: None };
            // A built-in worker's exit codes below 5 have other reasons.
            *rank == Some(r) && (*reason == expected || code < 5)
        }
        (InjectedFault::WorkerKilled(r), Some((rank, _, reason))) => {
            *rank == Some(r) && matches!(reason, FailureReason::Signal { number: 9, .. })
        }
        (
            InjectedFault::Interrupt
            | InjectedFault::ControllerKilled
            | InjectedFault::ControllerSuspended(_),
            failure,
        ) => failure.is_none(),
        (
            InjectedFault::HostAdded | InjectedFault::HostUnlisted(_) | InjectedFault::HostListed(_),
            failure,
        ) => failure.is_none() && world.outcome.as_ref().is_some_and(|o| o.exit_code == 0),
        (InjectedFault::WorkerExits(..) | InjectedFault::WorkerKilled(_), None) => false,
        // A spare host, a host whose workers had ended, or a short freeze causes no failure.
        (_, None) => true,
        (
            InjectedFault::AgentKilled(n)
            | InjectedFault::ConnectionBreaks(n)
            | InjectedFault::Silence(n)
            | InjectedFault::HostDies(n)
            | InjectedFault::HostFreezes(n, _),
            Some((rank, host, reason)),
        ) => {
            let name = format!("h{n}");
            let names_host =
                *host == name || matches!(reason, FailureReason::HostLost { host, .. } if *host == name);
            (rank.is_none() || matches!(fault, InjectedFault::HostFreezes(..))) && names_host
        }
    };
    if is_right { Ok(()) } else { Err(format!("{fault:?} was reported as {failure:?}")) }
}

#[test]
fn every_run_ends_with_at_most_one_root_cause_and_no_workers() {
    if let Some(seed) = std::env::var("LAUNCH_SIM_SEED").ok().and_then(|s| s.parse().ok()) {
        let world = simulate_seed(seed).unwrap_or_else(|why| panic!("LAUNCH_SIM_SEED={seed}: {why}"));
        return assert!(world.messages > 0);
    }
    let (mut restarted, mut failed, mut done) = (0, 0, 0);
    let mut violation = Vec::new();
    for seed in 0..SEED_COUNT {
        let world = match simulate_seed(seed) {
            Ok(world) => world,
            Err(why) => {
                violation.push(format!("LAUNCH_SIM_SEED={seed}: {why}"));
                continue;
            }
        };
        restarted += u64::from(world.reported.iter().any(|e| matches!(e, Event::Restart { .. })));
        match world.outcome {
            Some(outcome) if outcome.exit_code == 0 => done += 1,
            Some(_) => failed += 1,
            None => {}
        }
    }
    let shown = violation.iter().take(3).cloned().collect::<Vec<_>>().join("\n");
    assert!(violation.is_empty(), "{} of {SEED_COUNT} seeds:\n{shown}", violation.len());
    // The scenarios cover all outcomes.
    assert!(
        restarted > SEED_COUNT / 20 && failed > SEED_COUNT / 20 && done > SEED_COUNT / 20,
        "{restarted} {failed} {done}"
    );
}

/// Creates a scenario of `hosts` remote hosts with one program each and no restarts. `faults` are
/// the only injected faults, with their times.
pub(super) fn build_quiet_scenario(hosts: usize, faults: Vec<(Duration, InjectedFault)>) -> SimScenario {
    SimScenario {
        seed: 7,
        hosts,
        local: 1,
        remote: true,
        builtin: false,
        has_memory_copies: false,
        restarts: 0,
        min_hosts: hosts,
        use_hosts: hosts,
        faults,
        work: Duration::from_secs(10),
        attach_within: None,
    }
}

/// Simulates a scenario and returns the number of messages to and from the controller per host.
fn count_messages_per_host(hosts: usize, faults: Vec<(Duration, InjectedFault)>) -> f64 {
    let mut world = Simulation::new(build_quiet_scenario(hosts, faults));
    world.run_until(TIME_LIMIT).expect("runs");
    assert!(world.outcome.is_some() && world.list_running_workers().is_empty());
    world.messages as f64 / hosts as f64
}

#[test]
fn messages_for_each_host_do_not_grow_with_their_number() {
    let kill = || vec![(Duration::from_secs(4), InjectedFault::WorkerKilled(3))];
    for faults in [Vec::new(), kill()] {
        let (few, many) =
            (count_messages_per_host(200, faults.clone()), count_messages_per_host(2000, faults));
        assert!(many < few * 1.1 + 1.0, "{few} messages for each of 200 hosts, {many} for each of 2000");
    }
}

/// Measures the messages and the wall time of the controller per agent, and prints them as a table
/// for `scripts/bench/scale`. `LAUNCH_SCALE_AGENTS` selects a single number of agents.
#[test]
#[ignore = "a benchmark"]
fn controller_at_scale() {
    println!("Messages, and µs of the controller, for each agent:\n");
    println!("| agents | undisturbed | a worker killed | a host lost | an agent killed, all restarted |");
    println!("|---|---|---|---|---|");
    let at = Duration::from_secs(4);
    // A profiler needs one size only.
    let only: Option<usize> = std::env::var("LAUNCH_SCALE_AGENTS").ok().and_then(|n| n.parse().ok());
    for hosts in only.map_or(vec![100, 1000, 10_000], |n| vec![n]) {
        let cases =
            [vec![], vec![(at, InjectedFault::WorkerKilled(3))], vec![(at, InjectedFault::HostDies(2))]];
        let restarts = SimScenario {
            restarts: 1,
            ..build_quiet_scenario(hosts, vec![(at, InjectedFault::AgentKilled(2))])
        };
        let scenes = cases.into_iter().map(|faults| build_quiet_scenario(hosts, faults)).chain([restarts]);
        let cells: Vec<String> = scenes
            .map(|scenario| {
                let (messages, spent) = scenario.measure_core_time(TIME_LIMIT);
                let (messages, spent) = (messages as f64, spent.as_secs_f64() * 1e6);
                format!("{:.1}, {:.1}", messages / hosts as f64, spent / hosts as f64)
            })
            .collect();
        println!("| {hosts} | {} |", cells.join(" | "));
    }
}

#[test]
fn a_silent_host_is_lost_within_the_lease_and_a_second() {
    let mut world =
        Simulation::new(build_quiet_scenario(4, vec![(Duration::from_secs(3), InjectedFault::HostDies(2))]));
    world.run_until(TIME_LIMIT).expect("runs");
    let took = world.ended_at - Duration::from_secs(3);
    // Programs that ignore SIGTERM run until the end of their grace period of 3 s.
    assert!(took < HOST_LEASE + Duration::from_secs(1 + 4), "{took:?}");
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(1));
}

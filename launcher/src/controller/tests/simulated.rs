//! What must hold whatever goes wrong, shown by the simulator on thousands of seeds.
//!
//! A failing seed is printed; `LAUNCH_SIM_SEED=N` plays it alone.
use super::sim::{Chance, Fault, Scene, World};
use contract::event::Event;
use std::time::Duration;

/// Seeds tried in one run.
const SEEDS: u64 = 2000;
/// However bad: silence, cooling, late agents, and that for each restart.
pub(super) const LONGEST: Duration = Duration::from_secs(1200);

fn scene(seed: u64) -> Scene {
    let mut chance = Chance::new(seed ^ 0x5eed);
    let hosts = 1 + chance.below(5) as usize;
    let local = 1 + chance.below(3) as u32;
    let use_hosts = hosts - chance.below(2).min(hosts as u64 - 1) as usize;
    let min_hosts = 1 + chance.below(use_hosts as u64) as usize;
    let world = use_hosts as u64 * u64::from(local);
    let mut fault = || {
        let (node, rank) = (chance.below(hosts as u64) as usize, chance.below(world) as u32);
        let fault = match chance.below(19) {
            0 | 1 => Fault::WorkerExits(rank, 1 + chance.below(60) as u8),
            2 | 3 => Fault::WorkerKilled(rank),
            4 | 5 => Fault::AgentKilled(node),
            6 | 7 => Fault::LinkBreaks(node),
            8 => Fault::Silence(node),
            9 => Fault::HostDies(node),
            10 | 11 => Fault::HostFreezes(node, 500 + chance.below(30_000)),
            12 => Fault::ControllerKilled,
            13 | 14 => Fault::HostAdded,
            15 | 16 => Fault::HostUnlisted(node),
            17 => Fault::HostListed(node),
            _ => Fault::Interrupt,
        };
        (Duration::from_millis(chance.below(40_000)), fault)
    };
    let count = 1 + seed % 4;
    let faults = (0..count).map(|_| fault()).collect();
    let mut chance = Chance::new(seed ^ 0xf00d);
    Scene {
        seed,
        hosts,
        local,
        remote: chance.below(4) > 0,
        builtin: chance.below(2) == 0,
        restarts: chance.below(4) as u32,
        min_hosts,
        use_hosts,
        faults,
        work: Duration::from_millis(5_000 + chance.below(30_000)),
    }
}

fn play(seed: u64) -> Result<World, String> {
    let scene = scene(seed);
    let fail = |why: String| format!("{why}\n{scene:#?}");
    let mut world = World::new(scene.clone());
    world.run(LONGEST).map_err(fail)?;
    check(&world, &scene).map_err(|why| fail(format!("{why}\ntold: {:#?}", world.told)))?;
    Ok(world)
}

pub(super) fn check(world: &World, scene: &Scene) -> Result<(), String> {
    if let Some(wrong) = &world.wrong {
        return Err(wrong.clone());
    }
    let killed = world.injected.contains(&Fault::ControllerKilled);
    if world.outcome.is_none() && !killed {
        return Err(format!("the job did not end within {LONGEST:?}"));
    }
    if !world.living().is_empty() {
        return Err(format!("workers live after the end: {:?}", world.living()));
    }
    let causes: Vec<&Event> = world.told.iter().filter(|e| matches!(e, Event::Failure { .. })).collect();
    if causes.len() > 1 {
        return Err(format!("{} root causes", causes.len()));
    }
    if let Some(outcome) = &world.outcome {
        let failed = !matches!(outcome.exit_code, 0 | 130 | 143);
        if failed != (causes.len() == 1) {
            return Err(format!("exit code {} with {} causes", outcome.exit_code, causes.len()));
        }
        if world.injected.is_empty() && outcome.exit_code != 0 {
            return Err(format!("nothing went wrong, and the exit code is {}", outcome.exit_code));
        }
    }
    let restarts = world.told.iter().filter(|e| matches!(e, Event::Restart { .. })).count();
    if restarts > scene.restarts as usize {
        return Err(format!("{restarts} restarts of {}", scene.restarts));
    }
    the_only_fault_is_the_cause(world)
}

/// With one fault there is no doubt what the cause is.
fn the_only_fault_is_the_cause(world: &World) -> Result<(), String> {
    let [fault] = world.injected[..] else { return Ok(()) };
    let told = world.told.iter().find_map(|e| match e {
        Event::Failure { rank, host, cause, .. } | Event::Restart { rank, host, cause, .. } => {
            Some((*rank, host.clone(), cause.clone()))
        }
        _ => None,
    });
    let right = match (fault, &told) {
        (Fault::WorkerExits(r, code), Some((rank, _, cause))) => {
            *rank == Some(r) && (cause.contains(&format!("exit code {code}")) || code < 5)
        }
        (Fault::WorkerKilled(r), Some((rank, _, cause))) => *rank == Some(r) && cause.contains("SIGKILL"),
        (Fault::Interrupt | Fault::ControllerKilled, told) => told.is_none(),
        (Fault::HostAdded | Fault::HostUnlisted(_) | Fault::HostListed(_), told) => {
            told.is_none() && world.outcome.as_ref().is_some_and(|o| o.exit_code == 0)
        }
        // A spare, or a host whose part was over, costs nothing; a short freeze neither.
        (Fault::WorkerExits(..) | Fault::WorkerKilled(_), None) => false,
        (_, None) => true,
        (
            Fault::AgentKilled(n)
            | Fault::LinkBreaks(n)
            | Fault::Silence(n)
            | Fault::HostDies(n)
            | Fault::HostFreezes(n, _),
            Some((rank, host, cause)),
        ) => {
            (rank.is_none() || matches!(fault, Fault::HostFreezes(..)))
                && (*host == format!("h{n}") || cause.contains(&format!("h{n}")))
        }
    };
    if right { Ok(()) } else { Err(format!("{fault:?} was told as {told:?}")) }
}

#[test]
fn whatever_goes_wrong_the_job_ends_with_one_true_cause() {
    if let Some(seed) = std::env::var("LAUNCH_SIM_SEED").ok().and_then(|s| s.parse().ok()) {
        let world = play(seed).unwrap_or_else(|why| panic!("LAUNCH_SIM_SEED={seed}: {why}"));
        return assert!(world.messages > 0);
    }
    let (mut restarted, mut failed, mut done) = (0, 0, 0);
    let mut wrong = Vec::new();
    for seed in 0..SEEDS {
        let world = match play(seed) {
            Ok(world) => world,
            Err(why) => {
                wrong.push(format!("LAUNCH_SIM_SEED={seed}: {why}"));
                continue;
            }
        };
        restarted += u64::from(world.told.iter().any(|e| matches!(e, Event::Restart { .. })));
        match world.outcome {
            Some(outcome) if outcome.exit_code == 0 => done += 1,
            Some(_) => failed += 1,
            None => {}
        }
    }
    let shown = wrong.iter().take(3).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} of {SEEDS} seeds:\n{shown}", wrong.len());
    // The scenes are not all of one kind.
    assert!(
        restarted > SEEDS / 20 && failed > SEEDS / 20 && done > SEEDS / 20,
        "{restarted} {failed} {done}"
    );
}

pub(super) fn calm(hosts: usize, faults: Vec<(Duration, Fault)>) -> Scene {
    Scene {
        seed: 7,
        hosts,
        local: 1,
        remote: true,
        builtin: false,
        restarts: 0,
        min_hosts: hosts,
        use_hosts: hosts,
        faults,
        work: Duration::from_secs(10),
    }
}

/// Messages to and from the controller, for each host.
fn messages_per_host(hosts: usize, faults: Vec<(Duration, Fault)>) -> f64 {
    let mut world = World::new(calm(hosts, faults));
    world.run(LONGEST).expect("runs");
    assert!(world.outcome.is_some() && world.living().is_empty());
    world.messages as f64 / hosts as f64
}

#[test]
fn messages_for_each_host_do_not_grow_with_their_number() {
    let kill = || vec![(Duration::from_secs(4), Fault::WorkerKilled(3))];
    for faults in [Vec::new(), kill()] {
        let (few, many) = (messages_per_host(200, faults.clone()), messages_per_host(2000, faults));
        assert!(many < few * 1.1 + 1.0, "{few} messages for each of 200 hosts, {many} for each of 2000");
    }
}

/// Not a test: `scripts/bench/scale` runs it and shows what it prints.
#[test]
#[ignore = "a benchmark"]
fn controller_at_scale() {
    println!("Messages, and µs of the controller, for each agent:\n");
    println!("| agents | undisturbed | a worker killed | a host lost | an agent killed, all started again |");
    println!("|---|---|---|---|---|");
    let at = Duration::from_secs(4);
    // one size alone, for a profiler
    let alone: Option<usize> = std::env::var("LAUNCH_SCALE_AGENTS").ok().and_then(|n| n.parse().ok());
    for hosts in alone.map_or(vec![100, 1000, 10_000], |n| vec![n]) {
        let cases = [vec![], vec![(at, Fault::WorkerKilled(3))], vec![(at, Fault::HostDies(2))]];
        let restarts = Scene { restarts: 1, ..calm(hosts, vec![(at, Fault::AgentKilled(2))]) };
        let scenes = cases.into_iter().map(|faults| calm(hosts, faults)).chain([restarts]);
        let cells: Vec<String> = scenes
            .map(|scene| {
                let (messages, spent) = scene.alone(LONGEST);
                let (messages, spent) = (messages as f64, spent.as_secs_f64() * 1e6);
                format!("{:.1}, {:.1}", messages / hosts as f64, spent / hosts as f64)
            })
            .collect();
        println!("| {hosts} | {} |", cells.join(" | "));
    }
}

#[test]
fn silence_is_found_out_within_the_lease_and_a_second() {
    let mut world = World::new(calm(4, vec![(Duration::from_secs(3), Fault::HostDies(2))]));
    world.run(LONGEST).expect("runs");
    let took = world.ended_at - Duration::from_secs(3);
    // Programs that don't listen to SIGTERM use their grace of 3 s.
    assert!(took < super::super::core::REMOTE_LEASE + Duration::from_secs(1 + 4), "{took:?}");
    assert_eq!(world.outcome.as_ref().map(|o| o.exit_code), Some(1));
}

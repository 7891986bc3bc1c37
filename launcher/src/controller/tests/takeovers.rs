//! Tests in the simulator that kill and suspend controllers while other controllers take over the
//! run, together with faults of agents, workers and hosts.
use super::{
    sim::{InjectedFault, SimRng, SimScenario, Simulation},
    simulated_runs::build_quiet_scenario,
};
use protocol::event::Event;
use std::{collections::BTreeSet, time::Duration};

/// How many random scenarios the test simulates, one for each seed from 0, unless
/// `LAUNCH_SIM_SEEDS` is set.
const DEFAULT_SEED_COUNT: u64 = 1000;
/// The time limit of a run, in simulated time.
const TIME_LIMIT: Duration = Duration::from_secs(3600);

/// Checks that the journal has each line once and no gap: one start, one end, each attempt and each
/// restart once, and all steps of each attempt.
fn check_journal(world: &Simulation) -> Result<(), String> {
    if let Some(violation) = &world.violation {
        return Err(violation.clone());
    }
    let journal = world.journal_lines();
    let mut reports = BTreeSet::new();
    if let Some((event, report)) = journal.iter().find(|(_, report)| !reports.insert(*report)) {
        return Err(format!("{report:?} is repeated: {event:?}"));
    }
    let events = || journal.iter().map(|(event, _)| event);
    let starts = events().filter(|event| matches!(event, Event::Start { .. })).count();
    let ends = events().filter(|event| matches!(event, Event::Done { .. })).count();
    // The first controller may be lost before its journal has a line, and before it has a worker.
    let is_lost = world.takeovers == 0 && world.outcome.is_none();
    let expected_ends = usize::from(world.outcome.is_some());
    if (starts != 1 && !is_lost) || starts > 1 || ends != expected_ends {
        return Err(format!("{starts} starts and {ends} ends"));
    }
    let mut attempts = BTreeSet::new();
    let mut restarts = 0;
    let mut failures = 0;
    let (mut attempt, mut last_step) = (0, 0);
    for event in events() {
        match event {
            Event::Placement { attempt: number, .. } => {
                if !attempts.insert(*number) {
                    return Err(format!("attempt {number} is repeated"));
                }
                if *number > attempt {
                    check_last_step(world, attempt, last_step)?;
                    (attempt, last_step) = (*number, 0);
                }
            }
            Event::Restart { attempt: number, .. } => {
                restarts += 1;
                if *number != restarts {
                    return Err(format!("restart {number} is number {restarts}"));
                }
            }
            Event::Failure(_) => failures += 1,
            Event::Step { step, .. } => {
                if *step != last_step + 1 {
                    return Err(format!("step {step} of attempt {attempt} follows step {last_step}"));
                }
                last_step = *step;
            }
            _ => {}
        }
    }
    check_last_step(world, attempt, last_step)?;
    if failures > 1 {
        return Err(format!("{failures} root causes"));
    }
    Ok(())
}

/// Checks that the journal has all steps of an attempt, unless the run has no end or the host that
/// reported them may have been lost.
fn check_last_step(world: &Simulation, attempt: u32, last: u64) -> Result<(), String> {
    let Some((expected, host)) = world.steps.get(&attempt).copied() else { return Ok(()) };
    let may_be_lost = world.injected.iter().any(|fault| match fault {
        InjectedFault::AgentKilled(n)
        | InjectedFault::ConnectionBreaks(n)
        | InjectedFault::Silence(n)
        | InjectedFault::HostDies(n)
        | InjectedFault::HostFreezes(n, _) => *n == host,
        _ => false,
    });
    if last == expected || may_be_lost || world.outcome.is_none() {
        return Ok(());
    }
    Err(format!("attempt {attempt} reached step {expected}, and the journal has {last}"))
}

/// Derives a scenario from a seed: losses of controllers, and other faults.
fn build_random_scenario(seed: u64) -> SimScenario {
    let mut chance = SimRng::new(seed ^ 0xa77a);
    let hosts = 1 + chance.pick_below(5) as usize;
    let local = 1 + chance.pick_below(2) as u32;
    let world = hosts as u64 * u64::from(local);
    let mut faults = Vec::new();
    for _ in 0..1 + chance.pick_below(4) {
        let loss = match chance.pick_below(3) {
            0 => InjectedFault::ControllerSuspended(200 + chance.pick_below(40_000)),
            _ => InjectedFault::ControllerKilled,
        };
        faults.push((Duration::from_millis(chance.pick_below(60_000)), loss));
    }
    for _ in 0..chance.pick_below(3) {
        let (host, rank) = (chance.pick_below(hosts as u64) as usize, chance.pick_below(world) as u32);
        let fault = match chance.pick_below(8) {
            0 | 1 => InjectedFault::WorkerKilled(rank),
            2 => InjectedFault::WorkerExits(rank, 9),
            3 => InjectedFault::AgentKilled(host),
            4 => InjectedFault::ConnectionBreaks(host),
            5 => InjectedFault::HostDies(host),
            6 => InjectedFault::HostFreezes(host, 500 + chance.pick_below(30_000)),
            _ => InjectedFault::Interrupt,
        };
        faults.push((Duration::from_millis(chance.pick_below(60_000)), fault));
    }
    SimScenario {
        seed,
        hosts,
        local,
        remote: true,
        builtin: chance.pick_below(3) > 0,
        has_memory_copies: seed.is_multiple_of(3),
        restarts: chance.pick_below(4) as u32,
        min_hosts: 1 + chance.pick_below(hosts as u64) as usize,
        use_hosts: hosts,
        faults,
        work: Duration::from_millis(20_000 + chance.pick_below(60_000)),
        attach_within: Some(Duration::from_millis(1000 + chance.pick_below(30_000))),
    }
}

#[test]
fn no_event_is_lost_or_repeated_by_losses_of_controllers() {
    let only = std::env::var("LAUNCH_SIM_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let (mut takeovers, mut ended, mut violations) = (0, 0, Vec::new());
    let seeds = std::env::var("LAUNCH_SIM_SEEDS").ok().and_then(|seeds| seeds.parse::<u64>().ok());
    let seeds = seeds.unwrap_or(DEFAULT_SEED_COUNT);
    for seed in only.map_or(0..seeds, |seed| seed..seed + 1) {
        let scenario = build_random_scenario(seed);
        let mut world = Simulation::new(scenario.clone());
        let result = world.run_until(TIME_LIMIT).and_then(|()| check_journal(&world));
        let running = world.list_running_workers();
        let result = match result {
            Ok(()) if !running.is_empty() => Err(format!("workers run after the end: {running:?}")),
            result => result,
        };
        if let Err(why) = result {
            violations
                .push(format!("LAUNCH_SIM_SEED={seed}: {why}\n{scenario:#?}\n{:#?}", world.attach_failure));
        }
        takeovers += world.takeovers;
        ended += u64::from(world.outcome.is_some());
    }
    let shown = violations.iter().take(3).cloned().collect::<Vec<_>>().join("\n");
    assert!(violations.is_empty(), "{} of {seeds} seeds:\n{shown}", violations.len());
    assert!(only.is_some() || (takeovers as u64 > seeds / 2 && ended > seeds / 2), "{takeovers} {ended}");
}

#[test]
fn a_run_survives_100_kills_of_its_controllers() {
    let kill = |i: u64| (Duration::from_millis(5000 + i * 12_000), InjectedFault::ControllerKilled);
    let scenario = SimScenario {
        builtin: true,
        local: 2,
        work: Duration::from_secs(1210),
        attach_within: Some(Duration::from_secs(5)),
        ..build_quiet_scenario(4, (0..100).map(kill).collect())
    };
    let mut world = Simulation::new(scenario);
    world.run_until(TIME_LIMIT).expect("runs");
    check_journal(&world).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(world.outcome.as_ref().map(|outcome| outcome.exit_code), Some(0));
    assert!(world.takeovers >= 95, "{}", world.takeovers);
    let restarts = world.reported.iter().any(|event| matches!(event, Event::Restart { .. }));
    assert!(!restarts, "the workers never notice");
}

/// Derives, from a seed, a training on three hosts whose controllers and agents are killed at
/// random times. A host whose agent was killed is used again before the next agent is killed.
fn build_scenario_of_kills(seed: u64) -> SimScenario {
    let mut chance = SimRng::new(seed ^ 0xc111);
    let (mut faults, mut at, mut lost_at) = (Vec::new(), 3000, 0);
    for _ in 0..20 {
        at += 50 + chance.pick_below(3000);
        let kills_agent = at > lost_at + 30_000 && chance.pick_below(3) == 0;
        let fault = match kills_agent {
            true => InjectedFault::AgentKilled(chance.pick_below(3) as usize),
            false => InjectedFault::ControllerKilled,
        };
        lost_at = if kills_agent { at } else { lost_at };
        faults.push((Duration::from_millis(at), fault));
    }
    SimScenario {
        seed,
        builtin: true,
        has_memory_copies: seed.is_multiple_of(2),
        restarts: 1000,
        work: Duration::from_secs(60),
        attach_within: Some(Duration::from_millis(700)),
        ..build_quiet_scenario(3, faults)
    }
}

/// Checks that kills of controllers and agents, soon after each other, only delay a training.
#[test]
fn a_training_continues_after_each_kill_of_a_controller_or_an_agent() {
    let only = std::env::var("LAUNCH_SIM_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let seeds = std::env::var("LAUNCH_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(300);
    for seed in only.map_or(0..seeds, |seed| seed..seed + 1) {
        let scenario = build_scenario_of_kills(seed);
        let last_kill = scenario.faults.last().map_or(Duration::ZERO, |(at, _)| *at);
        let limit = last_kill + scenario.work + Duration::from_secs(60);
        let mut world = Simulation::new(scenario);
        let result = world.run_until(TIME_LIMIT).and_then(|()| check_journal(&world));
        result.unwrap_or_else(|why| panic!("LAUNCH_SIM_SEED={seed}: {why}"));
        let code = world.outcome.as_ref().map(|outcome| outcome.exit_code);
        let mut steps = world.steps.values().rev().map(|(step, _)| *step);
        // Without a checkpoint, two attempts in a row that end at the same step end the run.
        let has_no_progress = code == Some(1) && steps.next() == steps.next();
        assert!(code == Some(0) || has_no_progress, "LAUNCH_SIM_SEED={seed}: {code:?}");
        let ended_at = world.ended_at;
        assert!(ended_at < limit, "LAUNCH_SIM_SEED={seed}: ended at {ended_at:?}, limit {limit:?}");
    }
}

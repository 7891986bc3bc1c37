//! Tests of the straggler detector with simulated times.
use super::*;
use crate::step_times::LinkTimes;
use proptest::prelude::*;

pub(super) const RULES: StragglerRules = StragglerRules { share: 0.1, steps: 10 };
/// The duration of the collectives of a simulated step, in microseconds.
const COLLECTIVE_US: u64 = 40_000;

/// A small generator of pseudo-random numbers, with a fixed sequence for each seed.
pub(super) struct Noise(pub(super) u64);

impl Noise {
    /// Returns a number from 0 to below 1.
    pub(super) fn next_fraction(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Simulates a synchronous step: all ranks wait for the one whose work takes longest.
pub(super) fn simulate_step(work: &[u64]) -> Vec<RankTimes> {
    simulate_step_with(work, COLLECTIVE_US)
}

/// Simulates a synchronous step with collectives of this duration, in microseconds.
pub(super) fn simulate_step_with(work: &[u64], collective_us: u64) -> Vec<RankTimes> {
    let step_us = work.iter().max().unwrap_or(&0) + collective_us;
    let times = |work: &u64| RankTimes {
        step_us,
        waiting_us: step_us - work,
        collective_us: step_us - work,
        micro_batches: 2,
        links: None,
    };
    work.iter().map(times).collect()
}

/// Creates a detector for ranks that are on separate hosts.
fn create_detector(ranks: usize) -> StragglerDetector {
    StragglerDetector::new(RULES, (0..ranks).collect())
}

/// Runs the detector over simulated steps. `work` returns the work of a rank in a step.
fn run_detector(ranks: usize, steps: u64, mut work: impl FnMut(u64, usize) -> f64) -> Vec<StragglerChange> {
    let mut detector = create_detector(ranks);
    let simulate = |step| (0..ranks).map(|rank| (work(step, rank) * 300_000.0) as u64).collect::<Vec<_>>();
    (1..=steps)
        .map(simulate)
        .zip(1..)
        .flat_map(|(work, step)| detector.add_step(step, &simulate_step(&work)))
        .collect()
}

pub(super) fn summarize_changes(changes: &[StragglerChange]) -> Vec<(bool, u32)> {
    changes.iter().map(|c| (c.is_slow, c.rank)).collect()
}

#[test]
fn no_rank_is_named_in_2000_quiet_steps() {
    for (seed, ranks) in [(1, 2), (2, 3), (3, 8), (4, 64), (5, 3), (6, 8)] {
        let mut noise = Noise(seed);
        // Every rank varies by 15 %, and one step in 25 has a pause that triples its work.
        let changes = run_detector(ranks, 2000, |_, _| {
            let pause = if noise.next_fraction() < 0.04 { 2.0 } else { 0.0 };
            1.0 + 0.15 * noise.next_fraction() + pause
        });
        assert_eq!(changes, [], "{ranks} ranks");
    }
}

#[test]
fn ranks_that_are_slow_together_are_not_named() {
    let changes = run_detector(8, 500, |step, _| if (100..300).contains(&step) { 2.0 } else { 1.0 });
    assert_eq!(changes, []);
}

#[test]
fn a_rank_that_is_slow_for_one_step_is_not_named() {
    let changes = run_detector(3, 500, |step, rank| if step % 50 == 0 && rank == 1 { 20.0 } else { 1.0 });
    assert_eq!(changes, []);
}

#[test]
fn a_rank_slowed_by_20_percent_is_named_within_20_steps_and_once() {
    for seed in 0..50 {
        let mut noise = Noise(seed);
        let changes = run_detector(3, 600, |step, rank| {
            let factor = if rank == 2 && (101..400).contains(&step) { 1.2 } else { 1.0 };
            factor * (1.0 + 0.03 * noise.next_fraction())
        });
        assert_eq!(summarize_changes(&changes), [(true, 2), (false, 2)], "seed {seed}");
        assert!((101..=120).contains(&changes[0].step), "{:?}", changes[0]);
        assert!((400..=430).contains(&changes[1].step), "{:?}", changes[1]);
        assert!((0.1..0.25).contains(&changes[0].share), "{:?}", changes[0]);
        assert!((0.35..0.45).contains(&changes[0].step_s), "{:?}", changes[0]);
    }
}

#[test]
fn a_quota_that_stops_a_rank_in_some_of_its_short_steps_is_found() {
    // Steps of 10 ms. The rank is stopped for 30 ms in every period of 100 ms.
    let mut detector = create_detector(3);
    let steps = (1..=2000u64).flat_map(|step| {
        let slow = if step % 7 == 0 { 36_000 } else { 6_000 };
        let times = simulate_step(&[6_000, slow, 6_000]);
        let shorten = |t: &RankTimes| RankTimes {
            step_us: t.step_us - 36_000,
            waiting_us: t.waiting_us - 36_000,
            ..*t
        };
        detector.add_step(step, &times.iter().map(shorten).collect::<Vec<_>>())
    });
    assert_eq!(summarize_changes(&steps.collect::<Vec<_>>()), [(true, 1)]);
}

#[test]
fn both_ranks_of_a_slow_host_lead_to_one_report() {
    let mut noise = Noise(7);
    let changes = run_detector(6, 300, |_, rank| {
        (if rank >= 4 { 1.4 } else { 1.0 }) * (1.0 + 0.02 * noise.next_fraction())
    });
    assert_eq!(changes.len(), 1);
    assert!(changes[0].is_slow && changes[0].rank >= 4);
}

#[test]
fn more_micro_batches_may_take_longer() {
    let mut detector = create_detector(3);
    for step in 1..200 {
        let mut times = simulate_step(&[300_000, 150_000, 150_000]);
        times.iter_mut().zip([2, 1, 1]).for_each(|(t, n)| t.micro_batches = n);
        assert_eq!(detector.add_step(step, &times), []);
    }
}

/// Simulates a step of one rank on each of several hosts, with the times of the network links.
fn simulate_network(links: &[LinkTimes]) -> Vec<RankTimes> {
    let links = links.iter().map(|links| Some(*links));
    simulate_step(&vec![300_000; links.len()])
        .into_iter()
        .zip(links)
        .map(|(times, links)| RankTimes { links, ..times })
        .collect()
}

fn links(slowest_peer: u32, slowest_us: u64, fastest_us: u64) -> Option<LinkTimes> {
    Some(LinkTimes::new(slowest_peer, slowest_us, fastest_us))
}

#[test]
fn short_delays_of_a_network_are_ignored() {
    // On busy CPUs, data of one rank is on its way for 5 ms of each step of 10 ms.
    let links: Vec<LinkTimes> =
        [links(2, 6_000, 500), links(2, 6_000, 500), links(0, 6_000, 5_500)].into_iter().flatten().collect();
    let ranks: Vec<RankTimes> =
        simulate_network(&links).into_iter().map(|times| RankTimes { step_us: 10_000, ..times }).collect();
    let mut detector = create_detector(3);
    let changes: Vec<_> = (1..=2000).flat_map(|step| detector.add_step(step, &ranks)).collect();
    assert_eq!(changes, []);
}

#[test]
fn the_rank_with_the_slow_network_is_named() {
    let outgoing = [links(1, 60_000, 5_000), links(0, 120_000, 100_000), links(1, 60_000, 4_000)];
    let incoming = [links(1, 100_000, 5_000), links(2, 7_000, 5_000), links(1, 110_000, 4_000)];
    for times in [outgoing, incoming] {
        let times: Vec<LinkTimes> = times.into_iter().flatten().collect();
        let mut detector = create_detector(3);
        let changes: Vec<_> =
            (1..=40).flat_map(|step| detector.add_step(step, &simulate_network(&times))).collect();
        assert_eq!(summarize_changes(&changes), [(true, 1)]);
        assert_eq!((changes[0].kind, changes[0].step), (StragglerKind::Network, 10));
    }
}

#[test]
fn a_network_that_is_slow_everywhere_names_no_rank() {
    let mut noise = Noise(11);
    let mut detector = create_detector(4);
    for step in 1..2000 {
        let mut vary = |us: u64| (us as f64 * (1.0 + 0.3 * noise.next_fraction())) as u64;
        let times: Vec<LinkTimes> = (0..4u32)
            .filter_map(|rank| {
                let (a, b) = (vary(100_000), vary(100_000));
                links((rank + 1) % 4, a.max(b), a.min(b))
            })
            .collect();
        assert_eq!(detector.add_step(step, &simulate_network(&times)), []);
    }
    // With two hosts, both ends of the link are equal.
    let times: Vec<LinkTimes> =
        [links(1, 90_000, 90_000), links(0, 2_000, 2_000)].into_iter().flatten().collect();
    let mut detector = create_detector(2);
    assert!((1..100).all(|step| detector.add_step(step, &simulate_network(&times)).is_empty()));
}

#[test]
fn a_changed_number_of_ranks_begins_again() {
    let mut detector = create_detector(3);
    let slow = |ranks: usize| {
        let mut work = vec![300_000; ranks];
        work[0] = 600_000;
        simulate_step(&work)
    };
    assert_eq!((1..10).flat_map(|step| detector.add_step(step, &slow(3))).count(), 0);
    assert_eq!((1..10).flat_map(|step| detector.add_step(step, &slow(4))).count(), 0);
    assert_eq!(detector.add_step(10, &slow(4)).len(), 1);
    assert_eq!(detector.add_step(11, &[]), []);
    assert_eq!((1..99).flat_map(|step| detector.add_step(step, &slow(1))).count(), 0);
}

proptest! {
    #[test]
    fn no_times_break_the_detector(
        steps in prop::collection::vec(
            prop::collection::vec((any::<u64>(), any::<u64>(), 0u64..9, any::<(u32, u64, u64)>()), 0..5),
            0..60,
        ),
        hosts in prop::collection::vec(0usize..4, 0..5),
    ) {
        let mut detector = StragglerDetector::new(StragglerRules { share: 0.01, steps: 2 }, hosts);
        let mut reported = std::collections::BTreeMap::new();
        for (step, ranks) in (0..).zip(steps) {
            let times = ranks.iter().map(|&(step_us, waiting_us, micro_batches, (slowest_peer, a, b))| RankTimes {
                step_us,
                waiting_us,
                collective_us: waiting_us,
                micro_batches,
                links: Some(LinkTimes::new(slowest_peer, a.max(b), a.min(b))),
            });
            for change in detector.add_step(step, &times.collect::<Vec<_>>()) {
                prop_assert!(change.share.is_finite() && change.step_s.is_finite());
                // Reports alternate, unless the number of ranks has changed.
                if !change.is_slow {
                    prop_assert_eq!(reported.get(&change.kind), Some(&change.rank));
                }
                reported.insert(change.kind, change.rank);
            }
        }
    }

    #[test]
    fn the_slowed_rank_is_the_one_that_is_named(
        ranks in 2usize..20, slow in 0usize..20, factor in 1.3f64..4.0, seed in any::<u64>(),
    ) {
        let (slow, mut noise) = (slow % ranks, Noise(seed));
        let changes = run_detector(ranks, 30, |_, rank| {
            (if rank == slow { factor } else { 1.0 }) * (1.0 + 0.05 * noise.next_fraction())
        });
        prop_assert_eq!(summarize_changes(&changes), vec![(true, slow as u32)]);
        prop_assert!(changes[0].step <= 20);
    }
}

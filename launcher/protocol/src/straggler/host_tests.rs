//! Tests of slow networks of hosts with several ranks, with simulated times.
use super::{
    MIN_NETWORK_DELAY_US, StragglerChange, StragglerDetector, StragglerKind,
    host_links::compute_network_delay_shares,
    statistics::{compute_excesses, find_lower_median},
    tests::{Noise, RULES, simulate_step, summarize_changes},
};
use crate::step_times::{LinkTimes, RankTimes};
use proptest::prelude::*;

/// Hosts with the same number of ranks. Ranks are numbered host by host, and connect to the ranks
/// with the same local rank on all other hosts.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    hosts: usize,
    ranks_per_host: usize,
}

/// All sizes that the tests use.
const CLUSTERS: [Cluster; 4] = [
    Cluster { hosts: 3, ranks_per_host: 2 },
    Cluster { hosts: 3, ranks_per_host: 4 },
    Cluster { hosts: 8, ranks_per_host: 2 },
    Cluster { hosts: 8, ranks_per_host: 4 },
];

impl Cluster {
    fn host_of(self, rank: usize) -> usize {
        rank / self.ranks_per_host
    }

    fn world(self) -> usize {
        self.hosts * self.ranks_per_host
    }

    fn list_hosts(self) -> Vec<usize> {
        (0..self.world()).map(|rank| self.host_of(rank)).collect()
    }

    /// Simulates a step. `delay` returns for how long data of a rank is on its way to another rank.
    fn simulate(self, mut delay: impl FnMut(usize, usize) -> u64) -> Vec<RankTimes> {
        let mut times = simulate_step(&vec![300_000; self.world()]);
        for (rank, times) in times.iter_mut().enumerate() {
            let local = rank % self.ranks_per_host;
            let peers = (0..self.hosts).map(|host| host * self.ranks_per_host + local);
            let delays: Vec<(u64, usize)> =
                peers.filter(|peer| *peer != rank).map(|peer| (delay(rank, peer), peer)).collect();
            let (slowest_us, peer) = delays.iter().copied().max().unwrap_or_default();
            let fastest_us = delays.iter().map(|(delay, _)| *delay).min().unwrap_or_default();
            times.links = Some(LinkTimes::new(peer as u32, slowest_us, fastest_us));
        }
        times
    }

    /// Runs the detector over simulated steps. `change` may change the times of each step.
    fn run(
        self,
        steps: u64,
        mut delay: impl FnMut(u64, usize, usize) -> u64,
        change: impl Fn(&mut [RankTimes]),
    ) -> Vec<StragglerChange> {
        let mut detector = StragglerDetector::new(RULES, self.list_hosts());
        let step_changes = |step| {
            let mut times = self.simulate(|from, to| delay(step, from, to));
            change(&mut times);
            detector.add_step(step, &times)
        };
        (1..=steps).flat_map(step_changes).collect()
    }
}

/// Which data of a host is slow.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Direction {
    Outgoing,
    Incoming,
}

/// Checks that the first rank of a host with a slow network is named after ten steps, and that the
/// report ends after the network has recovered. `change` may change the times of each step.
fn check_slow_host(cluster: Cluster, direction: Direction, change: impl Fn(&mut [RankTimes]) + Copy) {
    for slow_host in [0, cluster.hosts - 1] {
        let mut noise = Noise(slow_host as u64 + 1);
        let delay = |step: u64, from: usize, to: usize| {
            let host = if direction == Direction::Outgoing { from } else { to };
            let is_slow = cluster.host_of(host) == slow_host && step <= 40;
            let delay_us = if is_slow { 90_000.0 } else { 5_000.0 };
            (delay_us * (1.0 + 0.3 * noise.next_fraction())) as u64
        };
        let changes = cluster.run(80, delay, change);
        let context = format!("{cluster:?}, {direction:?}, host {slow_host}: {changes:?}");
        let rank = (slow_host * cluster.ranks_per_host) as u32;
        assert_eq!(summarize_changes(&changes), [(true, rank), (false, rank)], "{context}");
        assert!(changes.iter().all(|change| change.kind == StragglerKind::Network), "{context}");
        assert_eq!((changes[0].step, changes[1].step), (10, 50), "{context}");
        assert!((0.2..0.4).contains(&changes[0].share), "{context}");
    }
}

#[test]
fn the_first_rank_of_the_host_with_the_slow_network_is_named() {
    for cluster in CLUSTERS {
        for direction in [Direction::Outgoing, Direction::Incoming] {
            check_slow_host(cluster, direction, |_| ());
        }
    }
}

#[test]
fn ranks_without_measured_connections_do_not_hide_a_slow_host() {
    for cluster in CLUSTERS {
        for direction in [Direction::Outgoing, Direction::Incoming] {
            let first_rank = |times: &mut [RankTimes]| {
                times.iter_mut().step_by(cluster.ranks_per_host).for_each(|times| times.links = None);
            };
            check_slow_host(cluster, direction, first_rank);
            let last_rank = |times: &mut [RankTimes]| {
                let last = cluster.ranks_per_host - 1;
                times.iter_mut().skip(last).step_by(cluster.ranks_per_host).for_each(|t| t.links = None);
            };
            check_slow_host(cluster, direction, last_rank);
        }
    }
    // The receiver itself need not be measured, if three other hosts are.
    let cluster = Cluster { hosts: 8, ranks_per_host: 2 };
    let ends = |times: &mut [RankTimes]| {
        let unmeasured = times.iter_mut().enumerate().filter(|(rank, _)| [0, 7].contains(&(rank / 2)));
        unmeasured.for_each(|(_, times)| times.links = None);
    };
    check_slow_host(cluster, Direction::Incoming, ends);
}

#[test]
fn no_host_is_named_without_measured_connections_or_hosts() {
    let cluster = CLUSTERS[0];
    let delay = |_: u64, from: usize, to: usize| {
        let slow = if cluster.host_of(from) == 1 { 90_000 } else { 5_000 };
        slow + to as u64 * 10
    };
    assert_eq!(summarize_changes(&cluster.run(40, delay, |_| ())), [(true, 2)]);
    assert_eq!(cluster.run(40, delay, |times| times.iter_mut().for_each(|t| t.links = None)), []);
    // Only two hosts are measured.
    let first_host = |times: &mut [RankTimes]| times[..2].iter_mut().for_each(|t| t.links = None);
    assert_eq!(cluster.run(40, delay, first_host), []);
    let mut detector = StragglerDetector::new(RULES, Vec::new());
    let times = cluster.simulate(|from, to| delay(0, from, to));
    assert!((1..40).all(|step| detector.add_step(step, &times).is_empty()), "unknown hosts");
}

#[test]
fn no_host_is_named_in_2000_steps_on_a_busy_network() {
    for (seed, cluster) in (1..).zip(CLUSTERS) {
        let mut noise = Noise(seed);
        let mut delay = |_: u64, from: usize, to: usize| {
            // Connections differ, and one in 20 is slow in a step.
            let usual = 20_000.0 + 3_000.0 * ((from * 7 + to * 3) % 5) as f64;
            let slow = if noise.next_fraction() < 0.05 { 150_000.0 } else { 0.0 };
            (usual * (1.0 + noise.next_fraction()) + slow) as u64
        };
        assert_eq!(cluster.run(2000, &mut delay, |_| ()), [], "{cluster:?}");
    }
}

#[test]
fn a_slow_rank_or_connection_is_not_a_slow_network() {
    for cluster in CLUSTERS {
        // One rank sends late, one rank receives late, and one connection is slow.
        for (from, to) in [(Some(1), None), (None, Some(1)), (Some(1), Some(1 + cluster.ranks_per_host))] {
            let delay = |_: u64, sender: usize, receiver: usize| {
                let is_slow = from.is_none_or(|r| r == sender) && to.is_none_or(|r| r == receiver);
                (if is_slow { 90_000 } else { 5_000 }) + receiver as u64 * 10
            };
            assert_eq!(cluster.run(200, delay, |_| ()), [], "{cluster:?}, {from:?} to {to:?}");
        }
    }
}

#[test]
fn hosts_with_different_numbers_of_ranks_are_compared() {
    // Host 5 has one rank, host 9 has three, and host 7 has two. Data to host 9 is slow.
    let hosts = vec![5, 9, 9, 7, 9, 7];
    let times = simulate_step(&[300_000; 6]).into_iter().enumerate().map(|(rank, times)| {
        let slowest_peer = [1, 0, 0, 1, 3, 2][rank];
        let slowest_us = if hosts[rank] == 9 { 6_000 } else { 90_000 };
        RankTimes { links: Some(LinkTimes::new(slowest_peer, slowest_us, 5_000)), ..times }
    });
    let times: Vec<RankTimes> = times.collect();
    let mut detector = StragglerDetector::new(RULES, hosts);
    let changes: Vec<_> = (1..=40).flat_map(|step| detector.add_step(step, &times)).collect();
    assert_eq!(summarize_changes(&changes), [(true, 1)], "the first rank of host 9");
}

/// Computes the shares that the networks of ranks cost which are all on separate hosts, without
/// combining ranks.
fn compute_rank_shares(ranks: &[RankTimes], window_us: u64) -> Vec<f64> {
    let links: Vec<_> = ranks.iter().enumerate().filter_map(|(rank, t)| Some((rank, t.links?))).collect();
    let mut delays = vec![0; ranks.len()];
    if links.len() >= 3 && links.iter().any(|(_, l)| l.slowest_us != l.fastest_us) {
        let fastest: Vec<u64> = links.iter().map(|(_, l)| l.fastest_us).collect();
        for ((rank, links), excess) in links.iter().zip(compute_excesses(&fastest)) {
            let is_slow = links.fastest_us >= (links.fastest_us - excess).saturating_mul(2);
            delays[*rank] = if is_slow { excess } else { 0 };
        }
        for (receiver, delay) in delays.iter_mut().enumerate() {
            let senders = links.iter().filter(|(sender, _)| *sender != receiver);
            let leads_here = |l: &LinkTimes| {
                l.slowest_peer as usize == receiver && l.slowest_us >= l.fastest_us.saturating_mul(2)
            };
            let incoming =
                senders.map(|(_, l)| if leads_here(l) { l.slowest_us - l.fastest_us } else { 0 }).collect();
            *delay = (*delay).max(find_lower_median(incoming));
        }
    }
    let delays = delays.into_iter().map(|delay| if delay >= MIN_NETWORK_DELAY_US { delay } else { 0 });
    delays.map(|delay| delay as f64 / window_us as f64).collect()
}

proptest! {
    #[test]
    fn with_one_rank_per_host_the_ranks_are_compared(
        links in prop::collection::vec(prop::option::of((0u32..7, 0u64..9, 0u64..9)), 0..7),
    ) {
        // No rank sends data to itself over the network.
        let other_rank = |rank: usize, peer: u32| if peer as usize == rank { peer + 1 } else { peer };
        let to_times = |(rank, links): (usize, Option<(u32, u64, u64)>)| {
            let links = links.map(|(peer, a, b)| {
                LinkTimes::new(other_rank(rank, peer), a.max(b) * 15_000, a.min(b) * 15_000)
            });
            RankTimes { links, ..RankTimes::default() }
        };
        let times: Vec<RankTimes> = links.into_iter().enumerate().map(to_times).collect();
        let hosts: Vec<usize> = (0..times.len()).map(|rank| 100 - rank).collect();
        let shares = compute_network_delay_shares(&times, &hosts, 300_000, MIN_NETWORK_DELAY_US);
        prop_assert_eq!(shares, compute_rank_shares(&times, 300_000));
    }
}

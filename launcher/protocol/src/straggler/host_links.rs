//! Finds hosts with a slow network, by comparing how long data of the ranks of each host was on its
//! way to other hosts.
//!
//! The ranks of a host share a network adapter, but each of them has other connections: data that
//! all ranks need is sent only between ranks with the same local rank. The connections of a host
//! are therefore combined before hosts are compared. Each time of a host is the median over its
//! ranks, so one rank that receives or sends late, because its thread waits for a CPU, is not taken
//! for a slow network.
use super::statistics::{compute_excesses, find_lower_median};
use crate::step_times::{LinkTimes, RankTimes};
use std::collections::BTreeMap;

/// The smallest ratio between two compared network delays at which the larger delay is evidence of
/// a host with a slow network.
const MIN_NETWORK_FACTOR: u64 = 2;
/// The smallest number of hosts whose network times are compared to find a host with a slow
/// network. With two hosts, it cannot be found out which of them is slow.
const MIN_HOSTS: usize = 3;

/// The measured times that data from the ranks of one host needed over the network to ranks of
/// other hosts.
struct HostLinks {
    /// The number of the host.
    host: usize,
    /// The first rank of the host.
    first_rank: usize,
    /// The times of each rank of the host that sent data to other hosts.
    ranks: Vec<LinkTimes>,
}

impl HostLinks {
    /// Returns for how long data of the host was on its way even on its fastest connections.
    fn find_fastest_us(&self) -> u64 {
        find_lower_median(self.ranks.iter().map(|links| links.fastest_us).collect())
    }

    /// Returns each host to which the network delay from ranks of this host is at least twice their
    /// shortest delay, with the median difference in microseconds. `hosts` has the host of each
    /// rank.
    fn list_delays(&self, hosts: &[usize]) -> impl Iterator<Item = (usize, u64)> {
        let mut delays: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for links in &self.ranks {
            let is_slow = links.slowest_us >= MIN_NETWORK_FACTOR.saturating_mul(links.fastest_us);
            let receiver = hosts.get(links.slowest_peer as usize).filter(|host| **host != self.host);
            if let Some(receiver) = receiver.filter(|_| is_slow) {
                delays.entry(*receiver).or_default().push(links.slowest_us - links.fastest_us);
            }
        }
        let ranks = self.ranks.len();
        delays.into_iter().map(move |(receiver, delays)| (receiver, find_padded_median(delays, ranks)))
    }
}

/// Returns one value per rank: for the first rank of a host with a slow network the share of the
/// time window that the host loses, and 0 for all others. `hosts` has the host of each rank.
///
/// The network of a host is slow if data of its ranks is long on its way to all other hosts, or if
/// data from most other hosts is long on its way to the host, but not to others. Delays in the
/// window below `min_delay_us` are ignored.
pub(super) fn compute_network_delay_shares(
    ranks: &[RankTimes],
    hosts: &[usize],
    window_us: u64,
    min_delay_us: u64,
) -> Vec<f64> {
    let mut shares = vec![0.0; ranks.len()];
    if hosts.len() != ranks.len() {
        return shares;
    }
    let grouped = group_by_host(ranks, hosts);
    let measured: Vec<&HostLinks> = grouped.values().filter(|host| !host.ranks.is_empty()).collect();
    let has_choice = measured.iter().flat_map(|host| &host.ranks).any(|l| l.slowest_us != l.fastest_us);
    if measured.len() < MIN_HOSTS || !has_choice {
        return shares;
    }
    let outgoing = list_outgoing_delays(&measured).into_iter();
    let incoming = list_incoming_delays(&measured, hosts);
    for (host, delay) in outgoing.chain(incoming).filter(|(_, delay)| *delay >= min_delay_us) {
        if let Some(share) = grouped.get(&host).and_then(|host| shares.get_mut(host.first_rank)) {
            *share = share.max(delay as f64 / window_us as f64);
        }
    }
    shares
}

/// Collects the measured network delays of the ranks of each host, and returns them in a map from
/// the host's number to the delays of its ranks.
fn group_by_host(ranks: &[RankTimes], hosts: &[usize]) -> BTreeMap<usize, HostLinks> {
    let mut grouped = BTreeMap::new();
    for (rank, (times, &host)) in ranks.iter().zip(hosts).enumerate() {
        let new = || HostLinks { host, first_rank: rank, ranks: Vec::new() };
        grouped.entry(host).or_insert_with(new).ranks.extend(times.links);
    }
    grouped
}

/// Returns the hosts whose shortest delay to any other host is at least twice the median of the
/// other hosts' shortest delays, each with the excess in microseconds.
fn list_outgoing_delays(measured: &[&HostLinks]) -> Vec<(usize, u64)> {
    let fastest: Vec<u64> = measured.iter().map(|host| host.find_fastest_us()).collect();
    let excesses = compute_excesses(&fastest).into_iter();
    let delays = measured.iter().zip(fastest).zip(excesses);
    let slow = delays.filter(|((_, fastest), excess)| {
        *fastest >= MIN_NETWORK_FACTOR.saturating_mul(fastest.saturating_sub(*excess))
    });
    slow.map(|((host, _), excess)| (host.host, excess)).collect()
}

/// Returns the hosts to which data from other hosts was delayed, each with the median of the extra
/// delay over all sending hosts, in microseconds.
fn list_incoming_delays(measured: &[&HostLinks], hosts: &[usize]) -> Vec<(usize, u64)> {
    let mut delays: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for (receiver, delay) in measured.iter().flat_map(|host| host.list_delays(hosts)) {
        delays.entry(receiver).or_default().push(delay);
    }
    let count_senders = |receiver: usize| measured.iter().filter(|host| host.host != receiver).count();
    let median = |(receiver, delays)| (receiver, find_padded_median(delays, count_senders(receiver)));
    delays.into_iter().map(median).collect()
}

/// Returns the lower median of the delays in `values` after the list was extended to `count` delays
/// by zeros, because a sender without an entry had no extra delay.
fn find_padded_median(mut values: Vec<u64>, count: usize) -> u64 {
    values.resize(count.max(values.len()), 0);
    find_lower_median(values)
}

//! [`PairMeasurements`]: what was measured between pairs of hosts, and which values are bad
//! compared with those of other pairs.
use super::fault_search::FaultSearch;
use diagnostic::Diagnostic;
use protocol::network_probe::{Measurement, Transfer};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A transfer between two hosts is slow if its rate is below this share of the usual rate, which is
/// the median of the best rates of all hosts.
const MAX_SLOW_RATE_SHARE: f64 = 0.5;
/// The multiple of the usual round-trip time above which a round trip between two hosts counts as
/// long. It must also exceed the usual time by more than [`MIN_EXTRA_ROUND_TRIP_MS`].
const LONG_ROUND_TRIP_FACTOR: f64 = 5.0;
/// The time, in milliseconds, by which a round trip must exceed the job's usual round-trip time
/// before it can count as long.
const MIN_EXTRA_ROUND_TRIP_MS: f64 = 1.0;

/// The best results of several tests of the connection from one host to another one: rate, round
/// trip and reached ports.
#[derive(Clone, Debug, Default)]
pub(super) struct DirectedMeasurement {
    /// How often the direction was tested.
    pub(super) tests: u32,
    /// Whether the first host reached the second one; `None` if it did not try.
    pub(super) is_reached: Option<bool>,
    /// The error of each port of the second host that the first host did not reach.
    pub(super) errors: Vec<Diagnostic>,
    /// How many ports of the second host the first host reached.
    pub(super) reached_ports: usize,
    /// The fastest transfer; `None` if none was possible.
    pub(super) transfer: Option<Transfer>,
    /// The shortest round trip, in milliseconds.
    pub(super) round_trip_ms: Option<f64>,
}

/// The results of all measurements between pairs of hosts. Hosts are numbered in the order of the
/// job.
#[derive(Clone, Debug, Default)]
pub(super) struct PairMeasurements {
    directions: BTreeMap<(usize, usize), DirectedMeasurement>,
}

/// A measured property of the connection between two hosts: reachability, transfer rate or
/// round-trip time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionProperty {
    /// Whether connections can be opened.
    Reachability,
    /// The rate of transfers.
    Rate,
    /// The time of a round trip.
    RoundTrip,
}

impl ConnectionProperty {
    /// All properties of a connection that `launch check --network` compares between pairs of
    /// hosts: reachability, transfer rate and round-trip time.
    pub(super) const ALL: [ConnectionProperty; 3] =
        [ConnectionProperty::Reachability, ConnectionProperty::Rate, ConnectionProperty::RoundTrip];
}

impl PairMeasurements {
    /// Adds what the agent of `host` has measured about its connection to the host `peer`. The
    /// better of this and earlier measurements counts.
    pub(super) fn add(&mut self, host: usize, peer: usize, found: &Measurement) {
        let forward = self.directions.entry((host, peer)).or_default();
        forward.tests += 1;
        let errors: Vec<Diagnostic> =
            found.connections.iter().filter_map(|result| result.as_ref().err().cloned()).collect();
        let reached = found.connections.len() - errors.len();
        if forward.is_reached.is_none() || reached >= forward.reached_ports {
            (forward.is_reached, forward.reached_ports) = (Some(reached > 0), reached);
            forward.errors = errors;
        }
        keep_faster_transfer(&mut forward.transfer, found.sent);
        let round_trip = found.round_trip_ms;
        forward.round_trip_ms = [forward.round_trip_ms, round_trip].into_iter().flatten().reduce(f64::min);
        if found.received.is_some() || found.sent.is_some() {
            let back = self.directions.entry((peer, host)).or_default();
            keep_faster_transfer(&mut back.transfer, found.received);
        }
    }

    /// Returns what was measured from one host to another one, or `None` if nothing was measured.
    pub(super) fn get(&self, pair: (usize, usize)) -> Option<&DirectedMeasurement> {
        self.directions.get(&pair)
    }

    /// Returns an iterator over all measured connections, each with the numbers of the two hosts.
    pub(super) fn iter(&self) -> impl Iterator<Item = ((usize, usize), &DirectedMeasurement)> {
        self.directions.iter().map(|(pair, direction)| (*pair, direction))
    }

    /// Returns the measured values of one property, each with the indices of the two hosts (from,
    /// to) of the measured direction. The value of the reachability is 1 or 0.
    pub(super) fn list_values_of_property(&self, property: ConnectionProperty) -> Vec<((usize, usize), f64)> {
        let value = |direction: &DirectedMeasurement| match property {
            ConnectionProperty::Reachability => {
                direction.is_reached.map(|is_reached| f64::from(u8::from(is_reached)))
            }
            ConnectionProperty::Rate => direction.transfer.map(|transfer| transfer.bytes_per_second()),
            ConnectionProperty::RoundTrip => direction.round_trip_ms,
        };
        self.iter().filter_map(|(pair, direction)| Some((pair, value(direction)?))).collect()
    }

    /// Returns the usual value of a connection property, such as the transfer rate: the median over
    /// the hosts of each host's best value. One slow host of three slows down most pairs, but not
    /// the best values of the other two. Returns `None` if nothing was measured.
    pub(super) fn find_usual_value(&self, property: ConnectionProperty) -> Option<f64> {
        let mut best: BTreeMap<usize, f64> = BTreeMap::new();
        let is_better = |new: f64, old: f64| match property {
            ConnectionProperty::RoundTrip => new < old,
            ConnectionProperty::Reachability | ConnectionProperty::Rate => new > old,
        };
        for ((a, b), value) in self.list_values_of_property(property) {
            for host in [a, b] {
                let known = best.entry(host).or_insert(value);
                if is_better(value, *known) {
                    *known = value;
                }
            }
        }
        let mut values: Vec<f64> = best.into_values().collect();
        values.sort_unstable_by(f64::total_cmp);
        let middle = match property {
            ConnectionProperty::RoundTrip => values.len().saturating_sub(1) / 2,
            ConnectionProperty::Reachability | ConnectionProperty::Rate => values.len() / 2,
        };
        values.get(middle).copied()
    }

    /// Creates a search for the hosts and network paths that cause the bad values of one property,
    /// such as a low transfer rate.
    pub(super) fn create_fault_search(&self, property: ConnectionProperty) -> FaultSearch {
        let mut search = FaultSearch::default();
        let usual = self.find_usual_value(property).unwrap_or(0.0);
        for (pair, value) in self.list_values_of_property(property) {
            let is_bad = match property {
                ConnectionProperty::Reachability => value == 0.0,
                ConnectionProperty::Rate => value == 0.0 || value < MAX_SLOW_RATE_SHARE * usual,
                ConnectionProperty::RoundTrip => {
                    value > LONG_ROUND_TRIP_FACTOR * usual && value > usual + MIN_EXTRA_ROUND_TRIP_MS
                }
            };
            let reverse = (pair.1, pair.0);
            let tests = [pair, reverse].map(|pair| self.get(pair).map_or(0, |direction| direction.tests));
            search.add_transfer(pair, is_bad, tests[0].max(tests[1]));
        }
        search
    }

    /// Returns the measurements of all pairs of hosts as JSON, with the names of the hosts.
    pub(super) fn to_json(&self, names: &[String]) -> Value {
        let direction = |((from, to), direction): ((usize, usize), &DirectedMeasurement)| {
            let transfer = direction.transfer;
            json!({
                "from": names.get(from),
                "to": names.get(to),
                "reached": direction.is_reached,
                "bytes_per_second": transfer.map(|transfer| transfer.bytes_per_second()),
                "round_trip_ms": direction.round_trip_ms,
                "retransmits": transfer.and_then(|transfer| transfer.retransmits),
                "segments": transfer.and_then(|transfer| transfer.segments),
                "errors": direction.errors.iter().map(Diagnostic::message).collect::<Vec<_>>(),
            })
        };
        self.iter().map(direction).collect()
    }
}

/// Stores the measured transfer `new` in `known` if it is faster than `known`, or if `known` is
/// empty.
fn keep_faster_transfer(known: &mut Option<Transfer>, new: Option<Transfer>) {
    if let Some(new) = new
        && known.is_none_or(|known| new.bytes_per_second() > known.bytes_per_second())
    {
        *known = Some(new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::check::network::fault_search::{TransferFault, TransferRole};

    /// Returns the result of a host that reached its peer, with these rates in MB/s.
    fn measure(sent: u64, received: u64, round_trip_ms: f64) -> Measurement {
        let transfer = |rate: u64| Transfer { bytes: rate * 1_000_000, seconds: 1.0, ..Transfer::default() };
        Measurement {
            connections: vec![Ok(0.2)],
            round_trip_ms: Some(round_trip_ms),
            sent: Some(transfer(sent)),
            received: Some(transfer(received)),
        }
    }

    #[test]
    fn the_slow_sender_of_three_hosts_is_found() {
        let mut pairs = PairMeasurements::default();
        for (a, b, sent, received) in [(0, 1, 1000, 900), (0, 2, 1100, 10), (1, 2, 950, 12)] {
            for _ in 0..2 {
                pairs.add(a, b, &measure(sent, received, 0.1));
                pairs.add(b, a, &Measurement { connections: vec![Ok(0.1)], ..Measurement::default() });
            }
        }
        let faults = |property| pairs.create_fault_search(property).find_faults();
        assert_eq!(faults(ConnectionProperty::Rate), [TransferFault::Host(2, TransferRole::Sender)]);
        assert_eq!(faults(ConnectionProperty::Reachability), []);
        assert_eq!(faults(ConnectionProperty::RoundTrip), []);
        assert!(pairs.find_usual_value(ConnectionProperty::Rate).is_some_and(|rate| rate > 9e8));
    }

    #[test]
    fn both_directions_of_a_slow_host_do_not_move_the_usual_rate() {
        let mut pairs = PairMeasurements::default();
        for (a, b, rate) in [(0, 1, 1000), (0, 2, 10), (1, 2, 12)] {
            pairs.add(a, b, &measure(rate, rate, 0.1));
        }
        let found = pairs.create_fault_search(ConnectionProperty::Rate).find_faults();
        let expected =
            [TransferRole::Sender, TransferRole::Receiver].map(|role| TransferFault::Host(2, role));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_firewall_in_one_direction_is_a_fault_of_the_receiver() {
        let mut pairs = PairMeasurements::default();
        let closed = Diagnostic::error(diagnostic::codes::host::PEER_UNREACHABLE, "closed");
        let unreachable = Measurement { connections: vec![Err(closed)], ..Measurement::default() };
        for (a, b) in [(0, 1), (1, 0), (2, 0), (2, 1)] {
            pairs.add(a, b, &measure(1000, 1000, 0.1));
        }
        pairs.add(0, 2, &unreachable);
        pairs.add(1, 2, &unreachable);
        let found = pairs.create_fault_search(ConnectionProperty::Reachability).find_faults();
        assert_eq!(found, [TransferFault::Host(2, TransferRole::Receiver)]);
        assert_eq!(pairs.get((0, 2)).map(|direction| direction.errors.len()), Some(1));
    }

    #[test]
    fn the_better_of_two_tests_counts() {
        let mut pairs = PairMeasurements::default();
        pairs.add(0, 1, &measure(10, 10, 9.0));
        pairs.add(0, 1, &measure(1000, 900, 0.1));
        let direction = pairs.get((0, 1)).expect("measured");
        assert_eq!((direction.tests, direction.round_trip_ms), (2, Some(0.1)));
        assert_eq!(direction.transfer.map(|transfer| transfer.bytes_per_second()), Some(1e9));
        assert_eq!(pairs.get((1, 0)).and_then(|back| back.transfer).map(|t| t.bytes_per_second()), Some(9e8));
    }
}

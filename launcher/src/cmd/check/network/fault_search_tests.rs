use super::*;
use crate::cmd::check::network::pair_rounds::{plan_rounds, select_disjoint_pairs};
use proptest::prelude::*;

/// The largest number of search rounds that may follow the rounds of [`plan_rounds`].
const MAX_FURTHER_ROUNDS: usize = 12;

/// A simulated network with faults, which reports only the results of tested transfers.
#[derive(Clone, Debug)]
struct FaultyNetwork {
    hosts: usize,
    senders: Vec<usize>,
    receivers: Vec<usize>,
    paths: Vec<(usize, usize)>,
}

impl FaultyNetwork {
    fn is_bad(&self, sender: usize, receiver: usize) -> bool {
        self.senders.contains(&sender)
            || self.receivers.contains(&receiver)
            || self.paths.contains(&(sender, receiver))
    }

    /// Runs a [`FaultSearch`] on the network until the search needs no further test. Returns the
    /// faults and the number of tested pairs of hosts.
    fn run_fault_search(&self) -> (Vec<TransferFault>, usize) {
        let mut tests: BTreeMap<(usize, usize), u32> = BTreeMap::new();
        let mut rounds = plan_rounds(self.hosts);
        rounds.reverse();
        let mut further = 0;
        loop {
            let mut search = FaultSearch::default();
            for (pair, count) in &tests {
                search.add_transfer(*pair, self.is_bad(pair.0, pair.1), *count);
            }
            let round = match rounds.pop() {
                Some(round) => round,
                None => select_disjoint_pairs(search.choose_test_transfers(self.hosts, |_, _| true)),
            };
            if round.is_empty() || further == MAX_FURTHER_ROUNDS {
                return (search.find_faults(), tests.values().sum::<u32>() as usize / 2);
            }
            further += usize::from(rounds.is_empty());
            for (a, b) in round {
                *tests.entry((a, b)).or_default() += 1;
                *tests.entry((b, a)).or_default() += 1;
            }
        }
    }

    /// Returns the faulty hosts from all transfers: the smallest set of hosts in a role, and then
    /// of paths, that explains every bad transfer and no good one.
    fn search_exhaustively(&self) -> Vec<TransferFault> {
        let pairs: Vec<(usize, usize)> = (0..self.hosts)
            .flat_map(|a| (0..self.hosts).filter(move |b| *b != a).map(move |b| (a, b)))
            .collect();
        let mut best: Option<(usize, Vec<TransferFault>)> = None;
        for set in 0..1u32 << (2 * self.hosts) {
            let has = |host: usize, role: TransferRole| {
                set & (1 << (host + if role == TransferRole::Sender { 0 } else { self.hosts })) != 0
            };
            let blames =
                |(a, b): (usize, usize)| has(a, TransferRole::Sender) || has(b, TransferRole::Receiver);
            if pairs.iter().any(|pair| blames(*pair) && !self.is_bad(pair.0, pair.1)) {
                continue;
            }
            let left: Vec<_> =
                pairs.iter().filter(|pair| self.is_bad(pair.0, pair.1) && !blames(**pair)).collect();
            let cost = set.count_ones() as usize + left.len();
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                let roles = [TransferRole::Sender, TransferRole::Receiver];
                let mut faults: Vec<TransferFault> = (0..self.hosts)
                    .flat_map(|host| roles.map(|role| (host, role)))
                    .filter(|(host, role)| has(*host, *role))
                    .map(|(host, role)| TransferFault::Host(host, role))
                    .collect();
                faults.extend(left.iter().map(|pair| TransferFault::Path(pair.0, pair.1)));
                faults.sort_unstable();
                best = Some((cost, faults));
            }
        }
        best.expect("the empty set explains everything by paths").1
    }
}

/// Returns only the faults of hosts.
fn select_host_faults(faults: &[TransferFault]) -> Vec<TransferFault> {
    faults.iter().copied().filter(|fault| matches!(fault, TransferFault::Host(..))).collect()
}

proptest! {
    #[test]
    fn the_faulty_hosts_are_those_of_an_exhaustive_search(
        hosts in 5usize..7,
        sender in proptest::option::of(0usize..7),
        receiver in proptest::option::of(0usize..7),
        path in proptest::option::of((0usize..7, 1usize..6)),
    ) {
        let path = path.map(|(from, step)| (from % hosts, (from % hosts + 1 + step % (hosts - 1)) % hosts));
        let network = FaultyNetwork {
            hosts,
            senders: sender.map(|host| host % hosts).into_iter().collect(),
            receivers: receiver.map(|host| host % hosts).into_iter().collect(),
            paths: path.into_iter().filter(|(a, b)| a != b).collect(),
        };
        let (found, tests) = network.run_fault_search();
        prop_assert_eq!(select_host_faults(&found), select_host_faults(&network.search_exhaustively()), "{:?}", &network);
        prop_assert!(tests <= 4 * hosts, "{} tests", tests);
        // Every bad transfer that was tested is explained, and a path is blamed only if it is bad.
        for fault in found {
            if let TransferFault::Path(a, b) = fault {
                prop_assert!(network.paths.contains(&(a, b)), "{:?}", &network);
            }
        }
    }

    #[test]
    fn few_tests_find_several_faulty_hosts_among_many(
        hosts in 16usize..80,
        faulty in proptest::collection::btree_set((0usize..80, any::<bool>()), 0..4),
    ) {
        let select = |is_sender: bool| -> Vec<usize> {
            let mut selected: Vec<usize> =
                faulty.iter().filter(|(_, s)| *s == is_sender).map(|(host, _)| host % hosts).collect();
            selected.sort_unstable();
            selected.dedup();
            selected
        };
        let (senders, receivers) = (select(true), select(false));
        let network = FaultyNetwork { hosts, senders, receivers, paths: Vec::new() };
        let mut expected: Vec<TransferFault> = network
            .senders
            .iter()
            .map(|host| TransferFault::Host(*host, TransferRole::Sender))
            .chain(network.receivers.iter().map(|host| TransferFault::Host(*host, TransferRole::Receiver)))
            .collect();
        expected.sort_unstable();
        let (found, tests) = network.run_fault_search();
        prop_assert_eq!(found, expected);
        let base: usize = plan_rounds(hosts).iter().map(Vec::len).sum();
        prop_assert!(tests <= base + 4 * faulty.len(), "{} tests, {} in the first rounds", tests, base);
    }
}

#[test]
fn two_hosts_cannot_tell_the_sender_from_the_receiver() {
    let network = FaultyNetwork { hosts: 2, senders: vec![1], receivers: vec![], paths: vec![] };
    let (found, tests) = network.run_fault_search();
    assert_eq!((found, tests), (vec![TransferFault::Undetermined(1, 0)], 3));
}

#[test]
fn the_majority_of_three_hosts_finds_the_faulty_one() {
    let network = FaultyNetwork { hosts: 3, senders: vec![2], receivers: vec![2], paths: vec![] };
    let expected =
        [TransferRole::Sender, TransferRole::Receiver].map(|role| TransferFault::Host(2, role)).to_vec();
    assert_eq!(network.run_fault_search().0, expected);
}

#[test]
fn a_path_between_working_hosts_is_at_fault() {
    let network = FaultyNetwork { hosts: 4, senders: vec![], receivers: vec![], paths: vec![(0, 3)] };
    assert_eq!(network.run_fault_search().0, [TransferFault::Path(0, 3)]);
}

#[test]
fn if_nothing_works_no_host_is_blamed() {
    let network = FaultyNetwork { hosts: 3, senders: vec![0, 1, 2], receivers: vec![], paths: vec![] };
    assert!(select_host_faults(&network.run_fault_search().0).is_empty());
}

#[test]
fn a_bad_test_that_does_not_repeat_blames_no_host() {
    let mut search = FaultSearch::default();
    search.add_transfer((0, 1), true, 1);
    search.add_transfer((1, 0), false, 1);
    assert_eq!(search.choose_test_transfers(2, |_, _| true), [(0, 1)], "the bad transfer is repeated");
    search.add_transfer((0, 1), false, 2);
    assert_eq!((search.find_faults(), search.choose_test_transfers(2, |_, _| true)), (vec![], vec![]));
}

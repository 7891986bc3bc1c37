//! [`FaultSearch`]: finds out which host or network path causes bad transfers (impossible or too
//! slow), and which transfers to test next.
//!
//! A transfer is bad because of its sender, its receiver or the path between them. A host that
//! takes part in a good transfer works in that role. So a bad transfer to a working receiver is
//! evidence against the sender, and the other way round. Two pieces of evidence convict a host,
//! because one can also come from a damaged path. If neither side of a bad transfer is known to
//! work, each of them is tested with a host that is.
use std::collections::BTreeMap;

/// The number of bad transfers with different hosts after which a host counts as faulty, if each of
/// these hosts has a good transfer with another host.
const MIN_BAD_TRANSFERS_OF_FAULTY_HOST: usize = 2;
/// The number of tests that confirm that a transfer between two hosts is bad, because other load
/// can disturb a single test.
const TESTS_OF_BAD_TRANSFER: u32 = 2;
/// The number of tests of a bad transfer after which the network path between its two hosts is
/// blamed, if neither host is found faulty.
const TESTS_OF_BAD_PATH: u32 = 3;

/// The results (good or bad) of all tested transfers between hosts, from which the hosts and
/// network paths at fault are derived.
#[derive(Clone, Debug, Default)]
pub(super) struct FaultSearch {
    transfers: BTreeMap<(usize, usize), TestedTransfer>,
}

/// The test results of transfers from one host to another: the number of tests, and whether all of
/// them were bad.
#[derive(Clone, Copy, Debug)]
struct TestedTransfer {
    is_bad: bool,
    tests: u32,
}

/// The role of a host in a transfer: sender or receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TransferRole {
    Sender,
    Receiver,
}

/// What is at fault for bad transfers: a host, or the path between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TransferFault {
    /// The host in this role: no transfer with a working partner was good.
    Host(usize, TransferRole),
    /// The path from the first host to the second one: both work with other hosts.
    Path(usize, usize),
    /// The first host as the sender, the second one as the receiver, or the path: there is no
    /// further host that could distinguish them.
    Undetermined(usize, usize),
}

impl FaultSearch {
    /// Adds the result of testing the transfer from `sender` to `receiver`: the number of tests,
    /// and whether all of them were bad.
    pub(super) fn add_transfer(&mut self, (sender, receiver): (usize, usize), is_bad: bool, tests: u32) {
        self.transfers.insert((sender, receiver), TestedTransfer { is_bad, tests });
    }

    /// Returns whether `host` took part in a good transfer in the role `role` (sender or receiver).
    fn has_good_transfer(&self, host: usize, role: TransferRole) -> bool {
        let is_good = |(pair, transfer): (&(usize, usize), &TestedTransfer)| {
            !transfer.is_bad && select_host_by_role(*pair, role) == host
        };
        self.transfers.iter().any(is_good)
    }

    /// Returns the bad transfers that suggest a fault of `host` as sender or receiver (`role`),
    /// because the other host of each transfer works with a third host.
    fn list_evidence_against_host(&self, host: usize, role: TransferRole) -> Vec<(usize, usize)> {
        if self.has_good_transfer(host, role) {
            return Vec::new();
        }
        let other = role.opposite_role();
        let is_evidence = |pair: &(usize, usize), transfer: &TestedTransfer| {
            transfer.is_bad
                && select_host_by_role(*pair, role) == host
                && self.has_good_transfer(select_host_by_role(*pair, other), other)
        };
        let evidence = self.transfers.iter().filter(|(pair, transfer)| is_evidence(pair, transfer));
        evidence.map(|(pair, _)| *pair).collect()
    }

    /// Returns whether enough bad transfers show that `host` is at fault as the sender or receiver,
    /// as `role` selects.
    fn is_proven_faulty(&self, host: usize, role: TransferRole) -> bool {
        self.list_evidence_against_host(host, role).len() >= MIN_BAD_TRANSFERS_OF_FAULTY_HOST
    }

    /// Returns all bad transfers, each as a pair of sender and receiver.
    fn list_bad_transfers(&self) -> Vec<(usize, usize)> {
        self.transfers.iter().filter(|(_, transfer)| transfer.is_bad).map(|(pair, _)| *pair).collect()
    }

    /// Returns all hosts and paths that are at fault for bad transfers, in ascending order without
    /// duplicates. The result explains every bad transfer.
    pub(super) fn find_faults(&self) -> Vec<TransferFault> {
        use TransferRole::{Receiver, Sender};
        let mut faults = Vec::new();
        for (sender, receiver) in self.list_bad_transfers() {
            let convicted = [(sender, Sender), (receiver, Receiver)].map(|(host, role)| {
                self.is_proven_faulty(host, role).then_some(TransferFault::Host(host, role))
            });
            faults.extend(convicted.iter().flatten());
            if convicted.iter().all(Option::is_none) {
                let both_work =
                    self.has_good_transfer(sender, Sender) && self.has_good_transfer(receiver, Receiver);
                faults.push(match both_work {
                    true => TransferFault::Path(sender, receiver),
                    false => TransferFault::Undetermined(sender, receiver),
                });
            }
        }
        faults.sort_unstable();
        faults.dedup();
        faults
    }

    /// Returns the transfers between hosts to test next, to find out which hosts are at fault, as
    /// pairs of sender and receiver. The result is empty if no further test helps. `is_usable`
    /// returns whether a transfer may be tested.
    pub(super) fn choose_test_transfers(
        &self,
        hosts: usize,
        is_usable: impl Fn(usize, usize) -> bool,
    ) -> Vec<(usize, usize)> {
        let mut chosen = Vec::new();
        for pair in self.list_bad_transfers() {
            for role in [TransferRole::Sender, TransferRole::Receiver] {
                chosen.extend(self.choose_test_transfer_for_host(
                    select_host_by_role(pair, role),
                    role,
                    hosts,
                    &is_usable,
                ));
            }
            let is_path_fault = [TransferRole::Sender, TransferRole::Receiver]
                .into_iter()
                .all(|role| !self.is_proven_faulty(select_host_by_role(pair, role), role));
            if is_path_fault && self.count_tests(pair) < TESTS_OF_BAD_PATH && is_usable(pair.0, pair.1) {
                chosen.push(pair);
            }
        }
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    /// Returns the next transfer to test, to find out whether `host` works in the role `role`
    /// (sender or receiver): a transfer with a new partner that is known to work, or the repetition
    /// of a bad transfer.
    fn choose_test_transfer_for_host(
        &self,
        host: usize,
        role: TransferRole,
        hosts: usize,
        is_usable: &impl Fn(usize, usize) -> bool,
    ) -> Option<(usize, usize)> {
        if self.has_good_transfer(host, role) {
            return None;
        }
        let pair = |partner: usize| match role {
            TransferRole::Sender => (host, partner),
            TransferRole::Receiver => (partner, host),
        };
        let evidence = self.list_evidence_against_host(host, role);
        if evidence.len() >= MIN_BAD_TRANSFERS_OF_FAULTY_HOST {
            // One confirmed transfer suffices: the others agree with it.
            let is_confirmed = evidence.iter().any(|pair| self.count_tests(*pair) >= TESTS_OF_BAD_TRANSFER);
            return evidence.into_iter().find(|pair| !is_confirmed && is_usable(pair.0, pair.1));
        }
        let is_new = |partner: &usize| {
            let pair = pair(*partner);
            *partner != host
                && self.has_good_transfer(*partner, role.opposite_role())
                && !self.transfers.contains_key(&pair)
                && is_usable(pair.0, pair.1)
        };
        // Hosts begin with different partners, so that their tests can run at the same time.
        (1..hosts).map(|step| (host + step) % hosts).find(is_new).map(pair)
    }

    /// Returns how often the transfer from one host to another one was tested.
    fn count_tests(&self, pair: (usize, usize)) -> u32 {
        self.transfers.get(&pair).map_or(0, |transfer| transfer.tests)
    }
}

impl TransferRole {
    /// Returns the role of the other host of a transfer: the receiver for a sender, and the sender
    /// for a receiver.
    fn opposite_role(self) -> TransferRole {
        match self {
            TransferRole::Sender => TransferRole::Receiver,
            TransferRole::Receiver => TransferRole::Sender,
        }
    }
}

/// Returns the sender or the receiver of a transfer, as `role` selects.
fn select_host_by_role((sender, receiver): (usize, usize), role: TransferRole) -> usize {
    match role {
        TransferRole::Sender => sender,
        TransferRole::Receiver => receiver,
    }
}

#[cfg(test)]
#[path = "fault_search_tests.rs"]
mod tests;

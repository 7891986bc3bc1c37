//! [`NetworkReport`]: the results of `launch check --network`, which are inspections of each host's
//! network and measurements between pairs of hosts.
use super::pair_measurements::PairMeasurements;
use protocol::network_probe::NetworkInspection;

/// What `launch check --network` has found: the network inspection of each host, and the
/// measurements between pairs of hosts.
#[derive(Debug, Default)]
pub(in crate::cmd::check) struct NetworkReport {
    /// For each host, its interface and devices, or the error; `None` if no agent answered.
    pub(super) inspections: Vec<Option<NetworkInspection>>,
    pub(super) pairs: PairMeasurements,
    /// The number of rounds in which pairs of hosts were measured.
    pub(super) rounds: usize,
    /// Whether the time was too short for all rounds.
    pub(super) is_incomplete: bool,
}

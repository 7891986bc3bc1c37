//! [`HostTarget`]: a host of a job, by the name under which the transport (local, SSH, Slurm or
//! joined nodes) reaches it.
use super::host_list::ClusterHost;
use jobspec::hosts::HostSlots;
use serde::{Deserialize, Serialize};

/// A host of a job: the name by which launch starts an agent on it, and its slots (places for
/// workers) that the job uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostTarget {
    /// The host's name in the job, by which the transport finds the host.
    pub(crate) name: String,
    /// The number of workers that the list of hosts declares for the host; `None` if the list
    /// declares no number.
    pub(crate) slots: Option<u32>,
    /// The numbers of the slots that the job's filter selects on this host; `None` if no filter
    /// selects slots of the host.
    pub(crate) selected_slots: Option<Vec<u32>>,
    /// Whether the host is the controller's machine.
    pub(crate) local: bool,
}

impl HostTarget {
    /// Creates the target for starting an agent on a host that `cluster.hosts` or a hostfile names.
    /// The host counts as another machine (`local` is `false`).
    pub(crate) fn from_cluster_host(host: &ClusterHost) -> HostTarget {
        let selected_slots =
            if let HostSlots::Selected(list) = &host.slots { Some(list.clone()) } else { None };
        HostTarget {
            name: host.host.name_with_port(),
            slots: host.slots.count(),
            selected_slots,
            local: false,
        }
    }
}

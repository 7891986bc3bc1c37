//! [`JobHost`]: a host on which workers are planned, with its hardware and environment.
use jobspec::HostSelection;
use protocol::control::HostInventory;
use std::net::IpAddr;

/// A host of the job for which workers are planned: its name, hardware and environment.
#[derive(Clone, Debug, PartialEq)]
pub struct JobHost {
    /// The name of the host, as the job states it.
    pub name: String,
    /// The number of workers that the list of hosts or the scheduler allows on the host; `None` if
    /// neither states a number.
    pub slots: Option<u32>,
    /// The numbers of the slots that a host filter selects, which are also the numbers of the GPUs
    /// to use. `None` stands for all slots.
    pub selected_slots: Option<Vec<u32>>,
    /// Whether the host is the machine on which the controller runs.
    pub local: bool,
    /// The inventory that the host's agent reported. Before the report, the value of
    /// [`HostInventory::unknown`].
    pub inventory: HostInventory,
}

impl JobHost {
    /// Returns the IP address of this host to which the controller connected by SSH; `None` for the
    /// controller's machine and for nodes that joined by themselves. There, sshd states at which
    /// address the user reached them.
    pub(super) fn reached_address(&self, hosts: &HostSelection) -> Option<IpAddr> {
        self.inventory.reached_address.filter(|_| !self.local && *hosts != HostSelection::Join)
    }
}

//! [`Preparation`]: what an attempt needs before its workers can start: the inventories of its
//! hosts, a plan, and a bound rendezvous.
use super::{
    HostTarget,
    core::{HostIndex, PlannedWorker},
    rendezvous::Rendezvous,
};
use crate::{
    discover::Inventory,
    plan::{JobHost, Plan},
};
use contract::{
    control::{BindRendezvous, HostInventory, HostPlan},
    job::{JobSpec, MasterPort, StoreHost},
};
use std::net::{IpAddr, Ipv4Addr};
use tokio::sync::mpsc;

/// The inventories that the agents have sent, and the user's choices of devices.
pub(super) struct HostInventories {
    /// The user's choices of devices, which hold for every host.
    chosen: Vec<(String, String)>,
    by_host: Vec<Option<HostInventory>>,
}

impl HostInventories {
    pub(super) fn new(chosen: Vec<(String, String)>, hosts: usize) -> Self {
        HostInventories { chosen, by_host: vec![None; hosts] }
    }

    pub(super) fn insert(&mut self, host: HostIndex, inventory: HostInventory) {
        if host >= self.by_host.len() {
            self.by_host.resize(host + 1, None);
        }
        if let Some(slot) = self.by_host.get_mut(host) {
            *slot = Some(inventory);
        }
    }

    /// Describes the hosts for the planner. Leaves out hosts without an inventory.
    pub(super) fn job_hosts(&self, targets: &[HostTarget], hosts: &[HostIndex]) -> Vec<JobHost> {
        let job_host = |host: &HostIndex| {
            let target = targets.get(*host)?;
            let inventory = self.by_host.get(*host)?.clone()?;
            Some(JobHost {
                name: target.name.clone(),
                slots: target.slots,
                selected_slots: target.selected_slots.clone(),
                local: target.local,
                inventory: Inventory::from_agent(inventory, &self.chosen),
            })
        };
        hosts.iter().filter_map(job_host).collect()
    }

    /// The addresses of all hosts except loopback, which may connect to the rendezvous.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let addresses = self.by_host.iter().flatten().flat_map(|inventory| &inventory.addresses);
        let mut addresses: Vec<IpAddr> =
            addresses.map(|a| a.address).filter(|ip| !ip.is_loopback()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }
}

/// An attempt that is being prepared.
pub(super) struct Preparation {
    pub(super) plan: Plan,
    /// The hosts of the plan, in the order of ranks.
    pub(super) hosts: Vec<HostIndex>,
    pub(super) bind: BindRendezvous,
    /// The rendezvous, if the controller binds it.
    pub(super) rendezvous: Option<Rendezvous>,
    /// The port, if the agent on the host of rank 0 has bound it.
    pub(super) port: Option<u16>,
}

impl Preparation {
    pub(super) fn new(job: &JobSpec, plan: Plan, allowed: &[IpAddr]) -> Self {
        let address = plan.master_address.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let port = if let MasterPort::Fixed(number) = job.cluster.master_port { number } else { 0 };
        let store = job.run.command.is_some() && job.cluster.store == StoreHost::Agent;
        let attempt = plan.host_plans.first().map_or(0, |node| node.attempt);
        let allowed = if address.is_loopback() { Vec::new() } else { allowed.to_vec() };
        let bind = BindRendezvous { attempt, address, port, store, clients: plan.world, allowed };
        Preparation { plan, hosts: Vec::new(), bind, rendezvous: None, port: None }
    }

    /// Binds the rendezvous in this process.
    pub(super) fn bind_locally(&self, messages: &mpsc::Sender<String>) -> diagnostic::Result<Rendezvous> {
        Rendezvous::open(&self.bind, messages)
    }
}

/// The workers of each host of a plan, in the form of [`Input::Ready`](super::core::Input::Ready).
pub(super) fn planned_workers(plan: &Plan) -> Vec<Vec<PlannedWorker>> {
    let host_workers =
        |host: &HostPlan| host.workers.iter().map(|w| PlannedWorker { log: w.log.clone() }).collect();
    plan.host_plans.iter().map(host_workers).collect()
}

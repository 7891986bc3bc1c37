//! [`AttemptPreparation`]: an attempt (one start of all workers) that is planned but not started,
//! because its rendezvous port (`MASTER_PORT`) must be bound first. [`HostInventories`] holds the
//! hardware of the hosts, from which the plan is made.
use super::core::{HostIndex, PlannedWorker};
use crate::{
    cluster::HostTarget,
    plan::{JobHost, Plan},
    rendezvous::BoundRendezvous,
};
use jobspec::{JobSpec, MasterPort, StoreHost};
use protocol::control::{HostInventory, HostPlan, RendezvousRequest};
use std::net::{IpAddr, Ipv4Addr};
use tokio::sync::mpsc;

/// The hardware and environment of all hosts as their agents have reported them, with environment
/// variables that apply to every host.
pub(super) struct HostInventories {
    /// Names and values of variables in the controller's environment, such as `OMP_NUM_THREADS`.
    /// They apply to every host, except those that select visible GPUs, which each host sets
    /// itself.
    chosen: Vec<(String, String)>,
    /// The inventory of each host; `None` before the hello of its agent.
    by_host: Vec<Option<HostInventory>>,
}

impl HostInventories {
    /// Creates an empty collection for the inventories (hardware and environment) of `hosts` hosts.
    /// `chosen` are names and values of variables in the controller's environment, which apply to
    /// every host unless they select visible GPUs.
    pub(super) fn new(chosen: Vec<(String, String)>, hosts: usize) -> Self {
        HostInventories { chosen, by_host: vec![None; hosts] }
    }

    /// Stores the inventory (hardware and environment) of a host and replaces an earlier inventory
    /// of that host.
    pub(super) fn insert_inventory(&mut self, host: HostIndex, inventory: HostInventory) {
        if host >= self.by_host.len() {
            self.by_host.resize(host + 1, None);
        }
        if let Some(slot) = self.by_host.get_mut(host) {
            *slot = Some(inventory);
        }
    }

    /// Describes the hosts of the next start of all workers by name, slots and hardware inventory,
    /// in the order of the host indices `hosts`. `targets` holds all hosts of the run, by index.
    /// Leaves out hosts without an inventory.
    pub(super) fn build_job_hosts(&self, targets: &[HostTarget], hosts: &[HostIndex]) -> Vec<JobHost> {
        let job_host = |host: &HostIndex| {
            let target = targets.get(*host)?;
            let inventory = self.by_host.get(*host)?.clone()?;
            Some(JobHost {
                name: target.name.clone(),
                slots: target.slots,
                selected_slots: target.selected_slots.clone(),
                local: target.local,
                inventory: HostInventory::from_report(inventory, &self.chosen),
            })
        };
        hosts.iter().filter_map(job_host).collect()
    }

    /// Returns all network addresses except loopback of the hosts whose agents have reported,
    /// sorted and without duplicates. The caller permits connections to the rendezvous from these
    /// addresses.
    pub(super) fn collect_host_addresses(&self) -> Vec<IpAddr> {
        let addresses = self.by_host.iter().flatten().flat_map(|inventory| &inventory.addresses);
        let mut addresses: Vec<IpAddr> =
            addresses.map(|a| a.address).filter(|ip| !ip.is_loopback()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }
}

/// The result of planning a start of all workers (attempt): the plan without the rendezvous port,
/// or the error because of which there is no plan.
pub(super) struct AttemptPlanningResult {
    pub(super) attempt: u32,
    /// The hosts of the attempt, in the order of ranks.
    pub(super) hosts: Vec<HostIndex>,
    pub(super) plan: diagnostic::Result<Plan>,
}

/// An attempt (start of all workers) that is planned and whose workers have not been started.
pub(super) struct AttemptPreparation {
    pub(super) plan: Plan,
    /// The hosts of the plan, in the order of ranks.
    pub(super) hosts: Vec<HostIndex>,
    /// The request that describes the rendezvous to bind.
    pub(super) bind: RendezvousRequest,
}

impl AttemptPreparation {
    /// Prepares the start of the workers in `plan`, and builds the request by which an agent later
    /// binds the rendezvous port (`MASTER_PORT`). `allowed` are the addresses from which clients
    /// may connect to the rendezvous. Binds nothing.
    pub(super) fn new(job: &JobSpec, plan: Plan, allowed: &[IpAddr]) -> Self {
        let address = plan.master_address.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let port = if let MasterPort::Fixed(number) = job.cluster.master_port { number } else { 0 };
        let store = job.run.command.is_some() && job.cluster.store == StoreHost::Agent;
        let attempt = plan.host_plans.first().map_or(0, |node| node.attempt);
        let allowed = if address.is_loopback() { Vec::new() } else { allowed.to_vec() };
        let coordinator = job.run.command.is_some();
        let clients = plan.world;
        let ports = job.cluster.ports;
        let bind = RendezvousRequest { attempt, address, port, store, clients, allowed, coordinator, ports };
        AttemptPreparation { plan, hosts: Vec::new(), bind }
    }

    /// Binds the rendezvous port (`MASTER_PORT`) of the planned workers in this process, to find
    /// out whether the port is available. A rendezvous store sends lines for the user to
    /// `messages`. Fails if the port is not available.
    pub(super) fn bind_rendezvous(
        &self,
        messages: &mpsc::Sender<String>,
    ) -> diagnostic::Result<BoundRendezvous> {
        BoundRendezvous::bind(&self.bind, messages)
    }
}

/// Returns the log file path of each worker in a plan, grouped by host.
pub(super) fn group_workers_by_host(plan: &Plan) -> Vec<Vec<PlannedWorker>> {
    let host_workers =
        |host: &HostPlan| host.workers.iter().map(|w| PlannedWorker { log: w.log.clone() }).collect();
    plan.host_plans.iter().map(host_workers).collect()
}

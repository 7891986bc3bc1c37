//! What a start of the job needs before its workers can run: facts of its hosts, a plan, a bound rendezvous.
use super::{
    HostTarget,
    core::{HostIndex, Planned},
    port::Rendezvous,
};
use crate::{
    discover::Facts,
    plan::{Host, Plan},
};
use contract::{
    control::{Bind, HostInventory},
    job::{JobSpec, MasterPort, StoreHost},
};
use std::net::{IpAddr, Ipv4Addr};
use tokio::sync::mpsc;

/// What the agents have found on their hosts.
pub(super) struct Found {
    /// The user's choices, for every host.
    chosen: Vec<(String, String)>,
    facts: Vec<Option<HostInventory>>,
}

impl Found {
    pub(super) fn new(chosen: Vec<(String, String)>, hosts: usize) -> Self {
        Found { chosen, facts: vec![None; hosts] }
    }

    pub(super) fn add(&mut self, node: HostIndex, facts: HostInventory) {
        if node >= self.facts.len() {
            self.facts.resize(node + 1, None);
        }
        if let Some(slot) = self.facts.get_mut(node) {
            *slot = Some(facts);
        }
    }

    /// These hosts as the plan sees them.
    pub(super) fn hosts(&self, targets: &[HostTarget], nodes: &[HostIndex]) -> Vec<Host> {
        let host = |node: &HostIndex| {
            let target = targets.get(*node)?;
            let facts = self.facts.get(*node)?.clone()?;
            Some(Host {
                name: target.name.clone(),
                slots: target.slots,
                picked: target.picked.clone(),
                local: target.local,
                facts: Facts::of_agent(facts, &self.chosen),
            })
        };
        nodes.iter().filter_map(host).collect()
    }

    /// Every address of every host: who may take part.
    pub(super) fn all(&self) -> Vec<IpAddr> {
        let addresses = self.facts.iter().flatten().flat_map(|facts| &facts.addresses);
        let mut all: Vec<IpAddr> = addresses.map(|a| a.address).filter(|ip| !ip.is_loopback()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// A start that is being prepared.
pub(super) struct Preparation {
    pub(super) plan: Plan,
    /// The hosts of the plan.
    pub(super) nodes: Vec<HostIndex>,
    pub(super) bind: Bind,
    /// Bound by this process.
    pub(super) rendezvous: Option<Rendezvous>,
    /// Bound by the agent of rank 0's node.
    pub(super) port: Option<u16>,
}

impl Preparation {
    pub(super) fn new(job: &JobSpec, plan: Plan, allowed: &[IpAddr]) -> Self {
        let address = plan.master.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let port = if let MasterPort::Fixed(number) = job.cluster.master_port { number } else { 0 };
        let store = job.run.command.is_some() && job.cluster.store == StoreHost::Agent;
        let epoch = plan.nodes.first().map_or(0, |node| node.epoch);
        let allowed = if address.is_loopback() { Vec::new() } else { allowed.to_vec() };
        let bind = Bind { epoch, address, port, store, clients: plan.world, allowed };
        Preparation { plan, nodes: Vec::new(), bind, rendezvous: None, port: None }
    }

    /// Binds the rendezvous in this process.
    pub(super) fn bind_here(&self, talk: &mpsc::Sender<String>) -> Result<Rendezvous, String> {
        Rendezvous::open(&self.bind, talk)
    }
}

/// What the core has to know of a plan.
pub(super) fn workers_of(plan: &Plan) -> Vec<Vec<Planned>> {
    let of_node = |node: &contract::control::HostPlan| {
        node.workers.iter().map(|w| Planned { log: w.log.clone() }).collect()
    };
    plan.nodes.iter().map(of_node).collect()
}

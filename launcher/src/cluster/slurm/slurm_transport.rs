//! [`SlurmTransport`]: starts agents on the nodes of a Slurm allocation, in one step (`srun`) with
//! one task on each node. Each agent connects back to the controller over TCP.
//!
//! srun cannot carry the control connections: it mixes the output of all tasks, and a SIGTERM to
//! srun kills the tasks immediately. So srun only starts the agents and passes them an invitation
//! on standard input, which keeps the key out of arguments and environment. srun ends after its
//! last agent.
//!
//! Each group of a heterogeneous job gets a separate step, because srun passes its standard input
//! to the first group only.
use super::{allocation::SlurmAllocation, listener, pending_agent, srun, step::SlurmStep};
use crate::{
    cluster::transport::{AgentHandle, AgentOutput, AgentProcess, Transport},
    connection::handshake::{HandshakeKey, Invitation},
    discover::list_addresses,
};
use diagnostic::{Diagnostic, codes::slurm};
use protocol::control::ExitStatus;
use std::{
    collections::HashSet,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};
use tokio::io::AsyncReadExt as _;

/// The transport that starts agents on the nodes of the allocation in which this process runs.
pub(crate) struct SlurmTransport {
    allocation: SlurmAllocation,
    /// Whether srun copies the executable to the nodes (`--bcast`).
    bcast: bool,
    /// The addresses of this machine to which agents connect. If the list is empty, agents try
    /// every address of this machine.
    addresses: Vec<IpAddr>,
    steps: Vec<Arc<SlurmStep>>,
}

impl SlurmTransport {
    /// Creates the transport for an allocation.
    ///
    /// With `bcast`, srun copies the executable to the nodes. Otherwise each node must have the
    /// executable at the path that it has here. `addresses` are the addresses of this machine to
    /// which agents connect. If the list is empty, agents try all addresses of this machine.
    pub(crate) fn new(allocation: SlurmAllocation, bcast: bool, addresses: Vec<IpAddr>) -> SlurmTransport {
        SlurmTransport { allocation, bcast, addresses, steps: Vec::new() }
    }

    /// Divides the allocated nodes that `hosts` names into steps. Ignores names of other hosts.
    ///
    /// A step holds the nodes of one heterogeneous group. If steps must request GPUs and the nodes
    /// have different numbers of GPUs, each node gets a separate step.
    fn group_nodes_into_steps(&self, hosts: &[String]) -> Vec<srun::StepNodes> {
        let requested: HashSet<&str> = hosts.iter().map(String::as_str).collect();
        let mut steps: Vec<srun::StepNodes> = Vec::new();
        for group in &self.allocation.groups {
            let requires_request = group.nodes.iter().any(|node| node.requires_gpu_request);
            let gpus_are_equal = group.nodes.windows(2).all(|pair| pair[0].gpus == pair[1].gpus);
            let one_step = !requires_request || gpus_are_equal;
            let mut current: Option<srun::StepNodes> = None;
            for node in group.nodes.iter().filter(|node| requested.contains(node.name.as_str())) {
                let gpus = node.gpus.filter(|_| requires_request);
                let gpus = gpus.map(if gpus_are_equal {
                    srun::StepGpuRequest::PerNode
                } else {
                    srun::StepGpuRequest::Total
                });
                let single = srun::StepNodes { het_group: group.het, gpus, names: vec![node.name.clone()] };
                match &mut current {
                    Some(current) if one_step => current.names.push(node.name.clone()),
                    _ => steps.extend(current.replace(single)),
                }
            }
            steps.extend(current);
        }
        steps
    }

    /// Starts one Slurm step with an agent on each of `nodes`, and the listener to which the agents
    /// connect. Returns the agents, which have not connected yet, with the names of their nodes.
    /// The `stderr` of the first agent carries the output of the whole step; the others have none.
    fn start_step(&mut self, nodes: &srun::StepNodes) -> diagnostic::Result<Vec<(String, AgentProcess)>> {
        let cannot_listen = |error: io::Error| {
            Diagnostic::error(slurm::SLURM_LISTEN_FAILED, "cannot open a TCP port for the agents")
                .with_cause(&error)
        };
        let (listener, port) = listener::open_listener(nodes.names.len()).map_err(cannot_listen)?;
        let mut ips = self.addresses.clone();
        if ips.is_empty() {
            let found = list_addresses().into_iter().filter(|a| a.address.is_ipv4() && a.interface != "lo");
            // A cluster of one machine may have no other address than that of the loopback.
            ips = found.map(|a| a.address).chain([IpAddr::from([127, 0, 0, 1])]).collect();
        }
        let (ips, omitted) = listener::select_addresses(ips);
        let invitation = Invitation {
            key: HandshakeKey::generate().map_err(cannot_listen)?,
            addresses: ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect(),
        };
        let executable = srun::StepExecutable::find_current(self.bcast, self.allocation.job)?;
        let (step, output) = SlurmStep::start(&srun::build_arguments(nodes, &executable), &invitation)?;
        self.steps.push(step.clone());
        let pending: Vec<_> =
            nodes.names.iter().map(|name| pending_agent::create_pending_agent(name, &step)).collect();
        let (mut agents, mut slots) = (Vec::new(), Vec::new());
        // Only the output of the first step begins with the warning.
        let warning = match omitted.is_empty() || self.steps.len() > 1 {
            true => String::new(),
            false => listener::format_omitted_addresses(&omitted),
        };
        // The output of the whole step belongs to the first agent.
        let mut step_output = Some(io::Cursor::new(warning).chain(output));
        for (agent, slot) in pending {
            let stderr: AgentOutput = match step_output.take() {
                Some(output) => Box::new(output),
                None => Box::new(tokio::io::empty()),
            };
            agents.push((
                agent.name().to_owned(),
                AgentProcess {
                    input: Box::new(agent.input),
                    output: Box::new(agent.output),
                    stderr,
                    handle: AgentHandle::Connection(Box::new(agent.connection)),
                },
            ));
            slots.push(slot);
        }
        tokio::spawn(listener::accept_agents(listener, invitation.key, slots, step));
        Ok(agents)
    }
}

impl Transport for SlurmTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        let mut started: Vec<(String, diagnostic::Result<AgentProcess>)> = Vec::new();
        for nodes in self.group_nodes_into_steps(hosts) {
            match self.start_step(&nodes) {
                Ok(agents) => started.extend(agents.into_iter().map(|(name, agent)| (name, Ok(agent)))),
                Err(error) => {
                    let failed = |name: String| (name.clone(), Err(error.clone().with_subject(name)));
                    started.extend(nodes.names.into_iter().map(failed));
                }
            }
        }
        let take_result = |name: &String| match started.iter().position(|(node, _)| node == name) {
            Some(index) => started.swap_remove(index).1,
            None => {
                let job = self.allocation.job;
                let message = format!("host {name} is not a node of the Slurm allocation {job}");
                Err(Diagnostic::error(slurm::SLURM_NODE_NOT_ALLOCATED, message).with_subject(name))
            }
        };
        hosts.iter().map(take_result).collect()
    }

    fn child_processes(&self) -> Vec<u32> {
        self.steps.iter().filter_map(|step| step.running_pid()).collect()
    }

    fn record_child_exit(&mut self, pid: u32, status: ExitStatus) {
        if let Some(step) = self.steps.iter().find(|step| step.pid() == pid) {
            step.set_exit_status(status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::slurm::allocation::{SlurmNode, SlurmNodeGroup};

    /// Builds a node of an allocation with this number of GPUs. `requires_gpu_request` states
    /// whether the job requested GPUs per task.
    fn build_node(name: &str, gpus: Option<u32>, requires_gpu_request: bool) -> SlurmNode {
        SlurmNode { name: name.to_owned(), tasks: None, cpus: 0, gpus, requires_gpu_request }
    }

    #[test]
    fn a_step_holds_nodes_with_equal_requests() {
        let two_nodes =
            |gpus: [u32; 2]| vec![build_node("a", Some(gpus[0]), true), build_node("b", Some(gpus[1]), true)];
        let uneven = vec![
            SlurmNodeGroup { het: Some(0), nodes: two_nodes([2, 1]) },
            SlurmNodeGroup {
                het: Some(1),
                nodes: vec![build_node("c", None, false), build_node("d", None, false)],
            },
        ];
        let even = vec![SlurmNodeGroup { het: None, nodes: two_nodes([2, 2]) }];
        let hosts = ["d", "a", "c", "b", "elsewhere"].map(str::to_owned);
        let steps = |groups: Vec<SlurmNodeGroup>| -> Vec<_> {
            let allocation = SlurmAllocation { job: 7, array: None, restarts: 0, groups };
            let slurm = SlurmTransport::new(allocation, false, Vec::new());
            let steps = slurm.group_nodes_into_steps(&hosts);
            steps.into_iter().map(|step| (step.het_group, step.gpus, step.names.join(","))).collect()
        };
        let step = |het_group, gpus, names: &str| (het_group, gpus, names.to_owned());
        let total = |count| Some(srun::StepGpuRequest::Total(count));
        let expected =
            [step(Some(0), total(2), "a"), step(Some(0), total(1), "b"), step(Some(1), None, "c,d")];
        assert_eq!(steps(uneven), expected);
        assert_eq!(steps(even), [step(None, Some(srun::StepGpuRequest::PerNode(2)), "a,b")]);
    }
}

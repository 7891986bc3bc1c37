//! [`JoinCluster`]: provides the hosts of a job that the user starts by running launch once on each
//! host (node). Node 0 is the controller, and the other nodes connect to it.
//!
//! The nodes share a key, know the address of node 0, and have numbers. Pods, mpirun and batch
//! systems without a provider start launch in this way.
mod job_hashes;
mod join_key;
mod join_transport;
mod joined_node;
mod mpi_process_variables;
mod node_0_connection;
mod node_environment;
mod node_listener;
mod node_name;
mod node_relay;
mod node_signals;
mod node_table;
mod rendezvous_listeners;

pub(crate) use joined_node::join_run;
pub(crate) use node_environment::NodeEnvironment;
pub(super) use node_environment::{
    ProcessEnvironment, SchedulerVariables, StepVariables, find_node_environment,
};

use super::{
    host_list::resolve_hosts,
    host_target::HostTarget,
    provider::{Cluster, ClusterError},
    transport::Transport,
};
use diagnostic::{Diagnostic, codes::host};
use jobspec::{ControllerLossAction, HostSelection, JobSpec, hosts::RendezvousAddress};
use join_transport::JoinTransport;
use node_name::{format_node_name, parse_node_name};

/// The provider of hosts for jobs with `cluster.hosts: join`, whose hosts join when the user starts
/// launch on each of them.
pub(super) struct JoinCluster;

impl Cluster for JoinCluster {
    fn detect(&self, job: &JobSpec) -> Result<bool, ClusterError> {
        if job.cluster.hosts != HostSelection::Join {
            return Ok(false);
        }
        // Rejects filters of hosts, because no hosts are named.
        resolve_hosts(&job.cluster, &job.run.workdir)?;
        Ok(true)
    }

    fn hosts(
        &self,
        job: &JobSpec,
        _local_host: &str,
        _warnings: &mut Vec<Diagnostic>,
    ) -> Result<Vec<HostTarget>, ClusterError> {
        let nodes = job.cluster.join.nodes.ok_or_else(|| {
            let error = Diagnostic::error(
                host::JOIN_NODES_INVALID,
                "`cluster.hosts: join` requires the number of nodes",
            );
            error.with_subject("cluster.join.nodes").with_help("add `--nodes N`, or set `cluster.join.nodes`")
        })?;
        let target = |name: String| HostTarget {
            local: parse_node_name(&name) == Some(0),
            name,
            slots: None,
            selected_slots: None,
        };
        Ok((0..nodes).map(format_node_name).map(target).collect())
    }

    fn transport(&self, job: &JobSpec) -> Result<Box<dyn Transport>, ClusterError> {
        if job.run.on_controller_loss == Some(ControllerLossAction::Continue) {
            let message = "nodes that join cannot outlive node 0";
            return Err(Diagnostic::error(host::JOIN_OPTION_UNSUPPORTED, message)
                .with_subject("run.on_controller_loss")
                .with_help(
                    "remove the key; when node 0 is lost, the other nodes end, and the next start resumes",
                )
                .into());
        }
        let text = job.cluster.join.rendezvous.as_deref().unwrap_or_default();
        let address: RendezvousAddress = text.parse().map_err(|_| {
            let message = "`cluster.hosts: join` requires the address of node 0";
            Diagnostic::error(host::JOIN_RENDEZVOUS_INVALID, message)
                .with_subject("cluster.join.rendezvous")
                .with_remedy()
        })?;
        Ok(Box::new(JoinTransport::new(job, &address)?))
    }

    fn hidden_variables(&self, job: &JobSpec) -> Vec<String> {
        if job.cluster.hosts != HostSelection::Join {
            return Vec::new();
        }
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        names.filter(|name| mpi_process_variables::is_process_variable(name)).collect()
    }
}

/// Returns whether this machine is node 0, that is, whether it has the rendezvous address at which
/// node 0 listens for other nodes. Blocks for the resolution of the name.
pub(crate) fn is_own_address(address: &RendezvousAddress) -> bool {
    !rendezvous_listeners::find_own_addresses(address).is_empty()
}

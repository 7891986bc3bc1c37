//! The hosts of a job and the transport that reaches them, before any agent runs.
use crate::{
    controller::{HostTarget, Requeue},
    discover::{
        Inventory,
        hosts::{ClusterHost, hosts},
        slurm::{self, Allocation, SlurmNode},
    },
    plan,
    transport::{LocalTransport, SlurmTransport, Transport, ssh::SshTransport},
};
use contract::{
    env,
    hosts::HostAddress,
    job::{Devices, Hosts, JobSpec, WorkersPerHost},
};
use diagnostic::{Category, Diagnostic, codes::host};

/// Most agents that a test may start on this machine.
const MAX_LOCAL_AGENTS: usize = 64;

/// Why the hosts of a job cannot be determined.
#[derive(Debug)]
pub(crate) enum HostsError {
    /// Mistakes of the job.
    Job(Vec<Diagnostic>),
    /// The hosts are not available.
    Cluster(Diagnostic),
}

/// The hosts of a job, in the order of their ranks. `local` is the inventory of this machine.
pub(crate) fn job_hosts(job: &JobSpec, local: &Inventory) -> Result<Vec<HostTarget>, HostsError> {
    let named = hosts(&job.cluster, &job.run.workdir).map_err(HostsError::Job)?;
    match (named, job_allocation(job).map_err(HostsError::Cluster)?) {
        (Some(hosts), _) => Ok(hosts.iter().map(HostTarget::remote).collect()),
        (None, Some(allocation)) => Ok(allocation.nodes().map(|node| slurm_target(job, node)).collect()),
        (None, None) => Ok(local_hosts(local)),
    }
}

/// A node of the allocation. The node of this process is treated like the others: its agent is
/// started by the same step.
fn slurm_target(job: &JobSpec, node: &SlurmNode) -> HostTarget {
    let use_gpus = match job.cluster.devices {
        Devices::Auto => job.run.command.is_some(),
        Devices::Cuda => true,
        Devices::Cpu | Devices::List(_) => false,
    };
    let slots = match job.cluster.workers_per_host {
        WorkersPerHost::Auto => node.workers(use_gpus),
        WorkersPerHost::Exactly(_) => None,
    };
    HostTarget { name: node.name.clone(), slots, selected_slots: None, local: false }
}

/// The Slurm allocation whose nodes are the hosts of the job; `None`: the job uses other hosts.
fn job_allocation(job: &JobSpec) -> diagnostic::Result<Option<Allocation>> {
    let read = |required: bool| match environment_allocation()? {
        None if required => {
            let message = "the job requires a Slurm allocation, but SLURM_JOB_ID is not set";
            Err(Diagnostic::error(host::SLURM_ALLOCATION_MISSING, message)
                .with_subject("cluster.hosts")
                .with_help("start launch inside sbatch or salloc, or submit the job with `launch sbatch`"))
        }
        allocation => Ok(allocation),
    };
    match job.cluster.hosts {
        Hosts::Local | Hosts::List(_) | Hosts::File(_) => Ok(None),
        Hosts::Auto => read(false),
        Hosts::Slurm => read(true),
    }
}

/// The allocation that the environment of this process describes.
fn environment_allocation() -> diagnostic::Result<Option<Allocation>> {
    slurm::read_allocation(&|name| std::env::var(name).ok())
}

/// The batch job that `--requeue` puts back into the queue.
pub(crate) fn requeue(job: &JobSpec) -> diagnostic::Result<Requeue> {
    match environment_allocation() {
        Ok(Some(found)) => Ok(Requeue { job: found.job, restarts: found.restarts, most: job.slurm.requeues }),
        _ => Err(Diagnostic::error(
            host::SLURM_REQUEUE_UNAVAILABLE,
            "`--requeue` requires a Slurm batch job, but launch runs outside of one",
        )
        .with_subject("--requeue")
        .with_help("leave the option out, or submit the job with `launch sbatch`")),
    }
}

/// The transport that starts agents on the hosts of a job.
pub(crate) fn job_transport(job: &JobSpec) -> diagnostic::Result<Box<dyn Transport>> {
    let unusable = |mistakes: Vec<Diagnostic>| {
        super::invalid_job("the list of hosts", mistakes).with_category(Category::Cluster)
    };
    Ok(match (hosts(&job.cluster, &job.run.workdir).map_err(unusable)?, job_allocation(job)?) {
        (Some(hosts), _) => Box::new(ssh_transport(job, &hosts)?),
        (None, Some(allocation)) => Box::new(SlurmTransport::new(allocation, job.slurm.bcast, Vec::new())),
        (None, None) => Box::new(LocalTransport),
    })
}

/// The transport to the nodes of the job's Slurm allocation, and their names.
pub(crate) fn slurm_transport(job: &JobSpec) -> diagnostic::Result<Option<(SlurmTransport, Vec<String>)>> {
    let allocation = job_allocation(job)?;
    Ok(allocation.map(|allocation| {
        let names = allocation.nodes().map(|node| node.name.clone()).collect();
        (SlurmTransport::new(allocation, job.slurm.bcast, Vec::new()), names)
    }))
}

/// The transport to these hosts over SSH.
pub(crate) fn ssh_transport(job: &JobSpec, hosts: &[ClusterHost]) -> diagnostic::Result<SshTransport> {
    let hosts: Vec<HostAddress> = hosts.iter().map(|h| h.host.clone()).collect();
    SshTransport::new(&job.cluster.ssh, &hosts, &job.run.workdir)
}

/// A host for the plan before its agent runs.
pub(crate) fn planning_host(target: &HostTarget, local: &Inventory) -> plan::JobHost {
    let inventory = if target.local { local.clone() } else { Inventory::unknown(&target.name) };
    let (name, selected_slots) = (target.name.clone(), target.selected_slots.clone());
    plan::JobHost { name, slots: target.slots, selected_slots, local: target.local, inventory }
}

/// This machine; in tests several hosts, each with its own agent on this machine.
fn local_hosts(local: &Inventory) -> Vec<HostTarget> {
    let count = std::env::var(env::LAUNCH_LOCAL_AGENTS).ok().and_then(|n| n.parse().ok());
    let target = |name: String| HostTarget { name, slots: None, selected_slots: None, local: true };
    match count {
        Some(n @ 2..=MAX_LOCAL_AGENTS) => (0..n).map(|i| target(format!("{}-{i}", local.host))).collect(),
        _ => vec![target(local.host.clone())],
    }
}

//! Determines the hosts of a job and creates the transport that starts agents on them.
use crate::{
    controller::{HostTarget, RequeueableJob},
    discover::{
        Inventory,
        cluster_hosts::{ClusterHost, resolve_hosts},
        slurm::{self, SlurmAllocation, SlurmNode},
    },
    plan,
    transport::{LocalTransport, SlurmTransport, Transport, ssh::SshTransport},
};
use contract::{
    env,
    hosts::HostAddress,
    job::{DeviceSelection, HostSelection, JobSpec, WorkersPerHost},
};
use diagnostic::{Category, Diagnostic, codes::slurm as slurm_codes};

/// The largest value of `LAUNCH_LOCAL_AGENTS`: the number of agents that a test may start on this
/// machine.
const MAX_LOCAL_AGENTS: usize = 64;

/// The error of a job whose hosts cannot be determined.
#[derive(Debug)]
pub(crate) enum JobHostsError {
    /// The mistakes in the job's list of hosts or in the hostfile.
    Job(Vec<Diagnostic>),
    /// The Slurm allocation is missing or cannot be read.
    Cluster(Diagnostic),
}

/// Determines the hosts of a job, in the order of their ranks.
///
/// The hosts are those that the job names, else the nodes of the Slurm allocation, else this
/// machine. `local` is the inventory of this machine.
pub(crate) fn determine_job_hosts(
    job: &JobSpec,
    local: &Inventory,
) -> Result<Vec<HostTarget>, JobHostsError> {
    let named = resolve_hosts(&job.cluster, &job.run.workdir).map_err(JobHostsError::Job)?;
    match (named, read_job_allocation(job).map_err(JobHostsError::Cluster)?) {
        (Some(hosts), _) => Ok(hosts.iter().map(HostTarget::from_cluster_host).collect()),
        (None, Some(allocation)) => {
            Ok(allocation.nodes().map(|node| build_slurm_target(job, node)).collect())
        }
        (None, None) => Ok(list_local_hosts(local)),
    }
}

/// Converts a node of a Slurm allocation to a host of the job.
///
/// No node counts as the local host, not even the node on which launch runs, because the Slurm step
/// starts the agents of all nodes.
fn build_slurm_target(job: &JobSpec, node: &SlurmNode) -> HostTarget {
    let use_gpus = match job.cluster.devices {
        DeviceSelection::Auto => job.run.command.is_some(),
        DeviceSelection::Cuda => true,
        DeviceSelection::Cpu | DeviceSelection::List(_) => false,
    };
    let slots = match job.cluster.workers_per_host {
        WorkersPerHost::Auto => node.worker_count(use_gpus),
        WorkersPerHost::Exactly(_) => None,
    };
    HostTarget { name: node.name.clone(), slots, selected_slots: None, local: false }
}

/// Returns the Slurm allocation whose nodes are the hosts of the job. Returns `None` if the job
/// uses other hosts.
///
/// Fails if the job requires an allocation but launch runs outside of Slurm.
fn read_job_allocation(job: &JobSpec) -> diagnostic::Result<Option<SlurmAllocation>> {
    let read = |required: bool| match read_environment_allocation()? {
        None if required => {
            let message = "the job requires a Slurm allocation, but SLURM_JOB_ID is not set";
            Err(Diagnostic::error(slurm_codes::SLURM_ALLOCATION_MISSING, message)
                .with_subject("cluster.hosts")
                .with_help("start launch inside sbatch or salloc, or submit the job with `launch sbatch`"))
        }
        allocation => Ok(allocation),
    };
    match job.cluster.hosts {
        HostSelection::Local | HostSelection::List(_) | HostSelection::File(_) => Ok(None),
        HostSelection::Auto => read(false),
        HostSelection::Slurm => read(true),
    }
}

/// Reads the Slurm allocation from the environment variables of this process. Returns `None`
/// outside of Slurm.
fn read_environment_allocation() -> diagnostic::Result<Option<SlurmAllocation>> {
    slurm::read_allocation(&|name| std::env::var(name).ok())
}

/// Returns the Slurm batch job in which launch runs, which `--requeue` puts back into the queue.
/// Fails outside of a Slurm job.
pub(crate) fn build_requeue(job: &JobSpec) -> diagnostic::Result<RequeueableJob> {
    match read_environment_allocation() {
        Ok(Some(found)) => {
            Ok(RequeueableJob { job: found.job, restarts: found.restarts, max_requeues: job.slurm.requeues })
        }
        _ => Err(Diagnostic::error(
            slurm_codes::SLURM_REQUEUE_UNAVAILABLE,
            "`--requeue` requires a Slurm batch job, but launch runs outside of one",
        )
        .with_subject("--requeue")
        .with_help("leave the option out, or submit the job with `launch sbatch`")),
    }
}

/// Creates the transport that starts agents on the hosts of a job: SSH, Slurm or local.
pub(crate) fn create_job_transport(job: &JobSpec) -> diagnostic::Result<Box<dyn Transport>> {
    let unusable = |mistakes: Vec<Diagnostic>| {
        super::invalid_job_error("the list of hosts", mistakes).with_category(Category::Cluster)
    };
    Ok(match (resolve_hosts(&job.cluster, &job.run.workdir).map_err(unusable)?, read_job_allocation(job)?) {
        (Some(hosts), _) => Box::new(create_ssh_transport(job, &hosts)?),
        (None, Some(allocation)) => Box::new(SlurmTransport::new(allocation, job.slurm.bcast, Vec::new())),
        (None, None) => Box::new(LocalTransport),
    })
}

/// Creates the transport to the nodes of the job's Slurm allocation. Returns the transport and the
/// names of the nodes, or `None` if the job does not use an allocation.
pub(crate) fn create_slurm_transport(
    job: &JobSpec,
) -> diagnostic::Result<Option<(SlurmTransport, Vec<String>)>> {
    let allocation = read_job_allocation(job)?;
    Ok(allocation.map(|allocation| {
        let names = allocation.nodes().map(|node| node.name.clone()).collect();
        (SlurmTransport::new(allocation, job.slurm.bcast, Vec::new()), names)
    }))
}

/// Creates the transport that starts agents on `hosts` over SSH.
pub(crate) fn create_ssh_transport(job: &JobSpec, hosts: &[ClusterHost]) -> diagnostic::Result<SshTransport> {
    let hosts: Vec<HostAddress> = hosts.iter().map(|h| h.host.clone()).collect();
    SshTransport::new(&job.cluster.ssh, &hosts, &job.run.workdir)
}

/// Returns a host for a plan that is made before the agents run. At that time, only the inventory
/// of this machine is known, so the inventory of any other host is empty.
pub(crate) fn build_planning_host(target: &HostTarget, local: &Inventory) -> plan::JobHost {
    let inventory = if target.local { local.clone() } else { Inventory::unknown(&target.name) };
    let (name, selected_slots) = (target.name.clone(), target.selected_slots.clone());
    plan::JobHost { name, slots: target.slots, selected_slots, local: target.local, inventory }
}

/// Returns this machine as the only host of a job. Tests set `LAUNCH_LOCAL_AGENTS` to get several
/// hosts, each with a separate agent on this machine.
fn list_local_hosts(local: &Inventory) -> Vec<HostTarget> {
    let count = std::env::var(env::LAUNCH_LOCAL_AGENTS).ok().and_then(|n| n.parse().ok());
    let target = |name: String| HostTarget { name, slots: None, selected_slots: None, local: true };
    match count {
        Some(n @ 2..=MAX_LOCAL_AGENTS) => (0..n).map(|i| target(format!("{}-{i}", local.host))).collect(),
        _ => vec![target(local.host.clone())],
    }
}

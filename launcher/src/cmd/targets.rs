//! Which hosts a job names, and what is known of them before anyone was asked.
use crate::{
    controller::{HostTarget, Requeue},
    discover::{
        Facts,
        hosts::{ClusterHost, hosts},
        slurm::{self, Allocation, Node},
    },
    error::{Failure, Kind},
    plan,
    transport::{Local, Slurm, Transport, ssh::Ssh},
};
use contract::{
    env,
    hosts::Host,
    job::{Count, Devices, Hosts, JobSpec},
    preflight::Finding,
};

/// Most agents that a test may ask for on this machine.
const MOST_LOCAL_AGENTS: usize = 64;

/// The hosts of a job, in the order of their ranks.
pub(crate) fn of(job: &JobSpec, here: &Facts) -> Result<Vec<HostTarget>, Unfit> {
    let named = hosts(&job.cluster, &job.run.workdir).map_err(Unfit::Job)?;
    match (named, allocation(job).map_err(Unfit::Cluster)?) {
        (Some(hosts), _) => Ok(hosts.iter().map(HostTarget::elsewhere).collect()),
        (None, Some(allocation)) => Ok(allocation.nodes().map(|node| node_target(job, node)).collect()),
        (None, None) => Ok(local(here)),
    }
}

/// Why the hosts can't be had.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// What the job says of them is wrong.
    Job(Vec<Finding>),
    /// They aren't there.
    Cluster(Failure),
}

/// A node of the allocation. The one this process runs on is no exception: its agent is started with the others.
fn node_target(job: &JobSpec, node: &Node) -> HostTarget {
    let use_gpus = match job.cluster.devices {
        Devices::Auto => job.run.command.is_some(),
        Devices::Cuda => true,
        Devices::Cpu | Devices::List(_) => false,
    };
    let slots = match job.cluster.workers_per_host {
        Count::Auto => node.workers(use_gpus),
        Count::Exactly(_) => None,
    };
    HostTarget { name: node.name.clone(), slots, picked: None, local: false }
}

/// The Slurm allocation that the job's hosts are; `None`: they aren't Slurm's.
fn allocation(job: &JobSpec) -> Result<Option<Allocation>, Failure> {
    let found = |wanted: bool| {
        let found = slurm::allocation(&|name| std::env::var(name).ok());
        let found = found.map_err(|why| Failure::new(Kind::Cluster, why.message).hint(why.hint))?;
        match found {
            None if wanted => Err(Failure::new(
                Kind::Cluster,
                "there is no Slurm allocation to use: SLURM_JOB_ID isn't set",
            )
            .hint("start launch inside sbatch or salloc, or submit the job with `launch sbatch`")),
            found => Ok(found),
        }
    };
    match job.cluster.hosts {
        Hosts::Local | Hosts::List(_) | Hosts::File(_) => Ok(None),
        Hosts::Auto => found(false),
        Hosts::Slurm => found(true),
    }
}

/// `--requeue`: the batch job to be queued again.
pub(crate) fn requeue(job: &JobSpec) -> Result<Requeue, Failure> {
    match slurm::allocation(&|name| std::env::var(name).ok()) {
        Ok(Some(found)) => Ok(Requeue { job: found.job, restarts: found.restarts, most: job.slurm.requeues }),
        _ => Err(Failure::new(Kind::Cluster, "--requeue works in a batch job of Slurm only")
            .hint("leave it out here, or submit the job with `launch sbatch`")),
    }
}

/// What reaches the hosts of a job.
pub(crate) fn transport(job: &JobSpec) -> Result<Box<dyn Transport>, Failure> {
    let wrong = |findings: Vec<Finding>| {
        let messages: Vec<String> = findings.into_iter().map(|f| f.message).collect();
        Failure::new(Kind::Cluster, messages.join("; "))
    };
    Ok(match (hosts(&job.cluster, &job.run.workdir).map_err(wrong)?, allocation(job)?) {
        (Some(hosts), _) => Box::new(ssh(job, &hosts)?),
        (None, Some(allocation)) => Box::new(Slurm::new(allocation, job.slurm.bcast, Vec::new())),
        (None, None) => Box::new(Local),
    })
}

/// The way to the nodes of the Slurm allocation that are the job's hosts, and their names.
pub(crate) fn slurm(job: &JobSpec) -> Result<Option<(Slurm, Vec<String>)>, Failure> {
    let found = allocation(job)?;
    Ok(found.map(|allocation| {
        let names = allocation.nodes().map(|node| node.name.clone()).collect();
        (Slurm::new(allocation, job.slurm.bcast, Vec::new()), names)
    }))
}

/// The way to other hosts.
pub(crate) fn ssh(job: &JobSpec, hosts: &[ClusterHost]) -> Result<Ssh, Failure> {
    let list: Vec<Host> = hosts.iter().map(|h| h.host.clone()).collect();
    Ssh::new(&job.cluster.ssh, &list, &job.run.workdir).map_err(|refusal| {
        let failure = Failure::new(Kind::Cluster, refusal.message);
        refusal.hint.into_iter().fold(failure, Failure::hint)
    })
}

/// A host as the plan sees it before its agent runs.
pub(crate) fn promised(target: &HostTarget, here: &Facts) -> plan::Host {
    let facts = if target.local { here.clone() } else { Facts::promised(&target.name) };
    let (name, picked) = (target.name.clone(), target.picked.clone());
    plan::Host { name, slots: target.slots, picked, local: target.local, facts }
}

/// This machine; for tests as several, each with an agent of its own.
fn local(here: &Facts) -> Vec<HostTarget> {
    let several = std::env::var(env::LAUNCH_LOCAL_AGENTS).ok().and_then(|n| n.parse().ok());
    let target = |name: String| HostTarget { name, slots: None, picked: None, local: true };
    match several {
        Some(n @ 2..=MOST_LOCAL_AGENTS) => (0..n).map(|i| target(format!("{}-{i}", here.host))).collect(),
        _ => vec![target(here.host.clone())],
    }
}

//! [`Plan`]: who runs where with what, from the job and the facts alone. Made again for each epoch: a restart may have
//! other hosts.
mod command;
mod devices;
mod env;
mod master;
mod place;

pub(crate) use devices::is_device_variable;

use crate::discover::Facts;
use contract::{
    control::{HostPlan, WorkerPlan},
    ids::{Rank, RunId},
    job::{Bind, Count, Devices, Hosts, JobSpec, ResumeFrom},
    preflight::Finding,
};
use core::net::IpAddr;
use std::path::PathBuf;

/// What will run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub run: RunId,
    /// Absolute.
    pub run_dir: PathBuf,
    pub world: u32,
    /// `MASTER_ADDR` of the workers; `None`: to be found when the hosts have told their addresses.
    pub master: Option<IpAddr>,
    /// In the order of the hosts, which is the order of the ranks.
    pub nodes: Vec<HostPlan>,
    /// The hosts' names as the job has them, one for each node.
    pub hosts: Vec<String>,
    /// Worth saying before the start.
    pub warnings: Vec<Finding>,
}

/// A host to plan for.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// As the job names it.
    pub name: String,
    /// Workers that it was promised to have room for (a hostfile, Slurm).
    pub slots: Option<u32>,
    /// The numbers of those slots, where a filter picked them: its GPUs.
    pub picked: Option<Vec<u32>>,
    /// It is the machine of the controller.
    pub local: bool,
    /// Found by its agent, or [`Facts::promised`] before that.
    pub facts: Facts,
}

/// Which start of the job is planned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Epoch {
    /// 0 at the first start.
    pub number: u32,
    /// How often the job was started again.
    pub restarts: u32,
    /// The checkpoint that this run itself has saved last, for a job that would not find it by itself.
    pub resume: Option<PathBuf>,
}

/// Most workers for which a host's plan is made.
const MOST_LOCAL: u32 = 1024;
/// Most workers of a job.
const MOST_WORKERS: u32 = 1 << 20;

/// Plans one start of a job on these hosts: ranks follow the order of the hosts. A rendezvous port that isn't given
/// stays `auto` in the environment: it is found when the run starts.
///
/// Problems are what the job asks for and the facts don't allow.
pub fn plan(job: &JobSpec, hosts: &[Host], run: &RunId, epoch: &Epoch) -> Result<Plan, Vec<Finding>> {
    let rooms = hosts.iter().map(|host| room(job, host));
    let rooms: Vec<Room> = rooms.collect::<Result<_, _>>().map_err(|finding| vec![finding])?;
    let world = rooms.iter().map(|room| u64::from(room.count)).sum::<u64>();
    if world == 0 || world > u64::from(MOST_WORKERS) {
        let message = format!("{world} workers on {} hosts can't be planned", hosts.len());
        return Err(vec![finding("cluster.workers_per_host", message, "use 1 to 1048576 workers in all")]);
    }
    let world = world as u32;
    let asked_threads = env::threads(job).map_err(|finding| vec![finding])?;
    let master = master::address(hosts, &job.cluster.interface).map_err(|finding| vec![finding])?;
    let run_dir = run_dir(job, run);
    let job_of_epoch = for_node(job, epoch);
    let mut first = 0;
    let mut nodes = Vec::with_capacity(hosts.len());
    for (group, (host, room)) in hosts.iter().zip(&rooms).enumerate() {
        let whole = env::Whole {
            job,
            run,
            world,
            groups: hosts.len() as u32,
            logs: &run_dir.join("logs"),
            master,
            restarts: epoch.restarts,
        };
        let node = Node { host, room, group: group as u32, first, asked_threads };
        nodes.push(HostPlan {
            job: job_of_epoch.clone(),
            run: run.0.clone(),
            host: host.name.clone(),
            run_dir: run_dir.clone(),
            epoch: epoch.number,
            world,
            workers: workers(&whole, &node).map_err(|finding| vec![finding])?,
            grace_ms: job.run.grace_ms,
        });
        first += room.count;
    }
    let counts: Vec<u32> = rooms.iter().map(|room| room.count).collect();
    let warnings = warnings(job, hosts, &counts, world);
    let hosts = hosts.iter().map(|h| h.name.clone()).collect();
    Ok(Plan { run: run.clone(), run_dir, world, master, nodes, hosts, warnings })
}

/// What a host gives the job.
struct Room {
    /// Workers.
    count: u32,
    gpus: devices::Gpus,
}

/// One host's part of the ranks.
struct Node<'a> {
    host: &'a Host,
    room: &'a Room,
    group: u32,
    first: Rank,
    asked_threads: Option<u32>,
}

fn workers(whole: &env::Whole<'_>, node: &Node<'_>) -> Result<Vec<WorkerPlan>, Finding> {
    let (job, facts) = (whole.job, &node.host.facts);
    let Room { count, gpus } = node.room;
    let near: Vec<Option<u32>> = (0..*count).map(|local_rank| gpus.node(local_rank)).collect();
    // Nobody knows yet what a promised host's cores are.
    let bind = if facts.is_promised() { Bind::None } else { job.run.bind };
    let slots = place::slots(facts, &near, bind).map_err(|message| {
        let message = format!("{message} on {}", node.host.name);
        finding("run.bind", message, "`auto` leaves workers unbound where cores don't suffice")
    })?;
    let worker = |(local_rank, slot): (u32, &place::Slot)| {
        let rank = node.first + local_rank;
        let (local_world, group, threads) = (*count, node.group, slot.threads);
        let who = env::Who { rank, local_rank, local_world, group, threads, gpus };
        WorkerPlan {
            rank,
            local_rank,
            local_world,
            command: command::of_worker(&job.run, env::shown_local_rank(job, local_rank)),
            threads: node.asked_threads.unwrap_or(slot.threads),
            env: env::of_worker(whole, facts, &who),
            workdir: job.run.workdir.clone(),
            cpus: slot.cpus.clone(),
            log: whole.logs.join(format!("rank-{rank}.log")),
        }
    };
    Ok((0..*count).zip(&slots).map(worker).collect())
}

/// How many workers a host gets, and which GPUs; a promise that the host doesn't keep is refused with both numbers.
fn room(job: &JobSpec, host: &Host) -> Result<Room, Finding> {
    const PATH: &str = "cluster.workers_per_host";
    let name = &host.name;
    let gpus = devices::of_job(job, &host.facts)?.picked(job, host)?;
    let of_gpus = gpus.workers() as u32;
    let count = match (job.cluster.workers_per_host, host.slots) {
        (Count::Exactly(n), Some(slots)) if n > slots => {
            let message = format!("{n} workers are asked for on {name}, which has {slots} slots");
            return Err(finding(PATH, message, "ask for fewer, or give the host more slots"));
        }
        (Count::Exactly(n), _) => n,
        (Count::Auto, Some(slots)) => slots,
        (Count::Auto, None) => of_gpus.max(1),
    };
    match host.slots {
        Some(slots) if of_gpus > 0 && slots > of_gpus => {
            let those = match job.cluster.devices {
                Devices::List(_) => format!("`cluster.devices` names {} GPUs", gpus.count()),
                _ => format!("{} GPUs were found there", gpus.count()),
            };
            let message = format!("{name} was promised to have {slots} slots, and {those}");
            Err(finding("cluster.hosts", message, "correct its slots, or use `cluster.devices: cpu`"))
        }
        _ if count > MOST_LOCAL => {
            let message = format!("{count} workers can't be planned on {name}");
            Err(finding(PATH, message, "use 1 to 1024 on each host"))
        }
        _ => {
            gpus.check(job, count, &host.facts)?;
            Ok(Room { count, gpus })
        }
    }
}

/// The job as this epoch's workers get it: after a restart it goes on from what the run itself has saved.
/// The job as each node gets it.
fn for_node(job: &JobSpec, epoch: &Epoch) -> JobSpec {
    let mut job = job.clone();
    if job.run.command.is_some() {
        // All hosts told to all hosts would grow with the square of their number. (Built-in workers write the job into
        // their checkpoints.)
        (job.cluster.hosts, job.cluster.include, job.cluster.exclude) = (Hosts::Local, vec![], vec![]);
    }
    if let (Some(path), false) = (&epoch.resume, job.resume.from == ResumeFrom::Auto) {
        job.resume.from = ResumeFrom::Path(path.clone());
    }
    job
}

/// What a person calls the devices of a host's workers, by local rank.
pub(crate) fn device_labels(job: &JobSpec, facts: &Facts, workers: u32) -> Vec<String> {
    let gpus = devices::of_job(job, facts).unwrap_or_default();
    (0..workers).map(|rank| gpus.label(rank)).collect()
}

/// The run directory with its placeholders filled in, absolute.
fn run_dir(job: &JobSpec, run: &RunId) -> PathBuf {
    let dir = job.run.logs.dir.replace("{name}", &job.name).replace("{run}", &run.0);
    job.run.workdir.join(dir)
}

fn warnings(job: &JobSpec, hosts: &[Host], counts: &[u32], world: u32) -> Vec<Finding> {
    let mut warnings = Vec::new();
    for (host, &count) in hosts.iter().zip(counts) {
        let cores = host.facts.cores();
        if count > cores && !host.facts.cpus.is_empty() {
            let place = if hosts.len() > 1 { format!(" of {}", host.name) } else { String::new() };
            let message = format!("{count} workers share {cores} CPU cores{place}: they run, but take turns");
            warnings.push(finding(
                "cluster.workers_per_host",
                message,
                "use at most one worker for each core",
            ));
        }
    }
    for (i, rank) in job.run.logs.show.iter().enumerate().filter(|(_, rank)| **rank >= world) {
        let message = format!("there is no rank {rank} to show: the job has {world} workers");
        warnings.push(finding(&format!("run.logs.show[{i}]"), message, "ranks count from 0"));
    }
    warnings
}

fn finding(path: &str, message: String, hint: &str) -> Finding {
    Finding { path: path.to_owned(), message, hint: Some(hint.to_owned()) }
}

#[cfg(test)]
mod tests;

//! [`Plan`]: the host, CPUs, accelerators and environment of each worker of an attempt (one start
//! of all workers).
//!
//! A plan depends only on the job, the attempt and the inventories of the hosts. Every attempt has
//! its own plan, because a restart may use other hosts.
mod absent_ranks;
mod accelerator_pool;
mod accelerator_selection;
mod cpu_binding;
mod hang_detection;
mod job_host;
mod key_error;
mod master_address;
mod memory_copies;
mod worker_command;
mod worker_env;

pub(crate) use hang_detection::HangDetectionReason;
pub use job_host::JobHost;
pub(crate) use memory_copies::MemoryCopyCost;

use core::net::IpAddr;
use diagnostic::{Diagnostic, codes::host as codes, quantity::format_count};
use jobspec::{
    CpuBind, DeviceSelection, HostSelection, JobSpec, MasterPort, ResumeFrom, WorkersPerHost,
    ids::{Rank, RunId},
};
use key_error::key_error;
use protocol::{
    control::{BatchJobRecord, HostInventory, HostPlan, WorkerPlan},
    preflight::MAX_TRAINING_WORKERS,
};
use std::path::PathBuf;

/// The plan of one attempt (one start of all workers): the workers of each host, with their CPUs,
/// accelerators and environment.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The name of the run.
    pub run: RunId,
    /// The absolute path of the run directory.
    pub run_dir: PathBuf,
    /// The number of workers on all hosts.
    pub world: u32,
    /// The IP address that workers get as `MASTER_ADDR`; `None` until the agents have reported the
    /// addresses of their hosts.
    pub master_address: Option<IpAddr>,
    /// The TCP port that workers get as `MASTER_PORT`; `None` until the rendezvous is bound, unless
    /// the job fixes the port.
    pub master_port: Option<u16>,
    /// The plan of each host. Ranks are assigned in this order. The environments of the workers
    /// lack `MASTER_ADDR` and `MASTER_PORT`; see [`Plan::insert_rendezvous`].
    pub host_plans: Vec<HostPlan>,
    /// The name of each host, as the job states it, in the order of `host_plans`.
    pub host_names: Vec<String>,
    /// The warnings that are reported before the attempt starts.
    pub warnings: Vec<Diagnostic>,
}

impl Plan {
    /// Adds `MASTER_ADDR` and `MASTER_PORT`, the address and port of rank 0, to a worker's
    /// environment variables `env`. A value that is not known yet is shown as `auto`.
    pub(crate) fn insert_rendezvous(&self, env: &mut Vec<(String, String)>) {
        let address = self.master_address.map_or_else(|| "auto".to_owned(), |address| address.to_string());
        let port = self.master_port.map_or_else(|| "auto".to_owned(), |port| port.to_string());
        worker_env::insert_rendezvous(env, address, port);
    }
}

/// The properties of one attempt (start of all workers) of a run, such as its number and the
/// checkpoint from which it resumes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attempt {
    /// The number of the attempt, from 0.
    pub number: u32,
    /// The number of restarts so far. Restarts that only change hosts are not counted.
    pub restarts: u32,
    /// The most recent checkpoint of this run; `None` if there is none. The attempt resumes from
    /// this checkpoint, except if `resume.from` is `auto`, which finds the checkpoint itself.
    pub resume: Option<PathBuf>,
    /// The batch job that started the run; `None` if no scheduler did.
    pub batch_job: Option<BatchJobRecord>,
}

/// The largest number of workers on a host.
const MAX_WORKERS_PER_HOST: u32 = 1024;
/// The largest number of workers of a job.
pub(crate) const MAX_WORKERS: u32 = 1 << 20;

/// Assigns the workers of one attempt (start of all workers) to the hosts, with CPUs, accelerators
/// and environment for each worker. Ranks follow the order of the hosts.
///
/// The errors name the keys of the job that the hosts cannot satisfy.
pub fn plan_attempt(
    job: &JobSpec,
    hosts: &[JobHost],
    run: &RunId,
    attempt: &Attempt,
) -> Result<Plan, Vec<Diagnostic>> {
    build_plan(job, hosts, run, attempt).map_err(|error| vec![error])
}

/// Fails if the job's number of workers, `world`, is 0 or exceeds the number that launch supports
/// for the kind of job. The built-in training supports fewer workers than programs.
fn check_world_size(job: &JobSpec, world: u64, hosts: usize) -> diagnostic::Result<()> {
    let (kind, limit) = match job.run.command {
        Some(_) => ("a program", MAX_WORKERS),
        None => ("the built-in training", MAX_TRAINING_WORKERS),
    };
    if (1..=u64::from(limit)).contains(&world) {
        return Ok(());
    }
    let (workers, hosts) = (format_count(world, "worker"), format_count(hosts, "host"));
    let message = format!("the job has {workers} on {hosts}; {kind} has 1 to {limit} workers");
    Err(key_error(codes::WORKERS_OUT_OF_RANGE, "cluster.workers_per_host", message)
        .with_field("workers", world)
        .with_field("limit", limit)
        .with_help("change `cluster.workers_per_host`, or use fewer hosts (`cluster.use_hosts`)"))
}

/// Builds the plan of one attempt (start of all workers): the host, CPUs, accelerators and
/// environment variables of each worker. Fails with the first error.
fn build_plan(job: &JobSpec, hosts: &[JobHost], run: &RunId, attempt: &Attempt) -> diagnostic::Result<Plan> {
    let capacities = hosts.iter().map(|host| compute_host_allocation(job, host));
    let capacities: Vec<HostAllocation> = capacities.collect::<Result<_, _>>()?;
    let world = capacities.iter().map(|capacity| u64::from(capacity.workers)).sum::<u64>();
    check_world_size(job, world, hosts.len())?;
    let world = world as u32;
    let threads = worker_env::parse_threads(job)?;
    let master_address = master_address::choose_master_address(hosts, &job.cluster)?;
    let run_dir = resolve_run_dir(job, run);
    let attempt_job = adapt_job_to_attempt(job, attempt);
    let on_cpus = capacities.iter().all(|capacity| capacity.accelerators.computes_on_cpus());
    let hang_detection = hang_detection::choose_hang_detection(job, on_cpus);
    let mut first_rank = 0;
    let mut host_plans = Vec::with_capacity(hosts.len());
    for (group, (host, capacity)) in hosts.iter().zip(&capacities).enumerate() {
        let job_env = worker_env::SharedEnvValues {
            job,
            run,
            world,
            groups: hosts.len() as u32,
            logs: &run_dir.join("logs"),
            restarts: attempt.restarts,
            between_hosts: master_address.is_some_and(|address| !address.is_loopback()) && hosts.len() > 1,
            on_cpus,
        };
        let ranks = HostWithFirstRank {
            host,
            capacity,
            group: group as u32,
            attempt: attempt.number,
            first_rank,
            threads,
        };
        host_plans.push(HostPlan {
            job: attempt_job.clone(),
            run: run.0.clone(),
            host: host.name.clone(),
            run_dir: run_dir.clone(),
            attempt: attempt.number,
            batch_job: attempt.batch_job.clone(),
            continues_batch_job: continues_batch_job(job, attempt),
            world,
            workers: plan_workers(&job_env, &ranks)?,
            hang_detection,
            debug_filter: String::new(),
        });
        first_rank += capacity.workers;
    }
    let warnings = collect_warnings(job, hosts, &capacities, world);
    let host_names = hosts.iter().map(|h| h.name.clone()).collect();
    let master_port = match job.cluster.master_port {
        MasterPort::Auto => None,
        MasterPort::Fixed(port) => Some(port),
    };
    Ok(Plan {
        run: run.clone(),
        run_dir,
        world,
        master_address,
        master_port,
        host_plans,
        host_names,
        warnings,
    })
}

/// The number of workers that are planned on a host, and the accelerators of the host that the job
/// uses.
struct HostAllocation {
    /// The number of workers on the host.
    workers: u32,
    accelerators: accelerator_selection::AcceleratorSelection,
}

/// A host for which workers are planned, with the rank that its first worker gets.
struct HostWithFirstRank<'a> {
    host: &'a JobHost,
    capacity: &'a HostAllocation,
    /// The index of the host, which is the workers' `GROUP_RANK`.
    group: u32,
    /// The number of the attempt.
    attempt: u32,
    first_rank: Rank,
    /// The number of threads per worker that the job sets. If this value is `None`, each worker
    /// gets a thread for each core of its share.
    threads: Option<u32>,
}

/// Plans the workers of one host: the rank, CPUs, accelerators, environment and command of each, in
/// the order of their local ranks. Fails if the workers cannot be bound to CPUs.
fn plan_workers(
    job_env: &worker_env::SharedEnvValues<'_>,
    ranks: &HostWithFirstRank<'_>,
) -> diagnostic::Result<Vec<WorkerPlan>> {
    let (job, inventory) = (job_env.job, &ranks.host.inventory);
    let HostAllocation { workers, accelerators } = ranks.capacity;
    let device_nodes: Vec<Option<u32>> =
        (0..*workers).map(|local_rank| accelerators.numa_node_of_worker(local_rank)).collect();
    // The cores of a host without an agent are not known yet.
    let bind = if inventory.is_unknown() { CpuBind::None } else { job.run.cpu_bind };
    let slots = cpu_binding::assign_cpus(inventory, &device_nodes, bind).map_err(|e| {
        key_error(codes::CPU_BINDING_IMPOSSIBLE, "run.cpu_bind", format!("{e} on {}", ranks.host.name))
            .with_field("host", ranks.host.name.as_str())
            .with_field("workers", e.workers)
            .with_field("cpus", e.cpus)
            .with_help("use `auto`, which leaves workers unbound where cores are too few")
    })?;
    let plan_worker = |(local_rank, slot): (u32, &cpu_binding::WorkerCpus)| {
        let rank = ranks.first_rank + local_rank;
        let (local_world, group, threads) = (*workers, ranks.group, slot.threads);
        let position =
            worker_env::WorkerEnvValues { rank, local_rank, local_world, group, threads, accelerators };
        WorkerPlan {
            rank,
            local_rank,
            local_world,
            command: worker_command::build_worker_command(
                &job.run,
                worker_env::compute_local_rank_value(job, local_rank),
            ),
            wrapper: worker_command::build_wrapper(
                &job.run,
                rank,
                &[
                    ("rank", rank.to_string()),
                    ("local_rank", local_rank.to_string()),
                    ("host", ranks.host.name.clone()),
                    ("run", job_env.run.0.clone()),
                    ("attempt", ranks.attempt.to_string()),
                ],
            ),
            threads: ranks.threads.unwrap_or(slot.threads),
            env: worker_env::build_worker_env(job_env, ranks.host, &position),
            workdir: job.run.workdir.clone(),
            cpus: slot.cpus.clone(),
            log: job_env.logs.join(format!("rank-{rank}.log")),
        }
    };
    Ok((0..*workers).zip(&slots).map(plan_worker).collect())
}

/// Determines how many workers a host gets, and selects the accelerators of the host that these
/// workers use. Fails if the job places more workers on the host than there are slots, or if there
/// are fewer accelerators than slots. Also fails if the accelerators do not suffice for the
/// workers, or if there are too many workers.
fn compute_host_allocation(job: &JobSpec, host: &JobHost) -> diagnostic::Result<HostAllocation> {
    /// The key of job.yaml that sets the number of workers on each host.
    const WORKERS_KEY: &str = "cluster.workers_per_host";
    let name = &host.name;
    let accelerators =
        accelerator_selection::select_accelerators(job, &host.inventory)?.retain_selected_slots(job, host)?;
    let device_workers = accelerators.worker_capacity() as u32;
    let workers = match (job.cluster.workers_per_host, host.slots) {
        (WorkersPerHost::Exactly(n), Some(slots)) if n > slots => {
            let available = format_count(slots, "slot");
            let message = format!("the job places {n} workers on {name}, which has {available}");
            return Err(key_error(codes::WORKERS_EXCEED_SLOTS, WORKERS_KEY, message)
                .with_field("host", name.as_str())
                .with_field("workers", n)
                .with_field("slots", slots)
                .with_help("lower the number of workers, or give the host more slots"));
        }
        (WorkersPerHost::Exactly(n), _) => n,
        (WorkersPerHost::Auto, Some(slots)) => slots,
        (WorkersPerHost::Auto, None) => {
            accelerators.check_single_kind(&host.inventory)?;
            device_workers.max(1)
        }
    };
    match host.slots {
        Some(slots) if device_workers > 0 && slots > device_workers => {
            let available = format_count(accelerators.count(), accelerators.unit_noun());
            let reason = match job.cluster.devices {
                DeviceSelection::List(_) => format!("`cluster.devices` names {available}"),
                _ => format!("the host has {available}"),
            };
            let message = format!("{name} declares {slots} slots, but {reason}");
            Err(key_error(codes::SLOTS_EXCEED_GPUS, "cluster.hosts", message)
                .with_field("host", name.as_str())
                .with_field("slots", slots)
                .with_field("gpus", accelerators.count())
                .with_help("correct the slots, or use `cluster.devices: cpu`"))
        }
        _ if workers > MAX_WORKERS_PER_HOST => {
            let message = format!(
                "the job places {workers} workers on {name}; at most {MAX_WORKERS_PER_HOST} are supported"
            );
            Err(key_error(codes::WORKERS_OUT_OF_RANGE, WORKERS_KEY, message)
                .with_field("host", name.as_str())
                .with_field("workers", workers))
        }
        _ => {
            accelerators.check_worker_count(job, workers, &host.inventory)?;
            Ok(HostAllocation { workers, accelerators })
        }
    }
}

/// Returns a copy of the job for the agents in one attempt (start of all workers), with the
/// checkpoint from which the attempt resumes. The job of a program does not contain the list of
/// hosts.
fn adapt_job_to_attempt(job: &JobSpec, attempt: &Attempt) -> JobSpec {
    let mut job = job.clone();
    if job.run.command.is_some() {
        // Sending the list of hosts to every host grows with the square of their number. Built-in
        // workers need it, because they store the job in their checkpoints.
        // Agents of joined nodes hide the variables of the launcher that started them.
        if job.cluster.hosts != HostSelection::Join {
            job.cluster.hosts = HostSelection::Local;
        }
        (job.cluster.include, job.cluster.exclude) = (vec![], vec![]);
    }
    if let (Some(path), false) = (&attempt.resume, job.resume.from == ResumeFrom::Auto) {
        job.resume.from = ResumeFrom::Path(path.clone());
    }
    job
}

/// Returns whether built-in training is to search for a checkpoint of earlier runs of its batch
/// job, such as a requeued Slurm job.
///
/// A checkpoint of this run takes precedence. With `resume.from: auto`, the newest checkpoint in
/// `checkpoint.dir` does.
fn continues_batch_job(job: &JobSpec, attempt: &Attempt) -> bool {
    let is_restarted = attempt.batch_job.as_ref().is_some_and(BatchJobRecord::may_have_earlier_runs);
    is_restarted
        && attempt.resume.is_none()
        && job.run.command.is_none()
        && job.resume.from != ResumeFrom::Auto
}

/// Returns the names of the devices that the workers of a host compute on, such as `gpu 0` or
/// `cpu`, in the order of their local ranks. A name is `gpu 0`, `npu 0`, `cpu` or `unknown`.
pub(crate) fn list_device_labels(job: &JobSpec, inventory: &HostInventory, workers: u32) -> Vec<String> {
    let accelerators = accelerator_selection::select_accelerators(job, inventory).unwrap_or_default();
    (0..workers).map(|rank| accelerators.device_label_of_worker(rank)).collect()
}

/// Returns the path of the run directory (the directory of the run's logs and events), which is
/// built from the working directory and `run.logs.dir`. The names of the job and of the run replace
/// the placeholders of `run.logs.dir`.
pub(crate) fn resolve_run_dir(job: &JobSpec, run: &RunId) -> PathBuf {
    let dir = job.run.logs.dir.replace("{name}", &job.name).replace("{run}", &run.0);
    job.run.workdir.join(dir)
}

/// Returns warnings about the planned workers, such as that the workers of a host must share too
/// few CPUs or accelerators. `capacities` contains the number of workers of each host.
fn collect_warnings(
    job: &JobSpec,
    hosts: &[JobHost],
    capacities: &[HostAllocation],
    world: u32,
) -> Vec<Diagnostic> {
    let mut warnings = Vec::new();
    for (host, capacity) in hosts.iter().zip(capacities) {
        warnings.extend(capacity.accelerators.find_shared_warning(&host.name, capacity.workers));
        let count = capacity.workers;
        let cores = host.inventory.usable_cpu_count();
        if count > cores && !host.inventory.cpus.is_empty() {
            let on_host = if hosts.len() > 1 { format!(" on {}", host.name) } else { String::new() };
            let shared = format_count(cores, "CPU core");
            let message = format!("{count} workers share {shared}{on_host}");
            warnings.push(
                Diagnostic::warning(codes::CPU_OVERSUBSCRIBED, message)
                    .with_subject("cluster.workers_per_host")
                    .with_field("host", host.name.as_str())
                    .with_field("workers", count)
                    .with_field("cores", cores)
                    .with_help("use at most one worker for each core"),
            );
        }
    }
    warnings.extend(absent_ranks::find_absent_rank_warnings(job, world));
    warnings.extend(memory_copies::find_unplaced_copies_warning(job, hosts.len()));
    warnings
}

#[cfg(test)]
mod tests;

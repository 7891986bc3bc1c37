//! [`build_worker_env`]: builds the environment variables that launch sets for a worker.
use super::{accelerator_selection::AcceleratorSelection, job_host::JobHost, key_error::key_error};
use diagnostic::codes;
use jobspec::{
    CommBackend, InterfaceSelector, JobSpec, RunSpec, StoreHost, VisibleDevices,
    env::{self, OMP_NUM_THREADS},
    ids::{Rank, RunId},
};
use protocol::control::{HostInventory, RendezvousRequest, select_host_address};
use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
};

/// The preliminary value of `JAX_COORDINATOR_ADDRESS` in a worker's environment, which the address
/// of JAX's coordinator replaces before the worker starts.
const UNBOUND_ADDRESS_PLACEHOLDER: &str = "auto";
/// The largest number of threads that `OMP_NUM_THREADS` may set for one worker.
const MAX_THREADS: u32 = 4096;

/// Values that are equal in the environment variables of all workers, such as the world size and
/// the run ID.
pub(super) struct SharedEnvValues<'a> {
    pub(super) job: &'a JobSpec,
    pub(super) run: &'a RunId,
    /// The number of workers on all hosts.
    pub(super) world: u32,
    /// The number of hosts of the attempt (`GROUP_WORLD_SIZE`).
    pub(super) groups: u32,
    /// The directory of the workers' log files.
    pub(super) logs: &'a Path,
    /// The number of restarts of the run so far. Restarts that only change the hosts are not
    /// counted.
    pub(super) restarts: u32,
    /// Whether workers exchange data over a network between hosts.
    pub(super) between_hosts: bool,
    /// Whether programs can only compute on CPUs, on every host.
    pub(super) on_cpus: bool,
}

/// Values that differ from worker to worker in the environment variables, such as the rank and the
/// number of threads.
pub(super) struct WorkerEnvValues<'a> {
    pub(super) rank: Rank,
    pub(super) local_rank: u32,
    pub(super) local_world: u32,
    /// The index of the worker's host (`GROUP_RANK`).
    pub(super) group: u32,
    pub(super) threads: u32,
    /// The accelerators that the job uses on the worker's host.
    pub(super) accelerators: &'a AcceleratorSelection,
}

/// Returns the environment variables that launch sets for a worker, without `MASTER_ADDR` and
/// `MASTER_PORT`, which [`insert_rendezvous`] adds. The variables that launch defines come first,
/// followed by those of `run.env`, which replace defaults of launch.
pub(super) fn build_worker_env(
    job_env: &SharedEnvValues<'_>,
    host: &JobHost,
    position: &WorkerEnvValues<'_>,
) -> Vec<(String, String)> {
    let (job, inventory) = (job_env.job, &host.inventory);
    let mut env = vec![
        (env::RANK, position.rank.to_string()),
        (env::LOCAL_RANK, compute_local_rank_value(job, position.local_rank).to_string()),
        (env::WORLD_SIZE, job_env.world.to_string()),
        (env::LOCAL_WORLD_SIZE, position.local_world.to_string()),
    ];
    let mut defaults = vec![(env::OMP_NUM_THREADS, position.threads.to_string())];
    let trains = job.run.command.is_none();
    if !trains {
        env.extend(build_program_env(job_env, position));
        defaults.push((env::PYTHONUNBUFFERED, "1".to_owned()));
        defaults.push((env::TORCH_NCCL_ASYNC_ERROR_HANDLING, "1".to_owned()));
        defaults.extend(build_framework_defaults(job_env, inventory, position));
        for (name, value) in &mut defaults {
            if let Some((_, inherited)) =
                inventory.inherited_env.iter().find(|(inherited, _)| inherited == name)
            {
                value.clone_from(inherited);
            }
        }
    }
    let is_hidden = |address: &IpAddr| host.reached_address(&job.cluster.hosts) != Some(*address);
    if trains && job_env.between_hosts && inventory.reached_address.as_ref().is_some_and(is_hidden) {
        // The user, and not the controller, reached this host at the address in the variable.
        env.push((env::SSH_CONNECTION, String::new()));
    }
    defaults.extend(build_interface_defaults(job_env, host));
    if trains && job.cluster.comm_backend == CommBackend::Nccl && job.cluster.workers_per_gpu > 1 {
        defaults.push((env::NCCL_MULTI_RANK_GPU_ENABLE, "1".to_owned()));
    }
    defaults.extend(position.accelerators.build_env(job.run.visible_devices, position.local_rank));
    let run = &job.run;
    let is_given =
        |name| run.env.iter().any(|(set, _)| set == name) || run.env_from.iter().any(|(set, _)| set == name);
    env.extend(defaults.into_iter().filter(|(name, _)| !is_given(*name)));
    let added = env.into_iter().map(|(name, value)| (name.to_owned(), value));
    added.chain(job.run.env.iter().cloned()).collect()
}

/// Returns variables for Accelerate and JAX with default values, each of which a worker gets if the
/// user has not set the variable. Accelerate trains each worker alone on CPUs, unless a variable
/// states that CPUs are intended. [`insert_rendezvous`] replaces the address of JAX's coordinator.
fn build_framework_defaults(
    job_env: &SharedEnvValues<'_>,
    inventory: &HostInventory,
    position: &WorkerEnvValues<'_>,
) -> Vec<(&'static str, String)> {
    let policy = job_env.job.run.visible_devices;
    let mut defaults = vec![(env::JAX_COORDINATOR_ADDRESS, UNBOUND_ADDRESS_PLACEHOLDER.to_owned())];
    let device =
        position.accelerators.jax_device_of_worker(policy, position.local_rank, position.local_world);
    defaults.extend(device.map(|device| (env::JAX_LOCAL_DEVICE_IDS, device.to_string())));
    if job_env.on_cpus && !uses_deepspeed(&job_env.job.run, inventory) {
        defaults.push((env::ACCELERATE_USE_CPU, "true".to_owned()));
    }
    defaults
}

/// Returns whether the user's program probably uses DeepSpeed, from its arguments and from the
/// settings of DeepSpeed in its environment.
fn uses_deepspeed(run: &RunSpec, inventory: &HostInventory) -> bool {
    let is_setting = |(name, value): &(String, String)| {
        env::ACCELERATE_DEEPSPEED_VARIABLES.contains(&name.as_str())
            && !matches!(value.as_str(), "" | "false")
    };
    let is_reference =
        run.env_from.iter().any(|(name, _)| env::ACCELERATE_DEEPSPEED_VARIABLES.contains(&name.as_str()));
    let is_given = run.env.iter().chain(&inventory.inherited_env).any(is_setting);
    run.local_rank_argument || is_reference || is_given
}

/// Returns variables that make NCCL, Gloo and TensorPipe use the network interface of the job, if
/// the job has several hosts. Values of the user or of the host replace those of launch.
///
/// Unless the job names a network, NCCL selects the fastest interface itself, and Gloo and
/// TensorPipe get the interface only if the controller reached the host through it. Any other
/// interface could be one that is not connected to the other hosts, such as a bridge of containers.
fn build_interface_defaults(job_env: &SharedEnvValues<'_>, host: &JobHost) -> Vec<(&'static str, String)> {
    let (selector, inventory) = (&job_env.job.cluster.interface, &host.inventory);
    let reached = host.reached_address(&job_env.job.cluster.hosts);
    let is_named = matches!(selector, InterfaceSelector::Named(_));
    let selected = select_host_address(selector, reached, &inventory.addresses)
        .filter(|selected| job_env.between_hosts && (is_named || Some(selected.address) == reached));
    let Some(selected) = selected else { return Vec::new() };
    let name = &selected.interface;
    let mut defaults = Vec::new();
    if is_named {
        // NCCL takes a name without `=` for a prefix.
        defaults.push((env::NCCL_SOCKET_IFNAME, format!("={name}")));
    }
    if job_env.job.run.command.is_some() {
        defaults.push((env::GLOO_SOCKET_IFNAME, name.clone()));
        defaults.push((env::TP_SOCKET_IFNAME, name.clone()));
    }
    for (variable, value) in &mut defaults {
        let is_inherited = |(n, v): &&(String, String)| n.as_str() == *variable && !v.is_empty();
        if let Some((_, inherited)) = inventory.inherited_env.iter().find(is_inherited) {
            value.clone_from(inherited);
        }
    }
    defaults
}

/// Adds `MASTER_ADDR` and `MASTER_PORT` to a worker's environment, and sets the address of JAX's
/// coordinator if the environment contains only a placeholder.
pub(super) fn insert_rendezvous(env: &mut Vec<(String, String)>, address: String, port: String) {
    let coordinator =
        env.iter_mut().find(|(n, v)| n == env::JAX_COORDINATOR_ADDRESS && v == UNBOUND_ADDRESS_PLACEHOLDER);
    if let (Some((_, value)), Ok(ip), Ok(port)) = (coordinator, address.parse::<IpAddr>(), port.parse()) {
        *value = SocketAddr::new(ip, RendezvousRequest::compute_jax_coordinator_port(port)).to_string();
    }
    let position = env.iter().position(|(name, _)| name == env::LOCAL_WORLD_SIZE).map_or(0, |i| i + 1);
    let variables = [(env::MASTER_ADDR.to_owned(), address), (env::MASTER_PORT.to_owned(), port)];
    env.splice(position..position, variables);
}

/// Returns the value of `LOCAL_RANK` for a worker: its local rank, or 0 if the worker's program
/// sees only one GPU. By this variable, a program selects one of its visible GPUs.
pub(super) fn compute_local_rank_value(job: &JobSpec, local_rank: Rank) -> Rank {
    match job.run.visible_devices {
        VisibleDevices::All => local_rank,
        VisibleDevices::One => 0,
    }
}

/// Returns the environment variables of torchrun, DeepSpeed and JAX for a worker that runs the
/// user's program.
fn build_program_env(
    job_env: &SharedEnvValues<'_>,
    position: &WorkerEnvValues<'_>,
) -> [(&'static str, String); 16] {
    let (group, groups) = (position.group.to_string(), job_env.groups.to_string());
    let agent_store = match job_env.job.cluster.store {
        StoreHost::Agent => "True",
        StoreHost::Rank0 => "False",
    };
    let error_file = job_env.logs.join(format!("rank-{}.error.json", position.rank));
    [
        (env::GROUP_RANK, group.clone()),
        (env::GROUP_WORLD_SIZE, groups.clone()),
        (env::ROLE_RANK, position.rank.to_string()),
        (env::ROLE_WORLD_SIZE, job_env.world.to_string()),
        (env::ROLE_NAME, "default".to_owned()),
        (env::NODE_RANK, group.clone()),
        (env::LOCAL_SIZE, position.local_world.to_string()),
        (env::CROSS_RANK, group),
        (env::CROSS_SIZE, groups),
        (env::TORCHELASTIC_RUN_ID, job_env.run.0.clone()),
        (env::TORCHELASTIC_RESTART_COUNT, job_env.restarts.to_string()),
        (env::TORCHELASTIC_MAX_RESTARTS, job_env.job.run.restarts.to_string()),
        (env::TORCHELASTIC_USE_AGENT_STORE, agent_store.to_owned()),
        (env::TORCHELASTIC_ERROR_FILE, error_file.display().to_string()),
        (env::JAX_NUM_PROCESSES, job_env.world.to_string()),
        (env::JAX_PROCESS_ID, position.rank.to_string()),
    ]
}

/// Parses the number of threads per worker that the user sets by `OMP_NUM_THREADS` in the job.
/// Returns `None` if the job does not set the variable. A value that is not a number from 1 to
/// [`MAX_THREADS`] is an error in a job with built-in training, and gives `None` in a job with a
/// program.
pub(super) fn parse_threads(job: &JobSpec) -> diagnostic::Result<Option<u32>> {
    let Some((name, value)) = job.run.env.iter().find(|(name, _)| name == OMP_NUM_THREADS) else {
        return Ok(None);
    };
    let threads = value.parse().ok().filter(|n| (1..=MAX_THREADS).contains(n));
    if threads.is_none() && job.train.is_some() {
        let message = format!("`{name}` is not a number of threads from 1 to {MAX_THREADS}");
        return Err(key_error(codes::host::THREADS_INVALID, &format!("run.env.{name}"), message)
            .with_help("remove it to use the worker's share of the cores"));
    }
    Ok(threads)
}

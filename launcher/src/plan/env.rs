//! The environment of a worker.
use super::devices::Gpus;
use crate::discover::Facts;
use contract::{
    env::{self, OMP_NUM_THREADS},
    ids::{Rank, RunId},
    job::{Collectives, JobSpec, MasterPort, StoreHost, VisibleDevices},
    preflight::Finding,
};
use core::net::IpAddr;
use std::path::Path;

/// Most threads of a worker.
const MOST_THREADS: u32 = 4096;

/// What is the same for all workers.
pub(super) struct Whole<'a> {
    pub(super) job: &'a JobSpec,
    pub(super) run: &'a RunId,
    pub(super) world: u32,
    /// Number of nodes.
    pub(super) groups: u32,
    /// Directory of the logs.
    pub(super) logs: &'a Path,
    pub(super) master: Option<IpAddr>,
    /// How often the job was started again.
    pub(super) restarts: u32,
}

/// The worker whose environment is made.
pub(super) struct Who<'a> {
    pub(super) rank: Rank,
    pub(super) local_rank: u32,
    pub(super) local_world: u32,
    /// Number of its node.
    pub(super) group: u32,
    pub(super) threads: u32,
    /// Of its host.
    pub(super) gpus: &'a Gpus,
}

/// What a worker's environment gets: launch's names, then the job's own.
pub(super) fn of_worker(whole: &Whole<'_>, facts: &Facts, who: &Who<'_>) -> Vec<(String, String)> {
    let job = whole.job;
    let port = match job.cluster.master_port {
        MasterPort::Auto => "auto".to_owned(),
        MasterPort::Fixed(port) => port.to_string(),
    };
    let master = whole.master.map_or_else(|| "auto".to_owned(), |address| address.to_string());
    let mut env = vec![
        (env::RANK, who.rank.to_string()),
        (env::LOCAL_RANK, shown_local_rank(job, who.local_rank).to_string()),
        (env::WORLD_SIZE, whole.world.to_string()),
        (env::LOCAL_WORLD_SIZE, who.local_world.to_string()),
        (env::MASTER_ADDR, master),
        (env::MASTER_PORT, port),
    ];
    let mut defaults = vec![(env::OMP_NUM_THREADS, who.threads.to_string())];
    let trains = job.run.command.is_none();
    if !trains {
        env.extend(of_program(whole, who));
        defaults.push((env::PYTHONUNBUFFERED, "1".to_owned()));
        defaults.push((env::TORCH_NCCL_ASYNC_ERROR_HANDLING, "1".to_owned()));
        for (name, value) in &mut defaults {
            if let Some((_, chosen)) = facts.chosen.iter().find(|(chosen, _)| chosen == name) {
                value.clone_from(chosen);
            }
        }
    }
    if trains && job.cluster.collectives == Collectives::Nccl && job.cluster.workers_per_gpu > 1 {
        defaults.push((env::NCCL_MULTI_RANK_GPU_ENABLE, "1".to_owned()));
    }
    defaults.extend(who.gpus.env(job.run.visible_devices, who.local_rank));
    let run = &job.run;
    let given =
        |name| run.env.iter().any(|(own, _)| own == name) || run.env_from.iter().any(|(own, _)| own == name);
    env.extend(defaults.into_iter().filter(|(name, _)| !given(*name)));
    let ours = env.into_iter().map(|(name, value)| (name.to_owned(), value));
    ours.chain(job.run.env.iter().cloned()).collect()
}

/// `LOCAL_RANK` picks a GPU of those that a worker sees.
pub(super) fn shown_local_rank(job: &JobSpec, local_rank: Rank) -> Rank {
    match job.run.visible_devices {
        VisibleDevices::All => local_rank,
        VisibleDevices::One => 0,
    }
}

/// What torchrun's programs, and DeepSpeed's, find beside the rank.
fn of_program(whole: &Whole<'_>, who: &Who<'_>) -> [(&'static str, String); 14] {
    let (group, groups) = (who.group.to_string(), whole.groups.to_string());
    let hosted = match whole.job.cluster.store {
        StoreHost::Agent => "True",
        StoreHost::Rank0 => "False",
    };
    let error_file = whole.logs.join(format!("rank-{}.error.json", who.rank));
    [
        (env::GROUP_RANK, group.clone()),
        (env::GROUP_WORLD_SIZE, groups.clone()),
        (env::ROLE_RANK, who.rank.to_string()),
        (env::ROLE_WORLD_SIZE, whole.world.to_string()),
        (env::ROLE_NAME, "default".to_owned()),
        (env::NODE_RANK, group.clone()),
        (env::LOCAL_SIZE, who.local_world.to_string()),
        (env::CROSS_RANK, group),
        (env::CROSS_SIZE, groups),
        (env::TORCHELASTIC_RUN_ID, whole.run.0.clone()),
        (env::TORCHELASTIC_RESTART_COUNT, whole.restarts.to_string()),
        (env::TORCHELASTIC_MAX_RESTARTS, whole.job.run.restarts.to_string()),
        (env::TORCHELASTIC_USE_AGENT_STORE, hosted.to_owned()),
        (env::TORCHELASTIC_ERROR_FILE, error_file.display().to_string()),
    ]
}

/// The number of threads that the job's own environment asks for. A program may understand more than a number there; the
/// built-in runtime doesn't.
pub(super) fn threads(job: &JobSpec) -> Result<Option<u32>, Finding> {
    let Some((name, value)) = job.run.env.iter().find(|(name, _)| name == OMP_NUM_THREADS) else {
        return Ok(None);
    };
    let threads = value.parse().ok().filter(|n| (1..=MOST_THREADS).contains(n));
    if threads.is_none() && job.train.is_some() {
        return Err(Finding {
            path: format!("run.env.{name}"),
            message: format!("`{name}` must be a number of threads from 1 to {MOST_THREADS}"),
            hint: Some("leave it out for the worker's share of the cores".to_owned()),
        });
    }
    Ok(threads)
}

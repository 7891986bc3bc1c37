//! The environment of a worker.
use crate::discover::Facts;
use contract::{
    env::{self, OMP_NUM_THREADS},
    ids::{Rank, RunId},
    job::{JobSpec, MasterPort, StoreHost},
    judge::Finding,
};
use std::path::Path;

/// Most threads of a worker.
const MOST_THREADS: u32 = 4096;

/// The worker whose environment is made. One machine has one node, so local and global numbers are the same.
pub(super) struct Who<'a> {
    pub(super) run: &'a RunId,
    pub(super) rank: Rank,
    pub(super) world: u32,
    pub(super) threads: u32,
    /// Directory of the logs.
    pub(super) logs: &'a Path,
}

/// What a worker's environment gets: launch's names, then the job's own.
pub(super) fn of_worker(job: &JobSpec, facts: &Facts, who: &Who<'_>) -> Vec<(String, String)> {
    let port = match job.cluster.master_port {
        MasterPort::Auto => "auto".to_owned(),
        MasterPort::Fixed(port) => port.to_string(),
    };
    let (rank, world) = (who.rank.to_string(), who.world.to_string());
    let mut env = vec![
        (env::RANK, rank.clone()),
        (env::LOCAL_RANK, rank),
        (env::WORLD_SIZE, world.clone()),
        (env::LOCAL_WORLD_SIZE, world),
        (env::MASTER_ADDR, "127.0.0.1".to_owned()),
        (env::MASTER_PORT, port),
    ];
    let mut defaults = vec![(env::OMP_NUM_THREADS, who.threads.to_string())];
    if job.run.command.is_some() {
        env.extend(of_program(job, who));
        defaults.push((env::PYTHONUNBUFFERED, "1".to_owned()));
        defaults.push((env::TORCH_NCCL_ASYNC_ERROR_HANDLING, "1".to_owned()));
        for (name, value) in &mut defaults {
            if let Some((_, chosen)) = facts.chosen.iter().find(|(chosen, _)| chosen == name) {
                value.clone_from(chosen);
            }
        }
    }
    let run = &job.run;
    let given =
        |name| run.env.iter().any(|(own, _)| own == name) || run.env_from.iter().any(|(own, _)| own == name);
    env.extend(defaults.into_iter().filter(|(name, _)| !given(*name)));
    let ours = env.into_iter().map(|(name, value)| (name.to_owned(), value));
    ours.chain(job.run.env.iter().cloned()).collect()
}

/// What torchrun's programs, and DeepSpeed's, find beside the rank.
fn of_program(job: &JobSpec, who: &Who<'_>) -> [(&'static str, String); 14] {
    let (first, one) = ("0".to_owned(), "1".to_owned());
    let hosted = match job.cluster.store {
        StoreHost::Agent => "True",
        StoreHost::Rank0 => "False",
    };
    let error_file = who.logs.join(format!("rank-{}.error.json", who.rank));
    [
        (env::GROUP_RANK, first.clone()),
        (env::GROUP_WORLD_SIZE, one.clone()),
        (env::ROLE_RANK, who.rank.to_string()),
        (env::ROLE_WORLD_SIZE, who.world.to_string()),
        (env::ROLE_NAME, "default".to_owned()),
        (env::NODE_RANK, first.clone()),
        (env::LOCAL_SIZE, who.world.to_string()),
        (env::CROSS_RANK, first.clone()),
        (env::CROSS_SIZE, one),
        (env::TORCHELASTIC_RUN_ID, who.run.0.clone()),
        (env::TORCHELASTIC_RESTART_COUNT, first.clone()),
        (env::TORCHELASTIC_MAX_RESTARTS, first),
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

//! The environment of a worker.
use contract::{
    env::{LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS, RANK, WORLD_SIZE},
    ids::Rank,
    job::{JobSpec, MasterPort},
    judge::Finding,
};

/// Most threads of a worker.
const MOST_THREADS: u32 = 4096;

/// What a worker's environment gets: launch's names, then the job's own.
pub(super) fn of_worker(job: &JobSpec, rank: Rank, world: u32, threads: u32) -> Vec<(String, String)> {
    let port = match job.cluster.master_port {
        MasterPort::Auto => "auto".to_owned(),
        MasterPort::Fixed(port) => port.to_string(),
    };
    let mut env = vec![
        (RANK, rank.to_string()),
        (LOCAL_RANK, rank.to_string()),
        (WORLD_SIZE, world.to_string()),
        (LOCAL_WORLD_SIZE, world.to_string()),
        (MASTER_ADDR, "127.0.0.1".to_owned()),
        (MASTER_PORT, port),
    ];
    if !job.run.env.iter().any(|(name, _)| name == OMP_NUM_THREADS) {
        env.push((OMP_NUM_THREADS, threads.to_string()));
    }
    let own = env.into_iter().map(|(name, value)| (name.to_owned(), value));
    own.chain(job.run.env.iter().cloned()).collect()
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

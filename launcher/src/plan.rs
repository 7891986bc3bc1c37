//! [`Plan`]: who runs where with what, from the job and the facts alone.
mod env;
mod place;

use crate::discover::Facts;
use contract::{
    control::{NodePlan, WorkerPlan},
    ids::RunId,
    job::{Count, JobSpec},
    judge::Finding,
};
use std::path::PathBuf;

/// What will run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub run: RunId,
    /// Absolute.
    pub run_dir: PathBuf,
    pub world: u32,
    pub nodes: Vec<NodePlan>,
    /// Worth saying before the start.
    pub warnings: Vec<Finding>,
}

/// Most workers for which one machine's plan is made.
const MOST_WORKERS: u32 = 1024;

/// Plans a job on one machine. A rendezvous port that isn't given stays `auto` in the environment: it is found when the
/// run starts.
///
/// Problems are what the job asks for and the facts don't allow.
pub fn plan(job: &JobSpec, facts: &Facts, run: &RunId) -> Result<Plan, Vec<Finding>> {
    let world = match job.cluster.workers_per_host {
        Count::Auto => 1,
        Count::Exactly(n) => n,
    };
    if world == 0 || world > MOST_WORKERS {
        let message = format!("{world} workers can't be planned on one machine");
        return Err(vec![finding("cluster.workers_per_host", message, "use 1 to 1024")]);
    }
    let asked_threads = env::threads(job).map_err(|finding| vec![finding])?;
    let run_dir = run_dir(job, run);
    let slots = place::cpu_slots(facts, world);
    let workers = (0..world)
        .map(|rank| {
            let slot = &slots[rank as usize];
            let logs = run_dir.join("logs");
            let who = env::Who { run, rank, world, threads: slot.threads, logs: &logs };
            let env = env::of_worker(job, facts, &who);
            WorkerPlan {
                rank,
                local_rank: rank,
                local_world: world,
                command: job.run.command.clone(),
                threads: asked_threads.unwrap_or(slot.threads),
                env,
                workdir: job.run.workdir.clone(),
                cpus: slot.cpus.clone(),
                log: logs.join(format!("rank-{rank}.log")),
            }
        })
        .collect();
    let node = NodePlan {
        job: job.clone(),
        run: run.0.clone(),
        run_dir: run_dir.clone(),
        epoch: 0,
        world,
        workers,
        grace_ms: job.run.grace_ms,
    };
    let warnings = warnings(job, facts, world);
    Ok(Plan { run: run.clone(), run_dir, world, nodes: vec![node], warnings })
}

/// The run directory with its placeholders filled in, absolute.
fn run_dir(job: &JobSpec, run: &RunId) -> PathBuf {
    let dir = job.run.logs.dir.replace("{name}", &job.name).replace("{run}", &run.0);
    job.run.workdir.join(dir)
}

fn warnings(job: &JobSpec, facts: &Facts, world: u32) -> Vec<Finding> {
    let mut warnings = Vec::new();
    let cores = facts.cores();
    if world > cores {
        let message = format!("{world} workers share {cores} CPU cores: they run, but take turns");
        warnings.push(finding("cluster.workers_per_host", message, "use at most one worker for each core"));
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

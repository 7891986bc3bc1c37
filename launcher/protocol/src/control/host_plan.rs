//! [`HostPlan`]: the workers of one host in one attempt (one start of all workers of a run).
use super::batch_job::BatchJobRecord;
use jobspec::{JobSpec, ids::Rank};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The instructions for the agent of one host for one start of all workers: the job, and the
/// command and environment of each worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostPlan {
    /// The job, which the agent passes to its built-in workers.
    #[serde(with = "crate::json_text")]
    pub job: JobSpec,
    /// The name of the run.
    pub run: String,
    /// The name of the host, as the job states it.
    pub host: String,
    /// The absolute path of the run directory.
    pub run_dir: PathBuf,
    /// The number of the attempt, counted from 0.
    pub attempt: u32,
    /// The batch job that started the run, which the checkpoints of the run record; `None` if no
    /// scheduler did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_job: Option<BatchJobRecord>,
    /// Whether the attempt resumes from the newest checkpoint of the batch job's earlier runs, if
    /// there is one, whatever `resume.from` states.
    #[serde(default)]
    pub continues_batch_job: bool,
    /// The number of workers of the job on all hosts.
    pub world: u32,
    /// The workers of this host, in the order of their local ranks.
    pub workers: Vec<WorkerPlan>,
    /// How the agent detects that workers hang; `None` if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang_detection: Option<HangDetection>,
    /// The filter of the agent's debug log, in the syntax of `LAUNCH_LOG`. Empty in stored plans.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub debug_filter: String,
}

/// The settings by which agents and the controller detect workers that hang, such as the time
/// without progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangDetection {
    /// The time without progress after which a worker counts as stalled, in milliseconds.
    pub timeout_ms: u64,
    /// Whether a stall of all workers is a hang only if a worker waits in a collective, and CPU
    /// time is progress of a worker that does not wait in one. This is the case if the user has not
    /// requested the detection, because launch cannot distinguish an idle program from a hang.
    pub only_in_collectives: bool,
}

/// How an agent starts one worker's process: its command, its environment, and the CPUs that it is
/// bound to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPlan {
    /// The global rank of the worker.
    pub rank: Rank,
    /// The local rank: the number of the worker among those of its host.
    pub local_rank: u32,
    /// The number of workers on the worker's host.
    pub local_world: u32,
    /// The program and its arguments; `None` for the built-in runtime (`launch worker`).
    pub command: Option<Vec<String>>,
    /// The programs and arguments that start the command (`run.wrap`); empty if no program does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wrapper: Vec<String>,
    /// Variables that are added to the environment of the agent, in this order. A later variable
    /// replaces an earlier one of the same name.
    pub env: Vec<(String, String)>,
    /// The working directory of the process.
    pub workdir: PathBuf,
    /// The numbers of the CPUs that the process is bound to; empty if the process is not bound.
    pub cpus: Vec<u32>,
    /// The number of threads of the built-in runtime, at least 1.
    pub threads: u32,
    /// The absolute path of the worker's log file.
    pub log: PathBuf,
}

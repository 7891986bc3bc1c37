//! `run`: the program of a job, its environment and supervision.
use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The program of a job, its environment and supervision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The program and its arguments, started once per rank; `None` for the built-in runtime.
    pub command: Option<Vec<String>>,
    /// The working directory of workers, where relative paths of the job start. Absolute after
    /// loading.
    pub workdir: PathBuf,
    /// Variables that are added to the environment of each worker, with their values.
    pub env: Vec<(String, String)>,
    /// Variables whose values are read when the run starts and never shown.
    pub env_from: Vec<(String, EnvSource)>,
    /// Patterns of the variables of launch that are passed to the workers of every host and never
    /// shown.
    pub pass_env: Vec<String>,
    /// How workers are bound to CPUs.
    #[serde(rename = "bind")]
    pub cpu_bind: CpuBind,
    /// Which GPUs a worker of a program sees.
    pub visible_devices: VisibleDevices,
    /// Whether `--local_rank=N` is inserted after the script's name, as older launchers do.
    pub local_rank_argument: bool,
    /// Time from SIGTERM to SIGKILL, milliseconds.
    #[serde(rename = "grace_ms")]
    pub grace_period_ms: u64,
    /// The most restarts after failures, over all hosts.
    pub restarts: u32,
    /// The fewest hosts of a start.
    pub min_hosts: MinHosts,
    /// Time without progress after which the job has failed, milliseconds; `None` for no limit.
    pub hang_timeout_ms: Option<u64>,
    /// A line of a program's output that contains this text counts as progress.
    #[serde(rename = "progress")]
    pub progress_pattern: Option<String>,
    /// The actions of signals that launch receives.
    pub signals: Signals,
    /// The logs of workers and the console.
    pub logs: LogsSpec,
}

/// The source of the value of an environment variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvSource {
    /// The variable of this name in the environment of launch.
    FromEnv(String),
    /// The content of this file without a final line break.
    FromFile(PathBuf),
}

/// The fewest hosts of a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinHosts {
    /// As many as the job uses.
    All,
    /// This many.
    AtLeast(u32),
}

/// The actions of signals that launch receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signals {
    /// The action of SIGUSR1.
    pub usr1: SignalAction,
    /// The action of SIGUSR2.
    pub usr2: SignalAction,
    /// The action of SIGTERM.
    pub term: SignalAction,
}

/// What launch does when it receives a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignalAction {
    /// It asks workers to save, and continues.
    Save,
    /// It asks workers to save, and stops them.
    SaveAndStop,
    /// It ignores the signal.
    Ignore,
}

/// How workers are bound to CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CpuBind {
    /// `Numa` when each worker has its own GPU, else `Cores`; unbound when there are more workers
    /// than cores.
    Auto,
    /// Workers are not bound.
    None,
    /// To all cores of a NUMA node: that of the worker's GPU, or of an equal share of the nodes.
    Numa,
    /// To an equal share of the cores.
    Cores,
}

/// Which GPUs of its host a worker sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VisibleDevices {
    /// All of them; `LOCAL_RANK` selects one.
    All,
    /// Only its own; `LOCAL_RANK` is 0.
    One,
}

/// The logs of workers and the console.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogsSpec {
    /// Template of the run directory with the placeholders `{name}` and `{run}`.
    pub dir: String,
    /// The ranks whose output the console shows.
    pub show: Vec<Rank>,
    /// Whether the console shows `[rank N]` before each line.
    pub prefix: bool,
    /// Largest size of a rank's log, bytes.
    pub max_size: u64,
}

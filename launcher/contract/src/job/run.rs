//! `run`: the program of a job, its environment and supervision.
use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `run`: the program of a job, its environment and supervision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The program and its arguments. One process of the program is started per rank. `None` stands
    /// for the built-in runtime.
    pub command: Option<Vec<String>>,
    /// The working directory of the workers, to which relative paths in the job refer. The path is
    /// absolute after loading.
    pub workdir: PathBuf,
    /// Variables, with their values, that are added to the environment of each worker.
    pub env: Vec<(String, String)>,
    /// Variables whose values are read when the run starts, each with the source of the value. The
    /// values are never shown.
    pub env_from: Vec<(String, EnvSource)>,
    /// Name patterns of variables that are copied from launch's environment to the workers of every
    /// host. The values are never shown.
    pub pass_env: Vec<String>,
    /// The CPUs that each worker is bound to.
    #[serde(rename = "bind")]
    pub cpu_bind: CpuBind,
    /// The GPUs that each process of a program sees.
    pub visible_devices: VisibleDevices,
    /// Whether `--local_rank=N` is inserted after the script's name, as older launchers do. `N` is
    /// the local rank.
    pub local_rank_argument: bool,
    /// The time from SIGTERM to SIGKILL, in milliseconds.
    #[serde(rename = "grace_ms")]
    pub grace_period_ms: u64,
    /// The largest number of restarts in a run, regardless of which hosts failed.
    pub restarts: u32,
    /// The smallest number of hosts with which an attempt starts.
    pub min_hosts: MinHosts,
    /// The time without progress after which an attempt has failed, in milliseconds; `None` for no
    /// limit.
    pub hang_timeout_ms: Option<u64>,
    /// The text that a line of a program's output contains if the line counts as progress. If this
    /// value is `None`, CPU time counts as progress.
    #[serde(rename = "progress")]
    pub progress_pattern: Option<String>,
    /// The action for each signal that launch receives.
    pub signals: Signals,
    /// The settings of workers' logs and of the console.
    pub logs: LogsSpec,
}

/// The source from which the value of an environment variable is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvSource {
    /// The variable with this name in launch's environment.
    FromEnv(String),
    /// The file at this path. A final line break is not part of the value.
    FromFile(PathBuf),
}

/// `run.min_hosts`: the smallest number of hosts with which an attempt starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinHosts {
    /// All hosts that the job uses.
    All,
    /// This number of hosts.
    AtLeast(u32),
}

/// `run.signals`: the action for each signal that launch receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signals {
    /// The action when launch receives SIGUSR1.
    pub usr1: SignalAction,
    /// The action when launch receives SIGUSR2.
    pub usr2: SignalAction,
    /// The action when launch receives SIGTERM.
    pub term: SignalAction,
}

/// What launch does when it receives a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignalAction {
    /// Makes workers save a checkpoint, after which the run continues.
    Save,
    /// Makes workers save a checkpoint, after which the run stops.
    SaveAndStop,
    /// Ignores the signal.
    Ignore,
}

/// `run.cpu_bind`: the CPUs that each worker is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CpuBind {
    /// Like [`CpuBind::Numa`] if each worker has a GPU whose NUMA node is known, otherwise like
    /// [`CpuBind::Cores`]. Workers are not bound if there are more workers than CPUs.
    Auto,
    /// Workers may run on all CPUs of the host.
    None,
    /// A worker is bound to all cores of its GPU's NUMA node. A worker without a GPU is bound to
    /// all cores of an equal share of the NUMA nodes.
    Numa,
    /// A worker is bound to an equal share of the cores, which no other worker uses.
    Cores,
}

/// `run.visible_devices`: the GPUs of its host that a process of a program sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VisibleDevices {
    /// All GPUs of the host that the job uses. The program selects one by `LOCAL_RANK`.
    All,
    /// Only the GPU of the process. `LOCAL_RANK` is then 0.
    One,
}

/// `run.logs`: the settings of workers' logs and of the console.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogsSpec {
    /// The path template of the run directory, with the placeholders `{name}` and `{run}`.
    pub dir: String,
    /// The ranks whose output appears on the console.
    pub show: Vec<Rank>,
    /// Whether each line on the console begins with `[rank N]`.
    pub prefix: bool,
    /// The largest size of one rank's log, in bytes. Output beyond this size is not stored.
    pub max_size: u64,
}

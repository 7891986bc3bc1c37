//! `run`: the program of a job, its environment and supervision.
use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `run`: the program of a job, its environment and supervision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The program and its arguments, which is started once per rank; `None` for the built-in
    /// runtime.
    pub command: Option<Vec<String>>,
    /// The working directory of the workers, at which relative paths of the job start. Absolute
    /// after loading.
    pub workdir: PathBuf,
    /// Variables that are added to the environment of each worker, with their values.
    pub env: Vec<(String, String)>,
    /// Variables whose values are read when the run starts, with the source of each. The values are
    /// never shown.
    pub env_from: Vec<(String, EnvSource)>,
    /// Patterns of the variables in launch's environment that are passed to the workers of every
    /// host. The values are never shown.
    pub pass_env: Vec<String>,
    /// The binding of workers to CPUs.
    #[serde(rename = "bind")]
    pub cpu_bind: CpuBind,
    /// The GPUs that a worker of a program sees.
    pub visible_devices: VisibleDevices,
    /// Whether `--local_rank=N` is inserted after the script's name, as older launchers do.
    pub local_rank_argument: bool,
    /// The time from SIGTERM to SIGKILL, milliseconds.
    #[serde(rename = "grace_ms")]
    pub grace_period_ms: u64,
    /// The largest number of restarts after failures on any host.
    pub restarts: u32,
    /// The smallest number of hosts that an attempt starts with.
    pub min_hosts: MinHosts,
    /// The time without progress after which the attempt has failed, milliseconds; `None` for no
    /// limit.
    pub hang_timeout_ms: Option<u64>,
    /// The text by which a line of a program's output counts as progress; `None` if CPU time counts
    /// as progress.
    #[serde(rename = "progress")]
    pub progress_pattern: Option<String>,
    /// The actions of launch when it receives these signals.
    pub signals: Signals,
    /// The logs of workers and the console.
    pub logs: LogsSpec,
}

/// The source of the value of an environment variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvSource {
    /// The variable of this name in launch's environment.
    FromEnv(String),
    /// The content of this file, without the final line break.
    FromFile(PathBuf),
}

/// The smallest number of hosts that an attempt starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinHosts {
    /// All hosts that the job uses.
    All,
    /// This number of hosts.
    AtLeast(u32),
}

/// The actions of launch when it receives these signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signals {
    /// The action of SIGUSR1.
    pub usr1: SignalAction,
    /// The action of SIGUSR2.
    pub usr2: SignalAction,
    /// The action of SIGTERM.
    pub term: SignalAction,
}

/// The action of launch when it receives a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignalAction {
    /// Workers save, and the run continues.
    Save,
    /// Workers save, and the run stops.
    SaveAndStop,
    /// The signal is ignored.
    Ignore,
}

/// The binding of workers to CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CpuBind {
    /// [`CpuBind::Numa`] if each worker has a GPU whose NUMA node is known, otherwise
    /// [`CpuBind::Cores`]. Workers are not bound if there are more workers than CPUs.
    Auto,
    /// Workers are not bound.
    None,
    /// A worker is bound to all cores of its GPU's NUMA node. A worker without a GPU is bound to
    /// all cores of an equal share of the NUMA nodes.
    Numa,
    /// A worker is bound to an equal share of the cores.
    Cores,
}

/// `run.visible_devices`: the GPUs of its host that a worker sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VisibleDevices {
    /// All GPUs of the job; `LOCAL_RANK` selects one.
    All,
    /// Only the worker's own GPU; `LOCAL_RANK` is 0.
    One,
}

/// The logs of workers and the console.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogsSpec {
    /// The template of the run directory, with the placeholders `{name}` and `{run}`.
    pub dir: String,
    /// The ranks whose output the console shows.
    pub show: Vec<Rank>,
    /// Whether the console shows `[rank N]` before each line.
    pub prefix: bool,
    /// The largest size of a rank's log, bytes.
    pub max_size: u64,
}

//! `run:` — what runs and how it is watched.
use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What runs and how it is watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// Any program as ranks; absent: the built-in runtime.
    pub command: Option<Vec<String>>,
    /// Absolute after loading; relative paths of the job resolve here. Default: the current directory.
    pub workdir: PathBuf,
    pub env: Vec<(String, String)>,
    /// Names of `env` whose values are looked up when the run starts, and shown nowhere.
    pub env_from: Vec<(String, EnvSource)>,
    /// Patterns of names whose values launch's own environment gives to workers on every host; shown nowhere.
    pub pass_env: Vec<String>,
    /// What workers are bound to.
    pub bind: Bind,
    /// Which GPUs a worker sees.
    pub visible_devices: VisibleDevices,
    /// Put `--local_rank=N` after the script's name, as older launchers do.
    pub local_rank_argument: bool,
    /// Between SIGTERM and SIGKILL, milliseconds.
    pub grace_ms: u64,
    /// How often the job may be started again after a failure; one budget for all hosts.
    pub restarts: u32,
    /// With how few hosts it may be started again.
    pub min_hosts: MinHosts,
    /// A job without progress for this long, milliseconds, has failed.
    pub hang_timeout_ms: Option<u64>,
    /// A program's line of output with this text is its progress.
    pub progress: Option<String>,
    pub signals: Signals,
    pub logs: LogsSpec,
}

/// Where the value of an environment variable is looked up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvSource {
    /// The variable of this name in launch's own environment.
    FromEnv(String),
    /// The text of this file, without one line end after it.
    FromFile(PathBuf),
}

/// The fewest hosts a start may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinHosts {
    /// As many as the job uses.
    All,
    AtLeast(u32),
}

/// What signals to launch do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signals {
    pub usr1: SignalAction,
    pub usr2: SignalAction,
    pub term: SignalAction,
}

/// What a signal does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignalAction {
    /// Workers are told to save, and go on.
    Save,
    /// Workers are told to save and end.
    SaveAndStop,
    Ignore,
}

/// What workers are bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bind {
    /// As `Numa` with GPUs of their own, else as `Cores`; not at all where cores don't suffice.
    Auto,
    /// Nothing.
    None,
    /// All cores of a NUMA node: the one of the worker's GPU, or an equal share of the nodes.
    Numa,
    /// Cores of their own.
    Cores,
}

/// Which GPUs a worker sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VisibleDevices {
    /// All of the host's; `LOCAL_RANK` picks one.
    All,
    /// Its own alone, and `LOCAL_RANK` is 0.
    One,
}

/// Where output goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogsSpec {
    /// Run directory template; `{name}` and `{run}` are filled in. Default `runs/{name}/{run}`.
    pub dir: String,
    /// Ranks whose output the console shows.
    pub show: Vec<Rank>,
    /// Put `[rank N]` before each line on the console.
    pub prefix: bool,
    /// A rank's log stops growing here, bytes.
    pub max_size: u64,
}

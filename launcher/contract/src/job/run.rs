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
    /// Between SIGTERM and SIGKILL, milliseconds.
    pub grace_ms: u64,
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

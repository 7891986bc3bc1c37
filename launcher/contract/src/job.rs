//! [`JobSpec`]: a job after parsing, defaults and validation. Every field has a value.
//!
//! docs/job.md documents the keys. Fields have the names of their keys, with a unit where the type
//! has none. Checkpoint manifests contain the job as JSON: a field that was renamed since keeps its
//! first name there by `serde(rename)`, and [`JobSpec::to_key_json`] shows it under its present
//! name.
mod check;
pub mod checkpoint;
pub mod cluster;
mod decode;
mod deprecated;
mod document;
pub mod experts;
mod hosts;
mod key_names;
mod keys;
mod load;
pub mod lora;
pub mod optimizer;
mod overrides;
mod print;
mod read;
mod reload;
pub mod run;
mod scalar;
mod sections;
pub mod slurm;
mod source;
mod sources;
pub mod train;
pub mod tune;
mod value_error;
mod yaml;

use serde::{Deserialize, Serialize};

pub use checkpoint::{CheckpointSpec, ResumeFrom, ResumeSpec, RngPolicy, SaveInterval};
pub use cluster::{
    ClusterSpec, CommBackend, Devices, Hosts, Interface, KnownHosts, MasterPort, SshConfig, SshSpec,
    StoreHost, WorkersPerHost,
};
pub use deprecated::{DEPRECATED, DeprecatedName};
pub use document::{Document, Item, ItemValue, Syntax};
pub use experts::{ExpertPlacement, ExpertsSpec};
pub use keys::{KEYS, Key, KeyDefault};
pub use load::{MAX_JOB, Source, load};
pub use lora::{LoraSpec, LoraTargets};
pub use optimizer::{OptimizerName, OptimizerSpec, ScheduleName, ScheduleSpec};
pub use print::quote_yaml;
pub use reload::{ReloadChanges, ReloadTrain, ReloadValues, compare_jobs};
pub use run::{CpuBind, EnvSource, LogsSpec, MinHosts, RunSpec, SignalAction, Signals, VisibleDevices};
pub use scalar::parse_duration;
pub use sections::is_reserved;
pub use slurm::SlurmSpec;
pub use source::SourceMap;
pub use sources::{DataSource, Format, LossOn};
pub use train::{
    Attention, BatchSpec, CudaGraphs, DataSpec, EvalSpec, LossScaleSpec, ModelSpec, Offload, Precision,
    Recompute, SampleSpec, Tokenizer, TrainSpec, ZeroSpec,
};
pub use tune::GroupSpec;

/// A whole job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// `name`: the name of the job, which is part of its directories.
    pub name: String,
    /// `cluster`: the hosts and devices.
    pub cluster: ClusterSpec,
    /// `run`: the program, its environment and supervision.
    pub run: RunSpec,
    /// `train`: the built-in training; present exactly when `run.command` is absent.
    pub train: Option<TrainSpec>,
    /// `checkpoint`: when and where the built-in training saves.
    pub checkpoint: CheckpointSpec,
    /// `resume`: the checkpoint that the run begins with.
    pub resume: ResumeSpec,
    /// `slurm`: the options of `launch sbatch`.
    pub slurm: SlurmSpec,
}

//! [`JobSpec`]: a job after parsing, defaults and validation. Every key has a value.
//!
//! docs/job.md documents the keys. Fields have the names of their keys, with a unit where the type
//! has none.
//!
//! Checkpoint manifests contain the job as JSON. A field that was renamed later keeps its first
//! name in manifests by `serde(rename)`. [`JobSpec::to_key_json`] shows the field under its present
//! name.
mod check;
pub mod checkpoint;
pub mod cluster;
pub mod data;
mod data_sources;
mod decode;
mod decode_hosts;
mod deprecated;
mod document;
pub mod experts;
mod key_json;
mod keys;
mod load;
pub mod lora;
pub mod model;
pub mod optimizer;
mod overrides;
pub mod param_groups;
mod print;
mod readers;
mod reload;
pub mod run;
mod scalar;
mod sections;
pub mod slurm;
mod source_map;
pub mod train;
mod value_error;
mod yaml;

use serde::{Deserialize, Serialize};

pub use checkpoint::{CheckpointSpec, ResumeFrom, ResumeSpec, RngPolicy, SaveInterval};
pub use cluster::{
    ClusterSpec, CommBackend, DeviceSelection, HostSelection, InterfaceSelector, KnownHosts, MasterPort,
    SshConfig, SshSpec, StoreHost, WorkersPerHost,
};
pub use data::{DataSpec, TokenizerSpec};
pub use data_sources::{DataSource, LossTargets, RecordFormat};
pub use deprecated::{DEPRECATED, DeprecatedName};
pub use document::{Document, DocumentItem, DocumentSyntax, DocumentValue};
pub use experts::{ExpertPlacement, ExpertsSpec};
pub use keys::{KEYS, KeyDefault, KeyInfo};
pub use load::{JobArgument, JobSource, MAX_JOB, load_job};
pub use lora::{LoraSpec, LoraTargets};
pub use model::ModelSpec;
pub use optimizer::{OptimizerName, OptimizerSpec, ScheduleName, ScheduleSpec};
pub use param_groups::ParamGroupSpec;
pub use print::quote_yaml;
pub use reload::{ReloadChanges, ReloadTrain, ReloadValues, compare_jobs};
pub use run::{CpuBind, EnvSource, LogsSpec, MinHosts, RunSpec, SignalAction, Signals, VisibleDevices};
pub use scalar::parse_duration;
pub use sections::is_reserved_variable;
pub use slurm::SlurmSpec;
pub use source_map::SourceMap;
pub use train::{
    AttentionKernels, BatchSpec, CudaGraphMode, EvalSpec, GenerationSpec, LossScaleSpec, OffloadTarget,
    Precision, RecomputeMode, TrainSpec, ZeroSpec,
};

/// A whole job: the content of job.yaml with all defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// `name`: the name of the job, which is part of the paths of its run and checkpoint
    /// directories.
    pub name: String,
    /// `cluster`: the hosts and devices that the job uses.
    pub cluster: ClusterSpec,
    /// `run`: the program, its environment and supervision.
    pub run: RunSpec,
    /// `train`: the built-in training; `None` exactly if the job has `run.command`.
    pub train: Option<TrainSpec>,
    /// `checkpoint`: when and where the built-in training saves checkpoints.
    pub checkpoint: CheckpointSpec,
    /// `resume`: the checkpoint that the run resumes from, and the policy for its RNG streams.
    pub resume: ResumeSpec,
    /// `slurm`: the options that `launch sbatch` passes to Slurm.
    pub slurm: SlurmSpec,
}

//! [`JobSpec`]: job.yaml after parsing, defaults and validation. Every field is present; nothing here can be half-given.
//!
//! docs/job.md documents each key; the names there and here are the same.
mod check;
pub mod checkpoint;
pub mod cluster;
mod decode;
mod document;
pub mod experts;
mod hosts;
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
mod tree;
pub mod tune;

use serde::{Deserialize, Serialize};

pub use checkpoint::{CheckpointSpec, Every, ResumeFrom, ResumeSpec, RngPolicy};
pub use cluster::{
    ClusterSpec, Collectives, Count, Devices, Hosts, Interface, KnownHosts, MasterPort, SshConfig, SshSpec,
    StoreHost,
};
pub use document::{Document, Item, ItemValue, Syntax};
pub use experts::{ExpertPlacement, ExpertsSpec};
pub use keys::{Default, KEYS, Key, Support};
pub use load::{MAX_JOB, Source, load};
pub use lora::{LoraSpec, LoraTargets};
pub use optimizer::{OptimizerName, OptimizerSpec, ScheduleName, ScheduleSpec};
pub use print::quoted;
pub use reload::{Reload, ReloadTrain, Reloaded, compare};
pub use run::{Bind, EnvSource, LogsSpec, MinHosts, RunSpec, SignalAction, Signals, VisibleDevices};
pub use scalar::duration;
pub use sections::is_reserved;
pub use slurm::SlurmSpec;
pub use source::SourceMap;
pub use sources::{DataSource, Format, LossOn};
pub use train::{
    Attention, BatchSpec, CudaGraphs, DataSpec, EvalSpec, LossScaleSpec, ModelSpec, Numerics, Offload,
    Precision, Recompute, SampleSpec, Tokenizer, TrainSpec, ZeroSpec,
};
pub use tune::GroupSpec;

/// A whole job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    pub name: String,
    pub cluster: ClusterSpec,
    pub run: RunSpec,
    /// Present exactly when `run.command` is absent.
    pub train: Option<TrainSpec>,
    pub checkpoint: CheckpointSpec,
    pub resume: ResumeSpec,
    pub slurm: SlurmSpec,
}

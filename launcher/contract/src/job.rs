//! [`JobSpec`]: job.yaml after parsing, defaults and validation. Every field is present; nothing here can be half-given.
//!
//! docs/job.md documents each key; the names there and here are the same.
mod check;
pub mod checkpoint;
pub mod cluster;
mod decode;
mod keys;
mod load;
mod overrides;
mod print;
mod read;
pub mod run;
mod scalar;
mod sections;
mod source;
pub mod train;
mod tree;

use serde::{Deserialize, Serialize};

pub use checkpoint::{CheckpointSpec, Every, ResumeFrom, ResumeSpec, RngPolicy};
pub use cluster::{ClusterSpec, Count, Devices, Hosts, MasterPort, StoreHost};
pub use keys::{Default, KEYS, Key, Support};
pub use load::{MAX_JOB, Source, load};
pub use run::{EnvSource, LogsSpec, RunSpec};
pub use source::SourceMap;
pub use train::{
    BatchSpec, DataSpec, EvalSpec, ModelSpec, OptimizerName, OptimizerSpec, Precision, Recompute,
    ScheduleName, ScheduleSpec, Tokenizer, TrainSpec, ZeroSpec,
};

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
}

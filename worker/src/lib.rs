//! Crate `worker`: the built-in training runtime of one rank.
//!
//! [`main`] is the process of a worker. [`TrainPreflight`] checks a job without running it, and
//! [`gpu_check()`] compares a GPU with the CPU.
pub mod checkpoint_mapping;
pub mod consensus;
pub mod data;
pub mod error;
pub mod expert_layout;
mod gpu;
mod gpu_check;
mod host_local;
pub mod model;
mod network;
pub mod optim;
pub mod param_groups;
pub mod params;
pub mod preflight;
pub mod resume;
pub mod rng;
pub mod runtime;
pub mod save;
pub mod session;
pub mod stages;
pub mod storage_topology;
pub mod train;
pub mod zero;

pub use gpu_check::main as gpu_check;
pub use preflight::TrainPreflight;
pub use runtime::main;

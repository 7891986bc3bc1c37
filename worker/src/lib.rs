//! Crate `worker`: the process of one rank of launch's built-in training, from connecting to the
//! other ranks to the final weights.
//!
//! [`main`] is the process of a worker. [`TrainPreflight`] checks a job without running it,
//! [`run_gpu_check`] compares a GPU with the CPU, and [`run_sandbox`] is the process in which
//! libraries interpret data.
pub mod checkpoint;
pub mod consensus;
pub mod data;
pub mod error;
pub mod expert_layout;
mod gpu;
mod gpu_check;
pub mod model;
pub mod optim;
pub mod param_groups;
pub mod params;
pub mod preflight;
pub mod rng;
pub mod runtime;
pub mod train;
pub mod trainer_stages;
pub mod untrusted;
pub mod zero;

pub use data::{SANDBOX_ARGUMENT, run_sandbox};
pub use gpu_check::{GpuCheckOptions, GpuCheckTask, PartFilter, run_gpu_check};
pub use preflight::{CUDA_CONTEXT_BYTES, TrainPreflight};
pub use runtime::main;

//! End-to-end tests: run the real executable, and check events, exit codes, files and messages.
//!
//! All tests are in one binary, because each binary takes seconds to link. `cargo nextest` runs
//! every test in a separate process, so a test may change its environment.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod batch_jobs;
mod cluster;
mod configs;
mod controller_replacement;
mod dashboard;
mod deepspeed;
mod devices;
mod drop_in;
#[path = "../../worker/device/tests/emulated_amx/library.rs"]
mod emulated_amx;
#[path = "../../worker/device/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
#[path = "../../worker/comm/tests/emulated_nccl/mod.rs"]
mod emulated_nccl;
mod faults;
mod faults_ssh;
mod gpu;
mod gpu_check;
mod hangs;
mod hosts;
mod isolation;
mod isolation_other_users;
mod job_schema;
mod join;
mod join_manifests;
mod join_rejections;
mod lora;
mod memory;
mod metrics;
mod misconfigured;
mod mlflow;
mod package;
mod precision;
mod processes;
mod programs;
mod random_states;
mod resume_external;
mod resume_programs;
mod run_control;
mod slurm;
mod ssh;
mod stragglers;
mod support;
mod takeovers;
mod tensorboard;
mod torch;
mod train;
mod trainer;
mod transformers;
mod wandb;
mod worker_environment;

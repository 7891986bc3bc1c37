//! Integration tests of the crate `worker`, in one binary, because each binary takes long to link.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod batch_job;
#[path = "../../device/tests/emulated_gpu/call_counts.rs"]
mod call_counts;
mod common;
mod cuda;
mod cuda_fused_kernels;
mod cuda_graphs;
mod cuda_host_waits;
mod cuda_streams;
mod deterministic_training;
mod dropout;
mod emulated;
#[path = "../../device/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
#[path = "../../comm/tests/emulated_nccl/mod.rs"]
mod emulated_nccl;
mod experts;
mod fp8;
mod frozen_experts;
mod frozen_params_and_optimizers;
mod generation;
mod golden_families;
mod golden_llama;
mod host_local;
mod interruption;
mod lora;
mod master_weights;
mod memory_copies;
mod nccl_gathers;
mod nccl_watchdog;
mod offload;
#[path = "../../../tests/support/own_process.rs"]
mod own_process;
mod precision;
mod resume;
mod reused_gpus;
mod timeline;

//! Integration tests of the crate `device`, in one binary, because each binary takes long to link.

mod amx;
mod amx_emulator;
mod attention;
mod bf16_rule;
#[path = "../emulated_gpu/call_counts.rs"]
mod call_counts;
mod classifier;
mod cubin;
mod cuda;
mod cuda_epilogues;
mod cuda_graphs;
mod cuda_library_faults;
mod cuda_matmul_plans;
mod cuda_memory;
mod cudnn;
mod cudnn_plans;
mod determinism;
mod dropout;
#[path = "../emulated_amx/mod.rs"]
mod emulated_amx;
#[path = "../emulated_gpu/mod.rs"]
mod emulated_gpu;
mod experts;
mod fp8;
mod gradients;
mod half_precision;
mod optimizers;
#[path = "../../../../tests/support/own_process.rs"]
mod own_process;
mod ptx;
mod reference;
mod stochastic_rounding;

//! The backend for NVIDIA GPUs, which implements all ops with CUDA kernels, cuBLASLt and cuDNN.
//!
//! Building the backend needs no CUDA toolkit. At run time, the backend searches for CUDA's
//! libraries and opens them ([`library_search`]). Kernels are compiled for the GPU's exact
//! architecture when they are first needed, and cached on disk ([`compile`]). All work of a thread
//! goes through one stream: the main stream, or the thread's separate stream. Ops return before
//! their work is complete, and their work runs in the order of the thread's calls.
//!
//! Calls return no errors. The first failure is recorded in the backend's status, and later calls
//! do nothing ([`crate::Storage::check_status`]). Because work is asynchronous, a later call than
//! the call that failed may record the failure.
mod activation;
mod attention;
mod attention_arguments;
mod backend;
mod bindings;
mod block_cache;
mod classifier;
mod compile;
mod context;
mod cudnn;
mod current_stream;
mod disk_cache;
mod elementwise;
mod error;
mod expert_rows;
mod flash_kernels;
mod fp8;
mod gpu;
mod gpu_sensors;
mod graph_control;
mod graphs;
mod host_inputs;
mod kernel_report;
mod kernel_text;
mod launch;
mod launch_log;
mod library;
mod library_checks;
mod library_search;
mod matmul;
mod matmul_epilogues;
mod matmul_operand;
mod matmul_ops;
mod memory;
mod memory_pool;
mod norm;
mod optimizers;
mod pinned_memory;
mod profile;
mod properties;
mod router;
mod status;
mod storage;
mod streams;
mod tensor_arg;

pub use backend::{Cuda, LoadedLibraries};
pub use classifier::count_classifier_workspace_bytes;
pub use cudnn::{AttentionBackend, compute_cudnn_plan_workspaces, estimate_cudnn_workspace_bytes};
pub use error::{CudaError, Result};
pub use gpu_sensors::{GpuSensorError, GpuSensorReadings};
pub use graphs::GraphStats;
pub use kernel_report::{KernelReport, LaunchReport};
pub use launch_log::{log_launches_to, read_launch_log};
pub use library::{CudaLibrary, RejectReason, RejectedLibrary};
pub use library_checks::{check_driver_and_libraries, compile_kernel_sources, query_library_versions};
pub use library_search::{LibrarySearchPaths, OpenLibrary};
pub use matmul::{MATMUL_WORKSPACE_BYTES, MatmulPlanReport};
pub use profile::ProfileEntry;
pub use properties::GpuProperties;

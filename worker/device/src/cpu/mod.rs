//! The CPU backend, which implements all ops with several threads and vector instructions.
//!
//! The instruction set and the number of threads are chosen at run time. They do not change any bit
//! of a result. Results do not depend on the machine's C library either, because logarithms, powers
//! and tanh of single numbers come from the crate `libm`.
//!
//! bf16 matmuls use AMX if the machine has it ([`amx`]).
//!
//! Each group of ops has a module. Kernels are written once over [`simd::Simd`] and compiled for
//! each instruction set. 16-bit elements are converted to `f32` on reading and rounded once on
//! writing ([`elements`]).
mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod attention_backward;
mod attention_dropout;
mod attention_layout;
mod backend;
mod bias;
mod classifier;
mod disjoint_slices;
mod elements;
mod elementwise;
mod embedding;
mod expert_rows;
mod flush_denormals;
mod fp8_matmul;
mod grouped_matmul;
mod instruction_set;
mod layer_norm;
mod matmul;
mod matmul_ops;
mod micro_kernel;
mod optimizers;
mod packing;
mod portable;
mod rms_norm;
mod rms_norm_heads;
mod rope;
mod router;
mod row_outputs;
mod scratch;
mod scratch_product;
mod simd;
mod software_fma;
mod stochastic_rounding;
mod storage;
mod sum_rule;
mod thread_pool;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use backend::Cpu;
pub use classifier::choose_classifier_chunk_rows;
pub use instruction_set::InstructionSetUnavailable;

//! Crate `device`: buffers, and the operations (ops) of training with their backward passes, on
//! CPUs ([`Cpu`]) and NVIDIA GPUs ([`Cuda`]).
pub mod buffer;
pub mod conformance;
pub mod cpu;
pub mod cuda;
pub mod dynamic_library;
pub mod fp8;
mod huge_pages;
pub mod ops;
pub mod philox;
pub mod storage;

pub use buffer::{Buf, Dtype, View, ViewMut};
pub use cpu::Cpu;
pub use cuda::Cuda;
pub use fp8::Fp8Format;
pub use ops::Ops;
pub use storage::Storage;

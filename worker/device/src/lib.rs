//! Crate `device`: buffers, and the forward and backward pass of every op, on CPUs ([`Cpu`]) and
//! NVIDIA GPUs ([`Cuda`]).
pub mod cpu;
pub mod cuda;
pub mod fp8;
mod huge;
pub mod mem;
pub mod ops;
pub mod parity;
pub mod philox;
pub mod storage;

pub use cpu::Cpu;
pub use cuda::Cuda;
pub use fp8::Fp8;
pub use mem::{Buf, Dtype, View, ViewMut};
pub use ops::Ops;
pub use storage::{Storage, with_alloc_label};

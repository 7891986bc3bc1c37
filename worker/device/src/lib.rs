//! Crate `device`: buffers, and the forward and backward of every op, on each kind of device.
pub mod cpu;
pub mod mem;
pub mod ops;

pub use cpu::Cpu;
pub use mem::{Buf, Dtype, View, ViewMut};
pub use ops::Ops;

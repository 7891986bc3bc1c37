//! Crate `device`: buffers, and the forward and backward of every op, on each kind of device.
pub mod mem;
pub mod ops;

pub use mem::{Buf, View, ViewMut};
pub use ops::Ops;

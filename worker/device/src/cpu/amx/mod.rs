//! bf16 matmuls with AMX, the matrix instructions of Intel CPUs.
//!
//! A tile is a register of 16 rows of 64 bytes. The instruction TDPBF16PS multiplies a tile of 16
//! rows × 32 terms of the left operand by a tile of 32 terms × 16 columns of the right operand, and
//! adds the products to a tile of 16 × 16 `f32` numbers. Its rule defines bf16 matmuls on all
//! instruction sets, so the bits are the same with and without AMX (docs/numerics.md).
//!
//! - [`detection`] finds out whether AMX can be used,
//! - [`self_check`] compares its results with the rule once per process,
//! - [`tiles`] has the instructions,
//! - [`packing`] copies operands in the order in which tiles are loaded,
//! - [`matmul`] divides a matmul into tasks, and [`result`] writes the results.
mod detection;
mod matmul;
mod packing;
mod result;
mod self_check;
mod tiles;

pub(crate) use detection::{AmxSupport, detect};
pub(crate) use matmul::{MAX_ROUNDED_DEPTH, matmul_bf16};
pub(crate) use packing::Bf16Operand;

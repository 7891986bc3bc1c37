//! Describes how the result of an operation on a GPU differs from the CPU's result
//! ([`ConformanceError`]).
use crate::fp8::Fp8Format;
use crate::ops::{RouterShape, StochasticRounding};
use crate::storage::DeviceError;
use crate::{Dtype, storage::extract_panic_message};
use diagnostic::{Code, Diagnostic, codes::device as codes, codes::run::INTERNAL};
use std::any::Any;

/// Why an operation on a GPU does not conform to the reference, the same operation on the CPU.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConformanceError {
    /// A buffer of the GPU's result differs from the CPU's buffer by more than the tolerance.
    #[error(
        "{case}: buffer {buffer} of {dtype:?}, {offset} elements into its memory, has a relative error \
         of {error:e}; the tolerance is {tolerance:e}"
    )]
    BufferDiffers {
        /// Name and shape of the compared operation.
        case: String,
        /// Element type under test, which activations and weights have.
        dtype: Dtype,
        /// Offset of the buffer in its allocation, in elements.
        offset: usize,
        /// Index of the differing buffer among the buffers of the case.
        buffer: usize,
        /// The largest difference, relative to the largest expected value.
        error: f64,
        /// The largest accepted relative error.
        tolerance: f64,
    },
    /// The sums that an operation on the GPU returned to the host differ from the CPU's sums.
    #[error("{case}: the sums are {gpu:?} on the GPU and {cpu:?} on the CPU")]
    SumsDiffer {
        /// Name of the compared operation and length of its input.
        case: String,
        /// The GPU's sums.
        gpu: Vec<f64>,
        /// The CPU's sums.
        cpu: Vec<f64>,
    },
    /// The GPU's router selected other experts than the CPU's router.
    #[error("{0:?}: the GPU selects other experts than the CPU")]
    ExpertsDiffer(RouterShape),
    /// The GPU rounded a number to another fp8 number than the CPU.
    #[error("{input:e} becomes {gpu:e} in {format:?} on the GPU and {cpu:e} on the CPU")]
    Fp8RoundingDiffers {
        /// The fp8 format to which the number was rounded.
        format: Fp8Format,
        /// The number that was rounded.
        input: f32,
        /// The GPU's result.
        gpu: f32,
        /// The CPU's result.
        cpu: f32,
    },
    /// The GPU rounded a number stochastically to another bf16 number than the CPU.
    #[error("{input:e} is rounded to {gpu:#x} on the GPU and to {cpu:#x} on the CPU ({rounding:?})")]
    StochasticRoundingDiffers {
        /// Identifies the random numbers that were used: key, position in the tensor, and step.
        rounding: StochasticRounding,
        /// The number that was rounded.
        input: f32,
        /// The bits of the GPU's result.
        gpu: u16,
        /// The bits of the CPU's result.
        cpu: u16,
    },
    /// An operation on the GPU failed with an error or a panic.
    #[error(transparent)]
    OpFailed(#[from] DeviceError),
}

impl ConformanceError {
    /// Converts a panic of an op during its comparison with the CPU to an error with the message of
    /// the panic.
    pub(super) fn from_panic(panic: &(dyn Any + Send)) -> Self {
        ConformanceError::OpFailed(DeviceError(Diagnostic::error(INTERNAL, extract_panic_message(panic))))
    }

    /// Returns the stable error code, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            ConformanceError::OpFailed(DeviceError(diagnostic)) => diagnostic.code(),
            _ => codes::GPU_RESULT_DIFFERS,
        }
    }
}

impl From<ConformanceError> for Diagnostic {
    fn from(error: ConformanceError) -> Self {
        match error {
            ConformanceError::OpFailed(DeviceError(diagnostic)) => diagnostic,
            error => Diagnostic::error(error.code(), error.to_string()),
        }
    }
}

//! [`UnsupportedFeature`]: a property of a checkpoint that an operation does not support, for error
//! messages.
use super::adapter_config::AdapterConfigError;
use super::convert::ConvertError;
use super::rng_files::{ReconcileError, RescaleError};
use crate::tensor::Dtype;

/// A property of a checkpoint that the requested operation does not support.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsupportedFeature {
    /// The manifest has a format or version that this program does not read.
    #[error(
        "the manifest is {format:?} version {version}; this program reads \"launch checkpoint\" versions {oldest} to {newest}"
    )]
    FormatVersion {
        /// Name of the format in the manifest.
        format: String,
        /// Version in the manifest.
        version: u32,
        /// Oldest version that this program reads.
        oldest: u32,
        /// Newest version that this program reads.
        newest: u32,
    },
    /// Values of this dtype cannot be converted to F32 without loss.
    #[error("{tensor} is {dtype}, which cannot be represented exactly in F32")]
    Dtype {
        /// `role/name` of the tensor.
        tensor: String,
        /// Dtype of the stored values.
        dtype: Dtype,
    },
    /// The tensor is not of a floating-point dtype.
    #[error("{tensor} is not a floating-point tensor")]
    NotFloat {
        /// `role/name` of the tensor.
        tensor: String,
    },
    /// The name or the content of a DeepSpeed file shows that a run with tensor, pipeline or expert
    /// parallelism wrote the file.
    #[error("{file} belongs to tensor, pipeline or expert parallelism")]
    ModelParallelism {
        /// Name of the file.
        file: String,
    },
    /// A file of adapter weights holds a tensor that is not a LoRA matrix.
    #[error("{file}: tensor {tensor} is not a LoRA matrix")]
    NotAnAdapterTensor {
        /// Name of the file.
        file: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// RNG streams cannot be assigned to the requested ranks.
    #[error("{0}")]
    RngReconcile(#[from] ReconcileError),
    /// The learning rate scheduler counts the steps of all processes, and cannot be rescaled to
    /// another number of processes.
    #[error("{0}")]
    SchedulerRescale(#[from] RescaleError),
    /// The target format of a conversion needs something that the checkpoint does not contain.
    #[error("{0}")]
    Convert(#[from] ConvertError),
    /// A setting of a LoRA adapter (PEFT) is not supported.
    #[error("{0}")]
    Adapter(#[from] AdapterConfigError),
    /// Any other unsupported property, as text.
    #[error("{0}")]
    Other(String),
}

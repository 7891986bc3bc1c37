//! [`SafetensorsError`]: why a safetensors file is rejected or cannot be written.
use super::cloneable_io_error::CloneableIoError;
use super::placeholder::PlaceholderFile;
use crate::format_constants::SAFETENSORS_HEADER_MAX;
use crate::tensor::{Dtype, InvalidTensorName};

/// Why a safetensors file is rejected, or cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The file is too short for the header length, which has 8 bytes.
    #[error("a safetensors file of {size} bytes has no header")]
    NoHeader {
        /// Size of the file in bytes.
        size: u64,
    },
    /// The header length exceeds the file or the limit.
    #[error(
        "the safetensors header claims {claimed} bytes; the file has {size}, the limit is {SAFETENSORS_HEADER_MAX}"
    )]
    HeaderLength {
        /// The header length that the file states.
        claimed: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The file is a placeholder, not a safetensors file.
    #[error("{0}")]
    Placeholder(PlaceholderFile),
    /// The header is not a JSON object.
    #[error("the safetensors header is not a JSON object")]
    NotAnObject,
    /// The header is not valid JSON, or has unexpected fields.
    #[error("invalid safetensors header: {0}")]
    Json(String),
    /// A tensor has an invalid name.
    #[error(transparent)]
    Name(#[from] InvalidTensorName),
    /// The header states a dtype of a tensor that this program does not know.
    #[error("tensor {tensor} has the unknown dtype {dtype:?}")]
    UnknownDtype {
        /// Name of the tensor.
        tensor: String,
        /// The dtype in the header.
        dtype: String,
    },
    /// Two tensors have the same name.
    #[error("tensor {0} occurs twice")]
    DuplicateTensor(String),
    /// The byte range of a tensor does not fit its dtype and shape, or the file.
    #[error("tensor {tensor}: bytes {begin}..{end} of {data} do not match {dtype} {shape:?}")]
    Extent {
        /// Name of the tensor.
        tensor: String,
        /// Offset of the tensor's first byte, relative to the end of the header.
        begin: u64,
        /// Offset of the end of the tensor's bytes, relative to the end of the header.
        end: u64,
        /// Number of bytes of the file after the header.
        data: u64,
        /// Dtype of the elements.
        dtype: Dtype,
        /// Shape of the tensor: the size of each dimension.
        shape: Vec<u64>,
    },
    /// A tensor does not begin where the previous tensor or the header ends.
    #[error("tensor {tensor} begins at byte {found}, expected {expected}: a gap or an overlap")]
    Gap {
        /// Name of the tensor.
        tensor: String,
        /// Offset of the tensor in the file.
        found: u64,
        /// Offset in the file at which the previous tensor or the header ends.
        expected: u64,
    },
    /// The tensors end before the file does.
    #[error("the tensors end at byte {end}, the file at byte {size}")]
    TrailingData {
        /// Offset in the file at which the last tensor ends.
        end: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// A file cannot be written, because the header for its tensors would exceed the limit on the
    /// size of a header.
    #[error("{tensors} tensors need a header larger than {SAFETENSORS_HEADER_MAX} bytes")]
    TooManyTensors {
        /// Number of tensors that the file would have.
        tensors: usize,
    },
    /// The file cannot be read.
    #[error("read error: {0}")]
    Read(#[from] CloneableIoError),
}

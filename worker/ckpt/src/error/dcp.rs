//! [`DcpError`]: why a checkpoint of torch's distributed checkpointing (DCP) is rejected.
use super::optimizer_state::InvalidStep;
use super::pickle::PickleError;
use super::torch_file::TorchFileError;
use crate::tensor::{Dtype, InvalidTensorName};

/// Why a checkpoint of torch's distributed checkpointing (DCP) is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DcpError {
    /// The pickle of `.metadata` is invalid.
    #[error("{0}")]
    Pickle(#[from] PickleError),
    /// The object pickled in `.metadata` is not of torch's class `Metadata`.
    #[error("the pickled object is {}, not Metadata", .class.unwrap_or("a plain value"))]
    NotMetadata {
        /// The class of the object; `None` for a plain value.
        class: Option<&'static str>,
    },
    /// An attribute of an object in `.metadata` is missing.
    #[error("no {0}")]
    MissingField(&'static str),
    /// An attribute of an object in `.metadata` has an unexpected type or value.
    #[error("invalid {0}")]
    InvalidField(&'static str),
    /// An object in `.metadata` has a different class than expected.
    #[error("expected an object of class {0}")]
    WrongClass(&'static str),
    /// The planner data in `.metadata`, which record the nested keys of every item, lack an item.
    #[error("no path for {0}")]
    PathMissing(String),
    /// The recorded nested keys of an item do not match its flattened key.
    #[error("the path of {key} is {path:?}, which does not match the key")]
    PathMismatch {
        /// Key of the item in `.metadata`.
        key: String,
        /// The nested keys that `.metadata` records for the item.
        path: Vec<String>,
    },
    /// An item has no storage location.
    #[error("no storage location for {key} at {offsets:?}")]
    LocationMissing {
        /// Key of the item.
        key: String,
        /// Index of the chunk's first element in each dimension. Empty for a pickled value.
        offsets: Vec<u64>,
    },
    /// A storage location belongs to no item.
    #[error("the storage location of {key} at {offsets:?} belongs to no tensor")]
    LocationUnused {
        /// Key of the item in the storage data.
        key: String,
        /// Index of the chunk's first element in each dimension. `None` for a pickled value.
        offsets: Option<Vec<u64>>,
    },
    /// An item has two storage locations.
    #[error("{0} has two storage locations")]
    DuplicateLocation(String),
    /// The storage locations of two items share bytes of a file.
    #[error("two items share bytes of {file} at {offset}")]
    SharedBytes {
        /// Name of the file.
        file: String,
        /// Offset in the file of the item that begins later.
        offset: u64,
    },
    /// An item is compressed or otherwise transformed.
    #[error("{0} is stored in a transformed form, which is not supported")]
    Transformed(String),
    /// A tensor has an unknown dtype.
    #[error("{0} has an unknown dtype")]
    UnknownDtype(String),
    /// A chunk is outside of its tensor.
    #[error("a chunk of {key} at {offsets:?} of size {sizes:?} is outside of the shape {shape:?}")]
    ChunkOutside {
        /// Key of the tensor.
        key: String,
        /// Index of the chunk's first element in each dimension.
        offsets: Vec<u64>,
        /// Size of the chunk in each dimension.
        sizes: Vec<u64>,
        /// Shape of the tensor.
        shape: Vec<u64>,
    },
    /// An item reaches beyond the end of its file.
    #[error("the file is truncated: {length} bytes expected at {offset}, the file has {size}")]
    ItemTruncated {
        /// Offset of the item in the file.
        offset: u64,
        /// Length of the item in bytes.
        length: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// An item is not a valid torch file.
    #[error("item at {offset}: {error}")]
    Item {
        /// Offset of the item in the file.
        offset: u64,
        /// Why the item is rejected.
        error: TorchFileError,
    },
    /// The item of a chunk is not a tensor.
    #[error("{key}: the item at {offset} of {file} is not a tensor")]
    NotATensor {
        /// Key of the tensor.
        key: String,
        /// Name of the file.
        file: String,
        /// Offset of the item in the file.
        offset: u64,
    },
    /// The stored chunk differs from its description.
    #[error(
        "{key}: the chunk at {offsets:?} should be {expected_dtype} {expected_shape:?}, {file} has {dtype} {shape:?}"
    )]
    ChunkMismatch {
        /// Key of the tensor.
        key: String,
        /// Index of the chunk's first element in each dimension.
        offsets: Vec<u64>,
        /// Dtype of the tensor in `.metadata`.
        expected_dtype: Dtype,
        /// Size of the chunk in `.metadata`, per dimension.
        expected_shape: Vec<u64>,
        /// Name of the file with the chunk.
        file: String,
        /// Dtype of the stored chunk.
        dtype: Dtype,
        /// Shape of the stored chunk.
        shape: Vec<u64>,
    },
    /// The shape of a tensor has too many dimensions or too many elements.
    #[error("{0} has an impossible shape")]
    ImpossibleShape(String),
    /// The chunks consist of too many runs of consecutive elements.
    #[error("{key} is split into more than {limit} runs of consecutive elements")]
    TooManyRuns {
        /// Key of the tensor.
        key: String,
        /// The largest accepted number of runs in all tensors together.
        limit: usize,
    },
    /// The items other than tensors have too many values in total.
    #[error("the items have more than {0} values that are no tensors")]
    TooManyValues(usize),
    /// An optimizer step is not a whole number.
    #[error("{name}: {error}")]
    Step {
        /// Name of the weight.
        name: String,
        /// The invalid step.
        error: InvalidStep,
    },
    /// A tensor has an invalid name.
    #[error(transparent)]
    Name(#[from] InvalidTensorName),
}

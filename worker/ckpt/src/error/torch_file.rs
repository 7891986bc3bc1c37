//! [`TorchFileError`]: why a file of `torch.save` is rejected.
use super::cloneable_io_error::CloneableIoError;
use super::pickle::PickleError;
use super::zip::ZipError;
use crate::tensor::Dtype;

/// Why a file of `torch.save` is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TorchFileError {
    /// The zip container is invalid.
    #[error("{0}")]
    Zip(#[from] ZipError),
    /// The pickle is invalid or names a forbidden class.
    #[error("{0}")]
    Pickle(#[from] PickleError),
    /// The zip container does not have exactly one `data.pkl`.
    #[error("the zip container does not have exactly one data.pkl, so torch.save did not write it")]
    NoDataPickle,
    /// The numbers in the file are big-endian.
    #[error("the numbers are not little-endian")]
    BigEndian,
    /// A member that is read into memory is larger than its limit.
    #[error("zip member {member:?} has {bytes} bytes, more than the limit of {limit}")]
    MemberTooLarge {
        /// Name of the zip member.
        member: String,
        /// Size of the zip member in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The content of a member differs from its CRC-32.
    #[error("zip member {member}: the content does not match its CRC-32")]
    CrcMismatch {
        /// Name of the zip member.
        member: String,
    },
    /// A tensor is pickled in an unknown form.
    #[error("a tensor is described in an unknown form")]
    UnknownTensorForm,
    /// The shape of a tensor has too many dimensions or too many elements.
    #[error("a tensor has the impossible shape {0:?}")]
    ImpossibleShape(Vec<u64>),
    /// A tensor reaches beyond the end of its storage.
    #[error(
        "a tensor of shape {shape:?}, strides {strides:?} at element {offset} reaches beyond its storage of {elements} elements"
    )]
    OutsideStorage {
        /// Shape of the tensor.
        shape: Vec<u64>,
        /// Distance of neighbouring elements in each dimension, in elements.
        strides: Vec<u64>,
        /// Index of the tensor's first element in the storage.
        offset: u64,
        /// Number of elements of the storage.
        elements: u64,
    },
    /// A large tensor has more elements than its storage, because several of its elements share
    /// memory.
    #[error(
        "a tensor of shape {shape:?} with strides {strides:?} has more elements than its storage of {elements}"
    )]
    Expanded {
        /// Shape of the tensor.
        shape: Vec<u64>,
        /// Distance of neighbouring elements in each dimension, in elements.
        strides: Vec<u64>,
        /// Number of elements of the storage.
        elements: u64,
    },
    /// A tensor names a storage that the file does not have.
    #[error("storage {0} is missing")]
    StorageMissing(String),
    /// The size of a storage differs from the size in the storage's description.
    #[error("storage {key} should have {elements} elements of {dtype}, but has {bytes} bytes")]
    StorageSize {
        /// Key of the storage.
        key: String,
        /// Number of elements that the storage's description states.
        elements: u64,
        /// Dtype that the storage's description states.
        dtype: Dtype,
        /// Size of the storage's zip member in bytes.
        bytes: u64,
    },
    /// A legacy file has a different version than 1001.
    #[error("the legacy torch format has a version other than 1001")]
    LegacyVersion,
    /// The list of storages of a legacy file is invalid.
    #[error("the list of storages is invalid")]
    LegacyKeys,
    /// A legacy file lists a storage that no tensor describes, so its dtype is unknown.
    #[error("no tensor describes storage {0}")]
    UndescribedStorage(String),
    /// A legacy file has too many storages.
    #[error("the file has more than {limit} storages")]
    TooManyStorages {
        /// The largest accepted number of storages.
        limit: usize,
    },
    /// A legacy file continues after its last storage.
    #[error("the storages end at byte {end}, the file at byte {size}")]
    TrailingData {
        /// Offset in the file at which the last storage ends.
        end: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// A legacy file ends within a pickle or storage.
    #[error("the file is truncated in {part}")]
    Truncated {
        /// The incomplete part, such as `a pickle` or `storage 3`.
        part: String,
    },
    /// A storage of a legacy file has a different number of elements than its description.
    #[error("storage {key} should have {expected} elements, but records {found}")]
    StorageElements {
        /// Key of the storage.
        key: String,
        /// Number of elements that the storage's description states.
        expected: u64,
        /// Number of elements that the file states before the data of the storage.
        found: u64,
    },
    /// Two descriptions of one storage differ.
    #[error("storage {0} has two different descriptions")]
    StorageConflict(String),
    /// The pickle refers to external data that are not a storage.
    #[error("the pickle refers to external data that are not a storage")]
    NotAStorage,
    /// The file cannot be read.
    #[error("read error: {0}")]
    Read(#[from] CloneableIoError),
}

impl TorchFileError {
    /// Returns true if the pickle names a class or function that is not allowed. Other files of the
    /// checkpoint may still be readable.
    pub(crate) fn is_forbidden_global(&self) -> bool {
        matches!(self, TorchFileError::Pickle(error) if error.is_forbidden_global())
    }
}

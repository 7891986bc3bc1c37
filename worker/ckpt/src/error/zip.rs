//! [`ZipError`]: why a zip container is rejected.
use super::cloneable_io_error::CloneableIoError;
use super::placeholder::PlaceholderFile;
use crate::format_constants::ZIP_DIRECTORY_MAX;

/// Why a zip container is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZipError {
    /// The file has no end record, which locates the central directory.
    #[error(
        "no zip directory at the end: the file is truncated, was not completely written, or is not a torch file"
    )]
    NoDirectory,
    /// The file is a placeholder for the real file, not a zip container.
    #[error("{0}")]
    Placeholder(PlaceholderFile),
    /// The zip64 end record is outside of the file or damaged.
    #[error("the zip64 end record is invalid")]
    Zip64Record,
    /// The container is split over several files.
    #[error("the zip container is split over several files")]
    MultiDisk,
    /// The central directory is larger than the limit.
    #[error("the zip directory has {bytes} bytes, more than the limit of {ZIP_DIRECTORY_MAX}")]
    DirectoryTooLarge {
        /// Size of the central directory in bytes.
        bytes: u64,
    },
    /// The central directory does not end where the end record begins.
    #[error("the zip directory should be {bytes} bytes at {start}, which is not where the end record is")]
    DirectoryMisplaced {
        /// Size of the central directory in bytes.
        bytes: u64,
        /// Offset of the central directory in the file.
        start: u64,
    },
    /// An entry of the central directory is damaged.
    #[error("the zip directory is damaged")]
    DirectoryDamaged,
    /// The central directory has a different number of entries than the end record states.
    #[error("the zip directory has {found} members, the end record {recorded}")]
    MemberCount {
        /// Number of entries in the central directory.
        found: usize,
        /// Number of entries in the end record.
        recorded: u64,
    },
    /// The central directory has too many entries.
    #[error("the zip container has more than {limit} members")]
    TooManyMembers {
        /// The largest accepted number of members.
        limit: usize,
    },
    /// The contents of two members share bytes.
    #[error("zip members {first:?} and {second:?} overlap")]
    Overlap {
        /// Name of the member that begins first.
        first: String,
        /// Name of the other member.
        second: String,
    },
    /// Two members have the same name.
    #[error("zip member {0:?} occurs twice")]
    Duplicate(String),
    /// A member is encrypted.
    #[error("zip member {0:?} is encrypted")]
    Encrypted(String),
    /// A member is compressed.
    #[error(
        "zip member {member:?} is compressed (method {method}); torch stores members uncompressed, as `zip -0` does"
    )]
    Compressed {
        /// Name of the member.
        member: String,
        /// The compression method of the zip format.
        method: u64,
    },
    /// A member's stored size differs from its uncompressed size, although it is not compressed.
    #[error("zip member {member:?} has {stored} stored bytes and a size of {size} bytes")]
    MemberSize {
        /// Name of the member.
        member: String,
        /// Stored size in bytes.
        stored: u64,
        /// Uncompressed size in bytes.
        size: u64,
    },
    /// A member's name is absolute, contains `..` or control characters, is empty, or is too long.
    #[error("zip member {0:?} has a name that points outside of the container, or that is too long")]
    UnsafeName(String),
    /// A member is outside of the file.
    #[error("zip member {0:?} is outside of the file")]
    OutOfBounds(String),
    /// The local header of a member is damaged.
    #[error("zip member {0:?} has a damaged header")]
    LocalHeader(String),
    /// The local header of a member has a different name than the central directory.
    #[error("zip member {0:?} has another name in its own header")]
    LocalName(String),
    /// The file cannot be read.
    #[error("read error: {0}")]
    Read(#[from] CloneableIoError),
}

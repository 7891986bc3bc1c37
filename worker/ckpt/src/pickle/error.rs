//! [`PickleError`] and [`EncodeError`]: why a pickle is rejected, and why a value cannot be
//! pickled.
use super::{BYTES_MAX, DEPTH_MAX};
use crate::dtype::Dtype;
use diagnostic::Code;
use diagnostic::codes::checkpoint as codes;

/// Why a pickle is rejected. Nothing in a pickle is ever executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// The pickle is larger than the limit.
    #[error("the pickle has {bytes} bytes, more than the limit of {BYTES_MAX}")]
    TooLarge {
        /// Size of the pickle.
        bytes: u64,
    },
    /// The pickle ends before the input does.
    #[error("the pickle ends at byte {end}, the file at byte {size}")]
    TrailingData {
        /// End of the pickle.
        end: usize,
        /// End of the input.
        size: usize,
    },
    /// An opcode needs more bytes than the input has.
    #[error("the pickle claims {claimed} bytes at byte {at}, where {left} are left")]
    Truncated {
        /// Position in the input.
        at: usize,
        /// Bytes that the opcode needs.
        claimed: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// A name has no line end.
    #[error("the pickle has a name without an end at byte {at}")]
    UnterminatedName {
        /// Position in the input.
        at: usize,
    },
    /// A class or function is not on the list of allowed names.
    #[error(
        "the pickle names {name}, which is not on the list of allowed classes and functions; nothing was executed"
    )]
    ForbiddenGlobal {
        /// `module.name`, without control characters and shortened.
        name: String,
    },
    /// An opcode that torch files do not use.
    #[error("the pickle has the unsupported opcode {}", opcode_name(*.opcode))]
    UnsupportedOpcode {
        /// The opcode.
        opcode: u8,
    },
    /// A protocol newer than 5.
    #[error("the pickle has protocol {protocol}; protocols 0 to 5 are supported")]
    UnsupportedProtocol {
        /// The protocol.
        protocol: u8,
    },
    /// A limit on memory is exceeded.
    #[error("the pickle makes more than {limit} {what}")]
    Limit {
        /// `values`, `marks` or `memo entries`.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// Values are nested too deeply.
    #[error("the pickle nests values more than {DEPTH_MAX} levels deep")]
    TooDeep,
    /// A value contains itself.
    #[error("the pickle has a value that contains itself")]
    Cycle,
    /// An opcode takes a value from an empty stack.
    #[error("the pickle takes more values from the stack than it has pushed")]
    StackUnderflow,
    /// An opcode reads a memo entry that was never written.
    #[error("the pickle reads memo entry {index}, which was never written")]
    UnknownMemoEntry {
        /// Index of the entry.
        index: usize,
    },
    /// A dict has an odd number of keys and values.
    #[error("the pickle has a key without a value")]
    KeyWithoutValue,
    /// An opcode is applied to a value of another type.
    #[error("the pickle {0}")]
    WrongType(&'static str),
    /// Text is not UTF-8.
    #[error("the pickle has text before byte {at} that is not UTF-8")]
    InvalidUtf8 {
        /// Position in the input.
        at: usize,
    },
    /// A size does not fit this machine.
    #[error("the pickle has a size that does not fit into memory")]
    SizeOverflow,
}

impl PickleError {
    /// True when the input ends too early, so that more input may make the pickle complete.
    pub(crate) fn is_truncated(&self) -> bool {
        matches!(self, PickleError::Truncated { .. } | PickleError::UnterminatedName { .. })
    }

    /// True when the pickle names a class or function that is not allowed.
    pub(crate) fn is_forbidden_global(&self) -> bool {
        matches!(self, PickleError::ForbiddenGlobal { .. })
    }

    /// The stable code of this error.
    pub fn code(&self) -> Code {
        match self {
            PickleError::ForbiddenGlobal { .. } => codes::PICKLE_GLOBAL_FORBIDDEN,
            _ => codes::PICKLE_INVALID,
        }
    }
}

/// An opcode as Python's `pickletools` names it.
fn opcode_name(opcode: u8) -> String {
    let name = match opcode {
        b'i' => "INST",
        b'o' => "OBJ",
        b'P' => "PERSID",
        b'g' => "GET",
        b'p' => "PUT",
        b'I' => "INT",
        b'L' => "LONG",
        b'F' => "FLOAT",
        b'S' => "STRING",
        b'V' => "UNICODE",
        0x82..=0x84 => "EXT",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => return format!("0x{opcode:02x}"),
    };
    format!("0x{opcode:02x} ({name})")
}

/// Why a value cannot be written as a pickle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// torch has no storage class for this dtype.
    #[error("torch has no storage class for {0}")]
    NoStorageClass(Dtype),
    /// A literal tensor was not moved to a storage of the file.
    #[error("a tensor has no storage in the file")]
    TensorWithoutStorage,
    /// The name has no module or contains a line break.
    #[error("{0:?} is not the name of a class or function")]
    InvalidGlobal(String),
    /// A text has more than 4 GiB.
    #[error("a text has more than 4 GiB")]
    TextTooLong,
}

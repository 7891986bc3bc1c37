//! [`PickleError`] and [`EncodeError`]: why a pickle is rejected, and why a value cannot be
//! pickled.
use crate::format_constants::{PICKLE_BYTES_MAX, PICKLE_DEPTH_MAX};
use crate::tensor::Dtype;
use diagnostic::Code;
use diagnostic::codes::checkpoint as codes;

/// Why a pickle is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// The pickle exceeds the limit on its size.
    #[error("the pickle has {bytes} bytes, more than the limit of {PICKLE_BYTES_MAX}")]
    TooLarge {
        /// Size of the pickle in bytes.
        bytes: u64,
    },
    /// The pickle ends before the input does.
    #[error("the pickle ends at byte {end}, the file at byte {size}")]
    TrailingData {
        /// Offset of the pickle's end in the input.
        end: usize,
        /// Size of the input in bytes.
        size: usize,
    },
    /// An opcode needs more bytes than the input has.
    #[error("the pickle claims {claimed} bytes at byte {at}, where {left} are left")]
    Truncated {
        /// Offset in the input of the byte after the opcode.
        at: usize,
        /// Bytes that the opcode needs.
        claimed: usize,
        /// Bytes of the input that are left at `at`.
        left: usize,
    },
    /// The line with the name of a class or function does not end within the input.
    #[error("the pickle has a name without an end at byte {at}")]
    UnterminatedName {
        /// Offset of the name in the input.
        at: usize,
    },
    /// The pickle names a class or function that is not on the list of allowed names.
    #[error(
        "the pickle names {name}, which is not on the list of allowed classes and functions; nothing was executed"
    )]
    ForbiddenGlobal {
        /// The forbidden name as `module.name`, shortened and without control characters.
        name: String,
    },
    /// The pickle has an opcode that torch files do not use.
    #[error("the pickle has the unsupported opcode {}", format_opcode(*.opcode))]
    UnsupportedOpcode {
        /// The unsupported opcode byte.
        opcode: u8,
    },
    /// The pickle has a protocol newer than 5.
    #[error("the pickle has protocol {protocol}; protocols 0 to 5 are supported")]
    UnsupportedProtocol {
        /// The protocol in the pickle.
        protocol: u8,
    },
    /// The pickle exceeds a limit on a count, which bounds the memory of the parser.
    #[error("the pickle makes more than {limit} {what}")]
    Limit {
        /// What is limited, such as `values`, `marks` or `memo entries`.
        what: &'static str,
        /// The largest accepted count.
        limit: usize,
    },
    /// Values are nested more than [`PICKLE_DEPTH_MAX`] levels deep.
    #[error("the pickle nests values more than {PICKLE_DEPTH_MAX} levels deep")]
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
        /// Index of the missing memo entry.
        index: usize,
    },
    /// A dict has an odd number of keys and values.
    #[error("the pickle has a key without a value")]
    KeyWithoutValue,
    /// An opcode is applied to a value of the wrong type. The text completes the sentence "the
    /// pickle …".
    #[error("the pickle {0}")]
    WrongType(&'static str),
    /// Text in the pickle is not UTF-8.
    #[error("the pickle has text before byte {at} that is not UTF-8")]
    InvalidUtf8 {
        /// Offset in the input of the byte after the text.
        at: usize,
    },
    /// A size does not fit into the address space of this machine.
    #[error("the pickle has a size that does not fit into memory")]
    SizeOverflow,
}

impl PickleError {
    /// Returns true if the input ends too early, so that more input may complete the pickle.
    pub(crate) fn is_truncated(&self) -> bool {
        matches!(self, PickleError::Truncated { .. } | PickleError::UnterminatedName { .. })
    }

    /// Returns true if the pickle names a class or function that is not allowed.
    pub(crate) fn is_forbidden_global(&self) -> bool {
        matches!(self, PickleError::ForbiddenGlobal { .. })
    }

    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            PickleError::ForbiddenGlobal { .. } => codes::PICKLE_GLOBAL_FORBIDDEN,
            _ => codes::PICKLE_INVALID,
        }
    }
}

/// Formats an opcode in hexadecimal, with its name in Python's `pickletools` if the name is known.
fn format_opcode(opcode: u8) -> String {
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

/// Why a Python value cannot be written as a pickle.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// torch has no storage class for this dtype.
    #[error("torch has no storage class for {0}")]
    NoStorageClass(Dtype),
    /// A tensor is still a `PythonObject::Literal`, which has not been moved to a storage
    /// of the file.
    #[error("a tensor has no storage in the file")]
    TensorWithoutStorage,
    /// The name of a class or function has no module or contains a line break.
    #[error("{0:?} is not the name of a class or function")]
    InvalidGlobal(String),
    /// A text has more than 4 GiB.
    #[error("a text has more than 4 GiB")]
    TextTooLong,
}

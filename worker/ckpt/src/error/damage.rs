//! [`Damage`]: which file of a checkpoint is damaged, and in which way.
use super::adapter_config::AdapterConfigError;
use super::cloneable_io_error::CloneableIoError;
use super::dcp::DcpError;
use super::deepspeed::DeepSpeedError;
use super::diagnosis::Diagnosis;
use super::manifest::ManifestError;
use super::missing_part::MissingPart;
use super::optimizer_state::OptimizerStateError;
use super::rng_files::{RngFilesError, RngStateError};
use super::safetensors::SafetensorsError;
use super::text::{format_names, shorten_text};
use super::torch_file::TorchFileError;
use crate::tensor::{CoverageError, InvalidTensorName};
use serde::{Serialize, Serializer};
use std::fmt;

/// A damaged file of a checkpoint: its name, what is wrong with it, and the tensors with data in
/// the damaged part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Damage {
    /// Name of the file in the checkpoint directory.
    pub file: String,
    /// Index of the damaged 1 MiB block; `None` if the damage is not within one block.
    pub block: Option<u64>,
    /// `role/name` of every tensor with bytes in the damaged block or file.
    pub tensors: Vec<String>,
    /// What is wrong with the file.
    #[serde(rename = "why", serialize_with = "serialize_as_text")]
    pub reason: DamageReason,
}

/// Serializes the reason why a file is damaged as a shortened error message, which JSON reports for
/// users contain in the field `why`.
fn serialize_as_text<S: Serializer>(reason: &DamageReason, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&shorten_text(reason.to_string()))
}

impl Damage {
    /// Describes the damage of the file `file` of a checkpoint, without naming a block or tensors.
    pub(crate) fn for_file(file: impl Into<String>, reason: impl Into<DamageReason>) -> Damage {
        Damage { file: file.into(), block: None, tensors: Vec::new(), reason: reason.into() }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shorten_text(self.file.clone()))?;
        if let Some(block) = self.block {
            write!(f, ", block {block}")?;
        }
        if !self.tensors.is_empty() {
            write!(f, " (holds {})", format_names(&self.tensors))?;
        }
        write!(f, ": {}", shorten_text(self.reason.to_string()))
    }
}

/// The way in which a file of a checkpoint is damaged, for example that it is missing, truncated or
/// too large.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DamageReason {
    /// The file does not exist.
    #[error("the file is missing")]
    FileMissing,
    /// A part of the file or directory does not exist.
    #[error("missing {0}")]
    PartMissing(MissingPart),
    /// The directory has a file that does not belong to the checkpoint.
    #[error("the file does not belong to the checkpoint")]
    UnexpectedFile,
    /// The file's size differs from the size in the manifest.
    #[error("the file has {found} bytes, expected {expected}")]
    SizeMismatch {
        /// Bytes recorded in the manifest.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// The file ends before its content is complete.
    #[error("the file is truncated")]
    Truncated,
    /// The file is larger than this program accepts.
    #[error("the file has {found} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Bytes of the file.
        found: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// This file and the files that were read before it have more tensors than this program
    /// accepts.
    #[error("the checkpoint has more than {limit} tensors")]
    TooManyTensors {
        /// The largest accepted number of tensors.
        limit: usize,
    },
    /// The tensors are together much larger than the files, because tensors share stored bytes. The
    /// damaged file is the one whose tensor exceeds the limit.
    #[error("the tensors of the checkpoint have more than {bytes} bytes, but its files have only {stored}")]
    TensorsExceedFiles {
        /// Total bytes of the tensors, up to and including the one that exceeds the limit.
        bytes: u64,
        /// Bytes of all files.
        stored: u64,
    },
    /// The file's size changed during a read or a repair.
    #[error("the file changed while it was read")]
    Changed,
    /// A symbolic link, device, socket or directory has the name of the file.
    #[error("not a regular file (symbolic links and devices are not followed)")]
    NotRegularFile,
    /// A file or symbolic link has the name of a directory.
    #[error("{component} is not a directory (symbolic links are not followed)")]
    NotADirectory {
        /// The component of the path that is not a directory.
        component: String,
    },
    /// The file's name is absolute, or has an empty, `.` or `..` component.
    #[error("the path points outside of the checkpoint directory")]
    OutsideDirectory,
    /// A block's content differs from its hash in the manifest.
    #[error("the content does not match its BLAKE3 hash")]
    HashMismatch,
    /// The file's content differs from its hash in the record of a gather or a conversion.
    #[error(
        "the content does not match its BLAKE3 hash in {record}: the file is damaged, or was changed later"
    )]
    RecordMismatch {
        /// Name of the file that records the hash.
        record: &'static str,
    },
    /// A block that was just written reads back differently.
    #[error("block {block} differs from the bytes that were just written; the disk or file system is faulty")]
    ReadBackMismatch {
        /// Index of the block in the file.
        block: u64,
    },
    /// The content of a zip member does not match its CRC-32.
    #[error("zip member {member}: the content does not match its CRC-32")]
    CrcMismatch {
        /// Name of the zip member.
        member: String,
    },
    /// The header of a native shard and the manifest describe a piece of a tensor differently.
    #[error("the shard header and the manifest differ in {piece}")]
    HeaderMismatch {
        /// `role/name@start` of the piece.
        piece: String,
    },
    /// An index lists a tensor that the file does not have.
    #[error("tensor {tensor}, which the index lists, is not in the file")]
    TensorMissing {
        /// Name of the tensor.
        tensor: String,
    },
    /// The name of the directory states a different step than the manifest.
    #[error("the directory is named for step {named}, the manifest is of step {stored}")]
    StepMismatch {
        /// The step that the directory's name states.
        named: u64,
        /// The step in the manifest.
        stored: u64,
    },
    /// The file or directory is not a checkpoint. The diagnosis states what it probably is.
    #[error("{0}")]
    NotACheckpoint(Diagnosis),
    /// The file cannot be read.
    #[error("read error: {0}")]
    Read(#[from] CloneableIoError),
    /// The manifest is invalid.
    #[error("{0}")]
    Manifest(#[from] ManifestError),
    /// The file is not a valid safetensors file.
    #[error("{0}")]
    Safetensors(#[from] SafetensorsError),
    /// The file is not a valid torch file.
    #[error("{0}")]
    TorchFile(TorchFileError),
    /// The `.metadata` or an item of a torch distributed checkpoint is invalid.
    #[error("{0}")]
    Dcp(DcpError),
    /// DeepSpeed's files are invalid or contradict each other.
    #[error("{0}")]
    DeepSpeed(#[from] DeepSpeedError),
    /// The `state_dict` of an optimizer is invalid.
    #[error("{0}")]
    Optimizer(#[from] OptimizerStateError),
    /// The configuration of an adapter is invalid.
    #[error("{0}")]
    Adapter(#[from] AdapterConfigError),
    /// A tensor has an invalid name.
    #[error("{0}")]
    Name(#[from] InvalidTensorName),
    /// The pieces of a tensor do not cover it exactly once.
    #[error("{0}")]
    Coverage(#[from] CoverageError),
    /// The file is not valid JSON, or has unexpected fields.
    #[error("invalid JSON: {0}")]
    Json(String),
    /// An RNG state file has invalid content.
    #[error("{0}")]
    RngState(#[from] RngStateError),
    /// The RNG state files of the ranks contradict each other.
    #[error("{0}")]
    RngFiles(#[from] RngFilesError),
    /// The content contradicts itself or another file. The text describes the contradiction.
    #[error("{0}")]
    Inconsistent(String),
}

impl DamageReason {
    /// Returns true if a pickle names a class or function that is not allowed.
    pub fn is_forbidden_global(&self) -> bool {
        matches!(self, DamageReason::TorchFile(error) if error.is_forbidden_global())
    }
}

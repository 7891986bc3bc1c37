//! [`SaveProblem`]: why the data that are to be saved do not make up one complete checkpoint.
use super::manifest::ManifestError;
use super::pickle::EncodeError;
use super::safetensors::SafetensorsError;
use crate::tensor::{Dtype, TensorRole};

/// The reason why a save cannot complete a checkpoint, such as missing reports of ranks, or a file
/// that is not the shard of its rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveProblem {
    /// The save began for a different step than it commits.
    #[error("the save began at step {begun} and commits step {committed}")]
    StepMismatch {
        /// The step for which the save began, which [`crate::StagingDir::create`] got.
        begun: u64,
        /// The step in the run facts with which the save was to be committed.
        committed: u64,
    },
    /// The ranks that reported are not exactly the ranks below the world size.
    #[error("reports of ranks {ranks:?} for {world} ranks")]
    RankReports {
        /// The ranks with a report, sorted.
        ranks: Vec<u32>,
        /// World size of the run.
        world: u32,
    },
    /// A rank is not below the world size.
    #[error("rank {rank} of {world}")]
    RankOutsideWorld {
        /// The invalid rank.
        rank: u32,
        /// World size of the run.
        world: u32,
    },
    /// The report of a rank names a file that is not the shard of this rank.
    #[error("{file} is not a shard of {world} ranks")]
    NotAShard {
        /// File name in the rank's report.
        file: String,
        /// World size of the run.
        world: u32,
    },
    /// A file in the staging directory is missing, or differs in size from the rank's report.
    #[error("{file} should have {expected} bytes, found {}", found.map_or("no such file".to_owned(), |n| format!("{n} bytes")))]
    FileSize {
        /// Name of the file.
        file: String,
        /// Bytes reported by the rank.
        expected: u64,
        /// Bytes of the file; `None` when it does not exist.
        found: Option<u64>,
    },
    /// Pieces of one tensor have different dtypes.
    #[error("pieces of one {role} are {first} and {second}")]
    MixedDtypes {
        /// Role of the tensor.
        role: TensorRole,
        /// Dtype of the first piece.
        first: Dtype,
        /// Dtype of another piece.
        second: Dtype,
    },
    /// A rank's shard would contain the same piece of a tensor twice.
    #[error("rank {rank} gives {piece} twice")]
    DuplicatePiece {
        /// The rank that gives the piece twice.
        rank: u32,
        /// `role/name@start` of the piece.
        piece: String,
    },
    /// A piece belongs to no tensor of the model.
    #[error("{tensor} is not a tensor of the model")]
    UnknownTensor {
        /// `role/name` of the tensor to which the piece claims to belong.
        tensor: String,
    },
    /// The manifest would be larger than this program accepts.
    #[error("the manifest would have {bytes} bytes, more than the limit of {limit}")]
    ManifestTooLarge {
        /// Size that the manifest would have, in bytes.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The run facts cannot be written as JSON.
    #[error("cannot write as JSON: {0}")]
    Json(String),
    /// The manifest that the save would write is invalid.
    #[error("{0}")]
    Manifest(#[from] ManifestError),
    /// A value of a torch file cannot be written as a pickle.
    #[error("cannot pickle: {0}")]
    Pickle(#[from] EncodeError),
    /// A safetensors header cannot be written.
    #[error("{0}")]
    Safetensors(#[from] SafetensorsError),
    /// A shard that was just written cannot be read back.
    #[error("cannot read back a shard: {0}")]
    ReadBack(String),
    /// Any other contradiction in the data of a save, as text.
    #[error("{0}")]
    Inconsistent(String),
}

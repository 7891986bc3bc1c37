//! Details of [`super::CkptError`]: which part is missing, which feature is not supported, and why
//! a save, an option or an output path is rejected.
use crate::catalog::TensorRole;
use crate::convert::ConvertError;
use crate::dtype::Dtype;
use crate::formats::safetensors::SafetensorsError;
use crate::manifest_error::ManifestError;
use crate::peft::AdapterConfigError;
use crate::pickle::EncodeError;
use crate::rng_files::{reconcile::ReconcileError, scheduler::RescaleError};
use serde::Serialize;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

/// A shard that is in the checkpoint directory of another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemoteShard {
    /// Name of the shard's file.
    pub file: String,
    /// Name and id of the host that has the shard, or `unknown`.
    pub host: String,
}

/// A part of a checkpoint that does not exist, such as a file or a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingPart {
    /// A file, by its path in the checkpoint directory.
    File(String),
    /// Several files, by their paths in the checkpoint directory.
    Files(Vec<String>),
    /// Alternative files, of which the checkpoint needs at least one.
    AnyFileOf(Vec<String>),
    /// Shards that an index file lists, but that do not exist.
    IndexedShards {
        /// Names of the missing shards.
        files: Vec<String>,
        /// Number of shards that the index lists.
        total: usize,
        /// Name of the index file.
        index: String,
    },
    /// Blocks of a native shard.
    Blocks {
        /// Index of the shard.
        file: usize,
        /// Range of the missing blocks' indices.
        blocks: Range<u64>,
    },
    /// The directory that `latest` or `latest_universal` names.
    LatestTarget {
        /// Name of the missing directory.
        target: String,
        /// Name of the file that names the directory, `latest` or `latest_universal`.
        pointer: &'static str,
        /// Checkpoints in the same directory that could be used instead.
        present: Vec<String>,
    },
    /// DeepSpeed's model or optimizer files of some ranks.
    RankFiles {
        /// Kind of the missing files, `model` or `optimizer`.
        kind: &'static str,
        /// The first ranks without a file, at most [`RANKS_LISTED_MAX`] + 1 of them.
        ranks: Vec<u32>,
        /// Number of ranks that wrote the checkpoint.
        world: u32,
    },
    /// DeepSpeed's model file of one rank, which stored slices of frozen weights.
    FrozenSlices {
        /// The rank without a model file.
        rank: u32,
        /// Number of frozen weights with a slice in the file.
        weights: usize,
    },
    /// Weights whose names the checkpoint lists without storing their values.
    Weights(Vec<String>),
    /// The RNG state file of one rank.
    RngFile {
        /// Name of the missing file.
        file: String,
        /// The rank whose RNG state is missing.
        rank: u32,
        /// Number of ranks that saved the checkpoint.
        world: u32,
    },
    /// The RNG state files of every rank.
    AllRngFiles,
    /// Any other part, as a noun phrase.
    Other(String),
}

/// The most ranks that a message lists by number.
pub(crate) const RANKS_LISTED_MAX: usize = 16;

impl fmt::Display for MissingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use MissingPart::*;
        match self {
            File(name) | Other(name) => f.write_str(name),
            Files(names) => f.write_str(&format_names(names)),
            AnyFileOf(names) => f.write_str(&names.join(" or ")),
            IndexedShards { files, total, index } => {
                write!(f, "{} (of {} listed in {index})", format_names(files), format_count(*total, "shard"))
            }
            Blocks { file, blocks } => write!(f, "blocks {}..{} of shard {file}", blocks.start, blocks.end),
            LatestTarget { target, pointer, present } => {
                write!(f, "{target}, which `{pointer}` names")?;
                match present.is_empty() {
                    true => Ok(()),
                    false => write!(f, " (present: {})", present.join(", ")),
                }
            }
            RankFiles { kind, ranks, world } => match ranks.as_slice() {
                [rank] => write!(f, "the {kind} file of rank {rank} of {world}"),
                ranks => write!(f, "the {kind} files of ranks {} of {world}", format_ranks(ranks)),
            },
            FrozenSlices { rank, weights } => write!(
                f,
                "the model file of rank {rank}, the only copy of its slices of {}",
                format_count(*weights, "frozen weight")
            ),
            RngFile { file, rank, world } => write!(f, "{file}, the RNG state of rank {rank} of {world}"),
            AllRngFiles => f.write_str("RNG state files (rng_state*.pth or random_states_*.pkl)"),
            Weights(names) => match names.as_slice() {
                [name] => write!(f, "weight {name}"),
                names => write!(f, "weights {}", format_names(names)),
            },
        }
    }
}

impl From<String> for MissingPart {
    fn from(phrase: String) -> Self {
        MissingPart::Other(phrase)
    }
}

impl From<&str> for MissingPart {
    fn from(phrase: &str) -> Self {
        MissingPart::Other(phrase.to_owned())
    }
}

/// A property of a checkpoint that an operation does not support.
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
    /// The file belongs to tensor, pipeline or expert parallelism.
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
    /// The target of a conversion needs something that the checkpoint does not contain.
    #[error("{0}")]
    Convert(#[from] ConvertError),
    /// A setting of an adapter is not supported.
    #[error("{0}")]
    Adapter(#[from] AdapterConfigError),
    /// Any other unsupported property, as text.
    #[error("{0}")]
    Other(String),
}

impl From<String> for UnsupportedFeature {
    fn from(detail: String) -> Self {
        UnsupportedFeature::Other(detail)
    }
}

impl From<&str> for UnsupportedFeature {
    fn from(detail: &str) -> Self {
        UnsupportedFeature::Other(detail.to_owned())
    }
}

/// Why an option of a conversion or gather is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionProblem {
    /// The requested ZeRO stage does not exist.
    #[error("ZeRO stage {stage} does not exist; stages are 1, 2 and 3")]
    Stage {
        /// The requested stage.
        stage: u8,
    },
    /// The requested number of ranks is 0 or too large.
    #[error("{world} ranks are not possible; a checkpoint has 1 to {limit} ranks")]
    WorldSize {
        /// The requested number of ranks.
        world: u32,
        /// The most ranks that a result may have.
        limit: u32,
    },
    /// The requested size of ZeRO-3 sub-groups is 0.
    #[error("a ZeRO-3 sub-group needs at least 1 element")]
    EmptySubGroup,
    /// The requested limit on host memory is too low for a conversion.
    #[error("a conversion needs at least {} of memory, but the limit is {}", format_mebibytes(*needed), format_mebibytes(*limit))]
    Memory {
        /// The least memory that works, in bytes.
        needed: u64,
        /// The requested limit, in bytes.
        limit: u64,
    },
    /// The output dtype is not a floating-point type.
    #[error("weights cannot be written as {dtype}; use F32, BF16 or F16")]
    Dtype {
        /// The requested dtype.
        dtype: Dtype,
    },
    /// A merge is requested for a checkpoint without adapters.
    #[error("checkpoint {} has no low-rank adapters to merge", .path.display())]
    NoAdapters {
        /// The checkpoint directory.
        path: PathBuf,
    },
    /// A file of the tokenizer has the name of another output file.
    #[error("the tokenizer has a file {name}, but another output file has this name")]
    FileNameTaken {
        /// The file name that both files would have.
        name: String,
    },
}

/// Why an output path is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutputProblem {
    /// The output path exists already.
    #[error("the path exists")]
    Exists,
    /// The output path exists and is not a directory.
    #[error("the path exists and is not a directory")]
    NotADirectory,
    /// The directory is not empty and was not written by an earlier run of the same operation, so
    /// the operation does not overwrite the directory.
    #[error("the directory is not empty and was not written by {operation}")]
    NotOurs {
        /// The operation that may overwrite only its own directories.
        operation: &'static str,
    },
    /// The directory holds a file that the operation did not write.
    #[error("the directory holds {file}, which was not written by {operation}")]
    OtherFile {
        /// Name of the file.
        file: String,
        /// The operation that wrote the other files.
        operation: &'static str,
    },
    /// An earlier run of the same operation wrote the directory, and `--force` is not given.
    #[error("the directory was written by an earlier {operation}")]
    NeedsForce {
        /// The operation that wrote the directory.
        operation: &'static str,
    },
    /// The output path is inside the checkpoint directory that the operation reads.
    #[error("the path is inside of the checkpoint")]
    InsideInput,
    /// The output path has no file name, such as `/`.
    #[error("the path has no file name")]
    NoName,
}

/// Why the data given to a save is not one complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveProblem {
    /// The save began for another step than it commits.
    #[error("the save began at step {begun} and commits step {committed}")]
    StepMismatch {
        /// Step of [`crate::StagingDir::create`].
        begun: u64,
        /// Step in the run facts of the commit.
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
    /// A report names a file that is not the shard of its rank.
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
    /// A rank gives the same piece twice.
    #[error("rank {rank} gives {piece} twice")]
    DuplicatePiece {
        /// The rank that gives the piece.
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
    /// The manifest would be larger than this program reads.
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
    /// The manifest would be invalid.
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

impl From<String> for SaveProblem {
    fn from(detail: String) -> Self {
        SaveProblem::Inconsistent(detail)
    }
}

impl From<serde_json::Error> for SaveProblem {
    fn from(error: serde_json::Error) -> Self {
        SaveProblem::Json(error.to_string())
    }
}

/// Formats a number with its noun: `1 shard`, `2 shards`.
pub(super) fn format_count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Formats a list of names, of which at most two are shown: `a`, `a and b`, `a, b and 3 more`.
pub(crate) fn format_names(names: &[String]) -> String {
    match names {
        [a, b, more @ ..] if !more.is_empty() => format!("{a}, {b} and {} more", more.len()),
        few => few.join(" and "),
    }
}

/// Formats ranks as a list, of which at most [`RANKS_LISTED_MAX`] are shown.
fn format_ranks(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().take(RANKS_LISTED_MAX).map(u32::to_string).collect();
    match list.split_last() {
        _ if ranks.len() > RANKS_LISTED_MAX => format!("{} and more", list.join(", ")),
        Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => list.join(""),
    }
}

/// Formats shards with their hosts as a list, of which at most three are shown.
pub(super) fn format_remote_shards(shards: &[RemoteShard]) -> String {
    const LISTED: usize = 3;
    let list: Vec<String> =
        shards.iter().take(LISTED).map(|s| format!("{} on host {}", s.file, s.host)).collect();
    match shards.len().saturating_sub(LISTED) {
        0 => list.join(", "),
        more => format!("{} and {more} more", list.join(", ")),
    }
}

/// Formats a size of memory in MiB: `64 MiB`, `0.5 MiB`. Rounds down, so that a size below a limit
/// is shown as less than the limit.
fn format_mebibytes(bytes: u64) -> String {
    let tenths = (bytes as f64 * 10.0 / f64::from(1 << 20)).floor();
    format!("{} MiB", tenths / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shown_in_binary_units() {
        let show = |limit| OptionProblem::Memory { needed: 64 << 20, limit }.to_string();
        let expected =
            |limit| format!("a conversion needs at least 64 MiB of memory, but the limit is {limit}");
        assert_eq!(show(1 << 20), expected("1 MiB"));
        assert_eq!(show((64 << 20) - 1), expected("63.9 MiB"));
    }
}

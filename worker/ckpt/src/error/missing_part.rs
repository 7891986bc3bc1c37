//! [`MissingPart`]: the part of a checkpoint that an error reports as missing.
use super::text::{format_names, format_ranks};
use diagnostic::quantity::format_count;
use serde::Serialize;
use std::ops::Range;

/// The name of a shard that this host cannot read because another host stores it, and the name of
/// that host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemoteShard {
    /// Name of the shard's file.
    pub file: String,
    /// Name and id of the host that has the shard, or `unknown`.
    pub host: String,
}

/// A part of a checkpoint that is missing, such as a file or a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MissingPart {
    /// A file, by its path in the checkpoint directory.
    #[error("{0}")]
    File(String),
    /// Several files, by their paths in the checkpoint directory.
    #[error("{}", format_names(.0))]
    Files(Vec<String>),
    /// Alternative files, of which the checkpoint needs at least one.
    #[error("{}", .0.join(" or "))]
    AnyFileOf(Vec<String>),
    /// Shards that an index file lists, but that do not exist.
    #[error("{} (of {} listed in {index})", format_names(files), format_count(*total, "shard"))]
    IndexedShards {
        /// Names of the missing shards.
        files: Vec<String>,
        /// Number of shards that the index lists.
        total: usize,
        /// Name of the index file.
        index: String,
    },
    /// Blocks of one rank's file (shard) of a native checkpoint.
    #[error("blocks {}..{} of shard {file}", .blocks.start, .blocks.end)]
    Blocks {
        /// Index of the shard.
        file: usize,
        /// Range of the missing blocks' indices.
        blocks: Range<u64>,
    },
    /// The directory that `latest` or `latest_universal` names.
    #[error("{target}, which `{pointer}` names{}", format_available_checkpoints(present))]
    LatestTarget {
        /// Name of the missing directory.
        target: String,
        /// Name of the file that names the directory, `latest` or `latest_universal`.
        pointer: &'static str,
        /// Checkpoints in the same directory that could be used instead.
        present: Vec<String>,
    },
    /// DeepSpeed's model or optimizer files of some ranks.
    #[error("the {kind} {} of {world}", format_files_of_ranks(ranks))]
    RankFiles {
        /// Kind of the missing files, `model` or `optimizer`.
        kind: &'static str,
        /// The first ranks without a file, at most [`super::RANKS_LISTED_MAX`] + 1 of them.
        ranks: Vec<u32>,
        /// Number of ranks that wrote the checkpoint.
        world: u32,
    },
    /// DeepSpeed's model file of one rank, which stored slices of frozen weights.
    #[error(
        "the model file of rank {rank}, the only copy of its slices of {}",
        format_count(*weights, "frozen weight")
    )]
    FrozenSlices {
        /// The rank without a model file.
        rank: u32,
        /// Number of frozen weights with a slice in the file.
        weights: usize,
    },
    /// Weights whose names the checkpoint lists without storing their values.
    #[error("weight{} {}", if .0.len() == 1 { "" } else { "s" }, format_names(.0))]
    Weights(Vec<String>),
    /// The RNG state file of one rank.
    #[error("{file}, the RNG state of rank {rank} of {world}")]
    RngFile {
        /// Name of the missing file.
        file: String,
        /// The rank whose RNG state is missing.
        rank: u32,
        /// Number of ranks that saved the checkpoint.
        world: u32,
    },
    /// The RNG state files of every rank.
    #[error("RNG state files (rng_state*.pth or random_states_*.pkl)")]
    AllRngFiles,
    /// Any other part, as a noun phrase.
    #[error("{0}")]
    Other(String),
}

/// Formats the names of at most three missing rank files together with the hosts that store them,
/// for an error message.
pub(crate) fn format_remote_shards(shards: &[RemoteShard]) -> String {
    /// Maximum number of missing shards that an error message names.
    const SHARDS_LISTED_MAX: usize = 3;
    let list: Vec<String> =
        shards.iter().take(SHARDS_LISTED_MAX).map(|s| format!("{} on host {}", s.file, s.host)).collect();
    match shards.len().saturating_sub(SHARDS_LISTED_MAX) {
        0 => list.join(", "),
        more => format!("{} and {more} more", list.join(", ")),
    }
}

/// Formats the remark ` (present: …)`, which names the checkpoints in a directory, for the error
/// message that another checkpoint is missing there. The remark is empty if there are none.
fn format_available_checkpoints(present: &[String]) -> String {
    match present.is_empty() {
        true => String::new(),
        false => format!(" (present: {})", present.join(", ")),
    }
}

/// Formats the ranks whose files are missing, such as `file of rank 3` or `files of ranks 3 and 4`.
fn format_files_of_ranks(ranks: &[u32]) -> String {
    match ranks {
        [rank] => format!("file of rank {rank}"),
        ranks => format!("files of ranks {}", format_ranks(ranks)),
    }
}

//! [`ManifestError`]: why a manifest of a native checkpoint, or the data of a save, is rejected.
use crate::tensor::{CoverageError, Dtype, InvalidTensorName};
use std::ops::Range;

/// The reason why `manifest.json`, which lists the tensors and files of a checkpoint in launch's
/// own format, is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The manifest is too short to contain a hash.
    #[error("the manifest is truncated")]
    Truncated,
    /// The content of the manifest does not match the hash at its beginning.
    #[error("the manifest does not match its own BLAKE3 hash")]
    HashMismatch,
    /// The serialized manifest does not begin with its hash.
    #[error("the hash is not the first field")]
    HashNotFirst,
    /// The manifest is not valid JSON, or has unexpected fields.
    #[error("invalid JSON: {0}")]
    Json(String),
    /// The model's `hf_config` is not an object.
    #[error("hf_config is not an object")]
    ConfigNotAnObject,
    /// A tensor has an invalid name.
    #[error(transparent)]
    Name(#[from] InvalidTensorName),
    /// A tensor or host is listed twice.
    #[error("{0} is listed twice")]
    Duplicate(String),
    /// The number of elements of a tensor overflows, or there are too many dimensions.
    #[error("{tensor} has the impossible shape {shape:?}")]
    ImpossibleShape {
        /// Kind or role of the tensor, and its name.
        tensor: String,
        /// The recorded dimensions of the tensor.
        shape: Vec<u64>,
    },
    /// A tied weight is itself stored, or the target of the tie is not stored.
    #[error("{alias} is tied to {target}, which does not match the weights")]
    InvalidTie {
        /// Name of the tied weight.
        alias: String,
        /// Name of the weight that should be stored in place of the tied weight.
        target: String,
    },
    /// The list of frozen weights has a name that is not a weight.
    #[error("{0} is frozen but is not a weight")]
    FrozenNotAWeight(String),
    /// The world size is 0.
    #[error("the world size is 0")]
    NoRanks,
    /// The ZeRO stage of the run does not exist.
    #[error("ZeRO stage {0} does not exist; stages are 0 to 3")]
    UnknownStage(u8),
    /// The parameter groups are not a list of objects.
    #[error("the parameter groups are not a list of objects")]
    GroupsNotObjects,
    /// A tokenizer file has an unsafe name, or the same name as another tokenizer file.
    #[error("{0:?} is not a valid tokenizer file name, or occurs twice")]
    TokenizerFileName(String),
    /// The block size differs from 1 MiB.
    #[error("blocks have {found} bytes, expected {expected}")]
    BlockSize {
        /// The recorded block size in bytes.
        found: u64,
        /// The block size that this program uses, in bytes.
        expected: u64,
    },
    /// The recorded version differs from the oldest version that can represent the contents.
    #[error("the manifest has version {recorded}, but its contents need version {needed}")]
    Version {
        /// The recorded version.
        recorded: u32,
        /// The oldest version that can represent the contents.
        needed: u32,
    },
    /// The number of shards differs from the world size.
    #[error("{shards} shards for a world size of {world}")]
    ShardCount {
        /// Number of shards in the manifest.
        shards: usize,
        /// Number of ranks that wrote the checkpoint.
        world: u32,
    },
    /// A shard has an unexpected name.
    #[error("shard {rank} has the wrong name {name:?}")]
    ShardName {
        /// Rank of the shard.
        rank: usize,
        /// The recorded name.
        name: String,
    },
    /// The number of block hashes of a file does not match the size of the file.
    #[error("{file} has {bytes} bytes and {hashes} block hashes")]
    BlockCount {
        /// Name of the file.
        file: String,
        /// Size of the file in bytes.
        bytes: u64,
        /// Number of block hashes.
        hashes: usize,
    },
    /// The total size of the shards, or their number, overflows.
    #[error("the sizes of the shards overflow")]
    SizeOverflow,
    /// The number of parity files differs from the number of shards.
    #[error("{parity} parity files for {shards} shards")]
    ParityCount {
        /// Number of parity files in the manifest.
        parity: usize,
        /// Number of shards in the manifest.
        shards: usize,
    },
    /// The name or the size of a parity file does not match the shards.
    #[error("parity file {rank} ({name}) does not match the shards")]
    ParityFile {
        /// Rank that wrote the file.
        rank: u32,
        /// Name of the file.
        name: String,
    },
    /// Shards refer to hosts, but the manifest lists no hosts.
    #[error("shards are on hosts that are not listed")]
    NoHosts,
    /// The manifest lists too many hosts.
    #[error("{found} hosts, more than the limit of {limit}")]
    HostCount {
        /// Number of hosts in the manifest.
        found: usize,
        /// Maximum number of hosts.
        limit: usize,
    },
    /// A host has an invalid id or name.
    #[error("a host has an invalid id or name")]
    InvalidHost,
    /// A shard is not on any of the listed hosts.
    #[error("{0} is on no listed host")]
    ShardWithoutHost(String),
    /// Two tensors share bytes of a shard.
    #[error("bytes {}..{} of {file} belong to two tensors", .bytes.start, .bytes.end)]
    Overlap {
        /// Name of the shard.
        file: String,
        /// The bytes that belong to both tensors.
        bytes: Range<u64>,
    },
    /// A tensor has a dtype that native checkpoints do not store.
    #[error("{tensor} is {dtype}; state is stored as F32, weights as F32 or BF16")]
    Dtype {
        /// Role and name of the tensor, as `role/name`.
        tensor: String,
        /// The recorded dtype.
        dtype: Dtype,
    },
    /// The pieces of a tensor do not contain each element exactly once.
    #[error("{tensor}: {error}")]
    Coverage {
        /// Role and name of the tensor, as `role/name`.
        tensor: String,
        /// The gap or overlap.
        error: CoverageError,
    },
    /// A piece is outside of its shard.
    #[error("{tensor}: bytes {}..{} are outside of shard {shard}", .bytes.start, .bytes.end)]
    OutsideShard {
        /// Role and name of the tensor, as `role/name`.
        tensor: String,
        /// Byte range of the piece in the shard.
        bytes: Range<u64>,
        /// Index of the shard.
        shard: usize,
    },
    /// A tensor of the model is in no shard.
    #[error("no shard holds {0}")]
    MissingTensor(String),
    /// The shape of a tensor differs from the shape in the model.
    #[error("{tensor} has the shape {found:?}, expected {expected:?}")]
    Shape {
        /// Role and name of the tensor, as `role/name`.
        tensor: String,
        /// The recorded shape.
        found: Vec<u64>,
        /// The shape in the model.
        expected: Vec<u64>,
    },
    /// A tensor does not belong to the model.
    #[error("{0} is not a tensor of the model")]
    UnknownTensor(String),
}

//! Reads checkpoints in launch's own format, which are directories `step-N` with a manifest and one
//! shard per rank.
mod checkpoint;
mod manifest;
mod memory_shard;
mod parity_stripes;
mod remote_shards;
pub(crate) mod step_directories;
mod storage_host;

pub use checkpoint::{BlockFetcher, BlockRange, BlockSink, Checkpoint};
pub(crate) use manifest::{FileEntry, Manifest, ShardPiece, TensorEntry, TensorPieceEntry, shard_file_name};
pub use memory_shard::MemoryShard;
pub(crate) use parity_stripes::{compute_parity_blocks_of_rank, parity_file_name};
pub(crate) use remote_shards::RemoteShards;
pub(crate) use step_directories::{
    DELETING_PREFIX, LATEST_FILE, LATEST_TEMP_FILE, REPLACED_PREFIX, SAVING_PREFIX, encode_latest,
    read_latest_step,
};
pub use step_directories::{find_latest_checkpoint, list_checkpoints, parse_step_dir_name, step_dir_name};
pub use storage_host::StorageHost;
pub(crate) use storage_host::{HOST_ID_FILE, HOST_ID_LEN, HOST_NAME_BYTES_MAX};

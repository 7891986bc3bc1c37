//! Files and directories: large aligned reads and writes with direct I/O.
//!
//! Every change on the disk passes a fault point ([`crate::fault_points`]), at which tests inject
//! failures.
mod block_reader;
mod buffer_pool;
mod directory;
mod file_writer;
mod offset_reader;

pub(crate) use block_reader::{BlockReader, BlockRequest, stream_windows};
pub(crate) use buffer_pool::{AlignedBuffer, DiskBufferPool};
pub(crate) use directory::{
    DirLock, Directory, exists, lock_dir, make_dir, make_dirs, parent_dir, query_free_bytes, remove_tree,
    sync_dir, sync_file_system, unlink,
};
pub(crate) use file_writer::{FileWriter, IoMode, SMALL_WINDOW, write_file};
pub(crate) use offset_reader::{OffsetReader, ReadBuffers};

/// Bytes per block. Each block has its own hash.
pub(crate) const BLOCK: usize = 1 << 20;
/// Bytes per window, the unit in which files are read and written.
pub(crate) const WINDOW: usize = 8 << 20;
/// Required alignment of offsets, lengths and memory for O_DIRECT, in bytes.
pub(crate) const ALIGN: usize = 4096;

//! Files and directories: large aligned reads and writes with direct I/O.
//!
//! Every change on the disk passes a fault point ([`crate::fault_points`]), at which tests inject
//! failures.
mod block_reader;
mod buffer_pool;
mod directory;
mod file_writer;
mod offset_reader;
mod units;

pub(crate) use block_reader::{BlockReader, BlockRequest, stream_windows};
pub(crate) use buffer_pool::DiskBufferPool;
pub(crate) use directory::{
    DirLock, Directory, exists, is_plain_file_name, lock_dir, make_dir, make_dirs, parent_dir, remove_tree,
    require_free_bytes, sync_dir, sync_file_system, unlink,
};
pub(crate) use file_writer::{FileWriter, IoMode, SMALL_WINDOW, write_file};
pub(crate) use offset_reader::{OffsetReader, ReadBuffers};
pub(crate) use units::{BLOCK, WINDOW};

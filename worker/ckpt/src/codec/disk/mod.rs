//! Files and directories: large aligned reads and writes with direct I/O.
//!
//! Every change on the disk passes a fault point ([`crate::fault_points`]), at which tests inject
//! failures.
mod block_reader;
mod buffer_pool;
mod crc;
mod digest;
mod directory;
mod file_writer;
mod io_units;
mod offset_reader;
mod sparse;

pub(crate) use block_reader::{BlockReader, BlockRequest, stream_windows};
pub(crate) use buffer_pool::DiskBufferPool;
pub(crate) use crc::{combine_crcs, read_file_crc};
pub(crate) use digest::{hash_file, hash_open_file};
pub(crate) use directory::{
    DirLock, Directory, FILES_MAX, FileState, is_plain_file_name, list_file_states, make_dir, make_dirs,
    open_regular_file, parent_dir, path_exists, remove_tree, remove_unless_directory, require_free_bytes,
    sync_dir, sync_file_system, try_lock_dir, unlink,
};
pub(crate) use file_writer::{FileWriter, HashMode, IoMode, SMALL_WINDOW_BYTES, WrittenFile, write_file};
pub(crate) use io_units::{BLOCK_BYTES, WINDOW_BYTES};
pub(crate) use offset_reader::{OffsetReader, ReadBuffers};
pub(crate) use sparse::find_data;

//! Files and directories: large aligned reads and writes with direct I/O. Every step of a save is
//! between fault points.
mod at;
mod buffer;
mod directory;
mod read;
mod write;

pub(crate) use at::{ReadAt, Scratch};
pub(crate) use buffer::{Buffer, Buffers};
pub(crate) use directory::{
    DirLock, Directory, exists, free_bytes, lock_dir, make_dir, make_dirs, parent_of, remove_tree,
    sync_all_of, sync_dir, unlink,
};
pub(crate) use read::{BlockFile, ReadJob, stream};
pub(crate) use write::{FileWriter, IoMode, SMALL_WINDOW, write_file};

/// Bytes per block, the unit of hashing.
pub(crate) const BLOCK: usize = 1 << 20;
/// Bytes per window, the unit of reading and writing.
pub(crate) const WINDOW: usize = 8 << 20;
/// Alignment of offsets, lengths and memory for O_DIRECT, bytes.
pub(crate) const ALIGN: usize = 4096;

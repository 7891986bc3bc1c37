//! Files and folders: large aligned writes and reads past the page cache, and every step of a save between fault points.
mod at;
mod buffer;
mod folder;
mod read;
mod write;

pub(crate) use at::{ReadAt, Scratch};
pub(crate) use buffer::{Buffer, Buffers};
pub(crate) use folder::{
    DirLock, Folder, exists, free_bytes, lock_dir, make_dir, make_dirs, parent_of, remove_tree, sync_all_of,
    sync_dir, unlink,
};
pub(crate) use read::{BlockFile, Job, stream};
pub(crate) use write::{FileWriter, NARROW, Path as WritePath, write_file};

/// Unit of hashing: bytes per block of a file.
pub(crate) const BLOCK: usize = 1 << 20;
/// Unit of reading and writing: bytes per system call.
pub(crate) const WINDOW: usize = 8 << 20;
/// O_DIRECT wants offsets, lengths and memory in multiples of this.
pub(crate) const ALIGN: usize = 4096;

//! [`MemoryFile`]: memory that several processes of `launch gpu-check` share.
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Memory that several processes of `launch gpu-check` share, as an unnamed file that exists only
/// in memory.
pub(super) struct MemoryFile(OwnedFd);

impl MemoryFile {
    /// Creates an empty file in memory, which other processes of `launch gpu-check` can open.
    pub(super) fn create() -> io::Result<MemoryFile> {
        // Ranks seal the memory that they share.
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        Ok(MemoryFile(memfd_create(c"launch-gpu-check", flags)?))
    }

    /// Returns the path by which other processes can open the shared memory file while this process
    /// runs.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// Returns another file descriptor of the shared memory file.
    pub(super) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}

/// Opens the shared memory file of another process of `launch gpu-check`, by its path.
pub(super) fn open_memory_file(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

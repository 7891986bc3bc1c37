//! Sizes of the blocks in which checkpoint files are hashed, read and written, and a function that
//! turns direct I/O off for a file.
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::fs::File;
use std::io;

/// Size in bytes of a block, the unit in which the files of checkpoints are hashed and verified.
/// Each block has its own hash.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;
/// Size in bytes of a window, the unit in which files are read and written.
pub(crate) const WINDOW_BYTES: usize = 8 << 20;
/// Required alignment of offsets, lengths and memory for O_DIRECT, in bytes.
pub(crate) const DIRECT_IO_ALIGNMENT: usize = 4096;

/// Turns O_DIRECT off for the open file `file`. Some file systems accept the flag when the file is
/// opened, but reject a direct read or write.
pub(super) fn disable_direct_io(file: &File) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags - OFlag::O_DIRECT))?;
    Ok(())
}

//! Sizes in which files are read and written.

/// Bytes per block. Each block has its own hash.
pub(crate) const BLOCK: usize = 1 << 20;
/// Bytes per window, the unit in which files are read and written.
pub(crate) const WINDOW: usize = 8 << 20;
/// Required alignment of offsets, lengths and memory for O_DIRECT, in bytes.
pub(crate) const ALIGN: usize = 4096;

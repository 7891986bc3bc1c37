//! [`MemoryShard`]: one rank's shard of a checkpoint that is stored in the memory of a host instead
//! of in a file on disk.
use crate::codec::disk::BlockReader;
use crate::error::{CkptError, Result};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// One rank's shard of a checkpoint, stored as a byte range of a memory file (memfd) on this host.
#[derive(Clone, Debug)]
pub struct MemoryShard {
    file: Arc<File>,
    bytes: Range<u64>,
}

impl MemoryShard {
    /// Creates a [`MemoryShard`] for the shard that the memory file `file` contains at the byte
    /// range `bytes`.
    pub(crate) fn new(file: Arc<File>, bytes: Range<u64>) -> MemoryShard {
        MemoryShard { file, bytes }
    }

    /// Returns the size of the shard in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Opens the shard for reading. `checkpoint` and `name` are the path of the checkpoint and the
    /// name of the shard in error messages.
    pub(crate) fn open(&self, checkpoint: &Path, name: &str) -> Result<BlockReader> {
        let file = self.file.try_clone().map_err(CkptError::io("open", &checkpoint.join(name)))?;
        Ok(BlockReader::from_memory_file(file, self.bytes.clone(), checkpoint, name))
    }
}

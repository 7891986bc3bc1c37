//! [`MemoryShard`]: a rank's file of a checkpoint (shard, in launch's own format) that is stored in
//! memory.
use crate::codec::disk::BlockReader;
use crate::error::{CkptError, Result};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A rank's part (shard) of a checkpoint in launch's own format, in a byte range of a memory file
/// (memfd), which may contain other shards, too.
#[derive(Clone, Debug)]
pub struct MemoryShard {
    file: Arc<File>,
    bytes: Range<u64>,
}

impl MemoryShard {
    /// Creates a handle to the rank's part of a checkpoint (shard) in the byte range `bytes` of the
    /// memory file `file`.
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

//! Page-aligned buffers, kept for the next use.
use super::WINDOW;
use memmap2::MmapMut;
use std::io;
use std::sync::{Mutex, PoisonError};

/// A store of buffers of equal size.
pub(crate) struct Buffers {
    size: usize,
    kept: Mutex<Vec<MmapMut>>,
}

/// Of [`WINDOW`] bytes.
impl Default for Buffers {
    fn default() -> Buffers {
        Buffers::of(WINDOW)
    }
}

impl Buffers {
    /// Of `size` bytes.
    pub(crate) fn of(size: usize) -> Buffers {
        Buffers { size, kept: Mutex::default() }
    }

    /// A buffer with arbitrary content.
    pub(crate) fn take(&self) -> io::Result<MmapMut> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match kept {
            Some(buffer) => Ok(buffer),
            None => {
                let buffer = MmapMut::map_anon(self.size)?;
                // fewer page faults and cheaper pinning; a kernel without huge pages goes on with small ones
                let _ = buffer.advise(memmap2::Advice::HugePage);
                Ok(buffer)
            }
        }
    }

    /// Keeps a buffer for the next [`Buffers::take`].
    pub(crate) fn give(&self, buffer: MmapMut) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

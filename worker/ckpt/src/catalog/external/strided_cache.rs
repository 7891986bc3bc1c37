//! [`StridedCache`]: keeps recently read byte ranges of checkpoint files in memory, for tensors
//! with non-contiguous elements.
//!
//! Such a tensor is read element by element, which would need a system call for each element. The
//! cache holds whole spans in memory instead.
use crate::error::Result;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum total size in bytes of the file content that a [`StridedCache`] keeps in memory. Spans
/// that are larger are not cached.
const CACHE_BYTES_MAX: u64 = 256 << 20;

/// A cache of byte ranges of checkpoint files, from which tensors with non-contiguous elements are
/// assembled without one read per element.
#[derive(Default)]
pub(super) struct StridedCache(Mutex<Vec<CachedSpan>>);

/// The cached bytes of one range of a checkpoint file, with the indices that identify the file and
/// the range.
struct CachedSpan {
    /// Index of the file in `StoredFiles`, and index of the span in the file.
    place: (usize, usize),
    content: Arc<[u8]>,
}

impl StridedCache {
    /// Returns the bytes of a range of a checkpoint file, either from this cache, or by a call of
    /// `read`, whose result is then cached. If the span is not cached, calls `read` with a buffer
    /// that `read` must fill, and removes the spans that were cached first if the cache is full.
    /// Returns `None` without a call of `read` if the span is larger than the cache.
    ///
    /// # Errors
    /// Fails if `read` fails.
    pub(super) fn get_or_read(
        &self,
        place: (usize, usize),
        bytes: u64,
        read: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Option<Arc<[u8]>>> {
        if bytes > CACHE_BYTES_MAX {
            return Ok(None);
        }
        // holds the lock during the read, so that threads do not read a span twice
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(span) = cached.iter().find(|span| span.place == place) {
            return Ok(Some(span.content.clone()));
        }
        let mut used: u64 = cached.iter().map(|span| span.content.len() as u64).sum();
        while used + bytes > CACHE_BYTES_MAX && !cached.is_empty() {
            used -= cached.remove(0).content.len() as u64;
        }
        let mut content = vec![0; bytes as usize];
        read(&mut content)?;
        let content: Arc<[u8]> = content.into();
        cached.push(CachedSpan { place, content: content.clone() });
        Ok(Some(content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_once_until_the_cache_is_full() {
        let cache = StridedCache::default();
        let reads = std::cell::Cell::new(0);
        let get = |span: usize, bytes: u64| {
            let read = |buffer: &mut [u8]| {
                reads.set(reads.get() + 1);
                buffer.fill(span as u8);
                Ok(())
            };
            cache.get_or_read((0, span), bytes, read).expect("read").map(|content| content[0])
        };
        let half = CACHE_BYTES_MAX / 2;
        assert_eq!((get(1, half), get(2, half), get(1, half), reads.get()), (Some(1), Some(2), Some(1), 2));
        // the third span replaces the first
        assert_eq!((get(3, half), get(2, half), reads.get()), (Some(3), Some(2), 3));
        assert_eq!((get(1, half), reads.get()), (Some(1), 4));
        assert_eq!((get(4, CACHE_BYTES_MAX + 1), reads.get()), (None, 4));
    }
}

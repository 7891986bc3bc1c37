//! Copies that bypass the processor caches, for destinations that are too large to stay in the
//! caches.
//!
//! An ordinary store first reads the cache line that it overwrites. In a large gather, these reads
//! are a third of the memory traffic.

/// The smallest destination, in bytes, for which copies that bypass the processor caches are
/// faster.
pub(super) const MIN_STREAMING_BYTES: usize = 24 << 20;

/// Copies `from` to `to`, and bypasses the processor caches if `bypass_cache` is true and the
/// processor supports this. Panics if the lengths differ.
pub(super) fn copy_bytes_streaming(to: &mut [u8], from: &[u8], bypass_cache: bool) {
    assert_eq!(to.len(), from.len(), "a copy has one length");
    #[cfg(target_arch = "x86_64")]
    if bypass_cache {
        return x86_64::copy_bypassing_caches(to, from);
    }
    let _ = bypass_cache;
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const CACHE_LINE_BYTES: usize = 64;

    /// Copies `from` to `to` with streaming stores, which bypass the caches. Returns after the
    /// stores are visible to other processors.
    pub(super) fn copy_bypassing_caches(to: &mut [u8], from: &[u8]) {
        let head = to.as_ptr().align_offset(CACHE_LINE_BYTES).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (from_head, from) = from.split_at(head);
        to_head.copy_from_slice(from_head);
        let (to_lines, to_tail) = to.as_chunks_mut::<CACHE_LINE_BYTES>();
        let (from_lines, from_tail) = from.as_chunks::<CACHE_LINE_BYTES>();
        for (to, from) in to_lines.iter_mut().zip(from_lines) {
            let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
            for i in 0..CACHE_LINE_BYTES / size_of::<__m128i>() {
                // SAFETY: inside the 64 bytes of both; `to` is aligned to 64. SSE2 is part of
                // x86-64.
                unsafe { _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i))) };
            }
        }
        to_tail.copy_from_slice(from_tail);
        // Streaming stores are weakly ordered: a rank that later learns of the copy must observe
        // it.
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
    }
}

#[cfg(test)]
mod tests {
    use super::copy_bytes_streaming;

    #[test]
    fn copies_at_every_alignment_and_length() {
        let from: Vec<u8> = (0..400u32).map(|i| (i * 7) as u8).collect();
        for bypass_cache in [false, true] {
            for (start, len) in (0..70).flat_map(|s| [0, 1, 15, 63, 64, 65, 200, 300].map(|l| (s, l))) {
                let mut to = vec![0xee; 400];
                copy_bytes_streaming(&mut to[start..start + len], &from[3..3 + len], bypass_cache);
                assert_eq!(&to[start..start + len], &from[3..3 + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&b| b == 0xee));
            }
        }
    }
}

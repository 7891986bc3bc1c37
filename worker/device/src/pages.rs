//! Large pages for large buffers: matrices are read in strides, and with pages of 4 KiB every row is a page of its own.

/// Bytes of a large page.
const LARGE: usize = 2 << 20;

/// Asks the system to back the whole large pages of this range with such; call it before the memory is first touched.
pub(crate) fn advise(start: *const u8, bytes: usize) {
    let skipped = start.align_offset(LARGE);
    let whole = bytes.saturating_sub(skipped) / LARGE * LARGE;
    if whole == 0 {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the range is the caller's memory, and the advice changes no content. Advice: without it pages are small.
    let _ = unsafe { libc::madvise(start.add(skipped).cast_mut().cast(), whole, libc::MADV_HUGEPAGE) };
}

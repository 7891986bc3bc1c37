//! Recognizes placeholders, which are small files that a failed download or checkout left in place
//! of the real files.
use crate::error::PlaceholderFile;

/// Returns which kind of placeholder, such as a Git LFS pointer, a file of `size` bytes is
/// according to its first bytes. `read_at(offset, buffer)` must fill the buffer with the bytes at
/// the offset. Returns `None` for other files, and if the bytes cannot be read.
pub(crate) fn detect_placeholder_file(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> Option<PlaceholderFile> {
    let mut start = [0u8; 23];
    if size < start.len() as u64 || read_at(0, &mut start).is_err() {
        return None;
    }
    let starts_with = |text: &str| start[..text.len()].eq_ignore_ascii_case(text.as_bytes());
    match () {
        () if starts_with("version https://git-lfs") => Some(PlaceholderFile::GitLfsPointer),
        () if starts_with("<!doctype") || starts_with("<html") => Some(PlaceholderFile::HtmlPage),
        () => None,
    }
}

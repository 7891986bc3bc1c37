//! Finds out which parts of a sparse file contain data.
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::ops::Range;

/// Returns the first contiguous range of data within the byte range `bytes` of a file that may have
/// holes. Returns the range up to the next hole, or the empty range at the end of `bytes` if the
/// rest is a hole. On file systems that do not report holes, the whole range counts as data.
///
/// Moves the position of the open file, on which the reads of this crate do not depend.
pub(crate) fn find_data(file: &File, bytes: Range<u64>) -> Range<u64> {
    let seek = |at: u64, whence| {
        let at = i64::try_from(at).map_err(|_| nix::Error::EINVAL)?;
        lseek(file, at, whence).map(|found| found.max(0) as u64)
    };
    let start = match seek(bytes.start, Whence::SeekData) {
        Ok(start) => start.clamp(bytes.start, bytes.end),
        // there is no data after this offset
        Err(nix::Error::ENXIO) if has_min_bytes(file, bytes.end) => return bytes.end..bytes.end,
        Err(_) => return bytes,
    };
    let end = seek(start, Whence::SeekHole).unwrap_or(bytes.end);
    start..end.clamp(start, bytes.end).max((start + 1).min(bytes.end))
}

/// Returns true if the file has at least `size` bytes, by which a hole is distinguished from a
/// range beyond the end of the file. A range beyond the end of the file does not count as a hole,
/// since a read of such a range must fail.
fn has_min_bytes(file: &File, size: u64) -> bool {
    file.metadata().is_ok_and(|m| m.len() >= size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn data_is_found_and_the_end_of_a_file_is_not_a_hole() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = File::create_new(dir.path().join("sparse")).expect("created");
        file.set_len(4 << 20).expect("sparse");
        file.write_all_at(&[1; 4096], 1 << 20).expect("written");
        let found = find_data(&file, 0..4 << 20);
        // a file system without holes reports the whole range
        if found != (0..4 << 20) {
            assert!(found.start <= 1 << 20 && found.end >= (1 << 20) + 4096, "{found:?}");
            assert_eq!(find_data(&file, found.end..4 << 20), 4 << 20..4 << 20);
        }
        assert_eq!(find_data(&file, (1 << 20) + 5..(1 << 20) + 6), (1 << 20) + 5..(1 << 20) + 6);
        assert_eq!(find_data(&file, 5..5), 5..5);
        assert_eq!(find_data(&file, 8 << 20..9 << 20), 8 << 20..9 << 20);
    }
}

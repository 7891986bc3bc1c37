//! Computes CRC-32s of files without reading the holes of sparse files, which consist of zeros.
use super::sparse::find_data;
use crc32fast::Hasher;
use std::fs::File;
use std::io;
use std::ops::Range;

/// 4 KiB of zeros, from whose CRC-32 the checksums of longer sequences of zeros are derived, such
/// as of the holes of sparse files.
const ZERO_BLOCK: [u8; 4096] = [0; 4096];

/// Computes the CRC-32 of two concatenated byte sequences from their CRC-32s. `second_bytes` is the
/// length of the second sequence in bytes.
pub(crate) fn combine_crcs(first: u32, second: u32, second_bytes: u64) -> u32 {
    let mut hasher = Hasher::new_with_initial(first);
    hasher.combine(&Hasher::new_with_initial_len(second, second_bytes));
    hasher.finalize()
}

/// Computes the CRC-32 of a sequence of `bytes` zero bytes. The time grows with the logarithm of
/// `bytes`.
fn compute_crc_of_zeros(bytes: u64) -> u32 {
    let unit = ZERO_BLOCK.len() as u64;
    let mut crc = crc32fast::hash(&ZERO_BLOCK[..(bytes % unit) as usize]);
    let (mut power, mut power_bytes, mut left) = (crc32fast::hash(&ZERO_BLOCK), unit, bytes / unit);
    while left > 0 {
        if left % 2 == 1 {
            crc = combine_crcs(crc, power, power_bytes);
        }
        left /= 2;
        if left > 0 {
            power = combine_crcs(power, power, power_bytes);
            power_bytes *= 2;
        }
    }
    crc
}

/// Computes the CRC-32 of the byte range `bytes` of `file`, without reading the holes of a sparse
/// file. `hash_data(range, hasher)` must add the bytes of a range to the hasher, and is not called
/// for holes of the file, which consist of zeros.
///
/// # Errors
/// Fails with the first error that `hash_data` returns.
pub(crate) fn compute_file_crc<E>(
    file: &File,
    bytes: Range<u64>,
    mut hash_data: impl FnMut(Range<u64>, &mut Hasher) -> Result<(), E>,
) -> Result<u32, E> {
    let (mut crc, mut at) = (0, bytes.start);
    while at < bytes.end {
        let data = find_data(file, at..bytes.end);
        crc = combine_crcs(crc, compute_crc_of_zeros(data.start - at), data.start - at);
        let mut hasher = Hasher::new();
        hash_data(data.clone(), &mut hasher)?;
        crc = combine_crcs(crc, hasher.finalize(), data.end - data.start);
        at = data.end;
    }
    Ok(crc)
}

/// Reads the byte range `bytes` of `file`, in pieces of the size of `buffer`, and computes its
/// CRC-32.
pub(crate) fn read_file_crc(file: &File, bytes: Range<u64>, buffer: &mut [u8]) -> io::Result<u32> {
    use std::os::unix::fs::FileExt;
    compute_file_crc(file, bytes, |data, hasher| {
        let mut at = data.start;
        while at < data.end {
            let len = (data.end - at).min(buffer.len() as u64) as usize;
            file.read_exact_at(&mut buffer[..len], at)?;
            hasher.update(&buffer[..len]);
            at += len as u64;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn zeros_have_the_crc_of_zeros() {
        for bytes in [0, 1, 4095, 4096, 4097, 1 << 20, (5 << 20) + 77] {
            assert_eq!(compute_crc_of_zeros(bytes), crc32fast::hash(&vec![0; bytes as usize]), "{bytes}");
        }
    }

    #[test]
    fn the_crc_of_a_sparse_file_needs_only_its_data() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("sparse");
        let file = std::fs::File::options().write(true).read(true).create(true).truncate(true).open(path);
        let file = file.expect("created");
        let (size, at) = (3 << 20, (1 << 20) + 5);
        file.set_len(size).expect("sparse");
        file.write_all_at(b"data", at).expect("written");
        let mut content = vec![0; size as usize];
        content[at as usize..at as usize + 4].copy_from_slice(b"data");
        let mut buffer = [0; 1000];
        for range in [0..size, 5..size - 5, at + 1..at + 3, at + 4..size, 7..7] {
            let expected = crc32fast::hash(&content[range.start as usize..range.end as usize]);
            assert_eq!(
                read_file_crc(&file, range.clone(), &mut buffer).expect("read"),
                expected,
                "{range:?}"
            );
        }
        // a file of a tebibyte takes no longer than its data
        file.set_len(1 << 40).expect("sparse");
        let begun = std::time::Instant::now();
        let crc = read_file_crc(&file, 0..1 << 40, &mut buffer).expect("read");
        let tail = compute_crc_of_zeros((1 << 40) - size);
        assert_eq!(crc, combine_crcs(crc32fast::hash(&content), tail, (1 << 40) - size));
        assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

//! Verifies the CRC-32 checksums of all files of another program's checkpoint, with several
//! threads.
//!
//! Threads take pieces of files from a queue, so that one large file is verified as fast as many
//! small ones. There is one thread more than CPU cores, so that the disk does not wait for the
//! computation.
use super::stored_files::{CrcSpan, StoredFile, StoredFiles, list_tensors_in_spans};
use super::tensor_part::ExternalTensor;
use crate::codec::disk::{OffsetReader, combine_crcs};
use crate::error::{Damage, Result};
use crate::parallel;
use std::ops::Range;

/// Number of bytes of a file that a thread verifies as one unit of work. A span that would have
/// more than [`PIECES_MAX`] pieces is split into larger pieces.
const PIECE_BYTES: u64 = 8 << 20;
/// The largest number of pieces into which one byte range of a file is divided to compute the
/// range's CRC-32 with several threads. Longer ranges get larger pieces, so that a sparse file,
/// which may claim any size, cannot make the list of pieces long.
const PIECES_MAX: u64 = 1 << 20;
/// Limit on the number of threads that verify checksums. More threads would only wait for the disk.
const THREADS_MAX: usize = 16;
/// The smallest number of bytes per thread for which checksums are verified by more than one
/// thread.
const THREAD_MIN_BYTES: u64 = 1 << 20;

/// A piece of a byte range of a file, whose CRC-32 one thread computes before the CRC-32s of all
/// pieces are combined.
struct SpanPiece {
    /// Index of the file in [`StoredFiles`].
    file: usize,
    /// Index, in the file, of the span (byte range with a CRC-32) to which the piece belongs.
    span: usize,
    /// Range of the piece's bytes in the file.
    bytes: Range<u64>,
}

/// Divides a byte range of a file into pieces of [`PIECE_BYTES`] bytes, or into at most
/// [`PIECES_MAX`] larger pieces.
fn split_into_pieces(file: usize, span: usize, bytes: Range<u64>) -> impl Iterator<Item = SpanPiece> {
    let end = bytes.end;
    let size = PIECE_BYTES.max((end - bytes.start).div_ceil(PIECES_MAX));
    let piece = move |at: u64| SpanPiece { file, span, bytes: at..end.min(at.saturating_add(size)) };
    bytes.step_by(size as usize).map(piece)
}

/// Compares the CRC-32 of each byte range of the checkpoint's files with the CRC-32 that the file
/// stores, except in files for which `skip` returns true. Returns the number of verified bytes, the
/// number of spans, and a [`Damage`] for each span whose CRC-32 is wrong. A damage names the
/// tensors of `entries` in its span.
///
/// # Errors
/// Fails if a file cannot be read. A wrong CRC-32 is damage, not an error.
pub(crate) fn verify_all_spans(
    store: &StoredFiles,
    entries: &[ExternalTensor],
    skip: impl Fn(&StoredFile) -> bool,
) -> Result<(u64, u64, Vec<Damage>)> {
    let skipped: Vec<bool> = store.files.iter().map(skip).collect();
    let spans: Vec<(usize, usize, &CrcSpan)> = list_spans(store).filter(|(f, ..)| !skipped[*f]).collect();
    let pieces: Vec<SpanPiece> =
        spans.iter().flat_map(|&(f, s, span)| split_into_pieces(f, s, span.bytes.clone())).collect();
    let crcs = compute_crcs(store, &pieces)?;
    let mut read = pieces.iter().zip(crcs).peekable();
    let (mut bytes, mut damaged) = (0u64, Vec::new());
    for &(f, s, span) in &spans {
        let mut crc_of_span = 0;
        while let Some((piece, crc)) = read.next_if(|(p, _)| (p.file, p.span) == (f, s)) {
            crc_of_span = combine_crcs(crc_of_span, crc, piece.bytes.end - piece.bytes.start);
        }
        bytes = span.bytes.end.saturating_sub(span.bytes.start).saturating_add(bytes);
        if span.crc.is_some_and(|expected| expected != crc_of_span) {
            damaged.push((f, s));
        }
    }
    let mut tensors = list_tensors_in_spans(&damaged, entries);
    let damage = |span| store.make_crc_mismatch_damage(span, tensors.remove(&span).unwrap_or_default());
    Ok((bytes, spans.len() as u64, damaged.into_iter().map(damage).collect()))
}

/// Verifies the CRC-32 of each byte range (span) of which some bytes were already read or, with
/// `every_span`, of all ranges. Reads only the bytes that were not read before, and marks the spans
/// as verified.
///
/// # Errors
/// Fails at the first span whose content does not match its CRC-32, with an error that names the
/// tensors of `entries` in the span. Also fails if a file cannot be read.
pub(crate) fn verify_read_spans(
    store: &StoredFiles,
    every_span: bool,
    entries: &[ExternalTensor],
) -> Result<()> {
    let is_due = |s: &CrcSpan| !s.is_verified() && (every_span || !s.partial_crcs.is_empty());
    let due: Vec<(usize, usize, &CrcSpan)> = list_spans(store).filter(|(_, _, s)| is_due(s)).collect();
    let gaps = |&(f, s, span): &(usize, usize, &CrcSpan)| {
        let gaps = span.partial_crcs.find_gaps(span.bytes.clone());
        gaps.into_iter().flat_map(move |gap| split_into_pieces(f, s, gap)).collect::<Vec<_>>()
    };
    let left: Vec<SpanPiece> = due.iter().flat_map(gaps).collect();
    for (piece, crc) in left.iter().zip(compute_crcs(store, &left)?) {
        store.files[piece.file].spans[piece.span].partial_crcs.add_crc(piece.bytes.clone(), crc);
    }
    for (f, s, span) in due {
        if span.partial_crcs.whole_crc(span.bytes.clone()) != span.crc {
            return Err(store.crc_mismatch_error((f, s), entries));
        }
        span.mark_verified();
    }
    Ok(())
}

/// Iterates over the byte ranges (spans) with tensors in all files of the checkpoint, each with the
/// indices of its file and of the range. Each item is the file's index in `store`, the span's index
/// in the file, and the span.
fn list_spans(store: &StoredFiles) -> impl Iterator<Item = (usize, usize, &CrcSpan)> {
    let files = store.files.iter().enumerate();
    files.flat_map(|(f, file)| file.spans.iter().enumerate().map(move |(s, span)| (f, s, span)))
}

/// Computes the CRC-32 of each of `pieces` (byte ranges of files) with several threads. Returns
/// them in the same order.
///
/// # Errors
/// Fails with the error of the first piece in the list that cannot be read.
fn compute_crcs<'a>(store: &'a StoredFiles, pieces: &[SpanPiece]) -> Result<Vec<u32>> {
    let bytes = pieces.iter().fold(0u64, |sum, p| sum.saturating_add(p.bytes.end - p.bytes.start));
    // each thread keeps the file of its previous piece open
    let no_file = || None::<(usize, OffsetReader<'a>)>;
    let compute = |open: &mut Option<(usize, OffsetReader<'a>)>, i: usize| {
        let (piece, file) = (&pieces[i], &store.files[pieces[i].file]);
        let opened = match open.take().filter(|(index, _)| *index == piece.file) {
            Some(opened) => opened,
            None => (piece.file, file.open(&store.read_buffers)?),
        };
        let (_, handle) = open.insert(opened);
        file.compute_crc(handle, piece.bytes.clone())
    };
    parallel::map_indices(choose_thread_count(bytes), pieces.len(), no_file, compute).into_iter().collect()
}

/// Returns how many threads compute checksums of `bytes` bytes in total, from the number of CPU
/// cores and [`THREAD_MIN_BYTES`]. The number is that of the CPU cores plus 1, but at most
/// [`THREADS_MAX`], and smaller if a thread would get fewer than [`THREAD_MIN_BYTES`].
fn choose_thread_count(bytes: u64) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (cores + 1).min(THREADS_MAX).min((bytes / THREAD_MIN_BYTES) as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::disk::Directory;
    use crate::codec::zip::ZipMember;
    use crate::error::DamageReason;
    use std::sync::Arc;

    /// Writes `bytes` to a file in `dir` and creates a store with this file. The spans of the file
    /// are the byte ranges `spans` with their CRC-32s.
    fn make_store(dir: &std::path::Path, bytes: &[u8], spans: &[Range<u64>]) -> StoredFiles {
        std::fs::write(dir.join("file"), bytes).expect("write");
        let directory = Arc::new(Directory::open(dir).expect("there"));
        let member = |r: &Range<u64>| {
            let crc = crc32fast::hash(&bytes[r.start as usize..r.end as usize]);
            ZipMember { name: format!("{r:?}"), data: r.clone(), crc: Some(crc) }
        };
        let mut store = StoredFiles::default();
        store.add_file(&directory, "file", bytes.len() as u64, spans.iter().map(member).collect());
        store
    }

    /// Checks that a flipped bit at a boundary between pieces or spans is reported for exactly the
    /// span that contains it. Also truncates the file.
    #[test]
    fn damage_in_a_large_file_is_found_in_the_right_span() {
        let dir = tempfile::tempdir().expect("a directory");
        let p = PIECE_BYTES as usize;
        let mut bytes: Vec<u8> =
            (0..5 * p + 77).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let end = bytes.len() as u64;
        let spans = [
            3..3,
            3..10,
            10..3 * PIECE_BYTES + 11,
            3 * PIECE_BYTES + 11..3 * PIECE_BYTES + 12,
            4 * PIECE_BYTES..end,
        ];
        let total: u64 = spans.iter().map(|r| r.end - r.start).sum();
        for (at, span) in [(9, 1), (10 + p - 1, 2), (10 + p, 2), (3 * p + 11, 3), (5 * p + 76, 4)] {
            let store = make_store(dir.path(), &bytes, &spans);
            bytes[at] ^= 4;
            std::fs::write(dir.path().join("file"), &bytes).expect("write");
            bytes[at] ^= 4;
            let (_, _, damaged) = verify_all_spans(&store, &[], |_| false).expect("readable");
            let named =
                |d: &Damage| d.reason == DamageReason::CrcMismatch { member: format!("{:?}", spans[span]) };
            assert_eq!(damaged.iter().map(named).collect::<Vec<_>>(), [true], "byte {at}: {damaged:?}");
            assert!(verify_read_spans(&store, true, &[]).is_err(), "byte {at}");
        }
        let store = make_store(dir.path(), &bytes, &spans);
        assert_eq!(verify_all_spans(&store, &[], |_| false).expect("readable"), (total, 5, Vec::new()));
        assert!(verify_read_spans(&store, true, &[]).is_ok());
        std::fs::write(dir.path().join("file"), &bytes[..p]).expect("write");
        let error = verify_all_spans(&store, &[], |_| false).expect_err("shorter");
        assert_eq!(error.code(), diagnostic::codes::checkpoint::CHECKPOINT_FILE_TRUNCATED);
    }
}

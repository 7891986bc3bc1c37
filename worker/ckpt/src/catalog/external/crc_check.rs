//! Verifies the CRC-32 of every byte of an external checkpoint with several threads.
//!
//! Threads take pieces of files from a queue, so that one large file is verified as fast as many
//! small ones. There is one thread more than CPU cores, so that the disk does not wait for the
//! computation.
use super::partial_crcs::combine_crcs;
use super::stored_files::{CrcSpan, StoredFile, StoredFiles};
use super::tensor_part::TensorPart;
use crate::codec::disk::OffsetReader;
use crate::error::{CkptError, Damage, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes per piece, the unit of work of a thread.
const PIECE_BYTES: u64 = 8 << 20;
/// Limit on the number of threads. More threads would only wait for the disk.
const THREADS_MAX: usize = 16;
/// Minimum bytes per thread. Starting a thread for fewer bytes costs more than it saves.
const THREAD_MIN_BYTES: u64 = 1 << 20;

/// A piece of a [`CrcSpan`], which one thread reads.
struct SpanPiece {
    /// Index of the file in the store.
    file: usize,
    /// Index of the span in the file.
    span: usize,
    /// Byte range of the piece in the file.
    bytes: Range<u64>,
}

/// Splits the byte range `bytes` of a span into pieces of at most [`PIECE_BYTES`].
fn split_into_pieces(file: usize, span: usize, bytes: Range<u64>) -> impl Iterator<Item = SpanPiece> {
    let end = bytes.end;
    let piece = move |at: u64| SpanPiece { file, span, bytes: at..end.min(at.saturating_add(PIECE_BYTES)) };
    bytes.step_by(PIECE_BYTES as usize).map(piece)
}

impl StoredFiles {
    /// Verifies the CRC-32 of every span of every file. Returns the number of verified bytes, the
    /// number of spans, and one damage per wrong span. `tensors_with(predicate)` must name the
    /// tensors with a part that satisfies the predicate.
    ///
    /// # Errors
    /// Fails if a file cannot be read. A wrong CRC-32 is damage, not an error.
    pub(crate) fn verify_all_spans(
        &self,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<(u64, u64, Vec<Damage>)> {
        let spans: Vec<(usize, usize, &CrcSpan)> = self.spans().collect();
        let pieces: Vec<SpanPiece> =
            spans.iter().flat_map(|&(f, s, span)| split_into_pieces(f, s, span.bytes.clone())).collect();
        let crcs = self.compute_crcs(&pieces)?;
        let mut read = pieces.iter().zip(crcs).peekable();
        let (mut bytes, mut damaged) = (0, Vec::new());
        for &(f, s, span) in &spans {
            let mut crc_of_span = 0;
            while let Some((piece, crc)) = read.next_if(|(p, _)| (p.file, p.span) == (f, s)) {
                crc_of_span = combine_crcs(crc_of_span, crc, piece.bytes.end - piece.bytes.start);
            }
            bytes += span.bytes.end - span.bytes.start;
            if span.crc.is_some_and(|expected| expected != crc_of_span) {
                damaged
                    .push(self.files[f].crc_damage(span, tensors_with(&|p: &TensorPart| p.is_in_span(f, s))));
            }
        }
        Ok((bytes, spans.len() as u64, damaged))
    }

    /// Verifies the spans from which bytes were read without verification or, with `every_span`,
    /// all unverified spans. Of each of these spans, reads only the bytes that were not read
    /// before, and marks the span as verified. `tensors_with(predicate)` must name the tensors with
    /// a part that satisfies the predicate.
    ///
    /// # Errors
    /// Fails at the first span whose content does not match its CRC-32, or if a file cannot be
    /// read.
    pub(crate) fn verify_read_spans(
        &self,
        every_span: bool,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        let is_due = |s: &CrcSpan| !s.is_verified() && (every_span || !s.partial_crcs.is_empty());
        let due: Vec<(usize, usize, &CrcSpan)> = self.spans().filter(|(_, _, s)| is_due(s)).collect();
        let gaps = |&(f, s, span): &(usize, usize, &CrcSpan)| {
            let gaps = span.partial_crcs.find_gaps(span.bytes.clone());
            gaps.into_iter().flat_map(move |gap| split_into_pieces(f, s, gap)).collect::<Vec<_>>()
        };
        let left: Vec<SpanPiece> = due.iter().flat_map(gaps).collect();
        for (piece, crc) in left.iter().zip(self.compute_crcs(&left)?) {
            self.files[piece.file].spans[piece.span].partial_crcs.add_crc(piece.bytes.clone(), crc);
        }
        for (f, s, span) in due {
            if span.partial_crcs.whole_crc(span.bytes.clone()) != span.crc {
                let file = &self.files[f];
                let damage = file.crc_damage(span, tensors_with(&|p: &TensorPart| p.is_in_span(f, s)));
                return Err(CkptError::Damaged {
                    path: file.directory().path().to_owned(),
                    damage: Box::new(damage),
                });
            }
            span.mark_verified();
        }
        Ok(())
    }

    /// Iterates over the spans of all files. Each item is the file's index in the store, the span's
    /// index in the file, and the span.
    fn spans(&self) -> impl Iterator<Item = (usize, usize, &CrcSpan)> {
        let span_count = |(f, file): (usize, &'_ StoredFile)| (f, file.spans.len());
        let counts: Vec<(usize, usize)> = self.files.iter().enumerate().map(span_count).collect();
        let indices = counts.into_iter().flat_map(|(f, n)| (0..n).map(move |s| (f, s)));
        indices.map(|(f, s)| (f, s, &self.files[f].spans[s]))
    }

    /// Computes the CRC-32 of each piece with several threads. Returns the CRC-32s in the order of
    /// `pieces`.
    ///
    /// # Errors
    /// Fails with the error of the first piece in the list that cannot be read.
    fn compute_crcs(&self, pieces: &[SpanPiece]) -> Result<Vec<u32>> {
        let bytes: u64 = pieces.iter().map(|p| p.bytes.end - p.bytes.start).sum();
        let threads = thread_count(bytes).min(pieces.len());
        let next = AtomicUsize::new(0);
        let work = || self.compute_queued_crcs(pieces, &next);
        let mut done = match threads {
            0 | 1 => work(),
            _ => std::thread::scope(|scope| {
                let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
                let mut results = work();
                for other in others {
                    results.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                }
                results
            }),
        };
        done.sort_by_key(|(i, _)| *i);
        done.into_iter().map(|(_, crc)| crc).collect()
    }

    /// Takes the index of the next piece from `next` and computes the CRC-32 of the piece, until no
    /// piece is left or a piece cannot be read. Returns each result with the index of its piece.
    fn compute_queued_crcs(&self, pieces: &[SpanPiece], next: &AtomicUsize) -> Vec<(usize, Result<u32>)> {
        let mut done = Vec::new();
        let mut open: Option<(usize, OffsetReader<'_>)> = None;
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(i) else { return done };
            let crc = self.compute_piece_crc(piece, &mut open);
            if crc.is_err() {
                // ends the queue: threads have all earlier pieces, and later ones are not needed
                next.store(pieces.len(), Ordering::Relaxed);
            }
            done.push((i, crc));
        }
    }

    /// Computes the CRC-32 of a piece. `open` has the index and the reader of the previous piece's
    /// file. They are replaced if `piece` is in another file.
    fn compute_piece_crc<'a>(
        &'a self,
        piece: &SpanPiece,
        open: &mut Option<(usize, OffsetReader<'a>)>,
    ) -> Result<u32> {
        let file = &self.files[piece.file];
        let opened = match open.take().filter(|(index, _)| *index == piece.file) {
            Some(opened) => opened,
            None => (piece.file, file.open(&self.read_buffers)?),
        };
        let (_, handle) = open.insert(opened);
        file.compute_crc(handle, piece.bytes.clone())
    }
}

/// Returns the number of threads that verify `bytes` bytes. This is the number of CPU cores plus 1,
/// at most [`THREADS_MAX`], and less if a thread would get fewer than [`THREAD_MIN_BYTES`].
fn thread_count(bytes: u64) -> usize {
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

    /// Writes `bytes` to a file in `dir` and makes a store with this file. Its spans are the byte
    /// ranges `spans` with their CRC-32s.
    fn make_store(dir: &std::path::Path, bytes: &[u8], spans: &[Range<u64>]) -> StoredFiles {
        std::fs::write(dir.join("file"), bytes).expect("write");
        let directory = Arc::new(Directory::open(dir).expect("there"));
        let mut file = StoredFile::new(directory, "file".into(), bytes.len() as u64);
        let member = |r: &Range<u64>| {
            let crc = crc32fast::hash(&bytes[r.start as usize..r.end as usize]);
            ZipMember { name: format!("{r:?}"), data: r.clone(), crc: Some(crc) }
        };
        file.add_spans(spans.iter().map(member).collect());
        StoredFiles { files: vec![file], ..StoredFiles::default() }
    }

    /// Flips a bit on either side of the boundaries between pieces and between spans, and checks
    /// that exactly the span with the bit is reported. Also truncates the file.
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
            let (_, _, damaged) = store.verify_all_spans(|_| Vec::new()).expect("readable");
            let named =
                |d: &Damage| d.reason == DamageReason::CrcMismatch { member: format!("{:?}", spans[span]) };
            assert_eq!(damaged.iter().map(named).collect::<Vec<_>>(), [true], "byte {at}: {damaged:?}");
            assert!(store.verify_read_spans(true, |_| Vec::new()).is_err(), "byte {at}");
        }
        let store = make_store(dir.path(), &bytes, &spans);
        assert_eq!(store.verify_all_spans(|_| Vec::new()).expect("readable"), (total, 5, Vec::new()));
        assert!(store.verify_read_spans(true, |_| Vec::new()).is_ok());
        std::fs::write(dir.path().join("file"), &bytes[..p]).expect("write");
        let error = store.verify_all_spans(|_| Vec::new()).expect_err("shorter");
        assert_eq!(error.code(), diagnostic::codes::checkpoint::CHECKPOINT_FILE_TRUNCATED);
    }
}

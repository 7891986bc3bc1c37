//! Verifies the CRC-32 of every byte of an external checkpoint with several threads.
//!
//! Threads take pieces of files from a queue, so that one large file is verified as fast as many
//! small ones. There is one thread more than cores, so that the disk does not wait for the
//! computation.
use super::crc_combine::combine;
use super::store::{CrcSpan, Store, StoredFile, TensorPart};
use crate::disk::ReadAt;
use crate::error::{CkptError, Damage, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes per piece.
const PIECE: u64 = 8 << 20;
/// Limit on the threads; more would only wait for the disk.
const THREADS_MAX: usize = 16;
/// Minimum bytes per thread; with less, starting a thread costs more than it saves.
const PER_THREAD: u64 = 1 << 20;

/// Consecutive bytes of a span.
struct Piece {
    file: usize,
    span: usize,
    bytes: Range<u64>,
}

/// Splits bytes of a span into pieces.
fn split(file: usize, span: usize, bytes: Range<u64>) -> impl Iterator<Item = Piece> {
    let end = bytes.end;
    let piece = move |at: u64| Piece { file, span, bytes: at..end.min(at.saturating_add(PIECE)) };
    bytes.step_by(PIECE as usize).map(piece)
}

impl Store {
    /// Verifies every span of every file. Returns the bytes, the number of spans and the damage.
    /// `tensors_with(predicate)` names the tensors with a matching part.
    pub(crate) fn verify_all(
        &self,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<(u64, u64, Vec<Damage>)> {
        let spans: Vec<(usize, usize, &CrcSpan)> = self.spans().collect();
        let pieces: Vec<Piece> =
            spans.iter().flat_map(|&(f, s, span)| split(f, s, span.bytes.clone())).collect();
        let crcs = self.crcs(&pieces)?;
        let mut read = pieces.iter().zip(crcs).peekable();
        let (mut bytes, mut damaged) = (0, Vec::new());
        for &(f, s, span) in &spans {
            let mut crc_of_span = 0;
            while let Some((piece, crc)) = read.next_if(|(p, _)| (p.file, p.span) == (f, s)) {
                crc_of_span = combine(crc_of_span, crc, piece.bytes.end - piece.bytes.start);
            }
            bytes += span.bytes.end - span.bytes.start;
            if span.crc.is_some_and(|expected| expected != crc_of_span) {
                damaged.push(self.files[f].crc_damage(span, tensors_with(&|p: &TensorPart| p.is_in(f, s))));
            }
        }
        Ok((bytes, spans.len() as u64, damaged))
    }

    /// Verifies the spans of which bytes were read without verification, or all spans with
    /// `every_span`. Reads the remaining bytes of these spans.
    pub(crate) fn verify_reads(
        &self,
        every_span: bool,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        let is_due = |s: &CrcSpan| !s.is_verified() && (every_span || !s.partial_crcs.is_empty());
        let due: Vec<(usize, usize, &CrcSpan)> = self.spans().filter(|(_, _, s)| is_due(s)).collect();
        let gaps = |&(f, s, span): &(usize, usize, &CrcSpan)| {
            let gaps = span.partial_crcs.gaps(span.bytes.clone());
            gaps.into_iter().flat_map(move |gap| split(f, s, gap)).collect::<Vec<_>>()
        };
        let left: Vec<Piece> = due.iter().flat_map(gaps).collect();
        for (piece, crc) in left.iter().zip(self.crcs(&left)?) {
            self.files[piece.file].spans[piece.span].partial_crcs.add(piece.bytes.clone(), crc);
        }
        for (f, s, span) in due {
            if span.partial_crcs.whole(span.bytes.clone()) != span.crc {
                let file = &self.files[f];
                let damage = file.crc_damage(span, tensors_with(&|p: &TensorPart| p.is_in(f, s)));
                return Err(CkptError::Damaged {
                    path: file.directory().path().to_owned(),
                    damage: Box::new(damage),
                });
            }
            span.set_verified();
        }
        Ok(())
    }

    /// All spans, with the indices of file and span.
    fn spans(&self) -> impl Iterator<Item = (usize, usize, &CrcSpan)> {
        let span_count = |(f, file): (usize, &'_ StoredFile)| (f, file.spans.len());
        let counts: Vec<(usize, usize)> = self.files.iter().enumerate().map(span_count).collect();
        let indices = counts.into_iter().flat_map(|(f, n)| (0..n).map(move |s| (f, s)));
        indices.map(|(f, s)| (f, s, &self.files[f].spans[s]))
    }

    /// Computes the CRC-32 of each piece. The error is that of the first piece that cannot be read.
    fn crcs(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let bytes: u64 = pieces.iter().map(|p| p.bytes.end - p.bytes.start).sum();
        let threads = threads(bytes).min(pieces.len());
        let next = AtomicUsize::new(0);
        let work = || self.run_worker(pieces, &next);
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

    /// Takes pieces from the queue until it is empty, or one cannot be read.
    fn run_worker(&self, pieces: &[Piece], next: &AtomicUsize) -> Vec<(usize, Result<u32>)> {
        let mut done = Vec::new();
        let mut open: Option<(usize, ReadAt<'_>)> = None;
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(i) else { return done };
            let crc = self.crc_of(piece, &mut open);
            if crc.is_err() {
                // other threads have the earlier pieces, and the later ones are not needed
                next.store(pieces.len(), Ordering::Relaxed);
            }
            done.push((i, crc));
        }
    }

    fn crc_of<'a>(&'a self, piece: &Piece, open: &mut Option<(usize, ReadAt<'a>)>) -> Result<u32> {
        let file = &self.files[piece.file];
        let opened = match open.take().filter(|(index, _)| *index == piece.file) {
            Some(opened) => opened,
            None => (piece.file, file.open(&self.scratch)?),
        };
        let (_, handle) = open.insert(opened);
        file.crc(handle, piece.bytes.clone())
    }
}

/// The number of threads that verify `bytes` bytes: one more than cores, but fewer for few bytes.
fn threads(bytes: u64) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (cores + 1).min(THREADS_MAX).min((bytes / PER_THREAD) as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Directory;
    use crate::error::DamageReason;
    use crate::formats::zip::Member;
    use std::sync::Arc;

    /// A store with one file and these spans.
    fn stored(dir: &std::path::Path, bytes: &[u8], spans: &[Range<u64>]) -> Store {
        std::fs::write(dir.join("file"), bytes).expect("write");
        let directory = Arc::new(Directory::open(dir).expect("there"));
        let mut file = StoredFile::new(directory, "file".into(), bytes.len() as u64);
        let member = |r: &Range<u64>| {
            let crc = crc32fast::hash(&bytes[r.start as usize..r.end as usize]);
            Member { name: format!("{r:?}"), data: r.clone(), crc: Some(crc) }
        };
        file.add(spans.iter().map(member).collect());
        Store { files: vec![file], ..Store::default() }
    }

    /// Damage on either side of a boundary between pieces is found in the right span.
    #[test]
    fn pieces_of_a_large_file_combine_to_its_crcs() {
        let dir = tempfile::tempdir().expect("a directory");
        let p = PIECE as usize;
        let mut bytes: Vec<u8> =
            (0..5 * p + 77).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let end = bytes.len() as u64;
        let spans = [3..3, 3..10, 10..3 * PIECE + 11, 3 * PIECE + 11..3 * PIECE + 12, 4 * PIECE..end];
        let total: u64 = spans.iter().map(|r| r.end - r.start).sum();
        for (at, span) in [(9, 1), (10 + p - 1, 2), (10 + p, 2), (3 * p + 11, 3), (5 * p + 76, 4)] {
            let store = stored(dir.path(), &bytes, &spans);
            bytes[at] ^= 4;
            std::fs::write(dir.path().join("file"), &bytes).expect("write");
            bytes[at] ^= 4;
            let (_, _, damaged) = store.verify_all(|_| Vec::new()).expect("readable");
            let named =
                |d: &Damage| d.reason == DamageReason::CrcMismatch { member: format!("{:?}", spans[span]) };
            assert_eq!(damaged.iter().map(named).collect::<Vec<_>>(), [true], "byte {at}: {damaged:?}");
            assert!(store.verify_reads(true, |_| Vec::new()).is_err(), "byte {at}");
        }
        let store = stored(dir.path(), &bytes, &spans);
        assert_eq!(store.verify_all(|_| Vec::new()).expect("readable"), (total, 5, Vec::new()));
        assert!(store.verify_reads(true, |_| Vec::new()).is_ok());
        std::fs::write(dir.path().join("file"), &bytes[..p]).expect("write");
        let error = store.verify_all(|_| Vec::new()).expect_err("shorter");
        assert_eq!(error.code(), diagnostic::codes::checkpoint::CHECKPOINT_FILE_TRUNCATED);
    }
}

//! Every byte of a checkpoint's files against their CRC-32: pieces of files, taken in turn by one thread more than there
//! are cores, so that one large file is checked as fast as many small ones and the disk never waits for a sum.
use super::store::{Part, Store, StoredFile, Stretch};
use super::sums::joined;
use crate::disk::ReadAt;
use crate::error::{CkptError, Damage, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that a thread takes at a time.
const PIECE: u64 = 8 << 20;
/// Most threads: more only wait for the disk.
const THREADS_MAX: usize = 16;
/// Below this many bytes for each, further threads cost more than they bring.
const PER_THREAD: u64 = 1 << 20;

/// Consecutive bytes of a stretch of a file.
struct Piece {
    file: usize,
    stretch: usize,
    bytes: Range<u64>,
}

/// Bytes of a stretch as pieces.
fn pieces(file: usize, stretch: usize, bytes: Range<u64>) -> impl Iterator<Item = Piece> {
    let end = bytes.end;
    let of = move |at: u64| Piece { file, stretch, bytes: at..end.min(at.saturating_add(PIECE)) };
    bytes.step_by(PIECE as usize).map(of)
}

impl Store {
    /// Reads and checks every stretch of every file: bytes, stretches and what is damaged. `holders(is it in the part?)`
    /// names the tensors with such a part.
    pub(crate) fn check(
        &self,
        holders: impl Fn(&dyn Fn(&Part) -> bool) -> Vec<String>,
    ) -> Result<(u64, u64, Vec<Damage>)> {
        let stretches: Vec<(usize, usize, &Stretch)> = self.stretches().collect();
        let all: Vec<Piece> =
            stretches.iter().flat_map(|&(f, s, stretch)| pieces(f, s, stretch.bytes.clone())).collect();
        let crcs = self.crcs(&all)?;
        let mut read = all.iter().zip(crcs).peekable();
        let (mut bytes, mut damaged) = (0, Vec::new());
        for &(f, s, stretch) in &stretches {
            let mut whole = 0;
            while let Some((piece, crc)) = read.next_if(|(p, _)| (p.file, p.stretch) == (f, s)) {
                whole = joined(whole, crc, piece.bytes.end - piece.bytes.start);
            }
            bytes += stretch.bytes.end - stretch.bytes.start;
            if stretch.crc.is_some_and(|expected| expected != whole) {
                damaged.push(self.files[f].flaw(stretch, holders(&|p: &Part| p.is_in(f, s))));
            }
        }
        Ok((bytes, stretches.len() as u64, damaged))
    }

    /// Checks every stretch of which something was read unchecked, or with `all` every one: what was not read is read now.
    pub(crate) fn settle(
        &self,
        all: bool,
        holders: impl Fn(&dyn Fn(&Part) -> bool) -> Vec<String>,
    ) -> Result<()> {
        let is_due = |s: &Stretch| !s.is_sound() && (all || !s.sums.is_empty());
        let due: Vec<(usize, usize, &Stretch)> = self.stretches().filter(|(_, _, s)| is_due(s)).collect();
        let gaps = |&(f, s, stretch): &(usize, usize, &Stretch)| {
            let gaps = stretch.sums.gaps(stretch.bytes.clone());
            gaps.into_iter().flat_map(move |gap| pieces(f, s, gap)).collect::<Vec<_>>()
        };
        let left: Vec<Piece> = due.iter().flat_map(gaps).collect();
        for (piece, crc) in left.iter().zip(self.crcs(&left)?) {
            self.files[piece.file].stretches[piece.stretch].sums.add(piece.bytes.clone(), crc);
        }
        for (f, s, stretch) in due {
            if stretch.sums.whole(stretch.bytes.clone()) != stretch.crc {
                let file = &self.files[f];
                let damage = file.flaw(stretch, holders(&|p: &Part| p.is_in(f, s)));
                return Err(CkptError::Damaged { path: file.folder().path().to_owned(), damage });
            }
            stretch.set_sound();
        }
        Ok(())
    }

    /// All stretches with the indices of file and stretch.
    fn stretches(&self) -> impl Iterator<Item = (usize, usize, &Stretch)> {
        let of = |(f, file): (usize, &'_ StoredFile)| (f, file.stretches.len());
        let counts: Vec<(usize, usize)> = self.files.iter().enumerate().map(of).collect();
        let all = counts.into_iter().flat_map(|(f, n)| (0..n).map(move |s| (f, s)));
        all.map(|(f, s)| (f, s, &self.files[f].stretches[s]))
    }

    /// The CRC of each piece. The error is that of the first piece that can't be read.
    fn crcs(&self, pieces: &[Piece]) -> Result<Vec<u32>> {
        let bytes: u64 = pieces.iter().map(|p| p.bytes.end - p.bytes.start).sum();
        let threads = threads(bytes).min(pieces.len());
        let next = AtomicUsize::new(0);
        let work = || self.crcs_in_turn(pieces, &next);
        let mut done = match threads {
            0 | 1 => work(),
            _ => std::thread::scope(|scope| {
                let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
                let mut all = work();
                for other in others {
                    all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                }
                all
            }),
        };
        done.sort_by_key(|(i, _)| *i);
        done.into_iter().map(|(_, crc)| crc).collect()
    }

    /// Takes pieces until none is left, or one can't be read.
    fn crcs_in_turn(&self, pieces: &[Piece], next: &AtomicUsize) -> Vec<(usize, Result<u32>)> {
        let mut done = Vec::new();
        let mut open: Option<(usize, ReadAt<'_>)> = None;
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(i) else { return done };
            let crc = self.crc_of(piece, &mut open);
            if crc.is_err() {
                // the others have what is before it, and need nothing after it
                next.store(pieces.len(), Ordering::Relaxed);
            }
            done.push((i, crc));
        }
    }

    fn crc_of<'a>(&'a self, piece: &Piece, open: &mut Option<(usize, ReadAt<'a>)>) -> Result<u32> {
        let file = &self.files[piece.file];
        let opened = match open.take().filter(|(of, _)| *of == piece.file) {
            Some(opened) => opened,
            None => (piece.file, file.open(&self.scratch)?),
        };
        let (_, handle) = open.insert(opened);
        file.crc(handle, piece.bytes.clone())
    }
}

/// Threads that are worth it for this many bytes.
fn threads(bytes: u64) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (cores + 1).min(THREADS_MAX).min((bytes / PER_THREAD) as usize + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Folder;
    use crate::formats::zip::Member;
    use std::sync::Arc;

    /// Stretches of one file, with the CRCs that they have.
    fn stored(dir: &std::path::Path, bytes: &[u8], stretches: &[Range<u64>]) -> Store {
        std::fs::write(dir.join("file"), bytes).expect("written");
        let folder = Arc::new(Folder::open(dir).expect("there"));
        let mut file = StoredFile::new(folder, "file".into(), bytes.len() as u64);
        let member = |r: &Range<u64>| {
            let crc = crc32fast::hash(&bytes[r.start as usize..r.end as usize]);
            Member { name: format!("{r:?}"), data: r.clone(), crc: Some(crc) }
        };
        file.add(stretches.iter().map(member).collect());
        Store { files: vec![file], ..Store::default() }
    }

    /// Every thread takes pieces of one file; damage on either side of where pieces meet is found in its stretch.
    #[test]
    fn pieces_of_a_large_file_make_its_sums() {
        let dir = tempfile::tempdir().expect("a directory");
        let p = PIECE as usize;
        let mut bytes: Vec<u8> =
            (0..5 * p + 77).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let end = bytes.len() as u64;
        let stretches = [3..3, 3..10, 10..3 * PIECE + 11, 3 * PIECE + 11..3 * PIECE + 12, 4 * PIECE..end];
        let total: u64 = stretches.iter().map(|r| r.end - r.start).sum();
        for (at, stretch) in [(9, 1), (10 + p - 1, 2), (10 + p, 2), (3 * p + 11, 3), (5 * p + 76, 4)] {
            let store = stored(dir.path(), &bytes, &stretches);
            bytes[at] ^= 4;
            std::fs::write(dir.path().join("file"), &bytes).expect("written");
            bytes[at] ^= 4;
            let (_, _, damaged) = store.check(|_| Vec::new()).expect("readable");
            let named = |d: &Damage| d.why.contains(&format!("{:?}", stretches[stretch]));
            assert_eq!(damaged.iter().map(named).collect::<Vec<_>>(), [true], "byte {at}: {damaged:?}");
            assert!(store.settle(true, |_| Vec::new()).is_err(), "byte {at}");
        }
        let store = stored(dir.path(), &bytes, &stretches);
        assert_eq!(store.check(|_| Vec::new()).expect("readable"), (total, 5, Vec::new()));
        assert!(store.settle(true, |_| Vec::new()).is_ok());
        std::fs::write(dir.path().join("file"), &bytes[..p]).expect("written");
        assert!(store.check(|_| Vec::new()).expect_err("shorter").to_string().contains("bytes now"));
    }
}

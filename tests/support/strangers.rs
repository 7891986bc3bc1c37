//! Bytes of strangers for the tests of several crates: a corpus, changed in every way a seed gives, and an allocator that counts
//! what reading them takes.
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts what is in use.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting has no effect on memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(used, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Memory from now on.
pub(crate) struct Memory(usize);

impl Memory {
    pub(crate) fn from_now() -> Memory {
        let used = USED.load(Ordering::Relaxed);
        PEAK.store(used, Ordering::Relaxed);
        Memory(used)
    }

    /// Bytes more than at the beginning, at the worst moment since.
    pub(crate) fn peak(&self) -> usize {
        PEAK.load(Ordering::Relaxed).saturating_sub(self.0)
    }
}

/// Names and contents of a folder's files, but for its README.
pub(crate) fn corpus(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(dir)
        .expect("listable")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ending| ending != "md"))
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read(&path).expect("readable"))
        })
        .collect();
    files.sort();
    files
}

/// Numbers that a seed gives, the same on every run.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

/// A few changes: flips, lengths as large as can be, pieces cut out or doubled, `signs` that mean something to a parser, and
/// what `other` gives.
pub(crate) fn changed(
    sound: &[u8],
    numbers: &mut Numbers,
    signs: &[u8],
    other: fn(&mut Numbers) -> u8,
) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    for _ in 0..=numbers.next(3) {
        let at = numbers.next(bytes.len());
        let len = numbers.next(32).min(bytes.len() - at);
        match numbers.next(7) {
            0 => bytes[at..].iter_mut().take(1).for_each(|b| *b ^= 1 << (len % 8)),
            1 => bytes[at..at + len.min(8)].fill(0xff),
            2 => drop(bytes.drain(at..at + len)),
            3 => {
                let piece = bytes[at..at + len].to_vec();
                let to = numbers.next(bytes.len());
                bytes.splice(to..to, piece);
            }
            4 => bytes.truncate(at),
            5 => bytes[at..].iter_mut().take(1).for_each(|b| *b = signs[numbers.next(signs.len())]),
            _ => bytes[at..at + len.min(8)].iter_mut().for_each(|b| *b = other(numbers)),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

//! Generates untrusted input for the tests of several crates, by randomly changing the files of a
//! corpus. An allocator counts the memory that parsing takes.
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An allocator that counts the bytes in use.
struct CountingAllocator;

/// The number of bytes that are currently allocated.
static USED_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The largest value of [`USED_BYTES`] since the last [`MemoryMeter::start`].
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting does not affect memory.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED_BYTES.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK_BYTES.fetch_max(used, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        USED_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Measures how much the memory in use grows after [`MemoryMeter::start`].
pub(crate) struct MemoryMeter(usize);

impl MemoryMeter {
    /// Starts to measure how much the memory in use grows. Only one measurement at a time is valid,
    /// because the peak is global.
    pub(crate) fn start() -> MemoryMeter {
        let used = USED_BYTES.load(Ordering::Relaxed);
        PEAK_BYTES.store(used, Ordering::Relaxed);
        MemoryMeter(used)
    }

    /// Returns the largest number of bytes in use since the start, minus those in use at the start.
    pub(crate) fn peak(&self) -> usize {
        PEAK_BYTES.load(Ordering::Relaxed).saturating_sub(self.0)
    }
}

/// Reads the names and contents of the files in a directory, sorted by name. Skips Markdown files
/// and files without an extension.
pub(crate) fn read_corpus(dir: &Path) -> Vec<(String, Vec<u8>)> {
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

/// A generator of pseudo-random numbers, which depend only on its seed.
pub(crate) struct SeededNumbers(pub(crate) u64);

impl SeededNumbers {
    /// Returns the next number, which is less than `below`. Returns 0 if `below` is 0.
    pub(crate) fn next_below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

/// Returns a copy of `valid` with one to four random mutations.
///
/// A mutation flips a bit, overwrites up to 8 bytes by 0xff, removes or repeats a range of bytes,
/// truncates the copy, overwrites a byte by one of `tokens`, or overwrites up to 8 bytes by bytes
/// that `other` generates. `numbers` determines the mutations.
pub(crate) fn mutate(
    valid: &[u8],
    numbers: &mut SeededNumbers,
    tokens: &[u8],
    other: fn(&mut SeededNumbers) -> u8,
) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..=numbers.next_below(3) {
        let at = numbers.next_below(bytes.len());
        let len = numbers.next_below(32).min(bytes.len() - at);
        match numbers.next_below(7) {
            0 => bytes[at..].iter_mut().take(1).for_each(|b| *b ^= 1 << (len % 8)),
            1 => bytes[at..at + len.min(8)].fill(0xff),
            2 => drop(bytes.drain(at..at + len)),
            3 => {
                let piece = bytes[at..at + len].to_vec();
                let to = numbers.next_below(bytes.len());
                bytes.splice(to..to, piece);
            }
            4 => bytes.truncate(at),
            5 => bytes[at..].iter_mut().take(1).for_each(|b| *b = tokens[numbers.next_below(tokens.len())]),
            _ => bytes[at..at + len.min(8)].iter_mut().for_each(|b| *b = other(numbers)),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

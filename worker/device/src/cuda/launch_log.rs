//! Writes the latest GPU calls of this process to a file (the launch log) that another process can
//! read after a crash or hang.
//!
//! The log is a ring of entries in memory that is mapped from the file. Enqueuing a call writes an
//! entry of a few words, and nothing is formatted before the log is read.
use super::launch::{KernelArg, LaunchConfig};
use memmap2::MmapRaw;
use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    ptr,
    sync::{
        OnceLock,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, Release},
        },
    },
};

/// Number of GPU calls in the launch log (a file with a process's latest GPU calls); a new call
/// overwrites the oldest one.
const ENTRY_COUNT: usize = 64;
/// Number of 64-bit words per GPU call in the launch log, a file with a process's latest GPU calls.
const ENTRY_WORDS: usize = 64;
/// Number of 64-bit words for the name of a GPU call in the launch log, a file with a process's
/// latest GPU calls.
const NAME_WORDS: usize = 8;
/// Index of the first argument among the 64-bit words that describe a GPU call in the launch log.
/// The words before are the number of the call, its name, and four words of the launch
/// configuration.
const FIRST_ARGUMENT_WORD: usize = 1 + NAME_WORDS + 4;
/// Maximum number of 64-bit words for the arguments of a GPU call in the launch log.
const MAX_ARGUMENT_WORDS: usize = ENTRY_WORDS - FIRST_ARGUMENT_WORD;
/// The size in bytes of the file of the launch log.
const LOG_BYTES: usize = ENTRY_COUNT * ENTRY_WORDS * size_of::<u64>();

/// The launch log of this process, a file with its latest GPU calls; empty until
/// [`log_launches_to`] opens the file.
static LAUNCH_LOG: OnceLock<LaunchLog> = OnceLock::new();

/// The memory-mapped file (launch log) in which this process stores its latest GPU calls, with the
/// number of calls so far.
struct LaunchLog {
    memory: MmapRaw,
    /// The number of calls that have been logged.
    calls: AtomicU64,
}

/// Opens `file` as the launch log of this process, to which all later GPU calls of the process are
/// written. Later calls of this function have no effect.
pub fn log_launches_to(file: &File) -> io::Result<()> {
    file.set_len(LOG_BYTES as u64)?;
    let memory = MmapRaw::map_raw(file)?;
    LAUNCH_LOG.get_or_init(|| LaunchLog { memory, calls: AtomicU64::new(0) });
    Ok(())
}

impl LaunchLog {
    /// Returns the content of the launch log (the memory-mapped file with the latest GPU calls) as
    /// 64-bit words.
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this size, is aligned to pages, and lives as long as self. It is
        // only accessed with atomic operations.
        unsafe { std::slice::from_raw_parts(self.memory.as_mut_ptr().cast(), ENTRY_COUNT * ENTRY_WORDS) }
    }

    /// Writes the description of one GPU call to the launch log, in place of the oldest call.
    fn write_entry(&self, name: &[u8], config: LaunchConfig, arguments: impl Iterator<Item = u64>) {
        let number = self.calls.fetch_add(1, Relaxed);
        let first = number as usize % ENTRY_COUNT * ENTRY_WORDS;
        let entry = &self.words()[first..first + ENTRY_WORDS];
        // A reader ignores an entry without a number, because it is incomplete.
        entry[0].store(0, Release);
        for (word, bytes) in
            entry[1..=NAME_WORDS].iter().zip(name.chunks(8).chain(std::iter::repeat(&[][..])))
        {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Relaxed);
        }
        let ([x, y, z], [bx, by, bz]) = (config.grid.map(u64::from), config.block.map(u64::from));
        let mut count = 0;
        for (word, argument) in entry[FIRST_ARGUMENT_WORD..].iter().zip(arguments) {
            word.store(argument, Relaxed);
            count += 1;
        }
        let shape = [x | y << 32, z | bx << 32, by | bz << 32, config.shared as u64 | count << 32];
        for (word, value) in entry[1 + NAME_WORDS..FIRST_ARGUMENT_WORD].iter().zip(shape) {
            word.store(value, Relaxed);
        }
        entry[0].store(number + 1, Release);
    }
}

/// Writes the name, launch configuration and arguments of a kernel launch to the launch log of this
/// process, if one is open.
pub(super) fn log_kernel(name: &[u8], config: LaunchConfig, arguments: &[&dyn KernelArg]) {
    let Some(log) = LAUNCH_LOG.get() else { return };
    let words = arguments.iter().flat_map(|argument| {
        let bytes = size_of_val(*argument);
        let start = ptr::from_ref::<dyn KernelArg>(*argument).cast::<u8>();
        (0..bytes.div_ceil(8)).map(move |i| {
            let mut word = [0; 8];
            let len = (bytes - 8 * i).min(8);
            // SAFETY: the argument has at least `8 * i + len` bytes, and no padding.
            unsafe { start.add(8 * i).copy_to_nonoverlapping(word.as_mut_ptr(), len) };
            u64::from_le_bytes(word)
        })
    });
    log.write_entry(name, config, words);
}

/// Writes a GPU call other than a kernel launch, such as a matmul, to the launch log of this
/// process, if one is open.
pub(super) fn log_non_kernel_call(name: &'static str, numbers: &[u64]) {
    if let Some(log) = LAUNCH_LOG.get() {
        let config = LaunchConfig { grid: [0; 3], block: [0; 3], shared: 0 };
        log.write_entry(name.as_bytes(), config, numbers.iter().copied());
    }
}

/// Reads the launch log (the latest GPU calls) of another process from its file, and returns one
/// line of text per call, oldest first. Returns nothing if that process has logged no call.
pub fn read_launch_log(path: &Path) -> io::Result<Vec<String>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LOG_BYTES as u64).read_to_end(&mut bytes)?;
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| word.iter().rfold(0, |w, b| w << 8 | u64::from(*b))).collect();
    let mut entries: Vec<&[u64]> = words.chunks_exact(ENTRY_WORDS).filter(|entry| entry[0] != 0).collect();
    entries.sort_by_key(|entry| entry[0]);
    Ok(entries.into_iter().map(describe_entry).collect())
}

/// Formats a call in a launch log as a line of text with its number, name, launch configuration and
/// arguments. Small numbers are decimal, and others, such as addresses, are hexadecimal.
fn describe_entry(entry: &[u64]) -> String {
    let name: Vec<u8> = entry[1..=NAME_WORDS].iter().flat_map(|word| word.to_le_bytes()).collect();
    let name = String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
    let halves = |i: usize| (entry[1 + NAME_WORDS + i] as u32, entry[1 + NAME_WORDS + i] >> 32);
    let [(x, y), (z, bx), (by, bz), (shared, count)] = [0, 1, 2, 3].map(halves);
    let config = match bx {
        0 => String::new(),
        _ => format!(" grid {x}×{y}×{z} block {bx}×{by}×{bz} shared {shared}"),
    };
    let count = (count as usize).min(MAX_ARGUMENT_WORDS);
    let format = |word: &u64| if *word < 1 << 24 { word.to_string() } else { format!("{word:#x}") };
    let arguments: Vec<String> =
        entry[FIRST_ARGUMENT_WORD..FIRST_ARGUMENT_WORD + count].iter().map(format).collect();
    format!("{} {name}{config} ({})", entry[0], arguments.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a launch log in a temporary file.
    fn create_log() -> (tempfile::NamedTempFile, LaunchLog) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(LOG_BYTES as u64).expect("a size");
        let memory = MmapRaw::map_raw(file.as_file()).expect("a mapping");
        (file, LaunchLog { memory, calls: AtomicU64::new(0) })
    }

    #[test]
    fn the_last_calls_are_read_in_their_order() {
        let (file, log) = create_log();
        assert_eq!(read_launch_log(file.path()).expect("a log"), Vec::<String>::new());
        let config = LaunchConfig { grid: [7, 2, 1], block: [32, 8, 1], shared: 512 };
        log.write_entry(b"rope_bf16", config, [5, 0x7f00_0000_1000].into_iter());
        let expected = "1 rope_bf16 grid 7×2×1 block 32×8×1 shared 512 (5, 0x7f0000001000)";
        assert_eq!(read_launch_log(file.path()).expect("a log"), [expected]);
        for _ in 0..ENTRY_COUNT {
            log.write_entry(&[b'a'; 100], LaunchConfig { block: [0; 3], ..config }, 0..100);
        }
        let calls = read_launch_log(file.path()).expect("a log");
        assert_eq!(calls.len(), ENTRY_COUNT);
        assert!(calls[0].starts_with("2 aaaa") && calls[ENTRY_COUNT - 1].starts_with("65 aaaa"), "{calls:?}");
        assert!(calls[0].ends_with(", 50)"), "{}", calls[0]);
    }

    #[test]
    fn damaged_and_short_logs_are_read() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), [0xff; 700]).expect("written");
        assert_eq!(read_launch_log(file.path()).expect("a log").len(), 1);
        std::fs::write(file.path(), vec![0xff; LOG_BYTES * 2]).expect("written");
        assert_eq!(read_launch_log(file.path()).expect("a log").len(), ENTRY_COUNT);
    }
}

//! Bytes of strangers: a corpus, changed in every way a seed gives, through everything that reads such bytes. Nothing
//! panics, and memory stays below a cap that has nothing to do with what the bytes claim.
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most memory that reading a few kilobytes may take at any time, bytes.
const CAP: usize = 96 << 20;
/// Changed copies per file and reader.
const CHANGES: u64 = 3000;

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

type Reader = fn(&[u8]) -> Result<(), String>;

const READERS: [(&str, Reader); 7] = [
    ("pickle", ckpt::hostile::pickle),
    ("zip", ckpt::hostile::zip),
    ("torch_file", ckpt::hostile::torch_file),
    ("optimizer", ckpt::hostile::optimizer),
    ("safetensors", ckpt::hostile::safetensors),
    ("dcp_metadata", ckpt::hostile::dcp_metadata),
    ("manifest", ckpt::hostile::manifest),
];

fn corpus() -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(dir)
        .expect("listable")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e != "md"))
        .map(|p| {
            (p.file_name().expect("a name").to_string_lossy().into_owned(), fs::read(&p).expect("readable"))
        })
        .collect();
    files.sort();
    assert!(files.len() >= 7, "the corpus is there");
    files
}

/// Numbers that a seed gives, the same on every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

/// A few changes: flips, lengths as large as can be, pieces cut out, doubled or moved, an opcode of pickles.
fn changed(sound: &[u8], numbers: &mut Numbers) -> Vec<u8> {
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
            5 => bytes[at..]
                .iter_mut()
                .take(1)
                .for_each(|b| *b = b"(.0NKJMX}])tuedrqhjcRbQ\x81\x85\x94\x8a\x93"[len % 28]),
            _ => bytes[at..at + len.min(8)].iter_mut().for_each(|b| *b = numbers.next(256) as u8),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

#[test]
fn nothing_panics_and_memory_stays_below_the_cap() {
    let before = USED.load(Ordering::Relaxed);
    let (mut refused, mut read) = (0u64, 0u64);
    for (name, sound) in corpus() {
        for (reader, run) in READERS {
            let mut numbers = Numbers(name.len() as u64 * 7 + reader.len() as u64);
            for _ in 0..CHANGES {
                match run(&changed(&sound, &mut numbers)) {
                    Ok(()) => read += 1,
                    Err(why) => {
                        assert!(!why.is_empty() && !why.contains('\n'), "{reader} of {name}: {why:?}");
                        refused += 1;
                    }
                }
            }
        }
    }
    let peak = PEAK.load(Ordering::Relaxed) - before;
    assert!(peak < CAP, "{peak} bytes at the peak");
    assert!(read > 1000 && refused > 10_000, "{read} read, {refused} refused: the changes reach the readers");
}

#[test]
fn sound_files_are_read() {
    for (name, bytes) in corpus() {
        let reads: &[Reader] = match name.rsplit('.').next() {
            Some("pkl") => &[ckpt::hostile::pickle],
            Some("pt") => &[ckpt::hostile::torch_file],
            Some("safetensors") => &[ckpt::hostile::safetensors],
            Some("metadata") => &[ckpt::hostile::dcp_metadata],
            _ => &[ckpt::hostile::manifest],
        };
        for read in reads {
            assert_eq!(read(&bytes), Ok(()), "{name}");
        }
    }
}

/// What attackers try, each refused for what it is.
#[test]
fn known_attacks_are_refused_by_name() {
    let long = |op: &[u8], len: u64| [b"\x80\x04".as_slice(), op, &len.to_le_bytes()].concat();
    let mut memo = b"\x80\x02]q\x00".to_vec();
    memo.extend(b"h\x00a.");
    let mut doubling = b"\x80\x02]q\x00".to_vec();
    for i in 0..40u8 {
        doubling.extend([b']', b'q', i + 1, b'(', b'h', i, b'h', i, b'e']);
    }
    doubling.push(b'.');
    for (bytes, reason) in [
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.".to_vec(), "names os.system"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.".to_vec(), "names posix.system"),
        (b"\x80\x02c__builtin__\neval\n.".to_vec(), "names __builtin__.eval"),
        (b"(S'ls'\nios\nsystem\n.".to_vec(), "opcode"),
        (
            [b"\x80\x02".to_vec(), vec![b']'; 1000], vec![b'a'; 999], b".".to_vec()].concat(),
            "nested more than",
        ),
        (memo, "contains itself"),
        (long(b"\x8d", 1 << 40), "claims 1099511627776 bytes"),
        (long(b"\x8e", u64::MAX), "claims"),
        (long(b"\x95", 1 << 40), "claims a frame of 1099511627776 bytes"),
    ] {
        let why = ckpt::hostile::pickle(&bytes).expect_err(reason);
        assert!(why.contains(reason), "{why} lacks {reason}");
    }
    // shared values stay shared: 2^40 of them are read in no time
    assert_eq!(ckpt::hostile::pickle(&doubling), Ok(()));
}

#[test]
fn a_manifest_of_nonsense_is_refused() {
    for text in [&b"{}"[..], b"", &[b' '; 200], &[b'['; 5000]] {
        assert!(ckpt::hostile::manifest(text).is_err());
    }
}

//! What strangers write: a corpus, changed in every way a seed gives, through everything of the launcher that reads such
//! bytes. Nothing panics, and memory stays below a cap that has nothing to do with what the bytes claim.
use contract::{
    control::{ExitStatus, FromAgent, HostFacts, ToAgent, VERSION},
    frame,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Most memory that reading a few kilobytes may take at any time, bytes.
const CAP: usize = 64 << 20;
/// Changed copies of each file for each reader.
const CHANGES: u64 = 1000;

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

/// By the ending of the files that each of them takes.
const READERS: [(&str, Reader); 7] = [
    ("control", launcher::hostile::control),
    ("hostfile", launcher::hostile::hostfile),
    ("hosts", launcher::hostile::host_list),
    ("slurm", launcher::hostile::slurm),
    ("job", launcher::hostile::job),
    ("store", launcher::hostile::store),
    ("invitation", launcher::hostile::invitation),
];

/// A few messages of an agent, and of a controller.
fn streams() -> [Vec<u8>; 2] {
    let found = HostFacts { host: "n1".into(), cpus: vec![0, 1], ..HostFacts::default() };
    let status = ExitStatus::Signal(11, true);
    let exited = FromAgent::Exited {
        epoch: 0,
        rank: 1,
        pid: 2,
        status,
        oom: false,
        tail: vec!["last".into()],
        error: None,
    };
    let agent = [FromAgent::Hello { version: VERSION, pid: 77, found }, exited, FromAgent::Beat];
    let kill = ToAgent::Kill { epoch: 0, reason: "a peer failed".into(), grace_ms: 5, stacks: false };
    let controller = [ToAgent::Hello { version: VERSION }, kill, ToAgent::Beat];
    [
        agent.iter().flat_map(|m| frame::encode(m).expect("sent")).collect(),
        controller.iter().flat_map(|m| frame::encode(m).expect("sent")).collect(),
    ]
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(dir)
        .expect("listable")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ending| ending != "md"))
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            (name, fs::read(&path).expect("readable"))
        })
        .collect();
    let [agent, controller] = streams();
    files.push(("agent.control".into(), agent));
    files.push(("controller.control".into(), controller));
    let invitation = format!("launch-join-1 {} 127.0.0.1:7000 [::1]:7000\n", "0f".repeat(32));
    files.push(("one.invitation".into(), invitation.into_bytes()));
    files.sort();
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

/// A few changes: flips, lengths as large as can be, pieces cut out or doubled, signs that mean something to a parser.
fn changed(sound: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    const SIGNS: &[u8] = b"[]-,:@=&*!{}\n \t#\"'|%\0\xff\x80\xdd\xdf\xc6";
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
            5 => bytes[at..].iter_mut().take(1).for_each(|b| *b = SIGNS[numbers.next(SIGNS.len())]),
            _ => bytes[at..at + len.min(8)].iter_mut().for_each(|b| *b = b'0' + numbers.next(10) as u8),
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
    PEAK.store(before, Ordering::Relaxed);
    let (mut refused, mut read) = (0u64, 0u64);
    for (name, sound) in corpus() {
        for (reader, run) in READERS {
            // Its own files count most.
            let changes = if name.ends_with(reader) { CHANGES } else { CHANGES / 20 };
            let mut numbers = Numbers(name.len() as u64 * 7 + reader.len() as u64);
            for _ in 0..changes {
                match run(&changed(&sound, &mut numbers)) {
                    Ok(()) => read += 1,
                    Err(why) => {
                        assert!(!why.is_empty(), "{reader} of {name}");
                        refused += 1;
                    }
                }
            }
        }
    }
    let peak = PEAK.load(Ordering::Relaxed) - before;
    assert!(peak < CAP, "{peak} bytes at the peak");
    assert!(read > 500 && refused > 2000, "{read} read, {refused} refused: the changes reach the readers");
}

#[test]
fn sound_files_are_read() {
    for (name, bytes) in corpus() {
        let (_, run) = READERS.iter().find(|(ending, _)| name.ends_with(&format!(".{ending}"))).expect(&name);
        assert_eq!(run(&bytes), Ok(()), "{name}");
    }
}

/// Few bytes that ask for much.
#[test]
fn claims_cost_the_claimer() {
    let before = USED.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let long = "n".repeat(100_000);
    let texts = [
        format!("{long}[0-16383]"),
        "n[0-16383][0-16383]".to_owned(),
        "n[0-127][0-127]".repeat(2),
        format!("n[{}0-{}9]", "0".repeat(200), "0".repeat(200)),
        "n[0-16383],".repeat(2000),
        format!("[{long}"),
    ];
    for text in &texts {
        for (reader, run) in &READERS[1..4] {
            assert!(run(text.as_bytes()).is_err(), "{reader} takes {:.40}…", text);
        }
    }
    // A frame and a key that are as long as can be said, and never come.
    assert!(launcher::hostile::control(&[0xff; 16]).is_err());
    assert!(launcher::hostile::control(&[0, 0, 0, 1, 0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    let mut key = vec![0, 9, 1];
    key.extend([0xff; 8]);
    assert!(launcher::hostile::store(&key).is_err());
    let peak = PEAK.load(Ordering::Relaxed) - before;
    assert!(peak < CAP, "{peak} bytes at the peak");
}

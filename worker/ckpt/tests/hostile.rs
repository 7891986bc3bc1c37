//! Bytes of strangers: a corpus, changed in every way a seed gives, through everything that reads such bytes. Nothing
//! panics, and memory stays below a cap that has nothing to do with what the bytes claim.
#[path = "../../../tests/support/strangers.rs"]
mod strangers;

use std::path::Path;
use strangers::{Memory, Numbers};

/// Most memory that reading a few kilobytes may take at any time, bytes.
const CAP: usize = 96 << 20;
/// Changed copies per file and reader.
const CHANGES: u64 = 3000;

/// Opcodes of pickles.
const SIGNS: &[u8] = b"(.0NKJMX}])tuedrqhjcRbQ\x81\x85\x94\x8a\x93";

type Reader = fn(&[u8]) -> Result<(), String>;

const READERS: [(&str, Reader); 8] = [
    ("pickle", ckpt::untrusted::pickle),
    ("zip", ckpt::untrusted::zip),
    ("torch_file", ckpt::untrusted::torch_file),
    ("optimizer", ckpt::untrusted::optimizer),
    ("safetensors", ckpt::untrusted::safetensors),
    ("dcp_metadata", ckpt::untrusted::dcp_metadata),
    ("manifest", ckpt::untrusted::manifest),
    ("adapter_config", ckpt::untrusted::adapter_config),
];

fn corpus() -> Vec<(String, Vec<u8>)> {
    let files = strangers::corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"));
    assert!(files.len() >= 7, "the corpus is there");
    files
}

fn changed(sound: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    strangers::changed(sound, numbers, SIGNS, |numbers| numbers.next(256) as u8)
}

#[test]
fn nothing_panics_and_memory_stays_below_the_cap() {
    let memory = Memory::from_now();
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
    let peak = memory.peak();
    assert!(peak < CAP, "{peak} bytes at the peak");
    assert!(read > 1000 && refused > 10_000, "{read} read, {refused} refused: the changes reach the readers");
}

#[test]
fn sound_files_are_read() {
    for (name, bytes) in corpus() {
        let reads: &[Reader] = match name.rsplit('.').next() {
            Some("pkl") => &[ckpt::untrusted::pickle],
            Some("pt") => &[ckpt::untrusted::torch_file],
            Some("safetensors") => &[ckpt::untrusted::safetensors],
            Some("adapter") => &[ckpt::untrusted::adapter_config],
            Some("metadata") => &[ckpt::untrusted::dcp_metadata],
            _ => &[ckpt::untrusted::manifest],
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
        let why = ckpt::untrusted::pickle(&bytes).expect_err(reason);
        assert!(why.contains(reason), "{why} lacks {reason}");
    }
    // shared values stay shared: 2^40 of them are read in no time
    assert_eq!(ckpt::untrusted::pickle(&doubling), Ok(()));
}

#[test]
fn a_manifest_of_nonsense_is_refused() {
    for text in [&b"{}"[..], b"", &[b' '; 200], &[b'['; 5000]] {
        assert!(ckpt::untrusted::manifest(text).is_err());
    }
}

//! Untrusted input: random changes of a corpus never make a reader panic or use more memory than a
//! fixed limit, whatever sizes the bytes claim.
#[path = "../../../tests/support/untrusted.rs"]
mod untrusted;

use std::path::Path;
use untrusted::{MemoryMeter, SeededNumbers};

/// Limit on the memory for reading a few kilobytes, bytes.
const CAP: usize = 96 << 20;
/// Changed copies per file and reader.
const CHANGES: u64 = 3000;

/// Opcodes of pickles, which the changes insert.
const OPCODES: &[u8] = b"(.0NKJMX}])tuedrqhjcRbQ\x81\x85\x94\x8a\x93";

type Reader = fn(&[u8]) -> diagnostic::Result<()>;

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
    let files = untrusted::corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"));
    assert!(files.len() >= 7, "the corpus exists");
    files
}

fn mutated(valid: &[u8], numbers: &mut SeededNumbers) -> Vec<u8> {
    untrusted::mutated(valid, numbers, OPCODES, |numbers| numbers.next(256) as u8)
}

#[test]
fn changed_files_never_panic_or_exceed_the_memory_limit() {
    let memory = MemoryMeter::start();
    let (mut rejected, mut read) = (0u64, 0u64);
    for (name, valid) in corpus() {
        for (reader, run) in READERS {
            let mut numbers = SeededNumbers(name.len() as u64 * 7 + reader.len() as u64);
            for _ in 0..CHANGES {
                match run(&mutated(&valid, &mut numbers)) {
                    Ok(()) => read += 1,
                    Err(error) => {
                        let text = error.to_string();
                        assert!(!text.is_empty() && !text.contains('\n'), "{reader} of {name}: {text:?}");
                        rejected += 1;
                    }
                }
            }
        }
    }
    let peak = memory.peak();
    assert!(peak < CAP, "{peak} bytes at the peak");
    assert!(read > 1000 && rejected > 10_000, "{read} read, {rejected} rejected");
}

#[test]
fn unchanged_files_are_read() {
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

/// Pickles that execute commands, claim huge sizes or nest without bound.
#[test]
fn known_attacks_are_rejected() {
    let long = |op: &[u8], len: u64| [b"\x80\x04".as_slice(), op, &len.to_le_bytes()].concat();
    let mut memo = b"\x80\x02]q\x00".to_vec();
    memo.extend(b"h\x00a.");
    let mut doubling = b"\x80\x02]q\x00".to_vec();
    for i in 0..40u8 {
        doubling.extend([b']', b'q', i + 1, b'(', b'h', i, b'h', i, b'e']);
    }
    doubling.push(b'.');
    let attacks: [(&str, Vec<u8>); 9] = [
        ("os.system", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.".to_vec()),
        ("posix.system", b"\x80\x04\x8c\x05posix\x8c\x06system\x93.".to_vec()),
        ("eval", b"\x80\x02c__builtin__\neval\n.".to_vec()),
        ("protocol 0", b"(S'ls'\nios\nsystem\n.".to_vec()),
        ("nesting", [b"\x80\x02".to_vec(), vec![b']'; 1000], vec![b'a'; 999], b".".to_vec()].concat()),
        ("cycle", memo),
        ("text of 2^40 bytes", long(b"\x8d", 1 << 40)),
        ("bytes of 2^64 bytes", long(b"\x8e", u64::MAX)),
        ("frame of 2^40 bytes", long(b"\x95", 1 << 40)),
    ];
    let line = |(what, bytes): &(&str, Vec<u8>)| {
        let error = ckpt::untrusted::pickle(bytes).expect_err(what);
        format!("{what}: [{}] {error}", error.code())
    };
    insta::assert_snapshot!("known_attacks", attacks.iter().map(line).collect::<Vec<_>>().join("\n"));
    // shared values are not copied, so 2^40 references need no memory
    assert_eq!(ckpt::untrusted::pickle(&doubling), Ok(()));
}

#[test]
fn invalid_manifests_are_rejected() {
    for text in [&b"{}"[..], b"", &[b' '; 200], &[b'['; 5000]] {
        assert!(ckpt::untrusted::manifest(text).is_err());
    }
}

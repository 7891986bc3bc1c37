//! Tests that random changes of valid files never make a parser panic or use more memory than a
//! fixed limit. Changed files may claim any size.

use crate::mutated_input::{self, MemoryMeter, SeededNumbers};
use std::path::Path;

/// Limit in bytes on the peak memory of all parser runs. Each file has only a few kilobytes.
const MEMORY_MAX: usize = 96 << 20;
/// Number of changed copies of each corpus file that each parser gets.
const MUTATIONS_PER_PARSER: u64 = 3000;

/// Opcodes of pickles, which the random changes insert into files.
const OPCODES: &[u8] = b"(.0NKJMX}])tuedrqhjcRbQ\x81\x85\x94\x8a\x93";

/// A parser of untrusted bytes, which returns an error for invalid bytes.
type ParseFn = fn(&[u8]) -> diagnostic::Result<()>;

/// All parsers of untrusted input, each with its name.
const PARSERS: [(&str, ParseFn); 11] = [
    ("pickle", ckpt::untrusted::parse_pickle),
    ("zip", ckpt::untrusted::parse_zip),
    ("torch_file", ckpt::untrusted::parse_torch_file),
    ("optimizer", ckpt::untrusted::parse_optimizer),
    ("safetensors", ckpt::untrusted::parse_safetensors),
    ("dcp_metadata", ckpt::untrusted::parse_dcp_metadata),
    ("manifest", ckpt::untrusted::parse_manifest),
    ("adapter_config", ckpt::untrusted::parse_adapter_config),
    ("output_record", ckpt::untrusted::parse_output_record),
    ("trainer_state", ckpt::untrusted::parse_trainer_state),
    ("weight_index", ckpt::untrusted::parse_weight_index),
];

/// Returns the names and contents of the valid files in `tests/corpus`. Panics if there are fewer
/// than 7 files.
fn read_corpus() -> Vec<(String, Vec<u8>)> {
    let files = mutated_input::read_corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"));
    assert!(files.len() >= 7, "the corpus exists");
    files
}

/// Returns a randomly changed copy of a valid file. `numbers` determines the changes.
fn mutate(valid: &[u8], numbers: &mut SeededNumbers) -> Vec<u8> {
    mutated_input::mutate(valid, numbers, OPCODES, |numbers| numbers.next_below(256) as u8)
}

#[test]
fn changed_files_never_panic_or_exceed_the_memory_limit() {
    let memory = MemoryMeter::start();
    let (mut rejected, mut read) = (0u64, 0u64);
    for (name, valid) in read_corpus() {
        for (reader, run) in PARSERS {
            let mut numbers = SeededNumbers(name.len() as u64 * 7 + reader.len() as u64);
            for _ in 0..MUTATIONS_PER_PARSER {
                match run(&mutate(&valid, &mut numbers)) {
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
    assert!(peak < MEMORY_MAX, "{peak} bytes at the peak");
    assert!(read > 1000 && rejected > 10_000, "{read} read, {rejected} rejected");
}

#[test]
fn unchanged_corpus_files_are_accepted() {
    for (name, bytes) in read_corpus() {
        let reads: &[ParseFn] = match name.rsplit('.').next() {
            Some("pkl") => &[ckpt::untrusted::parse_pickle],
            Some("pt") => &[ckpt::untrusted::parse_torch_file],
            Some("safetensors") => &[ckpt::untrusted::parse_safetensors],
            Some("adapter") => &[ckpt::untrusted::parse_adapter_config],
            Some("metadata") => &[ckpt::untrusted::parse_dcp_metadata],
            Some("index") => &[ckpt::untrusted::parse_weight_index],
            Some("trainer") => &[ckpt::untrusted::parse_trainer_state],
            Some("record") => &[ckpt::untrusted::parse_output_record],
            _ => &[ckpt::untrusted::parse_manifest],
        };
        for read in reads {
            assert_eq!(read(&bytes), Ok(()), "{name}");
        }
    }
}

/// Parses pickles that execute commands, claim huge sizes, nest without bound, or use a value
/// without bound, and compares the errors with a snapshot.
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
    let attacks: [(&str, Vec<u8>); 10] = [
        ("os.system", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.".to_vec()),
        ("posix.system", b"\x80\x04\x8c\x05posix\x8c\x06system\x93.".to_vec()),
        ("eval", b"\x80\x02c__builtin__\neval\n.".to_vec()),
        ("protocol 0", b"(S'ls'\nios\nsystem\n.".to_vec()),
        ("nesting", [b"\x80\x02".to_vec(), vec![b']'; 1000], vec![b'a'; 999], b".".to_vec()].concat()),
        ("cycle", memo),
        ("text of 2^40 bytes", long(b"\x8d", 1 << 40)),
        ("bytes of 2^64 bytes", long(b"\x8e", u64::MAX)),
        ("frame of 2^40 bytes", long(b"\x95", 1 << 40)),
        ("2^40 uses of a list", doubling),
    ];
    let line = |(what, bytes): &(&str, Vec<u8>)| {
        let error = ckpt::untrusted::parse_pickle(bytes).expect_err(what);
        format!("{what}: [{}] {error}", error.code())
    };
    insta::assert_snapshot!("known_attacks", attacks.iter().map(line).collect::<Vec<_>>().join("\n"));
}

#[test]
fn invalid_manifests_are_rejected() {
    for text in [&b"{}"[..], b"", &[b' '; 200], &[b'['; 5000]] {
        assert!(ckpt::untrusted::parse_manifest(text).is_err());
    }
}

//! Untrusted input: random mutations of a corpus never make a reader panic or wait for long. The
//! tests are in this crate, because only the executable of its unit tests is a sandbox process.
use super::*;
use mutated_input::{MemoryMeter, SeededNumbers};
use std::{
    path::Path,
    time::{Duration, Instant},
};

#[path = "../../tests/support/mutated_input.rs"]
mod mutated_input;

/// The limit on the memory of this process for inputs of a few kilobytes, in bytes. Other tests of
/// the process may use memory, too.
const MEMORY_MAX: usize = 512 << 20;
/// The longest time for one input. The limit of CPU time in tests is 1.5 s, and the machine may be
/// busy.
const LONGEST_TIME: Duration = Duration::from_secs(30);
/// Bytes that have a meaning in at least one of the tested formats.
const TOKENS: &[u8] = b"{}[]\",:%|()\\*+?$^\n \0\xff\x80PAR1";

type Reader = fn(&[u8]) -> UntrustedReadResult;

/// The readers to test. Each has the extension of its files in the corpus, and the number of
/// mutated copies that are made of each file.
const READERS: [(&str, Reader, u64); 8] = [
    ("config", parse_model_config, 2000),
    ("companion", parse_tokenizer_config, 4000),
    ("pattern", parse_file_pattern, 4000),
    ("record", parse_record, 4000),
    ("replies", parse_sandbox_replies, 4000),
    ("template", interpret_chat_template, 150),
    ("tokenizer", interpret_tokenizer, 100),
    ("parquet", interpret_parquet, 150),
];

fn read_corpus() -> Vec<(String, Vec<u8>)> {
    mutated_input::read_corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"))
}

#[test]
fn mutated_inputs_are_accepted_or_rejected_in_time() {
    let memory = MemoryMeter::start();
    for (extension, read, mutations) in READERS {
        let (mut accepted, mut rejected) = (0u64, 0u64);
        for (name, valid) in read_corpus().into_iter().filter(|(name, _)| name.ends_with(extension)) {
            let mut numbers = SeededNumbers(name.len() as u64 * 7 + 3);
            for _ in 0..mutations {
                let other = |numbers: &mut SeededNumbers| b'0' + numbers.next_below(10) as u8;
                let bytes = mutated_input::mutate(&valid, &mut numbers, TOKENS, other);
                let began = Instant::now();
                match read(&bytes) {
                    Ok(()) => accepted += 1,
                    Err(error) => {
                        assert!(!error.to_string().is_empty(), "{name}");
                        rejected += 1;
                    }
                }
                assert!(began.elapsed() < LONGEST_TIME, "{name}: {:?}: {bytes:?}", began.elapsed());
            }
        }
        assert!(rejected > mutations / 4, "{extension}: {accepted} accepted, {rejected} rejected");
    }
    let peak = memory.peak();
    assert!(peak < MEMORY_MAX, "{peak} bytes at the peak");
}

#[test]
fn unmodified_files_are_accepted() {
    for (name, bytes) in read_corpus() {
        let reader = READERS.iter().find(|(extension, ..)| name.ends_with(&format!(".{extension}")));
        let (_, read, _) = reader.unwrap_or_else(|| panic!("no reader for {name}"));
        read(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

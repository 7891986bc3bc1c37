//! Tests that random mutations of a corpus never make a parser of the launcher panic or use more
//! memory than a fixed limit, whatever sizes the bytes claim.
use crate::mutated_input::{self, MemoryMeter, SeededNumbers};
use launcher::untrusted::ParseResult;
use std::path::Path;

/// The limit on the memory for parsing a few kilobytes, in bytes.
const MEMORY_LIMIT: usize = 64 << 20;
/// The number of mutated copies of each corpus file that are passed to the parser for this kind of
/// file. Other parsers get fewer.
const MUTATIONS: u64 = 1000;

/// Bytes with a special meaning in at least one of the formats. Mutations insert them.
const TOKENS: &[u8] = b"[]-,:@=&*!{}\n \t#\"'|%\0\xff\x80\xdd\xdf\xc6";

type Parser = fn(&[u8]) -> ParseResult;

/// The parsers under test, each with the file extension of its inputs in the corpus.
const PARSERS: [(&str, Parser); 17] = [
    ("control", launcher::untrusted::parse_control_stream),
    ("hostfile", launcher::untrusted::parse_hostfile),
    ("hosts", launcher::untrusted::parse_host_list),
    ("slurm", launcher::untrusted::parse_allocation_variables),
    ("job", launcher::untrusted::parse_job),
    ("store", launcher::untrusted::parse_store_requests),
    ("invitation", launcher::untrusted::parse_invitation),
    ("record", launcher::untrusted::parse_run_record),
    ("journal", launcher::untrusted::parse_journal),
    ("netlink", launcher::untrusted::parse_socket_answer),
    ("accelerate", launcher::untrusted::parse_accelerate_config),
    ("deepspeed", launcher::untrusted::parse_deepspeed_config),
    // This parser rejects every input, so that the corpus has no file for it.
    ("encrypted", launcher::untrusted::parse_encrypted_connection),
    ("tree", launcher::untrusted::parse_tree_frames),
    ("dump", launcher::untrusted::parse_flight_recorder),
    ("mlflow", launcher::untrusted::parse_mlflow_answer),
    ("error", launcher::untrusted::parse_error_file),
];

/// Returns the names and the contents of the files in `tests/corpus`, and of the valid streams of
/// [`launcher::untrusted::create_control_streams`].
fn read_inputs() -> Vec<(String, Vec<u8>)> {
    let mut files = mutated_input::read_corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"));
    let streams = launcher::untrusted::create_control_streams();
    files.extend(streams.map(|(name, bytes)| (name.to_owned(), bytes)));
    files.sort();
    files
}

/// Returns a copy of `valid` with random mutations.
fn mutate_input(valid: &[u8], numbers: &mut SeededNumbers) -> Vec<u8> {
    mutated_input::mutate(valid, numbers, TOKENS, |numbers| b'0' + numbers.next_below(10) as u8)
}

#[test]
fn nothing_panics_and_memory_stays_below_the_limit() {
    let memory = MemoryMeter::start();
    let (mut rejected, mut accepted) = (0u64, 0u64);
    for (name, valid) in read_inputs() {
        for (extension, parse) in PARSERS {
            // The files of this parser are mutated most often.
            let changes = if name.ends_with(extension) { MUTATIONS } else { MUTATIONS / 20 };
            let mut numbers = SeededNumbers(name.len() as u64 * 7 + extension.len() as u64);
            for _ in 0..changes {
                match parse(&mutate_input(&valid, &mut numbers)) {
                    Ok(()) => accepted += 1,
                    Err(error) => {
                        assert!(!error.to_string().is_empty(), "{extension} of {name}");
                        rejected += 1;
                    }
                }
            }
        }
    }
    let peak = memory.peak();
    assert!(peak < MEMORY_LIMIT, "{peak} bytes at the peak");
    assert!(accepted > 500 && rejected > 2000, "{accepted} accepted, {rejected} rejected");
}

#[test]
fn unmodified_files_are_accepted() {
    for (name, bytes) in read_inputs() {
        let (_, parse) =
            PARSERS.iter().find(|(extension, _)| name.ends_with(&format!(".{extension}"))).expect(&name);
        assert!(parse(&bytes).is_ok(), "{name}");
    }
}

/// Checks that short inputs that claim large sizes do not make parsers allocate memory for these
/// sizes.
#[test]
fn claimed_sizes_do_not_allocate_memory() {
    let memory = MemoryMeter::start();
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
        for (extension, parse) in &PARSERS[1..4] {
            assert!(parse(text.as_bytes()).is_err(), "{extension} accepts {:.40}…", text);
        }
    }
    // A frame and a key with the largest length that the format allows.
    assert!(launcher::untrusted::parse_control_stream(&[0xff; 16]).is_err());
    assert!(launcher::untrusted::parse_control_stream(&[0, 0, 0, 1, 0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    let mut key = vec![0, 9, 1];
    key.extend([0xff; 8]);
    assert!(launcher::untrusted::parse_store_requests(&key).is_err());
    let peak = memory.peak();
    assert!(peak < MEMORY_LIMIT, "{peak} bytes at the peak");
}

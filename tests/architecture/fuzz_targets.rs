//! Checks that fuzzing covers every parser of untrusted input.
use crate::repository::{read_text, repository_root};
use std::collections::BTreeSet;

/// The modules that contain one function per parser of untrusted input, as pairs of the crate's
/// name and the module's path.
const READER_MODULES: [(&str, &str); 5] = [
    ("ckpt", "worker/ckpt/src/untrusted.rs"),
    ("comm", "worker/comm/src/untrusted.rs"),
    ("dashboard", "launcher/dashboard/src/untrusted.rs"),
    ("launcher", "launcher/src/untrusted.rs"),
    ("worker", "worker/src/untrusted.rs"),
];
/// The path of the source file with the fuzz targets.
const TARGETS_FILE: &str = "fuzz/fuzz_targets/untrusted.rs";

/// Returns the names of the public functions in `source` whose only parameter is `bytes`.
fn list_readers(source: &str) -> BTreeSet<&str> {
    let name = |line: &'_ str| -> Option<usize> { line.find("(bytes: &[u8])") };
    let functions = source.lines().filter_map(|line| line.strip_prefix("pub fn "));
    functions.filter_map(|line| name(line).map(|end| &line[..end])).collect()
}

#[test]
fn every_reader_of_untrusted_input_is_a_fuzz_target() {
    let targets = read_text(&repository_root().join(TARGETS_FILE));
    let mut readers_count = 0;
    for (name, file) in READER_MODULES {
        let source = read_text(&repository_root().join(file));
        let readers = list_readers(&source);
        assert!(readers.len() >= 3, "{file}: {readers:?}");
        readers_count += readers.len();
        for reader in readers {
            let call = format!("{name}::untrusted::{reader}(bytes)");
            assert!(targets.contains(&call), "{TARGETS_FILE} has no target that calls {call}");
        }
    }
    assert_eq!(targets.matches("::untrusted::").count() - 2, readers_count, "each target calls a reader");
}

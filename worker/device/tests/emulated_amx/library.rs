//! Builds the emulator of AMX. This file needs no library, so that the tests of the executable can
//! include it, too.
use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The source of the emulator.
const SOURCE: &str = include_str!("emulated_amx.c");
/// The options with which the emulator is compiled. AMX is only used on machines with AVX-512,
/// which have fused multiply-adds.
const COMPILER_OPTIONS: [&str; 11] = [
    "-std=gnu11",
    "-O3",
    "-mavx2",
    "-mfma",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
];

/// Name of the environment variable that makes every product that the emulator computes wrong.
pub(crate) const ERROR_VARIABLE: &str = "LAUNCH_TEST_AMX_ERROR";

/// Returns the path of the emulator's library, and builds it first if needed.
pub(crate) fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let mut hasher = DefaultHasher::new();
        (SOURCE, COMPILER_OPTIONS).hash(&mut hasher);
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let library = directory.join(format!("emulated-amx-{:016x}.so", hasher.finish()));
        if !library.exists() {
            build(&library);
        }
        library
    })
}

/// Compiles the emulator to a temporary file, which is then moved to `library`. Concurrent builds
/// therefore see the whole library or none.
fn build(library: &Path) {
    let process = std::process::id();
    let new = library.with_extension(process.to_string());
    let source = library.with_extension(format!("{process}.c"));
    fs::write(&source, SOURCE).expect("written");
    let mut command = Command::new("cc");
    let output = command.args(COMPILER_OPTIONS).arg("-o").args([&new, &source]).arg("-lm").output();
    let output = output.expect("a C compiler (scripts/setup-tests installs one)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(source).expect("removed");
    fs::rename(new, library).expect("moved");
}

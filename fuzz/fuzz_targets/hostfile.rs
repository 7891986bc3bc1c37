//! Fuzzes the parsers of hostfiles and host filters.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_hostfile(bytes);
});

//! Fuzzes the parser of the items of `cluster.hosts`.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_host_list(bytes);
});

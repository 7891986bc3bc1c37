//! Fuzzes the parser of checkpoint manifests.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_manifest(bytes);
});

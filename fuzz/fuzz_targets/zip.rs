//! Fuzzes the reader of zip directories.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_zip(bytes);
});

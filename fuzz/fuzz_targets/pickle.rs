//! Fuzzes the pickle reader.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_pickle(bytes);
});

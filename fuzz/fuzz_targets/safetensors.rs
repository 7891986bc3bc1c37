//! Fuzzes the parser of safetensors headers.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_safetensors(bytes);
});

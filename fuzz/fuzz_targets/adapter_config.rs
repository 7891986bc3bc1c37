//! Fuzzes the parser of `adapter_config.json` (PEFT).
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_adapter_config(bytes);
});

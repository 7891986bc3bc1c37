//! Fuzzes the parser of torch's optimizer `state_dict`.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_optimizer(bytes);
});

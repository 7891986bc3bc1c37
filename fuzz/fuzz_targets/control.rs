//! Fuzzes the decoder of control messages.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_control_stream(bytes);
});

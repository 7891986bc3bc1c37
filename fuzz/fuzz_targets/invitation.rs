//! Fuzzes the parser of invitations, by which agents find their controller.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_invitation(bytes);
});

//! Fuzzes the server of the rendezvous store (TCPStore).
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_store_requests(bytes);
});

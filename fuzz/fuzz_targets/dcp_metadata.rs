//! Fuzzes the parser of `.metadata` files of PyTorch Distributed Checkpoint.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_dcp_metadata(bytes);
});

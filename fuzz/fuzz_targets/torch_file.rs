//! Fuzzes the reader of files that `torch.save` writes.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = ckpt::untrusted::parse_torch_file(bytes);
});

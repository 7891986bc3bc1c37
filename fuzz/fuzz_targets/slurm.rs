//! Fuzzes the reader of Slurm's environment variables.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_slurm_variables(bytes);
});

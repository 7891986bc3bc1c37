//! Fuzzes the loader of job.yaml.
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = launcher::untrusted::parse_job(bytes);
});

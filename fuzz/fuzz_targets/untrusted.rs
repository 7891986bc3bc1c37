//! Fuzzes one parser of untrusted input, whose name is in the environment variable `FUZZ_TARGET`.
//!
//! One executable contains every target, because each executable takes long to link.
#![no_main]
use std::{
    alloc::{GlobalAlloc, Layout, System, handle_alloc_error},
    env,
    sync::LazyLock,
};

/// The largest allocation of a parser in bytes, which is far more than any input of the fuzzer
/// needs.
const MAX_ALLOCATION_BYTES: usize = 256 << 20;

/// The system's allocator, which ends the process at an allocation of more than
/// [`MAX_ALLOCATION_BYTES`].
struct LimitedAllocator;

// SAFETY: every call goes to the system's allocator unchanged, or does not return.
unsafe impl GlobalAlloc for LimitedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_ALLOCATION_BYTES {
            handle_alloc_error(layout);
        }
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: LimitedAllocator = LimitedAllocator;

/// A function that gives its input to a parser and ignores the result.
type Target = fn(&[u8]);

/// The fuzz targets, each with its name. `fuzz/run` reads the names from these lines.
const TARGETS: [(&str, Target); 17] = [
    ("adapter_config", |bytes| drop(ckpt::untrusted::parse_adapter_config(bytes))),
    ("dcp_metadata", |bytes| drop(ckpt::untrusted::parse_dcp_metadata(bytes))),
    ("manifest", |bytes| drop(ckpt::untrusted::parse_manifest(bytes))),
    ("optimizer", |bytes| drop(ckpt::untrusted::parse_optimizer(bytes))),
    ("output_record", |bytes| drop(ckpt::untrusted::parse_output_record(bytes))),
    ("pickle", |bytes| drop(ckpt::untrusted::parse_pickle(bytes))),
    ("safetensors", |bytes| drop(ckpt::untrusted::parse_safetensors(bytes))),
    ("torch_file", |bytes| drop(ckpt::untrusted::parse_torch_file(bytes))),
    ("zip", |bytes| drop(ckpt::untrusted::parse_zip(bytes))),
    ("control", |bytes| drop(launcher::untrusted::parse_control_stream(bytes))),
    ("encrypted", |bytes| drop(launcher::untrusted::parse_encrypted_connection(bytes))),
    ("host_list", |bytes| drop(launcher::untrusted::parse_host_list(bytes))),
    ("hostfile", |bytes| drop(launcher::untrusted::parse_hostfile(bytes))),
    ("invitation", |bytes| drop(launcher::untrusted::parse_invitation(bytes))),
    ("job", |bytes| drop(launcher::untrusted::parse_job(bytes))),
    ("slurm", |bytes| drop(launcher::untrusted::parse_allocation_variables(bytes))),
    ("store", |bytes| drop(launcher::untrusted::parse_store_requests(bytes))),
];

/// The target that `FUZZ_TARGET` names.
static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    TARGETS.iter().find(|(target, _)| *target == name).expect("a name of TARGETS").1
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET(bytes));

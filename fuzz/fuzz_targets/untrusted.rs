//! Fuzzes one parser of untrusted input, whose name is in the environment variable `FUZZ_TARGET`.
//!
//! One executable contains every target, because each executable takes long to link.
#![no_main]
use std::{
    alloc::{GlobalAlloc, Layout, System, handle_alloc_error},
    env, fs,
    path::PathBuf,
    process::exit,
    sync::LazyLock,
};

/// The size in bytes from which on a single memory allocation during fuzzing counts as a bug of the
/// parser, because no input of the fuzzer needs that much.
const MAX_ALLOCATION_BYTES: usize = 256 << 20;

/// An allocator that passes each call to the system's allocator, but ends the process at an
/// allocation of more than [`MAX_ALLOCATION_BYTES`].
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

/// A fuzz target, which is a function that passes its input to a parser and ignores the result.
type FuzzTarget = fn(&[u8]);

/// The fuzz targets (functions that pass fuzzed bytes to one parser each), with the names by which
/// `FUZZ_TARGET` selects them. `fuzz/run` reads the names from these lines.
const TARGETS: [(&str, FuzzTarget); 43] = [
    ("adapter_config", |bytes| drop(ckpt::untrusted::parse_adapter_config(bytes))),
    ("dcp_metadata", |bytes| drop(ckpt::untrusted::parse_dcp_metadata(bytes))),
    ("manifest", |bytes| drop(ckpt::untrusted::parse_manifest(bytes))),
    ("optimizer", |bytes| drop(ckpt::untrusted::parse_optimizer(bytes))),
    ("output_record", |bytes| drop(ckpt::untrusted::parse_output_record(bytes))),
    ("pickle", |bytes| drop(ckpt::untrusted::parse_pickle(bytes))),
    ("safetensors", |bytes| drop(ckpt::untrusted::parse_safetensors(bytes))),
    ("torch_file", |bytes| drop(ckpt::untrusted::parse_torch_file(bytes))),
    ("trainer_state", |bytes| drop(ckpt::untrusted::parse_trainer_state(bytes))),
    ("weight_index", |bytes| drop(ckpt::untrusted::parse_weight_index(bytes))),
    ("zip", |bytes| drop(ckpt::untrusted::parse_zip(bytes))),
    ("abort_reason", |bytes| drop(comm::untrusted::parse_abort_reason(bytes))),
    ("rank_frames", |bytes| drop(comm::untrusted::parse_control_frames(bytes))),
    ("rank_handshake", |bytes| drop(comm::untrusted::parse_handshake(bytes))),
    ("dashboard_journal", |bytes| drop(dashboard::untrusted::parse_journal(bytes))),
    ("dashboard_log", |bytes| drop(dashboard::untrusted::format_log(bytes))),
    ("dashboard_status", |bytes| drop(dashboard::untrusted::parse_run_status(bytes))),
    ("http_request", |bytes| drop(dashboard::untrusted::parse_http_request(bytes))),
    ("accelerate", |bytes| drop(launcher::untrusted::parse_accelerate_config(bytes))),
    ("control", |bytes| drop(launcher::untrusted::parse_control_stream(bytes))),
    ("deepspeed", |bytes| drop(launcher::untrusted::parse_deepspeed_config(bytes))),
    ("encrypted", |bytes| drop(launcher::untrusted::parse_encrypted_connection(bytes))),
    ("error_file", |bytes| drop(launcher::untrusted::parse_error_file(bytes))),
    ("flight_recorder", |bytes| drop(launcher::untrusted::parse_flight_recorder(bytes))),
    ("host_list", |bytes| drop(launcher::untrusted::parse_host_list(bytes))),
    ("hostfile", |bytes| drop(launcher::untrusted::parse_hostfile(bytes))),
    ("invitation", |bytes| drop(launcher::untrusted::parse_invitation(bytes))),
    ("job", |bytes| drop(launcher::untrusted::parse_job(bytes))),
    ("journal", |bytes| drop(launcher::untrusted::parse_journal(bytes))),
    ("mlflow_answer", |bytes| drop(launcher::untrusted::parse_mlflow_answer(bytes))),
    ("run_record", |bytes| drop(launcher::untrusted::parse_run_record(bytes))),
    ("slurm", |bytes| drop(launcher::untrusted::parse_allocation_variables(bytes))),
    ("socket_answer", |bytes| drop(launcher::untrusted::parse_socket_answer(bytes))),
    ("store", |bytes| drop(launcher::untrusted::parse_store_requests(bytes))),
    ("tree_frames", |bytes| drop(launcher::untrusted::parse_tree_frames(bytes))),
    ("chat_template", |bytes| drop(worker::untrusted::interpret_chat_template(bytes))),
    ("file_pattern", |bytes| drop(worker::untrusted::parse_file_pattern(bytes))),
    ("model_config", |bytes| drop(worker::untrusted::parse_model_config(bytes))),
    ("parquet", |bytes| drop(worker::untrusted::interpret_parquet(bytes))),
    ("record", |bytes| drop(worker::untrusted::parse_record(bytes))),
    ("sandbox_replies", |bytes| drop(worker::untrusted::parse_sandbox_replies(bytes))),
    ("tokenizer_config", |bytes| drop(worker::untrusted::parse_tokenizer_config(bytes))),
    ("tokenizer", |bytes| drop(worker::untrusted::interpret_tokenizer(bytes))),
];

/// The fuzz target (function that passes fuzzed bytes to one parser) that the environment variable
/// `FUZZ_TARGET` selects.
static SELECTED_TARGET: LazyLock<FuzzTarget> = LazyLock::new(|| {
    let name = env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    TARGETS.iter().find(|(target, _)| *target == name).expect("a name of TARGETS").1
});

/// If the first argument requests a task other than fuzzing (to run as a sandbox process or to
/// write fuzz seeds), performs the task and ends the process. The tasks are the sandbox process,
/// which has no environment variables, and `write-seeds DIR`, which writes the seeds that are not
/// files of a corpus.
fn run_other_task_and_exit() {
    let mut arguments = env::args().skip(1);
    match arguments.next().as_deref() {
        Some(worker::SANDBOX_ARGUMENT) => exit(worker::run_sandbox().into()),
        Some("write-seeds") => {
            let directory = PathBuf::from(arguments.next().expect("a directory"));
            let streams = launcher::untrusted::create_control_streams();
            for (name, bytes) in streams.into_iter().chain(comm::untrusted::create_fuzz_seeds()) {
                fs::write(directory.join(name), bytes).expect("a writable directory");
            }
            exit(0);
        }
        _ => {}
    }
}

libfuzzer_sys::fuzz_target!(
    init: run_other_task_and_exit(),
    |bytes: &[u8]| SELECTED_TARGET(bytes)
);

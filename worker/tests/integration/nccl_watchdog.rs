//! Tests of the watchdog of NCCL: an error that NCCL reports while a rank waits for the GPU ends
//! the wait of every rank.
use crate::{common::*, emulated::open_emulated_gpu, emulated_nccl, own_process::is_own_process};
use comm::{
    AbortReason, Comm, CommError,
    nccl::{NcclComm, NcclError, NcclLibrary},
};
use device::{Dtype, Storage};
use std::{
    ffi::c_int,
    time::{Duration, Instant},
};

/// The fault of libnccl.cpp with which work never ends, and the communicator of one rank fails
/// while the work runs.
const HANGS_AND_FAILS_LATER: c_int = 6;
/// The rank whose communicator fails.
const FAILING_RANK: c_int = 1;
/// A limit on the time until the wait of every rank ends. Without the watchdog, it never ends.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Injects [`HANGS_AND_FAILS_LATER`] into [`FAILING_RANK`].
fn inject_fault() {
    // SAFETY: libnccl.cpp declares the function with this type.
    unsafe {
        let library = libloading::Library::new(emulated_nccl::build_library().join("libnccl.so.2")).unwrap();
        let inject = library.get::<unsafe extern "C" fn(c_int, c_int) -> c_int>(b"fakeFault\0").unwrap();
        inject(HANGS_AND_FAILS_LATER, FAILING_RANK);
    }
}

#[test]
fn an_error_while_a_rank_waits_for_the_gpu_ends_the_wait_of_every_rank() {
    if !is_own_process("nccl_watchdog::an_error_while_a_rank_waits_for_the_gpu_ends_the_wait_of_every_rank") {
        return;
    }
    // SAFETY: no other thread is running. Streams run in threads, so that work can hang.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "side:1") };
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    let errors = run_on_ranks(2, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts.clone(), Duration::from_secs(60)).unwrap();
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        cuda.synchronize().unwrap();
        if comm.rank() == 0 {
            inject_fault();
        }
        comm.barrier().unwrap();
        cuda.with_separate_stream(&mut || {
            comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap();
            let began = Instant::now();
            cuda.synchronize().unwrap();
            assert!(began.elapsed() < WAIT_LIMIT);
        });
        // what the GPU has computed is not used, because the next collective fails
        [comm.barrier().unwrap_err(), comm.all_gather_bytes(&[]).unwrap_err()]
    });
    let message = "remote process exited or there was a network error: injected".to_owned();
    let error = NcclError::Call { function: "all_gather (call 0) of rank 1".into(), status: 6, message };
    let reason = AbortReason::Requested { reason: error.to_string() };
    assert_eq!(errors[0], [CommError::Aborted(reason.clone()), CommError::Aborted(reason)]);
    let found = CommError::Nccl(Box::new(error));
    assert_eq!(errors[1], [found.clone(), found]);
}

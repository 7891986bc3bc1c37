//! Tests how the CUDA backend allocates memory on the emulated GPU, and how it handles a GPU that
//! fails or has no fp8. This is one test, because the emulated GPU is configured per process.

use crate::emulated_gpu;
use crate::own_process::is_own_process;
use device::ops::VectorOps;
use device::{
    Buf, Cuda, Dtype, Storage,
    cuda::{CudaError, LibrarySearchPaths},
    storage::DeviceError,
};
use diagnostic::{Diagnostic, codes::device as codes};

#[test]
fn memory_is_freed_and_failures_are_typed() {
    if !is_own_process("cuda_memory::memory_is_freed_and_failures_are_typed") {
        return;
    }
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("EMULATED_GPU_MEMORY", (8 << 20).to_string()) };
    let configured = vec![emulated_gpu::library_directory().to_owned()];
    let paths = LibrarySearchPaths { configured, ..LibrarySearchPaths::default() };
    let cuda = Cuda::open(&paths, 0, None).expect("the emulated GPU");
    let free = || cuda.query_memory_info().expect("memory info").0;
    let before = free();
    let mut buf = cuda.zeroed(Dtype::Bf16, 1 << 20);
    assert_eq!(before - free(), 2 << 20);
    let Err(error) = cuda.try_zeroed("the head", Dtype::F32, 1 << 40) else {
        panic!("four TiB were allocated")
    };
    assert!(
        matches!(error, CudaError::OutOfMemory { requested: 4_398_046_511_104, purpose: "the head", .. }),
        "{error:?}"
    );
    let diagnostic = Diagnostic::from(error);
    assert_eq!(diagnostic.code(), codes::GPU_OUT_OF_MEMORY);
    insta::assert_snapshot!(diagnostic::render(&diagnostic, false));
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("EMULATED_GPU_FAILS", "cuLaunchKernel:1") };
    cuda.scale(buf.view_mut(), 2.0);
    let failure = cuda.check_status().expect_err("a failed launch");
    assert_eq!(failure.0.code(), codes::CUDA_CALL_FAILED);
    insta::assert_snapshot!(diagnostic::render(&failure.0, false));
    check_that_calls_do_nothing(&cuda, &failure);
    // SAFETY: no other thread runs.
    unsafe { std::env::remove_var("EMULATED_GPU_FAILS") };
    drop(buf);
    // The pool keeps those 2 MiB. They are returned to the system for an allocation that does not
    // fit otherwise.
    let large = cuda.try_zeroed("a test", Dtype::F32, 7 << 18).expect("7 of 8 MiB");
    drop(large);
    assert!(cuda.try_zeroed("a test", Dtype::F32, 9 << 18).is_err(), "9 of 8 MiB");
    assert_eq!(free(), before);
    for (capability, has_fp8) in [("80", false), ("90", true)] {
        // SAFETY: no other thread runs.
        unsafe { std::env::set_var("EMULATED_GPU_CAPABILITY", capability) };
        let result = Cuda::open(&paths, 0, None).expect("the emulated GPU").require_fp8();
        assert_eq!(result.map_err(|e| e.code()), if has_fp8 { Ok(()) } else { Err(codes::GPU_UNSUPPORTED) });
    }
}

/// Checks that calls after a failure neither allocate nor compute, that the first failure remains
/// recorded, and that calls are executed again after the failure was cleared.
fn check_that_calls_do_nothing(cuda: &Cuda, failure: &DeviceError) {
    let free = cuda.query_memory_info().expect("memory info").0;
    let mut absent = cuda.zeroed_with_purpose("a test", Dtype::F32, 1 << 16);
    assert_eq!(cuda.query_memory_info().expect("memory info").0, free);
    assert!(cuda.try_zeroed("a test", Dtype::F32, 1 << 40).is_err());
    cuda.scale(absent.view_mut(), 2.0);
    cuda.copy(absent.view_mut(), Buf::zeroed(1 << 16).view());
    let mut host = Buf::from_slice(&[3.0; 16]);
    cuda.copy(host.view_mut(), absent.view().slice(0..16));
    assert_eq!(host.host_slice(), [3.0; 16]);
    assert_eq!(cuda.sum_squares(absent.view()), 0.0);
    let download = cuda.start_download(&[absent.view()], vec![Buf::zeroed(1 << 16)]);
    assert_eq!(download.wait().map(|_| ()), Err(failure.clone()));
    cuda.record_event().synchronize().expect("no event was recorded");
    assert!(cuda.flush_and_get_stream().is_err());
    assert_eq!(cuda.synchronize(), Err(failure.clone()));
    drop(absent);
    assert_eq!(cuda.take_failure(), Err(failure.clone()));
    assert_eq!(cuda.check_status(), Ok(()));
    let ones = cuda.clone_to_device((&[1.0f32; 16][..]).into());
    assert_eq!(cuda.sum_squares(ones.view()), 16.0);
    assert_eq!(cuda.synchronize(), Ok(()));
}

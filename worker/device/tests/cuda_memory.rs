//! Memory of the emulated GPU, a GPU that fails, and one without fp8. This is one test, because the
//! emulated GPU is configured per process.
mod emulated_gpu;

use device::{
    Cuda, Dtype, Ops, Storage,
    cuda::{CudaError, LibrarySearchPaths},
    storage::DeviceError,
    with_alloc_label,
};
use diagnostic::{Diagnostic, codes::device as codes};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn memory_is_freed_and_failures_are_typed() {
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("EMULATED_GPU_MEMORY", (8 << 20).to_string()) };
    let configured = vec![emulated_gpu::library_directory().to_owned()];
    let paths = LibrarySearchPaths { configured, ..LibrarySearchPaths::default() };
    let cuda = Cuda::open(&paths, 0, None).expect("the emulated GPU");
    let free = || cuda.query_memory_info().expect("memory info").0;
    let before = free();
    let mut buf = cuda.zeroed(Dtype::Bf16, 1 << 20);
    assert_eq!(before - free(), 2 << 20);
    let too_much = || cuda.try_zeroed(Dtype::F32, 1 << 40).map(|_| ());
    let Err(error) = with_alloc_label("the head", too_much) else { panic!("four TiB were allocated") };
    assert!(
        matches!(error, CudaError::OutOfMemory { requested: 4_398_046_511_104, label: "the head", .. }),
        "{error:?}"
    );
    let diagnostic = Diagnostic::from(error);
    assert_eq!(diagnostic.code(), codes::GPU_OUT_OF_MEMORY);
    insta::assert_snapshot!(diagnostic::render(&diagnostic, false));
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("EMULATED_GPU_FAILS", "cuLaunchKernel:1") };
    let panic =
        catch_unwind(AssertUnwindSafe(|| cuda.scale(buf.view_mut(), 2.0))).expect_err("a failed launch");
    let DeviceError(failure) = panic.downcast_ref().expect("a device error");
    assert_eq!(failure.code(), codes::CUDA_CALL_FAILED);
    insta::assert_snapshot!(diagnostic::render(failure, false));
    // SAFETY: no other thread runs.
    unsafe { std::env::remove_var("EMULATED_GPU_FAILS") };
    drop(buf);
    // The pool keeps those 2 MiB. They are returned to the system for an allocation that does not
    // fit otherwise.
    let large = cuda.try_zeroed(Dtype::F32, 7 << 18).expect("7 of 8 MiB");
    drop(large);
    assert!(cuda.try_zeroed(Dtype::F32, 9 << 18).is_err(), "9 of 8 MiB");
    assert_eq!(free(), before);
    for (capability, has_fp8) in [("80", false), ("90", true)] {
        // SAFETY: no other thread runs.
        unsafe { std::env::set_var("EMULATED_GPU_CAPABILITY", capability) };
        let result = Cuda::open(&paths, 0, None).expect("the emulated GPU").require_fp8();
        assert_eq!(result.map_err(|e| e.code()), if has_fp8 { Ok(()) } else { Err(codes::GPU_UNSUPPORTED) });
    }
}

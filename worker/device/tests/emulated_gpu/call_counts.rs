//! Reads how often a process has called each function of the emulated libraries.
use super::emulated_gpu;
use std::ffi::{CString, c_char, c_long};

/// Returns how often this process called a function: a function of the driver (such as
/// `cuLaunchKernel`, without a version suffix), `cublasLtMatmul` or `cudnnBackendExecute`.
pub(crate) fn call_count(function: &str) -> i64 {
    let name = CString::new(function).expect("a name");
    let file = match &function[..5] {
        "cubla" => "libcublasLt.so.13",
        "cudnn" => "cudnn/libcudnn.so.9",
        _ => "libcuda.so.1",
    };
    // SAFETY: an emulated library that is open already; it declares the function like this.
    unsafe {
        let path = emulated_gpu::library_directory().join(file);
        let library = libloading::Library::new(path).expect("an emulated library");
        let count = library
            .get::<unsafe extern "C" fn(*const c_char) -> c_long>(b"emulatedGpuCalls\0")
            .expect("the function that counts calls");
        count(name.as_ptr())
    }
}

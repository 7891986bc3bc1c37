//! What the emulated driver was asked for.
use super::card;
use std::ffi::{CString, c_char, c_long};

/// How often a function of the driver was called in this process (`cuLaunchKernel`, without a version), `cublasLtMatmul` or `cudnnBackendExecute`.
pub(crate) fn calls(function: &str) -> i64 {
    let name = CString::new(function).expect("a name");
    let file = match &function[..5] {
        "cubla" => "libcublasLt.so.13",
        "cudnn" => "cudnn/libcudnn.so.9",
        _ => "libcuda.so.1",
    };
    // SAFETY: an emulated library, which is open already; the function is declared so there.
    unsafe {
        let library = libloading::Library::new(card::folder().join(file)).expect("an emulated library");
        let count = library
            .get::<unsafe extern "C" fn(*const c_char) -> c_long>(b"cardCalls\0")
            .expect("it counts calls");
        count(name.as_ptr())
    }
}

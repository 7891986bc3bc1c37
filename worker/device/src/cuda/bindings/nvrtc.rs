//! The functions of NVRTC that this program calls ([`NvrtcApi`]).
use super::super::error::CudaError;
use super::super::library::CudaLibrary;
use super::super::library_search::{LibrarySearchPaths, OpenLibrary};
use super::cuda_library::{Status, copy_c_string, cuda_library};
use cudarc::nvrtc::sys::nvrtcProgram;
use std::{
    ffi::{c_char, c_int},
    path::PathBuf,
};

cuda_library! {
    /// NVRTC, the run-time compiler, from `libnvrtc.so`.
    NvrtcApi: cudarc::nvrtc::sys, nvrtcResult, Nvrtc, "CUDA 12";
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcGetErrorString(status: Status) -> *const c_char;
    fn nvrtcGetNumSupportedArchs(count: *mut c_int);
    fn nvrtcGetSupportedArchs(architectures: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut nvrtcProgram, source: *const c_char, name: *const c_char, header_count: c_int,
        headers: *const *const c_char, header_names: *const *const c_char,
    );
    fn nvrtcDestroyProgram(program: *mut nvrtcProgram);
    fn nvrtcCompileProgram(program: nvrtcProgram, option_count: c_int, options: *const *const c_char);
    fn nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetCUBIN(program: nvrtcProgram, image: *mut c_char);
    fn nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char);
}

impl NvrtcApi {
    /// Returns NVRTC's description of the status code `status`.
    fn describe_status(&self, status: Status) -> String {
        // SAFETY: returns a static string or null.
        unsafe { copy_c_string((self.nvrtcGetErrorString)(status)) }
    }
}

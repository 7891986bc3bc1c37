//! The functions of cuDNN that this program calls ([`CudnnApi`]).
use super::super::error::CudaError;
use super::super::library::CudaLibrary;
use super::super::library_search::{LibrarySearchPaths, OpenLibrary};
use super::cuda_library::{Status, copy_c_string, cuda_library};
use cudarc::cudnn::sys::*;
use std::{
    ffi::{CStr, c_char, c_void},
    path::PathBuf,
};

/// Maximum size in bytes of an error message that is read from cuDNN.
const MAX_MESSAGE_BYTES: usize = 1 << 12;

cuda_library! {
    /// cuDNN's backend API, which compiles graphs of operations, from `libcudnn.so.9`.
    CudnnApi: cudarc::cudnn::sys, cudnnStatus_t, Cudnn, "cuDNN 9";
    fn cudnnGetVersion() -> usize;
    fn cudnnGetErrorString(status: Status) -> *const c_char;
    fn cudnnGetLastErrorString(message: *mut c_char, bytes: usize) -> ();
    fn cudnnCreate(handle: *mut cudnnHandle_t);
    fn cudnnDestroy(handle: cudnnHandle_t);
    fn cudnnSetStream(handle: cudnnHandle_t, stream: cudaStream_t);
    fn cudnnBackendCreateDescriptor(
        kind: cudnnBackendDescriptorType_t, descriptor: *mut cudnnBackendDescriptor_t,
    );
    fn cudnnBackendDestroyDescriptor(descriptor: cudnnBackendDescriptor_t);
    fn cudnnBackendSetAttribute(
        descriptor: cudnnBackendDescriptor_t, attribute: cudnnBackendAttributeName_t,
        value_type: cudnnBackendAttributeType_t, count: i64, values: *const c_void,
    );
    fn cudnnBackendGetAttribute(
        descriptor: cudnnBackendDescriptor_t, attribute: cudnnBackendAttributeName_t,
        value_type: cudnnBackendAttributeType_t, requested: i64, count: *mut i64, values: *mut c_void,
    );
    fn cudnnBackendFinalize(descriptor: cudnnBackendDescriptor_t);
    fn cudnnBackendExecute(
        handle: cudnnHandle_t, plan: cudnnBackendDescriptor_t, variant_pack: cudnnBackendDescriptor_t,
    );
}

impl CudnnApi {
    /// Returns cuDNN's description of a status code, and its message about the most recent failed
    /// call.
    fn describe_status(&self, status: Status) -> String {
        let mut detail = vec![0u8; MAX_MESSAGE_BYTES];
        // SAFETY: writes at most as many bytes as the buffer has; returns a static string or null.
        let name = unsafe {
            (self.cudnnGetLastErrorString)(detail.as_mut_ptr().cast(), detail.len());
            copy_c_string((self.cudnnGetErrorString)(status))
        };
        let detail = CStr::from_bytes_until_nul(&detail).map(CStr::to_string_lossy).unwrap_or_default();
        match detail.trim() {
            "" => name,
            detail => format!("{name}: {detail}"),
        }
    }
}

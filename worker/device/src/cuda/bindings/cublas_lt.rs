//! The functions of cuBLASLt that this program calls ([`CublasLtApi`]).
use super::super::error::CudaError;
use super::super::library::CudaLibrary;
use super::super::library_search::{LibrarySearchPaths, OpenLibrary};
use super::cuda_library::{Status, copy_c_string, cuda_library};
use cudarc::cublaslt::sys::*;
use std::{
    ffi::{c_char, c_int, c_void},
    path::PathBuf,
};

cuda_library! {
    /// cuBLASLt, the matmul library, from `libcublasLt.so`.
    CublasLtApi: cudarc::cublaslt::sys, cublasStatus_t, CublasLt, "CUDA 12";
    fn cublasLtGetVersion() -> usize;
    fn cublasLtGetStatusString(status: Status) -> *const c_char;
    fn cublasLtCreate(handle: *mut cublasLtHandle_t);
    fn cublasLtDestroy(handle: cublasLtHandle_t);
    fn cublasLtMatmulDescCreate(
        descriptor: *mut cublasLtMatmulDesc_t, compute_type: cublasComputeType_t, scale_type: cudaDataType_t,
    );
    fn cublasLtMatmulDescDestroy(descriptor: cublasLtMatmulDesc_t);
    fn cublasLtMatmulDescSetAttribute(
        descriptor: cublasLtMatmulDesc_t, attribute: cublasLtMatmulDescAttributes_t, value: *const c_void,
        bytes: usize,
    );
    fn cublasLtMatrixLayoutCreate(
        layout: *mut cublasLtMatrixLayout_t, data_type: cudaDataType, rows: u64, columns: u64, stride: i64,
    );
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t);
    fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: cublasLtMatmulPreference_t, attribute: cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void, bytes: usize,
    );
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: cublasLtHandle_t, descriptor: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t, c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t, requested: c_int, results: *mut cublasLtMatmulHeuristicResult_t,
        count: *mut c_int,
    );
    fn cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: *const cublasLtMatmulAlgo_t, attribute: cublasLtMatmulAlgoConfigAttributes_t,
        value: *mut c_void, bytes: usize, written: *mut usize,
    );
    fn cublasLtMatmulAlgoCheck(
        handle: cublasLtHandle_t, descriptor: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t, c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t, result: *mut cublasLtMatmulHeuristicResult_t,
    );
    fn cublasLtMatmul(
        handle: cublasLtHandle_t, descriptor: cublasLtMatmulDesc_t, alpha: *const c_void, a: *const c_void,
        a_layout: cublasLtMatrixLayout_t, b: *const c_void, b_layout: cublasLtMatrixLayout_t,
        beta: *const c_void, c: *const c_void, c_layout: cublasLtMatrixLayout_t, d: *mut c_void,
        d_layout: cublasLtMatrixLayout_t, algorithm: *const cublasLtMatmulAlgo_t, workspace: *mut c_void,
        workspace_bytes: usize, stream: cudaStream_t,
    );
}

impl CublasLtApi {
    /// Returns cuBLASLt's description of the status code `status`.
    fn describe_status(&self, status: Status) -> String {
        // SAFETY: returns a static string or null.
        unsafe { copy_c_string((self.cublasLtGetStatusString)(status)) }
    }
}

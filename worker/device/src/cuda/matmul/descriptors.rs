//! cuBLASLt's descriptors of a matmul, and of limits (such as the largest workspace) for the
//! algorithms that cuBLASLt suggests.
use super::super::bindings::{Address, CublasLtApi, cublas_lt_sys::*};
use super::super::error::Result;
use super::epilogue::Epilogue;
use std::{ffi::c_int, ptr, sync::Arc};

/// The parts of one matmul call that contain GPU addresses, which must be set in cuBLASLt's
/// descriptor before the call: scales and epilogue.
#[derive(Clone, Copy)]
pub(super) struct CallPointers {
    /// GPU addresses of the scales of `a` and `b`; `None` unless the operands are fp8.
    pub(super) scales: Option<[Address; 2]>,
    pub(super) epilogue: Epilogue,
    /// The number of elements from row to row in the epilogue's matrix.
    pub(super) aux_stride: usize,
}

impl CallPointers {
    /// Returns true if the matmul has neither scales nor an epilogue.
    pub(super) fn is_empty(self) -> bool {
        self.scales.is_none() && self.epilogue == Epilogue::None
    }
}

/// cuBLASLt descriptor of a matmul: transposition of the operands, scales and epilogue.
pub(super) struct MatmulDescriptor {
    library: Arc<CublasLtApi>,
    pub(super) handle: cublasLtMatmulDesc_t,
}

impl MatmulDescriptor {
    /// Creates cuBLASLt's descriptor of a matmul: transposition of the operands, scales and
    /// epilogue. `transposed` states whether `a` and `b`, in this order, are transposed.
    pub(super) fn new(
        library: &Arc<CublasLtApi>,
        transposed: [bool; 2],
        pointers: CallPointers,
    ) -> Result<Self> {
        use cublasLtMatmulDescAttributes_t::*;
        let (sums, scale_type) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let mut descriptor = MatmulDescriptor { library: library.clone(), handle: ptr::null_mut() };
        // SAFETY: writes one handle.
        unsafe { library.cublasLtMatmulDescCreate(&mut descriptor.handle, sums, scale_type) }?;
        let [a, b] = transposed.map(|transposed| c_int::from(transposed).to_ne_bytes());
        descriptor.set_attribute(CUBLASLT_MATMUL_DESC_TRANSA, &b)?;
        descriptor.set_attribute(CUBLASLT_MATMUL_DESC_TRANSB, &a)?;
        let epilogue = pointers.epilogue;
        if epilogue != Epilogue::None {
            let kind = epilogue.kind() as u32;
            descriptor.set_attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, &kind.to_ne_bytes())?;
        }
        if let Some(vector) = epilogue.vector() {
            descriptor.set_attribute(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector.to_ne_bytes())?;
        }
        if let Some(aux) = epilogue.aux() {
            let stride = pointers.aux_stride as i64;
            descriptor.set_attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux.to_ne_bytes())?;
            descriptor.set_attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride.to_ne_bytes())?;
        }
        if let Some([a, b]) = pointers.scales {
            descriptor.set_attribute(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b.to_ne_bytes())?;
            descriptor.set_attribute(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a.to_ne_bytes())?;
        }
        Ok(descriptor)
    }

    /// Sets an attribute of the matmul descriptor.
    fn set_attribute(&self, attribute: cublasLtMatmulDescAttributes_t, value: &[u8]) -> Result<()> {
        let (at, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: the value has `len` bytes.
        unsafe { self.library.cublasLtMatmulDescSetAttribute(self.handle, attribute, at, len) }
    }
}

impl Drop for MatmulDescriptor {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created by this library, destroyed once.
            let _ = unsafe { (self.library.cublasLtMatmulDescDestroy)(self.handle) };
        }
    }
}

/// cuBLASLt's descriptor of limits on the algorithms that its heuristic may suggest.
pub(super) struct AlgorithmPreference<'a> {
    library: &'a CublasLtApi,
    pub(super) handle: cublasLtMatmulPreference_t,
}

impl<'a> AlgorithmPreference<'a> {
    /// Creates the descriptor of limits on the algorithms that cuBLASLt's heuristic may suggest. It
    /// contains no limits yet.
    pub(super) fn new(library: &'a CublasLtApi) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { library.cublasLtMatmulPreferenceCreate(&mut handle) }?;
        Ok(AlgorithmPreference { library, handle })
    }

    /// Sets a limit on cuBLASLt's choice of an algorithm, such as the maximum size of the
    /// workspace.
    pub(super) fn set_attribute(
        &self,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: &[u8],
    ) -> Result<()> {
        let (at, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: the value has `len` bytes.
        unsafe { self.library.cublasLtMatmulPreferenceSetAttribute(self.handle, attribute, at, len) }
    }
}

impl Drop for AlgorithmPreference<'_> {
    fn drop(&mut self) {
        // SAFETY: created by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}

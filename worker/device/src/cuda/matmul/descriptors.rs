//! cuBLASLt's descriptors of matmuls and of the algorithms that may be used.
use super::super::bindings::{
    Address, BIAS, COMPUTE_F32, CublasLtApi, EPILOGUE, Handle, R_F32, SCALE_A, SCALE_B, TRANSPOSE_A,
    TRANSPOSE_B, WITH_BIAS,
};
use super::super::error::{CudaError, Result};
use std::{
    ffi::{CStr, c_int},
    ptr,
    sync::Arc,
};

/// GPU addresses of scales and bias. They are part of a matmul's descriptor and may differ from
/// call to call.
#[derive(Clone, Copy)]
pub(super) struct CallPointers {
    /// GPU addresses of the scales of `a` and `b`; `None` unless the operands are fp8.
    pub(super) scales: Option<[Address; 2]>,
    pub(super) bias: Option<Address>,
}

impl CallPointers {
    /// Returns true if there are no addresses.
    pub(super) fn is_empty(self) -> bool {
        self.scales.is_none() && self.bias.is_none()
    }
}

/// cuBLASLt descriptor of a matmul: transposition of the operands, scales and bias.
pub(super) struct MatmulDescriptor {
    library: Arc<CublasLtApi>,
    pub(super) handle: Handle,
}

impl MatmulDescriptor {
    /// Creates the descriptor of a matmul. `transposed` states whether `a` and `b`, in this order,
    /// are transposed.
    pub(super) fn new(
        library: &Arc<CublasLtApi>,
        transposed: [bool; 2],
        pointers: CallPointers,
    ) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (library.cublasLtMatmulDescCreate)(&mut handle, COMPUTE_F32, R_F32) };
        let descriptor = MatmulDescriptor { library: library.clone(), handle };
        check_status(library, "cublasLtMatmulDescCreate", status)?;
        for (attribute, transposed) in [(TRANSPOSE_A, transposed[1]), (TRANSPOSE_B, transposed[0])] {
            descriptor.set(attribute, &c_int::from(transposed).to_ne_bytes())?;
        }
        if let Some(bias) = pointers.bias {
            descriptor.set(EPILOGUE, &WITH_BIAS.to_ne_bytes())?;
            descriptor.set(BIAS, &bias.to_ne_bytes())?;
        }
        for (attribute, scale) in pointers.scales.into_iter().flat_map(|[a, b]| [(SCALE_A, b), (SCALE_B, a)])
        {
            descriptor.set(attribute, &scale.to_ne_bytes())?;
        }
        Ok(descriptor)
    }

    /// Sets an attribute of the matmul descriptor (`CUBLASLT_MATMUL_DESC_…`).
    fn set(&self, attribute: c_int, value: &[u8]) -> Result<()> {
        let (at, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: the value has `len` bytes.
        let status =
            unsafe { (self.library.cublasLtMatmulDescSetAttribute)(self.handle, attribute, at, len) };
        check_status(&self.library, "cublasLtMatmulDescSetAttribute", status)
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

/// Limits of the algorithms that the heuristic may suggest.
pub(super) struct AlgorithmPreference<'a> {
    library: &'a CublasLtApi,
    pub(super) handle: Handle,
}

impl<'a> AlgorithmPreference<'a> {
    /// Creates a preference without limits.
    pub(super) fn new(library: &'a CublasLtApi) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut handle) };
        check_status(library, "cublasLtMatmulPreferenceCreate", status)?;
        Ok(AlgorithmPreference { library, handle })
    }

    /// Sets an attribute of the preference (`CUBLASLT_MATMUL_PREF_…`).
    pub(super) fn set_attribute(&self, attribute: c_int, value: &[u8]) -> Result<()> {
        // SAFETY: the value has as many bytes as its length.
        let status = unsafe {
            (self.library.cublasLtMatmulPreferenceSetAttribute)(
                self.handle,
                attribute,
                value.as_ptr().cast(),
                value.len(),
            )
        };
        check_status(self.library, "cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for AlgorithmPreference<'_> {
    fn drop(&mut self) {
        // SAFETY: created by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}

/// Converts a status code of `function` to a result. The error contains the library's own message.
pub(super) fn check_status(library: &CublasLtApi, function: &str, status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: returns a static string or null.
    let message = unsafe {
        let at = (library.cublasLtGetStatusString)(status);
        if at.is_null() { "unknown error".into() } else { CStr::from_ptr(at).to_string_lossy().into_owned() }
    };
    Err(CudaError::Call { function: function.to_owned(), status, message })
}

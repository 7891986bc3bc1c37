//! cuBLASLt's descriptions of products, made and given back.
use super::super::binding::{
    Address, BIAS, Blas, COMPUTE_F32, EPILOGUE, Handle, R_F32, SCALE_A, SCALE_B, TRANSPOSE_A, TRANSPOSE_B,
    WITH_BIAS,
};
use super::super::error::{CudaError, Result};
use std::{
    ffi::{CStr, c_int},
    ptr,
    sync::Arc,
};

/// What lies elsewhere in each product, and is in its description: scales of the operands, a bias.
#[derive(Clone, Copy)]
pub(super) struct Own {
    pub(super) scales: Option<[Address; 2]>,
    pub(super) bias: Option<Address>,
}

impl Own {
    pub(super) fn is_there(self) -> bool {
        self.scales.is_some() || self.bias.is_some()
    }
}

/// How operands are multiplied, and by what.
pub(super) struct Desc {
    library: Arc<Blas>,
    pub(super) handle: Handle,
}

impl Desc {
    /// Of a product with these operands transposed, each pair in the order `a`, `b`.
    pub(super) fn new(library: &Arc<Blas>, transposed: [bool; 2], own: Own) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (library.cublasLtMatmulDescCreate)(&mut handle, COMPUTE_F32, R_F32) };
        let desc = Desc { library: library.clone(), handle };
        check(library, "cublasLtMatmulDescCreate", code)?;
        for (which, transposed) in [(TRANSPOSE_A, transposed[1]), (TRANSPOSE_B, transposed[0])] {
            desc.set(which, &c_int::from(transposed).to_ne_bytes())?;
        }
        if let Some(bias) = own.bias {
            desc.set(EPILOGUE, &WITH_BIAS.to_ne_bytes())?;
            desc.set(BIAS, &bias.to_ne_bytes())?;
        }
        for (which, scale) in own.scales.into_iter().flat_map(|[a, b]| [(SCALE_A, b), (SCALE_B, a)]) {
            desc.set(which, &scale.to_ne_bytes())?;
        }
        Ok(desc)
    }

    fn set(&self, which: c_int, value: &[u8]) -> Result<()> {
        let (at, len) = (value.as_ptr().cast(), value.len());
        // SAFETY: as many bytes as are said.
        let code = unsafe { (self.library.cublasLtMatmulDescSetAttribute)(self.handle, which, at, len) };
        check(&self.library, "cublasLtMatmulDescSetAttribute", code)
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by this library, destroyed once.
            let _ = unsafe { (self.library.cublasLtMatmulDescDestroy)(self.handle) };
        }
    }
}

/// What algorithms may use.
pub(super) struct Preference<'a> {
    library: &'a Blas,
    pub(super) handle: Handle,
}

impl<'a> Preference<'a> {
    pub(super) fn new(library: &'a Blas) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written.
        let code = unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut handle) };
        check(library, "cublasLtMatmulPreferenceCreate", code)?;
        Ok(Preference { library, handle })
    }

    pub(super) fn set(&self, which: c_int, value: &[u8]) -> Result<()> {
        // SAFETY: as many bytes as are said.
        let code = unsafe {
            (self.library.cublasLtMatmulPreferenceSetAttribute)(
                self.handle,
                which,
                value.as_ptr().cast(),
                value.len(),
            )
        };
        check(self.library, "cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}

/// An error of the library in its own words.
pub(super) fn check(library: &Blas, what: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: a text that never ends to live, or null.
    let said = unsafe {
        let at = (library.cublasLtGetStatusString)(code);
        if at.is_null() {
            "an unknown error".into()
        } else {
            CStr::from_ptr(at).to_string_lossy().into_owned()
        }
    };
    Err(CudaError::Call { what: what.to_owned(), code, said })
}

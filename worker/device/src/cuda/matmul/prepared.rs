//! A matmul with its algorithm, addresses and workspace, which is ready to be issued to a stream
//! ([`PreparedMatmul`]).
use super::super::bindings::{
    Address, CublasLtApi,
    cublas_lt_sys::{cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatrixLayout_t},
    driver_sys::CUstream,
};
use super::super::error::Result;
use super::descriptors::MatmulDescriptor;
use super::request::Matmul;
use std::{ffi::c_void, ptr, sync::Arc};

/// A handle of the cuBLASLt library (`cublasLtHandle_t`) for one GPU. Dropping it closes the
/// handle.
pub(super) struct CublasLtHandle {
    pub(super) library: Arc<CublasLtApi>,
    pub(super) handle: cublasLtHandle_t,
}

// SAFETY: several threads may use the handle at once, because cuBLASLt keeps no state in it.
unsafe impl Send for CublasLtHandle {}
// SAFETY: as for Send.
unsafe impl Sync for CublasLtHandle {}

impl Drop for CublasLtHandle {
    fn drop(&mut self) {
        // SAFETY: created by this library, destroyed once.
        let _ = unsafe { (self.library.cublasLtDestroy)(self.handle) };
    }
}

impl CublasLtHandle {
    /// Issues a matmul to `stream` immediately, without recording it for a CUDA graph. The last
    /// argument is the algorithm, and the address and the size in bytes of its workspace.
    pub(super) fn issue_matmul(
        &self,
        stream: CUstream,
        matmul: &Matmul,
        descriptor: &MatmulDescriptor,
        [first, second, result]: [cublasLtMatrixLayout_t; 3],
        (algorithm, workspace, bytes): (&cublasLtMatmulAlgo_t, Address, usize),
    ) -> Result<()> {
        let (one, beta) = (1.0f32, if matmul.add { 1.0f32 } else { 0.0 });
        let scalar = |x: &f32| ptr::from_ref(x).cast::<c_void>();
        let pointer = |at: Address| ptr::without_provenance_mut::<c_void>(at as usize);
        // SAFETY: the layouts describe the operands' sizes, and the ops checked that the views are
        // as large. The workspace is freed in the stream's order, after this matmul.
        unsafe {
            self.library.cublasLtMatmul(
                self.handle,
                descriptor.handle,
                scalar(&one),
                pointer(matmul.b.at),
                first,
                pointer(matmul.a.at),
                second,
                scalar(&beta),
                pointer(matmul.c.at),
                result,
                pointer(matmul.c.at),
                result,
                algorithm,
                pointer(workspace),
                bytes,
                stream.cast(),
            )
        }
    }
}

/// cuBLASLt's descriptors and the chosen algorithm for matmuls with certain sizes, strides, types
/// and alignments.
pub(super) struct MatmulPlan {
    pub(super) descriptor: MatmulDescriptor,
    pub(super) layouts: Arc<MatrixLayouts>,
    pub(super) algorithm: cublasLtMatmulAlgo_t,
    /// Size in bytes of the workspace that the algorithm needs.
    pub(super) workspace: usize,
}

// SAFETY: descriptors are only read after they are complete.
unsafe impl Send for MatmulPlan {}
// SAFETY: as for Send.
unsafe impl Sync for MatmulPlan {}

/// cuBLASLt's descriptors of the sizes, strides and types of a matmul's two operands and of its
/// result.
pub(super) struct MatrixLayouts {
    library: Arc<CublasLtApi>,
    pub(super) handles: [cublasLtMatrixLayout_t; 3],
}

// SAFETY: layouts are only read after they are complete.
unsafe impl Send for MatrixLayouts {}
// SAFETY: as for Send.
unsafe impl Sync for MatrixLayouts {}

impl MatrixLayouts {
    /// Creates cuBLASLt's descriptors of the operands and the result of `matmul`, as if the matmul
    /// had the sizes `[m, n, k]`.
    pub(super) fn new(
        library: &Arc<CublasLtApi>,
        matmul: &Matmul,
        [m, n, k]: [usize; 3],
    ) -> Result<MatrixLayouts> {
        let Matmul { a, b, c, .. } = matmul;
        let [a_type, b_type, c_type] = matmul.cuda_types();
        let stored = |rows, columns, transposed| if transposed { (columns, rows) } else { (rows, columns) };
        let shapes = [
            (stored(n, k, b.transposed), b.stride, b_type),
            (stored(k, m, a.transposed), a.stride, a_type),
            ((n, m), c.stride, c_type),
        ];
        let mut layouts = MatrixLayouts { library: library.clone(), handles: [ptr::null_mut(); 3] };
        for (layout, ((rows, columns), stride, dtype)) in layouts.handles.iter_mut().zip(shapes) {
            // SAFETY: writes one handle.
            unsafe {
                library.cublasLtMatrixLayoutCreate(layout, dtype, rows as u64, columns as u64, stride as i64)
            }?;
        }
        Ok(layouts)
    }
}

impl Drop for MatrixLayouts {
    fn drop(&mut self) {
        for layout in self.handles.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: created by this library, destroyed once.
            let _ = unsafe { (self.library.cublasLtMatrixLayoutDestroy)(layout) };
        }
    }
}

/// A matmul with all its arguments, its algorithm and its workspace, ready to be issued to a stream
/// or recorded for a CUDA graph.
#[derive(Clone)]
pub(in super::super) struct PreparedMatmul {
    pub(super) lt: Arc<CublasLtHandle>,
    pub(super) matmul: Matmul,
    pub(super) plan: Arc<MatmulPlan>,
    /// The layouts of the plan, or those of this matmul if a size varies.
    pub(super) layouts: Arc<MatrixLayouts>,
    pub(super) workspace: Address,
    /// Size in bytes of the workspace that the algorithm needs for this matmul.
    pub(super) workspace_bytes: usize,
}

impl PartialEq for PreparedMatmul {
    fn eq(&self, other: &Self) -> bool {
        self.matmul == other.matmul
            && self.workspace == other.workspace
            && Arc::ptr_eq(&self.plan, &other.plan)
    }
}

impl PreparedMatmul {
    /// Issues the matmul to `stream` immediately, without recording it for a CUDA graph.
    pub(in super::super) fn issue(&self, stream: CUstream) -> Result<()> {
        let PreparedMatmul { lt, matmul, plan, layouts, workspace, workspace_bytes } = self;
        // The plan's descriptor is shared between threads, so addresses need a separate one.
        let pointers = matmul.call_pointers();
        let transposed = [matmul.a.transposed, matmul.b.transposed];
        let separate = (!pointers.is_empty())
            .then(|| MatmulDescriptor::new(&lt.library, transposed, pointers))
            .transpose()?;
        let descriptor = separate.as_ref().unwrap_or(&plan.descriptor);
        let algorithm = (&plan.algorithm, *workspace, *workspace_bytes);
        lt.issue_matmul(stream, matmul, descriptor, layouts.handles, algorithm)
    }

    /// Returns numbers that identify the matmul by its sizes and addresses; their hash serves to
    /// recognize repeated sequences of GPU calls. The words of different matmuls may be equal, but
    /// rarely are.
    pub(in super::super) fn list_words_to_hash(&self) -> [u64; 6] {
        let Matmul { m, n, a, b, c, .. } = self.matmul;
        [m as u64, n as u64, a.at, b.at, c.at, self.workspace]
    }
}

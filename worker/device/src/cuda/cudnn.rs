//! Attention by cuDNN: one graph of operations per shape, which the library compiles for the GPU.
//!
//! The operations are the ones that NVIDIA's cuDNN frontend generates for attention. The library
//! recognizes a graph by its form, and rejects every other form as not supported.
mod attention_graph;
mod backend_selection;
mod descriptor;
mod execution_plan;
mod operation_graph;

use super::bindings::{CudnnApi, Handle};
use super::error::{CudaError, Result};
use super::library_search::{CudaLibrary, LibrarySearchPaths};
use crate::ops::AttentionShape;
use attention_graph::AttentionMask;
pub use attention_graph::estimate_cudnn_workspace_bytes;
pub(super) use attention_graph::{AttentionOperands, AttentionPass};
pub use backend_selection::AttentionBackend;
pub(super) use backend_selection::CudnnAttention;
use descriptor::Descriptor;
pub(super) use execution_plan::PreparedPlan;
use execution_plan::{ExecutionPlan, PlanTarget};
use std::{
    ffi::{CStr, c_int},
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// Oldest supported version, 9.10. It is the first version whose graphs accept an infinite mask
/// value.
const MIN_VERSION: usize = 91_000;
/// Maximum size in bytes of an error message that is read from cuDNN.
const MAX_MESSAGE: usize = 1 << 12;

/// The opened cuDNN library, with a handle for one GPU.
pub(super) struct Cudnn {
    library: Arc<CudnnApi>,
    version: usize,
    path: PathBuf,
    /// The library's handle of the GPU; `None` if the library was opened without a GPU.
    handle: Mutex<Option<CudnnHandle>>,
}

/// A cuDNN handle. Only one thread may use it at a time. Dropping it closes the handle.
struct CudnnHandle {
    library: Arc<CudnnApi>,
    handle: Handle,
}

// SAFETY: any thread may use the handle, one at a time.
unsafe impl Send for CudnnHandle {}

impl Drop for CudnnHandle {
    fn drop(&mut self) {
        // SAFETY: created by this library, destroyed once.
        let _ = unsafe { (self.library.cudnnDestroy)(self.handle) };
    }
}

/// Returns the library's version, such as `9.19.0`, and path. Does not use a GPU.
pub(super) fn query_library_version(paths: &LibrarySearchPaths) -> Result<(String, PathBuf)> {
    let cudnn = Cudnn::open_without_gpu(paths)?;
    Ok((cudnn.format_version(), cudnn.path))
}

impl Cudnn {
    /// Opens cuDNN for the GPU whose context is current in this thread.
    fn open(paths: &LibrarySearchPaths) -> Result<Cudnn> {
        let cudnn = Cudnn::open_without_gpu(paths)?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (cudnn.library.cudnnCreate)(&mut handle) };
        check_status(&cudnn.library, "cudnnCreate", status)?;
        let handle = CudnnHandle { library: cudnn.library.clone(), handle };
        Ok(Cudnn { handle: Mutex::new(Some(handle)), ..cudnn })
    }

    /// Opens cuDNN without a GPU, only to create execution plans.
    fn open_without_gpu(paths: &LibrarySearchPaths) -> Result<Cudnn> {
        let opened = paths.open(CudaLibrary::Cudnn)?;
        let path = opened.path.clone();
        let library = Arc::new(CudnnApi::load(opened)?);
        // SAFETY: no preconditions.
        let version = unsafe { (library.cudnnGetVersion)() };
        let cudnn = Cudnn { library, version, path, handle: Mutex::new(None) };
        if version < MIN_VERSION {
            let found = format!("cuDNN {}", cudnn.format_version());
            let required = "cuDNN 9.10 or newer".to_owned();
            return Err(CudaError::LibraryTooOld {
                library: CudaLibrary::Cudnn,
                path: cudnn.path,
                found,
                required,
            });
        }
        Ok(cudnn)
    }

    /// Formats cuDNN's version, such as `9.19.0`.
    fn format_version(&self) -> String {
        let v = self.version;
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Returns cuDNN's execution plans for a pass of attention on the GPU, the library's best guess
    /// first. There are none if cuDNN does not support the pass.
    fn create_plans(
        &self,
        pass: &AttentionPass,
    ) -> Result<impl Iterator<Item = Result<ExecutionPlan>> + use<>> {
        self.with_handle(|handle| {
            attention_graph::create_attention_plans(&self.library, pass, PlanTarget::Handle(handle))
        })
    }

    /// Returns the bytes of GPU memory that cuDNN's first plan for a pass needs in addition to the
    /// operands. `properties` describes the GPU as JSON in cuDNN's form. Returns `None` if there is
    /// no plan.
    fn compute_plan_workspace(&self, pass: &AttentionPass, properties: &str) -> Result<Option<usize>> {
        let target = PlanTarget::Properties(Descriptor::from_device_properties(&self.library, properties)?);
        let plan =
            attention_graph::create_attention_plans(&self.library, pass, target)?.next().transpose()?;
        let sums = pass.list_extra_tensors().iter().map(|t| t.elements * size_of::<f32>()).sum::<usize>();
        Ok(plan.map(|plan| plan.workspace + sums))
    }

    /// Runs `f` with the cuDNN handle, which is locked meanwhile. Panics if cuDNN was opened
    /// without a GPU.
    fn with_handle<T>(&self, f: impl FnOnce(Handle) -> Result<T>) -> Result<T> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.as_ref().map_or_else(|| unreachable!("cuDNN was opened without a GPU"), |h| f(h.handle))
    }

    /// Issues an execution plan to a stream immediately. `variant_pack` contains the addresses of
    /// the plan's tensors.
    fn execute(&self, plan: &ExecutionPlan, variant_pack: &Descriptor, stream: Handle) -> Result<()> {
        self.with_handle(|handle| {
            // SAFETY: handle and stream live.
            let status = unsafe { (self.library.cudnnSetStream)(handle, stream) };
            check_status(&self.library, "cudnnSetStream", status)?;
            // SAFETY: plan and pack are finalized. The ops checked that the operands are as large
            // as the plan's tensors.
            let status =
                unsafe { (self.library.cudnnBackendExecute)(handle, plan.handle(), variant_pack.handle()) };
            check_status(&self.library, "cudnnBackendExecute", status)
        })
    }
}

/// Returns the bytes that cuDNN's plans for the forward and the backward pass of attention need in
/// addition to their operands. A value is `None` if there is no plan.
///
/// The GPU need not exist: `properties` describes it, as JSON in cuDNN's form.
pub fn compute_cudnn_plan_workspaces(
    paths: &LibrarySearchPaths,
    properties: &str,
    shape: AttentionShape,
    window: Option<usize>,
) -> Result<[Option<usize>; 2]> {
    let cudnn = Cudnn::open_without_gpu(paths)?;
    let mask = window.map_or(AttentionMask::Causal, AttentionMask::Window);
    let workspace =
        |is_backward| cudnn.compute_plan_workspace(&AttentionPass { shape, mask, is_backward }, properties);
    Ok([workspace(false)?, workspace(true)?])
}

/// Fails with cuDNN's own messages if `status`, which `function` returned, is an error.
fn check_status(library: &CudnnApi, function: &str, status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let mut detail = vec![0u8; MAX_MESSAGE];
    // SAFETY: writes at most as many bytes as the buffer has; returns a static string or null.
    let name = unsafe {
        (library.cudnnGetLastErrorString)(detail.as_mut_ptr().cast(), detail.len());
        let name = (library.cudnnGetErrorString)(status);
        if name.is_null() { "unknown error".into() } else { CStr::from_ptr(name).to_string_lossy() }
    };
    let detail = CStr::from_bytes_until_nul(&detail).map(CStr::to_string_lossy).unwrap_or_default();
    let message = match detail.trim() {
        "" => name.into_owned(),
        detail => format!("{name}: {detail}"),
    };
    Err(CudaError::Call { function: function.to_owned(), status, message })
}

//! The opened cuDNN library with its handle for a GPU ([`Cudnn`]).
use super::super::bindings::{CudnnApi, cudnn_sys::cudnnHandle_t};
use super::super::error::{CudaError, Result};
use super::super::library::CudaLibrary;
use super::super::library_search::LibrarySearchPaths;
use std::{
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// The oldest supported version of cuDNN, 9.10. It is the first version whose graphs accept an
/// infinite mask value.
const MIN_VERSION: usize = 91_000;

/// The opened cuDNN library, with a handle for one GPU.
pub(in super::super) struct Cudnn {
    pub(super) library: Arc<CudnnApi>,
    version: usize,
    pub(super) path: PathBuf,
    /// The library's handle of the GPU; `None` if the library was opened without a GPU.
    handle: Mutex<Option<CudnnHandle>>,
}

/// A cuDNN handle (`cudnnHandle_t`), which is destroyed when dropped. Only one thread may use it at
/// a time.
struct CudnnHandle {
    library: Arc<CudnnApi>,
    handle: cudnnHandle_t,
}

// SAFETY: any thread may use the handle, one at a time.
unsafe impl Send for CudnnHandle {}

impl Drop for CudnnHandle {
    fn drop(&mut self) {
        // SAFETY: created by this library, destroyed once.
        let _ = unsafe { (self.library.cudnnDestroy)(self.handle) };
    }
}

impl Cudnn {
    /// Opens cuDNN for the GPU whose context is current in this thread.
    pub(super) fn open(paths: &LibrarySearchPaths) -> Result<Cudnn> {
        let cudnn = Cudnn::open_without_gpu(paths)?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { cudnn.library.cudnnCreate(&mut handle) }?;
        let handle = CudnnHandle { library: cudnn.library.clone(), handle };
        Ok(Cudnn { handle: Mutex::new(Some(handle)), ..cudnn })
    }

    /// Opens cuDNN on a machine that may have no GPU, only to compile execution plans for GPUs that
    /// are known by their properties.
    pub(super) fn open_without_gpu(paths: &LibrarySearchPaths) -> Result<Cudnn> {
        let (library, path) = CudnnApi::open(paths)?;
        // SAFETY: no preconditions.
        let version = unsafe { (library.cudnnGetVersion)() };
        let cudnn = Cudnn { library: Arc::new(library), version, path, handle: Mutex::new(None) };
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

    /// Formats the version of the opened cuDNN library, such as `9.19.0`.
    pub(super) fn format_version(&self) -> String {
        let v = self.version;
        format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Locks cuDNN's handle of the GPU and runs `f` with it. Panics if cuDNN was opened without a
    /// GPU.
    pub(super) fn with_handle<T>(&self, f: impl FnOnce(cudnnHandle_t) -> Result<T>) -> Result<T> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.as_ref().map_or_else(|| unreachable!("cuDNN was opened without a GPU"), |h| f(h.handle))
    }
}

//! The backend for NVIDIA GPUs.
//!
//! Building it needs no CUDA toolkit. At run time it opens CUDA's libraries where they are found on
//! the machine ([`library_search`]). Kernels are compiled for the GPU's exact architecture when
//! they are first needed, and cached on disk ([`compile`]). A thread's work goes through one
//! stream, the main stream or the thread's own. Ops return before their work is complete, and their
//! work runs in the order of the thread's calls.
//!
//! Ops return no errors. A failure is a panic with a [`DeviceError`], which ends the worker with
//! one message. Because work is asynchronous, a later call than the one that caused it may report
//! it.
mod activation;
mod attention;
mod bindings;
mod classifier;
mod compile;
mod context;
mod cudnn;
mod disk_cache;
mod error;
mod flat;
mod fp8;
mod graphs;
mod host_inputs;
mod launch;
mod library_search;
mod matmul;
mod memory;
mod norm;
mod ops;
mod profile;
mod properties;
mod rows;
mod storage;
mod streams;

pub use classifier::classifier_workspace_bytes;
pub use cudnn::{AttentionBackend, cudnn_plan_workspaces, cudnn_workspace_bytes};
pub use error::{CudaError, Result};
pub use graphs::GraphStats;
pub use library_search::{CudaLibrary, LibraryPaths, OpenLibrary, RejectReason, RejectedLibrary};
pub use matmul::MATMUL_WORKSPACE_BYTES;
pub use profile::ProfileEntry;
pub use properties::GpuProperties;

use crate::buffer::{Buf, Dtype, MemoryOwner, View, ViewMut};
use crate::storage::DeviceError;
use bindings::Address;
use compile::{KernelModules, KernelSource, Nvrtc};
use context::GpuContext;
use cudnn::CudnnAttention;
use graphs::GraphAutotuner;
use host_inputs::HostInputs;
use launch::{KernelArg, LaunchConfig};
use matmul::{CublasLt, Matmul};
use memory::DeviceMemory;
use profile::Profile;
use std::{
    collections::HashMap,
    ffi::CStr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::{self, ThreadId},
};
use streams::CudaEvent;

/// [`crate::Ops`] on one NVIDIA GPU.
pub struct Cuda {
    kernels: KernelModules,
    cublas_lt: CublasLt,
    /// Set if cuDNN may compute attention.
    cudnn: OnceLock<CudnnAttention>,
    /// By stream and thread, because inputs of one thread would overwrite those of another.
    host_inputs: Mutex<HashMap<(usize, ThreadId), HostInputs>>,
    /// Begin and end of timed waits that have not been counted yet.
    timed_waits: Mutex<Vec<[CudaEvent; 2]>>,
    profile: Profile,
    /// Measures whether CUDA graphs are faster, until that is known.
    graph_tuner: Mutex<Option<GraphAutotuner>>,
    /// The last field: fields are dropped in order, and cuBLASLt must be closed before the context.
    gpu: Arc<GpuContext>,
}

/// Versions and paths of the libraries that were opened for a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedLibraries {
    /// NVRTC's version, such as (13, 0), and path.
    pub nvrtc: ((u32, u32), PathBuf),
    /// cuBLASLt's version (130100 is 13.1.0) and path.
    pub cublas_lt: (usize, PathBuf),
}

impl MemoryOwner for GpuContext {
    fn release(&self, address: u64, bytes: usize) {
        self.free(address, bytes);
    }
}

/// The owner of pinned host memory.
struct PinnedOwner(Arc<GpuContext>);

impl MemoryOwner for PinnedOwner {
    fn release(&self, address: u64, _: usize) {
        self.0.free_pinned(address);
    }
}

impl Cuda {
    /// Opens a GPU and every library that training needs.
    ///
    /// `index` counts the GPUs that the driver shows this process. Compiled kernels are cached in
    /// the directory `cache`, if one is given.
    pub fn open(paths: &LibraryPaths, index: usize, cache: Option<PathBuf>) -> Result<Cuda> {
        let gpu = GpuContext::open(paths, index)?;
        let paths = &paths.for_driver(gpu.properties.driver_version.0);
        let kernels = KernelModules::new(Nvrtc::open(paths)?, &gpu, cache)?;
        gpu.make_current()?;
        Ok(Cuda {
            kernels,
            cublas_lt: CublasLt::open(paths)?,
            cudnn: OnceLock::new(),
            host_inputs: Mutex::default(),
            timed_waits: Mutex::default(),
            profile: Profile::default(),
            graph_tuner: Mutex::default(),
            gpu,
        })
    }

    /// The GPU's properties.
    pub fn properties(&self) -> &GpuProperties {
        &self.gpu.properties
    }

    /// Versions and paths of the opened libraries.
    pub fn loaded_libraries(&self) -> LoadedLibraries {
        let nvrtc = self.kernels.nvrtc();
        LoadedLibraries {
            nvrtc: (nvrtc.version, nvrtc.path.clone()),
            cublas_lt: (self.cublas_lt.version, self.cublas_lt.path.clone()),
        }
    }

    /// Free and total bytes of the GPU's memory.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.gpu.memory_info()
    }

    /// Name and architecture for the log: `NVIDIA H100 80GB HBM3, sm_90`.
    pub fn describe(&self) -> String {
        format!("{}, {}", self.gpu.properties.name, self.gpu.properties.architecture())
    }

    /// Fails if the GPU's tensor cores do not support fp8.
    pub fn require_fp8(&self) -> Result<()> {
        let properties = self.properties();
        if properties.has_fp8() {
            return Ok(());
        }
        Err(properties.unsupported("fp8 matmuls", "sm_89 (Ada) or newer"))
    }

    /// Compiles and loads every kernel now, so that no training step waits for it.
    pub fn load_kernels(&self) -> Result<()> {
        self.kernels.load_all(&self.gpu)
    }

    /// From now on, times cuBLASLt's algorithms for each matmul and uses the fastest. The choice is
    /// stored next to the cached kernels. It may differ between GPUs and hosts, and the last bits
    /// of results with it.
    pub fn enable_matmul_autotuning(&self) {
        self.cublas_lt.enable_autotuning(&self.gpu, self.kernels.cache_directory());
    }

    /// Selects whose kernels compute attention from now on. Called at most once.
    ///
    /// With [`AttentionBackend::Auto`] a missing or unusable cuDNN is no error. The returned error
    /// is the reason why a cuDNN that was found is not used.
    pub fn set_attention_backend(
        &self,
        backend: AttentionBackend,
        paths: &LibraryPaths,
    ) -> Result<Option<CudaError>> {
        self.gpu.make_current()?;
        match CudnnAttention::open(backend, &paths.for_driver(self.gpu.properties.driver_version.0)) {
            Ok(cudnn) => cudnn.into_iter().for_each(|cudnn| drop(self.cudnn.set(cudnn))),
            Err(error) if backend == AttentionBackend::Cudnn => return Err(error),
            Err(CudaError::LibraryNotFound { .. }) => {}
            Err(error) => return Ok(Some(error)),
        }
        Ok(None)
    }

    /// Why compiled kernels could not be written to the cache, if that failed.
    pub fn kernel_cache_error(&self) -> Option<&CudaError> {
        self.kernels.cache_error()
    }

    /// Allocates `len` zeros in the GPU's memory.
    pub fn try_zeroed(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let buf = self.allocate_uninit(dtype, len)?;
        self.gpu.fill_zero(buf.view().address(), len * dtype.size())?;
        Ok(buf)
    }

    /// Makes the GPU's context current in the calling thread, for libraries that rely on it.
    pub fn make_current(&self) -> Result<()> {
        self.gpu.make_current()
    }

    /// The stream of this thread's work (a `CUstream`), after all earlier calls were issued to it.
    pub fn stream(&self) -> *mut std::ffi::c_void {
        unwrap_or_panic(self.gpu.with_stream(|stream| stream))
    }

    /// Blocks until all work of this thread's stream is complete. Fails if any of it failed.
    pub fn synchronize_checked(&self) -> Result<()> {
        self.gpu.synchronize()
    }

    fn allocate_uninit(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let memory = self.gpu.allocate(len.saturating_mul(dtype.size()))?;
        Ok(Buf::from_device_allocation(self.gpu.clone(), memory.into_address(), dtype, len))
    }

    // --- helpers of the ops ---------------------------------------------------------------------

    /// Memory for the duration of one op.
    fn scratch(&self, bytes: usize) -> DeviceMemory {
        unwrap_or_panic(self.gpu.scratch(bytes))
    }

    /// The GPU address of a host input, valid for the duration of one op. An op has at most one
    /// input of a name. An input that was uploaded recently is not sent again.
    fn upload_input<T: bytemuck::Pod>(&self, name: &'static str, input: &[T]) -> Address {
        let mut by_stream = self.lock_host_inputs();
        let inputs = by_stream.entry((self.gpu.stream().addr(), thread::current().id())).or_default();
        unwrap_or_panic(inputs.upload(&self.gpu, name, bytemuck::cast_slice(input)))
    }

    fn lock_host_inputs(&self) -> MutexGuard<'_, HashMap<(usize, ThreadId), HostInputs>> {
        // a panic does not leave the map in an invalid state
        self.host_inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches a kernel. A grid without blocks launches nothing.
    fn launch(
        &self,
        source: KernelSource,
        name: &'static CStr,
        config: LaunchConfig,
        arguments: &[&dyn KernelArg],
    ) {
        if config.grid.contains(&0) {
            return;
        }
        let function = unwrap_or_panic(self.kernels.get(&self.gpu, source, name, config.shared));
        // SAFETY: each op passes the arguments of its kernel, and views of the length of its shape.
        let launch = || unsafe { self.gpu.launch(name, function, config, arguments) };
        self.profiled(|| name.to_string_lossy().into_owned(), launch);
    }

    /// True if cuBLASLt has an algorithm for this matmul.
    fn has_matmul_algorithm(&self, matmul: &Matmul) -> bool {
        unwrap_or_panic(self.cublas_lt.has_algorithm(&self.gpu, matmul))
    }

    /// Enqueues a matmul.
    fn run_matmul(&self, matmul: &Matmul) {
        self.profiled(|| matmul.describe(), || self.cublas_lt.run(&self.gpu, matmul));
    }

    /// Launches a kernel over `len` elements, one per thread at a time.
    fn launch_elementwise(
        &self,
        source: KernelSource,
        name: &'static CStr,
        len: usize,
        arguments: &[&dyn KernelArg],
    ) {
        let blocks = len.div_ceil(THREADS).min(self.gpu.properties.multiprocessor_count * 16) as u32;
        self.launch(
            source,
            name,
            LaunchConfig { grid: [blocks, 1, 1], block: [THREADS as u32, 1, 1], shared: 0 },
            arguments,
        );
    }

    /// Launches a kernel over `len` elements, eight per thread at a time.
    fn launch_elementwise_by_8(
        &self,
        source: KernelSource,
        name: &'static CStr,
        len: usize,
        arguments: &[&dyn KernelArg],
    ) {
        self.launch_elementwise(source, name, len.div_ceil(8), arguments);
    }

    /// Launches a kernel with one block per row of about `width` elements, eight per thread.
    fn launch_row_blocks(
        &self,
        source: KernelSource,
        name: &'static CStr,
        rows: usize,
        width: usize,
        arguments: &[&dyn KernelArg],
    ) {
        let grid =
            [u32::try_from(rows).unwrap_or_else(|_| panic!("{name:?}: {rows} rows exceed the grid")), 1, 1];
        self.launch(
            source,
            name,
            LaunchConfig { grid, block: [row_threads(width), 1, 1], shared: 0 },
            arguments,
        );
    }

    /// Launches a kernel with one warp per row if rows are short, several of them per block,
    /// otherwise with one block per row.
    fn launch_row_warps(
        &self,
        source: KernelSource,
        name: &'static CStr,
        rows: usize,
        width: usize,
        arguments: &[&dyn KernelArg],
    ) {
        if row_threads(width) > 32 {
            return self.launch_row_blocks(source, name, rows, width, arguments);
        }
        let blocks = rows.div_ceil(THREADS / 32);
        let grid =
            [u32::try_from(blocks).unwrap_or_else(|_| panic!("{name:?}: {rows} rows exceed the grid")), 1, 1];
        let block = [32, THREADS as u32 / 32, 1];
        self.launch(source, name, LaunchConfig { grid, block, shared: 0 }, arguments);
    }
}

/// True if a kernel for exactly these types (its name ends in the type) can be used: each tensor
/// has its type, begins at a multiple of 16 bytes, and has rows of a multiple of eight elements.
fn are_vectorizable(width: usize, tensors: &[(TensorArg, Dtype)]) -> bool {
    let is_aligned = |(tensor, dtype): &(TensorArg, Dtype)| {
        tensor.at.is_multiple_of(16) && tensor.dtype == dtype_code(*dtype)
    };
    width.is_multiple_of(8) && tensors.iter().all(is_aligned)
}

/// Threads of a block, unless a kernel needs another number.
const THREADS: usize = 256;

/// Number of threads for a row, eight elements each: whole warps.
fn row_threads(width: usize) -> u32 {
    width.div_ceil(8).next_multiple_of(32).clamp(32, THREADS) as u32
}

/// Checks that the driver shows this process a GPU, and that every library that training on it
/// needs can be opened. It opens no GPU.
pub fn check_available(paths: &LibraryPaths) -> Result<()> {
    let (driver, _) = properties::driver_version_with_gpu(paths)?;
    let paths = paths.for_driver(driver);
    paths.open(CudaLibrary::Nvrtc)?;
    paths.open(CudaLibrary::CublasLt)?;
    Ok(())
}

/// Version and path of each library that training on one GPU opens, by its name, or why it cannot
/// be used. cuDNN is optional.
pub fn library_versions(paths: &LibraryPaths) -> [(&'static str, Result<(String, PathBuf)>); 4] {
    let driver = properties::driver_version(paths);
    let paths = &driver.as_ref().map_or_else(|_| paths.clone(), |((major, _), _)| paths.for_driver(*major));
    let driver = driver.map(|((major, minor), path)| (format!("CUDA {major}.{minor}"), path));
    let nvrtc = Nvrtc::open(paths).map(|nvrtc| {
        let (major, minor) = nvrtc.version;
        (format!("{major}.{minor}"), nvrtc.path.clone())
    });
    [
        ("driver", driver),
        ("NVRTC", nvrtc),
        ("cuBLASLt", matmul::library_version(paths)),
        ("cuDNN", cudnn::library_version(paths)),
    ]
}

/// Compiles every kernel source for an architecture such as `sm_90`. This needs NVRTC and no GPU.
/// Returns each source's file name and image.
pub fn compile_all(paths: &LibraryPaths, architecture: &str) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let nvrtc = Nvrtc::open(paths)?;
    compile::SOURCES.iter().map(|source| Ok((source.file, nvrtc.compile(*source, architecture)?))).collect()
}

/// The value, or a panic with the error as its payload. The worker reports it as its own error.
#[track_caller]
fn unwrap_or_panic<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(DeviceError(error.into())))
}

/// A tensor in GPU memory with its type, as kernels take it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct TensorArg {
    at: Address,
    dtype: i64,
}

// SAFETY: struct Tensor of common.cuh.
unsafe impl KernelArg for TensorArg {}

impl TensorArg {
    /// An optional tensor that is absent.
    const NONE: TensorArg = TensorArg { at: 0, dtype: 0 };
}

impl From<View<'_>> for TensorArg {
    #[track_caller]
    fn from(v: View) -> Self {
        TensorArg { at: address(v), dtype: dtype_code(v.dtype()) }
    }
}

impl From<&ViewMut<'_>> for TensorArg {
    #[track_caller]
    fn from(v: &ViewMut) -> Self {
        v.as_view().into()
    }
}

/// The number of a type in common.cuh.
fn dtype_code(dtype: Dtype) -> i64 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

/// The GPU address of a view. Panics if the view is in host memory.
#[track_caller]
fn address(v: View) -> Address {
    assert!(!v.is_on_host() || v.is_empty(), "a buffer in host memory is used as GPU memory");
    v.address()
}

/// The GPU address of a view of `f32`. Panics if the view has another type.
#[track_caller]
fn f32_address(v: View) -> Address {
    assert!(v.dtype() == Dtype::F32, "a buffer of {:?} is used as f32", v.dtype());
    address(v)
}

/// Panics if an argument does not have the length of the op's shape.
#[track_caller]
fn expect_len(op: &str, name: &str, len: usize, expected: usize) {
    assert!(len == expected, "{op}: {name} has {len} elements, but the shape has {expected}");
}

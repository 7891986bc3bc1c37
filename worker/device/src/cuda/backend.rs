//! Performs the tensor operations (ops) of training on one NVIDIA GPU ([`Cuda`]), and has functions
//! with which the ops allocate GPU memory and enqueue work.
use super::bindings::{Address, driver_sys::CUstream};
use super::compile::{KernelModules, KernelSource, Nvrtc};
use super::cudnn::{AttentionBackend, CudnnAttention};
use super::error::{CudaError, Result};
use super::gpu::Gpu;
use super::graphs::GraphUseAutotuner;
use super::host_inputs::HostInputCache;
use super::launch::{KernelArg, LaunchConfig};
use super::library_search::LibrarySearchPaths;
use super::matmul::{CublasLt, Matmul};
use super::memory::DeviceMemory;
use super::profile::{GpuProfiler, ProfileEntry};
use super::properties::GpuProperties;
use super::streams::CudaEvent;
use crate::buffer::{Buf, Dtype, MemoryOwner};
use crate::ops::Ops;
use crate::storage::DeviceError;
use std::{
    collections::HashMap,
    ffi::CStr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicBool},
    thread::{self, ThreadId},
};

/// An open NVIDIA GPU on which the tensor operations (ops) of training are computed.
pub struct Cuda {
    pub(super) kernels: KernelModules,
    pub(super) cublas_lt: CublasLt,
    /// The opened cuDNN library; set if the job lets cuDNN compute attention.
    pub(super) cudnn: OnceLock<CudnnAttention>,
    /// Caches of the integer inputs that kernels get from host memory. Each stream and thread has a
    /// separate cache, because inputs of one thread would overwrite those of another.
    pub(super) host_inputs: Mutex<HashMap<(usize, ThreadId), HostInputCache>>,
    /// Pairs of events at the start and the end of timed waits that have not been counted yet.
    pub(super) timed_waits: Mutex<Vec<[CudaEvent; 2]>>,
    pub(super) profile: GpuProfiler,
    /// Measures whether CUDA graphs are faster. `None` if nothing is to be measured, or if the
    /// result is known.
    pub(super) graph_autotuner: Mutex<Option<GraphUseAutotuner>>,
    /// Whether matmuls compute GELU and bias gradients in their epilogues.
    pub(super) has_matmul_epilogues: AtomicBool,
    /// The open GPU. It is the last field, because fields are dropped in order and cuBLASLt must be
    /// closed before the context.
    pub(super) gpu: Arc<Gpu>,
}

/// Versions and paths of the libraries (NVRTC and cuBLASLt) that were opened for a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedLibraries {
    /// NVRTC's version, such as (13, 0), and path.
    pub nvrtc: ((u32, u32), PathBuf),
    /// cuBLASLt's version (130100 is 13.1.0) and path.
    pub cublas_lt: (usize, PathBuf),
}

impl MemoryOwner for Gpu {
    fn release(&self, address: u64, bytes: usize) {
        self.free(address, bytes);
    }
}

/// Owner of a buffer for which no GPU memory could be allocated; when the buffer is dropped, there
/// is nothing to free.
pub(super) struct UnallocatedBufferOwner;

impl MemoryOwner for UnallocatedBufferOwner {
    fn release(&self, _: u64, _: usize) {}
}

impl Ops for Cuda {}

impl Cuda {
    /// Opens the GPU with number `index` and every library that training needs. Kernels are not
    /// compiled yet.
    ///
    /// `index` is the GPU's number among those that the driver shows this process, from 0. Compiled
    /// kernels are cached in the directory `cache`, if one is given.
    pub fn open(paths: &LibrarySearchPaths, index: usize, cache: Option<PathBuf>) -> Result<Cuda> {
        let gpu = Gpu::open(paths, index)?;
        let paths = &paths.with_driver_version(gpu.properties.driver_version.0);
        let kernels = KernelModules::new(Nvrtc::open(paths)?, &gpu, cache)?;
        gpu.make_current()?;
        Ok(Cuda {
            kernels,
            cublas_lt: CublasLt::open(paths)?,
            cudnn: OnceLock::new(),
            host_inputs: Mutex::default(),
            timed_waits: Mutex::default(),
            profile: GpuProfiler::default(),
            graph_autotuner: Mutex::default(),
            has_matmul_epilogues: AtomicBool::new(false),
            gpu,
        })
    }

    /// Returns the properties of the GPU, such as its name and its compute capability.
    pub fn properties(&self) -> &GpuProperties {
        &self.gpu.properties
    }

    /// Returns the versions and paths of the CUDA libraries that this backend has opened.
    pub fn loaded_libraries(&self) -> LoadedLibraries {
        let nvrtc = self.kernels.nvrtc();
        LoadedLibraries {
            nvrtc: (nvrtc.version, nvrtc.path.clone()),
            cublas_lt: (self.cublas_lt.version, self.cublas_lt.path.clone()),
        }
    }

    /// Returns the number of free bytes and the total number of bytes of the GPU's memory.
    pub fn query_memory_info(&self) -> Result<(usize, usize)> {
        self.gpu.query_memory_info()
    }

    /// Returns the GPU's name and architecture for the log: `NVIDIA H100 80GB HBM3, sm_90`.
    pub fn describe_gpu(&self) -> String {
        format!("{}, {}", self.gpu.properties.name, self.gpu.properties.architecture())
    }

    /// Fails if the tensor cores of this GPU cannot multiply fp8 numbers.
    pub fn require_fp8(&self) -> Result<()> {
        let properties = self.properties();
        if properties.has_fp8() {
            return Ok(());
        }
        Err(properties.unsupported_error("fp8 matmuls", "sm_89 (Ada) or newer"))
    }

    /// Compiles and loads the kernels that most jobs need now, so that no training step waits for a
    /// compilation. Kernels that few jobs need are compiled at their first use.
    pub fn load_kernels(&self) -> Result<()> {
        let is_needed = |source: &KernelSource| !source.is_rarely_used;
        self.gpu.retry_if_out_of_memory(|| self.kernels.load_modules(&self.gpu, is_needed))
    }

    /// Compiles and loads every kernel now, also those that few jobs need.
    pub fn load_all_kernels(&self) -> Result<()> {
        self.gpu.retry_if_out_of_memory(|| self.kernels.load_modules(&self.gpu, |_| true))
    }

    /// Enables the autotuning of matmuls: whenever a new shape of a matmul occurs, cuBLASLt's
    /// algorithms for it are timed, and the fastest is used. Choices are stored in the directory of
    /// the kernel cache. GPUs and hosts may make different choices, and then differ in the last
    /// bits of results.
    pub fn enable_matmul_autotuning(&self) {
        self.cublas_lt.enable_autotuning(&self.gpu, self.kernels.cache_directory());
    }

    /// Selects whether attention is computed by cuDNN or by the built-in kernels from now on. Must
    /// be called at most once.
    ///
    /// With [`AttentionBackend::Cudnn`], fails if cuDNN cannot be opened. With
    /// [`AttentionBackend::Auto`], the built-in kernels are used in that case. The call then
    /// returns `Some` with the error if cuDNN was found but is unusable, and `None` if cuDNN was
    /// not found. In all other cases the call returns `None`.
    pub fn set_attention_backend(
        &self,
        backend: AttentionBackend,
        paths: &LibrarySearchPaths,
    ) -> Result<Option<CudaError>> {
        self.gpu.make_current()?;
        match CudnnAttention::open(backend, &paths.with_driver_version(self.gpu.properties.driver_version.0))
        {
            Ok(cudnn) => cudnn.into_iter().for_each(|cudnn| drop(self.cudnn.set(cudnn))),
            Err(error) if backend == AttentionBackend::Cudnn => return Err(error),
            Err(CudaError::LibraryNotFound { .. }) => {}
            Err(error) => return Ok(Some(error)),
        }
        Ok(None)
    }

    /// Returns the first error that occurred when compiled kernels were written to the kernel cache
    /// (a directory), or `None` if none occurred.
    pub fn kernel_cache_error(&self) -> Option<&CudaError> {
        self.kernels.cache_error()
    }

    /// Allocates a buffer of `len` zeros in the GPU's memory. Fails if the memory is full. The
    /// error names `purpose`.
    pub fn try_zeroed(&self, purpose: &'static str, dtype: Dtype, len: usize) -> Result<Buf> {
        let buf = self.allocate_uninit(dtype, len).map_err(|error| error.with_memory_purpose(purpose))?;
        self.gpu.enqueue_zero_fill(buf.view().address(), len * dtype.size())?;
        Ok(buf)
    }

    /// Returns all unused GPU memory of this process to the operating system, for libraries that
    /// allocate GPU memory themselves, such as NCCL. Waits for all work on the GPU.
    pub fn release_unused_memory(&self) -> Result<()> {
        self.gpu.release_unused_memory()
    }

    /// Prepares this GPU for other work after work that was abandoned: drops the calls that were
    /// not issued yet, the CUDA graphs and the copies of inputs, waits for all work on the GPU, and
    /// returns all unused memory to the operating system. The loaded kernels, the libraries and the
    /// chosen algorithms stay. CUDA graphs are off afterwards.
    ///
    /// The buffers of the abandoned work must have been dropped, and no other thread may use the
    /// GPU meanwhile. Fails if a call or work on the GPU has failed, after which this value cannot
    /// be used any more.
    pub fn reset(&self) -> std::result::Result<(), DeviceError> {
        self.gpu.make_current()?;
        self.gpu.graphs.lock_graph_state().reset(&self.gpu)?;
        self.gpu.synchronize_all_streams()?;
        self.lock_host_inputs().clear();
        self.timed_waits.lock().unwrap_or_else(PoisonError::into_inner).clear();
        *self.lock_graph_tuner() = None;
        self.gpu.release_unused_memory()?;
        self.gpu.status.check_no_failure()
    }

    /// Makes the GPU's context current in the calling thread, as libraries such as NCCL require.
    pub fn make_current(&self) -> Result<()> {
        self.gpu.make_current()
    }

    /// Issues the GPU calls that are still recorded for a CUDA graph, and returns this thread's
    /// CUDA stream (a `CUstream`) for calls of other libraries. Fails if this or an earlier call
    /// failed.
    pub fn flush_and_get_stream(&self) -> std::result::Result<*mut std::ffi::c_void, DeviceError> {
        self.gpu.status.check_no_failure()?;
        Ok(self.gpu.with_flushed_stream(CUstream::cast)?)
    }

    /// Removes and returns the stored error of the first failed GPU call, so that later GPU calls
    /// are no longer skipped. The conformance comparison uses this to continue after a failure.
    pub fn take_failure(&self) -> std::result::Result<(), DeviceError> {
        self.gpu.status.take_failure()
    }

    /// Starts profiling: measures the GPU time of each operation that is enqueued from now on.
    pub fn start_profiling(&self) {
        self.profile.start();
    }

    /// Stops profiling, waits for the measured operations, and returns their GPU times, longest
    /// first.
    pub fn stop_profiling(&self) -> Result<Vec<ProfileEntry>> {
        self.profile.stop()
    }

    /// Allocates a buffer of `len` elements in the GPU's memory without initializing the elements.
    fn allocate_uninit(&self, dtype: Dtype, len: usize) -> Result<Buf> {
        let memory = self.gpu.allocate(len.saturating_mul(dtype.size()))?;
        Ok(Buf::from_device_allocation(self.gpu.clone(), memory.into_address(), dtype, len))
    }

    // --- helpers of the ops ---------------------------------------------------------------------

    /// Allocates `bytes` bytes of uninitialized GPU memory for temporary results of one operation,
    /// and returns the memory, which is freed when dropped. Returns a range without memory if a
    /// call has failed.
    pub(super) fn alloc_scratch(&self, bytes: usize) -> DeviceMemory {
        self.gpu
            .call_and_record_failure(|| self.gpu.allocate_scratch(bytes))
            .unwrap_or_else(|| DeviceMemory::empty(&self.gpu))
    }

    /// Makes the content of a kernel's integer input available in GPU memory, and returns its GPU
    /// address for use in the current operation. An input that was uploaded recently is not sent
    /// again. An op has at most one input of each name.
    pub(super) fn upload_input<T: bytemuck::Pod>(&self, name: &'static str, input: &[T]) -> Address {
        let mut by_stream = self.lock_host_inputs();
        let inputs = by_stream.entry((self.gpu.current_stream().addr(), thread::current().id())).or_default();
        let upload = || inputs.upload_if_changed(&self.gpu, name, bytemuck::cast_slice(input));
        self.gpu.call_and_record_failure(upload).unwrap_or(0)
    }

    /// Locks the map of the integer inputs of kernels (such as tokens) that each thread has
    /// recently uploaded to the GPU, by stream and thread.
    pub(super) fn lock_host_inputs(&self) -> MutexGuard<'_, HashMap<(usize, ThreadId), HostInputCache>> {
        // a panic does not leave the map in an invalid state
        self.host_inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches the kernel `name` of the CUDA source file `source` on this thread's stream, with as
    /// many blocks and threads as `work` requires. Without work, launches nothing.
    pub(super) fn launch(
        &self,
        source: KernelSource,
        name: &'static CStr,
        work: LaunchSize,
        arguments: &[&dyn KernelArg],
    ) {
        let config = work.choose_launch_config(name, self.gpu.properties.multiprocessor_count);
        if config.grid.contains(&0) {
            return;
        }
        let find_function = || {
            let find = || self.kernels.get_or_load_function(&self.gpu, source, name, config);
            self.gpu.retry_if_out_of_memory(find)
        };
        let Some(function) = self.gpu.call_and_record_failure(find_function) else { return };
        // SAFETY: each op passes the arguments of its kernel, and views of the length of its shape.
        let launch = || unsafe { self.gpu.launch(name, function, config, arguments) };
        self.run_profiled(|| name.to_string_lossy().into_owned(), launch);
    }

    /// Returns true if cuBLASLt has an algorithm for the sizes, strides and types of `matmul`.
    pub(super) fn has_matmul_algorithm(&self, matmul: &Matmul) -> bool {
        self.gpu.call_and_record_failure(|| self.cublas_lt.has_algorithm(&self.gpu, matmul)).unwrap_or(false)
    }

    /// Runs `call`, which enqueues GPU work, and, while profiling is on, measures the GPU time of
    /// this work under the name `name`.
    pub(super) fn run_profiled(&self, name: impl FnOnce() -> String, call: impl FnOnce() -> Result<()>) {
        self.gpu.call_and_record_failure(|| self.profile.run_profiled(&self.gpu, name, call));
    }

    /// Enqueues a matmul on this thread's stream.
    pub(super) fn enqueue_matmul(&self, matmul: &Matmul) {
        self.run_profiled(|| matmul.describe(), || self.cublas_lt.enqueue(&self.gpu, matmul));
    }
}

/// Number of threads per block for kernels that work with any block size.
pub(super) const THREADS_PER_BLOCK: usize = 256;

/// Returns the number of threads that process a row of `width` elements: one per eight elements,
/// rounded up to whole warps, at most one block.
pub(super) fn choose_threads_per_row(width: usize) -> u32 {
    width.div_ceil(8).next_multiple_of(32).clamp(32, THREADS_PER_BLOCK) as u32
}

/// The amount of work of a kernel launch, such as a number of elements or rows, from which the
/// launch configuration is computed.
pub(super) enum LaunchSize {
    /// Work on this number of elements, of which each thread processes one at a time.
    Elements(usize),
    /// Work on this number of elements, of which each thread processes eight at a time.
    ElementsBy8(usize),
    /// Rows of about `width` elements: one block per row. Each thread processes eight elements at a
    /// time.
    RowBlocks { rows: usize, width: usize },
    /// Rows of about `width` elements. Short rows have one warp per row and several rows per block,
    /// and longer rows one block per row.
    RowWarps { rows: usize, width: usize },
    /// A launch with exactly these numbers of blocks and threads.
    Config(LaunchConfig),
}

impl LaunchSize {
    /// Computes the numbers of blocks and threads for a launch of the kernel `name` with this
    /// amount of work. Panics if there are too many rows for a grid.
    fn choose_launch_config(self, name: &CStr, multiprocessors: usize) -> LaunchConfig {
        let blocks_of_rows = |blocks: usize| match u32::try_from(blocks) {
            Ok(blocks) => [blocks, 1, 1],
            Err(_) => panic!("{name:?}: {blocks} blocks of rows exceed the grid"),
        };
        let (grid, block) = match self {
            LaunchSize::Config(config) => return config,
            LaunchSize::ElementsBy8(len) => {
                return LaunchSize::Elements(len.div_ceil(8)).choose_launch_config(name, multiprocessors);
            }
            LaunchSize::Elements(len) => {
                let blocks = len.div_ceil(THREADS_PER_BLOCK).min(multiprocessors * 16);
                ([blocks as u32, 1, 1], [THREADS_PER_BLOCK as u32, 1, 1])
            }
            LaunchSize::RowWarps { rows, width } if choose_threads_per_row(width) == 32 => {
                let rows_per_block = THREADS_PER_BLOCK / 32;
                (blocks_of_rows(rows.div_ceil(rows_per_block)), [32, rows_per_block as u32, 1])
            }
            LaunchSize::RowBlocks { rows, width } | LaunchSize::RowWarps { rows, width } => {
                (blocks_of_rows(rows), [choose_threads_per_row(width), 1, 1])
            }
        };
        LaunchConfig { grid, block, shared: 0 }
    }
}

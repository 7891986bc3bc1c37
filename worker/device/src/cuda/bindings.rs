//! Bindings of CUDA's libraries: the functions that this program calls, declared as in the headers
//! of CUDA 12 and 13, and looked up by name when a library is opened.
//!
//! Status codes stay plain integers, because a newer library may return codes that are unknown
//! here.
use super::error::CudaError;
use super::library::CudaLibrary;
use super::library_search::OpenLibrary;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Defines a struct with the functions of a library, and a function `load` that looks them up by
/// name.
macro_rules! library {
    ($(#[$doc:meta])* $library:ident = $kind:ident, $required:literal { $(fn $function:ident($($type:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $library {
            $(pub(super) $function: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Keeps the library open while its functions can be called.
            _library: libloading::Library,
        }

        impl $library {
            /// Looks up every function of the library. Fails with the name of the first function
            /// that is missing.
            pub(super) fn load(opened: OpenLibrary) -> Result<Self, CudaError> {
                let OpenLibrary { library, path } = opened;
                Ok($library {
                    $($function: {
                        let name = concat!(stringify!($function), "\0").as_bytes();
                        // SAFETY: the library's header declares this signature.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> $result>(name) };
                        match symbol {
                            Ok(symbol) => *symbol,
                            Err(_) => {
                                return Err(CudaError::LibraryTooOld {
                                    library: CudaLibrary::$kind,
                                    path,
                                    found: concat!("a version without ", stringify!($function)).to_owned(),
                                    required: concat!($required, " or newer").to_owned(),
                                });
                            }
                        }
                    },)*
                    _library: library,
                })
            }
        }
    };
}

/// An address in GPU memory.
pub(super) type Address = u64;
/// Opaque pointer to an object of a library, such as a context, stream, event, module, kernel or
/// memory pool.
pub(super) type Handle = *mut c_void;

library! {
    /// The CUDA driver API, from `libcuda.so.1`.
    DriverApi = Driver, "CUDA 12" {
        fn cuInit(c_uint) -> c_int;
        fn cuDriverGetVersion(*mut c_int) -> c_int;
        fn cuGetErrorName(c_int, *mut *const c_char) -> c_int;
        fn cuGetErrorString(c_int, *mut *const c_char) -> c_int;
        fn cuDeviceGetCount(*mut c_int) -> c_int;
        fn cuDeviceGet(*mut c_int, c_int) -> c_int;
        fn cuDeviceGetName(*mut c_char, c_int, c_int) -> c_int;
        fn cuDeviceTotalMem_v2(*mut usize, c_int) -> c_int;
        fn cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> c_int;
        fn cuDevicePrimaryCtxRetain(*mut Handle, c_int) -> c_int;
        fn cuDevicePrimaryCtxRelease_v2(c_int) -> c_int;
        fn cuCtxSetCurrent(Handle) -> c_int;
        fn cuDeviceGetDefaultMemPool(*mut Handle, c_int) -> c_int;
        fn cuMemPoolSetAttribute(Handle, c_int, *mut c_void) -> c_int;
        fn cuMemPoolTrimTo(Handle, usize) -> c_int;
        fn cuStreamCreate(*mut Handle, c_uint) -> c_int;
        fn cuStreamCreateWithPriority(*mut Handle, c_uint, c_int) -> c_int;
        fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> c_int;
        fn cuStreamDestroy_v2(Handle) -> c_int;
        fn cuStreamWaitEvent(Handle, Handle, c_uint) -> c_int;
        fn cuEventCreate(*mut Handle, c_uint) -> c_int;
        fn cuEventDestroy_v2(Handle) -> c_int;
        fn cuEventRecord(Handle, Handle) -> c_int;
        fn cuEventSynchronize(Handle) -> c_int;
        fn cuEventQuery(Handle) -> c_int;
        fn cuEventElapsedTime(*mut f32, Handle, Handle) -> c_int;
        fn cuStreamSynchronize(Handle) -> c_int;
        fn cuMemAllocAsync(*mut Address, usize, Handle) -> c_int;
        fn cuMemFreeAsync(Address, Handle) -> c_int;
        fn cuMemGetInfo_v2(*mut usize, *mut usize) -> c_int;
        fn cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle) -> c_int;
        fn cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle) -> c_int;
        fn cuMemcpyDtoDAsync_v2(Address, Address, usize, Handle) -> c_int;
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> c_int;
        fn cuMemFreeHost(*mut c_void) -> c_int;
        fn cuMemsetD8Async(Address, u8, usize, Handle) -> c_int;
        fn cuModuleLoadData(*mut Handle, *const c_void) -> c_int;
        fn cuModuleGetFunction(*mut Handle, Handle, *const c_char) -> c_int;
        fn cuFuncSetAttribute(Handle, c_int, c_int) -> c_int;
        fn cuLaunchKernel(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
        ) -> c_int;
        fn cuStreamBeginCapture_v2(Handle, c_int) -> c_int;
        fn cuStreamEndCapture(Handle, *mut Handle) -> c_int;
        fn cuGraphInstantiateWithFlags(*mut Handle, Handle, u64) -> c_int;
        fn cuStreamGetCaptureInfo_v2(
            Handle, *mut c_int, *mut u64, *mut Handle, *mut *const Handle, *mut usize,
        ) -> c_int;
        fn cuGraphExecKernelNodeSetParams_v2(Handle, Handle, *const KernelNode) -> c_int;
        fn cuGraphLaunch(Handle, Handle) -> c_int;
        fn cuGraphExecDestroy(Handle) -> c_int;
        fn cuGraphDestroy(Handle) -> c_int;
    }
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`: the kernel, grid and arguments of a node of a CUDA graph.
#[repr(C)]
pub(super) struct KernelNode {
    pub(super) function: Handle,
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) arguments: *mut *mut c_void,
    pub(super) extra: *mut *mut c_void,
    /// Always null here: the driver reads `kernel` and `context` only if `function` is null.
    pub(super) kernel: Handle,
    pub(super) context: Handle,
}

// Device attributes that are queried, with their numbers `CU_DEVICE_ATTRIBUTE_…`.
pub(super) const MULTIPROCESSORS: c_int = 16;
pub(super) const CAPABILITY_MAJOR: c_int = 75;
pub(super) const CAPABILITY_MINOR: c_int = 76;
pub(super) const SHARED_PER_BLOCK: c_int = 97;
pub(super) const L2_CACHE: c_int = 38;
pub(super) const MEMORY_POOLS: c_int = 115;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`: the attribute of a kernel that limits its
/// dynamic shared memory.
pub(super) const MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`: the attribute for how many bytes of freed memory a pool
/// keeps.
pub(super) const RELEASE_THRESHOLD: c_int = 4;
/// `CU_MEMHOSTALLOC_PORTABLE`: the flag that makes pinned memory usable in every context.
pub(super) const PORTABLE: c_uint = 1;
/// `CU_STREAM_NON_BLOCKING`: the flag of streams that do not synchronize with the default stream.
pub(super) const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`: the flag of events that do not record a time.
pub(super) const NO_TIMING: c_uint = 2;
/// `CUDA_ERROR_NOT_READY`: the status of an event that is not reached yet.
pub(super) const NOT_READY: c_int = 600;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: the capture mode that prohibits no calls of this thread.
pub(super) const RELAXED: c_int = 2;
/// `CUDA_ERROR_OUT_OF_MEMORY`: the status of an allocation that does not fit into GPU memory.
pub(super) const OUT_OF_MEMORY: c_int = 2;

library! {
    /// NVRTC, the run-time compiler, from `libnvrtc.so`.
    NvrtcApi = Nvrtc, "CUDA 12" {
        fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        fn nvrtcGetErrorString(c_int) -> *const c_char;
        fn nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcGetSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcCreateProgram(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int;
        fn nvrtcDestroyProgram(*mut Handle) -> c_int;
        fn nvrtcCompileProgram(Handle, c_int, *const *const c_char) -> c_int;
        fn nvrtcGetCUBINSize(Handle, *mut usize) -> c_int;
        fn nvrtcGetCUBIN(Handle, *mut c_char) -> c_int;
        fn nvrtcGetProgramLogSize(Handle, *mut usize) -> c_int;
        fn nvrtcGetProgramLog(Handle, *mut c_char) -> c_int;
    }
}

library! {
    /// cuBLASLt, the matmul library, from `libcublasLt.so`.
    CublasLtApi = CublasLt, "CUDA 12" {
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusString(c_int) -> *const c_char;
        fn cublasLtCreate(*mut Handle) -> c_int;
        fn cublasLtDestroy(Handle) -> c_int;
        fn cublasLtMatmulDescCreate(*mut Handle, c_int, c_int) -> c_int;
        fn cublasLtMatmulDescDestroy(Handle) -> c_int;
        fn cublasLtMatmulDescSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
        fn cublasLtMatrixLayoutCreate(*mut Handle, c_int, u64, u64, i64) -> c_int;
        fn cublasLtMatrixLayoutDestroy(Handle) -> c_int;
        fn cublasLtMatmulPreferenceCreate(*mut Handle) -> c_int;
        fn cublasLtMatmulPreferenceDestroy(Handle) -> c_int;
        fn cublasLtMatmulPreferenceSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
        fn cublasLtMatmulAlgoGetHeuristic(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int,
        ) -> c_int;
        fn cublasLtMatmul(
            Handle, Handle, *const c_void, Address, Handle, Address, Handle, *const c_void, Address, Handle, Address,
            Handle, *const Algorithm, Address, usize, Handle,
        ) -> c_int;
    }
}

/// `cublasLtMatmulAlgo_t`: an algorithm that cuBLASLt chose for a matmul. Its content is opaque.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

impl Algorithm {
    /// Returns the bytes of the algorithm, in the library's own memory layout.
    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// `cublasLtMatmulHeuristicResult_t`: a suggested algorithm, its status and its workspace size.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Heuristic {
    pub(super) algorithm: Algorithm,
    pub(super) workspace: usize,
    pub(super) state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// `CUBLAS_STATUS_NOT_SUPPORTED`: the status of a matmul for which there is no algorithm.
pub(super) const NOT_SUPPORTED: c_int = 15;
/// `CUBLAS_COMPUTE_32F`: sums are computed in `f32`.
pub(super) const COMPUTE_F32: c_int = 68;
// Element types of matrices, with their numbers `CUDA_R_…`.
pub(super) const R_F32: c_int = 0;
pub(super) const R_F16: c_int = 2;
pub(super) const R_BF16: c_int = 14;
pub(super) const R_E4M3: c_int = 28;
pub(super) const R_E5M2: c_int = 29;
// `CUBLASLT_MATMUL_DESC_TRANSA` and `TRANSB`: whether the operands are transposed.
pub(super) const TRANSPOSE_A: c_int = 3;
pub(super) const TRANSPOSE_B: c_int = 4;
// CUBLASLT_MATMUL_DESC_EPILOGUE, what happens to the sums before they are stored, and BIAS_POINTER,
// the GPU address of a vector that is added to each column.
pub(super) const EPILOGUE: c_int = 7;
pub(super) const BIAS: c_int = 8;
/// `CUBLASLT_EPILOGUE_BIAS`: a bias is added to the sums before they are stored.
pub(super) const WITH_BIAS: c_uint = 4;
// CUBLASLT_MATMUL_DESC_A_SCALE_POINTER and B_SCALE_POINTER: the GPU address of a factor that all
// elements of the operand are multiplied by.
pub(super) const SCALE_A: c_int = 17;
pub(super) const SCALE_B: c_int = 18;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`: the largest workspace of a suggested algorithm.
pub(super) const MAX_WORKSPACE: c_int = 1;
/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`: the alignment of matrix A. The attributes for B, C
/// and D have the next numbers.
pub(super) const MIN_ALIGNMENT: c_int = 5;

library! {
    /// cuDNN's backend API, which compiles graphs of operations, from `libcudnn.so.9`.
    CudnnApi = Cudnn, "cuDNN 9" {
        fn cudnnGetVersion() -> usize;
        fn cudnnGetErrorString(c_int) -> *const c_char;
        fn cudnnGetLastErrorString(*mut c_char, usize) -> ();
        fn cudnnCreate(*mut Handle) -> c_int;
        fn cudnnDestroy(Handle) -> c_int;
        fn cudnnSetStream(Handle, Handle) -> c_int;
        fn cudnnBackendCreateDescriptor(c_int, *mut Handle) -> c_int;
        fn cudnnBackendDestroyDescriptor(Handle) -> c_int;
        fn cudnnBackendSetAttribute(Handle, c_int, c_int, i64, *const c_void) -> c_int;
        fn cudnnBackendGetAttribute(Handle, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;
        fn cudnnBackendFinalize(Handle) -> c_int;
        fn cudnnBackendExecute(Handle, Handle, Handle) -> c_int;
    }
}

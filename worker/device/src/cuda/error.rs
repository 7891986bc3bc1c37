//! Errors of opening a GPU and its libraries, and of work on the GPU ([`CudaError`]).
use super::library::{CudaLibrary, RejectedLibrary};
use crate::storage::DeviceError;
use cudarc::{cublaslt::sys::cublasStatus_t, cudnn::sys::cudnnStatus_t, driver::sys::CUresult};
use diagnostic::{Code, Diagnostic, codes::device as codes};
use std::path::PathBuf;

/// The status code that `cuInit` returns if this process can use no GPU.
const NO_DEVICE_STATUS: i32 = CUresult::CUDA_ERROR_NO_DEVICE as i32;

/// Error of opening a GPU or one of its libraries, or of work on the GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No file of a library was found.
    #[error("{} ({file_names}) was not found", library.title())]
    LibraryNotFound {
        /// The library that cannot be used.
        library: CudaLibrary,
        /// The library's accepted file names, best first.
        file_names: String,
        /// Every directory that was searched, in order.
        searched: Vec<String>,
    },
    /// Files of a library were found, but every one of them is unusable.
    #[error("{} ({file_names}) cannot be loaded: {}", library.title(), format_rejected_libraries(rejected))]
    LibraryUnusable {
        /// The library that cannot be used.
        library: CudaLibrary,
        /// The library's accepted file names, best first.
        file_names: String,
        /// Every directory that was searched, in order.
        searched: Vec<String>,
        /// The files that were found, each with the reason why it cannot be used.
        rejected: Vec<RejectedLibrary>,
    },
    /// A library is older than this program supports, or too old for this GPU.
    #[error("{} is {found}, but {required} is required", path.display())]
    LibraryTooOld {
        /// The library that cannot be used.
        library: CudaLibrary,
        /// The library file that was opened.
        path: PathBuf,
        /// The version that was found, or the function that is missing.
        found: String,
        /// The oldest version that this program or this GPU requires.
        required: String,
    },
    /// The GPU lacks a feature that the job needs.
    #[error("GPU {index} ({name}, {architecture}) does not support {feature}: {required} is required")]
    GpuUnsupported {
        /// Index of the GPU among those that this process sees.
        index: usize,
        /// The GPU's name.
        name: String,
        /// The GPU's architecture, such as `sm_80`.
        architecture: String,
        /// The feature that the GPU lacks.
        feature: &'static str,
        /// The hardware or architecture that has the feature.
        required: &'static str,
    },
    /// The index of the requested GPU is too high: the driver shows this process fewer GPUs.
    #[error("GPU {index} was not found: the driver shows this process {count} GPUs, numbered from 0")]
    GpuNotFound {
        /// Index of the GPU that was requested, from 0.
        index: usize,
        /// Number of GPUs that the driver shows.
        count: usize,
    },
    /// NVRTC rejected a kernel source.
    #[error("cannot compile the kernels of {file}:\n{log}")]
    KernelCompile {
        /// Name of the kernel source file.
        file: &'static str,
        /// The compiler's messages.
        log: String,
    },
    /// A compiled kernel could not be written to the kernel cache.
    #[error("cannot write {}: {error}", path.display())]
    KernelCacheWrite {
        /// The cache file that could not be written.
        path: PathBuf,
        /// The operating system's message.
        error: String,
    },
    /// An allocation did not fit into the GPU's memory.
    #[error(
        "out of GPU memory: {:.2} GiB more are needed for {}, but {:.2} of {:.2} GiB are free and this worker uses \
         {:.2} GiB",
        to_gib(*requested as u64),
        purpose,
        to_gib(*free as u64),
        to_gib(*total as u64),
        to_gib(*used)
    )]
    OutOfMemory {
        /// Size in bytes of the allocation that failed.
        requested: usize,
        /// Number of free bytes of the GPU's memory.
        free: usize,
        /// Size of the GPU's memory in bytes.
        total: usize,
        /// Bytes that this process has allocated on the GPU.
        used: u64,
        /// The purpose of the memory, such as `gradients`
        /// ([`crate::Storage::zeroed_with_purpose`]).
        purpose: &'static str,
    },
    /// cuDNN cannot compute attention of a certain shape, although the job requires cuDNN.
    #[error("cuDNN {version} has no plan for {attention}")]
    AttentionUnsupported {
        /// cuDNN's version.
        version: String,
        /// Description of the attention: its shape, or the feature that cuDNN lacks.
        attention: String,
    },
    /// A function of a library failed.
    #[error("{function} failed: {message} ({status})")]
    Call {
        /// Name of the function, with the purpose of the call.
        function: String,
        /// The library's status code.
        status: i32,
        /// The library's own message.
        message: String,
    },
}

/// Result of a call of CUDA: a value, or a [`CudaError`].
pub type Result<T> = std::result::Result<T, CudaError>;

/// Converts a number of bytes to GiB, for messages.
fn to_gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Formats the rejected library files and the reasons of their rejection as one line for messages.
fn format_rejected_libraries(rejected: &[RejectedLibrary]) -> String {
    rejected.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl CudaError {
    /// Returns the stable error code, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            CudaError::LibraryNotFound { .. } => codes::DEVICE_LIBRARY_MISSING,
            CudaError::LibraryUnusable { .. } => codes::DEVICE_LIBRARY_UNUSABLE,
            CudaError::LibraryTooOld { .. } => codes::DEVICE_LIBRARY_TOO_OLD,
            CudaError::GpuUnsupported { .. } => codes::GPU_UNSUPPORTED,
            CudaError::GpuNotFound { .. } => codes::GPU_NOT_FOUND,
            CudaError::Call { function, status: NO_DEVICE_STATUS, .. } if function == "cuInit" => {
                codes::GPU_NOT_FOUND
            }
            CudaError::KernelCompile { .. } => codes::KERNEL_COMPILE_FAILED,
            CudaError::KernelCacheWrite { .. } => codes::KERNEL_CACHE_NOT_WRITABLE,
            CudaError::OutOfMemory { .. } => codes::GPU_OUT_OF_MEMORY,
            CudaError::AttentionUnsupported { .. } => codes::CUDNN_ATTENTION_UNSUPPORTED,
            CudaError::Call { .. } => codes::CUDA_CALL_FAILED,
        }
    }

    /// Returns true if this error is a failed CUDA call with the driver's status code `code`.
    pub(super) fn has_driver_status(&self, code: CUresult) -> bool {
        matches!(self, CudaError::Call { status, .. } if *status == code as i32)
    }

    /// Returns true if this error reports that the GPU has no free memory left.
    pub(super) fn is_out_of_memory(&self) -> bool {
        let CudaError::Call { function, status, .. } = self else {
            return matches!(self, CudaError::OutOfMemory { .. });
        };
        if function.starts_with("cublasLt") {
            return *status == cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED as i32;
        }
        if function.starts_with("cudnn") {
            return *status == cudnnStatus_t::CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED as i32;
        }
        *status == CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32
    }

    /// Replaces the name of the failed function in an error of a CUDA call by `name`, and returns
    /// the error.
    pub(super) fn with_failed_function(mut self, name: impl Into<String>) -> Self {
        if let CudaError::Call { function, .. } = &mut self {
            *function = name.into();
        }
        self
    }

    /// Replaces the purpose of the allocation in an out-of-memory error by `memory_purpose`, such
    /// as `gradients`, and returns the error. Returns other errors unchanged.
    pub(super) fn with_memory_purpose(mut self, memory_purpose: &'static str) -> Self {
        if let CudaError::OutOfMemory { purpose, .. } = &mut self {
            *purpose = memory_purpose;
        }
        self
    }
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        DeviceError(error.into())
    }
}

impl From<CudaError> for Diagnostic {
    fn from(error: CudaError) -> Self {
        let message = Diagnostic::error(error.code(), error.to_string());
        match error {
            CudaError::LibraryNotFound { library, file_names, searched } => message
                .with_subject(file_names)
                .with_help(format!("searched: {}", searched.join(", ")))
                .with_field("searched", searched)
                .with_help(library.install_help()),
            CudaError::LibraryUnusable { library, file_names, searched, rejected } => message
                .with_subject(file_names)
                .with_field("searched", searched)
                .with_field("rejected", rejected.iter().map(ToString::to_string).collect::<Vec<_>>())
                .with_help(library.install_help()),
            CudaError::LibraryTooOld { library, path, found, required } => message
                .with_subject(path.display().to_string())
                .with_field("found", found)
                .with_field("required", required)
                .with_help(library.install_help()),
            CudaError::GpuUnsupported { index, name, architecture, feature, required } => message
                .with_subject(format!("GPU {index}"))
                .with_field("gpu_index", index)
                .with_field("gpu_name", name)
                .with_field("gpu_architecture", architecture)
                .with_field("feature", feature)
                .with_field("required", required),
            CudaError::GpuNotFound { index, count } => message
                .with_subject(format!("GPU {index}"))
                .with_field("gpu_index", index)
                .with_field("gpu_count", count)
                .with_help("check CUDA_VISIBLE_DEVICES, and the output of `nvidia-smi`"),
            CudaError::KernelCompile { file, log } => {
                message.with_subject(file).with_field("compiler_log", log)
            }
            CudaError::KernelCacheWrite { path, .. } => message.with_subject(path.display().to_string()),
            CudaError::OutOfMemory { requested, free, total, used, purpose } => message
                .with_field("requested_bytes", requested)
                .with_field("free_bytes", free)
                .with_field("total_bytes", total)
                .with_field("used_bytes", used)
                .with_field("purpose", purpose)
                .with_help(
                    "use a smaller train.batch.micro, a shorter train.data.seq_len, train.recompute: block, more GPUs or a higher train.zero.stage",
                ),
            CudaError::AttentionUnsupported { version, attention } => message
                .with_subject(attention)
                .with_field("cudnn_version", version)
                .with_help("set `train.attention: auto`, which uses launch's own kernels there"),
            CudaError::Call { function, status, message: text } => message
                .with_subject(function)
                .with_field("status", status)
                .with_field("library_message", text),
        }
    }
}
